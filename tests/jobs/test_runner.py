"""A job writes its states, logs and errors to its run folder; a stand-in replaces the estimator."""

from __future__ import annotations

import errno
import os
import signal
import threading
import warnings
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest

from scalelatent import Dataset
from scalelatent.engine.callbacks import Callback
from scalelatent.errors import DataError, JobError, RunError
from scalelatent.jobs import runner
from scalelatent.jobs.resolve import load_job, resolve
from scalelatent.jobs.run_record import report_warnings
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.runner import run_job, run_new_job
from scalelatent.monitor.events import RunLog


@pytest.fixture
def prepare_run(job_paths, use_fake_estimator):
    def prepare(*settings):
        job = load_job(job_paths.job, settings=settings)
        return job, RunFolder.create(job.job.out, job)

    return prepare


def test_a_run_leaves_everything_in_its_folder(prepare_run):
    job, folder = prepare_run()
    result = run_job(job, folder)
    state = folder.read_state()
    assert state["state"] == "done"
    assert state["pass"] == 5
    assert state["objective"] == pytest.approx(0.2)
    assert state["error"] is None
    assert state["test_error"] == pytest.approx(0.25)
    assert folder.location.local_path("model.zarr") == folder.model_url
    assert result.report == folder.report_url
    assert [record["pass"] for record in folder.records("metrics.jsonl")] == [1, 2, 3, 4, 5]
    events = [record["event"] for record in folder.records("events.jsonl")]
    assert events[:2] == ["state", "fit_started"]
    assert {"fit_ended", "model_saved", "scored"} < set(events)
    assert folder.records("events.jsonl")[-1]["state"] == "done"
    assert result.estimator.asked["rows"] == 300
    assert not list(folder.path.glob(".*"))


def test_skipped_rows_are_reported(prepare_run):
    job, folder = prepare_run("engine.on_bad_shard=skip")
    reported = {"event": "shard_quarantined", "shard": "small.zarr/x/c/3/0", "rows": 1200, "deaths": 3}

    class Find(Callback):
        def on_fit_start(self, info):
            for _ in range(2):
                RunLog(folder).on_event(reported)

    result = run_job(job, folder, callbacks=[Find()])
    state = folder.read_state()
    assert (state["quarantined_shards"], state["quarantined_rows"]) == (2, 2400)
    (warning,) = result.warnings
    assert warning.startswith("2,400 rows of 2 bad shard(s) were excluded")
    (event, _) = [e for e in folder.records("events.jsonl") if e["event"] == "shard_quarantined"]
    assert (event["shard"], event["rows"], event["deaths"]) == ("small.zarr/x/c/3/0", 1200, 3)
    assert result.estimator.asked["engine"] == {"on_bad_shard": "skip"}


def test_failure_is_recorded_and_resumable(prepare_run, use_fake_estimator):
    job, folder = prepare_run()
    use_fake_estimator.fail = DataError("shard 3 of small.zarr is gone")
    with pytest.raises(DataError):
        run_job(job, folder)
    state = folder.read_state()
    assert (state["state"], state["error"]) == ("failed", "shard 3 of small.zarr is gone")
    use_fake_estimator.fail = None
    run_job(job, folder, resume=True)
    assert folder.read_state()["state"] == "done"
    assert [record["pass"] for record in folder.records("metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_repeated_passes_replace_their_records(prepare_run, use_fake_estimator):
    job, folder = prepare_run()
    use_fake_estimator.fail = DataError("gone")
    with pytest.raises(DataError):
        run_job(job, folder)
    # Make the checkpoint one pass older than the last record.
    (folder.path / "engine" / "passes").write_text("1")
    use_fake_estimator.fail = None
    run_job(job, folder, resume=True)
    assert [record["pass"] for record in folder.records("metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_a_resumed_fit_of_a_search_keeps_the_records_of_the_fits_before_it(prepare_run):
    _, folder = prepare_run()
    for resumed in (False, True):
        log = RunLog(folder)
        for fit in (1, 2) if not resumed else (2,):
            log.on_event({"event": "candidate", "fit": fit})
            if resumed:
                log.on_event({"event": "resumed", "record": {"stage": "estep", "pass": 2}})
            for number in (3, 4) if resumed else (1, 2, 3):
                log.on_pass_end({"stage": "estep", "pass": number})
            log.on_event({"event": "candidate_scored", "fit": fit})
    # The last fit, of the best candidate to all rows, has records without the key "fit".
    log.on_pass_end({"stage": "estep", "pass": 1})
    records = folder.records("metrics.jsonl")
    assert [(record.get("fit"), record["pass"]) for record in records] == [
        *((1, number) for number in (1, 2, 3)),
        *((2, number) for number in (1, 2, 3, 4)),
        (None, 1),
    ]


@pytest.mark.parametrize("last", ["first", "second"])
def test_jobs_in_threads_receive_only_their_warnings(prepare_run, tmp_path, last):
    job, one = prepare_run()
    other = RunFolder.create(tmp_path / "other", job)
    before, said = warnings.showwarning, {"first": [], "second": []}
    begun, gone = threading.Barrier(2), threading.Event()

    def drive(name, folder):
        with report_warnings(folder, said[name].append):
            begun.wait(10)
            warnings.showwarning(UserWarning(f"of the {name}"), UserWarning, "x.py", 1)
            begun.wait(10)
            if name == last:
                gone.wait(10)
        gone.set()

    threads = [threading.Thread(target=drive, args=args) for args in (("first", one), ("second", other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert said == {name: [f"warning: of the {name}"] for name in said}
    for folder, name in ((one, "first"), (other, "second")):
        (event,) = [e for e in folder.records("events.jsonl") if e["event"] == "warning"]
        assert event["message"] == f"of the {name}"
    assert warnings.showwarning is before


def test_unexpected_error_is_recorded_with_its_type(prepare_run, use_fake_estimator):
    job, folder = prepare_run()
    use_fake_estimator.fail = ZeroDivisionError("oops")
    with pytest.raises(ZeroDivisionError):
        run_job(job, folder)
    assert folder.read_state()["error"] == "ZeroDivisionError: oops"


def test_full_disk_gives_a_readable_error(prepare_run, use_fake_estimator):
    job, folder = prepare_run()
    use_fake_estimator.fail = OSError(errno.ENOSPC, "No space left on device", "/x/checkpoint")
    with pytest.raises(RunError, match=r"no space left while writing /x/checkpoint.*scalelatent resume"):
        run_job(job, folder)
    assert "free some space" in folder.read_state()["error"]


def test_first_signal_stops_after_the_pass(prepare_run, use_fake_estimator):
    job, folder = prepare_run()
    reported = []

    def interrupt(number):
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)

    use_fake_estimator.before_pass = staticmethod(interrupt)
    earlier = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_job(job, folder, print_line=reported.append)
    assert signal.getsignal(signal.SIGINT) is earlier
    state = folder.read_state()
    assert state["state"] == "cancelled"
    assert f"scalelatent resume {folder.path}" in state["error"]
    assert any("Ctrl-C again" in line for line in reported)
    assert [record["pass"] for record in folder.records("metrics.jsonl")] == [1, 2, 3]
    use_fake_estimator.before_pass = None
    run_job(job, folder, resume=True)
    assert [record["pass"] for record in folder.records("metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_second_signal_stops_at_once(prepare_run, use_fake_estimator):
    job, folder = prepare_run()

    def interrupt(number):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    use_fake_estimator.before_pass = staticmethod(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_job(job, folder)
    assert folder.read_state()["state"] == "cancelled"
    assert folder.records("metrics.jsonl") == []


def test_sigterm_counts_as_a_stop(prepare_run, use_fake_estimator):
    job, folder = prepare_run()
    use_fake_estimator.before_pass = staticmethod(lambda number: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run_job(job, folder)
    assert "SIGTERM" in folder.read_state()["error"]


def test_a_failing_report_is_a_warning(prepare_run, monkeypatch):
    from scalelatent.report import build

    _, folder = prepare_run()
    monkeypatch.undo()  # Use the real _report, whose build_report fails below.

    def broken(*_, **__):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(build, "build_report", broken, raising=False)
    result = runner.RunResult(folder, None)
    runner._report(result, runner.JobData(train=None), None)
    assert "no fonts" in result.warnings[0]
    assert "scalelatent report" in result.warnings[0]


def test_engine_settings_reach_the_fit(prepare_run, tmp_path):
    job, folder = prepare_run("engine.block_rows=64", "job.scratch=/tmp/x")
    result = run_job(job, folder)
    assert result.estimator.asked["engine"] == {"block_rows": 64, "scratch": "/tmp/x"}


def test_callbacks_of_the_user_are_called(prepare_run):
    job, folder = prepare_run()

    class Count(Callback):
        passes = 0

        def on_pass_end(self, record):
            self.passes += 1

    count = Count()
    run_job(job, folder, callbacks=[count])
    assert count.passes == 5


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.train_rows=0:401", r'train rows "0:401" exceed .*small.zarr, which has 400 rows'),
        ("data.test_rows=-401:", "exceed"),
        ("data.train_rows=300:-200", "contain none of the 400 rows"),
        ("data.target=small.zarr", "learns no outputs"),
    ],
)
def test_invalid_data_sections_are_an_error_before_the_fit(prepare_run, setting, message):
    job, folder = prepare_run(setting)
    with pytest.raises(JobError, match=message):
        run_job(job, folder)
    assert folder.read_state()["state"] == "failed"


def test_an_unreachable_scheduler_is_an_error(prepare_run):
    job, folder = prepare_run("cluster.scheduler=tcp://127.0.0.1:9")
    with pytest.raises(JobError, match=r"scheduler 'tcp://127.0.0.1:9': no program listens there"):
        run_job(job, folder)


def test_a_refused_job_leaves_no_folder(job_paths, use_fake_estimator):
    job = load_job(job_paths.job, settings=["data.train_rows=0:401"])
    with pytest.raises(JobError, match="exceed"):
        run_new_job(job)
    assert not job_paths.run.exists()
    job_paths.run.mkdir()
    with pytest.raises(JobError, match="exceed"):
        run_new_job(job)
    assert list(job_paths.run.iterdir()) == []  # The folder of the user stays.


def test_a_folder_that_another_driver_uses_is_not_removed(job_paths, use_fake_estimator):
    """The test imitates another process that resumes a run between its creation and the start of its fit."""
    job, other = load_job(job_paths.job), ExitStack()

    def lock_first(line):
        if line.startswith("run "):
            other.enter_context(RunFolder.open(job_paths.run).lock())

    with other:
        with pytest.raises(RunError, match="is driven by process"):
            run_new_job(job, print_line=lock_first)
        assert RunFolder.open(job_paths.run).read_job() == job


@pytest.mark.parametrize("trouble", ["silence", "closed"])
def test_a_run_does_not_wait_for_workers_that_do_not_answer(monkeypatch, trouble):
    from scalelatent.engine.dask import timed_calls
    from scalelatent.jobs.job_cluster import read_peak_bytes

    monkeypatch.setattr(timed_calls, "ASK_SECONDS", 0.05)
    never = threading.Event()

    class Client:
        scheduler = SimpleNamespace(address="tcp://head:8786")

        def scheduler_info(self, n_workers):
            if trouble == "closed":
                raise AttributeError("'NoneType' object has no attribute 'send_recv'")
            never.wait(30)

    assert read_peak_bytes(Client()) is None
    never.set()


def test_warnings_of_a_fit_become_lines_and_events(tmp_path, monkeypatch):
    """A warning becomes one line without a position in the code, and an event for `scalelatent logs`."""
    monkeypatch.setattr(runner, "_report", lambda *_: None)
    x = np.random.default_rng(0).integers(0, 256, (60, 12), dtype=np.uint8)
    Dataset.from_arrays(x).save(tmp_path / "x.zarr")
    reported = []
    sections = {
        "job": {"out": str(tmp_path / "run"), "seed": 0},
        "data": {"train": str(tmp_path / "x.zarr")},
        "model": {"kind": "mbn", "n_clusterings": 4, "decay": 0.5, "n_classes": 2},
    }
    result = runner.run_new_job(resolve(sections, environ={}), print_line=reported.append)
    (line,) = [line for line in reported if "n_clusterings=4" in line]
    assert line.startswith("warning: n_clusterings=4: with fewer than 50")
    events = result.folder.records("events.jsonl")
    assert [e["message"] for e in events if e["event"] == "warning"] == [line.removeprefix("warning: ")]
