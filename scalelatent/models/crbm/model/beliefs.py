"""Inference in the RBMs of a batch of rows, selected by name."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.kernels.arrays import Array
from scalelatent.models.crbm.kernels import AnyCoupling
from scalelatent.models.crbm.kernels.inference import CONVERGED, Inference

from .energy import CrbmShape, Params, compute_block_biases

# Name of the kernel of each inference, by the name of the inference. Outputs of a model without hidden units
# are independent, so the inference "independent" needs no kernel.
INFERENCES = {
    "sum-product": "crbm_sum_product",
    "mixed-product": "crbm_mixed_product",
    "max-product": "crbm_max_product",
    "mean-field": "crbm_mean_field",
    "independent": "",
}
# For n_sweeps=None an inference has this number of sweeps plus the epoch, counted from 1: 8 sweeps in the
# first epoch (section 6 of Ping and Ihler, 2017).
FIRST_SWEEPS = 7


def sweeps_at_epoch(n_sweeps: int | None, epoch: int) -> int:
    """Return the sweeps of an inference in an epoch, counted from 1: ``n_sweeps``, or 7 + epoch for None."""
    return FIRST_SWEEPS + epoch if n_sweeps is None else n_sweeps


def couple(weights: Array, backend: Backend) -> AnyCoupling:
    """Return the couplings W, (v, h), packed for the inference kernels; all rows share the result."""
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
) -> Inference:
    """Run an inference on each row's RBM; add P(v_i = 1, h_j = 1) of all rows to ``pairs`` if given."""
    if inference == "independent" or not b2.shape[1]:
        return Inference(b1, b2, None, None)
    if pairs is not None:
        return backend.kernel(INFERENCES[inference] + "_pairs")(coupling, b1, b2, n_sweeps, tol, pairs)
    return backend.kernel(INFERENCES[inference])(coupling, b1, b2, n_sweeps, tol)


class PreparedInference(NamedTuple):
    """Parameters on the backend, with W prepared for the kernels of the inference."""

    backend: Backend
    shape: CrbmShape
    params: Params
    coupling: AnyCoupling | None
    inference: str
    n_sweeps: int
    tol: float | None

    @classmethod
    def make(
        cls,
        shape: CrbmShape,
        theta: np.ndarray,
        inference: str,
        n_sweeps: int,
        tol: float | None,
        backend: Backend,
    ) -> PreparedInference:
        """Move the parameters to the backend; prepare W for the kernels if the inference sends messages."""
        params = shape.split(backend.asarray(theta, np.float32))
        coupled = shape.n_hidden and inference != "independent"
        coupling = couple(params.W, backend) if coupled else None
        return cls(backend, shape, params, coupling, inference, n_sweeps, tol)

    def run(self, block: Block, pairs: Array | None = None) -> Inference:
        """Return the beliefs of a block of rows x; add pair beliefs to ``pairs``, (v, h), if it is given."""
        _, b1, b2 = compute_block_biases(self.shape, self.params, block, self.backend)
        return infer(self.inference, self.coupling, b1, b2, self.n_sweeps, self.tol, self.backend, pairs)


def count_converged(change: np.ndarray, tol: float | None) -> int:
    """Return the number of rows whose beliefs changed by at most ``tol`` in their last sweep."""
    return int((change <= (CONVERGED if tol is None else tol)).sum())
