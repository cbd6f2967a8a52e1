"""Read and gather the rows of minibatches in a background thread."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.kernels.sparse_rows import CsrRows

from .order import RowOrder, permutation
from .reading import Reader, Stopped

if TYPE_CHECKING:
    from scalelatent.kernels.arrays import HostRows

    from .cache import Piece

AHEAD = 2  # number of slabs (groups of consecutive minibatch steps) whose rows are gathered in advance
BUFFERS = (
    2  # number of shuffle buffers in memory per chain (part of a minibatch): the current and the next one
)
# Upper bounds of a slab (group of steps): bytes per chain (part of each minibatch), and number of steps.
SLAB_BYTES, SLAB_STEPS = 2**21, 256
IDLE_SECONDS = 10.0  # an unused `Feed` releases its rows after this time
CLOSE_SECONDS = 5.0  # `Feed.close` waits at most this long for a read that is in progress
_POLL_SECONDS = 0.25  # interval at which waiting threads check for changes

# Rows of one chain (part of each minibatch) in a slab: (x, class codes or outputs, weights, row indices).
_Rows: TypeAlias = "tuple[HostRows, np.ndarray | None, np.ndarray | None, np.ndarray]"


class Feed:
    """Source of the rows of the given chains (parts of each minibatch), step by step.

    1. The steps of an epoch are split into *slabs* of consecutive steps. The rows of a slab are gathered at
       once, so that a step only slices arrays.
    2. A thread gathers the slab that the caller needs, then up to ``AHEAD`` further slabs.
    3. In its spare time the thread reads runs (contiguous ranges of rows) of the next shuffle buffers, one at
       a time.
    4. The thread releases every run that neither these slabs nor the next shuffle buffers need.
    5. After ``IDLE_SECONDS`` without a request the thread ends and releases all rows; the next request starts
       a new thread.
    """

    def __init__(self, reader: Reader, order: RowOrder, chains: Iterable[int], n_epochs: int) -> None:
        self._reader, self._order, self._chains = reader, order, list(chains)
        row_bytes = max(reader.dataset.nbytes // order.n_rows + reader.target_width, 1)
        self._steps = int(np.clip(SLAB_BYTES // (order.chain_rows * row_bytes), 1, SLAB_STEPS))
        self._per_epoch = -(-order.n_steps // self._steps)
        self._n_slabs = n_epochs * self._per_epoch
        self._whole = _rows_in_memory(reader)
        self._current: tuple[int, list[_Rows]] = (-1, [])
        # State that the thread and the caller share, protected by the condition.
        self._change = threading.Condition()
        self._requested = 0
        self._ready: dict[int, list[_Rows]] = {}
        self._error: BaseException | None = None
        self._closed, self._busy, self._asked = False, False, 0.0
        self._thread: threading.Thread | None = None
        # Many steps take rows from the same shuffle buffer, so its permutation is cached.
        self._permutations = {chain: lru_cache(BUFFERS)(permutation) for chain in self._chains}
        # Only the reading thread uses these: the runs (ranges of rows) in memory, and (slab, that is a group
        # of steps; the runs that are needed soon after this slab).
        self._runs: dict[int, Piece] = {}
        self._needed: tuple[int, set[int]] = (-1, set())

    def blocks(self, epoch: int, step: int, check: Callable[[], None] = lambda: None) -> list[Block | None]:
        """Return a block for each chain (part of a minibatch); None for a chain without rows in this step."""
        slab = epoch * self._per_epoch + step // self._steps
        with self._change:
            self._busy = True
        if self._current[0] != slab:
            if self._whole is None:
                self._fetch(slab, check)
            else:
                self._current = (slab, self._gather(slab))
        base = step // self._steps * self._steps
        out: list[Block | None] = []
        for chain, (x, y, weight, rows) in zip(self._chains, self._current[1], strict=True):
            offset = self._order.places(chain, base, base)[0]
            first, last = (place - offset for place in self._order.places(chain, step, step + 1))
            if first == last:
                out.append(None)
                continue
            numbers = rows[first:last]
            y = None if y is None else y[first:last]
            weight = None if weight is None else weight[first:last]
            block = self._reader.block(x[first:last], y, weight, int(numbers[0]), numbers, epoch, chain)
            out.append(block)
        return out

    def finish_step(self) -> None:
        """Mark the current step as finished; after `IDLE_SECONDS` without another step, rows are released."""
        with self._change:
            self._busy, self._asked = False, time.monotonic()

    def close(self) -> None:
        """Stop the thread and release all rows, without waiting for a read that hangs."""
        with self._change:
            self._closed = True
            self._change.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_SECONDS)
        with self._change:
            self._ready.clear()
            self._current = (-1, [])

    # -- the thread ------------------------------------------------------------------------------------------

    def _fetch(self, slab: int, check: Callable[[], None]) -> None:
        """Wait until the rows of a slab (group of steps) are gathered, and make it the current slab."""
        begin = time.perf_counter()
        with self._change:
            self._requested = slab
            for old in [k for k in self._ready if not slab <= k <= slab + AHEAD]:
                del self._ready[old]
        while not self._make_current(slab):
            check()
        self._reader.meter.wait_seconds += time.perf_counter() - begin

    def _make_current(self, slab: int) -> bool:
        """Make a slab (group of steps) the current one; return False if its rows are not ready soon."""
        with self._change:
            if self._closed:
                raise RuntimeError("a closed feed was asked for rows")
            if slab not in self._ready:
                if self._error is not None:
                    error, self._error, self._thread = self._error, None, None
                    raise error
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._work, name="scalelatent-feed", daemon=True)
                    self._thread.start()
                self._change.notify_all()
                self._change.wait(_POLL_SECONDS)
            if slab not in self._ready:
                return False
            # Both variables change under one lock, so that the thread does not gather these rows again.
            self._current = (slab, self._ready.pop(slab))
            return True

    def _work(self) -> None:
        try:
            while True:
                with self._change:
                    requested, current = self._requested, self._current[0]
                    todo = [k for k in self._list_ahead(requested) if k not in self._ready and k != current]
                self._release_runs(requested)
                if todo:
                    rows = self._gather(todo[0])
                    with self._change:
                        self._ready[todo[0]] = rows
                        self._change.notify_all()
                elif not self._read_next_run() and self._wait_for_request(requested):
                    return
        except Stopped:
            self._runs.clear()
        except BaseException as error:  # noqa: BLE001  passed to the caller, which raises it
            with self._change:
                self._error = error
                self._runs.clear()
                self._change.notify_all()

    def _list_ahead(self, requested: int) -> range:
        """Return the numbers of the slab (group of steps) ``requested`` and of those to gather in advance."""
        return range(requested, max(requested + 1, min(requested + 1 + AHEAD, self._n_slabs)))

    def _wait_for_request(self, requested: int) -> bool:
        """Wait until another slab (group of steps) is requested; return True if the thread must end."""
        with self._change:
            while not self._closed and self._requested == requested:
                if not self._busy and time.monotonic() - self._asked > IDLE_SECONDS:
                    break
                self._change.wait(_POLL_SECONDS)
            else:
                if not self._closed:
                    return False
            self._thread = None
            self._ready.clear()
            self._runs.clear()
            return True

    def _read_next_run(self) -> bool:
        """Read one missing run (range of rows) of the next buffers; return False if none is missing."""
        missing = self._needed[1].difference(self._runs)
        if not missing:
            return False
        self._read_run(min(missing))
        return True

    def _release_runs(self, requested: int) -> None:
        """Release the runs (ranges of rows) that the next steps do not need."""
        if self._needed[0] == requested:
            return
        needed = {run for slab in self._list_ahead(requested) for run in self._list_runs(slab)}
        self._needed = (requested, needed | self._list_following_runs(self._list_ahead(requested)[-1]))
        for run in [run for run in self._runs if run not in self._needed[1]]:
            del self._runs[run]

    def _list_runs(self, slab: int) -> set[int]:
        epoch, first, last = self._find_steps(slab)
        return {
            int(run)
            for chain in self._chains
            for run in self._order.runs_at(epoch, chain, *self._order.places(chain, first, last))
        }

    def _list_following_runs(self, slab: int) -> set[int]:
        """Return the runs (ranges of rows) of the shuffle buffers that chains need after a slab of steps."""
        epoch, _, last = self._find_steps(slab)
        out: set[int] = set()
        for chain in self._chains:
            place = -(-self._order.places(chain, last, last)[0] // self._order.buffer_rows)
            place, following = place * self._order.buffer_rows, epoch
            if place >= self._order.locate_chain(chain)[1]:
                place, following = 0, epoch + 1
            if following * self._per_epoch < self._n_slabs:
                out.update(int(r) for r in self._order.runs_at(following, chain, place, place + 1))
        return out

    def _find_steps(self, slab: int) -> tuple[int, int, int]:
        """Return (epoch, first step, last step + 1) of a slab (group of consecutive steps)."""
        epoch, index = divmod(slab, self._per_epoch)
        return epoch, index * self._steps, min((index + 1) * self._steps, self._order.n_steps)

    # -- rows ------------------------------------------------------------------------------------------------

    def _gather(self, slab: int) -> list[_Rows]:
        epoch, first, last = self._find_steps(slab)
        out = []
        for chain in self._chains:
            places, permute = self._order.places(chain, first, last), self._permutations[chain]
            rows = self._order.rows_at(epoch, chain, *places, permute)
            out.append(self._take_in_memory(rows) if self._whole is not None else self._take_from_runs(rows))
        return out

    def _take_in_memory(self, rows: np.ndarray) -> _Rows:
        assert self._whole is not None
        (x, y, weight), rows = self._whole, self._order.to_dataset_rows(rows)
        y = None if y is None else y.take(rows, axis=0)
        weight = None if weight is None else weight.take(rows, axis=0)
        return x.take(rows, axis=0), y, weight, rows

    def _take_from_runs(self, rows: np.ndarray) -> _Rows:
        size, numbers = self._order.run_rows, self._order.to_dataset_rows(rows)
        by_run = np.argsort(rows // size, kind="stable")
        runs = rows[by_run] // size
        cuts = [0, *(np.flatnonzero(runs[1:] != runs[:-1]) + 1).tolist(), len(rows)]
        spans = [(int(runs[a]), by_run[a:b]) for a, b in itertools.pairwise(cuts) if a < b]
        columns = []
        for column in range(3):
            parts = [
                (self._read_run(run)[column], numbers[at] - self._order.bounds_of_run(run)[0], at)
                for run, at in spans
            ]
            columns.append(_gather_parts(parts, len(rows)))
        x, y, weight = columns
        return x, y, weight, numbers

    def _read_run(self, run: int) -> Piece:
        """Return the rows of a run (range of rows), from memory if possible."""
        if self._closed:
            raise Stopped
        piece = self._runs.get(run)
        if piece is None:
            piece = self._runs[run] = self._reader.read(*self._order.bounds_of_run(run))
        return piece


def _gather_parts(parts: list[tuple[Any, np.ndarray, np.ndarray]], n: int) -> Any:
    """Return one column of ``n`` rows from several runs (ranges of rows).

    Each part is (the run's column, indices of the rows in the run, their positions in the result).
    """
    if not parts or parts[0][0] is None:
        return None
    first = parts[0][0]
    if isinstance(first, CsrRows):
        back = np.empty(n, dtype=np.int64)
        back[np.concatenate([places for _, _, places in parts])] = np.arange(n)
        return CsrRows.concatenate([source.take(local) for source, local, _ in parts]).take(back)
    out = np.empty((n, *first.shape[1:]), first.dtype)
    for source, local, places in parts:
        out[places] = source[local]
    return out


def _rows_in_memory(reader: Reader) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None] | None:
    """Return (x, codes or outputs, weight) if all rows are an array in memory, otherwise None."""
    dataset = reader.dataset
    if dataset.is_stored or dataset.lazy(0, 1) is not None:
        return None
    one, again = dataset.read_x(0, 1), dataset.read_x(0, 1)
    if not (isinstance(one, np.ndarray) and np.may_share_memory(one, again)):
        return None
    if reader.targets is not None:
        # Outputs of another dtype are converted to uint8 run by run, to avoid a second copy of all outputs.
        read = dataset.read_binary if reader.targets.source == "x" else dataset.read_targets
        if not np.may_share_memory(read(0, 1), read(0, 1)):
            return None
    x, y, weight = reader.read(0, len(dataset))
    assert isinstance(x, np.ndarray)
    return x, y, weight
