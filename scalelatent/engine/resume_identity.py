"""What a run folder is bound to, so that only the same fit goes on in it: parameters by name and value."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["differences", "named_values", "same_form"]

_FEW = 16  # numbers of an array that a message may show


def named_values(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Parameters as text that is equal for equal values alone; those of a nested one by their path."""
    found: dict[str, str] = {}
    for name, value in sorted(params.items()):
        if isinstance(value, Mapping):
            found |= named_values(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)) and value and all(isinstance(v, Mapping) for v in value):
            found[f"{prefix}{name}"] = f"{len(value)} of them"
            for i, one in enumerate(value):
                found |= named_values(one, f"{prefix}{name}[{i}].")
        else:
            found[f"{prefix}{name}"] = _text(value)
    return found


def _text(value: object) -> str:
    if isinstance(value, np.ndarray) and value.dtype != object:
        # numpy abbreviates what it prints, in length and in digits.
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        digest = hashlib.blake2b(little.tobytes(), digest_size=8).hexdigest()
        shown = f" {value.tolist()}" if value.size <= _FEW else ""
        return f"array {value.dtype.name} {value.shape}{shown} #{digest}"
    if isinstance(value, np.ndarray):  # of objects, which numpy abbreviates, too
        return f"array object {value.shape} {_text(value.tolist())}"
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


def same_form(params: Mapping[str, Any], kept: object) -> str | dict[str, str]:
    """Parameters in the form that a folder has them; those of earlier versions hold one `repr` of all."""
    return repr(sorted(params.items())) if isinstance(kept, str) else named_values(params)


def differences(kept: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """What is not alike, each as ``name: was -> is``."""
    was, now = _flat(kept), _flat(given)
    return [
        f"{name}: {was.get(name, 'None')} -> {now.get(name, 'None')}"
        for name in sorted({*was, *now})
        if was.get(name, "None") != now.get(name, "None")
    ]


def _flat(identity: Mapping[str, Any]) -> dict[str, str]:
    """What is in an identity, the parameters by name; what is not there is like None."""
    rest = {name: str(value) for name, value in identity.items() if name != "params"}
    params = identity.get("params", {})
    if isinstance(params, str):
        try:
            params = named_values(dict(ast.literal_eval(params)))
        except (ValueError, SyntaxError, TypeError):  # not of plain values
            params = {"parameters": params}
    return {**rest, **params}
