"""Compare the parameters of a fit with those in its run folder, so that a resume continues this fit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

_SHOWN_NUMBERS = 16  # arrays with up to this many numbers are shown in messages


def named_values(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return parameters as text, which is equal only for equal values; nested names are joined by dots."""
    found: dict[str, str] = {}
    for name, value in sorted(params.items()):
        if isinstance(value, Mapping):
            found |= named_values(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)) and value and all(isinstance(v, Mapping) for v in value):
            found[f"{prefix}{name}"] = f"{len(value)} of them"
            for i, one in enumerate(value):
                found |= named_values(one, f"{prefix}{name}[{i}].")
        else:
            found[f"{prefix}{name}"] = _format_value(value)
    return found


def _format_value(value: object) -> str:
    if isinstance(value, np.ndarray) and value.dtype != object:
        # Use a digest, because numpy's text of an array shows only few elements and few digits.
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        digest = hashlib.blake2b(little.tobytes(), digest_size=8).hexdigest()
        shown = f" {value.tolist()}" if value.size <= _SHOWN_NUMBERS else ""
        return f"array {value.dtype.name} {value.shape}{shown} #{digest}"
    if isinstance(value, np.ndarray):  # an array of objects
        return f"array object {value.shape} {_format_value(value.tolist())}"
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_format_value, value))}]"
    return repr(value)


def differences(
    stored: Mapping[str, Any], given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[str]:
    """Return the entries that differ between the descriptions of two fits, each as ``name: old -> new``.

    A parameter that one description lacks has the value in ``defaults``, or None.
    """
    missing = named_values(defaults)
    was, now = {**missing, **_flatten(stored)}, {**missing, **_flatten(given)}
    return [
        f"{name}: {was.get(name, 'None')} -> {now.get(name, 'None')}"
        for name in sorted({*was, *now})
        if was.get(name, "None") != now.get(name, "None")
    ]


def _flatten(identity: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a fit's description as text, with one entry per parameter."""
    rest = {name: str(value) for name, value in identity.items() if name != "params"}
    return {**rest, **identity.get("params", {})}
