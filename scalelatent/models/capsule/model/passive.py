r"""Passive-aggressive capsule regression: row by row, the smallest change of W that gives the posterior mean.

For a row x of class y the target of each capsule is its posterior mean E[h_i | y, x] = r_i h_i (Saul, 2021,
equation 2.19, and its section 4, which proposes this learner). The vector of all residuals
g = (E[h | y, x] - h) is taken out by the smallest change of W, at most the aggressiveness C of it (PA-I of
Crammer et al., 2006):

.. math::

    W \leftarrow W + \tau \frac{g}{|g|} z^T, \qquad z = \bar S^{-1} x, \qquad
    \tau = \min\left(C, \frac{|g|}{x^T z}\right)

The change is measured where it matters, in the second moments :math:`\bar S` of the rows: it is the smallest
mean squared change of the latent means of all rows. Rows that are right by a margin (threshold nu, equation
2.26) change nothing: they are what "passive" says.

A chain walks through its rows with its own copy of W; the copies of a step's chains are averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from scalelatent.contract.finite import find_nonfinite
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.models.capsule.kernels.squash import SquashTable, squash_table
from scalelatent.reductions.intercept import mapped_rows
from scalelatent.reductions.moments import NonFiniteError

from .online import OnlineCapsule, OnlineState


class Walk(NamedTuple):
    """The backend, its kernel, W, the members that still learn, and the threshold and the table of each."""

    backend: Backend
    kernel: Callable[..., tuple[np.ndarray, np.ndarray]]
    w: np.ndarray
    live: np.ndarray
    nu: np.ndarray
    table: SquashTable


@dataclass(frozen=True)
class CapsulePassiveAggressive(OnlineCapsule[OnlineState]):
    """Passive-aggressive learning (an :class:`~..base.OnlineLearner`)."""

    # C, the largest length of a row's change, in units of |g| / (x^T z); a row of weight a has a C
    aggressiveness: float

    def layout(self) -> Layout:
        """``moved`` (D, p) is the sum over ``chains`` of what a chain changed."""
        m, d, p = self.em.members.n_members, self.em.members.total_dim, self.em.moment.shape[1]
        return Layout((("sums", (m, 4)), ("rows", (m,)), ("moved", (d, p)), ("chains", ())))

    @cached_property
    def metrics(self) -> tuple[np.ndarray, np.ndarray]:
        """(inverses, which): the inverse mean second moments, float32 (kinds, p, p), and each member's."""
        masks = self.em.members.labels >= 0
        kinds, which = np.unique(masks, axis=0, return_inverse=True)
        first = [int(np.flatnonzero(which.ravel() == k)[0]) for k in range(len(kinds))]
        inverses = [self.em.inverse(r) * (masks[r] @ self.weight) for r in first]
        return np.stack(inverses).astype(np.float32), which.ravel().astype(np.int64)

    def prepare(self, state: OnlineState, backend: Backend) -> Walk:
        """W in float32, and the thresholds; members that have stopped walk nowhere."""
        rounds = np.minimum(state.round, len(self.em.nu) - 1)
        live = np.flatnonzero(state.finished == 0)
        table = squash_table(int(self.em.members.dims[0].sum()))
        return Walk(backend, backend.kernel("capsule_walk"), state.w, live, self.em.nu[rounds], table)

    def run_chain(self, prepared: Walk, block: Block, stats: Stats) -> None:
        """Walk through the rows with a copy of W."""
        backend, walk, w, live, nu, table = prepared
        assert block.y is not None
        members, (inverses, which) = self.em.members, self.metrics
        # As in counts of rows, weights below 1 on average are scaled to a mean of 1.
        scale = max(1.0, self.count.sum() / self.weight.sum())
        weight = np.ones(len(block.y)) if block.weight is None else block.weight * scale
        if self.em.class_weight is not None:
            weight = weight * self.em.class_weight[block.y]
        with np.errstate(over="ignore"):  # what is beyond float32 is told below, by row and feature
            x = backend.to_host(mapped_rows(self.em.intercept, backend, block.x, np.float32, "x"))
        for r in live:
            labels, rows = members.labels[r][block.y], self.rows_of(r)
            seen = np.flatnonzero(labels >= 0)
            everything = len(seen) == len(x)
            moved, sums = walk(
                w[rows],
                x if everything else x[seen],
                labels[seen],
                weight[seen],
                members.dims[r],
                inverses[which[r]],
                float(nu[r]),
                self.aggressiveness,
                table,
            )
            if not np.isfinite(sums).all() and (place := find_nonfinite(block)):
                raise NonFiniteError(place)
            stats["sums"][r, :3] += sums
            stats["sums"][r, 3] += weight[seen].sum()
            stats["rows"][r] += len(seen)
            stats["moved"][rows] += moved
        stats["chains"][...] += 1

    def step(self, state: OnlineState, stats: Stats, n_rows: int) -> OnlineState:
        """The mean of the chains; a pure function."""
        sums = self.measured(state, stats)
        w = state.w + stats["moved"] / float(stats["chains"])
        since, average = self.averaged(state, w)
        return replace(
            state,
            w=w,
            previous=state.w,
            sums=sums,
            steps=state.steps + 1,
            since=since,
            average=average,
        )
