"""Comparison of several runs: tables, a page, and test error against capsule dimension."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import NullFormatter, NullLocator

from scalelatent.contract.kinds import import_object, known_kinds
from scalelatent.errors import DataError

from .interpretation import wilson_interval
from .page import Page, Picture, Section, Table, count, write_page
from .style import ACCENT, COLORS, INK, WARN, new_figure, percent, short_name, style_axes, write_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ARCHITECTURES = {
    "multiclass": ("multiclass", "#bd1f01", "o"),
    "one_vs_all": ("one-versus-all", "#3f90da", "s"),
    "all_vs_all": ("all-versus-all", "#22262b", "D"),
}


def error_by_dimension(records: Iterable[Mapping[str, Any]]) -> Figure:
    """Draw test error against capsule dimension, one curve per architecture (Figure 5 of the capsule paper).

    Parameters
    ----------
    records : iterable of mapping
        One record per run, with ``architecture``, ``capsule_dim`` (int) and ``test_error`` (0 to 1). An
        optional ``series`` separates runs of one architecture, for example by the number of training rows.
        The curve connects the means of the records with the same dimension.

    Returns
    -------
    Figure

    Raises
    ------
    DataError
        There is no record, a record lacks a key, or a value cannot be drawn; the message numbers the record.

    Examples
    --------
    >>> runs = [{"architecture": "multiclass", "capsule_dim": d, "test_error": 0.1 / d} for d in (1, 2, 4)]
    >>> [round(float(y), 2) for y in error_by_dimension(runs).axes[0].lines[0].get_ydata()]
    [10.0, 5.0, 2.5]
    """
    series: dict[tuple[str, str], dict[int, list[float]]] = {}
    for number, record in enumerate(records):
        architecture, dimension, error = _check_record(record, number)
        name = str(record.get("series") or ARCHITECTURES.get(architecture, (architecture,))[0])
        series.setdefault((architecture, name), {}).setdefault(dimension, []).append(100 * error)
    if not series:
        raise DataError(
            "there are no records to draw; give one record per run, with architecture, capsule_dim and "
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
    style_axes(axes)
    return figure


def _check_record(record: Mapping[str, Any], number: int) -> tuple[str, int, float]:
    """Return architecture, dimension and error of a record."""
    missing = [key for key in ("architecture", "capsule_dim", "test_error") if record.get(key) is None]
    if missing:
        raise DataError(
            f"record {number} has no {' and no '.join(missing)}; every record needs architecture, "
            "capsule_dim and test_error"
        )
    dimension, error = record["capsule_dim"], record["test_error"]
    if isinstance(dimension, bool) or not isinstance(dimension, int | np.integer) or dimension < 1:
        raise DataError(
            f"record {number}: capsule_dim={dimension!r} is not a positive whole number; only runs with one "
            "dimension for all classes can be compared"
        )
    if not 0 <= float(error) <= 1:
        raise DataError(
            f"record {number}: test_error={error!r} is not between 0 and 1; give 0.0621 for 6.21 %"
        )
    return str(record["architecture"]), int(dimension), float(error)


def plot_error_by_dimension(records: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Write the figure of `error_by_dimension` as a PNG file; return the path."""
    write_png(error_by_dimension(records), Path(path))
    return Path(path)


SHARES = {
    "best_validation_error": "best validation error",
    "mean_member_validation_error": "mean member validation error",
    "validation_error": "validation error so far",
    "test_error": "test error",
    "test_nmi": "test NMI",
    "test_accuracy": "test accuracy",
}


def comparison_tables(compared: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return a table (caption, column names, rows of text) for each group of a comparison of runs."""
    tables = []
    for number, group in enumerate(compared["groups"]):
        runs = [run for run in compared["runs"] if run["group"] == number]
        names = group["differing"]
        shares = [name for name in SHARES if any(run.get(name) is not None for run in runs)]
        if "test_error" in shares:  # the accuracy is 1 minus the error
            shares = [name for name in shares if name != "test_accuracy"]
        columns = [
            "run",
            "state",
            *(_short(name, names) for name in names),
            "training rows",
            "passes",
            "time",
        ]
        rows = [
            [
                str(run["id"]),
                str(run["state"]),
                *(_value(run["parameters"], name) for name in names),
                _whole(run.get("rows")),
                _whole(run.get("passes")),
                "-" if run.get("seconds") is None else f"{run['seconds']:,.1f} s",
                *("-" if run.get(name) is None else percent(run[name]) for name in shares),
            ]
            for run in runs
        ]
        tables.append((_caption(group), [*columns, *(SHARES[name] for name in shares)], rows))
    return tables


def _caption(group: Mapping[str, Any]) -> str:
    rows = f", rows {group['rows']}" if group.get("rows") else ""
    role = f"{group['role']} rows of" if group["role"] else "fitted to"
    return f"{group['kind']}: {role} {group['data']}{rows}"


def _short(name: str, names: Sequence[str]) -> str:
    """Return the name of a parameter, without its section if the name is still unique."""
    key = name.split(".", 1)[1]
    return key if sum(other.split(".", 1)[1] == key for other in names) == 1 else name


def _value(parameters: Mapping[str, Any], name: str) -> str:
    if name not in parameters:
        return "-"
    value = parameters[name]
    return "none" if value is None else str(value)


def _whole(value: Any) -> str:
    return "-" if value is None else f"{value:,}"


def write_comparison(compared: Mapping[str, Any], folder: str | os.PathLike[str]) -> str:
    """Write a page with tables and figures that compare runs; return its path or address."""
    results = Section(
        "Parameters that differ between the jobs, and the results", pictures=_pictures(compared)
    )
    tables = [Table(f"group-{n}", *table) for n, table in enumerate(comparison_tables(compared), 1)]
    notes = [f"{note[0].upper()}{note[1:]}." for note in compared["notes"]]
    page = Page(f"Comparison of {count(len(compared['runs']), 'run')}", results, notes, tables=tables)
    return write_page(page, folder)


def _pictures(compared: Mapping[str, Any]) -> list[Picture]:
    found = []
    for number, group in enumerate(compared["groups"]):
        runs = [run for run in compared["runs"] if run["group"] == number]
        measured = [run for run in runs if _errors(run)]
        if not measured:
            continue
        errors = [
            f"{run['id']} {', '.join(f'{n} {percent(e)}' for n, e in _errors(run).items())}"
            for run in measured
        ]
        # Errors of several outputs of one row are correlated, so the number of rows gives no interval.
        kind = known_kinds().get(group["kind"])
        by_rows = kind is not None and not kind.takes_targets
        intervals = by_rows and any(run.get("test_rows") for run in measured)
        words = f"{_caption(group)}."
        if intervals:
            words += " Lines are 95 % intervals of the test errors. Runs with overlapping lines may be equal."
        after = f"-{number + 1}" if len(compared["groups"]) > 1 else ""
        found.append(
            Picture(
                f"errors{after}",
                f"Errors of the {group['kind']} runs",
                words,
                "; ".join(errors) + ".",
                _plot_errors(measured, intervals),
            )
        )
        if kind is not None and kind.compare:
            pictures = import_object(kind.compare)(measured)
            found += [replace(picture, name=f"{picture.name}{after}") for picture in pictures]
    return found


def _errors(run: Mapping[str, Any]) -> dict[str, float]:
    known = {"validation": run.get("best_validation_error", run.get("validation_error"))}
    known["test"] = run.get("test_error")
    return {name: float(value) for name, value in known.items() if value is not None}


def _plot_errors(runs: Sequence[Mapping[str, Any]], intervals: bool) -> Figure:
    """Draw one line per run with its validation error and its test error."""
    figure = new_figure(7.2, 1.1 + 0.34 * len(runs))
    axes = figure.subplots()
    styles = {"validation": (WARN, "o"), "test": (ACCENT, "D")}
    for place, run in enumerate(runs):
        for name, error in _errors(run).items():
            color, marker = styles[name]
            if name == "test" and intervals and run.get("test_rows"):
                low, high = wilson_interval(error, run["test_rows"])
                axes.plot([100 * low, 100 * high], [place, place], color=color, linewidth=1.4, alpha=0.6)
            label = name if name not in axes.get_legend_handles_labels()[1] else None
            axes.plot(100 * error, place, marker, color=color, markersize=6, label=label, linestyle="none")
    axes.set_yticks(range(len(runs)), [short_name(str(run["id"]), 28) for run in runs])
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.set_xlim(0, 1.08 * axes.get_xlim()[1])
    axes.set_xlabel("error, %")
    axes.legend(fontsize=9, frameon=False, labelcolor=INK)
    style_axes(axes)
    return figure
