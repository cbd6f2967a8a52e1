"""Clusters started on this machine, and the client of the enclosing `sl.cluster`."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from scalelatent.errors import JobError, RunError

from .security import security_from
from .worker_processes import (
    configured,
    first_cause,
    patient,
    refuse_numbers,
    refuse_page,
    worker_specs,
)

if TYPE_CHECKING:
    from distributed import Client, Security, SpecCluster, Worker, WorkerPlugin

    from scalelatent.typing import ClientLike

_current: ContextVar[Client | None] = ContextVar("scalelatent_client", default=None)
_job: ContextVar[str] = ContextVar("scalelatent_job", default="")
CLOSE_SECONDS = 60
# Puts our page on the dashboard of a scheduler that starts.
PAGE_PRELOAD = "scalelatent.monitor.preload"


def current_client() -> Client | None:
    """The client of the enclosing ``with sl.cluster(…)``, or None."""
    return _current.get()


@runtime_checkable
class HasScheduler(Protocol):
    """What clusters of Dask's packages have in common."""

    @property
    def scheduler_address(self) -> str: ...


@runtime_checkable
class TellsWorkers(Protocol):
    """What a client is asked for first; a cluster that is only planned tells it as well."""

    def scheduler_info(self, n_workers: int = ...) -> object: ...


@contextmanager
def client_of(given: ClientLike | None) -> Iterator[Client | None]:
    """The client that is given, one of a cluster that is given (closed here), else that of `sl.cluster`."""
    if given is None:
        yield current_client()
    elif isinstance(given, HasScheduler):
        from distributed import Client

        with Client(given, set_as_default=False) as client:
            yield client
    elif isinstance(given, TellsWorkers):
        _refuse_unusable(given)
        yield given
    else:
        raise TypeError(
            f"client={given!r} is neither a distributed.Client nor a cluster that runs (LocalCluster, "
            "KubeCluster, SLURMCluster): for a scheduler's address pass distributed.Client(address)"
        )


def _refuse_unusable(client: TellsWorkers) -> None:
    from distributed import Client

    if not isinstance(client, Client):  # a cluster that is only planned
        return
    if client.asynchronous:
        raise TypeError(
            f"client={client!r} is asynchronous, and these calls wait for what they compute: pass "
            "distributed.Client(address) without asynchronous=True, and call them in a thread "
            "(asyncio.to_thread)"
        )
    if client.status in ("closed", "closing"):
        raise RunError(f"client={client!r} is closed: make a new one, distributed.Client(address)")


def current_job() -> str:
    """Id of the job whose driver runs here, see :func:`job_named`; empty where it is none."""
    return _job.get()


@contextmanager
def job_named(identity: str) -> Iterator[None]:
    """Put the id of a job into the names of the tasks of its fits: several share a dashboard."""
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
    """A Dask cluster for the fits inside.

    Parameters
    ----------
    kind : {"local"} or str
        ``"local"`` starts a scheduler and worker processes on this machine, on loopback. Anything else is the
        address of a scheduler; of what follows only ``security`` counts then.
    workers : int
        CPU workers.
    threads : int
        Of each CPU worker.
    memory_limit : str, int or float
        Of each worker, for example ``"4GB"``, in bytes, or as a share of the machine; ``"auto"`` shares the
        memory this process may use (its container's, not the machine's) among all workers.
    gpus : int
        Workers beside them with the resource ``GPU``: one process and one thread for each device, which is
        the only one it sees. CPU workers then see none.
    dashboard_address : str or None
        Host and port of the dashboard; port 0 takes a free one, None none.
    host, port : str, int
        Where scheduler and workers listen, and the scheduler's port; 0 takes a free one.
    security : distributed.Security, optional
        Certificates for TLS. For a scheduler's address None means what Dask's own configuration names.

    Yields
    ------
    distributed.Client
        Its ``dashboard_link`` is the page to watch.

    Raises
    ------
    JobError
        Fewer GPUs than asked for, a port that is taken, or a number below its least.

    Examples
    --------
    >>> import scalelatent as sl
    >>> with sl.cluster("local", workers=1, dashboard_address=None) as client:  # doctest: +SKIP
    ...     sl.CapsuleRegression().fit(dataset)
    """
    from distributed import Client

    if kind != "local":
        with Client(kind, timeout=30, security=security or security_from()) as client:
            yield from _entered(client)
        return
    if workers + gpus < 1:
        raise JobError(f"workers = {workers}: give at least 1, or GPU workers")
    local = start_cluster(
        workers=workers, threads=threads, memory_limit=memory_limit, gpus=gpus,
        dashboard_address=dashboard_address, host=host, port=port, security=security,
    )  # fmt: skip
    try:
        with patient(), Client(local) as client:
            client.register_plugin(deaf_to_ctrl_c())
            yield from _entered(client)
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
    """A scheduler in this process and worker processes under nannies; options as of `cluster`."""
    import dask
    from distributed import Scheduler, SpecCluster

    refuse_numbers(workers, threads, gpus, port)
    refuse_page(dashboard_address)
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
    with configured():
        try:
            return SpecCluster(
                workers=specs, scheduler=scheduler, worker=next(iter(specs.values()), None),
                security=security, silence_logs=logging.WARNING, name="scalelatent",
            )  # fmt: skip
        except (OSError, RuntimeError) as error:
            page = f", dashboard on {dashboard_address}" if dashboard_address else ""
            raise JobError(
                f"no cluster starts on {host}:{port}{page} ({first_cause(error)}); port 0 takes a free one, "
                "hosts must be addresses of this machine, and a script starts its cluster below "
                '`if __name__ == "__main__":`, since every worker imports the script'
            ) from error


def close_cluster(started: SpecCluster) -> None:
    """End a cluster of :func:`start_cluster` and all its processes."""
    # Closing fails on a worker that was replaced while the machine was too busy; it is closed all the same.
    with suppress(KeyError):
        started.close(timeout=CLOSE_SECONDS)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_of(host: str) -> str:
    """The loopback address that Dask takes a name or an address for, empty where it is another's."""
    from distributed.utils import ensure_ip

    try:
        found = ensure_ip(host.strip("[]"))
    except (OSError, ValueError):  # of whoever listens there
        return ""
    return found if is_loopback(found) else ""


def refuse_loopback(host: str, or_else: str = "") -> None:
    """JobError for an address that no other machine reaches, as Debian's own name (127.0.1.1) is."""
    if found := loopback_of(host):
        raise JobError(
            f"host {host} is this machine alone ({found}): give its address as the other machines see it"
            f"{or_else} (--host)"
        )


def deaf_to_ctrl_c() -> WorkerPlugin:
    """A worker plugin that ignores a terminal's Ctrl-C: the driver ends the workers."""
    from distributed import WorkerPlugin

    class DeafToCtrlC(WorkerPlugin):
        name = "scalelatent-deaf-to-ctrl-c"

        def setup(self, worker: Worker) -> None:
            import signal
            import threading

            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)

    return DeafToCtrlC()


def _entered(client: Client) -> Iterator[Client]:
    token = _current.set(client)
    try:
        yield client
    finally:
        _current.reset(token)
