"""Submitted jobs, without a cluster: run folders, messages, cancellation, search, and checks of workers."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from scalelatent.deploy import checks
from scalelatent.deploy.probes import Requirements
from scalelatent.deploy.versions import Difference, find_differences, format_differences, versions
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.engine.threads import call_with_timeout
from scalelatent.errors import JobError, RunError
from scalelatent.jobs import control, submit
from scalelatent.jobs import run_record as news
from scalelatent.jobs.interrupt import StopRequest, read_cancel_request, request_cancel, stop_on_cancel
from scalelatent.jobs.resolve import load_job
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.runner import run_job
from scalelatent.monitor.times import epoch_seconds
from scalelatent.storage.disk import locate


@pytest.fixture
def folder(job_paths):
    job = load_job(job_paths.job)
    return RunFolder.create(job.job.out, job)


# -- two processes cannot use one run folder -----------------------------------------------------------------


@pytest.mark.parametrize("url", ["disk", "memory://creates-once"])
def test_only_one_of_many_threads_creates_a_file(tmp_path, url):
    location = locate(tmp_path / url if url == "disk" else url)
    together, made = threading.Barrier(8), []

    def create(number):
        together.wait(10)
        made.append((location.create("job.json", b"%d" % number), number))

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    winners = [number for success, number in made if success]
    assert len(made) == 8
    assert [b"%d" % number for number in winners] == [location.read("job.json")]
    assert location.keys("") == ["job.json"]


def test_a_folder_that_another_process_just_took_is_refused(job_paths, folder, monkeypatch):
    other = RunFolder(folder.url)
    # Imitate a process that creates its run after the check has found an empty folder.
    monkeypatch.setattr(type(other.location), "is_empty", lambda self: True)
    with pytest.raises(JobError, match=r"already contains a run \(state: queued\)"):
        RunFolder.create(folder.url, load_job(job_paths.job))


# -- messages while a slow step is waited for ----------------------------------------------------------------

STEPS = {
    "connect": "an answer of the scheduler tcp://10.0.0.1:8786",
    "check_versions": "the versions of the packages on the scheduler and on each worker",
    "require_checks": "each worker to check the data and the device",
    "_check_plan": "a worker to open the data and to plan the fit",
    "check_folder": "each worker to write to the run folder",
    "_wait_until_accepted": "the scheduler tcp://10.0.0.1:8786 to accept the job",
}


@pytest.mark.parametrize("slow", STEPS)
def test_submit_reports_what_a_slow_step_waits_for(job_paths, monkeypatch, slow):
    reported = threading.Event()

    def step(name):
        def run(*args, **more):
            if name == slow:
                assert reported.wait(10), "the step ended before its line was printed"
                raise JobError("the step ended")

        return run

    @contextmanager
    def connect(*args):
        step("connect")()
        yield SimpleNamespace(set_metadata=step("set_metadata"), submit=step("submit"))

    def require_checks(client, checks, wanted):
        step("check_folder" if "folder" in checks else "require_checks")()

    def collect_line(line):
        if line.startswith(f"waiting for {STEPS[slow]}"):
            reported.set()

    monkeypatch.setattr(submit, "SILENT_SECONDS", 0.02)
    monkeypatch.setattr(submit, "connect", connect)
    monkeypatch.setattr(submit, "require_checks", require_checks)
    for name in (
        "check_versions",
        "_wait_for_worker",
        "_check_plan",
        "add_dashboard_page",
        "publish_state",
        "_wait_until_accepted",
    ):
        monkeypatch.setattr(submit, name, step(name))
    with pytest.raises(JobError, match="the step ended"):
        submit.submit_job(load_job(job_paths.job), scheduler="tcp://10.0.0.1:8786", print_line=collect_line)


def test_submit_prints_nothing_for_quick_steps():
    reported = []
    with submit._report_waiting("nothing", reported.append):
        pass
    assert not reported


# -- states of a job in its run folder -----------------------------------------------------------------------


def test_starts_are_counted_and_lost_drivers_reported(folder):
    assert folder.begin("queued", submitted=1.5) == 1
    assert folder.begin("running", driver="tcp://10.0.0.7:1234") == 2
    state = folder.read_state()
    assert (state["state"], state["driver_lost"]) == ("failed", True)
    assert "the driver on tcp://10.0.0.7:1234 ended without a message" in state["error"]
    folder.append("metrics.jsonl", {"pass": 7, "objective": 1.5, "train_error": None})
    assert (folder.read_state()["pass"], folder.read_state()["objective"]) == (7, 1.5)
    folder.update_state(error="the scheduler tcp://10.0.0.1:8786 was lost")
    assert folder.read_state()["error"] == "the scheduler tcp://10.0.0.1:8786 was lost"


def test_a_driver_waits_for_the_one_before_it(folder):
    reported, held, release = [], threading.Event(), threading.Event()

    def hold():
        with RunFolder(folder.url).lock():
            held.set()
            release.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    with (
        pytest.raises(RunError, match=r"is driven by process .* scalelatent cancel"),
        folder.lock(patience=0.7),
    ):
        pass
    timer = threading.Timer(0.7, release.set)
    timer.start()
    with folder.lock(patience=20, waiting=reported.append):
        assert release.is_set()
    thread.join(10)
    assert len(reported) == 1
    assert f"waiting up to 20 s for process {os.getpid()} on host" in reported[0]


def test_progress_is_written_at_most_once_per_second(folder):
    callback = news.ProgressFile(folder)
    assert folder.read_progress() == {}
    for done in (1, 2, 3):
        callback.on_progress({"stage": "em", "pass": 1, "rows_done": done, "rows_total": 3})
    reported = folder.read_progress()
    assert (reported["rows_done"], reported["rows_total"]) == (1, 3)
    assert time.time() - epoch_seconds(reported["time"]) < 60
    callback._written_at = float("-inf")
    callback.on_progress({"stage": "em", "pass": 1, "rows_done": 3, "rows_total": 3})
    assert folder.read_progress()["rows_done"] == 3
    folder.location.write("progress.json", b'{"pass": 1')
    assert folder.read_progress() == {}


# -- requests to stop ----------------------------------------------------------------------------------------


def test_a_request_to_cancel_reaches_a_fit_in_another_thread(job_paths, use_fake_estimator):
    job = load_job(job_paths.job, settings=["model.max_iter=1000"])
    folder = RunFolder.create(job.job.out, job)
    use_fake_estimator.before_pass = staticmethod(lambda number: time.sleep(0.02))
    ended = []

    def drive():
        try:
            run_job(job, folder)
        except KeyboardInterrupt as stop:
            ended.append(stop)

    thread = threading.Thread(target=drive)
    thread.start()
    deadline = time.monotonic() + 20
    while not folder.records("metrics.jsonl") and time.monotonic() < deadline:
        time.sleep(0.01)
    begin = time.monotonic()
    state = control.cancel_job(RunFolder(folder.url))
    assert time.monotonic() - begin < 2
    thread.join(10)
    assert len(ended) == 1
    assert state["state"] == "cancelled"
    assert "stopped by scalelatent cancel" in state["error"]
    assert not folder.location.has("cancel")
    assert control.cancel_job(folder)["state"] == "cancelled"  # A second request changes nothing.
    use_fake_estimator.before_pass = None
    run_job(job, folder, resume=True)
    assert len(folder.records("metrics.jsonl")) == 1000
    with pytest.raises(JobError, match="has already ended .state: done"):
        control.cancel_job(folder)


def test_a_request_to_cancel_an_earlier_start_is_ignored(folder):
    request = StopRequest()
    folder.begin("running")
    request_cancel(folder)
    assert read_cancel_request(folder)["start"] == 1
    folder.begin("running")
    with stop_on_cancel(request, folder):
        time.sleep(0.7)
    assert request.by is None
    folder.location.write("cancel", b"")  # A user created this file without content.
    with stop_on_cancel(request, folder):
        time.sleep(0.7)
    assert request.by == "scalelatent cancel, ? on ?"
    with pytest.raises(KeyboardInterrupt):
        Callbacks([Callback(), request]).on_wait()


def test_a_job_without_a_driver_is_cancelled(folder):
    folder.begin("queued", submitted=1.0)
    assert "before the start" in control.cancel_job(folder)["error"]
    folder.begin("running", driver="tcp://gone:1")
    assert "its driver was lost" in control.cancel_job(folder)["error"]


# -- search for jobs, and display of their progress ----------------------------------------------------------


def test_a_job_is_found_by_its_folder_or_below_it(job_paths, folder, monkeypatch):
    monkeypatch.delenv("SCALELATENT_CLUSTER__SCHEDULER", raising=False)
    for name in (folder.url, "run", "./run", folder.id):
        assert control.find_job(name).url == folder.url
    near = folder.id[:-1]
    with pytest.raises(JobError, match=f"no job '{near}'.*did you mean '{folder.id}'.*--scheduler URL"):
        control.find_job(near)
    with pytest.raises(JobError, match="does not exist"):
        control.find_job("runs/none")
    monkeypatch.setenv("SCALELATENT_CLUSTER__SCHEDULER", "tcp://127.0.0.1:1")
    with pytest.raises(JobError, match="no program listens there"):
        control.find_job("nobody")


def test_follow_reports_passes_once_and_again_after_a_restart(folder):
    seen, progress, reported = [], [], []

    class Watch(Callback):
        def on_pass_end(self, record):
            seen.append(record["pass"])

        def on_progress(self, info):
            progress.append(info["rows_done"])

    folder.begin("queued")
    result = []
    thread = threading.Thread(
        target=lambda: result.append(control.follow(folder, [Watch()], print_line=reported.append, poll=0.02))
    )
    thread.start()

    def wait_for(what):
        deadline = time.monotonic() + 10
        while not what() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert what()

    wait_for(lambda: reported == ["queued"])
    with folder.lock():
        folder.update_state(state="running", driver="tcp://a:1")
        wait_for(lambda: reported[1:] == ["running on tcp://a:1"])
        for number in (1, 2, 3):
            folder.append("metrics.jsonl", {"pass": number})
        folder.write_progress({"rows_done": 7})
        wait_for(lambda: seen == [1, 2, 3] and progress == [7])
        folder.keep_records("metrics.jsonl", 1)
        time.sleep(0.1)
        folder.append("metrics.jsonl", {"pass": 2})
        wait_for(lambda: seen == [1, 2, 3, 2])
        folder.update_state(state="done")
    thread.join(10)
    assert result[0]["state"] == "done"


def test_follow_ends_for_a_queued_job_whose_scheduler_is_lost(folder, monkeypatch):
    monkeypatch.setattr(control, "QUEUED_SECONDS", 0.1)
    folder.begin("queued", scheduler="tcp://127.0.0.1:1")
    with pytest.raises(
        RunError, match=r"will not start it.*no program listens.*scalelatent resume .*--scheduler"
    ):
        control.follow(folder, poll=0.02)


def test_follow_waits_a_limited_time_for_a_lost_driver(folder, monkeypatch):
    monkeypatch.setattr(control, "RESTART_SECONDS", 0.3)
    folder.begin("running", submitted=1.0)
    reported = []
    begin = time.monotonic()
    assert control.follow(folder, print_line=reported.append, poll=0.02)["driver_lost"]
    assert time.monotonic() - begin > 0.3
    assert reported == ["the driver is lost; waiting for the cluster to restart it"]


def test_events_are_yielded_when_they_arrive(folder):
    folder.event("state", state="queued")
    assert [event["state"] for event in control.new_events(folder)] == ["queued"]
    with folder.lock():
        folder.begin("running")
        following = control.new_events(folder, follow=True, poll=0.01)
        assert next(following)["state"] == "queued"
        folder.event("checkpoint")
        assert next(following)["event"] == "checkpoint"
        folder.update_state(state="done")
    assert list(following) == []


# -- checks of a cluster before a job starts -----------------------------------------------------------------


def test_version_differences_of_workers_are_listed():
    same = versions()
    assert find_differences(same, same, {"a": same, "b": same}) == []
    micro = same | {"python": ".".join([*same["python"].split(".")[:2], "99"]), "cupy": None, "scipy": "0.1"}
    assert find_differences(same, same, {"a": micro}) == []
    older = same | {"numpy": "1.0", "cupy-cuda12x": "13.4"}
    found = find_differences(same, same, {"a": older, "b": same, "c": same | {"cupy": "13.6"}})
    assert found == [
        Difference("numpy", same["numpy"], same["numpy"], {"1.0": ["a"], same["numpy"]: ["b", "c"]}),
        Difference("cupy", "", "", {"13.4": ["a"], "13.6": ["c"]}),
    ]


def test_version_differences_are_printed_as_a_table():
    row = Difference("numba", "0.63.1", "0.63.1", {"0.62.0": ["tcp://a:40331"], "0.63.1": ["b", "c"]})
    assert format_differences([row]).splitlines() == [
        "package  here    scheduler  workers",
        "numba    0.63.1  0.63.1     0.62.0 (tcp://a:40331), 0.63.1 (2 workers)",
    ]


def judge_cluster(name, view):
    (check,) = [check for check in checks.CHECKS if (check.where, check.name) == ("cluster", name)]
    return list(check.findings(view))


def test_a_cluster_without_the_package_is_refused():
    same, without = versions(), versions() | {"scalelatent": None}
    reported = {"a": same, "b": without}
    (found,) = judge_cluster(
        "versions", checks.ClusterView("tcp://head:8786", scheduler={"versions": without}, versions=reported)
    )
    said = str(found.refusal())
    assert found.check == "package"
    assert "cannot be imported by the scheduler, b of the cluster tcp://head:8786:" in said
    assert said.splitlines()[-1].startswith("Install scalelatent there")


def test_workers_that_see_different_datasets_are_reported():
    seen = {
        worker: {"datasets": {"[data] train": ("", mark)}} for worker, mark in zip("abc", "112", strict=True)
    }
    view = checks.ClusterView("tcp://head:8786", Requirements(datasets={"[data] train": "/x"}), workers=seen)
    (found,) = judge_cluster("datasets", view)
    assert "[data] train = '/x' is not the same dataset on all workers (a, c see" in found.found


def test_a_call_that_hangs_raises_timeout_error():
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer in 0.1 s"):
        call_with_timeout(0.1, lambda: time.sleep(3))
    assert time.monotonic() - begin < 2
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(10, lambda: 1 // 0)
