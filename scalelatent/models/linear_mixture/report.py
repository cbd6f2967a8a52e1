"""Report sections of mixtures: components, reconstructions, mistakes, and the passes of the fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data import Dataset
from scalelatent.report.classes import (
    describe_confusion,
    draw_confusion,
    draw_mistakes,
    draw_reliability,
    explain_calibration,
)
from scalelatent.report.interpretation import explain_error_gap, usage_snippet
from scalelatent.report.page import Picture, Section, count, duration
from scalelatent.report.pictures import image_shape
from scalelatent.report.runfiles import RunFiles
from scalelatent.report.style import percent

from .model.components import DENSITY_LIKELIHOODS
from .model.density import main_directions
from .model.recognition import N_CANDIDATES, errors_at_rejects
from .output import density_likelihood
from .report_data import ClassReportData, DensityReportData, collect_classes, collect_density, list_phases
from .report_figures import (
    plot_deviations,
    plot_image_rows,
    plot_means,
    plot_passes,
    plot_reconstructions,
    plot_rows,
)

if TYPE_CHECKING:
    from .estimator import LinearMixture, LinearMixtureClassifier
    from .settings import AnyMixture

# Largest number of means in a line of a figure.
MOST_ACROSS = 20
# Largest number of classes in a figure.
MOST_CLASSES = 26
# Largest number of components in a figure.
MOST_COMPONENTS = 10
# Largest number of directions of a component in a figure.
MOST_DIRECTIONS = 4
# Number of rows in the figure of rows drawn from a density.
N_SAMPLES = 40
# Names of the phases of a fit on the page, by their names in ``history_``.
PHASES = {
    "k-means": "k-means",
    "settle": "bases by the error",
    "em": "EM",
    "finish": "final bases",
    "steps": "steps after batches",
}
# Names of the scores of a row on the page, by the values of the parameter ``likelihood``.
LIKELIHOODS = {
    "error": "reconstruction error",
    "code-cost": "reconstruction error and cost of the code",
    "ppca": "probabilistic PCA",
    "factor-analysis": "factor analysis",
}


def section(
    model: LinearMixtureClassifier,
    data: Dataset | None,
    run: RunFiles,
    rows: str,
    progress: Callable[[int, int], None] | None,
) -> Section:
    """Return the section of a classifier's report: numbers, explanations and figures."""
    collect, shape = partial(collect_classes, model, progress=progress), _image_shape(model, data)
    collected = run.collect(data, "figures of rows and errors are missing", collect)
    head, table = _list_class_numbers(collected, rows)
    more_head, more = _list_numbers(run, model)
    names = [str(c) for c in model.classes_.tolist()]
    pictures = [_draw_means(model, names, shape), *_draw_deviations(model, names, shape)]
    explained = []
    if differ := explain_error_gap(run, model.n_iter_):
        explained.append(("Validation and test error", differ))
    if collected is not None:
        pictures.append(_draw_reconstructions(model, collected, rows, shape))
        if collected.confusion is not None and collected.reliability is not None:
            pictures.append(draw_confusion(collected.confusion, names, rows))
            if (mistakes := draw_mistakes(collected.mistakes, names, shape or (), rows)) is not None:
                pictures.append(mistakes)
            pictures.append(draw_reliability(collected.reliability, rows))
            explained.append(("Calibration error", explain_calibration(collected.reliability)))
        else:
            run.notes.append(f"The {rows} rows have no labels, so there is no error.")
    pictures += _draw_passes(run, model)
    subtitle = f"Mixtures of linear models, {count(len(names), 'class', 'classes')}, {_describe_sizes(model)}"
    return Section(subtitle, head + more_head, table + more, pictures, explained, usage_snippet(run, model))


def density_section(
    model: LinearMixture,
    data: Dataset | None,
    run: RunFiles,
    rows: str,
    progress: Callable[[int, int], None] | None,
) -> Section:
    """Return the section of a density's report: numbers, explanations and figures."""
    shape = _image_shape(model, data)
    collect = partial(collect_density, model, progress=progress)
    collected = run.collect(data, "figures of rows are missing", collect)
    head, table = _list_numbers(run, model)
    if collected is not None:
        mean = f"{collected.log_likelihood:,.2f}"
        each = collected.log_likelihood / max(len(collected.examples[0]), 1)
        head.insert(0, (f"{rows} log-likelihood, nats per row", mean))
        table[:0] = [
            (f"{rows} rows", f"{collected.n_rows:,}"),
            (f"{rows} log-likelihood", f"{mean} nats per row ({each:.3f} per feature)"),
        ]
    scored = run.event("scored")
    found = {
        key: scored.get(f"test_{key}") for key in ("nmi", "accuracy", "purity") if f"test_{key}" in scored
    }
    if found:
        values = ", ".join(f"{name} {value:.3f}" for name, value in found.items() if value is not None)
        table.append(("components compared with the classes of the test rows", values))
    pictures = [
        _draw_samples(model, shape),
        _draw_means(model, None, shape),
        *_draw_deviations(model, None, shape),
    ]
    if collected is not None:
        pictures += _draw_density(model, collected, rows, shape)
    pictures += _draw_passes(run, model)
    subtitle = f"Density: mixture of linear models, {_describe_sizes(model)}"
    snippet = usage_snippet(run, model, verb="predict", gives="components")
    return Section(subtitle, head, table, pictures, _explain_density(model), snippet)


def _explain_density(model: LinearMixture) -> list[tuple[str, str]]:
    words = (
        "The mean logarithm of the density at a row, in nats: a higher value is better. It depends on the "
        "scale of the features, so it compares models of the same rows only."
    )
    if model.basis_ is not None:
        words += " The rows are smoothed first."
    if model.likelihood_ not in DENSITY_LIKELIHOODS:
        words += (
            " This model was fitted by its reconstruction error; its density is that of probabilistic PCA in "
            "the fitted bases."
        )
    return [("Log-likelihood", words)]


# -- numbers -----------------------------------------------------------------------------------------------


def _describe_sizes(model: AnyMixture) -> str:
    k = len(model.means_)
    return f"{count(k, 'component', 'components')} of {count(model.n_dims_, 'dimension')}"


def _list_class_numbers(
    collected: ClassReportData | None, rows: str
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    if collected is None:
        return [], []
    head: list[tuple[str, str]] = []
    table = [(f"{rows} rows", f"{collected.n_rows:,}")]
    if collected.confusion is not None and collected.reliability is not None:
        head.append((f"{rows} error", percent(collected.confusion.error)))
        table.append((f"{rows} error", describe_confusion(collected.confusion)))
        found = errors_at_rejects(np.concatenate(collected.certainties), np.concatenate(collected.are_wrong))
        errors = ", ".join(f"{percent(error)} at {share}" for share, error in found.items() if share != "0%")
        table.append((f"{rows} error with rejects", errors))
        table.append((f"{rows} log-loss", f"{collected.reliability.log_loss:.4f} nats per row"))
        table.append(("calibration error", percent(collected.reliability.calibration_error)))
    return head, table


def _list_numbers(run: RunFiles, model: AnyMixture) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    fitted, history = model._fitted, run.history
    head = [("passes", f"{model.n_iter_:,}")]
    table = [("passes", f"{model.n_iter_:,}"), ("score of a row", LIKELIHOODS[model.likelihood_])]
    if model.tangents:
        table.append(("tangents", ", ".join(model.tangents)))
    if model.recognition == "tangent-distance":
        table.append(("recognition", f"tangent distance of the best {N_CANDIDATES}"))
    counts = fitted.counts
    table.append(("components", f"{len(counts):,}"))
    table.append(("rows of a component", f"{counts.min():,.0f} to {counts.max():,.0f}"))
    if history:
        last = history[-1]
        for key, text in ("refilled", "components refilled"), ("dropped", "components dropped"):
            if last.get(key):
                table.append((text, f"{last[key]:,}"))
    seconds = sum(record.get("seconds") or 0.0 for record in history)
    trained = sum(record.get("rows") or 0 for record in history)
    if seconds > 0:
        head += [("time in passes", duration(seconds)), ("rows per second", f"{trained / seconds:,.0f}")]
        table.append(
            ("time in passes", f"{seconds:,.2f} s ({1e3 * seconds / len(history):,.2f} ms per pass)")
        )
        table.append(("rows per second", f"{trained / seconds:,.0f}"))
    if run.event("fit_started").get("rows"):
        table.append(("training rows", f"{run.event('fit_started')['rows']:,}"))
    table.append(("features of a row", f"{model.n_features_in_:,}"))
    table.append(("learned numbers", f"{model.means_.size + model.bases_.size:,}"))
    table.append(("seed", str(model.seed_)))
    return head, table


# -- pictures of the model ---------------------------------------------------------------------------------


def _image_shape(model: AnyMixture, data: Dataset | None) -> tuple[int, ...] | None:
    """Return the shape of the images as which rows are drawn, or None if rows are no images."""
    if model.image_shape is not None:
        return tuple(int(n) for n in model.image_shape)
    return image_shape((model.n_features_in_,) if data is None else data.feature_shape)


def _group_components(model: AnyMixture, names: list[str] | None) -> list[np.ndarray]:
    """Return the components of each class, or those of a density in equal parts, by decreasing row count."""
    counts, classes = model._fitted.counts, model.component_classes_
    if names is not None:
        own = [np.flatnonzero(classes == c) for c in range(min(len(names), MOST_CLASSES))]
        return [q[np.argsort(-counts[q], kind="stable")][:MOST_ACROSS] for q in own]
    order = np.argsort(-counts, kind="stable")[: MOST_ACROSS * MOST_CLASSES]
    across = min(MOST_ACROSS, max(10, round(len(order) ** 0.5)))
    return [order[a : a + across] for a in range(0, len(order), across)]


def _draw_means(model: AnyMixture, names: list[str] | None, shape: tuple[int, ...] | None) -> Picture:
    groups, means = _group_components(model, names), model.means_
    across = max(map(len, groups))
    tiles = np.full((len(groups), across, means.shape[1]), np.nan)
    rows = np.full((len(groups), across), -1.0)
    for i, own in enumerate(groups):
        tiles[i, : len(own)], rows[i, : len(own)] = means[own], model._fitted.counts[own]
    of = "of each class, one line per class" if names is not None else "of all components"
    shown, k = sum(map(len, groups)), len(means)
    words = (
        f"The means {of}, with the largest component first. The number below is that of its training rows."
    )
    if shown < k:
        words += f" {shown} of {k} are shown."
    if shape is None:
        words = f"The means {of}: features from left to right, the largest component first."
    alt = f"{count(shown, 'mean')} as {'images' if shape else 'lines'}."
    figure = plot_means(tiles, rows, [] if names is None else names[: len(groups)], shape)
    return Picture("means", "Means of all components", words, alt, figure, wide=across > 10)


def _select_largest(model: AnyMixture, names: list[str] | None) -> tuple[np.ndarray, list[str]]:
    """Return the largest component of each class, or the largest components, and their names."""
    groups = _group_components(model, names)
    if names is None:
        own = np.concatenate(groups)[:MOST_COMPONENTS]
        return own, [str(i + 1) for i in range(len(own))]
    return np.array([q[0] for q in groups if len(q)]), [
        name for name, q in zip(names, groups, strict=False) if len(q)
    ]


def _draw_deviations(
    model: AnyMixture, names: list[str] | None, shape: tuple[int, ...] | None
) -> list[Picture]:
    if not model.n_dims_:
        return []
    own, labels = _select_largest(model, names)
    fitted, shown = model._fitted, min(MOST_DIRECTIONS, model.n_dims_)
    tiles = []
    for q in own:
        mean = model.means_[q]
        lines = [mean]
        for way in main_directions(fitted.components, fitted.likelihood, int(q))[:shown]:
            lines += [mean - 2 * way, mean + 2 * way]
        tiles.append(np.stack(lines))
    of = "class" if names is not None else "component"
    largest = "the largest component of each class" if names is not None else "the largest components"
    words = (
        f"The mean of {largest}, and the mean minus and plus two standard deviations along its "
        f"{count(shown, 'widest direction')}. Such changes keep an image in its {of}."
    )
    alt = f"One line per {of}: its mean, then {count(shown, 'pair')} of images on both sides of it."
    figure = plot_deviations(np.stack(tiles), labels, shape)
    return [Picture("directions", "Along the first directions", words, alt, figure, wide=True)]


def _draw_passes(run: RunFiles, model: AnyMixture) -> list[Picture]:
    records = [record for record in run.history if record.get("objective") is not None]
    if not records:
        return []
    phases = [(a, b, PHASES.get(name, name), nats) for a, b, name, nats in list_phases(model, records)]
    words = ["Mean error of a row in each pass; colours mark the phases of the fit."]
    if any(nats for *_, nats in phases):
        words = [
            "Mean log-likelihood of a row in the phases by density, and mean error in the phases before."
        ]
    if any(name == PHASES["finish"] for _, _, name, _ in phases):
        words.append("The final passes keep the assignments, so their error is that of the last EM pass.")
    last = records[-1]
    if last.get("refilled") or last.get("dropped"):
        words.append(
            f"{count(last.get('refilled', 0), 'component', 'components')} that starved "
            f"were refilled, {last.get('dropped', 0)} dropped."
        )
    alt = f"A curve over {count(len(records), 'pass', 'passes')} in {count(len(phases), 'phase')}."
    name = "Log-likelihood against passes" if phases[-1][3] else "Error against passes"
    return [Picture("passes", name, " ".join(words), alt, plot_passes(records, phases))]


# -- pictures of rows --------------------------------------------------------------------------------------


def _draw_reconstructions(
    model: LinearMixtureClassifier, collected: ClassReportData, rows: str, shape: tuple[int, ...] | None
) -> Picture:
    n = min(len(collected.examples), MOST_CLASSES)
    names = collected.names[:MOST_CLASSES]
    figure = plot_reconstructions(
        collected.examples[:n],
        collected.reconstructed[:n, : len(names)],
        collected.scores[:n, : len(names)],
        [collected.names[c] for c in collected.codes[:n]],
        names,
        shape,
    )
    words = (
        f"One of the {rows} rows of each class, and its reconstruction by the best component of each "
        "class. The score is below; a smaller score is better, and the best one has a frame."
    )
    if model.basis_ is not None:
        words += " The rows are smoothed first."
    right = int((collected.scores[:n].argmin(axis=1) == collected.codes[:n]).sum())
    reconstructions = count(len(names), "reconstruction")
    alt = f"{count(n, 'row')} with {reconstructions} each; {right} are classified correctly."
    return Picture("reconstructions", "Rows by the models of each class", words, alt, figure, wide=True)


def _draw_samples(model: LinearMixture, shape: tuple[int, ...] | None) -> Picture:
    drawn, _ = model.sample(N_SAMPLES)
    tiles = drawn.reshape(-1, 10, drawn.shape[1])
    words = f"{N_SAMPLES} rows drawn from the density with its noise, in the grey scale of the means."
    if density_likelihood(model.likelihood_) != model.likelihood_:
        words += " The density is that of probabilistic PCA in the fitted bases."
    alt = f"{N_SAMPLES} drawn {'images' if shape else 'rows'}."
    return Picture("samples", "Samples", words, alt, plot_rows(tiles, shape, like=model.means_))


def _draw_density(
    model: LinearMixture, collected: DensityReportData, rows: str, shape: tuple[int, ...] | None
) -> list[Picture]:
    x = collected.examples
    words = f"Some of the {rows} rows, and their reconstructions by their best components."
    alt = f"{count(len(x), 'row')} above their reconstructions."
    figure = plot_image_rows([("row", x), ("model", collected.reconstructed)], shape)
    found = [Picture("reconstructions", "Rows and reconstructions", words, alt, figure, wide=True)]
    n = len(collected.least_likely) // 10 * 10 or len(collected.least_likely)
    tiles = collected.least_likely[:n].reshape(-1, min(n, 10), x.shape[1])
    logs = [f"{value:,.0f}" for value in collected.least_log_likelihoods[:n]]
    numbers = ", ".join(str(row) for row in collected.least_row_indices[:n])
    words = (
        f"The {rows} rows with the lowest log-likelihood (below each), which may be outliers: rows {numbers}."
    )
    alt = f"{count(n, 'row')} with log-likelihoods from {logs[0]} to {logs[-1]}."
    found.append(Picture("unlikely", "Least likely rows", words, alt, plot_rows(tiles, shape, logs)))
    return found
