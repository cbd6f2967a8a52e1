"""Shuffle all rows of a dataset in bounded memory, with temporary bucket files beside the output."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data.dataset import Dataset, open_dataset
from scalelatent.errors import DataError
from scalelatent.kernels.streams import check_seed, random_words
from scalelatent.storage.disk import locate
from scalelatent.storage.write_checks import clear_after, explain_os_errors

from .batches import Progress, RowBatch, half_progress, row_bytes, write_shards
from .create import create_like, derive_provenance, remove_on_failure

if TYPE_CHECKING:
    from typing import Unpack

    from scalelatent.data.schema import LayoutOptions
    from scalelatent.storage.disk import Location

DEFAULT_MEMORY_BYTES = 1 << 30
"""Default maximum of bytes of rows in memory at one time."""
MAX_BUCKETS = 1024
"""Maximum number of buckets; more buckets would need very small writes. It sets the least `memory`."""


def shuffled_rows(seed: int, n_rows: int) -> np.ndarray:
    """Return the source row of each row `j` of the shuffled dataset, int64 (n_rows,).

    The permutation is uniformly random and depends only on the arguments; `shuffle_dataset` never builds it.

    Examples
    --------
    >>> order = shuffled_rows(0, 1000)
    >>> bool((np.sort(order) == np.arange(1000)).all())
    True
    """
    return np.argsort(_sort_keys(seed, 0, n_rows), kind="stable")


def shuffle_dataset(
    source: Dataset | str | os.PathLike[str],
    out_url: str | os.PathLike[str],
    *,
    seed: int,
    memory: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Write the rows of a dataset in a uniformly random order, with their labels and weights.

    Parameters
    ----------
    source : Dataset or url
        Rows to shuffle.
    out_url : str
        Path or address of the new dataset. Rows that do not fit into `memory` are first written to bucket
        files in `<out>.shuffle-<hex>`, which are removed at the end, also after an error or Ctrl-C.
    seed : int
        Seed of the permutation, at least 0. The same seed and number of rows give the same order everywhere.
    memory : int, optional
        Maximum bytes of rows in memory, by default `DEFAULT_MEMORY_BYTES`; it does not affect the result.
    overwrite : bool, default False
        Replace an existing dataset at `out_url`.
    progress : callable, optional
        Function that is called with (rows done, total rows).
    **layout
        Arguments `chunk_rows`, `shard_rows` and `compressor` of `create_dataset`.

    Returns
    -------
    Dataset
        The shuffled rows.

    Raises
    ------
    DataError
        If the output exists or is the source; `seed` is negative; `memory` is too small for this number of
        rows (the message has the minimum); the source is damaged; or the disk is full. The partial output and
        the buckets are removed.

    Examples
    --------
    >>> from scalelatent.data import Dataset
    >>> rows = Dataset.from_arrays(np.arange(6.0)[:, None], list("abcdef"))
    >>> mixed = shuffle_dataset(rows, "memory://doc-shuffle", seed=1, overwrite=True)
    >>> "".join(mixed.read_y(0, 6)), mixed.read_x(0, 6).ravel().tolist()
    ('abedcf', [0.0, 1.0, 4.0, 3.0, 2.0, 5.0])
    """
    ds = source if isinstance(source, Dataset) else open_dataset(source)
    check_seed(seed)
    plan = _plan_memory(ds, DEFAULT_MEMORY_BYTES if memory is None else memory)
    gathering, writing = half_progress(progress, 0), half_progress(progress, 1)
    provenance = derive_provenance(ds, "shuffle", seed=seed)
    writer = create_like(ds, out_url, provenance=provenance, overwrite=overwrite, **layout)
    buckets = _Buckets(locate(f"{writer.url}.shuffle-{uuid.uuid4().hex[:8]}"), plan)
    with remove_on_failure(writer), buckets:
        for start, batch in _read_in_order(ds, plan.read_bytes):
            buckets.add(batch, _sort_keys(seed, start, len(batch)))
            if gathering is not None:
                gathering(start + len(batch), ds.n_rows)
        bounds = [writer.shard_bounds(i) for i in range(writer.n_shards)]
        write_shards(writer, _split_by_shards(buckets, bounds), writing)
        writer.finish()
    return open_dataset(writer.url)


def _sort_keys(seed: int, start: int, count: int) -> np.ndarray:
    """Return random sort keys of `count` rows; two of 10**9 rows share a key with probability 0.03."""
    return random_words(seed, "shuffle", start, count)


@dataclass(frozen=True)
class _MemoryPlan:
    """Division of the memory limit: a third for a bucket of rows, a third for its copy, the rest for I/O."""

    n_buckets: int
    read_bytes: int
    """Bytes of rows per read."""
    flush_bytes: int
    """Bytes of rows in memory above which all rows are written to their bucket files."""


def _plan_memory(ds: Dataset, memory: int) -> _MemoryPlan:
    total = int(row_bytes(ds) * ds.n_rows)
    least = -(-3 * total // MAX_BUCKETS)
    if memory < max(1, least):
        raise DataError(
            f"memory is {memory:,} bytes, but shuffling {ds.n_rows:,} rows ({total / 1e6:,.0f} MB) needs at "
            f"least {max(1, least):,} bytes; give more"
        )
    return _MemoryPlan(-(-3 * total // memory), memory // 8, memory // 4)


def _read_in_order(ds: Dataset, read_bytes: int) -> Iterator[tuple[int, RowBatch]]:
    """Yield all rows in order as (first row, rows); a chunk of at most `read_bytes` is decoded only once."""
    step = max(1, int(read_bytes / row_bytes(ds)))
    for a, b in ds.pieces():
        for start in range(a, b, step):
            yield start, RowBatch.read(ds, start, min(start + step, b))


class _Buckets:
    """Rows in buckets by intervals of their sort keys; one bucket stays in memory, several are in files."""

    def __init__(self, location: Location, plan: _MemoryPlan) -> None:
        self._location, self._plan = location, plan
        self._buffered: list[list[tuple[np.ndarray, RowBatch]]] = [[] for _ in range(plan.n_buckets)]
        self._buffered_bytes = 0
        self._n_flushed = 0

    def __enter__(self) -> _Buckets:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._plan.n_buckets < 2:
            return
        if error is not None:
            clear_after(error, self._location)
            return
        with contextlib.suppress(OSError):  # the output is complete, and bucket files that stay do no harm
            self._location.clear()

    def add(self, batch: RowBatch, keys: np.ndarray) -> None:
        """Add rows to the buckets of their sort `keys`; a bucket stores its rows in the order of calls."""
        bucket = (keys >> np.uint64(32)) * np.uint64(self._plan.n_buckets) >> np.uint64(32)
        order = np.argsort(bucket, kind="stable")
        edges = np.searchsorted(bucket[order], np.arange(1, self._plan.n_buckets, dtype=np.uint64))
        sorted_keys = np.split(keys[order], edges)
        for parts, part_keys, rows in zip(
            self._buffered, sorted_keys, batch.take(order).split(edges), strict=True
        ):
            if len(rows):
                parts.append((part_keys, rows))
        self._buffered_bytes += batch.nbytes
        if self._plan.n_buckets > 1 and self._buffered_bytes > self._plan.flush_bytes:
            self._flush()

    def iter_sorted(self) -> Iterator[tuple[RowBatch, np.ndarray]]:
        """Yield (rows, order by key) of each bucket; the caller must delete both before the next bucket."""
        if self._n_flushed:
            self._flush()
        for bucket, parts in enumerate(self._buffered):
            parts += [self._read(f"{bucket}/{name}") for name in self._location.keys(str(bucket))]
            if parts:
                yield self._join_and_sort(parts)

    @staticmethod
    def _join_and_sort(parts: list[tuple[np.ndarray, RowBatch]]) -> tuple[RowBatch, np.ndarray]:
        order = np.argsort(np.concatenate([keys for keys, _ in parts]), kind="stable")
        batch = RowBatch.concatenate([rows for _, rows in parts])
        parts.clear()
        return batch, order

    def _flush(self) -> None:
        with explain_os_errors(self._location, "writing a bucket of rows", "shuffle again"):
            for bucket, parts in enumerate(self._buffered):
                if parts:
                    keys = np.concatenate([keys for keys, _ in parts])
                    rows = RowBatch.concatenate([rows for _, rows in parts])
                    data = len(keys).to_bytes(8, "little") + keys.tobytes() + rows.to_bytes()
                    self._location.write(f"{bucket}/{self._n_flushed:08d}", data)
                    parts.clear()
        self._buffered_bytes = 0
        self._n_flushed += 1

    def _read(self, key: str) -> tuple[np.ndarray, RowBatch]:
        data = self._location.read(key)
        if data is None:
            raise DataError(
                f"{self._location.name_of(key)}, a bucket of the shuffle, is missing; shuffle the rows again"
            )
        count = int.from_bytes(data[:8], "little")
        return np.frombuffer(data, np.uint64, count, 8), RowBatch.from_bytes(data[8 + 8 * count :])


def _split_by_shards(buckets: _Buckets, bounds: list[tuple[int, int]]) -> Iterator[RowBatch]:
    """Yield the rows of all buckets in order, one batch per shard in `bounds`."""
    sizes = iter(b - a for a, b in bounds)
    room = next(sizes)
    pending: list[RowBatch] = []
    for batch, order in buckets.iter_sorted():
        at = 0
        while at < len(order):
            part = batch.take(order[at : at + room])
            pending.append(part)
            at, room = at + len(part), room - len(part)
            if not room:
                shard = RowBatch.concatenate(pending) if len(pending) > 1 else part
                pending, room = [], next(sizes, 0)
                yield shard
        del batch, order  # free the memory before the next bucket is read
