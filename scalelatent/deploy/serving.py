"""`cluster up`: a scheduler and its workers in the foreground, for others to send jobs to."""

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
from scalelatent.engine.dask.requests import ask_scheduler
from scalelatent.errors import JobError

from .clusters import close_cluster, deaf_to_ctrl_c, is_loopback, start_cluster
from .connection import page_of
from .security import make_certificates, security_from, tls_files, tls_options
from .worker_processes import patient

if TYPE_CHECKING:
    import psutil
    from distributed import Client, Security

START_SECONDS = 120
WATCH_SECONDS, SAME_SECONDS = 1.0, 1.0
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP] if hasattr(signal, "SIGHUP") else [signal.SIGINT]


def own_certificates(folder: str | os.PathLike[str], host: str) -> tuple[Security, dict[str, str]]:
    """Make a cluster's certificates, or take those of an earlier start; and the files a client names."""
    made = make_certificates(folder, hosts=[] if host in ("0.0.0.0", "::") else [host])
    security = security_from(made["ca.pem"], made["cluster-cert.pem"], made["cluster-key.pem"])
    assert security is not None
    client = {"ca": "ca.pem", "cert": "client-cert.pem", "key": "client-key.pem"}
    return security, {name: str(made[file]) for name, file in client.items()}


@dataclass(frozen=True)
class Served:
    """A cluster that runs, a client of it, and what to tell of it."""

    client: Client
    told: dict[str, Any]

    def wait(self, idle_minutes: float | None = None) -> None:
        """Wait until there was no task for so long, or a signal interrupts."""
        while True:
            time.sleep(WATCH_SECONDS)
            if idle_minutes and ask_scheduler(self.client, idle_seconds) > 60 * idle_minutes:
                return


@contextmanager
def serve(
    *, security: Security | None = None, client_files: dict[str, str] | None = None, **options: Any
) -> Iterator[Served]:
    """Run a cluster (options of `start_cluster`) as long as the ``with`` block lasts.

    What is yielded has in ``told`` a JSON-able dict: ``scheduler`` and ``dashboard`` (addresses),
    ``scheduler_file``, ``pid``, ``workers`` (list of name, address, threads, memory_bytes, resources),
    ``tls`` (`client_files`, or those of `security`), ``next`` (commands), ``warnings``.
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
                    f"only {len(client.nthreads())} of {count} workers started within {START_SECONDS} s; ask "
                    "for fewer --workers, or give each more --memory-limit"
                ) from None
            client.register_plugin(deaf_to_ctrl_c())
            page = page_of(client) if options.get("dashboard_address", True) else None
            told = _describe(client, client_files or tls_files(security), options, page)
            with patient():
                yield Served(client, told)
    finally:
        close_cluster(started)


def address_from(address: str | None, file: Path | None, seconds: float = 0) -> str:
    """A scheduler's address, given or from the file that it writes when it starts; waits so long for it."""
    if (address is None) == (file is None):
        raise JobError("which scheduler? Give its address (tls://head:8786), or --scheduler-file")
    if address is not None:
        return address
    assert file is not None
    deadline = time.monotonic() + seconds
    while True:
        try:
            return str(json.loads(file.read_text())["address"])
        except (OSError, ValueError, KeyError):  # not there yet, or half written
            if time.monotonic() > deadline:
                within = f" within {seconds:.0f} s" if seconds else ""
                raise JobError(
                    f"no scheduler wrote its address to {file}{within}; is it running, and is the file on "
                    "storage that this machine sees?"
                ) from None
        time.sleep(0.2)


@contextmanager
def until_stopped() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into `KeyboardInterrupt`, once; a later one ends the process at once.

    Batch systems signal a script and what it has started, which a script does too: what comes within a second
    is the same wish.
    """

    began: list[float] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if not began:
            began.append(time.monotonic())
            raise KeyboardInterrupt
        if time.monotonic() - began[0] > SAME_SECONDS:
            _end_children(seconds=0)
            os._exit(128 + number)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        _end_children()
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_children(seconds: float = 5) -> None:
    """End child processes that closing has left."""
    import psutil

    children = [child for child in psutil.Process().children(recursive=True) if not _ends_itself(child)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(number)
        _, children = psutil.wait_procs(children, timeout=seconds)


def _ends_itself(child: psutil.Process) -> bool:
    """Python's tracker of shared memory ignores signals, and leaves when its parent does."""
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
            f"this scheduler listens on {host} WITHOUT TLS: anyone who reaches it can run any code as you, "
            "on every worker. Start it with --tls, or leave it on loopback (as by default) and use ssh -L"
        )
    page = (options.get("dashboard_address") or "127.0.0.1:0").rpartition(":")[0]
    if not is_loopback(page or "0.0.0.0"):
        yield (
            f"the dashboard listens on {page or 'all addresses'} without a password: anyone who reaches "
            "it sees names of jobs, code on the stacks, and logs. Prefer ssh -L"
        )
