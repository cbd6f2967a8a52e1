"""Tasks of an online fit on workers: several minibatch steps on one worker, or one step on several workers.

Each worker keeps copies (replicas) of the last states, so that no state is sent to it with each step
(`minibatch_steps.py`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from scalelatent.engine.backend import make_backend
from scalelatent.engine.cache import shared_cache
from scalelatent.engine.chains import CHECK_SECONDS, ChainRunner, RowCheck, apply_step
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.executor import KEEP_REPLICAS, Place
from scalelatent.engine.grid import PairTree, TreeReducer
from scalelatent.engine.order import RowOrder
from scalelatent.engine.passes import Stage
from scalelatent.engine.reading import Stopped
from scalelatent.errors import RunError

from .pass_tasks import StageRef, _recent, configure_worker_process, worker_device
from .worker_side import REPORT_SECONDS, Fit, ReportTimer, TaskStop, restart_on_lost_gpu, work_reports


def task_check(fit: Fit, beat: ReportTimer) -> RowCheck:
    """Return a function that reports to the driver that the task runs; it raises `Stopped` after a cancel."""
    stop = TaskStop(fit, beat)

    def check_stop() -> None:
        stop.moved()
        if stop.is_set():
            raise Stopped

    return RowCheck(check_stop)


class StepReports:
    """Sender of progress events about the minibatch steps that one worker computes, in whole or in part."""

    def __init__(self, folder: str, name: str, runner: ChainRunner, place: Place) -> None:
        self._about, self._runner = (folder, name), runner
        self._begin(place)

    def _begin(self, place: Place) -> None:
        runner, self.begin = self._runner, time.perf_counter()
        self._before = place.step, runner.rows, runner.meter.bytes_read, runner.meter.wait_seconds

    def report_up_to(self, place: Place) -> None:
        """Send an event with the rows, bytes and seconds since the last event; ``place`` is the position."""
        seconds, runner = time.perf_counter() - self.begin, self._runner
        step, rows, nbytes, waited = self._before
        where = {"pass": place.epoch + 1, "step": place.step}
        work_reports.add_tasks(
            *self._about, "train", where, runner.device, runner.rows - rows, runner.meter.bytes_read - nbytes,
            seconds, runner.meter.wait_seconds - waited, place.step - step,
        )  # fmt: skip
        self._begin(place)


def task_steps(
    ref: StageRef, name: str, token: str, fit: Fit, place: Place, stop: int, threads: int, seconds: float
) -> SegmentEnd:
    """Compute the minibatch steps from ``place`` up to ``stop``, or until ``seconds`` have passed."""
    configure_worker_process()
    with (
        restart_on_lost_gpu(fit),
        sites.use(ref, name, token) as site,
        site.runner(0, site.order.n_chains, threads, check := task_check(fit, site.beat)) as runner,
    ):
        state, first, before = site.state(place), place, runner.meter.bytes_read
        begin, news = time.perf_counter(), StepReports(ref[0], name, runner, place)
        while place.step < stop:
            state = runner.step(place.epoch, place.step, state, check)
            place = Place(place.epoch, place.step + 1)
            now = time.perf_counter()
            last = now - begin > seconds or place.step == stop
            if last or now - news.begin > REPORT_SECONDS:
                news.report_up_to(place)
            if last:
                break
        spent = (time.perf_counter() - begin) / (place.step - first.step)
        nbytes = runner.meter.bytes_read - before
        saved = site.save(place, runner.to_host(state))
        return {**saved, "bytes_read": nbytes, "seconds": spent, "work": spent * threads}


def task_chains(
    ref: StageRef,
    name: str,
    token: str,
    fit: Fit,
    place: Place,
    index: int,
    chains: tuple[int, int],
    results: list[ChainResults],
) -> ChainResults:
    """Compute the chains ``chains[0]:chains[1]`` (parts of a minibatch) of one step; return their sums.

    ``results`` are those of the previous step, from which this task computes the state; if the list is empty,
    the state is read from the run folder. ``index`` is the number of this task in its step.
    """
    configure_worker_process()
    begin = time.perf_counter()
    with sites.use(ref, name, token) as site:
        check = task_check(fit, site.beat)
        state = site.follow(replace(place, step=place.step - 1), results) if results else site.state(place)
        with restart_on_lost_gpu(fit), site.runner(*chains, 1, check) as runner:
            before, news = runner.meter.bytes_read, StepReports(ref[0], name, runner, place)
            sums = runner.run(place.epoch, place.step, state, check)
            news.report_up_to(Place(place.epoch, place.step + 1))
            nbytes, seconds = runner.meter.bytes_read - before, time.perf_counter() - begin
    if results:
        nbytes, seconds = nbytes + results[index].bytes_read, seconds + results[index].seconds
    merged = sums.nodes()
    return ChainResults(list(merged), list(merged.values()), nbytes, seconds)


def task_close(
    ref: StageRef, name: str, token: str, fit: Fit, before: Place, results: list[ChainResults]
) -> SegmentEnd:
    """End a segment (several consecutive steps): compute and save the state after its last step."""
    configure_worker_process()
    work = [found.seconds for found in results]
    with sites.use(ref, name, token) as site:
        return {
            **site.save(Place(before.epoch, before.step + 1), site.follow(before, results)),
            "bytes_read": sum(found.bytes_read for found in results),
            "work": sum(work),
            "longest": max(work),
        }


def task_end_epoch(ref: StageRef, name: str, token: str, fit: Fit, before: Place, place: Place) -> SegmentEnd:
    """Apply the learner's ``end_epoch`` (for example a lower learning rate), and save the state."""
    configure_worker_process()
    with sites.use(ref, name, token) as site:
        return site.save(place, site.stage.online.end_epoch(site.state(before)))


def end_site(ref: StageRef, name: str, token: str) -> None:
    """Release the data that this worker keeps for a fit; called on each worker after the fit."""
    sites.end(ref, name, token)
    _recent.forget(ref[:2])


# A worker process keeps the data of at most KEEP_IDLE online fits that have no running task, each for at most
# IDLE_SECONDS after its last task.
KEEP_IDLE, IDLE_SECONDS = 8, 300.0


class SegmentEnd(TypedDict):
    """Result of the last task of a segment (consecutive minibatch steps), for the driver."""

    step: int
    summary: dict[str, Any]
    done: bool
    save_seconds: float
    bytes_read: NotRequired[int]
    work: NotRequired[float]
    """CPU seconds: of one step if one worker computed the segment, otherwise of all its steps."""
    seconds: NotRequired[float]
    """Seconds of one step."""
    longest: NotRequired[float]
    """Seconds of computing of the slowest worker in the segment."""


class ChainResults(NamedTuple):
    """Result of a task that computes some chains (parts of the minibatch) of a step."""

    nodes: list[tuple[int, int]]
    """Level and index of each partial sum in the tree of all chains."""
    vectors: list[np.ndarray]
    """Vector of each partial sum."""
    bytes_read: int
    """Bytes read since the first step of the segment (several consecutive steps)."""
    seconds: float
    """Seconds of computing since the first step of the segment."""


class StateLost(RunError):
    """Error of a task on a worker that has no copy of the state that the task needs."""


class _LockedRunner:
    """A `ChainRunner` with a lock, because only one task may use it at a time."""

    def __init__(self, runner: ChainRunner) -> None:
        self.runner, self.lock, self.retired = runner, threading.Lock(), False

    def retire(self) -> None:
        """Close the runner now, or when the task that uses it has ended."""
        self.retired = True
        if self.lock.acquire(blocking=False):
            try:
                self.runner.close()
            finally:
                self.lock.release()


class FitOnWorker:
    """Data of one online fit in a worker process: copies of its last states, and runners that read ahead."""

    def __init__(self, ref: StageRef, name: str, token: str) -> None:
        self.store, self.name, self.token = EngineStore(*ref[:2]), name, token
        self.users, self.used, self.ended = 0, time.monotonic(), False
        self.stage: Stage
        self.order: RowOrder
        self._n_epochs = 0
        self._loaded = False
        self._lock = threading.RLock()
        self._replicas: OrderedDict[Place, object] = OrderedDict()
        self._runners: dict[tuple[int, int], _LockedRunner] = {}  # by (first, last + 1) of their chains
        self._epoch = -1
        # All tasks of the fit share a timer for reports, because a task may be shorter than its interval.
        self.beat = ReportTimer()

    def load(self) -> None:
        """Load the stage (learner, datasets) and the row order from the run folder, if not loaded yet."""
        with self._lock:
            if self._loaded:
                return
            fit = self.store.load_result(f"{self.name}-{self.token}")
            if fit is None:
                raise RunError(
                    f"{self.store.location.url}: the order of rows of {self.name} is gone; resume the run"
                )
            self.stage = self.store.load_stage(self.name)
            self.order, self._n_epochs = fit["order"], fit["n_epochs"]
            self._loaded = True

    # -- runners ---------------------------------------------------------------------------------------------

    @contextmanager
    def runner(self, first: int, last: int, threads: int, check: Callable[[], None]) -> Iterator[ChainRunner]:
        """Lock and yield the runner of the chains (parts of a minibatch) ``first:last``.

        ``check`` is called while this method waits for the lock.
        """
        while True:
            found = self._runner(first, last, threads)
            while not found.lock.acquire(timeout=CHECK_SECONDS):
                check()
            if not found.retired:
                break
            found.lock.release()
            found.retire()
        try:
            yield found.runner
        finally:
            found.lock.release()
            if found.retired:
                found.retire()

    def _runner(self, first: int, last: int, threads: int) -> _LockedRunner:
        """Return the runner of the chains (parts of a minibatch) ``first:last``, a new one if necessary."""
        with self._lock:
            if (first, last) not in self._runners:
                self._retire_others(first, last)
                device = worker_device(self.stage.device)
                runner = ChainRunner(
                    self.stage,
                    self.order,
                    range(first, last),
                    [make_backend(device) for _ in range(threads)],
                    shared_cache(self.stage.cache),
                    self._n_epochs,
                )
                self._runners[first, last] = _LockedRunner(runner)
            return self._runners[first, last]

    def _retire_others(self, first: int, last: int) -> None:
        """Close other runners, objects that compute some chains (parts of a minibatch) in ``first:last``.

        After workers joined or left, each worker computes other chains, so it needs other runners.
        """
        # Keep the runner of all chains in memory, because this worker may later compute whole minibatches.
        whole = 0, self.order.n_chains
        if (first, last) == whole:
            return
        for a, b in list(self._runners):
            if (a, b) != whole and a < last and first < b:
                self._runners.pop((a, b)).retire()

    # -- states ----------------------------------------------------------------------------------------------

    def keep(self, place: Place, state: object) -> None:
        """Keep the state at ``place`` (epoch and step) in memory, and drop the oldest states."""
        with self._lock:
            self._replicas[place] = state
            while len(self._replicas) > KEEP_REPLICAS:
                self._replicas.popitem(last=False)
            if place.epoch > self._epoch:
                self._epoch = place.epoch
                shared_cache().start_pass()

    def state(self, place: Place) -> object:
        """Return the state at ``place`` (epoch and step) from memory or from the run folder."""
        with self._lock:
            if place not in self._replicas:
                total = place.total(self.order)
                tree = self.store.load_state(self.name, total)
                if tree["place"] != place:
                    raise RunError(
                        f"{self.store.state_path(self.name, total)} contains the state of {tree['place']} "
                        f"instead of {place}: the run folder is not the same for all workers, or another fit "
                        "writes to it; resume the run"
                    )
                self.keep(place, tree["state"])
            return self._replicas[place]

    def follow(self, before: Place, results: Sequence[ChainResults]) -> object:
        """Return the state after the step that starts at ``before``, from the results of the step's tasks."""
        place = Place(before.epoch, before.step + 1)
        with self._lock:
            if place not in self._replicas:
                if before not in self._replicas:
                    raise StateLost(f"this worker has no copy of the state at {before}")
                sums = TreeReducer(PairTree(self.order.n_chains), self.stage.online.layout().size)
                for found in results:
                    for node, vector in zip(found.nodes, found.vectors, strict=True):
                        sums.add(*node, vector)
                rows = self.order.step_rows(before.step)
                self.keep(place, apply_step(self.stage.online, self._replicas[before], sums, rows))
            return self._replicas[place]

    def save(self, place: Place, state: object) -> SegmentEnd:
        """Write the state into the run folder; return the learner's summary and whether it is done."""
        self.keep(place, state)
        tree = {"state": state, "place": place, "order": self.order}
        begin = time.perf_counter()
        self.store.save_state(self.name, place.total(self.order), tree, durable=False)
        learner = self.stage.online
        return {
            "step": place.step,
            "summary": learner.summary(state),
            "done": learner.is_done(state),
            "save_seconds": time.perf_counter() - begin,
        }

    def close(self) -> None:
        """Drop all states, and end the threads that compute steps and read rows."""
        with self._lock:
            runners, self._runners = list(self._runners.values()), {}
            self._replicas.clear()
        for runner in runners:
            runner.retire()


class FitsOnWorker:
    """Data of all online fits in a worker process: one `FitOnWorker` per fit, in the order of their use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[StageRef, str, str], FitOnWorker] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @contextmanager
    def use(self, ref: StageRef, name: str, token: str) -> Iterator[FitOnWorker]:
        """Yield this worker's data of a fit for the duration of a task."""
        key = ref, name, token
        with self._lock:
            site = self._kept.setdefault(key, FitOnWorker(*key))
            self._kept.move_to_end(key)
            site.users += 1
            idle = self._take_idle()
        for other in idle:
            other.close()
        try:
            site.load()
            yield site
        finally:
            with self._lock:
                site.users, site.used = site.users - 1, time.monotonic()
                last = site.ended and not site.users
            if last:
                site.close()

    def _take_idle(self) -> list[FitOnWorker]:
        """Remove and return the data of fits without a running task, if these are too old or too many.

        `KEEP_IDLE` fits without a running task may stay, each for `IDLE_SECONDS` after its last task.
        """
        idle = [key for key, site in self._kept.items() if not site.users]
        now = time.monotonic()
        return [
            self._kept.pop(key)
            for i, key in enumerate(idle)
            if i < len(idle) - KEEP_IDLE or now - self._kept[key].used > IDLE_SECONDS
        ]

    def end(self, ref: StageRef, name: str, token: str) -> None:
        """Release the data of a finished fit, or let a running task of the fit release them at its end."""
        with self._lock:
            site = self._kept.pop((ref, name, token), None)
            if site is None:
                return
            site.ended = True
            unused = not site.users
        if unused:
            # `close` waits for other threads, so it must not run in the worker's event loop, which may call
            # this.
            threading.Thread(target=site.close, name="scalelatent-close", daemon=True).start()


sites = FitsOnWorker()
