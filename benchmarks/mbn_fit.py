"""Measure the time of a full bootstrap network on MNIST, with pools and as in the paper.

    python benchmarks/mbn_fit.py [--clusterings 400] [--k1 8000] [--pools auto,paper]

With pools, several clusterings draw their centroids from the same random rows. The results are the seconds
of each stage of a fit, the seconds that the matrix products of the first layer need at the machine's rate
(sgemm of the same shapes on all cores, measured before and after the fit), the seconds of the transform of
the 10,000 test images in memory, and the peak memory. The time of the first layer grows with the number of
clusterings, and the time of the upper layers with its square. --keep FOLDER saves the outputs of training and
test images for `mbn_compressive.py --fitted`. Needs SCALELATENT_DATA.
"""

from __future__ import annotations

import resource
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import mnist, parser, write

import scalelatent as sl
from scalelatent.engine.threads import resolve_jobs, single_threaded
from scalelatent.evaluation import kmeans_scores

# Seconds of the transform of the 10,000 test images of MNIST in Zhang (2018), section 5.6.
PAPER_TRANSFORM_SECONDS = 4857.0


class StageSeconds(sl.Callback):
    """Callback that measures the seconds of each stage (layer or output) of a fit."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last: tuple[str, float] | None = None

    def on_stage(self, info: dict[str, Any]) -> None:
        self._finish_stage()
        self._last = (info["stage"], time.perf_counter())

    def on_fit_end(self, info: dict[str, Any]) -> None:
        self._finish_stage()

    def _finish_stage(self) -> None:
        if self._last is not None:
            self.seconds[self._last[0]] = round(time.perf_counter() - self._last[1], 3)


def measure_sgemm_rate(k: int, columns: int, threads: int, rounds: int = 5) -> float:
    """Return the operations per second of float32 products of 4,096 rows with k centroids.

    Each of ``threads`` threads runs a BLAS of one thread.
    """
    rng, rows = np.random.default_rng(0), 4096
    x = [rng.random((rows, columns), dtype=np.float32) for _ in range(threads)]
    w = rng.random((columns, k), dtype=np.float32)
    out = [np.empty((rows, k), dtype=np.float32) for _ in range(threads)]
    best, gate = np.inf, threading.Barrier(threads)

    def work(slot: int) -> tuple[float, float]:
        gate.wait()
        begin = time.perf_counter()
        np.matmul(x[slot], w, out=out[slot])
        return begin, time.perf_counter()

    with single_threaded(), ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            # The threads read the clock themselves, because the main thread may wake up much later.
            begins, ends = zip(*pool.map(work, range(threads)), strict=True)
            best = min(best, max(ends) - min(begins))
    return threads * 2.0 * rows * k * columns / best


def measure(options: Any, pools: str, folder: Path) -> dict[str, Any]:
    """Fit one network with ``pools`` as n_pools; return its times, peak memory and NMI."""
    x, y = mnist(slice(0, options.rows))
    ds = sl.Dataset.from_arrays(x, y).save(folder / "train.zarr")
    threads, columns = resolve_jobs(None), 784 // 2
    model = sl.MultilayerBootstrapNetwork(
        n_clusterings=options.clusterings,
        n_pools=pools if pools in ("auto", "paper") else int(pools),
        k1=options.k1,
        decay=0.5,
        n_components=10,
        n_classes=10,
        random_state=options.seed,
    )
    stages, before = StageSeconds(), measure_sgemm_rate(options.k1, columns, threads)
    begin = time.perf_counter()
    z = model.fit_transform(ds, run_dir=folder / "run", callbacks=stages)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rate = max(before, measure_sgemm_rate(options.k1, columns, threads))
    flops = 2.0 * options.rows * options.k1 * columns * options.clusterings
    test = mnist(part="test")[0]
    begin = time.perf_counter()
    zt = model.transform(test)
    transform = time.perf_counter() - begin
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        np.savez(options.keep / "outputs.npz", train=z, test=zt, seconds=[seconds, transform])
    return {
        "rows": options.rows,
        "clusterings": options.clusterings,
        "ks": model.ks_,
        "threads": threads,
        "sgemm_gflops": round(rate / 1e9, 1),
        "layer1_at_sgemm_seconds": round(flops / rate, 1),
        "fit_seconds": round(seconds, 1),
        "fit_over_layer1_at_sgemm": round(seconds * rate / flops, 3),
        "stage_seconds": stages.seconds,
        "transform_10000_seconds": round(transform, 1),
        "paper_over_transform": round(PAPER_TRANSFORM_SECONDS / transform, 1),
        "peak_gib": round(peak, 2),
        "nmi": round(100 * kmeans_scores(z, y, restarts=10, random_state=options.seed).nmi, 2),
    }


def main() -> None:
    arguments = parser(__doc__, "mbn_fit")
    arguments.add_argument("--rows", type=int, default=60_000)
    arguments.add_argument("--clusterings", type=int, default=400)
    arguments.add_argument("--pools", default="auto,paper", help="values of n_pools, one fit each")
    arguments.add_argument("--k1", type=int, default=8000)
    arguments.add_argument("--keep", type=Path, help="folder for the outputs of training and test images")
    options = arguments.parse_args()
    results = {}
    for pools in options.pools.split(","):
        with tempfile.TemporaryDirectory() as folder:
            results[pools] = measure(options, pools, Path(folder))
        for name, value in results[pools].items():
            print(f"{name:28} {value}", flush=True)
    write(options.out, options.seed, results)


if __name__ == "__main__":
    main()
