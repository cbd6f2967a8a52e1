"""Measure the speed of kernels and of reading rows; store the results next to the compiled kernels."""

from __future__ import annotations

import json
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
from scalelatent.kernels.cache_folder import CACHE_FOLDER
from scalelatent.storage.disk import locate

from .cache import DEFAULT_SHARE, SMALL_BYTES
from .passes import Stage, seconds_per_row
from .threads import single_threaded, usable_cores

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset

    from .mapwrite import OutputTask

    AnyRows: TypeAlias = "Dataset | RowShape"


@dataclass(frozen=True)
class RowShape:
    """Shape of float32 rows that a fit will make later, such as projected rows, in memory or on disk."""

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


FORMAT = 2  # version of the file with the rates
STALE_SECONDS = 90 * 86400.0  # a rate (seconds per unit of work) older than this is measured again
PROBE_SECONDS = 0.15  # minimum CPU seconds of one measurement
WAIT_SECONDS = 60.0  # maximum seconds that measuring threads wait for each other to start


def describe_machine() -> dict[str, Any]:
    """Return software versions and processor; if any of these changes, all rates are measured again."""
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
    """Measured seconds per unit of work, by the name of the work, stored in a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, float]] | None = None
        self._since = 0.0

    def get(self, name: str, measure: Callable[[], float]) -> float:
        """Return the stored rate ``name``; if there is none or if it is too old, measure and store it."""
        with self._lock:
            if self._known is None:
                self._known = self._read()
            found = self._known.get(name)
            if found is None or not max(self._since, time.time() - STALE_SECONDS) <= found[1]:
                found = self._known[name] = (float(measure()), time.time())
                self._write()
            return found[0]

    def measure_again(self) -> None:
        """Measure every rate again that was measured before this call."""
        self._since = time.time()

    def _read(self) -> dict[str, tuple[float, float]]:
        try:
            stored = json.loads(self.path.read_text())
            if stored["machine"] == describe_machine():
                return {name: (float(rate), float(at)) for name, (rate, at) in stored["rates"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return {}

    def _write(self) -> None:
        """Write the known rates to the file, and keep rates that other processes have added to the file."""
        assert self._known is not None
        rates = self._read() | self._known
        text = json.dumps({"machine": describe_machine(), "rates": rates}, indent=1)
        with suppress(OSError):
            locate(self.path.parent).write(self.path.name, text.encode())


rates = Rates(Path(CACHE_FOLDER) / "rates.json")
"""Stored rates of this machine."""


def cpu_seconds(
    make_call: Callable[[], Callable[[], object]], threads: int, least: float = PROBE_SECONDS
) -> float:
    """Return the CPU seconds of one call while ``threads`` threads (at most one per core) make the same call.

    CPU time includes waiting for caches and memory that these threads share, but not for other processes.
    """
    threads = max(1, min(threads, usable_cores()))
    barrier = threading.Barrier(threads)

    def measure(call: Callable[[], object]) -> float:
        try:
            call()
        except BaseException:
            barrier.abort()
            raise
        with suppress(threading.BrokenBarrierError):  # another thread failed, and its error is raised below
            barrier.wait(WAIT_SECONDS)
        begin, clock, calls = time.thread_time(), time.perf_counter(), 0
        while not calls or (time.thread_time() - begin < least and time.perf_counter() - clock < 20 * least):
            call()
            calls += 1
        return (time.thread_time() - begin) / calls

    with single_threaded(), ThreadPoolExecutor(threads) as pool:
        return float(np.mean(list(pool.map(measure, [make_call() for _ in range(threads)]))))


# Size of the dataset with which writing and reading are measured; it is larger than a processor's cache.
SCRATCH_ROWS, SCRATCH_FEATURES = 32_768, 196
EIGEN_SIZE = 400  # columns of the matrix with which the time of computing eigenvectors is measured
GATHER_RATE = 1.5e9  # bytes per second at which rows are gathered into a minibatch
NOMINAL_SCRATCH = 5e-9, 2e-10  # seconds per byte of writing and of reading, if they cannot be measured


def make_noise(rows: int, p: int, dtype: DTypeLike, codes: int) -> Block:
    """Return a block of random rows with ``p`` features and labels of ``codes`` classes."""
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
    """Return the seconds per byte of (writing, reading) a dataset of float32 rows."""
    found: dict[str, float] = {}

    def measure() -> None:
        from scalelatent.data import Dataset

        x = make_noise(SCRATCH_ROWS, SCRATCH_FEATURES, "float32", 0).x
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
    except (OSError, DataError):  # there is no space for temporary files, but the fit may not need any
        return NOMINAL_SCRATCH
    return write, read


def label_seconds(dataset: Dataset, classes: np.ndarray) -> float:
    """Return the seconds of reading all labels of a dataset once."""
    n = min(len(dataset), 2**17)

    def measure() -> float:
        begin = time.process_time()
        dataset.read_codes(0, n, classes)
        return (time.process_time() - begin) / n

    name = f"labels {dataset.fingerprint()}" if dataset.is_stored else f"labels in memory {classes.dtype}"
    return rates.get(name, measure) * len(dataset)


def read_seconds(dataset: AnyRows) -> float:
    """Return the seconds in which one thread reads and decodes one row of a stored dataset."""
    if isinstance(dataset, RowShape):
        return scratch_rates()[1] * dataset.nbytes / max(len(dataset), 1)

    def measure() -> float:
        pieces = dataset.pieces()
        for number, (start, stop) in enumerate(pieces, 1):
            times = []
            try:
                for _ in range(2):  # the first read may wait for the disk
                    begin = time.perf_counter()
                    dataset.read_x(start, stop)
                    times.append(time.perf_counter() - begin)
            except ShardError:  # the fit may exclude this shard
                if number == len(pieces):
                    raise
            else:
                break
        return min(times) / (stop - start)

    return rates.get(f"read {dataset.fingerprint()}", measure)


# If reading takes more than this share of the computing time, `plan` suggests to keep the rows in memory,
# because reading ahead takes time from computing when all cores compute (benchmarks/streamed_pass.py).
READ_SHARE = 0.05


def choose_cache(size: float | None, stage: Stage, *, once: bool = False) -> float:
    """Return the size of the row cache for a stage, in bytes or (up to 1) as a share of the memory.

    A ``size`` that the user set is returned unchanged. ``once`` is True if training rows are read only once;
    a large cache would then save no time.
    """
    if size is not None:
        return size
    if once and len(stage.datasets) == 1:
        return float(SMALL_BYTES)
    if any(ds.reads_at_once > 1 for ds in _list_large_datasets(stage).values()):
        return DEFAULT_SHARE  # reading from an object store is not measured, because it is always slow
    return DEFAULT_SHARE if reading_share(stage) > 1 else float(SMALL_BYTES)


def reading_share(stage: Stage) -> float:
    """Return the largest ratio (time to read a row) / (time to compute with it); 0 for small datasets."""
    return max(
        (
            read_seconds(ds) / seconds_per_row(stage.reductions.get(part, stage.online))
            for part, ds in _list_large_datasets(stage).items()
        ),
        default=0.0,
    )


def _list_large_datasets(stage: Stage) -> dict[str, Dataset]:
    """Return the stored datasets of a stage ("train", "validation"); {} if SMALL_BYTES hold all rows."""
    stored = {part: ds for part, ds in stage.datasets.items() if ds.is_stored}
    return stored if sum(ds.nbytes for ds in stored.values()) > SMALL_BYTES else {}


def choose_map_cache(size: float | None, task: OutputTask) -> float:
    """Return the size of the row cache for a map: bytes, or (up to 1) a share of the memory of the process.

    The cache helps if several tasks of the map read the same rows. It is large only for rows in an object
    store (``reads_at_once`` is above 1), because reading rows from a disk again is fast.
    """
    if size is not None:
        return size
    return DEFAULT_SHARE if task.dataset.reads_at_once > 1 else float(SMALL_BYTES)
