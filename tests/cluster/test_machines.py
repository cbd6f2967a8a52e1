"""A fit survives a lost connection and a damaged checkpoint; a full disk or a full memory gives an error."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, WorkerPlugin

from scalelatent import Callback, open_dataset
from scalelatent.errors import RunError
from tests.cluster.processes import Processes, delay_blocks
from tests.helpers import InterruptAt, wait_for

CUT_SECONDS = 10.0


class CallAtPass(Callback):
    """Callback that calls ``action`` at the end of pass ``number``, and records all passes and events."""

    def __init__(self, number: int, action: Callable[[], None]) -> None:
        self._number, self._action = number, action
        self.passes: list[int] = []
        self.events: list[dict[str, Any]] = []

    def on_pass_end(self, record: dict[str, Any]) -> None:
        self.passes.append(record["pass"])
        if record["pass"] == self._number:
            self._action()

    def on_event(self, info: dict[str, Any]) -> None:
        self.events.append(info)


# -- a worker on another host loses its connection -----------------------------------------------------------


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


class OtherHost:
    """Another host: a network namespace with a link to this one, which the test can interrupt."""

    def __init__(self, number: int) -> None:
        self.name, self.here, self.there = f"sl{number}", f"sla{number}", f"slb{number}"
        self.net = f"10.213.{number % 250}"

    def __enter__(self) -> OtherHost:
        _run("ip", "netns", "add", self.name)
        _run("ip", "link", "add", self.here, "type", "veth", "peer", "name", self.there, "netns", self.name)
        _run("ip", "addr", "add", f"{self.net}.1/24", "dev", self.here)
        _run("ip", "link", "set", self.here, "up")
        inside = self.inside
        _run(*inside, "ip", "addr", "add", f"{self.net}.2/24", "dev", self.there)
        for device in (self.there, "lo"):
            _run(*inside, "ip", "link", "set", device, "up")
        return self

    @property
    def inside(self) -> tuple[str, ...]:
        return "ip", "netns", "exec", self.name

    def set_cable(self, state: str) -> None:
        _run(*self.inside, "ip", "link", "set", self.there, state)

    def __exit__(self, *_: object) -> None:
        for words in (("ip", "link", "del", self.here), ("ip", "netns", "del", self.name)):
            subprocess.run(words, check=False, capture_output=True, timeout=20)


@pytest.fixture
def other_host() -> Iterator[OtherHost]:
    host = OtherHost(os.getpid() % 30_000)
    try:
        host.__enter__()
    except (OSError, subprocess.SubprocessError) as error:
        host.__exit__()
        pytest.skip(f"network namespaces: this machine does not permit them ({error})")
    try:
        yield host
    finally:
        host.__exit__()


@pytest.mark.timeout(240)
def test_a_network_partition_changes_no_bit(
    fit: Any, fit_alone: Any, assert_same: Any, processes: Processes, other_host: OtherHost, tmp_path: Path
) -> None:
    """The worker on the other host computes, but nobody can reach it for ten seconds within a pass."""
    address, _ = processes.scheduler(f"{other_host.net}.1")
    processes.worker(address)
    processes.worker(address, "--host", f"{other_host.net}.2", inside=other_host.inside)
    with Client(address, timeout=60, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)
        client.run(delay_blocks, 0.004)
        cut: list[float] = []

        def pull_cable() -> None:
            other_host.set_cable("down")
            cut.append(time.monotonic())
            threading.Timer(CUT_SECONDS, other_host.set_cable, ("up",)).start()

        log = CallAtPass(2, pull_cable)
        assert_same(fit(client, run_dir=tmp_path / "run", callbacks=log), fit_alone())
        assert log.passes == [1, 2, 3, 4, 5]
        # The fit outlasted the cut: the driver waited for the spans (row ranges of tasks) of the unreachable
        # worker, or the other worker recomputed them.
        assert time.monotonic() - cut[0] > CUT_SECONDS
        assert len(client.nthreads()) == 2


# -- the disk of the run folder is full ----------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MiB and return its folder; skip the test if mounting is forbidden."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        _run("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk))
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"a small file system: this machine does not permit mounting one ({error})")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False, timeout=20)


def _fill(disk: Path) -> None:
    with open(disk / "filler", "wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue


def test_a_fit_resumes_after_the_disk_of_the_run_folder_was_full(
    client: Any, fit: Any, fit_alone: Any, assert_same: Any, small_disk: Path
) -> None:
    options = {"max_iter": 40, "nu_schedule": None}
    with pytest.raises(RunError, match=r"cannot write .*No space left.*Free some space.*resume the run"):
        fit(client, run_dir=small_disk / "run", callbacks=CallAtPass(3, lambda: _fill(small_disk)), **options)
    (small_disk / "filler").unlink()
    again = CallAtPass(0, lambda: None)
    assert_same(
        fit(client, run_dir=small_disk / "run", resume=True, callbacks=again, **options), fit_alone(**options)
    )
    assert again.passes[0] > 1  # The passes before the full disk are not repeated.


# -- the newest checkpoint is damaged ------------------------------------------------------------------------


def test_a_fit_resumes_from_the_checkpoint_before_a_damaged_one(
    client: Any, fit: Any, fit_alone: Any, assert_same: Any, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(client, run_dir=tmp_path, callbacks=InterruptAt(3, "pass_end"))
    newest = sorted((tmp_path / "engine").glob("state-capsule_estep-*"))[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    log = CallAtPass(0, lambda: None)
    assert_same(fit(client, run_dir=tmp_path, resume=True, callbacks=log), fit_alone())
    assert log.events[0]["event"] == "checkpoint_unreadable"
    assert newest.name in log.events[0]["message"]


# -- a worker exceeds its memory limit -----------------------------------------------------------------------

MEMORY_LIMIT_BYTES = 700 * 2**20


class AllocateDuringReads(WorkerPlugin):
    """Worker plugin that fills the memory of its worker beyond the limit when it reads rows 3600:3900."""

    name = "greedy"

    def setup(self, worker: Any) -> None:
        import numpy as np

        from scalelatent.data.read.chunks import StoredRows

        original, held = StoredRows.read, []

        def read(source: Any, start: int, stop: int) -> Any:
            if source._name == "x" and "/train" in str(source._location.url) and start < 3900 and stop > 3600:
                while sum(a.nbytes for a in held) < 2 * MEMORY_LIMIT_BYTES:
                    held.append(np.ones(2**22))
                    # In this pause, the worker reports its memory to the scheduler with a heartbeat.
                    time.sleep(0.25)
            return original(source, start, stop)

        StoredRows.read = read  # type: ignore[method-assign]


@pytest.mark.timeout(240)
def test_the_error_names_rows_that_exceed_the_memory_of_a_worker(
    client: Any,
    start_other_cluster: Any,
    fit: Any,
    fit_alone: Any,
    assert_same: Any,
    rows: Any,
    tmp_path: Path,
) -> None:
    shutil.copytree(rows.folder / "train", tmp_path / "train")
    train = open_dataset(tmp_path / "train")
    with (
        start_other_cluster(1, memory_limit=MEMORY_LIMIT_BYTES) as cluster,
        Client(cluster, timeout=30, set_as_default=False) as small,
    ):
        wait_for(lambda: small.nthreads())
        small.register_plugin(AllocateDuringReads())
        with pytest.raises(RunError) as raised:
            fit(small, x=train, run_dir=tmp_path / "run")
    text = str(raised.value)
    assert "x/c/3/0 (rows 3600:4800)" in text
    assert "was with 3 workers when they died" in text
    assert "of 0.7 GiB in use at its peak" in text
    assert "They ran out of memory: give workers more memory" in text
    assert "memory_limit" in text
    assert_same(fit(client, x=train, run_dir=tmp_path / "run", resume=True), fit_alone())
