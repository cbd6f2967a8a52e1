r"""The negative phases: what each way of learning puts in the place of the intractable expectation.

All learners are gradient ascent, gradient = positive - negative (Ping and Ihler, 2017, equations 5 and 7):

.. math::

    \partial W = \sum_n v_n \mu_n^T - E[v h^T], \qquad \mu_n = \sigma(W^T v_n + W_{hx} x_n + b_h)

and they differ in the second term alone (lssvm in both: its hidden units take their best state).

=============  ==========================================================================================
learner        negative term
=============  ==========================================================================================
mle-bp         beliefs of units and pairs by sum-product belief propagation
mle-mf         mean field
cd             a Gibbs chain of k steps from the training row (contrastive divergence, CD-k)
pcd            Gibbs chains that go on from step to step: one for each place of a batch (Tieleman, 2008)
cd-percloss    the state of lowest free energy that a search of k steps from the logistic part's prediction
               met (h is drawn, v is the most probable one), where it is below the row's own: perceptron
               loss, after Mnih, Larochelle and Hinton (2011)
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
from .energy import Params, hidden_logits, negative_free_energy, nll_of_units, sigmoid
from .gibbs import Uniforms, gibbs_search, gibbs_steps


@dataclass(frozen=True)
class Phase:
    """The negative phase of some rows."""

    # visible, hidden: (rows, v) and (rows, h): expectations, samples or states
    visible: Array
    hidden: Array
    # (rows, h): hidden units of the positive phase
    positive: Array
    # (v, h), or None: sum over rows of the expectation of v h^T; None: visible^T hidden
    pairs: Array | None
    # (rows,): what the learner's objective is made of: log-loss of the units' beliefs (nats,
    # summed over units) where there are beliefs, else how much the negative states beat the row, in energy
    loss: Array
    # (rows,): units that the negative phase has otherwise than the row
    wrong: Array
    # where there was an inference that may converge
    inferred: Inference | None = None
    # (rows, h), or None: hidden states that go on in the next step (pcd)
    particles: Array | None = None


@dataclass(frozen=True)
class PhaseInput:
    """What a negative phase works on: rows of one gradient, on one backend."""

    backend: Backend
    params: Params
    # See :func:`.beliefs.couple`; None where no inference is run
    coupling: AnyCoupling | None
    # v, b1, b2: Targets as numbers, biases of the rows' RBMs
    v: Array
    b1: Array
    b2: Array
    n_sweeps: int
    # float or None
    tol: float | None
    # seed, epoch, rows: Keys of the random numbers
    seed: int
    epoch: int
    rows: np.ndarray
    gibbs_steps: int
    # (2, v): loss of a unit that is 1 where the row has 0, and 0 where it has 1
    cost: Array
    # (rows, h), or None
    particles: Array | None = None
    # Weight of new messages
    damping: float = 1.0

    @property
    def xp(self) -> ModuleType:
        return self.backend.xp

    @property
    def numbers(self) -> Uniforms:
        """Uniform numbers of each row, from the first."""
        return Uniforms(
            self.seed, self.epoch, self.rows, lambda a: self.backend.asarray(a, np.float32, "numbers")
        )


def _mle_bp(work: PhaseInput) -> Phase:
    xp, backend = work.xp, work.backend
    pairs = backend.buffer("pairs", work.params.W.shape, work.params.W.dtype)
    pairs[...] = 0
    args = work.coupling, work.b1, work.b2, work.n_sweeps, work.tol, backend, pairs
    found = infer("sum-product", *args, work.damping)
    return _of_beliefs(work, found, sigmoid(found.lh, xp), pairs, found)


def _mle_mf(work: PhaseInput) -> Phase:
    found = infer("mean-field", work.coupling, work.b1, work.b2, work.n_sweeps, work.tol, work.backend)
    return _of_beliefs(work, found, sigmoid(found.lh, work.xp), None, found)


def _logistic(work: PhaseInput) -> Phase:
    found = Inference(work.b1, work.b2, None, None)
    return _of_beliefs(work, found, work.b2, None, None)


def _of_beliefs(
    work: PhaseInput, found: Inference, hidden: Array, pairs: Array | None, inferred: Inference | None
) -> Phase:
    xp, v = work.xp, work.v
    visible = sigmoid(found.lv, xp)
    positive = sigmoid(hidden_logits(work.params, v, work.b2), xp)
    wrong = ((found.lv > 0) != (v > 0)).sum(axis=1)
    loss = nll_of_units(found.lv, visible, v, xp)
    return Phase(visible, hidden, positive, pairs, loss, wrong, inferred)


def _cd(work: PhaseInput) -> Phase:
    logits = hidden_logits(work.params, work.v, work.b2)
    return _of_samples(work, logits, sigmoid(logits, work.xp))


def _pcd(work: PhaseInput) -> Phase:
    logits = hidden_logits(work.params, work.v, work.b2)
    assert work.particles is not None
    phase = _of_samples(work, logits, work.particles)
    # The hidden state goes on; its own draw comes first in the next step.
    return replace(phase, particles=phase.hidden)


def _of_samples(work: PhaseInput, logits: Array, start: Array) -> Phase:
    sample, hidden = gibbs_steps(
        work.params, work.b1, work.b2, start, work.numbers, work.gibbs_steps, work.xp
    )
    loss = _advantage(work, logits, sample)
    wrong = (sample != work.v).sum(axis=1)
    return Phase(sample, hidden, sigmoid(logits, work.xp), None, loss, wrong)


def _advantage(work: PhaseInput, logits: Array, other: Array) -> Array:
    """-F of other visible states less -F of the rows' own."""
    theirs = negative_free_energy(other, work.b1, hidden_logits(work.params, other, work.b2), work.xp)
    return theirs - negative_free_energy(work.v, work.b1, logits, work.xp)


def _cd_percloss(work: PhaseInput) -> Phase:
    xp, v = work.xp, work.v
    logits = hidden_logits(work.params, v, work.b2)
    positive = sigmoid(logits, xp)
    start = (work.b1 > 0).astype(v.dtype)
    found, hidden, energy = gibbs_search(
        work.params, work.b1, work.b2, start, work.numbers, work.gibbs_steps, xp
    )
    loss = energy - negative_free_energy(v, work.b1, logits, xp)
    wrong = (found != v).sum(axis=1)
    # The row itself is a candidate for the minimum: where nothing better was found the loss is 0, and flat.
    better = (loss > 0)[:, None]
    found, hidden = xp.where(better, found, v), xp.where(better, hidden, positive)
    return Phase(found, hidden, positive, None, xp.maximum(loss, loss.dtype.type(0)), wrong)


def _augmented(work: PhaseInput) -> Array:
    """b1 with the loss of each unit: what loss-augmented inference runs on."""
    return work.b1 + work.xp.where(work.v > 0, -work.cost[1], work.cost[0])


def _loss_of(work: PhaseInput, states: Array) -> tuple[Array, Array]:
    wrong = states != work.v
    return (wrong * work.xp.where(work.v > 0, work.cost[1], work.cost[0])).sum(axis=1), wrong.sum(axis=1)


def _mssvm(work: PhaseInput) -> Phase:
    xp = work.xp
    args = work.coupling, _augmented(work), work.b2, work.n_sweeps, work.tol, work.backend
    found = infer("mixed-product", *args)
    states = (found.lv > 0).astype(work.v.dtype)
    hidden = sigmoid(hidden_logits(work.params, states, work.b2), xp)
    logits = hidden_logits(work.params, work.v, work.b2)
    delta, wrong = _loss_of(work, states)
    loss = _advantage(work, logits, states) + delta
    return Phase(states, hidden, sigmoid(logits, xp), None, loss, wrong, found)


def _lssvm(work: PhaseInput) -> Phase:
    v = work.v
    args = work.coupling, _augmented(work), work.b2, work.n_sweeps, work.tol, work.backend
    found = infer("max-product", *args, damping=work.damping)
    states, hidden = (found.lv > 0).astype(v.dtype), (found.lh > 0).astype(v.dtype)
    logits = hidden_logits(work.params, v, work.b2)
    positive = (logits > 0).astype(v.dtype)
    delta, wrong = _loss_of(work, states)
    theirs = (states * work.b1).sum(axis=1) + (hidden * hidden_logits(work.params, states, work.b2)).sum(
        axis=1
    )
    own = (v * work.b1).sum(axis=1) + (positive * logits).sum(axis=1)
    return Phase(states, hidden, positive, None, theirs + delta - own, wrong, found)


@dataclass(frozen=True)
class Learner:
    """One way of learning."""

    # :class:`PhaseInput` -> :class:`Phase`
    negative: Callable[[PhaseInput], Phase]
    # What predicts with the weights that it learns: matched to training, as the paper asks for
    inference: str
    # The negative phase runs an inference over the coupling of W
    couples: bool = True
    # Steps of its Gibbs chains unless asked otherwise; 0 where there are none
    gibbs_steps: int = 0
    # It learns what wrong outputs cost
    costs: bool = False


LEARNERS: dict[str, Learner] = {
    "mle-bp": Learner(_mle_bp, "sum-product"),
    "mle-mf": Learner(_mle_mf, "mean-field"),
    "cd": Learner(_cd, "mean-field", couples=False, gibbs_steps=1),
    "pcd": Learner(_pcd, "mean-field", couples=False, gibbs_steps=1),
    "cd-percloss": Learner(_cd_percloss, "mean-field", couples=False, gibbs_steps=10),
    "mssvm": Learner(_mssvm, "mixed-product", costs=True),
    "lssvm": Learner(_lssvm, "max-product", costs=True),
    "logistic": Learner(_logistic, "independent", couples=False),
}
