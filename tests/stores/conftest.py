"""Fixtures that start servers imitating S3 and Google's storage, and create an empty bucket for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

pytest.importorskip("moto")
pytest.importorskip("s3fs")

from scalelatent.storage import objects

from .server import ServerProxy, serve_bucket

SECRET = "never-to-be-written-down"


@dataclass
class S3:
    """Bucket of an S3 server: its URL, the proxy that counts its requests, and the address of the server."""

    url: str
    proxy: ServerProxy
    endpoint: str

    def at(self, key: str) -> str:
        """Return the URL of an object (key) in the bucket."""
        return f"{self.url}/{key}"


@pytest.fixture(scope="session")
def _server() -> Iterator[tuple[str, ServerProxy]]:
    objects.forget_connections()
    with serve_bucket() as found:
        yield found
    objects.forget_connections()


def point_to(patch: pytest.MonkeyPatch, endpoint: str, folder: object) -> None:
    """Make the environment point to the server, without the credentials of this user."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        patch.delenv(name)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": f"{folder}/no-config",
        "AWS_SHARED_CREDENTIALS_FILE": f"{folder}/no-credentials",
    }.items():
        patch.setenv(name, value)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: object, _server: tuple[str, ServerProxy]) -> ServerProxy:
    """Let the environment variables point to the server, and return the proxy that counts its requests."""
    endpoint, proxy = _server
    point_to(monkeypatch, endpoint, tmp_path)
    monkeypatch.setattr(objects, "FIRST_PAUSE", 0.005)
    return proxy


@pytest.fixture
def close_connections() -> Iterator[None]:
    """Close kept connections before and after a test, because the test changes the environment variables."""
    objects.forget_connections()
    yield
    objects.forget_connections()


@pytest.fixture
def s3(aws: ServerProxy, _server: tuple[str, ServerProxy]) -> S3:
    """Return a new, empty bucket of the server."""
    bucket = f"b-{uuid.uuid4().hex[:12]}"
    objects._filesystem("s3", os.getpid()).mkdir(bucket)
    aws.requests.clear()
    aws.turned_away = aws.most_in_flight = 0
    return S3(f"s3://{bucket}", aws, _server[0])


@pytest.fixture(scope="session")
def _google() -> Iterator[str]:
    """Start an emulator of Google's storage on loopback."""
    # The package gcsfs reads this variable when it is imported. Without the variable, gcsfs asks Google for
    # the kind of each bucket.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    pytest.importorskip("gcsfs")
    server = emulator.create_server("127.0.0.1", 0, in_memory=True)
    with server:
        yield "http://{}:{}".format(*server._api._httpd.server_address[:2])


@pytest.fixture
def gs(monkeypatch: pytest.MonkeyPatch, _google: str) -> Iterator[str]:
    """Return the URL of an empty bucket of the emulator of Google's storage."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", _google)
    # Without this variable, gcsfs searches the network for credentials.
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    objects.forget_connections()
    bucket = f"b-{uuid.uuid4().hex[:12]}"
    objects._filesystem("gs", os.getpid()).mkdir(bucket)
    yield f"gs://{bucket}"
    objects.forget_connections()


@pytest.fixture(params=["disk", "memory", "s3", "gs"])
def any_url(request: pytest.FixtureRequest, tmp_path: object) -> str:
    """Return an unused path or URL; a test runs on a disk, in memory, in S3 and in Google's storage."""
    if request.param == "disk":
        return f"{tmp_path}/place"
    if request.param == "memory":
        return f"memory://stores-{uuid.uuid4().hex[:8]}"
    if request.param == "gs":
        return f"{request.getfixturevalue('gs')}/place"
    return str(request.getfixturevalue("s3").at("place"))


@pytest.fixture(autouse=True, scope="module")
def _new_workers() -> Iterator[None]:
    """Let Dask spawn workers, because a forked worker would have the environment of an earlier test."""
    import dask

    with dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}):
        yield
