"""Fields of the messages of drivers and workers to the scheduler; read with care, anyone may send one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

TOPIC = "scalelatent"

ERRORS = ("train_error", "validation_error", "mean_member_train_error", "mean_member_validation_error")
"""Errors of a record; the last two of ensembles alone, whose members each solve a problem of their own."""

MEASURED = ("weights_on", "weights_changed", "rows_at_rest")
"""Other measurements of a record that are told, where it has them: two counts and a share."""

AFTER_FIT = ("saving", "scoring", "report")
"""Stages of a job that follow on its fit."""


def number(message: Mapping[str, Any], key: str, default: float = 0.0) -> float:
    """A finite number of a message."""
    value = message.get(key)
    if isinstance(value, (int, float)) and abs(value) <= 1e300:
        return float(value)
    return default


def number_or_none(message: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a message, or None."""
    value = number(message, key, float("nan"))
    return value if value == value else None


def clip(value: object, length: int = 300) -> str:
    """Text of bounded length."""
    text = str(value)
    return text if len(text) <= length else text[: length - 1] + "…"


def pool_of(message: Mapping[str, Any], unknown: str = "cpu") -> str:
    """Kind of device, ``gpu`` or ``cpu``, whatever the message calls it."""
    device = clip(message.get("device") or message.get("pool") or unknown, 20).lower()
    return {"cupy": "gpu", "cuda": "gpu", "numpy": "cpu", "numba": "cpu"}.get(device, device)


def span_text(message: Mapping[str, Any]) -> str:
    """What was done in few words: 'capsule_estep, pass 3, span 17'; steps and shards of outputs alike."""
    words = [clip(message["stage"], 60)] if message.get("stage") else []
    for key in ("pass", "span", "step", "shard"):
        if message.get(key) is not None:
            words.append(f"{key} {clip(message[key], 40)}")
    if words and message.get("part") == "validation":
        words[-1] = f"validation {words[-1]}"
    return ", ".join(words)


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key by which worker-2 comes before worker-10."""
    parts: list[str] = re.split(r"(\d+)", name)
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts)


def part_of(info: Mapping[str, Any]) -> str:
    """Which layer of a network, or how many values are tried; empty for other stages."""
    layer, layers, k, tries = (int(number(info, key)) for key in ("layer", "layers", "k", "tries"))
    if layer:
        return f"layer {layer} of {layers}, k = {k:,}"
    return f"{tries} values tried" if tries else ""


def scalars(info: Mapping[str, Any]) -> dict[str, Any]:
    """What of a record fits into a message: finite numbers, truths, text of bounded length."""
    found: dict[str, Any] = {}
    for key, value in info.items():
        if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
            value = value.item()
        if isinstance(value, str):
            found[key] = value[:1000]
        elif isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
            found[key] = value
    return found
