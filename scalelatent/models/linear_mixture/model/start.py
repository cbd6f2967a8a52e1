"""Start values of EM: k-means++ centres of a sample of each class, and random bases."""

from __future__ import annotations

import numpy as np

from scalelatent.kernels.streams import stream

from .components import Components
from .m_steps import orthonormalise

# Number of rows per component in the sample from which a fit starts.
SAMPLE_ROWS = 20
# Smallest number of rows of this sample.
LEAST_ROWS = 2000


def seed_centres(rows: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """Return k rows (k, p) as centres by greedy k-means++: each centre is the best of a few random rows.

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
    """Return k random bases of q orthonormal columns in p dimensions, float64 (k, p, q)."""
    drawn = stream(seed, "bases").normal(size=(k, p, q))
    return orthonormalise(drawn, drawn)


def start_components(centres: np.ndarray, q: int, seed: int) -> Components:
    """Return components whose means are the centres (K, p), each with q random directions.

    No direction belongs to the model yet (``n_dims`` is 0): the first passes are k-means, and M-steps turn
    the random directions towards the principal directions of the rows.
    """
    k, p = centres.shape
    ones = np.ones(k)
    return Components(centres, random_bases(k, p, q, seed), np.zeros((k, q)), ones, ones, 0)
