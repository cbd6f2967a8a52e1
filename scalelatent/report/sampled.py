"""Rows that a report looks at: some of all, from everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalelatent.data import Dataset
from scalelatent.errors import DataError


def check_width(data: Dataset, wanted: int) -> None:
    """Refuse rows of another kind than the model was fitted to.

    Raises
    ------
    DataError
        Another number of features.
    """
    if data.n_features != wanted:
        raise DataError(
            f"{data.url or 'the data'} has {data.n_features} features a row, but the model was fitted to "
            f"{wanted}: report on rows of the kind it was fitted to"
        )


def spaced(n: int, wanted: int, places: int) -> list[tuple[int, int]]:
    """Evenly spaced runs of rows, together ``wanted`` (in at most so many places) or all.

    Examples
    --------
    >>> spaced(5, 10, 2), spaced(100, 10, 2)
    ([(0, 5)], [(0, 5), (95, 100)])
    """
    if n <= wanted:
        return [(0, n)]
    each = max(1, wanted // places)
    starts = np.linspace(0, n - each, wanted // each).astype(int)
    return [(int(a), int(a) + each) for a in starts]


def joined(parts: list[Any]) -> Any:
    """One array, or CSR array, of several.

    Examples
    --------
    >>> joined([np.zeros((1, 2)), np.ones((2, 2))]).shape
    (3, 2)
    """
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import scipy.sparse

    return scipy.sparse.vstack(parts, format="csr")
