"""Executor on the threads of this process; the Dask executor must give bitwise identical results."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from scalelatent.contract.idle_threads import allow_threads
from scalelatent.contract.learners import Backend
from scalelatent.contract.stats import Stats
from scalelatent.errors import ShardError

from .backend import keep_current_device, make_backend, resolve_device
from .cache import PieceCache, shared_cache
from .callbacks import Callback
from .chains import ChainRunner, InProcessSteps
from .checkpoints import EngineStore
from .executor import OnRows, StepResult
from .grid import TreeReducer
from .halving import make_split_event
from .order import RowOrder
from .passes import PassContext, Span, Stage, is_worth_saving, plan_spans, split_vector, vector_length
from .quarantine import Quarantine
from .rates import choose_cache, choose_map_cache
from .reading import Meter, StopEvent, Stopped
from .threads import resolve_jobs

if TYPE_CHECKING:
    from .mapwrite import OutputTask

_POLL_SECONDS = 0.2
_END: Any = object()
Item = TypeVar("Item")
Value = TypeVar("Value")
# Minimum seconds of a span (rows of one task of a thread); starting a span takes tens of microseconds.
THREAD_TASK_SECONDS = 2e-4


class InProcessExecutor:
    """Executor with ``n_jobs`` threads, one of which is the calling thread."""

    keeps_states = False

    def __init__(
        self,
        n_jobs: int | None = None,
        store: EngineStore | None = None,
        checkpoint_seconds: float = 30.0,
        cache: PieceCache | float | None = None,
        callbacks: Callback | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        self.workers = resolve_jobs(n_jobs)
        self.store = store
        self.checkpoint_seconds = checkpoint_seconds
        self._own_cache = cache if isinstance(cache, PieceCache) else None
        self._cache_size = None if isinstance(cache, PieceCache) else cache
        self._cached_stage = ""
        self.cache = self._own_cache or shared_cache()
        self.callbacks = callbacks or Callback()
        self.quarantine = quarantine or Quarantine("stop", store)
        self._backends: dict[tuple[str, int], Backend] = {}
        self._reported_limits: dict[tuple[str, int, str], int] = {}

    def _resize_cache(self, stage: Stage, *, once: bool = False) -> None:
        """Choose the size of the row cache for a stage; ``once`` is True if the stage reads each row once."""
        if self._own_cache is None and stage.name != self._cached_stage:
            shared_cache(choose_cache(self._cache_size, stage, once=once))
            self._cached_stage = stage.name

    def put_state(self, stage: Stage, iteration: int, state: object) -> object:
        return state

    def get_state(self, stage: Stage, iteration: int, handle: object) -> Any:
        return handle

    def step(self, stage: Stage, iteration: int, handle: object, on_rows: OnRows) -> StepResult:
        stats, rows, nbytes = self._reduce(stage, iteration, handle, on_rows)
        with allow_threads(self.workers):
            state = stage.batch.update(handle, stats)
        if self.store is not None:
            self.store.drop_nodes()
        return StepResult(stage.batch.summary(state), stage.batch.is_done(state), rows, nbytes, state)

    def end(self) -> None:
        """Do nothing, because this executor never starts a pass in advance."""

    def online_steps(self, stage: Stage, order: RowOrder, n_epochs: int) -> InProcessSteps:
        self._resize_cache(stage, once=n_epochs == 1)
        threads = min(self.workers, order.n_chains)
        backends = [self._backend(stage.device, slot) for slot in range(threads)]
        chains = range(order.n_chains)
        runner = ChainRunner(stage, order, chains, backends, self.cache, n_epochs)
        return InProcessSteps(runner, self.cache)

    def collect(self, stage: Stage, on_rows: OnRows) -> dict[str, Stats]:
        stats = self._reduce(stage, 0, None, on_rows)[0]
        if self.store is not None:
            self.store.drop_nodes()
        return stats

    def _reduce(
        self, stage: Stage, iteration: int, state: object, on_rows: OnRows
    ) -> tuple[dict[str, Stats], int, int]:
        """Run one pass; after each bad shard that is excluded, run the pass again from its start."""
        while True:
            remaining = replace(stage, skipped=self.quarantine.excluded_parts(stage))
            try:
                return self._reduce_once(remaining, iteration, state, on_rows)
            except ShardError as error:
                where = {"stage": stage.name, "pass": iteration + 1}
                if not self.quarantine.exclude_unreadable(error, self.callbacks, **where):
                    raise
                if self.store is not None:  # because saved sums include rows that are now excluded
                    self.store.drop_nodes()

    def _reduce_once(
        self, stage: Stage, iteration: int, state: object, on_rows: OnRows
    ) -> tuple[dict[str, Stats], int, int]:
        """Return (statistics of "train" and "validation" rows, number of rows, bytes read) of one pass."""
        self._resize_cache(stage)
        self.cache.start_pass()
        reducers = {part: TreeReducer(grid) for part, grid in stage.grids.items()}
        spans, saved = plan_spans(stage, iteration, self.store, self.workers, THREAD_TASK_SECONDS)
        done = 0
        for span in saved:
            assert self.store is not None
            length = vector_length(stage.reductions[span.part])
            vector = self.store.load_node(stage.name, iteration, span, length)
            if vector is None:
                spans.append(span)
                continue
            reducers[span.part].add(span.level, span.index, vector)
            done += int(vector[-2])
        on_rows(done, stage.rows)

        def finish(span: Span, vector: np.ndarray) -> None:
            nonlocal done
            reducers[span.part].add(span.level, span.index, vector)
            done += int(vector[-2])
            on_rows(done, stage.rows)

        def compute(slot: int, stop: StopEvent) -> Callable[[Span], np.ndarray]:
            context = PassContext(stage, state, self._backend(stage.device, slot), self.cache)

            def run(span: Span) -> np.ndarray:
                begin = time.perf_counter()
                vector = context.run_span(span, stop)
                if self.store is not None and is_worth_saving(
                    time.perf_counter() - begin, vector.nbytes, self.checkpoint_seconds
                ):
                    self.store.save_node(stage.name, iteration, span, vector)
                return vector

            return run

        run_threads(spans, self.workers, compute, finish, self.callbacks.on_wait)
        self._report_limits()
        out, rows, nbytes = {}, 0, 0
        for part, reducer in reducers.items():
            out[part], part_rows, part_bytes = split_vector(stage, part, reducer.root())
            rows, nbytes = rows + part_rows, nbytes + part_bytes
        return out, rows, nbytes

    def _report_limits(self) -> None:
        """Notify the callbacks of GPUs whose memory was too small for whole blocks."""
        for (device, slot), backend in self._backends.items():
            for work, rows in backend.row_limits.items():
                if self._reported_limits.get((device, slot, work)) != rows:
                    self._reported_limits[device, slot, work] = rows
                    self.callbacks.on_event(make_split_event(work, rows, backend.device))

    def _backend(self, device: str, slot: int) -> Backend:
        name = device if device == "reference" else resolve_device(device)
        key = (name, slot)
        if key not in self._backends:
            self._backends[key] = make_backend(name, slot)
        return self._backends[key]

    def run_map(self, task: OutputTask, on_rows: OnRows) -> None:
        while True:
            skipped = self.quarantine.excluded_rows(task.dataset)
            remaining = replace(task, skipped=skipped, cache=choose_map_cache(self._cache_size, task))
            try:
                return self._run_map_once(remaining, on_rows)
            except ShardError as error:
                if not self.quarantine.exclude_unreadable(error, self.callbacks, stage=task.name):
                    raise

    def _run_map_once(self, task: OutputTask, on_rows: OnRows) -> None:
        self.cache.start_pass()
        missing = task.writer.missing()
        done = task.rows_done(missing)
        on_rows(done, task.rows)

        def finish(shard: int, rows: int) -> None:
            nonlocal done
            done += rows
            on_rows(done, task.rows)

        def compute(slot: int, stop: StopEvent) -> Callable[[int], int]:
            backend = self._backend(task.device, slot)
            return lambda shard: task.write_shard(shard, backend, stop, Meter())

        run_threads(missing, self.workers, compute, finish, self.callbacks.on_wait)
        self._report_limits()


class CallerStop(StopEvent):
    """Stop event of the calling thread; it also calls ``on_wait`` between two blocks of rows."""

    def __init__(self, stop: StopEvent, on_wait: Callable[[], None] | None) -> None:
        super().__init__()
        self._stop, self._on_wait, self._called = stop, on_wait, 0.0

    def is_set(self) -> bool:
        """Return True if the pass must stop, after a call of ``on_wait``, which may raise an error."""
        now = time.monotonic()
        if self._on_wait is not None and now - self._called >= _POLL_SECONDS:
            self._called = now
            self._on_wait()
        return self._stop.is_set()


def run_threads(
    items: Sequence[Item],
    workers: int,
    make_worker: Callable[[int, StopEvent], Callable[[Item], Value]],
    finish: Callable[[Item, Value], None],
    on_wait: Callable[[], None] | None = None,
) -> None:
    """Apply the function that ``make_worker`` returns for a thread to all items, on ``workers`` threads.

    ``finish`` runs on the calling thread for each result. ``on_wait`` may raise an error to stop all threads.
    The calling thread computes too: if it only waited, each result would wake it and interrupt a computing
    thread.
    """
    stop, todo = StopEvent(), deque(items)
    results: queue.SimpleQueue[tuple[Any, Any, BaseException | None]] = queue.SimpleQueue()

    def take() -> Any:
        try:
            return todo.popleft()
        except IndexError:
            return _END

    def work(slot: int) -> None:
        try:
            run = make_worker(slot, stop)
            while not stop.is_set() and (item := take()) is not _END:
                results.put((item, run(item), None))
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  raised in the calling thread
            results.put((None, None, error))
            stop.set()

    threads = [
        threading.Thread(target=work, args=(slot,), name=f"scalelatent-{slot}", daemon=True)
        for slot in range(1, min(workers, len(items)))
    ]
    for thread in threads:
        thread.start()
    try:
        with keep_current_device():
            caller_stop = CallerStop(stop, on_wait)
            run, remaining = make_worker(0, caller_stop), len(items)
            while remaining:
                if results.empty() and (item := take()) is not _END:
                    try:
                        value, error = run(item), None
                    except Stopped:  # another thread failed; `results` receives its error
                        continue
                else:
                    item, value, error = _wait_for_result(results, threads, caller_stop)
                if error is not None:
                    raise error
                finish(item, value)
                remaining -= 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _wait_for_result(
    results: queue.SimpleQueue[Any], threads: Sequence[threading.Thread], stop: StopEvent
) -> tuple[Any, Any, BaseException | None]:
    while True:
        try:
            return results.get(timeout=_POLL_SECONDS)  # a short wait, so that Ctrl-C works at once
        except queue.Empty:
            stop.is_set()  # calls on_wait
            if not any(thread.is_alive() for thread in threads) and results.empty():
                raise RuntimeError("all threads of the pass ended before the pass was finished") from None
