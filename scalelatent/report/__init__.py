"""Figures of the papers and one self-contained HTML page from a run folder.

Names are loaded when first used: matplotlib and jinja2 cost nothing to whoever never asks for a report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent._lazy import attach

if TYPE_CHECKING:
    from .build import build_report
    from .comparison import error_by_dimension, plot_error_by_dimension

__all__ = ["build_report", "error_by_dimension", "plot_error_by_dimension"]

_WHERE = {
    "build_report": ".build",
    "error_by_dimension": ".comparison",
    "plot_error_by_dimension": ".comparison",
}

__getattr__, __dir__ = attach(__name__, _WHERE)
