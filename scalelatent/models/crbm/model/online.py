r"""Learning conditional RBMs by minibatches: an :class:`~..base.OnlineLearner` over the engine's loop.

A step takes a batch, cut into chains of rows; each chain adds the gradient of its rows, and the step climbs

.. math::

    u \leftarrow \gamma u + \eta (g / n - \lambda \theta_W), \qquad \theta \leftarrow \theta + u

with the mean gradient of the batch, momentum gamma and weight decay lambda (on the three matrices, not on
the biases). With ``local_steps`` a chain takes that many steps by itself, over batches of its own, and the
step averages what the chains have become. One chain is then plain minibatch learning, with the engine asked
once in many steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Targets, Wants
from scalelatent.errors import DivergenceError
from scalelatent.kernels.arrays import Array, aligned, lined_up
from scalelatent.models.crbm.kernels import AnyCoupling
from scalelatent.models.crbm.kernels.inference import WeightError
from scalelatent.models.crbm.kernels.update import StepRates, Way, add_to, climb, moved

from .beliefs import couple
from .energy import CrbmShape, Observed, block_biases
from .gradient import add_of_weights, climb_factors, climb_phase, difference
from .negative_phases import LEARNERS, Phase, PhaseInput
from .predict import CrbmScoring, sweeps_in
from .state import N_SUMS, NOT_FINITE, CrbmState, Measures, diverged, shares, what_diverged


class PreparedStep(NamedTuple):
    """Parameters where the products are, what inference needs of W, the state, the losses of units."""

    backend: Backend
    theta: Array
    coupling: AnyCoupling | None
    state: CrbmState
    cost: Array


@dataclass(frozen=True)
class CrbmLearner:
    """Minibatch gradients of a conditional RBM."""

    shape: CrbmShape
    # A key of :data:`.learners.LEARNERS`
    learner: str
    # float64 (epochs,): learning rate of each epoch; the last one goes on
    rates: np.ndarray
    momentum: float
    weight_decay: float
    # int or None: sweeps of an inference; None: 7 + epoch, epochs counted from 1
    n_sweeps: int | None
    # float or None: end a row's sweeps where no belief moves by more
    tol: float | None
    gibbs_steps: int
    # float32 (2, v): loss of a unit that is wrongly 1, and wrongly 0 (mssvm and lssvm)
    cost: np.ndarray
    # n_chains, chain_rows: Chains of a step, and rows of one gradient of a chain
    n_chains: int
    chain_rows: int
    # Gradients that a chain climbs by itself before chains are averaged; 0: chains return gradients
    local_steps: int
    seed: int
    # Epochs without a better validation error before the end; 0: all epochs
    patience: int
    has_validation: bool
    # targets, validation_targets: What v is of the rows, and of those that are validated on
    targets: Targets
    validation_targets: Targets
    validation_inference: str
    # Weight of new messages
    damping: float = 1.0
    # Share by which an error has to be below the best before to count as better for patience
    gain: float = 0.0

    # -- the contract ----------------------------------------------------------------------------------------

    @property
    def wants(self) -> Wants:
        """CSR rows as they are, and outputs."""
        return Wants(csr=True, targets=self.targets)

    def layout(self) -> Layout:
        """Gradient (of local steps the displacement) by field, or its factors; then what is measured."""
        shape, fields = self.shape, self.shape.layout.fields
        factors: tuple[tuple[str, int], ...] = ()
        if self.factored:
            fields = fields[:1]
            factors = (("dv", shape.n_visible), ("dh", shape.n_hidden), ("x", shape.n_observed))
        more: list[tuple[str, tuple[int, ...]]] = [("sums", (N_SUMS,)), ("chains", ())]
        if self.local_steps and self.momentum:
            more.append(("velocity", (shape.n_parameters,)))
        if self.learner == "pcd":
            more.append(("particles", (self.n_particles, shape.n_hidden)))
        return Layout((*fields, *more), factors)

    @property
    def factored(self) -> bool:
        """Chains return dv, dh and x of their rows, whose products the step makes: where a batch has so few
        rows that these are fewer numbers than the gradients of Wvx and Whx.
        """
        shape, rows = self.shape, self.n_chains * self.chain_rows
        units = shape.n_visible + shape.n_hidden
        return not self.local_steps and rows * (units + shape.n_observed) < units * shape.n_observed

    def flops_per_row(self) -> float:
        """Products, and the messages of a typical inference."""
        shape = self.shape
        edges = shape.n_visible * shape.n_hidden
        sweeps = (self.n_sweeps or 16) if LEARNERS[self.learner].couples else self.gibbs_steps
        return 4.0 * shape.n_weights + 16.0 * edges * sweeps

    @property
    def n_particles(self) -> int:
        """Persistent chains: one for each place of a gradient's rows."""
        return self.n_chains * self.chain_rows if self.learner == "pcd" else 0

    def start(self, theta: np.ndarray) -> CrbmState:
        none = np.zeros(0, dtype=np.float32)
        particles = np.full((self.n_particles, self.shape.n_hidden), 0.5, dtype=np.float32)
        return CrbmState(
            theta=theta,
            velocity=np.zeros_like(theta) if self.momentum else none,
            best=theta if self.has_validation else none,
            particles=particles,
            sums=np.zeros(N_SUMS),
        )

    def prepare(self, state: CrbmState, backend: Backend) -> PreparedStep:
        # A walk copies them in any case.
        theta = backend.asarray(state.theta if self.local_steps else lined_up(state.theta), np.float32)
        coupling = None
        if LEARNERS[self.learner].couples and not self.local_steps:
            coupling = couple(self.shape.split(theta).W, backend)
        return PreparedStep(backend, theta, coupling, state, backend.asarray(self.cost, np.float32))

    def run_chain(self, prepared: PreparedStep, block: Block, stats: Stats) -> None:
        """Gradient of the rows; in local steps, where a walk over them leads."""
        if self.local_steps:
            self._walk(prepared, block, stats)
            return
        backend, theta, coupling, state, cost = prepared
        kept = self._particles(backend, state, block)
        with self._watched(backend, theta, state):
            seen, v, phase = self._phase(backend, theta, coupling, cost, block, kept)
        if self.factored:
            self._add_factors(stats, backend, block, v, phase)
        else:
            gradient = difference(self.shape, backend, theta, seen, v, phase)
            add_to(stats.vector[: self.shape.n_parameters], backend.to_host(gradient))
        measures = Measures()
        measures.add(phase)
        stats["sums"][...] += measures.sums(backend, self.tol)
        self._keep_particles(stats, backend, state, block, phase.particles)

    def step(self, state: CrbmState, stats: Stats, n_rows: int) -> CrbmState:
        """Climb the gradient of a batch of ``n_rows`` rows, or average what the chains have become."""
        if self.local_steps:
            share = 1.0 / float(stats["chains"])
            theta, velocity = moved(state.theta, self.gradient(stats), share), state.velocity
            if self.momentum:
                velocity = moved(velocity, stats["velocity"], share)
        else:
            theta, velocity = (aligned(a.shape) for a in (state.theta, state.velocity))
            way = Way(state.theta, state.velocity, theta, velocity)
            pace = self._pace(n_rows, state.iteration)
            if self.factored:
                w, dv, dh, x = (stats[name] for name in ("W", "dv", "dh", "x"))
                climb_factors(self.shape, way, w, dv, dh, x, pace)
            else:
                climb(way, self.gradient(stats), self.shape.n_weights, pace)
        self.check_safe(theta, state)
        particles = state.particles
        if self.n_particles:
            particles = (particles + stats["particles"]).astype(np.float32)
        return replace(
            state,
            theta=theta,
            velocity=velocity,
            particles=particles,
            sums=state.sums + stats["sums"],
            steps=state.steps + 1,
        )

    def end_epoch(self, state: CrbmState) -> CrbmState:
        """Measurements of the epoch; a pure function."""
        objective, train_error, converged = shares(state, self.shape.n_visible)
        return replace(
            state,
            objective=objective,
            train_error=train_error,
            converged=converged,
            sums=np.zeros(N_SUMS),
            stale=state.stale + 1,
            iteration=state.iteration + 1,
        )

    def validation(self) -> CrbmScoring:
        """Wrong units over the validation rows, with the sweeps of training."""
        return CrbmScoring(
            self.shape,
            self.validation_inference,
            self.n_sweeps,
            self.tol,
            self.validation_targets,
            damping=self.damping,
        )

    def validated(self, state: CrbmState, stats: Stats) -> CrbmState:
        """Keep the best; ends of epochs count ``stale``, however often they validate."""
        error, changed = CrbmScoring.errors(stats)
        state = replace(state, validation_error=error, changed_error=changed)
        if error < state.best_error:
            stale = -1 if error < (1 - self.gain) * state.best_error else state.stale
            return replace(
                state, best=state.theta, best_error=error, best_epoch=state.iteration + 1, stale=stale
            )
        return state

    def summary(self, state: CrbmState) -> dict[str, float | int | None]:
        """Measurements of the epoch; in mid-epoch, of its part that is done."""
        objective, train_error, converged = state.objective, state.train_error, state.converged
        if state.sums[2]:
            objective, train_error, converged = shares(state, self.shape.n_visible)
        epoch = state.iteration + bool(state.sums[2])
        out: dict[str, float | int | None] = {
            "objective": objective,
            "train_error": train_error,
            "validation_error": state.validation_error if self.has_validation else None,
            "changed_error": None if np.isnan(state.changed_error) else state.changed_error,
            "best_error": state.best_error if np.isfinite(state.best_error) else None,
            "converged": converged if LEARNERS[self.learner].couples else None,
            "learning_rate": self.rate(max(epoch - 1, 0)),
            "n_sweeps": sweeps_in(self.n_sweeps, epoch) if LEARNERS[self.learner].couples else None,
        }
        return out

    def is_done(self, state: CrbmState) -> bool:
        """Validation has not improved for too long."""
        return bool(self.patience and self.has_validation and state.stale >= self.patience)

    # -- what the estimator asks -----------------------------------------------------------------------------

    def weights(self, state: CrbmState) -> tuple[np.ndarray, int]:
        """(parameters to keep, the epoch that they are of): the best on validation rows, else the last."""
        if self.has_validation and state.best_epoch:
            return state.best, state.best_epoch
        return state.theta, max(state.iteration, 1)

    def rate(self, epoch: int) -> float:
        """Learning rate in an epoch, counted from 0."""
        return float(self.rates[min(epoch, len(self.rates) - 1)])

    def check_safe(self, theta: np.ndarray, state: CrbmState) -> None:
        """Refuse parameters that are not finite, and couplings that float32 messages do not bear."""
        what = what_diverged(self.shape, theta)
        if what:
            raise self._diverged(what, state)

    def _diverged(self, what: str, state: CrbmState) -> DivergenceError:
        rate = self.rate(state.iteration)
        return diverged(what, state.iteration + 1, state.steps + 1, rate, self.weight_decay)

    # -- gradients -------------------------------------------------------------------------------------------

    def gradient(self, stats: Stats) -> np.ndarray:
        """The sum over rows of positive less negative, a flat vector (of local steps the displacement);
        where chains do not return factors of it.
        """
        return stats.vector[: self.shape.n_parameters]

    def _phase(
        self,
        backend: Backend,
        theta: Array,
        coupling: AnyCoupling | None,
        cost: Array,
        block: Block,
        particles: Array | None,
    ) -> tuple[Observed | None, Array, Phase]:
        """(x where the products are, v as numbers, negative phase) of some rows."""
        params = self.shape.split(theta)
        assert block.rows is not None
        v = backend.asarray(block.y, np.float32, "v")
        seen, b1, b2 = block_biases(self.shape, params, block, backend)
        n_sweeps = sweeps_in(self.n_sweeps, block.epoch + 1)
        work = PhaseInput(
            backend, params, coupling, v, b1, b2, n_sweeps, self.tol, self.seed, block.epoch, block.rows,
            self.gibbs_steps, cost, particles, self.damping,
        )  # fmt: skip
        return seen, v, LEARNERS[self.learner].negative(work)

    def _add_factors(self, stats: Stats, backend: Backend, block: Block, v: Array, phase: Phase) -> None:
        add_of_weights(backend, v, phase, stats["W"])
        stats["dv"][...] = backend.to_host(v - phase.visible)
        stats["dh"][...] = backend.to_host(phase.positive - phase.hidden)
        stats["x"][...] = block.x if isinstance(block.x, np.ndarray) else block.x.to_dense()

    def _pace(self, n_rows: int, epoch: int) -> StepRates:
        rate = self.rate(epoch)
        return StepRates(rate / n_rows, rate * self.weight_decay, self.momentum)

    def _walk(self, prepared: PreparedStep, block: Block, stats: Stats) -> None:
        """Climb gradient after gradient over the rows of a chain; adds how far it came."""
        backend, theta, _, state, cost = prepared
        xp, first = backend.xp, theta
        theta = backend.buffer("theta", first.shape, first.dtype)
        theta[...], velocity = first, backend.asarray(state.velocity, np.float32).copy()
        way, kept = Way(theta, velocity, theta, velocity), self._particles(backend, state, block)
        measures = Measures()
        for a in range(0, len(block.x), self.chain_rows):
            part = rows_of(block, a, a + self.chain_rows)
            n = len(part.x)
            some = None if kept is None else kept[:n]
            with self._watched(backend, theta, state):
                couples = LEARNERS[self.learner].couples
                coupling = couple(self.shape.split(theta).W, backend) if couples else None
                seen, v, phase = self._phase(backend, theta, coupling, cost, part, some)
            climb_phase(self.shape, backend, way, seen, v, phase, self._pace(n, block.epoch))
            measures.add(phase)
            if kept is not None:
                kept[:n] = phase.particles
        stats["sums"][...] += measures.sums(backend, self.tol)
        add_to(stats.vector[: self.shape.n_parameters], backend.to_host(theta - first))
        if self.momentum:
            before = backend.asarray(state.velocity, np.float32)
            stats["velocity"][...] += backend.to_host(xp.subtract(velocity, before))
        stats["chains"][...] += 1
        self._keep_particles(stats, backend, state, block, kept)

    @contextmanager
    def _watched(self, backend: Backend, theta: Array, state: CrbmState) -> Iterator[None]:
        """Weights and biases that a phase cannot bear end the fit as in a step."""
        try:
            yield
        except WeightError as error:
            theta = backend.to_host(theta)
            self.check_safe(theta, state)
            raise self._diverged(str(error) if np.isfinite(theta).all() else NOT_FINITE, state) from error

    # -- persistent chains -----------------------------------------------------------------------------------

    def _places(self, block: Block) -> slice:
        first = block.chain * self.chain_rows
        return slice(first, first + min(len(block.x), self.chain_rows))

    def _particles(self, backend: Backend, state: CrbmState, block: Block) -> Array | None:
        """Hidden states of the persistent chains at a block's places; None where there are none."""
        if not self.n_particles:
            return None
        return backend.asarray(state.particles[self._places(block)].copy(), np.float32)

    def _keep_particles(
        self, stats: Stats, backend: Backend, state: CrbmState, block: Block, particles: Array | None
    ) -> None:
        if particles is not None:
            at = self._places(block)
            # Additive, as all statistics are: what has changed.
            stats["particles"][at] += backend.to_host(particles).astype(np.float64) - state.particles[at]


def rows_of(block: Block, start: int, stop: int) -> Block:
    """Some rows of a minibatch's block."""
    part = slice(start, stop)
    assert block.rows is not None
    assert block.y is not None
    numbers = block.rows[part]
    return replace(block, x=block.x[part], y=block.y[part], rows=numbers, start=int(numbers[0]))
