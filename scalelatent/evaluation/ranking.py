"""How near every document is to some queries: one block of scores at a time, never all pairs at once."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from scalelatent.errors import DataError
from scalelatent.kernels.onehot_compiled import count_matches

__all__ = ["RETRIEVAL_METRICS", "Scores", "scores_of"]

RETRIEVAL_METRICS = ("cosine", "euclidean", "overlap")
"""What `retrieval_accuracy` ranks by: the last counts codes that two rows share."""


class Scores(Protocol):
    """Scores of all documents for any run of queries; larger is nearer."""

    n: int

    def block(self, queries: np.ndarray) -> np.ndarray:
        """Scores (queries, n), float32 or float64."""


def scores_of(output: Any, metric: str) -> Scores:
    """The scores of a metric over an output.

    Parameters
    ----------
    output : ndarray or scipy CSR, shape (n, d)
        Real numbers for "cosine" (dense or sparse) and "euclidean"; codes (whole numbers of at least 0) for
        "overlap".
    metric : {"cosine", "euclidean", "overlap"}

    Returns
    -------
    Scores
        The cosine of a row of zeros with any row is 0.

    Raises
    ------
    DataError
        An unknown metric, rows that it does not know, NaN.

    Examples
    --------
    >>> scores = scores_of(np.array([[1, 2], [1, 3], [4, 3]], dtype=np.uint16), "overlap")
    >>> scores.block(np.array([1])).tolist()
    [[1.0, 2.0, 1.0]]
    """
    if metric not in RETRIEVAL_METRICS:
        raise DataError(f"metric={metric!r} is not one of {', '.join(RETRIEVAL_METRICS)}")
    sparse = hasattr(output, "tocsr")
    values = output.tocsr() if sparse else np.asarray(output)
    if values.ndim != 2 or min(values.shape) < 1:
        raise DataError(f"the output has shape {values.shape}: give rows (n, d) of at least one column")
    numbers: np.ndarray = values.data if sparse else values  # type: ignore[assignment]
    if numbers.dtype.kind not in "buif" or (numbers.dtype.kind == "f" and not np.isfinite(numbers).all()):
        raise DataError("the output holds NaN, infinity or no numbers: nothing can be ranked by these rows")
    if metric == "overlap":
        return _Overlap(values)
    if metric == "euclidean":
        return _Euclidean(values)
    return _SparseCosine(values) if sparse else _Cosine(values)


class _Cosine:
    def __init__(self, rows: np.ndarray) -> None:
        rows = rows.astype(np.float64)
        lengths = np.sqrt(np.einsum("nd,nd->n", rows, rows))[:, None]
        self._unit = np.divide(rows, lengths, out=rows, where=lengths > 0)
        self.n = len(rows)

    def block(self, queries: np.ndarray) -> np.ndarray:
        return self._unit[queries] @ self._unit.T


class _SparseCosine:
    def __init__(self, rows: Any) -> None:
        import scipy.sparse

        lengths = np.sqrt(np.asarray(rows.multiply(rows).sum(axis=1), dtype=np.float64)).ravel()
        scale = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
        self._unit = scipy.sparse.csr_array(scipy.sparse.diags_array(scale) @ rows.astype(np.float64))
        self._columns = self._unit.T.tocsr()
        self.n = rows.shape[0]

    def block(self, queries: np.ndarray) -> np.ndarray:
        return (self._unit[queries] @ self._columns).toarray()


class _Euclidean:
    def __init__(self, rows: Any) -> None:
        if not isinstance(rows, np.ndarray):
            raise DataError("metric='euclidean' ranks dense rows; use metric='cosine' for sparse ones")
        # Around the mean, lest distances between near rows drown in the squares of their lengths.
        self._rows = rows.astype(np.float64)
        self._rows -= self._rows.mean(axis=0)
        self._half = 0.5 * np.einsum("nd,nd->n", self._rows, self._rows)
        self.n = len(rows)

    def block(self, queries: np.ndarray) -> np.ndarray:
        return self._rows[queries] @ self._rows.T - self._half


class _Overlap:
    def __init__(self, rows: Any) -> None:
        if not isinstance(rows, np.ndarray) or rows.dtype.kind not in "ui" or rows.min() < 0:
            raise DataError(
                "metric='overlap' counts the codes that rows share: give what `codes` of a bootstrap network "
                "gives, whole numbers of at least 0"
            )
        short = int(rows.max()) <= np.iinfo(np.uint16).max
        self._codes = np.ascontiguousarray(rows, dtype=np.uint16 if short else np.uint32)
        self.n = len(rows)

    def block(self, queries: np.ndarray) -> np.ndarray:
        return count_matches(self._codes[queries], self._codes)
