"""Datasets and jobs may have storage options, whose secrets are never shown or stored."""

from __future__ import annotations

import pickle
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import scalelatent as sl
from scalelatent import Dataset, open_dataset
from scalelatent.data import append_rows, make_digits
from scalelatent.engine.dask.worker_access import send_access
from scalelatent.errors import DataError, JobError, RunError, StoreError
from scalelatent.jobs.resolve import load_job, resolve
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.runner import run_new_job
from scalelatent.jobs.submit import submit_job
from scalelatent.storage import objects
from scalelatent.storage.access import Access
from scalelatent.storage.disk import locate

from .conftest import S3, SECRET

X = np.random.default_rng(1).integers(0, 255, (650, 8), dtype=np.uint8)
Y = np.arange(650) % 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the dataset `a.zarr`, to which rows were appended."""
    folder = tmp_path_factory.mktemp("stores")
    Dataset.from_arrays(X[:600], Y[:600]).save(folder / "a.zarr", chunk_rows=20, shard_rows=100)
    append_rows(folder / "a.zarr", Dataset.from_arrays(X[600:], Y[600:]))
    return folder


def test_objects_that_are_not_an_address_are_refused(folder: Path) -> None:
    for thing in ({}, fsspec.filesystem("file").get_mapper(str(folder / "a.zarr"))):
        with pytest.raises(DataError, match=r" is not a location: give a path, or an address"):
            open_dataset(thing)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="has no storage_options"):
        open_dataset(folder / "a.zarr", storage_options={"anon": True})


def test_the_error_of_options_of_another_process_names_the_next_step(folder: Path) -> None:
    spec = open_dataset(folder / "a.zarr").spec() | {"access": "0" * 16}
    with pytest.raises(DataError, match="open it again with open_dataset"):
        Dataset.from_spec(spec)


def test_a_pickled_dataset_is_opened_where_it_is_used(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "a.zarr", tmp_path / "a.zarr")
    sent = pickle.dumps(open_dataset(tmp_path / "a.zarr")[5:9])
    (tmp_path / "a.zarr").rename(tmp_path / "away.zarr")
    passed_on = pickle.dumps(pickle.loads(sent))
    with pytest.raises(DataError, match=r"a\.zarr does not exist, or process .* open it there"):
        pickle.loads(passed_on).read_x(0, 1)
    (tmp_path / "away.zarr").rename(tmp_path / "a.zarr")
    rows = pickle.loads(passed_on)
    np.testing.assert_array_equal(rows.read_x(0, len(rows)), X[5:9])


# -- storage options ---------------------------------------------------------------------------------------


def make_options(s3: S3) -> dict[str, Any]:
    return {"key": "AKIATESTTESTTEST", "secret": SECRET, "endpoint_url": s3.endpoint}


@pytest.fixture
def options(s3: S3, monkeypatch: pytest.MonkeyPatch, close_connections: None) -> dict[str, Any]:
    """Store a dataset; return options that point to the server, to which the environment no longer points."""
    made = make_options(s3)
    make_digits(s3.at("digits.zarr"), 300)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    objects.forget_connections()
    return made


def test_options_open_what_the_environment_does_not(s3: S3, options: dict[str, Any]) -> None:
    ds = open_dataset(s3.at("digits.zarr"), storage_options=options)
    np.testing.assert_array_equal(
        ds[5:9].to_dask()[0].compute(scheduler="threads")[0].ravel(), ds.read_x(5, 6)[0]
    )
    assert Dataset.from_spec(ds.spec()).fingerprint() == ds.fingerprint()
    assert Access.from_options(options) is Access.from_options(dict(options)) is ds.accesses[0]


def test_secrets_are_not_shown(s3: S3, options: dict[str, Any]) -> None:
    ds = open_dataset(s3.at("digits.zarr"), storage_options=options)
    shown = [
        repr(ds),
        str(ds.spec()),
        repr(ds.accesses),
        repr(ds.place),
        repr(ds.to_dask()),
    ]
    assert SECRET not in "".join(shown)
    assert ds.accesses[0].hide(f"no entry with {SECRET}!") == "no entry with …!"
    with s3.proxy.denying(lambda method, path: True), pytest.raises(StoreError) as error:
        open_dataset(s3.at("digits.zarr"), storage_options=options)
    assert SECRET not in str(error.value)


def test_run_folders_and_models_contain_no_secret(s3: S3, options: dict[str, Any], tmp_path: Path) -> None:
    ds = open_dataset(s3.at("digits.zarr"), storage_options=options)
    model = sl.CapsuleRegression(capsule_dim=2, max_iter=2, random_state=0)
    model.fit(ds, run_dir=tmp_path / "run")
    model.save(tmp_path / "model.zarr")
    model.report(tmp_path / "report")
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 10
    for file in files:
        assert SECRET.encode() not in file.read_bytes(), file
    model.fit(
        open_dataset(s3.at("digits.zarr"), storage_options=options), run_dir=tmp_path / "run", resume=True
    )
    from scalelatent.jobs.recorder import check_resumable

    with pytest.raises(JobError, match="opened with storage options; resume"):
        check_resumable(RunFolder.open(str(tmp_path / "run")))


OPEN_AND_SUM = "import pickle, sys; print(pickle.load(sys.stdin.buffer).read_x(0, 300).sum(dtype=int))"


def test_a_pickled_dataset_opens_in_another_process(s3: S3, options: dict[str, Any]) -> None:
    ds = open_dataset(s3.at("digits.zarr"), storage_options=options)
    reported = subprocess.run(
        [sys.executable, "-c", OPEN_AND_SUM], input=pickle.dumps(ds), capture_output=True, timeout=100
    )
    assert int(reported.stdout) == ds.read_x(0, 300).sum(dtype=int), reported.stderr.decode()


# -- storage options of jobs -------------------------------------------------------------------------------


def write_job_file(folder: Path, train: str, options: str, more: str = "") -> Path:
    file = folder / "job.toml"
    file.write_text(
        f'[job]\nseed = 1\nout = "{folder}/run"\n[data]\ntrain = "{train}"\nstorage_options = {options}\n'
        f'[model]\nkind = "capsule"\ncapsule_dim = 2\nmax_iter = 2\n{more}'
    )
    return file


def test_a_job_may_have_storage_options(
    s3: S3, monkeypatch: pytest.MonkeyPatch, close_connections: None, tmp_path: Path
) -> None:
    make_digits(s3.at("digits.zarr"), 300)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    objects.forget_connections()
    job = load_job(write_job_file(tmp_path, s3.at("digits.zarr"), f'{{endpoint_url = "{s3.endpoint}"}}'))
    result = run_new_job(job)
    assert result.folder.read_state()["state"] == "done"
    assert result.folder.read_job().data.storage_options == {"endpoint_url": s3.endpoint}


@pytest.mark.parametrize(
    "options",
    [
        {"secret": "my-secret"},
        {"account_key": "my-secret"},
        {"sas_token": "my-secret"},
        {"client_kwargs": {"aws_secret_access_key": "my-secret"}},
        {"connection_string": "AccountKey=my-secret"},
        {"client_kwargs": {"headers": {"Authorization": "my-secret"}}},
        {"endpoint_url": "https://me:my-secret@host"},
    ],
)
def test_credentials_among_the_options_of_a_job_are_refused(options: dict[str, Any]) -> None:
    stored = {
        "job": {"out": "run"},
        "data": {"train": "s3://a/b", "storage_options": options},
        "model": {"kind": "capsule"},
    }
    with pytest.raises(JobError, match=r"credential.*AWS_ACCESS_KEY_ID.*never") as error:
        resolve(stored, environ={})
    assert "my-secret" not in str(error.value)
    stored["data"]["storage_options"] = {"token": "anon", "profile": "mine", "anon": True}
    assert resolve(stored, environ={}).data.storage_options == stored["data"]["storage_options"]


# -- datasets in Azure -------------------------------------------------------------------------------------


# Azurite, Microsoft's emulator, always has this published account and key, so they are no secret.
_AZURITE = (
    "AccountName=devstoreaccount1;AccountKey="
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch, close_connections: None) -> Iterator[str]:
    """Start Azurite on loopback with an empty container `con`; return the connection string."""
    pytest.importorskip("adlfs")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("Azurite (npm install azurite) is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    how = ["--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([program, *how, "--blobPort", str(port)], **quiet)
    try:
        end = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < end
            time.sleep(0.1)
        from azure.storage.blob import BlobServiceClient

        text = (
            f"DefaultEndpointsProtocol=http;{_AZURITE};BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
        )
        BlobServiceClient.from_connection_string(text).create_container("con")
        yield text
    finally:
        server.kill()
        server.wait()


def test_datasets_in_azure_are_read_and_written(azure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure)
    Dataset.from_arrays(X, Y).save("az://con/a.zarr", chunk_rows=20, shard_rows=100)
    store = locate("az://con/k")
    assert [store.create("x", b"1"), store.create("x", b"2"), store.read("x")] == [True, False, b"1"]
    model = sl.CapsuleRegression(capsule_dim=2, max_iter=2, random_state=0)
    model.fit(open_dataset("az://con/a.zarr"), run_dir="az://con/run")
    assert sl.load_model("az://con/run").n_iter_ == 2
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    objects.forget_connections()
    ds = open_dataset("az://con/a.zarr", storage_options={"connection_string": azure})
    np.testing.assert_array_equal(ds.read_x(0, 650), X)


# -- storage options of workers ----------------------------------------------------------------------------


class UnpicklableOption(dict[str, Any]):
    """Option that cannot be pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("only here")


def make_capsule(**fit: Any) -> Any:
    rows = fit.pop("rows")
    return sl.CapsuleRegression(capsule_dim=2, max_iter=3, random_state=0).fit(rows, **fit)


@pytest.mark.slow
@pytest.mark.cluster
def test_workers_receive_the_options(s3: S3, options: dict[str, Any], tmp_path: Path) -> None:
    ds = open_dataset(s3.at("digits.zarr"), storage_options=options)
    alone = make_capsule(rows=ds)
    with sl.cluster("local", workers=1, threads=1) as client:
        model = make_capsule(rows=ds, client=client, run_dir=tmp_path / "run")
        client.cluster.scale(2)  # A worker that joins later gets the options, too.
        client.wait_for_workers(2, timeout=60)
        client.retire_workers(list(client.scheduler_info()["workers"])[:1])
        out = model.predict(ds, out=tmp_path / "labels.zarr", client=client)
        of_one = alone.predict(ds, out=tmp_path / "alone.zarr")
        np.testing.assert_array_equal(out.read_x(0, 300), of_one.read_x(0, 300))
        assert client.compute(ds.to_dask()[0].sum()).result(timeout=60) == ds.read_x(0, 300).sum(dtype=int)
        both = ds.without_labels().with_target(ds)
        assert client.submit(lambda rows: rows.n_targets, both).result(timeout=60) == ds.n_features
        seen = str(client.scheduler_info()) + str(client.get_events("all"))
        assert SECRET not in seen
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or SECRET.encode() not in file.read_bytes(), file


@pytest.mark.slow
@pytest.mark.cluster
def test_options_that_cannot_be_pickled_are_refused(s3: S3, options: dict[str, Any]) -> None:
    ds = open_dataset(s3.at("digits.zarr"), storage_options={**options, "config_kwargs": UnpicklableOption()})
    message = r"storage options that cannot be sent to the workers \(TypeError: .*only here"
    with sl.cluster("local", workers=1, threads=1) as client, pytest.raises(RunError, match=message) as error:
        send_access(client, ds)
    assert SECRET not in str(error.value)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_submitted_job_may_have_storage_options(
    s3: S3, monkeypatch: pytest.MonkeyPatch, close_connections: None, tmp_path: Path
) -> None:
    make_digits(s3.at("digits.zarr"), 300)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    objects.forget_connections()
    job = load_job(write_job_file(tmp_path, s3.at("digits.zarr"), f'{{endpoint_url = "{s3.endpoint}"}}'))
    with sl.cluster("local", workers=2, threads=1) as client:
        folder = RunFolder.open(submit_job(job, client=client).run)
        end = time.monotonic() + 120
        while folder.read_state()["state"] not in ("done", "failed") and time.monotonic() < end:
            time.sleep(0.2)
    assert folder.read_state()["state"] == "done"
