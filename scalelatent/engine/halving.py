"""Blocks in halves where a card's memory is too small for whole ones."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from scalelatent.contract.learners import Backend, Block, PartedMap, Prepared, Reduction, RowMap
from scalelatent.contract.stats import Stats
from scalelatent.errors import DeviceMemoryError

LEAST_ROWS = 64
"""Blocks this short are not cut: what does not fit then is the model."""


def pieces(block: Block, rows: int | None) -> Iterator[Block]:
    """A block in runs of so many rows; whole where that is None."""
    count = len(block.x)
    if rows is None or count <= rows:
        yield block
        return
    for a in range(0, count, rows):
        yield _run(block, a, min(a + rows, count))


def _run(block: Block, a: int, b: int) -> Block:
    run = slice(a, b)
    y, weight, numbers = (None if v is None else v[run] for v in (block.y, block.weight, block.rows))
    return replace(block, x=block.x[run], y=y, weight=weight, start=block.start + a, rows=numbers)


def accumulate_leaf(
    backend: Backend,
    what: str,
    reduction: Reduction[Any, Prepared],
    prepared: Prepared,
    blocks: Iterator[Block],
    again: Callable[[], Iterable[Block]],
    stats: Stats,
) -> None:
    """Add the blocks of a leaf to a statistic of zeros."""
    largest = 0
    todo: Iterable[Block] = blocks
    while True:
        try:
            for block in todo:
                largest = max(largest, len(block.x))
                for piece in pieces(block, backend.row_limits.get(what)):
                    reduction.accumulate(prepared, piece, stats)
        except backend.card_errors as error:
            _halve(backend, what, largest, error)
        else:
            break
        # Not before the error is gone: its frames hold the arrays that were too large.
        backend.release_memory()
        stats.vector.fill(0.0)
        if isinstance(todo, Generator):
            todo.close()  # what it reads ahead
        todo = again()
    for _ in blocks:
        pass


def apply_block(
    backend: Backend, what: str, row_map: RowMap[Prepared], prepared: Prepared, block: Block
) -> np.ndarray:
    """The output rows of a block."""
    while True:
        try:
            parts = pieces(block, backend.row_limits.get(what))
            out = [row_map.apply(prepared, piece) for piece in parts]
            return out[0] if len(out) == 1 else np.concatenate(out)
        except backend.card_errors as error:
            _halve(backend, what, len(block.x), error)
        backend.release_memory()


def fill_block(
    backend: Backend,
    what: str,
    row_map: PartedMap[Prepared],
    prepared: Prepared,
    block: Block,
    out: np.ndarray,
) -> Iterator[None]:
    """Write the output rows of a block by a ``PartedMap``; hands over as that does."""
    done, count = 0, len(block.x)
    while True:
        tried = count - done
        try:
            for piece in pieces(_run(block, done, count), backend.row_limits.get(what)):
                tried = len(piece.x)
                yield from row_map.fill(prepared, piece, out[done : done + tried])
                done += tried
            return
        except backend.card_errors as error:
            _halve(backend, what, tried, error)
        backend.release_memory()


def cut_event(what: str, rows: int, device: str, worker: str | None = None) -> dict[str, Any]:
    """The event that tells of blocks in halves."""
    stage, _, part = what.partition("/")
    place = f"GPU {device}" + (f" of {worker}" if worker else "")
    if part:
        message = (
            f"{place}: its memory has ended; blocks of {stage} ({part} rows) are computed {rows} rows at a "
            "time there from now on, which changes the rounding of their sums. Free the card, or set "
            f"[engine] block_rows = {rows} for the next run"
        )
    else:  # a map, whose blocks are not optional
        message = (
            f"{place}: its memory has ended; rows of {stage} are computed {rows} at a time there from now "
            "on, which takes longer. Free the card for the next run"
        )
    more = {} if worker is None else {"worker": worker}
    return {"event": "blocks_cut", "stage": stage, "part": part, "rows": rows, **more, "message": message}


def _halve(backend: Backend, what: str, rows: int, error: Exception) -> None:
    """Allow half the rows of what was tried last; raise where memory is not the fault, or rows are few."""
    named = backend.name_error(error)
    tried = min(rows, backend.row_limits.get(what, rows))
    if tried < 2 * LEAST_ROWS or not isinstance(named, DeviceMemoryError):
        raise named from error
    backend.row_limits[what] = -(-tried // 2)
