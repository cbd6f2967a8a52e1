"""Batches of rows for copies between datasets, and threads that write batches as shards."""

from __future__ import annotations

import io
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from scalelatent.data import csr

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset
    from scalelatent.kernels.arrays import DenseOrCsr

    from .shards import ShardWriter

Item = TypeVar("Item")
Done = TypeVar("Done")

Progress = Callable[[int, int], None]
"""Type of a callback that receives (rows done, total rows)."""

MAX_THREADS = 4
"""Maximum number of writer threads; each has one shard in memory, and a write is slower than a read."""


@dataclass(frozen=True)
class RowBatch:
    """Rows, labels and weights; each column is an array with one entry per row, a CSR array, or None."""

    x: DenseOrCsr
    """Rows (n, n_features), dense or CSR."""
    y: DenseOrCsr | None = None
    """Labels, targets or multi-labels, as `Dataset.read_y` returns them."""
    weight: np.ndarray | None = None
    """Weights (n,)."""

    @classmethod
    def read(cls, ds: Dataset, start: int, stop: int) -> RowBatch:
        y = ds.read_y(start, stop) if ds.has_y else None
        return cls(ds.read_x(start, stop), y, ds.read_weight(start, stop))

    @classmethod
    def concatenate(cls, batches: Iterable[RowBatch]) -> RowBatch:
        """Return one batch with the rows of several batches, in order."""
        columns = zip(*((b.x, b.y, b.weight) for b in batches), strict=True)
        return cls(*(None if parts[0] is None else csr.concatenate(parts) for parts in columns))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for column in (self.x, self.y, self.weight) for part in _list_arrays(column))

    def __len__(self) -> int:
        return int(self.x.shape[0])

    def take(self, rows: np.ndarray) -> RowBatch:
        """Return copies of the given rows, in the given order."""
        return RowBatch(*(None if c is None else c[rows] for c in (self.x, self.y, self.weight)))

    def split(self, edges: np.ndarray) -> list[RowBatch]:
        """Split into batches; each row number in `edges` begins a batch. Dense columns become views."""
        bounds = [0, *edges.tolist(), len(self)]
        return [
            RowBatch(*(None if c is None else c[a:b] for c in (self.x, self.y, self.weight)))
            for a, b in itertools.pairwise(bounds)
        ]

    def to_bytes(self) -> bytes:
        """Return the batch as concatenated npy arrays, without pickle."""
        out = io.BytesIO()
        for column in (self.x, self.y, self.weight):
            parts = _list_arrays(column)
            shape = () if column is None or len(parts) < 3 else column.shape
            np.save(out, np.array([len(parts), *shape]))
            for part in parts:
                np.save(out, part, allow_pickle=False)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> RowBatch:
        """Return the batch that `to_bytes` wrote."""
        source = io.BytesIO(data)
        columns: list[DenseOrCsr | None] = []
        for _ in range(3):
            head = np.load(source, allow_pickle=False)
            parts = [np.load(source, allow_pickle=False) for _ in range(head[0])]
            if len(parts) == 3:
                columns.append(csr.csr_of(parts[0], parts[1], parts[2], int(head[2])))
            else:
                columns.append(parts[0] if parts else None)
        return cls(*columns)


def map_in_order(
    items: Iterable[Item], work: Callable[[int, Item], Done], threads: int, name: str, *, ahead: int
) -> Generator[Done]:
    """Yield `work(number, item)` in the order of the items; threads compute at most `ahead` results ahead.

    If the loop over this generator may raise an error, close the generator, which waits for its threads.
    """
    waiting: deque[Future[Done]] = deque()
    with ThreadPoolExecutor(threads, name) as pool:
        try:
            numbers = itertools.count()  # `enumerate` would keep the previous item in memory
            for item in items:
                waiting.append(pool.submit(work, next(numbers), item))
                del item  # free a large item as soon as its thread has finished
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def write_shards(
    writer: ShardWriter,
    batches: Iterable[RowBatch],
    progress: Progress | None = None,
    *,
    threads: int | None = None,
) -> None:
    """Write the batches, one per shard and in order, as the shards of a dataset."""
    from dask.system import cpu_count

    def write(shard: int, batch: RowBatch) -> int:
        writer.write_shard(shard, batch.x, batch.y, batch.weight)
        return writer.shard_bounds(shard)[1]

    threads = min(threads or min(cpu_count(), MAX_THREADS), writer.n_shards)
    with closing(map_in_order(batches, write, threads, "scalelatent-write", ahead=threads - 1)) as written:
        for done in written:
            if progress is not None:
                progress(done, writer.n_rows)


def half_progress(progress: Progress | None, half: int) -> Progress | None:
    """Return a callback for the first (0) or second (1) half of an operation that reads all rows twice."""
    return None if progress is None else lambda done, total: progress((half * total + done) // 2, total)


def row_bytes(ds: Dataset) -> float:
    """Return the mean bytes of one row in memory, over all columns of a dataset."""
    sample = RowBatch.read(ds, 0, 1)
    total = ds.nbytes / ds.n_rows + 8 * ds.has_weight
    if ds.y_kind == "multilabel":
        y = ds._columns.require_y("the rows")
        return total + 8 + y.nnz / y.shape[0] * (y.dtype.itemsize + csr.index_dtype(y.shape[1]).itemsize)
    return total + (0 if sample.y is None else sample.y.nbytes)


def _list_arrays(column: DenseOrCsr) -> list[np.ndarray]:
    """Return the arrays of a column: one array, the three arrays of CSR rows, or no array for None."""
    if column is None:
        return []
    return [column] if isinstance(column, np.ndarray) else list(csr.unpack_csr(column))
