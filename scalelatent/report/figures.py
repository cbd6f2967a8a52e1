"""Figures of curves and matrices, drawn from arrays, without access to files, models or global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from scalelatent.errors import DataError

from .style import ACCENT, INK, LINE, MUTED, WARN, new_figure, set_class_ticks, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ANNOTATED_CLASSES = 20


def read_column(records: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Return one value of each record as an array, with NaN for missing values."""
    values = [record.get(key) for record in records]
    return np.array([np.nan if value is None else float(value) for value in values])


def pass_positions(records: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return the number of finished passes at each record, with fractions for records within a pass."""
    passes, seen = read_column(records, "pass"), read_column(records, "rows_seen")
    if len(np.unique(passes)) == len(passes) or np.isnan(seen).any() or not (seen > 0).all():
        return passes
    # ``rows_seen / pass`` is largest at the end of a pass, where it equals the rows of one pass.
    return seen / (seen / passes).max()


def plot_learning(
    records: Sequence[Mapping[str, Any]], unit: str = "objective", time: str = "pass"
) -> Figure:
    """Draw the objective (above) and errors in percent (below) against passes."""
    if not records:
        raise DataError("there are no epochs to draw, because the history is empty; fit the model first")
    figure, passes = new_figure(8, 5.6), pass_positions(records)
    upper, lower = figure.subplots(2, 1, sharex=True)
    point = marker_style(records)
    upper.plot(passes, read_column(records, "objective"), color=INK, linewidth=1.6, **point)
    upper.set_ylabel(unit)
    draw_errors(lower, passes, records, point)
    lower.set_xlabel(time)
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        style_axes(axes)
    return figure


def marker_style(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return matplotlib options that mark passes by dots if there are few; a single pass has no line."""
    return {"marker": "o", "markersize": 3.5} if len(records) <= 40 else {}


def draw_errors(
    axes: Axes, passes: np.ndarray, records: Sequence[Mapping[str, Any]], point: dict[str, Any]
) -> None:
    curves = {
        "mean member, training": ("mean_member_train_error", MUTED),
        "mean member, validation": ("mean_member_validation_error", "#ffa90e"),
        "training": ("train_error", MUTED),
        "validation": ("validation_error", WARN),
    }
    shown, names = [], []
    for label, (key, color) in curves.items():
        error = 100 * read_column(records, key)
        if np.isnan(error).all():
            continue
        shown.append(error)
        names.append(label)
        axes.plot(passes, error, color=color, linewidth=1.6, label=label, **point)
    axes.set_ylabel("error, %")
    if not shown:
        return
    best = int(np.nanargmin(shown[-1]))
    kind = names[-1].replace(",", "")
    place = round(float(passes[best]), 2)
    axes.plot(passes[best], shown[-1][best], marker="*", markersize=12, color=INK, linestyle="none", zorder=5,
              label=f"lowest {kind} error: {shown[-1][best]:.2f} % in pass {place:g}")  # fmt: skip
    known = np.concatenate(shown)
    known = known[np.isfinite(known)]
    positive = known[known > 0]
    if len(positive) and known.max() > 8 * max(positive.min(), 1e-3):
        axes.set_yscale("log")
        axes.set_ylim(positive.min() / 1.6, min(known.max() * 1.3, 110))
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, max(known.max() * 1.15, 1e-2))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.legend(fontsize=9, frameon=True, framealpha=0.9, edgecolor="none", labelcolor=INK, loc="upper right")


def plot_confusion(counts: np.ndarray, names: Sequence[str]) -> Figure:
    """Draw a confusion matrix and, next to each row, the error of the class."""
    m = len(counts)
    total = counts.sum(axis=1)
    share = counts / np.maximum(total, 1)[:, None]
    side = min(max(0.42 * m + 1.0, 3.0), 13)
    figure = new_figure(side + 2.4, side)
    matrix, bars = figure.subplots(1, 2, sharey=True, width_ratios=[side, 2.0])
    matrix.imshow(_confusion_colors(share), aspect="equal", interpolation="nearest")
    if m <= ANNOTATED_CLASSES:
        _annotate(matrix, counts, share)
    set_class_ticks(matrix, names)
    matrix.set(xlabel="predicted class", ylabel="true class")
    style_axes(matrix, grid=False)
    error = np.where(total > 0, 100 * (1 - np.diag(share)), 0.0)
    bars.barh(np.arange(m), error, color=WARN, height=0.62)
    if m <= ANNOTATED_CLASSES:
        for i in range(m):
            text = f"{error[i]:.1f}" if total[i] else "no rows"
            bars.text(error[i], i, f" {text}", va="center", fontsize=8.5, color=INK)
    bars.set_xlim(0, max(error.max() * 1.35, 1.0))
    bars.set_xlabel("error, %")
    style_axes(bars, grid=False)
    bars.tick_params(axis="y", length=0, labelleft=False)
    return figure


def _confusion_colors(share: np.ndarray) -> np.ndarray:
    """Return the colours of a confusion matrix. Mistakes, which are rare, have a separate colour scale."""
    diagonal = np.eye(len(share), dtype=bool)
    worst = share[~diagonal].max() if len(share) > 1 else 0.0
    maps = matplotlib.colormaps
    colors = maps["Oranges"](0.75 * np.sqrt(share / worst if worst > 0 else np.zeros_like(share)))
    colors[~diagonal & (share == 0)] = (1, 1, 1, 1)
    colors[diagonal] = maps["Blues"](0.15 + 0.55 * share[diagonal])
    return colors


def _annotate(axes: Axes, counts: np.ndarray, share: np.ndarray) -> None:
    size = 9 if len(counts) <= 12 and counts.max() < 10_000 else 8
    for i, j in np.argwhere(counts > 0):
        dark = i == j and share[i, j] > 0.75
        axes.text(
            j, i, f"{counts[i, j]}", ha="center", va="center", fontsize=size, color="white" if dark else INK
        )


def plot_reliability(counts: np.ndarray, confidence: np.ndarray, hits: np.ndarray) -> Figure:
    """Draw the share of correct predictions against the predicted probability, in bins."""
    figure = new_figure(5, 5)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    upper.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    has = counts > 0
    upper.plot(
        confidence[has] / counts[has],
        hits[has] / counts[has],
        marker="o",
        color=ACCENT,
        linewidth=1.4,
        markersize=6,
    )
    upper.set(ylabel="share of correct rows", ylim=(-0.02, 1.04), xlim=(0, 1.01))
    bins = len(counts)
    lower.bar((np.arange(bins) + 0.5) / bins, counts, width=0.92 / bins, color=LINE)
    whole = bool((np.asarray(counts) % 1 == 0).all())
    lower.set(xlabel="probability of the predicted class", ylabel="rows" if whole else "weight")
    lower.yaxis.set_major_locator(MaxNLocator(3, integer=whole))
    style_axes(upper)
    style_axes(lower)
    return figure
