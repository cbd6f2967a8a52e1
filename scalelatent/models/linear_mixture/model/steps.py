"""M-steps of all sub-classes at once, from centred images S B."""

from __future__ import annotations

import numpy as np

from scalelatent.models.linear_mixture.kernels.steps import KEPT, eigenvectors, gram_schmidt, triangles

from .pancakes import over

TINY = np.finfo(float).tiny
# So much of the largest Ritz value may stay off the diagonal: images are sums in float32.
_RITZ = 1e-9
# Squares of loadings are at least this share of the noise: EM never leaves 0.
_LEAST = 1e-12


def transposed(a: np.ndarray) -> np.ndarray:
    """Each matrix of a stack transposed."""
    return np.swapaxes(a, -1, -2)


def centre_images(
    count: np.ndarray, total: np.ndarray, square: np.ndarray, image: np.ndarray, bases: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(shift of the mean, mean square about the new mean, S B (K, p, q), code of the shift (K, q)), all a
    row; images (K, q, p) were taken about the old mean.
    """
    n = np.maximum(count, TINY)
    shift = total / n[:, None]
    code = (shift[:, None, :] @ bases)[:, 0]
    spread = square / (n if square.ndim == 1 else n[:, None])
    spread = spread - (shift * shift if spread.ndim == 2 else (shift * shift).sum(axis=1))
    centred = image / n[:, None, None]
    centred -= code[:, :, None] * shift[:, None, :]
    return shift, np.maximum(spread, 0.0), transposed(centred), code


def orthonormal(columns: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """Each stack of columns (K, p, q) made orthonormal in order; those with nothing of their own are
    replaced.
    """
    if not columns.shape[2]:
        return columns
    bad = np.zeros(len(columns), dtype=bool)
    for _ in range(3):
        inverse, least = triangles(transposed(columns) @ columns)
        bad |= least == 0.0
        inverse[bad] = np.eye(columns.shape[2])
        columns = columns @ inverse
        if least[~bad].min(initial=1.0) > KEPT:
            break
    if bad.any():
        some = columns[bad]
        gram_schmidt(some, otherwise[bad])
        columns[bad] = some
    return columns


def ritz(bases: np.ndarray, centred: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ritz values (K, q), decreasing, and the rotations (K, q, q) of orthonormal bases that have them."""
    product = transposed(bases) @ centred
    values, turn = eigenvectors(0.5 * (product + transposed(product)), _RITZ)
    return np.maximum(values, 0.0), turn


def power_step(
    bases: np.ndarray, centred: np.ndarray, rows_alone: np.ndarray | None = None, last: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """One block power step: (next bases, Ritz values of the old ones); the next bases are the orthonormalised
    image. The error never rises: in each nested span it is EM for PCA (S. Roweis, 1998).

    Values are those of moments of the rows alone in the bases (K, q, q), where given. The ``last`` step only
    turns the bases, which have these values.
    """
    values, turn = ritz(bases, centred)
    if rows_alone is not None:
        values = np.maximum(np.einsum("kqi,kqr,kri->ki", turn, rows_alone, turn), 0.0)
    turned = bases @ turn
    return turned if last else orthonormal(centred @ turn, turned), values


def ppca_step(
    bases: np.ndarray,
    values: np.ndarray,
    noise: np.ndarray,
    spread: np.ndarray,
    centred: np.ndarray,
    floor: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """EM of probabilistic PCA under bases that are orthonormal: (bases, variances, noise).

    M. Tipping, C. Bishop, "Mixtures of probabilistic principal component analysers" (1999), equations C.14
    and C.15, with loadings V diag(scale), so that S W needs the image S V alone.
    """
    p, h = bases.shape[1:]
    if not h:
        return bases, values, np.maximum(spread / p, floor)
    scale = np.sqrt(np.maximum(values - noise[:, None], 0.0))
    sw = centred * scale[:, None, :]
    inner = scale[:, :, None] * (transposed(bases) @ sw)  # W' S W
    m = scale**2 + noise[:, None]
    root = np.sqrt(m)[:, None, :]
    right = noise[:, None, None] * np.eye(h) + inner / (root * transposed(root))
    loadings = over(sw / root, right) * root
    left = spread - np.einsum("kph,kph->k", sw / m[:, None, :], loadings)
    new_noise = np.maximum(left / p, floor)
    squares, turn = eigenvectors(transposed(loadings) @ loadings)
    directions = orthonormal(loadings @ turn, bases)
    return directions, np.maximum(squares, _LEAST * new_noise[:, None]) + new_noise[:, None], new_noise


def factor_step(
    loadings: np.ndarray, posterior: np.ndarray, spread: np.ndarray, centred: np.ndarray, floor: float
) -> tuple[np.ndarray, np.ndarray]:
    """EM of factor analysis: (loadings, noise (K, p)); ``posterior`` is beta', and S beta' its image.

    Z. Ghahramani, G. Hinton, "The EM algorithm for mixtures of factor analyzers" (1996), equations 5 and 6.
    """
    h = loadings.shape[2]
    if not h:
        return loadings, np.maximum(spread, floor)
    codes = transposed(posterior)
    second = np.eye(h) - codes @ loadings + codes @ centred
    new = over(centred, 0.5 * (second + transposed(second)))
    return new, np.maximum(spread - np.einsum("kph,kph->kp", new, centred), floor)
