"""Measure the kernels of multilayer bootstrap networks on one thread.

    python benchmarks/mbn_kernels.py

dense   Operations per second of finding the nearest of k centroids by half of the columns of MNIST; rows are
        uint8, as on disk. Without SCALELATENT_DATA the rows are noise of the same shape. The rate is
        compared with sgemm (float32 product) of the same shapes into an existing buffer, with a large square
        product, with BLAS and numpy's argmax block by block, and with faiss-cpu if it is installed.
codes   Nanoseconds of a look-up in the layers of 8,000 to 31 centroids, for eight clusterings at once as in
        a fit, and for one. A look-up compares one code of a row, from one clustering of the layer below,
        with all centroids. The codes are those of random clusterings of the same rows. The results also show
        how many times longer a float32 one-hot product takes, scaled up from the rows that fit in memory.
sparse  Microseconds of finding the nearest centroids of documents by half of the columns: RCV1's subset with
        its 2,000 most frequent stems and with its full vocabulary, as counts and as logarithms of counts.
        Without SCALELATENT_DATA columns are drawn by Zipf's law at the same density. The results show how
        many times faster the kernel is than making the rows dense and than the dense kernel alone, and the
        multiply-adds per row and centroid.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
from common import fastest, mnist, parser, write

from scalelatent.engine.threads import single_threaded
from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.models.mbn.kernels.cpu import dense, lists, sparse

# The search by BLAS and numpy multiplies this number of rows with this number of centroids at a time.
TILE_ROWS, TILE_CENTROIDS = 1024, 512
# Number of clusterings whose codes a fit computes in one call of the kernel.
CLUSTERINGS_PER_CALL = 8


def load_images(n: int, seed: int) -> tuple[np.ndarray, str]:
    """Return rows of uint8 and their name: MNIST, or noise without SCALELATENT_DATA."""
    try:
        return mnist(slice(0, n))[0], "MNIST"
    except SystemExit:
        return np.random.default_rng(seed).integers(0, 256, (n, 784), dtype=np.uint8), "noise"


def find_by_blas_tiles(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the nearest centroids of rows x by matrix products of blocks and numpy's argmax."""
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


def measure_dense_rates(k: int, seed: int) -> dict[str, Any]:
    """Return the GFlop/s of searches for the nearest of k centroids, by this package and by others."""
    rows, what = load_images(60_000, seed)
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
        "blas tiles": lambda: find_by_blas_tiles(cut, floats),
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
        out["codes unlike faiss's"] = int((index.search(cut, 1)[1][:, 0] != ways["ours"]()[:, 0]).sum())
    return out


def draw_random_codes(below: int, clusterings: int, n: int, seed: int) -> tuple[np.ndarray, str]:
    """Return codes (n, clusterings) of image rows, and the name of the rows.

    A code is the nearest of ``below`` random rows. To save time, a clustering uses 49 of the 784 columns; the
    codes are as uneven as in real fits.
    """
    rows, what = load_images(n, seed)
    rng = np.random.default_rng(seed)
    codes = np.empty((n, clusterings), dtype=np.uint16)
    for v in range(clusterings):
        columns = np.sort(rng.permutation(784)[:49])
        bank = dense.make_bank(rows[rng.permutation(n)[:below]][:, columns], "euclidean")
        codes[:, v] = dense.nearest(rows, columns, bank)[:, 0]
    return codes, what


def measure_code_look_ups(
    codes: np.ndarray, below: int, k: int, seed: int, sets: int = CLUSTERINGS_PER_CALL
) -> dict[str, Any]:
    """Return the times of finding nearest centroids in an upper layer, for 8,192 rows of codes.

    Codes are numbers of nearest centroids in the layer below, which has ``below`` centroids. The layer itself
    has k centroids and ``sets`` clusterings.
    """
    rng = np.random.default_rng(seed)
    clusterings = codes.shape[1]
    x = np.ascontiguousarray(codes[:8192])
    centroids = np.stack([codes[rng.permutation(len(codes))[:k]] for _ in range(sets)])
    units = rng.random((sets, clusterings, below)) < 0.5
    made = lists.make_lists(centroids, units)
    met = np.diff(made.start.astype(np.int64), axis=1)[np.arange(clusterings), x].mean() / sets
    part, few = max(8, min(256, 2**28 // (clusterings * below))), min(k, 256)
    left, right = (to_one_hot(rows, below) for rows in (x[:part], centroids[0, :few]))
    with single_threaded():
        ways = {
            "look-ups": lambda: lists.nearest_codes(x, made),
            "lists": lambda: lists.make_lists(centroids, units),
            "one-hot": lambda: left @ right.T,
        }
        for way in ways.values():
            way()
        seconds = fastest(ways, 7)
    by_product = seconds["one-hot"] * (len(x) / part) * (k / few)
    return {
        "k below": below,
        "k": k,
        "clusterings below": clusterings,
        "clusterings at once": sets,
        "centroids met a look-up": round(float(met), 3),
        "ns a look-up": round(1e9 * seconds["look-ups"] / x.size / sets, 2),
        "lists ms a clustering": round(1e3 * seconds["lists"] / sets, 2),
        "times faster than one-hot products": round(by_product * sets / seconds["look-ups"]),
    }


def to_one_hot(codes: np.ndarray, below: int) -> np.ndarray:
    """Return codes as one-hot rows, float32 (rows, clusterings * below)."""
    out = np.zeros((len(codes), codes.shape[1] * below), dtype=np.float32)
    out[np.arange(len(codes))[:, None], np.arange(codes.shape[1]) * below + codes] = 1.0
    return out


def load_documents(vocabulary: int | None, seed: int) -> tuple[CsrRows, str]:
    """Return CSR rows of counts of stems, without empty rows, and their name.

    ``vocabulary`` is the number of most frequent stems; None takes all stems.
    """
    file = Path(os.environ.get("SCALELATENT_DATA", "")) / "rcv1" / "rcv1v2_subset27613.npz"
    if file.exists():
        with np.load(file) as arrays:
            p = int(arrays["X_shape"][1])
            data, indices, indptr = (arrays[f"X_{name}"] for name in ("tf", "indices", "indptr"))
        what = "RCV1 subset"
    else:
        rng, n, p, entries = np.random.default_rng(seed), 4096, vocabulary or 20_000, 76
        popular = 1.0 / np.arange(1, p + 1)
        order = np.argsort(rng.random((n, p)) ** (1.0 / popular), axis=1)[:, -entries:]
        indices, data = np.sort(order, axis=1).ravel(), rng.integers(1, 6, n * entries)
        indptr, what = np.arange(n + 1) * entries, "drawn by Zipf's law"
    common = np.argsort(-np.bincount(indices, minlength=p), kind="stable")[: vocabulary or p]
    place = np.full(p, -1, dtype=np.int32)
    place[np.sort(common)] = np.arange(len(common), dtype=np.int32)
    kept = place[indices] >= 0
    lengths = np.diff(np.concatenate([[0], np.cumsum(kept)])[indptr])
    starts = np.concatenate([[0], np.cumsum(lengths[lengths > 0])])
    rows = CsrRows(data[kept].astype("f4"), place[indices[kept]], starts, (len(starts) - 1, len(common)))
    return rows, what


def take_rows(x: CsrRows, indices: np.ndarray) -> CsrRows:
    """Return the rows of ``x`` with the given row indices, in their order."""
    lengths = np.diff(x.indptr)[indices]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    at = np.repeat(x.indptr[indices] - indptr[:-1], lengths) + np.arange(indptr[-1])
    return CsrRows(x.data[at], x.indices[at], indptr, (len(indices), x.shape[1]))


def measure_sparse_rate(vocabulary: int | None, k: int, counts: bool, seed: int) -> dict[str, Any]:
    """Return times to find nearest centroids of counts (or their logarithms), as CSR and as dense rows."""
    rng = np.random.default_rng(seed)
    rows, what = load_documents(vocabulary, seed)
    if not counts:
        rows = CsrRows(np.log1p(rows.data), rows.indices, rows.indptr, rows.shape)
    p, n = rows.shape[1], 4096 if rows.shape[1] <= 5000 else 120
    order = rng.permutation(len(rows))
    columns = np.sort(rng.permutation(p)[: p // 2])
    x, w = take_rows(rows, order[:n]), take_rows(rows, order[n : n + k])
    centroids = sparse.make_sparse_bank(w, columns, "euclidean")
    bank, floats = dense.make_bank(w.to_dense()[:, columns], "euclidean"), x.to_dense()
    ways = {
        "sparse": lambda: sparse.nearest_sparse(x, centroids),
        "dense": lambda: dense.nearest(x.to_dense(), columns, bank),
        "kernel": lambda: dense.nearest(floats, columns, bank),
    }
    if not np.array_equal(ways["sparse"](), ways["dense"]()):
        raise SystemExit("sparse and dense rows have different codes")
    with single_threaded():
        seconds = fastest(ways, 7)
    posted = np.zeros(p)
    thin = np.flatnonzero(centroids.slot < -1)
    posted[thin] = np.diff(centroids.start)[-2 - centroids.slot[thin]]
    return {
        "rows": what,
        "values": "counts" if counts else "logarithms of counts",
        "columns": len(columns),
        "k": k,
        "entries a row on the columns": round(float(np.isin(x.indices, columns).sum()) / n, 1),
        "multiply-adds in dense columns": round(float((centroids.slot[x.indices] >= 0).sum()) / n, 2),
        "multiply-adds in postings": round(float(posted[x.indices].sum()) / n / k, 2),
        "us a row": round(1e6 * seconds["sparse"] / n, 2),
        "dense GF/s": round(2e-9 * n * k * len(columns) / seconds["kernel"], 1),
        "times faster than densifying": round(seconds["dense"] / seconds["sparse"], 1),
        "times faster than the dense kernel alone": round(seconds["kernel"] / seconds["sparse"], 1),
    }


def main() -> None:
    args = parser(__doc__, "mbn_kernels").parse_args()
    results: dict[str, Any] = {"dense": [], "codes": [], "sparse": []}
    for k in (500, 2000, 8000):
        results["dense"].append(measure_dense_rates(k, args.seed))
        print(results["dense"][-1], flush=True)
    layers = (8000, 4000, 2000, 1000, 500, 250, 125, 62)
    for below in (*layers, 100, 20):
        codes, what = draw_random_codes(below, 400, 8192 + below // 2, args.seed)
        for clusterings, sets in ((400, CLUSTERINGS_PER_CALL), (100, CLUSTERINGS_PER_CALL), (400, 1)):
            line = measure_code_look_ups(codes[:, :clusterings], below, below // 2, args.seed, sets)
            results["codes"].append({"rows": what, **line})
            print(results["codes"][-1], flush=True)
    of_layers = [
        r
        for r in results["codes"]
        if r["clusterings below"] == 400
        and r["clusterings at once"] == CLUSTERINGS_PER_CALL
        and r["k below"] in layers
    ]
    mean = sum(r["ns a look-up"] for r in of_layers) / len(of_layers)
    results["ns a look-up, mean of the layers of 8,000 to 31"] = round(mean, 2)
    for vocabulary, k, counts in itertools.product((2000, None), (500, 2000), (True, False)):
        results["sparse"].append(measure_sparse_rate(vocabulary, k, counts, args.seed))
        print(results["sparse"][-1], flush=True)
    write(args.out, args.seed, results)


if __name__ == "__main__":
    main()
