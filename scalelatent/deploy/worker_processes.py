"""Configure worker processes, and run the workers of this machine for a scheduler on another machine."""

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

# Environment of worker processes: one thread per library, and freed memory is returned to the system.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": 1,
    "MKL_NUM_THREADS": 1,
    "OPENBLAS_NUM_THREADS": 1,
    "NUMBA_NUM_THREADS": 1,
    "MALLOC_TRIM_THRESHOLD_": 65536,
}
# A task that no worker can run fails after five minutes; by default the task waits forever. If a worker
# dies, Dask counts one failure for each task on this worker, whatever the cause (distributed#5234). A task
# therefore fails only after more than ten such failures.
SCHEDULER_SETTINGS = {
    "distributed.scheduler.no-workers-timeout": "5 minutes",
    "distributed.scheduler.allowed-failures": 10,
}

# Intervals of background work in each process: the default of Dask, and a longer interval that takes less
# time from computing threads. Other values, which a user has set, are kept.
BACKGROUND_INTERVALS = {
    "distributed.worker.profile.interval": ("10ms", "100ms"),
    "distributed.admin.tick.interval": ("20ms", "500ms"),
    "distributed.worker.memory.monitor-interval": ("100ms", "500ms"),
    "distributed.admin.system-monitor.interval": ("500ms", "2s"),
}
# Dask closes a worker process that is still absent this long after its connection was lost. The tuple has
# the key of Dask's configuration, Dask's default, and a longer time, so that the running fit, and not Dask,
# decides about lost workers.
LOST_WORKER_TIMEOUT = ("distributed.deploy.lost-worker-timeout", "15s", "1 hour")
PROCESS_BYTES = 128 * 2**20  # memory of a worker process before it reads rows
ALLOWED_WORKERS = 16  # up to this number of workers may start on every machine, without a check of its memory


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
    on_joined: Callable[[list[str]], None] = lambda names: None,
) -> None:
    """Run the workers of this machine for a scheduler on another machine, until the scheduler ends.

    Worker names start with ``name``, by default the name of this machine and the process id. ``on_joined``
    receives the names when all workers have joined. ``host`` is the address on which the workers listen, by
    default the address of this machine in the network of the scheduler.
    """
    from distributed.comm.addressing import get_address_host
    from distributed.utils import get_ip

    check_numbers(workers, threads, gpus, 0)
    if workers + gpus < 1:
        raise JobError(f"workers = {workers} and gpus = {gpus}; start at least one worker")
    scheme, _, netloc = scheduler.partition("://")
    if scheme == "tls" and security is None:
        raise JobError(f"{scheduler} uses TLS; give --tls-folder, or --tls-ca-file, --tls-cert and --tls-key")
    try:
        host = host or get_ip(get_address_host(scheduler))
    except (ValueError, OSError) as error:
        raise JobError(
            f"scheduler {scheduler!r} is not an address ({error}); write for example tls://head:8786"
        ) from None
    common = {"host": host, "protocol": f"{scheme if netloc else 'tcp'}://", "security": security}
    specs = worker_specs(workers, threads, gpus, memory_limit, common)
    default = f"{socket.gethostname()}-{os.getpid()}"  # unique: a scheduler refuses two workers of one name
    logging.getLogger("distributed").setLevel(logging.WARNING)
    with dask_configuration():
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
                f"scheduler {scheduler!r} did not accept these workers within {wait_seconds:.0f} s "
                f"({reason}); check its address, the network between the machines, and the certificates"
            )
        on_joined([nanny.name for nanny in nannies])
        await asyncio.gather(*(nanny.finished() for nanny in nannies))
    finally:
        for task in starting:
            task.cancel()
        await asyncio.gather(*(nanny.close() for nanny in nannies), return_exceptions=True)


def visible_gpus() -> list[str]:
    """Return one value of ``CUDA_VISIBLE_DEVICES`` per GPU of this machine, without loading CUDA."""
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
def dask_configuration() -> Iterator[None]:
    """Configure Dask for schedulers and nannies that start in the ``with`` block."""
    import dask

    environ = {**dask.config.get("distributed.nanny.pre-spawn-environ", {}), **WORKER_ENVIRONMENT}
    found = BACKGROUND_INTERVALS.items()
    intervals = {key: longer for key, (default, longer) in found if dask.config.get(key) == default}
    with dask.config.set({"distributed.nanny.pre-spawn-environ": environ, **SCHEDULER_SETTINGS, **intervals}):
        yield


@contextmanager
def tolerate_lost_workers() -> Iterator[None]:
    """Configure Dask for a cluster whose workers may be lost for minutes."""
    import dask

    key, default, longer = LOST_WORKER_TIMEOUT
    with dask.config.set({key: longer} if dask.config.get(key) == default else {}):
        yield


def worker_specs(
    workers: int, threads: int, gpus: int, memory_limit: str | int | float, common: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the specification of each worker by name, for `distributed.SpecCluster`."""
    from distributed import Nanny

    devices = visible_gpus() if gpus else []
    if len(devices) < gpus:
        raise JobError(
            f"gpus = {gpus}, but this machine has {len(devices)} visible GPU(s) "
            f"({', '.join(devices) or 'none'}); check nvidia-smi and CUDA_VISIBLE_DEVICES, or start fewer"
        )
    options = common | {
        "memory_limit": divide_memory(memory_limit, workers + gpus),
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


def divide_memory(limit: str | int | float, processes: int) -> str | int | float:
    """Return a given memory limit, or, for ``"auto"``, the bytes for each of ``processes`` workers.

    ``"auto"`` of Dask divides by cores: with more workers than cores, their limits exceed the memory.
    """
    if limit != "auto":
        try:
            return check_memory(limit)
        except ValueError as error:
            raise JobError(f"memory_limit = {limit!r}: {error}") from None
    from distributed.system import MEMORY_LIMIT

    return int(MEMORY_LIMIT // max(1, processes))


def check_memory(limit: str | int | float) -> str | int | float:
    """Return a valid memory limit ('auto', '2GiB', bytes, a share, 0: none); raise ValueError otherwise."""
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
    """Return the first cause of an error, because errors of Dask only say that something failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def check_dashboard_address(address: str | None) -> None:
    """Refuse a dashboard address without a valid port."""
    _, colon, port = (address or "").rpartition(":")
    if colon and not (port.isdecimal() and int(port) < 65536):
        raise JobError(
            f"dashboard {address!r}: {port!r} is not a port; give HOST:PORT with a port from 0 (a free one) "
            "to 65535"
        )


def check_numbers(workers: int, threads: int, gpus: int, port: int) -> None:
    """Refuse numbers that are too small, and more workers than fit the memory of this machine."""
    least = {
        "workers": (workers, 0),
        "threads": (threads, 1),
        "gpus": (gpus, 0),
        "port": (port, 0),
    }
    for name, (value, bound) in least.items():
        if value < bound:
            raise JobError(f"{name} = {value}: give at least {bound}")
    if workers > ALLOWED_WORKERS:
        from distributed.system import MEMORY_LIMIT

        most = max(ALLOWED_WORKERS, MEMORY_LIMIT // PROCESS_BYTES)
        if workers > most:
            raise JobError(
                f"workers = {workers}: at most {most} worker processes fit the {MEMORY_LIMIT / 2**30:.1f} "
                f"GiB of this machine; give about one per core ({os.cpu_count()}), or start workers on other "
                "machines: scalelatent cluster join"
            )
