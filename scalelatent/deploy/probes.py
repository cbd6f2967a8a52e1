"""What the doctor asks of every worker and of the scheduler; runs there, and only looks."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import uuid
from importlib import metadata
from typing import Any

__all__ = ["look_at_scheduler", "look_at_worker", "probe_folder"]


async def look_at_worker(folder: str | None, token: str | None, dask_worker: Any) -> dict[str, Any]:
    """Tell what decides speed and safety in this worker.

    Parameters
    ----------
    folder : str or None
        Where runs will be written; None to leave that out.
    token : str or None
        Name of a file that the asker has put there.
    dask_worker : distributed.Worker
        Filled in by `distributed.Client.run`.

    Returns
    -------
    dict
        JSON-able: host, cores, memory, thread pools, devices, and the folder's trouble, if any.
    """
    from scalelatent.engine.dask.hooks import worker_settings

    told = worker_settings(dask_worker)
    # In a thread: a file system that hangs, or an import of seconds, must not silence the worker.
    return told | await asyncio.to_thread(_look, folder, token)


def _look(folder: str | None, token: str | None) -> dict[str, Any]:
    from dask.system import cpu_count

    from scalelatent.engine.backend import gpu_count

    from .doctor import is_cupy, memory_limit

    return {
        "host": socket.gethostname(),
        "cores": cpu_count(),
        "machine_bytes": memory_limit()[0],
        "pools": _pools(),
        "trim": os.environ.get("MALLOC_TRIM_THRESHOLD_") or None,
        "glibc": platform.libc_ver()[0] == "glibc",
        "cupy": sorted(f"{d.metadata['Name']} {d.version}" for d in metadata.distributions() if is_cupy(d)),
        "gpus": gpu_count(),
        "cache_trouble": _cache_trouble(),
        "folder_trouble": None if folder is None else probe_folder(folder, token),
    }


def _pools() -> dict[str, int]:
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


def _cache_trouble() -> str | None:
    from pathlib import Path

    from scalelatent.kernels.jit import CACHE

    from .doctor import write_problem

    problem = write_problem(Path(CACHE))
    return None if problem is None else f"{CACHE}: {problem}"


def probe_folder(folder: str, token: str | None) -> str | None:
    """Try what a run does in its folder: see what another machine has written, write, read and delete.

    Returns
    -------
    str or None
        What goes wrong.

    Examples
    --------
    >>> import tempfile
    >>> from scalelatent.deploy.probes import probe_folder
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     probe_folder(folder, None), probe_folder(folder, "left-by-the-laptop")
    (None, 'does not show what the asking machine writes there: another folder of the same name')
    """
    from scalelatent.errors import ScalelatentError
    from scalelatent.storage.disk import locate

    mine = f".doctor-{uuid.uuid4().hex[:8]}"
    try:
        place = locate(folder)
        if token is not None and token not in place.keys(""):
            return "does not show what the asking machine writes there: another folder of the same name"
        place.write(mine, b"doctor")
        try:
            works = place.read(mine) == b"doctor"
        finally:
            place.delete(mine)
    except (ScalelatentError, OSError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None if works else "what is written is not read"


def look_at_scheduler(dask_scheduler: Any) -> dict[str, Any]:
    """Tell what the scheduler was told, and what its dashboard shows."""
    from scalelatent.engine.dask.hooks import scheduler_settings

    try:
        bokeh: str | None = metadata.version("bokeh")
    except metadata.PackageNotFoundError:
        bokeh = None
    return {"bokeh": bokeh, **scheduler_settings(dask_scheduler)}
