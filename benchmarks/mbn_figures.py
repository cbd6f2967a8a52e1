"""Functions that draw the figures of mbn_clustering.py, and synthetic points like those of Zhang (2018)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import PercentFormatter

from scalelatent.errors import DataError
from scalelatent.models.mbn.report_figures import scatter
from scalelatent.report.style import ACCENT, COLORS, INK, MUTED, WARN, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Sweep:
    """NMI and accuracy (0 to 1) for values of one parameter: means and standard deviations over seeds."""

    title: str
    values: Sequence[float]
    nmi: Sequence[float]
    accuracy: Sequence[float]
    nmi_spread: Sequence[float]
    accuracy_spread: Sequence[float]
    marked: float | None = None  # median value that decay="auto" chose; it is drawn as a dashed line


def plot_sweeps(sweeps: Sequence[Sweep], name: str, *, logarithmic: bool = False) -> Figure:
    """Draw NMI and accuracy against the parameter ``name``, as Figures 10 and 11 of Zhang (2018) do."""
    if not sweeps:
        raise DataError("there are no scores to draw: give at least one sweep")
    columns = min(3, len(sweeps))
    rows = -(-len(sweeps) // columns)
    figure = new_figure(max(3.1 * columns, 4.2), 2.7 * rows)
    panels = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for axes, sweep in zip(panels, sweeps, strict=False):
        plot_sweep(axes, sweep)
        axes.set_title(sweep.title)
        axes.set_xlabel(name)
        if logarithmic:
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(sweep.values), [f"{value:g}" for value in sweep.values])
            axes.minorticks_off()
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        style_axes(axes)
    for axes in panels[len(sweeps) :]:
        axes.remove()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9, labelcolor=INK
    )
    return figure


def plot_sweep(axes: Axes, sweep: Sweep) -> None:
    values = np.asarray(sweep.values, dtype=float)
    lines: list[tuple[str, str, Any, Any]] = [
        ("NMI", ACCENT, sweep.nmi, sweep.nmi_spread),
        ("accuracy", COLORS[1], sweep.accuracy, sweep.accuracy_spread),
    ]
    for label, color, mean, spread in lines:
        mean, spread = np.asarray(mean, dtype=float), np.asarray(spread, dtype=float)
        axes.plot(values, mean, color=color, marker="o", markersize=3.5, linewidth=1.6, label=label)
        axes.fill_between(values, mean - spread, mean + spread, color=color, alpha=0.2, linewidth=0)
    if sweep.marked is not None:
        axes.axvline(sweep.marked, color=MUTED, linewidth=1, linestyle="--", label="chosen without labels")


def plot_densities(examples: Sequence[tuple[str, np.ndarray, np.ndarray, np.ndarray]]) -> Figure:
    """Draw data of uneven density above the outputs of the network (the paper's Figure 5)."""
    figure = new_figure(2.5 * len(examples) + 0.3, 5.2)
    panels = figure.subplots(2, len(examples), squeeze=False)
    for column, (title, rows, output, codes) in enumerate(examples):
        scatter(panels[0, column], rows, codes, 8.0)
        scatter(panels[1, column], output, codes, 8.0)
        panels[0, column].set_title(title, fontsize=10.5, color=INK)
    for axes, name in zip(panels[:, 0], ("data", "output of the network"), strict=True):
        axes.set_ylabel(name, color=INK, fontsize=10)
    return figure


def plot_outlier(
    rows: np.ndarray, pca: np.ndarray, output: np.ndarray, codes: np.ndarray, outlier: int
) -> Figure:
    """Draw two classes and a distant point (row ``outlier``): data, PCA and network's output (Figure 6)."""
    figure = new_figure(8.4, 2.9)
    kept = np.arange(len(rows)) != outlier
    for axes, points, title in zip(
        figure.subplots(1, 3), (rows, pca, output), ("data", "PCA", "network"), strict=True
    ):
        scatter(axes, points[kept], codes[kept], 8.0)
        axes.plot(*points[outlier], marker="x", color=WARN, markersize=9, markeredgewidth=2, linestyle="")
        axes.set_title(title, fontsize=10.5, color=INK)
    return figure


# Points (n, 2) and their classes. The points are random and have shapes like those of Zhang (2018), Figures 5
# and 6, which come from sets that were drawn by hand (Jain and Law, 2005; Chang and Yeung, 2008; Zahn, 1971).
Points = tuple[np.ndarray, np.ndarray]


def draw_gaussians(rng: np.random.Generator) -> Points:
    """Return points of two dense classes and a sparse one."""
    spreads, sizes = (0.25, 0.5, 1.6), (150, 150, 150)
    centres = np.array([[0.0, 0.0], [3.0, 0.5], [1.0, 5.5]])
    parts = [c + s * rng.normal(size=(n, 2)) for c, s, n in zip(centres, spreads, sizes, strict=True)]
    return np.concatenate(parts), np.repeat(np.arange(3), sizes)


def draw_arc(rng: np.random.Generator, n: int, span: tuple[float, float], width: float) -> np.ndarray:
    angle = np.pi * rng.uniform(*span, n)
    return (1 + width * rng.normal(size=n))[:, None] * np.column_stack([np.cos(angle), np.sin(angle)])


def draw_crescents(rng: np.random.Generator) -> Points:
    """Return points of two crescents (like those of Jain and Law); one has 2.8 times as many points."""
    upper = draw_arc(rng, 100, (0, 1), 0.09)
    lower = draw_arc(rng, 280, (1, 2), 0.09) + np.array([1.0, 0.35])
    return np.concatenate([upper, lower]), np.repeat([0, 1], [100, 280])


def draw_path(rng: np.random.Generator) -> Points:
    """Return points of two clouds inside a ring with a gap (like the path-based set of Chang and Yeung)."""
    ring = 2.2 * draw_arc(rng, 130, (-0.35, 1.35), 0.06)
    clouds = [c + 0.42 * rng.normal(size=(100, 2)) for c in ((-0.95, 0.0), (0.95, 0.0))]
    return np.concatenate([ring, *clouds]), np.repeat(np.arange(3), [130, 100, 100])


def draw_compound(rng: np.random.Generator) -> Points:
    """Return points of clusters inside, next to and on top of clusters (like the compound set of Zahn)."""
    parts = [
        np.array([0.0, 0.0]) + 0.35 * rng.normal(size=(60, 2)),
        1.5 * draw_arc(rng, 110, (0.0, 2.0), 0.05),
        np.array([-1.0, 5.2]) + 0.3 * rng.normal(size=(60, 2)),
        np.array([1.3, 5.2]) + 0.55 * rng.normal(size=(70, 2)),
        np.array([5.5, 2.6]) + 0.22 * rng.normal(size=(60, 2)),
        np.column_stack([rng.uniform(3.8, 7.2, 70), rng.uniform(0.4, 5.0, 70)]),
    ]
    return np.concatenate(parts), np.repeat(np.arange(6), [len(part) for part in parts])


_MAKERS: dict[str, Callable[[np.random.Generator], Points]] = {
    "Gaussian": draw_gaussians,
    "crescents": draw_crescents,
    "path-based": draw_path,
    "compound": draw_compound,
}

SHAPES = tuple(_MAKERS)
"""Names of shapes for `synthetic_points`."""


def synthetic_points(shape: str, seed: int = 0) -> Points:
    """Return points of one shape in the plane, float32 (n, 2), and their classes."""
    rows, classes = _MAKERS[shape](np.random.Generator(np.random.Philox(seed)))
    return rows.astype(np.float32), classes


def outlier_example(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return two Gaussian classes and, in the last row, a point far from both (the paper's Figure 6)."""
    rng = np.random.Generator(np.random.Philox(seed))
    rows = np.repeat([[-1.5, 0.0], [1.5, 0.0]], 100, axis=0) + 0.5 * rng.normal(size=(200, 2))
    rows = np.concatenate([rows, [[60.0, 60.0]]])
    return rows.astype(np.float32), np.append(np.repeat([0, 1], 100), 0)
