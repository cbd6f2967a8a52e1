"""Start clusters on this machine, and find the client and the job id of a fit."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from scalelatent.errors import JobError, RunError

from .security import make_security
from .worker_processes import (
    check_dashboard_address,
    check_numbers,
    dask_configuration,
    first_cause,
    tolerate_lost_workers,
    worker_specs,
)

if TYPE_CHECKING:
    from distributed import Client, Security, SpecCluster, Worker, WorkerPlugin

    from scalelatent.typing import ClientLike

logger = logging.getLogger("scalelatent")
_current: ContextVar[Client | None] = ContextVar("scalelatent_client", default=None)
_job: ContextVar[str] = ContextVar("scalelatent_job", default="")
CLOSE_SECONDS = 60  # time limit for the end of all processes of a cluster
PAGE_PRELOAD = "scalelatent.monitor.preload"  # adds the page Scalelatent to the dashboard of a new scheduler


def current_client() -> Client | None:
    """Return the client of the enclosing ``with sl.cluster(…)``, or None."""
    return _current.get()


@runtime_checkable
class HasScheduler(Protocol):
    """Interface that the cluster classes of Dask packages, such as LocalCluster, have in common."""

    @property
    def scheduler_address(self) -> str: ...


@runtime_checkable
class HasSchedulerInfo(Protocol):
    """Interface that a Dask client shares with `PlannedCluster`, which only lists workers."""

    def scheduler_info(self, n_workers: int = ...) -> object: ...


@contextmanager
def use_client(given: ClientLike | None) -> Iterator[Client | None]:
    """Yield the given client, a client of the given cluster, or the client of the enclosing `sl.cluster`."""
    if given is None:
        yield current_client()
    elif isinstance(given, HasScheduler):
        from distributed import Client

        with Client(given, set_as_default=False) as client:
            yield client
    elif isinstance(given, HasSchedulerInfo):
        _refuse_unusable(given)
        yield given
    else:
        raise TypeError(
            f"client={given!r} is neither a distributed.Client nor a running cluster (LocalCluster, "
            "KubeCluster, SLURMCluster); for the address of a scheduler pass distributed.Client(address)"
        )


def _refuse_unusable(client: HasSchedulerInfo) -> None:
    from distributed import Client

    if not isinstance(client, Client):  # a substitute that only lists workers, for `plan`
        return
    if client.asynchronous:
        raise TypeError(
            f"client={client!r} is asynchronous, and this call waits for its results; pass "
            "distributed.Client(address) without asynchronous=True, and make the call in a thread "
            "(asyncio.to_thread)"
        )
    if client.status in ("closed", "closing"):
        raise RunError(f"client={client!r} is closed; create a new one with distributed.Client(address)")


def current_job_id() -> str:
    """Return the id of the job that this thread runs, as set by `use_job_id`; empty without a job."""
    return _job.get()


@contextmanager
def use_job_id(identity: str) -> Iterator[None]:
    """Add the id of a job to the task names of its fits, because several jobs share a dashboard."""
    token = _job.set(identity)
    try:
        yield
    finally:
        _job.reset(token)


@contextmanager
def cluster(
    kind: str = "local",
    *,
    workers: int = 2,
    threads: int = 1,
    memory_limit: str | int | float = "auto",
    gpus: int = 0,
    dashboard_address: str | None = "127.0.0.1:0",
    host: str = "127.0.0.1",
    port: int = 0,
    security: Security | None = None,
) -> Iterator[Client]:
    """Start or connect to a Dask cluster, which the fits in the ``with`` block use.

    Parameters
    ----------
    kind : {"local"} or str
        ``"local"`` starts a scheduler and worker processes on this machine, on loopback. Any other value is
        the address of a running scheduler, for which only ``security`` applies.
    workers : int
        Number of CPU workers.
    threads : int
        Threads per CPU worker.
    memory_limit : str, int or float
        Memory limit per worker, for example ``"4GB"``, in bytes, or as a share of the machine. ``"auto"``
        divides the memory that this process may use (the limit of its container) among all workers.
    gpus : int
        Number of additional workers with the resource ``GPU``. Each is one process with one thread and sees
        one GPU. CPU workers then see no GPU.
    dashboard_address : str or None
        Host and port of the dashboard; port 0 chooses a free port, None starts no dashboard.
    host, port : str, int
        Address on which scheduler and workers listen, and port of the scheduler; 0 chooses a free port.
    security : distributed.Security, optional
        Certificates for TLS. To connect to a running scheduler, None means the configuration of Dask.

    Yields
    ------
    distributed.Client
        Client of the cluster; its ``dashboard_link`` is the address of the dashboard.

    Raises
    ------
    JobError
        The machine has fewer GPUs than ``gpus``, the port is in use, or a number is too small.

    Examples
    --------
    >>> import scalelatent as sl
    >>> with sl.cluster("local", workers=1, dashboard_address=None) as client:  # doctest: +SKIP
    ...     sl.CapsuleRegression().fit(dataset)
    """
    from distributed import Client

    if kind != "local":
        with Client(kind, timeout=30, security=security or make_security()) as client:
            yield from _use_as_current(client)
        return
    if workers + gpus < 1:
        raise JobError(f"workers = {workers} and gpus = {gpus}; start at least one worker")
    local = start_cluster(
        workers=workers, threads=threads, memory_limit=memory_limit, gpus=gpus,
        dashboard_address=dashboard_address, host=host, port=port, security=security,
    )  # fmt: skip
    try:
        with tolerate_lost_workers(), Client(local) as client:
            client.register_plugin(make_ctrl_c_plugin())
            yield from _use_as_current(client)
    finally:
        close_cluster(local)


def start_cluster(
    *,
    workers: int = 2,
    threads: int = 1,
    memory_limit: str | int | float = "auto",
    gpus: int = 0,
    dashboard_address: str | None = "127.0.0.1:0",
    host: str = "127.0.0.1",
    port: int = 0,
    security: Security | None = None,
    scheduler_file: str | os.PathLike[str] | None = None,
) -> SpecCluster:
    """Start a scheduler in this process, and worker processes with nannies; return the cluster."""
    import dask
    from distributed import Scheduler, SpecCluster

    check_numbers(workers, threads, gpus, port)
    check_dashboard_address(dashboard_address)
    protocol = "tcp://" if security is None else "tls://"
    common = {"host": host, "protocol": protocol, "security": security}
    scheduler = {
        "cls": Scheduler,
        "options": common | {
            "port": port,
            "dashboard": dashboard_address is not None,
            "dashboard_address": dashboard_address or f"{host}:0",
            "scheduler_file": None if scheduler_file is None else os.fspath(scheduler_file),
            "preload": [*dask.config.get("distributed.scheduler.preload"), PAGE_PRELOAD],
        },
    }  # fmt: skip
    specs = worker_specs(workers, threads, gpus, memory_limit, common)
    with dask_configuration():
        try:
            return SpecCluster(
                workers=specs, scheduler=scheduler, worker=next(iter(specs.values()), None),
                security=security, silence_logs=logging.WARNING, name="scalelatent",
            )  # fmt: skip
        except (OSError, RuntimeError) as error:
            page = f", dashboard on {dashboard_address}" if dashboard_address else ""
            raise JobError(
                f"no cluster could start on {host}:{port}{page} ({first_cause(error)}); port 0 chooses a "
                "free port, host must be an address of this machine, and a script must start its cluster "
                "inside "
                '`if __name__ == "__main__":`, because every worker imports the script'
            ) from error


def close_cluster(started: SpecCluster) -> None:
    """End a cluster of `start_cluster` and all its processes."""
    # Dask raises a KeyError for a worker that was replaced on a busy machine, but closes the cluster.
    try:
        with suppress(KeyError):
            started.close(timeout=CLOSE_SECONDS)
    except TimeoutError:
        logger.warning(
            "the processes of the local cluster did not end within %d s; they end with this process. Results "
            "are complete",
            CLOSE_SECONDS,
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_address(host: str) -> str:
    """Return the loopback address to which Dask resolves a host; empty if it resolves to another address."""
    from distributed.utils import ensure_ip

    try:
        found = ensure_ip(host.strip("[]"))
    except (OSError, ValueError):  # the name is unknown; the later connection reports this
        return ""
    return found if is_loopback(found) else ""


def refuse_loopback(host: str, or_else: str = "") -> None:
    """Refuse an address that other machines cannot reach, for example the host name of Debian (127.0.1.1)."""
    if found := loopback_address(host):
        raise JobError(
            f"host {host} is a loopback address ({found}), which other machines cannot reach; give the "
            f"address of this machine in the network{or_else} (--host)"
        )


def make_ctrl_c_plugin() -> WorkerPlugin:
    """Return a worker plugin that ignores Ctrl-C in a terminal, because the driver ends the workers."""
    from distributed import WorkerPlugin

    class IgnoreCtrlC(WorkerPlugin):
        name = "scalelatent-ignore-ctrl-c"

        def setup(self, worker: Worker) -> None:
            import signal
            import threading

            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)

    return IgnoreCtrlC()


def _use_as_current(client: Client) -> Iterator[Client]:
    token = _current.set(client)
    try:
        yield client
    finally:
        _current.reset(token)
