"""Jobs on a cluster can be submitted, watched, cancelled and resumed, several at the same time."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalelatent.errors import JobError, RunError
from scalelatent.jobs import clusterdriver, control, submit
from scalelatent.jobs.resolve import load_job
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.submit import resubmit, submit_job
from tests.helpers import WITHOUT_REPORT, read_model_files, wait_for, write_digits_job

LONG = ["model.max_iter=100000"]


@pytest.fixture(scope="module")
def dataset_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("submitted")
    write_digits_job(folder, 40)
    return folder


@pytest.fixture(scope="module")
def cluster(client: Any) -> Any:
    """Make the workers skip reports, which take longer than these fits, and return the client."""
    client.run(exec, WITHOUT_REPORT)
    return client


@pytest.fixture
def no_task_is_left(cluster: Any) -> Callable[[], Any]:
    """Return a function that waits until the scheduler has no task of this test."""
    before = set(list_tasks(cluster))
    return lambda: wait_for(lambda: set(list_tasks(cluster)) <= before, 10)


@pytest.fixture
def make_job(dataset_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes a job with a run folder in the folder of this test."""

    def job(name: str = "run", *settings: str) -> Any:
        return load_job(dataset_folder / "job.toml", settings=[f"job.out={tmp_path / name}", *settings])

    return job


def wait_until_ended(folder: RunFolder, seconds: float = 60.0) -> dict[str, Any]:
    def ended() -> Any:
        state = folder.read_state()
        return state if state["state"] in ("done", "failed", "cancelled") else None

    return wait_for(ended, seconds)


def list_passes(folder: RunFolder) -> int:
    return len(folder.records("metrics.jsonl"))


def list_tasks(client: Any) -> list[str]:
    return client.run_on_scheduler(lambda dask_scheduler: list(map(str, dask_scheduler.tasks)))


def run_command(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "scalelatent", *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


# -- a job from beginning to end -----------------------------------------------------------------------------


def test_submitted_job_gives_the_same_bits_as_a_local_job(
    cluster: Any, make_job: Any, no_task_is_left: Any, undisturbed: dict[str, bytes]
) -> None:
    submitted = submit_job(make_job(), client=cluster)
    folder = RunFolder.open(submitted.run)
    state = wait_until_ended(folder)
    assert (state["state"], state["error"], state["id"]) == ("done", None, submitted.id)
    assert state["driver"] in cluster.scheduler_info()["workers"]
    assert state["scheduler"] == cluster.scheduler.address
    assert read_model_files(folder) == undisturbed
    events = [record["event"] for record in folder.records("events.jsonl")]
    assert events[:3] == ["submitted", "state", "fit_started"]
    # The last stage, the scores of the test rows, has 297 rows.
    assert folder.read_progress()["rows_total"] == 297
    no_task_is_left()
    assert control.known_jobs(cluster)[submitted.id]["run"] == submitted.run


def test_the_driver_occupies_no_thread_of_a_worker(cluster: Any, make_job: Any) -> None:
    """A driver (the task that runs the fit of a job) leaves the only thread of its worker free for tasks."""
    folder = RunFolder.open(submit_job(make_job("run", *LONG), client=cluster).run)
    wait_for(lambda: list_passes(folder) > 2)
    # The name of each task contains the id of its job, because several jobs share the dashboard.
    wait_for(
        lambda: any(re.match(rf"capsule_estep-it\d+-s\d+-{folder.id}-", key) for key in list_tasks(cluster))
    )
    info = cluster.run_on_scheduler(
        lambda dask_scheduler: [(len(w.long_running), w.nthreads) for w in dask_scheduler.workers.values()]
    )
    assert sorted(info) == [(0, 1), (1, 1)]
    control.cancel_job(folder)


def test_cancel_stops_within_two_seconds_and_resume_continues(
    cluster: Any, make_job: Any, no_task_is_left: Any, undisturbed: dict[str, bytes]
) -> None:
    folder = RunFolder.open(
        submit_job(make_job("run", "model.max_iter=40", "engine.leaf_rows=512"), client=cluster).run
    )
    wait_for(lambda: list_passes(folder) > 2)
    begin = time.monotonic()
    state = control.cancel_job(folder)
    assert time.monotonic() - begin < 2.5  # The limit is 2 s, plus 0.5 s for a busy machine.
    assert state["state"] in ("cancelled", "done")
    if state["state"] == "cancelled":
        assert "stopped by scalelatent cancel" in state["error"]
        assert f"scalelatent resume {folder.url}" in state["error"]
        assert 2 < list_passes(folder) < 40
        assert not (folder.path / "cancel").exists()
        no_task_is_left()
        assert resubmit(folder.read_job(), folder, client=cluster).id == folder.id
        state = wait_until_ended(folder)
    assert state["state"] == "done"
    assert read_model_files(folder) == undisturbed
    assert [record["pass"] for record in folder.records("metrics.jsonl")] == list(range(1, 41))


def test_a_job_that_waits_for_a_thread_is_queued_and_can_be_cancelled(
    cluster: Any, make_job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Skip the check of the cluster, because it runs as a task and would wait for a thread, too.
    monkeypatch.setattr(submit, "check_cluster", lambda *a, **k: None)
    block = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.05)"
    block = block.format(str(tmp_path / "go"))
    busy = [cluster.submit(exec, block, priority=1000, pure=False) for _ in range(2)]
    try:
        wait_for(lambda: all(cluster.processing().values()))
        folder = RunFolder.open(submit_job(make_job(), client=cluster).run)
        time.sleep(0.3)
        assert folder.read_state()["state"] == "queued"
        with pytest.raises(JobError, match=r"already contains a run \(state: queued\)"):
            submit_job(make_job(), client=cluster)
        assert control.cancel_job(folder)["error"].startswith("cancelled before the start; resume with")
    finally:
        (tmp_path / "go").touch()
    for future in busy:
        future.result(timeout=30)
    assert folder.read_state()["state"] == "cancelled"
    assert not folder.fit_began
    assert (
        wait_until_ended(RunFolder.open(resubmit(folder.read_job(), folder, client=cluster).run))["state"]
        == "done"
    )


def test_a_driver_of_an_earlier_start_does_nothing(cluster: Any, make_job: Any) -> None:
    """The driver (task of the fit) does nothing if Dask repeats it after its job ended or restarted."""
    folder = RunFolder.open(submit_job(make_job("run", "model.max_iter=3"), client=cluster).run)
    assert wait_until_ended(folder)["state"] == "done"
    # The state is written before the last line of the events, so wait for this line.
    wait_for(lambda: folder.records("events.jsonl")[-1].get("state") == "done")
    before = (folder.path / "events.jsonl").read_bytes()
    for start in (0, 1):
        said = cluster.submit(clusterdriver.drive, folder.url, start, pure=False).result(timeout=30)
        assert said == "done (another start)"
    assert (folder.path / "events.jsonl").read_bytes() == before


def test_failed_job_reports_the_reason(cluster: Any, make_job: Any) -> None:
    folder = RunFolder.open(submit_job(make_job("run", *LONG), client=cluster).run)
    wait_for(lambda: list_passes(folder) > 2)
    driver = folder.read_state()["driver"]
    loop = "from scalelatent.engine import batch_loop as loop\n"
    broken = loop + "def broken(*a, **k): raise ZeroDivisionError('oops')\n"
    cluster.run(exec, broken + "loop.make_record, loop._true = broken, loop.make_record", workers=[driver])
    try:
        state = wait_until_ended(folder)
    finally:
        cluster.run(exec, loop + "loop.make_record = loop._true", workers=[driver])
    assert (state["state"], state["error"]) == ("failed", "ZeroDivisionError: oops")
    last = folder.records("events.jsonl")[-1]
    assert "in broken" in last["traceback"]
    assert control.follow(folder)["state"] == "failed"
    with pytest.raises(JobError, match="has already ended .state: failed"):
        control.cancel_job(folder)


# -- several jobs at once ------------------------------------------------------------------------------------


def test_second_submit_to_the_same_folder_is_refused(cluster: Any, make_job: Any) -> None:
    outcomes: list[Any] = []
    together = threading.Barrier(2)

    def try_it() -> None:
        together.wait(30)
        try:
            outcomes.append(submit_job(make_job("run", "model.max_iter=3"), client=cluster))
        except JobError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=try_it) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    errors = [str(found) for found in outcomes if isinstance(found, JobError)]
    accepted = [found for found in outcomes if not isinstance(found, JobError)]
    assert (len(errors), len(accepted)) == (1, 1)
    assert "output folder" in errors[0]
    assert wait_until_ended(RunFolder.open(accepted[0].run))["id"] == accepted[0].id


@pytest.mark.slow
def test_jobs_make_progress_in_turn(cluster: Any, make_job: Any) -> None:
    """The older of two jobs does not occupy the whole cluster: both finish passes, at similar rates."""
    folders = [RunFolder.open(submit_job(make_job(f"run{i}", *LONG), client=cluster).run) for i in range(2)]
    wait_for(lambda: min(map(list_passes, folders)) > 2)
    before = list(map(list_passes, folders))
    time.sleep(3)
    made = [list_passes(folder) - count for folder, count in zip(folders, before, strict=True)]
    for folder in folders:
        control.cancel_job(folder)
    assert min(made) > 0.25 * max(made), made


@pytest.mark.slow
def test_twenty_jobs_run_at_once(cluster: Any, make_job: Any, no_task_is_left: Any) -> None:
    settings = ("data.train_rows=0:2000", "model.max_iter=4")
    folders = [
        RunFolder.open(submit_job(make_job(f"run{i:02d}", *settings), client=cluster).run) for i in range(20)
    ]
    states = [wait_until_ended(folder) for folder in folders]
    assert [state["error"] for state in states] == [None] * 20
    models = [read_model_files(folder) for folder in folders]
    assert all(model == models[0] for model in models)
    no_task_is_left()
    listed = control.list_jobs(below=folders[0].path.parent, client=cluster)
    assert {state["id"] for state in states} <= {state["id"] for state in listed}


# -- the client ends before the job --------------------------------------------------------------------------


@pytest.mark.slow
def test_job_survives_a_client_killed_after_printing_the_id(
    cluster: Any, dataset_folder: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    out = tmp_path / "run"
    client = run_command(
        "submit",
        dataset_folder / "job.toml",
        "--scheduler",
        cluster.scheduler.address,
        "--out",
        out,
        cwd=tmp_path,
    )
    try:
        assert client.stdout is not None
        identity = client.stdout.readline().strip()
        client.kill()
    finally:
        client.kill()
        client.communicate(timeout=30)
    state = wait_until_ended(RunFolder.open(out))
    assert (state["state"], state["id"]) == ("done", identity)
    assert read_model_files(RunFolder.open(out)) == undisturbed
    # In another folder, the command needs a scheduler, which knows the run folder; in the parent folder it
    # finds the run folder itself.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for where, more in ((elsewhere, ["--scheduler", cluster.scheduler.address]), (tmp_path, [])):
        asked = run_command("status", identity, "--json", *more, cwd=where)
        said, trouble = asked.communicate(timeout=60)
        assert json.loads(said)["run"] == str(out), trouble


@pytest.mark.slow
def test_attach_shows_passes_and_may_end_before_the_job(
    cluster: Any, make_job: Any, dataset_folder: Path
) -> None:
    folder = RunFolder.open(submit_job(make_job("run", *LONG), client=cluster).run)
    watcher = run_command("attach", folder.url)
    try:
        assert watcher.stderr is not None
        lines = [watcher.stderr.readline() for _ in range(2)]
        watcher.send_signal(signal.SIGINT)
        _, rest = watcher.communicate(timeout=30)
    finally:
        watcher.kill()
        watcher.communicate(timeout=30)
    assert lines[0].startswith("running on tcp://"), (lines, rest)
    assert lines[1].startswith("pass 1  objective"), (lines, rest)
    assert "the job still runs" in rest
    assert watcher.returncode == 130
    assert folder.read_state()["state"] == "running"
    assert control.cancel_job(folder)["state"] == "cancelled"


def test_attach_ends_if_the_scheduler_does_not_know_the_job(
    cluster: Any, make_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test imitates a scheduler that was restarted at the same address: it has no tasks of the job."""
    monkeypatch.setattr(control, "QUEUED_SECONDS", 0.1)
    job = make_job()
    folder = RunFolder.create(job.job.out, job)
    folder.begin("queued", submitted=time.time(), scheduler=cluster.scheduler.address)
    with pytest.raises(RunError, match=r"it does not know the job; was it restarted.*scalelatent resume"):
        control.follow(folder, poll=0.05)
