"""What the workers run of an online fit: steps on one worker, or the chains of a step on several.

Where chains are spread, every worker keeps a replica of the state and takes the steps itself: what travels is
the statistics of the chains, once a step and from worker to worker, and all replicas have the same bits. A
worker that has no replica of the state before (it came late, or another died) says so, and the driver has the
segment done again from the state in the run folder where it began.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from scalelatent.engine.chains import Check
from scalelatent.engine.executor import Place
from scalelatent.engine.reading import Stopped

from .hooks import task_wanted
from .step_sites import Found, sites
from .tasks import Ref, _recent, settle_process


def task_check() -> Check:
    """Raises `Stopped` in a task that the scheduler wants no more; looks now and then.

    Examples
    --------
    >>> task_check()()  # in no task at all
    """
    from distributed import get_worker

    try:
        worker = get_worker()
        key = worker.get_current_task()
    except ValueError:
        return Check(lambda: None)

    def look() -> None:
        if not task_wanted(worker, key):
            raise Stopped

    return Check(look)


def task_steps(
    ref: Ref, name: str, token: str, place: Place, stop: int, threads: int, seconds: float
) -> dict[str, Any]:
    """All chains of some steps on this worker: up to ``stop``, or as many as ``seconds`` allow."""
    settle_process()
    check = task_check()
    with (
        sites.use(ref, name, token) as site,
        site.runner(0, site.order.n_chains, threads, check) as runner,
    ):
        state, first, before = site.state(place), place, runner.meter.bytes_read
        begin = time.perf_counter()
        while place.step < stop:
            state = runner.step(place.epoch, place.step, state, check)
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
    results: list[Found],
) -> Found:
    """Some chains of one step.

    Parameters
    ----------
    index : int
        Of this task among those of the step.
    chains : (first, last)
    results : list of Found
        Of all tasks of the step before; empty where a segment begins.
    """
    settle_process()
    check, begin = task_check(), time.perf_counter()
    with sites.use(ref, name, token) as site:
        state = site.follow(replace(place, step=place.step - 1), results) if results else site.state(place)
        with site.runner(*chains, 1, check) as runner:
            before = runner.meter.bytes_read
            sums = runner.run(place.epoch, place.step, state, check)
            nbytes, seconds = runner.meter.bytes_read - before, time.perf_counter() - begin
    if results:
        nbytes, seconds = nbytes + results[index].bytes_read, seconds + results[index].seconds
    merged = sums.nodes()
    return Found(list(merged), list(merged.values()), nbytes, seconds)


def task_close(ref: Ref, name: str, token: str, before: Place, results: list[Found]) -> dict[str, Any]:
    """The end of a segment: its last step is taken, and the state goes into the run folder."""
    settle_process()
    work = [found.seconds for found in results]
    with sites.use(ref, name, token) as site:
        return {
            **site.save(Place(before.epoch, before.step + 1), site.follow(before, results)),
            "bytes_read": sum(found.bytes_read for found in results),
            "work": sum(work),
            "longest": max(work),
        }


def task_end_epoch(ref: Ref, name: str, token: str, before: Place, place: Place) -> dict[str, Any]:
    """The learner's schedule."""
    settle_process()
    with sites.use(ref, name, token) as site:
        return site.save(place, site.stage.online.end_epoch(site.state(before)))


def end_site(ref: Ref, name: str, token: str) -> None:
    """Run on each worker when the fit is over."""
    sites.end(ref, name, token)
    _recent.forget(ref[:2])
