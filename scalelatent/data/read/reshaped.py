"""Dense rows as CSR rows, and CSR rows as dense ones: row sources (see sources.py) that convert when read."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from scalelatent.data import csr
from scalelatent.data.schema import n_features

from .sources import RowSource

__all__ = ["DenseRows", "SparseRows"]


class DenseRows:
    """CSR rows as dense ones."""

    def __init__(self, source: RowSource) -> None:
        self._source: Any = source
        self.shape: tuple[int, ...] = source.shape
        self.dtype: np.dtype[Any] = source.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows `start:stop`."""
        return np.asarray(self._source.read(start, stop).toarray())

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows `start:stop` cut where reading is cheapest."""
        return self._source.pieces(start, stop)  # type: ignore[no-any-return]


class SparseRows:
    """Dense rows as CSR ones; the axes of a row become one, zeros are left out."""

    sparse = True

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self.shape: tuple[int, ...] = (source.shape[0], n_features(source.shape[1:]))
        self.dtype: np.dtype[Any] = csr.check_dtype(source.dtype, "the rows")

    @functools.cached_property
    def nnz(self) -> int:
        """Numbers that are not zero; reads all rows, once."""
        return self._count(0, self.shape[0])

    def entries(self, start: int, stop: int) -> int:
        """Numbers of the rows `start:stop` that are not zero; reads them."""
        return self.nnz if (start, stop) == (0, self.shape[0]) else self._count(start, stop)

    def _count(self, start: int, stop: int) -> int:
        return sum(int(np.count_nonzero(self._source.read(a, b))) for a, b in self.pieces(start, stop))

    def read(self, start: int, stop: int) -> Any:
        """Rows `start:stop`."""
        rows = self._source.read(start, stop).reshape(stop - start, self.shape[1])
        row, column = np.nonzero(rows)
        pointers = np.searchsorted(row, np.arange(stop - start + 1))
        columns = column.astype(csr.index_dtype(self.shape[1]))
        return csr.csr_of(rows[row, column], columns, pointers, self.shape[1])

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows `start:stop` cut where reading is cheapest."""
        return self._source.pieces(start, stop)
