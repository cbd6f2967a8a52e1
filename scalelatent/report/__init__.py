"""Figures of the papers and one self-contained HTML page from a run folder.

Names are loaded when first used: matplotlib and jinja2 cost nothing where no report is asked for.
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
