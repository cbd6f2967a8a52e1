"""Connect to a scheduler within a time limit, and explain a failed connection.

Dask retries an address until a timeout and then reports only the timeout. A plain connection therefore tests
first whether a program listens at the address.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from scalelatent.engine.dask.hooks import page_address
from scalelatent.engine.dask.timed_calls import address_of, ask_scheduler
from scalelatent.engine.threads import call_with_timeout
from scalelatent.errors import JobError

from .clusters import is_loopback, loopback_address, refuse_loopback
from .worker_processes import first_cause

if TYPE_CHECKING:
    from distributed import Client, Security

PROBE_SECONDS = 5.0  # time limit to open a connection
CLIENT_SECONDS = 10.0  # time limit for a client to connect
ADDRESS_SCHEMES = ("tcp", "tls", "ws", "wss", "ucx", "inproc")
SCHEDULER_VARIABLE = "SCALELATENT_CLUSTER__SCHEDULER"
GIVE_CERTIFICATES = (
    "give --tls-ca-file, --tls-cert and --tls-key (in a job file: [cluster] tls_ca, tls_cert, tls_key)"
)


def default_scheduler() -> str | None:
    """Return the scheduler address from the environment or from the configuration of Dask, or None."""
    import dask

    return os.environ.get(SCHEDULER_VARIABLE) or dask.config.get("scheduler-address", None)


def open_client(address: str, security: Security | None = None, **options: Any) -> Client:
    """Connect to a scheduler; raise a `JobError` if no Dask scheduler answers within 20 seconds."""
    from distributed import Client

    options |= {"timeout": CLIENT_SECONDS, "set_as_default": False}
    scheme, host, port = _parts(address)
    if scheme == "tls" and security is None:
        raise JobError(f"scheduler {address!r} uses TLS, and no certificates are named; {GIVE_CERTIFICATES}")
    if port:
        try:
            socket.create_connection((host, port), timeout=PROBE_SECONDS).close()
        except OSError as error:
            raise JobError(f"scheduler {address!r}: {_explain_os_error(host, port, error)}") from None
    try:
        return call_with_timeout(CLIENT_SECONDS + 5, lambda: Client(address, security=security, **options))
    # Another program may listen at the address; Dask may read its first bytes as a huge message size.
    except (OSError, TimeoutError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        raise JobError(
            f"scheduler {address!r} does not answer as a Dask scheduler within {CLIENT_SECONDS:.0f} s "
            f"({first_cause(error)}). Check the port (the dashboard has a different one), that both sides "
            "use TLS with certificates of one authority or neither does, and that both have the same version "
            "of Dask"
        ) from error


def dashboard_url(client: Client) -> str:
    """Return the URL of the dashboard of a scheduler; a dashboard on loopback opens only on its own host."""
    from distributed.comm.addressing import get_address_host

    address = address_of(client)
    if not address.startswith(("tcp://", "tls://")):
        return str(client.dashboard_link)  # a proxy, such as Dask Gateway, forwards the dashboard
    host, port = ask_scheduler(client, page_address)
    if host in ("0.0.0.0", "::"):
        host = get_address_host(address)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/status"


def dashboard_line(client: Client) -> str:
    """Return the URL of the dashboard as text, with the host if the dashboard listens on another machine."""
    from distributed.comm.addressing import get_address_host

    page, host = dashboard_url(client), get_address_host(address_of(client))
    parts = urlsplit(page)
    if is_loopback(parts.hostname or "") and not is_loopback(host):
        page += f" on {host} (from other machines: ssh -L {parts.port}:127.0.0.1:{parts.port} {host})"
    return f"dashboard: {page}"


def check_addresses(address: str, host: str | None) -> None:
    """Raise a `JobError` for an invalid scheduler address or an unsuitable ``host``.

    Workers listen on ``host``. It must not be a loopback address if the scheduler runs on another machine.
    """
    _, scheduler_host, _ = _parts(address)
    if host is not None and not loopback_address(scheduler_host):
        refuse_loopback(host)


def _parts(address: str) -> tuple[str, str, int]:
    """Return scheme, host and port of an address; the port is 0 except for tcp and tls."""
    from distributed.comm.addressing import parse_address, parse_host_port

    try:
        scheme, netloc = parse_address(address, strict=False)
        if scheme == "gateway":
            raise ValueError("for a cluster of Dask Gateway pass its client in Python, see cluster/README.md")
        if scheme not in ADDRESS_SCHEMES:
            raise ValueError(f"{scheme!r} is not one of {', '.join(ADDRESS_SCHEMES)}")
        if scheme not in ("tcp", "tls"):
            return scheme, netloc, 0
        host, port = parse_host_port(netloc, 8786)
        if not 0 < port < 65536:
            raise ValueError(f"its port {port} is not between 1 and 65535")
    except (ValueError, TypeError) as error:
        raise JobError(
            f"scheduler {address!r} is not an address ({error}); write for example tcp://head:8786, the "
            "address that the scheduler prints when it starts"
        ) from None
    return scheme, host, port


def _explain_os_error(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the host {host!r} is unknown ({error.strerror}); check its name"
    if isinstance(error, ConnectionRefusedError):
        return (
            f"no program listens there (connection refused); check that the scheduler runs on {host} with "
            f"port {port}. The scheduler prints its address when it starts; the dashboard has a different "
            "port"
        )
    if isinstance(error, TimeoutError):
        return f"{host} does not answer within {PROBE_SECONDS:.0f} s; check the address and the firewalls"
    return f"{host} cannot be reached ({error.strerror or error})"
