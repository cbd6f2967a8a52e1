"""The E-step of a block as two matrix products around a kernel: any backend, any number of dimensions."""

from __future__ import annotations

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.kernels.arrays import Array

from .squash import SquashTable


def estep_by_products(
    backend: Backend, w: Array, x: Array, y: np.ndarray, weight: np.ndarray, dims: np.ndarray,
    labels: np.ndarray, nu: np.ndarray, table: SquashTable, train: bool,
) -> tuple[np.ndarray | None, np.ndarray]:  # fmt: skip
    """Residual moment and sums of one block for members that lie stacked in ``w``."""
    with np.errstate(invalid="ignore", over="ignore"):
        h = backend.matmul(w, x.T, "h")
    active, sums = backend.kernel("capsule_residuals")(h, y, weight, dims, labels, nu, table)
    if not train or (active is not None and not len(active)):
        return None, sums
    if active is not None:
        h, x = h[:, : len(active)], backend.take(x, active, "active")
    return backend.to_host(backend.matmul(h, x, "delta")), sums
