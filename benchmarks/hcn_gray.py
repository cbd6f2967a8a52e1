"""Networks of two layers on grey images of the two traits (appendix B, Figure 10):

    python benchmarks/hcn_gray.py [--sizes 3 7] [--p01 0.3] [--p10 0.005] [--quick]

200 images of `data make traits --blur 1 --grain 10`, without labels: 16 oriented filters make their channels,
of 3 x 3 and of 7 x 7, and 4 templates lie over 4 features of 15 x 15 (a trait of 13, and its edges on both
sides). Told of each size: errors of the four patterns, matched to the templates by the training images; which
feature is which trait (one that the trait's two templates have, and no other); weights on.

`--quick`: 60 images, 8 filters, 40 passes. Draws results/hcn_gray.png: the share of channels that are on in
each pixel of a feature, and templates by features.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from common import parser, write_part
from hcn_common import draw, tiles
from scipy.optimize import linear_sum_assignment

import scalelatent as sl
from scalelatent.data import Dataset
from scalelatent.generators.images import image_set

PATTERNS, WINDOW, TEST = 4, 15, 10_000
BLUR, GRAIN = 1, 10
TRAITS = ("square", "circle", "forward", "backward")


def traits_of(templates: np.ndarray, patterns: np.ndarray) -> dict[str, list[int]]:
    """Of each trait the features that its two templates have, and no other.

    Templates are (templates, features) of bool; ``patterns`` is the pattern of each.
    """
    shape, diagonal = patterns // 2, patterns % 2
    having = [shape == 0, shape == 1, diagonal == 0, diagonal == 1]
    return {
        name: [int(f) for f in np.flatnonzero((templates == with_it[:, None]).all(axis=0))]
        for name, with_it in zip(TRAITS, having, strict=True)
    }


def fitted(args: argparse.Namespace, size: int) -> tuple[Any, dict[str, Any]]:
    """A network of grey images, and what it found."""
    images = image_set("traits", seed=args.seed, labels="pattern", blur=BLUR, grain=GRAIN)
    n, filters = (60, 8) if args.quick else (200, 16)
    (x, y), (test, true) = images.rows(0, n), images.rows(n, n + (500 if args.quick else TEST))
    assert y is not None
    assert true is not None
    model = sl.HierarchicalCompositionalNetwork(
        [(PATTERNS, WINDOW)],
        templates=PATTERNS,
        filters=filters,
        filter_size=size,
        p01=args.p01,
        p10=args.p10,
        n_epochs=40 if args.quick else None,
        random_state=args.seed,
        n_jobs=1,
    )
    begin = time.process_time()
    model.fit(Dataset.from_arrays(x))
    seconds = time.process_time() - begin
    counts = np.zeros((PATTERNS, PATTERNS), int)
    np.add.at(counts, (model.predict(x), y), 1)
    of = linear_sum_assignment(-counts)[1]
    last = model.history_[-1]
    return model, {
        "images": n,
        "filters": filters,
        "filter_size": size,
        "p01": args.p01,
        "p10": args.p10,
        "training_error": round(float((of[model.predict(x)] != y).mean()), 6),
        "test_error": round(float((of[model.predict(test)] != true).mean()), 6),
        "features_of_traits": traits_of(model.weights_[-1].any(axis=(2, 3)), of),
        "weights_on": last["weights_on_by_layer"],
        "restarts": int(last["restart"]),
        "settled": not last["weights_changed"],
        "cpu_seconds": round(seconds, 1),
    }


def main() -> None:
    """Each size by itself."""
    arguments = parser(__doc__, "hcn_gray")
    arguments.add_argument("--sizes", type=int, nargs="+", default=[3, 7])
    arguments.add_argument("--p01", type=float, default=0.3)
    arguments.add_argument("--p10", type=float, default=0.005)
    arguments.add_argument("--quick", action="store_true")
    args = arguments.parse_args()
    lines = []
    for size in args.sizes:
        model, found = fitted(args, size)
        print(found, flush=True)
        write_part(args.out, f"{size} x {size}{' quick' if args.quick else ''}", args.seed, found)
        edges = model.weights_[0].mean(axis=1)
        features = tiles(edges / max(edges.max(), 1e-9), PATTERNS)
        templates = model.weights_[1].reshape(-1, *model.weights_[1].shape[2:])
        over = tiles(templates, PATTERNS)
        lines.append([(f"features, {size} x {size} filters", features), ("templates x features", over)])
    draw(args.out.with_suffix(".png"), lines)


if __name__ == "__main__":
    main()
