"""Schedulers and workers as separate processes, for tests that kill them or isolate them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.helpers import wait_for


class Processes:
    """A scheduler and workers in separate processes, each of which can be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str, inside: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Run a Python module; the words ``inside`` come before Python, such as ``ip netns exec NAME``."""
        with open(self.folder / "dask.log", "ab") as log:
            process = subprocess.Popen([*inside, sys.executable, "-m", *words], stdout=log, stderr=log)
        self.all.append(process)
        return process

    def scheduler(self, host: str = "127.0.0.1") -> tuple[str, subprocess.Popen[bytes]]:
        file = self.folder / f"scheduler-{len(self.all)}.json"
        process = self.start(
            "distributed.cli.dask_scheduler", "--host", host, "--port", "0", "--no-dashboard",
            "--scheduler-file", str(file),
        )  # fmt: skip
        wait_for(lambda: file.exists() and file.stat().st_size)
        return json.loads(file.read_text())["address"], process

    def worker(self, scheduler: str, *more: str, inside: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        return self.start(
            "distributed.cli.dask_worker", scheduler, "--nthreads", "1", "--no-dashboard",
            "--memory-limit", "0", "--local-directory", str(self.folder), *more, inside=inside,
        )  # fmt: skip

    def close(self) -> None:
        for process in self.all:
            process.terminate()
        for process in self.all:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


def delay_blocks(seconds: float) -> None:
    """Delay each block of rows by ``seconds`` in this worker, until the process of the worker ends."""
    from scalelatent.engine import passes, reading

    original = reading.iter_blocks

    def slow(reader: Any, blocks: Any, stop: Any) -> Iterator[Any]:
        for block in original(reader, blocks, stop):
            time.sleep(seconds)
            yield block

    passes.iter_blocks = slow
