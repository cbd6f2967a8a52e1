"""Rows of minibatches."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.kernels.sparse_rows import CsrRows

from .order import Permutations, RowOrder
from .reading import Reader, Stopped

if TYPE_CHECKING:
    from scalelatent.kernels.arrays import HostRows

    from .cache import Piece

AHEAD = 2
# Buffers of a chain: the one in use, and the next.
BUFFERS = 2
SLAB_BYTES, SLAB_STEPS = 2**21, 256
IDLE_SECONDS, CLOSE_SECONDS = 10.0, 5.0
_POLL_SECONDS = 0.25

# (x, codes or outputs, weight, row numbers) of one chain in some consecutive steps.
_Rows: TypeAlias = "tuple[HostRows, np.ndarray | None, np.ndarray | None, np.ndarray]"


class Feed:
    """Blocks of some chains, step by step."""

    # Rows are gathered a slab at a time, those of some consecutive steps, so that a step of a few rows costs
    # a few slices. Held are, for each chain, the runs of the buffer in use and of the next, and a few slabs.
    # A feed that is not asked for a while releases its thread and rows, and takes them up again when it is
    # asked.

    def __init__(self, reader: Reader, order: RowOrder, chains: Iterable[int], n_epochs: int) -> None:
        self._reader, self._order, self._chains = reader, order, list(chains)
        row_bytes = max(reader.dataset.nbytes // order.n_rows + reader.target_width, 1)
        self._steps = int(np.clip(SLAB_BYTES // (order.chain_rows * row_bytes), 1, SLAB_STEPS))
        self._per_epoch = -(-order.n_steps // self._steps)
        self._n_slabs = n_epochs * self._per_epoch
        self._whole = _rows_in_memory(reader)
        self._current: tuple[int, list[_Rows]] = (-1, [])
        # What the thread and the caller share, under the condition.
        self._change = threading.Condition()
        self._wanted = 0
        self._ready: dict[int, list[_Rows]] = {}
        self._error: BaseException | None = None
        self._closed, self._busy, self._asked = False, False, 0.0
        self._thread: threading.Thread | None = None
        self._permutations = {chain: Permutations(BUFFERS) for chain in self._chains}
        # The thread's own: runs in use, and the numbers of those worth holding at a slab.
        self._held: dict[int, Piece] = {}
        self._near: tuple[int, set[int]] = (-1, set())

    def blocks(self, epoch: int, step: int, check: Callable[[], None] = lambda: None) -> list[Block | None]:
        """A block for each chain; None where a chain has no rows in this (last) step."""
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

    def rest(self) -> None:
        """The step is done: if no other is asked for within a while, rows go."""
        with self._change:
            self._busy, self._asked = False, time.monotonic()

    def close(self) -> None:
        """Stop the thread and release all rows; a read that hangs is abandoned."""
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
        """Wait until a slab is there, and make it the current one."""
        begin = time.perf_counter()
        with self._change:
            self._wanted = slab
            for old in [k for k in self._ready if not slab <= k <= slab + AHEAD]:
                del self._ready[old]
        while not self._take_up(slab):
            check()
        self._reader.meter.wait_seconds += time.perf_counter() - begin

    def _take_up(self, slab: int) -> bool:
        """Make a slab the current one; where it is not ready, see to it that it will be, and wait a bit."""
        with self._change:
            if self._closed:
                raise RuntimeError("rows are asked of a feed that was closed")
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
            # In one go: the thread must at no time find it neither ready nor current, and read it again.
            self._current = (slab, self._ready.pop(slab))
            return True

    def _work(self) -> None:
        try:
            while True:
                with self._change:
                    wanted, current = self._wanted, self._current[0]
                    todo = [k for k in self._ahead(wanted) if k not in self._ready and k != current]
                self._forget(wanted)
                if todo:
                    rows = self._gather(todo[0])
                    with self._change:
                        self._ready[todo[0]] = rows
                        self._change.notify_all()
                elif not self._read_one_run() and self._wait(wanted):
                    return
        except Stopped:
            self._held.clear()
        except BaseException as error:  # noqa: BLE001  handed to the caller, which raises it
            with self._change:
                self._error = error
                self._held.clear()
                self._change.notify_all()

    def _ahead(self, wanted: int) -> range:
        return range(wanted, max(wanted + 1, min(wanted + 1 + AHEAD, self._n_slabs)))

    def _wait(self, wanted: int) -> bool:
        """Until there is something to do; True where the thread is to end."""
        with self._change:
            while not self._closed and self._wanted == wanted:
                if not self._busy and time.monotonic() - self._asked > IDLE_SECONDS:
                    break
                self._change.wait(_POLL_SECONDS)
            else:
                if not self._closed:
                    return False
            self._thread = None
            self._ready.clear()
            self._held.clear()
            return True

    def _read_one_run(self) -> bool:
        """Read a run of the next buffers, with which the thread fills its spare time."""
        missing = self._near[1].difference(self._held)
        if not missing:
            return False
        self._piece(min(missing))
        return True

    def _forget(self, wanted: int) -> None:
        """Release the runs that are not needed soon."""
        if self._near[0] == wanted:
            return
        near = {run for slab in self._ahead(wanted) for run in self._runs(slab)}
        self._near = (wanted, near | self._runs_after(self._ahead(wanted)[-1]))
        for run in [run for run in self._held if run not in self._near[1]]:
            del self._held[run]

    def _runs(self, slab: int) -> set[int]:
        epoch, first, last = self._steps_of(slab)
        return {
            int(run)
            for chain in self._chains
            for run in self._order.runs_at(epoch, chain, *self._order.places(chain, first, last))
        }

    def _runs_after(self, slab: int) -> set[int]:
        """Runs of the buffers that follow on those of a slab."""
        epoch, _, last = self._steps_of(slab)
        out: set[int] = set()
        for chain in self._chains:
            place = -(-self._order.places(chain, last, last)[0] // self._order.buffer_rows)
            place, following = place * self._order.buffer_rows, epoch
            if place >= self._order.segment(chain)[1]:
                place, following = 0, epoch + 1
            if following * self._per_epoch < self._n_slabs:
                out.update(int(r) for r in self._order.runs_at(following, chain, place, place + 1))
        return out

    def _steps_of(self, slab: int) -> tuple[int, int, int]:
        """(epoch, first step, one past the last step)."""
        epoch, index = divmod(slab, self._per_epoch)
        return epoch, index * self._steps, min((index + 1) * self._steps, self._order.n_steps)

    # -- rows ------------------------------------------------------------------------------------------------

    def _gather(self, slab: int) -> list[_Rows]:
        epoch, first, last = self._steps_of(slab)
        out = []
        for chain in self._chains:
            places, permute = self._order.places(chain, first, last), self._permutations[chain]
            rows = self._order.rows_at(epoch, chain, *places, permute)
            out.append(self._take_whole(rows) if self._whole is not None else self._take(rows))
        return out

    def _take_whole(self, rows: np.ndarray) -> _Rows:
        assert self._whole is not None
        (x, y, weight), rows = self._whole, self._order.numbers(rows)
        y = None if y is None else y.take(rows, axis=0)
        weight = None if weight is None else weight.take(rows, axis=0)
        return x.take(rows, axis=0), y, weight, rows

    def _take(self, rows: np.ndarray) -> _Rows:
        size, numbers = self._order.run_rows, self._order.numbers(rows)
        by_run = np.argsort(rows // size, kind="stable")
        runs = rows[by_run] // size
        cuts = [0, *(np.flatnonzero(runs[1:] != runs[:-1]) + 1).tolist(), len(rows)]
        spans = [(int(runs[a]), by_run[a:b]) for a, b in itertools.pairwise(cuts) if a < b]
        columns = []
        for column in range(3):
            parts = [
                (self._piece(run)[column], numbers[at] - self._order.run_range(run)[0], at)
                for run, at in spans
            ]
            columns.append(_gather_parts(parts, len(rows)))
        x, y, weight = columns
        return x, y, weight, numbers

    def _piece(self, run: int) -> Piece:
        if self._closed:
            raise Stopped
        piece = self._held.get(run)
        if piece is None:
            piece = self._held[run] = self._reader.read(*self._order.run_range(run))
        return piece


def _gather_parts(parts: list[tuple[Any, np.ndarray, np.ndarray]], n: int) -> Any:
    """One column of rows from several runs: (rows of a run, which of them, and where they go)."""
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
    """(x, codes or outputs, weight) where all rows are an array in memory, so that nothing has to be read."""
    dataset = reader.dataset
    if dataset.is_stored or dataset.lazy(0, 1) is not None:
        return None
    one, again = dataset.read_x(0, 1), dataset.read_x(0, 1)
    if not (isinstance(one, np.ndarray) and np.may_share_memory(one, again)):
        return None
    if reader.targets is not None:
        # Outputs of another type are made uint8 run by run: all at once would be a second copy of them.
        read = dataset.read_binary if reader.targets.source == "x" else dataset.read_targets
        if not np.may_share_memory(read(0, 1), read(0, 1)):
            return None
    x, y, weight = reader.read(0, len(dataset))
    assert isinstance(x, np.ndarray)
    return x, y, weight
