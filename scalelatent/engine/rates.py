"""How fast this machine is, measured once and kept beside its compiled kernels."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from scalelatent import __version__
from scalelatent.contract.learners import Block
from scalelatent.errors import DataError, ShardError
from scalelatent.kernels.cache_folder import CACHE

from .cache import DEFAULT_SHARE, SMALL_BYTES
from .passes import Stage, seconds_per_row
from .threads import single_threaded, usable_cores

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset

    from .mapwrite import OutputTask

    AnyRows: TypeAlias = "Dataset | RowShape"


@dataclass(frozen=True)
class RowShape:
    """Stands for float32 rows that do not exist yet (projected ones), which will be on disk or not."""

    n_rows: int
    n_features: int
    is_stored: bool = False
    reads_at_once = 1
    dtype = np.dtype(np.float32)

    def __len__(self) -> int:
        return self.n_rows

    @property
    def nbytes(self) -> int:
        return 4 * self.n_rows * self.n_features


FORMAT = 2
# A machine changes: its BLAS, its neighbours, its disk.
STALE_SECONDS = 90 * 86400.0
PROBE_SECONDS = 0.15
# That threads wait for each other before they measure.
WAIT_SECONDS = 60.0


def machine() -> dict[str, Any]:
    """What rates belong to: another version or processor measures again."""
    return {
        "format": FORMAT,
        "scalelatent": __version__,
        "numpy": np.__version__,
        "cpu": _cpu_name(),
        "cores": usable_cores(),
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
    """Seconds of one unit of work, by what it is."""

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
        """Keep what is known with what other processes have written meanwhile."""
        assert self._known is not None
        rates = self._read() | self._known
        aside = self.path.with_name(f".{self.path.name}-{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps({"machine": machine(), "rates": rates}, indent=1))
            aside.replace(self.path)
        except OSError:
            pass


rates = Rates(Path(CACHE) / "rates.json")
"""Those of this machine."""


def cpu_seconds(
    make: Callable[[], Callable[[], object]], threads: int, least: float = PROBE_SECONDS
) -> float:
    """CPU seconds of a call on one thread, while as many others as the machine has cores for do the same."""
    # What else the machine does at that moment does not count; what threads take from each other does.
    threads = max(1, min(threads, usable_cores()))
    barrier = threading.Barrier(threads)

    def measure(call: Callable[[], object]) -> float:
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


# What scratch rows are probed with: a shard that no cache of the processor holds.
SCRATCH_ROWS, SCRATCH_FEATURES = 32_768, 196
EIGEN_SIZE = 400
# Bytes a second that rows are gathered with out of others.
GATHER_RATE = 1.5e9
# Seconds a byte of writing and of reading, where neither can be measured.
NOMINAL_SCRATCH = 5e-9, 2e-10


def noise(rows: int, p: int, dtype: DTypeLike, codes: int) -> Block:
    """A block of noise."""
    rng, dtype = np.random.default_rng(0), np.dtype(dtype)
    if dtype == np.float64:
        x: np.ndarray = rng.standard_normal((rows, p))
    elif dtype.kind == "f":
        x = rng.standard_normal((rows, p), dtype=np.float32)
    else:
        x = rng.integers(0, 2 if dtype.kind == "b" else 100, (rows, p)).astype(dtype)
    y = (np.arange(rows) % max(codes, 1)).astype(np.int32)
    return Block(x, y, None, 0, np.arange(rows))


def scratch_rates() -> tuple[float, float]:
    """Seconds a byte of writing a dataset of float32 rows, and of reading it."""
    found: dict[str, float] = {}

    def measure() -> None:
        from scalelatent.data import Dataset

        x = noise(SCRATCH_ROWS, SCRATCH_FEATURES, "float32", 0).x
        with tempfile.TemporaryDirectory(prefix="scalelatent-") as folder:
            begin = time.process_time()
            stored = Dataset.from_arrays(x).save(Path(folder) / "rows.zarr")
            found["write"] = (time.process_time() - begin) / x.nbytes
            start, stop = stored.pieces()[0]
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                stored.read_x(start, stop)
                times.append(time.perf_counter() - begin)
            found["read"] = min(times) / ((stop - start) * SCRATCH_FEATURES * 4)

    def rate(name: str) -> float:
        if not found:
            measure()
        return found[name]

    try:
        names = ("write", "read")
        write, read = (rates.get(f"{name} scratch", partial(rate, name)) for name in names)
    except (OSError, DataError):  # no place for temporary files, which the fit may not need
        return NOMINAL_SCRATCH
    return write, read


def label_seconds(dataset: Dataset, classes: np.ndarray) -> float:
    """Seconds of reading all labels of a dataset once."""
    n = min(len(dataset), 2**17)

    def measure() -> float:
        begin = time.process_time()
        dataset.read_codes(0, n, classes)
        return (time.process_time() - begin) / n

    name = f"labels {dataset.fingerprint()}" if dataset.is_stored else f"labels in memory {classes.dtype}"
    return rates.get(name, measure) * len(dataset)


def read_seconds(dataset: AnyRows) -> float:
    """Seconds that a thread takes to read and decode a row of a stored dataset, measured once."""
    if isinstance(dataset, RowShape):
        return scratch_rates()[1] * dataset.nbytes / max(len(dataset), 1)

    def measure() -> float:
        pieces = dataset.pieces()
        for number, (start, stop) in enumerate(pieces, 1):
            times = []
            try:
                for _ in range(2):  # the first one may wait for the disk, and finds out what is there
                    begin = time.perf_counter()
                    dataset.read_x(start, stop)
                    times.append(time.perf_counter() - begin)
            except ShardError:  # the fit may leave it out
                if number == len(pieces):
                    raise
            else:
                break
        return min(times) / (stop - start)

    return rates.get(f"read {dataset.fingerprint()}", measure)


# Reading ahead hides what it takes from a single thread, not from processors that all compute: where it takes
# more than this share of computing, plans say what keeping rows would save (streamed_pass.py, part kept).
READ_SHARE = 0.05


def choose_cache(asked: float | None, stage: Stage, *, once: bool = False) -> float:
    """What the rows of a stage may take of each process's cache, as :func:`~.cache.shared_cache` takes it.

    ``once``: training rows are read a single time, and keeping more of them than of small sets gains nothing.
    """
    if asked is not None:
        return asked
    if once and len(stage.datasets) == 1:
        return float(SMALL_BYTES)
    if any(ds.reads_at_once > 1 for ds in _many_rows(stage).values()):
        return DEFAULT_SHARE  # rows of an object store are not read to find out
    return DEFAULT_SHARE if reading_share(stage) > 1 else float(SMALL_BYTES)


def reading_share(stage: Stage) -> float:
    """How long a thread reads a row of a stage beside computing on it, at most; 0 where rows are few."""
    return max(
        (
            read_seconds(ds) / seconds_per_row(stage.reductions.get(part, stage.online))
            for part, ds in _many_rows(stage).items()
        ),
        default=0.0,
    )


def _many_rows(stage: Stage) -> dict[str, Dataset]:
    """The stored rows of a stage; none where they are few."""
    stored = {part: ds for part, ds in stage.datasets.items() if ds.is_stored}
    return stored if sum(ds.nbytes for ds in stored.values()) > SMALL_BYTES else {}


def map_cache(asked: float | None, task: OutputTask) -> float:
    """The same for rows that tasks of a map read more than once, each time for seconds of work."""
    if asked is not None:
        return asked
    return DEFAULT_SHARE if task.dataset.reads_at_once > 1 else float(SMALL_BYTES)
