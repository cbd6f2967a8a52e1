"""Certificates of a cluster: an authority, what scheduler and workers show, and what clients show."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalelatent.errors import JobError

__all__ = ["FILES", "make_certificates"]

FILES = ("ca.pem", "cluster-cert.pem", "cluster-key.pem", "client-cert.pem", "client-key.pem")


def make_certificates(
    folder: str | os.PathLike[str], *, hosts: Sequence[str] = (), days: int = 365
) -> dict[str, Path]:
    """Make the certificates of one cluster; a folder that holds a whole set is taken as it is.

    The authority's private key is never written: nobody can add a member later. To shut somebody out, make
    a new set and start the cluster again with it.

    Parameters
    ----------
    folder : path
        Made if it is not there, for its owner only. Keys are readable by their owner alone.
    hosts : sequence of str
        Names and addresses written into the cluster's certificate besides this machine's. Dask does not
        look at them; a proxy in between may.
    days : int
        How long they are valid.

    Returns
    -------
    dict of str to pathlib.Path
        ``ca.pem`` goes everywhere, ``cluster-*.pem`` to scheduler and workers, ``client-*.pem`` to who
        submits; see `FILES`.

    Raises
    ------
    JobError
        Part of a set lies in the folder, or the package ``cryptography`` is missing.

    Examples
    --------
    >>> import tempfile
    >>> from scalelatent.deploy.certificates import make_certificates
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sorted(make_certificates(folder))
    ['ca.pem', 'client-cert.pem', 'client-key.pem', 'cluster-cert.pem', 'cluster-key.pem']
    """
    folder = Path(folder).absolute()
    files = {name: folder / name for name in FILES}
    there = [name for name, file in files.items() if file.exists()]
    if len(there) == len(FILES):
        return files
    if there:
        missing = ", ".join(name for name in FILES if name not in there)
        raise JobError(
            f"{folder} holds {', '.join(there)} but no {missing}; remove them, or choose a new folder"
        )
    texts = _make(hosts, days)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, text in texts.items():
            mode = 0o600 if name.endswith("-key.pem") else 0o644
            with open(os.open(files[name], os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(text)
    except OSError as error:
        raise JobError(f"cannot write certificates to {folder}: {error.strerror or error}") from error
    return files


def _make(hosts: Sequence[str], days: int) -> dict[str, bytes]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID as Usage
    except ImportError:
        raise JobError(
            "making certificates needs the package cryptography: python -m pip install 'scalelatent[tls]', "
            "or make them with openssl (cluster/tls/README.md) and name them by --tls-ca-file and so on"
        ) from None
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    root_key = ec.generate_private_key(ec.SECP256R1())
    root = _sign("scalelatent cluster authority", root_key.public_key(), None, root_key, days, [], None)
    names = ["localhost", "127.0.0.1", "::1", socket.gethostname(), *hosts]
    texts = {"ca.pem": root.public_bytes(pem)}
    # Scheduler and workers call and are called; a client only calls, so its certificate serves no worker.
    for name, usages, alternatives in (
        ("cluster", [Usage.SERVER_AUTH, Usage.CLIENT_AUTH], names),
        ("client", [Usage.CLIENT_AUTH], []),
    ):
        key = ec.generate_private_key(ec.SECP256R1())
        made = _sign(f"scalelatent {name}", key.public_key(), root, root_key, days, alternatives, usages)
        texts[f"{name}-cert.pem"] = made.public_bytes(pem)
        texts[f"{name}-key.pem"] = key.private_bytes(pem, *plain)
    return texts


def _sign(name: str, public: Any, issuer: Any, key: Any, days: int, hosts: Sequence[str], usages: Any) -> Any:
    """A certificate with what strict checking (Python 3.13) asks for; without an issuer, the authority's."""
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
        .issuer_name(subject if root else issuer.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of a cluster differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=root, path_length=0 if root else None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=not root, key_cert_sign=root, **use), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    if hosts:
        alternatives = x509.SubjectAlternativeName([_name(host) for host in dict.fromkeys(hosts)])
        builder = builder.add_extension(alternatives, critical=False)
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(key, hashes.SHA256())


def _name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
