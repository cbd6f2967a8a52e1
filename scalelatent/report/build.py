"""From a run folder, a model and rows to the report: what is shown, and in which words."""

# ruff: noqa: RUF001  the Greek letters of the paper

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from scalelatent.errors import DataError, ScalelatentError

from .explained import calibration_text, error_text, how_to_use, validation_rows, why_errors_differ
from .figures import plot_history, rounds_of
from .page import Page, Picture, count, listing, write_page
from .runfiles import RunFiles, read_run
from .searches import candidates_picture, candidates_table
from .style import percent

if TYPE_CHECKING:
    from scalelatent.data import Dataset
    from scalelatent.models.capsule.report_collect import Evidence
    from scalelatent.models.capsule.report_tallies import Confusion

__all__ = ["build_report"]

INTERVAL = (
    "These rows are a sample. The model's error on all rows of their kind lies within the interval "
    "(Wilson's) in 95 of 100 cases. Two errors whose intervals overlap may well be equal."
)
MEMBERS = (
    "Each member solves a problem of its own, one class against the others or against one other, which is "
    "easier than telling all classes apart. The validation error is that of the class that they decide on "
    "together."
)
Told = Callable[[int, int], None] | None
ARCHITECTURES = {"multiclass": "multiclass", "one_vs_all": "one-versus-all", "all_vs_all": "all-versus-all"}


def build_report(
    run_dir: str | os.PathLike[str],
    *,
    model: Any = None,
    data: Dataset | None = None,
    role: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Write ``report/index.html`` and its figures into a run folder.

    The page is one file without outside resources; the figures lie beside it as PNG files too. What is
    missing (history, rows, labels, validation) is left out and named on the page.

    Parameters
    ----------
    run_dir : path or str
        A run folder; read are ``job.json``, ``metrics.jsonl``, ``events.jsonl``, and ``model.zarr`` where no
        model is given.
    model : CapsuleRegression, MultilayerBootstrapNetwork or ConditionalRBM, optional
        The fitted model.
    data : Dataset, optional
        Rows with labels (or outputs) for figures and errors: test rows, or validation or training rows. They
        are streamed; one pass, in bounded memory.
    role : {"test", "validation", "training"}, optional
        What ``data`` are; by default what the job tells: the first of these three that it names.
    progress : callable, optional
        Called with rows done and rows in all.

    Returns
    -------
    str
        Path or address of the page.

    Raises
    ------
    DataError
        No such folder, or neither a model given nor one in the folder.

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
    if run.search:
        run.history = _history_of_best(run, model)
    if not run.history and getattr(model, "history_", None):
        run.history = [dict(record) for record in model.history_]
        run.notes = [note for note in run.notes if not note.startswith("metrics.jsonl")]
    kind = getattr(type(model), "_kind", None)
    rows = _rows_name(run, role)
    if kind == "mbn":
        return _network_report(run, model, data, rows, progress)
    if kind == "crbm":
        return _rbm_report(run, model, data, rows, progress)
    if kind != "capsule":
        raise DataError(
            f"{run.place.url}: there is no report for {type(model).__name__} models, only for capsule "
            "regression, bootstrap networks and conditional RBMs"
        )
    if len(model.capsule_dims_) > 1:
        run.history = [_of_members(record) for record in run.history]
    evidence = _evidence(run, model, data, progress)
    page = Page(title=_title(run), subtitle=_subtitle(model))
    page.headline, page.numbers = _numbers(run, model, evidence, rows)
    page.pictures = _history_pictures(run, model)
    if evidence is not None:
        from scalelatent.models.capsule.report import evidence_pictures

        page.pictures = evidence_pictures(evidence, rows) + page.pictures
        if not evidence.labelled:
            run.notes.append(
                f"The {rows} rows have no labels: colours and prototypes follow the predicted classes, "
                "and there is no error to tell."
            )
    page.explained = _explained(run, model, evidence)
    return _written(page, run, model)


def _history_of_best(run: RunFiles, model: Any) -> list[dict[str, Any]]:
    """The passes of the model, among those of all candidates."""
    if own := getattr(model, "history_", None):
        return [dict(record) for record in own]
    if run.search.get("folds", 1) > 1:  # the last fit was that of the best
        starts = [i for i, (a, b) in enumerate(pairwise(run.history)) if b["pass"] <= a["pass"]]
        return run.history[starts[-1] + 1 :] if starts else run.history
    run.notes.append("metrics.jsonl has the passes of all candidates: the curves of the best are left out.")
    return []


def _written(page: Page, run: RunFiles, model: Any) -> str:
    """The page, with what every kind of run has."""
    if run.search:
        page.tables.append(candidates_table(run.search))
        page.pictures.append(candidates_picture(run.search))
    page.notes, page.settings, page.links = run.notes, run.settings(), run.links()
    if run.place.has("model.zarr/zarr.json"):
        page.snippet = how_to_use(run, model)
    return write_page(page, run.place.at("report"))


def _explained(run: RunFiles, model: Any, evidence: Evidence | None) -> list[tuple[str, str]]:
    """What the numbers of a classifier mean."""
    found = []
    if differ := why_errors_differ(run, model.n_iter_, len(model.capsule_dims_)):
        found.append(("Validation and test error", differ))
    if evidence is not None and evidence.confusion is not None:
        found.append(("95 % interval", INTERVAL))
    if model.mean_member_validation_error_ is not None:
        found.append(("Mean member validation error", MEMBERS))
    if evidence is not None and evidence.reliability is not None:
        words = calibration_text(evidence.reliability, model.architecture)
        found.append(("Calibration error", words))
    return found


def _confusion_text(confusion: Confusion) -> str:
    rows = int(confusion.counts.sum())
    wrong = rows - int(confusion.counts.trace())
    if abs(confusion.weight - rows) > 1e-9 * rows:
        return f"{percent(confusion.error)} by weight ({wrong:,} of {count(rows, 'row')})"
    return error_text(confusion.error, rows, wrong=wrong)


def _network_report(run: RunFiles, model: Any, data: Dataset | None, rows: str, progress: Told) -> str:
    from scalelatent.models.mbn.report import (
        collect_network,
        network_numbers,
        network_pictures,
        network_subtitle,
        network_words,
    )

    page, evidence = Page(title=_title(run), subtitle=network_subtitle(model)), None
    # Its history is that of EM-PCA, which small networks have none of.
    run.notes = [note for note in run.notes if not note.startswith("metrics.jsonl")]
    if data is None:
        run.notes.append("No rows were at hand: the figures are left out.")
    else:
        try:
            scores = _recorded_scores(run) if rows == "test" else None
            evidence = collect_network(model, data, scores=scores, progress=progress)
        except ScalelatentError as error:
            run.notes.append(f"The rows could not be used, so their figures are left out: {error}")
    page.headline, page.numbers = network_numbers(run, model, evidence, rows)
    page.pictures = [] if evidence is None else network_pictures(evidence, rows)
    page.explained = network_words(run, evidence)
    if evidence is not None and evidence.clusters is None:
        run.notes.append(f"The {rows} rows have no classes, so clusters are not held against any.")
    return _written(page, run, model)


def _recorded_scores(run: RunFiles) -> dict[str, float] | None:
    """What the job has found of its test rows, where that is all that is told; None: compute it."""
    told = {key.removeprefix("test_"): value for key, value in run.event("scored").items()}
    of_each = [f"{name}{part}" for name in ("nmi", "accuracy") for part in ("", "_mean", "_spread")]
    wanted = [*of_each, "restarts", "clustered_rows"]
    return {key: told[key] for key in wanted} if all(key in told for key in wanted) else None


def _rbm_report(run: RunFiles, model: Any, data: Dataset | None, rows: str, progress: Told) -> str:
    from scalelatent.models.crbm.report import (
        collect_rbm,
        rbm_numbers,
        rbm_pictures,
        rbm_subtitle,
        rbm_words,
    )

    page, evidence = Page(title=_title(run), subtitle=rbm_subtitle(model)), None
    if data is None:
        run.notes.append("No rows were at hand: restored images and their errors are left out.")
    else:
        try:
            evidence = collect_rbm(model, data, progress=progress)
        except ScalelatentError as error:
            run.notes.append(f"The rows could not be used, so their figures are left out: {error}")
    if evidence is not None and evidence.shape is None:
        run.notes.append("Outputs are no images of the shape of the rows, so none are drawn.")
    page.headline, page.numbers = rbm_numbers(run, model, evidence, rows)
    page.pictures = rbm_pictures(run, model, evidence, rows)
    page.explained = rbm_words(run, model, evidence)
    return _written(page, run, model)


def _saved_model(run: RunFiles) -> Any:
    if not run.place.has("model.zarr/zarr.json"):
        raise DataError(
            f"run folder {run.place.url} has no model.zarr, so there is nothing to report on yet: finish it "
            f"with `scalelatent resume {run.place.url}`, or pass the fitted model"
        )
    from scalelatent.estimators import load_model

    return load_model(run.place.name_of("model.zarr"))


def _evidence(run: RunFiles, model: Any, data: Dataset | None, progress: Told) -> Evidence | None:
    if data is None:
        run.notes.append(
            "No rows were at hand: the figures of latent vectors, prototypes and errors are left out."
        )
        return None
    from scalelatent.models.capsule.report_collect import collect_evidence

    try:
        return collect_evidence(model, data, progress=progress)
    except ScalelatentError as error:
        # The history is worth a page even where the rows have been damaged or moved.
        run.notes.append(f"The rows could not be used, so their figures are left out: {error}")
        return None


def _rows_name(run: RunFiles, role: str | None) -> str:
    named = run.job.get("data", {})
    if role is None:
        role = next(
            (key for key in ("test", "validation") if named.get(key)), "training" if named else "given"
        )
    return role


def _title(run: RunFiles) -> str:
    return str(run.job.get("job", {}).get("name") or run.place.url.rstrip("/").rsplit("/", 1)[-1])


def _subtitle(model: Any) -> str:
    sizes = sorted({int(d) for d in model.capsule_dims_.ravel()})
    dims = f"d = {sizes[0]}" if len(sizes) == 1 else f"d = {sizes[0]} to {sizes[-1]}"
    kind = ARCHITECTURES.get(model.architecture, model.architecture)
    return f"Capsule regression, {kind}, {count(len(model.classes_), 'class', 'classes')}, {dims}"


def _numbers(
    run: RunFiles, model: Any, evidence: Evidence | None, rows: str
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(headline, table)."""
    head: list[tuple[str, str]] = []
    table: list[tuple[str, str]] = []
    if evidence is not None:
        table.append((f"{rows} rows", f"{evidence.n_rows:,}"))
        if evidence.confusion is not None:
            head.append((f"{rows} error", percent(evidence.confusion.error)))
            table.append((f"{rows} error", _confusion_text(evidence.confusion)))
        if evidence.reliability is not None:
            table.append((f"{rows} log-loss", f"{evidence.reliability.log_loss:.4f} nats a row"))
            table.append((f"{rows} calibration error", percent(evidence.reliability.calibration_error)))
    best, of_members = model.best_validation_error_, model.mean_member_validation_error_
    # Members of an ensemble each solve a problem of their own: their mean error is not that of their vote.
    mean = "" if len(model.capsule_dims_) == 1 else ", mean of the members"
    if best is not None:
        head.append(("best validation error", percent(best)))
        table.append(("best validation error", error_text(best, validation_rows(run))))
    if of_members is not None:
        table.append(("mean member validation error", percent(of_members)))
    head.append(("passes", f"{model.n_iter_:,}"))
    table.append(("passes", f"{model.n_iter_:,}"))
    table += _history_numbers(run, head, mean)
    table += _model_numbers(run, model)
    return head, table


def _passes(run: RunFiles) -> int:
    """Passes of the history, which may hold several records of one."""
    return len({record["pass"] for record in run.history})


def _history_numbers(run: RunFiles, head: list[tuple[str, str]], mean: str) -> list[tuple[str, str]]:
    if not run.history:
        return []
    table, last = [], run.history[-1]
    if last.get("objective") is not None:
        table.append((f"log-loss of the last pass{mean}", f"{last['objective']:.5f} nats a row"))
    if last.get("train_error") is not None:
        table.append(("training error of the last pass", percent(last["train_error"])))
    if last.get("mean_member_train_error") is not None:
        told = ("mean member training error of the last pass", percent(last["mean_member_train_error"]))
        table.append(told)
    seconds = sum(record.get("seconds") or 0.0 for record in run.history)
    rows = sum(record.get("rows") or 0 for record in run.history)
    if seconds > 0:
        head += [("time in passes", duration(seconds)), ("rows a second", f"{rows / seconds:,.0f}")]
        table.append(("rows of a pass, validation included", f"{last.get('rows') or 0:,}"))
        table.append(("time in passes", f"{seconds:,.2f} s ({1e3 * seconds / _passes(run):,.2f} ms a pass)"))
        table.append(("rows a second", f"{rows / seconds:,.0f}"))
    read = sum(record.get("bytes_read") or 0 for record in run.history)
    table.append(("read from storage in passes", f"{read / 2**20:,.1f} MiB"))
    return table


def _model_numbers(run: RunFiles, model: Any) -> list[tuple[str, str]]:
    width = model.W_.shape[1]
    table = []
    if run.event("fit_started").get("rows"):
        table.append(("training rows", f"{run.event('fit_started')['rows']:,}"))
    projected = "" if model.projection_ is None else f", projected to {width:,}"
    table.append(("features of a row", f"{model.n_features_in_:,}{projected}"))
    table.append(("members", f"{len(model.capsule_dims_):,}"))
    table.append(("learned weights", f"{model.W_.size:,}"))
    table.append(("seed", str(model.seed_)))
    return table


def duration(seconds: float) -> str:
    """A time as people read it.

    Examples
    --------
    >>> duration(0.0123), duration(75.2), duration(7300)
    ('0.012 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _of_members(record: dict[str, Any]) -> dict[str, Any]:
    """A record of an ensemble; earlier versions had the means over members under the names of the errors."""
    if "mean_member_train_error" in record:
        return record
    of_members = {f"mean_member_{key}": record.get(key) for key in ("train_error", "validation_error")}
    return {**record, **of_members, "train_error": None, "validation_error": None}


def _history_pictures(run: RunFiles, model: Any) -> list[Picture]:
    if not run.history:
        return []
    capsules, ensemble = model.capsule_dims_.shape[1], len(model.capsule_dims_) > 1
    first, last = run.history[0], run.history[-1]
    held = any(record.get("validation_error") is not None for record in run.history)
    words = [
        (
            f"Above: mean log-loss of the training rows divided by log {capsules}, so that guessing gives "
            "1 (Figure 6 of the paper)."
        ),
        f"Below: {'training and validation' if held else 'training'} error.",
    ]
    if ensemble:
        words.append(
            f"The log-loss and the members' errors are means over {len(model.capsule_dims_)} members, each "
            "with two capsules and an easier problem of its own."
        )
        if held:
            words.append(
                "The validation error is that of what they decide together; it is measured in the first "
                "eight passes and in every eighth from then on. The saved model has each member as it was at "
                "its best, which is in another pass for each."
            )
    if any(record.get("train_error") == 0 for record in run.history):
        words.append("An error of zero is not drawn where the axis is logarithmic.")
    rounds = rounds_of(run.history)
    if len(rounds) > 1 or (rounds and rounds[0][3] > 0):
        if not held:
            words.append("There were no validation rows: the training error decided when a round ended.")
        words.append(
            "Shading marks the rounds that the slowest member has reached."
            if ensemble
            else "Shading marks the rounds of the threshold ν; each starts from the best weights so far."
        )
    key = "mean_member_train_error" if ensemble else "train_error"
    errors = [
        f"{'mean member ' if ensemble else ''}training error {percent(record[key])}"
        for record in (first, last)
        if record.get(key) is not None
    ]
    alt = (
        f"Two curves against {count(_passes(run), 'pass', 'passes')}: log-loss, and "
        f"{listing(errors or ['errors'])} in the first and last pass."
    )
    return [
        Picture(
            "history",
            "Log-loss and error against passes",
            " ".join(words),
            alt,
            plot_history(run.history, capsules=capsules, ensemble=ensemble),
        )
    ]
