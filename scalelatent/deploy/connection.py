"""Connect to a scheduler within a time limit, and explain a failed connection.

Dask retries any address until a timeout and then reports only the timeout; with a web server it hangs. A
plain connection therefore tests the address first. A Dask scheduler sends its greeting at once; other servers
wait.
"""

from __future__ import annotations

import os
import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from scalelatent.engine.dask.hooks import page_address
from scalelatent.engine.dask.requests import address_of, ask_scheduler
from scalelatent.engine.threads import call_with_timeout
from scalelatent.errors import JobError

from .clusters import is_loopback, loopback_address, refuse_loopback

if TYPE_CHECKING:
    from distributed import Client, Security

PROBE_SECONDS = 5.0  # time limit to open a connection
# Time limits for the first bytes of a server without TLS, also to detect that a server expects TLS.
GREETING_SECONDS, TLS_GREETING_SECONDS = 1.0, 0.3
CLIENT_SECONDS = 10.0  # time limit for a client to connect
SCHEMES = ("tcp", "tls", "ws", "wss", "ucx", "inproc")
GATEWAY = "gateway+"
SCHEDULER_VARIABLE = "SCALELATENT_CLUSTER__SCHEDULER"
GIVE_CERTIFICATES = (
    "give --tls-ca-file, --tls-cert and --tls-key (in a job file: [cluster] tls_ca, tls_cert, tls_key)"
)


def default_scheduler() -> str | None:
    """Return the scheduler address from the environment or from the configuration of Dask, or None."""
    import dask

    return os.environ.get(SCHEDULER_VARIABLE) or dask.config.get("scheduler-address", None)


def gateway_address(url: str, name: str) -> str:
    """Return the address of a cluster from the address of its gateway and its name."""
    if not url.startswith(("http://", "https://")):
        raise JobError(
            f"gateway {url!r} is not an address; write for example https://hub/services/dask-gateway"
        )
    return f"{GATEWAY}{url.rstrip('/')}#{name}"


def open_client(address: str, security: Security | None = None, **options: Any) -> Client:
    """Connect to a scheduler; raise a `JobError` if no Dask scheduler answers within 15 seconds.

    For a cluster of Dask Gateway (``gateway+https://…#CLUSTER``), the gateway is first asked for the address
    and certificates, for at most another 15 seconds.
    """
    from distributed import Client

    options |= {"timeout": CLIENT_SECONDS, "set_as_default": False}
    if address.startswith(GATEWAY):
        from .gateway import open_gateway  # this module imports distributed

        return open_gateway(address, **options)
    scheme, host, port = _parts(address)
    if scheme == "tls" and security is None:
        raise JobError(f"scheduler {address!r} uses TLS, and no certificates are named; {GIVE_CERTIFICATES}")
    try:
        problem = _find_problem(scheme, host, port, security)
    except OSError as error:
        problem = _explain_os_error(host, port, error)
    if problem:
        raise JobError(f"scheduler {address!r}: {problem}")
    try:
        return call_with_timeout(CLIENT_SECONDS + 5, lambda: Client(address, security=security, **options))
    except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as error:
        raise JobError(
            f"scheduler {address!r} does not answer as a Dask scheduler within {CLIENT_SECONDS:.0f} s: "
            f"{error}; check the address, and that both sides have the same version of Dask"
        ) from error


def dashboard_url(client: Client) -> str:
    """Return the URL of the dashboard of a scheduler, which may listen only on loopback of its host."""
    from distributed.comm.addressing import get_address_host

    address = address_of(client)
    if not address.startswith(("tcp://", "tls://")):
        return str(client.dashboard_link)  # a gateway forwards the dashboard
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


def check_protocol(address: str, security: Security | None) -> None:
    """Refuse an address with the wrong protocol; accept a scheduler that has not started yet."""
    problem = ""
    with suppress(OSError):
        problem = _find_problem(*_parts(address), security)
    if problem:
        raise JobError(f"scheduler {address!r}: {problem}")


def check_listening_address(host: str, address: str) -> None:
    """Refuse workers on loopback for a scheduler that other machines can reach."""
    if not loopback_address(_parts(address)[1]):
        refuse_loopback(host)


def _parts(address: str) -> tuple[str, str, int]:
    """Return scheme, host and port of an address; the port is 0 except for tcp and tls."""
    from distributed.comm.addressing import parse_address, parse_host_port

    try:
        scheme, netloc = parse_address(address, strict=False)
        if scheme == "gateway":
            raise ValueError("for a cluster of Dask Gateway give --gateway URL CLUSTER")
        if scheme not in SCHEMES:
            raise ValueError(f"{scheme!r} is not one of {', '.join(SCHEMES)}")
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


def _find_problem(scheme: str, host: str, port: int, security: Security | None) -> str:
    """Return why no scheduler answers with the protocol of the address; empty if one may answer."""
    if scheme == "tcp":
        return _find_tcp_problem(host, port)
    if scheme == "tls" and security is not None:
        return _find_tls_problem(host, port, security)
    return ""


def _find_tcp_problem(host: str, port: int) -> str:
    with socket.create_connection((host, port), timeout=PROBE_SECONDS) as connection:
        greeting = _receive_greeting(connection, GREETING_SECONDS)
        if not greeting and _expects_tls(host, port):
            return f"the server expects TLS; write tls://{host}:{port}, and {GIVE_CERTIFICATES}"
        if not greeting and _is_web_server(host, port):
            return (
                "a web server listens there, possibly the dashboard; the scheduler has a different port "
                "(8786 by default), which it prints when it starts"
            )
        greeting = greeting or _receive_greeting(connection, CLIENT_SECONDS)  # a busy scheduler answers late
    if not greeting:
        return (
            f"a program listens there but sends nothing for {CLIENT_SECONDS:.0f} s, so it is not a "
            "scheduler, or a scheduler that hangs; check the address and the log of the scheduler"
        )
    # A Dask scheduler first sends a length of eight bytes, whose highest byte is zero.
    if greeting[-1:] == b"\0":
        return ""
    return f"another program listens there (it sends {greeting!r}); check the address"


def _receive_greeting(connection: socket.socket, seconds: float) -> bytes:
    """Return the first eight bytes that the server sends within a time limit; empty if it sends none."""
    connection.settimeout(seconds)
    try:
        return connection.recv(8, socket.MSG_WAITALL)
    except OSError:
        return b""


def _find_tls_problem(host: str, port: int, security: Security) -> str:
    ours = security.get_connection_args("client")["ssl_context"]
    connection = socket.create_connection((host, port), timeout=PROBE_SECONDS)
    # A scheduler without TLS would read the start of a TLS handshake as the length of a message.
    if _receive_greeting(connection, TLS_GREETING_SECONDS):
        connection.close()
        return f"the server does not use TLS; write tcp://{host}:{port} if you trust the network"
    accepted, complaint = _try_handshake(ours, connection)
    if accepted:
        return ""
    return (
        f"TLS was refused ({complaint.lower().replace('_', ' ')}); the certificates of the scheduler and of "
        "this client must be valid and signed by the same authority. Check --tls-ca-file, --tls-cert and "
        "--tls-key"
    )


def _expects_tls(host: str, port: int) -> bool:
    """Return whether a server expects TLS, with any certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = socket.create_connection((host, port), timeout=PROBE_SECONDS)
    accepted, complaint = _try_handshake(context, connection)
    return accepted or "ALERT" in complaint  # TLS refuses a client with an alert


def _try_handshake(context: ssl.SSLContext, plain: socket.socket) -> tuple[bool, str]:
    """Return whether both sides accept a TLS handshake, and the error otherwise; close the connection."""
    plain.settimeout(GREETING_SECONDS)
    try:
        with context.wrap_socket(plain) as wrapped:
            # With TLS 1.3 a server refuses the certificate of a client after the client has accepted.
            with suppress(TimeoutError):
                wrapped.recv(1)
            return True, ""
    except ssl.SSLError as error:
        return False, error.reason or str(error)
    except OSError as error:
        return False, str(error.strerror or error)
    finally:
        plain.close()


def _is_web_server(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=PROBE_SECONDS) as connection:
            connection.settimeout(GREETING_SECONDS)
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return connection.recv(5) == b"HTTP/"
    except OSError:
        return False
