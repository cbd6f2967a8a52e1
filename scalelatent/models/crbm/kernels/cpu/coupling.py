"""What all inference needs of the couplings, made once for many batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scalelatent.kernels.arrays import aligned
from scalelatent.kernels.tiles import packed_matrix
from scalelatent.kernels.vectors import BYTES
from scalelatent.models.crbm.kernels.inference import limits_of

# Lanes are the same on every machine, since products and sums over a row run by lanes: eight units at a time,
# and of sum-product sixteen edges, of which LLVM makes two vectors where a machine has narrower ones.
UNITS, EDGES = 8, 16
WIDE, LINE = BYTES * UNITS, BYTES * EDGES  # bytes; that of edges is also a cache line
# Visible units that are worked on together: their part of W and of the messages stays in the first-level
# cache from one direction to the other.
ROWS = 8


@dataclass(frozen=True)
class Coupling:
    """Couplings, and their exponentials filled up to whole vectors and blocks of rows.

    What is filled up has W = 0: its messages are 1, but for the last bit, and change no other unit.
    """

    # float32 (v, h): not a copy
    w: np.ndarray
    # factors, limit: Of :func:`..inference.limits_of`
    factors: int
    limit: float

    @cached_property
    def a(self) -> np.ndarray:
        """exp(W), filled up with ones."""
        return _filled_up(self.w, np.exp)

    @cached_property
    def padded(self) -> np.ndarray:
        """W, filled up with zeros."""
        return _filled_up(self.w, np.positive)

    @cached_property
    def row_products(self) -> np.ndarray:
        """The product of each row of A, (2, rows): a mantissa, and the bits of its integer exponent."""
        logs = np.zeros(self.a.shape[0])
        self.w.sum(axis=1, dtype=np.float64, out=logs[: len(self.w)])
        exponents = np.floor(logs / np.log(2.0))
        out = np.empty((2, len(logs)), dtype=np.float32)
        out[0], out[1].view(np.int32)[:] = np.exp(logs - exponents * np.log(2.0)), exponents
        return out

    @cached_property
    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        """W and its transpose as :func:`scalelatent.kernels.tiles.packed_matrix` makes them."""
        return packed_matrix(self.w), packed_matrix(np.ascontiguousarray(self.w.T))


def rounded_up(n: int) -> int:
    """Up to whole vectors of edges."""
    return -(-n // EDGES) * EDGES


def _filled_up(w: np.ndarray, of: np.ufunc) -> np.ndarray:
    v, h = w.shape
    out = aligned((-(-v // ROWS) * ROWS, rounded_up(h)))
    of(w, out=out[:v, :h])
    out[v:] = out[:, h:] = of(np.float32(0.0))
    return out


def make_coupling(w: np.ndarray) -> Coupling:
    w = np.asarray(w, dtype=np.float32)
    return Coupling(w, *limits_of(w))
