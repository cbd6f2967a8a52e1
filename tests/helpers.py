"""Helpers of tests in several folders: callbacks that log and interrupt, job files, waits and kernels."""

from __future__ import annotations

import importlib.util
import pickle
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from numba import int64

from scalelatent.data import make_digits
from scalelatent.engine.callbacks import Callback
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.kernels import jit
from scalelatent.kernels.sparse_rows import CsrRows

HOOKS = ("fit_start", "stage", "progress", "pass_end", "report", "checkpoint", "event", "fit_end")


class HookLog(Callback):
    """Callback that logs the infos it receives, in order, as pairs such as ``("pass_end", record)``.

    If ``stop_at`` is given, the fit stops when ``info[by]``, its number of passes or steps, equals it.
    """

    def __init__(self, stop_at: int | None = None, by: str = "pass") -> None:
        self.reported: list[tuple[str, dict[str, Any]]] = []
        self.stop_at, self.by = stop_at, by

    def _record(self, hook: str, info: dict[str, Any]) -> bool:
        self.reported.append((hook, info))
        return hook in ("pass_end", "report") and self.stop_at is not None and info[self.by] == self.stop_at

    def infos(self, hook: str) -> list[dict[str, Any]]:
        """Return the infos (dicts) that one hook, such as ``pass_end``, received, in order."""
        return [info for name, info in self.reported if name == hook]

    @property
    def stages(self) -> list[str]:
        """Names of the stages that the fit reported, in order."""
        return [info["stage"] for info in self.infos("stage")]


for _hook in HOOKS:
    setattr(HookLog, f"on_{_hook}", lambda self, info, hook=_hook: self._record(hook, info))


class InterruptAt(Callback):
    """Callback that interrupts a fit at call ``at``, counted from 0 over the given hooks (default: all)."""

    def __init__(self, at: int, *hooks: str) -> None:
        self.left, self.calls = at, 0
        for hook in hooks or HOOKS:
            assert hook in HOOKS, hook
            setattr(self, f"on_{hook}", self._count)

    def _count(self, info: dict[str, Any]) -> None:
        self.calls += 1
        if self.calls > self.left:
            raise KeyboardInterrupt


def refuse_pickle(monkeypatch: Any) -> None:
    """Make pickle raise an error until the test ends, to show that the package does not use pickle."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pickle was called")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)


def load_online_toys() -> Any:
    """Import engine/online_toys.py as a module of scalelatent, so that records may contain its types."""
    name = "scalelatent.online_toys"
    if name not in sys.modules:
        path = Path(__file__).parent / "engine" / "online_toys.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


# Source text that workers run to replace the function that writes reports: a report takes longer than a fit.
WITHOUT_REPORT = "from scalelatent.jobs import runner; runner._report = lambda *_: None"


# Job file of a capsule model of digits. With blocks of 128 rows the fit is slow enough to be interrupted.
DIGITS_JOB = """
[job]
seed = 1
out = "{folder}/unnamed"
[data]
train = "{folder}/train.zarr"
validation = "{folder}/test.zarr"
[model]
kind = "capsule"
capsule_dim = 4
max_iter = {passes}
nu_schedule = "none"
[engine]
block_rows = 128
leaf_rows = 512
"""


def write_digits_job(folder: Path, passes: int) -> Path:
    """Write a job file and its datasets to a folder; return the path of the job file."""
    make_digits(str(folder / "train.zarr"), 8_000, base_rows=(0, 1500))
    make_digits(str(folder / "test.zarr"), 297, base_rows=(1500, 1797))
    (folder / "job.toml").write_text(DIGITS_JOB.format(folder=folder, passes=passes))
    return folder / "job.toml"


def read_model_files(folder: RunFolder) -> dict[str, bytes]:
    """Return the content of every file of the model in a run folder, by relative path."""
    model = Path(folder.model_url)
    found = {str(p.relative_to(model)): p.read_bytes() for p in sorted(model.rglob("*")) if p.is_file()}
    assert found
    return found


def wait_for(wanted: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Call ``wanted()`` until its value is true, and return the value; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (found := wanted()):
        assert time.monotonic() < deadline, f"not true within {seconds} seconds"
        time.sleep(0.02)
    return found


def find_free_port() -> int:
    """Return a port of the loopback interface on which nothing listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def server_answers(server: subprocess.Popen[Any], log: Path, url: str) -> bool:
    """Return whether a started server answers at an address; fail with its log if it has ended."""
    assert server.poll() is None, log.read_text()
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        time.sleep(0.5)
        return False


def to_csr_rows(x: np.ndarray) -> CsrRows:
    """Return dense rows as CSR rows with the same values."""
    rows, columns = np.nonzero(x)
    pointers = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(x)))])
    return CsrRows(x[rows, columns], columns.astype(np.int32), pointers, x.shape)


def make_fresh_kernel() -> Any:
    """Return a kernel that is compiled at its first call, because a function without a file is not cached."""
    code = (lambda x: x + 1).__code__.replace(co_filename="<nowhere>")
    return jit.entry(int64)(FunctionType(code, {"__name__": "nowhere"}))
