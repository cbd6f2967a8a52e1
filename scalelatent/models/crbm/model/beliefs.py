"""Inference on the RBMs of a batch of rows, by name: what stands between the model and its kernels."""

from __future__ import annotations

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.kernels.arrays import Array
from scalelatent.models.crbm.kernels import AnyCoupling
from scalelatent.models.crbm.kernels.inference import CONVERGED, Inference

# Inference -> kernel; "independent" is that of a model without hidden units.
INFERENCES = {
    "sum-product": "crbm_sum_product",
    "mixed-product": "crbm_mixed_product",
    "max-product": "crbm_max_product",
    "mean-field": "crbm_mean_field",
    "independent": "",
}
# Those whose messages can be damped.
DAMPED = ("sum-product", "max-product")


def couple(weights: Array, backend: Backend) -> AnyCoupling:
    """What every inference needs of W, (v, h), once for all rows that share it."""
    return backend.kernel("crbm_make_coupling")(weights)


def infer(
    inference: str,
    coupling: AnyCoupling | None,
    b1: Array,
    b2: Array,
    n_sweeps: int,
    tol: float | None,
    backend: Backend,
    pairs: Array | None = None,
    damping: float = 1.0,
) -> Inference:
    """Run an inference on each row's own RBM."""
    if inference == "independent" or not b2.shape[1]:
        return Inference(b1, b2, None, None)
    damped = (damping,) if inference in DAMPED else ()
    if pairs is not None:
        kernel = backend.kernel(INFERENCES[inference] + "_pairs")
        return kernel(coupling, b1, b2, n_sweeps, tol, pairs, *damped)
    return backend.kernel(INFERENCES[inference])(coupling, b1, b2, n_sweeps, tol, *damped)


def count_converged(change: np.ndarray, tol: float | None) -> int:
    """Rows whose beliefs came to rest: by how much they moved in their last sweep."""
    return int((change <= (CONVERGED if tol is None else tol)).sum())
