"""Preflight: what a job would fail of on this cluster, said before it is submitted.

Workers are asked, not the laptop: a path may exist on one and not on the other.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from scalelatent.deploy.asking import address_of, ask_workers
from scalelatent.errors import JobError, PlanError, ScalelatentError
from scalelatent.storage.disk import is_local, locate

from .spec import Job

if TYPE_CHECKING:
    from distributed import Client

    from .runfolder import RunFolder

__all__ = ["check_cluster", "check_folder"]

PLAN_SECONDS = 120.0
SHOWN = 3


def check_cluster(
    client: Client,
    job: Job,
    *,
    wait: float = 0.0,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Refuse a job that this cluster cannot run.

    Parameters
    ----------
    client : distributed.Client
    job : Job
    wait : float
        Seconds to wait for the first worker.
    tell : callable
        Called with one line for the user.

    Raises
    ------
    JobError
        No workers; a device that none offers; a dataset or a folder that a worker does not see.
    PlanError
        The job does not fit into the workers' memory.
    """
    workers = _workers(client, wait, tell)
    _check_device(client, job, workers)
    _check_paths(client, job)
    _check_plan(client, job, tell)


def _workers(client: Client, wait: float, tell: Callable[[str], None]) -> dict[str, Any]:
    deadline = time.monotonic() + wait
    waiting = False
    while not (workers := client.scheduler_info(n_workers=-1)["workers"]):
        if time.monotonic() >= deadline:
            address = address_of(client)
            raise JobError(
                f"the cluster {address} has no workers{f', and none came in {wait:g} s' if wait else ''}: "
                f"start some (dask worker {address}), or give them longer with --wait SECONDS; an adaptive "
                "cluster needs a minimum of one worker"
            )
        if not waiting:
            waiting = True
            tell(f"waiting up to {wait:g} s for a worker")
        time.sleep(0.1)
    return dict(workers)


def _check_device(client: Client, job: Job, workers: Mapping[str, Any]) -> None:
    """A task whose resource nobody offers would wait for ever."""
    device = job.estimator_params().get("device")
    if device != "gpu":
        return
    if not any(worker.get("resources", {}).get("GPU") for worker in workers.values()):
        address = address_of(client)
        raise JobError(
            f'the job asks for device = "gpu", and none of the {len(workers)} workers of {address} offers '
            f"GPU: start one on a machine that has one (dask worker {address} --nthreads 1 --resources "
            '"GPU=1"), or set [cluster] device = "auto" or "cpu"'
        )


def _check_paths(client: Client, job: Job) -> None:
    """Ask every worker for the datasets and folders of the job."""
    data = job.data
    own = ("train", "validation", "test")
    names = (*own, "target", "validation_target", "test_target")
    datasets = {name: getattr(data, name) for name in names}
    datasets = {name: url for name, url in datasets.items() if url is not None}
    folders = {} if job.job.scratch is None else {"[job] scratch": job.job.scratch}
    folders["[job] out"] = job.job.out
    answers = ask_workers(client, look, datasets, folders)
    _raise_first(answers)
    for name, url in datasets.items():
        _check_dataset(name, url, {worker: seen["datasets"][name] for worker, seen in answers.items()})
    for name, url in folders.items():
        blind = {worker: seen["folders"][name] for worker, seen in answers.items() if seen["folders"][name]}
        if blind:
            raise JobError(
                f"{name} = {url!r} cannot be written by {_some(blind)}: {_reasons(blind)}; put it on storage "
                "that this machine and all workers share, a shared file system or an object store (s3://…)"
            )


def _raise_first(answers: Mapping[str, Any]) -> None:
    """Raise what a worker raised: what can be foreseen, it answers."""
    for worker, answer in answers.items():
        if isinstance(answer, BaseException):
            raise JobError(
                f"worker {worker} cannot look at the job ({type(answer).__name__}: {answer}): see its "
                "log, and whether it has another version of scalelatent"
            ) from answer


def _check_dataset(name: str, url: str, seen: Mapping[str, tuple[str, str]]) -> None:
    blind = {worker: trouble for worker, (trouble, _) in seen.items() if trouble}
    if blind:
        here = is_local(url) and os.path.exists(url)
        where = "" if not is_local(url) else " It exists here." if here else " It does not exist here either."
        fix = "check the path" if is_local(url) and not here else "put it on storage that all workers share"
        how = " (a shared file system, or s3://…)" if here else ""
        raise JobError(
            f"[data] {name} = {url!r} cannot be opened by {_some(blind)}: {_reasons(blind)}.{where} Next: "
            f"{fix}{how}"
        )
    prints: dict[str, str] = {}
    for worker, (_, fingerprint) in seen.items():
        prints.setdefault(fingerprint, worker)
    if len(prints) > 1:
        raise JobError(
            f"[data] {name} = {url!r} is not the same dataset on all workers ({', '.join(prints.values())} "
            "see different rows): put one copy on storage that all workers share, or copy it anew to each"
        )


def _some(workers: Mapping[str, Any]) -> str:
    names = sorted(workers)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"worker{'s' if len(names) > 1 else ''} {', '.join(names[:SHOWN])}{more}"


def _reasons(blind: Mapping[str, str]) -> str:
    return "; ".join(sorted(set(blind.values()))[:SHOWN])


async def look(datasets: dict[str, str], folders: dict[str, str]) -> dict[str, Any]:
    """Tell what this worker sees: of each dataset ``(trouble, fingerprint)``, of each folder the trouble.

    In a thread: a file system that hangs must not silence the worker.
    """
    return await asyncio.to_thread(_look, datasets, folders)


def _look(datasets: dict[str, str], folders: dict[str, str]) -> dict[str, Any]:
    return {
        "datasets": {name: _open(url) for name, url in datasets.items()},
        "folders": {name: _writable(url) for name, url in folders.items()},
    }


def _open(url: str) -> tuple[str, str]:
    from scalelatent.data import open_dataset

    host = socket.gethostname()
    if is_local(url) and not os.path.exists(url):
        return f"it does not exist on host {host}", ""
    try:
        return "", open_dataset(url).fingerprint()
    except (ScalelatentError, OSError) as error:
        return str(error), ""


def _writable(url: str) -> str:
    """Why nothing can be written below a folder that may not exist yet; nothing where it can."""
    if not is_local(url):
        try:
            locate(url)
        except ScalelatentError as error:
            return str(error)
        return ""  # an object store is tried with the run folder itself
    folder = os.path.abspath(url)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    host = socket.gethostname()
    if not os.path.isdir(folder):
        return f"{folder} on host {host} is a file"
    if not os.access(folder, os.W_OK):
        return f"no permission to write {folder} on host {host}"
    return ""


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
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return {
        address: {key: worker[key] for key in ("nthreads", "memory_limit", "resources")}
        for address, worker in workers.items()
    }


class _Planned:
    """Stands for the cluster where only its workers are asked for."""

    def __init__(self, workers: dict[str, Any]) -> None:
        self._workers = workers

    def scheduler_info(self, n_workers: int = -1) -> dict[str, Any]:
        return {"workers": self._workers}


def plan_on_worker(
    stored: dict[str, Any], workers: dict[str, Any]
) -> tuple[tuple[str, str] | None, list[str]]:
    """Open a job's data and plan it; returns the kind and the text of what refuses it, or None, and what to
    say of the plan.
    """
    from .planning import plan_job, plan_lines

    try:
        needs = plan_job(Job.from_dict(stored), client=_Planned(workers))  # type: ignore[arg-type]
    except ScalelatentError as error:
        return (type(error).__name__, str(error)), []
    return None, plan_lines(needs)


def check_folder(client: Client, folder: RunFolder) -> None:
    """Refuse a run folder that is not the same for this process and all workers.

    Parameters
    ----------
    client : distributed.Client
    folder : RunFolder
        Made by this process.

    Raises
    ------
    JobError
        A worker finds another folder there, or none, or cannot write it.
    """
    answers = ask_workers(client, find_folder, folder.url, folder.id)
    _raise_first(answers)
    blind = {worker: trouble for worker, trouble in answers.items() if trouble}
    if blind:
        raise JobError(
            f"run folder {folder.url} was made here, and {_some(blind)} cannot use it: {_reasons(blind)}; "
            "choose one on storage that this machine and all workers share (--out), a shared file system or "
            "an object store (s3://…)"
        )


async def find_folder(url: str, identity: str) -> str:
    """Tell why this worker cannot use a run folder; nothing where it can."""
    return await asyncio.to_thread(_find_folder, url, identity)


def _find_folder(url: str, identity: str) -> str:
    from .runfolder import RunFolder, is_run_folder

    host = socket.gethostname()
    try:
        if not is_run_folder(url):
            return f"it is not there on host {host}"
        folder = RunFolder.open(url)
        if folder.id != identity:
            return f"another run lies there on host {host}"
        mark = f".seen-{uuid.uuid4().hex[:12]}"
        folder.place.write(mark, b"seen")
        folder.place.delete(mark)
    except (ScalelatentError, OSError) as error:
        return f"{error} (host {host})"
    return ""
