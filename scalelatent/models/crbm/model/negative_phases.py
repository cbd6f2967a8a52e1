r"""Negative phases: how each learner approximates the intractable expectation of the gradient.

All learners are gradient ascent, gradient = positive - negative (Ping and Ihler, 2017, equations 5 and 7):

.. math::

    \partial W = \sum_n v_n \mu_n^T - E[v h^T], \qquad \mu_n = \sigma(W^T v_n + W_{hx} x_n + b_h)

and differ in the second term. Only lssvm differs in both: its hidden units take their best state.

=============  ==========================================================================================
learner        negative term
=============  ==========================================================================================
mle-bp         beliefs of units and pairs by sum-product belief propagation
mle-mf         mean field
cd             a Gibbs chain of k steps from the training row (contrastive divergence, CD-k)
pcd            persistent Gibbs chains, one for each row of a batch (Tieleman, 2008)
cd-percloss    the state of lowest free energy that a search of k steps found, if it is lower than that of the
               row: perceptron loss (Mnih, Larochelle and Hinton, 2011). The search starts at the prediction
               of the logistic part; a step draws h and takes the most probable v
mssvm          loss-augmented marginal MAP by mixed-product belief propagation
lssvm          loss-augmented joint MAP by max-product belief propagation
logistic       the exact probabilities of a model without hidden units
=============  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.kernels.arrays import Array
from scalelatent.models.crbm.kernels import AnyCoupling
from scalelatent.models.crbm.kernels.inference import Inference

from .beliefs import infer
from .energy import Params, compute_hidden_logits, compute_log_loss, compute_negative_free_energy, sigmoid
from .gibbs import Uniforms, gibbs_search, gibbs_steps


@dataclass(frozen=True)
class Phase:
    """Result of a negative phase, for the rows of one gradient."""

    # (rows, v) and (rows, h): expectations, samples or states
    visible: Array
    hidden: Array
    positive: Array  # (rows, h): hidden units of the positive phase
    # (v, h): sum over rows of the expectation of v h^T; None: this sum is visible^T hidden
    pairs: Array | None
    # (rows,): loss. A learner that infers beliefs has the log-loss in nats, summed over units. A learner that
    # samples has the free energy of the row minus that of the negative state
    loss: Array
    wrong: Array  # (rows,): number of units in which the negative phase differs from the row
    inferred: Inference | None = None  # Result of the iterative inference; None if the learner used none
    particles: Array | None = None  # (rows, h): hidden states of the persistent chains after the step (pcd)


@dataclass(frozen=True)
class PhaseInput:
    """Input of a negative phase: the rows of one gradient, on one backend."""

    backend: Backend
    params: Params
    # Couplings W, prepared for the inference kernels; None if the learner sends no messages
    coupling: AnyCoupling | None
    # Outputs of the rows in float32, and biases of the rows' RBMs
    v: Array
    b1: Array
    b2: Array
    n_sweeps: int
    tol: float | None
    # Keys of the random streams
    seed: int
    epoch: int
    rows: np.ndarray
    gibbs_steps: int
    particles: Array | None = None  # (rows, h): hidden states of the persistent chains before the step (pcd)

    @property
    def xp(self) -> ModuleType:
        return self.backend.xp

    @property
    def numbers(self) -> Uniforms:
        """New random streams of the rows; each stream starts at its first number."""
        return Uniforms(
            self.seed, self.epoch, self.rows, lambda a: self.backend.asarray(a, np.float32, "numbers")
        )


def _mle_bp(work: PhaseInput) -> Phase:
    xp, backend = work.xp, work.backend
    pairs = backend.buffer("pairs", work.params.W.shape, work.params.W.dtype)
    pairs[...] = 0
    args = work.coupling, work.b1, work.b2, work.n_sweeps, work.tol, backend, pairs
    found = infer("sum-product", *args)
    return _make_phase_of_beliefs(work, found, sigmoid(found.lh, xp), pairs, found)


def _mle_mf(work: PhaseInput) -> Phase:
    found = infer("mean-field", work.coupling, work.b1, work.b2, work.n_sweeps, work.tol, work.backend)
    return _make_phase_of_beliefs(work, found, sigmoid(found.lh, work.xp), None, found)


def _logistic(work: PhaseInput) -> Phase:
    found = Inference(work.b1, work.b2, None, None)
    return _make_phase_of_beliefs(work, found, work.b2, None, None)


def _make_phase_of_beliefs(
    work: PhaseInput, found: Inference, hidden: Array, pairs: Array | None, inferred: Inference | None
) -> Phase:
    xp, v = work.xp, work.v
    visible = sigmoid(found.lv, xp)
    positive = sigmoid(compute_hidden_logits(work.params, v, work.b2), xp)
    wrong = ((found.lv > 0) != (v > 0)).sum(axis=1)
    loss = compute_log_loss(found.lv, visible, v, xp)
    return Phase(visible, hidden, positive, pairs, loss, wrong, inferred)


def _cd(work: PhaseInput) -> Phase:
    logits = compute_hidden_logits(work.params, work.v, work.b2)
    return _sample_phase(work, logits, sigmoid(logits, work.xp))


def _pcd(work: PhaseInput) -> Phase:
    logits = compute_hidden_logits(work.params, work.v, work.b2)
    assert work.particles is not None
    phase = _sample_phase(work, logits, work.particles)
    # The next step continues from these probabilities, and draws the hidden units first.
    return replace(phase, particles=phase.hidden)


def _sample_phase(work: PhaseInput, logits: Array, start: Array) -> Phase:
    sample, hidden = gibbs_steps(
        work.params, work.b1, work.b2, start, work.numbers, work.gibbs_steps, work.xp
    )
    loss = _compute_energy_gap(work, logits, sample)
    wrong = (sample != work.v).sum(axis=1)
    return Phase(sample, hidden, sigmoid(logits, work.xp), None, loss, wrong)


def _compute_energy_gap(work: PhaseInput, logits: Array, other: Array) -> Array:
    """Return the free energy of the rows minus that of other visible states, (rows,)."""
    theirs = compute_negative_free_energy(
        other, work.b1, compute_hidden_logits(work.params, other, work.b2), work.xp
    )
    return theirs - compute_negative_free_energy(work.v, work.b1, logits, work.xp)


def _cd_percloss(work: PhaseInput) -> Phase:
    xp, v = work.xp, work.v
    logits = compute_hidden_logits(work.params, v, work.b2)
    positive = sigmoid(logits, xp)
    start = (work.b1 > 0).astype(v.dtype)
    found, hidden, energy = gibbs_search(
        work.params, work.b1, work.b2, start, work.numbers, work.gibbs_steps, xp
    )
    loss = energy - compute_negative_free_energy(v, work.b1, logits, xp)
    wrong = (found != v).sum(axis=1)
    # The row itself is a candidate: if the search found no lower energy, loss and gradient are 0.
    better = (loss > 0)[:, None]
    found, hidden = xp.where(better, found, v), xp.where(better, hidden, positive)
    return Phase(found, hidden, positive, None, xp.maximum(loss, loss.dtype.type(0)), wrong)


def _augment_biases(work: PhaseInput) -> Array:
    """Return b1 plus the change of the Hamming loss if a unit is 1, as loss-augmented inference needs it."""
    one = work.b1.dtype.type(1)
    return work.b1 + work.xp.where(work.v > 0, -one, one)


def _mssvm(work: PhaseInput) -> Phase:
    xp = work.xp
    args = work.coupling, _augment_biases(work), work.b2, work.n_sweeps, work.tol, work.backend
    found = infer("mixed-product", *args)
    states = (found.lv > 0).astype(work.v.dtype)
    hidden = sigmoid(compute_hidden_logits(work.params, states, work.b2), xp)
    logits = compute_hidden_logits(work.params, work.v, work.b2)
    wrong = (states != work.v).sum(axis=1)
    loss = _compute_energy_gap(work, logits, states) + wrong.astype(states.dtype)
    return Phase(states, hidden, sigmoid(logits, xp), None, loss, wrong, found)


def _lssvm(work: PhaseInput) -> Phase:
    v = work.v
    args = work.coupling, _augment_biases(work), work.b2, work.n_sweeps, work.tol, work.backend
    found = infer("max-product", *args)
    states, hidden = (found.lv > 0).astype(v.dtype), (found.lh > 0).astype(v.dtype)
    logits = compute_hidden_logits(work.params, v, work.b2)
    positive = (logits > 0).astype(v.dtype)
    wrong = (states != v).sum(axis=1)
    theirs = (states * work.b1).sum(axis=1) + (
        hidden * compute_hidden_logits(work.params, states, work.b2)
    ).sum(axis=1)
    own = (v * work.b1).sum(axis=1) + (positive * logits).sum(axis=1)
    return Phase(states, hidden, positive, None, theirs + wrong.astype(v.dtype) - own, wrong, found)


@dataclass(frozen=True)
class Learner:
    """Description of a learner: its negative phase, its inference for predictions, and what it uses."""

    negative: Callable[[PhaseInput], Phase]
    # Name of the inference that predicts; it matches the training, as in Ping and Ihler (2017)
    inference: str
    sends_messages: bool = True  # Whether the negative phase sends messages, which need the coupling of W
    gibbs_steps: int = 0  # Default number of Gibbs steps; 0: the learner does not sample


LEARNERS: dict[str, Learner] = {
    "mle-bp": Learner(_mle_bp, "sum-product"),
    "mle-mf": Learner(_mle_mf, "mean-field"),
    "cd": Learner(_cd, "mean-field", sends_messages=False, gibbs_steps=1),
    "pcd": Learner(_pcd, "mean-field", sends_messages=False, gibbs_steps=1),
    "cd-percloss": Learner(_cd_percloss, "mean-field", sends_messages=False, gibbs_steps=10),
    "mssvm": Learner(_mssvm, "mixed-product"),
    "lssvm": Learner(_lssvm, "max-product"),
    "logistic": Learner(_logistic, "independent", sends_messages=False),
}
