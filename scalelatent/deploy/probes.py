"""What checks look at: this process, each worker of a cluster, and its scheduler. Probes only look."""

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
from scalelatent.engine.dask.requests import (
    ASK_SECONDS,
    address_of,
    ask_every_worker,
    ask_scheduler,
    ask_workers,
)
from scalelatent.engine.threads import call_with_timeout
from scalelatent.errors import RunError, ScalelatentError
from scalelatent.storage.disk import is_local, locate
from scalelatent.storage.folder_probe import folder_trouble

from .versions import COMPARED, CUPY, versions

if TYPE_CHECKING:
    from distributed import Client, Scheduler, Worker

Facts = Mapping[str, Any]
"""What probes found of a process, by their names."""


@dataclass(frozen=True)
class Wanted:
    """What a run wants of the machine or cluster."""

    folder: str | None = None  # where it is written
    mark: str | None = None  # name of a file that the asking process has left there
    device: str = "auto"
    # setting of the job, such as ``[data] train``, to where the rows are
    datasets: Mapping[str, str] = field(default_factory=dict)
    scratch: Mapping[str, str] = field(default_factory=dict)  # the same, to where they may be written


def usable_cpus() -> tuple[int, int]:
    """Logical CPUs that this process may use (affinity, control group), and those of the machine."""
    from dask.system import cpu_count

    return cpu_count(), os.cpu_count() or 1


def cupy_wheels() -> list[str]:
    """CuPy's installed wheels with their versions; all share one import name."""
    found = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name == "cupy" or name.startswith(("cupy-cuda", "cupy-rocm")):
            found[name] = f"{name} {distribution.version}"
    return sorted(found.values())


def cache_trouble() -> str:
    """Why compiled kernels are not kept here; empty where they are."""
    from scalelatent.kernels.cache_folder import CACHE

    trouble = folder_trouble(CACHE)
    return trouble and f"{CACHE}: {trouble}"


def pool_threads() -> dict[str, int]:
    """Threads of every library that keeps some."""
    import numba
    import numcodecs.blosc
    import numpy.linalg  # noqa: F401  loads the library that numpy multiplies with
    import zarr
    from threadpoolctl import threadpool_info

    blas = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] in ("blas", "openmp")]
    return {
        "BLAS": max(blas, default=1),
        "numba": int(vars(numba.config)["NUMBA_NUM_THREADS"]),
        "Blosc": int(numcodecs.blosc.get_nthreads()),
        "zarr": int(zarr.config.get("threading.max_workers") or 0),
    }


def _gpus() -> int:
    from scalelatent.engine.backend import gpu_count

    return gpu_count()


def _card_trouble() -> str:
    """Return why the card of this process cannot be used; empty if it can, or if there is none."""
    from scalelatent.engine.backend import check_gpu

    return check_gpu() if _gpus() else ""


def peak_bytes() -> int:
    """Peak resident memory of this process; ru_maxrss, which outlives exec, only where nothing else tells."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _datasets(wanted: Wanted) -> dict[str, tuple[str, str]]:
    """Setting -> (trouble, fingerprint)."""
    from scalelatent.data import open_dataset

    found = {}
    for name, url in wanted.datasets.items():
        if is_local(url) and not os.path.exists(url):
            found[name] = f"it does not exist on host {socket.gethostname()}", ""
            continue
        try:
            found[name] = "", open_dataset(url).fingerprint()
        except (ScalelatentError, OSError) as error:
            found[name] = str(error), ""
    return found


PROBES: dict[str, Callable[[Wanted], object]] = {
    "versions": lambda wanted: versions(),
    "host": lambda wanted: socket.gethostname(),
    "cores": lambda wanted: usable_cpus()[0],
    "machine_bytes": lambda wanted: machine_memory()[0],
    "pools": lambda wanted: pool_threads(),
    "trim": lambda wanted: os.environ.get("MALLOC_TRIM_THRESHOLD_") or None,
    "glibc": lambda wanted: platform.libc_ver()[0] == "glibc",
    "cupy": lambda wanted: cupy_wheels(),
    "gpus": lambda wanted: _gpus(),
    "card_trouble": lambda wanted: _card_trouble(),
    "cache_trouble": lambda wanted: cache_trouble(),
    "folder_trouble": lambda wanted: folder_trouble(wanted.folder, wanted.mark) if wanted.folder else "",
    "datasets": _datasets,
    "scratch": lambda wanted: {name: folder_trouble(url) for name, url in wanted.scratch.items()},
}


# -- on workers and the scheduler ----------------------------------------------------------------------------


async def look(asked: Iterable[str], wanted: Wanted, dask_worker: Worker) -> dict[str, Any]:
    """On a worker: its settings, and the answers of the probes asked for."""
    from scalelatent.engine.dask.hooks import worker_settings

    # In a thread: a file system that hangs, or an import of seconds, must not silence the worker.
    settings = worker_settings(dask_worker)
    # Workers that do not offer a card must not take memory on it.
    probes = [name for name in asked if name != "card_trouble" or settings["offers_gpu"]]
    return settings | await asyncio.to_thread(_probe, probes, wanted)


def _probe(asked: list[str], wanted: Wanted) -> dict[str, Any]:
    return {name: PROBES[name](wanted) for name in asked}


def look_at_scheduler(dask_scheduler: Scheduler) -> dict[str, Any]:
    """On the scheduler: how it was started, what its dashboard shows, and its versions."""
    from scalelatent.engine.dask.hooks import scheduler_settings

    return {"versions": versions(), **scheduler_settings(dask_scheduler)}


# -- from here -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterView:
    """What a cluster answered."""

    address: str
    wanted: Wanted = field(default_factory=Wanted)
    # of `look_at_scheduler`; empty where it cannot import scalelatent, or was not asked
    scheduler: Facts = field(default_factory=dict)
    workers: Mapping[str, Facts] = field(default_factory=dict)  # answers of the probes by worker
    silent: Mapping[str, str] = field(default_factory=dict)  # worker to why it did not answer
    # by worker, by Dask's own means where scalelatent is missing
    versions: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    # seconds that a worker's clock is ahead, beyond the time of the question
    skews: Mapping[str, float] = field(default_factory=dict)
    trouble: str = ""  # with the folder, on this machine

    def of(self, fact: str) -> dict[str, Any]:
        """Worker -> one fact."""
        return {address: told[fact] for address, told in self.workers.items()}

    def by_host(self) -> dict[str, list[Facts]]:
        """Host -> facts of its workers."""
        hosts: dict[str, list[Facts]] = defaultdict(list)
        for told in self.workers.values():
            hosts[told["host"]].append(told)
        return hosts


def look_at_cluster(
    client: Client, asked: Collection[str], wanted: Wanted, seconds: float | None = None
) -> ClusterView:
    """Ask the workers by probes, or for ``skew`` and ``scheduler``; all must answer if no time is given."""
    probes = sorted(PROBES.keys() & set(asked))
    with _marked(wanted if "folder_trouble" in asked else replace(wanted, folder=None)) as (
        marked,
        trouble,
    ):
        if seconds is None:
            answers = ask_every_worker(client, look, probes, marked)
        else:
            answers = ask_workers(client, look, probes, marked, seconds=seconds)
    told = {address: answer for address, answer in answers.items() if isinstance(answer, dict)}
    failed = {address: answer for address, answer in answers.items() if isinstance(answer, Exception)}
    lacking = [address for address, error in failed.items() if not isinstance(error, TimeoutError | OSError)]
    scheduler: Facts = {}
    if {"versions", "scheduler"} & set(asked):
        try:
            scheduler = ask_scheduler(client, look_at_scheduler)
        except RunError:
            raise
        except Exception:  # noqa: BLE001  whatever an import there raises
            scheduler = {}
    found = {address: facts["versions"] for address, facts in told.items() if "versions" in facts}
    if "versions" in asked and (lacking or not scheduler):
        of_scheduler, of_workers = _versions_by_dask(client)
        scheduler = scheduler or {"versions": of_scheduler}
        found |= {address: of_workers.get(address, {}) for address in lacking}
    skews = _skews(client, told, seconds) if "skew" in asked else {}
    silent = {
        address: f"{type(error).__name__}: {error}" if address in lacking else str(error)
        for address, error in failed.items()
    }
    return ClusterView(address_of(client), wanted, scheduler, told, silent, found, skews, trouble)


@contextmanager
def _marked(wanted: Wanted) -> Iterator[tuple[Wanted, str]]:
    """Leave a file in the folder for the workers to see; and what went wrong with that."""
    if wanted.folder is None:
        yield wanted, ""
        return
    mark = f".seen-{uuid.uuid4().hex[:12]}"
    try:
        place = locate(wanted.folder)
        place.make()
        place.write(mark, b"seen")
    except (OSError, ScalelatentError) as error:
        yield replace(wanted, folder=None), getattr(error, "strerror", None) or str(error)
        return
    try:
        yield replace(wanted, mark=mark), ""
    finally:
        with suppress(OSError, ScalelatentError):
            place.delete(mark)


def _skews(client: Client, workers: Iterable[str], seconds: float | None) -> dict[str, float]:
    before = time.time()
    clocks = ask_workers(client, time.time, workers=list(workers), seconds=seconds)
    after = time.time()
    return {
        address: max(0.0, clock - after) - max(0.0, before - clock)
        for address, clock in clocks.items()
        if isinstance(clock, float)
    }


def _versions_by_dask(client: Client) -> tuple[dict[str, str | None], dict[str, dict[str, str | None]]]:
    """Versions of the scheduler and of the workers, for those that cannot import scalelatent."""
    names = [name for name in (*COMPARED, *CUPY) if name != "python"]  # which Dask tells by itself
    try:
        asked: Any = call_with_timeout(ASK_SECONDS, lambda: client.get_versions(packages=names))
    except TimeoutError:  # a worker hangs, which other checks tell
        return {}, {}
    workers = {
        address: told["packages"] | {"scalelatent": None} for address, told in asked["workers"].items()
    }
    return asked["scheduler"]["packages"] | {"scalelatent": None}, workers
