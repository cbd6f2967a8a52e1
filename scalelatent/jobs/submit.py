"""`submit`: hand a job to a cluster, which then needs no laptop.

The client checks what can be checked (versions, workers, resources, paths as the workers see them), makes the
run folder, and leaves one task behind: the driver (`scalelatent.jobs.clusterdriver`). From then on the run
folder tells everything; the scheduler's metadata tells which folder belongs to which job id.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from scalelatent.deploy.checks import check_versions
from scalelatent.deploy.connection import default_scheduler, page_of
from scalelatent.engine.dask.asking import address_of, ask_scheduler
from scalelatent.errors import JobError, RunError
from scalelatent.monitor.times import time_text
from scalelatent.storage.disk import is_local

from .clusterdriver import drive, key_of
from .control import METADATA
from .driver_news import announce, install_page
from .job_cluster import connect
from .preflight import check_cluster, check_folder
from .resolve import override
from .runfolder import RunFolder
from .runner import take_back

if TYPE_CHECKING:
    from distributed import Client

    from .spec import Job

__all__ = ["Submitted", "resubmit", "submit_job"]

ACCEPT_SECONDS = 30.0
WORKER_SECONDS = 10.0


@dataclass(frozen=True)
class Submitted:
    """What is known of a job that a cluster has taken."""

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
    tell: Callable[[str], None] = lambda line: None,
) -> Submitted:
    """Submit a job to a running cluster, where it goes on without this process."""
    job = _at_scheduler(job, scheduler, client).with_seed()
    with connect(job, client, tell) as found:
        assert found is not None
        check_versions(found, job.cluster.allow_mismatch, tell)
        check_cluster(found, job, wait=wait, tell=tell)
        existed = is_local(job.job.out) and os.path.isdir(job.job.out)
        folder = RunFolder.create(job.job.out, job)
        try:
            check_folder(found, folder)
            return _hand_over(found, folder, job)
        except BaseException:
            take_back(folder, existed)
            raise


def resubmit(
    job: Job,
    folder: RunFolder,
    *,
    client: Client | None = None,
    wait: float = WORKER_SECONDS,
    tell: Callable[[str], None] = lambda line: None,
) -> Submitted:
    """Submit a run that was broken off again; it goes on from its checkpoints."""
    from .runner import check_changes

    check_changes(job, folder)
    job = _at_scheduler(job, None, client)
    with folder.lock():
        pass  # says who drives it, if someone does
    with ExitStack() as stack:
        try:
            found = stack.enter_context(connect(job, client, tell))
        except JobError as error:
            error.add_note(
                f"(where its cluster has ended: scalelatent resume {folder.url} --scheduler-file FILE, or "
                "--scheduler URL, of another one, or --here)"
            )
            raise
        assert found is not None
        check_versions(found, job.cluster.allow_mismatch, tell)
        check_cluster(found, job, wait=wait, tell=tell)
        check_folder(found, folder)
        return _hand_over(found, folder, job)


def _at_scheduler(job: Job, scheduler: str | None, client: Client | None) -> Job:
    address = scheduler or (address_of(client) if client is not None else job.cluster.scheduler)
    address = address or default_scheduler()
    if address is None:
        raise JobError(
            "submit needs a running cluster: give --scheduler URL (a scheduler prints its address when it "
            "starts), or [cluster] scheduler in the job file. To start one here: scalelatent cluster up. To "
            "run the job in this process: scalelatent fit"
        )
    return override(job, [f'cluster.scheduler="{address}"'])


def _hand_over(client: Client, folder: RunFolder, job: Job) -> Submitted:
    """Leave the driver with the scheduler, and see it taken."""
    address = str(job.cluster.scheduler)
    with folder.lock():
        folder.write_job(job)
        start = folder.begin("queued", submitted=time_text(), scheduler=address, driver=None)
        folder.event("submitted", scheduler=address, host=socket.gethostname(), start=start)
    state = folder.read_state()
    identity = state["id"]
    known = {"run": folder.url, "name": job.job.name, "kind": job.kind, "submitted": state["submitted"]}
    client.set_metadata([METADATA, identity], known)
    install_page(client)
    announce(client, folder, job, state)
    key = key_of(identity, start)
    future = client.submit(drive, folder.url, start, key=key, pure=False, priority=100)
    _keep(client, key)
    future.release()
    return Submitted(identity, folder.url, address, page_of(client))


def _keep(client: Client, key: str) -> None:
    """Make the task outlive this client; returns when the scheduler has it."""
    from scalelatent.engine.dask.hooks import keep_task

    deadline = time.monotonic() + ACCEPT_SECONDS
    while not ask_scheduler(client, keep_task, key):
        if time.monotonic() > deadline:
            raise RunError(
                f"the scheduler {address_of(client)} did not take the job within {ACCEPT_SECONDS:.0f} s; "
                "look at its log, and submit again"
            )
        time.sleep(0.02)
