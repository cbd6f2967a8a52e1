"""The steps of an online fit on a Dask cluster, in segments of about three seconds.

Law 7 needs segments (a task a step costs the scheduler 20 ms and more, `simulated_cluster.py`), and
`test_online_trouble.py` that they are done again.
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

from .failures import look_after
from .online_tasks import StateLost, end_site, task_chains, task_close, task_end_epoch, task_steps
from .watch import Retry, WorkerDied
from .window import Window, Work

if TYPE_CHECKING:
    from distributed import Future

    from .executor import DaskExecutor
    from .online_tasks import SegmentEnd

# The end of a segment costs some hundredths of a second: its state is written, and the driver asked. In
# segments so long, after a first one that measures a step, steps on one worker take 0.5 to 3 ms each beyond
# computing (minibatch_steps.py).
SEGMENT_SECONDS, FIRST_SECONDS = 3.0, 0.1
# Longer ones where writing the state takes more than this share of the time, at most so long: bounds, the
# latter on what a lost worker costs.
SAVE_SHARE, LONGEST_SECONDS = 0.02, 30.0
# Steps of a spread segment: a bound on the tasks that the scheduler has at once.
SEGMENT_STEPS = 256
# Seconds a step that spreading it over workers costs, until the fit has measured it: 8.1 to 9.6 ms on two
# workers with a state of 16 or 128 KiB (minibatch_steps.py).
SPREAD_SECONDS = 8e-3
# One that says nothing for so long hangs, and another worker gets it: a bound, on the side of patience.
OVERDUE_SECONDS = 300.0
# For the word that a fit is over: a bound.
ANSWER_SECONDS = 5.0
# A segment is done again so often where its workers die or hang: a bound.
REPLAYS = 3
SPREADS = ("auto", "one", "all")


class WorkerLeft(Retry):
    """A worker was taken away in order, as adaptive clusters do all day: no failure."""


class Segment(Work[Place]):
    """The tasks of a segment, looked after as those of a pass are; the last one tells what came of it."""

    hang_seconds = OVERDUE_SECONDS
    unit = "segment"

    def __init__(self, steps: DaskSteps, place: Place, replay: int) -> None:
        token = steps.token + (f"-r{replay}" if replay else "")
        super().__init__(steps.stage.name, place.epoch + 1, token, 0)
        self._steps, self._place = steps, place
        self.futures: list[Future] = []
        self._told: SegmentEnd | None = None

    def submit(
        self, task: Callable[..., Any], role: str, worker: str, *args: Any, chain: int | None = None,
        place: Place | None = None,
    ) -> Future:  # fmt: skip
        """Send a task to a worker; named by its place."""
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
        """The result of the first of some futures."""
        executor, self.futures = self._steps.executor, futures
        futures[0].add_done_callback(lambda _: executor.pulse.set())
        self.window = Window({worker: 1}, [self._place], lambda batch, last: {self._place: futures[0]})
        try:
            look_after(executor, self, lambda done, rows: None)
            assert self._told is not None
            return self._told
        finally:
            self.cancel()

    @property
    def done(self) -> bool:
        """Whether the driver has what the last task tells."""
        if self._told is None and super().done:
            found = self._steps.executor.fetched(self.futures[0], self._place)
            self._told = found[0] if found else None
        return self._told is not None

    def look(self) -> bool:
        """See :meth:`Work.look`; callbacks may raise to leave."""
        self._steps.callbacks.on_wait()
        return super().look()

    def item_rows(self, item: Place) -> int:
        """None are counted."""
        return 0

    def words(self, item: Place) -> str:
        """A segment in the words of errors."""
        return f"the segment after step {item.step} of epoch {item.epoch + 1} of {self.name}"

    def redone(self, item: Place, why: str, worker: str) -> None:
        """It is told once, by who does it again."""

    def worker_lost(self, items: list[Place], worker: str, alone: bool, expected: bool) -> None:
        """Replicas of the state are gone with it, which Dask cannot make again."""
        if items and expected:
            raise WorkerLeft(f"worker {worker} was taken away")
        if items:
            raise WorkerDied(f"worker {worker} died")

    def release(self) -> None:
        """Let go of all futures."""
        # Not `Client.cancel`: it asks the scheduler, which may be what is gone.
        super().release()
        for future in self.futures:
            future.release()


class DaskSteps:
    """The steps of an online fit on a cluster; a handle is a `Place`, whose state lies in the run folder."""

    def __init__(
        self, executor: DaskExecutor, stage: Stage, order: RowOrder, n_epochs: int, spread: str = "auto"
    ) -> None:
        if spread not in SPREADS:
            raise ValueError(f"spread={spread!r} is not one of {', '.join(SPREADS)}")
        self.executor, self.stage, self._order, self._spread = executor, stage, order, spread
        self._store, self.token = executor.store, executor.next_token()
        self._store.save_stage(replace(stage, cache=choose_cache(executor.cache, stage, once=n_epochs == 1)))
        self._store.save_result(self._record, {"order": order, "n_epochs": n_epochs})
        # What is known of a place without loading its state.
        self._known: tuple[Place, dict[str, Any], bool] | None = None
        # Seconds a step: on one worker, of computing in all, and the cost of spreading.
        self._one: float | None = None
        self._work, self._cost = 0.0, SPREAD_SECONDS
        self._seconds = SEGMENT_SECONDS
        self.spread_steps = 0
        self.callbacks = Callback()

    @property
    def _record(self) -> str:
        return f"{self.stage.name}-{self.token}"

    def __enter__(self) -> DaskSteps:
        return self

    def __exit__(self, *error: object) -> None:
        self.executor.end()  # validation may have begun a pass behind its last one
        self._store.drop_result(self._record)
        args, client = (self._store.ref, self.stage.name, self.token), self.executor.client
        # What does not hear of it lets go by itself, later.
        with suppress(Exception):
            call_with_timeout(ANSWER_SECONDS, lambda: client.run(end_site, *args, on_error="ignore"))

    # -- states ----------------------------------------------------------------------------------------------

    def put(self, place: Place, state: object, *, kept: bool = False) -> Place:
        """Write a state where the workers find it, unless it comes from there."""
        if not kept:
            tree = {"state": state, "place": place, "order": self._order}
            self._store.save_state(self.stage.name, place.total(self._order), tree, durable=False)
        learner = self.stage.online
        self._known = (place, learner.summary(state), learner.is_done(state))
        return place

    def get(self, place: Place, handle: Place) -> Any:
        """The state, from the run folder."""
        return self._store.load_state(self.stage.name, handle.total(self._order))["state"]

    def summary(self, place: Place, handle: Place) -> tuple[dict[str, Any], bool]:
        """What the task that made the state told."""
        assert self._known is not None
        assert self._known[0] == handle
        return self._known[1], self._known[2]

    def _told(self, place: Place, out: SegmentEnd) -> Place:
        self._known = (place, out["summary"], out["done"])
        wanted = max(SEGMENT_SECONDS, out["save_seconds"] / SAVE_SHARE)
        self._seconds = min(wanted, max(LONGEST_SECONDS, SEGMENT_SECONDS))
        return place

    # -- steps -----------------------------------------------------------------------------------------------

    def steps(self, place: Place, stop: int, handle: Place) -> Iterator[Advance]:
        """A segment at a time."""
        while place.step < stop:
            out = self._segment(place, stop)
            place = self._told(Place(place.epoch, out["step"]), out)
            yield Advance(place.step, place, out["bytes_read"])

    def end_epoch(self, place: Place, handle: Place) -> Place:
        """The learner's schedule, on a worker."""

        def end(segment: Segment, workers: list[str], careful: bool) -> SegmentEnd:
            future = segment.submit(task_end_epoch, "epoch", workers[0], handle, place)
            return segment.result([future], workers[0])

        return self._told(place, self._redone(end, handle, f"the end of epoch {place.epoch}"))

    def _segment(self, place: Place, stop: int) -> SegmentEnd:
        """One segment from a place; returns what its last task told."""

        def run(segment: Segment, workers: list[str], careful: bool) -> SegmentEnd:
            groups = min(len(workers), self._order.n_chains)
            # One worker needs no replicas, so that ends a series of lost ones; and shows which one hangs.
            if careful or self._use_one(groups):
                return self._on_one(segment, place, stop, workers[0])
            return self._on_all(segment, place, stop, workers[:groups])

        return self._redone(run, place, f"the steps after {place.step} of epoch {place.epoch + 1}")

    def _redone(
        self, run: Callable[[Segment, list[str], bool], SegmentEnd], place: Place, what: str
    ) -> SegmentEnd:
        """What a part of the fit comes to, done again where workers went or hang."""
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
                        f"{what} of {self.stage.name} failed {failed} times, the last time because {error}. "
                        f"{error.advice}, then resume the run"
                    ) from None
        raise AssertionError

    def _workers(self, fresh: bool = False) -> list[str]:
        """Addresses, one for each thread of a worker."""
        if fresh:
            self.executor.wait_for_workers()
        self.executor.refresh()
        turns = [(turn, name) for name, n in self.executor.threads.items() for turn in range(n)]
        return [name for _, name in sorted(turns)]

    def _use_one(self, groups: int) -> bool:
        if self._spread != "auto" or groups == 1:
            return self._spread == "one" or groups == 1
        if self._one is None:
            return True
        largest = -(-self._order.n_chains // groups) / self._order.n_chains
        return self._one <= self._work * largest + self._cost

    def _on_one(self, segment: Segment, place: Place, stop: int, worker: str) -> SegmentEnd:
        threads = min(self.executor.threads.get(worker, 1), self._order.n_chains)
        seconds = FIRST_SECONDS if self._one is None else self._seconds
        future = segment.submit(task_steps, "step", worker, place, stop, threads, seconds)
        out = segment.result([future], worker)
        self._one, self._work = out["seconds"], out["work"]
        return out

    def _on_all(self, segment: Segment, place: Place, stop: int, workers: list[str]) -> SegmentEnd:
        count = min(self._length(len(workers)), stop - place.step)
        edges = [self._order.n_chains * i // len(workers) for i in range(len(workers) + 1)]
        begin, last = time.perf_counter(), place
        futures: list[Future] = []
        for step in range(place.step, place.step + count):
            last = Place(place.epoch, step, place.validated and step == place.step)
            # Only the newest futures are held, so that workers let go of the others as they are used.
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
        # What one worker took may have been its first steps, with kernels to load and rows to read.
        self._one = self._work if self._one is None else min(self._one, self._work)
        # A late answer of one segment says little; a lasting one moves the mean.
        self._cost = 0.7 * self._cost + 0.3 * max(seconds - out["longest"] / count, 0.0)
        self.spread_steps += count
        return out

    def _length(self, groups: int) -> int:
        """Steps of a segment."""
        wanted = self._seconds / (self._work / groups + self._cost)
        return max(1, min(int(wanted), SEGMENT_STEPS))
