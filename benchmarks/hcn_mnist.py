"""Learn features of MNIST digits online without labels, and classify digits by them.

    python benchmarks/hcn_mnist.py [--rows 60000] [--parts 32x8,32x12,64x10]
    python benchmarks/hcn_mnist.py --folder FOLDER --rows 1000000

A pixel is 1 if its grey value is above 127. The name of a part, such as 32x8, is the number and the side of
the features. A fit has one epoch of --rows training images. More than 60,000 images are infinite digits
(random deformations) of MNIST rows 0:50000, which are written to FOLDER once.

The results are the compression of the first --test-rows test images, and two test errors of logistic
regression. Compression is the number of bits of the coded images divided by the number of bits of their
pixels. One regression uses the places where features are found: whether a feature is within three places of
every third place. The other one uses the pixels. Both are fitted on the first --labelled training images, and
their penalty is chosen on the images that follow. Draws results/hcn_mnist_FEATURESxSIZE.png. Needs
SCALELATENT_DATA.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from common import infinite_digits, mnist, parser, write_part
from hcn_common import arrange_tiles, draw_pictures
from sklearn.linear_model import LogisticRegression

import scalelatent as sl
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.models.hcn.model.compression import DescriptionLength, add_counts, compression

THRESHOLD = 127
PENALTIES = (0.01, 0.1)


def pool_features(s: np.ndarray, reach: int = 3, step: int = 3) -> np.ndarray:
    """Return the largest value of each feature within ``reach`` places of every ``step``-th place.

    ``s`` is (rows, h, w, features). The result is (rows, chosen places * features).
    """
    wide = np.pad(s, ((0, 0), (reach, reach), (reach, reach), (0, 0)))
    parts = [
        wide[:, i : i + 2 * reach + 1, j : j + 2 * reach + 1].max(axis=(1, 2))
        for i in range(0, s.shape[1], step)
        for j in range(0, s.shape[2], step)
    ]
    return np.concatenate(parts, axis=1)


def measure_errors(given: dict[str, np.ndarray], labels: dict[str, np.ndarray]) -> float:
    """Return the test error of logistic regression with the penalty that is best on the validation rows."""
    fits = []
    for penalty in PENALTIES:
        model = LogisticRegression(C=penalty, max_iter=200).fit(given["train"], labels["train"])
        fits.append((model.score(given["validation"], labels["validation"]), model))
    _, best = max(fits, key=lambda fit: fit[0])
    return round(float(1 - best.score(given["test"], labels["test"])), 4)


def describe_images(
    model: sl.HierarchicalCompositionalNetwork, on: np.ndarray, s: np.ndarray
) -> tuple[float, np.ndarray]:
    """Return the compression of images by the features found in them, and the images that the features draw.

    ``on`` are binary images (n, pixels); ``s`` is 1 where a feature was found (n, h, w, features).
    """
    layer, decoder, backend = model._network.layer, model._decoder(), make_backend("cpu")
    stats = Stats.zeros(DescriptionLength(decoder).layout())
    evidence = layer.compute_evidence(on * np.float32(THRESHOLD + 1))
    for a in range(0, len(on), 256):
        part = slice(a, a + 256)
        add_counts(decoder, evidence[part], s[part], backend, stats)
    made = decoder.cover_counts(s, backend) > 0
    return compression(layer, decoder.weights, stats), made.reshape(on.shape)


def load_images(args: Any) -> Any:
    """Return ``args.rows`` MNIST images, or above 60,000 random deformations of them, as a dataset."""
    if args.rows <= 60_000:
        return Dataset.from_arrays(mnist(slice(0, args.rows))[0].reshape(-1, 28, 28))
    if args.folder is None:
        raise SystemExit("more than 60,000 images are written to a folder: set --folder FOLDER")
    return infinite_digits(args.folder, args.rows, args.seed)[0]


def run_part(name: str, args: Any) -> dict[str, Any]:
    """Fit a network with the features of ``name``, such as 32x8; draw them, and return its results."""
    n_features, size = map(int, name.split("x"))
    model = sl.HierarchicalCompositionalNetwork(
        [(n_features, (size, size))],
        p01=args.p01,
        p10=args.p10,
        p_weight=args.p_weight,
        p_sparsity=args.p_sparsity,
        forgetting=args.forgetting,
        n_epochs=1,
        threshold=THRESHOLD,
        image_shape=(28, 28),
        random_state=args.seed,
        n_jobs=args.jobs,
    )
    begin = time.perf_counter()
    model.fit(load_images(args))
    seconds = time.perf_counter() - begin
    n = args.labelled
    rows = {
        "train": mnist(slice(0, n)),
        "validation": mnist(slice(n, n + n // 5)),
        "test": mnist(part="test"),
    }
    rows["test"] = tuple(a[: args.test_rows] for a in rows["test"])
    labels = {key: y for key, (_, y) in rows.items()}
    x = {key: x for key, (x, _) in rows.items()}
    s = {key: model.transform(x[key]) for key in x}
    on = x["test"] > THRESHOLD
    sent, made = describe_images(model, on, s["test"])
    found = {
        "images": args.rows,
        "features": [n_features, size],
        "features_used": int(model.used_[0].sum()),
        "compression_training": round(model.compression_, 4),
        "compression_test": round(sent, 4),
        "placed_in_a_test_image": round(float(s["test"].sum(axis=(1, 2, 3)).mean()), 2),
        "wrong_pixels": round(float((made != on).mean()), 4),
        "pixels_on": round(float(on.mean()), 4),
        "labelled": n,
        "test_images": len(on),
        "error_from_places": measure_errors({key: pool_features(v) for key, v in s.items()}, labels),
        "error_from_pixels": measure_errors({key: v > THRESHOLD for key, v in x.items()}, labels),
        "settings": {
            key: getattr(model, key) for key in ("p01", "p10", "p_weight", "p_sparsity", "forgetting")
        },
        **({"fit_seconds": round(seconds, 1)} if args.timings else {}),
    }
    features = model.weights_[0][model.used_[0]][:, 0]
    shown = [
        ("features", arrange_tiles(features, 8)),
        ("test images", arrange_tiles(on[:16].reshape(-1, 28, 28), 4)),
    ]
    shown.append(("what the features make", arrange_tiles(made[:16].reshape(-1, 28, 28), 4)))
    draw_pictures(args.out.with_name(f"{args.out.stem}_{name}.png"), [shown])
    print(name, found, flush=True)
    return found


def main() -> None:
    arguments = parser(__doc__, "hcn_mnist")
    arguments.add_argument(
        "--parts", default="32x8,32x12,64x10", help="numbers and sides of features, separated by commas"
    )
    arguments.add_argument("--rows", type=int, default=60_000, help="training images")
    arguments.add_argument(
        "--labelled", type=int, default=5_000, help="training images with labels for logistic regression"
    )
    arguments.add_argument("--test-rows", type=int, default=2_000)
    arguments.add_argument("--p01", type=float, default=1e-3)
    arguments.add_argument("--p10", type=float, default=1e-3)
    arguments.add_argument("--p-weight", type=float, default=0.3)
    arguments.add_argument("--p-sparsity", type=float, default=1e-4)
    arguments.add_argument("--forgetting", type=float, default=0.98)
    arguments.add_argument("--jobs", type=int, default=1)
    arguments.add_argument("--folder", type=Path, help="folder of infinite digits, for more than 60,000 rows")
    arguments.add_argument("--timings", action="store_true", help="write the seconds of the fit as well")
    args = arguments.parse_args()
    for name in args.parts.split(","):
        key = name if args.rows <= 60_000 else f"{name}/infinite"
        write_part(args.out, key, args.seed, run_part(name, args))


if __name__ == "__main__":
    main()
