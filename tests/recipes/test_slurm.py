"""Scripts of cluster/slurm run on a real SLURM of two virtual nodes, which this module starts.

SLURM sends SIGTERM to the batch script before its time limit. `scancel --batch` imitates this warning.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from scalelatent.deploy.clusters import is_loopback
from scalelatent.deploy.connection import open_client
from scalelatent.deploy.security import make_security
from scalelatent.deploy.serving import read_scheduler_address
from scalelatent.jobs import runner
from scalelatent.jobs.resolve import load_job
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.submit import submit_job
from tests.helpers import WITHOUT_REPORT, read_model_files, wait_for, write_digits_job
from tests.recipes.slurm import NODES, SlurmCluster, list_missing_programs

pytest.importorskip("cryptography")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        bool(list_missing_programs()),
        reason=f"needs SLURM (slurmctld, slurmd, munge): {list_missing_programs()}",
    ),
]
NEEDS_JOBQUEUE = pytest.mark.skipif(find_spec("dask_jobqueue") is None, reason="needs dask-jobqueue")
ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "cluster" / "slurm"
SMALL = ("--cpus-per-task=1", "--mem=1000", "--time=30")
PASSES = 600


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    # The path of the socket of munge may have at most 107 characters, so the folder has a short name.
    folder = tmp_path_factory.mktemp("slurm")
    started = SlurmCluster(folder)
    words = folder / "bin" / "scalelatent"
    words.parent.mkdir()
    words.write_text(f'#!/bin/sh\nexec env PYTHONPATH={ROOT} {sys.executable} -m scalelatent.cli "$@"\n')
    words.chmod(0o755)
    started.environ["PATH"] = f"{words.parent}:{started.environ['PATH']}"
    try:
        started.start()
        yield started
    finally:
        started.close()


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    write_digits_job(folder, PASSES)
    return folder


@pytest.fixture(scope="module")
def expected_files(digits: Path) -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_report", lambda *_: None)
        result = runner.run_new_job(load_job(digits / "job.toml", settings=[f"job.out={digits / 'whole'}"]))
    return read_model_files(result.folder)


@pytest.fixture
def log_option(tmp_path: Path) -> tuple[str, ...]:
    return (f"--output={tmp_path}/%j.log",)


def count_passes(run: Path) -> int:
    return len(RunFolder(str(run)).records("metrics.jsonl")) if (run / "job.json").exists() else 0


def wait_for_state(slurm: SlurmCluster, job: str, *wanted: str, seconds: float = 120) -> dict[str, str]:
    """Wait until a job has one of the wanted states, and return what the controller reports about it."""
    return wait_for(lambda: (reported := slurm.show_job(job))["JobState"] in wanted and reported, seconds)


def test_a_fit_resumes_after_its_walltime(
    slurm: SlurmCluster,
    digits: Path,
    tmp_path: Path,
    log_option: tuple[str, ...],
    expected_files: dict[str, bytes],
) -> None:
    run = tmp_path / "run"
    words = (RECIPES / "fit.sbatch", digits / "job.toml", run)
    job = slurm.submit(*SMALL, *log_option, *map(str, words), TMPDIR=str(tmp_path))
    after = slurm.submit(f"--dependency=afterok:{job}", "--mem=100", *log_option, "--wrap", "true")
    wait_for(lambda: count_passes(run) > 5, 120)
    slurm.call("scancel", "--batch", "--signal=TERM", job)
    wait_for(lambda: slurm.show_job(job)["Restarts"] == "1", 60)
    assert slurm.show_job(after)["JobState"] == "PENDING"
    assert wait_for_state(slurm, job, "COMPLETED", "FAILED")["ExitCode"] == "0:0"
    assert wait_for_state(slurm, after, "COMPLETED", "CANCELLED")["JobState"] == "COMPLETED"
    folder = RunFolder(str(run))
    states = [event["state"] for event in folder.records("events.jsonl") if event["event"] == "state"]
    assert states == ["running", "cancelled", "running", "done"]
    assert read_model_files(folder) == expected_files
    log = (tmp_path / f"{job}.log").read_text()
    assert "stopped; resume from the last checkpoint" in log  # The resumed job appends to this log.
    assert "done" in log
    assert "Traceback" not in log


def test_each_job_of_an_array_has_its_own_setting(slurm: SlurmCluster, digits: Path, tmp_path: Path) -> None:
    run, limit = tmp_path / "run", "model.max_iter=2"
    words = (RECIPES / "fit.sbatch", digits / "job.toml", run, limit, "model.max_iter=3")
    job = slurm.submit(*SMALL, "--array=0-2", f"--output={tmp_path}/%a.log", *map(str, words))
    wait_for(lambda: not slurm.call("squeue", "--noheader", "--jobs", job, check=False).strip(), 120)
    assert [count_passes(tmp_path / f"run-{number}") for number in (0, 1)] == [2, 3]
    assert (
        "job 2 of the array has no setting: 2 are given, for --array=0-1" in (tmp_path / "2.log").read_text()
    )


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("--time=3",), "the time of this job is up at .* give it more, such as --time=6 minutes"),
        (("--time=30", "--export=NONE"), "knows no scalelatent: sbatch --export=SETUP="),
    ],
)
def test_a_job_that_cannot_run_is_refused_before_the_fit(
    slurm: SlurmCluster,
    digits: Path,
    tmp_path: Path,
    log_option: tuple[str, ...],
    words: tuple[str, ...],
    reported: str,
) -> None:
    recipe = (RECIPES / "fit.sbatch", digits / "job.toml", tmp_path / "run")
    bare = {"PATH": "/usr/bin:/bin"}
    job = slurm.submit(
        *SMALL[:2], *words, *log_option, *map(str, recipe), **(bare if "--export=NONE" in words else {})
    )
    assert wait_for_state(slurm, job, "FAILED", "COMPLETED")["ExitCode"] == "2:0"
    assert re.search(reported, (tmp_path / f"{job}.log").read_text())
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def address() -> str:
    """Return the address of this machine in the network; skip the test if it is a loopback address."""
    from distributed.utils import get_ip

    found = get_ip()
    if is_loopback(found):
        pytest.skip("needs an address of this machine that is not loopback")
    return found


def test_a_job_survives_a_failed_node_and_ends_regularly(
    slurm: SlurmCluster, digits: Path, tmp_path: Path, log_option: tuple[str, ...], address: str
) -> None:
    folder, run = tmp_path / "cluster", tmp_path / "run"
    recipe = (str(RECIPES / "cluster.sbatch"), str(folder))
    refused = slurm.submit(*SMALL, *log_option, *recipe, ADDRESS="127.0.0.1")
    job = slurm.submit(*SMALL, *log_option, *recipe, ADDRESS=address)
    after = slurm.submit(f"--dependency=afterok:{job}", "--mem=100", *log_option, "--wrap", "true")
    file = folder / "scheduler.json"
    wait_for(lambda: file.exists() and file.stat().st_size, 120)
    assert "is a loopback address" in (tmp_path / f"{refused}.log").read_text()
    tls = {"ca": "ca.pem", "cert": "client-cert.pem", "key": "client-key.pem"}
    security = make_security(**{name: folder / "tls" / pem for name, pem in tls.items()})
    with open_client(read_scheduler_address(None, file, 10), security) as client:
        client.wait_for_workers(2, timeout=120)
        client.run(exec, WITHOUT_REPORT)
        long = load_job(digits / "job.toml", settings=[f"job.out={run}", "model.max_iter=100000"])
        submit_job(long, client=client)
        wait_for(lambda: count_passes(run) > 5, 120)
        slurm.kill_node(NODES[1])
        wait_for(lambda: slurm.read_node_state(NODES[1]).startswith("down"), 120)
        wait_for(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == 1, 60)
        seen = count_passes(run)
        wait_for(lambda: count_passes(run) > seen + 5, 120)
    assert slurm.show_job(job)["JobState"] == "RUNNING"
    slurm.call("scancel", "--batch", "--signal=TERM", job)
    assert wait_for_state(slurm, job, "COMPLETED", "FAILED", "NODE_FAIL")["ExitCode"] == "0:0"
    slurm.start_node(NODES[1])
    assert wait_for_state(slurm, after, "COMPLETED", "CANCELLED")["JobState"] == "COMPLETED"
    # The log also has many lines of Dask about lost workers, so only the line of the run is compared.
    assert "cancelled; resume with: scalelatent resume" in (tmp_path / f"{job}.log").read_text()
    ended = RunFolder(str(run)).records("events.jsonl")[-1]
    assert (ended["state"], "traceback" in ended) == ("cancelled", False)


@NEEDS_JOBQUEUE
def test_a_rejection_by_slurm_is_one_line(slurm: SlurmCluster, tmp_path: Path, address: str) -> None:
    words = ("--host", address, "--cores", "1", "--memory", "1GB", "--queue", "nowhere")
    ended = subprocess.run(
        [sys.executable, str(RECIPES / "jobqueue_cluster.py"), str(tmp_path / "cluster"), *words],
        env=slurm.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: SLURM refuses the jobs of the workers (sbatch: error: ")
    assert "nowhere" in line


@NEEDS_JOBQUEUE
def test_workers_of_jobqueue_join_and_end_with_their_process(
    slurm: SlurmCluster, tmp_path: Path, address: str
) -> None:
    """Two SLURM jobs run workers, and end after SIGTERM to the process that requested the workers."""
    words: list[Any] = [
        "--host", address, "--cores", "1", "--memory", "1GB", "--jobs", "2", "--walltime", "30",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, str(RECIPES / "jobqueue_cluster.py"), str(tmp_path), *words],
        env=slurm.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        running = ("squeue", "--noheader", "--name=dask-worker", "--states=RUNNING")
        wait_for(lambda: len(slurm.call(*running).splitlines()) == 2, 120)
    finally:
        process.terminate()
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 0
    assert output.startswith("dashboard http://127.0.0.1:")
    wait_for(lambda: not slurm.call("squeue", "--noheader", "--name=dask-worker").strip(), 60)
