"""Measure the kernels of mixtures of linear models on one thread, relative to sgemm.

    python benchmarks/linear_mixture_kernels.py [--part scan]

There are K components of h latent dimensions for rows of p features; sgemm is the float32 product of BLAS. A
tangent of a row is the change of the image under a small shift, rotation or scaling.

scan      Rate of finding the best component of each row in memory, which multiplies rows with K (h + 1)
          columns. It is compared with sgemm of the same rows and columns (the faster of both memory orders).
images    Time of multiplying the scatter matrix of each component's rows with a basis of 16 directions,
          including the sums of the rows. It is compared with its two products in sgemm, one component at a
          time. The time of adding six tangents of each row to these sums is compared with sgemm likewise.
distance  Time of a scan with tangent distance for ten random ones of 1,000 components / the scan alone.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

from typing import Any

import numpy as np
from common import fastest, parser, write

from scalelatent.models.linear_mixture.kernels import cpu
from scalelatent.models.linear_mixture.kernels.reference import (
    TANGENTS,
    TangentSpec,
    error_scores,
    group_rows,
)

# Pairs (components K, latent dimensions h) in the part "scan": for rows of 256 and 784 features, and for rows
# of 3,072 features.
SCANS = ((10, 12), (50, 12), (100, 12), (1000, 10))
WIDE_SCANS = ((300, 10),)


def make_components(p: int, k: int, h: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return random means (k, p) and orthonormal bases (k, p, h)."""
    return rng.random((k, p)), np.linalg.qr(rng.normal(size=(k, p, h)))[0]


def measure_rates(functions: dict[str, Any], flops: float, rounds: int) -> dict[str, float]:
    """Return the giga floating-point operations per second of each function in its fastest round."""
    for function in functions.values():
        function()
    return {name: flops / seconds / 1e9 for name, seconds in fastest(functions, rounds).items()}


def measure_scan(p: int, k: int, h: int, rng: np.random.Generator, rounds: int) -> dict[str, Any]:
    """Measure the search for the best of k components, with h latent dimensions, for rows of p features.

    Return its rate, and the rate of sgemm (float32 product of BLAS) with the same rows and columns.
    """
    n, columns = (4096 if k < 1000 else 1024), k * (h + 1)
    x = rng.random((n, p), dtype=np.float32)
    scores = error_scores(*make_components(p, k, h, rng), np.full(p, 0.5))
    scorer = cpu.make_scorer(scores, np.array([0, k]))
    w, out = rng.random((columns, p), dtype=np.float32), np.empty((n, columns), dtype=np.float32)
    turned = np.ascontiguousarray(w.T)
    ways = {
        "ours": lambda: cpu.nearest(scorer, x, 0, 1),
        "rows": lambda: np.matmul(x, w.T, out=out),
        "columns": lambda: np.matmul(x, turned, out=out),
    }
    found = measure_rates(ways, 2.0 * n * p * columns, rounds)
    sgemm = max(found["rows"], found["columns"])
    return {
        "p": p,
        "columns": columns,
        "GF/s": found["ours"],
        "sgemm GF/s": sgemm,
        "share": found["ours"] / sgemm,
    }


def measure_tangents(
    p: int, k: int, rows_per_component: int, rng: np.random.Generator, rounds: int
) -> dict[str, Any]:
    """Return the times of adding rows, and six tangents of each row, to the sums of k components.

    The rows have p features. Each time is divided by the time of the same matrix products in sgemm.
    """
    n, q = k * rows_per_component, 16
    x, (means, bases) = rng.random((n, p), dtype=np.float32), make_components(p, k, q, rng)
    groups = group_rows(rng.permutation(np.repeat(np.arange(k), rows_per_component)), k)
    packed, out = cpu.pack_bases(means, bases, False), (np.zeros((k, p)), np.zeros(k), np.zeros((k, q, p)))
    narrow, code, image = bases.astype("f4"), np.empty((rows_per_component, q), "f4"), np.empty((q, p), "f4")
    spec, factors = TangentSpec(TANGENTS[:6], (p // 28, 28) if p == 784 else (16, 16), 0.6), np.ones((k, 6))
    trace, gram = np.zeros((k, 6)), np.zeros((0, 0, 0))

    def multiply(times: int = 1) -> None:
        for g in range(k):
            part = x[g * rows_per_component : (g + 1) * rows_per_component]
            for _ in range(times):
                np.matmul(part, narrow[g], out=code)
                np.matmul(code.T, part, out=image)

    ways = {
        "ours": lambda: cpu.add_scatter(packed, x, groups, *out, gram),
        "products": multiply,
        "tangents": lambda: cpu.add_tangent_scatter(packed, x, groups, spec, factors, out[2], trace),
        "tangents' products": lambda: multiply(6),
    }
    for way in ways.values():
        way()
    seconds = fastest(ways, rounds)
    return {
        "p": p,
        "K": k,
        "rows a group": rows_per_component,
        "images, times their products": seconds["ours"] / seconds["products"],
        "six tangents, times their products": seconds["tangents"] / seconds["tangents' products"],
    }


def measure_distances(
    p: int, shape: tuple[int, int], rng: np.random.Generator, rounds: int
) -> dict[str, Any]:
    """Return rows per second of recognition with tangent distance, and its time over that of a scan.

    The rows are images of ``shape`` with p features. A scan finds the best component without tangents.
    """
    k, n = 1000, 512
    x, scores = (
        rng.random((n, p), dtype=np.float32),
        error_scores(*make_components(p, k, 10, rng), np.full(p, 0.5)),
    )
    scorer, tangent_scores = cpu.make_scorer(scores, np.array([0, k])), cpu.pack_tangent_scores(scores)
    candidates = rng.integers(0, k, (n, 10)).astype(np.int32)

    def scan_by_tangents() -> None:
        tangents = cpu.tangent_rows(x, shape, TANGENTS[:6], 0.6)
        cpu.nearest(scorer, x, 0, 1)
        cpu.tangent_distance(tangent_scores, x, tangents, candidates)

    ways = {"plain": lambda: cpu.nearest(scorer, x, 0, 1), "tangents": scan_by_tangents}
    scan_by_tangents()
    seconds = fastest(ways, rounds)
    return {
        "p": p,
        "K": k,
        "rows/s": n / seconds["tangents"],
        "times": seconds["tangents"] / seconds["plain"],
    }


def main() -> None:
    arguments = parser(__doc__, "linear_mixture_kernels")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument(
        "--part", choices=("scan", "images", "distance"), help="run this part only, and write nothing"
    )
    args = arguments.parse_args()
    rng, results = np.random.default_rng(args.seed), {}
    for part in ("scan", "images", "distance"):
        if args.part not in (None, part):
            continue
        found = []
        for p, shape in ((256, (16, 16)), (784, (28, 28)), (3072, (48, 64))):
            if part != "scan" and p > 784:
                continue
            if part == "scan":
                found += [
                    measure_scan(p, k, h, rng, args.rounds) for k, h in (SCANS if p <= 784 else WIDE_SCANS)
                ]
            elif part == "images":
                found += [
                    measure_tangents(p, 100, rows_per_component, rng, args.rounds)
                    for rows_per_component in (20, 300)
                ]
            else:
                found.append(measure_distances(p, shape, rng, args.rounds))
        results[part] = [
            {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
            for row in found
        ]
        for row in results[part]:
            print(part, row, flush=True)
    if args.part is None:
        write(args.out, args.seed, results)


if __name__ == "__main__":
    main()
