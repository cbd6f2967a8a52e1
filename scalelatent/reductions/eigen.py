"""Eigenvectors that several models need, with signs that are the same on every machine."""

from __future__ import annotations

import numpy as np


def signs(vectors: np.ndarray) -> np.ndarray:
    """-1 for each column (of a stack) whose entry of largest magnitude is negative, else 1."""
    rows = np.abs(vectors).argmax(axis=-2)[..., None, :]
    return np.where(np.take_along_axis(vectors, rows, axis=-2)[..., 0, :] < 0, -1.0, 1.0)


def leading_eigenvectors(moment: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The n largest eigenvalues of symmetric matrices (…, p, p), decreasing, and their vectors (…, p, n); the
    entry of largest magnitude of each is positive.
    """
    from scipy.linalg import eigh

    p = moment.shape[-1]
    if moment.ndim > 2:
        pairs = [leading_eigenvectors(one, n) for one in moment]
        values, vectors = (np.array(some) for some in zip(*pairs, strict=True))
        return values.reshape(*moment.shape[:-2], n), vectors.reshape(*moment.shape[:-1], n)
    if not n:
        return np.zeros(0), np.zeros((p, 0))
    values, vectors = eigh(moment, subset_by_index=[p - n, p - 1])
    values, vectors = values[::-1], vectors[:, ::-1]
    return values.copy(), vectors * signs(vectors)


def ritz(bases: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ritz values (…, q), decreasing, and rotations (…, q, q) of orthonormal bases B, by their images S B."""
    product = np.swapaxes(bases, -1, -2) @ images
    values, turn = np.linalg.eigh(0.5 * (product + np.swapaxes(product, -1, -2)))
    return values[..., ::-1], turn[..., ::-1]


def unit_scale(moment: np.ndarray) -> np.ndarray:
    """Return the factors (p,) that bring features to unit mean square; 1 for a feature without values."""
    squares = np.diagonal(moment)
    return 1 / np.sqrt(np.where(squares > 0, squares, 1.0))


def inverse_on_rows(
    moment: np.ndarray, least: float, ridge: np.ndarray | float = 0.0, relative_jitter: float = 0.0
) -> np.ndarray:
    """Return (S + ridge)^-1 of second moments, (p, p), the ridge being a number or one for each column.

    Without a ridge a small share of S is added instead.

    Features have unit mean square meanwhile, so that their units do not decide. Directions that no row has
    (eigenvalues at ``least`` of the largest) are left out: there rounding would turn into weights.
    """
    moment = moment + np.eye(len(moment)) * ridge
    unit = unit_scale(moment)
    values, vectors = np.linalg.eigh(moment * unit * unit[:, None])
    added = 0.0 if np.any(ridge) else relative_jitter * max(values.mean(), 0.0)
    kept = values > least * max(values[-1], np.finfo(float).tiny)
    scaled = vectors[:, kept] * unit[:, None]
    inverse = (scaled / (values[kept] + added)) @ scaled.T
    if not kept.all():  # back into the directions of the rows, which the scales have tilted
        span = np.linalg.qr(vectors[:, kept] / unit[:, None])[0]
        inverse = span @ (span.T @ inverse @ span) @ span.T
    return np.asarray(inverse)
