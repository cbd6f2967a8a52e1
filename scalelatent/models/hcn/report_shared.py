"""What reports of one layer and of several share: hidden pixels filled in, features, learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelatent.report.page import Picture, count, join_words
from scalelatent.report.runfiles import RunFiles
from scalelatent.report.style import percent

from .report_figures import direction_colors, plot_evidence, plot_features, plot_filled

# Images that are filled in, from so many places of the data; those drawn, of how many pixels side by side.
FILLED, PLACES = 100, 50
SHOWN, WIDE = 8, 320


@dataclass(frozen=True)
class FilledImages:
    """Images of which a part was hidden, and what was made of the rest.

    Attributes
    ----------
    images, given, made : ndarray of bool, shape (n, channels, height, width)
        The images, which of their pixels were given (or are unknown), and what these were made into.
    hidden : str
        What was hidden.
    """

    images: np.ndarray
    given: np.ndarray
    made: np.ndarray
    hidden: str

    @property
    def any_hidden(self) -> bool:
        """Whether a pixel that is known was hidden."""
        return not bool(self.given.all())

    @property
    def wrong(self) -> tuple[float, float]:
        """Share of wrong pixels among the hidden ones; and were they all 0."""
        hidden = ~self.given
        return float((self.made != self.images)[hidden].mean()), float(self.images[hidden].mean())


def hide(shape: tuple[int, ...], window: int) -> tuple[str, np.ndarray]:
    """What is hidden of images, in words, and which pixels are given; of large ones so that parts are cut."""
    height = shape[2]
    if height <= 4 * window:
        words, lines = "the lower half was hidden", np.arange(height) >= height // 2
    else:
        band = -(-window // 2)
        words = f"every other band of {count(band, 'line')} was hidden"
        lines = np.arange(height) // band % 2 == 1
    given = np.ones(shape, bool)
    given[:, :, lines] = False
    return words, given


def shown(image: tuple[int, ...]) -> int:
    """Images that are drawn side by side."""
    return int(np.clip(WIDE // max(image[1:]), 1, SHOWN))


def learning(run: RunFiles) -> list[dict[str, Any]]:
    """Records of the last restart, without its warm-up."""
    found = [record for record in run.history if record.get("weights_on") is not None]
    if not found:
        return []
    return [record for record in found if record.get("stage") == found[-1].get("stage")]


def warmed(run: RunFiles) -> int:
    """Images of the warm-up before the last restart."""
    stages = [record for record in run.history if "_warmup" in str(record.get("stage"))]
    return int(stages[-1].get("rows_seen") or 0) if stages else 0


def features_picture(
    weights: np.ndarray,
    used: np.ndarray,
    often: np.ndarray | None = None,
    layer: int = 1,
    of_edges: bool = False,
) -> Picture:
    """All features of a layer, and how often each lies in an image where that is known."""
    words = "All features with their numbers; those that are used in ink and framed in their colour"
    words += "." if often is None else ", below each how often it lies in an image, in the mean."
    if len(weights[0]) > 1:
        below = "features of the layer below" if layer > 1 else "channels"
        what = "directions of edges" if of_edges else below
        words += f" A pixel has the mean colour of the {what} that are on in it."
    alt = f"{int(used.sum())} of {count(len(used), 'feature')} are used"
    if often is not None and used.any():
        most = int(np.argmax(often))
        alt += f"; feature {most} most often, {often[most]:.2g} times an image"
    name, title = "features", "Features"
    if layer > 1:
        name, title = f"{name}-{layer}", f"{title} of layer {layer}"
    figure = plot_features(weights, used, often, direction_colors(weights.shape[1]) if of_edges else None)
    return Picture(name, title, words, f"{alt}.", figure, wide=True)


def learning_pictures(run: RunFiles) -> list[Picture]:
    """Weights against images seen, where there is more than one record."""
    history, before = learning(run), warmed(run)
    if len(history) < 2:
        return []
    words = "Weights that are on, and that change sign, against images seen (as Figure 6 of the paper)."
    told = [
        f"{int(history[k]['weights_on']):,} weights on {when}" for k, when in ((0, "first"), (-1, "last"))
    ]
    compressed = [record["compression"] for record in history if record.get("compression") is not None]
    if compressed:
        words += " Below: bits sent of the validation images, over their bits."
        told.append(f"{percent(compressed[-1])} of the bits sent in the end")
    alt = f"Curves over {count(len(history), 'record')}: {join_words(told)}."
    figure = plot_evidence(history, before)
    return [Picture("learning", "Weights against images seen", words, alt, figure)]


def filled_picture(filled: FilledImages, rows: str, by: str) -> Picture:
    """Images, what was given of them, and what was made of that, in words and drawn."""
    wrong, base = filled.wrong
    n = len(filled.images)
    some = np.linspace(0, n - 1, min(shown(filled.images.shape[1:]), n)).astype(int)
    words = (
        f"{rows.capitalize()} images of which {filled.hidden}, and what {by} of the rest. Of "
        f"{count(n, 'image')} {percent(wrong)} of the hidden pixels are wrong; {percent(base)} were they all "
        "0. A part that is hidden as a whole cannot be known."
    )
    alt = f"{count(len(some), 'image')} in three lines; {percent(wrong)} of the hidden pixels are wrong."
    figure = plot_filled(filled.images[some], filled.given[some], filled.made[some])
    return Picture("filled", "Unknown pixels", words, alt, figure, wide=True)
