"""What a process tells of itself to the checks: this one, each worker and the scheduler; they only look."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from scalelatent.engine.cache import machine_memory
from scalelatent.errors import ScalelatentError
from scalelatent.storage.disk import is_local
from scalelatent.storage.folder_probe import folder_trouble

from .versions import versions

__all__ = ["Wanted", "cache_trouble", "cupy_wheels", "look", "look_at_scheduler", "peak_bytes", "usable_cpus"]


@dataclass(frozen=True)
class Wanted:
    """What a run wants of the machine or cluster.

    Attributes
    ----------
    folder, mark : str, optional
        Where it is written, and the name of a file that the asking process has left there.
    device : str
    datasets, scratch : dict of str to str
        Setting of the job, such as ``[data] train``, to where the rows are, or may be written.
    """

    folder: str | None = None
    mark: str | None = None
    device: str = "auto"
    datasets: Mapping[str, str] = field(default_factory=dict)
    scratch: Mapping[str, str] = field(default_factory=dict)


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
    from scalelatent.kernels.jit import CACHE

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


def peak_bytes() -> int:
    """Peak resident memory of this process. Where possible not ru_maxrss: it outlives exec, so tells of the
    parent.
    """
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


PROBES: dict[str, Callable[[Wanted], Any]] = {
    "versions": lambda wanted: versions(),
    "host": lambda wanted: socket.gethostname(),
    "cores": lambda wanted: usable_cpus()[0],
    "machine_bytes": lambda wanted: machine_memory()[0],
    "pools": lambda wanted: pool_threads(),
    "trim": lambda wanted: os.environ.get("MALLOC_TRIM_THRESHOLD_") or None,
    "glibc": lambda wanted: platform.libc_ver()[0] == "glibc",
    "cupy": lambda wanted: cupy_wheels(),
    "gpus": lambda wanted: _gpus(),
    "cache_trouble": lambda wanted: cache_trouble(),
    "folder_trouble": lambda wanted: folder_trouble(wanted.folder, wanted.mark) if wanted.folder else "",
    "datasets": _datasets,
    "scratch": lambda wanted: {name: folder_trouble(url) for name, url in wanted.scratch.items()},
}


async def look(asked: Iterable[str], wanted: Wanted, dask_worker: Any) -> dict[str, Any]:
    """On a worker: its settings, and the answers of the probes asked for."""
    from scalelatent.engine.dask.hooks import worker_settings

    # In a thread: a file system that hangs, or an import of seconds, must not silence the worker.
    return worker_settings(dask_worker) | await asyncio.to_thread(_probe, list(asked), wanted)


def _probe(asked: list[str], wanted: Wanted) -> dict[str, Any]:
    return {name: PROBES[name](wanted) for name in asked}


def look_at_scheduler(dask_scheduler: Any) -> dict[str, Any]:
    """On the scheduler: how it was started, what its dashboard shows, and its versions."""
    from scalelatent.engine.dask.hooks import scheduler_settings

    return {"versions": versions(), **scheduler_settings(dask_scheduler)}
