r"""Incremental EM of capsule regression (Neal and Hinton, 1998): leaves exchange old contributions for new.

A *leaf* is a fixed run of rows. Each keeps what its last visit gave: the residual moment
:math:`\Delta_l = \sum (r - 1) h x^T` and :math:`H_l = \sum h x^T`, both under the weights of that visit; the
totals G and H are kept up to date by exchange. Exact incremental EM is :math:`W \leftarrow (G + H) S^{-1}`.
Residuals must not be added to W again and again while they are stale: it is H, stale as well, that prevents
it. Written so that nothing large cancels, and with momentum:

.. math::  W \leftarrow W + [G + (1 - \gamma) (H - W S)] S^{-1}

gamma = 0 is Neal and Hinton's. Where the gradient is constant, W drifts at 2 / (1 - gamma) steps of batch EM
a pass, the gain that momentum has in batch EM, and twice that. All leaves at once are one step of batch EM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.reductions.intercept import mapped_rows

from .em import CapsulePass, Moving, Prepared
from .online import OnlineCapsule, OnlineState, online_state

BLOCK_ROWS = 2048


@dataclass(frozen=True)
class IncrementalState(OnlineState):
    """State of incremental EM; ``delta`` is the total G."""

    # float64 (D, p): the total H
    moment: np.ndarray
    # int64 (M,): leaves that the totals hold; W moves once these are all
    leaves: np.ndarray


def incremental_state(w: np.ndarray, n_members: int) -> IncrementalState:
    leaves = np.zeros(n_members, dtype=np.int64)
    return IncrementalState(**vars(online_state(w, n_members)), moment=np.zeros_like(w), leaves=leaves)


class LeafEStep(NamedTuple):
    """The E-step and its weights, and the state."""

    train: CapsulePass[Moving]
    weights: Prepared
    state: IncrementalState


class LeafKept(TypedDict):
    """What is kept of a leaf: its statistic, and the round of each member's schedule that it is of."""

    vector: np.ndarray
    round: np.ndarray


@dataclass(frozen=True)
class CapsuleIncremental(OnlineCapsule[IncrementalState]):
    """Incremental EM (a :class:`~scalelatent.contract.learners.LeafLearner`)."""

    n_leaves: int

    def layout(self) -> Layout:
        """The E-step of batch EM, ``moment`` (D, p) and ``leaves`` (M,)."""
        members, p = self.em.members, self.em.moment.shape[1]
        more = (("moment", (members.total_dim, p)), ("leaves", (members.n_members,)))
        return Layout(self.train_pass.layout().fields + more)

    def prepare(self, state: IncrementalState, backend: Backend) -> LeafEStep:
        train = self.train_pass
        return LeafEStep(train, train.prepare(state, backend), state)

    def visit(self, prepared: LeafEStep, block: Block, kept: LeafKept | None) -> LeafKept:
        """What a leaf has to keep: an E-step of its rows, kernel block by kernel block."""
        train, weights, state = prepared
        stats = Stats.zeros(self.layout())
        part = Stats(train.layout(), stats.vector[: train.layout().size])
        for a in range(0, len(block.x), BLOCK_ROWS):
            rows = slice(a, a + BLOCK_ROWS)
            cut = replace(
                block,
                x=block.x[rows],
                y=None if block.y is None else block.y[rows],
                weight=None if block.weight is None else block.weight[rows],
                start=block.start + a,
                rows=None if block.rows is None else block.rows[rows],
            )
            train.accumulate(weights, cut, part)
            self._add_moment(weights.backend, state, cut, stats["moment"])
        return {"vector": stats.vector, "round": state.round}

    def _add_moment(
        self, backend: Backend, state: IncrementalState, block: Block, moment: np.ndarray
    ) -> None:
        """sum h x^T in float64: it stands against W S, whose small directions float32 would drown."""
        members = self.em.members
        x = mapped_rows(self.em.intercept, backend, block.x, np.float64, "x64")
        assert block.y is not None
        weight = np.ones(len(x)) if block.weight is None else block.weight
        if self.em.class_weight is not None:
            weight = weight * self.em.class_weight[block.y]
        for label, group in members.groups:
            live = group[state.finished[group] == 0]
            if not len(live):
                continue
            of_label = np.arange(len(x)) if label is None else np.flatnonzero(block.y == label)
            part = x if label is None else backend.take(x, of_label, "class64")
            rows = members.rows(live)
            h = backend.matmul(part, backend.asarray(state.w[rows], np.float64).T, "h64")
            h *= backend.asarray(weight[of_label], np.float64)[:, None]
            moment[rows] += backend.to_host(backend.matmul(h.T, part, "moment"))

    def exchange(self, prepared: LeafEStep, old: LeafKept | None, new: LeafKept, stats: Stats) -> None:
        """Add what a leaf's new contribution changes in the totals."""
        state = prepared.state
        layout = self.layout()
        fresh = Stats(layout, new["vector"])
        kept = np.zeros(self.em.members.n_members, dtype=bool)
        if old is not None:
            kept = old["round"] == state.round
        for name in ("sums", "rows", "delta", "moment"):
            stats[name][...] += fresh[name]
        stats["leaves"][...] += ~kept
        if old is not None and kept.any():
            stale = Stats(layout, old["vector"])
            for r in map(int, np.flatnonzero(kept)):
                rows = self.rows_of(r)
                stats["delta"][rows] -= stale["delta"][rows]
                stats["moment"][rows] -= stale["moment"][rows]

    def step(self, state: IncrementalState, stats: Stats, n_rows: int) -> IncrementalState:
        """M-step of the members whose totals hold all leaves; a pure function."""
        sums = self.measured(state, stats)
        live = state.finished == 0
        leaves = state.leaves + np.where(live, stats["leaves"], 0).astype(np.int64)
        delta, moment, w = state.delta + stats["delta"], state.moment + stats["moment"], state.w.copy()
        for r in map(int, np.flatnonzero(live & (leaves >= self.n_leaves))):
            rows = self.rows_of(r)
            stale = moment[rows] - state.w[rows] @ self.em.second_moment(r)
            total = delta[rows] + (1.0 - self.em.momentum) * stale
            w[rows] = self.em.em_step(state.w[rows], total, r)
        return replace(
            state,
            w=w,
            previous=state.w,
            average=w,
            delta=delta,
            moment=moment,
            leaves=leaves,
            sums=sums,
            since=state.since + live,
            steps=state.steps + 1,
        )

    def _restarted(self, state: IncrementalState, ended: np.ndarray) -> IncrementalState:
        """Contributions of another threshold are void: the totals of these members are gathered again."""
        state = super()._restarted(state, ended)
        rows = np.repeat(ended, self.em.members.dims.sum(axis=1))[:, None]
        return replace(
            state,
            moment=np.where(rows, 0.0, state.moment),
            leaves=np.where(ended, 0, state.leaves),
        )
