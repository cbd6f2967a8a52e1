"""Submitted jobs may have data and run folder in an object store, so workers need no shared disk."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.errors import JobError
from scalelatent.jobs import control
from scalelatent.jobs.resolve import resolve
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.runner import run_new_job
from scalelatent.jobs.submit import resubmit, submit_job
from tests.helpers import WITHOUT_REPORT, wait_for

from .conftest import S3, point_to

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def workers(_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start two workers with credentials in their environment, and yield their client."""
    from distributed import Client, LocalCluster

    with pytest.MonkeyPatch.context() as patch:
        point_to(patch, _server[0], tmp_path_factory.mktemp("aws"))
        cluster = LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0",
            memory_limit=0, silence_logs=50,
        )  # fmt: skip
        try:
            with Client(cluster, set_as_default=False) as client:
                yield client
        finally:
            with suppress(KeyError):
                cluster.close(timeout=60)


@pytest.fixture
def client(workers: Any, s3: S3) -> Any:
    """Return the client of ``workers`` when both workers are alive; they write no reports."""
    workers.wait_for_workers(2, timeout=60)
    workers.run(exec, WITHOUT_REPORT)
    return workers


@pytest.fixture
def job(s3: S3) -> Callable[..., Any]:
    sl.data.make_digits(s3.at("train.zarr"), 600, shard_rows=100)

    def make(name: str = "run", passes: int = 6) -> Any:
        stored = {
            "job": {"out": s3.at(name), "seed": 3},
            "data": {"train": s3.at("train.zarr")},
            "model": {"kind": "capsule", "capsule_dim": 2, "max_iter": passes, "nu_schedule": "none"},
            "engine": {"leaf_rows": 64, "block_rows": 64},
        }
        return resolve(stored, environ={})

    return make


@pytest.mark.timeout(240)
def test_a_job_survives_its_driver_and_is_cancelled_and_resumed(client: Any, job: Any) -> None:
    folder = RunFolder.open(submit_job(job(passes=300), client=client).run)
    wait_for(lambda: len(folder.records("metrics.jsonl")) > 2)
    with pytest.raises(JobError, match=r"already contains a run \(state: running\)"):
        submit_job(job(), client=client)
    driver = folder.read_state()["driver"]
    os.kill(client.run(os.getpid, workers=[driver])[driver], signal.SIGKILL)
    wait_for(lambda: folder.read_state()["driver"] != driver)
    # A new process of the fit does not wait until the lease expires, because the old one is known to be dead.
    count = len(folder.records("metrics.jsonl"))
    wait_for(lambda: len(folder.records("metrics.jsonl")) > count)
    begin = time.monotonic()
    assert control.cancel_job(folder)["state"] == "cancelled"
    # The fit looks for requests to cancel every two seconds, because each request to a store costs money.
    assert time.monotonic() - begin < 6
    assert folder.read_progress()["rows_total"] == 600
    assert control.find_job(folder.url).id == folder.id
    resubmit(folder.read_job(), folder, client=client)
    wait_for(lambda: folder.read_state()["state"] == "running")
    control.cancel_job(folder)


def test_a_submitted_job_has_the_bits_of_a_local_one(
    client: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.jobs import runner

    folder = RunFolder.open(submit_job(job(), client=client).run)
    state = control.follow(folder)
    assert (state["state"], state["error"]) == ("done", None)
    monkeypatch.setattr(runner, "_report", lambda *_: None)
    here = run_new_job(job("here"))
    np.testing.assert_array_equal(sl.load_model(folder.model_url).W_, here.estimator.W_)
