"""Split blocks in halves on a GPU whose memory is too small for whole blocks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np

from scalelatent.contract.learners import (
    Backend,
    Block,
    ColumnMap,
    LeafReduction,
    Prepared,
    Reduction,
    RowMap,
)
from scalelatent.contract.stats import Stats
from scalelatent.errors import DeviceMemoryError

LEAST_ROWS = 64
"""Shorter blocks are not split further, because then the model itself does not fit into memory."""


def split_rows(block: Block, rows: int | None) -> Iterator[Block]:
    """Yield a block in parts of up to ``rows`` rows, or the whole block if ``rows`` is None."""
    count = len(block.x)
    if rows is None or count <= rows:
        yield block
        return
    for a in range(0, count, rows):
        yield block.slice_rows(a, min(a + rows, count))


def accumulate_leaf(
    backend: Backend,
    work_name: str,
    reduction: Reduction[Any, Prepared],
    prepared: Prepared,
    blocks: Iterator[Block],
    reread: Callable[[], Iterable[Block]],
    stats: Stats,
) -> None:
    """Add the statistics of all blocks of a leaf (a group of consecutive blocks) to ``stats``, which is zero.

    If the GPU runs out of memory, halve the rows per call and read all blocks again with ``reread``.
    """
    largest = 0
    todo: Iterable[Block] = blocks

    def pieces(todo: Iterable[Block]) -> Iterator[Block]:
        nonlocal largest
        for block in todo:
            largest = max(largest, len(block.x))
            yield from split_rows(block, backend.row_limits.get(work_name))

    while True:
        try:
            if isinstance(reduction, LeafReduction):
                sums = reduction.make_leaf_sums(prepared, stats)
                for piece in pieces(todo):
                    reduction.add_block(prepared, piece, stats, sums)
                reduction.add_leaf_sums(prepared, stats, sums)
            else:
                for piece in pieces(todo):
                    reduction.accumulate(prepared, piece, stats)
        except backend.gpu_errors as error:
            _halve(backend, work_name, largest, error)
        else:
            break
        # Release memory only here, because the frames of the error refer to the arrays that were too large.
        backend.release_memory()
        stats.vector.fill(0.0)
        if isinstance(todo, Generator):
            todo.close()  # stops reading ahead
        todo = reread()
    for _ in blocks:
        pass


def apply_block(
    backend: Backend, work_name: str, row_map: RowMap[Prepared], prepared: Prepared, block: Block
) -> np.ndarray:
    """Return the output rows of a block; if GPU memory runs out, compute them in smaller blocks."""
    while True:
        try:
            parts = split_rows(block, backend.row_limits.get(work_name))
            out = [row_map.apply(prepared, piece) for piece in parts]
            return out[0] if len(out) == 1 else np.concatenate(out)
        except backend.gpu_errors as error:
            _halve(backend, work_name, len(block.x), error)
        backend.release_memory()


def fill_block(
    backend: Backend,
    work_name: str,
    row_map: ColumnMap[Prepared],
    prepared: Prepared,
    block: Block,
    out: np.ndarray,
) -> Iterator[None]:
    """Write the output rows of a block of a ``ColumnMap``; yield whenever ``ColumnMap.fill`` yields."""
    done, count = 0, len(block.x)
    while True:
        tried = count - done
        try:
            for piece in split_rows(block.slice_rows(done, count), backend.row_limits.get(work_name)):
                tried = len(piece.x)
                yield from row_map.fill(prepared, piece, out[done : done + tried])
                done += tried
            return
        except backend.gpu_errors as error:
            _halve(backend, work_name, tried, error)
        backend.release_memory()


def make_split_event(work_name: str, rows: int, device: str, worker: str | None = None) -> dict[str, Any]:
    """Return the event that reports split blocks; ``work_name`` is "stage/part", or the name of a map."""
    stage, _, part = work_name.partition("/")
    place = f"GPU {device}" + (f" of {worker}" if worker else "")
    if part:
        message = (
            f"{place} is out of memory: it computes blocks of {stage} ({part} rows) {rows} rows at a time "
            "from now on, which changes the rounding of their sums. Free its memory, or set "
            f"[engine] block_rows = {rows} for the next run"
        )
    else:  # a map, whose block size the user cannot set
        message = (
            f"{place} is out of memory: it computes {rows} rows of {stage} at a time from now on, which "
            "takes longer. Free its memory for the next run"
        )
    where = {} if worker is None else {"worker": worker}
    return {"event": "blocks_cut", "stage": stage, "part": part, "rows": rows, **where, "message": message}


def _halve(backend: Backend, work_name: str, rows: int, error: Exception) -> None:
    """Halve the rows per call; raise ``error`` if it is not a lack of memory, or if ``rows`` is too small."""
    named = backend.name_error(error)
    tried = min(rows, backend.row_limits.get(work_name, rows))
    if tried < 2 * LEAST_ROWS or not isinstance(named, DeviceMemoryError):
        raise named from error
    backend.row_limits[work_name] = -(-tried // 2)
