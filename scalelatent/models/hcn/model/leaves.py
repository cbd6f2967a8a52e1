"""Learning with kept messages over many leaves: visits add up what their messages to W have changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Wants
from scalelatent.errors import DivergenceError
from scalelatent.models.hcn.kernels.exact import from_grid, to_grid

from .batch import LeafMessages, LeafParts, leaf_bytes, start_leaf, visit
from .layer import rows_of
from .online import EvidenceLearner, EvidenceState, PreparedEvidence


@dataclass(frozen=True)
class LeafState(EvidenceState):
    """Beliefs of W with the messages of all leaves, multiples of a unit.

    Attributes
    ----------
    moved, last_moved : int
        Trees of which a message changed in the last sweep of a leaf: of the epoch, and of the one before.
    left, last_left : int
        Leaves that have sweeps left, of both.
    """

    moved: int = 0
    last_moved: int = -1
    left: int = 0
    last_left: int = -1


class KeptLeaf(TypedDict):
    """What is kept of a leaf: its messages, and what the last visit changed in the beliefs of W."""

    messages: LeafParts
    change: np.ndarray


@dataclass(frozen=True)
class KeptMessages(EvidenceLearner):
    """Algorithm 1 (a :class:`~scalelatent.contract.learners.LeafLearner`).

    Attributes
    ----------
    damping : float
        Weight of the new message.
    n_rows : int
        Images of all leaves.
    alone_sweeps : int
        Sweeps of a visit where one leaf is all: nothing comes from others between two of them.
    most_sweeps : int
        Of all visits of a leaf.
    """

    damping: float = 1.0
    n_rows: int = 1
    alone_sweeps: int = 1
    most_sweeps: int = 60

    @property
    def wants(self) -> Wants:
        fixed = 48 * int(np.prod(self.layer.weights_shape))
        # What was kept and what is kept, each with its bytes on the way from and to the disk, which are put
        # together of those of its arrays; and the orders.
        return Wants(scratch=(fixed, 5 * leaf_bytes(self.layer, 1) + 24 * self.layer.n_pixels))

    def layout(self) -> Layout:
        return Layout((("evidence", self.layer.weights_shape), ("moved", ()), ("left", ())))

    def alone(self, n_rows: int, sweeps: int) -> KeptMessages:
        """The learner of so many rows that are one leaf, with so many sweeps of a visit."""
        return replace(self, n_rows=n_rows, alone_sweeps=sweeps)

    def start(self, restart: int = 0) -> LeafState:
        first = self.layer.first_beliefs(self.seed, restart)
        return LeafState(from_grid(to_grid(first)), first)

    def visit(self, prepared: PreparedEvidence, block: Block, kept: KeptLeaf | None) -> KeptLeaf:
        """The leaf's messages after some sweeps, and what these change in the beliefs of W."""
        state, backend = prepared
        old = start_leaf(self.layer, len(block.x)) if kept is None else LeafMessages(**kept["messages"])
        evidence, beliefs = self.layer.evidence_in(block), to_grid(state.beliefs)
        wanted = self.alone_sweeps if len(block.x) == self.n_rows else 1
        sweeps = min(wanted, self.most_sweeps - old.sweeps)
        if sweeps < 1:
            new, change = replace(old, moved=0), np.zeros_like(beliefs)
        else:
            first = int(rows_of(block)[0])
            how = first, self.seed, sweeps, self.damping, backend
            new, change = visit(self.layer, old, evidence, beliefs, *how)
        return KeptLeaf(messages=new.parts(), change=change)

    def exchange(
        self, prepared: PreparedEvidence, kept: KeptLeaf | None, new: KeptLeaf, stats: Stats
    ) -> None:
        stats["evidence"][...] += from_grid(new["change"])
        stats["moved"][...] += new["messages"]["moved"]
        stats["left"][...] += new["messages"]["sweeps"] < self.most_sweeps

    def step(self, state: EvidenceState, stats: Stats, n_rows: int) -> LeafState:
        assert isinstance(state, LeafState)
        beliefs = state.beliefs + stats["evidence"]
        if not self.layer.is_exact(to_grid(np.clip(beliefs, -(2.0**22), 2.0**22))):
            feature = int(np.abs(beliefs).max(axis=(0, 1, 2)).argmax())
            raise DivergenceError(
                f"layer 1: beliefs in weights of feature {feature} have reached {np.abs(beliefs).max():,.0f} "
                "and are beyond exact sums: lower damping, raise p01 and p10, or learn with online=True"
            )
        changed = int(((beliefs > 0) != (state.beliefs > 0)).sum())
        return replace(
            state,
            beliefs=beliefs,
            changed=state.changed + changed,
            moved=state.moved + int(stats["moved"]),
            left=state.left + int(stats["left"]),
            steps=state.steps + 1,
            rows=state.rows + n_rows,
        )

    def end_epoch(self, state: EvidenceState) -> EvidenceState:
        assert isinstance(state, LeafState)
        ended = super().end_epoch(replace(state, last_moved=state.moved, last_left=state.left))
        assert isinstance(ended, LeafState)
        return replace(ended, moved=0, left=0)

    def summary(self, state: EvidenceState) -> dict[str, float | int | None]:
        assert isinstance(state, LeafState)
        return {**super().summary(state), "moved": state.moved if state.rows else state.last_moved}

    def is_done(self, state: EvidenceState) -> bool:
        assert isinstance(state, LeafState)
        return 0 in (state.last_moved, state.last_left) or super().is_done(state)
