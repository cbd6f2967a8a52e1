"""Fits and transforms called from Python are jobs of the dashboard page, also without a run folder."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent import Callback, ConditionalRBM, MultilayerBootstrapNetwork, monitor
from scalelatent.engine.dask.online_steps import DaskSteps

X = np.random.default_rng(0).integers(0, 2, (3000, 16)).astype(np.uint8)


def fetch_page(client: Any, path: str) -> str:
    with urllib.request.urlopen(
        f"{client.dashboard_link.removesuffix('/status')}{path}", timeout=10
    ) as answer:
        return str(answer.read().decode())


def list_jobs(client: Any) -> list[dict[str, Any]]:
    """Return the jobs that the page shows, including jobs of other tests."""
    return list(json.loads(fetch_page(client, "/scalelatent.json"))["jobs"])


@pytest.fixture
def wait_for_job(client: Any) -> Callable[..., dict[str, Any]]:
    """Return a function that waits until the newest job of a model meets ``until``, and returns this job."""

    def wait(model: str, until: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        deadline = time.monotonic() + 20
        while True:
            found = [j for j in list_jobs(client) if j["model"] == model]
            if found:
                newest = max(found, key=lambda j: str(j["began"]))
                reported = json.loads(fetch_page(client, f"/scalelatent.json?job={newest['id']}"))["job"]
                if until(reported):
                    return reported
            assert time.monotonic() < deadline, found
            time.sleep(0.1)

    return wait


def read_worker_rows(reported: dict[str, Any]) -> int:
    return sum(worker.get("rows", 0) for worker in reported["worker_rows"])


def test_a_fit_without_a_run_folder_is_a_job_that_ends(client: Any, fit: Any, wait_for_job: Any) -> None:
    fit(client)
    reported = wait_for_job(
        "capsule", lambda reported: reported["state"] == "done" and read_worker_rows(reported) >= 5 * 10_000
    )
    assert reported["name"] == "capsule without a run folder"
    assert reported["pass"] == 5

    class Fails(Callback):
        def on_pass_end(self, record: dict[str, Any]) -> None:
            raise ArithmeticError("of a callback")

    with pytest.raises(ArithmeticError):
        fit(client, callbacks=Fails())
    assert wait_for_job("capsule", lambda reported: reported["state"] == "failed")["error"] == "of a callback"


@pytest.mark.parametrize("one", [True, False])
def test_workers_report_the_rows_of_steps(
    client: Any, wait_for_job: Any, one: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(DaskSteps, "_use_one", lambda steps, groups: one)
    m = ConditionalRBM(n_hidden=2, n_epochs=2, batch_size=50, n_chains=2, random_state=0)
    m.fit(X, 1 - X, client=client, run_dir=tmp_path / "run")
    # The last reports arrive up to a second after the fit.
    reported = wait_for_job(
        "crbm", lambda reported: reported["state"] == "done" and read_worker_rows(reported) == 2 * len(X)
    )
    assert len(reported["worker_rows"]) == (1 if one else 2)
    for worker in reported["worker_rows"]:
        # The page counts a step of an online fit as one of the worker's spans (row ranges of tasks).
        assert worker["spans"] == 2 * (len(X) // 50)
        assert worker["last_span"] == "crbm_learn, pass 2, step 60"
    found = re.findall(
        rf'scalelatent_rows_total{{job="{reported["id"]}".*pool="cpu"}} (.*)', fetch_page(client, "/metrics")
    )
    assert [float(count) for count in found] == [2 * len(X)]


@pytest.mark.filterwarnings("ignore:n_clusterings=10")
def test_workers_report_the_shards_of_outputs(client: Any, wait_for_job: Any, tmp_path: Path) -> None:
    m = MultilayerBootstrapNetwork(n_clusterings=10, k1=20, n_components=2, decay=0.5, random_state=0)
    m.fit(X)
    assert monitor.install(client) == ""
    before = {job["id"] for job in list_jobs(client)}
    m.transform(X, out=tmp_path / "out.zarr", client=client)
    reported = wait_for_job(
        "mbn", lambda reported: reported["state"] == "done" and read_worker_rows(reported) == len(X)
    )
    assert {worker["last_span"] for worker in reported["worker_rows"]} == {"mbn_transform, shard 0"}
    # A fit after a transform is a job of its own, which does not continue the job of the transform.
    m.fit(X, client=client)
    reported = wait_for_job(
        "mbn",
        lambda reported: (
            reported["state"] == "done"
            and reported["stage"] != "mbn_transform"
            and read_worker_rows(reported)
        ),
    )
    assert reported["name"] == "mbn without a run folder"
    assert {job["state"] for job in list_jobs(client) if job["id"] not in before} == {"done"}
