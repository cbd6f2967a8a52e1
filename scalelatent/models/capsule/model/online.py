r"""Capsule regression beyond batch EM: what all online learners share, and stepwise EM.

Stepwise EM (Cappé and Moulines, 2009; Liang and Klein, 2009) on residuals: after a batch of :math:`n_b` rows

.. math::

    \Delta \leftarrow (1-\eta_t) \Delta + \eta_t \frac{n}{n_b} \Delta_{batch}, \qquad
    W \leftarrow W + \eta_t \Delta S^{-1} + \gamma (W - W_{before}), \qquad
    \eta_t = (1 + t/t_0)^{-\kappa}

with the second moments S of *all* rows: so the noise of a batch vanishes with its residuals, and one batch of
all rows with eta = 1 is a step of batch EM. A batch of fewer rows than features cannot bear a whole step: eta
in the step of W is then multiplied by rows / features. Rows are counted, not their weights, so that a heavy
batch moves W more than a light one (:func:`row_share`). The model that is validated and kept is a running
average of W over about the last ninth of the steps (polynomial-decay averaging, Shamir and Zhang, 2013): it
takes the noise of the last batches out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from scalelatent.contract.finite import make_divergence_error
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Wants

from .em import CapsuleEM, CapsulePass, Moving, Prepared, error_rates, with_decision

AVERAGE_POWER = 8


@dataclass(frozen=True)
class OnlineState:
    """Everything that changes from step to step; M members share one stacked W."""

    # w, previous, delta, average, best: float64 (D, p): current weights, those one step
    # before (momentum), the running residual moment, the averaged weights, and the averaged weights that did
    # best
    w: np.ndarray
    previous: np.ndarray
    delta: np.ndarray
    average: np.ndarray
    best: np.ndarray
    # best_error, objective, train_error, validation_error, active: float64 (M,): error rate
    # of ``best``; of the last epoch: mean log-loss in nats, error rates and share of rows that took part, all
    # measured on the way while W moved; NaN where not measured
    best_error: np.ndarray
    objective: np.ndarray
    train_error: np.ndarray
    validation_error: np.ndarray
    active: np.ndarray
    # round, stale, finished, best_epoch, since: int64 (M,): round of the schedule, epochs
    # without improvement, 1 where the member has stopped, the epoch that gave ``best``, steps since the round
    # began
    round: np.ndarray
    stale: np.ndarray
    finished: np.ndarray
    best_epoch: np.ndarray
    since: np.ndarray
    # float64 (M, 5): of the epoch in progress: log-likelihood, errors, active rows, weight,
    # rows
    sums: np.ndarray
    # iteration, steps: Epochs and steps done
    iteration: int
    steps: int
    # As in batch EM, of the averaged weights
    decision_error: float = field(default=float("nan"), kw_only=True)
    together: np.ndarray | None = field(default=None, kw_only=True)
    together_error: float = field(default=float("inf"), kw_only=True)


State = TypeVar("State", bound=OnlineState)


def online_state(w: np.ndarray, n_members: int) -> OnlineState:
    """State before the first step."""
    nan, zero = np.full(n_members, np.nan), np.zeros(n_members, dtype=np.int64)
    infinite = np.full(n_members, np.inf)
    return OnlineState(
        w=w,
        previous=w,
        delta=np.zeros_like(w),
        average=w,
        best=w,
        best_error=infinite,
        objective=infinite,
        train_error=nan,
        validation_error=nan,
        active=nan,
        round=zero,
        stale=zero,
        finished=zero,
        best_epoch=zero,
        since=zero,
        sums=np.zeros((n_members, 5)),
        iteration=0,
        steps=0,
    )


def row_share(weight: float, rows: float, mean_weight: float, p: int) -> float:
    """What the residual moment of a batch is multiplied by to be that of one row of mean weight."""
    return min(1.0, max(2.0 * rows, p) * mean_weight / weight) / (rows * mean_weight)


@dataclass(frozen=True)
class AveragedPass(CapsulePass[OnlineState]):
    """Scoring of the averaged weights."""

    def decides(self, state: OnlineState) -> bool:
        """Always: there are few epochs."""
        return True

    def prepare(self, state: OnlineState, backend: Backend) -> Prepared:
        """The averaged weights of the members that still learn."""
        return super().prepare(replace(state, w=state.average), backend)


@dataclass(frozen=True)
class OnlineCapsule(Generic[State]):
    """What the online learners share: measurements, schedule of rounds, the averaged model."""

    wants = Wants()

    # Constants of the fit: members, second moments, schedule (its patience counts epochs), momentum, ridge
    em: CapsuleEM
    # weight, count: float64 (classes,): sum of the row weights of each class, and its rows
    # of weight above 0
    weight: np.ndarray
    count: np.ndarray

    # -- measurements ----------------------------------------------------------------------------------------

    @property
    def train_pass(self) -> CapsulePass[Moving]:
        return self.em.reductions()["train"]

    def flops_per_row(self) -> float:
        return self.train_pass.flops_per_row()

    def measured(self, state: State, stats: Stats) -> np.ndarray:
        """Sums of the epoch with those of a step."""
        sums = state.sums + np.column_stack([stats["sums"], stats["rows"]])
        live = state.finished == 0
        if not np.isfinite(sums[live]).all():
            bad = np.flatnonzero(live & ~np.isfinite(sums).all(axis=1)).tolist()
            step = "lower `momentum`, or set `ridge` above 0 or `batch_rows` higher"
            raise make_divergence_error(bad, f"step {state.steps + 1}", step)
        return sums

    def averaged(self, state: OnlineState, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(``since``, ``average``) after a step to ``w``."""
        live = state.finished == 0
        since = state.since + live
        rate = np.where(live, (1.0 + AVERAGE_POWER) / (np.maximum(since, 1) + AVERAGE_POWER), 0.0)
        rate = np.repeat(rate, self.em.members.dims.sum(axis=1))[:, None]
        return since, state.average + rate * (w - state.average)

    def rows_of(self, member: int) -> slice:
        """Rows of W of a member."""
        return slice(int(self.em.members.offsets[member]), int(self.em.members.offsets[member + 1]))

    def validation(self) -> AveragedPass:
        """Errors of the averaged model over the validation rows."""
        em = self.em
        return AveragedPass(em.members, em.moment.shape[1], em.nu, None, False, em.intercept)

    def validated(self, state: State, stats: Stats) -> State:
        """Keep each member's best."""
        live, total = state.finished == 0, stats["sums"][:, 3]
        errors = stats["sums"][:, 1] / np.maximum(total, np.finfo(float).tiny)
        state = replace(state, validation_error=np.where(live, errors, state.validation_error))
        state = with_decision(state, state.average, stats)
        return self._keep_best(state, state.validation_error)

    def _keep_best(self, state: State, watched: np.ndarray) -> State:
        better = (state.finished == 0) & (watched < state.best_error)
        if not better.any():
            return state
        rows = np.repeat(better, self.em.members.dims.sum(axis=1))[:, None]
        return replace(
            state,
            best=np.where(rows, state.average, state.best),
            best_error=np.where(better, watched, state.best_error),
            best_epoch=np.where(better, state.iteration + 1, state.best_epoch),
            stale=np.where(better, -1, state.stale),
        )

    # -- schedule --------------------------------------------------------------------------------------------

    def end_epoch(self, state: State) -> State:
        """Measurements of the epoch, and one step of every member's schedule; a pure function."""
        live, sums = state.finished == 0, state.sums
        total = np.maximum(sums[:, 3], np.finfo(float).tiny)
        objective = np.where(live, -sums[:, 0] / total, state.objective)
        error = np.where(live, sums[:, 1] / total, state.train_error)
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
        return self._restarted(state, ended) if ended.any() else state

    def _restarted(self, state: State, ended: np.ndarray) -> State:
        """The next round of some members starts at their best model, without momentum."""
        rows = np.repeat(ended, self.em.members.dims.sum(axis=1))[:, None]
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
        """W to keep: each member's best on validation rows, without such rows the averaged one."""
        return state.best if self.em.has_validation else state.average

    def is_done(self, state: OnlineState) -> bool:
        return bool(state.finished.all())

    def summary(self, state: OnlineState) -> dict[str, float | int | None]:
        """Measurements of the epoch, or of its part that is done; means over members."""
        objective, error, active = state.objective, state.train_error, state.active
        if state.sums[:, 3].any():
            total = np.maximum(state.sums[:, 3], np.finfo(float).tiny)
            objective, error = -state.sums[:, 0] / total, state.sums[:, 1] / total
            active = state.sums[:, 2] / np.maximum(state.sums[:, 4], 1.0)
        rounds = np.minimum(state.round, len(self.em.nu) - 1)
        return {
            "objective": float(objective.mean()),
            **error_rates(state, error, bool(self.em.has_validation)),
            "best_error": float(state.best_error.mean()) if np.isfinite(state.best_error).all() else None,
            "active_members": int((state.finished == 0).sum()),
            "active_rows": float(active.mean()),
            "nu": float(self.em.nu[rounds].mean()),
            "round": int(rounds.min()) + 1,
        }


class BatchEStep(NamedTuple):
    """The E-step of a batch, and its weights."""

    train: CapsulePass[Moving]
    weights: Prepared


@dataclass(frozen=True)
class CapsuleStepwise(OnlineCapsule[OnlineState]):
    """Stepwise EM (an :class:`~..base.OnlineLearner`)."""

    # Exponent of eta_t = (1 + t / t0) ** -kappa; 0 keeps eta = 1
    kappa: float
    # Steps after which eta falls
    t0: float

    def layout(self) -> Layout:
        """The E-step of batch EM, and ``counted`` (M,): rows of weight above 0."""
        return Layout((*self.train_pass.layout().fields, ("counted", (self.em.members.n_members,))))

    def prepare(self, state: OnlineState, backend: Backend) -> BatchEStep:
        train = self.train_pass
        return BatchEStep(train, train.prepare(state, backend))

    def run_chain(self, prepared: BatchEStep, block: Block, stats: Stats) -> None:
        train, weights = prepared
        train.accumulate(weights, block, Stats(train.layout(), stats.vector[: train.layout().size]))
        assert block.y is not None
        y = block.y if block.weight is None else block.y[block.weight > 0]
        labels = self.em.members.labels
        stats["counted"][...] += (labels >= 0) @ np.bincount(y, minlength=labels.shape[1])

    def step(self, state: OnlineState, stats: Stats, n_rows: int) -> OnlineState:
        """The M-step of a batch; a pure function."""
        sums, p = self.measured(state, stats), self.em.moment.shape[1]
        eta = (1.0 + state.steps / self.t0) ** -self.kappa
        w, previous, delta = state.w.copy(), state.previous.copy(), state.delta.copy()
        masks = self.em.members.labels >= 0
        totals, means = masks @ self.weight, (masks @ self.weight) / (masks @ self.count)
        for r in map(int, np.flatnonzero((state.finished == 0) & (stats["sums"][:, 3] > 0))):
            rows = self.rows_of(r)
            weight, seen = float(stats["sums"][r, 3]), float(stats["counted"][r])
            batch = totals[r] * row_share(weight, seen, means[r], p)
            delta[rows] = (1.0 - eta) * delta[rows] + eta * batch * stats["delta"][rows]
            rate = eta * min(1.0, seen / p)
            move = self.em.em_step(state.w[rows], delta[rows], r) - state.w[rows]
            w[rows] += rate * move + self.em.momentum * (state.w[rows] - state.previous[rows])
            previous[rows] = state.w[rows]
        since, average = self.averaged(state, w)
        return replace(
            state,
            w=w,
            previous=previous,
            delta=delta,
            sums=sums,
            steps=state.steps + 1,
            since=since,
            average=average,
        )
