"""Read the rows of a dataset in pieces (the rows of one read), ahead of the computation."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements, Targets
from scalelatent.contract.learners import Block
from scalelatent.data.csr import index_dtype
from scalelatent.errors import DataError, RunError, ScalelatentError, ShardError
from scalelatent.kernels.corruption import corrupt
from scalelatent.kernels.sparse_rows import CsrRows

from .backend import COPY_THREADS
from .cache import Piece, PieceCache
from .quarantine import Ranges

PlacedPiece: TypeAlias = "tuple[tuple[int, int], Piece]"

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset
    from scalelatent.kernels.arrays import DenseOrCsr, HostRows

    from .backend import CupyBackend

TARGET_BYTES = 2**24  # upper bound of the bytes of outputs that are read in one call
_NO_REQUIREMENTS = BlockRequirements()
T = TypeVar("T")


@contextmanager
def name_dataset_in_errors(dataset: Dataset) -> Iterator[None]:
    """Add the dataset's URL to kernel and shard errors that are raised in the ``with`` statement."""
    try:
        yield
    except ShardError as error:
        raise error.moved(url=dataset.url) from error.__cause__
    except ScalelatentError:
        raise
    except MemoryError as error:
        raise RunError(
            f"out of memory on rows of {dataset.url or 'the given arrays'}: {error}. Give the worker more "
            "memory or fewer threads ([cluster] memory_limit, threads), then resume the run; or start again "
            "in another folder with a lower [engine] block_rows (engine={'block_rows': ...})"
        ) from error
    except (ValueError, FloatingPointError) as error:
        name = dataset.url or "the given arrays"
        raise DataError(f"{name}: {error}. Clean these rows, or leave them out, and start again") from error


def as_rows(x: DenseOrCsr) -> HostRows:
    """Return rows as kernels read them: an ndarray unchanged, or SciPy CSR rows as :class:`CsrRows`."""
    return x if isinstance(x, np.ndarray) else CsrRows.from_scipy(x)


class Stopped(Exception):
    """Signal that ends a computing thread after its pass or step was cancelled."""


class StopEvent(threading.Event):
    """Event that stops a pass; a subclass can override methods to follow the progress of the pass."""

    notes = False
    """True if the subclass logs each step with ``note``; rows are then not read ahead of the computation."""

    def moved(self) -> None:
        """Handle the start of the computation on the next block of rows."""

    def note(self, doing: str, start: int, stop: int) -> None:
        """Handle the start of ``doing``, such as "reading", on the rows ``start:stop``."""


@dataclass
class Meter:
    """Cost of reading: bytes decoded by all reading threads, and seconds that computing waited for rows."""

    bytes_read: int = 0
    wait_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes


class Reader:
    """Reader of one dataset's rows, labels and weights; it takes rows from the row cache if possible."""

    def __init__(
        self,
        dataset: Dataset,
        cache: PieceCache | None,
        meter: Meter,
        classes: np.ndarray | None = None,
        *,
        requirements: BlockRequirements = _NO_REQUIREMENTS,
        skipped: Ranges = (),
    ) -> None:
        self.dataset, self.skipped = dataset, skipped
        self.csr, self.targets = requirements.csr, requirements.targets
        self.classes = classes if dataset.has_y and requirements.targets is None else None
        self.unlabelled = requirements.unlabelled
        self.cache = cache if dataset.is_stored else None
        self.meter = meter
        labels = None
        if self.classes is not None:
            labels = (str(self.classes.dtype), self.classes.tobytes(), self.unlabelled)
        form = labels if requirements.targets is None else requirements.targets.source
        self._form = form

    @cached_property
    def name(self) -> Hashable:
        """Key that identifies the rows of this reader in caches."""
        # A dataset in memory has no stored fingerprint, but it stays the same object during a fit.
        which = self.dataset.fingerprint() if self.dataset.is_stored else self.dataset
        return which, self._form, self.skipped

    @property
    def target_width(self) -> int:
        """Number of outputs per row; 0 if outputs are not read."""
        if self.targets is None:
            return 0
        return self.dataset.n_features if self.targets.source == "x" else int(self.dataset.n_targets or 0)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Split the rows ``start:stop`` into ranges, each of which is read in one call."""
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
        """Return a block of these rows with the inputs, outputs or class codes that the learner requests."""
        if self.targets is not None and self.targets.source == "x":
            assert isinstance(x, np.ndarray)
            x, y = _make_inputs(x, self.targets, start, rows, epoch), x
        elif isinstance(x, CsrRows) and not self.csr:
            x = x.to_dense()
        return Block(x, y, weight, start, rows, epoch, chain)

    def cached(self, start: int, stop: int) -> Piece | None:
        """Return the rows ``start:stop`` from the cache, or None if the cache does not contain them."""
        return self.cache.get((self.name, start, stop)) if self.cache is not None else None

    def read(self, start: int, stop: int) -> Piece:
        """Return (x, class codes or outputs, weight) of rows ``start:stop``, if possible from the cache."""
        found = self.cached(start, stop)
        if found is not None:
            return found
        piece = self._read_unskipped(start, stop) if self.skipped else self._read(start, stop)
        if self.cache is not None:
            self.cache.put((self.name, start, stop), piece)
        return piece

    def _read(self, start: int, stop: int) -> Piece:
        ds = self.dataset
        has_own_outputs = self.targets is not None and self.targets.source == "x"
        piece = (
            ds.read_binary(start, stop) if has_own_outputs else as_rows(ds.read_x(start, stop)),
            None if has_own_outputs else self._read_y(start, stop),
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

    def _read_unskipped(self, start: int, stop: int) -> Piece:
        """Return the rows ``start:stop``, in which excluded rows are zeros with weight 0 and are not read."""
        parts: list[PlacedPiece] = []
        row = start
        skipped = [(max(a, start), min(b, stop)) for a, b in self.skipped if a < stop and b > start]
        for a, b in [*skipped, (stop, stop)]:
            if row < a:
                x, y, weight = self._read(row, a)
                parts.append(((row, a), (x, y, np.ones(a - row) if weight is None else weight)))
            if a < b:
                parts.append(((a, b), self._make_zeros(b - a)))
            row = b
        x, y, weight = (slice_column(parts, column, start, stop) for column in range(3))
        return x, y, weight

    def _make_zeros(self, rows: int) -> Piece:
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


def _make_inputs(
    v: np.ndarray, targets: Targets, start: int, rows: np.ndarray | None, epoch: int
) -> np.ndarray:
    """Return the inputs that the corruption makes from outputs ``v``; (rows, 0) without a corruption."""
    if targets.corruption is None:
        return np.empty((len(v), 0), np.uint8)
    rows = np.arange(start, start + len(v)) if rows is None else rows
    return corrupt(v, rows, epoch, **vars(targets.corruption))


def slice_column(pieces: list[PlacedPiece], column: int, start: int, stop: int) -> Any:
    """Return the rows start:stop of one column (x, y or weight) of several pieces (rows of one read)."""
    parts = [
        rows[max(start - a, 0) : stop - a]
        for (a, b), piece in pieces
        if (rows := piece[column]) is not None and a < stop and b > start
    ]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else join_rows(parts)


def join_rows(parts: list[HostRows]) -> HostRows:
    """Return the rows of all parts, one part after the other, as one array or `CsrRows`."""
    sparse = [part for part in parts if isinstance(part, CsrRows)]
    if sparse:
        return CsrRows.concatenate(sparse)
    return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])


AHEAD, AHEAD_BYTES = 3, 2**25  # upper bounds on the pieces (rows of one read) and bytes that are read ahead
_POLL_SECONDS = 0.2  # interval at which waiting threads check whether the pass was cancelled


def iter_blocks(
    reader: Reader, blocks: list[tuple[int, int]], stop_event: StopEvent
) -> Generator[Block, None, None]:
    """Yield the blocks of adjacent ranges of rows, in order, and read the following rows ahead."""
    if not blocks:
        return
    pieces = reader.pieces(blocks[0][0], blocks[-1][1])
    in_memory = not reader.dataset.is_stored or all(reader.cached(*piece) is not None for piece in pieces)
    source: Generator[PlacedPiece, None, None]
    if stop_event.notes:
        source = _read_noted(reader, pieces, stop_event.note)
    elif in_memory:
        source = ((piece, reader.read(*piece)) for piece in pieces)
    else:
        source = _read_ahead(reader, pieces, stop_event)
    try:
        current: list[PlacedPiece] = []
        for start, stop in blocks:
            if stop_event.is_set():
                raise Stopped
            stop_event.moved()
            while not current or current[-1][0][1] < stop:
                current.append(next(source))
            current = [entry for entry in current if entry[0][1] > start]
            x, y, weight = (slice_column(current, column, start, stop) for column in range(3))
            assert x is not None
            stop_event.note("computing on", start, stop)
            yield reader.block(x, y, weight, start)
    finally:
        source.close()


def iter_gpu_blocks(
    reader: Reader,
    blocks: list[tuple[int, int]],
    stop_event: StopEvent,
    backend: CupyBackend,
    *,
    keeps_rows: bool = True,
) -> Generator[Block, None, None]:
    """Yield the blocks of :func:`iter_blocks`, with rows on the GPU if the GPU has kept them.

    If a block is not on the GPU, a thread copies its rows to the GPU while the caller computes the previous
    block. The block itself has the rows in host memory, which some models check, and ``backend.asarray``
    returns the copy. Without ``keeps_rows`` the GPU keeps no rows for later passes.
    """
    keys = [(reader.name, *block) for block in blocks]
    pieces = [backend.kept_rows.get(key) if keeps_rows else None for key in keys]
    if stop_event.notes:
        yield from iter_blocks(reader, blocks, stop_event)
    elif None in pieces:
        yield from _iter_copied_blocks(reader, blocks, keys, pieces, stop_event, backend, keeps_rows)
    else:
        for (start, _), piece in zip(blocks, pieces, strict=True):
            if stop_event.is_set():
                raise Stopped
            stop_event.moved()
            assert piece is not None
            yield reader.block(*piece, start)


def _iter_copied_blocks(
    reader: Reader,
    blocks: list[tuple[int, int]],
    keys: list[tuple[Hashable, int, int]],
    pieces: list[Piece | None],
    stop_event: StopEvent,
    backend: CupyBackend,
    keeps_rows: bool,
) -> Generator[Block, None, None]:
    own_stop, own_reader = StopEvent(), copy(reader)  # copies for the thread that reads rows
    own_reader.meter = Meter()

    def read() -> Generator[Block, None, None]:
        for kept, group in itertools.groupby(
            zip(blocks, pieces, strict=True), lambda one: one[1] is not None
        ):
            if kept:
                yield from (reader.block(*piece, start) for (start, _), piece in group if piece is not None)
            else:
                yield from iter_blocks(own_reader, [block for block, _ in group], own_stop)

    source, owner = read(), backend.begin_copies()

    def copy_next(number: int) -> Block:
        block = next(source)
        backend.copy_ahead(owner, number, keys[number] if keeps_rows else None, block, pool)
        return block

    pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="scalelatent-copy")
    future = pool.submit(copy_next, 0)
    try:
        for number in range(len(blocks)):
            if stop_event.is_set():
                raise Stopped
            block = _wait_for_rows(future, reader.meter, stop_event)
            if number + 1 < len(blocks):
                future = pool.submit(copy_next, number + 1)
            stop_event.moved()
            yield block
            backend.finish_block(number)
    finally:
        own_stop.set()
        pool.submit(source.close)
        # If the pass was cancelled, do not wait for a read that may hang.
        pool.shutdown(wait=not stop_event.is_set())
        reader.meter.count(own_reader.meter.bytes_read)


def _wait_for_rows(future: Future[T], meter: Meter, stop_event: StopEvent) -> T:
    """Return the result of a thread that reads rows, and count the seconds of waiting."""
    begin = time.perf_counter()
    while not wait([future], timeout=_POLL_SECONDS).done:
        if stop_event.is_set():
            raise Stopped
    rows = future.result()
    meter.wait_seconds += time.perf_counter() - begin
    return rows


def _read_noted(
    reader: Reader, pieces: list[tuple[int, int]], note: Callable[[str, int, int], None]
) -> Generator[PlacedPiece, None, None]:
    for piece in pieces:
        note("reading", *piece)
        yield piece, reader.read(*piece)


def _read_ahead(
    reader: Reader, pieces: list[tuple[int, int]], stop_event: StopEvent
) -> Generator[PlacedPiece, None, None]:
    """Yield the pieces (rows of one read) in order, while threads read the following pieces.

    One thread reads from a disk. Several threads read from an object store, because each waits for the
    network.
    """
    threads, ahead = reader.dataset.reads_at_once, reader.dataset.reads_at_once
    if threads == 1:
        ahead = 1 + _limit_read_ahead(reader.dataset, pieces, reader.target_width)
    waiting: deque[tuple[tuple[int, int], Future[Piece]]] = deque()
    pool = ThreadPoolExecutor(min(threads, len(pieces)), thread_name_prefix="scalelatent-read")
    try:
        rest = iter(pieces)
        for piece in itertools.islice(rest, ahead):
            waiting.append((piece, pool.submit(reader.read, *piece)))
        while waiting:
            rows = _wait_for_rows(waiting[0][1], reader.meter, stop_event)
            piece, _ = waiting.popleft()
            for following in itertools.islice(rest, 1):
                waiting.append((following, pool.submit(reader.read, *following)))
            yield piece, rows
    finally:
        running = [future for _, future in waiting if not future.cancel()]
        # If the pass was cancelled, wait at most one second for a read that may hang.
        hangs = wait(running, timeout=1.0 if stop_event.is_set() else None).not_done
        pool.shutdown(wait=not hangs)


def _limit_read_ahead(dataset: Dataset, pieces: list[tuple[int, int]], target_width: int) -> int:
    """Return how many pieces (rows of one read) one thread reads ahead of the computation."""
    if dataset.is_sparse:  # the bytes of CSR rows are unknown before the read, but their row groups are small
        return AHEAD
    row_bytes = dataset.n_features * dataset.dtype.itemsize + target_width
    largest = max(stop - start for start, stop in pieces) * row_bytes
    return max(1, min(AHEAD, AHEAD_BYTES // max(largest, 1)))


@dataclass(frozen=True)
class RowMask:
    """Range of held-out rows in cross-validation; ``inside``: use these rows, otherwise all other rows."""

    start: int
    stop: int
    inside: int

    def apply(self, block: Block) -> Block | None:
        """Return the block with only its used rows, or with weight 0 for the others; None if it has none.

        If ``inside`` is set, rows outside of the range are removed from the block. If not, rows in the range
        stay in the block with weight 0.
        """
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
        return block.slice_rows(first, last)
