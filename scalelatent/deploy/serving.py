"""Run a scheduler and its workers in the foreground (`scalelatent cluster up`), for jobs of any client."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from scalelatent.engine.dask.hooks import idle_seconds
from scalelatent.engine.dask.timed_calls import ask_scheduler
from scalelatent.errors import JobError

from .clusters import close_cluster, is_loopback, make_ctrl_c_plugin, start_cluster
from .connection import dashboard_url
from .security import client_tls_files, make_certificates, make_security, tls_options
from .worker_processes import tolerate_lost_workers

if TYPE_CHECKING:
    import psutil
    from distributed import Client, Security

START_SECONDS = 120  # time limit for all workers to start
WATCH_SECONDS = 1.0  # seconds between checks for idleness
REPEAT_SECONDS = 1.0  # signals within this time count as one
STOP_SIGNALS = (
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP] if hasattr(signal, "SIGHUP") else [signal.SIGINT]
)


def prepare_certificates(folder: str | os.PathLike[str]) -> tuple[Security, dict[str, str]]:
    """Create or reuse the certificates of a cluster; return its TLS settings and the files for clients."""
    made = make_certificates(folder)
    security = make_security(made["ca.pem"], made["cluster-cert.pem"], made["cluster-key.pem"])
    assert security is not None
    client = {"ca": "ca.pem", "cert": "client-cert.pem", "key": "client-key.pem"}
    return security, {name: str(made[file]) for name, file in client.items()}


@dataclass(frozen=True)
class Served:
    """Running cluster of `scalelatent cluster up`: its client, and a description for users."""

    client: Client
    info: dict[str, Any]

    def wait(self, idle_minutes: float | None = None) -> None:
        """Wait until a signal, or until the cluster has had no task for ``idle_minutes``."""
        while True:
            time.sleep(WATCH_SECONDS)
            if idle_minutes and ask_scheduler(self.client, idle_seconds) > 60 * idle_minutes:
                return


@contextmanager
def serve(
    *, security: Security | None = None, client_files: dict[str, str] | None = None, **options: Any
) -> Iterator[Served]:
    """Run a cluster, with the options of `start_cluster`, during the ``with`` block.

    ``info`` of the result has values for JSON: ``scheduler`` and ``dashboard`` (addresses),
    ``scheduler_file``, ``pid``, ``workers`` (list of name, address, threads, memory_bytes, resources),
    ``tls`` (``client_files``, or the files of ``security``), ``next`` (commands), ``warnings``.
    """
    from distributed import Client

    started = start_cluster(security=security, **options)
    try:
        with Client(started, set_as_default=False) as client:
            count = len(started.worker_spec)
            try:
                if count:
                    client.wait_for_workers(count, timeout=START_SECONDS)
            except TimeoutError:
                raise JobError(
                    f"only {len(client.nthreads())} of {count} workers started within {START_SECONDS} s; "
                    "start fewer --workers, or give each worker more --memory-limit"
                ) from None
            client.register_plugin(make_ctrl_c_plugin())
            page = dashboard_url(client) if options.get("dashboard_address", True) else None
            info = _describe(client, client_files or client_tls_files(security), options, page)
            with tolerate_lost_workers():
                yield Served(client, info)
    finally:
        close_cluster(started)


def read_scheduler_address(address: str | None, file: Path | None, seconds: float = 0) -> str:
    """Return the given scheduler address, or read it from the scheduler file; wait for the file."""
    if (address is None) == (file is None):
        raise JobError("give either the address of the scheduler (tls://head:8786) or --scheduler-file")
    if address is not None:
        return address
    assert file is not None
    deadline = time.monotonic() + seconds
    while True:
        try:
            return str(json.loads(file.read_text())["address"])
        except (OSError, ValueError, KeyError):  # the file is missing or incomplete
            if time.monotonic() > deadline:
                within = f" within {seconds:.0f} s" if seconds else ""
                raise JobError(
                    f"no scheduler wrote its address to {file}{within}; check that the scheduler runs, and "
                    "that this machine sees the file"
                ) from None
        time.sleep(0.2)


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Raise `KeyboardInterrupt` at the first SIGINT, SIGTERM or SIGHUP; end the process at a later one.

    Signals within one second count as one, because a batch system and its script may both forward a signal.
    """
    began: list[float] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if not began:
            began.append(time.monotonic())
            raise KeyboardInterrupt
        if time.monotonic() - began[0] > REPEAT_SECONDS:
            _end_children(seconds=0)
            os._exit(128 + number)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        _end_children()
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_children(seconds: float = 5) -> None:
    """End the child processes that still run, with SIGTERM and then, after ``seconds``, with SIGKILL."""
    import psutil

    children = [child for child in psutil.Process().children(recursive=True) if not _ends_itself(child)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(number)
        _, children = psutil.wait_procs(children, timeout=seconds)


def _ends_itself(child: psutil.Process) -> bool:
    """Return whether a child is the resource tracker of Python, which ends with its parent."""
    import psutil

    try:
        return "resource_tracker" in " ".join(child.cmdline())
    except psutil.Error:
        return True


def _describe(
    client: Client, files: dict[str, str] | None, options: dict[str, Any], page: str | None
) -> dict[str, Any]:
    assert client.scheduler is not None
    address = str(client.scheduler.address)
    info = client.scheduler_info(n_workers=-1)["workers"]
    workers = [
        {
            "name": str(worker["name"]), "address": where, "threads": worker["nthreads"],
            "memory_bytes": worker["memory_limit"], "resources": worker["resources"],
        }
        for where, worker in info.items()
    ]  # fmt: skip
    reach = shlex.join(["--scheduler", address, *tls_options(files)])
    file = options.get("scheduler_file")
    joining = [] if workers else [f"scalelatent cluster join {address} --workers N   (on each machine)"]
    return {
        "scheduler": address,
        "dashboard": page,
        "scheduler_file": None if file is None else str(Path(file).absolute()),
        "pid": os.getpid(),
        "workers": sorted(workers, key=lambda worker: worker["name"]),
        "tls": files,
        "next": [*joining, f"scalelatent doctor {reach}", f"scalelatent submit JOB.toml {reach}"],
        "warnings": list(_warnings(options, files)),
    }


def _warnings(options: dict[str, Any], files: dict[str, str] | None) -> Iterator[str]:
    host = options.get("host", "127.0.0.1")
    if not is_loopback(host) and files is None:
        yield (
            f"this scheduler listens on {host} WITHOUT TLS: anyone who can connect can run any code as you, "
            "on every worker. Start it with --tls, or use the default host (loopback) and ssh -L"
        )
    page = (options.get("dashboard_address") or "127.0.0.1:0").rpartition(":")[0]
    if not is_loopback(page or "0.0.0.0"):
        yield (
            f"the dashboard listens on {page or 'all addresses'} without a password: anyone who can connect "
            "sees names of jobs, code and logs. Use the default address (loopback) and ssh -L"
        )
