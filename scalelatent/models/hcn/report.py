"""Section of a report on a network of one layer: images with their features, all features, learning curve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.threads import single_threaded
from scalelatent.models.hcn.model.compression import DescriptionLength, compression
from scalelatent.models.hcn.model.decode import reconstruct
from scalelatent.report.interpretation import usage_snippet
from scalelatent.report.page import Picture, Section, count
from scalelatent.report.runfiles import RunFiles
from scalelatent.report.style import percent

from .parameters import has_templates, is_online
from .report_figures import plot_parts
from .report_multi_layer import make_layers_section
from .report_shared import (
    N_COMPLETED,
    FilledImages,
    count_shown_images,
    count_warmup_images,
    make_completion_picture,
    make_features_picture,
    make_learning_pictures,
    make_mask,
    read_last_restart,
    read_spaced_rows,
)

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork

# A report decodes images (infers the positions of their features) with about this number of updates, which
# take a few seconds on one core. An update computes the belief-propagation messages of one pair (feature
# position, weight).
MAX_PAIR_UPDATES = 4e9
# Smallest and largest number of images that a report decodes (infers the positions of their features).
MIN_DECODED, MAX_DECODED = 20, 1000
# Texts that explain numbers of the report, each as (name of the number, text).
EXPLANATIONS = [
    (
        "Bits sent",
        "Bits of a description of the images by features, over the bits of their pixels. The description "
        "holds the features (once for all images), their places, and the pixels that differ from the "
        "reconstruction. Each part counts N times the entropy of its share of ones. 100 % means that no "
        "features were found. Noise cannot be compressed, so even the true features need some bits.",
    ),
    (
        "Features used",
        "A feature is used if it saves more bits than it costs. Unused features have no places. Give more "
        "features than you expect: unused features cost nothing.",
    ),
]


def section(
    model: HierarchicalCompositionalNetwork,
    data: Dataset | None,
    run: RunFiles,
    rows: str,
    progress: Callable[[int, int], None] | None,
) -> Section:
    """Return the section of a report about a network: numbers, figures, explanations.

    ``data`` are the images of the figures, or None, and ``rows`` names their data split, such as "test". For
    a network of one layer, ``progress`` is called with the numbers of finished images and of all images.
    """
    if has_templates(model):
        return make_layers_section(model, data, run, rows)
    collect = partial(collect_parts, model, progress=progress)
    evidence = run.collect(data, "the figure of images and their features is missing", collect, "images")
    head, table = collect_part_numbers(run, model, evidence, rows)
    snippet = usage_snippet(run, model, verb="transform", gives="places of the features, uint8")
    pictures = _make_pictures(run, model, evidence, rows)
    return Section(_make_subtitle(model), head, table, pictures, EXPLANATIONS, snippet)


@dataclass(frozen=True)
class PartsEvidence:
    """Images of a dataset and the features that the model finds in them, for the numbers and figures.

    Attributes
    ----------
    n_rows : int
        Number of rows of the dataset.
    stats : Stats
        Counts of pixels and features in a sample of the images, from which compression is computed.
    images, made, unknown : ndarray of bool, shape (n, channels, height, width)
        True for pixels of 1, for reconstructed pixels of 1, and for unknown pixels of n images.
    places : ndarray of uint8, shape (n, HS, WS, F)
        1 if one of the F features is at one of HS x WS positions of these images, else 0.
    filled : FilledImages
        Images with hidden pixels, and their completions.
    """

    n_rows: int
    stats: Stats
    images: np.ndarray
    made: np.ndarray
    unknown: np.ndarray
    places: np.ndarray
    filled: FilledImages

    @property
    def sampled(self) -> int:
        return int(self.stats["rows"])


def collect_parts(
    model: HierarchicalCompositionalNetwork,
    data: Dataset,
    *,
    sample_rows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PartsEvidence:
    """Infer the features of evenly spaced images of a dataset; return the data of the report.

    ``sample_rows`` is the number of images, by default as many as take a few seconds. ``progress`` is called
    with the numbers of finished images and of all images.
    """
    decoder, backend = model._decoder(), make_backend(model.device)
    layer, length = decoder.layer, DescriptionLength(decoder)
    if sample_rows is None:
        sample_rows = int(np.clip(MAX_PAIR_UPDATES / (10 * layer.pairs), MIN_DECODED, MAX_DECODED))
    numbers, x = read_spaced_rows(model, data, sample_rows)
    stats = Stats.zeros(length.layout())
    with single_threaded():
        for a in range(0, len(x), decoder.block_rows):
            block = Block(x[a : a + decoder.block_rows], None, None, 0, numbers[a : a + decoder.block_rows])
            length.accumulate(length.prepare(None, backend), block, stats)
            if progress is not None:
                progress(min(a + len(block.x), len(x)), len(x))
        some = np.linspace(0, len(x) - 1, min(count_shown_images(layer.image), len(x))).astype(int)
        evidence = layer.compute_evidence(x[some])
        places = decoder.decode(evidence, numbers[some], backend)[0]
        half = np.linspace(0, len(x) - 1, min(N_COMPLETED, len(x))).astype(int)
        whole = layer.compute_evidence(x[half])
        hidden, given = make_mask(whole.shape, layer.window[0])
        made = reconstruct(decoder, np.where(given, whole, 0), numbers[half], backend, fills=True)
    return PartsEvidence(
        len(data),
        stats,
        evidence > 0,
        decoder.cover_counts(places, backend) > 0,
        evidence == 0,
        places,
        FilledImages(whole > 0, given | (whole == 0), made > 0, hidden),
    )


def _make_subtitle(model: HierarchicalCompositionalNetwork) -> str:
    """Return the subtitle of the section: sizes of features and images, and online or batch learning."""
    layer = model._network.layer
    channels = f", {count(layer.image[0], 'channel')}" if layer.image[0] > 1 else ""
    sizes = [" x ".join(map(str, size)) for size in (layer.window, layer.image[1:])]
    how = "online" if is_online(model) else "with stored messages"
    return (
        f"Hierarchical compositional network, {count(layer.n_features, 'feature')} of {sizes[0]} on images "
        f"of {sizes[1]}{channels}, learned {how}"
    )


def collect_part_numbers(
    run: RunFiles, model: HierarchicalCompositionalNetwork, evidence: PartsEvidence | None, rows: str
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the numbers of the headline and the numbers of the table, both as (name, value)."""
    head: list[tuple[str, str]] = []
    table: list[tuple[str, str]] = []
    weights, used = model.weights_[0], model.used_[0]
    if evidence is not None:
        table.append((f"{rows} images", f"{evidence.n_rows:,}"))
        part = ""
        if evidence.sampled < evidence.n_rows:
            part = f" of {count(evidence.sampled, 'image')}"
            table.append(("of these decoded here", f"{evidence.sampled:,}, evenly spaced"))
        found, of = compression(model._network.layer, model._decoder().weights, evidence.stats), part
        # If the run measured the compression of all test images, show it instead of the sample's compression.
        if part and rows == "test" and "test_compression" in run.event("scored"):
            found, of = run.event("scored")["test_compression"], ""
        head.append((f"bits sent{of}", percent(found)))
        table.append((f"compression of {rows} images{of}: bits sent over their bits", percent(found)))
        wrong = evidence.stats["errors"] / max(1.0, float(evidence.stats["known"]))
        table.append((f"pixels that features do not explain{part}", percent(float(wrong))))
        often = float(evidence.stats["placed"].sum()) / evidence.sampled
        head.append(("features in an image", f"{often:.1f}"))
        table.append((f"features in an image{part}, mean", f"{often:.2f}"))
        table.append((f"images at rest{part}", percent(float(evidence.stats["at_rest"]) / evidence.sampled)))
    if model.compression_ == model.compression_:
        table.append(("compression when the fit ended", percent(model.compression_)))
    head.append(("features used", f"{int(used.sum())} of {len(used)}"))
    table.append(("features that pay for their bits", f"{int(used.sum())} of {len(used)}"))
    share = percent(float(weights.mean()))
    table.append(("weights on, of all features", f"{int(weights.sum()):,} ({share})"))
    history = read_last_restart(run)
    if history and history[-1].get("rows_seen"):
        head.append(("images seen", f"{int(history[-1]['rows_seen']) + count_warmup_images(run):,}"))
    table.append(("passes", f"{model.n_iter_:,}"))
    seconds = sum(record.get("seconds") or 0.0 for record in history)
    trained = sum(record.get("rows") or 0 for record in history)
    if seconds > 0 and trained:
        table.append(("images a second", f"{trained / seconds:,.0f}"))
    if run.event("fit_started").get("rows"):
        table.append(("training images", f"{run.event('fit_started')['rows']:,}"))
    table.append(("seed", str(model.seed_)))
    return head, table


def _make_pictures(
    run: RunFiles, model: HierarchicalCompositionalNetwork, evidence: PartsEvidence | None, rows: str
) -> list[Picture]:
    """Return all figures of the section, in the order of the page."""
    found = []
    if evidence is not None:
        found.append(_make_parts_picture(model, evidence, rows))
    often = None if evidence is None else evidence.stats["placed"] / evidence.sampled
    found.append(make_features_picture(model.weights_[0], model.used_[0], often))
    found += make_learning_pictures(run)
    if evidence is not None and evidence.filled.has_hidden_pixels:
        found.append(make_completion_picture(evidence.filled, rows, "the features"))
    return found


def _make_parts_picture(
    model: HierarchicalCompositionalNetwork, evidence: PartsEvidence, rows: str
) -> Picture:
    words = (
        f"Evenly spaced {rows} images; their features, each in its colour; the places of the features, as "
        "numbers or dots; and the reconstructions (Figures 1, 3 and 5 of the paper). In a reconstruction "
        "missing pixels are blue and extra pixels are red. With the right features they are the noise."
    )
    wrong = ((evidence.made != evidence.images) & ~evidence.unknown).mean()
    alt = (
        f"{count(len(evidence.images), 'image')} in four rows, with {int(evidence.places.sum())} features; "
        f"{percent(float(wrong))} of the pixels differ from the reconstructions."
    )
    drawn = evidence.images, evidence.places, model.weights_[0], evidence.made, evidence.unknown
    return Picture("parts", "Images and their parts", words, alt, plot_parts(*drawn), wide=True)
