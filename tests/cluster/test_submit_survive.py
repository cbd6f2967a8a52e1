"""A job gives the same bits if drivers (tasks of fits) or workers die, or if it resumes after a failure."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from scalelatent.deploy.connection import open_client
from scalelatent.errors import JobError
from scalelatent.jobs import control
from scalelatent.jobs.resolve import load_job, override
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.submit import resubmit, submit_job
from tests.cluster.processes import Processes
from tests.helpers import WITHOUT_REPORT, read_model_files, wait_for, write_digits_job

pytestmark = pytest.mark.slow
PASSES = 120


@pytest.fixture(scope="module")
def dataset_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("survive")
    write_digits_job(folder, PASSES)
    return folder


def list_passes(folder: RunFolder) -> int:
    return len(folder.records("metrics.jsonl"))


def list_events(folder: RunFolder, name: str) -> list[dict[str, Any]]:
    return [record for record in folder.records("events.jsonl") if record["event"] == name]


@pytest.mark.timeout(240)
def test_a_job_survives_the_deaths_of_its_drivers_workers(
    dataset_folder: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """Three workers that run the driver (the task of the fit) are killed; Dask allows one death per task."""
    import dask
    from distributed import Client, LocalCluster

    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0",
            memory_limit=0, silence_logs=50,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):  # fmt: skip
        client.run(exec, WITHOUT_REPORT)
        job = load_job(dataset_folder / "job.toml", settings=[f"job.out={tmp_path / 'run'}"])
        folder = RunFolder.open(submit_job(job, client=client).run)
        killed: list[str] = []
        for _ in range(3):
            wait_for(lambda: list_passes(folder) > 3 + 10 * len(killed))
            driver = folder.read_state()["driver"]
            assert driver not in killed
            pid = client.run(os.getpid, workers=[driver])[driver]
            os.kill(pid, signal.SIGKILL)
            killed.append(driver)
            wait_for(lambda: folder.read_state()["driver"] not in killed, 90)
        state = control.follow(folder)
    assert (state["state"], state["error"]) == ("done", None)
    assert read_model_files(folder) == undisturbed
    assert [record["pass"] for record in folder.records("metrics.jsonl")] == list(range(1, PASSES + 1))
    drivers = [event["driver"] for event in list_events(folder, "state") if event["state"] == "running"]
    assert len(drivers) == 4
    assert len(list_events(folder, "resumed")) == 3
    assert len(list_events(folder, "submitted")) == 1


@pytest.mark.timeout(240)
def test_a_job_resumes_on_another_scheduler_after_a_kill(
    dataset_folder: Path, tmp_path: Path, undisturbed: dict[str, bytes], processes: Processes
) -> None:
    address, scheduler = processes.scheduler()
    worker = processes.worker(address)
    job = load_job(dataset_folder / "job.toml", settings=[f"job.out={tmp_path / 'run'}"])
    folder = RunFolder.open(submit_job(job, scheduler=address, wait=60).run)
    wait_for(lambda: list_passes(folder) > 5)
    scheduler.kill()
    scheduler.wait(30)
    # The process of the fit notices the loss of its scheduler, and writes the state into the run folder.
    state = wait_for(lambda: (s := folder.read_state())["state"] != "running" and s, 90)
    assert state["state"] == "failed"
    assert state["error"].startswith(f"the scheduler {address} was lost")
    assert f"scalelatent resume {folder.url}" in state["error"]
    assert control.find_job(folder.id, below=tmp_path).url == folder.url
    with pytest.raises(JobError, match="no program listens there"):
        resubmit(folder.read_job(), folder)
    worker.wait(60)

    address, _ = processes.scheduler()
    processes.worker(address)
    with open_client(address) as client:
        client.wait_for_workers(1, timeout=60)
        client.run(exec, WITHOUT_REPORT)
    known = list_passes(folder)
    resubmit(override(folder.read_job(), [f'cluster.scheduler="{address}"']), folder)
    state = control.follow(folder)
    assert (state["state"], state["error"], state["scheduler"]) == ("done", None, address)
    assert read_model_files(folder) == undisturbed
    assert [record["pass"] for record in folder.records("metrics.jsonl")] == list(range(1, PASSES + 1))
    resumed = list_events(folder, "resumed")[-1]["pass"]
    assert 5 < resumed <= known + 1


@pytest.mark.timeout(240)
def test_a_retired_worker_hands_over_the_driver(
    dataset_folder: Path, tmp_path: Path, undisturbed: dict[str, bytes], mortal_cluster: Any
) -> None:
    mortal_cluster.run(exec, WITHOUT_REPORT)
    job = load_job(dataset_folder / "job.toml", settings=[f"job.out={tmp_path / 'run'}"])
    folder = RunFolder.open(submit_job(job, client=mortal_cluster).run)
    wait_for(lambda: list_passes(folder) > 5)
    first = folder.read_state()["driver"]
    mortal_cluster.retire_workers([first], close_workers=True)
    wait_for(lambda: folder.read_state()["driver"] != first, 90)
    state = control.follow(folder)
    assert (state["state"], state["error"]) == ("done", None)
    assert read_model_files(folder) == undisturbed
