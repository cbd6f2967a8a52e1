"""The doctor of a cluster: what a live one answers, and what is made of each answer."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from scalelatent.deploy import doctor_cluster as doctor

GIB = 2**30
SCHEDULER = {
    "dashboard": True, "bokeh": "3.9", "page": True, "no_workers_timeout": 300.0, "allowed_failures": 10
}  # fmt: skip
WORKER = {
    "name": "w", "threads": 1, "memory_limit": 4 * GIB, "nanny": True, "offers_gpu": False, "host": "a",
    "cores": 4, "machine_bytes": 16 * GIB, "pools": {"BLAS": 1, "numba": 1, "Blosc": 4, "zarr": 0},
    "trim": "65536", "glibc": True, "cupy": [], "gpus": 0, "cache_trouble": None, "folder_trouble": None,
    "skew": 0.0, "local_directory": "/tmp",
}  # fmt: skip


def seen(
    *workers: dict[str, Any], address: str = "tls://head:8786", silent: Any = (), **scheduler: Any
) -> Any:
    told = {f"tls://10.0.0.{i}:40000": WORKER | worker for i, worker in enumerate(workers)}
    return doctor.Seen(address, SCHEDULER | scheduler, told, dict(silent))


def only(findings: Any, status: str) -> Any:
    (finding,) = [finding for finding in findings if finding.status != "ok"]
    assert finding.status == status
    assert finding.fix
    return finding


def test_a_cluster_in_order():
    two = seen({}, {"host": "b", "offers_gpu": True, "gpus": 1, "cupy": ["cupy-cuda12x 13.6"]})
    checks = [
        doctor._workers, doctor._scheduler, doctor._dashboard, doctor._threads, doctor._memory,
        doctor._malloc, doctor._clock, doctor._gpu, doctor._cache,
        lambda s: doctor._folder(s, "s3://runs", None),
    ]  # fmt: skip
    findings = [finding for check in checks for finding in check(two)]
    assert {finding.status for finding in findings} == {"ok"}
    assert all(finding.fix == "" for finding in findings)
    assert findings[0].found == "2 workers on 2 host(s), 2 threads, 1 of them offer a GPU"


def test_workers_that_are_not_there():
    assert "none" in only(doctor._workers(seen()), "fail").found
    lacking = seen({}, silent={"tcp://x:1": "ModuleNotFoundError: No module named 'scalelatent'"})
    found = only(doctor._workers(lacking), "fail")
    assert "tcp://x:1" in found.found
    assert "install scalelatent" in found.fix
    assert "without one" in only(doctor._workers(seen({"nanny": False})), "warn").found


def test_open_without_tls():
    found = only(doctor._scheduler(seen({}, address="tcp://10.0.0.1:8786")), "warn")
    assert "can run code" in found.found
    assert next(doctor._scheduler(seen({}, address="tcp://127.0.0.1:8786"))).status == "ok"


def test_settings_of_the_scheduler():
    found = only(doctor._scheduler(seen({}, no_workers_timeout=None, allowed_failures=3)), "warn")
    assert "NO_WORKERS_TIMEOUT=5min" in found.fix
    assert "ALLOWED_FAILURES=10" in found.fix


@pytest.mark.parametrize(
    ("scheduler", "fix"),
    [
        ({"bokeh": None}, "bokeh>=3.4"),
        ({"dashboard": False}, "--dashboard-address"),
        ({"page": False}, "--preload"),
    ],
)
def test_dashboard(scheduler, fix):
    assert fix in only(doctor._dashboard(seen({}, **scheduler)), "warn").fix


def test_threads():
    crowded = seen(*[{"threads": 2}] * 3, {"host": "b", "threads": 4})
    found = only(doctor._threads(crowded), "warn")
    assert found.found == "a has 6 worker threads on 4 cores"
    pools = {"BLAS": 1, "numba": 64, "Blosc": 8, "zarr": 0}
    found = only(doctor._threads(seen({}, {"pools": pools})), "warn")
    assert found.found.startswith("numba keeps 64 threads in 1 worker(s) (tls://10.0.0.1:40000)")
    assert "NUMBA_NUM_THREADS=1" in found.fix


def test_memory():
    assert (
        "has 16.0 GiB and its workers may use 20.0 GiB" in only(doctor._memory(seen(*[{}] * 5)), "warn").found
    )
    assert "without a limit" in only(doctor._memory(seen({}, {"memory_limit": None})), "warn").found
    assert "MALLOC_TRIM" in only(doctor._malloc(seen({"trim": None})), "warn").found
    assert next(doctor._malloc(seen({"trim": None, "glibc": False}))).status == "ok"


def test_clock():
    found = only(doctor._clock(seen({}, {"skew": -7.25}, {"skew": 0.9})), "warn")
    assert found.found.startswith("1 worker(s) (tls://10.0.0.1:40000) off by up to -7.2 s")


@pytest.mark.parametrize(
    ("worker", "status", "found"),
    [
        ({"offers_gpu": True}, "fail", "offer a GPU, but no CuPy"),
        ({"offers_gpu": True, "cupy": ["cupy 13"]}, "fail", "but CuPy finds no device"),
        ({"offers_gpu": True, "cupy": ["cupy 13"], "gpus": 1, "threads": 4}, "warn", "several threads"),
        ({"cupy": ["cupy-cuda12x 13", "cupy-cuda13x 13"]}, "fail", "CuPy twice"),
        ({"cupy": ["cupy 13"], "gpus": 1}, "warn", "that they do not offer"),
    ],
)
def test_gpu(worker, status, found):
    assert found in only(doctor._gpu(seen({}, worker)), status).found


def test_folder():
    found = only(doctor._folder(seen({}, {"folder_trouble": "Permission denied"}), "/runs", None), "fail")
    assert found.found == "/runs: 1 worker(s) (tls://10.0.0.1:40000) cannot use it (Permission denied)"
    assert "on this machine" in only(doctor._folder(seen({}), "/runs", "Read-only file system"), "fail").found


@pytest.mark.cluster
def test_a_live_cluster(tls_client, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_versions", lambda client: iter(()))  # has tests of its own
    findings = {finding.check: finding for finding in doctor.examine_cluster(tls_client, tmp_path / "runs")}
    assert findings["workers"].found == "2 workers on 1 host(s), 2 threads, 1 of them offer a GPU"
    for check in ("trust", "scheduler", "memory", "malloc", "clock", "numba cache", "folder"):
        assert findings[check].status == "ok", findings[check]
    assert findings["gpu"].status == "fail"  # the device it offers is not there
    assert list((tmp_path / "runs").iterdir()) == []
    assert "BLAS 1, numba 1" in findings["threads"].found or findings["threads"].status == "warn"


@pytest.mark.cluster
def test_a_folder_that_is_a_file(tls_client, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_versions", lambda client: iter(()))
    (tmp_path / "file").write_text("")
    findings = doctor.examine_cluster(tls_client, tmp_path / "file" / "runs")
    (folder,) = [finding for finding in findings if finding.check == "folder"]
    assert folder.status == "fail"
    assert "on this machine" in folder.found


@pytest.mark.cluster
def test_a_worker_that_hangs_is_named(tls_client, tls_cluster, monkeypatch):
    monkeypatch.setattr(doctor, "_versions", lambda client: iter(()))
    pids = tls_client.run(os.getpid)
    address, pid = next(iter(pids.items()))
    os.kill(pid, signal.SIGSTOP)
    try:
        (hung, *_), others = doctor.examine_cluster(tls_client, seconds=2), pids.keys() - {address}
    finally:
        os.kill(pid, signal.SIGCONT)
    assert hung.check == "workers"
    assert hung.status == "fail"
    assert address in hung.found
    assert not any(other in hung.found for other in others)
    assert "no answer within 2 s" in hung.found


@pytest.mark.cluster
def test_the_command(tls_cluster, tmp_path):
    pytest.importorskip("scalelatent.deploy.connection")
    import json

    from typer.testing import CliRunner

    from scalelatent.cli import app

    files = tls_cluster["tls"]
    result = CliRunner().invoke(app, [
        "doctor", str(tmp_path), "--json", "--scheduler", tls_cluster["scheduler"],
        "--tls-ca-file", files["ca"], "--tls-cert", files["cert"], "--tls-key", files["key"],
    ])  # fmt: skip
    told = json.loads(result.stdout)
    findings = {finding["check"]: finding for finding in told["findings"]}
    assert findings["versions"]["status"] == "ok"
    assert (result.exit_code, told["ok"]) == (1, False)  # of the GPU that is not there
