"""Compare capsule regression with a small MLP, and sizes of bootstrap networks for text.

    python benchmarks/choosing.py [--parts algorithms,clusterings]

algorithms   Test error and seconds on MNIST (50,000 training and 10,000 validation images, one thread) of two
             fits of capsule regression, a classifier, and of scikit-learn's MLPClassifier. "em" is batch EM
             with the schedule of Saul (2021); "stepwise" updates the parameters after each small batch of
             rows. The MLP trains until its validation error is as small as those of both fits.
clusterings  NMI (normalised mutual information, 0 to 1) between topics and k-means clusters of documents. The
             documents are encoded by latent semantic analysis and by bootstrap networks (layers of V random
             clusterings) for several V. The documents are a sample of those of the RCV1-v2 subset that
             have one topic, among topics with at least 100 such documents.

Needs SCALELATENT_DATA.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
from common import lsa, mnist, parser, rcv1_subset, single_topics, write_part
from threadpoolctl import threadpool_limits

import scalelatent as sl
from scalelatent.evaluation import kmeans_scores

CLUSTERINGS = (5, 10, 25, 50, 100, 200, 400)


def compare_algorithms(a: Any) -> dict[str, Any]:
    """Return test error, seconds and number of passes over the rows of each algorithm on MNIST."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    x, y = mnist()
    test = mnist(part="test")
    train, validation = (x[:50_000], y[:50_000]), (x[50_000:], y[50_000:])
    out: dict[str, Any] = {}

    def record(name: str, error: float, begin: float, **more: Any) -> None:
        out[name] = {"test_error": round(error, 4), "seconds": round(time.perf_counter() - begin, 1), **more}
        print(name, out[name], flush=True)

    warm = sl.CapsuleRegression(
        architecture="multiclass", max_iter=1, n_epochs=1, n_jobs=1, random_state=a.seed
    )
    for algorithm in ("em", "stepwise"):  # Compile the kernels before the measured fits.
        warm.set_params(algorithm=algorithm).fit(x[:2000], y[:2000])
    targets = {}
    for algorithm in ("em", "stepwise"):
        model = sl.CapsuleRegression(
            architecture="multiclass",
            algorithm=algorithm,
            capsule_dim=a.dim,
            fit_intercept=False,
            ridge=0,
            n_jobs=1,
            random_state=a.seed,
        )
        begin = time.perf_counter()
        model.fit(*train, validation=validation)
        targets[algorithm] = error = float(model.best_validation_error_)
        record(algorithm, 1 - model.score(*test), begin, validation_error=error, passes=model.n_iter_)
    scaled = [(part[0].astype(np.float32) / 255, part[1]) for part in (train, validation, test)]
    mlp = MLPClassifier((a.hidden,), random_state=a.seed)
    begin, unreached = time.perf_counter(), sorted(targets, key=lambda name: -targets[name])
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for epoch in range(1, a.epochs + 1):
            order = np.random.default_rng((a.seed, epoch)).permutation(len(train[0]))
            mlp.partial_fit(scaled[0][0][order], scaled[0][1][order], classes=np.arange(10))
            error = 1 - mlp.score(*scaled[1])
            while unreached and error <= targets[unreached[0]]:
                name = f"MLP, {a.hidden} units, to the error of {unreached.pop(0)}"
                record(name, 1 - mlp.score(*scaled[2]), begin, validation_error=error, passes=epoch)
            if not unreached:
                break
    for name in unreached:
        name = f"MLP, {a.hidden} units, not as far as {name}"
        record(name, 1 - mlp.score(*scaled[2]), begin, passes=a.epochs)
    return out


def compare_clusterings(a: Any) -> dict[str, Any]:
    """Return the NMI (agreement of clusters and topics) of latent semantic analysis and of each network."""
    counts, topics, _ = rcv1_subset()
    rows, y = single_topics(topics)
    order = np.sort(np.random.default_rng(a.seed).permutation(len(rows))[: a.documents])
    x, y = counts[rows[order]], y[order]
    n = len(np.unique(y))
    out: dict[str, Any] = {"documents": len(y), "topics": n, "nmi": {}}

    def record(name: str, z: np.ndarray) -> None:
        found = kmeans_scores(z, y, restarts=a.restarts, random_state=a.seed)
        out["nmi"][name] = round(found.nmi, 4)
        print(name, out["nmi"][name], flush=True)

    record("LSA", lsa(n, a.seed).fit_transform(x))
    for v in CLUSTERINGS:
        for seed in range(a.seed, a.seed + a.seeds):
            model = sl.MultilayerBootstrapNetwork(
                n_clusterings=v,
                n_pools="paper",
                decay=0.5,
                metric="cosine",
                n_classes=n,
                random_state=seed,
                k1=a.k1,
            )
            record(f"V = {v}, seed {seed}", model.fit_transform(x))
    return out


def main() -> None:
    arguments = parser(__doc__, "choosing")
    arguments.add_argument("--parts", default="algorithms,clusterings")
    arguments.add_argument("--dim", type=int, default=8, help="dimension of a capsule")
    arguments.add_argument("--hidden", type=int, default=64, help="units of the MLP")
    arguments.add_argument("--epochs", type=int, default=60, help="largest number of epochs of the MLP")
    arguments.add_argument("--documents", type=int, default=4000)
    arguments.add_argument("--k1", type=int, default=500)
    arguments.add_argument("--restarts", type=int, default=10)
    arguments.add_argument("--seeds", type=int, default=2)
    a = arguments.parse_args()
    for part in a.parts.split(","):
        compare = {"algorithms": compare_algorithms, "clusterings": compare_clusterings}[part]
        write_part(a.out, part, a.seed, compare(a))


if __name__ == "__main__":
    main()
