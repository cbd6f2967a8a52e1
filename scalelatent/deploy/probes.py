"""Probes: functions that collect facts about a process, for the checks of `scalelatent.deploy.checks`.

A probe runs in this process or in each worker of a cluster; one more probe runs in its scheduler.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelatent.engine.cache import machine_memory
from scalelatent.engine.dask.timed_calls import (
    ASK_SECONDS,
    address_of,
    ask_every_worker,
    ask_scheduler,
    ask_workers,
)
from scalelatent.engine.threads import call_with_timeout
from scalelatent.errors import RunError, ScalelatentError
from scalelatent.storage.disk import is_local, locate
from scalelatent.storage.folder_probe import find_folder_problem

from .versions import COMPARED, CUPY_WHEELS, versions

if TYPE_CHECKING:
    from distributed import Client, Scheduler, Worker

Facts = Mapping[str, Any]
"""Results of the probes in one process, by name of the probe."""


@dataclass(frozen=True)
class Requirements:
    """Requirements of a run: folder, device, datasets and scratch folders."""

    folder: str | None = None  # run folder, or folder of the runs
    mark: str | None = None  # name of a file that the client wrote into `folder`; all workers must see it
    device: str = "auto"
    # Addresses of datasets and scratch folders by the job's key that names them, such as ``[data] train``.
    datasets: Mapping[str, str] = field(default_factory=dict)
    scratch: Mapping[str, str] = field(default_factory=dict)


def usable_cpus() -> tuple[int, int]:
    """Return the number of logical CPUs that this process may use, and the number in the machine."""
    from dask.system import cpu_count

    return cpu_count(), os.cpu_count() or 1


def cupy_wheels() -> list[str]:
    """Return the installed wheels of CuPy with their versions; all wheels have the same import name."""
    found = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name == "cupy" or name.startswith(("cupy-cuda", "cupy-rocm")):
            found[name] = f"{name} {distribution.version}"
    return sorted(found.values())


def find_cache_problem() -> str:
    """Return why this machine cannot store compiled kernels; empty if it can."""
    from scalelatent.kernels.cache_folder import CACHE_FOLDER

    problem = find_folder_problem(CACHE_FOLDER)
    return problem and f"{CACHE_FOLDER}: {problem}"


def pool_threads() -> dict[str, int]:
    """Return the number of threads in the thread pool of each library."""
    import numba
    import numcodecs.blosc
    import numpy.linalg  # noqa: F401  this import loads the BLAS library
    import zarr
    from threadpoolctl import threadpool_info

    blas = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] in ("blas", "openmp")]
    return {
        "BLAS": max(blas, default=1),
        "numba": int(vars(numba.config)["NUMBA_NUM_THREADS"]),
        "Blosc": int(numcodecs.blosc.get_nthreads()),
        "zarr": int(zarr.config.get("threading.max_workers") or 0),
    }


def _count_gpus() -> int:
    from scalelatent.engine.backend import gpu_count

    return gpu_count()


def _find_gpu_problem() -> str:
    """Return why the GPU of this process cannot compute; empty if it can, or without a GPU."""
    from scalelatent.engine.backend import check_gpu

    return check_gpu() if _count_gpus() else ""


def _describe_gpu_memory() -> str:
    """Return the memory of the GPU of this process and its limits as text; empty without a GPU."""
    from scalelatent.engine.backend import read_gpu_memory

    return read_gpu_memory().describe() if _count_gpus() else ""


def peak_bytes() -> int:
    """Return the peak resident memory of this process, in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # ru_maxrss may include memory of the program before exec, so it is only a fallback

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _datasets(requirements: Requirements) -> dict[str, tuple[str, str]]:
    """Return (problem, fingerprint), one of them empty, of each dataset by its key, e.g. ``[data] train``."""
    from scalelatent.data import open_dataset

    found = {}
    for name, url in requirements.datasets.items():
        if is_local(url) and not os.path.exists(url):
            found[name] = f"it does not exist on host {socket.gethostname()}", ""
            continue
        try:
            found[name] = "", open_dataset(url).fingerprint()
        except (ScalelatentError, OSError) as error:
            found[name] = str(error), ""
    return found


PROBES: dict[str, Callable[[Requirements], object]] = {
    "versions": lambda requirements: versions(),
    "host": lambda requirements: socket.gethostname(),
    "cores": lambda requirements: usable_cpus()[0],
    "machine_bytes": lambda requirements: machine_memory()[0],
    "pools": lambda requirements: pool_threads(),
    "trim": lambda requirements: os.environ.get("MALLOC_TRIM_THRESHOLD_") or None,
    "glibc": lambda requirements: platform.libc_ver()[0] == "glibc",
    "cupy": lambda requirements: cupy_wheels(),
    "gpus": lambda requirements: _count_gpus(),
    "gpu_problem": lambda requirements: _find_gpu_problem(),
    "gpu_memory": lambda requirements: _describe_gpu_memory(),
    "cache_problem": lambda requirements: find_cache_problem(),
    "folder_problem": lambda requirements: (
        find_folder_problem(requirements.folder, requirements.mark) if requirements.folder else ""
    ),
    "datasets": _datasets,
    "scratch": lambda requirements: {
        name: find_folder_problem(url) for name, url in requirements.scratch.items()
    },
}

GPU_PROBES = ("gpu_problem", "gpu_memory")

# -- on workers and the scheduler ----------------------------------------------------------------------------


async def probe_worker(
    probes: Iterable[str], requirements: Requirements, dask_worker: Worker
) -> dict[str, Any]:
    """Return the settings of this worker and the results of some probes."""
    from scalelatent.engine.dask.hooks import worker_settings

    settings = worker_settings(dask_worker)
    # Workers that compute on their CPU must not allocate memory on a GPU.
    names = [name for name in probes if name not in GPU_PROBES or settings["offers_gpu"]]
    # A thread keeps the event loop free during a slow import or a file system that hangs.
    found = await asyncio.to_thread(lambda: {name: PROBES[name](requirements) for name in names})
    return settings | found


def probe_scheduler(dask_scheduler: Scheduler) -> dict[str, Any]:
    """Return the settings, the dashboard pages and the versions of this scheduler."""
    from scalelatent.engine.dask.hooks import scheduler_settings

    return {"versions": versions(), **scheduler_settings(dask_scheduler)}


# -- in the client -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterView:
    """Facts that probes collected about the scheduler and the workers of a cluster."""

    address: str
    requirements: Requirements = field(default_factory=Requirements)
    # Result of `probe_scheduler`; empty if no check needs it, or if the scheduler cannot import scalelatent.
    scheduler: Facts = field(default_factory=dict)
    workers: Mapping[str, Facts] = field(default_factory=dict)  # facts by the address of the worker
    silent: Mapping[str, str] = field(default_factory=dict)  # errors, by address of the worker without answer
    # Versions of packages by worker, from Dask if the worker cannot import scalelatent.
    versions: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    skews: Mapping[str, float] = field(default_factory=dict)  # seconds a worker's clock is ahead of this one
    folder_problem: str = ""  # why the client cannot write to the folder of the runs; empty if it can

    def values_of(self, fact: str) -> dict[str, Any]:
        """Return one fact of each worker, by the address of the worker."""
        return {address: facts[fact] for address, facts in self.workers.items()}

    def by_host(self) -> dict[str, list[Facts]]:
        """Return the facts of the workers by host."""
        hosts: dict[str, list[Facts]] = defaultdict(list)
        for facts in self.workers.values():
            hosts[facts["host"]].append(facts)
        return hosts


def probe_cluster(
    client: Client, asked: Collection[str], requirements: Requirements, seconds: float | None = None
) -> ClusterView:
    """Collect the facts in ``asked``: results of worker probes, clock differences, scheduler settings.

    With ``seconds``, workers may fail to answer in this time; without ``seconds``, all workers must answer.
    """
    probes = sorted(PROBES.keys() & set(asked))
    marked = requirements if "folder_problem" in asked else replace(requirements, folder=None)
    with _write_mark(marked) as (marked, problem):
        if seconds is None:
            answers = ask_every_worker(client, probe_worker, probes, marked)
        else:
            answers = ask_workers(client, probe_worker, probes, marked, seconds=seconds)
    workers = {address: answer for address, answer in answers.items() if isinstance(answer, dict)}
    failed = {address: answer for address, answer in answers.items() if isinstance(answer, Exception)}
    lacking = [address for address, error in failed.items() if not isinstance(error, TimeoutError | OSError)]
    scheduler: Facts = {}
    if {"versions", "scheduler"} & set(asked):
        try:
            scheduler = ask_scheduler(client, probe_scheduler)
        except RunError:
            raise
        except Exception:  # noqa: BLE001  an import on the scheduler may raise any error
            scheduler = {}
    found = {address: facts["versions"] for address, facts in workers.items() if "versions" in facts}
    if "versions" in asked and (lacking or not scheduler):
        of_scheduler, of_workers = _versions_by_dask(client)
        scheduler = scheduler or {"versions": of_scheduler}
        found |= {address: of_workers.get(address, {}) for address in lacking}
    skews = _measure_clock_skews(client, workers, seconds) if "skew" in asked else {}
    silent = {
        address: f"{type(error).__name__}: {error}" if address in lacking else str(error)
        for address, error in failed.items()
    }
    return ClusterView(address_of(client), requirements, scheduler, workers, silent, found, skews, problem)


@contextmanager
def _write_mark(requirements: Requirements) -> Iterator[tuple[Requirements, str]]:
    """Write a marker file into the run folder; yield requirements with its name, and an error text or ""."""
    if requirements.folder is None:
        yield requirements, ""
        return
    mark = f".seen-{uuid.uuid4().hex[:12]}"
    try:
        location = locate(requirements.folder)
        location.make()
        location.write(mark, b"seen")
    except (OSError, ScalelatentError) as error:
        yield replace(requirements, folder=None), getattr(error, "strerror", None) or str(error)
        return
    try:
        yield replace(requirements, mark=mark), ""
    finally:
        with suppress(OSError, ScalelatentError):
            location.delete(mark)


def _measure_clock_skews(client: Client, workers: Iterable[str], seconds: float | None) -> dict[str, float]:
    """Return how many seconds the clock of each worker is ahead of the clock here, by worker.

    The result is 0 if the difference is less than the time between the request and its answer.
    """
    before = time.time()
    clocks = ask_workers(client, time.time, workers=list(workers), seconds=seconds)
    after = time.time()
    return {
        address: max(0.0, clock - after) - max(0.0, before - clock)
        for address, clock in clocks.items()
        if isinstance(clock, float)
    }


def _versions_by_dask(client: Client) -> tuple[dict[str, str | None], dict[str, dict[str, str | None]]]:
    """Return the versions of scheduler and workers through Dask, without importing scalelatent there."""
    names = [name for name in (*COMPARED, *CUPY_WHEELS) if name != "python"]  # Dask reports Python itself
    try:
        asked: Any = call_with_timeout(ASK_SECONDS, lambda: client.get_versions(packages=names))
    except TimeoutError:  # a worker hangs; the check "workers" reports it
        return {}, {}
    workers = {
        address: found["packages"] | {"scalelatent": None} for address, found in asked["workers"].items()
    }
    return asked["scheduler"]["packages"] | {"scalelatent": None}, workers
