"""Select rows of a dataset by their numbers; the new dataset reads `x` from the old one when needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data import csr
from scalelatent.data.columns import DatasetColumns, label_source
from scalelatent.data.dataset import Dataset

from .sources import ArrayRows, RowSource

if TYPE_CHECKING:
    import numpy.typing as npt

    from scalelatent.kernels.arrays import DenseOrCsr

# One read covers at most this many consecutive rows of the original dataset.
READ_ROWS = 8192


def select_rows(dataset: Dataset, numbers: npt.ArrayLike) -> Dataset:
    """Return the rows `numbers` as a dataset, in ascending order; labels and weights stay in memory."""
    rows = np.unique(np.asarray(numbers, dtype=np.int64))
    x = SelectedRows(dataset.read_x, rows, dataset.feature_shape, dataset.dtype, dataset.is_sparse)
    weight = dataset.read_weight(0, len(dataset))
    weights, names = None if weight is None else ArrayRows(weight[rows]), dataset.feature_names
    if not dataset.has_targets:
        y = label_source(dataset.read_y(0, len(dataset))[rows]) if dataset.has_y else None
        return Dataset(DatasetColumns(x, y, weights, feature_names=names))
    outputs = SelectedRows(dataset.read_targets, rows, (int(dataset.n_targets or 0),), np.dtype("u1"), False)
    return Dataset(DatasetColumns(x, None, weights, feature_names=names)).with_target(
        Dataset(DatasetColumns(outputs))
    )


class SelectedRows(RowSource):
    """Rows of a dataset with the numbers `rows`, which the function `read` reads from the whole dataset."""

    def __init__(
        self,
        read: Callable[[int, int], DenseOrCsr],
        rows: np.ndarray,
        feature_shape: tuple[int, ...],
        dtype: np.dtype,
        sparse: bool,
    ) -> None:
        self.shape, self.dtype, self.sparse = (len(rows), *feature_shape), np.dtype(dtype), sparse
        self._read, self._rows = read, rows

    def count_entries(self, start: int, stop: int) -> int:
        parts = (self.read(a, b) for a, b in self.pieces(start, stop))
        return sum(int(part.nnz) for part in parts if not isinstance(part, np.ndarray))

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        if stop <= start:
            return []
        whole = self._rows[start:stop]
        first = np.arange(whole[0], whole[-1] + 1, READ_ROWS)
        edges = np.unique(np.append(np.searchsorted(whole, first), len(whole))) + start
        return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))

    def read(self, start: int, stop: int) -> DenseOrCsr:
        parts = []
        for a, b in self.pieces(start, stop):
            numbers = self._rows[a:b]
            first, last = int(numbers[0]), int(numbers[-1]) + 1
            rows = self._read(first, last)
            parts.append(rows if len(numbers) == last - first else rows[numbers - first])
        if not parts:
            return np.empty((0, *self.shape[1:]), dtype=self.dtype)
        found = csr.concatenate(parts)
        return found.reshape(-1, *self.shape[1:]) if isinstance(found, np.ndarray) else found
