r"""Kernels of capsule regression in numpy and float64; tests compare the numba and CuPy kernels with them.

Symbols (Saul, 2021, equations 2.13 to 2.19): h = W x are the latent means, q_i = \|h_i\|^2, q is their sum,
f_i = q_i / q, and beta = q / 2. The posterior of class y enters through two numbers per row: one for the
capsule of the row's class, and one for all other capsules.
"""

from __future__ import annotations

import numpy as np

from .squash import SquashTable, squash_integral


def probabilities(h: np.ndarray, dims: np.ndarray, table: SquashTable | None = None) -> np.ndarray:
    """Return P(y | x) of one member, (capsules, rows), from latent means (D, rows), D = dims.sum()."""
    f, beta = _fractions(np.asarray(h, dtype=np.float64), dims)
    total = dims.sum()
    lam0 = squash_integral(total / 2, beta) if table is None else table(beta)[0]
    return lam0 * f + (1 - lam0) * (dims / total)[:, None]


def posterior_ratios(h: np.ndarray, y: np.ndarray, dims: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ratios Q_i(y) / P(y | x) and P(y | x) of one member, both (capsules, rows).

    The posterior means are E[h_i | y, x] = ratio_i h_i (Saul, 2021, equation 2.19).
    """
    h = np.asarray(h, dtype=np.float64)
    f, beta = _fractions(h, dims)
    total = dims.sum()
    p = probabilities(h, dims)
    lam1 = squash_integral(total / 2 + 1, beta)
    rows = np.arange(h.shape[1])
    own = 2.0 * (np.arange(len(dims))[:, None] == y)
    return (lam1 * f[y, rows] + (1 - lam1) * (own + dims[y]) / (2 + total)) / p[y, rows], p


def residuals(
    h: np.ndarray, y: np.ndarray, weight: np.ndarray, dims: np.ndarray, labels: np.ndarray, nu: np.ndarray,
    table: SquashTable | None = None,
) -> tuple[np.ndarray | None, np.ndarray]:  # fmt: skip
    """Replace the latent means h (D, rows) by the residuals (r - 1) h; return the active rows and the sums.

    Here r are the ratios of :func:`posterior_ratios`, so a residual is the posterior mean minus the latent
    mean. A row is active if the largest probability of a wrong class is above ``nu`` times that of its class.
    With a threshold nu > 0, the residuals of the active rows are moved to the front of h, and their row
    numbers are returned; otherwise None is returned. The sums (members, 3) are the log-likelihood, errors and
    active rows.
    """
    rows = np.arange(h.shape[1])
    factors, sums, moved = np.empty(h.shape), np.zeros((len(dims), 3)), np.zeros(h.shape[1], dtype=bool)
    start = 0
    for m, sizes in enumerate(dims):
        stop, target = start + sizes.sum(), labels[m][y]
        ratios, p = posterior_ratios(h[start:stop], target, sizes)
        right = p[target, rows]
        wrong = np.where(np.arange(len(sizes))[:, None] == target, -np.inf, p).max(axis=0)
        active = wrong > nu[m] * right if nu[m] > 0 else np.ones(h.shape[1], dtype=bool)
        factors[start:stop] = np.repeat(np.where(active, weight * (ratios - 1), 0.0), sizes, axis=0)
        sums[m] = (weight * np.log(right)).sum(), (weight * (p.argmax(axis=0) != target)).sum(), active.sum()
        moved |= active
        start = stop
    if not (nu > 0).any():
        h *= factors
        return None, sums
    index = np.flatnonzero(moved).astype(np.int32)
    h[:, : len(index)] = (h * factors)[:, index]
    return index, sums


def _fractions(h: np.ndarray, dims: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    starts = np.concatenate([[0], np.cumsum(dims)[:-1]])
    q = np.add.reduceat(h * h, starts, axis=0)
    total = q.sum(axis=0)
    # If h = 0, then beta, lambda0 and lambda1 are 0, so the fractions have no effect. Divide by 1, not by 0.
    return q / np.where(total > 0, total, 1.0), total / 2
