"""Real fits by the command line write all files, and have the same bits after an interruption."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from scalelatent.cli import main
from scalelatent.data import make_digits
from scalelatent.jobs import runner

JOB = """
[job]
name = "digits"
seed = 1
out = "run"
[data]
train = "train.zarr"
validation = "test.zarr"
test = "test.zarr"
[model]
kind = "capsule"
capsule_dim = 4
max_iter = {max_iter}
nu_schedule = "none"
"""


def run_command(*arguments, cwd, code=0):
    """Run the command line in this process; check its exit code ``code``, and return its output."""
    out, err = io.StringIO(), io.StringIO()
    said = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with contextlib.chdir(cwd), said[0], said[1], pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert (ended.value.code or 0) == code, (ended.value.code, out.getvalue(), err.getvalue())
    return SimpleNamespace(out=out.getvalue(), err=err.getvalue(), json=lambda: json.loads(out.getvalue()))


@pytest.fixture(scope="module")
def digits_folder(tmp_path_factory):
    """Return a folder with datasets of digits and two job files."""
    folder = tmp_path_factory.mktemp("digits")
    make_digits(str(folder / "train.zarr"), 20_000, base_rows=(0, 1500))
    make_digits(str(folder / "test.zarr"), 297, base_rows=(1500, 1797))
    (folder / "job.toml").write_text(JOB.format(max_iter=12))
    (folder / "long.toml").write_text(JOB.format(max_iter=60))
    return folder


@contextlib.contextmanager
def without_report():
    """Write no report inside this context, because figures take most of the time and are not tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_report", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def undisturbed(digits_folder):
    """Fit the job long.toml without interruption, and return the files of its model."""
    with without_report():
        run_command("fit", "long.toml", "--out", "undisturbed", cwd=digits_folder)
    return read_files(digits_folder / "undisturbed" / "model.zarr")


def read_files(folder: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    assert found
    return found


@contextlib.contextmanager
def start_command(*arguments, cwd):
    """Start a command line in its own process group, and kill the group at the end of the context."""
    command = [sys.executable, "-m", "scalelatent", *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        process.stdout.close()


def wait_for_passes(run: Path, process, passes: int) -> None:
    """Wait until a run has reported ``passes`` passes; fail if its process ends first, or after 120 s."""
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= passes:
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    raise AssertionError(f"no {passes} passes within 120 s")


def stop_process(process, number: int) -> str:
    """Send a signal to the process and its children, as a terminal does, and return their output."""
    os.killpg(process.pid, number)
    return process.communicate(timeout=60)[0]


@pytest.mark.slow
def test_a_job_from_plan_to_report(digits_folder):
    planned = run_command(
        "plan", "job.toml", "--set", "model.capsule_dim=2", "--json", cwd=digits_folder
    ).json()
    assert planned["job"]["origins"]["model.capsule_dim"] == "command line"
    assert planned["plan"]
    text = run_command("plan", "job.toml", cwd=digits_folder).out
    assert "model.capsule_dim" in text
    assert "job file" in text
    assert not (digits_folder / "run").exists()

    reported = run_command("fit", "job.toml", "--json", cwd=digits_folder).json()
    assert reported["state"] == "done"
    assert reported["test_error"] < 0.3
    run = digits_folder / "run"
    for name in (
        "job.json",
        "state.json",
        "metrics.jsonl",
        "events.jsonl",
        "model.zarr",
        "report/index.html",
    ):
        assert (run / name).exists(), name
    assert reported["report"] == str(run / "report" / "index.html")

    again = run_command("fit", "job.toml", cwd=digits_folder, code=2)
    assert "already contains a run" in again.err
    assert "--out" in again.err

    state = run_command("status", "run", "--json", cwd=digits_folder).json()
    assert {"id", "state", "pass", "objective", "error", "run"} <= set(state)
    assert run_command("status", "--json", cwd=digits_folder).json()[0]["id"] == state["id"]
    assert "nothing to resume" in run_command("resume", "run", cwd=digits_folder).err
    ignored = run_command("resume", "run", "--set", "cluster.workers=2", cwd=digits_folder, code=2).err
    assert "is done, so --set cluster.workers=2 cannot change it" in ignored
    assert "scalelatent fit JOB --set" in ignored

    score = run_command(
        "score", "run", "test.zarr", "--metric", "error", "--metric", "log_loss", "--json", cwd=digits_folder
    )
    assert score.json()["error"] == pytest.approx(reported["test_error"])
    saved = run_command(
        "score", "run/model.zarr", "test.zarr", "--metric", "error", "--json", cwd=digits_folder
    )
    assert saved.json()["error"] == score.json()["error"]

    run_command("predict", "run", "test.zarr", "--out", "labels.zarr", cwd=digits_folder)
    assert run_command("data", "info", "labels.zarr", "--json", cwd=digits_folder).json()["rows"] == 297
    run_command("transform", "run", "test.zarr", "--out", "latent.zarr", "--rows", "0:100", cwd=digits_folder)
    latent = run_command("data", "info", "latent.zarr", "--json", cwd=digits_folder).json()
    assert (latent["rows"], latent["features"]) == (100, 80)  # 10 pairs of capsules, each of 4 numbers.
    assert (
        "--overwrite"
        in run_command("predict", "run", "test.zarr", "--out", "labels.zarr", cwd=digits_folder, code=2).err
    )
    run_command("predict", "run", "test.zarr", "--out", "labels.zarr", "--overwrite", cwd=digits_folder)

    model = run_command("model", "info", "run", "--json", cwd=digits_folder).json()
    assert model["model"] == "CapsuleRegression"
    assert model["parameters"]["capsule_dim"] == 4
    (run / "report" / "index.html").unlink()
    run_command("report", "run", cwd=digits_folder)
    assert (run / "report" / "index.html").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_an_interrupted_job_resumes_to_the_same_bits(digits_folder, undisturbed, number):
    run = digits_folder / f"stopped-{number}"
    with start_command("fit", "long.toml", "--out", run, cwd=digits_folder) as process:
        wait_for_passes(run, process, 5)
        said = stop_process(process, number)
    if number == signal.SIGINT:
        assert process.returncode == 130, said
        assert f"scalelatent resume {run}" in said
        assert "Traceback" not in said
    state = run_command("status", run, "--json", cwd=digits_folder).json()
    assert state["state"] == ("cancelled" if number == signal.SIGINT else "failed")
    assert "scalelatent resume" in state["error"]
    with without_report():
        reported = run_command("resume", run, "--json", cwd=digits_folder).json()
    assert reported["state"] == "done"
    assert read_files(run / "model.zarr") == undisturbed
    passes = [json.loads(line)["pass"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert passes == sorted(set(passes))


@pytest.mark.cluster
@pytest.mark.slow
def test_a_job_interrupted_on_a_cluster_resumes_in_one_process(digits_folder, undisturbed):
    run = digits_folder / "stopped-cluster"
    with start_command(
        "fit", "long.toml", "--out", run, "--set", "cluster.workers=2", cwd=digits_folder
    ) as process:
        wait_for_passes(run, process, 5)
        said = stop_process(process, signal.SIGINT)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "dashboard: http" in said
    with without_report():
        run_command("resume", run, "--set", "cluster.workers=none", cwd=digits_folder)
    assert read_files(run / "model.zarr") == undisturbed


def test_a_job_that_cannot_fit_is_refused(digits_folder):
    settings = ("--set", "cluster.workers=2", "--set", "cluster.memory_limit=20MiB")
    said = run_command("plan", "job.toml", *settings, cwd=digits_folder, code=2)
    assert "memory" in said.err


def test_the_error_names_unknown_keys(digits_folder):
    said = run_command(
        "fit", "job.toml", "--set", "model.capsule_dims=4", "--out", "never", cwd=digits_folder, code=2
    )
    assert "did you mean 'capsule_dim'" in said.err
    assert not (digits_folder / "never").exists()


def test_invalid_values_are_refused_before_work_starts(digits_folder):
    said = run_command(
        "fit", "job.toml", "--set", "model.capsule_dim=0", "--out", "bad", cwd=digits_folder, code=2
    )
    assert said.err.splitlines()[-1].startswith("error: [model] capsule_dim=0")
    assert not (digits_folder / "bad").exists()
    grid = ["--set", "engine.block_rows=4096", "--set", "engine.leaf_rows=5000", "--out", "bad"]
    reported = "error: leaf_rows=5000 is not a multiple of block_rows=4096: set [engine] leaf_rows to 8192"
    assert run_command("fit", "job.toml", *grid, cwd=digits_folder, code=2).err.splitlines()[-1] == reported
    assert not (digits_folder / "bad").exists()
    (digits_folder / "bad").mkdir()
    run_command("fit", "job.toml", "--set", "data.train=none.zarr", "--out", "bad", cwd=digits_folder, code=2)
    assert list((digits_folder / "bad").iterdir()) == []


@pytest.mark.cluster
def test_the_demo_fits_reports_and_names_the_next_steps(tmp_path):
    reported = run_command("demo", "--rows", 5000, "--json", cwd=tmp_path).json()
    folder = tmp_path / "scalelatent-demo"
    assert reported["state"] == "done"
    assert reported["test_error"] < 0.2
    assert reported["peak_worker_bytes"] > 2**20
    assert reported["run"] == str(folder / "run")
    assert Path(reported["report"]).is_file()
    said = run_command("demo", "--rows", 5000, cwd=tmp_path, code=2)
    assert "--overwrite" in said.err
    assert "already contains a demo" in said.err
    (folder / "notes.txt").write_text("mine")
    from scalelatent.jobs.demo import prepare

    prepare(folder, rows=2000, overwrite=True)
    assert (folder / "notes.txt").read_text() == "mine"
    assert not (folder / "run").exists()


def test_a_demo_that_was_stopped_before_it_was_ready_starts_again(tmp_path):
    from scalelatent.errors import JobError
    from scalelatent.jobs.demo import MARKER, prepare

    (tmp_path / MARKER).write_text("")
    (tmp_path / "train.zarr").mkdir()
    prepare(tmp_path, rows=1000)
    with pytest.raises(JobError, match="already contains a demo"):
        prepare(tmp_path, rows=1000)


def test_the_demo_changes_no_other_folder(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    said = run_command("demo", "--rows", 2000, "--out", tmp_path, "--overwrite", cwd=tmp_path, code=2)
    assert "not empty" in said.err
    assert (tmp_path / "thesis.txt").read_text() == "precious"
