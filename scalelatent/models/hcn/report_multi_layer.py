"""Section of a report on a network of several layers: features, templates, samples, completed images."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from scalelatent.data import Dataset
from scalelatent.data.feature_names import without_names
from scalelatent.report.interpretation import usage_snippet
from scalelatent.report.page import Picture, Section, count
from scalelatent.report.runfiles import RunFiles
from scalelatent.report.style import percent

from .report_figures import MAX_CLASSES, make_direction_colors, plot_edges, plot_samples, plot_templates
from .report_shared import (
    N_COMPLETED,
    FilledImages,
    count_shown_images,
    make_completion_picture,
    make_features_picture,
    make_learning_pictures,
    make_mask,
    read_spaced_rows,
)

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork

# Number of random images per class that the report draws from the model.
SAMPLES_PER_CLASS = 6
# Texts that explain numbers of the report, each as (name of the number, text).
EXPLANATIONS = [
    (
        "Templates",
        "An image has one template. Each weight of the template puts a feature near a place; a pool shifts "
        "the feature by up to half the side of the pool. Further pools shift the pixels of the feature. "
        "Without labels, templates are numbered clusters.",
    )
]


def make_layers_section(
    model: HierarchicalCompositionalNetwork, data: Dataset | None, run: RunFiles, rows: str
) -> Section:
    """Return the section of a report about a network of several layers: numbers, figures, explanations.

    ``data`` are the images of the figures, or None, and ``rows`` names their data split, such as "test".
    """
    filled = edges = None
    if model.filters is None:
        fill = partial(complete_images, model)
        filled = run.collect(data, "the figure of completed images is missing", fill, "images")
    else:
        edges = run.collect(data, "the figure of edges is missing", partial(find_edges, model), "images")
    head, table = _collect_numbers(run, model, filled)
    subtitle = f"Hierarchical compositional network, {model._network.describe()}"
    snippet = usage_snippet(run, model, gives="the class of each image, or its cluster")
    pictures = _make_pictures(run, model, filled, edges, rows)
    return Section(subtitle, head, table, pictures, EXPLANATIONS, snippet)


def complete_images(model: HierarchicalCompositionalNetwork, data: Dataset) -> FilledImages:
    """Hide pixels of evenly spaced images of a dataset, and complete the images by the fitted network."""
    layer, (_, x) = model._network.layer, read_spaced_rows(model, data, N_COMPLETED)
    whole = layer.compute_evidence(x)
    hidden, given = make_mask(whole.shape, layer.window[0])
    made = model.inpaint(x, given)
    return FilledImages(whole > 0, given | (whole == 0), made > 0, hidden)


# Grey images, their edges, and the edges of their best templates (features of the top layer).
EdgeImages: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


def find_edges(model: HierarchicalCompositionalNetwork, data: Dataset) -> EdgeImages:
    """Return evenly spaced images of a dataset, their edges, and the edges of their best templates.

    The first image is not from the dataset, but a bright disc, which has edges of all directions and no
    template (feature of the top layer). The images are uint8 (n, height, width). Edges are bool (images,
    filters, height, width), True for the filter that is on at a pixel.
    """
    layer = model._network.layer
    assert layer.filters is not None
    size = layer.image[1:]
    _, x = read_spaced_rows(model, data, count_shown_images(layer.image) - 1)
    # The code below needs grey images (0 to 255). `reconstruct` raises an error for all other images.
    made = without_names(model).reconstruct(x) > 0
    y, z = np.indices(size) - (np.array(size)[:, None, None] - 1) / 2
    disc = 255 * (np.hypot(y, z) <= 0.35 * min(size))
    images = np.concatenate([disc[None], x.reshape(-1, *size)]).astype(np.uint8)
    return images, layer.filters.find_edges(images), made


def _collect_numbers(
    run: RunFiles, model: HierarchicalCompositionalNetwork, filled: FilledImages | None
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the numbers of the headline and the numbers of the table, both as (name, value)."""
    head = [("layers", str(len(model.weights_))), ("templates", str(len(model.template_classes_)))]
    table = [("records of passes", f"{model.n_iter_:,}"), ("seed", str(model.seed_))]
    for level, (weights, used) in enumerate(zip(model.weights_, model.used_, strict=True), 1):
        name = "templates" if level == len(model.weights_) else f"features of layer {level}"
        table.append((f"{name} with a weight", f"{int(used.sum())} of {len(used)}"))
        table.append(
            (f"weights on, of all {name}", f"{int(weights.sum()):,} ({percent(float(weights.mean()))})")
        )
    if (error := run.event("scored").get("test_error")) is not None:
        head.append(("test error", percent(error)))
    if filled is not None and filled.has_hidden_pixels:
        of = count(len(filled.images), "image")
        table.append((f"wrong among the hidden pixels of {of}", percent(filled.error_shares[0])))
    return head, table


def _make_pictures(
    run: RunFiles,
    model: HierarchicalCompositionalNetwork,
    filled: FilledImages | None,
    edges: EdgeImages | None,
    rows: str,
) -> list[Picture]:
    """Return all figures of the section, in the order of the page."""
    found = [] if edges is None else [_make_edges_picture(model, edges, rows)]
    are_edges = model.filters is not None
    for level, one in enumerate(zip(model.weights_[:-1], model.used_[:-1], strict=True), 1):
        found.append(make_features_picture(*one, layer=level, are_edges=are_edges and level == 1))
    found += [_make_templates_picture(model), _make_samples_picture(model)]
    if filled is not None and filled.has_hidden_pixels:
        found.append(make_completion_picture(filled, rows, "the best template of each image"))
    return found + make_learning_pictures(run)


def _make_edges_picture(model: HierarchicalCompositionalNetwork, edges: EdgeImages, rows: str) -> Picture:
    words = (
        f"Evenly spaced {rows} images; their edges, coloured by the strongest of {model.filters} directions; "
        "and the edges of the best template of each image. The bright disc is the key to the colours of "
        "edges, features and samples."
    )
    found, made = (percent(float(part.any(axis=1).mean())) for part in (edges[1][1:], edges[2]))
    alt = (
        f"{count(len(edges[2]), 'image')} in three rows; {found} of their pixels are on an edge, and "
        f"{made} of the pixels of the templates."
    )
    figure = plot_edges(*edges)
    return Picture("edges", "Edges of grey images", words, alt, figure, wide=True)


def _class_word(model: HierarchicalCompositionalNetwork) -> str:
    """Return what a template (top feature) stands for: "class", or "cluster" if there are no labels."""
    return "cluster" if model._multi_layer("net").labels is None else "class"


def _make_templates_picture(model: HierarchicalCompositionalNetwork) -> Picture:
    weights, kind = model.weights_[-1], _class_word(model)
    figure, drawn = plot_templates(weights, [f"{kind} {label}" for label in model.template_classes_])
    words = (
        "Places of the features of the layer below (columns) in each template (rows), as in Figure 7 of the "
        "paper. Features have the colours of the figures above."
    )
    if drawn != weights.shape[:2]:
        most = f"{count(weights.shape[0], 'template')} and {count(weights.shape[1], 'feature')}"
        words += f" The figure shows those of {most} with the most weights."
    often = float(weights.any(axis=(2, 3)).sum(axis=1).mean())
    grid = f"{count(drawn[0], 'template')} by {count(drawn[1], 'feature')}"
    alt = f"{grid}; a template has {often:.1f} features on average."
    return Picture("templates", "Templates by features", words, alt, figure, wide=True)


def _make_samples_picture(model: HierarchicalCompositionalNetwork) -> Picture:
    classes, kind = model.classes_[:MAX_CLASSES], _class_word(model)
    n, y = len(classes), np.repeat(classes, SAMPLES_PER_CLASS)
    made = model.sample(len(y), y, noise=False, random_state=model.seed_) > 0
    words = f"Images of each {kind} (rows), drawn from the model without noise; pools shift their parts."
    if n < len(model.classes_):
        words += f" The figure shows the first {n} of {len(model.classes_)}."
    share = percent(float(made.mean()))
    alt = f"{SAMPLES_PER_CLASS} images per row, {count(n, 'row')}; {share} of the pixels are on."
    colors = None if model.filters is None else make_direction_colors(made.shape[1])
    names = [f"{kind} {label}" for label in classes]
    figure = plot_samples(made.reshape(n, SAMPLES_PER_CLASS, *made.shape[1:]), names, colors)
    return Picture("samples", "Samples", words, alt, figure, wide=True)
