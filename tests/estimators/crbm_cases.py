"""Functions for tests of conditional RBMs: they make rows and models, and compare the weights of models."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalelatent import ConditionalRBM

Pair = tuple[np.ndarray, np.ndarray]


def make_patterns(n: int, seed: int, k: int = 4, flip: float = 0.2, width: int = 24) -> Pair:
    """Return n noisy and n clean rows of k patterns; the seed draws the rows, but not the patterns.

    A bit of a noisy row differs from the clean row with probability ``flip``.
    """
    prototypes = np.random.default_rng(7).random((k, width)) < 0.5
    rng = np.random.default_rng(seed)
    v = prototypes[rng.integers(0, k, n)]
    return (v ^ (rng.random(v.shape) < flip)).astype(np.uint8), v.astype(np.uint8)


def make_rbm(**more: Any) -> ConditionalRBM:
    options: dict[str, Any] = {"n_hidden": 6, "n_epochs": 4, "batch_size": 20, "learning_rate": 0.2}
    return ConditionalRBM(**(options | {"random_state": 0, "n_jobs": 1} | more))


def assert_same(a: ConditionalRBM, b: ConditionalRBM) -> None:
    for name in ("W_", "Wvx_", "Whx_", "bv_", "bh_"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
