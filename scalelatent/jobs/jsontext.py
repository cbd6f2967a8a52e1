"""Values as the JSON text of a run folder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

__all__ = ["as_json", "plain"]


def as_json(value: Mapping[str, Any]) -> bytes:
    """Write a mapping as JSON text that people can read.

    Examples
    --------
    >>> as_json({"pass": 3})
    b'{\\n  "pass": 3\\n}\\n'
    """
    return (json.dumps(plain(value), indent=2) + "\n").encode()


def plain(value: Any) -> Any:
    """Turn numpy values and paths into what JSON knows, and NaN and infinity, which it lacks, into None.

    Examples
    --------
    >>> import numpy as np
    >>> plain({"error": np.float32(0.5), "objective": float("nan")})
    {'error': 0.5, 'objective': None}
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value
