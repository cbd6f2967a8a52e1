"""Section of a report about a bootstrap network: numbers, explanations and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.mapwrite import map_to_array
from scalelatent.evaluation import RetrievalCurve, retrieval_accuracy
from scalelatent.evaluation.output_scores import read_spaced, score_clusters
from scalelatent.models.mbn.model.network import Network
from scalelatent.models.mbn.model.pca import compute_coordinates
from scalelatent.report.interpretation import usage_snippet, wilson_interval
from scalelatent.report.page import Picture, Section, count, join_words
from scalelatent.report.runfiles import RunFiles, check_features
from scalelatent.report.style import percent

from .report_figures import LEGEND_CLASSES, plot_layers, plot_output, plot_retrieval

if TYPE_CHECKING:
    from .estimator import MultilayerBootstrapNetwork

# Largest number of rows in the figures.
SAMPLE_ROWS = 2000


def section(
    model: MultilayerBootstrapNetwork,
    data: Dataset | None,
    run: RunFiles,
    rows: str,
    progress: Callable[[int, int], None] | None,
) -> Section:
    """Return the section of the report about a network; ``rows`` is the name of ``data``, such as "test"."""
    # Drop the note that metrics.jsonl is missing: a fit of at most 1,024 rows does not write this file.
    run.notes = [note for note in run.notes if not note.startswith("metrics.jsonl")]
    scores = _find_recorded_scores(run) if rows == "test" else None
    collect = partial(collect_evidence, model, scores=scores, progress=progress)
    evidence = run.collect(data, "the figures are left out", collect)
    head, table = list_numbers(run, model, evidence, rows)
    pictures = [] if evidence is None else make_pictures(evidence, rows)
    if evidence is not None and evidence.clusters is None:
        run.notes.append(f"The {rows} rows have no classes, so the page does not score clusters.")
    snippet = usage_snippet(run, model, verb="transform", gives="components")
    return Section(describe_model(model), head, table, pictures, explain_numbers(evidence), snippet)


def _find_recorded_scores(run: RunFiles) -> dict[str, float] | None:
    """Return the scores of clusters of the test rows that the job recorded, or None if some are missing."""
    recorded = {key.removeprefix("test_"): value for key, value in run.event("scored").items()}
    of_each = [f"{name}{part}" for name in ("nmi", "accuracy") for part in ("", "_mean", "_spread")]
    needed = [*of_each, "restarts", "clustered_rows"]
    return {key: recorded[key] for key in needed} if all(key in recorded for key in needed) else None


@dataclass(frozen=True)
class NetworkEvidence:
    """Data of the figures and numbers of a report, for n sampled rows of a dataset."""

    n_rows: int  # number of rows of the whole dataset
    output: np.ndarray  # float32 (n, components): output; two principal components if the output is codes
    layers: list[np.ndarray]  # float64 (n, 2): first two principal components of the output of each layer
    ks: list[int]  # number of centroids per clustering of each layer
    codes: np.ndarray | None  # class number of each row; None without labels, or with several labels per row
    class_names: list[str]
    clusters: Mapping[str, float] | None  # scores of clusters; None without labels, and for output="codes"
    retrieval: RetrievalCurve | None  # share of similar rows with the same label; None without labels
    ranked_by: str = "cosine"  # similarity of two rows for retrieval; "overlap" is the number of equal codes


def collect_evidence(
    model: MultilayerBootstrapNetwork,
    data: Dataset,
    *,
    sample_rows: int = SAMPLE_ROWS,
    scores: Mapping[str, float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> NetworkEvidence:
    """Compute the outputs of all layers for evenly spaced rows; score the clusters without ``scores``."""
    check_features(data, model)
    rows, labels = read_spaced(data, sample_rows)
    layer_points, codes, kernel = [], Dataset.from_arrays(rows), make_backend("cpu").kernel
    for number, (layer, centroids) in enumerate(zip(model._layers, model._centroids, strict=True), 1):
        found = map_to_array(Network((layer,), (centroids,)), codes, model.device, model.n_jobs)
        layer_points.append(compute_coordinates(found, 2, kernel))
        codes = Dataset.from_arrays(found)
        if progress is not None:
            progress(len(found) * number // len(model._layers), len(found))
    projection, metric = model._row_map("output").projection, "cosine"
    if projection is None:
        output, ranked, metric = layer_points[-1].astype(np.float32), found, "overlap"
    else:
        output = ranked = map_to_array(projection, codes, model.device, model.n_jobs)
    classes, names, clusters, curve = None, [], None, None
    if labels is not None and data.y_kind == "labels":
        values, classes = np.unique(labels, return_inverse=True)
        names = [str(value) for value in values.tolist()]
        if len(values) <= len(output) and projection is not None:
            clusters = scores or score_clusters(model, data)
    if labels is not None and data.y_kind != "targets" and len(output) > 1:
        curve = retrieval_accuracy(ranked, labels, metric=metric, n_jobs=model.n_jobs)
    ks = [int(k) for k in model.ks_]
    return NetworkEvidence(data.n_rows, output, layer_points, ks, classes, names, clusters, curve, metric)


def describe_model(model: MultilayerBootstrapNetwork) -> str:
    """Return a title with the numbers of layers, of clusterings, and of centroids in each layer."""
    ks = " → ".join(f"{k:,}" for k in model.ks_)
    return (
        f"Multilayer bootstrap network, {count(len(model.ks_), 'layer')} of "
        f"{count(model.n_clusterings, 'clustering')}, k = {ks}"
    )


def list_numbers(
    run: RunFiles, model: MultilayerBootstrapNetwork, evidence: NetworkEvidence | None, rows: str
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (label, value) of the numbers at the top of the page, and of those in its table."""
    head: list[tuple[str, str]] = []
    table: list[tuple[str, str]] = []
    if evidence is not None:
        table.append((f"{rows} rows", f"{evidence.n_rows:,}"))
        shown = len(evidence.output)
        table.append(("rows in the figures", _format_row_count(shown, evidence)))
        if (scores := evidence.clusters) is not None:
            head += [("NMI", percent(scores["nmi"])), ("clustering accuracy", percent(scores["accuracy"]))]
            for name, label in (("nmi", "NMI"), ("accuracy", "clustering accuracy")):
                value = f"{percent(scores[name])} for the clusters of smallest inertia"
                spread = f"{percent(scores[f'{name}_mean'])} ± {percent(scores[f'{name}_spread'])}"
                table.append((label, f"{value}; mean of {int(scores['restarts'])} restarts {spread}"))
            low, high = wilson_interval(scores["accuracy"], scores["clustered_rows"])
            table.append(("clustering accuracy, 95 % interval", f"{100 * low:.2f} to {100 * high:.2f} %"))
            table.append(
                ("rows that k-means clustered", _format_row_count(int(scores["clustered_rows"]), evidence))
            )
        if (curve := evidence.retrieval) is not None:
            at = [f"{percent(a)} at {k:,}" for k, a in zip(curve.levels, curve.accuracy, strict=True)]
            table.append(("retrieval accuracy", join_words(at[:4])))
    head.append(("layers", str(len(model.ks_))))
    table.append(("centroids of each layer", ", ".join(f"{k:,}" for k in model.ks_)))
    table.append(("clusterings of a layer", f"{model.n_clusterings:,}"))
    table.append(("share of the columns that a clustering uses", f"{model.feature_fraction:g}"))
    decay = getattr(model, "decay_", model.decay)
    chosen = " (chosen without labels)" if model.decay == "auto" else ""
    table.append(("decay", f"{decay:g}{chosen}"))
    ratio = getattr(model, "explained_variance_ratio_", None)
    if ratio is not None:
        table.append((f"variance in {count(len(ratio), 'component')}", percent(float(ratio.sum()))))
    if run.event("fit_started").get("rows"):
        table.append(("training rows", f"{run.event('fit_started')['rows']:,}"))
    table.append(("features of a row", f"{model.n_features_in_:,}"))
    table.append(("seed", str(model.seed_)))
    return head, table


def explain_numbers(evidence: NetworkEvidence | None) -> list[tuple[str, str]]:
    """Return (heading, text) of each explanation of a number on the page."""
    found = []
    if evidence is not None and evidence.clusters is not None:
        restarts = int(evidence.clusters["restarts"])
        text = (
            f"k-means clusters the network's components {restarts} times, from different starts, into as "
            "many clusters as there are classes. The scores are those of the clustering with the smallest "
            "inertia. NMI (normalized mutual information) is 0 % if the clusters are independent of the "
            "classes, and 100 % if both are equal. Clustering accuracy is the share of rows whose cluster is "
            "paired with their class, under the best one-to-one pairing. The network has not seen the "
            "classes. `scalelatent score` computes the same numbers."
        )
        if int(evidence.clusters["clustered_rows"]) < evidence.n_rows:
            text += " The scores are from evenly spaced rows, because k-means on all rows would take minutes."
        found.append(("NMI and clustering accuracy", text))
        interval = (
            "These rows are a sample. The interval contains the accuracy of these clusters on all rows of "
            "the same kind in 95 of 100 cases. It does not include the effect of another start of k-means, "
            "which the spread over the restarts shows."
        )
        found.append(("95 % interval", interval))
    return found


def _format_row_count(rows: int, evidence: NetworkEvidence) -> str:
    return f"{rows:,}, evenly spaced" if rows < evidence.n_rows else f"all {rows:,}"


def make_pictures(evidence: NetworkEvidence, rows: str) -> list[Picture]:
    """Return all figures in the order in which the page shows them."""
    found = [_make_output_picture(evidence, rows), _make_layers_picture(evidence, rows)]
    if evidence.retrieval is not None:
        found.append(_make_retrieval_picture(evidence, evidence.retrieval, rows))
    return found


def _describe_rows(evidence: NetworkEvidence, rows: str) -> str:
    n = len(evidence.output)
    if n == evidence.n_rows:
        return f"all {n:,} {rows} rows"
    return f"{n:,} evenly spaced of {evidence.n_rows:,} {rows} rows"


def _explain_colours(evidence: NetworkEvidence) -> str:
    if evidence.codes is None:
        return "The rows have no classes, so all points have one colour."
    if len(evidence.class_names) > LEGEND_CLASSES:
        return f"Colours and markers are the {len(evidence.class_names)} classes, ten colours by marker."
    return "Colours are classes, which the network has not seen."


def _make_output_picture(evidence: NetworkEvidence, rows: str) -> Picture:
    what = "output" if evidence.ranked_by == "cosine" else "codes"
    words = (
        f"The first two components of the {what} of {_describe_rows(evidence, rows)} (Figures 8 and 9 of the "
        f"paper). {_explain_colours(evidence)}"
    )
    alt = f"A scatter of {len(evidence.output):,} points"
    if evidence.clusters is not None:
        alt += (
            f" in {count(len(evidence.class_names), 'class', 'classes')}; k-means on all components reaches "
            f"an accuracy of {percent(evidence.clusters['accuracy'])}"
        )
    figure = plot_output(evidence.output, evidence.codes, evidence.class_names)
    return Picture("output", "Output", words, alt + ".", figure)


def _make_layers_picture(evidence: NetworkEvidence, rows: str) -> Picture:
    titles = [f"layer {i}: k = {k:,}" for i, k in enumerate(evidence.ks, 1)]
    words = (
        f"{_describe_rows(evidence, rows).capitalize()} at each layer: the first two principal components of "
        "these rows' codes (Figure 16 of the paper). From layer to layer small variations within a group are "
        "dropped, until k is near the number of classes."
    )
    of = f"from k = {evidence.ks[0]:,} to {evidence.ks[-1]:,}"
    alt = f"{count(len(titles), 'scatter plot')} of the same points, {of}."
    figure = plot_layers(evidence.layers, titles, evidence.codes, evidence.class_names)
    return Picture("layers", "Output of each layer", words, alt, figure, wide=True)


def _make_retrieval_picture(evidence: NetworkEvidence, curve: RetrievalCurve, rows: str) -> Picture:
    by_cosine = evidence.ranked_by == "cosine"
    which = _describe_rows(evidence, rows).replace("all ", "the ", 1)
    nearest = "by the cosine of the output" if by_cosine else "by the number of codes that two rows share"
    words = (
        f"For each of {which}, the other rows are sorted {nearest}, the nearest first. The curve shows the "
        "mean share of rows with the same class or a common topic among the first ones (section 5.5 of the "
        "paper). A row without topics always counts as wrong."
    )
    alt = (
        f"A falling curve from {percent(float(curve.accuracy[0]))} of the first to "
        f"{percent(float(curve.accuracy[-1]))} of the first {int(curve.levels[-1]):,}."
    )
    curves = {"output": (curve.levels.tolist(), curve.accuracy.tolist())}
    return Picture("retrieval", "Retrieval accuracy", words, alt, plot_retrieval(curves))
