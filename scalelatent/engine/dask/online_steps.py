"""Run an online fit on a Dask cluster in segments: consecutive minibatch steps of about three seconds.

The driver sends one segment at a time, because one message per step would cost the scheduler 20 ms or more
(`simulated_cluster.py`). After a failure the segment runs again (`test_online_trouble.py`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scalelatent.engine.callbacks import Callback
from scalelatent.engine.executor import Advance, Place
from scalelatent.engine.order import RowOrder
from scalelatent.engine.passes import Stage
from scalelatent.engine.rates import choose_cache
from scalelatent.engine.threads import call_with_timeout
from scalelatent.errors import RunError

from .failures import supervise
from .online_tasks import StateLost, end_site, task_chains, task_close, task_end_epoch, task_steps
from .watch import Retry, WorkerDied
from .window import Window, Work

if TYPE_CHECKING:
    from distributed import Future

    from .executor import DaskExecutor
    from .online_tasks import SegmentEnd

# Seconds of a segment (several consecutive minibatch steps that run without the driver). At the end of a
# segment, the state is saved and the driver is called, which takes 0.5 to 3 ms per step on one worker
# (minibatch_steps.py).
SEGMENT_SECONDS = 3.0
# Seconds of the first segment of a fit, which only measures the seconds of a step.
FIRST_SECONDS = 0.1
# If saving the state takes more than SAVE_SHARE of a segment's seconds, later segments (consecutive steps)
# get longer, up to LONGEST_SECONDS. After the loss of a worker, one segment is computed again.
SAVE_SHARE, LONGEST_SECONDS = 0.02, 30.0
# Maximum number of steps in a segment on several workers; it limits the number of tasks on the scheduler.
SEGMENT_STEPS = 256
# Extra seconds of a step on several workers instead of one, before the fit has measured them: 8.1 to 9.6 ms
# on two workers with a state of 16 or 128 KiB (minibatch_steps.py).
INITIAL_EXTRA_SECONDS = 8e-3
# A segment (consecutive steps) starts again on another worker if it sends no report for these seconds.
OVERDUE_SECONDS = 300.0
# Maximum seconds that a driver waits until all workers have received the message that a fit has ended.
END_SITE_SECONDS = 5.0
# A fit fails if a segment (several consecutive steps) was repeated this number of times, because its workers
# died or hung, and fails once more.
REPLAYS = 3


class WorkerLeft(Retry):
    """Signal that a worker was stopped on purpose, for example by an adaptive cluster; it is no failure."""


class Segment(Work[Place]):
    """Tasks of one segment (several consecutive minibatch steps); the last task returns the result.

    ``place`` is the position of the first step, and ``replay`` the number of earlier attempts.
    """

    hang_seconds = OVERDUE_SECONDS
    unit = "segment"

    def __init__(self, steps: DaskSteps, place: Place, replay: int) -> None:
        token = steps.token + (f"-r{replay}" if replay else "")
        super().__init__(steps.stage.name, place.epoch + 1, token, 0)
        self._steps, self._place = steps, place
        self.futures: list[Future] = []
        self._end: SegmentEnd | None = None

    def submit(
        self, task: Callable[..., Any], role: str, worker: str, *args: Any, chain: int | None = None,
        place: Place | None = None,
    ) -> Future:  # fmt: skip
        """Submit a task to a worker; its key has the epoch, step and first chain (part of a minibatch)."""
        steps, place = self._steps, place or self._place
        model = self.name.removesuffix("_step")
        key = f"{model}_{role}-e{place.epoch + 1:04d}-s{place.step + 1:05d}"
        key += "" if chain is None else f"-c{chain:02d}"
        key += f"-{self.token}"
        self.items[key] = self._place
        executor = steps.executor
        about = executor.store.ref, self.name, steps.token, executor.fit
        free = not executor.watch.only
        return executor.client.submit(
            task, *about, *args, key=key, workers=[worker], allow_other_workers=free, pure=False
        )

    def result(self, futures: list[Future], worker: str) -> SegmentEnd:
        """Supervise the tasks of these steps until the first of ``futures`` has ended; return its result."""
        executor, self.futures = self._steps.executor, futures
        futures[0].add_done_callback(lambda _: executor.wake_event.set())
        self.window = Window({worker: 1}, [self._place], lambda batch, last: {self._place: futures[0]})
        try:
            supervise(executor, self, lambda done, rows: None)
            assert self._end is not None
            return self._end
        finally:
            self.cancel()

    @property
    def done(self) -> bool:
        """True if the driver has the result of the last task."""
        if self._end is None and super().done:
            found = self._steps.executor.fetched(self.futures[0], self._place)
            self._end = found[0] if found else None
        return self._end is not None

    def poll(self) -> bool:
        """Let the callbacks interrupt the fit; return True if the last task of these steps has finished."""
        self._steps.callbacks.on_wait()
        return super().poll()

    def item_rows(self, item: Place) -> int:
        """Return 0, because each task itself reports to the driver how many rows it has computed."""
        return 0

    def describe(self, item: Place) -> str:
        return f"the segment after step {item.step} of epoch {item.epoch + 1} of {self.name}"

    def make_repeat_event(self, item: Place, why: str, worker: str) -> None:
        """Return None (no event), because `DaskSteps._repeat_until_done` already reports repeated steps."""

    def worker_lost(self, items: list[Place], worker: str, alone: bool, expected: bool) -> None:
        """Raise `WorkerLeft` or `WorkerDied`, because the lost worker had the only copy of the last state."""
        if items and expected:
            raise WorkerLeft(f"worker {worker} was stopped")
        if items:
            raise WorkerDied(f"worker {worker} died")

    def release(self) -> None:
        # `Client.cancel` would wait for the scheduler, which may be lost.
        super().release()
        for future in self.futures:
            future.release()


class DaskSteps:
    """Runner of the minibatch steps of an online fit on a cluster.

    The handle of a state is its `Place` (epoch and step); the state itself is in the run folder. ``spread``
    is the number of workers that compute a step: "one", "all", or "auto" for the faster choice by
    measurement.
    """

    def __init__(
        self, executor: DaskExecutor, stage: Stage, order: RowOrder, n_epochs: int, spread: str = "auto"
    ) -> None:
        self.executor, self.stage, self._order, self._spread = executor, stage, order, spread
        self._store, self.token = executor.store, executor.next_token()
        self._store.save_stage(replace(stage, cache=choose_cache(executor.cache, stage, once=n_epochs == 1)))
        self._store.save_result(self._record, {"order": order, "n_epochs": n_epochs})
        # (position, summary, True if the learner is done) of the newest state, so that the driver need not
        # load the state.
        self._newest: tuple[Place, dict[str, Any], bool] | None = None
        # Measured seconds per step: `_one` on one worker, `_work` CPU seconds of all workers together, and
        # `_cost` extra seconds because several workers compute a step.
        self._one: float | None = None
        self._work, self._cost = 0.0, INITIAL_EXTRA_SECONDS
        self._segment_seconds = SEGMENT_SECONDS
        self.callbacks = Callback()

    @property
    def _record(self) -> str:
        """Name of the file in the run folder from which workers load the order of the rows."""
        return f"{self.stage.name}-{self.token}"

    def __enter__(self) -> DaskSteps:
        return self

    def __exit__(self, *error: object) -> None:
        self.executor.end()  # A validation pass may have sent another pass in advance.
        self._store.drop_result(self._record)
        args, client = (self._store.ref, self.stage.name, self.token), self.executor.client
        # A worker that does not receive this call releases its data of the fit after IDLE_SECONDS.
        with suppress(Exception):
            call_with_timeout(END_SITE_SECONDS, lambda: client.run(end_site, *args, on_error="ignore"))

    # -- states ----------------------------------------------------------------------------------------------

    def put(self, place: Place, state: object, *, is_written: bool = False) -> Place:
        if not is_written:
            tree = {"state": state, "place": place, "order": self._order}
            self._store.save_state(self.stage.name, place.total(self._order), tree, durable=False)
        learner = self.stage.online
        self._newest = (place, learner.summary(state), learner.is_done(state))
        return place

    def get(self, place: Place, handle: Place) -> Any:
        return self._store.load_state(self.stage.name, handle.total(self._order))["state"]

    def summary(self, place: Place, handle: Place) -> tuple[dict[str, Any], bool]:
        assert self._newest is not None
        assert self._newest[0] == handle
        return self._newest[1], self._newest[2]

    def _remember_end(self, place: Place, out: SegmentEnd) -> Place:
        """Store the result of the steps up to ``place``, and choose the seconds of the next steps."""
        self._newest = (place, out["summary"], out["done"])
        wanted = max(SEGMENT_SECONDS, out["save_seconds"] / SAVE_SHARE)
        self._segment_seconds = min(wanted, max(LONGEST_SECONDS, SEGMENT_SECONDS))
        return place

    # -- steps -----------------------------------------------------------------------------------------------

    def steps(self, place: Place, stop: int, handle: Place) -> Iterator[Advance]:
        while place.step < stop:
            out = self._segment(place, stop)
            place = self._remember_end(Place(place.epoch, out["step"]), out)
            yield Advance(place.step, place, out["bytes_read"])

    def end_epoch(self, place: Place, handle: Place) -> Place:
        def end(segment: Segment, workers: list[str], careful: bool) -> SegmentEnd:
            future = segment.submit(task_end_epoch, "epoch", workers[0], handle, place)
            return segment.result([future], workers[0])

        return self._remember_end(
            place, self._repeat_until_done(end, handle, f"the end of epoch {place.epoch}")
        )

    def _segment(self, place: Place, stop: int) -> SegmentEnd:
        """Run minibatch steps from ``place`` on, at most up to ``stop``; return the last task's result."""

        def run(segment: Segment, workers: list[str], careful: bool) -> SegmentEnd:
            groups = min(len(workers), self._order.n_chains)
            # Steps on one worker need no copies of the state on other workers, which could be lost, and they
            # show which worker hangs.
            if careful or self._use_one(groups):
                return self._on_one(segment, place, stop, workers[0])
            return self._on_all(segment, place, stop, workers[:groups])

        return self._repeat_until_done(run, place, f"the steps after {place.step} of epoch {place.epoch + 1}")

    def _repeat_until_done(
        self, run: Callable[[Segment, list[str], bool], SegmentEnd], place: Place, work: str
    ) -> SegmentEnd:
        """Call ``run``, which runs a segment (steps), until no worker leaves or hangs; return its result.

        ``run`` receives the segment, the addresses of the workers, and True if only one worker may compute.
        ``work`` names the steps for error messages.
        """
        missing = failed = 0
        self.executor.watch.begin()
        for replay in itertools.count():
            workers = self._workers(fresh=bool(replay))
            try:
                return run(Segment(self, place, replay), workers, failed > 1 or missing >= REPLAYS)
            except StateLost:
                missing += 1
            except Retry as error:
                failed += not isinstance(error, WorkerLeft)
                about = {"stage": self.stage.name, "pass": place.epoch + 1, "step": place.step}
                self.callbacks.on_event({"event": "steps_redone", **about, "reason": str(error)})
                if failed > REPLAYS:
                    raise RunError(
                        f"{work} of {self.stage.name} failed {failed} times, the last time because {error}. "
                        f"{error.advice}, then resume the run"
                    ) from None
        raise AssertionError

    def _workers(self, fresh: bool = False) -> list[str]:
        """Return the address of each worker once per thread; all different addresses come first."""
        if fresh:
            self.executor.wait_for_workers()
        self.executor.refresh()
        turns = [(turn, name) for name, n in self.executor.threads.items() for turn in range(n)]
        return [name for _, name in sorted(turns)]

    def _use_one(self, groups: int) -> bool:
        """Return True if one worker should compute the next steps, rather than ``groups`` threads."""
        if self._spread != "auto" or groups == 1:
            return self._spread == "one" or groups == 1
        if self._one is None:
            return True
        largest = -(-self._order.n_chains // groups) / self._order.n_chains
        return self._one <= self._work * largest + self._cost

    def _on_one(self, segment: Segment, place: Place, stop: int, worker: str) -> SegmentEnd:
        threads = min(self.executor.threads.get(worker, 1), self._order.n_chains)
        seconds = FIRST_SECONDS if self._one is None else self._segment_seconds
        future = segment.submit(task_steps, "step", worker, place, stop, threads, seconds)
        out = segment.result([future], worker)
        self._one, self._work = out["seconds"], out["work"]
        return out

    def _on_all(self, segment: Segment, place: Place, stop: int, workers: list[str]) -> SegmentEnd:
        """Run the next steps, each as one task per entry of ``workers``; return the last task's result."""
        count = min(self._choose_steps(len(workers)), stop - place.step)
        edges = [self._order.n_chains * i // len(workers) for i in range(len(workers) + 1)]
        begin, last = time.perf_counter(), place
        futures: list[Future] = []
        for step in range(place.step, place.step + count):
            last = Place(place.epoch, step, place.validated and step == place.step)
            # Only the futures of the last step stay referenced, so that workers can release the results of
            # earlier steps.
            futures = [
                segment.submit(
                    task_chains, "step", worker, last, g, (edges[g], edges[g + 1]), futures,
                    chain=edges[g], place=last,
                )
                for g, worker in enumerate(workers)
            ]  # fmt: skip
        future = segment.submit(task_close, "close", workers[0], last, futures, place=last)
        out = segment.result([future, *futures], workers[0])
        seconds = (time.perf_counter() - begin) / count
        self._work = out["work"] / count
        # The first measurements on one worker may include the loading of kernels and rows, so the smallest
        # measurement is used.
        self._one = self._work if self._one is None else min(self._one, self._work)
        # Average with earlier measurements, because one slow answer should change the estimate only little.
        self._cost = 0.7 * self._cost + 0.3 * max(seconds - out["longest"] / count, 0.0)
        return out

    def _choose_steps(self, groups: int) -> int:
        """Return the number of consecutive steps to run as one segment on ``groups`` workers."""
        wanted = self._segment_seconds / (self._work / groups + self._cost)
        return max(1, min(int(wanted), SEGMENT_STEPS))
