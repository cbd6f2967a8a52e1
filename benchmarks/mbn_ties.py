"""Compare two codes for rows that have no code in common with any centroid: code 0, and a code by hash.

    python benchmarks/mbn_ties.py [--sets documents,digits] [--clusterings 25,50,100] [--seeds 3]

In an upper layer, a row of codes gets the centroid with the most equal codes; all centroids tie if none has
an equal code. The network then uses code 0 ("lowest"). "hash" instead gives such a row a code by a hash of
the seed, the clustering and the codes of the row. All other rows of the layer keep their codes. The
results are the NMI in percent of k-means (the best of ten starts) on as many components as classes, with a
decay of 0.5, and the largest share of tied codes in a layer. Runs whose results are in the file are not
repeated. The documents need SCALELATENT_DATA.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
from common import parser, write_part
from mbn_pools import read_set

import scalelatent as sl
from scalelatent.engine.reading import as_rows
from scalelatent.evaluation import kmeans_scores
from scalelatent.models.mbn.decay import code_rows, compute_output
from scalelatent.models.mbn.fit import plan_layers
from scalelatent.models.mbn.model.layers import Layer


def replace_ties(layer: Layer, below: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the codes, with hashed codes for rows that tie for all centroids, and the share of these ties.

    ``below`` are the rows' codes of the layer below.
    """
    out, ties = codes.copy(), 0
    hashes = np.array([zlib.crc32(row.tobytes()) for row in below], dtype=np.uint64)
    for v in range(layer.n_clusterings):
        rows = np.flatnonzero(codes[:, v] == 0)
        first = below[layer.rows(v)[0]]
        seen = layer.draw_units(v)[0][np.arange(layer.width), first]
        # A row has code 0 also if centroid 0 is its nearest. The row ties for all centroids only if centroid
        # 0 has no code in common with it.
        tied = rows[~((below[rows] == first) & seen).any(axis=1)]
        mixed = (hashes[tied] + np.uint64(v + 1)) * np.uint64(0x9E3779B97F4A7C15)
        out[tied, v] = (mixed ^ (mixed >> np.uint64(29))) % np.uint64(layer.k)
        ties += len(tied)
    return out, ties / codes.size


def measure(name: str, clusterings: int, seed: int, jobs: int | None) -> dict[str, float]:
    """Return the NMI of both networks, and the largest share of ties in a layer."""
    x, y, params = read_set(name, seed)
    classes, train = len(np.unique(y)), sl.Dataset.from_arrays(x)
    model = sl.MultilayerBootstrapNetwork(
        n_classes=classes, n_clusterings=clusterings, random_state=seed, **params
    )
    layers, rows = plan_layers(model, train, 0.5, seed), as_rows(train.read_x(0, len(train)))
    first = code_rows(layers[0], rows, rows, jobs, "cpu")
    found, most = {}, 0.0
    for way in ("lowest", "hash"):
        codes = first
        for layer in layers[1:]:
            below, codes = codes, code_rows(layer, codes, codes, jobs, "cpu")
            if way == "hash":
                codes, share = replace_ties(layer, below, codes)
                most = max(most, share)
        z = compute_output(codes, classes, "cpu")
        found[way] = round(100 * kmeans_scores(z, y, restarts=10, random_state=seed).nmi, 2)
    return {**found, "percent_tied": round(100 * most, 2)}


def main() -> None:
    arguments = parser(__doc__, "mbn_ties")
    arguments.add_argument("--sets", default="documents,digits")
    arguments.add_argument("--clusterings", default="25,50,100")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--jobs", type=int, default=None)
    args = arguments.parse_args()
    for seed in range(args.seeds):
        for name in args.sets.split(","):
            for clusterings in map(int, args.clusterings.split(",")):
                parts = json.loads(args.out.read_text())["parts"] if args.out.exists() else {}
                part = f"{name} {clusterings}"
                runs: dict[str, Any] = parts.get(part, {}).get("result", {}).get("runs", {})
                if str(seed) in runs:
                    continue
                runs[str(seed)] = measure(name, clusterings, seed, args.jobs)
                print(part, seed, runs[str(seed)], flush=True)
                means = {
                    key: round(float(np.mean([run[key] for run in runs.values()])), 2)
                    for key in runs[str(seed)]
                }
                write_part(args.out, part, args.seed, {"runs": runs, "means": means})


if __name__ == "__main__":
    main()
