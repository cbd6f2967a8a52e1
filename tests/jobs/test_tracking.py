"""A job with `[[callbacks]]` sends data to MLflow: to a stand-in, and to its real server on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from scalelatent import Callback
from scalelatent.errors import JobError
from scalelatent.jobs import job_callbacks
from scalelatent.jobs.resolve import load_job
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.runner import run_job
from scalelatent.jobs.spec import Job
from scalelatent.monitor import tracking
from tests.helpers import find_free_port, server_answers, wait_for


class FakeServer:
    """Stand-in for a tracking server: its runs by id, and a function that may delay or refuse requests."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.on_call: Callable[[], None] = lambda: None
        self.uris: list[str] = []
        self.calls: Counter[str] = Counter()

    def client(self, tracking_uri: str) -> Any:
        self.uris.append(tracking_uri)
        return FakeClient(self)


class FakeClient:
    """Stand-in for the part of `mlflow.MlflowClient` that the package uses."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server

    def get_experiment_by_name(self, name: str) -> Any:
        self._server.on_call()
        return None

    def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
        return name

    def search_runs(self, experiments: list[str], filter_string: str) -> list[Any]:
        value = filter_string.split("'")[1]
        found = [run for run in self._server.runs.values() if value in run["tags"].values()]
        return [SimpleNamespace(info=SimpleNamespace(run_id=run["id"])) for run in found]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        run_id = f"run-{len(self._server.runs)}"
        empty: dict[str, Any] = {"metrics": [], "params": {}, "files": [], "status": "RUNNING"}
        self._server.runs[run_id] = {"id": run_id, "name": run_name, "tags": dict(tags), **empty}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def update_run(self, run_id: str, status: str) -> None:
        self._server.runs[run_id]["status"] = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self._server.on_call()
        self._server.calls["metrics"] += bool(metrics)
        self._server.runs[run_id]["metrics"] += [(m.key, m.value, m.step) for m in metrics]
        # Each parameter is sent once, because MLflow refuses a second value.
        assert not set(self._server.runs[run_id]["params"]) & {p.key for p in params}
        self._server.runs[run_id]["params"] |= {p.key: p.value for p in params}

    def log_artifact(self, run_id: str, file: str, folder: str) -> None:
        self._server.on_call()
        self._server.runs[run_id]["files"].append(f"{folder}/{Path(file).name}")

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self._server.runs[run_id]["tags"][key] = value

    def set_terminated(self, run_id: str, status: str) -> None:
        self._server.runs[run_id]["status"] = status


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """Replace the package mlflow by a stand-in, and return the server of the stand-in."""
    found = FakeServer()
    package: Any = ModuleType("mlflow")
    package.entities = entities = ModuleType("mlflow.entities")
    package.MlflowClient = found.client
    entities.Metric = lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step)
    entities.Param = lambda key, value: SimpleNamespace(key=key, value=value)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return found


@pytest.fixture
def job(job_paths: Any, use_fake_estimator: Any) -> Callable[..., Job]:
    """Return a function that adds callbacks to the job file, and returns the job."""

    def make(text: str = 'kind = "mlflow"') -> Job:
        with job_paths.job.open("a") as file:
            file.write(f"\n[[callbacks]]\n{text}\n")
        return load_job(job_paths.job)

    return make


def run(job: Job, **how: Any) -> tuple[RunFolder, list[str]]:
    """Run a job in a new run folder, or with options in its old one; return the folder and printed lines."""
    folder = RunFolder.open(job.job.out) if how else RunFolder.create(job.job.out, job)
    lines: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        run_job(folder.read_job(), folder, print_line=lines.append, **how)
    return folder, lines


def test_a_run_is_tracked_with_parameters_and_metrics(server: FakeServer, job: Any) -> None:
    folder, lines = run(job())
    (reported,) = server.runs.values()
    assert reported["status"] == "FINISHED"
    assert reported["params"]["model.capsule_dim"] == "2"
    assert reported["params"]["model.kind"] == "capsule"
    assert [(value, step) for key, value, step in reported["metrics"] if key == "objective"] == [
        (pytest.approx(1 / step), step) for step in range(1, 6)
    ]
    assert ("test_error", 0.25, 5) in reported["metrics"]
    assert sorted(reported["files"]) == ["model/model.json", "report/index.html"]
    parent = Path(folder.url).parent
    assert server.uris == [f"sqlite:///{parent}/mlflow.db"]
    assert not [line for line in lines if "warning" in line]
    stored = folder.read_job()
    assert stored.callbacks == ({"kind": "mlflow"},)


def test_a_resumed_run_continues_its_tracked_run(
    server: FakeServer, job: Any, use_fake_estimator: Any
) -> None:
    use_fake_estimator.fail = OSError("no more")
    made = job()
    with pytest.raises(OSError, match="no more"):
        run(made)
    (reported,) = server.runs.values()
    assert reported["status"] == "FAILED"
    assert "no more" in reported["tags"]["scalelatent.error"]
    use_fake_estimator.fail = None
    run(made, resume=True)
    assert len(server.runs) == 1
    assert reported["status"] == "FINISHED"


@pytest.mark.parametrize("when", ["never there", "gone"])
def test_a_failing_server_does_not_end_the_fit(
    server: FakeServer, job: Any, use_fake_estimator: Any, when: str
) -> None:
    def refuse() -> None:
        raise ConnectionError("refused")

    def gone(number: int) -> None:
        server.on_call = refuse

    if when == "gone":
        use_fake_estimator.before_pass = gone
    else:
        gone(0)
    folder, lines = run(job())
    assert folder.read_state()["state"] == "done"
    (line,) = [line for line in lines if "MLflow" in line]
    assert "ConnectionError: refused; the fit continues, and further errors are not reported" in line


def test_a_server_that_does_not_answer_does_not_delay_the_fit(
    server: FakeServer, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    server.on_call = lambda: answer.wait(60) or None
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 0.2)
    folder, lines = run(job())
    assert folder.read_state()["state"] == "done"
    (line,) = [line for line in lines if "MLflow" in line]
    assert "no answer for 0 s; the run is complete, but its last data is not in MLflow" in line
    answer.set()


def test_short_passes_are_sent_in_one_call(server: FakeServer, job: Any, use_fake_estimator: Any) -> None:
    taken = threading.Event()
    server.on_call = lambda: taken.wait(60) or None
    use_fake_estimator.before_pass = lambda number: taken.set() if number == 5 else None
    run(job())
    (reported,) = server.runs.values()
    steps = [step for key, _, step in reported["metrics"] if key == "objective"]
    assert steps == [1, 2, 3, 4, 5]
    # One call sends the passes that waited until pass 5; two more may send pass 5 and the scores.
    assert server.calls["metrics"] <= 3


def test_a_slow_server_is_waited_for_as_long_as_it_answers(
    server: FakeServer, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.on_call = lambda: time.sleep(0.5)
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 2.0)
    _, lines = run(job())
    (reported,) = server.runs.values()
    assert reported["status"] == "FINISHED"
    assert not [line for line in lines if "MLflow" in line]


def test_a_refused_call_does_not_prevent_the_others(
    server: FakeServer, job: Any, use_fake_estimator: Any
) -> None:
    def refuse() -> None:
        server.on_call = lambda: None
        raise ValueError("a long\n  text " + 400 * "x")

    use_fake_estimator.before_pass = lambda number: (
        setattr(server, "on_call", refuse) if number == 3 else time.sleep(0.2)
    )
    _, lines = run(job())
    (reported,) = server.runs.values()
    assert reported["status"] == "FINISHED"
    assert ("objective", pytest.approx(1 / 5), 5) in reported["metrics"]
    (line,) = [line for line in lines if "MLflow" in line]
    assert "ValueError: a long text xxx" in line
    assert "x …; the fit continues" in line


def test_failed_run_names_the_server_in_one_line(
    server: FakeServer, job: Any, use_fake_estimator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    server.on_call = lambda: answer.wait(60) or None
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 0.2)
    use_fake_estimator.fail = OSError("no more")
    lines: list[str] = []
    made = job()
    folder = RunFolder.create(made.job.out, made)
    with pytest.raises(OSError, match="no more"), warnings.catch_warnings():
        warnings.simplefilter("always")
        run_job(made, folder, print_line=lines.append)
    answer.set()
    assert len([line for line in lines if "MLflow" in line]) == 1


def test_a_failing_callback_of_another_package_does_not_end_the_fit(
    job: Any, monkeypatch: pytest.MonkeyPatch, use_fake_estimator: Any
) -> None:
    point = EntryPoint("broken", f"{__name__}:BrokenCallback", job_callbacks.CALLBACK_ENTRY_POINTS)
    monkeypatch.setattr(job_callbacks, "entry_points", lambda group: [point])
    monkeypatch.setattr(EntryPoint, "load", lambda self: BrokenCallback)
    BrokenCallback.reported = []
    folder, lines = run(job('kind = "broken"\nword = "x"'))
    assert folder.read_state()["state"] == "done"
    assert BrokenCallback.reported == ["x"] * 5
    (line,) = [line for line in lines if "callback" in line]
    assert "callback BrokenCallback: OSError: no disk; the fit continues" in line


class BrokenCallback(Callback):
    """Callback that fails at every pass."""

    reported: list[str]

    def __init__(self, word: str) -> None:
        self.word = word

    def on_pass_end(self, record: dict[str, Any]) -> None:
        self.reported.append(self.word)
        raise OSError("no disk")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('kind = "mlfow"', r"kind = 'mlfow' is unknown; did you mean 'mlflow'"),
        ('kind = "mlflow"\nurl = "x"', r"unknown key 'url' in \[\[callbacks\]\] .* did you mean 'uri'"),
        ('uri = "x"', r"\[\[callbacks\]\] kind is missing"),
    ],
)
def test_mistakes_are_refused_when_the_job_is_read(job: Any, text: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        job(text)


def test_table_in_place_of_a_list_is_refused(job_paths: Any) -> None:
    with job_paths.job.open("a") as file:
        file.write('\n[callbacks]\nkind = "mlflow"\n')
    with pytest.raises(JobError, match=r"write \[\[callbacks\]\], with two brackets"):
        load_job(job_paths.job)


def test_without_mlflow_the_run_does_not_start(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(JobError, match=r"pip install 'scalelatent\[mlflow\]'"):
        run(job())


@pytest.fixture
def real_server(tmp_path: Path) -> Iterator[str]:
    """Start the real server of MLflow on loopback, and yield its address."""
    pytest.importorskip("mlflow")
    port = find_free_port()
    store = f"sqlite:///{tmp_path}/server.db"
    words = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words += ["--backend-store-uri", store, "--artifacts-destination", f"{tmp_path}/files"]
    log = (tmp_path / "server.log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words], stdout=log, stderr=log, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: server_answers(process, tmp_path / "server.log", f"{url}/health"), 150)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # End the child processes of the server, too.
        process.wait(30)
        log.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_real_server_receives_a_run(job: Any, real_server: str) -> None:
    import mlflow

    _, lines = run(job(f'kind = "mlflow"\nuri = "{real_server}"\nexperiment = "tried"'))
    assert not [line for line in lines if "MLflow" in line], lines
    client = mlflow.MlflowClient(tracking_uri=real_server)
    experiment = client.get_experiment_by_name("tried").experiment_id
    (reported,) = client.search_runs([experiment])
    assert reported.info.status == "FINISHED"
    assert reported.data.params["model.capsule_dim"] == "2"
    assert reported.data.metrics["test_error"] == 0.25
    assert [m.step for m in client.get_metric_history(reported.info.run_id, "objective")] == [1, 2, 3, 4, 5]
    assert {file.path for file in client.list_artifacts(reported.info.run_id)} == {"report", "model"}


def test_calls_are_tried_again_some_time_after_a_refusal() -> None:
    def refuse() -> None:
        raise OSError("no")

    sender, done = tracking._Sender(), list[int]()
    sender.put(refuse)
    wait_for(lambda: sender.error is not None, 10)
    time.sleep(0.6)
    for number in range(3):
        sender.put(lambda number=number: done.append(number))
    assert sender.close(0.5)
    assert done == [0, 1, 2]
