"""How fast this machine is, measured once and kept beside its compiled kernels.

A rate is measured by a probe of some tenths of a second the first time that a plan wants it. It is CPU
seconds of a thread while as many others do the same: what else the machine does at that moment does not
count, what threads take from each other does.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from dask.system import cpu_count

from scalelatent import __version__
from scalelatent.kernels import jit

from .threads import single_threaded

FORMAT = 1
# A machine changes: its BLAS, its neighbours, its disk.
STALE_SECONDS = 90 * 86400.0
PROBE_SECONDS = 0.15
# That threads wait for each other before they measure.
WAIT_SECONDS = 60.0


def machine() -> dict[str, Any]:
    """What rates belong to: another version or processor measures anew."""
    return {
        "format": FORMAT,
        "scalelatent": __version__,
        "numpy": np.__version__,
        "cpu": _cpu_name(),
        "cores": cpu_count(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class Rates:
    """Seconds of one unit of work, by what it is.

    Parameters
    ----------
    path : Path
        A JSON file. What it holds of another version or processor, and what is old, counts as not measured.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rates = Rates(Path(folder) / "rates.json")
    ...     rates.get("a sum", lambda: 2.0), Rates(rates.path).get("a sum", lambda: 3.0)
    (2.0, 2.0)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, float]] | None = None
        self._since = 0.0

    def get(self, name: str, measure: Callable[[], float]) -> float:
        """The rate that is known by a name, measured now where it is not."""
        with self._lock:
            if self._known is None:
                self._known = self._read()
            found = self._known.get(name)
            if found is None or not max(self._since, time.time() - STALE_SECONDS) <= found[1]:
                found = self._known[name] = (float(measure()), time.time())
                self._write()
            return found[0]

    def measure_again(self) -> None:
        """Take what was measured before this moment for old."""
        self._since = time.time()

    def _read(self) -> dict[str, tuple[float, float]]:
        try:
            kept = json.loads(self.path.read_text())
            if kept.pop("machine") == machine():
                return {name: (float(rate), float(at)) for name, (rate, at) in kept["rates"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return {}

    def _write(self) -> None:
        """Keep what is known with what other processes have written meanwhile; without a place for it no
        harm is done.
        """
        assert self._known is not None
        rates = self._read() | self._known
        aside = self.path.with_name(f".{self.path.name}-{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps({"machine": machine(), "rates": rates}, indent=1))
            aside.replace(self.path)
        except OSError:
            pass


rates = Rates(Path(jit.CACHE) / "rates.json")
"""Those of this machine."""


def cpu_seconds(make: Callable[[], Callable[[], Any]], threads: int, least: float = PROBE_SECONDS) -> float:
    """CPU seconds of a call on one thread, while as many others as the machine has cores for do the same.

    Parameters
    ----------
    make : callable
        Gives each thread a call of its own.
    threads : int
    least : float
        Seconds that each thread measures, after one call that counts for nothing.

    Examples
    --------
    >>> 0 < cpu_seconds(lambda: lambda: sum(range(1000)), 1, 0.001) < 0.1
    True
    """
    threads = max(1, min(threads, cpu_count()))
    barrier = threading.Barrier(threads)

    def measure(call: Callable[[], Any]) -> float:
        try:
            call()
        except BaseException:
            barrier.abort()
            raise
        with suppress(threading.BrokenBarrierError):  # of a thread that failed: its error is what is told
            barrier.wait(WAIT_SECONDS)
        begin, clock, calls = time.thread_time(), time.perf_counter(), 0
        while not calls or (time.thread_time() - begin < least and time.perf_counter() - clock < 20 * least):
            call()
            calls += 1
        return (time.thread_time() - begin) / calls

    with single_threaded(), ThreadPoolExecutor(threads) as pool:
        return float(np.mean(list(pool.map(measure, [make() for _ in range(threads)]))))
