"""Runs of rows on their way from one dataset to another, and the threads that write them as shards."""

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
"""Called with (rows done, rows in all)."""

MAX_THREADS = 4
"""Hashing, packing and writing a shard costs several times what reading it does; each holds a shard."""


@dataclass(frozen=True)
class RowBatch:
    """Rows, labels and weights; each column an array whose first axis is the row, a CSR array, or None."""

    x: DenseOrCsr
    """Rows (n, n_features), dense or CSR."""
    y: DenseOrCsr | None = None
    """Labels, targets or multi-labels, as `Dataset.read_y` gives them."""
    weight: np.ndarray | None = None
    """Weights (n,)."""

    @classmethod
    def read(cls, ds: Dataset, start: int, stop: int) -> RowBatch:
        y = ds.read_y(start, stop) if ds.has_y else None
        return cls(ds.read_x(start, stop), y, ds.read_weight(start, stop))

    @classmethod
    def concatenate(cls, batches: Iterable[RowBatch]) -> RowBatch:
        """One batch of several, in order."""
        columns = zip(*((b.x, b.y, b.weight) for b in batches), strict=True)
        return cls(*(_concatenate(list(parts)) for parts in columns))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for column in (self.x, self.y, self.weight) for part in _parts(column))

    def __len__(self) -> int:
        return int(self.x.shape[0])

    def take(self, rows: np.ndarray) -> RowBatch:
        """Copies of the given rows, in the given order."""
        return RowBatch(*(None if c is None else c[rows] for c in (self.x, self.y, self.weight)))

    def split(self, edges: np.ndarray) -> list[RowBatch]:
        """Cut before each of the given rows; views, not copies, where columns are dense."""
        bounds = [0, *edges.tolist(), len(self)]
        return [
            RowBatch(*(None if c is None else c[a:b] for c in (self.x, self.y, self.weight)))
            for a, b in itertools.pairwise(bounds)
        ]

    def to_bytes(self) -> bytes:
        """The batch as npy arrays one after another; nothing is pickled."""
        out = io.BytesIO()
        for column in (self.x, self.y, self.weight):
            parts = _parts(column)
            shape = () if column is None or len(parts) < 3 else column.shape
            np.save(out, np.array([len(parts), *shape]))
            for part in parts:
                np.save(out, part, allow_pickle=False)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> RowBatch:
        """The batch that `to_bytes` wrote."""
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


def in_order(
    items: Iterable[Item], work: Callable[[int, Item], Done], threads: int, name: str, *, ahead: int
) -> Generator[Done]:
    """What threads make of items and their numbers, in order; so many are at work or done ahead.

    Close it where a loop over it may raise: no thread is at work any more then.
    """
    waiting: deque[Future[Done]] = deque()
    with ThreadPoolExecutor(threads, name) as pool:
        try:
            numbers = itertools.count()  # `enumerate` would hold an item while the next one is read
            for item in items:
                waiting.append(pool.submit(work, next(numbers), item))
                del item  # which may be large: the thread holds it as long as it needs it
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
    """Write the shards of a dataset, given in order."""
    from dask.system import cpu_count

    def write(shard: int, batch: RowBatch) -> int:
        writer.write_shard(shard, batch.x, batch.y, batch.weight)
        return writer.shard_bounds(shard)[1]

    threads = min(threads or min(cpu_count(), MAX_THREADS), writer.n_shards)
    with closing(in_order(batches, write, threads, "scalelatent-write", ahead=threads - 1)) as written:
        for done in written:
            if progress is not None:
                progress(done, writer.n_rows)


def row_bytes(ds: Dataset) -> float:
    """Bytes of a row of a dataset in memory, all columns, on average."""
    sample = RowBatch.read(ds, 0, 1)
    total = ds.nbytes / ds.n_rows + 8 * ds.has_weight
    if ds.y_kind == "multilabel":
        y = ds._columns.outputs("the rows")
        return total + 8 + y.nnz / y.shape[0] * (y.dtype.itemsize + csr.index_dtype(y.shape[1]).itemsize)
    return total + (0 if sample.y is None else sample.y.nbytes)


def _parts(column: DenseOrCsr) -> list[np.ndarray]:
    """The arrays a column is made of: none, one, or the three of CSR."""
    if column is None:
        return []
    return [column] if isinstance(column, np.ndarray) else list(csr.parts_of(column))


def _concatenate(columns: list[DenseOrCsr]) -> DenseOrCsr:
    if columns[0] is None:
        return None
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    return csr.stack(columns)
