"""All private helpers of scikit-learn that scalelatent uses, each with a replacement if it is missing."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator

    from scalelatent.kernels.arrays import DenseOrCsr
    from scalelatent.typing import RowsLike, WeightsLike

try:
    from sklearn.utils._set_output import _wrap_data_with_container as _wrap
except ImportError:
    _wrap = None

try:
    from sklearn.utils.validation import _check_sample_weight
except ImportError:
    _check_sample_weight = None

# The largest weight must be between 1 / LARGEST_WEIGHT and this, so that sums of a billion rows fit float64.
LARGEST_WEIGHT = 1e30


def wrap_output(estimator: BaseEstimator, found: Any, X: RowsLike) -> Any:
    """Return the array of a transform in the container that ``set_output`` requests; keep other objects."""
    if not isinstance(found, np.ndarray):
        return found
    if _wrap is None:
        if getattr(estimator, "_sklearn_output_config", {}):
            warnings.warn(
                "this scikit-learn lacks what set_output needs: the output is a numpy array", stacklevel=3
            )
        return found
    # Each number of a row becomes one column, for rows of any shape.
    try:
        framed = _wrap("transform", found.reshape(len(found), -1), X, estimator)
    except ImportError as error:
        raise DataError(f"{error}: pip install 'scalelatent[polars]' (or pandas)") from error
    return found if isinstance(framed, np.ndarray) else framed


def check_weights(sample_weight: WeightsLike, X: DenseOrCsr) -> np.ndarray:
    """Return finite, nonnegative float64 weights (n). Refuse weights that are all too large or too small."""
    weights = _finite_weights(sample_weight, X)
    largest = float(weights.max(initial=0.0))
    if largest and not 1 / LARGEST_WEIGHT <= largest <= LARGEST_WEIGHT:
        raise ValueError(
            f"the largest sample_weight is {largest:g}, outside of {1 / LARGEST_WEIGHT:g} to "
            f"{LARGEST_WEIGHT:g}: divide sample_weight by its mean"
        )
    return weights


def _finite_weights(sample_weight: WeightsLike, X: DenseOrCsr) -> np.ndarray:
    if _check_sample_weight is not None:
        return np.asarray(_check_sample_weight(sample_weight, X, ensure_non_negative=True))
    if np.asarray(sample_weight).ndim == 0:
        sample_weight = np.full(len(X), sample_weight)
    weights = np.asarray(sample_weight, np.float64)
    if weights.shape != (len(X),):
        raise ValueError(f"sample_weight.shape == {weights.shape}, expected {(len(X),)}")
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError("sample_weight has negative or non-finite values")
    return weights
