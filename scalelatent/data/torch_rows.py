"""Feed rows of a dataset to PyTorch's DataLoader, in a new order each epoch. This module imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from scalelatent.errors import DataError
from scalelatent.kernels.streams import stream

if TYPE_CHECKING:
    from .dataset import Dataset


class TorchRows(IterableDataset):
    """Rows, or batches of rows, in an order that depends on (seed, epoch); see `Dataset.to_torch`."""

    def __init__(self, ds: Dataset, seed: int | None, batch_size: int | None, piece_rows: int) -> None:
        if (batch_size is not None and batch_size < 1) or piece_rows < 1:
            raise DataError(f"batch_size={batch_size}, piece_rows={piece_rows}: both must be at least 1")
        self._ds, self._seed, self._batch = ds, seed, batch_size
        cut = (range(a, b, piece_rows) for a, b in ds.pieces())
        self._pieces = [(u, min(u + piece_rows, part.stop)) for part in cut for u in part]
        # Shared memory passes the epoch to DataLoader workers that persist between epochs.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        """Return the number of rows, or of batches, in one epoch."""
        if self._batch is None:
            return len(self._ds)
        return sum(-(-(b - a) // self._batch) for a, b in self._pieces)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that determines the order of rows in the next iteration."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[torch.Tensor | tuple[torch.Tensor, ...]]:
        epoch = int(self._epoch)
        order = self._shuffled(epoch, 0, len(self._pieces))
        worker = get_worker_info()
        numbers = order if worker is None else order[worker.id :: worker.num_workers]
        for number in numbers.tolist():
            a, b = self._pieces[number]
            rows = self._shuffled(epoch, 1 + number, b - a)
            columns = [torch.from_numpy(column[rows]) for column in self._read(a, b)]
            for i in range(0, b - a, self._batch or 1):
                parts = [c[i] if self._batch is None else c[i : i + self._batch] for c in columns]
                yield tuple(parts) if len(parts) > 1 else parts[0]

    def _shuffled(self, epoch: int, draw: int, count: int) -> np.ndarray:
        if self._seed is None:
            return np.arange(count)
        return stream(self._seed, "torch-rows", epoch, draw).permutation(count)

    def _read(self, start: int, stop: int) -> list[np.ndarray]:
        """Return the dense rows, then codes or targets, and then weights, if the dataset has them."""
        ds = self._ds
        rows = ds.read_x(start, stop)
        dense = rows if isinstance(rows, np.ndarray) else rows.toarray()
        columns = [dense.reshape(stop - start, *ds.feature_shape)]
        if ds.y_kind == "labels" and ds.classes is not None:
            columns.append(ds.read_codes(start, stop).astype(np.int64))
        elif ds.has_y:
            y = ds.read_y(start, stop)
            columns.append(y if isinstance(y, np.ndarray) else y.toarray())
        if ds.has_weight:
            columns.append(np.asarray(ds.read_weight(start, stop)))
        return columns
