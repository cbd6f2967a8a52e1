"""Compare methods that choose a decay without labels, and the seconds that they take.

    python benchmarks/mbn_decay.py [--sets wine,thyroid,umist,coil20] [--seeds 10]

The decay is the ratio of the numbers of centroids in consecutive layers of a bootstrap network. For each
decay, four small networks are fitted to at most 1,000 rows of each data set, as decay="auto" does: two with
all features, and two with half of the features. The NMI of a decay compares the classes with k-means on the
output of the first two networks. Each method chooses a decay. Its loss is the NMI of the best decay minus
the NMI of the chosen decay, in percentage points. The methods are:

    outputs      the best linear centred kernel alignment of the outputs of two seeds
    silhouette   the best silhouette of the clusters in the output
    seeds        the best adjusted mutual information between the clusters of two seeds with all features
    halves       the same score between a network with all features and one with half of the features
    grid         the best mean of the five agreements of seeds and halves, over all decays
    auto         the best such mean over the decays that decay="auto" tries before it stops
    tolerant     among decays within one standard error of "grid", the one nearest to 0.5

Each fixed decay has a loss as well. "cpu_seconds" are the seconds of the small networks and their scores,
for "grid" and for "auto". Needs SCALELATENT_DATA, and about five seconds of one core for each set and seed.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from common import parser, write
from mbn_clustering import load_rows as load_all_rows

import scalelatent as sl
from scalelatent.engine.threads import single_threaded
from scalelatent.evaluation import nmi
from scalelatent.models.mbn import decay as choice
from scalelatent.models.mbn.model.layers import Layer

# Methods that choose the decay with the largest score; each method has the name of its score.
CRITERIA = ("outputs", "silhouette", "seeds", "halves", "grid")


def load_rows(name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most 1,000 rows of a data set, and their classes."""
    from sklearn import datasets

    toys = {"iris": datasets.load_iris, "cancer": datasets.load_breast_cancer, "digits": datasets.load_digits}
    x, y = toys[name](return_X_y=True) if name in toys else load_all_rows(name, 0)
    few = np.sort(np.random.default_rng(seed).permutation(len(x))[: choice.SAMPLE_ROWS])
    return np.ascontiguousarray(x[few]), y[few]


def compute_alignment(a: np.ndarray, b: np.ndarray) -> float:
    """Return the linear centred kernel alignment of two outputs (rows, components), from 0 to 1."""
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    own = np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b)
    return float(np.linalg.norm(a.T @ b) ** 2 / own) if own else 0.0


def judge_decays(x: np.ndarray, y: np.ndarray, seed: int) -> dict[float, dict[str, float]]:
    """Return the scores of each decay, its NMI with the classes, and CPU seconds."""
    from sklearn.metrics import silhouette_score

    begin = time.process_time()
    k, train = len(np.unique(y)), sl.Dataset.from_arrays(x)
    model = sl.MultilayerBootstrapNetwork(n_classes=k, n_jobs=1)
    schedules = {decay: choice._choose_schedule(model, len(x), decay) for decay in choice.DECAYS}
    firsts = choice._make_first_layers(model, train, len(x), schedules[choice.DECAYS[0]][0], seed)
    below, found = [choice.code_rows(first, x, x, 1, "cpu") for first in firsts], {}
    for decay, ks in schedules.items():
        labels = [
            choice._cluster_rows(model, first, ks, codes, seed)[0]
            for first, codes in zip(firsts, below, strict=True)
        ]
        seeds, *halves = (
            choice.measure_agreement(labels[a], labels[b])
            for a, b in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3))
        )
        seconds, begin = time.process_time() - begin, time.process_time()
        z = [compute_output(first, ks, codes, k) for first, codes in zip(firsts[:2], below, strict=False)]
        found[decay] = {
            "nmi": float(np.mean([nmi(y, own) for own in labels[:2]])),
            "outputs": compute_alignment(*z),
            "silhouette": float(silhouette_score(z[0], labels[0])) if len(np.unique(labels[0])) > 1 else 0.0,
            "seeds": seeds,
            "halves": float(np.mean(halves)),
            "grid": float(np.mean([seeds, *halves])),
            "error": float(np.std([seeds, *halves], ddof=1) / 5**0.5),
            "seconds": seconds,
        }
        begin = time.process_time()
    return found


def compute_output(first: Layer, ks: tuple[int, ...], codes: np.ndarray, d: int) -> np.ndarray:
    """Return the output (rows, d) of a small network from the ``codes`` of its first layer.

    Codes are the numbers of the nearest centroids; ``ks`` has the number of centroids of each layer.
    """
    for layer in choice._make_upper_layers(first, ks):
        codes = choice.code_rows(layer, codes, codes, 1, "cpu")
    return choice.compute_output(codes, d, "cpu")


def choose_decays(run: dict[float, dict[str, float]]) -> dict[str, float]:
    """Return the decay that each method chooses; ``run`` has the scores of one seed by decay."""
    chosen = {name: max(run, key=lambda d, n=name: run[d][n]) for name in CRITERIA}  # type: ignore[misc]
    tried = list_tried_decays(run)
    chosen["auto"] = max(tried, key=lambda d: run[d]["grid"])
    best = run[chosen["grid"]]
    near = [d for d in run if run[d]["grid"] >= best["grid"] - best["error"]]
    return chosen | {"tolerant": min(near, key=lambda d: abs(d - 0.5))}


def list_tried_decays(run: dict[float, dict[str, float]]) -> list[float]:
    """Return the decays that decay="auto" tries.

    The trials stop after a decay of at least 0.5 whose score is over MAX_SCORE_DROP below the best so far.
    """
    best = 0.0
    for count, (decay, found) in enumerate(run.items(), 1):
        best = max(best, found["grid"])
        if decay >= 0.5 and found["grid"] < best - choice.MAX_SCORE_DROP:
            return list(run)[:count]
    return list(run)


def compute_losses(runs: list[dict[float, dict[str, float]]]) -> dict[str, float]:
    """Return the loss of each method (mean over seeds) and each fixed decay, in percentage points of NMI.

    The loss is the NMI (mean over seeds) of the best fixed decay minus that of the decay used.
    """
    scores = {d: float(np.mean([run[d]["nmi"] for run in runs])) for d in choice.DECAYS}
    best, chosen = max(scores.values()), [choose_decays(run) for run in runs]
    lost = {name: float(np.mean([best - scores[own[name]] for own in chosen])) for name in chosen[0]}
    return {k: round(100 * v, 2) for k, v in (lost | {f"{d:g}": best - v for d, v in scores.items()}).items()}


def main() -> None:
    arguments = parser(__doc__, "mbn_decay")
    arguments.add_argument("--sets", default="wine,thyroid,umist,isolet1,coil20,mnist5000,iris,cancer,digits")
    arguments.add_argument("--seeds", type=int, default=10)
    args = arguments.parse_args()
    result: dict[str, Any] = {"nmi": {}, "chosen": {}, "points_lost": {}, "cpu_seconds": {}}
    for name in args.sets.split(","):
        runs = []
        for seed in range(args.seeds):
            with single_threaded():
                runs.append(judge_decays(*load_rows(name, seed), seed))
        means = {f"{d:g}": round(100 * float(np.mean([r[d]["nmi"] for r in runs])), 2) for d in choice.DECAYS}
        result["nmi"][name], result["points_lost"][name] = means, compute_losses(runs)
        chosen = [choose_decays(run) for run in runs]
        result["chosen"][name] = {way: [own[way] for own in chosen] for way in ("grid", "auto", "tolerant")}
        tried = [(run, list(run), list_tried_decays(run)) for run in runs]
        seconds = [[sum(run[d]["seconds"] for d in some) for some in both] for run, *both in tried]
        result["cpu_seconds"][name] = dict(
            zip(("grid", "auto"), np.median(seconds, axis=0).round(2).tolist(), strict=True)
        )
        print(name, *(result[part][name] for part in ("chosen", "points_lost", "cpu_seconds")), flush=True)
    table = result["points_lost"].values()
    result["mean_points_lost"] = {
        k: round(float(np.mean([row[k] for row in table])), 2) for k in next(iter(table))
    }
    print(result["mean_points_lost"])
    write(args.out, args.seed, result)


if __name__ == "__main__":
    main()
