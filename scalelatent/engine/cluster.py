"""Clusters for people who have none at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

_current: ContextVar[Any] = ContextVar("scalelatent_client", default=None)
PIN = {
    "OMP_NUM_THREADS": 1,
    "MKL_NUM_THREADS": 1,
    "OPENBLAS_NUM_THREADS": 1,
    "NUMBA_NUM_THREADS": 1,
    "MALLOC_TRIM_THRESHOLD_": 65536,
}


def current_client() -> Any:
    """The client of the enclosing ``with sl.cluster(…)``, or None."""
    return _current.get()


@contextmanager
def cluster(
    kind: str = "local",
    *,
    workers: int = 2,
    threads: int = 1,
    memory_limit: str | int = "auto",
    dashboard_address: str | None = "127.0.0.1:0",
) -> Iterator[Any]:
    """A Dask cluster for the fits inside.

    Parameters
    ----------
    kind : {"local"} or str
        ``"local"`` starts worker processes on this machine, on loopback; anything else is the address of a
        scheduler.
    workers, threads : int
        Worker processes, and threads of each.
    memory_limit : str or int
        Of each worker, for example ``"4GB"``.
    dashboard_address : str or None
        Host and port of the dashboard; port 0 takes a free one, None none.

    Yields
    ------
    distributed.Client
        Its ``dashboard_link`` is the page to watch.

    Examples
    --------
    >>> import scalelatent as sl
    >>> with sl.cluster("local", workers=1, dashboard_address=None) as client:  # doctest: +SKIP
    ...     sl.CapsuleRegression().fit(dataset)
    """
    import dask
    from distributed import Client, LocalCluster

    if kind != "local":
        with Client(kind, timeout=30) as client:
            yield from _entered(client)
        return
    environ = {**dask.config.get("distributed.nanny.pre-spawn-environ", {}), **PIN}
    with dask.config.set({"distributed.nanny.pre-spawn-environ": environ}):
        local = LocalCluster(
            n_workers=workers,
            threads_per_worker=threads,
            memory_limit=memory_limit,
            host="127.0.0.1",
            dashboard_address=dashboard_address or "127.0.0.1:0",
            scheduler_kwargs={} if dashboard_address else {"dashboard": False},
        )
        try:
            with Client(local) as client:
                client.register_plugin(_deaf_to_ctrl_c())
                yield from _entered(client)
        finally:
            # Closing stumbles over a worker that was replaced while the machine was too busy; it is closed
            # all the same.
            with suppress(KeyError):
                local.close(timeout=60)


def _deaf_to_ctrl_c() -> Any:
    """A worker plugin that keeps a terminal's Ctrl-C from the workers.

    A terminal sends it to every process of a command; workers that die of it could not finish the pass whose
    end the driver waits for. They end when the driver closes the cluster.
    """
    from distributed import WorkerPlugin

    class DeafToCtrlC(WorkerPlugin):
        name = "scalelatent-deaf-to-ctrl-c"

        def setup(self, worker: Any) -> None:
            import signal
            import threading

            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)

    return DeafToCtrlC()


def _entered(client: Any) -> Iterator[Any]:
    token = _current.set(client)
    try:
        yield client
    finally:
        _current.reset(token)
