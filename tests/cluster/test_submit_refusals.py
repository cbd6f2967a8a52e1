"""A job that the cluster cannot run is refused at submission, and the error says what to change.

No run folder and no task is left.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelatent.deploy.checks import check_versions
from scalelatent.deploy.connection import open_client
from scalelatent.errors import JobError, PlanError, RunError
from scalelatent.jobs import control
from scalelatent.jobs.resolve import resolve
from scalelatent.jobs.submit import submit_job

# Programs that a worker runs before it starts: then it lacks this package, or has another version of numba.
WITHOUT_PACKAGE = "import sys; sys.modules['scalelatent'] = None\n"
OTHER_NUMBA = """
import importlib.metadata as metadata
def version(name, true=metadata.version):
    return "0.1.2" if name == "numba" else true(name)
metadata.version = version
"""


def start(workers: int = 1, **more: Any) -> Any:
    from distributed import LocalCluster

    return LocalCluster(
        n_workers=workers, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0",
        memory_limit=0, silence_logs=50, **more,
    )  # fmt: skip


@pytest.fixture
def make_job(rows: Any, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes a job; its argument ``section__key=value`` changes one setting."""

    def make(**changes: Any) -> Any:
        stored: dict[str, dict[str, Any]] = {
            "job": {"out": str(tmp_path / "run"), "seed": 1},
            "data": {"train": str(rows.folder / "train")},
            "model": {"kind": "capsule", "capsule_dim": 2, "max_iter": 2},
            "cluster": {},
        }
        for name, value in changes.items():
            section, key = name.split("__")
            stored[section][key] = value
        return resolve(stored, environ={})

    return make


@pytest.fixture
def submit_refused_job(client: Any, make_job: Any, tmp_path: Path) -> Callable[..., str]:
    """Return a function that submits a job that is refused, and returns the error message.

    It checks that there is no run folder and no new job.
    """

    before = control.known_jobs(client)

    def run(kind: type[Exception] = JobError, **changes: Any) -> str:
        with pytest.raises(kind) as error:
            submit_job(make_job(**changes), client=client)
        assert not (tmp_path / "run").exists()
        assert control.known_jobs(client) == before
        return str(error.value)

    return run


def test_a_device_that_no_worker_offers_is_refused(submit_refused_job: Any) -> None:
    said = submit_refused_job(model__device="gpu")
    assert "none of the 2 workers" in said
    assert '--resources "GPU=1"' in said
    assert '[cluster] device = "auto"' in said


def test_a_missing_dataset_is_refused(submit_refused_job: Any) -> None:
    said = submit_refused_job(data__validation="/no/such/rows.zarr")
    assert said.startswith("[data] validation = '/no/such/rows.zarr' cannot be opened by workers tcp://")
    assert (
        f"(it does not exist on host {socket.gethostname()}; it does not exist here either): check the path"
        in said
    )


def test_a_dataset_that_only_this_machine_sees_is_refused(
    submit_refused_job: Any, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rows.folder)  # In the workers' folder, the path below does not exist.
    said = submit_refused_job(data__train="/proc/self/cwd/train")
    assert (
        f"(it does not exist on host {socket.gethostname()}; it exists on this machine): move it to storage"
        in said
    )


def test_a_run_folder_that_the_workers_do_not_see_is_refused(
    client: Any, make_job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match=r"/proc/self/cwd/run: workers .* cannot use it"):
        submit_job(make_job(job__out="/proc/self/cwd/run"), client=client)
    assert os.listdir(tmp_path) == []


def test_callbacks_that_a_worker_cannot_create_are_refused(
    client: Any, make_job: Any, tmp_path: Path
) -> None:
    client.run(exec, "import sys; sys.modules['mlflow'] = None")
    try:
        with pytest.raises(
            JobError, match=r"scalelatent\[mlflow\]' \(on worker tcp://.*, which may drive the job"
        ):
            submit_job(replace(make_job(), callbacks=({"kind": "mlflow"},)), client=client)
    finally:
        client.run(exec, "import sys; del sys.modules['mlflow']")
    assert not (tmp_path / "run").exists()


def test_folders_that_cannot_be_written_are_refused(submit_refused_job: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = submit_refused_job(job__scratch=str(tmp_path / "file" / "scratch"))
    assert f"[job] scratch = '{tmp_path}/file/scratch' cannot be written by workers" in said
    assert f"{tmp_path}/file on host {socket.gethostname()} is a file" in said


def test_worker_refuses_an_invalid_job(submit_refused_job: Any) -> None:
    assert "exceed" in submit_refused_job(data__train_rows="0:1000000")
    assert "capsule_dim" in submit_refused_job(model__capsule_dim=-3)


def test_a_job_that_does_not_fit_in_memory_is_refused(
    client: Any, make_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.jobs import submit

    true = submit._worker_facts
    small = {"memory_limit": 2**20}
    monkeypatch.setattr(submit, "_worker_facts", lambda c: {a: w | small for a, w in true(c).items()})
    with pytest.raises(PlanError, match="memory"):
        submit_job(make_job(), client=client)


def test_a_cluster_without_workers_is_refused(make_job: Any) -> None:
    with start(0) as cluster:
        begin = time.monotonic()
        with pytest.raises(
            JobError, match=r"has no workers, and none joined within 0.5 s: start workers \(dask worker"
        ):
            submit_job(make_job(), scheduler=cluster.scheduler_address, wait=0.5)
        assert time.monotonic() - begin < 10


@pytest.mark.slow
def test_workers_without_the_package_are_refused(make_job: Any, tmp_path: Path) -> None:
    with (
        start(preload=[WITHOUT_PACKAGE]) as cluster,
        pytest.raises(JobError, match="scalelatent cannot be imported by tcp://") as error,
    ):
        submit_job(make_job(cluster__allow_mismatch=True), scheduler=cluster.scheduler_address)
    assert "pip install scalelatent" in str(error.value)
    assert "missing (tcp://" in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_workers_with_other_versions_are_refused(make_job: Any, tmp_path: Path) -> None:
    reported: list[str] = []
    with start(preload=[OTHER_NUMBA]) as cluster:
        with pytest.raises(JobError, match=r"differ from those of this environment") as error:
            submit_job(make_job(), scheduler=cluster.scheduler_address)
        assert not (tmp_path / "run").exists()
        with open_client(cluster.scheduler_address) as client:
            check_versions(client, allow_mismatch=True, print_line=reported.append)
    lines = str(error.value).splitlines()
    assert lines[1].split() == ["package", "here", "scheduler", "workers"]
    assert [line.split()[0] for line in lines[2:-1]] == ["numba"]
    assert "0.1.2 (tcp://" in lines[2]
    assert "--allow-mismatch" in lines[-1]
    assert reported[0].splitlines()[1:] == lines[1:-1]


def test_an_unknown_job_is_an_error(client: Any, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"jobs of the scheduler tcp://.*; (it knows no job|valid are)"):
        control.find_job("nobody-12345678", scheduler=client.scheduler.address, below=tmp_path)


# -- wrong addresses of schedulers ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def schedulers() -> Iterator[Any]:
    """Start one scheduler without TLS and one with TLS in this process, both without workers."""
    from distributed import LocalCluster, Security

    ours = Security.temporary()
    how: dict[str, Any] = {"n_workers": 0, "dashboard_address": "127.0.0.1:0", "silence_logs": 60}
    with (
        LocalCluster(host="127.0.0.1", **how) as plain,
        LocalCluster(host="tls://127.0.0.1", security=ours, **how) as secure,
    ):
        yield plain, secure, ours


def connect_refused(address: str, security: Any = None, seconds: float = 8.0) -> str:
    begin = time.monotonic()
    with pytest.raises(JobError) as error:
        open_client(address, security)
    assert time.monotonic() - begin < seconds
    return str(error.value)


def test_a_mismatch_of_tls_is_reported(schedulers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed import Security

    from scalelatent.deploy import connection

    plain, secure, ours = schedulers
    with_tls, without = secure.scheduler_address, plain.scheduler_address
    for address, security in ((without, None), (with_tls, ours)):
        with open_client(address, security) as client:
            assert client.scheduler_info()["address"] == address
    assert "no certificates are named" in connect_refused(with_tls)
    assert "certificate" in connect_refused(with_tls, Security.temporary())
    monkeypatch.setattr(connection, "CLIENT_SECONDS", 1.0)
    for address, security in ((with_tls.replace("tls", "tcp"), None), (without.replace("tcp", "tls"), ours)):
        assert (
            "that both sides use TLS with certificates of one authority or neither does"
            in connect_refused(address, security)
        )


def test_an_address_that_is_not_a_scheduler_is_refused(
    schedulers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.deploy import connection

    assert "no program listens there (connection refused)" in connect_refused("tcp://127.0.0.1:1")
    assert "the host 'no-such-host.invalid' is unknown" in connect_refused("tcp://no-such-host.invalid:8786")
    assert "'http' is not one of tcp, tls" in connect_refused("http://127.0.0.1:8787")
    assert "is not an address" in connect_refused("tcp://127.0.0.1:scheduler")
    monkeypatch.setattr(connection, "CLIENT_SECONDS", 1.0)
    dashboard = schedulers[0].dashboard_link.replace("http", "tcp").removesuffix("/status")
    assert "Check the port (the dashboard has a different one)" in connect_refused(dashboard)


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-x"])
def test_a_silent_or_foreign_server_is_refused(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from scalelatent.deploy import connection

    monkeypatch.setattr(connection, "CLIENT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def serve() -> None:
            while True:
                try:
                    kept.append(server.accept()[0])
                    kept[-1].sendall(said)
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        refused = connect_refused(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        assert "does not answer as a Dask scheduler within" in refused
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    for one in kept:
        one.close()


@pytest.mark.slow
def test_a_hanging_worker_is_reported(rows: Any, make_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    from scalelatent.engine.dask import timed_calls

    monkeypatch.setattr(timed_calls, "ASK_SECONDS", 6.0)
    with start(2) as cluster, open_client(cluster.scheduler_address) as client:
        client.wait_for_workers(2, timeout=60)
        address, pid = next(iter(client.run(os.getpid).items()))
        os.kill(pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            with pytest.raises(RunError, match=f"without an answer: {address} .last seen") as error:
                submit_job(make_job(), client=client)
            assert time.monotonic() - begin < 12
        finally:
            os.kill(pid, signal.SIGCONT)
    assert "Stop the workers that hang" in str(error.value)
