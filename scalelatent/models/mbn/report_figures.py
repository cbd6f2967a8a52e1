"""Figures of a bootstrap network for its report: scatter plots of outputs, and the retrieval curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from scalelatent.report.style import (
    ACCENT,
    COLORS,
    INK,
    class_style,
    new_figure,
    short_name,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Largest number of classes in a legend; number of scatter plots side by side in the figure of all layers.
LEGEND_CLASSES = 30
_FIGURE_COLUMNS = 4


def scatter(axes: Axes, points: np.ndarray, codes: np.ndarray | None, size: float = 7.0) -> None:
    """Draw points (n, 2), coloured by class, in random order so that no class covers another.

    ``codes`` are the numbers of the classes, or None for points without classes; ``size`` is the area of a
    marker in square points.
    """
    if codes is None:
        axes.scatter(points[:, 0], points[:, 1], s=size, color=ACCENT, alpha=0.6, linewidths=0)
    else:
        order = np.random.Generator(np.random.Philox(0)).permutation(len(points))
        styles = [class_style(int(code)) for code in codes[order]]
        for marker in dict.fromkeys(marker for _, marker in styles):
            own = [i for i, (_, m) in enumerate(styles) if m == marker]
            at, colors = points[order[own]], [styles[i][0] for i in own]
            axes.scatter(at[:, 0], at[:, 1], s=size, c=colors, marker=marker, alpha=0.65, linewidths=0)
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_color("#c9ced4")
    axes.margins(0.04)


def plot_output(points: np.ndarray, codes: np.ndarray | None, names: Sequence[str]) -> Figure:
    """Draw the first two components of the output as points, coloured by class (Figures 8, 9 of the paper).

    ``codes`` are the numbers of the classes in ``names``, or None for points without classes.
    """
    figure = new_figure(7.4, 5.6)
    axes = figure.subplots()
    scatter(axes, select_two_columns(points), codes, 9.0)
    axes.set_xlabel("first component", color=INK, fontsize=10)
    axes.set_ylabel("second component" if points.shape[1] > 1 else "rank", color=INK, fontsize=10)
    if codes is not None and 1 < len(names) <= LEGEND_CLASSES:
        _add_class_legend(axes, names)
    return figure


def select_two_columns(points: np.ndarray) -> np.ndarray:
    """Return two columns as x and y of a plot: the first two, or the only column and its values' ranks."""
    if points.shape[1] > 1:
        return points[:, :2]
    return np.column_stack([points[:, 0], points[:, 0].argsort(kind="stable").argsort(kind="stable")])


def _add_class_legend(axes: Axes, names: Sequence[str]) -> None:
    handles = [
        Line2D([], [], color=color, marker=marker, linestyle="", markersize=6)
        for color, marker in map(class_style, range(len(names)))
    ]
    axes.legend(
        handles, [short_name(name) for name in names], loc="center left", bbox_to_anchor=(1.01, 0.5),
        frameon=False, fontsize=9, labelcolor=INK, ncols=1 + (len(names) > 15),
    )  # fmt: skip


def plot_layers(
    layers: Sequence[np.ndarray], titles: Sequence[str], codes: np.ndarray | None, names: Sequence[str]
) -> Figure:
    """Draw one scatter plot per layer of two components of its output (Figure 16 of the paper)."""
    columns = min(_FIGURE_COLUMNS, len(layers))
    rows = -(-len(layers) // columns)
    figure = new_figure(2.35 * columns, 2.45 * rows)
    panels = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for axes, points, title in zip(panels, layers, titles, strict=False):
        scatter(axes, points, codes, 4.0)
        axes.set_title(title, fontsize=9.5, color=INK)
    for axes in panels[len(layers) :]:
        axes.remove()
    return figure


def plot_retrieval(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]],
) -> Figure:
    """Draw the share of rows with the right class among the first retrieved rows (paper: Figures 12, 14).

    ``curves`` has (numbers of retrieved rows, shares) for each name in the legend.
    """
    figure = new_figure(6.6, 4.2)
    axes = figure.subplots()
    for i, (name, (levels, accuracy)) in enumerate(curves.items()):
        color, marker = COLORS[i % len(COLORS)], "os^Dv"[i % 5]
        axes.plot(levels, accuracy, color=color, marker=marker, markersize=4, linewidth=1.6, label=name)
    longest = max((levels for levels, _ in curves.values()), key=len)
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        list(longest), [f"{level:,}" for level in longest], rotation=45 if len(longest) > 8 else 0
    )
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("retrieved documents")
    axes.set_ylabel("accuracy")
    style_axes(axes)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    return figure
