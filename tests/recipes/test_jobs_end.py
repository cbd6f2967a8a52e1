"""If a cluster ends, its jobs stop at a checkpoint, and can resume without a cluster."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalelatent.cli import main
from scalelatent.deploy import connection, serving
from scalelatent.jobs import control, job_cluster, runner
from scalelatent.jobs.resolve import load_job
from scalelatent.jobs.runfolder import RunFolder
from tests.helpers import read_model_files, wait_for, write_digits_job

pytestmark = pytest.mark.cluster


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Return a function that runs a `scalelatent` command, and returns its stdout and stderr."""

    def run(*words: str | Path, code: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        reported = capsys.readouterr()
        assert (ended.value.code or 0) == code, reported
        return reported.out, reported.err

    return run


@pytest.fixture
def skip_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_report", lambda *_: None)


@pytest.mark.usefixtures("skip_report")
def test_jobs_stop_with_their_cluster_and_resume_elsewhere(
    running_cluster: Any, run_cli: Any, tmp_path: Path
) -> None:
    job, run, file = write_digits_job(tmp_path, 60), tmp_path / "run", tmp_path / "scheduler.json"
    with running_cluster("--workers", "1", "--scheduler-file", str(file)) as (process, reported):
        at = ("--scheduler-file", file)
        assert (
            json.loads(run_cli("submit", job, *at, "--out", run, "--wait", "60", "--json")[0])["dashboard"]
            == (reported["dashboard"])
        )
        folder = RunFolder.open(str(run))
        wait_for(lambda: len(folder.records("metrics.jsonl")) > 3)
        assert folder.id in run_cli("status", folder.id, *at)[0]
        assert folder.id in run_cli("status", *at)[0]
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "stopping 1 job(s) at the next checkpoint" in errors
    assert f"{folder.id}  cancelled; resume with: scalelatent resume" in errors
    assert "Traceback" not in errors.partition("stopped: ")[0]
    state = folder.read_state()
    assert (state["state"], state["scheduler"]) == ("cancelled", reported["scheduler"])
    assert "traceback" not in folder.records("events.jsonl")[-1]

    # A resume needs the address of another cluster, because the old cluster has ended.
    refused = run_cli("resume", run, code=2)[1]
    assert "no program listens there" in refused
    assert "--scheduler-file FILE" in refused
    assert "--here" in refused
    assert "no scheduler wrote its address" in run_cli("resume", run, *at, code=2)[1]
    with pytest.MonkeyPatch.context() as patch:
        for module in (control, job_cluster):
            patch.setattr(module, "open_client", lambda *_: pytest.fail("resume --here opened a client"))
        assert "done" in run_cli("resume", run, "--here")[0]
    whole = runner.run_new_job(load_job(job, settings=[f"job.out={tmp_path / 'whole'}"]))
    assert read_model_files(folder) == read_model_files(whole.folder)


def test_an_idle_cluster_ends(running_cluster: Any) -> None:
    with running_cluster("--workers", "0", "--idle", "0.02") as (process, _):
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "no job for 0.02 minutes" in errors


def test_doctor_reads_the_scheduler_file(tls_cluster: Any, run_cli: Any, tmp_path: Path) -> None:
    file, tls = tmp_path / "scheduler.json", tls_cluster["tls"]
    file.write_text(json.dumps({"address": tls_cluster["scheduler"]}))
    files = ("--tls-ca-file", tls["ca"], "--tls-cert", tls["cert"], "--tls-key", tls["key"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        # The worker declares a GPU that does not exist.
        found, _ = run_cli("doctor", "--scheduler-file", file, *files, code=1)
    assert "workers: 2, hosts: 1" in found
    reported = run_cli("doctor", "--scheduler-file", file, "--scheduler", "tcp://head:8786", code=2)[1]
    assert "give either the address of the scheduler" in reported


def test_the_dashboard_line_of_another_host_has_a_port_forward(
    tls_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert connection.dashboard_line(tls_client) == f"dashboard: {connection.dashboard_url(tls_client)}"
    monkeypatch.setattr(connection, "dashboard_url", lambda client: "http://127.0.0.1:8787/status")
    monkeypatch.setattr(connection, "address_of", lambda client: "tls://10.0.0.1:8786")
    forward = "ssh -L 8787:127.0.0.1:8787 10.0.0.1"
    assert connection.dashboard_line(tls_client) == (
        f"dashboard: http://127.0.0.1:8787/status on 10.0.0.1 (from other machines: {forward})"
    )


def test_a_repeated_signal_interrupts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system and the script of the job may both send SIGTERM."""
    # The clusters of other tests must not end.
    monkeypatch.setattr(serving, "_end_children", lambda seconds=5: None)
    interrupts = 0
    with serving.interrupt_on_signals():
        for _ in range(2):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except KeyboardInterrupt:
                interrupts += 1
    assert interrupts == 1
