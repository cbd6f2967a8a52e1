"""The style of all figures: colours, text, class names. matplotlib's global state is left alone."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

# M. A. Petroff, "Accessible color sequences for data visualization" (2021): told apart with any kind of
# colour vision.
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
    """(colour, marker) of a class: ten colours, then the same with another marker."""
    return COLORS[code % len(COLORS)], MARKERS[code // len(COLORS) % len(MARKERS)]


def short_name(name: str, length: int = 14) -> str:
    """A class name that fits beside a panel."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def long_names(names: Sequence[str]) -> bool:
    """Whether names have to be turned to fit under columns."""
    return len(names) > 20 or max((len(short_name(name)) for name in names), default=0) > 3


def new_figure(width: float, height: float) -> Figure:
    """A figure with a canvas of its own, unknown to pyplot: it is freed with its last reference."""
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def quiet_axes(axes: Axes, *, grid: bool = True) -> None:
    """No box, small ink-coloured text, a light grid."""
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


def class_ticks(axes: Axes, names: Sequence[str], *, x: bool = True, y: bool = True) -> None:
    """Class names at 0, 1, 2, … of one or both axes."""
    labels, where = [short_name(name) for name in names], range(len(names))
    size = 9 if len(names) <= 20 else 7
    if x:
        axes.set_xticks(where, labels, fontsize=size, rotation=90 if long_names(names) else 0)
    if y:
        axes.set_yticks(where, labels, fontsize=size)


def percent(value: float) -> str:
    """A share as people read it."""
    return "not known" if value != value else f"{100 * value:.2f} %"


def png_bytes(figure: Figure) -> bytes:
    """The figure as PNG, without a date or a program's name: the same numbers give the same file."""
    buffer = io.BytesIO()
    # Not savefig, which draws twice.
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def write_png(figure: Figure, path: str | Path) -> Any:
    with open(path, "wb") as file:
        file.write(png_bytes(figure))
