"""The steps of an online fit on a Dask cluster, in segments of about three seconds."""

from __future__ import annotations

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
from scalelatent.engine.threads import within
from scalelatent.errors import RunError

from .online_tasks import StateLost, end_site, task_chains, task_close, task_end_epoch, task_steps

if TYPE_CHECKING:
    from .executor import DaskExecutor

# The end of a segment costs some hundredths of a second: its state is written, and the driver asked. Measured
# are steps on one worker in such segments, 0.5 to 3 ms each beyond computing (minibatch_steps.py); the
# lengths themselves are guesses.
SEGMENT_SECONDS, FIRST_SECONDS = 3.0, 0.1
# Longer segments where writing the state takes long: at most this share of the time, for at most so long. Not
# measured: guesses.
SAVE_SHARE, LONGEST_SECONDS = 0.02, 30.0
# Steps of a spread segment at most. Not measured: a guess.
SEGMENT_STEPS = 256
# Seconds a step that spreading it over workers costs, until the fit has measured it: 8.1 to 9.6 ms on two
# workers with a state of 16 or 128 KiB (minibatch_steps.py).
SPREAD_SECONDS = 8e-3
# A segment that takes this many times as long as the one before, and at least so long, hangs: another worker
# gets it. The first one may have much to read, and how long it should take is not known. Not measured:
# guesses, on the side of patience.
OVERDUE_FACTOR, OVERDUE_SECONDS, FIRST_OVERDUE_SECONDS = 20.0, 300.0, 1800.0
# Not measured: guesses.
PASSED_OVER_SECONDS, ANSWER_SECONDS = 600.0, 5.0
REPLAYS = 3
SPREADS = ("auto", "one", "all")


class _Redo(Exception):
    """What was given to some workers has to be given again; in words, why."""

    counts = True


class _WorkerLost(_Redo):
    """A worker died."""


class _WorkerLeft(_Redo):
    """A worker was taken away in order, as adaptive clusters do all day: no failure."""

    counts = False


class _Overdue(_Redo):
    """A worker hangs; it is noted who."""


class DaskSteps:
    """The steps of an online fit on a cluster; a handle is a `Place`, whose state lies in the run folder."""

    def __init__(
        self, executor: DaskExecutor, stage: Stage, order: RowOrder, n_epochs: int, spread: str = "auto"
    ) -> None:
        if spread not in SPREADS:
            raise ValueError(f"spread={spread!r} is not one of {', '.join(SPREADS)}")
        self._executor, self._stage, self._order, self._spread = executor, stage, order, spread
        self._store, self._token = executor.store, executor.next_token()
        self._store.save_stage(replace(stage, cache=choose_cache(executor.cache, stage)))
        self._store.save_result(self._record, {"order": order, "n_epochs": n_epochs})
        # What is known of a place without loading its state.
        self._known: tuple[Place, dict[str, Any], bool] | None = None
        # Seconds a step: on one worker, of computing in all, and the cost of spreading.
        self._one: float | None = None
        self._work, self._cost = 0.0, SPREAD_SECONDS
        self._seconds = SEGMENT_SECONDS
        self._took: float | None = None
        self._hung: dict[str, float] = {}
        self.spread_steps = 0
        self.callbacks = Callback()

    @property
    def _record(self) -> str:
        return f"{self._stage.name}-{self._token}"

    def __enter__(self) -> DaskSteps:
        return self

    def __exit__(self, *error: Any) -> None:
        self._executor.end()  # validation may have begun a pass behind its last one
        self._store.drop_result(self._record)
        args, client = (self._store.ref, self._stage.name, self._token), self._executor.client
        # What does not hear of it lets go by itself, later.
        with suppress(Exception):
            within(ANSWER_SECONDS, lambda: client.run(end_site, *args, on_error="ignore"))

    # -- states ----------------------------------------------------------------------------------------------

    def put(self, place: Place, state: Any, *, kept: bool = False) -> Place:
        """Write a state where the workers find it, unless it comes from there."""
        if not kept:
            tree = {"state": state, "place": place, "order": self._order}
            self._store.save_state(self._stage.name, place.total(self._order), tree, durable=False)
        learner = self._stage.online
        self._known = (place, learner.summary(state), learner.is_done(state))
        return place

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

        def end(workers: list[str], replay: int, careful: bool) -> dict[str, Any]:
            future = self._submit(task_end_epoch, "epoch", handle, replay, workers[0], handle, place)
            return self._result([future], workers[:1])

        return self._told(place, self._redone(end, handle, f"the end of epoch {place.epoch}"))

    def _segment(self, place: Place, stop: int) -> dict[str, Any]:
        """One segment from a place; returns what its last task told."""

        def run(workers: list[str], replay: int, careful: bool) -> dict[str, Any]:
            groups = min(len(workers), self._order.n_chains)
            # One worker needs no replicas, so that ends a series of lost ones; and shows which one hangs.
            if careful or self._use_one(groups):
                return self._on_one(place, stop, workers[0], replay)
            return self._on_all(place, stop, workers[:groups], replay)

        return self._redone(run, place, f"the steps after {place.step} of epoch {place.epoch + 1}")

    def _redone(
        self, run: Callable[[list[str], int, bool], dict[str, Any]], place: Place, what: str
    ) -> dict[str, Any]:
        """What a part of the fit comes to, done again where workers went or hang."""
        replay, missing, overdue, failed = 0, 0, 0, 0
        while True:
            workers = self._workers(fresh=bool(replay))
            try:
                return run(workers, replay, overdue > 1 or missing >= REPLAYS)
            except StateLost:
                missing += 1
            except _Redo as error:
                overdue += isinstance(error, _Overdue)
                failed += error.counts
                self.callbacks.on_event(
                    {
                        "event": "steps_redone",
                        "stage": self._stage.name,
                        "pass": place.epoch + 1,
                        "step": place.step,
                        "reason": str(error),
                    }
                )
                if failed > REPLAYS:
                    raise RunError(
                        f"{what} of {self._stage.name} failed {failed} times, the last time because {error}: "
                        "most often memory. Look at the logs of the workers, give them more memory or fewer "
                        "threads ([cluster] memory_limit, threads), then resume the run"
                    ) from None
            replay += 1

    def _result(self, futures: list[Any], workers: list[str]) -> Any:
        """The result of the first of some futures, unless one of the workers goes or hangs."""
        # The scheduler would move the tasks of a lost worker, but not where none was left at that moment:
        # tasks bound to addresses that are gone then wait for ever.
        begin, limit = time.monotonic(), self._limit()

        def check() -> None:
            self.callbacks.on_wait()
            gone = sorted(set(workers).difference(self._executor.wait_for_workers()))
            for worker in gone:
                if not self._left_in_order(worker):
                    raise _WorkerLost(f"worker {worker} died")
            if gone:
                raise _WorkerLeft(f"worker {gone[0]} was taken away")
            if time.monotonic() - begin > limit:
                hung = self._holders(workers)
                self._hung |= dict.fromkeys(hung, time.monotonic())
                raise _Overdue(f"{', '.join(hung)} had nothing to show for {limit:.0f} s")

        try:
            out = self._executor.result(futures[0], check)
        except BaseException:
            for future in futures:
                # Not `Client.cancel`: it asks the scheduler, which may be what is gone.
                future.release()
            raise
        self._took = time.monotonic() - begin
        return out

    def _limit(self) -> float:
        """Seconds after which a segment hangs."""
        if self._took is None:
            return FIRST_OVERDUE_SECONDS
        return max(OVERDUE_SECONDS, OVERDUE_FACTOR * max(self._seconds, self._took))

    def _holders(self, workers: list[str]) -> list[str]:
        """Of some workers those that have a task of ours right now; all where the scheduler does not tell."""
        client, mine = self._executor.client, f"-{self._token}"
        try:
            found = within(ANSWER_SECONDS, lambda: client.processing(sorted(set(workers))))
        except Exception:  # noqa: BLE001  whatever Dask raises
            found = {}
        return sorted(w for w, keys in found.items() if any(mine in str(key) for key in keys)) or sorted(
            set(workers)
        )

    def _left_in_order(self, worker: str) -> bool:
        """Whether a worker that is gone was asked to go, as far as the scheduler tells."""
        client = self._executor.client
        try:
            events = within(ANSWER_SECONDS, lambda: client.get_events(worker))
        except Exception:  # noqa: BLE001  whatever Dask raises: then it counts as dead
            return False
        told = [event for _, event in events if isinstance(event, dict)]
        return any(
            event.get("action") == "retired"
            or (event.get("action") == "remove-worker" and event.get("expected", False))
            for event in told
        )

    def _workers(self, fresh: bool = False) -> list[str]:
        """Addresses, one for each thread of a worker."""
        if fresh:
            self._executor.wait_for_workers()
        self._executor.refresh()
        threads, now = self._executor.threads, time.monotonic()
        hung = {name for name, found in self._hung.items() if now - found < PASSED_OVER_SECONDS}
        threads = {name: n for name, n in threads.items() if name not in hung} or threads
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
        out = self._result([future], [worker])
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
        out = self._result([future, *futures], workers)
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
            allow_other_workers=not self._executor.pools.bound,
            pure=False,
        )
