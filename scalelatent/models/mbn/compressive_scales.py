"""Scales of the rows and outputs that a compressive network learns from, and what has no place among them.

Rows are looked at a piece at a time, whatever their width; of CSR rows only what is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from scalelatent.data import Dataset
from scalelatent.engine.grid import spaced
from scalelatent.estimators.base import check_finite

SAMPLED_PLACES, SAMPLED_ROWS = 64, 256
# Of a piece: rows, and bytes of them as float64 (of CSR rows, as they are stored).
PIECE_ROWS, PIECE_BYTES = 1024, 2**24


def pieces(dataset: Dataset, runs: list[tuple[int, int]]) -> Iterator[tuple[int, Any]]:
    """(number of the first row, rows) of runs of rows, a few megabytes at a time.

    Examples
    --------
    >>> [(first, len(x)) for first, x in pieces(Dataset.from_arrays(np.zeros((1500, 2))), [(0, 1500)])]
    [(0, 1024), (1024, 476)]
    """
    row_bytes = dataset.nbytes // len(dataset) if dataset.is_sparse else 8 * dataset.n_features
    rows = max(1, min(PIECE_ROWS, PIECE_BYTES // max(row_bytes, 1)))
    for start, stop in runs:
        for a in range(start, stop, rows):
            yield a, dataset.read_x(a, min(a + rows, stop))


def check_rows(dataset: Dataset, what: str) -> None:
    """Refuse NaN, infinity and numbers beyond float32; reads all rows.

    Raises
    ------
    DataError
        Naming the dataset, row and column.
    """
    for first, x in pieces(dataset, [(0, len(dataset))]):
        check_finite(x, _named(dataset, what), first)


def surely_fine(dataset: Dataset) -> bool:
    """Whether :func:`check_rows` need not read to find nothing.

    Examples
    --------
    >>> surely_fine(Dataset.from_arrays(np.zeros((2, 2), np.uint8)))
    True
    """
    return dataset.known_finite and (dataset.dtype.kind != "f" or dataset.dtype.itemsize <= 4)


def scales(x: Dataset, z: Dataset) -> tuple[tuple[float, float], tuple[np.ndarray, float]]:
    """((shift, scale) of rows, (mean, size) of outputs), one number for all columns but for the mean; of some
    thousand rows from evenly spaced places.

    Sparse rows are not shifted, so their zeros stay what most of them is.

    Raises
    ------
    DataError
        NaN, infinity or a number beyond float32 among them.
    """
    rows = Spread(1)
    for piece in _sampled(x, "X"):
        if x.is_sparse:
            rows.add_squares(piece.data, piece.shape[0] * piece.shape[1])
        else:
            rows.add(piece.reshape(-1, 1))
    outputs = Spread(z.n_features)
    for piece in _sampled(z, "the output"):
        outputs.add(piece if isinstance(piece, np.ndarray) else piece.toarray())
    return (float(rows.mean[0]), rows.size() or 1.0), (outputs.mean, outputs.size() or 1.0)


class Spread:
    """Means of columns and the mean square around them, of rows that come piece by piece.

    Pieces are merged by their differences (Chan, Golub, LeVeque), so that nothing cancels where a mean is
    large beside the spread.

    Examples
    --------
    >>> spread = Spread(1)
    >>> spread.add(np.array([[1.0], [3.0]]))
    >>> spread.add(np.array([[5.0]]))
    >>> float(spread.mean[0]), round(spread.size() ** 2, 4)
    (3.0, 2.6667)
    """

    def __init__(self, columns: int) -> None:
        self.mean = np.zeros(columns)
        self._count, self._squares = 0, 0.0

    def add(self, rows: np.ndarray) -> None:
        """More rows, (n, columns)."""
        part = rows.astype(np.float64)
        mean, count = part.mean(axis=0), self._count + len(part)
        part -= mean
        off = mean - self.mean
        self._squares += float(np.square(part, out=part).sum())
        self._squares += float(off @ off) * self._count * len(part) / count
        self.mean += off * (len(part) / count)
        self._count = count

    def add_squares(self, values: np.ndarray, count: int) -> None:
        """So many numbers around 0, of which all but ``values`` are 0; not to be mixed with :meth:`add`."""
        part = values.astype(np.float64)
        self._squares += float(part @ part)
        self._count += count

    def size(self) -> float:
        """Root of the mean square, over all columns."""
        return float(np.sqrt(self._squares / (self._count * len(self.mean))))


def _sampled(dataset: Dataset, what: str) -> Iterator[Any]:
    runs = spaced(len(dataset), SAMPLED_PLACES * SAMPLED_ROWS, SAMPLED_PLACES)
    for first, x in pieces(dataset, runs):
        check_finite(x, _named(dataset, what), first)
        yield x


def _named(dataset: Dataset, what: str) -> str:
    return f"{what} ({dataset.url})" if dataset.url else what
