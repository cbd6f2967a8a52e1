r"""Capsule regression by batch EM, in residual form.

The equations are those of L. K. Saul, "Capsule regression", Neural Computation (2021).

A row x of class y has latent vectors :math:`h_i = W_i x`, one per capsule. One pass is one EM step:

1. Compute all latent vectors of a block of rows with one matrix product, :math:`H = W X^T`.
2. Compute the class probabilities :math:`P(y | x)` from the squared lengths of the latent vectors (equations
   2.13 to 2.16) and the posterior means :math:`E[h_i | y, x] = r_i h_i` with
   :math:`r_i = Q_i(y) / P(y | x)` (equation 2.19).
3. Skip the rows that the model classifies with a margin: at the threshold :math:`\nu`, these are the rows
   with :math:`\max_{i \neq y} P(i | x) \leq \nu P(y | x)` (equation 2.26).
4. Add the remaining rows to the residual moment :math:`\Delta_i = \sum_n (r_{n,i} - 1) h_{n,i} x_n^T`.
5. After the last block, update the weights: :math:`W_i \leftarrow W_i + \Delta_i S^{-1}` with the second
   moments :math:`S = \sum_n x_n x_n^T`. Add momentum (equation 2.27), keep the weights with the lowest error,
   and lower :math:`\nu` when the error no longer falls (the schedule of section 3.1).

Step 5 equals the paper's update (equation 2.24), because :math:`W S = \sum_n h_n x_n^T`. It rounds better,
because no large terms cancel at convergence, and step 3 saves most of the second matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.finite import find_nonfinite, find_too_large, make_divergence_error
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.kernels.arrays import Array
from scalelatent.models.capsule.kernels.squash import SquashTable, squash_table
from scalelatent.reductions.eigen import invert_on_rows
from scalelatent.reductions.intercept import Intercept, map_rows
from scalelatent.reductions.moments import NonFiniteError

from .members import Members
from .predict import compute_class_scores

# Without a ridge, this share of the mean eigenvalue of the second moments S is added to the diagonal of S.
RELATIVE_JITTER = 1e-8
# An eigenvalue of the second moments of at most this share of the largest eigenvalue counts as 0: no row has
# a component in its direction, and the weights W stay 0 in this direction.
NO_ROWS = 1e-10
# Batch EM measures the error of an ensemble's joint decision in the first eight passes, and then in every
# eighth pass. The joint decision needs all members on all validation rows: one more matrix product.
FIRST_DECISION_PASSES = 8


@dataclass(frozen=True, kw_only=True)
class MemberState:
    """State of M members during a fit by batch or stepwise EM; W stacks the weights of all members.

    The arrays of weights are float64 (D, p). The other arrays have one entry per member: float64 (M,) for
    errors and the objective, int64 (M,) for counts.
    """

    w: np.ndarray  # current weights
    previous: np.ndarray  # weights one step before, for the momentum
    best: np.ndarray  # weights of each member with its lowest error so far
    best_error: np.ndarray  # error rate of ``best`` on validation rows, else on training rows
    objective: np.ndarray  # mean log-loss in nats of the last pass
    train_error: np.ndarray  # error rate of the last pass; NaN before the first pass
    validation_error: np.ndarray  # NaN if there are no validation rows
    round: np.ndarray  # current round (threshold nu) of the schedule, from 0
    stale: np.ndarray  # passes or epochs since the error improved; -1 right after an improvement or a restart
    finished: np.ndarray  # 1 if the member has stopped
    active: np.ndarray  # share of rows that took part in the last update
    iteration: int  # completed passes or epochs
    # Validation error of the ensemble's joint decision in the last pass that measured it.
    decision_error: float = float("nan")
    # Weights with the lowest error of the joint decision of all members, and this error.
    together: np.ndarray | None = None
    together_error: float = float("inf")

    @classmethod
    def start(cls, w: np.ndarray, n_members: int, **more: Any) -> Self:
        """Return the state before the first step; ``more`` are the fields of the subclass."""
        nan, zero = np.full(n_members, np.nan), np.zeros(n_members, dtype=np.int64)
        infinite = np.full(n_members, np.inf)
        return cls(
            w=w, previous=w, best=w, best_error=infinite, objective=infinite, train_error=nan,
            validation_error=nan, round=zero, stale=zero, finished=zero, active=nan, iteration=0, **more,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CapsuleState(MemberState):
    """State of batch EM."""

    measured_round: np.ndarray  # round of the schedule in the last pass, int64 (M,)
    best_pass: np.ndarray  # pass that gave ``best``, int64 (M,)


AnyState = TypeVar("AnyState", bound=MemberState)


def initial_state(w: np.ndarray, n_members: int) -> CapsuleState:
    """Return the state of batch EM before the first pass, from weights (D, p)."""
    zero = np.zeros(n_members, dtype=np.int64)
    return CapsuleState.start(w, n_members, measured_round=zero, best_pass=zero)


class Group(NamedTuple):
    """Members that learn from the same rows, which are all rows or the rows of one class."""

    label: int | None  # class code of these rows; None means all rows
    members: np.ndarray
    w: Array
    table: SquashTable
    nu: np.ndarray


@dataclass(frozen=True)
class Prepared:
    """Parameters of a pass on the device."""

    backend: Backend
    groups: tuple[Group, ...]
    w: Array | None = None  # weights of all members, if the pass measures the joint decision


@dataclass(frozen=True)
class CapsulePass:
    """Reduction over rows: the E-step if ``train`` is True, else scoring alone.

    Statistics: ``sums`` (M, 4) has the weighted log-likelihood, weighted errors, active rows and total
    weight; ``rows`` (M,) counts rows. The E-step adds the residual moment ``delta`` (D, p). Scoring of an
    ensemble adds ``decision`` (2,): weighted errors of the joint decision and total weight, both 0 if not
    measured.
    """

    requirements = BlockRequirements(reads_on_gpu=True)

    members: Members
    n_features: int  # columns of W
    schedule: np.ndarray  # threshold nu of each round
    class_weight: np.ndarray | None
    train: bool
    intercept: Intercept | None = None  # None if the rows already contain the constant column

    def layout(self) -> Layout:
        fields: list[tuple[str, tuple[int, ...]]] = [
            ("sums", (self.members.n_members, 4)),
            ("rows", (self.members.n_members,)),
        ]
        if self.train:
            fields.append(("delta", (self.members.total_dim, self.n_features)))
        elif self.members.n_members > 1:
            fields.append(("decision", (2,)))
        return Layout(tuple(fields))

    def flops_per_row(self) -> float:
        """Return operations of matrix products; a member counts by the share of classes it learns from."""
        share = self.members.sees.mean(axis=1) @ self.members.dims.sum(axis=1)
        return (4.0 if self.train else 2.0) * self.n_features * float(share)

    def prepare(self, state: MemberState, backend: Backend) -> Prepared:
        """Copy the weights of the members that still learn to the device, by `Group` of members."""
        groups = []
        for label, members in self.members.groups:
            live = members[state.finished[members] == 0]
            if not len(live):
                continue
            w = backend.asarray(state.w[self.members.stack_rows(live)], np.float32)
            nu = (
                self.schedule[np.minimum(state.round[live], len(self.schedule) - 1)]
                if self.train
                else np.zeros(len(live))
            )
            table = squash_table(int(self.members.dims[live[0]].sum()))
            groups.append(Group(label, live, w, backend.copy_table(table), nu))
        whole = not self.train and self.members.n_members > 1 and self.measures_decision(state)
        return Prepared(backend, tuple(groups), backend.asarray(state.w, np.float32) if whole else None)

    def measures_decision(self, state: MemberState) -> bool:
        """Return True if the next pass measures the joint decision of an ensemble."""
        done = state.iteration + 1
        return done <= FIRST_DECISION_PASSES or done % FIRST_DECISION_PASSES == 0

    def accumulate(self, prepared: Prepared, block: Block, stats: Stats) -> None:
        """Add log-likelihood, errors and, in training, the residual moment of one block to ``stats``."""
        backend = prepared.backend
        assert block.y is not None
        with np.errstate(over="ignore"):  # find_too_large and find_nonfinite report the row and the feature
            x = map_rows(self.intercept, backend, block.x, np.float32, "x")
        # Only validation rows are checked here, because the pass over the second moments has already checked
        # the training rows.
        if not self.train and (place := find_too_large(block)):
            raise NonFiniteError(place)
        weight = np.ones(len(block.y)) if block.weight is None else block.weight
        if self.class_weight is not None:
            weight = weight * self.class_weight[block.y]
        # A member for a pair of classes uses only rows of these classes, so the rows are sorted by class.
        pairs = self.members.architecture == "all_vs_all"
        order = np.argsort(block.y, kind="stable") if pairs else np.empty(0, dtype=np.intp)
        for group in prepared.groups:
            if group.label is None:
                sums = self._add_group(backend, group, x, block.y, weight, stats)
            else:
                first, last = np.searchsorted(block.y, [group.label, group.label + 1], sorter=order)
                rows = order[first:last]
                if not len(rows):
                    continue
                part = backend.take(x, rows, "class")
                sums = self._add_group(backend, group, part, block.y[rows], weight[rows], stats)
            # Non-finite sums of finite rows mean that the weights W have grown too large. The M-step reports
            # this.
            if not np.isfinite(sums).all() and (place := find_nonfinite(block)):
                raise NonFiniteError(place)
        if prepared.w is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                h = backend.matmul(prepared.w, x.T, "h")
                wrong = compute_class_scores(backend, self.members, h).argmax(axis=1) != block.y
            decision = stats["decision"]
            decision += weight @ wrong, weight.sum()

    def _add_group(
        self, backend: Backend, group: Group, x: Array, y: np.ndarray, weight: np.ndarray, stats: Stats
    ) -> np.ndarray:
        """Add rows to the statistics of one group of members; return the sums of these rows (members, 3)."""
        members, live = self.members, group.members
        product, sums = backend.kernel("capsule_estep")(
            backend, group.w, x, y, weight, members.dims[live], members.labels[live], group.nu, group.table,
            self.train,
        )  # fmt: skip
        totals = stats["sums"]
        totals[live, :3] += sums
        totals[live, 3] += weight.sum()
        stats["rows"][live] += len(y)
        if product is None:
            return sums
        delta, row = stats["delta"], 0
        for r in live:
            rows = members.rows_of(r)
            delta[rows] += product[row : row + rows.stop - rows.start]
            row += rows.stop - rows.start
        return sums


@dataclass(frozen=True)
class CapsuleEM:
    """Batch learner: the constants of a fit, the M-step and the schedule."""

    members: Members
    moment: np.ndarray  # weighted second moments of the classes, float64 (classes, p, p)
    nu: np.ndarray  # threshold of each round of the schedule, (rounds,)
    patience: np.ndarray  # passes without improvement that end a round, (rounds,)
    scheduled: int  # 0: plain EM without rounds, whose result is the last weights
    momentum: float
    ridge: np.ndarray  # added to the diagonal of the second moments, float64 (p,)
    tol: float
    max_iter: int  # largest number of passes
    class_weight: np.ndarray | None  # float64 (classes,)
    has_validation: int
    intercept: Intercept | None = None

    def reductions(self) -> dict[str, CapsulePass]:
        """Return the E-step over the training rows and, if there are any, scoring of the validation rows."""
        p = self.moment.shape[1]
        out = {"train": CapsulePass(self.members, p, self.nu, self.class_weight, True, self.intercept)}
        if self.has_validation:
            out["validation"] = CapsulePass(self.members, p, self.nu, None, False, self.intercept)
        return out

    @cached_property
    def _factors(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Pairs ((S + ridge)^-1, S) of the second moments S (p, p), for each set of classes of a member."""
        moments = [self.moment[mask].sum(axis=0) for mask in self.members.class_sets]
        return [(invert_on_rows(s, NO_ROWS, self.ridge, RELATIVE_JITTER), s) for s in moments]

    def em_step(self, w: np.ndarray, delta: np.ndarray, member: int) -> np.ndarray:
        """Return the new weights of one member: W + Delta S^-1, or (W S + Delta)(S + ridge)^-1."""
        inverse, s = self._factors[self.members.class_set_of[member]]
        if np.any(self.ridge):
            return (w @ s + delta) @ inverse
        return w + delta @ inverse

    def update(self, state: CapsuleState, stats: Mapping[str, Stats]) -> CapsuleState:
        """Return the state after one M-step and the check of each member's patience; a pure function."""
        train = stats["train"]
        live = state.finished == 0
        loss, error = mean_loss_and_error(train["sums"])
        objective = np.where(live, loss, state.objective)
        if not np.isfinite(objective[live]).all():
            bad = np.flatnonzero(live & ~np.isfinite(objective)).tolist()
            raise make_divergence_error(
                bad, f"pass {state.iteration + 1}", "lower `momentum`, or set `ridge` above 0"
            )
        validation = state.validation_error
        if self.has_validation:
            validation = np.where(live, mean_loss_and_error(stats["validation"]["sums"])[1], validation)
        measured = replace(
            state,
            objective=objective,
            train_error=np.where(live, error, state.train_error),
            validation_error=validation,
            measured_round=state.round,
            active=np.where(live, train["sums"][:, 2] / np.maximum(train["rows"], 1), state.active),
            iteration=state.iteration + 1,
        )
        measured = record_decision(measured, state.w, stats.get("validation"))
        return self._step_members(measured, state.objective, train["delta"])

    def _step_members(
        self, state: CapsuleState, last_objective: np.ndarray, delta: np.ndarray
    ) -> CapsuleState:
        """Return the state in which each member has made an EM step, or has moved to its next threshold."""
        watched = state.validation_error if self.has_validation else state.train_error
        w, previous, best = state.w.copy(), state.w.copy(), state.best.copy()
        round_, stale, finished = state.round.copy(), state.stale.copy(), state.finished.copy()
        best_error, best_pass = state.best_error.copy(), state.best_pass.copy()
        for r in map(int, np.flatnonzero(state.finished == 0)):
            rows = self.members.rows_of(r)
            stale[r] += 1
            if watched[r] < best_error[r]:
                best_error[r], best_pass[r], stale[r] = watched[r], state.iteration, 0
                best[rows] = state.w[rows]
            # The first pass of a later round measures the best weights again, so its unchanged objective does
            # not mean that the fit has converged.
            stepped = state.stale[r] >= 0
            flat = self.tol > 0 and stepped and 0 <= last_objective[r] - state.objective[r] < self.tol
            if stale[r] >= self.patience[round_[r]] or flat:
                # The next round starts at the best weights without momentum. Its first pass measures these
                # weights again.
                round_[r] += 1
                stale[r] = -1
                w[rows] = previous[rows] = best[rows] if self.scheduled else state.w[rows]
            else:
                step = self.em_step(state.w[rows], delta[rows], r)
                w[rows] = step + self.momentum * (state.w[rows] - state.previous[rows])
            if round_[r] >= len(self.nu) or state.iteration >= self.max_iter:
                finished[r] = 1
                if self.scheduled or self.has_validation:
                    w[rows] = best[rows]
        return replace(
            state, w=w, previous=previous, best=best, best_error=best_error, best_pass=best_pass,
            round=round_, stale=stale, finished=finished,
        )  # fmt: skip

    def weights(self, state: CapsuleState) -> np.ndarray:
        """Return the weights of the fitted model: each member's best weights, or the last of plain EM."""
        return state.best if self.scheduled or self.has_validation else state.w

    def is_done(self, state: CapsuleState) -> bool:
        return bool(state.finished.all())

    def summary(self, state: CapsuleState) -> dict[str, float | int | None]:
        """Return the measurements of the last pass."""
        rounds, measured = state.measured_round, (state.objective, state.train_error, state.active)
        return {"pass": state.iteration} | self.describe(state, rounds, *measured)

    def describe(
        self,
        state: MemberState,
        rounds: np.ndarray,
        objective: np.ndarray,
        train_error: np.ndarray,
        active: np.ndarray,
    ) -> dict[str, float | int | None]:
        """Return one history record of a pass: means over members, and the validation error of the model."""
        rounds = np.minimum(rounds, len(self.nu) - 1)
        train, held = float(train_error.mean()), float(state.validation_error.mean())
        errors: dict[str, float | int | None] = {
            "train_error": train,
            "validation_error": held if self.has_validation else None,
        }
        if self.members.n_members > 1:
            # The members solve different problems, so their mean error is not the error of their joint
            # decision.
            known = self.has_validation and not np.isnan(state.decision_error)
            errors = {
                "train_error": None,
                "mean_member_train_error": train,
                "validation_error": state.decision_error if known else None,
                "mean_member_validation_error": held if self.has_validation else None,
            }
        return {
            "objective": float(objective.mean()),
            **errors,
            "best_error": float(state.best_error.mean()) if np.isfinite(state.best_error).all() else None,
            "active_members": int((state.finished == 0).sum()),
            "active_rows": float(active.mean()),
            "nu": float(self.nu[rounds].mean()),
            "round": int(rounds.min()) + 1,
        }


def mean_loss_and_error(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean log-loss (nats) and the error rate of each member, both (M,), from ``sums`` (M, 4+)."""
    total = np.maximum(sums[:, 3], np.finfo(float).tiny)
    return -sums[:, 0] / total, sums[:, 1] / total


def record_decision(state: AnyState, w: np.ndarray, validation: Stats | None) -> AnyState:
    """Return the state with the validation error of an ensemble's joint decision, if the pass measured it.

    ``w`` are the weights that the pass measured. The state keeps ``w`` if its error is the lowest so far.
    """
    if validation is None or "decision" not in validation.layout.slices:
        return state
    wrong, weight = validation["decision"]
    if not weight > 0:
        return state
    error = float(wrong / weight)
    if error < state.together_error:
        state = replace(state, together=w, together_error=error)
    return replace(state, decision_error=error)
