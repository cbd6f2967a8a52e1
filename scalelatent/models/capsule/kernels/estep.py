"""E-step of a block as two matrix products around a kernel, for any backend and number of dimensions."""

from __future__ import annotations

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.kernels.arrays import Array

from .squash import SquashTable


def estep_by_products(
    backend: Backend, w: Array, x: Array, y: Array, weight: Array, dims: np.ndarray,
    labels: np.ndarray, nu: np.ndarray, table: SquashTable, train: bool,
) -> tuple[np.ndarray | None, np.ndarray]:  # fmt: skip
    """Return the residual moment (D, p), or None, and the sums (members, 3) of one block.

    ``w`` (D, p) stacks the weights of the members. The sums are log-likelihood, errors, and active rows (rows
    that are not classified with a margin). The moment is None without ``train`` or active rows.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        h = backend.matmul(w, x.T, "h")
    active, sums = backend.kernel("capsule_residuals")(h, y, weight, dims, labels, nu, table)
    if not train or (active is not None and not len(active)):
        return None, sums
    if active is not None:
        h, x = h[:, : len(active)], backend.take(x, active, "active")
    return backend.to_host(backend.matmul(h, x, "delta")), sums
