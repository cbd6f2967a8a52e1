"""Random trees and sweeps, and the oracles that they are held against."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from scalelatent.models.hcn.kernels.cpu.trees import ROOM
from scalelatent.models.hcn.kernels.windows import pairs_of


def by_enumeration(allowed: Callable[..., float], incoming: np.ndarray) -> np.ndarray:
    """Messages of a factor to its binary variables: differences of max-marginals without the variable's own.

    ``allowed`` gives the log of the factor of a configuration.
    """
    n = len(incoming)
    best = np.full((n, 2), -np.inf)
    for values in itertools.product((0, 1), repeat=n):
        score = allowed(*values)
        for i in range(n):
            rest = sum(m * v for j, (m, v) in enumerate(zip(incoming, values, strict=True)) if j != i)
            best[i, values[i]] = max(best[i, values[i]], score + rest)
    return best[:, 1] - best[:, 0]


def log_of(condition: bool) -> float:
    return 0.0 if condition else -np.inf


def is_and(a: int, b: int, below: int) -> float:
    return log_of(below == (a and b))


def is_or(*values: int) -> float:
    return log_of(values[-1] == max(values[:-1]))


def is_pool(*values: int) -> float:
    *outputs, top = values
    return -np.log(len(outputs)) if top and sum(outputs) == 1 else log_of(not top and not sum(outputs))


def draw_sweep(
    seed: int, chains: int, images: int, image: tuple[int, int, int], window: tuple[int, int], n_features: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Evidence (some of it missing), orders, beliefs of S and of W: whole units in float32."""
    rng = np.random.default_rng(seed)
    n_channels, height, width = image
    h, w = window
    pixels = (chains, images, n_channels, height, width)
    evidence = np.where(rng.random(pixels) < 0.3, 1300, -1100) * (rng.random(pixels) > 0.1)
    n = images * n_channels * height * width
    order = np.stack([rng.permutation(n) for _ in range(chains)])
    s = rng.normal(-300, 300, size=(chains, images, height - h + 1, width - w + 1, n_features))
    weights = rng.normal(-150, 300, size=(chains, n_channels, h, w, n_features))
    return (
        evidence.astype("f4"), order.astype("i4"), np.rint(s).astype("f4"), np.rint(weights).astype("f4")
    )  # fmt: skip


def no_messages(evidence: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Room for one message of each pair, zero."""
    size = pairs_of(evidence.shape[3:], w.shape[2:4], w.shape[4]) + ROOM
    return np.zeros((*evidence.shape[:3], size), np.int16)
