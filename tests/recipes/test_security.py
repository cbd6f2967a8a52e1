"""Certificates for TLS are created, and invalid files are refused before a connection."""

from __future__ import annotations

import stat

import dask
import pytest

from scalelatent.deploy.security import client_tls_files, make_security, tls_options
from scalelatent.errors import JobError

pytest.importorskip("cryptography")
from scalelatent.deploy.security import CERTIFICATE_FILES, make_certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates") / "new")


def list_client_files(certificates):
    return certificates["ca.pem"], certificates["client-cert.pem"], certificates["client-key.pem"]


def test_certificates_serve_every_role(certificates):
    security = make_security(*list_client_files(certificates))
    assert security.require_encryption
    for role in ("client", "worker", "scheduler"):
        config = security.get_tls_config_for_role(role)
        assert (config["ca_file"], config["cert"], config["key"]) == tuple(
            map(str, list_client_files(certificates))
        )
    assert tls_options(client_tls_files(security))[::2] == ["--tls-ca-file", "--tls-cert", "--tls-key"]


def test_certificates_come_from_the_configuration_of_dask(certificates):
    ca, cert, key = map(str, list_client_files(certificates))
    with dask.config.set({
        "distributed.comm.tls.ca-file": ca,
        "distributed.comm.tls.client.cert": cert,
        "distributed.comm.tls.client.key": key,
    }):  # fmt: skip
        assert client_tls_files(make_security()) == {"ca": ca, "cert": cert, "key": key}
    with (
        dask.config.set({"distributed.comm.require-encryption": True}),
        pytest.raises(JobError, match="no certificates are named"),
    ):
        make_security()


def test_a_missing_file_is_named(certificates):
    with pytest.raises(JobError, match=r"--tls-cert\) is missing"):
        make_security(ca=certificates["ca.pem"])
    with pytest.raises(JobError, match=r"--tls-ca-file\) is missing"):
        make_security(cert=certificates["client-cert.pem"], key=certificates["client-key.pem"])


def test_unreadable_and_mismatched_files_are_refused(certificates, tmp_path):
    ca, cert, key = list_client_files(certificates)
    with pytest.raises(JobError, match=r"nothing.pem and .*client-key.pem are not .* \(No such file"):
        make_security(ca, tmp_path / "nothing.pem", key)
    other = make_certificates(tmp_path / "other")
    with pytest.raises(JobError, match="are not a readable certificate and its key"):
        make_security(ca, cert, other["cluster-key.pem"])
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    with pytest.raises(JobError, match=r"text.pem is not a readable certificate"):
        make_security(text, cert, key)


def test_an_encrypted_key_is_refused_and_asks_no_password(certificates, tmp_path):
    from cryptography.hazmat.primitives import serialization as s

    key = s.load_pem_private_key(certificates["client-key.pem"].read_bytes(), None)
    locked = tmp_path / "locked.pem"
    wrap = s.BestAvailableEncryption(b"secret")
    locked.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, wrap))
    with pytest.raises(JobError, match="not encrypted"):
        make_security(certificates["ca.pem"], certificates["client-cert.pem"], locked)


def test_only_the_owner_reads_keys(certificates):
    for name, file in certificates.items():
        readable = stat.S_IMODE(file.stat().st_mode)
        assert readable == (0o600 if name.endswith("-key.pem") else 0o644)
    assert stat.S_IMODE(certificates["ca.pem"].parent.stat().st_mode) == 0o700
    assert b"PRIVATE" not in certificates["ca.pem"].read_bytes()


def test_an_existing_set_is_not_changed_and_an_incomplete_set_is_refused(tmp_path):
    first = {name: file.read_bytes() for name, file in make_certificates(tmp_path).items()}
    assert {name: file.read_bytes() for name, file in make_certificates(tmp_path).items()} == first
    assert sorted(first) == sorted(CERTIFICATE_FILES)
    (tmp_path / "client-key.pem").unlink()
    with pytest.raises(JobError, match=r"but no client-key.pem; remove these files"):
        make_certificates(tmp_path)
