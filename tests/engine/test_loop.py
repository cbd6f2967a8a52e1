"""A batch fit calls callbacks, stores checkpoints, and stops on request or after an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalelatent.engine import batch_loop as loop
from scalelatent.engine.batch_loop import LoopResult, Progress, fit_batches
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.inprocess import InProcessExecutor, run_threads
from scalelatent.engine.reading import Stopped
from tests.helpers import HookLog


def _fit(
    toy: SimpleNamespace, log: Callback, store: EngineStore | None = None, jobs: int = 1, **options: Any
) -> LoopResult:
    stage = toy.stage(toy.rows(200), passes=options.pop("passes", 5), validation=toy.rows(60, seed=1))
    executor = InProcessExecutor(jobs, store, options.get("checkpoint_seconds", 30.0), PieceCache(0))
    return fit_batches(executor, stage, toy.start(), callbacks=Callbacks(log), store=store, **options)


def test_each_pass_has_one_record(toy: SimpleNamespace) -> None:
    log = HookLog()
    result = _fit(toy, log)
    assert result.history == log.infos("pass_end")
    assert [r["pass"] for r in result.history] == [1, 2, 3, 4, 5]
    for i, record in enumerate(result.history):
        assert record["stage"] == "toy_estep"
        assert record["rows"] == 260  # Training and validation rows together.
        assert record["bytes_read"] == 0
        assert record["seconds"] > 0
        assert record["objective"] == result.state["trail"][i]
    assert result.state["iteration"] == 5


def test_progress_starts_at_zero_and_ends_at_all_rows(toy: SimpleNamespace) -> None:
    log = HookLog()
    _fit(toy, log)
    for number in range(1, 6):
        reported = [i for i in log.infos("progress") if i["pass"] == number]
        rows = [i["rows_done"] for i in reported]
        assert rows[-1] == 260
        assert rows == sorted(rows)
        assert {i["rows_total"] for i in reported} == {260}
        assert {i["stage"] for i in reported} == {"toy_estep"}
    ended = [name for name, _ in log.reported if name == "pass_end" or name == "progress"]
    assert ended[-2:] == ["progress", "pass_end"]


def test_progress_is_reported_at_most_ten_times_per_second_and_always_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(np.arange(1, 1000) * 0.01)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    log = HookLog()
    progress = Progress(log, "s", 1)
    for done in range(101):
        progress(done, 100)
    reported = log.infos("progress")
    assert 10 <= len(reported) <= 13
    assert reported[-1]["rows_done"] == 100


def test_the_rate_excludes_rows_of_an_interrupted_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 2.0])
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    log = HookLog()
    progress = Progress(log, "s", 1)
    progress(80, 100)
    progress(100, 100)
    assert [i["rows_per_s"] for i in log.infos("progress")] == [0.0, 10.0]


def test_a_callback_stops_the_fit(toy: SimpleNamespace) -> None:
    log = HookLog(stop_at=2)
    result = _fit(toy, log)
    assert len(result.history) == 2
    assert result.state["iteration"] == 2
    assert log.infos("event")[-1] == {"event": "stopped_by_callback", "stage": "toy_estep", "pass": 2}


def test_a_fit_that_a_callback_stopped_is_stored(toy: SimpleNamespace, tmp_path: Path) -> None:
    store = EngineStore(tmp_path)
    result = _fit(toy, HookLog(stop_at=3), store)
    iteration, state, _ = store.latest_state("toy_estep")
    assert iteration == 3
    np.testing.assert_array_equal(state["trail"], result.state["trail"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"checkpoint_passes": 2}, [2, 4, 5]),
        ({"checkpoint_passes": 1}, [1, 2, 3, 4, 5]),
        ({}, [5]),
        ({"checkpoint_seconds": 0}, [1, 2, 3, 4, 5]),
        ({"checkpoint_passes": 100}, [5]),
    ],
)
def test_checkpoints_have_the_requested_interval(
    toy: SimpleNamespace, tmp_path: Path, options: dict[str, Any], expected: list[int]
) -> None:
    log = HookLog()
    store = EngineStore(tmp_path)
    _fit(toy, log, store, **options)
    assert [i["pass"] for i in log.infos("checkpoint")] == expected
    for info in log.infos("checkpoint"):
        assert info["seconds"] >= 0
        assert Path(info["path"]).parent == tmp_path
    assert Path(log.infos("checkpoint")[-1]["path"]).exists()


def test_a_checkpoint_is_stored_before_the_pass_is_reported(toy: SimpleNamespace, tmp_path: Path) -> None:
    log = HookLog()
    _fit(toy, log, EngineStore(tmp_path), checkpoint_passes=1)
    order = [name for name, _ in log.reported if name in ("pass_end", "checkpoint")]
    assert order == ["checkpoint", "pass_end"] * 5


def test_without_a_store_nothing_is_written(
    toy: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = HookLog()
    _fit(toy, log, checkpoint_passes=1)
    assert log.infos("checkpoint") == []
    assert list(tmp_path.iterdir()) == []


def test_a_finished_fit_is_read_and_not_repeated(toy: SimpleNamespace, tmp_path: Path) -> None:
    store = EngineStore(tmp_path)
    first = _fit(toy, HookLog(), store)
    log = HookLog()
    again = _fit(toy, log, store)
    assert log.infos("pass_end") == []
    assert again.history == first.history
    np.testing.assert_array_equal(again.state["trail"], first.state["trail"])
    resumed = {
        "event": "resumed",
        "stage": "toy_estep",
        "pass": 5,
        "record": first.history[-1],
        "history": first.history,
    }
    assert log.infos("event") == [resumed]


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_learner_that_fails_ends_the_fit_with_its_error(
    toy: SimpleNamespace, tmp_path: Path, jobs: int
) -> None:
    class Broken(toy.Wander):  # type: ignore[name-defined,misc]
        def update(self, state: Any, stats: Any) -> Any:
            if state["iteration"] == 2:
                raise FloatingPointError("the log-loss is not finite")
            return super().update(state, stats)

    from dataclasses import replace

    stage = toy.stage(toy.rows(200))
    stage = replace(stage, work=Broken(3, 9))
    store = EngineStore(tmp_path)
    with pytest.raises(FloatingPointError, match="not finite"):
        fit_batches(InProcessExecutor(jobs, store), stage, toy.start(), callbacks=Callbacks(), store=store)
    assert store.latest_state("toy_estep")[0] == 2  # The last finished pass is stored.


# -- threads that compute items in parallel (run_threads) ----------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_run_threads_finishes_every_item_in_the_calling_thread(workers: int) -> None:
    import threading

    got, threads = {}, set()

    def make(slot: int, stop: threading.Event) -> Any:
        return lambda item: item * item

    def finish(item: int, value: int) -> None:
        threads.add(threading.current_thread())
        got[item] = value

    run_threads(range(40), workers, make, finish)
    assert got == {i: i * i for i in range(40)}
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_error_stops_all_threads(workers: int) -> None:
    import time

    done = []

    def make(slot: int, stop: Any) -> Any:
        def run(item: int) -> int:
            if item == 5:
                raise OSError("disk gone")
            time.sleep(0.005)
            done.append(item)
            return item

        return run

    with pytest.raises(OSError, match="disk gone"):
        run_threads(range(1000), workers, make, lambda item, value: None)
    assert len(done) < 100


def test_an_error_in_the_setup_of_a_thread_is_raised() -> None:
    def make(slot: int, stop: Any) -> Any:
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        run_threads(range(4), 2, make, lambda item, value: None)


@pytest.mark.parametrize("workers", [1, 3])
def test_an_interrupt_of_the_caller_stops_the_other_threads(workers: int) -> None:
    import threading
    import time

    stopped, caller = [], threading.current_thread()
    running = threading.Barrier(workers)

    def make(slot: int, stop: Any) -> Any:
        def run(item: int) -> int:
            running.wait(5)
            if threading.current_thread() is caller:
                raise KeyboardInterrupt  # Ctrl-C raises this error while the caller computes an item.
            for _ in range(2000):
                if stop.is_set():
                    stopped.append(item)
                    raise Stopped
                time.sleep(0.001)
            return item

        return run

    begin = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run_threads(range(6), workers, make, lambda item, value: None)
    assert time.perf_counter() - begin < 1.5
    assert len(stopped) == workers - 1


def test_an_error_in_another_thread_interrupts_the_callers_item() -> None:
    import threading
    import time

    caller = threading.current_thread()

    def make(slot: int, stop: Any) -> Any:
        def run(item: int) -> int:
            if threading.current_thread() is not caller:
                raise OSError("disk gone")
            for _ in range(5000):
                if stop.is_set():
                    raise Stopped
                time.sleep(0.001)
            return item

        return run

    begin = time.perf_counter()
    with pytest.raises(OSError, match="disk gone"):
        run_threads(range(2), 2, make, lambda item, value: None)
    assert time.perf_counter() - begin < 2
