"""Figures of the papers and one self-contained HTML page from a run folder.

Names are loaded when first used: matplotlib and jinja2 cost nothing to whoever never asks for a report.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import build_report
    from .comparison import error_by_dimension, plot_error_by_dimension

__all__ = ["build_report", "error_by_dimension", "plot_error_by_dimension"]

_WHERE = {
    "build_report": ".build",
    "error_by_dimension": ".comparison",
    "plot_error_by_dimension": ".comparison",
}


def __getattr__(name: str) -> Any:
    try:
        module = _WHERE[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(module, __name__), name)
    globals()[name] = value
    return value
