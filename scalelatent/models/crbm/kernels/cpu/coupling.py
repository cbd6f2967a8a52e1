"""The couplings W with exponentials and packed copies, computed once for all rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scalelatent.kernels.arrays import aligned_empty
from scalelatent.kernels.tiles import packed_matrix
from scalelatent.kernels.vectors import BYTES
from scalelatent.models.crbm.kernels.inference import choose_limits, largest_magnitude

# Kernels compute 8 units, or 16 edges, at a time on every machine. The numbers are fixed because they
# determine the order of sums. LLVM splits a vector that is wider than the registers of the machine.
UNITS, EDGES = 8, 16
# Bytes of 8 units, and of 16 edges. The latter is also a cache line.
UNIT_BYTES, LINE_BYTES = BYTES * UNITS, BYTES * EDGES
# Visible units of a block. Their part of W and of the messages stays in the first-level cache while messages
# go in both directions.
ROWS = 8


@dataclass(frozen=True)
class Coupling:
    """Couplings, and their exponentials padded to whole vectors and blocks of rows.

    The padding has W = 0, so its messages are 1 within rounding and do not change any other unit.
    """

    # float32 (v, h): the couplings W; the caller's own array if it was float32
    w: np.ndarray
    # Number of messages that are multiplied before mantissa and exponent are split, and upper bound of |log
    # odds| when beliefs are computed; both come from :func:`..inference.choose_limits`
    factors: int
    limit: float

    @cached_property
    def a(self) -> np.ndarray:
        """exp(W), padded with ones."""
        return _pad(self.w, np.exp)

    @cached_property
    def padded(self) -> np.ndarray:
        """W, padded with zeros."""
        return _pad(self.w, np.positive)

    @cached_property
    def row_products(self) -> np.ndarray:
        """Product of each row of exp(W), (2, rows): the mantissa, and the bits of the integer exponent."""
        logs = np.zeros(self.a.shape[0])
        self.w.sum(axis=1, dtype=np.float64, out=logs[: len(self.w)])
        exponents = np.floor(logs / np.log(2.0))
        out = np.empty((2, len(logs)), dtype=np.float32)
        out[0], out[1].view(np.int32)[:] = np.exp(logs - exponents * np.log(2.0)), exponents
        return out

    @cached_property
    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        """W and its transpose in the layout of :func:`scalelatent.kernels.tiles.packed_matrix`."""
        return packed_matrix(self.w), packed_matrix(np.ascontiguousarray(self.w.T))


def round_up(n: int) -> int:
    """Return n rounded up to whole vectors of edges."""
    return -(-n // EDGES) * EDGES


def _pad(w: np.ndarray, function: np.ufunc) -> np.ndarray:
    v, h = w.shape
    out = aligned_empty((-(-v // ROWS) * ROWS, round_up(h)))
    function(w, out=out[:v, :h])
    out[v:] = out[:, h:] = function(np.float32(0.0))
    return out


def make_coupling(w: np.ndarray) -> Coupling:
    """Return the couplings, checked; exponentials and packed forms are computed at first use."""
    w = np.asarray(w, dtype=np.float32)
    return Coupling(w, *choose_limits(largest_magnitude(w)))
