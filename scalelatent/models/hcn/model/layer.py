"""A layer of binary features: sizes, prior probabilities, noise, and log odds of pixels.

The model is from section 2.1 of Lázaro-Gredilla et al., "Hierarchical compositional feature learning" (2016).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.errors import DataError, DivergenceError
from scalelatent.kernels.streams import stream
from scalelatent.models.hcn.kernels.units import BELIEF_LIMIT, MESSAGE_LIMIT, UNITS_PER_NAT, to_units
from scalelatent.models.hcn.kernels.windows import count_pairs

from .filters import GREY_LEVELS, OrientedFilters

FLOPS_PER_PAIR = 27.0
"""Number of operations that update the messages of a pixel to one position and to one weight."""

# Upper bound, in bytes, of the image windows that :func:`convolve` copies at a time.
WINDOW_BYTES = 2**26

UNKNOWN = -65504.0
"""Value that replaces NaN (unknown pixel), because datasets hold only finite numbers; it fits float16."""


def log_odds(p: float | np.ndarray) -> np.ndarray:
    """Return the log odds log(p) - log(1 - p), in nats, of probabilities ``p``."""
    return np.log(p) - np.log1p(-np.asarray(p, np.float64))


@dataclass(frozen=True)
class FeatureLayer:
    """One layer: binary features that are placed on images, joined by OR, and observed through noise.

    Attributes
    ----------
    image : (channels, height, width)
        Shape of an image.
    n_features : int
        Number of features.
    window : (h, w)
        Height and width of a feature in pixels.
    p01, p10 : float
        Probability that a pixel under a feature is 0, and that a pixel under no feature is 1.
    p_weight, p_sparsity : float
        Prior probability that a weight is on, and that a feature is at a position.
    threshold : float or None
        Pixels with values above the threshold count as 1, others as 0. If it is None, pixels are 0 and 1.
    missing : float or None
        Value of an unknown pixel; if it is None, all pixels are known. If it is NaN, `UNKNOWN` also marks
        unknown pixels.
    filters : OrientedFilters or None
        Edge filters that make the channels of the image from a grey image; if None, rows are binary images.
    """

    image: tuple[int, int, int]
    n_features: int
    window: tuple[int, int]
    p01: float
    p10: float
    p_weight: float
    p_sparsity: float
    threshold: float | None = None
    missing: float | None = None
    filters: OrientedFilters | None = field(default=None, kw_only=True)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Shape (channels, height, width) of the images in a dataset; grey images have one channel."""
        return self.image if self.filters is None else (1, *self.image[1:])

    @property
    def places(self) -> tuple[int, int, int]:
        """Shape (HS, WS, F) of an array of feature positions: HS x WS positions of F features in an image."""
        (_, height, width), (h, w) = self.image, self.window
        return height - h + 1, width - w + 1, self.n_features

    @property
    def weights_shape(self) -> tuple[int, int, int, int]:
        """Shape of weights in kernels: (channels, height, width, features), height and width reversed."""
        return self.image[0], *self.window, self.n_features

    @property
    def n_weights(self) -> int:
        return math.prod(self.weights_shape)

    @property
    def n_pixels(self) -> int:
        """Number of pixels of an image, summed over its channels."""
        return math.prod(self.image)

    @property
    def pairs(self) -> int:
        """Number of pairs (feature position, weight) of an image; each pair can turn on one pixel."""
        return self.image[0] * count_pairs(self.image[1:], self.window, self.n_features)

    @cached_property
    def evidence_values(self) -> tuple[np.int32, np.int32]:
        """Log odds that a feature covers a pixel, for a pixel of 0 and a pixel of 1, in units of 1/256 nat.

        The values are log P(pixel | covered) - log P(pixel | not covered), at most MESSAGE_LIMIT in size.
        """
        off, on = (
            to_units(np.clip(nats, -MESSAGE_LIMIT / UNITS_PER_NAT, MESSAGE_LIMIT / UNITS_PER_NAT))
            for nats in (np.log(self.p01) - np.log1p(-self.p10), np.log1p(-self.p01) - np.log(self.p10))
        )
        return np.int32(off), np.int32(on)

    @cached_property
    def prior(self) -> np.int32:
        """Prior log odds of a feature at a position, in units of 1/256 nat."""
        return np.int32(to_units(log_odds(self.p_sparsity)))

    def prior_beliefs(self, n_rows: int) -> np.ndarray:
        """Return the prior log odds of features at all positions of images, in units of 1/256 nat.

        The result is int32 (rows, vertical positions, horizontal positions, features).
        """
        return np.full((n_rows, *self.places), self.prior, np.int32)

    def compute_evidence(self, x: np.ndarray) -> np.ndarray:
        """Return the log odds that a feature covers each pixel; 0 for unknown pixels.

        ``x`` are rows of a dataset. The result is int32 (rows, channels, height, width), in 1/256 nat.
        """
        off, on = self.evidence_values
        if self.filters is not None:
            edges = self.filters.find_edges(np.ascontiguousarray(x, np.uint8).reshape(-1, *self.image[1:]))
            return np.where(edges, on, off)
        is_on = x > self.threshold if self.threshold is not None else x == 1
        out = np.where(is_on, on, off)
        if (unknown := self._unknown(x)) is not None:
            out[unknown] = 0
        return np.ascontiguousarray(out.reshape(len(x), *self.image))

    def read_evidence(self, block: Block) -> np.ndarray:
        """Check the pixels of a block; return the log odds that a feature covers each pixel, 0 if unknown.

        Raises
        ------
        DataError
            Without ``threshold``, if a pixel is neither 0 nor 1 nor unknown. With ``filters``, if a pixel is
            not a whole number from 0 to 255, or if the largest pixel is 1.
        """
        x = block.x
        if self.filters is not None:
            self._check_grey(block)
        elif self.threshold is None:
            odd = (x != 0) & (x != 1)
            if (unknown := self._unknown(x)) is not None:
                odd &= ~unknown
            if odd.any():
                row, pixel = (int(i) for i in np.argwhere(odd)[0])
                raise DataError(
                    f"row {block.row_number(row)}, pixel {pixel} is {x[row, pixel]}: pixels must be 0 or 1; "
                    "set threshold (pixels above it are 1), or set missing to the value of unknown pixels"
                )
        return self.compute_evidence(x)

    def _check_grey(self, block: Block) -> None:
        x = block.x
        odd = (x < 0) | (x >= GREY_LEVELS) | (x != np.rint(x))
        if odd.any():
            row, pixel = (int(i) for i in np.argwhere(odd)[0])
            raise DataError(
                f"row {block.row_number(row)}, pixel {pixel} is {x[row, pixel]}: filters need grey images of "
                "whole numbers from 0 to 255; multiply images with pixels from 0 to 1 by 255 and round them"
            )
        if x.max(initial=0) == 1:
            raise DataError(
                f"rows from {block.row_number(0)} on hold only 0 and 1, but filters find the edges of grey "
                "images: remove filters"
            )

    def _unknown(self, x: np.ndarray) -> np.ndarray | None:
        if self.missing is None:
            return None
        return np.isnan(x) | (x == UNKNOWN) if math.isnan(self.missing) else x == self.missing

    def first_beliefs(self, seed: int, restart: int = 0, level: int = 0) -> np.ndarray:
        """Return the random initial log odds of the weights, in nats.

        The probabilities of the weights are uniform between 0.9 ``p_weight`` and ``p_weight``. ``level`` is
        the number of the layer from the image up, from 0, and ``restart`` the number of the fit.
        """
        drawn = stream(seed, "hcn weights", level, restart).random(self.weights_shape)
        return log_odds((0.9 + 0.1 * drawn) * self.p_weight)

    def check_overflow(self, w: np.ndarray, level: int, remedy: str) -> None:
        """Raise a DivergenceError if int32 sums of log odds ``w`` of weights could overflow.

        ``w`` has the shape `weights_shape`, in units of 1/256 nat. The message has the number ``level`` of
        the layer, from 1, and says to lower ``remedy``, which names parameters.
        """
        largest = np.abs(w).max(axis=(0, 1, 2))
        feature = int(largest.argmax())
        if largest[feature] >= BELIEF_LIMIT:
            raise DivergenceError(
                f"layer {level}: log odds of the weights of feature {feature} have reached "
                f"{largest[feature] / UNITS_PER_NAT:,.0f} nats; the limit of exact sums is "
                f"{BELIEF_LIMIT / UNITS_PER_NAT:,.0f}: lower {remedy}"
            )


def convolve(pixels: np.ndarray, w: np.ndarray, layer: FeatureLayer) -> np.ndarray:
    """Return the sum of the values of the pixels under each feature at each position.

    ``pixels`` are int32 (images, channels, height, width), and ``w`` are the weights of the features, bool,
    of the shape ``layer.weights_shape``. The result is int32 (images, HS, WS, F), F features at HS x WS
    positions; sums are limited to +-2**30.
    """
    high, wide, n_features = layer.places
    flat = w[:, ::-1, ::-1].reshape(-1, n_features).astype(np.float64)
    out = np.empty((len(pixels), high, wide, n_features), np.int32)
    rows = max(1, WINDOW_BYTES // (8 * high * wide * len(flat)))
    for a in range(0, len(pixels), rows):
        views = np.lib.stride_tricks.sliding_window_view(pixels[a : a + rows], layer.window, axis=(2, 3))
        columns = np.moveaxis(views, 1, 3).reshape(-1, len(flat)).astype(np.float64)
        sums = np.clip(columns @ flat, -(2**30), 2**30)
        out[a : a + rows] = sums.reshape(-1, high, wide, n_features)
    return out


def to_features(w: np.ndarray) -> np.ndarray:
    """Convert weights of the shape (channels, h, w, F) to features (F, channels, h, w).

    F is the number of features of h x w pixels. Kernels need weights with reversed axes h and w.
    """
    return np.ascontiguousarray(np.moveaxis(w[:, ::-1, ::-1], -1, 0))


def from_features(features: np.ndarray) -> np.ndarray:
    """Convert F features (F, channels, h, w) to weights (channels, h, w, F), the inverse of `to_features`."""
    return np.ascontiguousarray(np.moveaxis(features, 0, -1)[:, ::-1, ::-1])


def row_numbers(block: Block) -> np.ndarray:
    """Return for each row of a block its row number in the dataset."""
    if block.rows is not None:
        return block.rows
    return np.arange(block.start, block.start + len(block.x))


def hide_unknown(evidence: np.ndarray, known: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
    """Return the log odds ``evidence`` of pixels, with 0 for pixels that the mask ``known`` hides.

    The mask is uint8 (images, bytes), with one bit per pixel: 1 if the pixel is known. If it is None, no
    pixel is hidden. Row i of ``evidence`` (rows, channels, height, width) belongs to the image ``rows[i]`` of
    the mask.
    """
    if known is None:
        return evidence
    bits = np.unpackbits(known[rows], axis=1, count=evidence[0].size)
    return np.where(bits.reshape(evidence.shape) != 0, evidence, np.int32(0))
