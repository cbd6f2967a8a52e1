"""TLS between client, scheduler and workers: create certificates, and check them before connecting.

TLS of Dask is mutual: each side needs a certificate that the authority of the cluster has signed. Dask does
not compare host names. A holder of a certificate may run code on the cluster; others cannot connect.
"""

from __future__ import annotations

import datetime
import errno
import ipaddress
import os
import socket
import ssl
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelatent.errors import JobError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from distributed import Security

ROLES = ("client", "worker", "scheduler")
FILES = ("ca.pem", "cluster-cert.pem", "cluster-key.pem", "client-cert.pem", "client-key.pem")


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
    files = {f"tls_{role}_cert": cert for role in ROLES} | {f"tls_{role}_key": key for role in ROLES}
    return Security(require_encryption=True, tls_ca_file=ca, **files)


security_from = make_security  # deprecated name, which older copies of cluster/tls/README.md use


def client_tls_files(security: Any) -> dict[str, str] | None:
    """Return the client files ``ca``, ``cert`` and ``key`` of a `distributed.Security`; None without TLS."""
    if security is None or security.tls_ca_file is None:
        return None
    files = {
        "ca": security.tls_ca_file, "cert": security.tls_client_cert, "key": security.tls_client_key
    }  # fmt: skip
    return {name: str(Path(file).absolute()) for name, file in files.items() if file is not None}


def tls_options(files: dict[str, str] | None) -> list[str]:
    """Return client files as options of a command line; an empty list without TLS."""
    names = {"ca": "--tls-ca-file", "cert": "--tls-cert", "key": "--tls-key"}
    return [word for name, file in (files or {}).items() for word in (names[name], file)]


def _check_files(ca: str, cert: str, key: str | None) -> None:
    """Check the files like a connection does; raise a `JobError` that names the wrong file."""
    for file in (ca, cert, key):
        if file is None or "\n" in file:  # Dask also accepts the text of a certificate
            continue
        try:
            if not stat.S_ISREG(os.stat(file).st_mode):  # opening a FIFO would wait
                raise OSError(errno.EINVAL, "it is not a regular file")
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
            f"TLS: {ca} is not the certificate of an authority; give --tls-ca-file the certificate of the "
            "authority that signed yours"
        )
    ends = max(ssl.cert_time_to_seconds(str(authority["notAfter"])) for authority in authorities)
    if ends < time.time():
        raise JobError(
            f"TLS: {ca} expired on {time.strftime('%Y-%m-%d', time.gmtime(ends))}; create new certificates "
            "with: scalelatent cluster certificates NEW_FOLDER, and restart the cluster with them"
        )
    try:
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise JobError(
            f"TLS: {cert} and {key or 'the key in it'} do not match ({reason}); give the key of this "
            "certificate, in PEM form and not encrypted"
        ) from None


def make_certificates(
    folder: str | os.PathLike[str], *, hosts: Sequence[str] = (), days: int = 365
) -> dict[str, Path]:
    """Create the certificates of one cluster; reuse a folder that has all of them. Return the paths by name.

    All members need ``ca.pem``, scheduler and workers ``cluster-*.pem``, and users ``client-*.pem``. The
    private key of the authority is not stored, so to exclude a member, create new certificates and restart
    the cluster. The certificate of the cluster names this machine and ``hosts``; Dask ignores these names,
    but a proxy may check them.
    """
    folder = Path(folder).absolute()
    files = {name: folder / name for name in FILES}
    there = [name for name, file in files.items() if file.exists()]
    if len(there) == len(FILES):
        return files
    if there:
        missing = ", ".join(name for name in FILES if name not in there)
        raise JobError(
            f"{folder} contains {', '.join(there)} but no {missing}; remove these files, or choose a new "
            "folder"
        )
    texts = _make_pem_files(hosts, days)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, text in texts.items():
            mode = 0o600 if name.endswith("-key.pem") else 0o644
            with open(os.open(files[name], os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(text)
    except OSError as error:
        raise JobError(
            f"cannot write certificates to {folder}: {error.strerror or error}; choose another folder"
        ) from error
    return files


def _make_pem_files(hosts: Sequence[str], days: int) -> dict[str, bytes]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID as Usage
    except ImportError:
        raise JobError(
            "creating certificates needs the package cryptography; run: python -m pip install "
            "'scalelatent[tls]', or use openssl (cluster/tls/README.md) and give the files with "
            "--tls-ca-file, --tls-cert and --tls-key"
        ) from None
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    root_key = ec.generate_private_key(ec.SECP256R1())
    root = _sign("scalelatent cluster authority", root_key.public_key(), None, root_key, days, [], None)
    names = ["localhost", "127.0.0.1", "::1", socket.gethostname(), *hosts]
    texts = {"ca.pem": root.public_bytes(pem)}
    # Scheduler and workers are servers and clients. A client is no server, so a worker cannot use its
    # certificate.
    for name, usages, alternatives in (
        ("cluster", [Usage.SERVER_AUTH, Usage.CLIENT_AUTH], names),
        ("client", [Usage.CLIENT_AUTH], []),
    ):
        key = ec.generate_private_key(ec.SECP256R1())
        made = _sign(f"scalelatent {name}", key.public_key(), root, root_key, days, alternatives, usages)
        texts[f"{name}-cert.pem"] = made.public_bytes(pem)
        texts[f"{name}-key.pem"] = key.private_bytes(pem, *plain)
    return texts


def _sign(
    name: str,
    public: ec.EllipticCurvePublicKey,
    issuer: x509.Certificate | None,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    hosts: Sequence[str],
    usages: Sequence[x509.ObjectIdentifier] | None,
) -> x509.Certificate:
    """Return a certificate with all extensions that Python 3.13 requires; without an issuer, an authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    root = issuer is None
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    use = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
         "decipher_only", "crl_sign"), False
    )  # fmt: skip
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # other machines may have slow clocks
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=root, path_length=0 if root else None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=not root, key_cert_sign=root, **use), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    if hosts:
        alternatives = x509.SubjectAlternativeName([_host_name(host) for host in dict.fromkeys(hosts)])
        builder = builder.add_extension(alternatives, critical=False)
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(key, hashes.SHA256())


def _host_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
