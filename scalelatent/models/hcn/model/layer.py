"""A layer of binary features: sizes, prior probabilities, noise, and log odds of pixels.

The model is from section 2.1 of Lázaro-Gredilla et al., "Hierarchical compositional feature learning" (2016).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.errors import DataError
from scalelatent.kernels.streams import stream
from scalelatent.models.hcn.kernels.units import BELIEF_LIMIT, MESSAGE_LIMIT, UNITS_PER_NAT, to_units
from scalelatent.models.hcn.kernels.windows import count_pairs

from .filters import GREY_LEVELS, OrientedFilters

FLOPS_PER_PAIR = 27.0
"""Floating-point operations per pair (position, weight) when the messages of a pixel are updated once."""

# Upper bound, in bytes, of the image windows that :func:`convolve` copies at a time.
WINDOW_BYTES = 2**26

UNKNOWN = -65504.0
"""Value that replaces NaN in datasets, which hold finite numbers only; float16 can represent it."""


@overload
def log_odds(p: float) -> np.float64: ...


@overload
def log_odds(p: np.ndarray) -> np.ndarray: ...


def log_odds(p: float | np.ndarray) -> np.float64 | np.ndarray:
    """Return the log odds log p - log(1 - p), in nats, of probabilities ``p``."""
    return np.log(p) - np.log1p(-np.asarray(p, np.float64))


@dataclass(frozen=True)
class FeatureLayer:
    """Features of one size that are placed on binary images, joined by OR and observed through noise.

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
        Pixels above it are 1; None: pixels are 0 and 1.
    missing : float or None
        Value of an unknown pixel. If it is NaN, `UNKNOWN` also marks unknown pixels.
    filters : OrientedFilters or None
        Filters whose edges of grey images are the channels.
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
        """Shape of the images in the rows of a dataset: (channels, height, width), before filters."""
        return self.image if self.filters is None else (1, *self.image[1:])

    @property
    def places(self) -> tuple[int, int, int]:
        """Shape of the array of feature positions of an image: (vertical HS, horizontal WS, features F)."""
        (_, height, width), (h, w) = self.image, self.window
        return height - h + 1, width - w + 1, self.n_features

    @property
    def weights_shape(self) -> tuple[int, int, int, int]:
        """Shape of the weights in kernels: (channels, h, w, features), with h and w in reverse order."""
        return self.image[0], *self.window, self.n_features

    @property
    def n_pixels(self) -> int:
        """Number of pixels of an image, summed over its channels."""
        return math.prod(self.image)

    @property
    def pairs(self) -> int:
        """Number of pairs (feature position, weight) of an image, each of which can turn on one pixel."""
        return self.image[0] * count_pairs(self.image[1:], self.window, self.n_features)

    @cached_property
    def evidence_values(self) -> tuple[np.int32, np.int32]:
        """Log odds of an observed 0 and of an observed 1, in units of 1/256 nat.

        They are log p(observed pixel | covered by a feature) - log p(observed pixel | not covered).
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
        """Return the prior log odds of features at all positions, in units of 1/256 nat.

        They are int32 (rows, HS, WS, F): vertical positions, horizontal positions, features.
        """
        return np.full((n_rows, *self.places), self.prior, np.int32)

    def compute_evidence(self, x: np.ndarray) -> np.ndarray:
        """Return the log odds of pixels, see `evidence_values`; 0 for unknown pixels.

        ``x`` are rows of a dataset. The result is int32 (rows, channels, height, width).
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
        """Check the pixels of a block of rows, and return their log odds, see :meth:`compute_evidence`.

        Raises
        ------
        DataError
            If a pixel is neither 0 nor 1 nor unknown, or with filters not a whole number from 0 to 255.
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
        """Return the random initial log odds of weights, in nats.

        Their probabilities are uniform from 0.9 ``p_weight`` to ``p_weight``.
        """
        drawn = stream(seed, "hcn weights", level, restart).random(self.weights_shape)
        return log_odds((0.9 + 0.1 * drawn) * self.p_weight)

    def is_exact(self, w: np.ndarray) -> bool:
        """Return True if int32 sums of log odds ``w`` of weights, in units of 1/256 nat, cannot overflow."""
        return bool(np.abs(w).max(initial=0) < BELIEF_LIMIT)


def convolve(pixels: np.ndarray, w: np.ndarray, layer: FeatureLayer) -> np.ndarray:
    """Return the sum of the values of ``pixels`` under each feature ``w`` at each position.

    The result is int32 (images, HS, WS, F). The sums are exact.
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
    """Convert weights from the memory layout of kernels to features (F, channels, h, w)."""
    return np.ascontiguousarray(np.moveaxis(w[:, ::-1, ::-1], -1, 0))


def from_features(features: np.ndarray) -> np.ndarray:
    """Convert features (F, channels, h, w) to the memory layout of kernels, see `weights_shape`."""
    return np.ascontiguousarray(np.moveaxis(features, 0, -1)[:, ::-1, ::-1])


def row_numbers(block: Block) -> np.ndarray:
    """Return the index of each row of a block in the dataset."""
    if block.rows is not None:
        return block.rows
    return np.arange(block.start, block.start + len(block.x))


def hide_unknown(evidence: np.ndarray, known: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
    """Return the log odds of pixels, with 0 for unknown pixels.

    Parameters
    ----------
    evidence : ndarray of int32, shape (rows, channels, height, width)
        Log odds of the pixels.
    known : ndarray of uint8, shape (all rows, bytes), or None
        One bit per pixel, 1 if the pixel is known; None: all pixels are known.
    rows : ndarray of int, shape (rows,)
        Indices of the rows in ``known``.
    """
    if known is None:
        return evidence
    bits = np.unpackbits(known[rows], axis=1, count=evidence[0].size)
    return np.where(bits.reshape(evidence.shape) != 0, evidence, np.int32(0))
