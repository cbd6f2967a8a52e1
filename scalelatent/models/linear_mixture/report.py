"""What the report of a mixture shows: its pancakes, what they make of rows, mistakes, how it learned."""

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

from .kernels.reference import tangent_rows
from .model.density import main_directions
from .model.recognise import N_CANDIDATES, REJECTED, errors_at_rejects, reject_curve
from .output import DENSE, density_of
from .report_data import ClassEvidence, DensityEvidence, collect_classes, collect_density, phases_of
from .report_figures import (
    plot_deviations,
    plot_means,
    plot_passes,
    plot_reconstructions,
    plot_rejects,
    plot_rows,
    plot_spectra,
    plot_tangents,
    plot_under,
)

if TYPE_CHECKING:
    from .estimator import LinearMixture, LinearMixtureClassifier
    from .fit import AnyMixture

__all__ = ["density_section", "section"]

MOST_ACROSS, MOST_CLASSES, SHOWN, DIRECTIONS, SAMPLES = 20, 26, 10, 4, 40
PHASES = {
    "k-means": "k-means",
    "settle": "bases by the error",
    "em": "EM",
    "finish": "final bases",
    "steps": "steps after batches",
}
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
    """The part of a classifier's report; see `scalelatent.contract.kinds.Kind.report`."""
    collect, shape = partial(collect_classes, model, progress=progress), _image_shape(model, data)
    evidence = run.collect(data, "the figures of rows and errors are left out", collect)
    head, table = _class_numbers(evidence, rows)
    more_head, more = _numbers(run, model)
    names = [str(c) for c in model.classes_.tolist()]
    pictures = [_means(model, names, shape), *_deviations(model, names, shape)]
    explained = []
    if differ := explain_error_gap(run, model.n_iter_):
        explained.append(("Validation and test error", differ))
    if evidence is not None:
        pictures.append(_reconstructions(model, evidence, rows, shape))
        if evidence.confusion is not None and evidence.reliability is not None:
            pictures.append(draw_confusion(evidence.confusion, names, rows))
            pictures.append(_rejects(model, evidence, rows))
            if (mistakes := draw_mistakes(evidence.mistakes, names, shape or (), rows)) is not None:
                pictures.append(mistakes)
            pictures.append(draw_reliability(evidence.reliability, rows))
            explained.append(("Calibration error", explain_calibration(evidence.reliability)))
        else:
            run.notes.append(f"The {rows} rows have no labels: there is no error to tell.")
    pictures += _of_model(run, model, names, shape)
    subtitle = f"Mixtures of linear models, {count(len(names), 'class', 'classes')}, {_sizes(model)}"
    return Section(subtitle, head + more_head, table + more, pictures, explained, usage_snippet(run, model))


def density_section(
    model: LinearMixture,
    data: Dataset | None,
    run: RunFiles,
    rows: str,
    progress: Callable[[int, int], None] | None,
) -> Section:
    """The part of a density's report; see `scalelatent.contract.kinds.Kind.report`."""
    shape = _image_shape(model, data)
    collect = partial(collect_density, model, shape=shape, progress=progress)
    evidence = run.collect(data, "the figures of rows are left out", collect)
    head, table = _numbers(run, model)
    if evidence is not None:
        told = f"{evidence.log_likelihood:,.2f}"
        each = evidence.log_likelihood / max(len(evidence.examples[0]), 1)
        head.insert(0, (f"{rows} log-likelihood, nats a row", told))
        table[:0] = [
            (f"{rows} rows", f"{evidence.n_rows:,}"),
            (f"{rows} log-likelihood", f"{told} nats a row ({each:.3f} a feature)"),
        ]
    scored = run.event("scored")
    found = {
        key: scored.get(f"test_{key}") for key in ("nmi", "accuracy", "purity") if f"test_{key}" in scored
    }
    if found:
        told = ", ".join(f"{name} {value:.3f}" for name, value in found.items() if value is not None)
        table.append(("components held against the classes of the test rows", told))
    names = [f"{q}" for q in range(len(model.means_))]
    pictures = [_samples(model, shape), _means(model, None, shape), *_deviations(model, None, shape)]
    if evidence is not None:
        pictures += _density_pictures(model, evidence, rows, shape)
    pictures += _of_model(run, model, names, shape)
    subtitle = f"Density: mixture of linear models, {_sizes(model)}"
    snippet = usage_snippet(run, model, verb="predict", gives="components")
    return Section(subtitle, head, table, pictures, _density_words(model), snippet)


def _density_words(model: LinearMixture) -> list[tuple[str, str]]:
    words = (
        "The logarithm of the density at a row, in nats, on average: the higher, the better. It depends on "
        "the scale of the features: only models of the same rows can be compared by it."
    )
    if model.basis_ is not None:
        words += " It is that of the smoothed rows."
    if model.likelihood not in DENSE:
        words += (
            " This model was fitted by its reconstruction error; its density is that of probabilistic PCA "
            "in the bases found."
        )
    return [("Log-likelihood", words)]


# -- numbers -----------------------------------------------------------------------------------------------


def _sizes(model: AnyMixture) -> str:
    k = len(model.means_)
    return f"{count(k, 'sub-class', 'sub-classes')} of {count(model.n_dims_, 'dimension')}"


def _class_numbers(
    evidence: ClassEvidence | None, rows: str
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    if evidence is None:
        return [], []
    head: list[tuple[str, str]] = []
    table = [(f"{rows} rows", f"{evidence.n_rows:,}")]
    if evidence.confusion is not None and evidence.reliability is not None:
        head.append((f"{rows} error", percent(evidence.confusion.error)))
        table.append((f"{rows} error", describe_confusion(evidence.confusion)))
        found = errors_at_rejects(np.concatenate(evidence.certain), np.concatenate(evidence.wrong))
        told = ", ".join(f"{percent(error)} at {share}" for share, error in found.items() if share != "0%")
        table.append((f"{rows} error with rejects", told))
        table.append((f"{rows} log-loss", f"{evidence.reliability.log_loss:.4f} nats a row"))
        table.append(("calibration error", percent(evidence.reliability.calibration_error)))
    return head, table


def _numbers(run: RunFiles, model: AnyMixture) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    fitted, history = model._fitted, run.history
    head = [("passes", f"{model.n_iter_:,}")]
    table = [("passes", f"{model.n_iter_:,}"), ("score of a row", LIKELIHOODS[model.likelihood])]
    if model.tangents:
        table.append(("tangents", ", ".join(model.tangents)))
    if model.recognition == "tangent-distance":
        table.append(("recognition", f"tangent distance of the best {N_CANDIDATES}"))
    counts = fitted.counts
    table.append(("sub-classes", f"{len(counts):,}"))
    table.append(("rows of a sub-class", f"{counts.min():,.0f} to {counts.max():,.0f}"))
    if history:
        last = history[-1]
        for key, text in ("refilled", "sub-classes refilled"), ("dropped", "sub-classes dropped"):
            if last.get(key):
                table.append((text, f"{last[key]:,}"))
    seconds = sum(record.get("seconds") or 0.0 for record in history)
    trained = sum(record.get("rows") or 0 for record in history)
    if seconds > 0:
        head += [("time in passes", duration(seconds)), ("rows a second", f"{trained / seconds:,.0f}")]
        table.append(("time in passes", f"{seconds:,.2f} s ({1e3 * seconds / len(history):,.2f} ms a pass)"))
        table.append(("rows a second", f"{trained / seconds:,.0f}"))
    if run.event("fit_started").get("rows"):
        table.append(("training rows", f"{run.event('fit_started')['rows']:,}"))
    table.append(("features of a row", f"{model.n_features_in_:,}"))
    table.append(("learned numbers", f"{model.means_.size + model.bases_.size:,}"))
    table.append(("seed", str(model.seed_)))
    return head, table


# -- pictures of the model ---------------------------------------------------------------------------------


def _image_shape(model: AnyMixture, data: Dataset | None) -> tuple[int, ...] | None:
    """Shape in which rows are drawn."""
    if model.image_shape is not None:
        return tuple(int(n) for n in model.image_shape)
    return image_shape((model.n_features_in_,) if data is None else data.feature_shape)


def _groups(model: AnyMixture, names: list[str] | None) -> list[np.ndarray]:
    """Sub-classes of each class, those of most rows first; of a density in lines of so many."""
    counts, classes = model._fitted.counts, model.component_classes_
    if names is not None:
        own = [np.flatnonzero(classes == c) for c in range(min(len(names), MOST_CLASSES))]
        return [q[np.argsort(-counts[q], kind="stable")][:MOST_ACROSS] for q in own]
    order = np.argsort(-counts, kind="stable")[: MOST_ACROSS * MOST_CLASSES]
    across = min(MOST_ACROSS, max(10, round(len(order) ** 0.5)))
    return [order[a : a + across] for a in range(0, len(order), across)]


def _means(model: AnyMixture, names: list[str] | None, shape: tuple[int, ...] | None) -> Picture:
    groups, means = _groups(model, names), model.means_
    across = max(map(len, groups))
    tiles = np.full((len(groups), across, means.shape[1]), np.nan)
    rows = np.full((len(groups), across), -1.0)
    for i, own in enumerate(groups):
        tiles[i, : len(own)], rows[i, : len(own)] = means[own], model._fitted.counts[own]
    of = "of each class, a line for each" if names is not None else "of all components"
    shown, k = sum(map(len, groups)), len(means)
    words = f"The means {of}, those of most training rows first; under each its rows."
    if shown < k:
        words += f" The first {shown} of {k}."
    if shape is None:
        words = f"The means {of}: features across, those of most training rows first."
    alt = f"{count(shown, 'mean')} as {'images' if shape else 'lines'}."
    figure = plot_means(tiles, rows, [] if names is None else names[: len(groups)], shape)
    return Picture("means", "Means of all sub-classes", words, alt, figure, wide=across > 10)


def _largest(model: AnyMixture, names: list[str] | None) -> tuple[np.ndarray, list[str]]:
    """The largest sub-class of each class, or the largest components, and what they are called."""
    groups = _groups(model, names)
    if names is None:
        own = np.concatenate(groups)[:SHOWN]
        return own, [str(i + 1) for i in range(len(own))]
    return np.array([q[0] for q in groups if len(q)]), [
        name for name, q in zip(names, groups, strict=False) if len(q)
    ]


def _deviations(model: AnyMixture, names: list[str] | None, shape: tuple[int, ...] | None) -> list[Picture]:
    if not model.n_dims_:
        return []
    own, called = _largest(model, names)
    fitted, shown = model._fitted, min(DIRECTIONS, model.n_dims_)
    tiles = []
    for q in own:
        mean = model.means_[q]
        lines = [mean]
        for way in main_directions(fitted.pancakes, fitted.likelihood, int(q))[:shown]:
            lines += [mean - 2 * way, mean + 2 * way]
        tiles.append(np.stack(lines))
    of = "class" if names is not None else "component"
    largest = "the largest sub-class of each class" if names is not None else "the largest components"
    words = (
        f"The mean of {largest}, and the mean less and plus two standard deviations along its "
        f"{count(shown, 'widest direction')}: what may change in an image without leaving the {of}."
    )
    alt = f"A line for each {of}: its mean, then {count(shown, 'pair')} of images on both sides of it."
    figure = plot_deviations(np.stack(tiles), called, shape)
    return [Picture("directions", "Along the first directions", words, alt, figure, wide=True)]


def _of_model(
    run: RunFiles, model: AnyMixture, names: list[str], shape: tuple[int, ...] | None
) -> list[Picture]:
    """Tangents, spectra and the course of the fit."""
    classes = names if hasattr(model, "classes_") else None
    return [*_tangents(model, classes, shape), *_spectra(model), *_passes(run, model)]


def _tangents(model: AnyMixture, names: list[str] | None, shape: tuple[int, ...] | None) -> list[Picture]:
    if not model.tangents or shape is None or len(shape) != 2:
        return []
    own, called = _largest(model, names)
    means, flat = model.means_[own[:SHOWN]], (int(shape[0]), int(shape[1]))
    tangents = tangent_rows(means, flat, tuple(model.tangents), float(model.tangent_smoothing))
    words = (
        "What a small change of each kind adds to an image of the mean (red) and takes from it (blue), each "
        "drawn in its own scale."
    )
    alt = f"{count(len(means), 'mean')} with {count(len(model.tangents), 'tangent')} each."
    figure = plot_tangents(means, tangents, called, tuple(model.tangents), flat)
    return [Picture("tangents", "Tangents of a mean", words, alt, figure, wide=len(model.tangents) > 5)]


def _spectra(model: AnyMixture) -> list[Picture]:
    if not model.n_dims_:
        return []
    fitted = model._fitted
    ways = [
        (main_directions(fitted.pancakes, fitted.likelihood, q) ** 2).sum(axis=1)
        for q in range(len(model.means_))
    ]
    variances = np.maximum(np.array(ways), fitted.floor)
    noise = model.noise_.reshape(len(variances), -1).mean(axis=1)
    words = (
        "Variance of the rows along the directions of each sub-class (grey), their median and the middle "
        "80 % (blue), and in every direction that the model leaves out (dashed, median)."
    )
    first, last, rest = np.median(variances[:, 0]), np.median(variances[:, -1]), np.median(noise)
    alt = f"Curves that fall from {first:.3g} to {last:.3g}; {rest:.3g} in each other direction."
    return [Picture("spectra", "Variance along the directions", words, alt, plot_spectra(variances, noise))]


def _passes(run: RunFiles, model: AnyMixture) -> list[Picture]:
    records = [record for record in run.history if record.get("objective") is not None]
    if not records:
        return []
    phases = [(a, b, PHASES.get(name, name), nats) for a, b, name, nats in phases_of(model, records)]
    words = ["Mean error of a row in each pass, with the phases of the fit."]
    if any(nats for *_, nats in phases):
        words = ["Mean log-likelihood of a row where rows have a density, mean error before."]
    if any(name == PHASES["finish"] for _, _, name, _ in phases):
        words.append(
            "The final passes hold the assignments, so that their error is that of the last EM pass."
        )
    last = records[-1]
    if last.get("refilled") or last.get("dropped"):
        words.append(
            f"{count(last.get('refilled', 0), 'sub-class', 'sub-classes')} that starved "
            f"were refilled, {last.get('dropped', 0)} dropped."
        )
    alt = f"A curve over {count(len(records), 'pass', 'passes')} in {count(len(phases), 'phase')}."
    name = "Log-likelihood against passes" if phases[-1][3] else "Error against passes"
    return [Picture("passes", name, " ".join(words), alt, plot_passes(records, phases))]


# -- pictures of rows --------------------------------------------------------------------------------------


def _reconstructions(
    model: LinearMixtureClassifier, evidence: ClassEvidence, rows: str, shape: tuple[int, ...] | None
) -> Picture:
    n = min(len(evidence.examples), MOST_CLASSES)
    names = evidence.names[:MOST_CLASSES]
    figure = plot_reconstructions(
        evidence.examples[:n],
        evidence.made[:n, : len(names)],
        evidence.scores[:n, : len(names)],
        [evidence.names[c] for c in evidence.codes[:n]],
        names,
        shape,
    )
    words = (
        f"One of the {rows} rows of each class, and what the best sub-class of each class makes of it; under "
        "each its score, the smaller the better, the best one framed."
    )
    if model.basis_ is not None:
        words += " Reconstructions are of smoothed rows."
    right = int((evidence.scores[:n].argmin(axis=1) == evidence.codes[:n]).sum())
    alt = f"{count(n, 'row')} beside {count(len(names), 'reconstruction')} each; {right} are recognised."
    return Picture("reconstructions", "Rows by the models of each class", words, alt, figure, wide=True)


def _rejects(model: LinearMixtureClassifier, evidence: ClassEvidence, rows: str) -> Picture:
    wrong = np.concatenate(evidence.wrong)
    by = "best to second class" if model._fitted.likelihood not in DENSE else "second to best probability"
    certain = np.concatenate(evidence.certain)
    found = errors_at_rejects(certain, wrong)
    told = ", ".join(f"{percent(error)} at {share}" for share, error in found.items())
    words = (
        f"Error of the {rows} rows that remain when the least certain rows are rejected. The ratio of {by} "
        f"measures certainty. The error is {told} rejects."
    )
    alt = f"A falling curve; error at {', '.join(f'{share:.0%}' for share in REJECTED)} rejects: {told}."
    return Picture("rejects", "Error and rejects", words, alt, plot_rejects(*reject_curve(certain, wrong)))


def _samples(model: LinearMixture, shape: tuple[int, ...] | None) -> Picture:
    drawn, _ = model.sample(SAMPLES)
    tiles = drawn.reshape(-1, 10, drawn.shape[1])
    words = f"{SAMPLES} rows drawn from the density, noise included, in the tone of the means."
    if density_of(model.likelihood) != model.likelihood:
        words += " It is that of probabilistic PCA in the bases found."
    alt = f"{SAMPLES} made {'images' if shape else 'rows'}."
    return Picture("samples", "Samples", words, alt, plot_rows(tiles, shape, like=model.means_))


def _density_pictures(
    model: LinearMixture, evidence: DensityEvidence, rows: str, shape: tuple[int, ...] | None
) -> list[Picture]:
    x, hidden, found = evidence.examples, evidence.hidden, []
    if hidden.any():
        seen, part = np.where(hidden, np.nan, x), "upper half" if shape else "first half of features"
        lines = [("row", x), ("seen", seen), ("filled in", evidence.filled)]
        words = (
            f"Some of the {rows} rows, their {part}, and the rest filled in by its conditional mean given "
            "what is seen."
        )
        error = float(((evidence.filled - x)[:, hidden] ** 2).mean())
        alt = f"{count(len(x), 'row')} completed; mean squared error of what was hidden {error:.3g}."
        figure = plot_under(lines, shape)
        found.append(Picture("inpainting", "Hidden parts filled in", words, alt, figure, wide=True))
    words = f"Some of the {rows} rows, and how their best component reconstructs them."
    alt = f"{count(len(x), 'row')} above their reconstructions."
    figure = plot_under([("row", x), ("model", evidence.made)], shape)
    found.append(Picture("reconstructions", "Rows and reconstructions", words, alt, figure, wide=True))
    n = len(evidence.least) // 10 * 10 or len(evidence.least)
    tiles = evidence.least[:n].reshape(-1, min(n, 10), x.shape[1])
    told = [f"{value:,.0f}" for value in evidence.least_at[:n]]
    numbers = ", ".join(str(row) for row in evidence.least_rows[:n])
    words = f"The {rows} rows of the lowest log-likelihood (under each), worth a look: rows {numbers}."
    alt = f"{count(n, 'row')} with log-likelihoods from {told[0]} to {told[-1]}."
    found.append(Picture("unlikely", "Least likely rows", words, alt, plot_rows(tiles, shape, told)))
    return found
