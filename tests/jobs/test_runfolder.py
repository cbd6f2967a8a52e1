"""A run folder has whole files and one driver (process that runs the fit); other folders are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from scalelatent.errors import JobError, RunError, ScalelatentError
from scalelatent.jobs.runfolder import RunFolder, is_run_folder
from scalelatent.jobs.spec import DataSection, Job, JobSection
from scalelatent.storage import lease as lease_module
from scalelatent.storage import locks as lock_module
from scalelatent.storage.locks import FileLock


@pytest.fixture
def job():
    return Job(
        JobSection(name="My Run!", out="run"), DataSection(train="a.zarr"), "capsule", {"capsule_dim": 8}
    )


@pytest.fixture
def folder(tmp_path, job):
    return RunFolder.create(tmp_path / "run", job)


def test_a_created_folder_is_opened_and_read(folder, job):
    assert is_run_folder(folder.path)
    again = RunFolder.open(folder.path)
    assert again.read_job() == job
    state = again.read_state()
    assert state["state"] == "queued"
    assert state["run"] == str(folder.path)
    assert {"id", "state", "pass", "objective", "error", "run"} <= set(state)
    assert folder.id.startswith("my-run-")


def test_a_folder_with_a_run_is_refused_and_an_empty_one_accepted(tmp_path, job, folder):
    with pytest.raises(JobError, match=r"already contains a run.*scalelatent resume .*--out"):
        RunFolder.create(folder.path, job)
    folder.update_state(state="done")
    with pytest.raises(JobError, match=r"state: done.*scalelatent status.*--out"):
        RunFolder.create(folder.path, job)
    other = tmp_path / "other"
    other.mkdir()
    RunFolder.create(other, job)
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "thesis.txt").write_text("precious")
    with pytest.raises(JobError, match=r"not empty; choose another folder with --out"):
        RunFolder.create(strange, job)
    with pytest.raises(JobError, match="is a file"):
        RunFolder.create(strange / "thesis.txt", job)
    with pytest.raises(JobError, match="cannot be written"):
        RunFolder.create(strange / "thesis.txt" / "run", job)


def test_open_refuses_folders_that_are_not_runs(tmp_path):
    with pytest.raises(JobError, match="does not exist"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(JobError, match="is an empty folder, not a run folder"):
        RunFolder.open(tmp_path)


def test_states_are_checked_and_written_whole(folder, monkeypatch):
    with pytest.raises(ValueError, match="not one of queued"):
        folder.update_state(state="sleeping")
    before = (folder.path / "state.json").read_bytes()

    def torn(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", torn)
    with pytest.raises(OSError, match="No space"):
        folder.update_state(state="done")
    assert (folder.path / "state.json").read_bytes() == before
    assert not list(folder.path.glob(".*.tmp"))


def test_the_error_names_a_missing_job_file(folder):
    (folder.path / "job.json").unlink()
    with pytest.raises(JobError, match=r"has no job\.json"):
        folder.read_job()


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("job.json", lambda folder: folder.read_job()),
        ("state.json", lambda folder: folder.read_state()),
        ("lock", lambda folder: folder.lock().__enter__()),
    ],
)
def test_fifo_in_place_of_a_file_does_not_block(folder, name, use):
    (folder.path / name).unlink(missing_ok=True)
    os.mkfifo(folder.path / name)
    with pytest.raises(ScalelatentError, match=rf"{name}.* a FIFO .*not a regular file"):
        use(folder)


def test_records_survive_a_damaged_line(folder):
    for number in range(3):
        folder.append("metrics.jsonl", {"pass": number, "objective": float("nan")})
    with open(folder.path / "metrics.jsonl", "ab") as file:
        file.write(b'{"pass": 3, "obj')
    assert [record["pass"] for record in folder.records("metrics.jsonl")] == [0, 1, 2]
    folder.append("metrics.jsonl", {"pass": 3})
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["pass"] for line in lines] == [0, 1, 2, 3]
    assert json.loads(lines[0])["objective"] is None
    folder.keep_records("metrics.jsonl", 2)
    assert len(folder.records("metrics.jsonl")) == 2
    assert folder.records("nothing.jsonl") == []


def test_a_folder_has_one_driver_at_a_time(folder):
    again = RunFolder.open(folder.path)
    match = rf"driven by process {os.getpid()} on host"
    with folder.lock(), pytest.raises(RunError, match=match), again.lock():
        pass
    with folder.lock():
        pass


def test_a_killed_driver_leaves_no_lock(folder):
    code = f"""
import time
from scalelatent.jobs.runfolder import RunFolder
folder = RunFolder({str(folder.path)!r})
with folder.lock():
    folder.update_state(state="running")
    print("locked", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().strip() == "locked"
        assert folder.read_state()["state"] == "running"
        with pytest.raises(RunError, match=str(process.pid)), folder.lock():
            pass
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
    state = folder.read_state()
    assert state["state"] == "failed"
    assert "scalelatent resume" in state["error"]
    with folder.lock():
        assert FileLock(folder.path / "lock").holder()["pid"] == os.getpid()


def test_a_driver_on_another_host_counts_until_its_heartbeat_stops(folder):
    file = folder.path / "lock"
    file.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    with pytest.raises(RunError, match="process 1 on host elsewhere"), folder.lock():
        pass
    old = time.time() - 2 * lock_module.STALE_SECONDS
    os.utime(file, (old, old))
    assert FileLock(folder.path / "lock").holder() is None
    with folder.lock():
        pass


def test_a_file_system_without_locks_uses_heartbeats(folder, monkeypatch):
    def refuse(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    match = rf"driven by process {os.getpid()} on host"
    with folder.lock(), pytest.raises(RunError, match=match), RunFolder.open(folder.path).lock():
        pass
    gone = lease_module.this_process() | {"started": 1.0}
    (folder.path / "lock").write_text(json.dumps(gone))
    with folder.lock():
        pass


def test_heartbeat_keeps_the_lock_fresh(folder, monkeypatch):
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.02)
    with folder.lock():
        os.utime(folder.path / "lock", (0, 0))
        deadline = time.monotonic() + 5
        while (folder.path / "lock").stat().st_mtime < 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (folder.path / "lock").stat().st_mtime > 1


def is_true_within(true, seconds=5):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def test_heartbeats_continue_after_a_short_failure_of_the_file_system(folder, monkeypatch):
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.02)
    calls = []

    def fail_twice(path):
        calls.append(path)
        if len(calls) < 3:
            raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "utime", fail_twice)
    with folder.lock():
        assert is_true_within(lambda: len(calls) > 3)


@pytest.mark.parametrize("how", ["written over", "made again"])
def test_a_driver_that_was_replaced_stops(folder, monkeypatch, how):
    """The process of a fit stops if another host, where locks have no effect, takes over the lock file."""
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.02)
    file = folder.path / "lock"
    theirs = json.dumps({"pid": 1, "host": "elsewhere", "token": "theirs"})
    with pytest.raises(RunError, match="was taken over by another driver"), folder.lock():
        folder.append("metrics.jsonl", {"pass": 1})
        if how == "made again":
            file.unlink()
        file.write_text(theirs)
        assert is_true_within(lambda: folder._held.lost)
        folder.append("metrics.jsonl", {"pass": 2})
    assert [record["pass"] for record in folder.records("metrics.jsonl")] == [1]
    assert file.read_text() == theirs  # The stopped process did not change the lock of the other.
