"""Eigenvectors and inverses of second moments; the signs are the same on every machine."""

from __future__ import annotations

import numpy as np


def column_signs(vectors: np.ndarray) -> np.ndarray:
    """Return the sign of the entry of largest magnitude of each column of ``vectors`` (…, n, columns)."""
    rows = np.abs(vectors).argmax(axis=-2)[..., None, :]
    return np.where(np.take_along_axis(vectors, rows, axis=-2)[..., 0, :] < 0, -1.0, 1.0)


def leading_eigenvectors(moment: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the n largest eigenvalues, decreasing, and eigenvectors (…, p, n) of symmetric (…, p, p).

    The entry of largest magnitude of each eigenvector is positive.
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
    return values.copy(), vectors * column_signs(vectors)


def ritz_pairs(bases: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Ritz values (…, q), decreasing, and rotations (…, q, q) of bases, which give the Ritz vectors.

    ``bases`` B have orthonormal columns (…, p, q); ``images`` are the products S B with a symmetric matrix S.
    """
    product = np.swapaxes(bases, -1, -2) @ images
    values, turn = np.linalg.eigh(0.5 * (product + np.swapaxes(product, -1, -2)))
    return values[..., ::-1], turn[..., ::-1]


def unit_scale(moment: np.ndarray) -> np.ndarray:
    """Return the factors (p,) that scale features to unit mean square; 1 for a feature of zeros."""
    squares = np.diagonal(moment)
    return 1 / np.sqrt(np.where(squares > 0, squares, 1.0))


def invert_on_rows(
    moment: np.ndarray, least: float, ridge: np.ndarray | float = 0.0, relative_jitter: float = 0.0
) -> np.ndarray:
    """Return (S + ridge)^-1 of second moments S (p, p), on the directions that the rows have.

    Parameters
    ----------
    moment : ndarray of float64, shape (p, p)
    least : float
        Directions whose eigenvalue is at most this share of the largest are excluded, because rounding errors
        would turn into weights there.
    ridge : float or ndarray of float64, shape (p,)
        Added to the diagonal.
    relative_jitter : float
        Share of the mean eigenvalue that is added to all eigenvalues if there is no ridge.

    Returns
    -------
    ndarray of float64, shape (p, p)

    Notes
    -----
    Features are scaled to unit mean square first, so that the result does not depend on their units.

    Examples
    --------
    >>> invert_on_rows(np.diag([4.0, 0.0]), 1e-10)
    array([[0.25, 0.  ],
           [0.  , 0.  ]])
    """
    moment = moment + np.eye(len(moment)) * ridge
    unit = unit_scale(moment)
    values, vectors = np.linalg.eigh(moment * unit * unit[:, None])
    added = 0.0 if np.any(ridge) else relative_jitter * max(values.mean(), 0.0)
    is_large = values > least * max(values[-1], np.finfo(float).tiny)
    scaled = vectors[:, is_large] * unit[:, None]
    inverse = (scaled / (values[is_large] + added)) @ scaled.T
    if not is_large.all():  # project on the span of the rows, which the scaling has changed
        span = np.linalg.qr(vectors[:, is_large] / unit[:, None])[0]
        inverse = span @ (span.T @ inverse @ span) @ span.T
    return np.asarray(inverse)
