r"""Minibatch learning of conditional RBMs, an :class:`~scalelatent.contract.learners.OnlineLearner`.

A step takes a batch of n rows, which is divided into parts called chains. (Persistent Gibbs chains are
something else: hidden states that Gibbs sampling carries from step to step.) Each chain computes the gradient
of its rows, and the step updates the parameters theta by

.. math::

    u \leftarrow \gamma u + \eta (g / n - \lambda \theta_W), \qquad \theta \leftarrow \theta + u

with the summed gradient g, the learning rate eta, momentum gamma, and the weight decay lambda of the three
matrices theta_W; biases do not decay. With ``local_steps`` each chain takes that many steps on batches of its
own, and the step averages the parameters of the chains. One chain with local steps is plain minibatch
learning, for which the engine needs fewer calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements, Targets
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.errors import DivergenceError
from scalelatent.kernels.arrays import Array, align_copy, aligned_empty
from scalelatent.models.crbm.kernels import AnyCoupling
from scalelatent.models.crbm.kernels.inference import (
    MAX_WEIGHT,
    MOST_CHAINS,
    WeightError,
    find_largest_magnitude,
)
from scalelatent.models.crbm.kernels.products import MAX_ROWS
from scalelatent.models.crbm.kernels.update import StepArrays, StepRates, add_scaled, add_to, ascend

from .beliefs import choose_n_sweeps, count_converged, prepare_coupling
from .columns import ColumnUnits
from .energy import ChainInputs, CrbmShape, Observed, are_usable, compute_block_biases, compute_chain_inputs
from .gradient import add_weight_gradient, ascend_factors, ascend_phase, compute_gradient
from .negative_phases import LEARNERS, Phase, PhaseInput
from .predict import CrbmScoring
from .state import (
    N_SUMS,
    NOT_FINITE,
    CrbmState,
    PhaseMeasures,
    compute_shares,
    find_divergence,
    make_divergence_error,
)

# The learning rate is multiplied by this factor when the validation error has stopped falling. The value was
# measured on the two multi-label datasets of benchmarks/rivals.py.
RATE_DROP = 0.25
# Learners for which a GPU computes all chains (parts of a batch) of a step in one launch, and their kernels.
GPU_CHAIN_KERNELS = {"mle-bp": "sum_product", "mle-mf": "mean_field"}


class PreparedStep(NamedTuple):
    """Parameters of one step on the backend, and the state of the fit before the step."""

    backend: Backend
    theta: Array
    coupling: AnyCoupling | None  # W as the inference kernels read it; None if the learner uses no kernel
    state: CrbmState


@dataclass(frozen=True)
class GpuState:
    """State of a fit between two steps, with the parameters on a GPU."""

    state: CrbmState  # state whose ``theta`` is a GPU array; a step does not overwrite this array
    largest: float  # largest |W|
    backend: Backend


class ChainSums(NamedTuple):
    """Results of several chains (parts of a batch), in one array, so that one copy moves them to the host."""

    flat: Array  # the array that contains the other fields
    # (chains, parameters): gradient of each chain; only the gradient of W if the learner is ``factored``
    gradients: Array
    measures: Array  # (3, rows): loss, wrong outputs, and largest change of P(unit = 1) in the last sweep
    dv: Array  # (rows, outputs): outputs minus their expectations in the model
    dh: Array  # (rows, hidden units): expectations given the outputs minus expectations in the model

    @classmethod
    def split(cls, flat: Array, shape: CrbmShape, rows: int, chains: int, width: int) -> ChainSums:
        """Return the fields as views of ``flat``; the gradient of a chain has ``width`` numbers."""
        shapes = (chains, width), (3, rows), (rows, shape.n_visible), (rows, shape.n_hidden)
        cuts = pairwise(np.cumsum([0, *(a * b for a, b in shapes)]))
        return cls(flat, *(flat[a:b].reshape(own) for (a, b), own in zip(cuts, shapes, strict=True)))


@dataclass(frozen=True)
class CrbmLearner:
    """Learner of a conditional RBM: gradients, steps of the parameters, and early stopping."""

    shape: CrbmShape
    learner: str  # Name of the learner, for example "mle-bp"; a key of the table LEARNERS
    # float64 (epochs,): learning rate of each epoch; epochs after the last of the array use the last rate
    rates: np.ndarray
    momentum: float
    weight_decay: float
    n_sweeps: int | None  # Sweeps (rounds of messages) of an inference; with None epoch k makes 7 + k sweeps
    # The inference of a row stops as soon as no P(unit = 1) changed by more than ``tol`` in a sweep; with
    # None it never stops early
    tol: float | None
    gibbs_steps: int
    n_chains: int  # number of parts (chains) into which the batch of a step is divided
    chain_rows: int  # rows of one gradient of a chain (part of a batch)
    # Number of steps that a chain takes before the parameters of all chains are averaged. With 0, chains
    # return their gradients, and the batch is one step
    local_steps: int
    seed: int
    # The fit ends after this number of epochs without a better validation error. With 0 it runs all epochs
    patience: int
    has_validation: bool
    targets: Targets  # source of the outputs v of the training rows
    validation_targets: Targets  # source of the outputs v of the validation rows
    validation_inference: str
    # Smallest relative fall of the validation error that counts as better. If it is above 0, the end of the
    # patience lowers the learning rate, and ends the fit only if the last lower rate brought no such fall
    gain: float = 0.0
    # Shift and scale that standardise each column of x before learning; with None x is used unchanged
    units: ColumnUnits | None = None

    @property
    def requirements(self) -> BlockRequirements:
        """Blocks that the learner needs: rows x, dense or CSR, with their outputs v."""
        return BlockRequirements(csr=True, targets=self.targets)

    def layout(self) -> Layout:
        """Return the fields of the statistics that a chain (part of a batch) fills in.

        They are sums of measurements, and the gradient, its factors or, with local steps, the change of the
        parameters and the velocity. The learner pcd adds the change of the persistent Gibbs chains.
        """
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
        """True if chains (parts of a batch) return factors instead of the gradients of Wvx and Whx.

        These gradients are products dv^T x and dh^T x over rows. The step computes the products if their
        factors dv (outputs minus expectations), dh (the same for hidden units) and x are fewer numbers.
        """
        shape, rows = self.shape, self.n_chains * self.chain_rows
        units = shape.n_visible + shape.n_hidden
        return not self.local_steps and rows * (units + shape.n_observed) < units * shape.n_observed

    def flops_per_row(self) -> float:
        """Return floating-point operations per row of matrix products and inference (16 sweeps for None)."""
        shape = self.shape
        edges = shape.n_visible * shape.n_hidden
        sweeps = (self.n_sweeps or 16) if LEARNERS[self.learner].sends_messages else self.gibbs_steps
        return 4.0 * shape.n_weights + 16.0 * edges * sweeps

    @property
    def n_particles(self) -> int:
        """Number of persistent Gibbs chains: one for each row of a batch for the learner pcd, else 0."""
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
        # Local steps copy the parameters to a buffer of their own, so an aligned copy here would be wasted.
        theta = backend.asarray(state.theta if self.local_steps else align_copy(state.theta), np.float32)
        coupling = None
        if LEARNERS[self.learner].sends_messages and not self.local_steps:
            coupling = prepare_coupling(self.shape.split(theta).W, backend)
        return PreparedStep(backend, theta, coupling, state)

    def run_chain(self, prepared: PreparedStep, block: Block, stats: Stats) -> None:
        """Add the results for the block's rows to ``stats``; `layout` lists its fields."""
        if self.units is not None:
            block = self.units.standardise(block)
        if self.local_steps:
            self._take_local_steps(prepared, block, stats)
            return
        backend, theta, coupling, state = prepared
        kept = self._read_particles(backend, state, block)
        with self._report_divergence(backend, theta, state):
            seen, v, phase = self._compute_phase(backend, theta, coupling, block, kept)
        if self.factored:
            self._add_gradient_factors(stats, backend, block, v, phase)
        else:
            gradient = compute_gradient(self.shape, backend, theta, seen, v, phase)
            add_to(stats.vector[: self.shape.n_parameters], backend.to_host(gradient))
        measures = PhaseMeasures()
        measures.add(phase)
        stats["sums"][...] += measures.sums(backend, self.tol)
        self._add_particle_change(stats, backend, state, block, phase.particles)

    def run_chains(self, prepared: PreparedStep, blocks: Sequence[Block], stats: Sequence[Stats]) -> None:
        """Add the gradients of several blocks, each with the rows of one chain (part of a batch), on a GPU.

        One launch infers the rows of all chains. Only the products with x are computed chain by chain, so
        that their bits do not depend on the other chains.
        """
        shape, backend, seen, inputs = self.shape, prepared.backend, blocks, None
        if self._runs_together:
            seen = self._standardise(blocks)
            with self._report_divergence(backend, prepared.theta, prepared.state):
                inputs = compute_chain_inputs(shape, shape.split(prepared.theta), seen, backend)
                # If the sum of all biases is not finite, a row may have to be refused. Copy only this sum to
                # the host, because the host waits for the copy.
                if shape.n_observed and not are_usable(seen, float(inputs.sum_biases())):
                    inputs = None
        if inputs is None:
            for block, own in zip(blocks, stats, strict=True):
                self.run_chain(prepared, block, own)
            return
        starts, sums = self._compute_gpu_gradients(backend, prepared.coupling, seen, inputs)
        copied = sums.flat if self.factored else sums.flat[: sums.gradients.size + sums.measures.size]
        host = np.zeros(sums.flat.shape, dtype=np.float32)
        host[: len(copied)] = backend.to_host(copied)
        found = ChainSums.split(host, shape, int(starts[-1]), *sums.gradients.shape)
        measured, parts = self._sum_measures(found.measures, starts), pairwise(starts)
        for own, block, gradient, of_rows, (a, b) in zip(
            stats, seen, found.gradients, measured, parts, strict=True
        ):
            add_to(own.vector[: len(gradient)], gradient)
            if self.factored:
                own["dv"][...], own["dh"][...] = found.dv[a:b], found.dh[a:b]
                own["x"][...] = block.x if isinstance(block.x, np.ndarray) else block.x.to_dense()
            own["sums"][...] += of_rows

    @property
    def _runs_together(self) -> bool:
        """True if a GPU infers the rows of several chains (parts of a batch) in one launch."""
        return self.learner in GPU_CHAIN_KERNELS and not self.local_steps and self.shape.n_hidden > 0

    def _standardise(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return blocks if self.units is None else [self.units.standardise(block) for block in blocks]

    def _compute_gpu_gradients(
        self, backend: Backend, coupling: AnyCoupling | None, blocks: Sequence[Block], inputs: ChainInputs
    ) -> tuple[np.ndarray, ChainSums]:
        """Compute the gradients of several chains (parts of a batch, one block each) on a GPU.

        Return the first row of each chain followed by the number of rows, and the results on the backend.
        """
        shape, factored, chains = self.shape, self.factored, len(blocks)
        starts = np.cumsum([0, *(len(block.x) for block in blocks)])
        rows, width = int(starts[-1]), shape.n_visible * shape.n_hidden if factored else shape.n_parameters
        size = chains * width + rows * (3 + shape.n_visible + shape.n_hidden)
        flat = backend.buffer("chains", (size,), np.float32)
        sums = ChainSums.split(flat, shape, rows, chains, width)
        gradients, dv, dh = sums.gradients, sums.dv, sums.dh
        gradients.fill(0)
        v = backend.asarray(np.concatenate([block.y for block in blocks]), np.float32, "v")
        n_sweeps = choose_n_sweeps(self.n_sweeps, blocks[0].epoch + 1)
        biases = None if factored else gradients.reshape(-1)[shape.n_weights :]
        backend.kernel("crbm_add_chain_gradients")(
            GPU_CHAIN_KERNELS[self.learner], coupling, v, inputs.b1, inputs.b2, starts, n_sweeps, self.tol,
            gradients, dv, dh, sums.measures, biases,
        )  # fmt: skip
        for gradient, observed, (a, b) in zip(gradients, inputs.seen, pairwise(starts), strict=True):
            if not factored and observed is not None:
                params = shape.split(gradient)
                observed.write_outer(dv[a:b], params.Wvx, backend.xp)
                observed.write_outer(dh[a:b], params.Whx, backend.xp)
        return starts, sums

    def _sum_measures(self, measures: np.ndarray, starts: np.ndarray) -> list[np.ndarray]:
        """Return sums of loss, wrong outputs, rows and converged rows for each chain (part of a batch)."""
        loss, wrong, change = measures
        return [
            np.array(
                [
                    loss[a:b].sum(dtype=np.float64),
                    wrong[a:b].sum(),
                    b - a,
                    count_converged(change[a:b], self.tol),
                ]
            )
            for a, b in pairwise(starts)
        ]

    def step_on_gpu(
        self, state: CrbmState | GpuState, blocks: Sequence[Block], n_rows: int, backend: Backend
    ) -> GpuState | None:
        """Take a step with all blocks on a GPU, where the parameters stay; bit-identical to `step`.

        The host waits once, for the measurements. Return None if the caller has to use `run_chains` and
        `step` instead: for a learner that no GPU kernel runs, with momentum, weight decay or local steps,
        with more than ``MOST_CHAINS`` blocks, with factors that are sparse or have many rows, or if a row may
        have to be refused.
        """
        shape, rows = self.shape, sum(len(block.x) for block in blocks)
        is_dense = all(isinstance(block.x, np.ndarray) for block in blocks)
        few = rows <= MAX_ROWS and is_dense and min(shape.n_visible, shape.n_hidden) > 1
        plain = self._runs_together and not self.momentum and not self.weight_decay
        if not plain or len(blocks) > MOST_CHAINS or (self.factored and not few):
            return None
        if not isinstance(state, GpuState):
            edges = shape.n_visible * shape.n_hidden
            theta = backend.asarray(state.theta, np.float32)
            state = GpuState(
                replace(state, theta=theta), find_largest_magnitude(state.theta[:edges]), backend
            )
        before, seen = state.state, self._standardise(blocks)
        params = shape.split(before.theta)
        with self._report_divergence(backend, before.theta, before):
            coupling = backend.kernel("crbm_make_coupling")(params.W, state.largest)
            inputs = compute_chain_inputs(shape, params, seen, backend)
        starts, sums = self._compute_gpu_gradients(backend, coupling, seen, inputs)
        theta, largest = backend.kernel("crbm_ascend_chains")(
            (shape.n_visible, shape.n_hidden, shape.n_observed),
            before.theta,
            sums.gradients,
            self._step_rates(n_rows, before, before.iteration).rate,
            (sums.dv, sums.dh, inputs.x) if self.factored else None,
        )
        report = [sums.measures.reshape(-1), inputs.sum_biases().reshape(1), largest]
        host = backend.to_host(backend.xp.concatenate(report))
        if shape.n_observed and not are_usable(seen, float(host[3 * rows])):
            return None
        most = float(host[3 * rows + 1 :].view(np.int32).max().view(np.float32))
        if not most <= MAX_WEIGHT:
            self.check_safe(backend.to_host(theta), before)
        # Add the measurements of the chains (parts of a batch) two by two, in the order in which the engine
        # adds their statistics for `step`, so that the sums are bit-identical.
        parts = self._sum_measures(host[: 3 * rows].reshape(3, rows), starts)
        while len(parts) > 1:
            parts = [np.sum(parts[i : i + 2], axis=0) for i in range(0, len(parts), 2)]
        after = replace(before, theta=theta, sums=before.sums + parts[0], steps=before.steps + 1)
        return GpuState(after, most, backend)

    def to_host(self, state: CrbmState | GpuState) -> CrbmState:
        """Return the state with its parameters on the host."""
        if not isinstance(state, GpuState):
            return state
        return replace(state.state, theta=state.backend.to_host(state.state.theta))

    def step(self, state: CrbmState, stats: Stats, n_rows: int) -> CrbmState:
        """Return the state after a step along the gradient of ``n_rows`` rows, or after the local steps."""
        if self.local_steps:
            share = 1.0 / float(stats["chains"])
            theta, velocity = add_scaled(state.theta, self.gradient(stats), share), state.velocity
            if self.momentum:
                velocity = add_scaled(velocity, stats["velocity"], share)
        else:
            theta, velocity = (aligned_empty(a.shape) for a in (state.theta, state.velocity))
            arrays = StepArrays(state.theta, state.velocity, theta, velocity)
            rates = self._step_rates(n_rows, state, state.iteration)
            if self.factored:
                w, dv, dh, x = (stats[name] for name in ("W", "dv", "dh", "x"))
                ascend_factors(self.shape, arrays, w, dv, dh, x, rates)
            else:
                ascend(arrays, self.gradient(stats), self.shape.n_weights, rates)
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
        """Return the state at the end of an epoch, with the means of its measurements.

        If ``gain`` is above 0 and ``patience`` epochs brought no better validation error, learning continues
        from the best parameters at a quarter of the rate, unless nothing was gained since the last such drop.
        """
        objective, train_error, converged = compute_shares(state, self.shape.n_visible)
        ended = replace(
            state,
            objective=objective,
            train_error=train_error,
            converged=converged,
            sums=np.zeros(N_SUMS),
            stale=state.stale + 1,
            iteration=state.iteration + 1,
            last_drops=state.n_drops,
        )
        if not (self.gain and self.is_done(ended) and self._has_gained(ended, ended.dropped_error)):
            return ended
        return replace(
            ended,
            theta=ended.best,
            velocity=np.zeros_like(ended.velocity),
            stale=0,
            n_drops=ended.n_drops + 1,
            dropped_error=ended.best_error,
        )

    def _has_gained(self, state: CrbmState, error: float) -> bool:
        """Return whether the lowest validation error is below ``error`` by the relative amount ``gain``."""
        return state.best_error < (1 - self.gain) * error

    def validation(self) -> CrbmScoring:
        """Return the reduction that counts wrong outputs of validation rows.

        A plain RBM has no x, so its outputs are predicted from the hidden units given the row itself.
        """
        return CrbmScoring(
            self.shape,
            self.validation_inference,
            self.n_sweeps,
            self.tol,
            self.validation_targets,
            reconstructs=not self.shape.n_observed,
            units=self.units,
        )

    def validated(self, state: CrbmState, stats: Stats) -> CrbmState:
        """Return the state with the validation errors of ``stats``; keep the parameters if they are best."""
        error, changed = CrbmScoring.errors(stats)
        state = replace(state, validation_error=error, changed_error=changed)
        if error < state.best_error:
            better = replace(state, best=state.theta, best_error=error, best_epoch=state.iteration + 1)
            return replace(better, stale=-1) if self._has_gained(better, state.best_error) else better
        return state

    def summary(self, state: CrbmState) -> dict[str, float | int | None]:
        """Return the measurements of the last epoch, or of the completed part of the current epoch."""
        objective, train_error, converged = state.objective, state.train_error, state.converged
        if state.sums[2]:
            objective, train_error, converged = compute_shares(state, self.shape.n_visible)
        epoch = state.iteration + bool(state.sums[2])
        return {
            "objective": objective,
            "train_error": train_error,
            "validation_error": state.validation_error if self.has_validation else None,
            "changed_error": None if np.isnan(state.changed_error) else state.changed_error,
            "best_error": state.best_error if np.isfinite(state.best_error) else None,
            "converged": converged if LEARNERS[self.learner].sends_messages else None,
            "learning_rate": self.rate(
                max(epoch - 1, 0), state.n_drops if state.sums[2] else state.last_drops
            ),
            "n_sweeps": choose_n_sweeps(self.n_sweeps, epoch)
            if LEARNERS[self.learner].sends_messages
            else None,
        }

    def is_done(self, state: CrbmState) -> bool:
        """Return whether ``patience`` epochs brought no better validation error; False for ``patience`` 0."""
        return bool(self.patience and self.has_validation and state.stale >= self.patience)

    def best_parameters(self, state: CrbmState) -> tuple[np.ndarray, int]:
        """Return the parameters with the lowest validation error (else the last), and their epoch."""
        is_best = self.has_validation and state.best_epoch
        theta, epoch = (state.best, state.best_epoch) if is_best else (state.theta, max(state.iteration, 1))
        return (theta if self.units is None else self.units.convert_to_original(self.shape, theta)), epoch

    def rate(self, epoch: int, n_drops: int = 0) -> float:
        """Return the learning rate in ``epoch`` (0 is the first) after it was lowered ``n_drops`` times."""
        return float(self.rates[min(epoch, len(self.rates) - 1)]) * RATE_DROP**n_drops

    def check_safe(self, theta: np.ndarray, state: CrbmState) -> None:
        """Raise DivergenceError if parameters are not finite, or W is too large for messages in float32."""
        problem = find_divergence(self.shape, theta)
        if problem:
            raise self._divergence_error(problem, state)

    def _divergence_error(self, problem: str, state: CrbmState) -> DivergenceError:
        rate = self.rate(state.iteration, state.n_drops)
        return make_divergence_error(problem, state.iteration + 1, state.steps + 1, rate, self.weight_decay)

    def gradient(self, stats: Stats) -> np.ndarray:
        """Return the summed gradient in ``stats`` or, with local steps, the summed change of parameters."""
        return stats.vector[: self.shape.n_parameters]

    def _compute_phase(
        self, backend: Backend, theta: Array, coupling: AnyCoupling | None, block: Block,
        particles: Array | None,
    ) -> tuple[Observed | None, Array, Phase]:  # fmt: skip
        """Compute the negative phase (the model's expectations) of a block; return (x, v, phase)."""
        params = self.shape.split(theta)
        assert block.rows is not None
        v = backend.asarray(block.y, np.float32, "v")
        seen, b1, b2 = compute_block_biases(self.shape, params, block, backend)
        n_sweeps = choose_n_sweeps(self.n_sweeps, block.epoch + 1)
        work = PhaseInput(
            backend, params, coupling, v, b1, b2, n_sweeps, self.tol, self.seed, block.epoch, block.rows,
            self.gibbs_steps, particles,
        )  # fmt: skip
        return seen, v, LEARNERS[self.learner].negative(work)

    def _add_gradient_factors(
        self, stats: Stats, backend: Backend, block: Block, v: Array, phase: Phase
    ) -> None:
        add_weight_gradient(backend, v, phase, stats["W"])
        stats["dv"][...] = backend.to_host(v - phase.visible)
        stats["dh"][...] = backend.to_host(phase.positive - phase.hidden)
        stats["x"][...] = block.x if isinstance(block.x, np.ndarray) else block.x.to_dense()

    def _step_rates(self, n_rows: int, state: CrbmState, epoch: int) -> StepRates:
        rate = self.rate(epoch, state.n_drops)
        return StepRates(rate / n_rows, rate * self.weight_decay, self.momentum)

    def _take_local_steps(self, prepared: PreparedStep, block: Block, stats: Stats) -> None:
        """Take a step per ``chain_rows`` rows of a block; add the change of the parameters to ``stats``."""
        backend, theta, _, state = prepared
        xp, first = backend.xp, theta
        theta = backend.buffer("theta", first.shape, first.dtype)
        theta[...], velocity = first, backend.asarray(state.velocity, np.float32).copy()
        arrays, kept = (
            StepArrays(theta, velocity, theta, velocity),
            self._read_particles(backend, state, block),
        )
        measures = PhaseMeasures()
        for a in range(0, len(block.x), self.chain_rows):
            part = block.slice_rows(a, a + self.chain_rows)
            n = len(part.x)
            some = None if kept is None else kept[:n]
            with self._report_divergence(backend, theta, state):
                sends_messages = LEARNERS[self.learner].sends_messages
                coupling = prepare_coupling(self.shape.split(theta).W, backend) if sends_messages else None
                seen, v, phase = self._compute_phase(backend, theta, coupling, part, some)
            ascend_phase(self.shape, backend, arrays, seen, v, phase, self._step_rates(n, state, block.epoch))
            measures.add(phase)
            if kept is not None:
                kept[:n] = phase.particles
        stats["sums"][...] += measures.sums(backend, self.tol)
        add_to(stats.vector[: self.shape.n_parameters], backend.to_host(theta - first))
        if self.momentum:
            before = backend.asarray(state.velocity, np.float32)
            stats["velocity"][...] += backend.to_host(xp.subtract(velocity, before))
        stats["chains"][...] += 1
        self._add_particle_change(stats, backend, state, block, kept)

    @contextmanager
    def _report_divergence(self, backend: Backend, theta: Array, state: CrbmState) -> Iterator[None]:
        """Convert a `WeightError` of the ``with`` body (W or biases not usable) to a DivergenceError."""
        try:
            yield
        except WeightError as error:
            theta = backend.to_host(theta)
            self.check_safe(theta, state)
            raise self._divergence_error(
                str(error) if np.isfinite(theta).all() else NOT_FINITE, state
            ) from error

    def _find_particles(self, block: Block) -> slice:
        """Return the indices, in the batch, of the persistent Gibbs chains that belong to a block's rows."""
        first = block.chain * self.chain_rows
        return slice(first, first + min(len(block.x), self.chain_rows))

    def _read_particles(self, backend: Backend, state: CrbmState, block: Block) -> Array | None:
        """Return P(h = 1) of the persistent Gibbs chains of a block's rows; None for learners except pcd."""
        if not self.n_particles:
            return None
        return backend.asarray(state.particles[self._find_particles(block)].copy(), np.float32)

    def _add_particle_change(
        self, stats: Stats, backend: Backend, state: CrbmState, block: Block, particles: Array | None
    ) -> None:
        if particles is not None:
            at = self._find_particles(block)
            # Statistics of blocks are summed, so add the change instead of the new states.
            stats["particles"][at] += backend.to_host(particles).astype(np.float64) - state.particles[at]
