"""The steps of an online fit on a Dask cluster, in segments of about a second (more for large states).

A segment begins with a state in the run folder and ends with one; in between the driver takes no part. It
is either one task that does its steps on one worker, or a chain of small tasks over several: ``…_step`` runs
some chains of a step, given what all tasks of the step before found, and ``…_close`` writes the state. Which
of the two is faster is measured as the fit goes: spreading costs some milliseconds a step, so it pays where a
step computes for longer than that. The bits are the same either way.

Since a segment begins from a record, no task depends on an earlier segment: the scheduler forgets each one
when it is done, and what a lost worker had is done again from there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from scalelatent.errors import RunError

from .executor import Advance, Place
from .online_tasks import StateLost, task_chains, task_close, task_end_epoch, task_steps
from .order import RowOrder
from .passes import Stage

if TYPE_CHECKING:
    from .on_dask import DaskExecutor

SEGMENT_SECONDS, FIRST_SECONDS = 1.0, 0.1
# Longer segments where writing the state takes long: at most this share of the time, for at most so long.
SAVE_SHARE, LONGEST_SECONDS = 0.02, 30.0
SEGMENT_STEPS = 256
# Seconds a step that spreading it over workers costs, until it is measured.
SPREAD_SECONDS = 8e-3
REPLAYS = 3
SPREADS = ("auto", "one", "all")


class _WorkerLost(Exception):
    """A worker that a segment was given to is gone; its address."""


class DaskSteps:
    """The steps of an online fit on a cluster; a handle is a :class:`~.executor.Place`, whose state lies in
    the run folder.

    See :class:`~.executor.OnlineSteps`. ``spread`` is ``"auto"``, ``"one"`` (worker) or ``"all"``.
    """

    def __init__(
        self, executor: DaskExecutor, stage: Stage, order: RowOrder, n_epochs: int, spread: str = "auto"
    ) -> None:
        if spread not in SPREADS:
            raise ValueError(f"spread={spread!r} is not one of {', '.join(SPREADS)}")
        self._executor, self._stage, self._order, self._spread = executor, stage, order, spread
        self._store, self._token = executor.store, executor.next_token()
        self._store.save_stage(stage)
        self._store.save_result(self._record, {"order": order, "n_epochs": n_epochs})
        # What is known of a place without loading its state.
        self._known: tuple[Place, dict[str, Any], bool] | None = None
        # Seconds a step: on one worker, of computing in all, and the cost of spreading.
        self._one: float | None = None
        self._work, self._cost = 0.0, SPREAD_SECONDS
        self._seconds = SEGMENT_SECONDS
        self.spread_steps = 0

    @property
    def _record(self) -> str:
        return f"{self._stage.name}-{self._token}"

    def __enter__(self) -> DaskSteps:
        return self

    def __exit__(self, *error: Any) -> None:
        self._executor.end()  # validation may have begun a pass behind its last one
        self._store.drop_result(self._record)

    # -- states ----------------------------------------------------------------------------------------------

    def put(self, place: Place, state: Any) -> Place:
        """Write a state where the workers find it."""
        if not self._has(place):
            tree = {"state": state, "place": place, "order": self._order}
            self._store.save_state(self._stage.name, place.total(self._order), tree, durable=False)
        learner = self._stage.work
        self._known = (place, learner.summary(state), learner.is_done(state))
        return place

    def _has(self, place: Place) -> bool:
        """Whether the state lies there already: a checkpoint that a fit goes on from is not written again."""
        try:
            kept = self._store.load_state(self._stage.name, place.total(self._order))
        except RunError:
            return False
        return bool(kept["place"] == place)

    def get(self, place: Place, handle: Place) -> Any:
        """The state, from the run folder."""
        return self._store.load_state(self._stage.name, handle.total(self._order))["state"]

    def summary(self, place: Place, handle: Place) -> tuple[dict[str, Any], bool]:
        """What the task that made the state told."""
        assert self._known is not None
        assert self._known[0] == handle
        return self._known[1], self._known[2]

    def _told(self, place: Place, out: dict[str, Any]) -> Place:
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
        for replay in range(REPLAYS + 1):
            worker = self._workers(fresh=bool(replay))[0]
            future = self._submit(task_end_epoch, "epoch", handle, replay, worker, handle, place)
            try:
                return self._told(place, self._result(future, [worker]))
            except _WorkerLost:
                self._executor.client.cancel([future])
        raise RunError(
            f"{REPLAYS + 1} workers died one after another at the end of epoch {place.epoch} of "
            f"{self._stage.name}: look at their logs, then resume the run"
        )

    def _segment(self, place: Place, stop: int) -> dict[str, Any]:
        """One segment from a place; returns what its last task told.

        Raises
        ------
        RunError
            Workers died again and again while they did it.
        """
        replay, lost = 0, 0
        while True:
            workers = self._workers(fresh=bool(replay))
            groups = min(len(workers), self._order.n_chains)
            try:
                # One worker needs no replicas, so that ends a series of lost ones.
                if self._use_one(groups) or replay - lost >= REPLAYS:
                    return self._on_one(place, stop, workers[0], replay)
                return self._on_all(place, stop, workers[:groups], replay)
            except _WorkerLost as error:
                lost += 1
                if lost > REPLAYS:
                    raise RunError(
                        f"{lost} times a worker ({error}) died within the steps after {place.step} of epoch "
                        f"{place.epoch + 1} of {self._stage.name}: most often memory. Give workers more "
                        "memory, or set batch_rows lower, then resume the run"
                    ) from None
            except StateLost:
                pass
            replay += 1

    def _result(self, future: Any, workers: list[str]) -> Any:
        """The result of the last task of a segment, unless one of its workers goes.

        The scheduler would move the tasks of a lost worker, but not where none was left at that moment: tasks
        bound to addresses that are gone then wait for ever.
        """

        def check() -> None:
            gone = set(workers).difference(self._executor.wait_for_workers())
            if gone:
                raise _WorkerLost(min(gone))

        return self._executor.result(future, check)

    def _workers(self, fresh: bool = False) -> list[str]:
        """Addresses, one for each thread of a worker; every worker's first thread comes first."""
        if fresh:
            self._executor.wait_for_workers()
        self._executor.refresh()
        threads = self._executor.threads
        turns = [(turn, name) for name, n in threads.items() for turn in range(n)]
        return [name for _, name in sorted(turns)]

    def _use_one(self, groups: int) -> bool:
        if self._spread != "auto" or groups == 1:
            return self._spread == "one" or groups == 1
        if self._one is None:
            return True
        largest = -(-self._order.n_chains // groups) / self._order.n_chains
        return self._one <= self._work * largest + self._cost

    def _on_one(self, place: Place, stop: int, worker: str, replay: int) -> dict[str, Any]:
        threads = min(self._executor.threads.get(worker, 1), self._order.n_chains)
        seconds = FIRST_SECONDS if self._one is None else self._seconds
        future = self._submit(task_steps, "step", place, replay, worker, place, stop, threads, seconds)
        try:
            out = self._result(future, [worker])
        except BaseException:
            self._executor.client.cancel([future])
            raise
        self._one, self._work = out["seconds"], out["work"]
        return out

    def _on_all(self, place: Place, stop: int, workers: list[str], replay: int) -> dict[str, Any]:
        count = min(self._length(len(workers)), stop - place.step)
        edges = [self._order.n_chains * i // len(workers) for i in range(len(workers) + 1)]
        begin, last, futures = time.perf_counter(), place, list[Any]()
        for step in range(place.step, place.step + count):
            last = Place(place.epoch, step, place.validated and step == place.step)
            # Only the newest futures are held, so that workers let go of the others as they are used.
            futures = [
                self._submit(
                    task_chains, "step", last, replay, worker,
                    last, g, (edges[g], edges[g + 1]), futures, chain=edges[g],
                )
                for g, worker in enumerate(workers)
            ]  # fmt: skip
        future = self._submit(task_close, "close", last, replay, workers[0], last, futures)
        try:
            out = self._result(future, workers)
        except BaseException:
            self._executor.client.cancel([future, *futures])
            raise
        seconds = (time.perf_counter() - begin) / count
        self._work = out["work"] / count
        # A late answer of one segment says little; a lasting one moves the mean.
        self._cost = 0.7 * self._cost + 0.3 * max(seconds - out["longest"] / count, 0.0)
        self.spread_steps += count
        return out

    def _length(self, groups: int) -> int:
        """Steps of a segment of about a second."""
        wanted = self._seconds / (self._work / groups + self._cost)
        return max(1, min(int(wanted), SEGMENT_STEPS))

    def _submit(
        self,
        task: Any,
        role: str,
        place: Place,
        replay: int,
        worker: str,
        *args: Any,
        chain: int | None = None,
    ) -> Any:
        model = self._stage.name.removesuffix("_step")
        key = f"{model}_{role}-e{place.epoch + 1:04d}-s{place.step + 1:05d}"
        key += "" if chain is None else f"-c{chain:02d}"
        key += f"-{self._token}" + (f"-r{replay}" if replay else "")
        return self._executor.client.submit(
            task,
            self._store.ref,
            self._stage.name,
            self._token,
            *args,
            key=key,
            workers=[worker],
            allow_other_workers=True,
            pure=False,
        )
