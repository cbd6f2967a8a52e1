"""Fit networks of two layers to grey images of two traits (appendix B, Figure 10).

    python benchmarks/hcn_gray.py [--sizes 3 7] [--seed 0] [--unlabelled] [--passes 100]
        [--images 100] [--filters 8]

The paper is Lázaro-Gredilla et al. (2016). An image has two traits: a square or a circle, and one of two
diagonals; together they make four patterns. Oriented filters of 3 x 3 and of 7 x 7 pixels turn an image into
channels of edges; an edge is a step of at least 16 grey levels. The network has 6 features of 15 x 15,
because a trait has 13 pixels and edges on both sides. One template (combination of features) per pattern is
learned with labels or, with --unlabelled, as one of four clusters. The training images decide which cluster
is which pattern. The settings were chosen on seeds from 10 on.

The results of each filter size are the errors on 2,000 test images, the features of each trait, the number of
weights that are on, and the number of weights that changed in the last ten passes. Seed 0 with labels draws
results/hcn_gray_3.png and hcn_gray_7.png: the features, and the features that each template uses.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from common import parser, write_part
from hcn_common import arrange_tiles, draw_pictures
from scipy.optimize import linear_sum_assignment

import scalelatent as sl
from scalelatent.data import Dataset
from scalelatent.generators.images import image_set

# Numbers of patterns and of features, side of a feature in pixels, and least grey-level step of an edge.
PATTERNS, FEATURES, WINDOW, EDGE_STEP = 4, 6, 15, 16
TEST_IMAGES = 2_000
# Blur and noise of the images, in the units of `scalelatent data make traits` (--blur, --grain).
BLUR, GRAIN = 1, 10
TRAITS = ("square", "circle", "forward", "backward")


def find_traits(templates: np.ndarray, patterns: np.ndarray) -> dict[str, list[int]]:
    """Return the numbers of the features of each trait: both its templates use them, and no other one does.

    ``templates`` is bool (templates, features); ``patterns`` is the pattern (0 to 3) of each template.
    """
    shape, diagonal = patterns // 2, patterns % 2
    having = [shape == 0, shape == 1, diagonal == 0, diagonal == 1]
    return {
        name: [int(f) for f in np.flatnonzero((templates == with_it[:, None]).all(axis=0))]
        for name, with_it in zip(TRAITS, having, strict=True)
    }


def fit_network(args: argparse.Namespace, size: int) -> tuple[Any, dict[str, Any]]:
    """Fit a network with filters of ``size`` x ``size`` pixels to grey images; return it and its results."""
    images = image_set("traits", seed=args.seed, labels="pattern", blur=BLUR, grain=GRAIN)
    (x, y), (test, true) = images.rows(0, args.images), images.rows(args.images, args.images + TEST_IMAGES)
    assert y is not None
    assert true is not None
    model = sl.HierarchicalCompositionalNetwork(
        [(FEATURES, WINDOW)],
        templates=PATTERNS if args.unlabelled else 1,
        filters=args.filters,
        filter_size=size,
        threshold=EDGE_STEP,
        p01=args.p01,
        p10=args.p10,
        damping=args.damping,
        online=False,
        n_epochs=args.passes,
        random_state=args.seed,
        n_jobs=1,
    )
    begin = time.process_time()
    train = Dataset.from_arrays(x, None if args.unlabelled else y.astype(np.int64))
    model.fit(train, engine={"leaf_rows": args.images})
    seconds = time.process_time() - begin
    counts = np.zeros((PATTERNS, PATTERNS), int)
    np.add.at(counts, (model.predict(x), y), 1)
    pattern_of_cluster = linear_sum_assignment(-counts)[1] if args.unlabelled else np.arange(PATTERNS)
    last = model.history_[-1]
    return model, {
        "images": args.images,
        "filters": args.filters,
        "filter_size": size,
        "labels": not args.unlabelled,
        "passes": args.passes,
        "p01": args.p01,
        "p10": args.p10,
        "training_error": round(float((pattern_of_cluster[model.predict(x)] != y).mean()), 6),
        "test_error": round(float((pattern_of_cluster[model.predict(test)] != true).mean()), 6),
        "features_of_traits": find_traits(model.weights_[-1].any(axis=(2, 3)), pattern_of_cluster),
        "weights_on": last["weights_on_by_layer"],
        "weights_changed": int(last["weights_changed"]),
        "cpu_seconds": round(seconds, 1),
    }


def main() -> None:
    arguments = parser(__doc__, "hcn_gray")
    arguments.add_argument(
        "--sizes", type=int, nargs="+", default=[3, 7], help="sides of the filters in pixels"
    )
    arguments.add_argument("--p01", type=float, default=0.3)
    arguments.add_argument("--p10", type=float, default=0.02)
    arguments.add_argument("--damping", type=float, default=0.1)
    arguments.add_argument("--passes", type=int, default=100)
    arguments.add_argument("--images", type=int, default=100)
    arguments.add_argument("--filters", type=int, default=8)
    arguments.add_argument("--unlabelled", action="store_true", help="fit without labels: four clusters")
    args = arguments.parse_args()
    for size in args.sizes:
        model, found = fit_network(args, size)
        print(found, flush=True)
        labels = "labelled"
        if args.unlabelled:
            labels = f"clusters, {args.images} images, {args.filters} filters"
            labels += f", p01 {args.p01}, p10 {args.p10}, damping {args.damping}"
        write_part(args.out, f"{size} x {size}, {labels}, seed {args.seed}", args.seed, found)
        if args.unlabelled or args.seed:
            continue
        edges = model.weights_[0].mean(axis=1)
        features = arrange_tiles(edges / max(edges.max(), 1e-9), FEATURES)
        templates = model.weights_[1].reshape(-1, *model.weights_[1].shape[2:])
        over = arrange_tiles(templates, FEATURES)
        line = [(f"features, {size} x {size} filters", features), ("templates x features", over)]
        draw_pictures(args.out.with_name(f"{args.out.stem}_{size}.png"), [line])


if __name__ == "__main__":
    main()
