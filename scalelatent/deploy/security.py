"""TLS between client, scheduler and workers: what a cluster is joined with, checked before anything connects.

Dask's TLS is mutual: each side shows a certificate signed by the cluster's own authority, and nobody looks at
host names. Whoever holds such a certificate may run code on the cluster; whoever holds none gets no answer.
"""

from __future__ import annotations

import errno
import os
import ssl
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelatent.errors import JobError

if TYPE_CHECKING:
    from distributed import Security

__all__ = ["security_from", "tls_files", "tls_options"]

ROLES = ("client", "worker", "scheduler")


def security_from(
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> Security | None:
    """What a client, a worker or a scheduler shows the others, or None for a cluster without TLS.

    Parameters
    ----------
    ca : path, optional
        Certificate of the cluster's authority (PEM).
    cert : path, optional
        Own certificate, signed by it (PEM).
    key : path, optional
        Private key of ``cert`` (PEM, not encrypted); may also lie in the file of ``cert``.

        What is not given comes from Dask's own configuration (``distributed.comm.tls.*``: its YAML files, or
        variables such as ``DASK_DISTRIBUTED__COMM__TLS__CA_FILE``).

    Returns
    -------
    distributed.Security or None
        The same certificate in every role, so that a worker that holds it can be a client too. None where
        neither the arguments nor the configuration name any.

    Raises
    ------
    JobError
        One without the other, a file that cannot be read, a key that belongs to another certificate, an
        authority that has expired: named before anything connects, where the other side would only hang up.

    Examples
    --------
    >>> from scalelatent.deploy.security import security_from
    >>> security_from() is None
    True
    >>> security_from(ca="no/such/ca.pem", cert="no/such/cert.pem")
    Traceback (most recent call last):
    ...
    scalelatent.errors.JobError: TLS: cannot read no/such/ca.pem (No such file or directory); ...
    """
    from distributed import Security

    configured: Any = Security()  # sets its attributes by name, which type checkers cannot see
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
            "the authority's certificate (--tls-ca-file)" if ca is None else "a certificate (--tls-cert)"
        )
        raise JobError(
            f"TLS: {missing} is missing; a cluster with TLS wants --tls-ca-file, --tls-cert and --tls-key"
        )
    _check(ca, cert, key)
    files = {f"tls_{role}_cert": cert for role in ROLES} | {f"tls_{role}_key": key for role in ROLES}
    return Security(require_encryption=True, tls_ca_file=ca, **files)


def tls_files(security: Any) -> dict[str, str] | None:
    """The files a `distributed.Security` names for a client: ``ca``, ``cert`` and ``key``; None without TLS.

    Examples
    --------
    >>> tls_files(None) is None
    True
    """
    if security is None or security.tls_ca_file is None:
        return None
    files = {
        "ca": security.tls_ca_file, "cert": security.tls_client_cert, "key": security.tls_client_key
    }  # fmt: skip
    return {name: str(Path(file).absolute()) for name, file in files.items() if file is not None}


def tls_options(files: dict[str, str] | None) -> list[str]:
    """The same as options of a command line; none without TLS.

    Examples
    --------
    >>> tls_options({"ca": "/tls/ca.pem", "cert": "/tls/me.pem"})
    ['--tls-ca-file', '/tls/ca.pem', '--tls-cert', '/tls/me.pem']
    """
    names = {"ca": "--tls-ca-file", "cert": "--tls-cert", "key": "--tls-key"}
    return [word for name, file in (files or {}).items() for word in (names[name], file)]


def _check(ca: str, cert: str, key: str | None) -> None:
    """Read the files the way a connection will, and say what is wrong with which."""
    for file in (ca, cert, key):
        if file is None or "\n" in file:  # Dask takes the text itself as well
            continue
        try:
            if not stat.S_ISREG(os.stat(file).st_mode):  # opening a FIFO would wait
                raise OSError(errno.EINVAL, "it is no regular file")
            with open(file, "rb"):
                pass
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise JobError(
                f"TLS: cannot read {file} ({reason}); give the files that `scalelatent cluster up "
                "--tls` or `scalelatent cluster certificates` printed"
            ) from None
    if any("\n" in file for file in (ca, cert, key or "")):
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise JobError(f"TLS: {ca} is not a certificate in PEM form ({error.reason or error})") from None
    authorities = context.get_ca_certs()
    if not authorities:
        raise JobError(
            f"TLS: {ca} is the certificate of no authority; give --tls-ca-file the one that signed yours"
        )
    ends = max(ssl.cert_time_to_seconds(str(authority["notAfter"])) for authority in authorities)
    if ends < time.time():
        raise JobError(
            f"TLS: {ca} expired on {time.strftime('%Y-%m-%d', time.gmtime(ends))}; make new certificates "
            "with: scalelatent cluster certificates NEW_FOLDER, and start the cluster again with them"
        )
    try:
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise JobError(
            f"TLS: {cert} and {key or 'the key in it'} do not go together ({reason}); the key must be that "
            "of this certificate, in PEM form and not encrypted"
        ) from None
