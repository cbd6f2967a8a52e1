r"""Capsule regression by expectation-maximisation, in residual form.

.. math::

    W_i \leftarrow W_i + \Delta_i S^{-1}, \qquad
    \Delta_i = \sum_n (r_{n,i} - 1) h_{n,i} x_n^T, \qquad r_{n,i} = Q_i(y_n) / P(y_n)

equals the paper's update (equation 2.24, because W S = sum h x^T) and rounds better: at convergence nothing
large cancels, and rows below the threshold nu (equation 2.26) drop out of the second product. Momentum is
equation 2.27, the schedule section 3.1.

L. K. Saul, "Capsule regression", Neural Computation (2021).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from scalelatent.contract.finite import find_nonfinite, find_too_large, make_divergence_error
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Wants
from scalelatent.kernels.arrays import Array
from scalelatent.models.capsule.kernels.squash import SquashTable, squash_table
from scalelatent.reductions.eigen import inverse_on_rows
from scalelatent.reductions.intercept import Intercept, mapped_rows
from scalelatent.reductions.moments import NonFiniteError

from .members import Members
from .predict import class_scores

if TYPE_CHECKING:
    from .online import OnlineState

RELATIVE_JITTER = 1e-8
NO_ROWS = 1e-10
# An ensemble's own error needs all members on all validation rows, also those that have stopped and those
# that learn from other classes: batch EM measures it in the first passes, and then only now and then.
DECIDED_PASSES = 8


@dataclass(frozen=True)
class CapsuleState:
    """Everything that changes from pass to pass; M members share one stacked W."""

    # w, previous, best: float64 (D, p): current weights, those one pass before (momentum),
    # and each member's best so far
    w: np.ndarray
    previous: np.ndarray
    best: np.ndarray
    # float64 (M,): watched error rate (validation if there is one, else training) of
    # ``best``
    best_error: np.ndarray
    # objective, train_error, validation_error: float64 (M,): mean log-loss in nats and
    # error rates of the last pass; NaN where not measured
    objective: np.ndarray
    train_error: np.ndarray
    validation_error: np.ndarray
    # round, measured_round, stale, finished, best_pass: int64 (M,): round of the schedule
    # now and in the last pass, passes without improvement, 1 where the member has stopped, the pass that gave
    # ``best``
    round: np.ndarray
    measured_round: np.ndarray
    stale: np.ndarray
    finished: np.ndarray
    best_pass: np.ndarray
    # float64 (M,): share of rows that took part in the last update
    active: np.ndarray
    # Passes done
    iteration: int
    # Of an ensemble: validation error of what its members decide together, when it was last measured; NaN
    # before
    decision_error: float = float("nan")
    # Of an ensemble: float64 (D, p), weights with which its members decided best together, and their error
    together: np.ndarray | None = None
    together_error: float = float("inf")


def initial_state(w: np.ndarray, n_members: int) -> CapsuleState:
    """State before the first pass."""
    nan, zero = np.full(n_members, np.nan), np.zeros(n_members, dtype=np.int64)
    return CapsuleState(
        w=w,
        previous=w,
        best=w,
        best_error=np.full(n_members, np.inf),
        objective=np.full(n_members, np.inf),
        train_error=nan,
        validation_error=nan,
        round=zero,
        measured_round=zero,
        stale=zero,
        finished=zero,
        best_pass=zero,
        active=np.ones(n_members),
        iteration=0,
    )


class Moving(Protocol):
    """What a pass reads of a state, see :class:`CapsuleState`."""

    @property
    def w(self) -> np.ndarray: ...

    @property
    def round(self) -> np.ndarray: ...

    @property
    def finished(self) -> np.ndarray: ...

    @property
    def iteration(self) -> int: ...


class Measured(Protocol):
    """What a record reads of a state."""

    @property
    def validation_error(self) -> np.ndarray: ...

    @property
    def decision_error(self) -> float: ...


class Group(NamedTuple):
    """Members that learn from the same rows: those of one class, or (None) all."""

    label: int | None
    members: np.ndarray
    w: Array
    table: SquashTable
    nu: np.ndarray


@dataclass(frozen=True)
class Prepared:
    """Parameters of a pass on the device, and all of W where the decision is measured."""

    backend: Backend
    groups: tuple[Group, ...]
    w: Array | None = None


S = TypeVar("S", bound=Moving, contravariant=True)
Deciding = TypeVar("Deciding", bound="CapsuleState | OnlineState")


@dataclass(frozen=True)
class CapsulePass(Generic[S]):
    """E-step (``train`` True) or scoring alone: the :class:`~..base.Reduction` of capsule regression.

    Statistics: ``sums`` (M, 4) are weighted log-likelihood, weighted errors, active rows, total weight; the
    E-step adds ``rows`` (M,) and ``delta`` (D, p), the residual moment; scoring of an ensemble ``decision``
    (2,), weighted errors of what its members decide together and total weight, both 0 where not measured.
    """

    wants = Wants()

    members: Members
    # Columns of W
    n_features: int
    schedule: np.ndarray
    class_weight: np.ndarray | None
    train: bool
    # Of rows that bring no intercept with them
    intercept: Intercept | None = None

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
        """Both products; a member that sees a share of the classes is counted by that share."""
        share = (self.members.labels >= 0).mean(axis=1) @ self.members.dims.sum(axis=1)
        return (4.0 if self.train else 2.0) * self.n_features * float(share)

    def prepare(self, state: S, backend: Backend) -> Prepared:
        """Stack the weights of the members that still learn."""
        groups = []
        for label, members in self.members.groups:
            live = members[state.finished[members] == 0]
            if not len(live):
                continue
            w = backend.asarray(state.w[self.members.rows(live)], np.float32)
            nu = (
                self.schedule[np.minimum(state.round[live], len(self.schedule) - 1)]
                if self.train
                else np.zeros(len(live))
            )
            table = squash_table(int(self.members.dims[live[0]].sum()))
            groups.append(Group(label, live, w, backend.table(table), nu))
        whole = not self.train and self.members.n_members > 1 and self.decides(state)
        return Prepared(backend, tuple(groups), backend.asarray(state.w, np.float32) if whole else None)

    def decides(self, state: S) -> bool:
        """Whether a pass of an ensemble measures what its members decide together."""
        done = state.iteration + 1
        return done <= DECIDED_PASSES or done % DECIDED_PASSES == 0

    def accumulate(self, prepared: Prepared, block: Block, stats: Stats) -> None:
        """Add one block: H = W X^T, residuals in place, Delta += G X."""
        backend = prepared.backend
        assert block.y is not None
        with np.errstate(over="ignore"):  # what is beyond float32 is told below, by row and feature
            x = mapped_rows(self.intercept, backend, block.x, np.float32, "x")
        # Rows to learn from were measured before the first pass.
        if not self.train and (place := find_too_large(block)):
            raise NonFiniteError(place)
        weight = np.ones(len(block.y)) if block.weight is None else block.weight
        if self.class_weight is not None:
            weight = weight * self.class_weight[block.y]
        # Members of pairs see their classes only: a class feeds all its members at once.
        pairs = self.members.architecture == "all_vs_all"
        order = np.argsort(block.y, kind="stable") if pairs else np.empty(0, dtype=np.intp)
        for label, live, w, table, nu in prepared.groups:
            if label is None:
                sums = self._group(backend, x, block.y, weight, live, w, table, nu, stats)
            else:
                first, last = np.searchsorted(block.y, [label, label + 1], sorter=order)
                rows = order[first:last]
                if not len(rows):
                    continue
                part = backend.take(x, rows, "class")
                sums = self._group(backend, part, block.y[rows], weight[rows], live, w, table, nu, stats)
            # Where the rows are sound, weights that have grown too large are for the M-step to report.
            if not np.isfinite(sums).all() and (place := find_nonfinite(block)):
                raise NonFiniteError(place)
        if prepared.w is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                scores = class_scores(backend, self.members, backend.matmul(prepared.w, x.T, "h"))
            wrong, decision = scores.argmax(axis=1) != block.y, stats["decision"]
            decision += weight @ wrong, weight.sum()

    def _group(
        self,
        backend: Backend,
        x: Array,
        y: np.ndarray,
        weight: np.ndarray,
        live: np.ndarray,
        w: Array,
        table: SquashTable,
        nu: np.ndarray,
        stats: Stats,
    ) -> np.ndarray:
        members = self.members
        product, sums = backend.kernel("capsule_estep")(
            backend, w, x, y, weight, members.dims[live], members.labels[live], nu, table, self.train
        )
        totals = stats["sums"]
        totals[live, :3] += sums
        totals[live, 3] += weight.sum()
        stats["rows"][live] += len(y)
        if product is None:
            return sums
        delta, row = stats["delta"], 0
        for r in live:
            start, stop = members.offsets[r], members.offsets[r + 1]
            delta[start:stop] += product[row : row + stop - start]
            row += stop - start
        return sums


@dataclass(frozen=True)
class CapsuleEM:
    """The batch learner: constants of a fit, M-step, schedule."""

    members: Members
    # float64 (classes, p, p): weighted second moments of the classes
    moment: np.ndarray
    # nu, patience: (rounds,): the schedule; ``scheduled`` 0 means plain EM with the last
    # weights as the result
    nu: np.ndarray
    patience: np.ndarray
    scheduled: int
    momentum: float
    # float64 (p,): rho of each column
    ridge: np.ndarray
    tol: float
    # Largest number of passes
    max_iter: int
    # ndarray of float64, shape (classes,) or None
    class_weight: np.ndarray | None
    has_validation: int
    intercept: Intercept | None = None

    def reductions(self) -> dict[str, CapsulePass[Moving]]:
        """E-step over the training rows and, where there are some, errors over the validation rows."""
        p = self.moment.shape[1]
        out: dict[str, CapsulePass[Moving]] = {
            "train": CapsulePass(self.members, p, self.nu, self.class_weight, True, self.intercept)
        }
        if self.has_validation:
            out["validation"] = CapsulePass(self.members, p, self.nu, None, False, self.intercept)
        return out

    @cached_property
    def _inverses(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(S + rho)^-1 and S of each member; members that see the same classes share them."""
        seen: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}
        out = []
        for mask in self.members.labels >= 0:
            if mask.tobytes() not in seen:
                s = self.moment[mask].sum(axis=0)
                seen[mask.tobytes()] = inverse_on_rows(s, NO_ROWS, self.ridge, RELATIVE_JITTER), s
            out.append(seen[mask.tobytes()])
        return out

    def inverse(self, member: int) -> np.ndarray:
        """(S + rho)^-1 of a member, (p, p)."""
        return self._inverses[member][0]

    def second_moment(self, member: int) -> np.ndarray:
        """S of a member, (p, p)."""
        return self._inverses[member][1]

    def em_step(self, w: np.ndarray, delta: np.ndarray, member: int) -> np.ndarray:
        """EM(W) of one member: W + Delta S^-1, or with a ridge (W S + Delta)(S + rho)^-1."""
        inverse, s = self._inverses[member]
        if np.any(self.ridge):
            return (w @ s + delta) @ inverse
        return w + delta @ inverse

    def update(self, state: CapsuleState, stats: Mapping[str, Stats]) -> CapsuleState:
        """One M-step and one step of every member's schedule; a pure function."""
        train = stats["train"]
        total = np.maximum(train["sums"][:, 3], np.finfo(float).tiny)
        live = state.finished == 0
        objective = np.where(live, -train["sums"][:, 0] / total, state.objective)
        if not np.isfinite(objective[live]).all():
            bad = np.flatnonzero(live & ~np.isfinite(objective)).tolist()
            raise make_divergence_error(
                bad, f"pass {state.iteration + 1}", "lower `momentum`, or set `ridge` above 0"
            )
        error = np.where(live, train["sums"][:, 1] / total, state.train_error)
        validation = state.validation_error
        if self.has_validation:
            sums = stats["validation"]["sums"]
            validation = np.where(live, sums[:, 1] / np.maximum(sums[:, 3], np.finfo(float).tiny), validation)
        measured = replace(
            state,
            objective=objective,
            train_error=error,
            validation_error=validation,
            measured_round=state.round,
            active=np.where(live, train["sums"][:, 2] / np.maximum(train["rows"], 1), state.active),
            iteration=state.iteration + 1,
        )
        measured = with_decision(measured, state.w, stats.get("validation"))
        return self._advance(measured, state.objective, train["delta"])

    def _advance(self, state: CapsuleState, last_objective: np.ndarray, delta: np.ndarray) -> CapsuleState:
        watched = state.validation_error if self.has_validation else state.train_error
        w, previous, best = state.w.copy(), state.w.copy(), state.best.copy()
        round_, stale, finished = state.round.copy(), state.stale.copy(), state.finished.copy()
        best_error, best_pass = state.best_error.copy(), state.best_pass.copy()
        for r in map(int, np.flatnonzero(state.finished == 0)):
            rows = slice(self.members.offsets[r], self.members.offsets[r + 1])
            stale[r] += 1
            if watched[r] < best_error[r]:
                best_error[r], best_pass[r], stale[r] = watched[r], state.iteration, 0
                best[rows] = state.w[rows]
            # The first pass of a later round measures the weights that it starts from: no step lies between.
            stepped = state.stale[r] >= 0
            flat = self.tol > 0 and stepped and 0 <= last_objective[r] - state.objective[r] < self.tol
            if stale[r] >= self.patience[round_[r]] or flat:
                # The next round starts at the best model so far, without momentum; its first pass only
                # measures that model again.
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
            state,
            w=w,
            previous=previous,
            best=best,
            best_error=best_error,
            best_pass=best_pass,
            round=round_,
            stale=stale,
            finished=finished,
        )

    def weights(self, state: CapsuleState) -> np.ndarray:
        """W to keep: each member's best where errors are watched, the latest of plain EM."""
        return state.best if self.scheduled or self.has_validation else state.w

    def is_done(self, state: CapsuleState) -> bool:
        """All members have stopped."""
        return bool(state.finished.all())

    def summary(self, state: CapsuleState) -> dict[str, float | int | None]:
        """The last pass's measurements: means over members, and the validation error of all together."""
        rounds = np.minimum(state.measured_round, len(self.nu) - 1)
        return {
            "pass": state.iteration,
            "objective": float(state.objective.mean()),
            **error_rates(state, state.train_error, bool(self.has_validation)),
            "best_error": float(state.best_error.mean()),
            "active_members": int((state.finished == 0).sum()),
            "active_rows": float(state.active.mean()),
            "nu": float(self.nu[rounds].mean()),
            "round": int(rounds.min()) + 1,
        }


def with_decision(state: Deciding, w: np.ndarray, validation: Stats | None) -> Deciding:
    """Return the state with the validation error of what an ensemble decides, of a pass that measured it.

    ``w`` are the weights that were measured; they are kept where they decided better than all before.
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


def error_rates(state: Measured, train_error: np.ndarray, has_validation: bool) -> dict[str, float | None]:
    """Errors of a record: those of the model; of an ensemble the means over its members have other names."""
    train, held = float(train_error.mean()), float(state.validation_error.mean())
    if len(train_error) == 1:
        return {"train_error": train, "validation_error": held if has_validation else None}
    own = state.decision_error if has_validation and not np.isnan(state.decision_error) else None
    return {
        "train_error": None,
        "mean_member_train_error": train,
        "validation_error": own,
        "mean_member_validation_error": held if has_validation else None,
    }
