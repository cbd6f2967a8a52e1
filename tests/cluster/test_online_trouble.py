"""Online fits can be cancelled, run at the same time, and survive workers that hang, die or are retired."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalelatent.data import Dataset
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.dask import online_steps as online
from scalelatent.engine.dask.executor import DaskExecutor
from scalelatent.engine.dask.watch import NoProgress, Watch
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.online_loop import fit_online
from scalelatent.engine.order import RowOrder
from scalelatent.engine.passes import make_stage
from scalelatent.errors import RunError
from tests.helpers import load_online_toys

P, ROWS = 6, 480
toys = load_online_toys()


@pytest.fixture(scope="module")
def workers(client: Any) -> Any:
    client.upload_file(toys.__file__)
    return client


@pytest.fixture(scope="module")
def training_rows(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    rng = np.random.Generator(np.random.Philox(1))
    rows = Dataset.from_arrays(rng.normal(size=(ROWS, P)).astype("f4"))
    return rows.save(tmp_path_factory.mktemp("trouble") / "rows", chunk_rows=64)


@pytest.fixture(scope="module")
def run(training_rows: Dataset) -> Callable[..., Any]:
    def run(client: Any, where: Path, *, spread: str = "one", callback: Any = (), **more: Any) -> Any:
        learner, store = toys.Evidence(P), EngineStore(where)
        stage = make_stage("toy_step", learner, {"train": training_rows}, "cpu")
        if client is None:
            executor: Any = InProcessExecutor(1, store, cache=PieceCache(0))
        else:
            executor = DaskExecutor(client, store)
            executor.spread = spread
        order = RowOrder(ROWS, more.get("seed", 3), 24, n_chains=4, run_rows=32, buffer_runs=2)
        return fit_online(
            executor, stage, learner.start(), order=order, n_epochs=2,
            callbacks=Callbacks(callback), store=store,
        ).state["belief"]  # fmt: skip

    return run


@pytest.fixture(scope="module")
def undisturbed(run: Any, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return run(None, tmp_path_factory.mktemp("whole"))


def _is_true_within(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def compute_slowly(seconds: float) -> None:
    """Delay each chain (part of a minibatch) on this worker by ``seconds``."""
    from scalelatent.engine import chains

    original = chains.run_chains

    def slow(learner: Any, state: Any, blocks: Any, backend: Any, check: Any, **more: Any) -> Any:
        def wait() -> None:
            time.sleep(seconds)
            check()

        return original(learner, state, blocks, backend, wait, **more)

    slow.original = original  # type: ignore[attr-defined]
    chains.run_chains = slow


def compute_quickly() -> None:
    from scalelatent.engine import chains

    chains.run_chains = getattr(chains.run_chains, "original", chains.run_chains)


def count_running_tasks(dask_worker: Any) -> int:
    return len(dask_worker.state.executing) + len(dask_worker.state.long_running)


class LeaveFit(Callback):
    def __init__(self, after: float) -> None:
        self.after, self.begin, self.left = after, time.monotonic(), 0.0

    def on_wait(self) -> None:
        if time.monotonic() - self.begin > self.after:
            self.left = time.monotonic()
            raise KeyboardInterrupt


@pytest.mark.parametrize("spread", ["one", "all"])
def test_workers_stop_at_once_if_a_fit_is_cancelled_within_a_segment(
    workers: Any, run: Any, undisturbed: np.ndarray, tmp_path: Path, monkeypatch: Any, spread: str
) -> None:
    # The first segment (consecutive minibatch steps) may last 60 s, so it contains the whole epoch.
    monkeypatch.setattr(online, "FIRST_SECONDS", 60.0)
    workers.run(compute_slowly, 0.2)  # An epoch takes 16 s on one worker.
    try:
        leave = LeaveFit(2.0)
        with pytest.raises(KeyboardInterrupt):
            run(workers, tmp_path, spread=spread, callback=leave)
        assert time.monotonic() - leave.left < 3  # The fit ends without waiting for workers.
        assert _is_true_within(lambda: sum(workers.run(count_running_tasks).values()) == 0, seconds=4)
        assert time.monotonic() - leave.left < 6
    finally:
        workers.run(compute_quickly)
    np.testing.assert_array_equal(run(workers, tmp_path, spread=spread), undisturbed)


def test_several_fits_run_at_once(workers: Any, run: Any, tmp_path: Path) -> None:
    answers: dict[int, Any] = {}

    def fit(i: int) -> None:
        try:
            spread = ("one", "all", "all", "one")[i]
            answers[i] = run(workers, tmp_path / str(i), spread=spread, seed=i)
        except BaseException as error:  # noqa: BLE001  The test checks it below.
            answers[i] = error

    threads = [threading.Thread(target=fit, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for i in range(4):
        np.testing.assert_array_equal(answers[i], run(None, tmp_path / f"alone{i}", seed=i))


def list_leftovers() -> tuple[int, int, list[str]]:
    from scalelatent.engine.dask import online_tasks as online_sites
    from scalelatent.engine.dask import pass_tasks as tasks

    threads = [
        t.name for t in threading.enumerate() if t.name.startswith(("scalelatent-feed", "scalelatent-chain"))
    ]
    return len(online_sites.sites), len(tasks._recent._kept), threads


@pytest.mark.parametrize("spread", ["one", "all"])
def test_a_finished_fit_leaves_nothing_on_the_workers(
    workers: Any, run: Any, tmp_path: Path, spread: str
) -> None:
    run(workers, tmp_path, spread=spread)
    assert _is_true_within(
        lambda: all(left[0] == 0 and not left[2] for left in workers.run(list_leftovers).values())
    )


def _hang(over: str) -> None:
    """Let this worker's next segment (consecutive minibatch steps) wait up to 60 s for the file ``over``."""
    from scalelatent.engine.dask import online_tasks as online_sites

    original = online_sites.FitOnWorker.state

    def state(site: Any, place: Any) -> Any:
        online_sites.FitOnWorker.state = original  # type: ignore[method-assign]
        deadline = time.monotonic() + 60
        while not os.path.exists(over) and time.monotonic() < deadline:
            time.sleep(0.05)
        return original(site, place)

    online_sites.FitOnWorker.state = state  # type: ignore[method-assign]


@pytest.mark.parametrize("spread", ["one", "all"])
def test_a_hanging_worker_is_avoided(
    workers: Any, run: Any, undisturbed: np.ndarray, tmp_path: Path, monkeypatch: Any, spread: str
) -> None:
    monkeypatch.setattr(online.Segment, "hang_seconds", 2.0)
    reported: list[dict[str, Any]] = []

    class Log(Callback):
        def on_event(self, info: dict[str, Any]) -> None:
            reported.append(info)

    hung = sorted(workers.nthreads())[0]
    workers.run(_hang, str(tmp_path / "over"), workers=[hung])
    try:
        begin = time.monotonic()
        np.testing.assert_array_equal(
            run(workers, tmp_path / "run", spread=spread, callback=Log()), undisturbed
        )
        assert time.monotonic() - begin < 11
    finally:
        (tmp_path / "over").touch()
    (redone,) = [info for info in reported if info["event"] == "steps_redone"]
    assert re.fullmatch(rf"no report arrived for \d s from {hung}", redone["reason"])
    assert (redone["pass"], redone["step"]) == (1, 0)


def _report_often(seconds: float) -> None:
    """Make tasks on this worker report their progress every ``seconds`` seconds."""
    from scalelatent.engine.dask import worker_side

    worker_side.BEAT_SECONDS = seconds


@pytest.mark.parametrize("spread", ["one", "all"])
def test_a_segment_longer_than_estimated_does_not_count_as_hanging(
    workers: Any, run: Any, undisturbed: np.ndarray, tmp_path: Path, monkeypatch: Any, spread: str
) -> None:
    monkeypatch.setattr(online.Segment, "hang_seconds", 2.0)
    # The first segment (consecutive minibatch steps) may last 60 s, so it contains the whole epoch.
    monkeypatch.setattr(online, "FIRST_SECONDS", 60.0)
    redone: list[dict[str, Any]] = []

    class Log(Callback):
        def on_event(self, info: dict[str, Any]) -> None:
            redone.extend([info] if info["event"] == "steps_redone" else [])

    workers.run(compute_slowly, 0.1)  # With this delay, a task takes 0.2 s, and a segment 4 s or more.
    workers.run(_report_often, 0.5)
    try:
        np.testing.assert_array_equal(run(workers, tmp_path, spread=spread, callback=Log()), undisturbed)
    finally:
        workers.run(compute_quickly)
        workers.run(_report_often, 10.0)
    assert redone == []


def test_a_result_that_is_lost_before_the_driver_fetches_it_is_recomputed(
    mortal_cluster: Any, run: Any, undisturbed: np.ndarray, tmp_path: Path, monkeypatch: Any
) -> None:
    """The worker of a finished segment (consecutive minibatch steps) dies before its result is fetched.

    No other worker may compute the lost task, so the whole segment is repeated on another worker.
    """
    mortal_cluster.upload_file(toys.__file__)
    monkeypatch.setattr(Watch, "only", property(lambda watch: list(watch._executor.threads)))
    pids, poll, killed = mortal_cluster.run(os.getpid), online.Segment.poll, list[str]()

    def kill(segment: online.Segment) -> bool:
        moved = poll(segment)
        if moved and not killed:
            ((where,),) = mortal_cluster.who_has(segment.futures).values()
            killed.append(where)
            os.kill(pids[where], signal.SIGKILL)
            assert _is_true_within(lambda: segment.futures[0].status != "finished")
        return moved

    monkeypatch.setattr(online.Segment, "poll", kill)
    np.testing.assert_array_equal(run(mortal_cluster, tmp_path, callback=LeaveFit(60.0)), undisturbed)
    assert killed


@pytest.fixture
def steps() -> Any:
    """Return a DaskSteps without a cluster, which can only retry segments (consecutive minibatch steps)."""
    steps = online.DaskSteps.__new__(online.DaskSteps)
    steps.stage, steps.callbacks, steps.token = SimpleNamespace(name="toy_step"), Callback(), "t"
    steps.executor = SimpleNamespace(watch=SimpleNamespace(begin=lambda: None))
    steps._workers = lambda fresh=False: ["a", "b", "c"]
    return steps


def test_retired_workers_never_end_a_fit(steps: Any) -> None:
    left = [online.WorkerLeft("worker a was stopped")] * 20

    def run(segment: online.Segment, workers: list[str], careful: bool) -> dict[str, Any]:
        if left:
            raise left.pop()
        return {"token": segment.token}

    assert steps._repeat_until_done(run, online.Place(), "the steps") == {"token": "t-r20"}


def test_workers_that_die_one_after_another_end_a_fit(steps: Any) -> None:
    def run(segment: online.Segment, workers: list[str], careful: bool) -> dict[str, Any]:
        segment.worker_lost([online.Place()], "a", alone=True, expected=False)
        return {}

    with pytest.raises(
        RunError, match=r"the steps of toy_step failed 4 times.*worker a died\. .*memory.*then resume"
    ):
        steps._repeat_until_done(run, online.Place(), "the steps")


def test_the_error_of_steps_without_progress_does_not_mention_memory(steps: Any) -> None:
    def run(segment: online.Segment, workers: list[str], careful: bool) -> dict[str, Any]:
        raise NoProgress("no report arrived for 301 s from a")

    with pytest.raises(
        RunError, match=r"failed 4 times.*no report arrived for 301 s from a\. .*resume"
    ) as reported:
        steps._repeat_until_done(run, online.Place(), "the steps")
    assert "memory" not in str(reported.value)


def test_a_killed_worker_is_distinguished_from_a_retired_one(mortal_cluster: Any, steps: Any) -> None:
    pids = mortal_cluster.run(os.getpid)
    taken, killed = sorted(pids)
    mortal_cluster.retire_workers([taken], close_workers=True)
    assert _is_true_within(lambda: taken not in mortal_cluster.nthreads())
    os.kill(pids[killed], signal.SIGKILL)
    assert _is_true_within(lambda: killed not in mortal_cluster.nthreads())
    reported = [message for _, message in mortal_cluster.get_events("all")]
    lost = {m["worker"]: m["expected"] for m in reported if m.get("action") == "remove-worker"}
    assert lost == {taken: True, killed: False}
    segment, place = online.Segment(steps, online.Place(), 0), online.Place()
    segment.worker_lost(
        [], killed, alone=True, expected=False
    )  # This call raises nothing, because the lost worker had no task.
    for worker, expected in lost.items():
        with pytest.raises(online.Retry) as retry:
            segment.worker_lost([place], worker, alone=True, expected=expected)
        assert isinstance(retry.value, online.WorkerLeft) is expected
