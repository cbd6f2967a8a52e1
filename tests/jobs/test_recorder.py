"""The command line shows, resumes, cancels and reports fits in Python by their run folders."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from sklearn.model_selection import KFold
from typer.testing import CliRunner

import scalelatent as sl
from scalelatent.cli import app
from scalelatent.deploy import clusters
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.errors import RunError
from scalelatent.estimators import base
from scalelatent.estimators.fit_services import FitCall
from scalelatent.jobs.recorder import record_fit
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.monitor import publish
from scalelatent.search import search as searching

X, Y = np.random.default_rng(0).normal(size=(80, 6)), np.arange(80) % 2


def model(**more: Any) -> sl.CapsuleRegression:
    return sl.CapsuleRegression(**{"capsule_dim": 2, "max_iter": 4, "nu_schedule": None} | more)


class StopAfter(sl.Callback):
    def __init__(self, number: int, how: BaseException | None = None) -> None:
        self.number, self.how = number, how or KeyboardInterrupt()

    def on_pass_end(self, record: dict[str, Any]) -> None:
        if record["pass"] == self.number:
            raise self.how


@pytest.fixture
def rows(tmp_path):
    return sl.Dataset.from_arrays(X, Y).save(tmp_path / "rows.zarr")


def run(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_fit_with_run_dir_has_state_log_and_report(tmp_path, rows):
    fitted = model(random_state=3).fit(rows[:60], validation=rows[60:], run_dir=tmp_path / "run")
    state = json.loads(run("status", tmp_path / "run", "--json").output)
    assert (state["state"], state["pass"], state["kind"]) == ("done", 4, "capsule")
    assert state["objective"] == fitted.history_[-1]["objective"]
    assert state["best_validation_error"] == fitted.best_validation_error_
    logs = run("logs", tmp_path / "run").output
    assert "fit_started" in logs
    assert "model_saved" in logs
    assert len(RunFolder(tmp_path / "run").records("metrics.jsonl")) == 4
    loaded = sl.load_model(tmp_path / "run")
    np.testing.assert_array_equal(loaded.W_, fitted.W_)
    assert run("report", tmp_path / "run").exit_code == 0
    page = (tmp_path / "run" / "report" / "index.html").read_text()
    assert "validation error" in page
    assert "made without rows" not in page


@pytest.mark.parametrize("seed", [3, None])
def test_the_command_line_resumes_a_fit_with_the_same_bits(tmp_path, rows, seed):
    rounds = {"nu_schedule": [(0.5, 2), (0.0, 2)]}
    with pytest.raises(KeyboardInterrupt):
        model(random_state=seed, **rounds).fit(
            rows[:60], validation=rows[60:], run_dir=tmp_path / "run", callbacks=StopAfter(2)
        )
    state = RunFolder(tmp_path / "run").read_state()
    assert (state["state"], state["pass"]) == ("cancelled", 2)
    assert f"scalelatent resume {tmp_path / 'run'}" in state["error"]
    done = run("resume", tmp_path / "run")
    assert done.exit_code == 0, done.output
    resumed = sl.load_model(tmp_path / "run")
    drawn = json.loads((tmp_path / "run" / "job.json").read_text())["job"]["seed"] if seed is None else seed
    whole = model(random_state=drawn, **rounds).fit(rows[:60], validation=rows[60:])
    np.testing.assert_array_equal(resumed.W_, whole.W_)


def test_a_stored_dataset_keeps_its_targets_and_weights(tmp_path):
    v = sl.Dataset.from_arrays((X > 0).astype("u1")).save(tmp_path / "v.zarr")
    both = v.with_target(v)
    rbm = sl.ConditionalRBM(n_hidden=2, n_epochs=3, batch_size=20, random_state=0)
    with pytest.raises(KeyboardInterrupt):
        rbm.fit(both, run_dir=tmp_path / "run", callbacks=StopAfter(1))
    assert run("resume", tmp_path / "run").exit_code == 0
    np.testing.assert_array_equal(sl.load_model(tmp_path / "run").W_, rbm.fit(both).W_)


@pytest.mark.parametrize("what", ["rows", "weights", "search", "parameter"])
def test_fits_with_python_objects_are_resumed_in_python(tmp_path, rows, what):
    how: dict[str, Any] = {"run_dir": tmp_path / "run", "callbacks": StopAfter(1)}
    if what == "weights":
        how["sample_weight"] = np.arange(1, 81)
    one: Any = model(random_state=0)
    if what == "search":
        one = sl.Search(one, {"capsule_dim": [1, 2]}, cv=KFold(2))
    if what == "parameter":
        one.set_params(class_weight={0: 1.0, 1: 2.0})
    with pytest.raises(KeyboardInterrupt):
        one.fit(*((X, Y) if what == "rows" else (rows,)), **how)
    before = RunFolder(tmp_path / "run").read_state()
    refused = run("resume", tmp_path / "run")
    assert refused.exit_code == 2
    message = refused.output.strip()
    assert message.startswith(f"error: the command line cannot resume run {tmp_path / 'run'}: ")
    assert message.endswith(
        f"resume in Python with the same fit(..., run_dir='{tmp_path / 'run'}', resume=True)"
    )
    assert "\n" not in message
    assert RunFolder(tmp_path / "run").read_state() == before
    one.fit(*((X, Y) if what == "rows" else (rows,)), **how | {"callbacks": (), "resume": True})
    assert RunFolder(tmp_path / "run").read_state()["state"] == "done"


def test_report_says_that_rows_were_in_memory(tmp_path):
    model().fit(X, Y, run_dir=tmp_path / "run")
    reported = run("report", tmp_path / "run")
    assert reported.exit_code == 0
    assert "were in memory" in reported.output
    assert f".report('{tmp_path / 'run'}', data=(X, y))" in reported.output
    sl.load_model(tmp_path / "run").report(tmp_path / "run", data=(X, Y))
    assert "evaluation error" in (tmp_path / "run" / "report" / "index.html").read_text()


@pytest.mark.parametrize("resume", [False, True])
def test_a_fit_into_a_folder_that_a_thread_is_fitting_into_is_refused(tmp_path, rows, resume):
    begun, refused, folder = threading.Event(), threading.Event(), RunFolder(tmp_path / "run")

    class Wait(sl.Callback):
        def on_pass_end(self, record: dict[str, Any]) -> None:
            begun.set()
            refused.wait(60)

    with ThreadPoolExecutor(1, "first-fit") as pool:
        first = pool.submit(model(random_state=0).fit, rows, run_dir=folder.url, callbacks=Wait())
        assert begun.wait(60)
        files = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json*")}
        message = (
            rf"{folder.url} is driven by .*this process, in its thread 'first-fit_0'.* choose another folder"
        )
        try:
            with pytest.raises(RunError, match=message):
                model(random_state=1).fit(rows, run_dir=folder.url, resume=resume)
            assert files == {path: path.read_bytes() for path in files}
        finally:
            refused.set()
        np.testing.assert_array_equal(first.result().W_, model(random_state=0).fit(rows).W_)
    assert folder.read_state()["state"] == "done"


def test_the_second_of_two_threads_in_one_folder_is_refused(tmp_path, rows, monkeypatch):
    both, identity = threading.Barrier(2), EngineStore.identity

    def wait_for_both(store: EngineStore) -> Any:
        kept = identity(store)
        # The lock of the folder lets only one thread come here, so this thread waits in vain, for a second.
        with suppress(threading.BrokenBarrierError):
            both.wait(1)
        return kept

    monkeypatch.setattr(EngineStore, "identity", wait_for_both)
    with ThreadPoolExecutor(2) as pool:
        fits = [pool.submit(model(random_state=0).fit, rows, run_dir=tmp_path / "run") for _ in range(2)]
    errors = [fit.exception() for fit in fits]
    (refused,) = filter(None, errors)
    assert isinstance(refused, RunError)
    assert "is driven by" in str(refused)
    assert RunFolder(tmp_path / "run").read_state()["state"] == "done"
    assert sl.load_model(tmp_path / "run").n_iter_ == 4


@pytest.mark.parametrize("existed", [False, True])
def test_a_fit_that_fails_before_it_starts_does_not_change_the_folder(tmp_path, rows, monkeypatch, existed):
    if existed:
        (tmp_path / "run").mkdir()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("scalelatent.estimators.session.FitSession.notify_start", Mock(side_effect=MemoryError))
        model().fit(rows, run_dir=tmp_path / "run")
    assert (tmp_path / "run").exists() == existed
    assert model().fit(rows, run_dir=tmp_path / "run").n_iter_ == 4


def test_failed_fit_is_recorded(tmp_path, rows):
    with pytest.raises(OSError, match="no more"):
        model().fit(rows, run_dir=tmp_path / "run", callbacks=StopAfter(2, OSError("no more")))
    state = RunFolder(tmp_path / "run").read_state()
    assert (state["state"], state["error"]) == ("failed", "OSError: no more")


def test_a_fit_that_is_refused_leaves_no_run(tmp_path, rows):
    with pytest.raises(ValueError, match="capsule_dim"):
        model(capsule_dim=8).fit(rows, run_dir=tmp_path / "run")
    assert not (tmp_path / "run" / "job.json").exists()


def test_folder_of_an_earlier_version_is_resumed(tmp_path, rows):
    with pytest.raises(KeyboardInterrupt):
        model(random_state=0).fit(rows, run_dir=tmp_path / "run", callbacks=StopAfter(2))
    for path in (tmp_path / "run").iterdir():
        if path.name != "engine":
            path.unlink()
    fitted = model(random_state=0).fit(rows, run_dir=tmp_path / "run", resume=True)
    assert fitted.n_iter_ == 4
    assert RunFolder(tmp_path / "run").read_state()["state"] == "done"


def test_a_run_of_another_driver_is_not_changed(tmp_path, rows):
    with pytest.raises(KeyboardInterrupt):
        model(random_state=0).fit(rows, run_dir=tmp_path / "run", callbacks=StopAfter(2))
    folder = RunFolder(tmp_path / "run")
    with folder.lock(), pytest.raises(RunError, match="is driven by process"):
        model(random_state=0).fit(rows, run_dir=tmp_path / "run", resume=True)
    assert folder.read_state()["state"] == "cancelled"


def test_cancel_stops_a_fit_in_python(tmp_path, rows):
    from scalelatent.jobs.interrupt import request_cancel

    class Cancel(sl.Callback):
        def on_pass_end(self, record: dict[str, Any]) -> None:
            if record["pass"] == 1:
                request_cancel(RunFolder(tmp_path / "run"))

    with pytest.raises(KeyboardInterrupt, match="scalelatent cancel"):
        model(max_iter=100_000).fit(rows, run_dir=tmp_path / "run", callbacks=Cancel())
    assert RunFolder(tmp_path / "run").read_state()["state"] == "cancelled"


def test_a_finished_search_holds_its_best_model(tmp_path, rows):
    search = sl.Search(model(random_state=0), {"capsule_dim": [1, 2]}, cv=2)
    search.fit(rows, run_dir=tmp_path / "run")
    np.testing.assert_array_equal(sl.load_model(tmp_path / "run").W_, search.best_estimator_.W_)
    assert not (tmp_path / "run" / "refit" / "job.json").exists()


class _Client:
    """Stand-in for a client whose scheduler accepts events, but has no dashboard page of scalelatent."""

    status, loop = "running", None

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.scheduler = SimpleNamespace(log_event=self.log_event)

    def log_event(self, topic: str, msg: dict[str, Any]) -> None:
        assert topic == "scalelatent"
        self.received.append(msg)

    def sync(self, function: Any, *args: Any, callback_timeout: float, **more: Any) -> None:
        function(*args, **more)

    def states(self) -> list[str]:
        return list(dict.fromkeys(m["state"] for m in self.received if m["kind"] == "state"))


@pytest.fixture
def client(monkeypatch):
    def post(client: _Client, topic: str, messages: list[dict[str, Any]], pause: float) -> bool:
        client.received += messages
        return False

    monkeypatch.setattr(publish.hooks, "post_event", post)
    return _Client()


@pytest.mark.parametrize("how", ["done", "failed", "cancelled"])
def test_fit_on_a_cluster_appears_on_the_dashboard(tmp_path, rows, client, how):
    one = model(random_state=3).fit(rows)
    error = {"done": None, "failed": OSError("no more"), "cancelled": KeyboardInterrupt()}[how]
    call = FitCall(one, {"train": rows}, tmp_path / "run", client=client)
    with nullcontext() if error is None else pytest.raises(type(error)), record_fit(call) as record:
        record.on_fit_start({"rows": 80, "seed": 3})
        record.on_pass_end({"pass": 1, "objective": 0.5})
        if error is not None:
            raise error
    assert client.states() == ["running", how]
    assert {message["run"] for message in client.received} == {RunFolder(tmp_path / "run").url}
    assert [message["objective"] for message in client.received if message["kind"] == "pass"] == [0.5]
    assert client.received[0]["job"] == RunFolder(tmp_path / "run").id


def test_no_second_reporter_if_a_callback_already_reports_to_the_dashboard(tmp_path, rows, client):
    log = sl.monitor.ClusterLog(client, "mine")
    call = FitCall(model().fit(rows), {"train": rows}, tmp_path / "run", callbacks=[log], client=client)
    with record_fit(call) as record:
        record.on_fit_start({"rows": 80, "seed": 3})
    assert client.received == []


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("search", [True, False])
def test_fit_uses_the_given_client_or_the_enclosing_cluster(monkeypatch, rows, search, given):
    seen = []

    def stop(call: FitCall) -> Any:
        seen.append(call.client)
        raise StopIteration

    workers = {"tcp://a:1": {"nthreads": 1, "memory_limit": 2**32, "resources": {}, "host": "a"}}
    client = SimpleNamespace(scheduler_info=lambda n_workers: {"workers": workers})
    for module in (base, searching):
        monkeypatch.setattr(module, "fit_callbacks", stop)
    if not given:
        monkeypatch.setattr(clusters, "current_client", lambda: client)
    one: Any = sl.Search(model(), {"capsule_dim": [1, 2]}, cv=2) if search else model()
    with pytest.raises(StopIteration):
        one.fit(rows, **({"client": client} if given else {}))
    assert seen == [client]
