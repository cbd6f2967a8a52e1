"""M-steps of all sub-classes at once, from centred images S B or from moments S."""

from __future__ import annotations

import numpy as np

from scalelatent.reductions import eigen

TINY = np.finfo(float).tiny
# Singular values of loadings below this share of the largest are none: EM never leaves 0.
_LEAST = 1e-6
# Columns that have less of their own than this are made orthonormal by Householder's QR.
_LEAST_PIVOT = 1e-3


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
    code = np.einsum("kp,kpq->kq", shift, bases)
    spread = square / (n if square.ndim == 1 else n[:, None])
    spread = spread - (shift * shift if spread.ndim == 2 else (shift * shift).sum(axis=1))
    centred = transposed(image) / n[:, None, None] - shift[:, :, None] * code[:, None, :]
    return shift, np.maximum(spread, 0.0), centred, code


def orthonormal(columns: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """Each stack of columns (K, p, q) made orthonormal in order; those that are 0 are replaced."""
    if not columns.shape[2]:
        return columns
    lengths = np.sqrt((columns * columns).sum(axis=1))
    none = lengths <= 1e-12 * np.maximum(lengths.max(axis=1, keepdims=True), TINY)
    columns = np.where(none[:, None, :], otherwise, columns / np.maximum(lengths, TINY)[:, None, :])
    found, bad = _cholesky_qr(columns)
    if bad.any():
        some, upper = np.linalg.qr(columns[bad])
        signs = np.where(np.diagonal(upper, axis1=1, axis2=2) < 0, -1.0, 1.0)
        found[bad] = some * signs[:, None, :]
    return found


def _cholesky_qr(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Q of unit columns by Cholesky, twice, in a fraction of QR's time, and where it is not to be trusted."""
    bad = np.zeros(len(columns), dtype=bool)
    for _ in range(2):
        gram = transposed(columns) @ columns
        try:
            lower = np.linalg.cholesky(gram)
        except np.linalg.LinAlgError:
            return np.empty_like(columns), np.ones(len(columns), dtype=bool)
        bad |= np.diagonal(lower, axis1=1, axis2=2).min(axis=1) < _LEAST_PIVOT
        columns = columns @ transposed(np.linalg.inv(lower))
    return columns, bad


def ritz(bases: np.ndarray, centred: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ritz values (K, q), decreasing, and the rotations (K, q, q) of orthonormal bases that have them."""
    values, turn = eigen.ritz(bases, centred)
    return np.maximum(values, 0.0), turn


def power_step(bases: np.ndarray, centred: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One block power step: (Ritz values of the old bases, rotations); the next bases are the orthonormalised
    image. The error never rises: in each nested span it is EM for PCA (S. Roweis, 1998).
    """
    values, turn = ritz(bases, centred)
    return next_bases(bases, centred, turn), values


def next_bases(bases: np.ndarray, centred: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """The orthonormalised image, its columns in the order of the Ritz values."""
    return orthonormal(centred @ turn, bases @ turn)


def leading(moment: np.ndarray, q: int) -> tuple[np.ndarray, np.ndarray]:
    """Leading eigenvectors (K, p, q) and values of moments (K, p, p), with a fixed sign."""
    values, vectors = eigen.leading_eigenvectors(moment, q)
    return vectors, np.maximum(values, 0.0)


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
    right = noise[:, None, None] * np.eye(h) + inner / m[:, :, None]
    loadings = transposed(np.linalg.solve(transposed(right), transposed(sw)))
    left = spread - np.einsum("kph,kph->k", sw / m[:, None, :], loadings)
    new_noise = np.maximum(left / p, floor)
    directions, upper = np.linalg.qr(loadings)
    u, s, _ = np.linalg.svd(upper)
    s = np.maximum(s, _LEAST * np.sqrt(new_noise)[:, None])
    return directions @ u, s**2 + new_noise[:, None], new_noise


def ppca_fit(moment: np.ndarray, h: int, floor: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maximum likelihood of probabilistic PCA from moments (K, p, p): (bases, variances, noise)."""
    p = moment.shape[1]
    bases, values = leading(moment, h)
    left = np.trace(moment, axis1=1, axis2=2) - values.sum(axis=1)
    noise = np.maximum(left / max(p - h, 1), floor)
    return bases, np.maximum(values, noise[:, None]), noise


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
    new = transposed(np.linalg.solve(0.5 * (second + transposed(second)), transposed(centred)))
    return new, np.maximum(spread - np.einsum("kph,kph->kp", new, centred), floor)
