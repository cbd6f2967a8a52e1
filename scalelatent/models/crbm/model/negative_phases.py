r"""Negative phases: how each learner approximates the intractable expectation of the gradient.

All learners are gradient ascent, gradient = positive - negative (Ping and Ihler, 2017, equations 5 and 7):

.. math::

    \partial W = \sum_n v_n \mu_n^T - E[v h^T], \qquad \mu_n = \sigma(W^T v_n + W_{hx} x_n + b_h)

and differ in the second term (v_n are the outputs of row n, and sigma is the sigmoid). Only lssvm differs in
both: its hidden units take their most probable state.

=============  ==========================================================================================
learner        negative term
=============  ==========================================================================================
mle-bp         marginals of units and of pairs (v_i, h_j) by sum-product belief propagation
mle-mf         marginals of units by mean field
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
from .gibbs import Uniforms, run_gibbs_steps, search_lowest_energy


@dataclass(frozen=True)
class Phase:
    """Result of a negative phase (the model's expectations) for the rows of one gradient."""

    # (rows, outputs) and (rows, hidden units): expectations, samples or most probable states of v and h
    visible: Array
    hidden: Array
    positive: Array  # (rows, hidden units): expectation of the hidden units given the outputs of the row
    # (outputs, hidden units): expectation of v h^T, summed over rows; None if it equals visible^T hidden
    pairs: Array | None
    # (rows,): log-loss in nats, summed over outputs. Learners that compute samples or states measure another
    # loss: free energy of the row minus that of the sample or state (lssvm: energy with the most probable h),
    # plus the number of wrong outputs for lssvm and mssvm
    loss: Array
    wrong: Array  # (rows,): number of outputs in which the expectation, sample or state differs from the row
    inferred: Inference | None = None  # Result of the inference kernel; None if the learner used no kernel
    particles: Array | None = None  # (rows, hidden units): for pcd, P(h = 1) from which the next step draws h


@dataclass(frozen=True)
class PhaseInput:
    """Input of a negative phase (the model's expectations): the rows of one gradient, on one backend."""

    backend: Backend
    params: Params
    # Couplings W in the form that the inference kernels read; None if the learner uses no kernel
    coupling: AnyCoupling | None
    v: Array  # float32 (rows, outputs): outputs of the rows
    b1: Array  # (rows, outputs): biases of the outputs in each row's RBM
    b2: Array  # (rows, hidden units): biases of the hidden units in each row's RBM
    n_sweeps: int
    tol: float | None
    # Seed, epoch and row numbers select the random streams of the rows
    seed: int
    epoch: int
    rows: np.ndarray
    gibbs_steps: int
    particles: Array | None = None  # (rows, hidden units): for pcd, P(h = 1) after the last step

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
    work: PhaseInput, log_odds: Inference, hidden: Array, pairs: Array | None, kernel_result: Inference | None
) -> Phase:
    xp, v = work.xp, work.v
    visible = sigmoid(log_odds.lv, xp)
    positive = sigmoid(compute_hidden_logits(work.params, v, work.b2), xp)
    wrong = ((log_odds.lv > 0) != (v > 0)).sum(axis=1)
    loss = compute_log_loss(log_odds.lv, visible, v, xp)
    return Phase(visible, hidden, positive, pairs, loss, wrong, kernel_result)


def _cd(work: PhaseInput) -> Phase:
    logits = compute_hidden_logits(work.params, work.v, work.b2)
    return _sample_phase(work, logits, sigmoid(logits, work.xp))


def _pcd(work: PhaseInput) -> Phase:
    logits = compute_hidden_logits(work.params, work.v, work.b2)
    assert work.particles is not None
    phase = _sample_phase(work, logits, work.particles)
    # The next step starts the Gibbs chains from these probabilities: it first draws the hidden units.
    return replace(phase, particles=phase.hidden)


def _sample_phase(work: PhaseInput, logits: Array, start: Array) -> Phase:
    sample, hidden = run_gibbs_steps(
        work.params, work.b1, work.b2, start, work.numbers, work.gibbs_steps, work.xp
    )
    loss = _compute_energy_gap(work, logits, sample)
    wrong = (sample != work.v).sum(axis=1)
    return Phase(sample, hidden, sigmoid(logits, work.xp), None, loss, wrong)


def _compute_energy_gap(work: PhaseInput, logits: Array, other: Array) -> Array:
    """Return, for each row, the free energy of its outputs v minus that of the outputs ``other``.

    ``logits`` are the log odds of the hidden units given v.
    """
    other_logits = compute_hidden_logits(work.params, other, work.b2)
    negative = compute_negative_free_energy(other, work.b1, other_logits, work.xp)
    return negative - compute_negative_free_energy(work.v, work.b1, logits, work.xp)


def _cd_percloss(work: PhaseInput) -> Phase:
    xp, v = work.xp, work.v
    logits = compute_hidden_logits(work.params, v, work.b2)
    positive = sigmoid(logits, xp)
    start = (work.b1 > 0).astype(v.dtype)
    found, hidden, energy = search_lowest_energy(
        work.params, work.b1, work.b2, start, work.numbers, work.gibbs_steps, xp
    )
    loss = energy - compute_negative_free_energy(v, work.b1, logits, xp)
    wrong = (found != v).sum(axis=1)
    # If the search found no outputs of lower energy than the row's own, loss and gradient of the row are 0.
    better = (loss > 0)[:, None]
    found, hidden = xp.where(better, found, v), xp.where(better, hidden, positive)
    return Phase(found, hidden, positive, None, xp.maximum(loss, loss.dtype.type(0)), wrong)


def _augment_biases(work: PhaseInput) -> Array:
    """Return the biases b1 of the outputs, changed so that wrong outputs gain 1 (loss-augmented inference).

    A bias grows by 1 if the true output is 0, and falls by 1 if it is 1.
    """
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
    state_logits = compute_hidden_logits(work.params, states, work.b2)
    found_score = (states * work.b1).sum(axis=1) + (hidden * state_logits).sum(axis=1)
    true_score = (v * work.b1).sum(axis=1) + (positive * logits).sum(axis=1)
    loss = found_score + wrong.astype(v.dtype) - true_score
    return Phase(states, hidden, positive, None, loss, wrong, found)


@dataclass(frozen=True)
class Learner:
    """A learner: the function of its negative phase (the model's expectations), and its default settings."""

    negative: Callable[[PhaseInput], Phase]
    # Default inference of predictions: the inference of training or, if training draws samples, mean field
    inference: str
    sends_messages: bool = True  # Whether training uses an inference kernel, which needs the couplings W
    gibbs_steps: int = 0  # Default number of Gibbs steps; a learner with 0 does not sample


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
