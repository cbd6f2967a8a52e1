"""The lease of a run folder in an object store lets one process at a time run its fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from typing import Any

import pytest

from scalelatent.errors import RunError, StoreError
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.spec import DataSection, Job, JobSection
from scalelatent.storage import lease as lease_module
from scalelatent.storage.disk import locate
from scalelatent.storage.lease import ObjectLock

from .conftest import S3

JOB = Job(JobSection(name="x", out="run"), DataSection(train="a.zarr"), "capsule", {})


@pytest.fixture
def url() -> str:
    return f"memory://lease-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def use_short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.02)


def pretend_other_host(url: str, number: int, **who: Any) -> None:
    written = {"token": "t", "pid": 1, "host": "elsewhere", "space": "another boot", "started": 0.0, **who}
    locate(url).write(f"lock/{number:06d}.json", json.dumps(written).encode())


def _wait(until: Any, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(until())


@pytest.mark.parametrize("store", ["memory", "s3"])
def test_a_run_folder_has_one_driver(url: str, store: str, request: pytest.FixtureRequest) -> None:
    if store == "s3":
        url = request.getfixturevalue("s3").at("run")
    folder = RunFolder.create(url, JOB)
    with folder.lock():
        message = rf"driven by process {os.getpid()} on host .* its lock expires in"
        with pytest.raises(RunError, match=message), RunFolder.open(url).lock():
            pass
        folder.update_state(state="running")
        assert RunFolder.open(url).read_state()["state"] == "running"
    assert RunFolder.open(url).read_state()["state"] == "failed"  # No process runs this job any more.
    with RunFolder.open(url).lock():
        pass
    assert locate(url).keys("lock") == ["000002.json"]


def test_one_of_many_threads_gets_the_lease(s3: S3) -> None:
    url, won, start = s3.at("run"), [], threading.Barrier(5)
    locate(url).write("lock/000003.json", b'{"released": true}')

    def race() -> None:
        lock = ObjectLock(locate(url))  # type: ignore[arg-type]
        start.wait()
        try:
            lock.acquire()
            won.append(lock)
        except BlockingIOError:
            pass

    threads = [threading.Thread(target=race) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(won) == 1
    assert locate(url).keys("lock") == ["000004.json"]
    won[0].release()


def test_another_host_has_the_lease_until_its_heartbeat_stops(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_other_host(url, 7)
    lock = ObjectLock(locate(url))  # type: ignore[arg-type]
    holder = lock.holder()
    assert holder is not None
    assert holder["host"] == "elsewhere"
    assert 80 <= holder["seconds_left"] <= 90
    with pytest.raises(BlockingIOError):
        lock.acquire()
    monkeypatch.setattr(lease_module, "STALE_SECONDS", -1.0)
    assert lock.holder() is None
    lock.acquire()
    assert locate(url).keys("lock") == ["000008.json"]
    lock.release()


def test_a_dead_process_of_this_machine_loses_the_lease_at_once(s3: S3) -> None:
    url = s3.at("run")
    script = (
        "import os, signal\n"
        "from scalelatent.storage.disk import locate\n"
        "from scalelatent.storage.lease import ObjectLock\n"
        f"ObjectLock(locate({url!r})).acquire()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert locate(url).keys("lock") == ["000001.json"]
    lock = ObjectLock(locate(url))  # type: ignore[arg-type]
    assert lock.holder() is None
    lock.acquire()
    lock.release()


def test_a_replaced_driver_stops(url: str, use_short_lease: None) -> None:
    folder = RunFolder.create(url, JOB)
    with pytest.raises(RunError, match="was taken over by another driver"), folder.lock():
        folder.append("metrics.jsonl", {"pass": 1})
        pretend_other_host(url, 2)
        assert _wait(lambda: folder._held is not None and folder._held.lost)
        folder.append("metrics.jsonl", {"pass": 2})
    assert [record["pass"] for record in folder.records("metrics.jsonl")] == [1]
    written = json.loads(locate(url).read("lock/000002.json"))  # type: ignore[arg-type]
    assert written["host"] == "elsewhere"  # The stopped fit did not change the lease of the other.


def test_heartbeats_renew_the_lease(url: str, use_short_lease: None) -> None:
    lock = ObjectLock(locate(url))  # type: ignore[arg-type]
    lock.acquire()
    beat = lambda: json.loads(locate(url).read("lock/000001.json")).get("beats", 0)  # type: ignore[arg-type]  # noqa: E731
    assert _wait(lambda: beat() >= 2)
    lock.release()
    assert lock.holder() is None
    lock.release()  # A second release has no effect.


def test_a_lost_answer_does_not_count_as_another_driver(s3: S3) -> None:
    lock = ObjectLock(locate(s3.at("run")))  # type: ignore[arg-type]
    with s3.proxy.losing_first("PUT", "/lock/000001.json"):
        lock.acquire()
    lock.release()


def test_a_late_heartbeat_does_not_undo_the_release(
    url: str, use_short_lease: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "RELEASE_SECONDS", 0.05)
    store = locate(url)
    write, late, go_on = store.write, threading.Event(), threading.Event()

    def wait_and_write(key: str, data: bytes, **how: Any) -> None:
        late.set()
        assert go_on.wait(30)
        write(key, data, **how)

    monkeypatch.setattr(store, "write", wait_and_write)
    lock = ObjectLock(store)  # type: ignore[arg-type]
    lock.acquire()
    assert late.wait(30)  # Now a heartbeat is being sent to the store.
    lock.release()  # The release waits for the heartbeat, but not for longer than 50 ms.
    go_on.set()
    assert _wait(lambda: ObjectLock(locate(url)).holder() is None)  # type: ignore[arg-type]
    assert not _wait(lambda: ObjectLock(locate(url)).holder() is not None, seconds=0.2)  # type: ignore[arg-type]
    assert store.keys("lock") == ["000001.json"]


def test_a_failing_release_does_not_hide_the_error_of_the_run(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(url, JOB)

    def refuse(*_: Any, **__: Any) -> None:
        raise StoreError(f"{url}: the store did not answer")

    def drive() -> None:
        with folder.lock():
            monkeypatch.setattr(folder.location, "write", refuse)
            raise ZeroDivisionError("the true error")

    with pytest.raises(ZeroDivisionError, match="the true error"):
        drive()


def test_a_removed_folder_is_not_created_again(url: str) -> None:
    folder = RunFolder.create(url, JOB)
    with folder.lock():
        folder.remove()
    assert locate(url).is_empty()
