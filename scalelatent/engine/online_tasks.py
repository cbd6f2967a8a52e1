"""What the workers run of an online fit: steps on one worker, or the chains of a step on several.

Where chains are spread, every worker keeps a replica of the state and takes the steps itself: what travels is
the statistics of the chains, once a step and from worker to worker, and all replicas have the same bits. A
worker that has no replica of the state before (it came late, or another died) says so, and the driver has the
segment done again from the state in the run folder where it began.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scalelatent.errors import RunError

from .backend import make_backend
from .cache import shared_cache
from .chains import ChainRunner, advance
from .dask_tasks import Ref, limit_pools, load_stage, worker_device
from .executor import Place
from .store import EngineStore

COUNTERS = 2  # bytes read, seconds of computing: after the statistics of a task's chains
KEEP_SITES, KEEP_REPLICAS = 2, 3
_sites: OrderedDict[tuple[Ref, str, str], _Site] = OrderedDict()
_sites_lock = threading.Lock()


class StateLost(RunError):
    """This worker has no replica of the state that the task needs."""


class _Site:
    """What a worker process keeps of one online fit: replicas of the last few states, rows read ahead."""

    def __init__(self, ref: Ref, name: str, token: str) -> None:
        self.store, self.name = EngineStore(*ref[:2]), name
        self.stage = load_stage(ref, name)
        fit = self.store.load_result(f"{name}-{token}")
        if fit is None:
            raise RunError(f"{ref[0]}: the order of rows of {name} is gone; resume the run")
        self.order, self.n_epochs = fit["order"], fit["n_epochs"]
        self.lock = threading.RLock()
        self._replicas: OrderedDict[Place, Any] = OrderedDict()
        self._runners: dict[tuple[int, int], tuple[threading.Lock, ChainRunner]] = {}
        self._epoch = -1

    def runner(self, first: int, last: int, threads: int) -> tuple[threading.Lock, ChainRunner]:
        """The runner of some chains, for one task at a time."""
        with self.lock:
            if (first, last) not in self._runners:
                device = worker_device(self.stage.device)
                runner = ChainRunner(
                    self.stage,
                    self.order,
                    range(first, last),
                    [make_backend(device) for _ in range(threads)],
                    shared_cache(),
                    self.n_epochs,
                )
                self._runners[first, last] = (threading.Lock(), runner)
            return self._runners[first, last]

    def keep(self, place: Place, state: Any) -> None:
        """Keep a replica; old ones go."""
        with self.lock:
            self._replicas[place] = state
            while len(self._replicas) > KEEP_REPLICAS:
                self._replicas.popitem(last=False)
            if place.epoch != self._epoch:
                self._epoch = place.epoch
                shared_cache().start_pass()

    def load(self, place: Place) -> Any:
        """The state where a segment begins: a replica, or the record in the run folder."""
        with self.lock:
            if place not in self._replicas:
                total = place.total(self.order)
                tree = self.store.load_state(self.name, total)
                if tree["place"] != place:
                    raise RunError(
                        f"{self.store.state_path(self.name, total)} holds the state of {tree['place']} where "
                        f"{place} was expected: the run folder is not the same for all workers, or another "
                        "fit writes to it; resume the run"
                    )
                self.keep(place, tree["state"])
            return self._replicas[place]

    def follow(self, before: Place, results: Sequence[np.ndarray]) -> Any:
        """The state after the step at ``before``, given what the tasks of that step returned.

        Raises
        ------
        StateLost
            No replica of the state before.
        """
        place = Place(before.epoch, before.step + 1)
        with self.lock:
            if place not in self._replicas:
                if before not in self._replicas:
                    raise StateLost(f"no replica of the state at {before} on this worker")
                size = self.stage.work.layout().size
                vectors = [row for out in results for row in out[:-COUNTERS].reshape(-1, size)]
                rows = self.order.step_rows(before.step)
                self.keep(place, advance(self.stage.work, self._replicas[before], vectors, rows))
            return self._replicas[place]

    def save(self, place: Place, state: Any) -> dict[str, Any]:
        """Write the state into the run folder; returns the learner's scalars."""
        self.keep(place, state)
        tree = {"state": state, "place": place, "order": self.order}
        begin = time.perf_counter()
        self.store.save_state(self.name, place.total(self.order), tree, durable=False)
        learner = self.stage.work
        return {
            "step": place.step,
            "summary": learner.summary(state),
            "done": learner.is_done(state),
            "save_seconds": time.perf_counter() - begin,
        }

    def close(self) -> None:
        """End all threads."""
        for lock, runner in self._runners.values():
            with lock:
                runner.close()


def _site(ref: Ref, name: str, token: str) -> _Site:
    limit_pools()
    key = (ref, name, token)
    with _sites_lock:
        if key not in _sites:
            _sites[key] = _Site(ref, name, token)
        _sites.move_to_end(key)
        old = [_sites.popitem(last=False)[1] for _ in range(len(_sites) - KEEP_SITES)]
    for site in old:
        site.close()
    return _sites[key]


def task_steps(
    ref: Ref, name: str, token: str, place: Place, stop: int, threads: int, seconds: float
) -> dict[str, Any]:
    """All chains of some steps on this worker: up to ``stop``, or as many as ``seconds`` allow."""
    site = _site(ref, name, token)
    lock, runner = site.runner(0, site.order.n_chains, threads)
    with lock:
        state, first, before = site.load(place), place, runner.meter.bytes_read
        begin = time.perf_counter()
        while place.step < stop:
            state = runner.step(place.epoch, place.step, state)
            place = Place(place.epoch, place.step + 1)
            if time.perf_counter() - begin > seconds:
                break
        spent = (time.perf_counter() - begin) / (place.step - first.step)
        nbytes = runner.meter.bytes_read - before
        return {**site.save(place, state), "bytes_read": nbytes, "seconds": spent, "work": spent * threads}


def task_chains(
    ref: Ref,
    name: str,
    token: str,
    place: Place,
    index: int,
    chains: tuple[int, int],
    results: list[np.ndarray],
) -> np.ndarray:
    """Some chains of one step.

    Parameters
    ----------
    index : int
        Of this task among those of the step.
    chains : (first, last)
    results : list of ndarray
        Of all tasks of the step before; empty where a segment begins.

    Returns
    -------
    ndarray of float64
        Statistics of the chains, one after another, then the counters since the segment began.
    """
    site = _site(ref, name, token)
    begin = time.perf_counter()
    state = site.follow(replace(place, step=place.step - 1), results) if results else site.load(place)
    lock, runner = site.runner(*chains, 1)
    with lock:
        before = runner.meter.bytes_read
        vectors = runner.run(place.epoch, place.step, state)
        counters = np.array([runner.meter.bytes_read - before, time.perf_counter() - begin])
    return np.concatenate([*vectors, counters + (results[index][-COUNTERS:] if results else 0.0)])


def task_close(ref: Ref, name: str, token: str, before: Place, results: list[np.ndarray]) -> dict[str, Any]:
    """The end of a segment: its last step is taken, and the state goes into the run folder."""
    site = _site(ref, name, token)
    state = site.follow(before, results)
    nbytes, work = zip(*(out[-COUNTERS:].tolist() for out in results), strict=True)
    return {
        **site.save(Place(before.epoch, before.step + 1), state),
        "bytes_read": int(sum(nbytes)),
        "work": sum(work),
        "longest": max(work),
    }


def task_end_epoch(ref: Ref, name: str, token: str, before: Place, place: Place) -> dict[str, Any]:
    """The learner's schedule."""
    site = _site(ref, name, token)
    return site.save(place, site.stage.work.end_epoch(site.load(before)))
