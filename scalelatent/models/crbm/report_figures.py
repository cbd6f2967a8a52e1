"""Figures of conditional RBMs: restored images, learning curves, convergence, errors by occlusion.

Figures 2 to 4 of Ping and Ihler, "Belief propagation in conditional RBMs for structured prediction" (2017).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from scalelatent.errors import DataError
from scalelatent.report.figures import column, draw_errors, places_of
from scalelatent.report.pictures import draw_image
from scalelatent.report.style import ACCENT, INK, LINE, WARN, new_figure, quiet_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from scalelatent.evaluation import OutputErrors

__all__ = ["plot_convergence", "plot_learning", "plot_occlusion", "plot_restored"]

_PAPER = ("gray_r", 0.0, 1.0)  # ink on paper: ones are dark


def plot_restored(rows: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Figure:
    """Images under each other: originals, what was given, and what the model makes of it (Figure 2).

    Parameters
    ----------
    rows : mapping of str to ndarray, shape (n, features)
        By the words that stand beside them; the n images of one column belong together.
    shape : tuple of int
        Of an image.

    Returns
    -------
    Figure
        An axes for each image, row by row.

    Raises
    ------
    DataError
        No image.

    Examples
    --------
    >>> figure = plot_restored({"original": np.ones((3, 64)), "restored": np.zeros((3, 64))}, (8, 8))
    >>> len(figure.axes), figure.axes[3].get_ylabel()
    (6, 'restored')
    """
    n = min((len(images) for images in rows.values()), default=0)
    if not n:
        raise DataError("there are no images to draw: give at least one row of each kind")
    figure = new_figure(0.9 * n + 0.6, 0.95 * len(rows))
    axes = figure.subplots(len(rows), n, squeeze=False)
    for line, (name, images) in zip(axes, rows.items(), strict=True):
        for place, image in zip(line, images, strict=False):
            draw_image(place, np.asarray(image, np.float64), shape, _PAPER)
            for side in place.spines.values():
                side.set_color(LINE)
        line[0].set_ylabel(name, fontsize=9, color=INK)
    return figure


def plot_learning(records: Sequence[Mapping[str, Any]], unit: str = "objective") -> Figure:
    """Objective and errors against epochs.

    Parameters
    ----------
    records : sequence of mapping
        One an epoch: pass, objective, train_error, validation_error; with ``rows_seen`` there may be several.
    unit : str
        What the objective is.

    Returns
    -------
    Figure
        Upper axes: objective; lower axes: errors in percent.

    Raises
    ------
    DataError
        No record.

    Examples
    --------
    >>> records = [{"pass": i, "objective": 1.0 / i, "validation_error": 0.1 / i} for i in (1, 2)]
    >>> plot_learning(records).axes[0].lines[0].get_ydata().tolist()
    [1.0, 0.5]
    """
    if not records:
        raise DataError("there are no epochs to draw: the history is empty")
    figure, passes = new_figure(8, 5.6), places_of(records)
    upper, lower = figure.subplots(2, 1, sharex=True)
    point = _points(records)
    upper.plot(passes, column(records, "objective"), color=INK, linewidth=1.6, **point)
    upper.set_ylabel(unit)
    draw_errors(lower, passes, records, point)
    lower.set_xlabel("epoch")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        quiet_axes(axes)
    return figure


def plot_convergence(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Share of rows whose inference converged in each epoch (Figure 4).

    Parameters
    ----------
    records : sequence of mapping
        With ``pass`` and ``converged``.

    Returns
    -------
    Figure

    Raises
    ------
    DataError
        No record says how many converged.

    Examples
    --------
    >>> figure = plot_convergence([{"pass": 1, "converged": 1.0}, {"pass": 2, "converged": 0.9}])
    >>> figure.axes[0].lines[0].get_ydata().tolist()
    [100.0, 90.0]
    """
    told = [record for record in records if record.get("converged") is not None]
    if not told:
        raise DataError("no record says how many rows converged: the learner has no messages")
    figure = new_figure(8, 3.2)
    axes = figure.subplots()
    axes.plot(places_of(told), 100 * column(told, "converged"), color=ACCENT, linewidth=1.6, **_points(told))
    axes.set(xlabel="epoch", ylabel="rows that converged, %", ylim=(0, 103))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    quiet_axes(axes)
    return figure


def plot_occlusion(errors: Mapping[int, OutputErrors], names: str = "pixels") -> Figure:
    """Errors against the side of the square that is gone, all of it at the right end (Figure 3).

    Parameters
    ----------
    errors : mapping of int to OutputErrors
        By side.
    names : str
        What the outputs are.

    Returns
    -------
    Figure

    Raises
    ------
    DataError
        No error.

    Examples
    --------
    >>> from scalelatent.evaluation import OutputErrors
    >>> figure = plot_occlusion({0: OutputErrors(100, 1), 4: OutputErrors(100, 8, 16, 6)})
    >>> [line.get_ydata().tolist() for line in figure.axes[0].lines]
    [[1.0, 8.0], [37.5]]
    """
    if not errors:
        raise DataError("there are no errors to draw: give at least one side of the square")
    figure = new_figure(8, 3.6)
    axes = figure.subplots()
    sides = sorted(errors)
    point: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.6}
    axes.plot(sides, [100 * errors[s].all_error for s in sides], color=INK, label=f"all {names}", **point)
    hidden = [s for s in sides if errors[s].changed]
    if hidden:
        changed = [100 * errors[s].changed_error for s in hidden]
        axes.plot(hidden, changed, color=WARN, label=f"{names} that were changed", **point)
    axes.set(xlabel=f"side of the square that is gone, {names}", ylabel="error, %")
    axes.set_xticks(sides)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=9, frameon=True, framealpha=0.9, edgecolor="none", labelcolor=INK)
    quiet_axes(axes)
    return figure


def _points(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    # A line needs two points: short histories are drawn as points too.
    return {"marker": "o", "markersize": 3.5} if len(records) <= 40 else {}
