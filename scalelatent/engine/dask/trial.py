"""Trials: an item (the rows of one task) that may have killed two workers runs alone on an idle worker.

The task of a trial logs the rows of each step to the run folder. If the worker of the trial dies too, an
error names these rows (`test_bad_shards.py`, `test_machines.py`).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.passes import Span
from scalelatent.engine.quarantine import BadShard
from scalelatent.engine.reading import Meter
from scalelatent.errors import RunError, ScalelatentError

from .failures import RowsExcluded, supervise
from .graph import Graph
from .pass_tasks import StageRef, context_of, load_map, open_store, stopping
from .watch import DEATHS, DRIVERS, Retry
from .window import Batch, Item, Window, Work
from .worker_side import Fit, TaskStop

if TYPE_CHECKING:
    from distributed import Future, Worker

    from scalelatent.data.dataset import Dataset

    from .executor import DaskExecutor

# If the last known memory of a dead worker was above this share of its limit, the error says that memory ran
# out. A nanny kills a worker at 95 % of the limit, but the last known number is some seconds old and lower
# (test_machines.py).
FULL_SHARE = 0.8
ATTEMPTS_FILE = "begun.json"
QUIET_SECONDS = 20.0  # maximum seconds to wait until cancelled tasks end
ASK_SECONDS = 3.0  # seconds to wait for the answer of a worker
TRIALS = 4  # maximum number of attempts to compute one item (the rows of one task) alone


class TrialWorkerDied(Exception):
    """Signal that a worker died while it ran a single task, whose rows are then bad."""


class Trial(Work[Item]):
    """Work that computes a single item (rows that may have killed workers) as one task on an idle worker."""

    def __init__(self, executor: DaskExecutor, tried: Work[Item], suspect: Item, worker: str) -> None:
        super().__init__(tried.name, tried.number, executor.next_token(), tried.item_rows(suspect))
        self._client, self._tried = executor.client, tried
        self.note = note_name(tried, suspect)
        self.window = Window({worker: 1}, [suspect], self._send)

    def _send(self, batch: Batch[Item], last: bool) -> dict[Item, Future]:
        ((item, worker),) = batch
        graph, key = Graph(), f"{self.name}-trial-{self._tried.label(item)}-{self.token}"
        self._tried.add_trial(graph, key, item, self.note, worker)
        self.items[key] = item
        # Only this worker may run the task, so that the rows kill no further worker if this worker dies.
        return {item: graph.send(self._client, [key], [worker])[key]}

    def about(self, item: Item) -> dict[str, Any]:
        return self._tried.about(item)

    def dataset_of(self, item: Item) -> Dataset | None:
        return self._tried.dataset_of(item)

    def shards_of(self, item: Item) -> list[tuple[str, int, int]]:
        """Return [], so that `Watch` does not stop this task because of workers that died earlier."""
        return []

    def worker_lost(self, items: list[Item], worker: str, alone: bool, expected: bool) -> None:
        """Raise `TrialWorkerDied`, or `Retry` if another task of the worker may have caused its death."""
        if expected or not items:
            return
        if not alone:
            raise Retry(f"{worker} died while it also ran tasks of other programs")
        raise TrialWorkerDied(worker)


def note_name(work: Work[Item], item: Item) -> str:
    """Return the name of the file to which the task that computes only ``item`` (rows) logs its steps."""
    return f"trial-{work.name}-{work.number}-{work.label(item)}.json"


def count_attempts(store: EngineStore, name: str, number: int) -> int:
    """Record that a driver starts a pass or map; return how many earlier drivers crashed during it."""
    stored = store.location.read(ATTEMPTS_FILE)
    before = {} if stored is None else json.loads(stored)
    same = (before.get("name"), before.get("number")) == (name, number)
    ends = 0 if stored is None else 1 + (int(before["ends"]) if same else 0)
    store.write_bytes(ATTEMPTS_FILE, json.dumps({"name": name, "number": number, "ends": ends}).encode())
    return ends


def clear_attempts(store: EngineStore) -> None:
    """Remove the record that `count_attempts` wrote, because the driver ends without a crash."""
    with suppress(OSError):
        store.remove(ATTEMPTS_FILE)


def find_suspect_items(executor: DaskExecutor, work: Work[Item]) -> None:
    """Record the items (the rows of one task) that may have killed earlier drivers of this run."""
    # A driver that runs on a dying worker dies too, and cannot record the death. After two drivers crashed in
    # a pass or map, all items of this work run alone. After the third crash, the log of the last trial names
    # the bad rows.
    ends = count_attempts(executor.store, work.name, work.number)
    notes = set(executor.store.location.keys("")) if ends else set()
    left = [item for item in work.todo if note_name(work, item) in notes]
    if ends >= DEATHS:
        who = [f"the worker of an earlier driver ({number})" for number in range(ends, 0, -1)]
        for item in left or work.todo:
            executor.watch.deaths[work.name, work.number, item] = list(who)
    for item in left:
        try:
            if ends > DEATHS:
                _exclude_or_raise(executor, work, item)
        finally:
            executor.store.remove(note_name(work, item))


def run_isolated(executor: DaskExecutor, work: Work[Item]) -> bool:
    """Run each item (the rows of one task) alone that may have killed workers.

    Return True if there are such items; the caller must then create the work again.
    """
    suspects = executor.watch.suspects(work)
    if suspects:
        wait_until_idle(executor)
    for item in suspects:
        _run_trial(executor, work, item)
        executor.watch.forget_deaths(work, item)
    return bool(suspects)


def _run_trial(executor: DaskExecutor, work: Work[Item], item: Item) -> None:
    """Compute one item (rows) on an idle worker; if the worker dies, exclude or report these rows."""
    for _ in range(TRIALS):
        trial = Trial(executor, work, item, _find_least_busy_worker(executor))
        try:
            return supervise(executor, trial, lambda done, rows: None)
        except TrialWorkerDied:
            _exclude_or_raise(executor, work, item)
        except RowsExcluded:
            raise
        except Retry as again:
            why = str(again)
        finally:
            trial.cancel()
            with suppress(OSError):
                executor.store.remove(trial.note)
    raise RunError(
        f"{executor.watch.describe_deaths(work, item)}; it ran {TRIALS} times alone and did not finish: "
        f"{why}. Look at the logs of the workers, then resume the run; finished work is kept"
    )


def _find_least_busy_worker(executor: DaskExecutor) -> str:
    """Return the worker with the fewest tasks, if possible a worker on which no driver of a job runs."""
    threads, tasks = executor.wait_for_workers(), executor.link.processing()

    def count_load(worker: str) -> tuple[bool, int]:
        keys = tasks.get(worker, [])
        return any(key.startswith(DRIVERS) for key in keys), len(keys)

    return min(threads, key=count_load)


def wait_until_idle(executor: DaskExecutor) -> None:
    """Wait until no worker runs a task of this driver, because a cancelled task may still kill its worker."""
    deadline = time.monotonic() + QUIET_SECONDS
    while time.monotonic() < deadline:
        try:
            busy = executor.link.ask_workers(
                "cancelled tasks were ending", count_running_tasks, executor.token, seconds=ASK_SECONDS
            )
        except RunError:  # A worker left during the call, or hangs.
            if not executor.link.connected:
                raise
            busy = {"": 1}
        if not any(busy.values()):
            return
        executor.wait(0.1)


def _exclude_or_raise(executor: DaskExecutor, work: Work[Item], item: Item) -> NoReturn:
    """After a worker died with a single task, exclude the shards that it read, or raise a `RunError`.

    If shards are excluded, raise `RowsExcluded`.
    """
    text = executor.store.location.read(note_name(work, item))
    logged: dict[str, Any] = {} if text is None else json.loads(text)
    workers = executor.watch.deaths_of(work, item)
    executor.watch.raise_peak_memory(workers[-1], int(logged.get("peak", 0)))
    dataset = work.dataset_of(item)
    if "rows" not in logged or dataset is None:
        raise RunError(
            f"{executor.watch.describe_deaths(work, item)}; the last worker ran nothing else and had read no "
            f"row. {_advice(executor, workers)}"
        )
    a, b = logged["rows"]
    first = dataset.extent[0]
    shards = dataset.shards(a, b) or [("", first + a, first + b)]
    named = ", ".join(f"{file} (rows {start}:{stop})" for file, start, stop in shards)
    workers = executor.watch.deaths_with(work, item, shards)
    words = executor.watch.describe_deaths(work, item, workers)
    words += (
        f"; the last worker ran nothing else, and died while {logged['doing']} rows {first + a}:{first + b}"
    )
    if executor.quarantine.skips and dataset.url is not None:
        bad = [BadShard(dataset.url, file, u, v, len(workers), words) for file, u, v in shards]
        where = {"stage": work.name, "pass": work.number}
        executor.quarantine.exclude_shards(bad, executor.callbacks, **where)
        executor.watch.forget_deaths(work, item)
        raise RowsExcluded(words)
    raise RunError(
        f"workers die while they read shard file {named} of {dataset.url or 'the given rows'}: {words}. "
        f'{_advice(executor, workers)}, or exclude the shard ([engine] on_bad_shard = "skip"; `scalelatent '
        "resume RUN --set engine.on_bad_shard=skip`). Then resume the run; finished work is kept"
    )


def _advice(executor: DaskExecutor, workers: Sequence[str]) -> str:
    lost = [text for address, text in executor.lost_gpus.items() if address in workers]
    if lost:
        return f"{lost[-1]}. Use device='cpu' for this fit"
    members = [executor.watch.members[address] for address in workers if address in executor.watch.members]
    full = any(m.memory_limit and m.memory > FULL_SHARE * m.memory_limit for m in members)
    memory = (
        "give workers more memory (`dask worker --memory-limit`, [cluster] memory_limit) or fewer threads"
    )
    look = "look at the file (`scalelatent data check DATA`) and at the workers' logs"
    if full:
        return f"They ran out of memory: {memory}, or lower [engine] block_rows for another run; or {look}"
    return f"{look[0].upper()}{look[1:]}, {memory}"


# Seconds between two samples of a worker's memory while it computes a suspect task (test_machines.py).
SAMPLE_SECONDS = 0.25


class LoggedStop(TaskStop):
    """Stop event of a task that may kill its worker; it logs the rows of each step before the step."""

    notes = True

    def __init__(self, fit: Fit | None, store: EngineStore, name: str) -> None:
        super().__init__(fit)
        self._store, self._name, self._lock = store, name, threading.Lock()
        self._entry: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "peak": 0}

    def note(self, doing: str, start: int, stop: int) -> None:
        self._update_entry(doing=doing, rows=[start, stop])

    def log_memory_growth(self) -> None:
        """Log the memory of this process (bytes) if it has grown by more than 2 % since the last entry."""
        memory = _memory()
        if memory > 1.02 * self._entry["peak"]:
            self._update_entry(peak=memory)

    def _update_entry(self, **changes: object) -> None:
        with self._lock:
            self._entry |= {"peak": max(self._entry["peak"], _memory()), **changes}
            self._store.write_bytes(self._name, json.dumps(self._entry).encode())


def _memory() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


@contextmanager
def _log_steps(store: EngineStore, name: str, fit: Fit) -> Iterator[LoggedStop]:
    """Log steps and memory to the file ``name`` in the ``with`` statement, and remove the file at its end."""
    stop, ended = LoggedStop(fit, store, name), threading.Event()

    def sample_memory() -> None:
        with suppress(ScalelatentError, OSError):
            while not ended.wait(SAMPLE_SECONDS):
                stop.log_memory_growth()

    thread = threading.Thread(target=sample_memory, name="scalelatent-note", daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        ended.set()
        thread.join()
        store.remove(name)


def try_span(
    ref: StageRef, stage_name: str, iteration: int, span: Span, learns: bool, fit: Fit, note: str
) -> None:
    """Compute the statistic of a suspect span (range of rows) alone, and save it for the next attempt."""
    store = open_store(ref)
    state = store.load_state(stage_name, iteration) if learns else None
    with _log_steps(store, note, fit) as stop, stopping(fit):
        vector = context_of(ref, stage_name, iteration, state).run_span(span, stop)
    store.save_node(stage_name, iteration, span, vector)


def try_shard(ref: StageRef, name: str, shard: int, fit: Fit, note: str) -> None:
    """Compute and write a suspect output shard of a map alone; log each step in the file ``note``."""
    task, backend = load_map(ref, name)
    with _log_steps(open_store(ref), note, fit) as stop, stopping(fit):
        task.write_shard(shard, backend, stop, Meter())


def count_running_tasks(token: str, dask_worker: Worker) -> int:
    """Return the number of tasks of one driver that this worker runs, including cancelled tasks."""
    from .hooks import running_tasks

    return sum(token in key for key in running_tasks(dask_worker))
