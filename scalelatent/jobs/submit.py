"""Submit a job to a cluster, where the job runs without the submitting process.

The client checks versions, workers, resources and the paths that the workers see. The client then creates the
run folder and submits one task, the driver (`scalelatent.jobs.clusterdriver`). The run folder records all
progress, and the scheduler's metadata maps each job id to its folder.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from scalelatent.deploy.checks import check_versions, no_workers, require_checks
from scalelatent.deploy.connection import dashboard_url, default_scheduler
from scalelatent.deploy.probes import Requirements
from scalelatent.engine.dask.timed_calls import address_of, ask_scheduler, ask_workers, worker_infos
from scalelatent.errors import JobError, PlanError, RunError
from scalelatent.monitor.times import time_text
from scalelatent.storage.disk import is_local

from .clusterdriver import drive, driver_key, plan_on_worker
from .control import JOBS_METADATA
from .job_callbacks import find_callback_problem
from .job_cluster import connect
from .resolve import override
from .run_record import add_dashboard_page, publish_state
from .runfolder import RunFolder
from .spec import Job

if TYPE_CHECKING:
    from distributed import Client

ACCEPT_SECONDS = 30.0
PLAN_SECONDS = 120.0
WORKER_SECONDS = 10.0
# Seconds that a step may take before `submit` reports what the step waits for.
SILENT_SECONDS = 1.0
DATASET_KEYS = ("train", "validation", "test", "target", "validation_target", "test_target")


@dataclass(frozen=True)
class Submitted:
    """Job id, run folder, scheduler address and dashboard address of a submitted job."""

    id: str
    run: str
    scheduler: str
    dashboard: str

    def to_dict(self) -> dict[str, str]:
        return {**asdict(self), "state": "queued"}


def submit_job(
    job: Job,
    *,
    scheduler: str | None = None,
    client: Client | None = None,
    wait: float = WORKER_SECONDS,
    print_line: Callable[[str], None] = lambda line: None,
) -> Submitted:
    """Submit a job to a running cluster, where the job runs without this process."""
    job = _with_scheduler(job, scheduler, client).with_seed()
    RunFolder.unused(job.job.out)
    with ExitStack() as stack:
        found = _connect(stack, job, client, print_line)
        check_cluster(found, job, wait=wait, print_line=print_line)
        existed = is_local(job.job.out) and os.path.isdir(job.job.out)
        folder = RunFolder.create(job.job.out, job)
        try:
            check_folder(found, folder, print_line)
            return _submit_driver(found, folder, job, print_line)
        except BaseException:
            folder.remove_if_unused(existed)
            raise


def resubmit(
    job: Job,
    folder: RunFolder,
    *,
    client: Client | None = None,
    wait: float = WORKER_SECONDS,
    print_line: Callable[[str], None] = lambda line: None,
) -> Submitted:
    """Submit an interrupted run again; the run resumes from its checkpoints."""
    from .runner import check_changes  # this import loads models, which a first submit does not need

    check_changes(job, folder)
    job = _with_scheduler(job, None, client)
    with folder.lock():
        pass  # raises an error if another process drives the job
    with ExitStack() as stack:
        try:
            found = _connect(stack, job, client, print_line)
        except JobError as error:
            error.add_note(
                f"(if its cluster has ended: scalelatent resume {folder.url} with --scheduler-file FILE or "
                "--scheduler URL of another cluster, or with --here)"
            )
            raise
        check_cluster(found, job, wait=wait, print_line=print_line)
        check_folder(found, folder, print_line)
        return _submit_driver(found, folder, job, print_line)


@contextmanager
def _report_waiting(awaited: str, print_line: Callable[[str], None]) -> Iterator[None]:
    """Report what a step waits for if the step takes longer than ``SILENT_SECONDS``."""
    timer = threading.Timer(SILENT_SECONDS, print_line, (f"waiting for {awaited}",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _connect(stack: ExitStack, job: Job, client: Client | None, print_line: Callable[[str], None]) -> Client:
    """Return a client of the job's cluster; ``stack`` closes the client."""
    with _report_waiting(f"an answer of the scheduler {job.cluster.scheduler}", print_line):
        found = stack.enter_context(connect(job, client, print_line))
    assert found is not None
    return found


def _with_scheduler(job: Job, scheduler: str | None, client: Client | None) -> Job:
    address = scheduler or (address_of(client) if client is not None else job.cluster.scheduler)
    address = address or default_scheduler()
    if address is None:
        raise JobError(
            "submit needs a running cluster; give --scheduler URL (a scheduler prints its address when it "
            "starts), or [cluster] scheduler in the job file. To start a cluster on this machine: "
            "scalelatent cluster up. To run the job in this process: scalelatent fit"
        )
    return override(job, [f'cluster.scheduler="{address}"'])


def _submit_driver(
    client: Client, folder: RunFolder, job: Job, print_line: Callable[[str], None]
) -> Submitted:
    """Submit the driver task, and wait until the scheduler has accepted it."""
    address = str(job.cluster.scheduler)
    with folder.lock():
        folder.write_job(job)
        start = folder.begin("queued", submitted=time_text(), scheduler=address, driver=None)
        folder.event("submitted", scheduler=address, host=socket.gethostname(), start=start)
    state = folder.read_state()
    identity = state["id"]
    known = {"run": folder.url, "name": job.job.name, "kind": job.kind, "submitted": state["submitted"]}
    client.set_metadata([JOBS_METADATA, identity], known)
    add_dashboard_page(client)
    publish_state(client, folder, job, state)
    key = driver_key(identity, start)
    future = client.submit(drive, folder.url, start, key=key, pure=False, priority=100)
    with _report_waiting(f"the scheduler {address} to accept the job", print_line):
        _wait_until_accepted(client, key)
    future.release()
    return Submitted(identity, folder.url, address, dashboard_url(client))


def _wait_until_accepted(client: Client, key: str) -> None:
    """Wait until the scheduler has the task, and let it keep the task after this client closes."""
    from scalelatent.engine.dask.hooks import hold_task

    deadline = time.monotonic() + ACCEPT_SECONDS
    while not ask_scheduler(client, hold_task, key):
        if time.monotonic() > deadline:
            raise RunError(
                f"the scheduler {address_of(client)} did not accept the job within {ACCEPT_SECONDS:.0f} s; "
                "read its log, and submit again"
            )
        time.sleep(0.02)


# The checks below find reasons why a job would fail on this cluster. The checks run on the workers, because a
# path may exist on this machine and not on a worker.


def check_cluster(
    client: Client, job: Job, *, wait: float = 0.0, print_line: Callable[[str], None] = lambda line: None
) -> None:
    """Refuse a job that this cluster cannot run, after waiting for its first worker."""
    with _report_waiting("the versions of the packages on the scheduler and on each worker", print_line):
        check_versions(client, job.cluster.allow_mismatch, print_line)
    _wait_for_worker(client, wait, print_line)
    datasets = {f"[data] {name}": getattr(job.data, name) for name in DATASET_KEYS}
    # Datasets with storage options cannot be checked by address; the plan opens these datasets on a worker.
    if job.data.storage_options is not None:
        datasets = {name: url for name, url in datasets.items() if url is not None and is_local(url)}
    requirements = Requirements(
        device=job.estimator_params().get("device") or "auto",
        datasets={name: url for name, url in datasets.items() if url is not None},
        scratch={} if job.job.scratch is None else {"[job] scratch": job.job.scratch},
    )
    with _report_waiting("each worker to check the data and the device", print_line):
        require_checks(client, ("workers", "device", "datasets", "scratch"), requirements)
    if job.callbacks:
        with _report_waiting("each worker to create the callbacks", print_line):
            _check_callbacks(client, job)
    with _report_waiting("a worker to open the data and to plan the fit", print_line):
        _check_plan(client, job, print_line)


def check_folder(client: Client, folder: RunFolder, print_line: Callable[[str], None]) -> None:
    """Refuse a run folder that some worker does not see, or cannot write."""
    with _report_waiting(f"each worker to write to the run folder {folder.url}", print_line):
        require_checks(client, ("folder",), Requirements(folder=folder.url))


def _wait_for_worker(client: Client, wait: float, print_line: Callable[[str], None]) -> None:
    deadline = time.monotonic() + wait
    waiting = False
    while not worker_infos(client):
        if time.monotonic() >= deadline:
            raise no_workers(address_of(client), wait).refusal()
        if not waiting:
            waiting = True
            print_line(f"waiting up to {wait:g} s for a worker")
        time.sleep(0.1)


def _check_callbacks(client: Client, job: Job) -> None:
    """Refuse callbacks that some worker cannot create, because any worker may drive the job."""
    for address, trouble in ask_workers(client, find_callback_problem, job.callbacks).items():
        if isinstance(trouble, str) and trouble:
            raise JobError(f"{trouble} (on worker {address}, which may drive the job)")


def _check_plan(client: Client, job: Job, print_line: Callable[[str], None]) -> None:
    """Let one worker open the rows of the job and plan the fit; print the plan, or raise its error."""
    from distributed import KilledWorker

    future = client.submit(
        plan_on_worker, job.to_dict(), _worker_facts(client), key=f"scalelatent-plan-{uuid.uuid4().hex[:8]}",
        pure=False, priority=100,
    )  # fmt: skip
    try:
        trouble, lines = future.result(timeout=PLAN_SECONDS)
    except TimeoutError:
        raise JobError(
            f"no worker of {address_of(client)} planned the job within {PLAN_SECONDS:.0f} s, because the "
            "workers are busy or hang; submit again later"
        ) from None
    except KilledWorker as error:
        raise JobError(
            f"the workers of {address_of(client)} died while they opened the data of the job ({error}); read "
            "their logs; the most frequent cause is too little memory"
        ) from None
    finally:
        future.release()
    if trouble is not None:
        kind, text = trouble
        raise (PlanError if kind == "PlanError" else JobError)(text)
    for line in lines:
        print_line(line)


def _worker_facts(client: Client) -> dict[str, Any]:
    return {
        address: {key: worker[key] for key in ("nthreads", "memory_limit", "resources")}
        for address, worker in worker_infos(client).items()
    }
