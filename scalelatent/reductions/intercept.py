"""Rows about their mean, with a constant column: what gives a linear map of rows an intercept.

A map W of the rows [x - mean, constant] is W_x (x - mean) + constant w, so that learners, kernels and
projections see a column more and need no code of their own. The mean is subtracted before rows are cast to
float32, which keeps the digits of rows far from the origin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.kernels.arrays import Array, check_same_width

if TYPE_CHECKING:
    import numpy.typing as npt


# Mean squares of a feature that rounding makes: of its mean in float32, and of sums about another point.
MEAN_NOISE, SUM_NOISE = 4e-15, 1e-13


@dataclass(frozen=True)
class Intercept:
    """The map x -> [x - mean, constant] of rows."""

    # float32 (p,), so that float32 rows and sums in float64 are of the same rows
    mean: np.ndarray
    constant: float

    def rows(self, backend: Backend, x: Array, dtype: npt.DTypeLike, name: str) -> Array:
        """Return the mapped rows, (rows, p + 1), in a named buffer of the backend."""
        check_same_width(x.shape[1], len(self.mean))
        dtype = np.dtype(np.float64 if backend.name == "reference" else dtype)
        # Rows of float64 or of large integers keep their digits until the mean is subtracted.
        given = backend.asarray(x, np.result_type(x.dtype, dtype), f"{name}.given")
        out = backend.buffer(name, (len(x), len(self.mean) + 1), dtype)
        backend.xp.subtract(given, backend.table(self).mean, out=out[:, :-1])
        out[:, -1] = self.constant
        return out


def mapped_rows(
    intercept: Intercept | None, backend: Backend, x: Array, dtype: npt.DTypeLike, name: str
) -> Array:
    """Return rows with their intercept where there is one, else as they are; contiguous, of ``dtype``."""
    return backend.asarray(x, dtype, name) if intercept is None else intercept.rows(backend, x, dtype, name)


def recentred(moment: np.ndarray, first: Intercept) -> tuple[np.ndarray, Intercept]:
    """Return second moments (m, p + 1, p + 1) about the mean of all rows, and the intercept they are of.

    ``moment`` are those about ``first``. The constant is the root mean squared length of the rows about their
    mean: the intercept then takes part in leading directions in any units.
    """
    total = moment.sum(axis=0)
    n = max(total[-1, -1], np.finfo(float).tiny)
    mean = (first.mean + total[:-1, -1] / n).astype(np.float32)
    shift = np.eye(len(total))
    shift[:-1, -1] = first.mean.astype(np.float64) - mean
    moment = shift @ moment @ shift.T
    # What rounding leaves of features that do not vary would pass for directions of the rows.
    flat = np.diagonal(moment.sum(axis=0))[:-1] <= n * (
        MEAN_NOISE * mean**2 + SUM_NOISE * shift[:-1, -1] ** 2
    )
    moment[:, :-1][:, flat] = 0.0
    moment[:, :, :-1][:, :, flat] = 0.0
    length = float(np.sqrt(max(np.trace(moment.sum(axis=0)[:-1, :-1]), 0.0) / n)) or 1.0
    moment[:, -1] *= length
    moment[:, :, -1] *= length
    return moment, Intercept(mean, length)
