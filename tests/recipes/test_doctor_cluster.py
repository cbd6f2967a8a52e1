"""`scalelatent doctor` reports the right findings for given answers of workers, and for a live cluster."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from scalelatent.deploy import checks
from scalelatent.deploy.probes import Requirements

GIB = 2**30
SCHEDULER = {"dashboard": True, "versions": {"bokeh": "3.9"}, "page": True}
WORKER = {
    "name": "w", "threads": 1, "memory_limit": 4 * GIB, "nanny": True, "offers_gpu": False, "host": "a",
    "cores": 4, "machine_bytes": 16 * GIB, "pools": {"BLAS": 1, "numba": 1, "Blosc": 4, "zarr": 0},
    "trim": "65536", "glibc": True, "cupy": [], "gpus": 0, "gpu_problem": "", "gpu_memory": "",
    "cache_problem": "", "folder_problem": "",
    "local_directory": "/tmp",
}  # fmt: skip


def make_view(
    *workers: dict[str, Any],
    address: str = "tls://head:8786",
    silent: Any = (),
    skews: Any = (),
    **scheduler: Any,
) -> checks.ClusterView:
    reported = {f"tls://10.0.0.{i}:40000": WORKER | worker for i, worker in enumerate(workers)}
    off = {f"tls://10.0.0.{i}:40000": skew for i, skew in enumerate(skews)}
    wanted = Requirements(folder="/runs")
    return checks.ClusterView(address, wanted, SCHEDULER | scheduler, reported, dict(silent), skews=off)


def judge_answers(name: str, view: checks.ClusterView) -> list[checks.Finding]:
    (check,) = [check for check in checks.CHECKS if (check.where, check.name) == ("cluster", name)]
    return list(check.findings(view))


def find_single_finding(name: str, status: str, view: checks.ClusterView) -> checks.Finding:
    (finding,) = [finding for finding in judge_answers(name, view) if finding.status != "ok"]
    assert finding.status == status
    assert finding.fix
    return finding


def test_a_healthy_cluster_has_no_findings():
    two = make_view({}, {"host": "b", "offers_gpu": True, "gpus": 1, "cupy": ["cupy-cuda12x 13.6"]})
    names = [check.name for check in checks.CHECKS if check.where == "cluster"]
    findings = [
        finding
        for name in names
        if name not in ("versions", "datasets", "scratch")
        for finding in judge_answers(name, two)
    ]
    assert {finding.status for finding in findings} == {"ok"}
    assert all(finding.fix == "" for finding in findings)
    assert findings[0].found == "workers: 2, hosts: 2, threads: 2, with a GPU: 1"


def test_missing_and_incomplete_workers_are_reported():
    assert "has no workers" in find_single_finding("workers", "fail", make_view()).found
    lacking = make_view({}, silent={"tcp://x:1": "ModuleNotFoundError: No module named 'scalelatent'"})
    found = find_single_finding("workers", "fail", lacking)
    assert "tcp://x:1" in found.found
    assert "install scalelatent" in found.fix
    assert "without a nanny" in find_single_finding("workers", "warn", make_view({"nanny": False})).found


def test_an_address_without_tls_is_reported_except_on_loopback():
    found = find_single_finding("trust", "warn", make_view({}, address="tcp://10.0.0.1:8786"))
    assert "can run code" in found.found
    assert judge_answers("trust", make_view({}, address="tcp://127.0.0.1:8786"))[0].status == "ok"


@pytest.mark.parametrize(
    ("scheduler", "fix"),
    [
        ({"versions": {"bokeh": None}}, "bokeh>=3.4"),
        ({"dashboard": False}, "--dashboard-address"),
    ],
)
def test_a_missing_dashboard_is_reported(scheduler, fix):
    assert fix in find_single_finding("dashboard", "warn", make_view({}, **scheduler)).fix


def test_more_threads_than_cores_are_reported():
    crowded = make_view(*[{"threads": 2}] * 3, {"host": "b", "threads": 4})
    found = find_single_finding("threads", "warn", crowded)
    assert found.found == "a has 6 worker threads on 4 cores"
    pools = {"BLAS": 64, "numba": 64, "Blosc": 8, "zarr": 0}
    found = find_single_finding("threads", "warn", make_view({}, {"pools": pools}))
    assert found.found.startswith("BLAS has 64 threads in worker tls://10.0.0.1:40000")
    assert "OPENBLAS_NUM_THREADS=1" in found.fix


def test_the_defaults_of_dask_are_accepted():
    """Without a page of scalelatent, and with several numba threads in workers, the findings are "ok"."""
    view = make_view({"pools": {"BLAS": 1, "numba": 64, "Blosc": 8, "zarr": 0}}, page=False)
    findings = [finding for name in ("dashboard", "threads") for finding in judge_answers(name, view)]
    assert [finding.status for finding in findings] == ["ok", "ok"]
    assert "the first job adds the page" in findings[0].found


def test_workers_that_may_exceed_the_memory_are_reported():
    assert (
        "has 16.0 GiB and its workers may use 20.0 GiB"
        in find_single_finding("memory", "warn", make_view(*[{}] * 5)).found
    )
    assert (
        "no memory limit for worker"
        in find_single_finding("memory", "warn", make_view({}, {"memory_limit": None})).found
    )
    assert "MALLOC_TRIM" in find_single_finding("malloc", "warn", make_view({"trim": None})).found
    assert judge_answers("malloc", make_view({"trim": None, "glibc": False}))[0].status == "ok"


def test_clocks_that_differ_are_reported():
    found = find_single_finding("clock", "warn", make_view({}, {}, {}, skews=(0.0, -7.25, 0.9)))
    assert found.found.startswith("clocks of worker tls://10.0.0.1:40000 differ by up to -7.2 s")


@pytest.mark.parametrize(
    ("worker", "status", "found"),
    [
        (
            {"offers_gpu": True},
            "fail",
            "worker tls://10.0.0.1:40000 with the resource GPU, but CuPy is not installed",
        ),
        ({"offers_gpu": True, "cupy": ["cupy 13"]}, "fail", "but CuPy finds no GPU"),
        ({"offers_gpu": True, "cupy": ["cupy 13"], "gpus": 1, "threads": 4}, "warn", "several threads"),
        (
            {
                "offers_gpu": True,
                "cupy": ["cupy 14"],
                "gpus": 1,
                "gpu_problem": "no libcublasLt.so.13",
            },
            "fail",
            "worker tls://10.0.0.1:40000 cannot compute on the GPU: no libcublasLt.so.13",
        ),
        ({"cupy": ["cupy-cuda12x 13", "cupy-cuda13x 13"]}, "fail", "CuPy is installed twice"),
        ({"cupy": ["cupy 13"], "gpus": 1}, "warn", "with an unused GPU"),
    ],
)
def test_gpus_that_cannot_compute_are_reported(worker, status, found):
    assert found in find_single_finding("gpu", status, make_view({}, worker)).found


def test_a_run_folder_that_workers_cannot_write_is_reported():
    found = find_single_finding("folder", "fail", make_view({}, {"folder_problem": "Permission denied"}))
    assert found.found == "/runs: worker tls://10.0.0.1:40000 cannot use it (Permission denied)"
    view = replace(make_view({}), folder_problem="Read-only file system")
    assert "on this machine" in find_single_finding("folder", "fail", view).found


@pytest.mark.cluster
def test_a_live_cluster_gives_findings_of_all_checks(tls_client, tmp_path):
    findings = {finding.check: finding for finding in checks.examine_cluster(tls_client, tmp_path / "runs")}
    assert findings["workers"].found == "workers: 2, hosts: 1, threads: 2, with a GPU: 1"
    for check in ("trust", "memory", "malloc", "clock", "numba cache", "folder"):
        assert findings[check].status == "ok", findings[check]
    assert findings["gpu"].status == "fail"  # The worker declares a GPU that does not exist.
    assert list((tmp_path / "runs").iterdir()) == []
    assert "BLAS 1, numba 1" in findings["threads"].found or findings["threads"].status == "warn"


@pytest.mark.cluster
def test_a_run_folder_below_a_file_is_reported(tls_client, tmp_path):
    (tmp_path / "file").write_text("")
    findings = checks.examine_cluster(tls_client, tmp_path / "file" / "runs")
    (folder,) = [finding for finding in findings if finding.check == "folder"]
    assert folder.status == "fail"
    assert "on this machine" in folder.found


@pytest.mark.cluster
def test_the_finding_names_a_worker_that_hangs(tls_client, tls_cluster):
    pids = tls_client.run(os.getpid)
    address, pid = next(iter(pids.items()))
    os.kill(pid, signal.SIGSTOP)
    try:
        (hung, *_), others = checks.examine_cluster(tls_client, seconds=2), pids.keys() - {address}
    finally:
        os.kill(pid, signal.SIGCONT)
    assert hung.check == "workers"
    assert hung.status == "fail"
    assert address in hung.found
    assert not any(other in hung.found for other in others)
    assert "no answer within 2 s" in hung.found


@pytest.mark.cluster
def test_the_command_prints_the_findings_as_json(tls_cluster, tmp_path):
    pytest.importorskip("scalelatent.deploy.connection")
    import json

    from typer.testing import CliRunner

    from scalelatent.cli import app

    files = tls_cluster["tls"]
    result = CliRunner().invoke(app, [
        "doctor", str(tmp_path), "--json", "--scheduler", tls_cluster["scheduler"],
        "--tls-ca-file", files["ca"], "--tls-cert", files["cert"], "--tls-key", files["key"],
    ])  # fmt: skip
    reported = json.loads(result.stdout)
    findings = {finding["check"]: finding for finding in reported["findings"]}
    assert findings["versions"]["status"] == "ok"
    assert (result.exit_code, reported["ok"]) == (1, False)  # The worker declares a GPU that does not exist.
