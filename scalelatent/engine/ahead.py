"""Rows of a span as blocks: pieces are read ahead by a thread while earlier ones are computed on.

A piece is what the dataset reads best at once (a chunk); a block is what a kernel gets. The two grids are
independent: a block that straddles pieces is copied together, all others are views.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any

from scalelatent.contract.learners import Block

from .cache import Piece
from .reading import Reader, StopEvent, Stopped, cut

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset

AHEAD, AHEAD_BYTES = 3, 2**25
_POLL_SECONDS = 0.2


def iter_blocks(
    reader: Reader, blocks: list[tuple[int, int]], stop_event: StopEvent
) -> Generator[Block, None, None]:
    """The blocks of a run of rows, in order.

    Parameters
    ----------
    reader : Reader
    blocks : list of (start, stop)
        Adjacent.
    stop_event : StopEvent
        Set to call the pass off: the iterator raises :class:`~.reading.Stopped` at the next block.
    """
    if not blocks:
        return
    pieces = reader.pieces(blocks[0][0], blocks[-1][1])
    at_hand = not reader.dataset.is_stored or all(reader.cached(*piece) is not None for piece in pieces)
    at_once = ((piece, reader.read(*piece)) for piece in pieces)
    several = reader.dataset.reads_at_once > 1
    ahead = _read_several if several else _read_ahead
    source: Generator[Any, None, None] = at_once if at_hand else ahead(reader, pieces, stop_event)
    if stop_event.notes:
        source = _read_noted(reader, pieces, stop_event.note)
    try:
        held: list[tuple[tuple[int, int], Piece]] = []
        for start, stop in blocks:
            if stop_event.is_set():
                raise Stopped
            stop_event.moved()
            while not held or held[-1][0][1] < stop:
                held.append(next(source))
            held = [entry for entry in held if entry[0][1] > start]
            x, y, weight = (cut(held, column, start, stop) for column in range(3))
            assert x is not None
            stop_event.note("computing on", start, stop)
            yield reader.block(x, y, weight, start)
    finally:
        source.close()


def _read_noted(
    reader: Reader, pieces: list[tuple[int, int]], note: Callable[[str, int, int], None]
) -> Generator[Any, None, None]:
    for piece in pieces:
        note("reading", *piece)
        yield piece, reader.read(*piece)


def _read_ahead(
    reader: Reader, pieces: list[tuple[int, int]], stop_event: StopEvent
) -> Generator[Any, None, None]:
    """Read by a thread, at most ``AHEAD`` pieces in front of the consumer, of large ones fewer."""
    ready: queue.Queue[Any] = queue.Queue(maxsize=_how_far(reader.dataset, pieces, reader.target_width))
    closed = threading.Event()

    def put(item: Any) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=_POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for piece in pieces:
                if not put((piece, reader.read(*piece), None)):
                    return
        except BaseException as error:  # noqa: BLE001  handed to the consumer, which raises it
            put((None, None, error))

    thread = threading.Thread(target=work, name="scalelatent-read", daemon=True)
    thread.start()
    try:
        for _ in pieces:
            begin = time.perf_counter()
            piece, rows, error = _got(lambda: ready.get(timeout=_POLL_SECONDS), queue.Empty, stop_event)
            reader.meter.wait_seconds += time.perf_counter() - begin
            if error is not None:
                raise error
            yield piece, rows
    finally:
        closed.set()
        # Where the pass is called off, a read that hangs is left behind: it holds nobody up.
        thread.join(timeout=1.0 if stop_event.is_set() else None)


def _how_far(dataset: Dataset, pieces: list[tuple[int, int]], beside: int = 0) -> int:
    # The bytes of sparse rows are not known without reading; their row groups are small.
    if dataset.is_sparse:
        return AHEAD
    width = dataset.n_features * dataset.dtype.itemsize + beside
    largest = max(stop - start for start, stop in pieces) * width
    return max(1, min(AHEAD, AHEAD_BYTES // max(largest, 1)))


def _got(get: Callable[[], Any], not_yet: type[Exception], stop_event: StopEvent) -> Any:
    """What ``get`` brings, asked for until it is there or the pass is called off."""
    while True:
        try:
            return get()
        except not_yet:
            if stop_event.is_set():
                raise Stopped from None


class _NotYet(Exception):
    """A read is not done."""


def _done(future: Any) -> None:
    if not wait([future], timeout=_POLL_SECONDS).done:
        raise _NotYet


def _read_several(
    reader: Reader, pieces: list[tuple[int, int]], stop_event: StopEvent
) -> Generator[Any, None, None]:
    """Read by several threads, each waiting for a network; the pieces come in order, and as many are held."""
    at_once = reader.dataset.reads_at_once
    waiting: deque[tuple[tuple[int, int], Any]] = deque()
    pool = ThreadPoolExecutor(min(at_once, len(pieces)), thread_name_prefix="scalelatent-read")
    try:
        rest = iter(pieces)
        for piece in itertools.islice(rest, at_once):
            waiting.append((piece, pool.submit(reader.read, *piece)))
        while waiting:
            piece, future = waiting.popleft()
            begin = time.perf_counter()
            # Asked whether it is done: a TimeoutError may also be what the read itself came to.
            _got(partial(_done, future), _NotYet, stop_event)
            rows = future.result()
            reader.meter.wait_seconds += time.perf_counter() - begin
            for following in itertools.islice(rest, 1):
                waiting.append((following, pool.submit(reader.read, *following)))
            yield piece, rows
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
