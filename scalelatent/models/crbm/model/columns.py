"""Units of the columns of x: learning sees standardised columns, and the learned parameters fit the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scalelatent.contract.learners import Block

from .energy import CrbmShape

# Largest standardised value, in units of the range of a column; a rarely used column would have larger ones.
RANGE_SHARE = 0.1
# Mean squared length of a standardised row is at most this. It is two to three times that of the binary
# images of 784 pixels for which the learning rates were chosen.
MOST_LENGTH = 300.0


@dataclass(frozen=True)
class ColumnUnits:
    """Shift and scale of each column of x, float32 (x,)."""

    shift: np.ndarray
    scale: np.ndarray

    @classmethod
    def measure(cls, x: np.ndarray) -> ColumnUnits | None:
        """Return the units of rows (n, x); None for zeros and ones, and for rows that are not finite."""
        if ((x == 0) | (x == 1)).all():
            return None
        x = x.astype(np.float64)
        shift, spread = x.mean(axis=0), np.ptp(x, axis=0)
        scale = np.maximum(x.std(axis=0), RANGE_SHARE * spread)
        scale[spread == 0] = 1.0
        length = float((((x - shift) / scale) ** 2).sum(axis=1).mean())
        scale *= max(1.0, length / MOST_LENGTH) ** 0.5
        units = cls(shift.astype(np.float32), scale.astype(np.float32))
        return units if np.isfinite([units.shift, 1 / units.scale]).all() else None

    def standardise(self, block: Block) -> Block:
        """Return the block with standardised columns in float32."""
        return replace(block, x=((block.x - self.shift) / self.scale).astype(np.float32, copy=False))

    def for_rows(self, shape: CrbmShape, theta: np.ndarray) -> np.ndarray:
        """Return parameters for rows as they are, from those for standardised rows."""
        return self._convert(shape, theta, 1 / self.scale.astype(np.float64), -1.0)

    def for_standardised(self, shape: CrbmShape, theta: np.ndarray) -> np.ndarray:
        """Return parameters for standardised rows, from those for rows as they are."""
        return self._convert(shape, theta, self.scale.astype(np.float64), 1.0)

    def _convert(self, shape: CrbmShape, theta: np.ndarray, factor: np.ndarray, sign: float) -> np.ndarray:
        """Multiply the columns of Wvx and Whx; move their products with the shift to or from the biases."""
        out = theta.copy()
        params = shape.split(out)
        for weights, bias in ((params.Wvx, params.bv), (params.Whx, params.bh)):
            raw = weights * (factor if sign < 0 else 1.0)
            bias += (sign * (raw @ self.shift.astype(np.float64))).astype(bias.dtype)
            weights *= factor.astype(weights.dtype)
        return out
