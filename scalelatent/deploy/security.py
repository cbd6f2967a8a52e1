"""TLS between client, scheduler and workers: create certificates, and check them before connecting.

TLS of Dask is mutual: each side needs a certificate that the authority of the cluster has signed. Dask does
not compare host names. A holder of a certificate may run code on the cluster; others cannot connect.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelatent.errors import JobError

if TYPE_CHECKING:
    from distributed import Security

TLS_ROLES = ("client", "worker", "scheduler")
CERTIFICATE_FILES = ("ca.pem", "cluster-cert.pem", "cluster-key.pem", "client-cert.pem", "client-key.pem")


def make_security(
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> Security | None:
    """Return TLS settings for Dask from these files and the configuration of Dask; None without TLS."""
    from distributed import Security

    configured: Any = Security()  # Security sets attributes dynamically, which type checkers cannot see
    ca = os.fspath(ca) if ca is not None else configured.tls_ca_file
    if cert is None:
        cert = configured.tls_client_cert
        key = key if key is not None else configured.tls_client_key
    cert, key = (None if file is None else os.fspath(file) for file in (cert, key))
    if ca is None and cert is None and key is None:
        if configured.require_encryption:
            raise JobError(
                "TLS: distributed.comm.require-encryption is set, but no certificates are named; give "
                "--tls-ca-file, --tls-cert and --tls-key, or set distributed.comm.tls.*"
            )
        return None
    if ca is None or cert is None:
        missing = (
            "the certificate of the authority (--tls-ca-file)" if ca is None else "a certificate (--tls-cert)"
        )
        raise JobError(
            f"TLS: {missing} is missing; a cluster with TLS needs --tls-ca-file, --tls-cert and --tls-key"
        )
    _check_files(ca, cert, key)
    files = {f"tls_{role}_cert": cert for role in TLS_ROLES} | {f"tls_{role}_key": key for role in TLS_ROLES}
    return Security(require_encryption=True, tls_ca_file=ca, **files)


def client_tls_files(security: Any) -> dict[str, str] | None:
    """Return the client files ``ca``, ``cert`` and ``key`` of a `distributed.Security`; None without TLS."""
    if security is None or security.tls_ca_file is None:
        return None
    files = {
        "ca": security.tls_ca_file, "cert": security.tls_client_cert, "key": security.tls_client_key
    }  # fmt: skip
    return {name: str(Path(file).absolute()) for name, file in files.items() if file is not None}


def tls_options(files: dict[str, str] | None) -> list[str]:
    """Return the client files as options of `scalelatent`, such as ``--tls-cert FILE``; [] without TLS."""
    names = {"ca": "--tls-ca-file", "cert": "--tls-cert", "key": "--tls-key"}
    return [word for name, file in (files or {}).items() for word in (names[name], file)]


def _check_files(ca: str, cert: str, key: str | None) -> None:
    """Load the files like a connection does; raise a `JobError` that names the wrong file."""
    if any("\n" in file for file in (ca, cert, key or "")):  # Dask also accepts the text of a certificate
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    pair = f"{cert} and {key or 'the key in it'}"
    steps: dict[str, Callable[[], None]] = {
        f"{ca} is not a readable certificate": lambda: context.load_verify_locations(ca),
        f"{pair} are not a readable certificate and its key": lambda: context.load_cert_chain(
            cert,
            key,
            password="",  # otherwise OpenSSL asks for the password of an encrypted key
        ),
    }
    for problem, load in steps.items():
        try:
            load()
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise JobError(
                f"TLS: {problem} ({reason}); give the files that `scalelatent cluster up --tls` or "
                "`scalelatent cluster certificates` printed: PEM form, not encrypted"
            ) from None


def make_certificates(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Create the certificates of one cluster; reuse a folder that has all of them. Return the paths by name.

    All members need ``ca.pem``, scheduler and workers ``cluster-*.pem``, and users ``client-*.pem``. All
    files contain one pair of certificate and key, which `distributed.Security.temporary` creates: each member
    may run code on all others, so separate keys would protect nobody. To exclude a member, create new
    certificates and restart the cluster. Certificates expire after a year.
    """
    from distributed import Security

    folder = Path(folder).absolute()
    files = {name: folder / name for name in CERTIFICATE_FILES}
    there = [name for name, file in files.items() if file.exists()]
    if len(there) == len(CERTIFICATE_FILES):
        return files
    if there:
        missing = ", ".join(name for name in CERTIFICATE_FILES if name not in there)
        raise JobError(
            f"{folder} contains {', '.join(there)} but no {missing}; remove these files, or choose a new "
            "folder"
        )
    try:
        made: Any = Security.temporary()
    except ImportError:
        raise JobError(
            "creating certificates needs the package cryptography; run: python -m pip install "
            "'scalelatent[tls]', or use openssl (cluster/tls/README.md) and give the files with "
            "--tls-ca-file, --tls-cert and --tls-key"
        ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, file in files.items():
            is_key = name.endswith("-key.pem")
            flags, mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if is_key else 0o644
            with open(os.open(file, flags, mode), "w") as opened:
                opened.write(made.tls_client_key if is_key else made.tls_client_cert)
    except OSError as error:
        raise JobError(
            f"cannot write certificates to {folder}: {error.strerror or error}; choose another folder"
        ) from error
    return files
