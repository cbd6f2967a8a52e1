"""What the report of a hierarchical compositional network shows: images by their parts, features, bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.grid import spaced
from scalelatent.engine.threads import single_threaded
from scalelatent.errors import ScalelatentError
from scalelatent.models.hcn.model.compression import DescriptionLength, bits, compression, lengths
from scalelatent.models.hcn.model.decode import reconstruct
from scalelatent.report.explained import how_to_use
from scalelatent.report.page import Picture, Section, count, listing
from scalelatent.report.runfiles import RunFiles
from scalelatent.report.sampled import check_width
from scalelatent.report.style import percent

from .parameters import is_online, is_several
from .report_figures import plot_bits, plot_evidence, plot_features, plot_filled, plot_parts

__all__ = ["PartsEvidence", "collect_parts", "section"]

# Pairs that may be updated for the figures: some seconds of one core.
PAIR_UPDATES = 4e9
LEAST_ROWS, MOST_ROWS, PLACES = 20, 1000, 50
# Images that are drawn, of how many pixels side by side; images whose lower halves are filled in.
SHOWN, WIDE, FILLED = 8, 320, 100


def section(
    model: Any, data: Dataset | None, run: RunFiles, rows: str, progress: Callable[[int, int], None] | None
) -> Section:
    """The part of a network's report; see `scalelatent.contract.kinds.Kind.report`."""
    if is_several(model):
        return layered_section(model, run)
    evidence = None
    if data is None:
        run.notes.append("No images were at hand: those that features are placed in are left out.")
    else:
        try:
            evidence = collect_parts(model, data, progress=progress)
        except ScalelatentError as error:
            run.notes.append(f"The images could not be used, so their figures are left out: {error}")
    head, table = parts_numbers(run, model, evidence, rows)
    snippet = how_to_use(run, model, verb="transform", gives="where each feature lies, uint8")
    return Section(
        parts_subtitle(model), head, table, parts_pictures(run, model, evidence, rows), parts_words(), snippet
    )


def layered_section(model: Any, run: RunFiles) -> Section:
    """The part of a network with templates."""
    network = model._network
    subtitle = f"Hierarchical compositional network, {network.told()}"
    head = [("layers", str(len(model.weights_))), ("templates", str(len(model.template_classes_)))]
    table = [("passes", f"{model.n_iter_:,}"), ("seed", str(model.seed_))]
    for level, (weights, used) in enumerate(zip(model.weights_, model.used_, strict=True), 1):
        name = "templates" if level == len(model.weights_) else f"features of layer {level}"
        table.append((f"{name} with a weight", f"{int(used.sum())} of {len(used)}"))
        table.append(
            (f"weights on, of all {name}", f"{int(weights.sum()):,} ({percent(float(weights.mean()))})")
        )
    if (error := run.event("scored").get("test_error")) is not None:
        head.append(("test error", percent(error)))
    pictures = [_features(model, None)]
    if len(history := _learning(run)) > 1:
        pictures.append(_evidence(history, _warmed(run)))
    snippet = how_to_use(run, model, gives="the class of each image, or its cluster")
    return Section(subtitle, head, table, pictures, [], snippet)


@dataclass(frozen=True)
class PartsEvidence:
    """What the figures are drawn from: some images, and what the model makes of them.

    Attributes
    ----------
    n_rows : int
        Of the dataset.
    stats : Stats
        Of `DescriptionLength`, over the sampled images.
    images, made, unknown : ndarray of bool, shape (n, channels, height, width)
        Of the images that are drawn.
    places : ndarray of uint8, shape (n, HS, WS, F)
    halves, given, filled : ndarray of bool, shape (m, channels, height, width)
        Images of which a part was hidden, which of their pixels were given, and what was made of these.
    hidden : str
        What was hidden.
    """

    n_rows: int
    stats: Stats
    images: np.ndarray
    made: np.ndarray
    unknown: np.ndarray
    places: np.ndarray
    halves: np.ndarray
    given: np.ndarray
    filled: np.ndarray
    hidden: str

    @property
    def sampled(self) -> int:
        """Images that were looked at."""
        return int(self.stats["rows"])

    @property
    def filled_wrong(self) -> tuple[float, float]:
        """Share of wrong pixels among the hidden ones; and were they all 0."""
        hidden = ~self.given
        return float((self.filled != self.halves)[hidden].mean()), float(self.halves[hidden].mean())


def collect_parts(
    model: Any,
    data: Dataset,
    *,
    sample_rows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PartsEvidence:
    """Take evenly spaced images of a dataset apart with a fitted network."""
    check_width(data, model.n_features_in_)
    decoder, backend = model._decoder(), make_backend(model.device)
    layer, length = decoder.layer, DescriptionLength(decoder)
    pieces = spaced(len(data), _rows_worth(layer.pairs) if sample_rows is None else sample_rows, PLACES)
    numbers = np.concatenate([np.arange(a, b) for a, b in pieces])
    x = np.concatenate([data.read_x(a, b) for a, b in pieces])
    stats = Stats.zeros(length.layout())
    with single_threaded():
        for a in range(0, len(x), decoder.block_rows):
            block = Block(x[a : a + decoder.block_rows], None, None, 0, numbers[a : a + decoder.block_rows])
            length.accumulate(length.prepare(None, backend), block, stats)
            if progress is not None:
                progress(min(a + len(block.x), len(x)), len(x))
        some = np.linspace(0, len(x) - 1, min(_shown(layer.image), len(x))).astype(int)
        evidence = layer.evidence(x[some])
        places = decoder.places(evidence, numbers[some], backend)
        half = np.linspace(0, len(x) - 1, min(FILLED, len(x))).astype(int)
        whole = layer.evidence(x[half])
        hidden, lines = _hidden_lines(layer.image[1], layer.window[0])
        given = np.ones(whole.shape, bool)
        given[:, :, lines] = False
        filled = reconstruct(decoder, np.where(given, whole, 0), numbers[half], backend, fills=True)
    return PartsEvidence(
        len(data),
        stats,
        evidence > 0,
        decoder.layers(places, backend) > 0,
        evidence == 0,
        places,
        whole > 0,
        given | (whole == 0),
        filled > 0,
        hidden,
    )


def _hidden_lines(height: int, window: int) -> tuple[str, np.ndarray]:
    """Which lines of an image are hidden, in words and by a mask; of a large one so that parts are cut."""
    if height <= 4 * window:
        return "the lower half was hidden", np.arange(height) >= height // 2
    band = -(-window // 2)
    return f"every other band of {count(band, 'line')} was hidden", np.arange(height) // band % 2 == 1


def _rows_worth(pairs: int) -> int:
    return int(np.clip(PAIR_UPDATES / (10 * pairs), LEAST_ROWS, MOST_ROWS))


def _shown(image: tuple[int, int, int]) -> int:
    """Images that are drawn side by side."""
    return int(np.clip(WIDE // max(image[1:]), 1, SHOWN))


def parts_subtitle(model: Any) -> str:
    """One line that says what the model is."""
    layer = model._layer
    channels = f", {count(layer.image[0], 'channel')}" if layer.image[0] > 1 else ""
    sizes = [" x ".join(map(str, size)) for size in (layer.window, layer.image[1:])]
    how = "online" if is_online(model) else "with kept messages"
    return (
        f"Hierarchical compositional network, {count(layer.n_features, 'feature')} of {sizes[0]} on images "
        f"of {sizes[1]}{channels}, learned {how}"
    )


def parts_numbers(
    run: RunFiles, model: Any, evidence: PartsEvidence | None, rows: str
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(headline, table)."""
    head: list[tuple[str, str]] = []
    table: list[tuple[str, str]] = []
    weights, used = model.weights_[0], model.used_[0]
    if evidence is not None:
        table.append((f"{rows} images", f"{evidence.n_rows:,}"))
        part = ""
        if evidence.sampled < evidence.n_rows:
            part = f" of {count(evidence.sampled, 'image')}"
            table.append(("of these taken apart here", f"{evidence.sampled:,}, evenly spaced"))
        found, of = compression(model._layer, model._decoder().weights, evidence.stats), part
        # The run has scored all test rows.
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
    history = _learning(run)
    if history and history[-1].get("rows_seen"):
        head.append(("images seen", f"{int(history[-1]['rows_seen']) + _warmed(run):,}"))
    table.append(("passes", f"{model.n_iter_:,}"))
    seconds = sum(record.get("seconds") or 0.0 for record in history)
    trained = sum(record.get("rows") or 0 for record in history)
    if seconds > 0 and trained:
        table.append(("images a second", f"{trained / seconds:,.0f}"))
    if run.event("fit_started").get("rows"):
        table.append(("training images", f"{run.event('fit_started')['rows']:,}"))
    table.append(("seed", str(model.seed_)))
    return head, table


def parts_words() -> list[tuple[str, str]]:
    """What the numbers mean."""
    bits_text = (
        "What it takes to tell the images by features, over what their pixels take: the features themselves "
        "(once, for all images), where each lies, and the pixels that are otherwise than they make. Each is "
        "counted as N times the entropy of its share of ones. 100 % says that nothing was found; noise "
        "cannot be told in fewer bits, so that even the true features leave something."
    )
    used = (
        "A feature is used where it saves more bits than it costs; others lie in no image. Give more "
        "features than you expect: those that are left over cost nothing."
    )
    return [("Bits sent", bits_text), ("Features used", used)]


def _learning(run: RunFiles) -> list[dict[str, Any]]:
    """Records of the last restart, without its warm-up."""
    found = [record for record in run.history if record.get("weights_on") is not None]
    if not found:
        return []
    return [record for record in found if record.get("stage") == found[-1].get("stage")]


def _warmed(run: RunFiles) -> int:
    """Images of the warm-up before the last restart."""
    stages = [record for record in run.history if "_warmup" in str(record.get("stage"))]
    return int(stages[-1].get("rows_seen") or 0) if stages else 0


def parts_pictures(run: RunFiles, model: Any, evidence: PartsEvidence | None, rows: str) -> list[Picture]:
    """All figures, in the order of the page."""
    found = []
    if evidence is not None:
        found.append(_parts(model, evidence, rows))
    found.append(_features(model, evidence))
    if len(history := _learning(run)) > 1:
        found.append(_evidence(history, _warmed(run)))
    if evidence is not None:
        if (~evidence.given).any():
            found.append(_filled(evidence, rows))
        if float(bits(evidence.stats["ones"], evidence.stats["known"])) > 0:
            found.append(_bits(model, evidence, rows))
    return found


def _parts(model: Any, evidence: PartsEvidence, rows: str) -> Picture:
    words = (
        f"Evenly spaced {rows} images; the features that were found in them, each in its colour; where they "
        "lie, by the numbers of the features or as dots; and what they make together (Figures 1, 3 and 5 of "
        "the paper). There, pixels of the image that are left out are blue, and pixels too many red: noise, "
        "where the features are right."
    )
    wrong = ((evidence.made != evidence.images) & ~evidence.unknown).mean()
    alt = (
        f"{count(len(evidence.images), 'image')} in four lines; {int(evidence.places.sum())} features lie in "
        f"them, and {percent(float(wrong))} of the pixels are otherwise than these make."
    )
    drawn = evidence.images, evidence.places, model.weights_[0], evidence.made, evidence.unknown
    return Picture("parts", "Images and their parts", words, alt, plot_parts(*drawn), wide=True)


def _features(model: Any, evidence: PartsEvidence | None) -> Picture:
    weights, used = model.weights_[0], model.used_[0]
    often = None if evidence is None else evidence.stats["placed"] / evidence.sampled
    words = "All features with their numbers; those that are used in ink and framed in their colour"
    words += "." if often is None else ", below each how often it lies in an image, in the mean."
    if len(weights[0]) > 1:
        words += " A pixel has the mean colour of the channels that are on in it."
    alt = f"{int(used.sum())} of {count(len(used), 'feature')} are used"
    if often is not None and used.any():
        most = int(np.argmax(often))
        alt += f"; feature {most} most often, {often[most]:.2g} times an image"
    figure = plot_features(weights, used, often)
    return Picture("features", "Features", words, f"{alt}.", figure, wide=True)


def _evidence(history: list[dict[str, Any]], before: int) -> Picture:
    words = "Weights that are on, and that change sign, against images seen (as Figure 6 of the paper)."
    told = [
        f"{int(history[k]['weights_on']):,} weights on {when}" for k, when in ((0, "first"), (-1, "last"))
    ]
    compressed = [record["compression"] for record in history if record.get("compression") is not None]
    if compressed:
        words += " Below: bits sent of the validation images, over their bits."
        told.append(f"{percent(compressed[-1])} of the bits sent in the end")
    alt = f"Curves over {count(len(history), 'record')}: {listing(told)}."
    return Picture("learning", "Weights against images seen", words, alt, plot_evidence(history, before))


def _filled(evidence: PartsEvidence, rows: str) -> Picture:
    wrong, base = evidence.filled_wrong
    shown = min(_shown(evidence.images.shape[1:]), len(evidence.halves))  # type: ignore[arg-type]
    some = np.linspace(0, len(evidence.halves) - 1, shown).astype(int)
    words = (
        f"{rows.capitalize()} images of which {evidence.hidden}, and what the features make of the "
        f"rest. Of {count(len(evidence.halves), 'image')} {percent(wrong)} of the hidden pixels are wrong; "
        f"{percent(base)} were they all 0. A part that is hidden as a whole cannot be known."
    )
    alt = f"{count(len(some), 'image')} in three lines; {percent(wrong)} of the hidden pixels are wrong."
    figure = plot_filled(evidence.halves[some], evidence.given[some], evidence.filled[some])
    return Picture("filled", "Unknown pixels", words, alt, figure, wide=True)


def _bits(model: Any, evidence: PartsEvidence, rows: str) -> Picture:
    places, features, errors = lengths(model._layer, model._decoder().weights, evidence.stats)
    whole = float(bits(evidence.stats["ones"], evidence.stats["known"]))
    parts = {"places": places, "features, once": features, "pixels not explained": errors}
    words = (
        f"What it takes to tell {count(evidence.sampled, f'{rows} image')}: pixel by pixel, and by features. "
        "Features are told once, so that their part shrinks with more images."
    )
    told = [f"{name} {percent(number / whole)}" for name, number in parts.items()]
    return Picture(
        "bits", "Bits", words, f"Of the bits of the pixels: {listing(told)}.", plot_bits(whole, parts)
    )
