"""From a scheduler's address to a client, within a bounded time, and in words where there is none.

Dask tries an address until its time is up, whatever the reason, and then names only the time. So the place is
looked at first by a plain connection, and looked at again, for TLS or a web server, where Dask gave up.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from scalelatent.errors import JobError

from .spec import ClusterSection, Job

if TYPE_CHECKING:
    from distributed import Client, Security

__all__ = ["address_of", "connect", "default_scheduler", "open_client", "scheduler_trouble", "security_of"]

PROBE_SECONDS = 5.0
CLIENT_SECONDS = 10.0
SCHEDULER_VARIABLE = "SCALELATENT_CLUSTER__SCHEDULER"


def default_scheduler() -> str | None:
    """Return the scheduler that the environment names, or Dask's configuration; None where neither does.

    Examples
    --------
    >>> import os
    >>> from scalelatent.jobs.connection import default_scheduler
    >>> os.environ["SCALELATENT_CLUSTER__SCHEDULER"] = "tcp://head:8786"
    >>> default_scheduler(), os.environ.pop("SCALELATENT_CLUSTER__SCHEDULER")
    ('tcp://head:8786', 'tcp://head:8786')
    """
    import dask

    return os.environ.get(SCHEDULER_VARIABLE) or dask.config.get("scheduler-address", None)


def security_of(cluster: ClusterSection) -> Security | None:
    """Return what to show the scheduler: the job's certificates, or those of Dask's configuration.

    Raises
    ------
    JobError
        If a certificate cannot be read.
    """
    try:
        from scalelatent.engine.security import security_from
    except ImportError:
        return None
    return security_from(ca=cluster.tls_ca, cert=cluster.tls_cert, key=cluster.tls_key)


@contextmanager
def connect(
    job: Job, client: Client | None = None, tell: Callable[[str], None] = lambda line: None
) -> Iterator[Client | None]:
    """Give the Dask client a job asks for: the one given, its scheduler's, a local cluster's, or None.

    Raises
    ------
    JobError
        If the scheduler does not answer in time.
    """
    wanted = job.cluster
    if client is not None:
        yield client
    elif wanted.scheduler is not None:
        with open_client(wanted.scheduler, security_of(wanted)) as found:
            tell(f"dashboard: {found.dashboard_link}")
            yield found
    elif wanted.workers is not None:
        from scalelatent.engine.cluster import cluster

        options = {"threads": wanted.threads, "memory_limit": wanted.memory_limit}
        given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
        with cluster("local", workers=wanted.workers, **given) as started:
            tell(f"dashboard: {started.dashboard_link}")
            yield started
    else:
        yield None


def open_client(address: str, security: Security | None = None, **options: Any) -> Client:
    """Connect to a scheduler.

    Parameters
    ----------
    address : str
        For example ``"tcp://head:8786"`` or ``"tls://head:8786"``.
    security : distributed.Security, optional
        Certificates, for ``tls://``.
    **options
        Of `distributed.Client`.

    Returns
    -------
    distributed.Client
        Not the default client of this process; to be closed by the caller.

    Raises
    ------
    JobError
        If nothing that is a Dask scheduler answers there within 15 seconds; the message says what does.

    Examples
    --------
    >>> from scalelatent.jobs.connection import open_client
    >>> open_client("tcp://127.0.0.1:1")
    Traceback (most recent call last):
    ...
    scalelatent.errors.JobError: scheduler 'tcp://127.0.0.1:1': nothing listens there ...
    """
    from distributed import Client

    scheme, host, port = _parts(address)
    if scheme == "tls" and security is None:
        raise JobError(
            f"scheduler {address!r} speaks TLS, and no certificates are named: give --tls-ca-file, "
            "--tls-cert and --tls-key (in a job file: [cluster] tls_ca, tls_cert, tls_key)"
        )
    if scheme in ("tcp", "tls"):
        refused = _unreachable(host, port)
        if refused:
            raise JobError(f"scheduler {address!r}: {refused}")
    try:
        return Client(address, timeout=CLIENT_SECONDS, security=security, set_as_default=False, **options)
    except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as error:
        why = _what_answers(scheme, host, port, security) if scheme in ("tcp", "tls") else ""
        raise JobError(
            f"scheduler {address!r} does not answer as a Dask scheduler within {CLIENT_SECONDS:.0f} s: "
            f"{why or f'{error}; check the address'}"
        ) from error


def _parts(address: str) -> tuple[str, str, int]:
    """Scheme, host and port; no port but for tcp and tls."""
    from distributed.comm.addressing import parse_address, parse_host_port

    try:
        scheme, place = parse_address(address, strict=False)
        if scheme not in ("tcp", "tls"):
            return scheme, place, 0
        host, port = parse_host_port(place, 8786)
    except (ValueError, TypeError) as error:
        raise JobError(
            f"scheduler {address!r} is not an address ({error}); write for example tcp://head:8786, as the "
            "scheduler prints it when it starts"
        ) from None
    return scheme, host, port


def address_of(client: Client) -> str:
    """Return the address of a client's scheduler."""
    assert client.scheduler is not None
    return str(client.scheduler.address)


def scheduler_trouble(address: str) -> str:
    """Return why a scheduler cannot be reached; nothing where something listens at its address.

    Examples
    --------
    >>> from scalelatent.jobs.connection import scheduler_trouble
    >>> scheduler_trouble("tcp://127.0.0.1:1")
    'nothing listens there (connection refused): ...
    """
    scheme, host, port = _parts(address)
    return _unreachable(host, port) if scheme in ("tcp", "tls") else ""


def _unreachable(host: str, port: int) -> str:
    """Why no connection can be opened; nothing where one can."""
    try:
        socket.create_connection((host, port), timeout=PROBE_SECONDS).close()
    except socket.gaierror as error:
        return f"the host {host!r} is not known ({error.strerror}); check its name"
    except ConnectionRefusedError:
        return (
            f"nothing listens there (connection refused): is the scheduler running on {host}, and is {port} "
            "its port? It prints its address when it starts; the dashboard's port is another one"
        )
    except TimeoutError:
        return f"{host} does not answer within {PROBE_SECONDS:.0f} s: check the address, and firewalls"
    except OSError as error:
        return f"{host} cannot be reached ({error.strerror or error})"
    return ""


def _what_answers(scheme: str, host: str, port: int, security: Security | None) -> str:
    """What is listening where Dask was not understood, and what to write instead."""
    speaks_tls, complaint = _try_tls(host, port)
    if scheme == "tcp" and speaks_tls:
        return (
            f"it speaks TLS: write tls://{host}:{port}, and give --tls-ca-file, --tls-cert and --tls-key "
            "(in a job file: [cluster] tls_ca, tls_cert, tls_key)"
        )
    if scheme == "tls" and not speaks_tls:
        return f"it does not speak TLS ({complaint}): write tcp://{host}:{port} if the network may be trusted"
    if scheme == "tls" and security is not None:
        return _certificate_trouble(host, port, security)
    if _is_web_server(host, port):
        return (
            "a web server does, perhaps the dashboard; the scheduler has a port of its own (8786 unless told "
            "otherwise), which it prints when it starts"
        )
    return "something else listens there, or another version of Dask; check the address"


def _try_tls(host: str, port: int) -> tuple[bool, str]:
    """Whether TLS is spoken there (with whomever), and what was said instead."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return _shake_hands(context, host, port)


def _shake_hands(context: ssl.SSLContext, host: str, port: int) -> tuple[bool, str]:
    try:
        with (
            socket.create_connection((host, port), timeout=PROBE_SECONDS) as plain,
            context.wrap_socket(plain) as wrapped,
        ):
            try:
                # Since TLS 1.3 a server refuses a client's certificate only after the client is content.
                wrapped.settimeout(1.0)
                wrapped.recv(1)
            except TimeoutError:
                pass
            return True, ""
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        # An alert is TLS's own word for "not you".
        return "ALERT" in reason or "CERTIFICATE" in reason, reason
    except OSError as error:
        return False, str(error.strerror or error)


def _certificate_trouble(host: str, port: int, security: Security) -> str:
    context = security.get_connection_args("client").get("ssl_context")
    _, reason = (False, "") if context is None else _shake_hands(context, host, port)
    told = f" ({reason.lower().replace('_', ' ')})" if reason else ""
    return (
        f"TLS was refused{told}: the scheduler's certificate and ours must be signed by one authority, "
        "and be valid today; check --tls-ca-file, --tls-cert and --tls-key"
    )


def _is_web_server(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=PROBE_SECONDS) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return connection.recv(5) == b"HTTP/"
    except OSError:
        return False
