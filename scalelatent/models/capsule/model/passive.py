r"""Passive-aggressive capsule regression: learn row by row, with the smallest change of W for each row.

Section 4 of the paper proposes this learner. For a row x of class y, the target of each capsule is its
posterior mean :math:`E[h_i | y, x] = r_i h_i` (equation 2.19). The vector g of all residuals
:math:`E[h | y, x] - h` is removed by the smallest change of W, limited by the aggressiveness C (PA-I of
Crammer et al., 2006):

.. math::

    W \leftarrow W + \tau \frac{g}{|g|} z^T, \qquad z = \bar S^{-1} x, \qquad
    \tau = \min\left(C, \frac{|g|}{x^T z}\right)

The size of a change is measured by the mean second moments :math:`\bar S` of the rows: it is the mean squared
change of the latent means of all rows. Rows that are right by a margin (threshold nu, equation 2.26) change
nothing, hence "passive".

Each chain updates its own copy of W row by row; a step averages the copies of its chains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from scalelatent.contract.finite import find_nonfinite
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.models.capsule.kernels.squash import SquashTable, squash_table
from scalelatent.reductions.intercept import map_rows
from scalelatent.reductions.moments import NonFiniteError

from .online import OnlineCapsule, OnlineState


class PreparedRows(NamedTuple):
    """Data that every chain of a step needs."""

    backend: Backend
    update_by_rows: Callable[..., tuple[np.ndarray, np.ndarray]]  # the kernel
    w: np.ndarray
    live: np.ndarray  # members that still learn
    nu: np.ndarray  # threshold of each member
    table: SquashTable


@dataclass(frozen=True)
class CapsulePassiveAggressive(OnlineCapsule):
    """Passive-aggressive learning, an `OnlineLearner`."""

    # C, the largest length of a row's change, in units of |g| / (x^T z); a row of weight a has the limit a C.
    aggressiveness: float

    def layout(self) -> Layout:
        """Return the fields: among others ``moved`` (D, p), the changes of W over ``chains`` chains."""
        m, d, p = self.em.members.n_members, self.em.members.total_dim, self.em.moment.shape[1]
        return Layout((("sums", (m, 4)), ("rows", (m,)), ("moved", (d, p)), ("chains", ())))

    @cached_property
    def inverses(self) -> np.ndarray:
        """Inverse mean second moments of each set of classes that members see, float32 (sets, p, p)."""
        sets = self.em.members.class_sets
        inverses = [self.em.inverse(k) * (mask @ self.weight) for k, mask in enumerate(sets)]
        return np.stack(inverses).astype(np.float32)

    def prepare(self, state: OnlineState, backend: Backend) -> PreparedRows:
        """Return the kernel and its arguments for the members that still learn."""
        rounds = np.minimum(state.round, len(self.em.nu) - 1)
        live = np.flatnonzero(state.finished == 0)
        table = squash_table(int(self.em.members.dims[0].sum()))
        kernel = backend.kernel("capsule_passive")
        return PreparedRows(backend, kernel, state.w, live, self.em.nu[rounds], table)

    def run_chain(self, prepared: PreparedRows, block: Block, stats: Stats) -> None:
        """Update a copy of W with the rows of a block, one after another; add its change to ``stats``."""
        backend, update_by_rows, w, live, nu, table = prepared
        assert block.y is not None
        members, inverses = self.em.members, self.inverses
        # Weights with a mean below 1 are scaled to a mean of 1, like numbers of repeated rows.
        scale = max(1.0, self.count.sum() / self.weight.sum())
        weight = np.ones(len(block.y)) if block.weight is None else block.weight * scale
        if self.em.class_weight is not None:
            weight = weight * self.em.class_weight[block.y]
        with np.errstate(over="ignore"):  # find_nonfinite reports the row and the feature below
            x = backend.to_host(map_rows(self.em.intercept, backend, block.x, np.float32, "x"))
        for r in live:
            labels, rows = members.labels[r][block.y], members.rows_of(r)
            seen = np.flatnonzero(labels >= 0)
            everything = len(seen) == len(x)
            moved, sums = update_by_rows(
                w[rows],
                x if everything else x[seen],
                labels[seen],
                weight[seen],
                members.dims[r],
                inverses[members.class_set_of[r]],
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
        """Return the state with the mean of the chains' weights; a pure function."""
        sums = self.add_sums(state, stats)
        return self.finish_step(
            state, state.w + stats["moved"] / float(stats["chains"]), sums, previous=state.w
        )
