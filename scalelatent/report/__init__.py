"""Reports of runs: one self-contained HTML page with figures, and comparisons of several runs.

Names are imported on first use, so that matplotlib and jinja2 are only loaded for a report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent._lazy import attach

if TYPE_CHECKING:
    from .build import build_report
    from .comparison import (
        comparison_tables,
        error_by_dimension,
        plot_error_by_dimension,
        write_comparison,
    )

__all__ = [
    "build_report",
    "comparison_tables",
    "error_by_dimension",
    "plot_error_by_dimension",
    "write_comparison",
]

_WHERE = {
    ".build": ("build_report",),
    ".comparison": (
        "comparison_tables", "error_by_dimension", "plot_error_by_dimension", "write_comparison"
    ),
}  # fmt: skip

__getattr__, __dir__ = attach(__name__, _WHERE)
