"""The couplings W (visible, hidden units), with exponentials and copies that kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scalelatent.kernels.arrays import aligned_empty
from scalelatent.kernels.tiles import packed_matrix
from scalelatent.kernels.vectors import BYTES
from scalelatent.models.crbm.kernels.inference import choose_limits, find_largest_magnitude

# Number of units, and of edges (pairs of a visible and a hidden unit), in one vector. Both numbers determine
# the order of sums, so they are the same on every machine; LLVM splits vectors wider than the registers.
UNITS, EDGES = 8, 16
# Bytes of a vector of 8 units, and of a vector of 16 edges, which is also the size of a cache line.
UNIT_BYTES, LINE_BYTES = BYTES * UNITS, BYTES * EDGES
# Number of visible units that are processed together. Their rows of W and of the messages stay in the
# first-level cache while messages are sent in both directions.
ROWS = 8


@dataclass(frozen=True)
class Coupling:
    """Couplings W and exp(W), padded to multiples of 8 visible units and of 16 hidden units.

    Kernels process 8 visible and 16 hidden units at a time. The padding has W = 0, so its messages (odds that
    one unit sends to another) are 1 within rounding and do not change any other unit.
    """

    w: np.ndarray  # float32 (v, h): the couplings W; not a copy if the caller's array is float32
    # Number of messages that are multiplied before mantissa and exponent are split, and upper bound of |log
    # odds| when beliefs are computed. The function ``choose_limits`` computes both numbers from max |W|
    factors: int
    limit: float

    @cached_property
    def exp_w(self) -> np.ndarray:
        """exp(W), padded with ones to multiples of 8 visible and 16 hidden units, for whole vectors."""
        return _pad(self.w, np.exp)

    @cached_property
    def padded(self) -> np.ndarray:
        """W, padded with zeros to multiples of 8 visible and 16 hidden units, for whole vectors."""
        return _pad(self.w, np.positive)

    @cached_property
    def row_products(self) -> np.ndarray:
        """Product of each row of exp(W): its mantissas, and below them the bits of its integer exponents."""
        logs = np.zeros(self.exp_w.shape[0])
        self.w.sum(axis=1, dtype=np.float64, out=logs[: len(self.w)])
        exponents = np.floor(logs / np.log(2.0))
        out = np.empty((2, len(logs)), dtype=np.float32)
        out[0], out[1].view(np.int32)[:] = np.exp(logs - exponents * np.log(2.0)), exponents
        return out

    @cached_property
    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        """W and its transpose, in the memory layout that the kernel of mean field multiplies."""
        return packed_matrix(self.w), packed_matrix(np.ascontiguousarray(self.w.T))


def round_up(n: int) -> int:
    """Return n rounded up to a multiple of 16, the number of edges in a vector."""
    return -(-n // EDGES) * EDGES


def _pad(w: np.ndarray, function: np.ufunc) -> np.ndarray:
    v, h = w.shape
    out = aligned_empty((-(-v // ROWS) * ROWS, round_up(h)))
    function(w, out=out[:v, :h])
    out[v:] = out[:, h:] = function(np.float32(0.0))
    return out


def make_coupling(w: np.ndarray) -> Coupling:
    """Return the couplings W, or raise `WeightError`; other arrays of them are computed at first use."""
    w = np.asarray(w, dtype=np.float32)
    return Coupling(w, *choose_limits(find_largest_magnitude(w)))
