"""What a job would fail of on this cluster, said before it is submitted.

Workers are asked, not this machine: a path may exist on one and not on the other.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scalelatent.deploy.checks import no_workers, require
from scalelatent.deploy.probes import Wanted
from scalelatent.engine.dask.asking import address_of, ask_workers, worker_infos
from scalelatent.errors import JobError, PlanError, ScalelatentError
from scalelatent.storage.disk import is_local

from .job_callbacks import callbacks_trouble
from .planning import PlannedCluster, plan_job, plan_lines
from .spec import Job

if TYPE_CHECKING:
    from distributed import Client

    from .runfolder import RunFolder

__all__ = ["check_cluster", "check_folder"]

PLAN_SECONDS = 120.0
DATASETS = ("train", "validation", "test", "target", "validation_target", "test_target")


def check_cluster(
    client: Client, job: Job, *, wait: float = 0.0, tell: Callable[[str], None] = lambda line: None
) -> None:
    """Refuse a job that this cluster cannot run, after waiting for its first worker."""
    _wait_for_worker(client, wait, tell)
    datasets = {f"[data] {name}": getattr(job.data, name) for name in DATASETS}
    # An address alone does not open them: the plan does, on a worker.
    if job.data.storage_options is not None:
        datasets = {name: url for name, url in datasets.items() if url is not None and is_local(url)}
    wanted = Wanted(
        device=job.estimator_params().get("device") or "auto",
        datasets={name: url for name, url in datasets.items() if url is not None},
        scratch={} if job.job.scratch is None else {"[job] scratch": job.job.scratch},
    )
    require(client, ("workers", "device", "datasets", "scratch"), wanted)
    if job.callbacks:
        _check_callbacks(client, job)
    _check_plan(client, job, tell)


def check_folder(client: Client, folder: RunFolder) -> None:
    """Refuse a run folder that some worker does not see, or cannot write."""
    require(client, ("folder",), Wanted(folder=folder.url))


def _wait_for_worker(client: Client, wait: float, tell: Callable[[str], None]) -> None:
    deadline = time.monotonic() + wait
    waiting = False
    while not worker_infos(client):
        if time.monotonic() >= deadline:
            raise no_workers(address_of(client), wait).refusal()
        if not waiting:
            waiting = True
            tell(f"waiting up to {wait:g} s for a worker")
        time.sleep(0.1)


def _check_callbacks(client: Client, job: Job) -> None:
    """Refuse callbacks that some worker cannot make: each may drive the job."""
    for address, trouble in ask_workers(client, callbacks_trouble, job.callbacks).items():
        if isinstance(trouble, str) and trouble:
            raise JobError(f"{trouble} (where worker {address} runs, which may drive the job)")


def _check_plan(client: Client, job: Job, tell: Callable[[str], None]) -> None:
    """Let one worker open the data at the rows the job names, and plan the fit for the workers there are."""
    from distributed import KilledWorker

    future = client.submit(
        plan_on_worker, job.to_dict(), _capacity(client), key=f"scalelatent-plan-{uuid.uuid4().hex[:8]}",
        pure=False, priority=100,
    )  # fmt: skip
    try:
        trouble, lines = future.result(timeout=PLAN_SECONDS)
    except TimeoutError:
        raise JobError(
            f"no worker of {address_of(client)} had time to look at the job within "
            f"{PLAN_SECONDS:.0f} s: they are busy, or hang; submit again later"
        ) from None
    except KilledWorker as error:
        raise JobError(
            f"the workers of {address_of(client)} died while one opened the data of the job ({error}): see "
            "their logs; most often it is their memory"
        ) from None
    finally:
        future.release()
    if trouble is not None:
        kind, text = trouble
        raise (PlanError if kind == "PlanError" else JobError)(text)
    for line in lines:
        tell(line)


def _capacity(client: Client) -> dict[str, Any]:
    return {
        address: {key: worker[key] for key in ("nthreads", "memory_limit", "resources")}
        for address, worker in worker_infos(client).items()
    }


def plan_on_worker(
    stored: dict[str, Any], workers: dict[str, Any]
) -> tuple[tuple[str, str] | None, list[str]]:
    """Plan a job: (kind and text of the error, or None; the plan in words)."""
    try:
        needs = plan_job(Job.from_dict(stored), client=PlannedCluster(workers))  # type: ignore[arg-type]
    except ScalelatentError as error:
        return (type(error).__name__, str(error)), []
    return None, plan_lines(needs)
