"""Several runs side by side: test error against capsule dimension, as in the paper's Figure 5."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import NullFormatter, NullLocator

from scalelatent.errors import DataError

from .style import COLORS, INK, new_figure, quiet_axes, write_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["error_by_dimension", "plot_error_by_dimension"]

ARCHITECTURES = {
    "multiclass": ("multiclass", "#bd1f01", "o"),
    "one_vs_all": ("one-versus-all", "#3f90da", "s"),
    "all_vs_all": ("all-versus-all", "#22262b", "D"),
}


def error_by_dimension(records: Iterable[Mapping[str, Any]]) -> Figure:
    """Test error against capsule dimension, a curve for each architecture (the paper's Figure 5).

    Parameters
    ----------
    records : iterable of mapping
        Each with ``architecture``, ``capsule_dim`` (int) and ``test_error`` (a share, 0 to 1); optionally
        ``series``, a name that sets runs of one architecture apart (such as those on more rows). Of several
        records of one point the mean is drawn.

    Returns
    -------
    Figure

    Raises
    ------
    DataError
        No record, or one without a key, or with a value that cannot be drawn; the message numbers it.

    Examples
    --------
    >>> runs = [{"architecture": "multiclass", "capsule_dim": d, "test_error": 0.1 / d} for d in (1, 2, 4)]
    >>> [round(float(y), 2) for y in error_by_dimension(runs).axes[0].lines[0].get_ydata()]
    [10.0, 5.0, 2.5]
    """
    series: dict[tuple[str, str], dict[int, list[float]]] = {}
    for number, record in enumerate(records):
        architecture, dimension, error = _point(record, number)
        name = str(record.get("series") or ARCHITECTURES.get(architecture, (architecture,))[0])
        series.setdefault((architecture, name), {}).setdefault(dimension, []).append(100 * error)
    if not series:
        raise DataError(
            "there are no records to draw: give one for each run, with architecture, capsule_dim and "
            "test_error"
        )
    figure = new_figure(6.4, 4.6)
    axes = figure.subplots()
    used: set[str] = set()
    for k, ((architecture, name), points) in enumerate(series.items()):
        _, color, marker = ARCHITECTURES.get(architecture, ("", COLORS[k % len(COLORS)], "o"))
        second = color in used
        color = next((c for c in COLORS[4:] if c not in used), color) if second else color
        used.add(color)
        at = sorted(points)
        look: dict[str, Any] = {"color": color, "marker": marker, "linestyle": "--" if second else "-"}
        mean = [float(np.mean(points[d])) for d in at]
        axes.plot(at, mean, linewidth=1.6, markersize=6, label=name, **look)
        spread = [(d, e) for d in at for e in points[d] if len(points[d]) > 1]
        if spread:
            across, up = zip(*spread, strict=True)
            axes.scatter(across, up, color=color, s=8, alpha=0.5, linewidths=0)
    dimensions = sorted({d for points in series.values() for d in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(dimensions, [str(d) for d in dimensions])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="capsule dimension d", ylabel="test error, %")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=9, frameon=False, labelcolor=INK)
    quiet_axes(axes)
    return figure


def _point(record: Mapping[str, Any], number: int) -> tuple[str, int, float]:
    missing = [key for key in ("architecture", "capsule_dim", "test_error") if record.get(key) is None]
    if missing:
        raise DataError(
            f"record {number} has no {' and no '.join(missing)}: every run needs architecture, "
            "capsule_dim and test_error"
        )
    dimension, error = record["capsule_dim"], record["test_error"]
    if isinstance(dimension, bool) or not isinstance(dimension, int | np.integer) or dimension < 1:
        raise DataError(
            f"record {number}: capsule_dim={dimension!r} is no single dimension; runs with one dimension "
            "for all classes can be compared"
        )
    if not 0 <= float(error) <= 1:
        raise DataError(f"record {number}: test_error={error!r} is no share; give 0.0621 for 6.21 %")
    return str(record["architecture"]), int(dimension), float(error)


def plot_error_by_dimension(records: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Write `error_by_dimension` of the records as a PNG file.

    Parameters
    ----------
    records : iterable of mapping
        See `error_by_dimension`.
    path : path
        The file; one that is there is replaced.

    Returns
    -------
    pathlib.Path

    Raises
    ------
    DataError
        See `error_by_dimension`.

    Examples
    --------
    >>> import tempfile
    >>> runs = [{"architecture": "all_vs_all", "capsule_dim": 4, "test_error": 0.02}]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot_error_by_dimension(runs, folder + "/errors.png").name
    'errors.png'
    """
    write_png(error_by_dimension(records), Path(path))
    return Path(path)
