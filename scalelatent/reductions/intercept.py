"""Intercept of a linear map: rows minus their mean, with a constant column.

The product of W with a row [x - mean, constant] is W_x (x - mean) + constant w. Learners, kernels and
projections therefore only see one more column. The mean is subtracted before rows are cast to float32, which
keeps the digits of rows far from the origin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.kernels.arrays import Array, check_same_width

if TYPE_CHECKING:
    import numpy.typing as npt


# A mean square of a centred feature counts as a rounding error up to the sum of two terms: the first number
# times its squared mean (which is float32), and the second times the squared shift between the first and the
# final mean.
MEAN_NOISE, SUM_NOISE = 4e-15, 1e-13


@dataclass(frozen=True)
class Intercept:
    """Map of rows x -> [x - mean, constant]."""

    # float32 (p,), so that float32 rows and float64 sums use the same mean.
    mean: np.ndarray
    constant: float


def map_rows(
    intercept: Intercept | None, backend: Backend, x: Array, dtype: npt.DTypeLike, name: str
) -> Array:
    """Return contiguous rows of ``dtype`` in the buffer ``name`` of the backend.

    With an intercept, the rows are [x - mean, constant], (rows, p + 1).
    """
    if intercept is None:
        return backend.asarray(x, dtype, name)
    check_same_width(x.shape[1], len(intercept.mean))
    dtype = np.dtype(np.float64 if backend.name == "reference" else dtype)
    # Rows of float64 or large integers keep their digits until the mean is subtracted.
    given = backend.asarray(x, np.result_type(x.dtype, dtype), f"{name}.given")
    out = backend.buffer(name, (len(x), len(intercept.mean) + 1), dtype)
    backend.xp.subtract(given, backend.copy_table(intercept).mean, out=out[:, :-1])
    out[:, -1] = intercept.constant
    return out


def recenter(moment: np.ndarray, first: Intercept) -> tuple[np.ndarray, Intercept]:
    """Return the second moments (m, p + 1, p + 1) about the mean of all rows, and their intercept.

    ``moment`` are the second moments about ``first``. The constant of the new intercept is the root mean
    squared length of the rows about their mean, so that the constant column matters in any units of the
    features.
    """
    total = moment.sum(axis=0)
    n = max(total[-1, -1], np.finfo(float).tiny)
    mean = (first.mean + total[:-1, -1] / n).astype(np.float32)
    shift = np.eye(len(total))
    shift[:-1, -1] = first.mean.astype(np.float64) - mean
    moment = shift @ moment @ shift.T
    # Rounding errors of features that do not vary would look like directions of the rows.
    flat = np.diagonal(moment.sum(axis=0))[:-1] <= n * (
        MEAN_NOISE * mean**2 + SUM_NOISE * shift[:-1, -1] ** 2
    )
    moment[:, :-1][:, flat] = 0.0
    moment[:, :, :-1][:, :, flat] = 0.0
    length = float(np.sqrt(max(np.trace(moment.sum(axis=0)[:-1, :-1]), 0.0) / n)) or 1.0
    moment[:, -1] *= length
    moment[:, :, -1] *= length
    return moment, Intercept(mean, length)
