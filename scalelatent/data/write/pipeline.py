"""Shards written by threads while the next one is read or put together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .batch import RowBatch
    from .writer import DatasetWriter

__all__ = ["MAX_THREADS", "write_shards"]

MAX_THREADS = 4
"""Hashing, packing and writing a shard costs several times what reading it does; each holds a shard."""


def write_shards(
    writer: DatasetWriter,
    batches: Iterable[RowBatch],
    progress: Callable[[int, int], None] | None = None,
    *,
    threads: int | None = None,
) -> None:
    """Write the shards of a dataset, given in order.

    Parameters
    ----------
    writer : DatasetWriter
        Of a dataset, of which every shard is to be written.
    batches : iterable of RowBatch
        The rows of each shard; at most one more than `threads` are in memory at a time.
    progress : callable, optional
        Called with (rows done, rows in all).
    threads : int, optional
        Shards that are written at once; by default as many as there are cores, at most `MAX_THREADS`.

    Raises
    ------
    DataError
        What the writer raises; then no shard is being written any more.
    """
    from dask.system import cpu_count

    threads = min(threads or min(cpu_count(), MAX_THREADS), writer.n_shards)
    waiting: deque[tuple[int, Future[None]]] = deque()

    def wait_for(left: int) -> None:
        while len(waiting) > left:
            shard, future = waiting.popleft()
            future.result()
            if progress is not None:
                progress(writer.shard_bounds(shard)[1], writer.n_rows)

    with ThreadPoolExecutor(threads, "scalelatent-write") as pool:
        try:
            for shard, batch in enumerate(batches):
                waiting.append(
                    (shard, pool.submit(writer.write_shard, shard, batch.x, batch.y, batch.weight))
                )
                del batch
                wait_for(threads - 1)
            wait_for(0)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
