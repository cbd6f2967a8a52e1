"""Compare networks that combine several decays with the choice of one decay.

    python benchmarks/mbn_ensemble.py [--sets wine,thyroid,umist,digits,coil20,isolet1,mnist5000] [--seeds 3]

The decay is the ratio of the numbers of centroids in consecutive layers of a bootstrap network. Each seed
has one first layer, and above it a stack of layers for each decay of 0.1, 0.2, ..., 0.9. The results are the
NMI in percent of k-means (the best of ten starts) on as many components as classes, for these methods:

    0.1 ... 0.9     the stack of one decay; the paper uses 0.5
    auto            the stack that ``decay="auto"`` chooses
    three, nine     the concatenated codes of the stacks of 0.3, 0.5 and 0.7, or of all stacks
    agreement       the concatenated codes of the three stacks whose clusters agree most with the clusters of
                    all nine (adjusted mutual information)
    similarity      the concatenated codes of the three stacks whose similarities of pairs of rows (shares
                    of equal codes) correlate most with the similarities of all nine
    best            the stack with the best NMI, which needs the classes

Runs whose results are in the file are not repeated. Needs SCALELATENT_DATA.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from common import parser, write_part
from mbn_pools import read_set
from sklearn.cluster import KMeans

import scalelatent as sl
from scalelatent.engine.reading import as_rows
from scalelatent.evaluation import nmi
from scalelatent.models.mbn.decay import (
    DECAYS,
    choose_decay,
    code_rows,
    compute_output,
    measure_agreement,
)
from scalelatent.models.mbn.fit import plan_layers

# The method "three" combines the stacks of these decays.
COMBINED_DECAYS = (0.3, 0.5, 0.7)


def compute_code_stacks(model: Any, train: Any, seed: int, jobs: int | None) -> dict[float, np.ndarray]:
    """Return the last layer's codes (numbers of nearest centroids) by decay; all share the first layer."""
    rows, below, stacks = as_rows(train.read_x(0, len(train))), None, {}
    for decay in DECAYS:
        layers = plan_layers(model, train, decay, seed)
        below = code_rows(layers[0], rows, rows, jobs, "cpu") if below is None else below
        codes = below
        for layer in layers[1:]:
            codes = code_rows(layer, codes, codes, jobs, "cpu")
        stacks[decay] = codes
    return stacks


def correlate_pairs(codes: np.ndarray, all_codes: list[np.ndarray], seed: int) -> float:
    """Return how similarities of rows in one stack (layers of one decay) correlate with those in all stacks.

    The similarity of two rows is their share of equal codes; it is computed for 20,000 random pairs.
    """
    pairs = np.random.default_rng(seed).integers(0, len(codes), (2, 20_000))
    own = (codes[pairs[0]] == codes[pairs[1]]).mean(axis=1)
    whole = np.mean([(other[pairs[0]] == other[pairs[1]]).mean(axis=1) for other in all_codes], axis=0)
    return float(np.corrcoef(own, whole)[0, 1]) if own.std() else 0.0


def measure(name: str, seed: int, jobs: int | None) -> dict[str, Any]:
    """Return the NMI of each method for one data set and seed."""
    x, y, params = read_set(name, seed)
    classes, train = len(np.unique(y)), sl.Dataset.from_arrays(x)
    model = sl.MultilayerBootstrapNetwork(n_classes=classes, random_state=seed, n_jobs=jobs, **params)
    stacks = compute_code_stacks(model, train, seed, jobs)

    def score(decays: Any) -> tuple[float, np.ndarray]:
        codes = np.concatenate([stacks[decay] for decay in decays], axis=1)
        z = compute_output(codes, classes, "cpu")
        labels = KMeans(classes, n_init=10, random_state=seed).fit(z).labels_
        return round(100 * nmi(y, labels), 2), labels

    singles = {decay: score([decay]) for decay in DECAYS}
    nine, labels = score(DECAYS)
    agreement = {decay: measure_agreement(own, labels) for decay, (_, own) in singles.items()}
    similarity = {d: correlate_pairs(codes, list(stacks.values()), seed) for d, codes in stacks.items()}
    chosen = choose_decay(model, train, seed)
    nearest = [sorted(DECAYS, key=lambda d, by=by: -by[d])[:3] for by in (agreement, similarity)]
    return {
        **{f"{decay:g}": value for decay, (value, _) in singles.items()},
        "auto": singles[chosen][0],
        "auto_decay": chosen,
        "three": score(COMBINED_DECAYS)[0],
        "nine": nine,
        "agreement": score(nearest[0])[0],
        "similarity": score(nearest[1])[0],
        "members": nearest,
        "best": max(value for value, _ in singles.values()),
    }


def main() -> None:
    arguments = parser(__doc__, "mbn_ensemble")
    arguments.add_argument("--sets", default="wine,thyroid,umist,digits,coil20,isolet1,mnist5000")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--jobs", type=int, default=None)
    args = arguments.parse_args()
    for name in args.sets.split(","):
        parts = json.loads(args.out.read_text())["parts"] if args.out.exists() else {}
        runs = parts.get(name, {}).get("result", {}).get("runs", {})
        for seed in range(args.seeds):
            if str(seed) in runs:
                continue
            runs[str(seed)] = measure(name, seed, args.jobs)
            print(name, seed, runs[str(seed)], flush=True)
            ways = [way for way, value in runs[str(seed)].items() if isinstance(value, float)]
            means = {way: round(float(np.mean([run[way] for run in runs.values()])), 2) for way in ways}
            write_part(args.out, name, args.seed, {"runs": runs, "mean_nmi": means})


if __name__ == "__main__":
    main()
