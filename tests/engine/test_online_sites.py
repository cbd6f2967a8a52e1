"""A worker process shares the state of an online fit among its tasks, and keeps few idle states."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent.data import Dataset
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.dask import online_tasks as online_sites
from scalelatent.engine.dask.online_tasks import FitOnWorker, FitsOnWorker
from scalelatent.engine.executor import Place
from scalelatent.engine.order import RowOrder
from scalelatent.engine.passes import make_stage
from scalelatent.engine.reading import Stopped
from scalelatent.errors import RunError

P, CHAINS = 4, 6


@pytest.fixture
def ref(online: Any, tmp_path: Path) -> tuple[str, str]:
    """Return the address and id of a run folder that has the records of the fits ``t0`` to ``t19``."""
    rows = Dataset.from_arrays(np.ones((96, P), "f4")).save(tmp_path / "rows")
    store = EngineStore(tmp_path / "run")
    store.save_stage(make_stage("toy_step", online.Evidence(P), {"train": rows}, "cpu"))
    order = RowOrder(96, 0, 24, n_chains=CHAINS, run_rows=16, buffer_runs=2)
    for i in range(20):
        store.save_result(f"toy_step-t{i}", {"order": order, "n_epochs": 2})
    tree = {"state": online.Evidence(P).start(), "place": Place(), "order": order}
    store.save_state("toy_step", 0, tree, durable=False)
    return store.ref


@pytest.fixture
def sites() -> Iterator[FitsOnWorker]:
    sites = FitsOnWorker()
    yield sites
    for key in list(sites._kept):
        sites.end(*key)
    _is_true_within(lambda: not any(t.name.startswith("scalelatent") for t in threading.enumerate()))


def _is_true_within(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def nothing() -> None:
    pass


def step(site: FitOnWorker, first: int, stop: int, threads: int = 1) -> list[np.ndarray]:
    with site.runner(first, stop, threads, nothing) as runner:
        return list(runner.run(0, 0, site.state(Place())).nodes().values())


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that receives the chains (parts of a minibatch) of each runner that is closed."""
    found: list[list[int]] = []
    original = online_sites.ChainRunner.close

    def close(runner: Any) -> None:
        found.append(list(runner._feed._chains))
        original(runner)

    monkeypatch.setattr(online_sites.ChainRunner, "close", close)
    return found


def test_a_worker_runs_many_fits_at_once(ref: Any, sites: FitsOnWorker) -> None:
    """Twelve fits run at the same time, more than a worker keeps when they are idle."""
    together, answers = threading.Barrier(12), dict[int, Any]()

    def work(i: int) -> None:
        try:
            with sites.use(ref, "toy_step", f"t{i}") as site:
                together.wait(30)
                answers[i] = step(site, 0, CHAINS)
        except BaseException as error:  # noqa: BLE001  The test checks it below.
            answers[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(answers) == list(range(12))
    for answer in answers.values():
        np.testing.assert_array_equal(answer, answers[0])
    with sites.use(ref, "toy_step", "t12"):
        assert len(sites) <= online_sites.KEEP_IDLE + 1


def test_idle_runners_are_dropped_and_used_ones_stay(
    ref: Any, sites: FitsOnWorker, closed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with sites.use(ref, "toy_step", "t0") as used:
        step(used, 0, 2)
        with sites.use(ref, "toy_step", "t1") as idle:
            step(idle, 2, 4)
        monkeypatch.setattr(online_sites, "IDLE_SECONDS", -1.0)
        with sites.use(ref, "toy_step", "t2"):
            assert [key[2] for key in sites._kept] == ["t0", "t2"]
        assert closed == [[2, 3]]
        assert len(step(used, 0, 2)) == 1  # The task has merged the statistics of both chains into one.


def test_the_end_of_a_fit_waits_for_its_running_task(
    ref: Any, sites: FitsOnWorker, closed: list[list[int]]
) -> None:
    with sites.use(ref, "toy_step", "t0") as site, site.runner(0, 2, 1, nothing) as runner:
        sites.end(ref, "toy_step", "t0")
        time.sleep(0.05)
        assert closed == []
        assert list(runner.run(0, 0, site.state(Place())).nodes()) == [(1, 0)]
    assert closed == [[0, 1]]
    assert len(sites) == 0
    sites.end(ref, "toy_step", "t0")  # A second call has no effect.
    with sites.use(ref, "toy_step", "t1") as site:
        step(site, 0, 2)
    sites.end(ref, "toy_step", "t1")  # A fit that no task uses ends at once.
    assert _is_true_within(lambda: closed == [[0, 1], [0, 1]])


def test_a_finished_fit_is_not_started_again(ref: Any, sites: FitsOnWorker) -> None:
    EngineStore(*ref).drop_result("toy_step-t0")
    with pytest.raises(RunError, match="resume the run"), sites.use(ref, "toy_step", "t0"):
        pass


def test_runners_of_an_earlier_division_of_chains_are_closed(
    ref: Any, sites: FitsOnWorker, closed: list[list[int]]
) -> None:
    with sites.use(ref, "toy_step", "t0") as site:
        for first, last in ((0, CHAINS), (0, 3), (3, 6), (2, 4)):
            step(site, first, last)
        assert closed == [[0, 1, 2], [3, 4, 5]]
        assert sorted(site._runners) == [(0, CHAINS), (2, 4)]
        for cut in range(1, CHAINS):  # Workers join and leave.
            step(site, 0, cut)
            step(site, cut, CHAINS)
        chains = sum(last - first for first, last in site._runners)
        assert chains <= 2 * CHAINS


def test_the_task_that_holds_a_retired_runner_closes_it(
    ref: Any, sites: FitsOnWorker, closed: list[list[int]]
) -> None:
    with sites.use(ref, "toy_step", "t0") as site:
        with site.runner(0, 3, 1, nothing) as runner:
            step(site, 2, 4)
            assert closed == []
            assert list(runner.run(0, 0, site.state(Place())).nodes()) == [(1, 0), (0, 2)]
        assert closed == [[0, 1, 2]]


def test_waiting_for_a_runner_can_be_interrupted(ref: Any, sites: FitsOnWorker) -> None:
    def leave() -> None:
        raise Stopped

    with (
        sites.use(ref, "toy_step", "t0") as site,
        site.runner(0, 3, 1, nothing),
        pytest.raises(Stopped),
        site.runner(0, 3, 1, leave),
    ):
        pass
