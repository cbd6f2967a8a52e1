"""Inference, selected by name: estimates of P(unit = 1) in RBMs; each row x of a batch has its own RBM."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.kernels.arrays import Array
from scalelatent.models.crbm.kernels import AnyCoupling
from scalelatent.models.crbm.kernels.inference import CONVERGED, Inference

from .energy import CrbmShape, Params, compute_block_biases

# Maps the name of each inference to the name of its kernel. The inference "independent" is for models without
# hidden units. The outputs of these models are independent, so it needs no kernel.
INFERENCES = {
    "sum-product": "crbm_sum_product",
    "mixed-product": "crbm_mixed_product",
    "max-product": "crbm_max_product",
    "mean-field": "crbm_mean_field",
    "independent": "",
}
# For n_sweeps=None, an inference in epoch k makes 7 + k sweeps (rounds of messages over all edges of the
# graph): 8 sweeps in epoch 1, as in section 6 of Ping and Ihler (2017).
BASE_SWEEPS = 7


def choose_n_sweeps(n_sweeps: int | None, epoch: int) -> int:
    """Return ``n_sweeps`` or, if it is None, 7 plus the number of the epoch; the first epoch has number 1."""
    return BASE_SWEEPS + epoch if n_sweeps is None else n_sweeps


def prepare_coupling(weights: Array, backend: Backend) -> AnyCoupling:
    """Return the couplings W, (visible, hidden units), in the form that the backend's kernels read."""
    return backend.kernel("crbm_make_coupling")(weights)


def infer(
    inference: str, coupling: AnyCoupling | None, b1: Array, b2: Array, n_sweeps: int, tol: float | None,
    backend: Backend, pairs: Array | None = None,
) -> Inference:  # fmt: skip
    """Estimate the log odds of all units of each row's RBM, with biases ``b1`` of v and ``b2`` of h.

    If ``pairs`` is given, add P(v_i = 1, h_j = 1), summed over rows, to it.
    """
    if inference == "independent" or not b2.shape[1]:
        return Inference(b1, b2, None, None)
    if pairs is not None:
        return backend.kernel(INFERENCES[inference] + "_pairs")(coupling, b1, b2, n_sweeps, tol, pairs)
    return backend.kernel(INFERENCES[inference])(coupling, b1, b2, n_sweeps, tol)


class PreparedInference(NamedTuple):
    """Parameters on a backend, and their couplings W in the form that the inference kernels read."""

    backend: Backend
    shape: CrbmShape
    params: Params
    coupling: AnyCoupling | None
    inference: str
    n_sweeps: int
    tol: float | None

    @classmethod
    def make(
        cls, shape: CrbmShape, theta: np.ndarray, inference: str, n_sweeps: int, tol: float | None,
        backend: Backend,
    ) -> PreparedInference:  # fmt: skip
        """Copy the parameter vector ``theta`` to the backend; prepare W if the inference needs a kernel."""
        params = shape.split(backend.asarray(theta, np.float32))
        coupled = shape.n_hidden and inference != "independent"
        coupling = prepare_coupling(params.W, backend) if coupled else None
        return cls(backend, shape, params, coupling, inference, n_sweeps, tol)

    def run(self, block: Block, pairs: Array | None = None) -> Inference:
        """Return the log odds of all units, given the rows x of a block.

        If ``pairs`` is given, add P(v_i = 1, h_j = 1), summed over rows, to it.
        """
        _, b1, b2 = compute_block_biases(self.shape, self.params, block, self.backend)
        return infer(self.inference, self.coupling, b1, b2, self.n_sweeps, self.tol, self.backend, pairs)


def count_converged(change: np.ndarray, tol: float | None) -> int:
    """Count rows whose ``change`` of P(unit = 1) in the last sweep is at most ``tol`` (0.001 for None)."""
    return int((change <= (CONVERGED if tol is None else tol)).sum())
