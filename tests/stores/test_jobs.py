"""A job with data, run folder and report in an object store has the bits of a fit on a disk."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import scalelatent as sl
from scalelatent.cli import app
from scalelatent.errors import DataError, JobError, RunError
from scalelatent.jobs.resolve import load_job, resolve
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.runner import run_job, run_new_job
from scalelatent.jobs.runs import find_runs
from scalelatent.storage.disk import locate

from .conftest import S3, SECRET

PASSES = 8


def write_job_file(folder: Path, base: str, **more: str) -> Path:
    """Write a job file whose data and run folder are below the URL ``base``; return the path of the file."""
    sections: dict[str, str] = {"job": "", "data": "", "engine": "", "cluster": ""} | more
    file = folder / f"job-{uuid.uuid4().hex[:6]}.toml"
    file.write_text(
        f"""
        [job]
        name = "stored"
        seed = 3
        out = "{base}/run"
        {sections["job"]}
        [data]
        train = "{base}/train.zarr"
        validation = "{base}/train.zarr"
        validation_rows = "0:100"
        test = "{base}/train.zarr"
        test_rows = "100:200"
        {sections["data"]}
        [model]
        kind = "capsule"
        capsule_dim = 2
        max_iter = {PASSES}
        projection = 20
        tol = "none"
        [engine]
        leaf_rows = 64
        block_rows = 64
        checkpoint_passes = 2
        {sections["engine"]}
        [cluster]
        {sections["cluster"] or "threads = 1"}
        """
    )
    return file


def fit(rows: sl.Dataset, **how: Any) -> sl.CapsuleRegression:
    """Fit a model with the parameters of the job file, without a job."""
    model = sl.CapsuleRegression(
        capsule_dim=2, max_iter=PASSES, projection=20, tol=None, random_state=3, n_jobs=1
    )
    engine = {"leaf_rows": 64, "block_rows": 64, "checkpoint_passes": 2}
    return model.fit(rows, validation=rows[0:100], engine=engine, **how)


@pytest.fixture(scope="module")
def fit_on_disk(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Fit the model of the job file on rows on a disk; return it with their path as ``rows_url``."""
    folder = tmp_path_factory.mktemp("oracle")
    rows = sl.data.make_digits(str(folder / "train.zarr"), 600, shard_rows=100)
    model = fit(rows)
    model.rows_url = rows.url  # type: ignore[attr-defined]
    return model


@pytest.fixture
def dataset_url(s3: S3, fit_on_disk: Any) -> str:
    """Store the training rows in a bucket, and return the URL of the bucket."""
    sl.data.make_digits(s3.at("train.zarr"), 600, shard_rows=100)
    return s3.url


def call(*arguments: str) -> Any:
    """Run a command with ``--json``, and return its output."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert SECRET not in result.output
    return json.loads(result.stdout[result.stdout.index("{") :])


def assert_same_bits(url: str, on_disk: Any) -> None:
    model = sl.load_model(url)
    np.testing.assert_array_equal(model.W_, on_disk.W_)


@pytest.mark.slow
def test_a_job_runs_from_data_to_report_in_a_store(s3: S3, fit_on_disk: Any, tmp_path: Path) -> None:
    base = s3.url
    error = 1.0 - fit_on_disk.score(sl.open_dataset(fit_on_disk.rows_url)[100:200])
    with s3.proxy.turning_away(0.04):
        call("data", "make", "digits", f"{base}/train.zarr", "--rows", "600")
        done = call("fit", str(write_job_file(tmp_path, base)))
        assert done["state"] == "done"
        assert done["pass"] == PASSES
        assert done["run"] == f"{base}/run"
        assert done["report"] == f"{base}/run/report/index.html"
        state = call("status", f"{base}/run")
        assert state["test_error"] == pytest.approx(error)
        assert call("model", "info", f"{base}/run")["model"] == "CapsuleRegression"
        written = call("predict", f"{base}/run", f"{base}/train.zarr", "--out", f"{base}/labels.zarr")
        assert written == {"written": f"{base}/labels.zarr", "rows": 600}
        call("transform", f"{base}/run", f"{base}/train.zarr", "--out", f"{base}/h.zarr", "--rows", "0:100")
        scores = call("score", f"{base}/run", f"{base}/train.zarr", "--rows", "100:200")
        assert scores["error"] == pytest.approx(error)
        assert call("report", f"{base}/run")["report"].endswith("run/report/index.html")
        assert_same_bits(f"{base}/run", fit_on_disk)
        assert_same_bits(f"{base}/run/model.zarr", fit_on_disk)
    assert s3.proxy.turned_away > 5
    page = locate(f"{base}/run").read("report/index.html")
    assert b"<html" in page  # type: ignore[operator]
    labels = sl.open_dataset(f"{base}/labels.zarr")
    train = sl.open_dataset(f"{base}/train.zarr")
    np.testing.assert_array_equal(
        labels.read_y(0, 600), sl.load_model(f"{base}/run").predict(train.read_x(0, 600))
    )
    refused = CliRunner().invoke(app, ["fit", str(write_job_file(tmp_path, base))])
    assert refused.exit_code == 2
    assert "already contains a run (state: done)" in refused.output
    assert [folder.url for folder in find_runs(base)] == [f"{base}/run"]
    store = locate(base)
    for key in store.all_keys():  # type: ignore[attr-defined]
        assert SECRET.encode() not in store.read(key), key  # type: ignore[operator]


def test_a_run_folder_is_created_if_the_first_answer_is_lost(
    s3: S3, dataset_url: str, tmp_path: Path
) -> None:
    job = load_job(write_job_file(tmp_path, dataset_url))
    with s3.proxy.losing_first("PUT", "/run/job.json"):
        folder = RunFolder.create(job.job.out, job)
    assert folder.read_state()["state"] == "queued"
    assert folder.read_job() == job
    with pytest.raises(JobError, match="already contains a run"):
        RunFolder.create(job.job.out, job)


def test_a_fit_may_have_its_run_folder_in_a_store(s3: S3, dataset_url: str, fit_on_disk: Any) -> None:
    from scalelatent.engine.callbacks import Callback

    class Break(Callback):
        def on_pass_end(self, record: dict[str, Any]) -> bool:
            if record["pass"] == 3:
                raise KeyboardInterrupt
            return False

    rows = sl.open_dataset(f"{dataset_url}/train.zarr")
    with s3.proxy.turning_away(0.02):
        with pytest.raises(KeyboardInterrupt):
            fit(rows, run_dir=f"{dataset_url}/run", callbacks=[Break()])
        assert any(name.startswith("state-") for name in locate(f"{dataset_url}/run").keys("engine"))
        with pytest.raises(RunError, match="already holds a fit"):
            fit(rows, run_dir=f"{dataset_url}/run")
        model = fit(rows, run_dir=f"{dataset_url}/run", resume=True)
    np.testing.assert_array_equal(model.W_, fit_on_disk.W_)
    assert [record["pass"] for record in model.history_] == list(range(1, PASSES + 1))
    assert locate(f"{dataset_url}/run/engine/scratch").is_empty()  # The temporary rows are gone.


def test_a_job_runs_from_data_to_report_in_memory(fit_on_disk: Any, tmp_path: Path) -> None:
    base = f"memory://cycle-{uuid.uuid4().hex[:8]}"
    sl.data.make_digits(f"{base}/train.zarr", 600, shard_rows=100)
    result = run_new_job(load_job(write_job_file(tmp_path, base)))
    assert result.warnings == []
    assert_same_bits(f"{base}/run", fit_on_disk)
    assert [r["pass"] for r in result.folder.records("metrics.jsonl")] == list(range(1, PASSES + 1))


@pytest.mark.slow
def test_resume_after_a_kill_gives_the_same_bits(
    s3: S3, dataset_url: str, fit_on_disk: Any, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "scalelatent", "fit", str(write_job_file(tmp_path, dataset_url))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    store, deadline = locate(f"{dataset_url}/run"), time.monotonic() + 90
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if any(name.startswith("state-capsule_estep-000002") for name in store.keys("engine")):
                break
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    finally:
        process.wait(30)
    assert process.returncode == -signal.SIGKILL
    folder = RunFolder.open(f"{dataset_url}/run")
    state = folder.read_state()
    # The process of the fit is dead on this machine, so the run counts as failed before its lease expires.
    assert state["state"] == "failed"
    assert f"scalelatent resume {dataset_url}/run" in state["error"]
    assert not folder.has_model
    assert call("resume", f"{dataset_url}/run")["state"] == "done"
    assert_same_bits(f"{dataset_url}/run", fit_on_disk)
    assert [r["pass"] for r in folder.records("metrics.jsonl")] == list(range(1, PASSES + 1))


@pytest.mark.slow
def test_an_interrupted_run_resumes_in_another_process(
    s3: S3, dataset_url: str, fit_on_disk: Any, tmp_path: Path
) -> None:
    from scalelatent.engine.callbacks import Callback

    class Break(Callback):
        def on_pass_end(self, record: dict[str, Any]) -> bool:
            if record["pass"] == 3:
                raise KeyboardInterrupt
            return False

    job = load_job(write_job_file(tmp_path, dataset_url))
    folder = RunFolder.create(job.job.out, job)
    with pytest.raises(KeyboardInterrupt):
        run_job(job, folder, callbacks=[Break()])
    assert folder.read_state()["state"] == "cancelled"
    again = RunFolder.open(folder.url)
    run_job(again.read_job(), again, resume=True)
    assert_same_bits(folder.url, fit_on_disk)


@pytest.mark.slow
def test_a_store_that_fails_during_a_run_is_reported(
    s3: S3, dataset_url: str, fit_on_disk: Any, tmp_path: Path
) -> None:
    job = load_job(write_job_file(tmp_path, dataset_url))
    folder = RunFolder.create(job.job.out, job)
    no_checkpoint = s3.proxy.denying(lambda method, path: "state-capsule_estep-000004" in path)
    with no_checkpoint, pytest.raises(RunError, match=r"cannot write s3://.*permission denied.*resume"):
        run_job(job, folder)
    assert folder.read_state()["state"] == "failed"
    run_job(job, folder, resume=True)
    assert_same_bits(folder.url, fit_on_disk)


@pytest.mark.slow
def test_the_error_names_an_object_lost_during_a_run_which_can_resume(
    s3: S3, dataset_url: str, tmp_path: Path
) -> None:
    from scalelatent.engine.callbacks import Callback

    key = "train.zarr/x/c/3/0/0"
    kept = locate(dataset_url).read(key)
    assert kept is not None

    class Lose(Callback):
        def on_stage(self, info: dict[str, Any]) -> None:
            locate(dataset_url).delete(key)

    job = load_job(write_job_file(tmp_path, dataset_url))
    folder = RunFolder.create(job.job.out, job)
    with pytest.raises(DataError, match=r"x/c/3/0/0 \(rows 300:400 of 'x'\) is missing"):
        run_job(job, folder, callbacks=[Lose()])
    locate(dataset_url).write(key, kept)
    run_job(job, folder, resume=True)
    assert folder.read_state()["state"] == "done"


LOSE_CREDENTIALS = """
import os
from scalelatent.storage import objects
for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
    del os.environ[name]
objects.forget_connections()
"""


@pytest.mark.slow
@pytest.mark.cluster
def test_a_job_on_a_cluster_uses_the_store(
    s3: S3, dataset_url: str, fit_on_disk: Any, tmp_path: Path
) -> None:
    file = write_job_file(tmp_path, dataset_url, cluster="workers = 2\nthreads = 1\nmemory_limit = '1GiB'")
    with s3.proxy.turning_away(0.02):
        result = run_new_job(load_job(file))
    assert_same_bits(f"{dataset_url}/run", fit_on_disk)
    assert result.warnings == []
    with sl.cluster("local", workers=1, threads=1) as client:
        result.estimator.predict(
            sl.open_dataset(f"{dataset_url}/train.zarr"), out=f"{dataset_url}/labels.zarr"
        )
        assert len(sl.open_dataset(f"{dataset_url}/labels.zarr")) == 600
        client.run(exec, LOSE_CREDENTIALS)
        model = sl.CapsuleRegression(capsule_dim=2, max_iter=2, random_state=0)
        with pytest.raises(RunError, match=r"worker\(s\) .* do not see the run folder s3://.*no credentials"):
            model.fit(sl.open_dataset(f"{dataset_url}/train.zarr"), run_dir=f"{dataset_url}/other")


def test_an_impossible_run_folder_is_refused(s3: S3, tmp_path: Path) -> None:
    sl.data.make_digits(s3.at("train.zarr"), 400)
    job = load_job(write_job_file(tmp_path, s3.url), settings=["job.out=s3://no-such-bucket/run"])
    with pytest.raises(DataError, match="there is no bucket 'no-such-bucket'"):
        run_new_job(job)
    with s3.proxy.denying(lambda method, path: method == "PUT"):
        result = CliRunner().invoke(app, ["fit", str(write_job_file(tmp_path, s3.url))])
    assert result.exit_code == 2
    assert "cannot be written" in result.output
    assert "permission denied" in result.output
    with pytest.raises(JobError, match=r"s3://.*/none does not exist"):
        RunFolder.open(s3.at("none"))
    with pytest.raises(JobError, match=r"train.zarr is a dataset, not a run folder"):
        RunFolder.open(s3.at("train.zarr"))


def test_the_doctor_checks_a_store(s3: S3) -> None:
    from scalelatent.deploy.checks import examine

    def folder(url: str) -> Any:
        return next(finding for finding in examine(url) if finding.check == "folder")

    assert folder(s3.at("runs")).status == "ok"
    assert locate(s3.url + "/runs").is_empty()
    reported = folder("s3://no-such-bucket/runs")
    assert reported.status == "fail"
    assert "there is no bucket 'no-such-bucket'" in reported.found


def test_the_demo_refuses_a_store() -> None:
    result = CliRunner().invoke(app, ["demo", "--out", "s3://bucket/demo"])
    assert result.exit_code == 2
    assert "give a path" in result.output


def test_a_replaced_driver_does_not_change_the_state(fit_on_disk: Any, tmp_path: Path) -> None:
    from scalelatent.engine.callbacks import Callback

    base = f"memory://replaced-{uuid.uuid4().hex[:8]}"
    sl.data.make_digits(f"{base}/train.zarr", 200)
    job = load_job(write_job_file(tmp_path, base))
    folder = RunFolder.create(job.job.out, job)

    class Replace(Callback):
        def on_pass_end(self, record: dict[str, Any]) -> bool:
            held: Any = folder._held
            # Mark the lease as lost, as the heartbeat does if another process has taken the lease.
            held._hold.lost = True
            return False

    with pytest.raises(RunError, match="was taken over by another driver"):
        run_job(job, folder, callbacks=[Replace()])
    assert json.loads(locate(f"{base}/run").read("state.json"))["state"] == "running"  # type: ignore[arg-type]


def test_a_refused_job_leaves_no_objects(s3: S3, tmp_path: Path) -> None:
    sl.data.make_digits(s3.at("train.zarr"), 100)
    with pytest.raises(JobError, match="exceed"):
        run_new_job(load_job(write_job_file(tmp_path, s3.url, data='train_rows = "0:5000"')))
    assert locate(s3.at("run")).is_empty()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("data", "train", "s3://AKIA:my-secret@bucket/train.zarr"),
        ("job", "out", "s3://bucket/run?secret=my-secret"),
        ("data", "secret", "my-secret"),
        ("job", "aws_access_key_id", "my-secret"),
        ("data", "storage_options", {"key": "a", "secret": "my-secret"}),
        ("engine", "token", "my-secret"),
    ],
)
@pytest.mark.parametrize("source", ["file", "environment", "setting"])
def test_credentials_in_a_job_are_refused_and_not_repeated(
    section: str, key: str, value: Any, source: str
) -> None:
    stored: dict[str, Any] = {
        "job": {"out": "run"}, "data": {"train": "a.zarr"}, "model": {"kind": "capsule"}
    }  # fmt: skip
    environ, settings = {}, []
    if source == "file":
        stored.setdefault(section, {})[key] = value
    elif source == "environment":
        environ = {f"SCALELATENT_{section.upper()}__{key.upper()}": str(value)}
    else:
        settings = [f"{section}.{key}={value}"]
    with pytest.raises(JobError, match=r"credential.*AWS_ACCESS_KEY_ID.*never") as error:
        resolve(stored, environ=environ, settings=settings)
    assert "my-secret" not in str(error.value)
