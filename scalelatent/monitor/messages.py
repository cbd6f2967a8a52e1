"""Safe readers of the messages of drivers and workers to the scheduler, since any client may send one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

TOPIC = "scalelatent"

ERRORS = ("train_error", "validation_error", "mean_member_train_error", "mean_member_validation_error")
"""Errors in a pass record. Only ensembles whose members solve different problems have the last two."""

MEASURED = ("weights_on", "weights_changed", "rows_at_rest")
"""Optional measurements in a pass record: two numbers of weights, and a share of rows."""

AFTER_FIT = ("saving", "scoring", "report")
"""Stages of a job after its fit."""


def read_number(message: Mapping[str, Any], key: str, default: float = 0.0) -> float:
    """Return a finite number of a message, or ``default``."""
    value = message.get(key)
    if isinstance(value, (int, float)) and abs(value) <= 1e300:
        return float(value)
    return default


def read_number_or_none(message: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number of a message, or None."""
    value = read_number(message, key, float("nan"))
    return value if value == value else None


def clip(value: object, length: int = 300) -> str:
    """Return a value as text of at most ``length`` characters."""
    text = str(value)
    return text if len(text) <= length else text[: length - 1] + "…"


def device_pool_of(message: Mapping[str, Any], unknown: str = "cpu") -> str:
    """Return "gpu" or "cpu" for the device or array library in a message, such as "cuda" or "numpy"."""
    device = clip(message.get("device") or message.get("pool") or unknown, 20).lower()
    return {"cupy": "gpu", "cuda": "gpu", "numpy": "cpu", "numba": "cpu"}.get(device, device)


def describe_span(message: Mapping[str, Any]) -> str:
    """Return which range of rows (span) a message reports, such as 'capsule_estep, pass 3, span 17'."""
    words = [clip(message["stage"], 60)] if message.get("stage") else []
    for key in ("pass", "span", "step", "shard"):
        if message.get(key) is not None:
            words.append(f"{key} {clip(message[key], 40)}")
    if words and message.get("part") == "validation":
        words[-1] = f"validation {words[-1]}"
    return ", ".join(words)


def natural_sort_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts worker-2 before worker-10."""
    parts: list[str] = re.split(r"(\d+)", name)
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts)


def describe_part(info: Mapping[str, Any]) -> str:
    """Return, as text, the layer of a network or how many parameter values a stage tries; or ""."""
    layer, layers, k, tries = (int(read_number(info, key)) for key in ("layer", "layers", "k", "tries"))
    if layer:
        return f"layer {layer} of {layers}, k = {k:,}"
    return f"up to {tries} values tried" if tries else ""


def scalars(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a record that a message may contain: finite numbers, booleans, shortened text."""
    found: dict[str, Any] = {}
    for key, value in info.items():
        if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
            value = value.item()
        if isinstance(value, str):
            found[key] = value[:1000]
        elif isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
            found[key] = value
    return found
