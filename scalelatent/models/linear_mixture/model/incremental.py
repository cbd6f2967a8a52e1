"""Update of fitted components by single rows with incremental SVD, for `partial_fit`."""

from __future__ import annotations

import numpy as np

from .components import Components

# A row adds a direction to a basis if more than this share of its length is outside of the span of the basis.
_OUTSIDE_SHARE = 1e-6


def add_rows(
    components: Components,
    counts: np.ndarray,
    x: np.ndarray,
    index: np.ndarray,
    weight: np.ndarray,
    floor: float = 0.0,
) -> np.ndarray:
    """Add rows to components in place; return the new weight (K,) of the rows of each component.

    Means are exact. Bases and variances follow the incremental SVD of D. Ross, J. Lim, R.-S. Lin, M.-H. Yang,
    "Incremental learning for robust visual tracking" (2008): exact while all columns of a basis, spare ones
    included, span the rows.

    Parameters
    ----------
    components : Components
    counts : ndarray, shape (K,)
        Weight of the rows of each component so far.
    x : ndarray, shape (m, p)
    index : ndarray of int, shape (m,)
        Component of each row.
    weight : ndarray, shape (m,)
        Weight of each row, above 0.
    floor : float
        Smallest noise variance.
    """
    means, bases, values, noise = components.means, components.bases, components.values, components.noise
    counts, h, p = np.array(counts, dtype=np.float64), components.n_dims, means.shape[1]
    for q in np.unique(index):
        own = index == q
        rows, shares = x[own].astype(np.float64), weight[own]
        n, m = counts[q], shares.sum()
        centre = (shares / m) @ rows
        shift, residuals = centre - means[q], np.sqrt(shares)[:, None] * (rows - centre)
        # The scatter of n old and m new rows about their common mean is the sum of both scatters, plus
        # n m / (n + m) times the squared shift between the two means.
        between = n * m / (n + m)
        total = n * (values[q][:h].sum() + (p - h) * noise[q]) + (residuals**2).sum()
        total += between * (shift @ shift)
        new = np.sqrt(between) * shift[None]
        if len(rows) > 1:
            new = np.concatenate([residuals, new])
        basis, singular = _update_svd(bases[q], np.sqrt(n * values[q]), new)
        width = min(bases.shape[2], len(singular))
        bases[q][:, :width] = basis[:, :width]
        values[q][:] = 0.0
        values[q][:width] = singular[:width] ** 2 / (n + m)
        means[q] += m / (n + m) * shift
        counts[q] = n + m
        noise[q] = max((total / (n + m) - values[q][:h].sum()) / max(p - h, 1), floor)
    return counts


def _update_svd(basis: np.ndarray, singular: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return right singular vectors and singular values of diag(singular) basis' stacked on ``rows``."""
    width = basis.shape[1]
    if len(rows) == 1 and width < len(basis):
        code = rows[0] @ basis
        rest = rows[0] - basis @ code
        again = rest @ basis  # a second projection removes rounding errors of the first projection
        rest, code = rest - basis @ again, code + again
        length = np.sqrt(rest @ rest)
        if length > _OUTSIDE_SHARE * np.sqrt(code @ code):
            core = np.zeros((width + 1, width + 1))
            core[np.arange(width), np.arange(width)] = singular
            core[width, :width], core[width, width] = code, length
            _, values, right = np.linalg.svd(core)
            return np.column_stack([basis, rest / length]) @ right.T, values
    _, values, right = np.linalg.svd(np.concatenate([singular[:, None] * basis.T, rows]), full_matrices=False)
    return right.T, values
