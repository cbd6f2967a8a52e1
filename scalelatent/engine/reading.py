"""Rows of a dataset, a piece at a time, in the form that the work requests."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.wants import Targets, Wants
from scalelatent.data.csr import index_dtype
from scalelatent.errors import DataError, RunError, ScalelatentError, ShardError
from scalelatent.kernels.sparse_rows import CsrRows

from .cache import Piece, PieceCache
from .quarantine import Ranges

T = TypeVar("T")
PlacedPiece: TypeAlias = "tuple[tuple[int, int], Piece]"

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset
    from scalelatent.kernels.arrays import DenseOrCsr, HostRows

# A piece of rows with outputs is cut where these would be more: outputs may be far wider than rows.
TARGET_BYTES = 2**24
_NO_WANTS = Wants()


@contextmanager
def naming(dataset: Dataset) -> Iterator[None]:
    """Add the name of the dataset to errors of kernels and of damaged shards."""
    try:
        yield
    except ShardError as error:
        raise error.moved(url=dataset.url) from error.__cause__
    except ScalelatentError:
        raise
    except MemoryError as error:
        raise RunError(
            f"out of memory on rows of {dataset.url or 'the given arrays'}: {error}. Give the worker more "
            "memory, or fewer threads ([cluster] memory_limit, threads), then resume the run; or start again "
            "in another folder with a lower [engine] block_rows (engine={'block_rows': ...})"
        ) from error
    except (ValueError, FloatingPointError) as error:
        where = dataset.url or "the given arrays"
        raise DataError(f"{where}: {error}. Clean these rows, or leave them out, and start again") from error


def as_rows(x: DenseOrCsr) -> HostRows:
    """Rows as kernels take them: an ndarray as it is, a scipy matrix as :class:`CsrRows`."""
    return x if isinstance(x, np.ndarray) else CsrRows.of(x)


class Stopped(Exception):
    """The pass was called off."""


class StopEvent(threading.Event):
    """Tells a pass to stop, and hears how far it is; a task of a cluster has one of its own kind."""

    notes = False
    """Each read and each computation is told to ``note`` before it is begun, so nothing is read ahead."""

    def moved(self) -> None:
        """Another block is about to be computed on."""

    def note(self, doing: str, start: int, stop: int) -> None:
        """The next step, with its rows."""


@dataclass
class Meter:
    """What reading cost: bytes decoded, by any of the threads that read, and seconds waited for."""

    bytes_read: int = 0
    wait_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes


class Reader:
    """Pieces of one dataset through the cache."""

    def __init__(
        self,
        dataset: Dataset,
        cache: PieceCache | None,
        meter: Meter,
        classes: np.ndarray | None = None,
        *,
        wants: Wants = _NO_WANTS,
        skipped: Ranges = (),
    ) -> None:
        self.dataset, self.skipped = dataset, skipped
        self.csr, self.targets = wants.csr, wants.targets
        self.classes = classes if dataset.has_y and wants.targets is None else None
        self.unlabelled = wants.unlabelled
        self.cache = cache if dataset.is_stored else None
        self.meter = meter
        labels = None
        if self.classes is not None:
            labels = (str(self.classes.dtype), self.classes.tobytes(), self.unlabelled)
        form = labels if wants.targets is None else wants.targets.source
        self._name = (dataset.fingerprint(), form, skipped) if self.cache is not None else None

    @property
    def target_width(self) -> int:
        """Outputs of a row; 0 where they are not read."""
        if self.targets is None:
            return 0
        return self.dataset.n_features if self.targets.source == "x" else int(self.dataset.n_targets or 0)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows cut into what is read at once."""
        pieces = self.dataset.pieces(start, stop)
        if self.targets is None:
            return pieces
        step = max(1, TARGET_BYTES // max(self.target_width, 1))
        return [(c, min(c + step, b)) for a, b in pieces for c in range(a, b, step)]

    def block(
        self,
        x: HostRows,
        y: np.ndarray | None,
        weight: np.ndarray | None,
        start: int,
        rows: np.ndarray | None = None,
        epoch: int = 0,
        chain: int = 0,
    ) -> Block:
        """Columns of some rows (of a piece, or gathered out of several) as kernels take them."""
        if self.targets is not None and self.targets.source == "x":
            assert isinstance(x, np.ndarray)
            x, y = _observed(x, self.targets, start, rows, epoch), x
        elif isinstance(x, CsrRows) and not self.csr:
            x = x.to_dense()
        return Block(x, y, weight, start, rows, epoch, chain)

    def cached(self, start: int, stop: int) -> Piece | None:
        """A piece that is at hand without reading."""
        return self.cache.get((self._name, start, stop)) if self.cache is not None else None

    def read(self, start: int, stop: int) -> Piece:
        """(x, codes or outputs, weight) of a piece; where rows are their own outputs, x are these."""
        found = self.cached(start, stop)
        if found is not None:
            return found
        piece = self._read_around(start, stop) if self.skipped else self._read(start, stop)
        if self.cache is not None:
            self.cache.put((self._name, start, stop), piece)
        return piece

    def _read(self, start: int, stop: int) -> Piece:
        ds = self.dataset
        itself = self.targets is not None and self.targets.source == "x"
        piece = (
            ds.read_binary(start, stop) if itself else as_rows(ds.read_x(start, stop)),
            None if itself else self._read_y(start, stop),
            ds.read_weight(start, stop) if ds.has_weight else None,
        )
        if ds.is_stored:
            self.meter.count(sum(a.nbytes for a in piece if a is not None))
        return piece

    def _read_y(self, start: int, stop: int) -> np.ndarray | None:
        if self.targets is not None:
            return self.dataset.read_targets(start, stop)
        if self.classes is None:
            return None
        return self.dataset.read_codes(start, stop, self.classes, unlabelled=self.unlabelled)

    def _read_around(self, start: int, stop: int) -> Piece:
        """A piece without the rows that are to be left out, in whose places there is nothing."""
        held: list[PlacedPiece] = []
        row = start
        inside = [(max(a, start), min(b, stop)) for a, b in self.skipped if a < stop and b > start]
        for a, b in [*inside, (stop, stop)]:
            if row < a:
                x, y, weight = self._read(row, a)
                held.append(((row, a), (x, y, np.ones(a - row) if weight is None else weight)))
            if a < b:
                held.append(((a, b), self._nothing(b - a)))
            row = b
        x, y, weight = (cut(held, column, start, stop) for column in range(3))
        return x, y, weight

    def _nothing(self, rows: int) -> Piece:
        dtype, p = self.dataset.dtype, self.dataset.n_features
        if self.targets is not None and self.targets.source == "x":
            return np.zeros((rows, p), np.uint8), None, np.zeros(rows)
        if self.dataset.is_sparse:
            index = index_dtype(p)
            empty = np.zeros(0, dtype), np.zeros(0, index), np.zeros(rows + 1, np.int64)
            x: HostRows = CsrRows(*empty, (rows, p))
        else:
            x = np.zeros((rows, p), dtype)
        y = None if self.classes is None else np.zeros(rows, np.int32)
        if self.targets is not None:
            y = np.zeros((rows, self.target_width), np.uint8)
        return x, y, np.zeros(rows)


def _observed(v: np.ndarray, targets: Targets, start: int, rows: np.ndarray | None, epoch: int) -> np.ndarray:
    """The input of rows that are outputs."""
    how = targets.corruption
    if how is None:
        return np.empty((len(v), 0), np.uint8)
    from scalelatent.kernels.corruption import corrupt

    rows = np.arange(start, start + len(v)) if rows is None else rows
    return corrupt(
        v,
        rows,
        epoch,
        kind=how.kind,
        rate=how.rate,
        size=how.size,
        shape=how.shape,
        seed=how.seed,
        stage=how.stage,
    )


def cut(held: list[PlacedPiece], column: int, start: int, stop: int) -> Any:
    """Rows start to stop of a column (x, y or weight) of pieces: a view where one piece has them all."""
    parts = [
        rows[max(start - a, 0) : stop - a]
        for (a, b), piece in held
        if (rows := piece[column]) is not None and a < stop and b > start
    ]
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    sparse = [part for part in parts if isinstance(part, CsrRows)]
    if sparse:
        return CsrRows.concatenate(sparse)
    return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])


AHEAD, AHEAD_BYTES = 3, 2**25
_POLL_SECONDS = 0.2


def iter_blocks(
    reader: Reader, blocks: list[tuple[int, int]], stop_event: StopEvent
) -> Generator[Block, None, None]:
    """The blocks of a run of rows, in order."""
    if not blocks:
        return
    pieces = reader.pieces(blocks[0][0], blocks[-1][1])
    at_hand = not reader.dataset.is_stored or all(reader.cached(*piece) is not None for piece in pieces)
    at_once = ((piece, reader.read(*piece)) for piece in pieces)
    several = reader.dataset.reads_at_once > 1
    ahead = _read_several if several else _read_ahead
    source: Generator[PlacedPiece, None, None] = at_once if at_hand else ahead(reader, pieces, stop_event)
    if stop_event.notes:
        source = _read_noted(reader, pieces, stop_event.note)
    try:
        held: list[PlacedPiece] = []
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
) -> Generator[PlacedPiece, None, None]:
    for piece in pieces:
        note("reading", *piece)
        yield piece, reader.read(*piece)


def _read_ahead(
    reader: Reader, pieces: list[tuple[int, int]], stop_event: StopEvent
) -> Generator[PlacedPiece, None, None]:
    """Read by a thread, at most ``AHEAD`` pieces in front of the consumer, of large ones fewer."""
    ready: queue.Queue[tuple[PlacedPiece | None, BaseException | None]] = queue.Queue(
        maxsize=_how_far(reader.dataset, pieces, reader.target_width)
    )
    closed = threading.Event()

    def put(item: PlacedPiece | None, error: BaseException | None = None) -> bool:
        while not closed.is_set():
            try:
                ready.put((item, error), timeout=_POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for piece in pieces:
                if not put((piece, reader.read(*piece))):
                    return
        except BaseException as error:  # noqa: BLE001  handed to the consumer, which raises it
            put(None, error)

    thread = threading.Thread(target=work, name="scalelatent-read", daemon=True)
    thread.start()
    try:
        for _ in pieces:
            begin = time.perf_counter()
            item, error = _got(lambda: ready.get(timeout=_POLL_SECONDS), queue.Empty, stop_event)
            reader.meter.wait_seconds += time.perf_counter() - begin
            if item is None:
                raise error or Stopped
            yield item
    finally:
        closed.set()
        # Where the pass is called off, a read that hangs is left behind: it holds nothing up.
        thread.join(timeout=1.0 if stop_event.is_set() else None)


def _how_far(dataset: Dataset, pieces: list[tuple[int, int]], beside: int = 0) -> int:
    # The bytes of sparse rows are not known without reading; their row groups are small.
    if dataset.is_sparse:
        return AHEAD
    width = dataset.n_features * dataset.dtype.itemsize + beside
    largest = max(stop - start for start, stop in pieces) * width
    return max(1, min(AHEAD, AHEAD_BYTES // max(largest, 1)))


def _got(get: Callable[[], T], not_yet: type[Exception], stop_event: StopEvent) -> T:
    """What ``get`` brings, asked for until it is there or the pass is called off."""
    while True:
        try:
            return get()
        except not_yet:
            if stop_event.is_set():
                raise Stopped from None


class _NotYet(Exception):
    """A read is not done."""


def _done(future: Future[Piece]) -> None:
    if not wait([future], timeout=_POLL_SECONDS).done:
        raise _NotYet


def _read_several(
    reader: Reader, pieces: list[tuple[int, int]], stop_event: StopEvent
) -> Generator[PlacedPiece, None, None]:
    """Read by several threads, each waiting for a network; the pieces come in order, and as many are held."""
    at_once = reader.dataset.reads_at_once
    waiting: deque[tuple[tuple[int, int], Future[Piece]]] = deque()
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


@dataclass(frozen=True)
class RowMask:
    """A run of rows of a dataset."""

    start: int
    stop: int
    inside: int

    def apply(self, block: Block) -> Block | None:
        """What a member sees of a block; None where it sees nothing."""
        n = len(block.x)
        first, last = max(self.start - block.start, 0), min(self.stop - block.start, n)
        if first >= last:
            return None if self.inside else block
        if first == 0 and last == n:
            return block if self.inside else None
        if not self.inside:
            weight = np.ones(n) if block.weight is None else block.weight.copy()
            weight[first:last] = 0.0
            return replace(block, weight=weight)
        return replace(
            block,
            x=block.x[first:last],
            y=None if block.y is None else block.y[first:last],
            weight=None if block.weight is None else block.weight[first:last],
            start=block.start + first,
        )
