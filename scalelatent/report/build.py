"""Build the report of a run from its run folder, its model and some rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.kinds import find_kind, import_object
from scalelatent.data import Dataset
from scalelatent.errors import DataError

from .figures import plot_learning
from .interpretation import usage_snippet
from .page import Page, Picture, Section, Table, count, duration, write_page
from .runfiles import RunFiles, check_features, read_run
from .style import COLORS, new_figure, style_axes

if TYPE_CHECKING:
    from scalelatent.estimators.base import StreamedEstimator

MAX_DRAWN = 30  # the figure of a search shows at most this number of candidates, the best first


def build_report(
    run_dir: str | os.PathLike[str],
    *,
    model: StreamedEstimator | None = None,
    data: Dataset | None = None,
    role: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Write ``report/index.html`` and its figures into a run folder.

    The page is one file that loads no other resource; the figures are also written next to it as PNG files.
    If history, rows, labels or validation are missing, the page says so and omits their figures.

    Parameters
    ----------
    run_dir : path or str
        A run folder. The function reads ``job.json``, ``metrics.jsonl``, ``events.jsonl``, and, without
        ``model``, ``model.zarr``.
    model : estimator, optional
        The fitted model.
    data : Dataset, optional
        Rows with labels (or outputs) for figures and errors: test, validation or training rows. They are
        read in one pass, in bounded memory.
    role : {"test", "validation", "training"}, optional
        Name of ``data`` on the page; by default the first of these three that the job names.
    progress : callable, optional
        Called with the number of finished rows and the number of all rows.

    Returns
    -------
    str
        Path or address of the page.

    Raises
    ------
    DataError
        There is no model, neither given nor in the folder.

    Examples
    --------
    >>> import os, tempfile
    >>> from sklearn.datasets import load_digits
    >>> from scalelatent import CapsuleRegression, Dataset
    >>> x, y = load_digits(return_X_y=True)
    >>> model = CapsuleRegression(capsule_dim=2, max_iter=5, random_state=0).fit(x[:1000], y[:1000])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = build_report(folder, model=model, data=Dataset.from_arrays(x[1000:], y[1000:]))
    ...     sorted(os.listdir(os.path.dirname(page)))[:4]
    ['confusion.png', 'history.png', 'index.html', 'latents.png']
    """
    run = read_run(run_dir)
    model = _saved_model(run) if model is None else model
    if data is not None and role == "evaluation":
        check_features(data, model)
    if run.search:
        run.history = _history_of_best(run, model)
    if not run.history and getattr(model, "history_", None):
        run.history = [dict(record) for record in model.history_]
        run.notes = [note for note in run.notes if not note.startswith("metrics.jsonl")]
    place = find_kind(model._kind).report
    section: Section = (import_object(place) if place else default_section)(
        model, data, run, _choose_role(run, role), progress
    )
    title = str(run.job.get("job", {}).get("name") or run.place.url.rstrip("/").rsplit("/", 1)[-1])
    page = Page(title, section, notes=run.notes, settings=run.settings(), links=run.links())
    if run.search:
        page.tables.append(make_candidates_table(run.search))
        section.pictures.append(draw_candidates(run.search))
    if not run.place.has("model.zarr/zarr.json"):
        section.snippet = ""
    return write_page(page, run.place.at("report"))


def default_section(
    model: StreamedEstimator,
    data: Dataset | None,
    run: RunFiles,
    rows: str,
    progress: Callable[[int, int], None] | None,
) -> Section:
    """Return the section for a kind of model without a ``report`` function: numbers and curves of the fit."""
    name = type(model).__name__
    passes = len({record["pass"] for record in run.history})
    table = [("passes", f"{passes:,}")]
    seconds = sum(record.get("seconds") or 0.0 for record in run.history)
    if seconds > 0:
        trained = sum(record.get("rows") or 0 for record in run.history)
        table += [("time in passes", duration(seconds)), ("rows per second", f"{trained / seconds:,.0f}")]
    if run.event("fit_started").get("rows"):
        table.append(("training rows", f"{run.event('fit_started')['rows']:,}"))
    table.append(("features per row", f"{model.n_features_in_:,}"))
    pictures = []
    if run.history:
        objectives = [record["objective"] for record in run.history if record.get("objective") is not None]
        alt = f"Curves over {count(passes, 'pass', 'passes')}"
        alt += f": from {objectives[0]:.4g} to {objectives[-1]:.4g}." if objectives else "."
        words = "The objective after each pass (above) and, if the model has errors, the errors (below)."
        pictures.append(
            Picture("learning", "Objective against passes", words, alt, plot_learning(run.history))
        )
    verb, gives = ("predict", "predictions") if hasattr(model, "predict") else ("transform", "the output")
    return Section(
        name, table[:3], table, pictures, snippet=usage_snippet(run, model, verb=verb, gives=gives)
    )


def _history_of_best(run: RunFiles, model: StreamedEstimator) -> list[dict[str, Any]]:
    """Return the pass records of the best model from the records of all candidates of a search."""
    if own := getattr(model, "history_", None):
        return [dict(record) for record in own]
    if run.search.get("folds", 1) > 1:  # the last fit refitted the best candidate
        starts = [i for i, (a, b) in enumerate(pairwise(run.history)) if b["pass"] <= a["pass"]]
        return run.history[starts[-1] + 1 :] if starts else run.history
    run.notes.append("metrics.jsonl mixes the passes of all candidates: the page has no curves of the best.")
    return []


def _saved_model(run: RunFiles) -> StreamedEstimator:
    if not run.place.has("model.zarr/zarr.json"):
        raise DataError(
            f"{run.place.url} has no model.zarr, so a report has no model to show; give another run folder, "
            f"finish the run with `scalelatent resume {run.place.url}`, or pass the fitted model"
        )
    from scalelatent.engine.saved_models import load_model

    return load_model(run.place.name_of("model.zarr"))


def _choose_role(run: RunFiles, role: str | None) -> str:
    named = run.job.get("data", {})
    if role is None:
        role = next(
            (key for key in ("test", "validation") if named.get(key)), "training" if named else "evaluation"
        )
    return role


def make_candidates_table(search: Mapping[str, Any]) -> Table:
    """Return a table of all candidates of a search, the best first."""
    rows = [
        [
            str(one["rank"]),
            _format_params(one["params"]),
            one["error"] or "none" if one["score"] is None else f"{one['score']:.4f}",
            "" if one["spread"] is None else f"{one['spread']:.4f}",
            str(one["passes"]),
            f"{one['fit_seconds']:.1f}",
        ]
        for one in _sort_candidates(search)
    ]
    head = ["rank", "parameters", str(search["scoring"]), "deviation over folds", "passes", "seconds per fit"]
    return Table("candidates", f"Search over {count(len(rows), 'candidate')}", head, rows)


def draw_candidates(search: Mapping[str, Any]) -> Picture:
    """Return a picture of the scores of the best candidates: each fold, and the mean."""
    shown = [one for one in _sort_candidates(search) if one["score"] is not None][:MAX_DRAWN]
    figure = new_figure(7.2, 1.2 + 0.28 * len(shown))
    axes = figure.subplots()
    at = np.arange(len(shown))
    for place, one in enumerate(shown):
        folds = [score for score in one["scores"] if score is not None]
        axes.plot(folds, [place] * len(folds), "o", color=COLORS[0], alpha=0.35, markersize=4)
        axes.plot(one["score"], place, "D", color=COLORS[1] if place == 0 else COLORS[0], markersize=6)
    axes.set_yticks(at, [_format_params(one["params"])[:60] for one in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(str(search["scoring"]))
    style_axes(axes)
    of_all = "" if len(shown) == len(search["candidates"]) else f" of {len(search['candidates'])}"
    by = "validation rows" if search["folds"] == 1 else f"{search['folds']} folds"
    caption = f"Scores of {count(len(shown), 'candidate')}{of_all} on {by}, and their mean; the best on top."
    alt = (
        f"Best: {_format_params(shown[0]['params'])} with {shown[0]['score']:.4f}." if shown else "No scores."
    )
    return Picture("candidates", "Candidates of the search", caption, alt, figure)


def _sort_candidates(search: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sorted(search["candidates"], key=lambda one: one["rank"])


def _format_params(params: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name} = {'none' if v is None else v}" for name, v in params.items())
    return text or "parameters of the model"
