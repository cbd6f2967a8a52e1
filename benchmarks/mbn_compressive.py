"""Replace a bootstrap network by a small network (section 5.6 of Zhang, 2018; Figures 13 and 14).

    python benchmarks/mbn_compressive.py --parts mnist [--rows 60000 --k1 8000 --clusterings 400]
    python benchmarks/mbn_compressive.py --parts mnist --fitted FOLDER       after `mbn_fit.py --keep FOLDER`
    python benchmarks/mbn_compressive.py --parts rcv1

mnist  A CompressiveMBN, a small neural network, learns the output of a bootstrap network for training
       images, with two and with ten components. The results are its explained variance on training and test
       images, NMI and accuracy of k-means on the outputs of both networks, and how many times faster it
       predicts.
rcv1   The same results for documents with five components; retrieval accuracy replaces the clusters.

Needs SCALELATENT_DATA and torch.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from common import mnist, parser, rcv1_subset, write_part

import scalelatent as sl
from scalelatent.evaluation import kmeans_scores, retrieval_accuracy


def call_timed(call: Any) -> tuple[Any, float]:
    """Call a function; return its result, and the seconds of the call."""
    begin = time.perf_counter()
    return call(), time.perf_counter() - begin


def compress(
    x: Any, z: np.ndarray, xt: Any, zt: np.ndarray, network_seconds: float, args: Any
) -> tuple[Any, dict[str, Any]]:
    """Fit the small network to outputs z of rows x; return it, its explained variance and its times.

    ``xt`` and ``zt`` are test rows and their outputs; the bootstrap network needs ``network_seconds`` seconds
    for the test rows.
    """
    small = sl.CompressiveMBN(n_epochs=args.epochs, random_state=args.seed, n_jobs=args.jobs)
    _, fit = call_timed(lambda: small.fit(x, z))
    small.transform(xt[:256])
    _, fast = call_timed(lambda: small.transform(xt))
    return small, {
        "explained_train": round(small.score(x, z), 4),
        "explained_test": round(small.score(xt, zt), 4),
        "fit_seconds": round(fit, 1),
        "predict_seconds": round(fast, 3),
        "times_faster": round(network_seconds / fast, 1),
    }


def fit_network(x: np.ndarray, xt: np.ndarray, args: Any) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Return a network's outputs for training images x and test images xt, and the seconds of both steps.

    --fitted names a folder with the outputs of an earlier fit, which are read instead.
    """
    if args.fitted:
        with np.load(args.fitted / "outputs.npz") as kept:
            z, zt, (seconds, slow) = kept["train"], kept["test"], kept["seconds"].tolist()
        if len(z) != len(x):
            raise SystemExit(f"{args.fitted} holds outputs of {len(z)} images, --rows asks for {len(x)}")
        return z, zt, seconds, slow
    model = sl.MultilayerBootstrapNetwork(
        n_clusterings=args.clusterings, n_pools="paper", k1=args.k1, decay=0.5, n_components=10, n_classes=10,
        random_state=args.seed, n_jobs=args.jobs,
    )  # fmt: skip
    z, seconds = call_timed(lambda: model.fit_transform(x))
    zt, slow = call_timed(lambda: model.transform(xt))
    return z, zt, seconds, slow


def compress_mnist(args: Any) -> dict[str, Any]:
    """Return explained variance, times, NMI and accuracy for images, with two and with ten components."""
    x, (xt, yt) = mnist(slice(0, args.rows))[0], mnist(part="test")
    z, zt, seconds, slow = fit_network(x, xt, args)
    print(f"network: {seconds:.0f} s", flush=True)
    out: dict[str, Any] = {"train": len(x), "test": len(xt), "k1": args.k1, "clusterings": args.clusterings}
    out |= {"network_fit_seconds": round(seconds, 1), "network_predict_seconds": round(slow, 2)}
    for d in (2, 10):
        small, found = compress(x, z[:, :d], xt, zt[:, :d], slow, args)
        for name, output in (("network", zt[:, :d]), ("compressive", small.transform(xt))):
            scores = kmeans_scores(output, yt, 10, restarts=20, n_jobs=args.jobs)
            found[name] = {"nmi": round(100 * scores.nmi, 2), "accuracy": round(100 * scores.accuracy, 2)}
        out[f"{d} components"] = found
        print(d, found, flush=True)
    return out


def compress_rcv1(args: Any) -> dict[str, Any]:
    """Return explained variance, times and retrieval accuracy for documents."""
    counts, topics, names = rcv1_subset()
    order = np.random.default_rng(args.seed).permutation(counts.shape[0])
    half = len(order) // 2
    train, test = np.sort(order[:half]), np.sort(order[half:])
    model = sl.MultilayerBootstrapNetwork(
        n_clusterings=200, n_pools="paper", k1=500, decay=0.5, metric="cosine", n_components=5,
        n_classes=len(names), random_state=args.seed, n_jobs=args.jobs,
    )  # fmt: skip
    z = model.fit_transform(counts[train])
    zt, slow = call_timed(lambda: model.transform(counts[test]))
    small, found = compress(counts[train], z, counts[test], zt, slow, args)
    found["network_predict_seconds"] = round(slow, 2)
    for name, output in (("network", zt), ("compressive", small.transform(counts[test]))):
        curve = retrieval_accuracy(output, topics[test], n_jobs=args.jobs)
        found[name] = {"levels": curve.levels.tolist(), "accuracy": (100 * curve.accuracy).round(2).tolist()}
    print(found, flush=True)
    return found


def main() -> None:
    parts = {"mnist": compress_mnist, "rcv1": compress_rcv1}
    arguments = parser(__doc__, "mbn_compressive")
    arguments.add_argument("--parts", default="mnist,rcv1")
    arguments.add_argument("--rows", type=int, default=60_000, help="training images")
    arguments.add_argument("--k1", type=int, default=8000)
    arguments.add_argument("--clusterings", type=int, default=400)
    arguments.add_argument("--epochs", type=int, default=20)
    arguments.add_argument("--jobs", type=int, default=None)
    arguments.add_argument(
        "--fitted", type=Path, help="folder with the outputs of an earlier fit with the same settings"
    )
    args = arguments.parse_args()
    for name in args.parts.split(","):
        write_part(args.out, name, args.seed, parts[name](args))


if __name__ == "__main__":
    main()
