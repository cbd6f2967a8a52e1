"""The E-step of a block as two matrix products around a kernel: any backend, any number of dimensions."""

from __future__ import annotations

from typing import Any

import numpy as np


def estep_by_products(
    backend: Any,
    w: Any,
    x: Any,
    y: np.ndarray,
    weight: np.ndarray,
    dims: np.ndarray,
    labels: np.ndarray,
    nu: np.ndarray,
    table: Any,
    train: bool,
) -> tuple[np.ndarray | None, np.ndarray]:
    """Residual moment and sums of one block for members that lie stacked in ``w``.

    Parameters
    ----------
    backend : object
        Where the arrays ``w`` and ``x`` lie.
    w : array of float32, shape (D, p)
    x : array of float32, shape (rows, p)
    y : ndarray of int32, shape (rows,)
    weight : ndarray of float64, shape (rows,)
    dims, labels, nu, table
        As in :func:`.reference.residuals`.
    train : bool
        False leaves the second product out.

    Returns
    -------
    delta : ndarray of float32, shape (D, p), or None
        sum over rows of weight (r - 1) h x^T, on the host, valid until the next block; None where no row is
        active.
    sums : ndarray of float64, shape (members, 3)
        As in :func:`.reference.residuals`.

    Examples
    --------
    >>> from scalelatent.engine.backend import make_backend
    >>> backend, rows, labels = make_backend("reference"), np.eye(2), np.array([0, 1])
    >>> wiring = np.array([[1, 1]]), np.array([[0, 1]])
    >>> delta, sums = estep_by_products(
    ...     backend, np.eye(2), rows, labels, np.ones(2), *wiring, np.zeros(1), None, True
    ... )
    >>> delta.shape, sums[0, 1:].tolist()
    ((2, 2), [0.0, 2.0])
    """
    with np.errstate(invalid="ignore", over="ignore"):
        h = backend.matmul(w, x.T, "h")
    active, sums = backend.kernel("capsule_residuals")(h, y, weight, dims, labels, nu, table)
    if not train or (active is not None and not len(active)):
        return None, sums
    if active is not None:
        h, x = h[:, : len(active)], backend.take(x, active, "active")
    return backend.to_host(backend.matmul(h, x, "delta")), sums
