"""By `scalelatent cluster join`, workers join a running scheduler, compute, and end with the scheduler."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from scalelatent.deploy.serving import read_scheduler_address
from scalelatent.deploy.worker_processes import run_workers
from scalelatent.errors import JobError

pytest.importorskip("cryptography")
pytestmark = pytest.mark.cluster
ROOT = Path(__file__).resolve().parents[2]


def test_workers_join_and_end_with_the_scheduler(running_cluster, tmp_path):
    from distributed import Client

    from scalelatent.deploy.security import make_security

    file, folder = tmp_path / "scheduler.json", tmp_path / "tls"
    join = [
        sys.executable, "-m", "scalelatent", "cluster", "join", "--scheduler-file", str(file),
        "--workers", "1", "--gpus", "1", "--name", "box", "--tls-folder", str(folder), "--wait", "60",
    ]  # fmt: skip
    environ = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "3"}
    options = ("--workers", "0", "--tls", "--tls-folder", str(folder), "--scheduler-file", str(file))
    with running_cluster(*options) as (scheduler, reported):
        assert reported["workers"] == []
        assert reported["next"][0].startswith(f"scalelatent cluster join {reported['scheduler']}")
        joined = subprocess.Popen(join, env=environ, stderr=subprocess.PIPE, text=True)
        try:
            security = make_security(**reported["tls"])
            with Client(reported["scheduler"], security=security, timeout=30, set_as_default=False) as client:
                client.wait_for_workers(2, timeout=60)
                workers = client.scheduler_info(n_workers=-1)["workers"].values()
                assert {w["name"]: w["resources"] for w in workers} == {
                    "box-cpu-0": {},
                    "box-gpu-0": {"GPU": 1},
                }
                assert client.submit(sum, [1, 2]).result(timeout=30) == 3
            scheduler.terminate()
            _, errors = joined.communicate(timeout=60)
        finally:
            joined.kill()
    assert joined.returncode == 0, errors
    assert "box-cpu-0, box-gpu-0 joined tls://" in errors
    assert "the scheduler has ended" in errors


def test_missing_scheduler_is_reported_in_time():
    start_time = time.monotonic()
    with pytest.raises(JobError, match=r"'tcp://127.0.0.1:1' did not accept these workers within 1 s"):
        asyncio.run(run_workers("tcp://127.0.0.1:1", workers=1, wait_seconds=1))
    assert time.monotonic() - start_time < 20


@pytest.mark.parametrize(
    ("address", "reported"),
    [("tls://127.0.0.1:1", "uses TLS; give --tls-folder"), ("head", "is not an address")],
)
def test_unusable_addresses_are_refused(address, reported):
    with pytest.raises(JobError, match=reported):
        asyncio.run(run_workers(address, workers=1, wait_seconds=1))


def test_a_join_without_workers_is_refused():
    with pytest.raises(JobError, match="start at least one worker"):
        asyncio.run(run_workers("tcp://127.0.0.1:1", workers=0))


def test_join_waits_for_the_scheduler_file(tmp_path):
    file = tmp_path / "scheduler.json"
    file.write_text("{")  # The scheduler is still writing the file.

    def finish() -> None:
        time.sleep(0.5)
        file.write_text(json.dumps({"address": "tcp://head:8786"}))

    writer = threading.Thread(target=finish)
    writer.start()
    assert read_scheduler_address(None, file, 10) == "tcp://head:8786"
    writer.join()
    with pytest.raises(JobError, match="no scheduler wrote its address"):
        read_scheduler_address(None, tmp_path / "none", 0.1)
    for both in ((None, None), ("tcp://head:8786", file)):
        with pytest.raises(JobError, match="give either the address of the scheduler"):
            read_scheduler_address(*both, 0.1)
