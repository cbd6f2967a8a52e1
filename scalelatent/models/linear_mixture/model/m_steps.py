"""M-steps: new bases, variances and noise of the components, from their scatter times their bases."""

from __future__ import annotations

import numpy as np

from scalelatent.models.linear_mixture.kernels.small_matrices import (
    REPROJECT_SHARE,
    eigenvectors,
    gram_schmidt,
    orthonormalising_triangles,
)

from .components import divide_by

TINY = np.finfo(float).tiny
# Off-diagonal elements below this share of the largest Ritz value are rounding errors, because the scatter is
# summed in float32.
_RITZ_ZERO_SHARE = 1e-9
# Lower bound of squared loadings, as a share of the noise. A loading of 0 would stay 0 in all EM steps.
_LEAST_LOADING_SHARE = 1e-12


def transpose(a: np.ndarray) -> np.ndarray:
    """Return a stack of matrices (…, a, b) with each matrix transposed, (…, b, a)."""
    return np.swapaxes(a, -1, -2)


def centre_scatter(
    count: np.ndarray, total: np.ndarray, square: np.ndarray, scatter: np.ndarray, bases: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Convert sums of a pass, taken about the old means, to mean values per row about the new means.

    Parameters
    ----------
    count : ndarray, shape (K,)
    total : ndarray, shape (K, p)
    square : ndarray, shape (K,) or (K, p)
    scatter : ndarray, shape (K, q, p)
        Sums of a pass over the rows of each component, about the old means.
    bases : ndarray, shape (K, p, q)

    Returns
    -------
    shift : ndarray, shape (K, p)
        New mean less old mean.
    mean_square : ndarray, shape of ``square``
    projected : ndarray, shape (K, p, q)
        S B, with the covariance S of the rows of each component.
    code : ndarray, shape (K, q)
        B' times the shift.
    """
    n = np.maximum(count, TINY)
    shift = total / n[:, None]
    code = (shift[:, None, :] @ bases)[:, 0]
    mean_square = square / (n if square.ndim == 1 else n[:, None])
    mean_square = mean_square - (shift * shift if square.ndim == 2 else (shift * shift).sum(axis=1))
    projected = scatter / n[:, None, None]
    projected -= code[:, :, None] * shift[:, None, :]
    return shift, np.maximum(mean_square, 0.0), transpose(projected), code


def orthonormalise(columns: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """Return the columns (K, p, q) of each matrix made orthonormal, first column first.

    A column that is linearly dependent on earlier columns is replaced by the column of ``otherwise`` with
    this index.
    """
    if not columns.shape[2]:
        return columns
    is_bad = np.zeros(len(columns), dtype=bool)
    for _ in range(3):
        inverse, least = orthonormalising_triangles(transpose(columns) @ columns)
        is_bad |= least == 0.0
        inverse[is_bad] = np.eye(columns.shape[2])
        columns = columns @ inverse
        if least[~is_bad].min(initial=1.0) > REPROJECT_SHARE:
            break
    if is_bad.any():
        some = columns[is_bad]
        gram_schmidt(some, otherwise[is_bad])
        columns[is_bad] = some
    return columns


def compute_ritz(bases: np.ndarray, projected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return approximate eigenvalues (K, q), decreasing, of the scatter S of the rows of each component.

    Also return the rotations (K, q, q) that turn the orthonormal ``bases`` B into approximate eigenvectors
    (Ritz vectors). ``projected`` is S B.
    """
    product = transpose(bases) @ projected
    values, rotation = eigenvectors(0.5 * (product + transpose(product)), _RITZ_ZERO_SHARE)
    return np.maximum(values, 0.0), rotation


def power_step(
    bases: np.ndarray, projected: np.ndarray, rows_alone: np.ndarray | None = None, last: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Take one block power step; return the next bases and the Ritz values (K, q) of the old bases.

    The next bases are S B, made orthonormal. The reconstruction error never rises, because the step is EM for
    PCA on the span of each number of leading columns (S. Roweis, "EM algorithms for PCA and SPCA", 1998).

    Parameters
    ----------
    bases, projected : ndarray, shape (K, p, q)
        B and S B. S may include the scatter of tangents.
    rows_alone : ndarray, shape (K, q, q), or None
        B' S B of the rows without tangents; the values are then variances of the rows alone.
    last : bool
        True rotates the bases without the power step; the values then belong to the returned bases.
    """
    values, rotation = compute_ritz(bases, projected)
    if rows_alone is not None:
        values = np.maximum(np.einsum("kqi,kqr,kri->ki", rotation, rows_alone, rotation), 0.0)
    rotated = bases @ rotation
    return rotated if last else orthonormalise(projected @ rotation, rotated), values


def ppca_step(
    bases: np.ndarray,
    values: np.ndarray,
    noise: np.ndarray,
    mean_square: np.ndarray,
    projected: np.ndarray,
    floor: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Take one EM step of probabilistic PCA; return orthonormal bases, variances along them, and noise.

    M. Tipping, C. Bishop, "Mixtures of probabilistic principal component analysers" (1999), equations C.14
    and C.15. The loadings are W = V diag(scale) with the orthonormal ``bases`` V. Therefore S W, with the
    covariance S of the rows, follows from S V (``projected``).
    """
    p, h = bases.shape[1:]
    if not h:
        return bases, values, np.maximum(mean_square / p, floor)
    scale = np.sqrt(np.maximum(values - noise[:, None], 0.0))
    sw = projected * scale[:, None, :]
    inner = scale[:, :, None] * (transpose(bases) @ sw)  # W' S W
    m = scale**2 + noise[:, None]
    root = np.sqrt(m)[:, None, :]
    right = noise[:, None, None] * np.eye(h) + inner / (root * transpose(root))
    loadings = divide_by(sw / root, right) * root
    unexplained = mean_square - np.einsum("kph,kph->k", sw / m[:, None, :], loadings)
    new_noise = np.maximum(unexplained / p, floor)
    squares, rotation = eigenvectors(transpose(loadings) @ loadings)
    directions = orthonormalise(loadings @ rotation, bases)
    return (
        directions,
        np.maximum(squares, _LEAST_LOADING_SHARE * new_noise[:, None]) + new_noise[:, None],
        new_noise,
    )


def factor_step(
    loadings: np.ndarray,
    posterior: np.ndarray,
    mean_square: np.ndarray,
    projected: np.ndarray,
    floor: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Take one EM step of factor analysis; return loadings (K, p, h) and noise (K, p).

    ``posterior`` is beta', where beta maps a centred row to the posterior means of its factors.
    ``projected`` is S beta', with the covariance S of the rows. Z. Ghahramani, G. Hinton, "The EM algorithm
    for mixtures of factor analyzers" (1996), equations 5 and 6.
    """
    h = loadings.shape[2]
    if not h:
        return loadings, np.maximum(mean_square, floor)
    codes = transpose(posterior)
    second = np.eye(h) - codes @ loadings + codes @ projected
    new = divide_by(projected, 0.5 * (second + transpose(second)))
    return new, np.maximum(mean_square - np.einsum("kph,kph->kp", new, projected), floor)
