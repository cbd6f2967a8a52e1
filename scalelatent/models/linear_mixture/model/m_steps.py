"""M-steps of all components, from S B: the scatter S of their rows times their bases B."""

from __future__ import annotations

import numpy as np

from scalelatent.models.linear_mixture.kernels.small_matrices import (
    KEPT,
    eigenvectors,
    gram_schmidt,
    triangles,
)

from .components import divide_by

TINY = np.finfo(float).tiny
# Off-diagonal elements below this share of the largest Ritz value are rounding errors, because the scatter is
# summed in float32.
_RITZ = 1e-9
# Lower bound of squared loadings, as a share of the noise. EM could never change a loading of 0.
_LEAST = 1e-12


def transposed(a: np.ndarray) -> np.ndarray:
    """Return a stack of matrices (…, a, b) with each matrix transposed (…, b, a)."""
    return np.swapaxes(a, -1, -2)


def centre_scatter(
    count: np.ndarray, total: np.ndarray, square: np.ndarray, scatter: np.ndarray, bases: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Turn sums about the old means into mean values per row about the new means.

    Parameters
    ----------
    count : ndarray, shape (K,)
    total : ndarray, shape (K, p)
    square : ndarray, shape (K,) or (K, p)
    scatter : ndarray, shape (K, q, p)
        Sums of a pass; see :class:`.e_step.MixturePass`.
    bases : ndarray, shape (K, p, q)

    Returns
    -------
    shift : ndarray, shape (K, p)
        New mean less old mean.
    mean_square : ndarray, shape of ``square``
    projected : ndarray, shape (K, p, q)
        S B of the covariance S.
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
    return shift, np.maximum(mean_square, 0.0), transposed(projected), code


def orthonormalise(columns: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """Return stacks of columns (K, p, q), orthonormal in order.

    A column that depends on earlier ones is replaced by the same column of ``otherwise``.
    """
    if not columns.shape[2]:
        return columns
    is_bad = np.zeros(len(columns), dtype=bool)
    for _ in range(3):
        inverse, least = triangles(transposed(columns) @ columns)
        is_bad |= least == 0.0
        inverse[is_bad] = np.eye(columns.shape[2])
        columns = columns @ inverse
        if least[~is_bad].min(initial=1.0) > KEPT:
            break
    if is_bad.any():
        some = columns[is_bad]
        gram_schmidt(some, otherwise[is_bad])
        columns[is_bad] = some
    return columns


def ritz(bases: np.ndarray, projected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the Ritz values (K, q), decreasing, and the rotations (K, q, q) of bases to Ritz vectors.

    They are approximate eigenvalues and eigenvectors of the scatter S. ``bases`` B are orthonormal, and
    ``projected`` is S B.
    """
    product = transposed(bases) @ projected
    values, rotation = eigenvectors(0.5 * (product + transposed(product)), _RITZ)
    return np.maximum(values, 0.0), rotation


def power_step(
    bases: np.ndarray, projected: np.ndarray, rows_alone: np.ndarray | None = None, last: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Take one block power step; return the next bases and the Ritz values (K, q) of the old ones.

    The next bases are S B, orthonormalised. The reconstruction error never rises: for each nested subspace
    the step is EM for PCA (S. Roweis, "EM algorithms for PCA and SPCA", 1998).

    Parameters
    ----------
    bases, projected : ndarray, shape (K, p, q)
        B and S B. S may include the scatter of tangents.
    rows_alone : ndarray, shape (K, q, q), or None
        B' S B of the rows without tangents; the values are then variances of the rows alone.
    last : bool
        Only rotate the bases; the values are then those of the returned bases.
    """
    values, rotation = ritz(bases, projected)
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
    and C.15, with loadings V diag(scale), so that S W needs S V alone (``projected``).
    """
    p, h = bases.shape[1:]
    if not h:
        return bases, values, np.maximum(mean_square / p, floor)
    scale = np.sqrt(np.maximum(values - noise[:, None], 0.0))
    sw = projected * scale[:, None, :]
    inner = scale[:, :, None] * (transposed(bases) @ sw)  # W' S W
    m = scale**2 + noise[:, None]
    root = np.sqrt(m)[:, None, :]
    right = noise[:, None, None] * np.eye(h) + inner / (root * transposed(root))
    loadings = divide_by(sw / root, right) * root
    unexplained = mean_square - np.einsum("kph,kph->k", sw / m[:, None, :], loadings)
    new_noise = np.maximum(unexplained / p, floor)
    squares, rotation = eigenvectors(transposed(loadings) @ loadings)
    directions = orthonormalise(loadings @ rotation, bases)
    return directions, np.maximum(squares, _LEAST * new_noise[:, None]) + new_noise[:, None], new_noise


def factor_step(
    loadings: np.ndarray,
    posterior: np.ndarray,
    mean_square: np.ndarray,
    projected: np.ndarray,
    floor: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Take one EM step of factor analysis; return loadings (K, p, h) and noise (K, p).

    ``posterior`` is beta', and ``projected`` is S beta'. Z. Ghahramani, G. Hinton, "The EM algorithm for
    mixtures of factor analyzers" (1996), equations 5 and 6.
    """
    h = loadings.shape[2]
    if not h:
        return loadings, np.maximum(mean_square, floor)
    codes = transposed(posterior)
    second = np.eye(h) - codes @ loadings + codes @ projected
    new = divide_by(projected, 0.5 * (second + transposed(second)))
    return new, np.maximum(mean_square - np.einsum("kph,kph->kp", new, projected), floor)
