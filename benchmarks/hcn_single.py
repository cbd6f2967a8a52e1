"""Learn features of single images in batch mode (Table 1 of the paper, Figures 1, 3 and 5).

    python benchmarks/hcn_single.py [--sets bars,text] [--border 2] [--restarts 40] [--timings] [--nmf]

The paper is Lázaro-Gredilla et al. (2016). Each set has one image per seed. A fit has ten restarts, and the
restart with the best compression counts. Compression is the number of bits of the coded image divided by the
number of bits of its pixels. All seeds have the same settings, which were chosen on the seeds 100 to 105.
Each compression is compared with two others: with the features and places that generated the image ("truth"),
and with the generator's features at places that this package's decoder finds ("true_features"). The decoder
places features only inside the image, so it may find no place for a letter at an edge. A kind (building
block of the generator, such as a letter) is found if its largest overlap (intersection over union) with a
feature is at least .9. Without options, draws results/hcn_single.png of the first seed.

--border    Each image gets this number of unknown pixels on each side. They cost no bits, and features may
            reach into them.
--restarts  Number of restarts; each number has an entry of its own in the result file.
--timings   Measure CPU seconds of a fit on one thread instead.
--nmf       Measure a baseline instead, in place of the paper's NOCA: scikit-learn's NMF of all patches that
            are not empty. NMF has three times as many components as the network has features; a pixel of
            a component is on above half of its maximum. Components that do not shorten the code are dropped.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
from common import parser, write_part
from hcn_common import (
    MIN_IOU,
    arrange_tiles,
    compute_overlaps,
    compute_true_compression,
    count_found,
    draw_pictures,
)
from sklearn.decomposition import NMF
from sklearn.feature_extraction.image import extract_patches_2d

import scalelatent as sl
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.generators.images import ImageSet, image_set
from scalelatent.models.hcn.fit import make_feature_layers
from scalelatent.models.hcn.model.compression import (
    DescriptionLength,
    add_counts,
    compression,
    find_paying_features,
)
from scalelatent.models.hcn.model.decode import Decoder
from scalelatent.models.hcn.model.layer import from_features

LETTERS = {"kind": "letters", "size": (96, 96), "count": 80, "alphabet": "ABCDEFGHIJ"}


def list_settings(noise: float, p_sparsity: float, p_weight: float, **more: Any) -> dict[str, Any]:
    return {"p01": noise, "p10": noise, "p_sparsity": p_sparsity, "p_weight": p_weight, **more}


# By set: options of the generator; number and (h, w) of features; parameters; compression in Table 1 of
# Lázaro-Gredilla et al. (2016), or None if the table lacks the set.
SETS: dict[str, tuple[dict[str, Any], tuple[int, tuple[int, int]], dict[str, Any], float | None]] = {
    "bars": ({"kind": "bars"}, (3, (6, 6)), list_settings(1e-2, 1e-2, 0.1), 0.83),
    "clean bars": (
        {"kind": "bars", "noise": 0.0}, (3, (6, 6)), list_settings(1e-8, 1e-6, 0.01, n_epochs=100), None
    ),
    "symbols": ({"kind": "symbols"}, (10, (8, 8)), list_settings(1e-4, 1e-10, 0.25), 0.11),
    "letters": ({**LETTERS, "noise": 0.0}, (14, (8, 6)), list_settings(1e-3, 1e-4, 0.25), 0.38),
    "noisy letters": (
        {**LETTERS, "noise": 0.03}, (14, (8, 6)), list_settings(1e-3, 1e-6, 0.25, damping=0.8), 0.73
    ),
    "text": ({"kind": "text"}, (28, (7, 5)), list_settings(1e-3, 1e-4, 0.25, damping=0.8), 0.28),
}  # fmt: skip


# Value of an unknown pixel (0 and 1 are off and on), and default number of restarts of a fit.
UNKNOWN, RESTARTS = 2, 10


def draw_image(name: str, seed: int, border: int) -> tuple[ImageSet, Dataset]:
    """Return an image generator, and its first image with ``border`` unknown pixels on each side."""
    given = dict(SETS[name][0])
    images = image_set(given.pop("kind"), seed=seed, **given)
    x = np.pad(images.rows(0, 1)[0], ((0, 0), (border,) * 2, (border,) * 2), constant_values=UNKNOWN)
    return images, Dataset.from_arrays(x)


def remove_border(picture: np.ndarray, border: int) -> np.ndarray:
    """Return a picture (h, w) without its border."""
    h, w = picture.shape
    return picture[border : h - border, border : w - border]


def make_estimator(name: str, seed: int, restarts: int) -> sl.HierarchicalCompositionalNetwork:
    _, features, more, _ = SETS[name]
    how = {"online": False, "n_epochs": 60, **more}
    return sl.HierarchicalCompositionalNetwork(
        [features], **how, missing=UNKNOWN, n_restarts=restarts, random_state=seed, n_jobs=1
    )


def count_placed_kinds(images: ImageSet) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the building blocks in the first image, and how often each of them occurs."""
    kinds = images.truth(0, 1)[0][:, 0]
    found: tuple[np.ndarray, np.ndarray] = np.unique(kinds[kinds >= 0], return_counts=True)
    return found


def describe_image(name: str, ds: Dataset, seed: int, features: np.ndarray) -> tuple[float, np.ndarray]:
    """Place features (n, 1, h, w) in an image; return the compression, and which features save bits."""
    layer = make_feature_layers(make_estimator(name, seed, 1), (1, *ds.feature_shape))[0]
    layer = replace(layer, n_features=len(features))
    decoder, backend = Decoder(layer, from_features(features)), make_backend("cpu")
    evidence, rows = layer.compute_evidence(ds.read_x(0, len(ds))), np.arange(len(ds))
    stats = Stats.zeros(DescriptionLength(decoder).layout())
    add_counts(decoder, evidence, decoder.decode(evidence, rows, backend)[0], backend, stats)
    paying = find_paying_features(layer, decoder.weights, stats)
    return compression(layer, decoder.weights, stats), paying


def compress_by_true_features(name: str, images: ImageSet, ds: Dataset, seed: int) -> float:
    """Return the compression by the generator's features, centred in windows, where the decoder puts them."""
    kinds, window = images.features[count_placed_kinds(images)[0]], SETS[name][1][1]
    given = np.zeros((len(kinds), 1, *window), bool)
    for feature, kind in zip(given[:, 0], kinds, strict=True):
        h, w = (int(np.flatnonzero(kind.any(axis=side)).max()) + 1 for side in (1, 0))
        top, left = (window[0] - h) // 2, (window[1] - w) // 2
        feature[top : top + h, left : left + w] = kind[:h, :w]
    return describe_image(name, ds, seed, given)[0]


def cut_patches(name: str, images: ImageSet, ds: Dataset) -> np.ndarray:
    """Return all patches of the size of a feature that are not empty, as rows."""
    x = ds.read_x(0, 1).reshape(images.image_shape)
    found = extract_patches_2d(x, SETS[name][1][1]).astype(np.float64)
    return found.reshape(len(found), -1)[found.any(axis=(1, 2))]


def learn_by_nmf(name: str, seed: int) -> dict[str, Any]:
    """Learn features by NMF of the patches of an image; return compression and found building blocks."""
    images, ds = draw_image(name, seed, 0)
    count, window = SETS[name][1]
    begin = time.process_time()
    model = NMF(3 * count, init="random", max_iter=500, random_state=seed).fit(cut_patches(name, images, ds))
    parts = model.components_
    features = (parts > 0.5 * parts.max(axis=1, keepdims=True)).reshape(-1, 1, *window)
    features = np.unique(features[features.any(axis=(1, 2, 3))], axis=0)
    seconds = time.process_time() - begin
    for _ in range(20):
        length, paying = describe_image(name, ds, seed, features)
        if paying.all() or not paying.any():
            break
        features = features[paying]
    if not paying.any():
        length = 1.0  # Without features, the code has as many bits as the pixels.
    kinds = images.features[count_placed_kinds(images)[0]]
    return {
        "seed": seed,
        "compression": round(length, 4),
        "kinds": len(kinds),
        "found": count_found(features, kinds),
        "features_used": int(paying.sum()),
        "cpu_seconds": round(seconds, 2),
    }


def fit_image(name: str, seed: int, args: Any) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Fit one image; return the results, and pictures: image, features, places, reconstruction."""
    images, ds = draw_image(name, seed, args.border)
    x, clean = images.rows(0, 1)[0], images.clean(0, 1)
    model = make_estimator(name, seed, args.restarts).fit(ds)
    kinds, often = count_placed_kinds(images)
    used = model.weights_[0][model.used_[0]]
    has = compute_overlaps(used, images.features[kinds]) >= MIN_IOU
    made = remove_border(model.reconstruct(ds)[0, 0], args.border)
    truth = compute_true_compression(images, 1)
    found = {
        "seed": seed,
        "compression": round(model.compression_, 4),
        "truth": round(truth, 4),
        "true_features": round(compress_by_true_features(name, images, ds, seed), 4),
        "over_truth": round(model.compression_ / truth, 4),
        "kinds": len(kinds),
        "found": count_found(used, images.features[kinds]),
        "kinds_placed_twice": int((often > 1).sum()),
        "found_of_these": int(has[often > 1].sum()),
        "features_used": len(used),
        "wrong_pixels": int((made != clean[0]).sum()),
        "noisy_pixels": int((x != clean).sum()),
    }
    places = model.transform(ds)[0].max(axis=2)
    return found, [1 - x[0], arrange_tiles(used[:, 0], min(len(used), 7)), 1 - places, 1 - made]


def summarise(fits: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians, sums and worst values of the results over the seeds, and numbers of images."""

    columns = {key: [fit[key] for fit in fits] for key in fits[0]}

    def differences(a: str, b: str) -> list[float]:
        return [x - y for x, y in zip(columns[a], columns[b], strict=True)]

    over = columns["over_truth"]
    nearer = [difference < 0 for difference in differences("wrong_pixels", "noisy_pixels")]
    return {
        **{
            key: round(float(np.median(columns[key])), 4) for key in ("compression", "truth", "true_features")
        },
        "over_truth": [round(float(v), 3) for v in (np.median(over), max(over))],
        "kinds": sum(columns["kinds"]),
        "found": sum(columns["found"]),
        "images_with_all_kinds": differences("kinds", "found").count(0),
        "images_with_all_kinds_placed_twice": differences("kinds_placed_twice", "found_of_these").count(0),
        "images_shorter_than_by_true_features": sum(
            fit["compression"] <= fit["true_features"] for fit in fits
        ),
        "images_nearer_to_clean": sum(nearer) if any(columns["noisy_pixels"]) else None,
    }


def time_fits(name: str, seed: int, args: Any) -> float:
    ds, model = draw_image(name, seed, args.border)[1], make_estimator(name, seed, args.restarts)
    make_estimator(name, seed, 1).fit(ds)  # The first fit compiles the kernels.
    begin = time.process_time()
    model.fit(ds)
    return round(time.process_time() - begin, 2)


def main() -> None:
    arguments = parser(__doc__, "hcn_single")
    arguments.add_argument("--sets", default=",".join(SETS), help="names of sets, separated by commas")
    arguments.add_argument("--seeds", type=int, default=10, help="number of seeds, from --seed on")
    arguments.add_argument(
        "--restarts",
        type=int,
        default=RESTARTS,
        help="restarts per fit; the one with the best compression counts",
    )
    arguments.add_argument("--border", type=int, default=0, help="unknown pixels on each side of the image")
    arguments.add_argument("--timings", action="store_true", help="measure CPU seconds instead")
    arguments.add_argument("--nmf", action="store_true", help="measure the NMF baseline instead")
    args = arguments.parse_args()
    seeds, lines = range(args.seed, args.seed + args.seeds), []
    border = f", border of {args.border}" if args.border else ""
    border += f", {args.restarts} restarts" if args.restarts != RESTARTS else ""
    if args.nmf:
        for name in args.sets.split(","):
            fits = [learn_by_nmf(name, seed) for seed in seeds]
            print(name, fits, flush=True)
            write_part(args.out, f"nmf, {name}", args.seed, {"fits": fits})
        return
    if args.timings:
        found = {name: [time_fits(name, seed, args) for seed in seeds] for name in args.sets.split(",")}
        print(found)
        write_part(args.out, f"seconds{border}", args.seed, found)
        return
    for name in args.sets.split(","):
        done = [fit_image(name, seed, args) for seed in seeds]
        fits = [fit for fit, _ in done]
        reported = {"paper": SETS[name][3], **summarise(fits), "fits": fits}
        lines.append([(name if i == 0 else "", picture) for i, picture in enumerate(done[0][1])])
        print(name, {k: v for k, v in reported.items() if k != "fits"}, flush=True)
        write_part(args.out, f"{name}{border}", args.seed, reported)
    if not border:
        draw_pictures(args.out.with_suffix(".png"), lines, ("image", "features", "places", "reconstruction"))


if __name__ == "__main__":
    main()
