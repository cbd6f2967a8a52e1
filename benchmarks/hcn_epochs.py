"""Measure the compression of held-out images after each epoch of online learning.

    python benchmarks/hcn_epochs.py

Compression is the number of bits of the coded images divided by the number of bits of their pixels. By
default, an estimator runs as many epochs as it needs to read at least 3,000 images. The results have
the compression after each epoch, up to twice the default number of epochs. The held-out images are 200
letter images (AKSTX, 24 x 24, 3 % noise), or every fifth digit of scikit-learn; values above 7 are on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common import parser, write_part
from sklearn.datasets import load_digits

import scalelatent as sl
from scalelatent.generators.images import image_set

# By default, an estimator runs as many epochs as it needs to read at least this many images.
DEFAULT_ROWS = 3_000


def list_sets() -> dict[str, tuple[dict[str, Any], np.ndarray, np.ndarray]]:
    """Return parameters, training images and held-out images of each data set."""
    letters = image_set("letters", alphabet="AKSTX", count=5, size=(24, 24), noise=0.03, seed=3)
    x, _ = letters.rows(0, 1_500)
    held, _ = letters.rows(5_000, 5_200)
    digits = (load_digits().images > 7).astype(np.uint8)
    of_digits = np.arange(len(digits)) % 5 == 0
    train, test = digits[~of_digits], digits[of_digits]
    how = {"layers": [(6, (8, 6))]}
    return {
        "letters, 300 images": (how, x[:300], held),
        "letters, 1,500 images": (how, x, held),
        "digits 8 x 8, 300 images": ({}, train[:300], test),
        "digits 8 x 8, 1,437 images": ({}, train, test),
    }


def main() -> None:
    arguments = parser(__doc__, "hcn_epochs")
    arguments.add_argument(
        "--seeds", type=int, default=3, help="number of fits of each set, with seeds from --seed on"
    )
    args = arguments.parse_args()
    for name, (how, x, held) in list_sets().items():
        epochs = -(-DEFAULT_ROWS // len(x))
        found = []
        for seed in range(args.seed, args.seed + args.seeds):
            model = sl.HierarchicalCompositionalNetwork(
                n_epochs=2 * epochs, random_state=seed, n_jobs=1, **how
            ).fit(x, validation=held)
            found.append([round(record["compression"], 4) for record in model.history_])
        print(name, epochs, found, flush=True)
        write_part(args.out, name, args.seed, {"default_epochs": epochs, "compression": found})


if __name__ == "__main__":
    main()
