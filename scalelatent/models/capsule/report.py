"""Report of a capsule model: latent vectors, prototypes, mistakes, and the course of the fit."""

# ruff: noqa: RUF001  the Greek letters of the paper

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data import Dataset
from scalelatent.report.classes import (
    describe_confusion,
    draw_confusion,
    draw_mistakes,
    draw_reliability,
    explain_calibration,
)
from scalelatent.report.interpretation import (
    count_validation_rows,
    explain_error_gap,
    format_error,
    usage_snippet,
)
from scalelatent.report.page import Picture, Section, count, duration, join_words
from scalelatent.report.pictures import image_shape
from scalelatent.report.runfiles import RunFiles
from scalelatent.report.style import percent

from .report_data import ReportData, Sample, collect_report_data
from .report_figures import (
    MAX_ELEMENTS,
    find_rounds,
    plot_history,
    plot_latents,
    plot_prototypes,
    project_on_leading_plane,
    puts_classes_across,
)

if TYPE_CHECKING:
    from .estimator import CapsuleRegression

INTERVAL_NOTE = (
    "These rows are a sample. The model's error on all rows of their kind is within the interval "
    "(Wilson's) in 95 of 100 cases. Two errors whose intervals overlap may well be equal."
)
MEMBERS_NOTE = (
    "Each member separates one class from the others, or from one other class, which is easier than "
    "separating all classes. The validation error is the error of the class that all members choose together."
)
ONE_VS_ALL_NOTE = (
    "In a one-versus-all model each class has its own probability. They are divided by their sum, and then "
    "adjusted by the temperature."
)
ARCHITECTURES = {"multiclass": "multiclass", "one_vs_all": "one-versus-all", "all_vs_all": "all-versus-all"}


def section(
    model: CapsuleRegression,
    data: Dataset | None,
    run: RunFiles,
    rows: str,
    progress: Callable[[int, int], None] | None,
) -> Section:
    """Return the section of a report for a capsule model: numbers, explanations and figures."""
    if len(model.capsule_dims_) > 1:
        run.history = [_rename_member_means(record) for record in run.history]
    missing_figures = "the figures of latent vectors, prototypes and errors are omitted"
    shown = run.collect(data, missing_figures, partial(collect_report_data, model, progress=progress))
    head, table = _list_numbers(run, model, shown, rows)
    pictures = _draw_history(run, model)
    if shown is not None:
        pictures = _draw_rows(shown, rows) + pictures
        if not shown.labelled:
            run.notes.append(
                f"The {rows} rows have no labels: colours and prototypes follow the predicted classes, "
                "and there is no error."
            )
    explained = _describe_numbers(run, model, shown)
    return Section(_describe_model(model), head, table, pictures, explained, usage_snippet(run, model))


def _describe_numbers(
    run: RunFiles, model: CapsuleRegression, shown: ReportData | None
) -> list[tuple[str, str]]:
    """Return (number, explanation) for the numbers of a classifier."""
    found = []
    if differ := explain_error_gap(run, model.n_iter_, len(model.capsule_dims_)):
        found.append(("Validation and test error", differ))
    if shown is not None and shown.confusion is not None:
        found.append(("95 % interval", INTERVAL_NOTE))
    if model.mean_member_validation_error_ is not None:
        found.append(("Mean member validation error", MEMBERS_NOTE))
    if shown is not None and shown.reliability is not None:
        words = explain_calibration(
            shown.reliability, ONE_VS_ALL_NOTE if model.architecture_ == "one_vs_all" else ""
        )
        found.append(("Calibration error", words))
    return found


def _describe_model(model: CapsuleRegression) -> str:
    sizes = sorted({int(d) for d in model.capsule_dims_.ravel()})
    dims = f"d = {sizes[0]}" if len(sizes) == 1 else f"d = {sizes[0]} to {sizes[-1]}"
    kind = ARCHITECTURES[model.architecture_]
    return f"Capsule regression, {kind}, {count(len(model.classes_), 'class', 'classes')}, {dims}"


def _list_numbers(
    run: RunFiles, model: CapsuleRegression, shown: ReportData | None, rows: str
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the numbers at the top of the page and those of the table, as pairs (name, value)."""
    head: list[tuple[str, str]] = []
    table: list[tuple[str, str]] = []
    if shown is not None:
        table.append((f"{rows} rows", f"{shown.n_rows:,}"))
        if shown.confusion is not None:
            head.append((f"{rows} error", percent(shown.confusion.error)))
            table.append((f"{rows} error", describe_confusion(shown.confusion)))
        if shown.reliability is not None:
            table.append((f"{rows} log-loss", f"{shown.reliability.log_loss:.4f} nats per row"))
            table.append((f"{rows} calibration error", percent(shown.reliability.calibration_error)))
    best, of_members = model.best_validation_error_, model.mean_member_validation_error_
    # The members of an ensemble solve different problems, so their mean error is not the error of their vote.
    mean = "" if len(model.capsule_dims_) == 1 else ", mean of the members"
    if best is not None:
        head.append(("best validation error", percent(best)))
        table.append(("best validation error", format_error(best, count_validation_rows(run))))
    if of_members is not None:
        table.append(("mean member validation error", percent(of_members)))
    head.append(("passes", f"{model.n_iter_:,}"))
    table.append(("passes", f"{model.n_iter_:,}"))
    table += _history_numbers(run, head, mean)
    table += _model_numbers(run, model)
    return head, table


def _count_passes(run: RunFiles) -> int:
    """Return the number of passes of the history, which may have several records per pass."""
    return len({record["pass"] for record in run.history})


def _history_numbers(run: RunFiles, head: list[tuple[str, str]], mean: str) -> list[tuple[str, str]]:
    if not run.history:
        return []
    table, last = [], run.history[-1]
    if last.get("objective") is not None:
        table.append((f"log-loss of the last pass{mean}", f"{last['objective']:.5f} nats per row"))
    if last.get("train_error") is not None:
        table.append(("training error of the last pass", percent(last["train_error"])))
    if last.get("mean_member_train_error") is not None:
        mean_error = percent(last["mean_member_train_error"])
        table.append(("mean member training error of the last pass", mean_error))
    seconds = sum(record.get("seconds") or 0.0 for record in run.history)
    rows = sum(record.get("rows") or 0 for record in run.history)
    if seconds > 0:
        head += [("time in passes", duration(seconds)), ("rows per second", f"{rows / seconds:,.0f}")]
        table.append(("rows of a pass, validation included", f"{last.get('rows') or 0:,}"))
        table.append(
            ("time in passes", f"{seconds:,.2f} s ({1e3 * seconds / _count_passes(run):,.2f} ms per pass)")
        )
        table.append(("rows per second", f"{rows / seconds:,.0f}"))
    read = sum(record.get("bytes_read") or 0 for record in run.history)
    table.append(("read from storage in passes", f"{read / 2**20:,.1f} MiB"))
    return table


def _model_numbers(run: RunFiles, model: CapsuleRegression) -> list[tuple[str, str]]:
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


def _rename_member_means(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of an ensemble; earlier versions stored means over members as errors."""
    if "mean_member_train_error" in record:
        return record
    of_members = {f"mean_member_{key}": record.get(key) for key in ("train_error", "validation_error")}
    return {**record, **of_members, "train_error": None, "validation_error": None}


def _draw_history(run: RunFiles, model: CapsuleRegression) -> list[Picture]:
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
            "with two capsules and an easier problem."
        )
        if held:
            words.append(
                "The validation error is the error of the class that all members choose together. It is "
                "measured in the first eight passes and then in every eighth. The saved model has the best "
                "weights of each member, which come from different passes."
            )
    if (first.get("train_error") or 0) > 1 - 1 / capsules:
        words.append(
            "The first weights (equation 2.28) often give a row a longer vector for a wrong class, so the "
            "first errors exceed those of guessing."
        )
    if any(record.get("train_error") == 0 for record in run.history):
        words.append("An error of zero is not drawn on a logarithmic axis.")
    rounds = find_rounds(run.history)
    if len(rounds) > 1 or (rounds and rounds[0][3] > 0):
        if not held:
            words.append("There were no validation rows, so the training error decided when a round ended.")
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
        f"Two curves against {count(_count_passes(run), 'pass', 'passes')}: log-loss, and "
        f"{join_words(errors or ['errors'])} in the first and last pass."
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


def _draw_rows(shown: ReportData, rows: str) -> list[Picture]:
    """Return all figures of the rows, in the order in which the page shows them."""
    # The members of an all-versus-all model each know two classes, so they have no common latent space.
    found = [] if shown.sample is None else [_draw_latents(shown, shown.sample, rows)]
    if (shape := image_shape(shown.feature_shape)) is not None:
        found.append(_draw_prototypes(shown, rows, shape))
    if shown.confusion is not None:
        found.append(draw_confusion(shown.confusion, shown.class_names, rows))
    score = "share of votes" if shown.members.architecture == "all_vs_all" else "probability"
    mistakes = draw_mistakes(shown.mistakes, shown.class_names, shown.feature_shape, rows, score)
    if mistakes is not None:
        found.append(mistakes)
    if shown.reliability is not None:
        found.append(draw_reliability(shown.reliability, rows))
    return found


def _draw_latents(shown: ReportData, sample: Sample, rows: str) -> Picture:
    members = shown.members
    figure = plot_latents(sample.points, sample.codes, shown.class_names)
    k, large = len(sample.rows), max(members.class_dims) > 2
    which = "all" if k == shown.n_rows else f"{k:,} evenly spaced of {shown.n_rows:,}"
    own = "class of a row" if shown.labelled else "predicted class of a row"
    words = [
        "Squashed latent vectors Ψ_i = h_i / √(Σ_j |h_j|²) of each class's capsule (equation 3.1), "
        f"{which} {rows} rows, coloured by the {own}; the panels' names are the legend. The nearer a "
        "vector comes to the circle, the surer the model is of that class."
    ]
    if members.architecture == "one_vs_all":
        words.append("Each panel is the first capsule of a model of its own (its class against all others).")
    if large:
        shares = [
            project_on_leading_plane(p, sample.codes == c)[1]
            for c, p in enumerate(sample.points)
            if p.shape[1] > 2
        ]
        words.append(
            "Capsules have more than two dimensions: drawn are the two leading directions of each, those "
            f"in which the vectors of its own class are longest; they hold {100 * min(shares):.0f} to "
            f"{100 * max(shares):.0f} % of the squared length (in the corner)."
        )
    if min(members.class_dims) == 1:
        words.append(
            "A capsule of dimension 1 is a strip from -1 to 1 with a row of points for each class; "
            "the row of its own class is shaded."
        )
    length = [np.linalg.norm(p[sample.codes == c], axis=1) for c, p in enumerate(sample.points)]
    typical = np.median(np.concatenate(length)) if sum(map(len, length)) else float("nan")
    alt = (
        f"{count(members.n_classes, 'panel')}, one for each class: points inside the unit circle. Half of "
        f"the rows are further than {typical:.2f} from the centre in the panel of their own class."
    )
    return Picture(
        "latents", "Latent vectors of each class", " ".join(words), alt, figure, wide=members.n_classes > 3
    )


def _draw_prototypes(shown: ReportData, rows: str, shape: tuple[int, ...]) -> Picture:
    kept = shown.prototypes
    present = np.asarray(kept.rows >= 0)
    own = "of the class" if shown.labelled else "predicted as the class"
    words = [
        f"For class i and element α: the {rows} row {own} whose probability gets its largest contribution "
        "from element α of the class's latent vector, where |h_iα| / |h| is largest (equation 3.2)."
    ]
    if shown.members.architecture == "all_vs_all":
        words.append(
            f"The {shown.members.n_classes - 1} members that know a class are combined by the "
            "mean of (h_iα / |h|)²."
        )
    if present.shape[1] > MAX_ELEMENTS:
        words.append(f"The first {MAX_ELEMENTS} of {present.shape[1]} elements.")
    missing = [shown.class_names[c] for c in np.flatnonzero(~present.any(axis=1))]
    if missing:
        words.append(f"No row of class {', '.join(missing)}.")
    best = np.sqrt(kept.score[present])
    alt = (
        f"A grid of {count(present.shape[0], 'class', 'classes')} by {count(present.shape[1], 'element')} "
        "of images."
    )
    if best.size:
        alt += f" The elements' shares |h_iα| / |h| range from {best.min():.2f} to {best.max():.2f}."
    figure = plot_prototypes(kept.x, present, shown.class_names, shape)
    wide = puts_classes_across(*present.shape) or present.shape[1] > 6
    return Picture("prototypes", "Prototypes of each class", " ".join(words), alt, figure, wide=wide)
