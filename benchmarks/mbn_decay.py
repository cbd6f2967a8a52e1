"""Compare criteria that choose a decay without labels.

    python benchmarks/mbn_decay.py [--sets wine,thyroid,umist,coil20] [--seeds 3]

The small networks of decay="auto" are fitted for each decay to at most 1,000 rows of each data set: two
networks with all features, and two with half of the features. The NMI of a decay compares the classes with
k-means on the output of the first two networks. Each criterion chooses a decay. Its loss is the NMI of the
best decay minus the NMI of the chosen decay, in points. The criteria are:

    outputs      linear centred kernel alignment of the outputs of two seeds
    silhouette   silhouette of the clusters in the output
    seeds        adjusted mutual information between the clusters of two seeds with all features
    halves       adjusted mutual information between a network with all features and one with half of them
    auto         mean of the five agreements of seeds and halves, which decay="auto" uses

Each fixed decay of the grid has a loss as well. Needs SCALELATENT_DATA, and half a minute of one core for
each set and seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common import parser, write
from mbn_clustering import load
from sklearn.cluster import KMeans

import scalelatent as sl
from scalelatent.engine.threads import single_threaded
from scalelatent.evaluation import nmi
from scalelatent.models.mbn import decay as choice

CRITERIA = ("outputs", "silhouette", "seeds", "halves", "auto")


def rows_of(name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most 1,000 rows of a data set, and their classes."""
    from sklearn import datasets

    toys = {"iris": datasets.load_iris, "cancer": datasets.load_breast_cancer, "digits": datasets.load_digits}
    x, y = toys[name](return_X_y=True) if name in toys else load(name, 0)
    few = np.sort(np.random.default_rng(seed).permutation(len(x))[: choice.SAMPLE_ROWS])
    return np.ascontiguousarray(x[few]), y[few]


def alignment(a: np.ndarray, b: np.ndarray) -> float:
    """Return linear centred kernel alignment of two outputs, 0 to 1."""
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    own = np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b)
    return float(np.linalg.norm(a.T @ b) ** 2 / own) if own else 0.0


def judged(x: np.ndarray, y: np.ndarray, seed: int) -> dict[float, dict[str, float]]:
    """Return the criteria and the NMI of each decay."""
    from sklearn.metrics import silhouette_score

    k, train = len(np.unique(y)), sl.Dataset.from_arrays(x)
    model = sl.MultilayerBootstrapNetwork(n_classes=k)
    schedules = {decay: choice._choose_schedule(model, len(x), decay) for decay in choice.GRID}
    outputs: dict[float, list[np.ndarray]] = {decay: [] for decay in choice.GRID}
    for first in choice._make_first_layers(model, train, len(x), schedules[choice.GRID[0]][0], seed):
        below = choice.code_rows(first, x, x, None, "cpu")
        for decay, ks in schedules.items():
            codes = below
            for layer in choice._make_upper_layers(first, ks):
                codes = choice.code_rows(layer, codes, codes, None, "cpu")
            outputs[decay].append(choice.compute_output(codes, k, "cpu"))
    found = {}
    for decay, z in outputs.items():
        labels = [
            KMeans(k, n_init=choice.RESTARTS, random_state=seed % 2**32).fit(rows).labels_ for rows in z
        ]
        seeds = choice.measure_agreement(labels[0], labels[1])
        halves = float(
            np.mean([choice.measure_agreement(labels[a], labels[b]) for a in (0, 1) for b in (2, 3)])
        )
        found[decay] = {
            "nmi": float(np.mean([nmi(y, own) for own in labels[:2]])),
            "outputs": alignment(z[0], z[1]),
            "silhouette": float(silhouette_score(z[0], labels[0])) if len(np.unique(labels[0])) > 1 else 0.0,
            "seeds": seeds,
            "halves": halves,
            "auto": (seeds + 4 * halves) / 5,
        }
    return found


def losses(runs: list[dict[float, dict[str, float]]]) -> dict[str, float]:
    """Return the mean loss over seeds of each criterion and each fixed decay, in points of NMI."""
    scores = {d: float(np.mean([run[d]["nmi"] for run in runs])) for d in choice.GRID}
    best = max(scores.values())
    lost = {
        name: float(np.mean([best - scores[max(run, key=lambda d, n=name: run[d][n])] for run in runs]))
        for name in CRITERIA
    }
    return {k: round(100 * v, 2) for k, v in (lost | {f"{d:g}": best - v for d, v in scores.items()}).items()}


def main() -> None:
    """Run all data sets, and write one table."""
    arguments = parser(__doc__, "mbn_decay")
    arguments.add_argument("--sets", default="wine,thyroid,umist,isolet1,coil20,mnist5000,iris,cancer,digits")
    arguments.add_argument("--seeds", type=int, default=3)
    args = arguments.parse_args()
    result: dict[str, Any] = {"nmi": {}, "chosen": {}, "points_lost": {}}
    for name in args.sets.split(","):
        runs = []
        for seed in range(args.seeds):
            with single_threaded():
                runs.append(judged(*rows_of(name, seed), seed))
        scores = {f"{d:g}": round(100 * float(np.mean([r[d]["nmi"] for r in runs])), 2) for d in choice.GRID}
        result["nmi"][name], result["points_lost"][name] = scores, losses(runs)
        result["chosen"][name] = [max(run, key=lambda d: run[d]["auto"]) for run in runs]  # type: ignore[arg-type]
        print(name, result["chosen"][name], result["points_lost"][name], flush=True)
    table = result["points_lost"].values()
    result["mean_points_lost"] = {
        k: round(float(np.mean([row[k] for row in table])), 2) for k in next(iter(table))
    }
    print(result["mean_points_lost"])
    write(args.out, args.seed, result)


if __name__ == "__main__":
    main()
