"""First components of EM: k-means++ centres of a sample of each class, and random bases."""

from __future__ import annotations

import numpy as np

from scalelatent.kernels.streams import stream

from .components import Components
from .m_steps import orthonormalise

# The sample has this many rows per component, and at least this many rows in total.
SAMPLE_ROWS, LEAST_ROWS = 20, 2000


def seed_centres(rows: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """Choose k rows as centres by greedy k-means++: each is the best of a few draws.

    D. Arthur, S. Vassilvitskii, "k-means++: the advantages of careful seeding" (2007).

    Raises
    ------
    ValueError
        There are fewer rows than centres.
    """
    n = len(rows)
    if n < k:
        raise ValueError(f"{k} components need at least {k} rows; there are {n}")
    x = rows.astype(np.float64)
    lengths = (x * x).sum(axis=1)
    chosen = [int(rng.integers(n))]
    gaps = np.maximum(lengths - 2.0 * (x @ x[chosen[0]]) + lengths[chosen[0]], 0.0)
    for _ in range(1, k):
        total = np.cumsum(gaps)
        if total[-1] > 0:
            drawn = np.searchsorted(total, rng.random(2 + int(np.log(k))) * total[-1], side="right")
        else:  # there are fewer distinct rows than centres
            drawn = rng.integers(n, size=1)
        drawn = np.minimum(drawn, n - 1)
        to = np.maximum(lengths[:, None] - 2.0 * (x @ x[drawn].T) + lengths[drawn], 0.0)
        best = np.minimum(gaps[:, None], to)
        j = int(best.sum(axis=0).argmin())
        chosen.append(int(drawn[j]))
        gaps = best[:, j]
    return x[chosen]


def random_bases(k: int, p: int, q: int, seed: int) -> np.ndarray:
    """Return random orthonormal columns, float64 (k, p, q)."""
    drawn = stream(seed, "bases").normal(size=(k, p, q))
    return orthonormalise(drawn, drawn)


def start_components(centres: np.ndarray, q: int, seed: int) -> Components:
    """Return components at the centres (K, p), with q random directions, all of them spare."""
    k, p = centres.shape
    ones = np.ones(k)
    return Components(centres, random_bases(k, p, q, seed), np.zeros((k, q)), ones, ones, 0)
