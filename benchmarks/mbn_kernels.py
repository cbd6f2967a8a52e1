"""Clusterings of a multilayer bootstrap network, one thread: python benchmarks/mbn_kernels.py

dense    nearest of k centroids on half of the columns of MNIST (noise of its shape without data), uint8 rows
         as they lie on disk: against the matrix product alone (sgemm, same shapes, kept buffer), against
         a large square product, BLAS tiles with numpy's argmax, and faiss-cpu where it is installed
codes    shared units of rows of codes: nanoseconds a look-up (row x clustering below), on codes of random
         clusterings of the same rows, and how many times longer a float32 one-hot product takes (of so many
         rows as fit, scaled)
sparse   nearest centroids of CSR rows of the density of RCV1 (76 of 2,000): times faster than dense
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from common import fastest, mnist, parser, write

from scalelatent.engine.threads import single_threaded
from scalelatent.models.base import CsrRows
from scalelatent.models.mbn.cpu import dense, overlap, sparse

TILE_ROWS, TILE_CENTROIDS = 1024, 512


def images(n: int, seed: int) -> tuple[np.ndarray, str]:
    """Rows of uint8, and what they are."""
    try:
        return mnist(slice(0, n))[0], "MNIST"
    except SystemExit:
        return np.random.default_rng(seed).integers(0, 256, (n, 784), dtype=np.uint8), "noise"


def blas_tiles(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Tiles of a matrix product, and numpy's argmax of each: what one writes without a kernel."""
    half = 0.5 * np.einsum("jc,jc->j", w, w)
    out = np.empty(len(x), dtype=np.int64)
    for a in range(0, len(x), TILE_ROWS):
        best = np.full(len(x[a : a + TILE_ROWS]), -np.inf, dtype=np.float32)
        for b in range(0, len(w), TILE_CENTROIDS):
            scores = x[a : a + TILE_ROWS] @ w[b : b + TILE_CENTROIDS].T - half[b : b + TILE_CENTROIDS]
            index = scores.argmax(axis=1)
            top = scores[np.arange(len(scores)), index]
            wins = top > best
            best[wins] = top[wins]
            out[a : a + TILE_ROWS][wins] = b + index[wins]
    return out


def dense_rates(k: int, seed: int) -> dict[str, Any]:
    """Giga floating-point operations a second of each way, and agreement."""
    rows, what = images(60_000, seed)
    rng = np.random.default_rng(seed)
    x, columns = rows[:4096], np.sort(rng.permutation(784)[:392])
    w = rows[rng.permutation(len(rows))[:k]][:, columns]
    bank = dense.make_bank(w, "euclidean")
    cut, floats = np.ascontiguousarray(x[:, columns], dtype=np.float32), w.astype(np.float32)
    scores = np.empty((len(x), k), dtype=np.float32)
    square = rng.random((2048, 2048), dtype=np.float32)
    ways = {
        "ours": lambda: dense.nearest(x, columns, bank),
        "sgemm": lambda: np.matmul(cut, floats.T, out=scores),
        "blas tiles": lambda: blas_tiles(cut, floats),
        "square sgemm": lambda: square @ square,
    }
    flops = dict.fromkeys(ways, 2.0 * len(x) * k * len(columns)) | {"square sgemm": 2.0 * 2048**3}
    try:
        import faiss

        faiss.omp_set_num_threads(1)
        index = faiss.IndexFlatL2(len(columns))
        index.add(floats)
        ways["faiss"], flops["faiss"] = lambda: index.search(cut, 1), flops["ours"]
    except ImportError:
        pass
    with single_threaded():
        for way in ways.values():
            way()
        seconds = fastest(ways, 7)
    rates = {name: flops[name] / value / 1e9 for name, value in seconds.items()}
    out = {"rows": what, "k": k, "columns": 392, **{f"{n} GF/s": round(v, 1) for n, v in rates.items()}}
    out["share of sgemm"] = round(rates["ours"] / rates["sgemm"], 3)
    out["share of square sgemm"] = round(rates["ours"] / rates["square sgemm"], 3)
    if "faiss" in rates:
        out["times faiss"] = round(rates["ours"] / rates["faiss"], 3)
        out["codes unlike faiss's"] = int((index.search(cut, 1)[1][:, 0] != ways["ours"]()).sum())
    return out


def code_look_ups(below: int, k: int, clusterings: int, seed: int) -> dict[str, Any]:
    """One upper clustering over 8,192 rows."""
    rows, what = images(8192, seed)
    rng = np.random.default_rng(seed)
    codes = np.empty((len(rows), clusterings), dtype=np.uint16)
    for v in range(
        clusterings
    ):  # few columns, so that the codes are made quickly; they are as uneven as real ones
        columns = np.sort(rng.permutation(784)[:49])
        bank = dense.make_bank(rows[rng.permutation(len(rows))[:below]][:, columns], "euclidean")
        codes[:, v] = dense.nearest(rows, columns, bank)
    centroids = codes[rng.permutation(len(rows))[:k]]
    units = rng.random((clusterings, below)) < 0.5
    lists = overlap.make_lists(centroids, units)
    part = 256
    left = np.zeros((part, clusterings * below), dtype=np.float32)
    left[np.arange(part)[:, None], np.arange(clusterings) * below + codes[:part]] = 1.0
    right = np.zeros((min(k, 256), clusterings * below), dtype=np.float32)
    right[np.arange(len(right))[:, None], np.arange(clusterings) * below + centroids[: len(right)]] = 1.0
    with single_threaded():
        ways = {
            "look-ups": lambda: overlap.nearest_codes(codes, lists),
            "lists": lambda: overlap.make_lists(centroids, units),
            "one-hot": lambda: left @ right.T,
        }
        for way in ways.values():
            way()
        seconds = fastest(ways, 7)
    one_hot = seconds["one-hot"] * (len(rows) / part) * (k / len(right))
    return {
        "rows": what,
        "k below": below,
        "k": k,
        "clusterings below": clusterings,
        "ns a look-up": round(1e9 * seconds["look-ups"] / codes.size, 2),
        "lists ms": round(1e3 * seconds["lists"], 1),
        "times faster than one-hot products": round(one_hot / seconds["look-ups"]),
    }


def sparse_rate(k: int, seed: int) -> dict[str, Any]:
    """CSR rows of RCV1's density against the same rows made dense."""
    rng = np.random.default_rng(seed)
    n, p, entries = 2048, 2000, 76
    popular = 1.0 / np.arange(1, p + 1)
    x = np.zeros((n + k, p), dtype=np.float32)
    for row in x:
        row[rng.choice(p, entries, replace=False, p=popular / popular.sum())] = rng.integers(1, 6, entries)
    indptr = np.arange(n + k + 1, dtype=np.int64) * entries
    csr = CsrRows(x[x > 0], np.nonzero(x)[1].astype(np.int32), indptr, x.shape)
    columns = np.sort(rng.permutation(p)[: p // 2])
    postings = sparse.make_sparse_bank(csr[n:], columns, "cosine")
    bank = dense.make_bank(x[n:, columns], "cosine")
    ways = {
        "sparse": lambda: sparse.nearest_sparse(csr[:n], postings),
        "dense": lambda: dense.nearest(csr[:n].to_dense(), columns, bank),
    }
    if not np.array_equal(ways["sparse"](), ways["dense"]()):
        raise SystemExit("sparse and dense rows have different codes")
    with single_threaded():
        seconds = fastest(ways, 5)
    return {
        "k": k,
        "us a row": round(1e6 * seconds["sparse"] / n, 2),
        "times faster than dense": round(seconds["dense"] / seconds["sparse"], 1),
    }


def main() -> None:
    args = parser(__doc__, "mbn_kernels").parse_args()
    results: dict[str, Any] = {"dense": [], "codes": [], "sparse": []}
    for k in (500, 2000, 8000):
        results["dense"].append(dense_rates(k, args.seed))
        print(results["dense"][-1], flush=True)
    for below in (4000, 1000, 250, 62):
        results["codes"].append(code_look_ups(below, below // 2, 400, args.seed))
        print(results["codes"][-1], flush=True)
    for k in (500, 2000):
        results["sparse"].append(sparse_rate(k, args.seed))
        print(results["sparse"][-1], flush=True)
    write(args.out, " ".join(["python", *sys.argv]), args.seed, results)


if __name__ == "__main__":
    main()
