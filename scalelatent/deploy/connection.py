"""From a scheduler's address to a client, within a bounded time, and why there is none.

Dask tries an address until its time is up, whatever the reason, and then names only the time; at a web server
it hangs for good. So a plain connection looks first: a Dask scheduler speaks at once, where others wait.
"""

from __future__ import annotations

import os
import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from scalelatent.engine.dask.hooks import page_place
from scalelatent.engine.dask.requests import address_of, ask_scheduler
from scalelatent.engine.threads import call_with_timeout
from scalelatent.errors import JobError

from .clusters import is_loopback, loopback_of, refuse_loopback

if TYPE_CHECKING:
    from distributed import Client, Security

PROBE_SECONDS = 5.0
SPEAK_SECONDS, TLS_SPEAK_SECONDS = 1.0, 0.3
CLIENT_SECONDS = 10.0
SCHEMES = ("tcp", "tls", "ws", "wss", "ucx", "inproc")
GATEWAY = "gateway+"
SCHEDULER_VARIABLE = "SCALELATENT_CLUSTER__SCHEDULER"


def default_scheduler() -> str | None:
    """The scheduler that the environment names, or Dask's configuration; None where neither does."""
    import dask

    return os.environ.get(SCHEDULER_VARIABLE) or dask.config.get("scheduler-address", None)


def gateway_address(url: str, name: str) -> str:
    """The address of a cluster, by that of its gateway and its name there."""
    if not url.startswith(("http://", "https://")):
        raise JobError(
            f"gateway {url!r} is not an address; write for example https://hub/services/dask-gateway"
        )
    return f"{GATEWAY}{url.rstrip('/')}#{name}"


def open_client(address: str, security: Security | None = None, **options: Any) -> Client:
    """Connect to a scheduler; JobError within 15 seconds if no Dask scheduler answers there.

    One behind Dask Gateway (``gateway+https://…#CLUSTER``) is asked for there first, with its certificates,
    within 15 seconds more.
    """
    from distributed import Client

    options |= {"timeout": CLIENT_SECONDS, "set_as_default": False}
    if address.startswith(GATEWAY):
        from .gateway import open_gateway  # which is built on distributed

        return open_gateway(address, **options)
    scheme, host, port = _parts(address)
    if scheme == "tls" and security is None:
        raise JobError(
            f"scheduler {address!r} speaks TLS, and no certificates are named: give --tls-ca-file, "
            "--tls-cert and --tls-key (in a job file: [cluster] tls_ca, tls_cert, tls_key)"
        )
    trouble = _trouble(scheme, host, port, security)
    if trouble:
        raise JobError(f"scheduler {address!r}: {trouble}")
    try:
        return call_with_timeout(CLIENT_SECONDS + 5, lambda: Client(address, security=security, **options))
    except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as error:
        raise JobError(
            f"scheduler {address!r} does not answer as a Dask scheduler within {CLIENT_SECONDS:.0f} s: "
            f"{error}; check the address, and that Dask has the same version on both sides"
        ) from error


def page_of(client: Client) -> str:
    """Where a scheduler's dashboard listens: perhaps on loopback of its host, as all that we start do."""
    from distributed.comm.addressing import get_address_host

    address = address_of(client)
    if not address.startswith(("tcp://", "tls://")):
        return str(client.dashboard_link)  # of a gateway, which stands before it
    host, port = ask_scheduler(client, page_place)
    if host in ("0.0.0.0", "::"):
        host = get_address_host(address)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/status"


def page_told(client: Client) -> str:
    """The same as a line, which names the host where it is not this one."""
    from distributed.comm.addressing import get_address_host

    page, host = page_of(client), get_address_host(address_of(client))
    parts = urlsplit(page)
    if is_loopback(parts.hostname or "") and not is_loopback(host):
        page += f" on {host} (from elsewhere: ssh -L {parts.port}:127.0.0.1:{parts.port} {host})"
    return f"dashboard: {page}"


def check_protocol(address: str, security: Security | None) -> None:
    """Refuse a scheduler whose protocol is not that of its address; it may not be up yet."""
    scheme, host, port = _parts(address)
    trouble = ""
    with suppress(OSError):
        if scheme == "tcp":
            trouble = _trouble_tcp(host, port)
        elif scheme == "tls" and security is not None:
            trouble = _trouble_tls(host, port, security)
    if trouble:
        raise JobError(f"scheduler {address!r}: {trouble}")


def check_listening(host: str, address: str) -> None:
    """Refuse workers that listen on loopback for a scheduler that other machines reach."""
    if not loopback_of(_parts(address)[1]):
        refuse_loopback(host)


def _parts(address: str) -> tuple[str, str, int]:
    """Scheme, host and port; no port but for tcp and tls."""
    from distributed.comm.addressing import parse_address, parse_host_port

    try:
        scheme, place = parse_address(address, strict=False)
        if scheme == "gateway":
            raise ValueError("a cluster behind Dask Gateway is named by --gateway URL CLUSTER")
        if scheme not in SCHEMES:
            raise ValueError(f"{scheme!r} is none of {', '.join(SCHEMES)}")
        if scheme not in ("tcp", "tls"):
            return scheme, place, 0
        host, port = parse_host_port(place, 8786)
        if not 0 < port < 65536:
            raise ValueError(f"its port {port} is none of 1 to 65535")
    except (ValueError, TypeError) as error:
        raise JobError(
            f"scheduler {address!r} is not an address ({error}); write for example tcp://head:8786, as the "
            "scheduler prints it when it starts"
        ) from None
    return scheme, host, port


def _tell_os_error(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the host {host!r} is not known ({error.strerror}); check its name"
    if isinstance(error, ConnectionRefusedError):
        return (
            f"nothing listens there (connection refused): is the scheduler running on {host}, and is {port} "
            "its port? It prints its address when it starts; the dashboard's port is another one"
        )
    if isinstance(error, TimeoutError):
        return f"{host} does not answer within {PROBE_SECONDS:.0f} s: check the address, and firewalls"
    return f"{host} cannot be reached ({error.strerror or error})"


def _trouble(scheme: str, host: str, port: int, security: Security | None) -> str:
    """Why no scheduler answers by the protocol of the address; empty where one may."""
    try:
        if scheme == "tcp":
            return _trouble_tcp(host, port)
        if scheme == "tls" and security is not None:
            return _trouble_tls(host, port, security)
    except OSError as error:
        return _tell_os_error(host, port, error)
    return ""


def _trouble_tcp(host: str, port: int) -> str:
    with socket.create_connection((host, port), timeout=PROBE_SECONDS) as connection:
        said = _hear(connection, SPEAK_SECONDS)
        if not said and _speaks_tls(host, port):
            return (
                f"it speaks TLS: write tls://{host}:{port}, and give --tls-ca-file, --tls-cert and --tls-key "
                "(in a job file: [cluster] tls_ca, tls_cert, tls_key)"
            )
        if not said and _is_web_server(host, port):
            return (
                "a web server listens there, perhaps the dashboard; the scheduler has a port of its own "
                "(8786 unless told otherwise), which it prints when it starts"
            )
        # A busy scheduler answers late.
        said = said or _hear(connection, CLIENT_SECONDS)
    if not said:
        return (
            f"something listens there and says nothing for {CLIENT_SECONDS:.0f} s: a scheduler that hangs, "
            "or another program; check the address, and the scheduler's log"
        )
    # A Dask scheduler first sends a length of eight bytes, whose highest is zero.
    return (
        "" if said[-1:] == b"\0" else f"another program listens there (it says {said!r}); check the address"
    )


def _hear(connection: socket.socket, seconds: float) -> bytes:
    """The first eight bytes that the other side sends unasked."""
    connection.settimeout(seconds)
    try:
        return connection.recv(8, socket.MSG_WAITALL)
    except OSError:
        return b""


def _trouble_tls(host: str, port: int, security: Security) -> str:
    ours = security.get_connection_args("client")["ssl_context"]
    connection = socket.create_connection((host, port), timeout=PROBE_SECONDS)
    # No TLS to a scheduler without: it would take it for the length of a message.
    if _hear(connection, TLS_SPEAK_SECONDS):
        connection.close()
        return f"it does not speak TLS: write tcp://{host}:{port} if the network may be trusted"
    accepted, complaint = _shake_hands(ours, connection)
    if accepted:
        return ""
    return (
        f"TLS was refused ({complaint.lower().replace('_', ' ')}): the scheduler's certificate and ours must "
        "be signed by one authority, and be valid today; check --tls-ca-file, --tls-cert and --tls-key"
    )


def _speaks_tls(host: str, port: int) -> bool:
    """Whether TLS is spoken there, whatever certificates it asks for."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = socket.create_connection((host, port), timeout=PROBE_SECONDS)
    accepted, complaint = _shake_hands(context, connection)
    # An alert is how TLS refuses a client.
    return accepted or "ALERT" in complaint


def _shake_hands(context: ssl.SSLContext, plain: socket.socket) -> tuple[bool, str]:
    """Whether both sides accept, and else the complaint; closes the connection."""
    plain.settimeout(SPEAK_SECONDS)
    try:
        with context.wrap_socket(plain) as wrapped:
            # Since TLS 1.3 a server refuses a client's certificate only after the client has accepted.
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
            connection.settimeout(SPEAK_SECONDS)
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return connection.recv(5) == b"HTTP/"
    except OSError:
        return False
