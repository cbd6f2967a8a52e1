"""Contents of reports that networks of one layer and of several layers share: images, masks, figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data import Dataset
from scalelatent.engine.grid import space_ranges
from scalelatent.report.page import Picture, count, join_words
from scalelatent.report.runfiles import RunFiles, check_features
from scalelatent.report.style import percent

from .report_figures import make_direction_colors, plot_features, plot_filled, plot_weight_counts

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork

# Approximate number of images in which a report hides some pixels, so that the model completes the images.
N_COMPLETED = 100
# Largest number of evenly spaced ranges of the dataset from which the images of a report are read.
N_RANGES = 50
# Largest number of images side by side in a figure.
MAX_SHOWN = 8
# Largest sum of the longer sides (height or width, in pixels) of several images side by side in a figure.
MAX_WIDTH = 320


@dataclass(frozen=True)
class FilledImages:
    """Images with hidden pixels, and their completions by a model.

    Attributes
    ----------
    images, given, made : ndarray of bool, shape (n, channels, height, width)
        The images, the masks of the pixels that were not hidden or always unknown, and the completed images.
    hidden : str
        Words that describe the hidden pixels, for the caption.
    """

    images: np.ndarray
    given: np.ndarray
    made: np.ndarray
    hidden: str

    @property
    def has_hidden_pixels(self) -> bool:
        """True if at least one known pixel was hidden."""
        return not bool(self.given.all())

    @property
    def error_shares(self) -> tuple[float, float]:
        """Share of hidden pixels with a wrong value in the completed images, and in images that are all 0."""
        hidden = ~self.given
        return float((self.made != self.images)[hidden].mean()), float(self.images[hidden].mean())


def read_spaced_rows(
    model: HierarchicalCompositionalNetwork, data: Dataset, n_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return about ``n_rows`` evenly spaced rows of a dataset: their row numbers, and their pixels.

    Raise an error if the rows do not have the features of the model.
    """
    check_features(data, model)
    ranges = space_ranges(len(data), n_rows, N_RANGES)
    numbers = np.concatenate([np.arange(a, b) for a, b in ranges])
    return numbers, np.concatenate([data.read_x(a, b) for a, b in ranges])


def make_mask(shape: tuple[int, ...], window: int) -> tuple[str, np.ndarray]:
    """Return a description of the hidden pixels of images, and a mask that is True for all other pixels.

    ``shape`` is (n, channels, height, width), and ``window`` is the height of a feature. In small images
    the lower half is hidden, and in larger images every other band of half the height of a feature.
    """
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


def count_shown_images(image: tuple[int, ...]) -> int:
    """Return the number of images side by side in a figure, for images (channels, height, width)."""
    return int(np.clip(MAX_WIDTH // max(image[1:]), 1, MAX_SHOWN))


def read_last_restart(run: RunFiles) -> list[dict[str, Any]]:
    """Return the records of the last of the ``n_restarts`` fits of a run, without its warm-up records."""
    found = [record for record in run.history if record.get("weights_on") is not None]
    return [record for record in found if record.get("stage") == found[-1].get("stage")]


def count_warmup_images(run: RunFiles) -> int:
    """Return the number of images that the last fit of a run learned in its warm-up, or 0."""
    stages = [record for record in run.history if "_warmup" in str(record.get("stage"))]
    return int(stages[-1].get("rows_seen") or 0) if stages else 0


def make_features_picture(
    weights: np.ndarray,
    used: np.ndarray,
    rates: np.ndarray | None = None,
    layer: int = 1,
    are_edges: bool = False,
) -> Picture:
    """Return the figure of the features of a layer.

    ``used`` is True for features that the model uses, ``rates`` the mean number of positions of each feature
    per image, and ``layer`` the number of the layer from the image up. ``are_edges`` is True if the channels
    of the features are the directions of edges.
    """
    words = "All features with their numbers; used features are dark with a frame in their colour."
    words += "" if rates is None else " The number below a feature is its mean number of places per image."
    if len(weights[0]) > 1:
        below = "features of the layer below" if layer > 1 else "channels"
        what = "directions of edges" if are_edges else below
        words += f" The colour of a pixel is the mean colour of its {what}."
    alt = f"{int(used.sum())} of {count(len(used), 'feature')} are used"
    if rates is not None and used.any():
        most = int(np.argmax(rates))
        alt += f"; feature {most} is the most frequent with {rates[most]:.2g} places per image"
    name, title = "features", "Features"
    if layer > 1:
        name, title = f"{name}-{layer}", f"{title} of layer {layer}"
    figure = plot_features(
        weights, used, rates, make_direction_colors(weights.shape[1]) if are_edges else None
    )
    return Picture(name, title, words, f"{alt}.", figure, wide=True)


def make_learning_pictures(run: RunFiles) -> list[Picture]:
    """Return the figure of weights against images seen, or no figure for fewer than two records."""
    history, before = read_last_restart(run), count_warmup_images(run)
    if len(history) < 2:
        return []
    words = "Weights that are on, and weights that change sign, against images seen (Figure 6 of the paper)."
    facts = [
        f"{int(history[k]['weights_on']):,} weights on {when}" for k, when in ((0, "first"), (-1, "last"))
    ]
    compressed = [record["compression"] for record in history if record.get("compression") is not None]
    if compressed:
        words += " Below: compression of the validation images."
        facts.append(f"compression {percent(compressed[-1])} at the end")
    alt = f"Curves over {count(len(history), 'record')}: {join_words(facts)}."
    figure = plot_weight_counts(history, before)
    return [Picture("learning", "Weights against images seen", words, alt, figure)]


def make_completion_picture(filled: FilledImages, rows: str, by: str) -> Picture:
    """Return the figure of images, their given pixels, and the completed images.

    ``rows`` names the data split, such as "test"; ``by`` names the part of the model that fills in pixels.
    """
    wrong, base = filled.error_shares
    n = len(filled.images)
    some = np.linspace(0, n - 1, min(count_shown_images(filled.images.shape[1:]), n)).astype(int)
    words = (
        f"{rows.capitalize()} images, their given pixels ({filled.hidden}), and their completions by {by}. "
        f"In {count(n, 'image')} {percent(wrong)} of the hidden pixels are wrong; with 0 everywhere it would "
        f"be {percent(base)}. A part that is hidden entirely cannot be known."
    )
    alt = f"{count(len(some), 'image')} in three rows; {percent(wrong)} of the hidden pixels are wrong."
    figure = plot_filled(filled.images[some], filled.given[some], filled.made[some])
    return Picture("filled", "Unknown pixels", words, alt, figure, wide=True)
