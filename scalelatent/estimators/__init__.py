"""The scikit-learn shells: parameters, fit, predict, save; they alone join a model to the engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capsule import CapsuleRegression
    from .persist import load_model

__all__ = ["CapsuleRegression", "load_model"]

_WHERE = {"CapsuleRegression": ".capsule", "load_model": ".persist"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name], __name__), name)
