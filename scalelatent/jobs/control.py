"""Find, watch and cancel a job through its run folder, on any machine that sees the folder.

The scheduler is only needed to find the folder of a job id; a job of a dead cluster can still be read.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelatent.deploy.connection import default_scheduler, open_client
from scalelatent.engine.dask.timed_calls import ask_scheduler
from scalelatent.errors import JobError, RunError, nearest
from scalelatent.monitor.times import epoch_seconds
from scalelatent.storage.disk import is_local

from .clusterdriver import driver_key
from .interrupt import request_cancel
from .resolve import load_job
from .runfolder import RunFolder, is_run_folder
from .runs import find_runs

if TYPE_CHECKING:
    from distributed import Client, Security

    from scalelatent.engine.callbacks import Callback

JOBS_METADATA = "scalelatent-jobs"
ENDED_STATES = ("done", "failed", "cancelled")
POLL_SECONDS = 0.5
# Seconds to wait for a lost driver, which the scheduler restarts on another worker.
RESTART_SECONDS = 20.0
# Seconds that a followed job may stay queued before its scheduler is asked whether it knows the job.
QUEUED_SECONDS = 30.0
# Seconds that a cancel waits by default until the job has stopped at a checkpoint.
CANCEL_SECONDS = 30.0
# Maximum seconds to wait until the jobs of a cluster have stopped, before the cluster ends. The SLURM recipes
# receive their signal two minutes before the end, so this wait must be shorter.
STOP_SECONDS = 90.0


def find_job(
    job: str,
    *,
    scheduler: str | None = None,
    security: Security | None = None,
    below: str | os.PathLike[str] = ".",
) -> RunFolder:
    """Return the run folder of a job, which is a path, an address or a job id."""
    if "/" in job or os.sep in job or os.path.exists(job) or is_run_folder(job):
        return RunFolder.open(job)
    here = {folder.id: folder for folder in find_runs(below)}
    if job in here:
        return here[job]
    runs = f"one of the {len(here)} runs below {Path(below).resolve()}"
    looked = f"no job {job!r}: it is neither a run folder nor {runs}"
    address = scheduler or default_scheduler()
    if address is None:
        near = f" ({nearest(job, here)})" if here else ""
        raise JobError(f"{looked}{near}; to search on a scheduler, add --scheduler URL")
    with open_client(address, security) as client:
        known = known_jobs(client)
    if job not in known:
        near = nearest(job, {*known, *here}) if known or here else "it knows no job since its start"
        raise JobError(f"{looked}, nor one of the {len(known)} jobs of the scheduler {address}; {near}")
    run = known[job]["run"]
    if not is_run_folder(run):
        reason = "which this machine does not see" if is_local(run) else "which no longer exists"
        raise JobError(f"job {job} has the run folder {run}, {reason}; use a machine that sees the folder")
    return RunFolder.open(run)


def restore_job(folder: RunFolder, job_file: str | os.PathLike[str]) -> None:
    """Rewrite a damaged ``job.json`` from the job file that started the run."""
    try:
        folder.read_job()
    except JobError:
        with folder.lock():
            job = load_job(job_file, settings=[f"job.out={json.dumps(folder.url)}"])
            seeds = [
                event["seed"] for event in folder.records("events.jsonl") if event.get("seed") is not None
            ]
            # If neither the job file nor the model names a seed, the run drew one and logged it in an event.
            if job.job.seed is None and job.params.get("random_state") is None and seeds:
                job = replace(job, job=job.job.model_copy(update={"seed": seeds[0]}))
            folder.write_job(job)
        return
    raise JobError(
        f"run folder {folder.url} has an intact job.json; remove --job (use --set to change values)"
    )


def known_jobs(client: Client) -> dict[str, dict[str, Any]]:
    """Return the jobs that were submitted since the scheduler started, by job id."""
    return dict(client.get_metadata([JOBS_METADATA], default={}))


def list_jobs(below: str | os.PathLike[str] = ".", client: Client | None = None) -> list[dict[str, Any]]:
    """Return the states of the runs below a folder, and of the runs that a scheduler knows."""
    states = {state["run"]: state for state in (folder.read_state() for folder in find_runs(below))}
    for identity, known in known_jobs(client).items() if client is not None else ():
        if known["run"] in states:
            continue
        if is_run_folder(known["run"]):
            states[known["run"]] = RunFolder(known["run"]).read_state()
        else:
            empty = {
                "state": None,
                "pass": None,
                "objective": None,
                "error": "this machine does not see the run folder",
            }
            states[known["run"]] = {"id": identity, **empty, **known}
    return list(states.values())


def follow(
    folder: RunFolder,
    callbacks: Iterable[Callback] = (),
    *,
    security: Security | None = None,
    print_line: Callable[[str], None] = lambda line: None,
    poll: float = POLL_SECONDS,
) -> dict[str, Any]:
    """Report the passes and progress of a run to ``callbacks`` until the run ends; return its last state."""
    everyone = list(callbacks)
    watch = _RunWatcher(folder, everyone)
    lost_since: float | None = None
    printed: str | None = None
    asked = time.monotonic()
    while True:
        state = folder.read_state()
        if state["state"] != printed and not state.get("driver_lost"):
            printed = state["state"]
            if printed not in ENDED_STATES:
                print_line(" on ".join(word for word in (printed, state.get("driver")) if word))
        watch.poll()
        if not state.get("driver_lost"):
            lost_since = None
            if state["state"] in ENDED_STATES:
                return state
        elif lost_since is None:
            lost_since = time.monotonic()
            if state.get("submitted"):
                print_line("the driver is lost; waiting for the cluster to restart it")
        elif time.monotonic() - lost_since > (RESTART_SECONDS if state.get("submitted") else 0):
            return state
        if state["state"] == "queued" and time.monotonic() - asked > QUEUED_SECONDS:
            asked = time.monotonic()
            _check_scheduler(folder, state, security)
        time.sleep(poll)


def _check_scheduler(folder: RunFolder, state: dict[str, Any], security: Security | None) -> None:
    """Raise a `RunError` if a queued job is unknown to its scheduler, or the scheduler does not answer."""
    if not state.get("scheduler"):
        return
    trouble = ""
    try:
        with open_client(state["scheduler"], security) as client:
            found = _task_of(client, state)
            if found in (None, "erred"):
                trouble = (
                    "it does not know the job; was it restarted?" if found is None else "the task failed"
                )
    except (JobError, RunError) as error:
        trouble = str(error)
    if trouble and folder.read_state()["state"] == "queued":
        raise RunError(
            f"job {state['id']} is queued, but its scheduler {state['scheduler']} will not start it "
            f"({trouble}); submit it to another scheduler: scalelatent resume {folder.url} --scheduler URL"
        )


def _task_of(client: Client, state: dict[str, Any]) -> str | None:
    """Return the Dask state of the task that drives the job since its last start; None without a task."""
    from scalelatent.engine.dask.hooks import task_state

    return ask_scheduler(client, task_state, driver_key(state["id"], state["starts"]))


class _RunWatcher:
    """Watcher that reports new passes and progress in a run folder to callbacks."""

    def __init__(self, folder: RunFolder, callbacks: list[Callback]) -> None:
        self._folder, self._callbacks = folder, callbacks
        self._seen = 0
        self._progress: dict[str, Any] = {}
        params = folder.read_job().params
        most = params.get("max_iter", params.get("n_epochs"))
        info = {
            "max_iter": most if isinstance(most, int) else None,
            "began": epoch_seconds(folder.read_state().get("began")),
        }
        for callback in callbacks:
            callback.on_fit_start(info)

    def poll(self) -> None:
        records = self._folder.records("metrics.jsonl")
        # A restarted driver removes the passes after its checkpoint and repeats them.
        fresh = records[min(self._seen, len(records)) :]
        self._seen = len(records)
        for record in fresh:
            for callback in self._callbacks:
                callback.on_pass_end(record)
        progress = self._folder.read_progress()
        if progress and progress != self._progress:
            self._progress = progress
            for callback in self._callbacks:
                callback.on_progress(progress)


def new_events(
    folder: RunFolder, *, follow: bool = False, poll: float = POLL_SECONDS
) -> Iterator[dict[str, Any]]:
    """Yield the events of a run, oldest first; with `follow`, until the run ends."""
    n_read = 0
    while True:
        ended = folder.read_state()["state"] in ENDED_STATES
        events = folder.records("events.jsonl")
        yield from events[n_read:]
        n_read = len(events)
        if ended or not follow:
            return
        time.sleep(poll)


def cancel_job(folder: RunFolder, *, wait: float = CANCEL_SECONDS) -> dict[str, Any]:
    """Cancel a job, which stops at its next checkpoint; return the state after at most `wait` seconds."""
    try:
        with folder.lock():  # no process runs this job now; a process that starts it later reads the state
            state = folder.read_state()
            if state["state"] in ENDED_STATES:
                if state["state"] == "cancelled":
                    return state
                raise JobError(
                    f"job {state['id']} ({folder.url}) has already ended (state: {state['state']})"
                )
            text = f"cancelled before the start; resume with: scalelatent resume {folder.url}"
            if state["state"] == "running":
                text = f"cancelled after its driver was lost; resume with: scalelatent resume {folder.url}"
            folder.event("state", state="cancelled", error=text)
            folder.update_state(state="cancelled", error=text)
            return folder.read_state()
    except RunError:
        request_cancel(folder)
    return _wait_until_ended(folder, time.monotonic() + wait)


def _wait_until_ended(folder: RunFolder, deadline: float) -> dict[str, Any]:
    """Wait until a run has ended, or until ``time.monotonic()`` reaches `deadline`; return the state."""
    while True:
        state = folder.read_state()
        if state["state"] in ENDED_STATES or time.monotonic() > deadline:
            return state
        time.sleep(0.1)


def stop_jobs(client: Client, print_line: Callable[[str], None]) -> None:
    """Cancel the jobs that a cluster drives, before the cluster ends."""
    driven = []
    for known in known_jobs(client).values():
        folder = RunFolder(known["run"])
        state = folder.read_state() if is_run_folder(folder.url) else {"state": ENDED_STATES[0]}
        if state["state"] not in ENDED_STATES and _task_of(client, state) is not None:
            driven.append(folder)
    if driven:
        print_line(f"stopping {len(driven)} job(s) at the next checkpoint, within {STOP_SECONDS:g} s")
    for folder in driven:
        with suppress(JobError):  # the job has ended already
            cancel_job(folder, wait=0)
    deadline = time.monotonic() + STOP_SECONDS
    for folder in driven:
        state = _wait_until_ended(folder, deadline)
        print_line(f"{state['id']}  {state['state']}; resume with: scalelatent resume {folder.url}")
