r"""Capsule regression by stepwise EM: an M-step after each batch of rows.

Stepwise EM (Cappé and Moulines, 2009; Liang and Klein, 2009) works on residuals. After a batch of :math:`n_b`
of the :math:`n` rows it computes

.. math::

    \Delta \leftarrow (1-\eta_t) \Delta + \eta_t \frac{n}{n_b} \Delta_{batch}, \qquad
    W \leftarrow W + \eta_t \Delta S^{-1} + \gamma (W - W_{before}), \qquad
    \eta_t = (1 + t/t_0)^{-\kappa}

with the second moments S of *all* rows. The noise of a batch therefore vanishes with its residuals, and one
batch of all rows with eta = 1 is a step of batch EM. If a batch has fewer rows than features, the step of W
is multiplied by rows / features. This factor counts rows, not their weights, so that a heavy batch moves W
more than a light one (:func:`batch_scale`).

Validation and the fitted model use a running average of W over about the last ninth of the steps
(polynomial-decay averaging, Shamir and Zhang, 2013). The average removes the noise of the last batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.finite import make_divergence_error
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats

from .em import CapsuleEM, CapsulePass, MemberState, Prepared, mean_loss_and_error, record_decision

# Power of the polynomial-decay average: the average covers about the last 1 / (1 + power) of the steps.
AVERAGE_POWER = 8


@dataclass(frozen=True, kw_only=True)
class OnlineState(MemberState):
    """State of stepwise EM; ``best`` holds averaged weights."""

    delta: np.ndarray  # running residual moment, float64 (D, p)
    average: np.ndarray  # averaged weights, float64 (D, p)
    best_epoch: np.ndarray  # epoch that gave ``best``, int64 (M,)
    since: np.ndarray  # steps since the current round (threshold nu) of the schedule started, int64 (M,)
    # Sums of the current epoch: log-likelihood, errors, active rows, weight and rows, float64 (M, 5).
    sums: np.ndarray
    steps: int  # completed steps


def online_state(w: np.ndarray, n_members: int) -> OnlineState:
    """Return the state before the first step, from weights (D, p)."""
    zero = np.zeros(n_members, dtype=np.int64)
    return OnlineState.start(
        w, n_members, delta=np.zeros_like(w), average=w, best_epoch=zero, since=zero,
        sums=np.zeros((n_members, 5)), steps=0,
    )  # fmt: skip


def batch_scale(weight: float, rows: float, mean_weight: float, p: int) -> float:
    """Return the factor that turns the residual moment of a batch into the moment of one row of mean weight.

    A batch has ``rows`` rows of the total ``weight``; ``p`` is the number of features. The factor is capped
    so that a heavy batch of few rows moves W no further than a whole step.
    """
    return min(1.0, max(2.0 * rows, p) * mean_weight / weight) / (rows * mean_weight)


@dataclass(frozen=True)
class AveragedPass(CapsulePass):
    """Reduction that measures the averaged weights on validation rows."""

    def measures_decision(self, state: MemberState) -> bool:
        """Return True: every epoch measures the joint decision, because there are few epochs."""
        return True

    def prepare(self, state: MemberState, backend: Backend) -> Prepared:
        """Copy the averaged weights of the members that still learn to the device."""
        assert isinstance(state, OnlineState)
        return super().prepare(replace(state, w=state.average), backend)


@dataclass(frozen=True)
class CapsuleStepwise:
    """Stepwise EM, an `OnlineLearner`: steps, the rounds (thresholds nu), and the averaged weights."""

    requirements = BlockRequirements()

    em: CapsuleEM  # constants of the fit; its patience counts epochs
    weight: np.ndarray  # sum of the row weights of each class, float64 (classes,)
    count: np.ndarray  # number of rows of each class whose weight is above 0, float64 (classes,)
    kappa: float  # exponent of the step size eta_t = (1 + t / t0) ** -kappa; 0 keeps eta = 1
    t0: float  # number of steps after which eta falls

    # -- steps -----------------------------------------------------------------------------------------------

    @cached_property
    def train_pass(self) -> CapsulePass:
        """E-step of batch EM over the training rows."""
        return self.em.reductions()["train"]

    def flops_per_row(self) -> float:
        return self.train_pass.flops_per_row()

    def layout(self) -> Layout:
        """Return the fields of the E-step of batch EM, and ``counted`` (M,): rows of weight above 0."""
        return Layout((*self.train_pass.layout().fields, ("counted", (self.em.members.n_members,))))

    def prepare(self, state: OnlineState, backend: Backend) -> Prepared:
        return self.train_pass.prepare(state, backend)

    def run_chain(self, prepared: Prepared, block: Block, stats: Stats) -> None:
        """Add the E-step of one chain (part of a batch), and the number of its rows of weight above 0."""
        layout = self.train_pass.layout()
        self.train_pass.accumulate(prepared, block, Stats(layout, stats.vector[: layout.size]))
        assert block.y is not None
        y = block.y if block.weight is None else block.y[block.weight > 0]
        sees = self.em.members.sees
        stats["counted"][...] += sees @ np.bincount(y, minlength=sees.shape[1])

    def step(self, state: OnlineState, stats: Stats, n_rows: int) -> OnlineState:
        """Return the state after the M-step of a batch; sums that are not finite raise `DivergenceError`."""
        live, p = state.finished == 0, self.em.moment.shape[1]
        sums = state.sums + np.column_stack([stats["sums"], stats["rows"]])
        if not np.isfinite(sums[live]).all():
            bad = np.flatnonzero(live & ~np.isfinite(sums).all(axis=1)).tolist()
            remedy = "lower `momentum`, or set `ridge` above 0 or `batch_rows` higher"
            raise make_divergence_error(bad, f"step {state.steps + 1}", remedy)
        eta = (1.0 + state.steps / self.t0) ** -self.kappa
        w, previous, delta = state.w.copy(), state.previous.copy(), state.delta.copy()
        sees = self.em.members.sees
        totals, means = sees @ self.weight, (sees @ self.weight) / (sees @ self.count)
        for r in map(int, np.flatnonzero(live & (stats["sums"][:, 3] > 0))):
            rows = self.em.members.rows_of(r)
            weight, seen = float(stats["sums"][r, 3]), float(stats["counted"][r])
            batch = totals[r] * batch_scale(weight, seen, means[r], p)
            delta[rows] = (1.0 - eta) * delta[rows] + eta * batch * stats["delta"][rows]
            rate = eta * min(1.0, seen / p)
            move = self.em.em_step(state.w[rows], delta[rows], r) - state.w[rows]
            w[rows] += rate * move + self.em.momentum * (state.w[rows] - state.previous[rows])
            previous[rows] = state.w[rows]
        since = state.since + live
        share = np.where(live, (1.0 + AVERAGE_POWER) / (np.maximum(since, 1) + AVERAGE_POWER), 0.0)
        average = state.average + self.em.members.spread_over_rows(share) * (w - state.average)
        return replace(
            state, w=w, previous=previous, delta=delta, average=average, since=since, sums=sums,
            steps=state.steps + 1,
        )  # fmt: skip

    # -- validation ------------------------------------------------------------------------------------------

    def validation(self) -> AveragedPass:
        """Return the pass that measures the averaged weights on the validation rows."""
        em = self.em
        return AveragedPass(em.members, em.moment.shape[1], em.nu, None, False, em.intercept)

    def validated(self, state: OnlineState, stats: Stats) -> OnlineState:
        """Return the state with the validation errors, and with each member's best weights."""
        errors = mean_loss_and_error(stats["sums"])[1]
        state = replace(state, validation_error=np.where(state.finished == 0, errors, state.validation_error))
        state = record_decision(state, state.average, stats)
        return self._keep_best(state, state.validation_error)

    def _keep_best(self, state: OnlineState, watched: np.ndarray) -> OnlineState:
        better = (state.finished == 0) & (watched < state.best_error)
        if not better.any():
            return state
        rows = self.em.members.spread_over_rows(better)
        return replace(
            state,
            best=np.where(rows, state.average, state.best),
            best_error=np.where(better, watched, state.best_error),
            best_epoch=np.where(better, state.iteration + 1, state.best_epoch),
            stale=np.where(better, -1, state.stale),
        )

    # -- schedule --------------------------------------------------------------------------------------------

    def end_epoch(self, state: OnlineState) -> OnlineState:
        """Return the state with the epoch's measurements; members without progress get the next threshold."""
        live, sums = state.finished == 0, state.sums
        loss, error = mean_loss_and_error(sums)
        objective = np.where(live, loss, state.objective)
        error = np.where(live, error, state.train_error)
        if not self.em.has_validation:
            state = self._keep_best(state, error)
        flat = (state.objective - objective >= 0) & (state.objective - objective < self.em.tol)
        stale = state.stale + live
        round_, finished = state.round.copy(), state.finished.copy()
        ended = live & ((stale >= self.em.patience[np.minimum(round_, len(self.em.nu) - 1)]) | flat)
        round_[ended] += 1
        finished[round_ >= len(self.em.nu)] = 1
        state = replace(
            state,
            objective=objective,
            train_error=error,
            active=np.where(live, sums[:, 2] / np.maximum(sums[:, 4], 1.0), state.active),
            stale=np.where(ended, 0, stale),
            round=round_,
            finished=finished,
            sums=np.zeros_like(sums),
            iteration=state.iteration + 1,
        )
        if not ended.any():
            return state
        # The next round of these members starts at their best weights, without momentum.
        rows = self.em.members.spread_over_rows(ended)
        w = np.where(rows, self.weights(state), state.w)
        return replace(
            state,
            w=w,
            previous=np.where(rows, w, state.previous),
            average=np.where(rows, w, state.average),
            delta=np.where(rows, 0.0, state.delta),
            since=np.where(ended, 0, state.since),
        )

    def weights(self, state: OnlineState) -> np.ndarray:
        """Return the weights of the fitted model: the best on validation rows, else the running average."""
        return state.best if self.em.has_validation else state.average

    def is_done(self, state: OnlineState) -> bool:
        return bool(state.finished.all())

    def summary(self, state: OnlineState) -> dict[str, float | int | None]:
        """Return the measurements of the epoch, or of its completed part; means over members."""
        objective, error, active = state.objective, state.train_error, state.active
        if state.sums[:, 3].any():
            objective, error = mean_loss_and_error(state.sums)
            active = state.sums[:, 2] / np.maximum(state.sums[:, 4], 1.0)
        return self.em.describe(state, state.round, objective, error, active)
