"""The private function of scikit-learn that scalelatent uses, for releases with and without it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator

    from scalelatent.typing import RowsLike

try:
    from sklearn.utils._set_output import _wrap_data_with_container as _wrap
except ImportError:
    _wrap = None


def wrap_output(estimator: BaseEstimator, found: Any, X: RowsLike) -> Any:
    """Return an array of ``transform`` as the data frame that ``set_output`` requests; keep other objects."""
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
