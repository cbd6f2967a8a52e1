"""Style of all figures: colours, text, class names. It does not change the global state of matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours from M. A. Petroff, "Accessible color sequences for data visualization" (2021). Readers with any
# kind of colour vision can distinguish these colours.
COLORS = (
    "#3f90da",
    "#ffa90e",
    "#bd1f01",
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#717581",
    "#92dadd",
)
MARKERS = ("o", "^", "s", "D", "v")
INK, MUTED, ACCENT, WARN = "#22262b", "#868d96", "#3f90da", "#bd1f01"
LINE = "#c9ced4"
DPI = 144


def class_style(code: int) -> tuple[str, str]:
    """Return colour and marker of a class: ten colours, then the same colours with the next marker."""
    return COLORS[code % len(COLORS)], MARKERS[code // len(COLORS) % len(MARKERS)]


def short_name(name: str, length: int = 14) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def needs_rotation(names: Sequence[str]) -> bool:
    """Return whether class names must be rotated to fit under columns."""
    return len(names) > 20 or max((len(short_name(name)) for name in names), default=0) > 3


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of this size in inches, which pyplot does not keep in memory."""
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Axes, *, grid: bool = True) -> None:
    """Remove the box of the axes, and use small dark text and a light grid."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(LINE)
    axes.tick_params(colors=INK, labelsize=9, length=3, color=LINE)
    axes.xaxis.label.set(color=INK, fontsize=10)
    axes.yaxis.label.set(color=INK, fontsize=10)
    axes.title.set(color=INK, fontsize=11)
    if grid:
        axes.grid(True, color=LINE, linewidth=0.6, alpha=0.6)
        axes.set_axisbelow(True)


def set_class_ticks(axes: Axes, names: Sequence[str], *, x: bool = True, y: bool = True) -> None:
    """Write class names at 0, 1, 2, … of one or both axes."""
    labels, where = [short_name(name) for name in names], range(len(names))
    size = 9 if len(names) <= 20 else 8
    if x:
        axes.set_xticks(where, labels, fontsize=size, rotation=90 if needs_rotation(names) else 0)
    if y:
        axes.set_yticks(where, labels, fontsize=size)


def percent(value: float) -> str:
    return "unknown" if value != value else f"{100 * value:.2f} %"


def png_bytes(figure: Figure) -> bytes:
    """Return the figure as PNG without a date or program name, so that equal figures give equal files."""
    buffer = io.BytesIO()
    # ``savefig`` would draw the figure twice.
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()
