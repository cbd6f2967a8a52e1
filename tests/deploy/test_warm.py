"""`scalelatent warm` compiles kernels before the first fit, and names kernels that do not compile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from scalelatent import models
from scalelatent.deploy import warm as warming
from scalelatent.errors import JobError


@pytest.mark.slow
def test_warm_kernels_are_not_compiled_again(tmp_path: Path) -> None:
    def run(*more: str) -> str:
        command = [sys.executable, "-m", "scalelatent", "warm", "data", *more]
        env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=170, check=True
        ).stdout

    first = json.loads(run("--json"))
    assert first["kernels"] == len(first["compiled"]) >= 1
    assert first["folder"] == str(tmp_path / "scalelatent")
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")}
    assert files
    assert run() == f"all kernels are compiled ({tmp_path / 'scalelatent'})\n"
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")} == files


def test_the_error_names_unknown_kernels() -> None:
    with pytest.raises(JobError, match="no kernels 'capsul'; did you mean 'capsule'"):
        warming.warm(["capsul"])
    with pytest.raises(JobError, match="no kernels 'x'; valid are: .*hcn, kernels, linear_mixture, mbn"):
        warming.warm(["x"])


def test_every_model_has_its_kernels() -> None:
    folders = {kind.estimator.split(".")[2] for kind in models.KINDS if kind.kernels}
    assert folders <= set(warming.kernel_families())


def test_the_error_names_a_kernel_that_does_not_compile(monkeypatch) -> None:
    monkeypatch.setattr(warming, "_find_uncompiled", lambda kinds: (2, [("data", 10**6, "no._such_kernel")]))
    with pytest.raises(JobError, match=r"process that compiled kernel no\._such_kernel ended"):
        warming.warm(["data"])


@pytest.mark.parametrize("starting", [0.0, 1.0], ids=["while it compiles", "while it is started"])
def test_ctrl_c_ends_the_children_without_a_traceback(
    starting: float, tmp_path: Path, monkeypatch, capfd
) -> None:
    """Only the parent gets Ctrl-C of the terminal; it ends its child, which would compile for 60 seconds."""
    (tmp_path / "slow.py").write_text("import sys, time\nsys.stdin.readline()\ntime.sleep(60)\n")
    monkeypatch.setattr(warming, "_find_uncompiled", lambda kinds: (1, [("data", 0, "no._such_kernel")]))
    begin, children, started = time.monotonic(), [], threading.Event()

    class Child(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **how: Any) -> None:
            super().__init__([sys.executable, str(tmp_path / "slow.py")], **how)
            children.append((self, os.getpgid(self.pid)))
            started.set()
            time.sleep(starting)

    def interrupt() -> None:
        started.wait(10)
        time.sleep(0.3)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(warming.subprocess, "Popen", Child)
    # After this call, which an import of polars makes, too, a signal does not end a wait for a child process.
    signal.siginterrupt(signal.SIGINT, False)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            warming.warm(["data"])
    finally:
        signal.siginterrupt(signal.SIGINT, True)
    ((child, group),) = children
    assert child.wait(10) < 0
    assert group != os.getpgrp()
    assert time.monotonic() - begin < 30
    assert "Traceback" not in capfd.readouterr().err
