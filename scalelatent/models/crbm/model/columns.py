"""Scaling of the columns of x: a fit standardises columns, and its final parameters fit the original rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scalelatent.contract.finite import LARGEST_VALUE, find_too_large
from scalelatent.contract.learners import Block
from scalelatent.kernels.sparse_rows import CsrRows

from .energy import CrbmShape

# Smallest scale of a column, as a share of its range (largest minus smallest value). Without this limit, a
# column that is rarely different from 0 would have very large standardised values.
RANGE_SHARE = 0.1
# Upper bound of the squared length of a standardised row, averaged over rows. The default learning rates were
# chosen for binary images of 784 pixels, whose average is a third to a half of this bound.
MAX_SQUARED_LENGTH = 300.0


@dataclass(frozen=True)
class ColumnUnits:
    """Shift and scale of each column of the rows x; a standardised value is (x - shift) / scale.

    CSR rows are not shifted, because their zeros are not stored. A dense column with more zeros than other
    values is not shifted either, so that the same rows give the same result in both formats.
    """

    shift: np.ndarray
    scale: np.ndarray

    @classmethod
    def measure(cls, x: np.ndarray | CsrRows) -> ColumnUnits | None:
        """Return the shift and scale of each column, measured on the rows ``x``.

        Return None if all values are 0 or 1, or if a value is NaN or too large.
        """
        values = x.data if isinstance(x, CsrRows) else x
        if ((values == 0) | (values == 1)).all() or not (np.abs(values) <= LARGEST_VALUE).all():
            return None
        n, dense = len(x), x if isinstance(x, np.ndarray) else x.to_dense()
        dense = dense.astype(np.float64)
        is_sparse = isinstance(x, CsrRows) | (2 * np.count_nonzero(dense, axis=0) < n)
        shift = np.where(is_sparse, 0.0, dense.mean(axis=0))
        spread = np.ptp(dense, axis=0)
        scale = np.maximum(dense.std(axis=0), RANGE_SHARE * spread)
        scale[spread == 0] = 1.0
        length = float((((dense - shift) / scale) ** 2).sum(axis=1).mean())
        scale *= max(1.0, length / MAX_SQUARED_LENGTH) ** 0.5
        return cls(shift.astype(np.float32), scale.astype(np.float32))

    def standardise(self, block: Block) -> Block:
        """Return the block with standardised columns in float32.

        Raises
        ------
        ValueError
            A value is too large; the message names its row and feature.
        """
        x = block.x
        if place := find_too_large(block):
            raise ValueError(place)
        if isinstance(x, CsrRows):
            scaled = (x.data / self.scale[x.indices]).astype(np.float32, copy=False)
            return replace(block, x=replace(x, data=scaled))
        return replace(block, x=((x - self.shift) / self.scale).astype(np.float32, copy=False))

    def convert_to_original(self, shape: CrbmShape, theta: np.ndarray) -> np.ndarray:
        """Return parameters that give the original rows the biases that ``theta`` gives standardised rows."""
        return self._convert(shape, theta, 1 / self.scale.astype(np.float64), -1.0)

    def convert_to_standardised(self, shape: CrbmShape, theta: np.ndarray) -> np.ndarray:
        """Return parameters that give standardised rows the biases that ``theta`` gives the original rows."""
        return self._convert(shape, theta, self.scale.astype(np.float64), 1.0)

    def _convert(self, shape: CrbmShape, theta: np.ndarray, factor: np.ndarray, sign: float) -> np.ndarray:
        """Multiply weights of x by ``factor``; add ``sign`` times the effect of the shift to the biases."""
        out = theta.copy()
        params = shape.split(out)
        for weights, bias in ((params.Wvx, params.bv), (params.Whx, params.bh)):
            raw = weights * (factor if sign < 0 else 1.0)
            bias += (sign * (raw @ self.shift.astype(np.float64))).astype(bias.dtype)
            weights *= factor.astype(weights.dtype)
        return out
