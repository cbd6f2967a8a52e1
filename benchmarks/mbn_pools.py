"""Compare first layers with shared pools of centroids to the paper's independent clusterings.

    python benchmarks/mbn_pools.py [--sets wine,thyroid,umist,digits,coil20,isolet1,mnist5000,documents]
    python benchmarks/mbn_pools.py --sets mnist20000 --seeds 3
    python benchmarks/mbn_pools.py --sets mnist --seeds 1

A pool is a set of random rows from which several clusterings draw their centroids. Each data set and seed
has a network for each number of pools (``n_pools``), and one with "paper", where each clustering draws its
own centroids from all rows; the decay is 0.5. The results are the NMI in percent of k-means (the best of ten
starts) on as many components as classes, and CPU seconds of the first layer and of the others. Runs whose
results are in the file are not repeated. Needs SCALELATENT_DATA.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
from common import parser, rcv1_subset, single_topics, write_part
from mbn_clustering import load_rows, project_codes

import scalelatent as sl
from scalelatent.engine.reading import as_rows
from scalelatent.evaluation import kmeans_scores
from scalelatent.models.mbn.decay import code_rows, compute_output
from scalelatent.models.mbn.fit import plan_layers

# Numbers of pools that are compared; "paper" has no pools.
POOLS = (4, 10, 20, 40, 80, "paper")
# The set "documents" has this number of random documents with exactly one topic.
DOCUMENTS = 4000
# Number of centroids in the first layer for the large sets: a fifth of the rows, or the number of Zhang
# (2018). The default, half of the rows, would take hours.
K1 = {"mnist20000": 4000, "mnist": 8000}


def read_set(name: str, seed: int) -> tuple[Any, np.ndarray, dict[str, Any]]:
    """Return the rows, the classes and the network parameters of a data set."""
    if name == "documents":
        counts, topics, _ = rcv1_subset()
        rows, y = single_topics(topics)
        few = np.sort(np.random.default_rng(0).permutation(len(rows))[:DOCUMENTS])
        return counts[rows[few]], y[few], {"metric": "cosine"}
    if name == "digits":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        return x.astype(np.uint8), y, {}
    if name == "mnist20000":
        x, y = load_rows("mnist", 0)
        rows = np.sort(np.random.default_rng(seed).permutation(len(x))[:20_000])
        return np.ascontiguousarray(x[rows]), y[rows], {"k1": K1[name]}
    x, y = load_rows(name, 0)
    return np.ascontiguousarray(x), y, {"k1": K1[name]} if name in K1 else {}


def measure(x: Any, y: np.ndarray, seed: int, jobs: int | None, **params: Any) -> dict[str, float]:
    """Return the NMI in percent, and the CPU seconds of the first layer and of the upper layers."""
    classes = len(np.unique(y))
    model = sl.MultilayerBootstrapNetwork(n_classes=classes, random_state=seed, **params)
    train = sl.Dataset.from_arrays(x)
    layers = plan_layers(model, train, 0.5, seed)
    begin = time.process_time()
    rows = as_rows(train.read_x(0, len(train)))
    codes = code_rows(layers[0], rows, rows, jobs, "cpu")
    first = time.process_time() - begin
    for layer in layers[1:]:
        codes = code_rows(layer, codes, codes, jobs, "cpu")
    rest = time.process_time() - begin - first
    few = len(codes) <= 6000
    z = compute_output(codes, classes, "cpu") if few else project_codes(model, layers, codes, seed)
    score = kmeans_scores(z, y, restarts=10, random_state=seed, n_jobs=jobs)
    return {
        "nmi": round(100 * score.nmi, 2),
        "first_layer_seconds": round(first, 2),
        "other_layers_seconds": round(rest, 2),
    }


def main() -> None:
    arguments = parser(__doc__, "mbn_pools")
    arguments.add_argument("--sets", default="wine,thyroid,umist,digits,coil20,isolet1,mnist5000,documents")
    arguments.add_argument("--seeds", type=int, default=10)
    arguments.add_argument("--pools", default=",".join(map(str, POOLS)))
    arguments.add_argument("--jobs", type=int, default=None)
    args = arguments.parse_args()
    pools = [g if g == "paper" else int(g) for g in args.pools.split(",")]
    for name in args.sets.split(","):
        parts = json.loads(args.out.read_text())["parts"] if args.out.exists() else {}
        runs = parts.get(name, {}).get("result", {}).get("runs", {})
        for seed in range(args.seeds):
            for g in pools:
                if str(seed) in runs.setdefault(str(g), {}):
                    continue
                x, y, params = read_set(name, seed)
                runs[str(g)][str(seed)] = measure(x, y, seed, args.jobs, n_pools=g, **params)
                print(name, seed, g, runs[str(g)][str(seed)], flush=True)
            write_part(args.out, name, args.seed, {"runs": runs, "mean_nmi": compute_means(runs)})


def compute_means(runs: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """Return the mean NMI of each number of pools."""
    means = {g: np.mean([run["nmi"] for run in own.values()]) for g, own in runs.items() if own}
    return {g: round(float(mean), 2) for g, mean in means.items()}


if __name__ == "__main__":
    main()
