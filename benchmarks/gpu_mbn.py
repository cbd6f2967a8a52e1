"""Check and measure bootstrap networks on a GPU: codes compared with those of the CPU, then rates.

    python benchmarks/gpu_mbn.py --out gpu_mbn.json

The docstring of gpu_common.py describes what the script needs, its result file and its exit codes.

The network has layers of random clusterings. A code is the index of a row's nearest centroid in one
clustering. Rates are medians over repeats, with the rows on the GPU; they include the copy of the codes to
the host. The rate of dense rows is compared with that of the matrix product alone, with the same shapes and
blocks in the same run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

# The codes of the CPU come from one thread; BLAS reads these variables when numpy loads it.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np
from gpu_common import (
    Task,
    device_seconds,
    find_kernel,
    host_seconds,
    make_gpu_backend,
    run_script,
    script_parser,
)

from scalelatent.engine.backend import CupyBackend
from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.models.mbn.kernels.reference import METRICS

FEATURES = 784


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--clusterings", type=int, default=400)
    args = parser.parse_args()
    if args.quick:
        args.rows, args.clusterings, args.repeats = 60, 20, 1
    return run_script(args, make_gpu_backend, list_checks, list_measurements)


def list_measurements(backend: CupyBackend, args: argparse.Namespace) -> Iterator[Task]:
    sizes = (30, 12) if args.quick else (500, 2000, 8000)
    layers = (16, 8) if args.quick else (8000, 4000, 2000, 1000, 500, 250, 125, 62)
    for k in sizes:
        yield "dense", f"dense rows, k = {k}", partial(measure_dense_rows, backend, k, args)
    for n_below in layers:
        yield "codes", f"rows of codes below {n_below}", partial(measure_codes, backend, n_below, args)
    for k in sizes[:2]:
        yield "sparse", f"sparse rows, k = {k}", partial(measure_sparse_rows, backend, k, args)


def list_checks(backend: CupyBackend, args: argparse.Namespace) -> Iterator[Task]:
    """Yield checks of codes (nearest centroids) of dense, CSR and coded rows on the GPU against the CPU."""
    rng, n = np.random.default_rng(args.seed), min(args.rows, 5000)

    def make_check(name: str, *given: Any) -> Task:
        return "checks", name, partial(compare_codes, name, backend, *given)

    for metric in METRICS:
        for stored in ("uint8", "float32"):
            for k, p in ((1, 3), (40, 30), *(() if args.quick else ((1000, FEATURES), (9000, 200)))):
                x, w = draw_pixels(rng, n, p, stored), draw_pixels(rng, k, p, stored)
                x[: n // 2] = w[rng.integers(0, k, n // 2)]
                yield make_check(f"dense {metric} {stored} k={k}", "nearest", x, w, metric)
    base = rng.normal(size=200) * 100
    x, w = ((base + rng.normal(size=(m, 200)) * 1e-2).astype("f4") for m in (n, min(n, 2000)))
    yield make_check("dense rows with nearly equal distances", "nearest", x, w, "euclidean")
    for metric in METRICS:
        for k in (7, 60) if args.quick else (7, 500, 9000):
            x, w = draw_documents(rng, n, 300), draw_documents(rng, k, 300)
            yield make_check(f"sparse {metric} k={k}", "nearest_sparse", x, w, metric)
    for n_below, k in ((9, 4), (60, 30)) if args.quick else ((9, 4), (8000, 4000), (20_000, 10_000)):
        x, w = (rng.integers(0, n_below, (*m, args.clusterings)).astype("u2") for m in ((n,), (2, k)))
        units = rng.random((2, args.clusterings, n_below)) < 0.5
        yield make_check(f"codes k={k} of {n_below}", "nearest_codes", x, w, units)


def compare_codes(
    name: str, backend: CupyBackend, kernel: str, x: Any, w: Any, setting: Any
) -> dict[str, Any]:
    """Check that no row of x has different codes (nearest centroids) on the GPU and on the CPU.

    ``w`` are the centroids. ``setting`` is the metric or, for coded rows, a mask of the units (centroids of
    the layer below) that each clustering uses.
    """
    makers = {"nearest": "make_bank", "nearest_sparse": "make_sparse_bank", "nearest_codes": "make_lists"}
    make = makers[kernel]
    codes = []
    for find in (backend.kernel, lambda name: find_kernel(name, "numba")):
        if kernel == "nearest":
            columns = np.arange(0, x.shape[1], 2)
            bank = find(f"mbn_{make}")(w[:, columns], setting)
            codes.append(find(f"mbn_{kernel}")(x, columns, bank))
        elif kernel == "nearest_sparse":
            codes.append(
                find(f"mbn_{kernel}")(x, find(f"mbn_{make}")(w, np.arange(x.shape[1] // 2), setting))
            )
        else:
            codes.append(find(f"mbn_{kernel}")(x, find(f"mbn_{make}")(w, setting)))
    wrong = int((codes[0] != codes[1]).reshape(len(x), -1).any(axis=1).sum())
    return {"name": name, "rows": len(x), "rows that differ": wrong, "passed": wrong == 0}


def draw_pixels(rng: np.random.Generator, n: int, p: int, stored: str) -> np.ndarray:
    """Return rows (n, p) of random numbers from 1 to below 255, with dtype ``stored``."""
    return (rng.random((n, p)) * 254 + 1).astype(stored)


def draw_documents(rng: np.random.Generator, n: int, p: int) -> CsrRows:
    """Return CSR rows (n, p) of word counts with frequencies by Zipf's law; every row has the first word."""
    share = np.minimum(1.0, 8.0 / np.arange(1, p + 1))
    share[0] = 1.0
    x = rng.integers(1, 6, (n, p)) * (rng.random((n, p)) < share)
    rows, columns = np.nonzero(x)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n))]).astype(np.int32)
    return CsrRows(x[rows, columns].astype("f4"), columns.astype("i4"), indptr, x.shape)


def measure_dense_rows(backend: CupyBackend, k: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return operations per second of finding nearest centroids of bytes, and of matrix products alone."""
    from scalelatent.models.mbn.kernels import gpu

    rng, cupy, n = np.random.default_rng(args.seed), backend.xp, args.rows
    columns = np.sort(rng.permutation(FEATURES)[: FEATURES // 2])
    x = backend.asarray(draw_pixels(rng, n, FEATURES, "uint8"), np.uint8)
    bank = backend.kernel("mbn_make_bank")(draw_pixels(rng, k, FEATURES, "uint8")[:, columns], "euclidean")
    nearest = backend.kernel("mbn_nearest")
    whole = host_seconds(lambda: nearest(x, columns, bank), args.repeats)
    stored, width = bank.w.shape  # The centroids are bytes, padded as tensor cores require.
    tile = min(n, gpu.MAX_SCORES // stored)
    cut = cupy.zeros((tile, width), dtype=bank.w.dtype)
    cut.fill(1)
    products = cupy.empty((tile, stored), dtype=np.int32)

    def multiply_alone(_: int) -> None:
        gpu.multiply(cut, bank.w.T, products)

    product = device_seconds(backend, multiply_alone, args.repeats) * n / tile
    flops = 2.0 * n * k * len(columns)
    line = {
        "centroids": k,
        "columns": len(columns),
        "rows_per_second": n / whole,
        "gflop_per_second": flops / whole / 1e9,
    }
    line |= {"gemm_gflop_per_second": flops / product / 1e9, "share_of_gemm": product / whole}
    print("dense", line, flush=True)
    return line


def measure_codes(backend: CupyBackend, n_below: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the nanoseconds per code to find nearest centroids, and the seconds to prepare the centroids.

    A code is the index of one of ``n_below`` centroids of the layer below; a centroid also consists of codes.
    """
    rng, k = np.random.default_rng(args.seed), n_below // 2
    x = rng.integers(0, n_below, (args.rows, args.clusterings)).astype(np.int32)
    centroids = rng.integers(0, n_below, (1, k, args.clusterings)).astype("u2")
    units = rng.random((1, args.clusterings, n_below)) < 0.5
    make, nearest = backend.kernel("mbn_make_lists"), backend.kernel("mbn_nearest_codes")
    lists, rows = make(centroids, units), backend.asarray(x, np.int32)
    seconds = host_seconds(lambda: nearest(rows, lists), args.repeats)
    line = {"centroids_below": n_below, "centroids": k, "ns_per_code": 1e9 * seconds / x.size}
    line["seconds_to_make_lists"] = host_seconds(lambda: make(centroids, units), args.repeats)
    print("codes", line, flush=True)
    return line


def measure_sparse_rows(backend: CupyBackend, k: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure finding nearest centroids of documents with 2,000 words, by half of the words."""
    rng, cupy = np.random.default_rng(args.seed), backend.xp
    x, w = draw_documents(rng, min(args.rows, 20_000), 2000), draw_documents(rng, k, 2000)
    bank = backend.kernel("mbn_make_sparse_bank")(w, np.arange(0, 2000, 2), "euclidean")
    moved = CsrRows(*(cupy.asarray(part) for part in (x.data, x.indices, x.indptr)), x.shape)
    seconds = host_seconds(lambda: backend.kernel("mbn_nearest_sparse")(moved, bank), args.repeats)
    line = {"centroids": k, "entries_per_row": len(x.data) / len(x), "rows_per_second": len(x) / seconds}
    print("sparse", line, flush=True)
    return line


if __name__ == "__main__":
    sys.exit(main())
