"""Measure document retrieval with bootstrap networks and with latent semantic analysis (Figure 12).

    python benchmarks/mbn_retrieval.py [--k1 500,2000] [--clusterings 200]

The data are a subset of RCV1-v2 (27,613 documents, counts of the 2,000 most frequent terms) with topics. Half
of the documents are training rows. Each document of the other half searches in the other half. The results
are the mean shares of the first 1, 3, 7, 15, … found documents that have a topic of the query. Draws
results/mbn_retrieval.png. Needs SCALELATENT_DATA.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from common import RESULTS, lsa, parser, rcv1_subset, write, write_png

import scalelatent as sl
from scalelatent.evaluation import retrieval_accuracy


def measure_curve(output: Any, topics: Any, metric: str, jobs: int | None) -> dict[str, Any]:
    """Return the retrieval accuracy in percent of one output of the test documents, and its seconds."""
    begin = time.perf_counter()
    found = retrieval_accuracy(output, topics, metric=metric, n_jobs=jobs).to_dict()
    found["accuracy"] = [round(100 * a, 2) for a in found["accuracy"]]
    return found | {"metric": metric, "seconds": round(time.perf_counter() - begin, 1)}


def main() -> None:
    arguments = parser(__doc__, "mbn_retrieval")
    arguments.add_argument("--k1", default="500,2000")
    arguments.add_argument("--clusterings", type=int, default=200)
    arguments.add_argument(
        "--components",
        type=int,
        default=5,
        help="components of the networks and of the smaller latent semantic analysis",
    )
    arguments.add_argument("--jobs", type=int, default=None)
    args = arguments.parse_args()
    counts, topics, names = rcv1_subset()
    order = np.random.default_rng(args.seed).permutation(counts.shape[0])
    half = len(order) // 2
    train, test = np.sort(order[:half]), np.sort(order[half:])
    x, xt, yt = counts[train], counts[test], topics[test]
    unlabelled = int((np.diff(yt.indptr) == 0).sum())
    results: dict[str, Any] = {
        "train": len(train),
        "test": len(test),
        "leaf_topics": len(names),
        "unlabelled_test": unlabelled,
        "curves": {},
    }
    curves = results["curves"]

    def record(name: str, output: Any, metric: str = "cosine", **more: Any) -> None:
        curves[name] = measure_curve(output, yt, metric, args.jobs) | more
        print(name, curves[name]["accuracy"], more, flush=True)

    for d in (args.components, 125):
        record(f"LSA, {d} components", lsa(d, args.seed).fit(x).transform(xt))
    record("counts, cosine", xt)
    for k1 in map(int, args.k1.split(",")):
        model = sl.MultilayerBootstrapNetwork(
            n_clusterings=args.clusterings,
            n_pools="paper",
            k1=k1,
            decay=0.5,
            metric="cosine",
            n_components=args.components,
            n_classes=len(names),
            random_state=args.seed,
            n_jobs=args.jobs,
        )
        begin = time.perf_counter()
        model.fit(x)
        fit = time.perf_counter() - begin
        begin = time.perf_counter()
        z = model.transform(xt)
        transform = time.perf_counter() - begin
        of = {"ks": model.ks_, "fit_seconds": round(fit, 1), "transform_seconds": round(transform, 1)}
        record(f"MBN, k1 = {k1:,}, {args.components} components", z, **of)
        record(f"MBN, k1 = {k1:,}, codes", model.codes(xt), "overlap")
    write(args.out, args.seed, results)
    from scalelatent.models.mbn.report_figures import plot_retrieval

    shown = {name: (curve["levels"], [a / 100 for a in curve["accuracy"]]) for name, curve in curves.items()}
    write_png(plot_retrieval(shown), RESULTS / "mbn_retrieval.png")


if __name__ == "__main__":
    main()
