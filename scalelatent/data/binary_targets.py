"""Binary outputs of rows, as kernels take them: zeros and ones in uint8, from wherever they lie.

They are a dataset's own `y`, dense (n, v) or multi-label CSR, or the rows of another dataset that goes with
it row for row (`Dataset.with_target`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError, ShardError

from . import csr

if TYPE_CHECKING:
    from .dataset import Dataset

__all__ = ["PairedRows", "as_binary"]


class PairedRows:
    """The rows of one dataset as the targets of another, a row source (see sources.py).

    Parameters
    ----------
    dataset : Dataset
        Whose rows are the targets.
    first : int
        Row of the other dataset's columns that has its first row.
    n_rows : int
        Rows of the other dataset's columns.
    """

    def __init__(self, dataset: Dataset, first: int, n_rows: int) -> None:
        self.dataset, self._first = dataset, first
        self.shape: tuple[int, ...] = (n_rows, dataset.n_features)
        self.dtype: np.dtype[Any] = dataset.dtype
        self.sparse = dataset.is_sparse

    @property
    def nnz(self) -> int | None:
        """Stored entries of CSR rows."""
        return self.dataset.nnz

    def entries(self, start: int, stop: int) -> int:
        """Stored entries of the rows `start:stop`."""
        return int(self.part(start, stop).nnz or 0)

    def part(self, start: int, stop: int) -> Dataset:
        """The rows `start:stop` as a dataset."""
        return self.dataset[start - self._first : stop - self._first]

    def number(self, row: int) -> int:
        """Which row of the whole other dataset belongs to one of this."""
        return self.dataset.extent[0] + row - self._first

    def read(self, start: int, stop: int) -> Any:
        """Rows `start:stop`, (stop - start, n_features)."""
        try:
            return self.dataset.read_x(start - self._first, stop - self._first)
        except ShardError as error:  # before it is taken for one of the rows beside it
            raise error.moved(url=self.dataset.url) from error.__cause__

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows `start:stop` cut where reading is cheapest."""
        cut = self.dataset.pieces(start - self._first, stop - self._first)
        return [(a + self._first, b + self._first) for a, b in cut]


def as_binary(rows: Any, first_row: int, what: str) -> np.ndarray:
    """Rows of zeros and ones of any type as uint8, dense.

    Parameters
    ----------
    rows : ndarray or scipy CSR, shape (n, v)
        False and True, 0 and 1 or 0.0 and 1.0.
    first_row : int
        Number of the first row, for messages.
    what : str
        What messages call the dataset.

    Returns
    -------
    ndarray of uint8, shape (n, v)
        A view of rows of uint8 or bool.

    Raises
    ------
    DataError
        A number that is neither 0 nor 1: naming its row and column.

    Examples
    --------
    >>> as_binary(np.array([[0.0, 1.0]]), 0, "the dataset")
    array([[0, 1]], dtype=uint8)
    >>> as_binary(np.array([[0, 255]]), 7, "dataset digits.zarr")
    Traceback (most recent call last):
    scalelatent.errors.DataError: dataset digits.zarr: column 1 of row 7 is 255, but an output is 0 or 1; ...
    """
    if csr.is_sparse(rows):
        values = _checked(rows.data, lambda i: _entry(rows, i), first_row, what)
        out = np.zeros(rows.shape, np.uint8)
        out[np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr)), rows.indices] = values
        return out
    width = rows.shape[1]
    return _checked(rows, lambda i: divmod(i, width), first_row, what)


def _checked(values: np.ndarray, place: Any, first_row: int, what: str) -> np.ndarray:
    """Values as uint8; `place` gives (row, column) of the one with a number."""
    if values.dtype == np.bool_:
        return values.view(np.uint8)
    if values.dtype == np.uint8:
        if not values.size or values.max() <= 1:
            return values
        good = values <= 1
    else:
        one = values == 1
        good = one | (values == 0)
        if good.all():
            return one.view(np.uint8)
    at = int(np.flatnonzero(~good)[0])
    row, column = place(at)
    raise DataError(
        f"{what}: column {column} of row {first_row + row} is {values.reshape(-1)[at]}, but an output is "
        f"0 or 1; make the outputs binary first, for example Dataset.from_arrays((v > 127).astype('u1'))"
    )


def _entry(rows: Any, i: int) -> tuple[int, int]:
    return int(np.searchsorted(rows.indptr, i, side="right")) - 1, int(rows.indices[i])
