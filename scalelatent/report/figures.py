"""Curves and matrices: arrays in, a matplotlib figure out. No reading, no model, no global state."""

# ruff: noqa: RUF001  the Greek letters of the paper

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from scalelatent.errors import DataError

from .style import ACCENT, INK, LINE, MUTED, WARN, class_ticks, long_names, new_figure, quiet_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "plot_confusion",
    "plot_history",
    "plot_reliability",
    "plot_votes",
    "rounds_of",
]

ANNOTATED_CLASSES = 20


def column(records: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """One value of all records, NaN where there is none.

    Examples
    --------
    >>> column([{"a": 1}, {"a": None}, {}], "a")
    array([ 1., nan, nan])
    """
    values = [record.get(key) for record in records]
    return np.array([np.nan if value is None else float(value) for value in values])


def rounds_of(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, int, float]]:
    """Runs of passes of one round.

    Parameters
    ----------
    records : sequence of mapping
        With ``round`` and ``nu``.

    Returns
    -------
    list of (first index, index behind the last, round, nu of its first pass)

    Examples
    --------
    >>> rounds_of([{"round": 1, "nu": 0.8}, {"round": 1, "nu": 0.8}, {"round": 2, "nu": 0.6}])
    [(0, 2, 1, 0.8), (2, 3, 2, 0.6)]
    """
    number, nu = column(records, "round"), column(records, "nu")
    if not len(number) or np.isnan(number).any():
        return []
    starts = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(number)]
    return [(a, b, int(number[a]), float(nu[a])) for a, b in itertools.pairwise(starts)]


def plot_history(
    records: Sequence[Mapping[str, Any]], *, capsules: int = 2, ensemble: bool = False
) -> Figure:
    """Log-loss and errors against passes, rounds of nu shaded (the paper's Figures 6 and 7).

    Parameters
    ----------
    records : sequence of mapping
        One a pass: pass, objective (nats), train_error, validation_error, round, nu. With ``rows_seen`` there
        may be several of a pass, which are drawn where they were made.
    capsules : int
        m of a member: the log-loss is divided by log m, so that guessing gives 1.
    ensemble : bool
        Members go through rounds on their own, so a round has no one nu.

    Returns
    -------
    Figure
        Upper axes: log-loss; lower axes: errors in percent.

    Raises
    ------
    DataError
        No record.

    Examples
    --------
    >>> first = {"pass": 1, "objective": 1.0, "train_error": 0.4}
    >>> records = [first, {"pass": 2, "objective": 0.5, "train_error": 0.1}]
    >>> [round(float(y), 3) for y in plot_history(records, capsules=10).axes[0].lines[0].get_ydata()]
    [0.434, 0.217]
    """
    if not records:
        raise DataError("there are no passes to draw: the history is empty")
    passes = places_of(records)
    figure = new_figure(8, 5.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.15])
    # A line needs two points: short histories are drawn as points too.
    point = {"marker": "o", "markersize": 3.5} if len(records) <= 40 else {}
    upper.plot(passes, column(records, "objective") / math.log(capsules), color=INK, linewidth=1.6, **point)
    upper.set_ylabel(f"log-loss / log {capsules}")
    draw_errors(lower, passes, records, point)
    lower.set_xlabel("pass over the training rows")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        quiet_axes(axes)
    _shade_rounds((upper, lower), passes, rounds_of(records), ensemble)
    pad = max(0.5, 0.01 * (passes[-1] - passes[0]))
    lower.set_xlim(passes[0] - pad, passes[-1] + pad)
    return figure


def places_of(records: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Passes done at each record; in mid-pass by the rows seen."""
    passes, seen = column(records, "pass"), column(records, "rows_seen")
    if len(np.unique(passes)) == len(passes) or np.isnan(seen).any() or not (seen > 0).all():
        return passes
    # At the end of a pass these are all its rows; in its middle fewer.
    return seen / (seen / passes).max()


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
        error = 100 * column(records, key)
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


def _shade_rounds(
    both: Iterable[Axes], passes: np.ndarray, rounds: list[tuple[int, int, int, float]], ensemble: bool
) -> None:
    if len(rounds) == 1 and rounds[0][3] == 0:
        return  # plain EM has no rounds worth a word
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
            # Late rounds are short: a label that would run into the last one is left to the shading.
            if number == 0 and centre - right > 0.08 * span:
                above = axes.get_xaxis_transform()
                axes.text(centre, 1.02, text, transform=above, ha="center", fontsize=8.5, color=MUTED)
                right = centre


def plot_confusion(counts: np.ndarray, names: Sequence[str]) -> Figure:
    """Confusion matrix and, row by row beside it, the error of each class.

    Parameters
    ----------
    counts : ndarray of int, shape (classes, classes)
        Rows of each true class (row) by predicted class (column).
    names : sequence of str

    Returns
    -------
    Figure
        Left axes: an RGBA image, blue on the diagonal, orange elsewhere, both by share of the true class;
        right axes: bars in percent.

    Examples
    --------
    >>> figure = plot_confusion(np.array([[8, 2], [0, 5]]), ["a", "b"])
    >>> [round(float(bar.get_width()), 1) for bar in figure.axes[1].patches]
    [20.0, 0.0]
    """
    m = len(counts)
    total = counts.sum(axis=1)
    share = counts / np.maximum(total, 1)[:, None]
    side = min(max(0.42 * m + 1.0, 3.0), 13)
    figure = new_figure(side + 2.4, side)
    matrix, bars = figure.subplots(1, 2, sharey=True, width_ratios=[side, 2.0])
    matrix.imshow(_confusion_colors(share), aspect="equal", interpolation="nearest")
    if m <= ANNOTATED_CLASSES:
        _annotate(matrix, counts, share)
    class_ticks(matrix, names)
    matrix.set(xlabel="predicted class", ylabel="true class")
    quiet_axes(matrix, grid=False)
    error = np.where(total > 0, 100 * (1 - np.diag(share)), 0.0)
    bars.barh(np.arange(m), error, color=WARN, height=0.62)
    if m <= ANNOTATED_CLASSES:
        for i in range(m):
            text = f"{error[i]:.1f}" if total[i] else "no rows"
            bars.text(error[i], i, f" {text}", va="center", fontsize=8.5, color=INK)
    bars.set_xlim(0, max(error.max() * 1.35, 1.0))
    bars.set_xlabel("error, %")
    quiet_axes(bars, grid=False)
    bars.tick_params(axis="y", length=0, labelleft=False)
    return figure


def _confusion_colors(share: np.ndarray) -> np.ndarray:
    """Mistakes are far rarer than hits: each gets a scale of its own, or they would all look white."""
    diagonal = np.eye(len(share), dtype=bool)
    worst = share[~diagonal].max() if len(share) > 1 else 0.0
    maps = matplotlib.colormaps
    colors = maps["Oranges"](0.75 * np.sqrt(share / worst if worst > 0 else np.zeros_like(share)))
    colors[~diagonal & (share == 0)] = (1, 1, 1, 1)
    colors[diagonal] = maps["Blues"](0.15 + 0.55 * share[diagonal])
    return colors


def _annotate(axes: Axes, counts: np.ndarray, share: np.ndarray) -> None:
    size = 9 if len(counts) <= 12 and counts.max() < 10_000 else 6.5
    for i, j in np.argwhere(counts > 0):
        dark = i == j and share[i, j] > 0.75
        axes.text(
            j, i, f"{counts[i, j]}", ha="center", va="center", fontsize=size, color="white" if dark else INK
        )


def plot_reliability(counts: np.ndarray, confidence: np.ndarray, hits: np.ndarray) -> Figure:
    """Share of right predictions against the probability they were given, in bins.

    Parameters
    ----------
    counts, confidence, hits : ndarray, shape (bins,)
        Rows (or their weight), summed probability and right predictions of each bin of predicted probability;
        bins share [0, 1] equally.

    Returns
    -------
    Figure
        Upper axes: reliability, one point a bin that has rows; lower axes: rows of each bin.

    Examples
    --------
    >>> figure = plot_reliability(np.array([0, 4]), np.array([0, 3.6]), np.array([0, 3]))
    >>> [float(v[0]) for v in figure.axes[0].lines[1].get_data()]
    [0.9, 0.75]
    """
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
    upper.set(ylabel="share of rows that are right", ylim=(-0.02, 1.04), xlim=(0, 1.01))
    bins = len(counts)
    lower.bar((np.arange(bins) + 0.5) / bins, counts, width=0.92 / bins, color=LINE)
    whole = bool((np.asarray(counts) % 1 == 0).all())
    lower.set(xlabel="probability of the predicted class", ylabel="rows" if whole else "weight")
    lower.yaxis.set_major_locator(MaxNLocator(3, integer=whole))
    quiet_axes(upper)
    quiet_axes(lower)
    return figure


def plot_votes(shares: np.ndarray, pair_wins: np.ndarray, names: Sequence[str]) -> Figure:
    """Votes of an all-versus-all model, in place of a scatter: its capsules live in m (m - 1) / 2 spaces.

    Parameters
    ----------
    shares : ndarray, shape (classes, classes)
        Share of its possible votes that each class (column) gets from rows of each true class (row).
    pair_wins : ndarray, shape (classes, classes)
        Share of the rows of class i (row) that member {i, j} gives to i; NaN on the diagonal.
    names : sequence of str

    Returns
    -------
    Figure
        Left axes: image of shares; right axes: image of pair errors, 1 - pair_wins, in percent.

    Examples
    --------
    >>> nan = float("nan")
    >>> figure = plot_votes(np.eye(2), np.array([[nan, 0.9], [1.0, nan]]), ["a", "b"])
    >>> round(float(figure.axes[1].images[0].get_array()[0, 1]), 1)
    10.0
    """
    m = len(names)
    side = min(max(0.4 * m + 1.2, 3.2), 9)
    # Long names under the columns need height, not width.
    figure = new_figure(2 * side + 1.2, side + (1.3 if long_names(names) else 0.5))
    axes = figure.subplots(1, 2)
    panels = (
        (shares, "Blues", "share of the votes a class can get", "class", "{:.2f}"),
        (100 * (1 - pair_wins), "Oranges", "rows lost to one other class, %", "other class", "{:.1f}"),
    )
    for ax, (values, colors, title, label, form) in zip(axes, panels, strict=True):
        image = ax.imshow(values, cmap=colors, vmin=0, aspect="equal", interpolation="nearest")
        ax.set(title=title, xlabel=label, ylabel="true class")
        class_ticks(ax, names)
        quiet_axes(ax, grid=False)
        if m <= 12:
            limit = 0.65 * (np.nanmax(values) if np.isfinite(values).any() else 1)
            for i, j in np.argwhere(np.isfinite(values)):
                ax.text(j, i, form.format(values[i, j]), ha="center", va="center", fontsize=6.5,
                        color="white" if values[i, j] > limit else INK)  # fmt: skip
        else:
            figure.colorbar(image, ax=ax, shrink=0.7).ax.tick_params(labelsize=8, colors=INK)
    return figure
