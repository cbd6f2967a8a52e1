"""Sparse rows in compressed sparse row (CSR) form, the form that kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_array


@dataclass(frozen=True)
class CsrRows:
    """Rows in compressed sparse row (CSR) form: the arrays of scipy's ``csr_array``, without scipy.

    Row ``i`` has the values ``data[indptr[i]:indptr[i + 1]]`` in the strictly increasing columns
    ``indices[indptr[i]:indptr[i + 1]]``. The arrays are never changed in place.
    """

    data: np.ndarray  # values, (entries,)
    indices: np.ndarray  # columns, int32 or int64 (entries,)
    indptr: np.ndarray  # int32 or int64 (rows + 1,), from 0 to the number of entries
    shape: tuple[int, int]  # (rows, features)

    @classmethod
    def from_scipy(cls, matrix: csr_array) -> CsrRows:
        """Return the rows of a scipy CSR matrix or array, without copies."""
        rows, features = matrix.shape
        return cls(matrix.data, matrix.indices, matrix.indptr, (int(rows), int(features)))

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.indices.nbytes + self.indptr.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> CsrRows:
        """Return a contiguous range of rows; ``data`` and ``indices`` are views, not copies."""
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise ValueError(f"the step of a slice of CsrRows must be 1, not {step}: use take for other rows")
        stop = max(start, stop)
        first, last = int(self.indptr[start]), int(self.indptr[stop])
        pointers = self.indptr[start : stop + 1] - self.indptr[start]
        return CsrRows(
            self.data[first:last], self.indices[first:last], pointers, (stop - start, self.shape[1])
        )

    def to_dense(self) -> np.ndarray:
        """Return a dense array (rows, features) of the same dtype."""
        out = np.zeros(self.shape, self.data.dtype)
        first = np.arange(self.shape[0], dtype=np.int64) * self.shape[1]
        out.reshape(-1)[np.repeat(first, np.diff(self.indptr)) + self.indices] = self.data
        return out

    def take(self, rows: np.ndarray) -> CsrRows:
        """Return a copy of the rows with the numbers ``rows``, in the order of these numbers."""
        counts = np.diff(self.indptr)[rows]
        pointers = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        entries = np.arange(pointers[-1]) + np.repeat(self.indptr[rows] - pointers[:-1], counts)
        return CsrRows(self.data[entries], self.indices[entries], pointers, (len(rows), self.shape[1]))

    def keep_columns(self, columns: np.ndarray) -> CsrRows:
        """Return a copy of the rows with only the entries in these columns; the shape does not change."""
        inside = np.zeros(self.shape[1], dtype=bool)
        inside[columns] = True
        kept = inside[self.indices]
        pointers = np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])[self.indptr]
        return CsrRows(self.data[kept], self.indices[kept], pointers, self.shape)

    @staticmethod
    def concatenate(parts: Sequence[CsrRows]) -> CsrRows:
        """Return the rows of all ``parts`` in order; there is at least one part."""
        if len(parts) == 1:
            return parts[0]
        counts = np.concatenate([np.diff(part.indptr) for part in parts])
        return CsrRows(
            np.concatenate([part.data for part in parts]),
            np.concatenate([part.indices for part in parts]),
            np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]),
            (len(counts), parts[0].shape[1]),
        )
