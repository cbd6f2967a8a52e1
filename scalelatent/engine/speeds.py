"""Seconds of the parts of a fit on this machine: short probes on noise of the right shape, kept by
:mod:`.rates`.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.errors import DataError

from .backend import make_backend
from .rates import cpu_seconds, rates

# What scratch rows are probed with: a shard that no cache of the processor holds.
SCRATCH_ROWS, SCRATCH_FEATURES = 32_768, 196
EIGEN_SIZE = 400
# Bytes a second that rows are gathered with out of others.
GATHER_RATE = 1.5e9
# Seconds a byte of writing and of reading, where neither can be measured.
NOMINAL_SCRATCH = 5e-9, 2e-10


def noise(rows: int, p: int, dtype: Any, codes: int) -> Block:
    """A block of noise."""
    rng, dtype = np.random.default_rng(0), np.dtype(dtype)
    if dtype == np.float64:
        x: Any = rng.standard_normal((rows, p))
    elif dtype.kind == "f":
        x = rng.standard_normal((rows, p), dtype=np.float32)
    else:
        x = rng.integers(0, 2 if dtype.kind == "b" else 100, (rows, p)).astype(dtype)
    y = (np.arange(rows) % max(codes, 1)).astype(np.int32)
    return Block(x, y, None, 0, np.arange(rows))


def reduction_rate(
    name: str,
    reduction: Any,
    state: Any,
    rows: int,
    p: int,
    dtype: Any,
    codes: int,
    threads: int,
    block: Block | None = None,
) -> float:
    """Seconds a row of a reduction on one thread of some.

    Parameters
    ----------
    name : str
        Of the work.
    reduction : Reduction
    state : object
    rows, p : int
        Of a block.
    dtype : dtype
        Of the rows.
    codes : int
        Classes of the made labels.
    threads : int
    block : Block or None
        In place of noise.
    """
    layout = reduction.layout()

    def make() -> Any:
        prepared, stats = reduction.prepare(state, make_backend("cpu")), Stats.zeros(layout)
        some = noise(rows, p, dtype, codes) if block is None else block
        return lambda: reduction.accumulate(prepared, some, stats)

    what = f"{name} {rows}x{p} {np.dtype(dtype)} {layout.size} {reduction.flops_per_row():.0f} {codes}"
    return rates.get(f"{what} t{threads}", lambda: cpu_seconds(make, threads) / rows)


def map_rate(name: str, row_map: Any, rows: int, p: int, dtype: Any, threads: int) -> float:
    """Seconds a row of a map on one thread of some."""

    def make() -> Any:
        prepared, block = row_map.prepare(make_backend("cpu")), noise(rows, p, dtype, 0)
        return lambda: row_map.apply(prepared, block)

    what = f"{name} {rows}x{p} {np.dtype(dtype)} {row_map.output()}"
    return rates.get(f"{what} t{threads}", lambda: cpu_seconds(make, threads) / rows)


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


def eigen_seconds(p: int) -> float:
    """Seconds of the eigenvectors of a symmetric matrix of p columns, on one thread."""

    def make() -> Any:
        x = np.random.default_rng(0).standard_normal((EIGEN_SIZE, EIGEN_SIZE))
        return lambda: np.linalg.eigh(x + x.T)

    return rates.get("eigenvectors", lambda: cpu_seconds(make, 1) / EIGEN_SIZE**3) * p**3


def label_seconds(dataset: Any, classes: np.ndarray) -> float:
    """Seconds of reading all labels of a dataset once."""
    n = min(len(dataset), 2**17)

    def measure() -> float:
        begin = time.process_time()
        dataset.read_codes(0, n, classes)
        return (time.process_time() - begin) / n

    name = f"labels {dataset.fingerprint()}" if dataset.is_stored else f"labels in memory {classes.dtype}"
    return rates.get(name, measure) * len(dataset)
