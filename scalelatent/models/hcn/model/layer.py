"""A layer of binary features: its sizes, priors and noise, and what a pixel says."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.errors import DataError
from scalelatent.kernels.streams import stream
from scalelatent.models.hcn.kernels.exact import BELIEF_LIMIT, GRID, MESSAGE_LIMIT, to_grid
from scalelatent.models.hcn.kernels.reference import FLOOR
from scalelatent.models.hcn.kernels.windows import pairs_of

from .filters import GREY_LEVELS, OrientedFilters

FLOPS_PER_PAIR = 27.0
"""Of a sweep: the general rule's."""

# Of windows of what a layer makes that are held at once.
WINDOW_BYTES = 2**26

UNKNOWN = -65504.0
"""What NaN becomes in rows, which are finite in datasets; every float has it."""


@overload
def log_odds(p: float) -> np.float64: ...


@overload
def log_odds(p: np.ndarray) -> np.ndarray: ...


def log_odds(p: float | np.ndarray) -> np.float64 | np.ndarray:
    """log p - log(1 - p)."""
    return np.log(p) - np.log1p(-np.asarray(p, np.float64))


@dataclass(frozen=True)
class FeatureLayer:
    """Features of one size that are placed on binary images, joined by OR, and seen through noise.

    Attributes
    ----------
    image : (channels, height, width)
    n_features : int
    window : (h, w)
        Of a feature.
    p01, p10 : float
        Chance that a pixel is 0 where a feature lies, and 1 where none does.
    p_weight, p_sparsity : float
        Prior chance of a weight, and of a feature at a place.
    threshold : float or None
        Pixels above it are 1; None: pixels are 0 and 1.
    missing : float or None
        Value of a pixel that is unknown; NaN is `UNKNOWN` too.
    filters : OrientedFilters or None
        Rows are grey images, and channels what filters find in them.
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
    def seen(self) -> tuple[int, int, int]:
        """Shape of the images that rows are."""
        return self.image if self.filters is None else (1, *self.image[1:])

    @property
    def places(self) -> tuple[int, int, int]:
        """Shape of an image's S: (HS, WS, F)."""
        (_, height, width), (h, w) = self.image, self.window
        return height - h + 1, width - w + 1, self.n_features

    @property
    def weights_shape(self) -> tuple[int, int, int, int]:
        """Shape of W in the kernels: (channels, h, w, F), the window flipped on both axes."""
        return self.image[0], *self.window, self.n_features

    @property
    def n_pixels(self) -> int:
        """Pixels of an image, of all its channels."""
        return math.prod(self.image)

    @property
    def pairs(self) -> int:
        """Pairs of an image."""
        return self.image[0] * pairs_of(self.image[1:], self.window, self.n_features)

    @cached_property
    def evidence_of(self) -> tuple[np.int32, np.int32]:
        """Message of a pixel that is 0, and of one that is 1, in units."""
        most = min(MESSAGE_LIMIT, FLOOR * GRID)
        off, on = (
            to_grid(np.clip(nats, -most / GRID, most / GRID))
            for nats in (np.log(self.p01) - np.log1p(-self.p10), np.log1p(-self.p01) - np.log(self.p10))
        )
        return np.int32(off), np.int32(on)

    @cached_property
    def prior(self) -> np.int32:
        """Belief of S before anything is seen, in units."""
        return np.int32(to_grid(log_odds(self.p_sparsity)))

    def no_places(self, n_rows: int) -> np.ndarray:
        """Beliefs of S of some rows before anything is seen, int32 (rows, HS, WS, F)."""
        return np.full((n_rows, *self.places), self.prior, np.int32)

    def evidence(self, x: np.ndarray, known: np.ndarray | None = None) -> np.ndarray:
        """Messages of pixels in units, 0 where unknown: int32 (rows, channels, height, width)."""
        off, on = self.evidence_of
        if self.filters is not None:
            edges = self.filters.edges(np.ascontiguousarray(x, np.uint8).reshape(-1, *self.image[1:]))
            return np.where(edges, on, off)
        out = np.where(self.is_on(x), on, off)
        for unknown in (self._unknown(x), None if known is None else ~known.astype(bool)):
            if unknown is not None:
                out[unknown] = 0
        return np.ascontiguousarray(out.reshape(len(x), *self.image))

    def evidence_in(self, block: Block) -> np.ndarray:
        """Messages of a block's pixels; raises DataError where one is neither 0 nor 1, or of filters no grey
        level.
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
                    f"row {block.row_number(row)}, pixel {pixel} is {x[row, pixel]}: images are of 0 and 1; "
                    "set threshold (pixels above it are 1), or missing to the value of unknown pixels"
                )
        return self.evidence(x)

    def _check_grey(self, block: Block) -> None:
        x = block.x
        odd = (x < 0) | (x >= GREY_LEVELS) | (x != np.rint(x))
        if odd.any():
            row, pixel = (int(i) for i in np.argwhere(odd)[0])
            raise DataError(
                f"row {block.row_number(row)}, pixel {pixel} is {x[row, pixel]}: filters read grey images of "
                "whole numbers from 0 to 255; multiply images of 0 to 1 by 255 and round them"
            )
        if x.max(initial=0) == 1:
            raise DataError(
                f"rows from {block.row_number(0)} on are of 0 and 1: filters find the edges of grey images; "
                "leave filters out"
            )

    def is_on(self, x: np.ndarray) -> np.ndarray:
        """Which pixels are 1."""
        return x > self.threshold if self.threshold is not None else x == 1

    def _unknown(self, x: np.ndarray) -> np.ndarray | None:
        if self.missing is None:
            return None
        return np.isnan(x) | (x == UNKNOWN) if math.isnan(self.missing) else x == self.missing

    def first_beliefs(self, seed: int, restart: int = 0, level: int = 0) -> np.ndarray:
        """Beliefs of W before anything is seen: log odds of uniform draws from .9 p_weight to p_weight."""
        drawn = stream(seed, "hcn weights", level, restart).random(self.weights_shape)
        return log_odds((0.9 + 0.1 * drawn) * self.p_weight)

    def is_exact(self, w: np.ndarray) -> bool:
        """Whether int32 has room for sums of beliefs of W in units."""
        return bool(np.abs(w).max(initial=0) < BELIEF_LIMIT)


def convolve(made: np.ndarray, w: np.ndarray, layer: FeatureLayer) -> np.ndarray:
    """Sums of what lies under each feature at each place, int32 (images, HS, WS, F); exact."""
    high, wide, n_features = layer.places
    flat = w[:, ::-1, ::-1].reshape(-1, n_features).astype(np.float64)
    out = np.empty((len(made), high, wide, n_features), np.int32)
    rows = max(1, WINDOW_BYTES // (8 * high * wide * len(flat)))
    for a in range(0, len(made), rows):
        views = np.lib.stride_tricks.sliding_window_view(made[a : a + rows], layer.window, axis=(2, 3))
        columns = np.moveaxis(views, 1, 3).reshape(-1, len(flat)).astype(np.float64)
        sums = np.clip(columns @ flat, -(2**30), 2**30)
        out[a : a + rows] = sums.reshape(-1, high, wide, n_features)
    return out


def to_features(w: np.ndarray) -> np.ndarray:
    """W of the kernels as features (F, channels, h, w)."""
    return np.ascontiguousarray(np.moveaxis(w[:, ::-1, ::-1], -1, 0))


def from_features(features: np.ndarray) -> np.ndarray:
    """Features (F, channels, h, w) as W of the kernels."""
    return np.ascontiguousarray(np.moveaxis(features, 0, -1)[:, ::-1, ::-1])


def rows_of(block: Block) -> np.ndarray:
    """Number of each row of a block."""
    if block.rows is not None:
        return block.rows
    return np.arange(block.start, block.start + len(block.x))
