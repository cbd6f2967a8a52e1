"""Worker processes: how they are configured, and those of a machine that joins a cluster elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelatent.errors import JobError

if TYPE_CHECKING:
    from distributed import Security

PIN = {
    "OMP_NUM_THREADS": 1,
    "MKL_NUM_THREADS": 1,
    "OPENBLAS_NUM_THREADS": 1,
    "NUMBA_NUM_THREADS": 1,
    "MALLOC_TRIM_THRESHOLD_": 65536,
}
# A task whose resource no worker offers fails after five minutes, not never. All tasks of a worker that dies
# count as suspect (distributed#5234), so a few deaths must not fail them.
SCHEDULER = {
    "distributed.scheduler.no-workers-timeout": "5 minutes",
    "distributed.scheduler.allowed-failures": 10,
}

# What every process of a cluster does on the side, many times a second: Dask's interval, and ours, which is
# enough and costs the threads that compute less. A user's settings stay.
ON_THE_SIDE = {
    "distributed.worker.profile.interval": ("10ms", "100ms"),
    "distributed.admin.tick.interval": ("20ms", "500ms"),
    "distributed.worker.memory.monitor-interval": ("100ms", "500ms"),
    "distributed.admin.system-monitor.interval": ("500ms", "2s"),
}
# Read when a worker is lost: Dask gives up one that dies twice in this time, while we find out why.
LOST_SECONDS = ("distributed.deploy.lost-worker-timeout", "15s", "1 hour")


# What a worker needs before it reads a row, and how many may always be asked for.
PROCESS_BYTES, WITHOUT_ASKING = 128 * 2**20, 16


async def run_workers(
    scheduler: str,
    *,
    workers: int = 1,
    threads: int = 1,
    memory_limit: str | int | float = "auto",
    gpus: int = 0,
    host: str | None = None,
    name: str | None = None,
    security: Security | None = None,
    wait_seconds: float = 300,
    told: Callable[[list[str]], None] = lambda names: None,
) -> None:
    """Run the workers of this machine for a scheduler elsewhere, until it ends.

    Names begin with `name`, by default this machine's name and the process; `told` gets them once they have
    joined. `host` is the address to listen on, by default this machine's as the scheduler's network sees it.
    """
    from distributed.comm.addressing import get_address_host
    from distributed.utils import get_ip

    refuse_numbers(workers, threads, gpus, 0)
    if workers + gpus < 1:
        raise JobError("nothing to start: give --workers or --gpus")
    scheme, _, place = scheduler.partition("://")
    if scheme == "tls" and security is None:
        raise JobError(
            f"{scheduler} speaks TLS: give --tls-folder, or --tls-ca-file, --tls-cert and --tls-key"
        )
    try:
        host = host or get_ip(get_address_host(scheduler))
    except (ValueError, OSError) as error:
        raise JobError(
            f"{scheduler!r} is not an address ({error}); write for example tls://head:8786"
        ) from None
    common = {"host": host, "protocol": f"{scheme if place else 'tcp'}://", "security": security}
    specs = worker_specs(workers, threads, gpus, memory_limit, common)
    default = f"{socket.gethostname()}-{os.getpid()}"  # the scheduler refuses a name it has
    logging.getLogger("distributed").setLevel(logging.WARNING)
    with configured():
        nannies = [
            spec["cls"](scheduler, name=f"{name or default}-{key}", death_timeout=wait_seconds,
                        **spec["options"])
            for key, spec in specs.items()
        ]  # fmt: skip
    starting = [asyncio.ensure_future(nanny.start()) for nanny in nannies]
    try:
        _, late = await asyncio.wait(starting, timeout=wait_seconds, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task.exception() for task in starting if task.done() and task.exception() is not None]
        if failed or late:
            reason = first_cause(failed[0]) if failed and failed[0] else "no answer"
            raise JobError(
                f"scheduler {scheduler!r} did not take these workers within {wait_seconds:.0f} s ({reason}); "
                "check its address, whether this machine can reach it, and the certificates"
            )
        told([nanny.name for nanny in nannies])
        await asyncio.gather(*(nanny.finished() for nanny in nannies))
    finally:
        for task in starting:
            task.cancel()
        await asyncio.gather(*(nanny.close() for nanny in nannies), return_exceptions=True)


def visible_gpus() -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` may name here, one entry for each device; no CUDA is loaded."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [part.strip() for part in named.split(",") if part.strip() not in ("", "-1")]
    count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        with suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=True)
            count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return [str(i) for i in range(count)]


@contextmanager
def configured() -> Iterator[None]:
    """Dask's configuration for schedulers and nannies that start inside."""
    import dask

    environ = {**dask.config.get("distributed.nanny.pre-spawn-environ", {}), **PIN}
    calmer = {key: ours for key, (theirs, ours) in ON_THE_SIDE.items() if dask.config.get(key) == theirs}
    with dask.config.set({"distributed.nanny.pre-spawn-environ": environ, **SCHEDULER, **calmer}):
        yield


@contextmanager
def patient() -> Iterator[None]:
    """Dask's configuration as long as a cluster runs whose workers may be lost for minutes."""
    import dask

    key, theirs, ours = LOST_SECONDS
    with dask.config.set({key: ours} if dask.config.get(key) == theirs else {}):
        yield


def worker_specs(
    workers: int, threads: int, gpus: int, memory_limit: str | int | float, common: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """The workers' specifications by name."""
    from distributed import Nanny

    devices = visible_gpus() if gpus else []
    if len(devices) < gpus:
        raise JobError(
            f"{gpus} GPU workers asked for, but this machine shows {len(devices)} CUDA device(s) "
            f"({', '.join(devices) or 'none'}); see nvidia-smi and CUDA_VISIBLE_DEVICES, or ask for fewer"
        )
    options = common | {
        "memory_limit": _memory(memory_limit, workers + gpus),
        "silence_logs": logging.WARNING,
        "dashboard": False,
    }
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"} if gpus else {}
    cpu = {"cls": Nanny, "options": options | {"nthreads": threads, "env": hidden}}
    found = {f"cpu-{i}": cpu for i in range(workers)}
    for i, device in enumerate(devices[:gpus]):
        env = {"CUDA_VISIBLE_DEVICES": device}
        found[f"gpu-{i}"] = {
            "cls": Nanny, "options": options | {"nthreads": 1, "resources": {"GPU": 1}, "env": env}
        }  # fmt: skip
    return found


def _memory(limit: str | int | float, processes: int) -> str | int | float:
    """Dask's own ``"auto"`` counts threads, and promises memory twice where workers outnumber cores."""
    if limit != "auto":
        try:
            return check_memory(limit)
        except ValueError as error:
            raise JobError(f"memory_limit = {limit!r}: {error}") from None
    from distributed.system import MEMORY_LIMIT

    return int(MEMORY_LIMIT // max(1, processes))


def check_memory(limit: str | int | float) -> str | int | float:
    """A memory limit if Dask reads it ('auto', '2GiB', bytes, a share, 0 for none), else ValueError."""
    from dask.utils import parse_bytes

    try:
        if limit == "auto" or 0 <= parse_bytes(limit) < 2**63:
            return limit
    except (ValueError, TypeError, KeyError, OverflowError):
        pass
    raise ValueError(
        f"{limit!r} is not an amount of memory; write for example '2GiB', 'auto', or 0 for no limit"
    )


def first_cause(error: BaseException) -> BaseException:
    """The first cause of an error of Dask, whose own message says only that something failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def refuse_page(address: str | None) -> None:
    """Refuse an address of the dashboard without a valid port."""
    _, colon, port = (address or "").rpartition(":")
    if colon and not (port.isdecimal() and int(port) < 65536):
        raise JobError(
            f"dashboard {address!r}: {port!r} is not a port; give HOST:PORT with a port from 0 (free) to "
            "65535"
        )


def refuse_numbers(workers: int, threads: int, gpus: int, port: int) -> None:
    """Refuse a number below its least, and more processes than this machine can hold."""
    least = {
        "workers": (workers, 0),
        "threads": (threads, 1),
        "gpus": (gpus, 0),
        "port": (port, 0),
    }
    for name, (value, bound) in least.items():
        if value < bound:
            raise JobError(f"{name} = {value}: give at least {bound}")
    if workers > WITHOUT_ASKING:
        from distributed.system import MEMORY_LIMIT

        most = max(WITHOUT_ASKING, MEMORY_LIMIT // PROCESS_BYTES)
        if workers > most:
            raise JobError(
                f"workers = {workers}: the {MEMORY_LIMIT / 2**30:.1f} GiB of this machine hold {most} "
                f"processes at most; give about as many as it has cores ({os.cpu_count()}), or start workers "
                "on other machines: scalelatent cluster join"
            )
