"""After a fault of the cluster, a fit ends with the same bits or with an error; events report the fault."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import WorkerPlugin

from scalelatent import Callback
from scalelatent.engine.dask import watch
from scalelatent.errors import RunError
from tests.cluster.processes import delay_blocks

FROZEN_SECONDS = 20.0


class LogAndCall(Callback):
    """Callback that records events, and calls ``action`` once at a share of the rows of a stage."""

    def __init__(self, stage: str | None = None, action: Any = None, share: float = 0.0) -> None:
        self.stage, self.action, self.share, self.done = stage, action, share, False
        self.events: list[dict[str, Any]] = []

    def on_event(self, info: dict[str, Any]) -> None:
        self.events.append(info)

    def on_progress(self, info: dict[str, Any]) -> None:
        if self.done or self.stage is None or not info["stage"].startswith(self.stage):
            return
        if info["rows_done"] >= self.share * info["rows_total"]:
            self.done = True
            self.action()

    def infos(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]


def make_killer(pids: dict[str, int]) -> Any:
    victims = list(pids.values())

    def kill() -> None:
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    return kill


# Workers are killed at this share of the rows of a stage (part of a fit). In the first stage the share is
# above 0, so that the fit already listens to events of the scheduler. The projection is so short that its
# first report covers all rows.
@pytest.mark.parametrize(
    ("stage", "share"),
    [("capsule_moments", 0.05), pytest.param("capsule_project", 0.0, marks=pytest.mark.slow)],
)
def test_killing_all_workers_in_any_stage_changes_no_bit(
    mortal_cluster: Any,
    fit: Any,
    fit_alone: Any,
    assert_same: Any,
    worker_pids: Any,
    tmp_path: Path,
    stage: str,
    share: float,
) -> None:
    """Replacement workers have new addresses; a task bound to a dead worker's address would wait forever."""
    mortal_cluster.run(delay_blocks, 0.004)
    log = LogAndCall(stage, make_killer(worker_pids(mortal_cluster)), share)
    begin = time.monotonic()
    model = fit(mortal_cluster, run_dir=tmp_path / "run", callbacks=log, projection=20)
    assert log.done
    assert time.monotonic() - begin < 90
    assert_same(model, fit_alone(projection=20))
    assert len(log.infos("worker_lost")) >= 2
    assert not any(event["expected"] for event in log.infos("worker_lost"))
    assert len(log.infos("worker_joined")) >= 2


@pytest.mark.slow
def test_a_killed_worker_is_reported_with_its_spans(
    mortal_cluster: Any, fit: Any, fit_alone: Any, assert_same: Any, worker_pids: Any, tmp_path: Path
) -> None:
    mortal_cluster.run(delay_blocks, 0.004)
    address, pid = sorted(worker_pids(mortal_cluster).items())[0]
    log = LogAndCall("capsule_estep", lambda: os.kill(pid, signal.SIGKILL), 0.2)
    assert_same(fit(mortal_cluster, run_dir=tmp_path / "run", callbacks=log), fit_alone())
    assert [event["worker"] for event in log.infos("worker_lost")] == [address]
    redone = log.infos("span_redone")
    assert redone
    for event in redone:
        assert event["stage"] == "capsule_estep"
        assert event["part"] in ("train", "validation")
        assert event["worker"] == address
        assert event["why"] in ("its worker was lost", "its worker was lost with the result")


@pytest.mark.slow
def test_a_worker_that_stops_for_some_seconds_changes_no_bit(
    mortal_cluster: Any, fit: Any, fit_alone: Any, assert_same: Any, worker_pids: Any, tmp_path: Path
) -> None:
    pid = sorted(worker_pids(mortal_cluster).values())[0]

    def freeze() -> None:
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(FROZEN_SECONDS, os.kill, (pid, signal.SIGCONT)).start()

    log = LogAndCall("capsule_estep", freeze, 0.2)
    mortal_cluster.run(delay_blocks, 0.005)
    assert_same(fit(mortal_cluster, run_dir=tmp_path / "run", callbacks=log), fit_alone())
    assert log.done


def hang_once(mark: str) -> None:
    """Let one block that a worker reads after the file ``mark`` exists wait for the file ``mark.over``."""
    from scalelatent.engine import passes, reading

    original = reading.iter_blocks

    def hanging(reader: Any, blocks: Any, stop: Any) -> Iterator[Any]:
        for block in original(reader, blocks, stop):
            try:
                os.rename(mark, mark + ".taken")
            except OSError:
                pass
            else:
                deadline = time.monotonic() + 60
                while not os.path.exists(mark + ".over") and time.monotonic() < deadline:
                    time.sleep(0.05)
            yield block

    passes.iter_blocks = hanging


@pytest.mark.slow
def test_a_hanging_span_is_computed_by_another_worker(
    mortal_cluster: Any,
    fit: Any,
    fit_alone: Any,
    assert_same: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "HANG_SECONDS", 6.0)
    mark = tmp_path / "mark"
    mortal_cluster.run(hang_once, str(mark))
    log = LogAndCall("capsule_estep", lambda: mark.write_text(""), 0.2)
    # Compile the kernels before the test, because a worker sends no reports while it compiles.
    fit(mortal_cluster, max_iter=1)
    begin = time.monotonic()
    try:
        assert_same(fit(mortal_cluster, run_dir=tmp_path / "run", callbacks=log), fit_alone())
    finally:
        (tmp_path / "mark.over").touch()
    assert time.monotonic() - begin < 45
    assert (tmp_path / "mark.taken").exists()
    assert any("it sent no report for" in event["why"] for event in log.infos("span_redone"))


class LeaveOnWait(Callback):
    """Callback that interrupts the fit 0.7 s after its EM passes started, like a request to cancel a job."""

    def __init__(self, slow_down: Callable[[], Any]) -> None:
        self.asked: float | None = None
        self.began = threading.Event()
        self.slow_down = slow_down

    def on_stage(self, info: dict[str, Any]) -> None:
        if info["stage"] == "capsule_estep" and not self.began.is_set():
            self.began.set()
            self.slow_down()
            threading.Timer(0.7, self._ask).start()

    def _ask(self) -> None:
        self.asked = time.monotonic()

    def on_wait(self) -> None:
        if self.asked is not None:
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["cluster", pytest.param("here", marks=pytest.mark.slow)])
def test_a_cancelled_span_ends_within_two_seconds(
    mortal_cluster: Any, fit: Any, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.engine import passes

    monkeypatch.setattr(passes, "iter_blocks", passes.iter_blocks)
    # Compile the kernels before the test, because nothing can interrupt a compilation.
    fit(mortal_cluster if where == "cluster" else None, max_iter=1)
    cancel = LeaveOnWait(
        lambda: mortal_cluster.run(delay_blocks, 0.1) if where == "cluster" else delay_blocks(0.1)
    )
    with pytest.raises(KeyboardInterrupt):
        fit(mortal_cluster if where == "cluster" else None, run_dir=tmp_path / "run", callbacks=cancel)
    assert cancel.asked is not None
    assert time.monotonic() - cancel.asked < 2
    deadline = cancel.asked + 2.5
    if where == "cluster":
        while any(mortal_cluster.processing().values()) or any(
            mortal_cluster.run(list_executing_tasks).values()
        ):
            assert time.monotonic() < deadline, mortal_cluster.processing()
            time.sleep(0.05)


def list_executing_tasks(dask_worker: Any) -> int:
    return len(dask_worker.active_keys)


def test_the_error_names_a_closed_client(fit: Any, start_other_cluster: Any, tmp_path: Path) -> None:
    from distributed import Client

    with start_other_cluster(1) as cluster:
        client = Client(cluster, timeout=30, set_as_default=False)
        client.wait_for_workers(1, timeout=60)
        log = LogAndCall("capsule_estep", client.close, 0.2)
        with pytest.raises(RunError, match=r"client of the scheduler .* was closed|scheduler .* was lost"):
            fit(client, run_dir=tmp_path / "run", callbacks=log)
    assert np.isfinite(fit(None, run_dir=tmp_path / "run", resume=True).W_).all()


# -- a worker whose GPU is lost ------------------------------------------------------------------------------


def lose_gpu() -> None:
    from scalelatent.engine.passes import PassContext
    from scalelatent.errors import DeviceLostError

    def fail(*_: object) -> None:
        raise DeviceLostError("GPU 0 (stand-in): the kernel capsule failed: cudaErrorIllegalAddress")

    PassContext.run_span = fail


class LostGpuBackend(WorkerPlugin):
    """Worker plugin that lets every computation fail as if the GPU were lost, also after a restart."""

    def setup(self, worker: Any) -> None:
        lose_gpu()


@pytest.mark.slow
def test_a_worker_with_a_lost_gpu_is_restarted(
    mortal_cluster: Any, fit: Any, fit_alone: Any, assert_same: Any
) -> None:
    log, victim = LogAndCall(), min(mortal_cluster.nthreads())
    mortal_cluster.run(lose_gpu, workers=[victim])
    assert_same(fit(mortal_cluster, callbacks=log), fit_alone())
    (event,) = log.infos("card_lost")
    assert event["worker"] == victim
    assert re.search(
        "is restarted, and its tasks go to other workers. GPU 0 .*IllegalAddress", event["message"]
    )
    mortal_cluster.wait_for_workers(2, timeout=60)
    assert victim not in mortal_cluster.nthreads()


@pytest.mark.slow
def test_a_fit_that_loses_every_gpu_ends_with_an_error(mortal_cluster: Any, fit: Any) -> None:
    mortal_cluster.register_plugin(LostGpuBackend())
    with pytest.raises(RunError, match=r"GPU 0 .*cudaErrorIllegalAddress.*Use device='cpu' for this fit"):
        fit(mortal_cluster)
