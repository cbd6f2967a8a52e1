"""Figures of a capsule model: latent vectors, prototypes, and the course of a fit."""

# ruff: noqa: RUF001  the Greek letters of the paper

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Circle
from matplotlib.ticker import MaxNLocator

from scalelatent.errors import DataError
from scalelatent.report.figures import draw_errors, marker_style, pass_positions, read_column
from scalelatent.report.pictures import choose_colormap_range, draw_mosaic
from scalelatent.report.style import (
    ACCENT,
    INK,
    LINE,
    MUTED,
    class_style,
    needs_rotation,
    new_figure,
    short_name,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Largest number of elements of a latent vector whose prototypes are drawn.
MAX_ELEMENTS = 32
# Largest number of classes that the figure of prototypes draws as columns.
_MAX_CLASS_COLUMNS = 20
# Fractional part of the golden ratio. Its multiples modulo 1 are evenly spread in [0, 1), and set the
# vertical positions of the points in a strip.
_GOLDEN_RATIO = 0.6180339887498949


def project_on_leading_plane(points: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, float]:
    """Project squashed vectors on the two directions in which the vectors of their class are longest.

    Return the points (n, 2) and the share of the squared length of the class that these directions hold.
    """
    if points.shape[1] == 2:
        return points, 1.0
    used = points[own] if own.any() else points
    values, vectors = np.linalg.eigh(used.T.astype(np.float64) @ used)
    leading = vectors[:, :-3:-1]
    # The sign of an eigenvector is arbitrary. Choose the sign that puts the class to the right and above.
    leading = leading * np.where((used @ leading).sum(axis=0) < 0, -1, 1)
    total = values.sum()
    return points @ leading, float(values[-2:].sum() / total) if total > 0 else 1.0


def plot_latents(points: Sequence[np.ndarray], codes: np.ndarray, names: Sequence[str]) -> Figure:
    """Draw a panel for each capsule: squashed vectors in the unit circle, coloured by class."""
    m = len(points)
    columns = m if m <= 5 else 5
    rows = -(-m // columns)
    figure = new_figure(2.3 * columns, 2.5 * rows)
    panels = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for c, axes in enumerate(panels):
        axes.set_axis_off()
        if c >= m:
            continue
        if points[c].shape[1] == 1:
            _draw_strip(axes, points[c][:, 0], codes, c, m)
        else:
            _draw_disc(axes, points[c], codes, c)
        color, marker = class_style(c)
        # The marker beside the name is the legend, because the panels name all classes.
        axes.text(
            0.09, 1.01, short_name(names[c]), transform=axes.transAxes, va="center", fontsize=11, color=INK
        )
        axes.plot(
            0.04, 1.013, transform=axes.transAxes, marker=marker, color=color, markersize=7, clip_on=False
        )
    return figure


def _draw_disc(axes: Axes, points: np.ndarray, codes: np.ndarray, c: int) -> None:
    plane, share = project_on_leading_plane(points, codes == c)
    axes.add_patch(Circle((0, 0), 1, facecolor="none", edgecolor=MUTED, linewidth=0.9, zorder=3))
    axes.plot([-1, 1], [0, 0], color=LINE, linewidth=0.6, zorder=0)
    axes.plot([0, 0], [-1, 1], color=LINE, linewidth=0.6, zorder=0)
    _draw_points(axes, plane[:, 0], plane[:, 1], codes, c)
    if points.shape[1] > 2:
        axes.text(1.0, -1.0, f"{100 * share:.0f} %", ha="right", va="bottom", fontsize=8.5, color=MUTED)
    axes.set(xlim=(-1.06, 1.06), ylim=(-1.06, 1.06), aspect="equal")


def _draw_strip(axes: Axes, values: np.ndarray, codes: np.ndarray, c: int, m: int) -> None:
    """Draw a capsule of dimension 1: a row of points for each class, with a fixed vertical jitter."""
    jitter = (np.arange(len(values)) * _GOLDEN_RATIO) % 1 - 0.5
    axes.axhspan(c - 0.5, c + 0.5, color=LINE, alpha=0.35, linewidth=0, zorder=0)
    for edge in (-1, 0, 1):
        axes.plot([edge, edge], [-0.5, m - 0.5], color=MUTED if edge else LINE, linewidth=0.8, zorder=0)
    _draw_points(axes, values, codes + 0.8 * jitter, codes, c)
    # Leave space above the rows of points for the name.
    axes.set(xlim=(-1.06, 1.06), ylim=(m - 0.4, -0.6 - 0.22 * m))


def _draw_points(axes: Axes, x: np.ndarray, y: np.ndarray, codes: np.ndarray, c: int) -> None:
    """Draw all other classes first and faint, in the order of rows, so that none is hidden; then class c."""
    many = len(codes) > 1500
    own = codes == c
    styles = [class_style(int(code)) for code in range(int(codes.max(initial=0)) + 1)]
    colors = np.array([style[0] for style in styles])
    markers = np.array([style[1] for style in styles])
    look: dict[str, Any] = {"linewidths": 0, "zorder": 1}
    for marker in dict.fromkeys(markers):
        part = ~own & (markers[codes] == marker)
        if part.any():
            axes.scatter(
                x[part],
                y[part],
                s=3.5 if many else 9,
                c=colors[codes[part]],
                marker=marker,
                alpha=0.45,
                **look,
            )
    color, marker = class_style(c)
    axes.scatter(
        x[own], y[own], s=5 if many else 12, c=color, marker=marker, alpha=0.75, linewidths=0, zorder=2
    )


def find_rounds(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, int, float]]:
    """Return the rounds (thresholds nu) of a fit as (first record, end of the records, round, nu)."""
    number, nu = read_column(records, "round"), read_column(records, "nu")
    if not len(number) or np.isnan(number).any():
        return []
    starts = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(number)]
    return [(a, b, int(number[a]), float(nu[a])) for a, b in itertools.pairwise(starts)]


def plot_history(
    records: Sequence[Mapping[str, Any]], *, capsules: int = 2, ensemble: bool = False
) -> Figure:
    """Draw log-loss and errors against passes, with shaded rounds of nu (Figures 6 and 7 of the paper)."""
    if not records:
        raise DataError("there are no passes to draw, because the history is empty: fit the model first")
    passes = pass_positions(records)
    figure = new_figure(8, 5.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.15])
    point = marker_style(records)
    upper.plot(
        passes, read_column(records, "objective") / math.log(capsules), color=INK, linewidth=1.6, **point
    )
    upper.set_ylabel(f"log-loss / log {capsules}")
    draw_errors(lower, passes, records, point)
    lower.set_xlabel("pass over the training rows")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        style_axes(axes)
    _shade_rounds((upper, lower), passes, find_rounds(records), ensemble)
    pad = max(0.5, 0.01 * (passes[-1] - passes[0]))
    lower.set_xlim(passes[0] - pad, passes[-1] + pad)
    return figure


def _shade_rounds(
    both: Iterable[Axes], passes: np.ndarray, rounds: list[tuple[int, int, int, float]], ensemble: bool
) -> None:
    if len(rounds) == 1 and rounds[0][3] == 0:
        return  # plain EM has a single round
    span = max(passes[-1] - passes[0], 1)
    between = (passes[1:] + passes[:-1]) / 2
    pads = (between[0] - passes[0], passes[-1] - between[-1]) if len(between) else (0.5, 0.5)
    edges = np.concatenate([[passes[0] - pads[0]], between, [passes[-1] + pads[1]]])
    for number, axes in enumerate(both):
        right = -math.inf
        for k, (a, b, which, nu) in enumerate(rounds):
            left, end = edges[a], edges[b]
            axes.axvspan(left, end, color=ACCENT, alpha=0.10 if k % 2 == 0 else 0.0, linewidth=0, zorder=0)
            text = f"round {which}" if ensemble else f"ν = {nu:g}"
            centre = (left + end) / 2
            # Late rounds are short. A label that would overlap the previous label is not drawn.
            if number == 0 and centre - right > 0.08 * span:
                above = axes.get_xaxis_transform()
                axes.text(centre, 1.02, text, transform=above, ha="center", fontsize=8.5, color=MUTED)
                right = centre


def puts_classes_across(n_classes: int, n_dims: int) -> bool:
    """Return True if classes are columns, because few elements of many classes would give a tall figure."""
    return 2 * n_dims < n_classes <= _MAX_CLASS_COLUMNS


def plot_prototypes(
    x: np.ndarray, present: np.ndarray, names: Sequence[str], shape: tuple[int, ...]
) -> Figure:
    """Draw the image that each element of each capsule contributes most to (equation 3.2, Figure 4)."""
    x, present = x[:, :MAX_ELEMENTS], present[:, :MAX_ELEMENTS]
    across = puts_classes_across(*present.shape)
    if across:
        x, present = x.swapaxes(0, 1), present.T
    rows, columns = present.shape
    figure = new_figure(max(0.66 * columns, 1.5) + 0.9, 0.66 * rows + 0.65)
    axes = figure.subplots()
    tiles = np.where(present[:, :, None], x.astype(np.float64), np.nan)
    centres, lower = draw_mosaic(axes, tiles, shape, choose_colormap_range(x[present]))
    axes.set_axis_on()
    elements = [str(a + 1) for a in range(rows if across else columns)]
    below, beside = (names, elements) if across else (elements, names)
    rotation = 90 if needs_rotation(below) else 0
    axes.set_xticks(centres, [short_name(name) for name in below], fontsize=9, rotation=rotation)
    axes.set_yticks(lower - shape[0] / 2, [short_name(name) for name in beside], fontsize=9)
    axes.set_xlabel("class" if across else "element of the latent vector", color=INK, fontsize=10)
    axes.set_ylabel("element" if across else "class", color=INK, fontsize=10)
    axes.tick_params(length=0, colors=INK)
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    for side in axes.spines.values():
        side.set_visible(False)
    return figure
