"""Batch learning of one layer of features, with stored messages of all images.

It is Algorithm 1 of Lázaro-Gredilla et al., "Hierarchical compositional feature learning" (2016).

A leaf is a fixed, contiguous range of images, and its file stores the last messages of all its pixels. A
visit updates the messages of one leaf once or a few times, starting from the log odds of the weights W of the
previous step. It returns the change of the messages from the leaf to W. A step adds the changes of the leaves
that it visits to the log odds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.errors import DivergenceError
from scalelatent.models.hcn.kernels.pixel_order import shuffled
from scalelatent.models.hcn.kernels.units import from_units, to_units
from scalelatent.models.hcn.kernels.windows import message_room

from .evidence_learner import EvidenceState, OnlineFeatureLearner, PreparedEvidence
from .layer import FeatureLayer, row_numbers

# One kernel call updates ranges of images (leaves) of at most this many bytes. The host holds them twice.
KERNEL_CALL_BYTES = 2**31


@dataclass(frozen=True)
class LeafMessages:
    """Messages of a leaf (a fixed range of images) between two sweeps (updates of all pixels).

    Attributes
    ----------
    s : ndarray of int32, shape (images, HS, WS, F)
        Log odds of feature positions in units of 1/256 nat: the prior plus all messages to positions.
    to_s, to_w : ndarray of int16, shape (images, channels, pairs and room)
        Messages of the pixels to positions and to weights, in units of 1/256 nat, followed by `MESSAGE_ROOM`
        unused entries.
    held : ndarray of uint8, shape (images, channels, height * width, h)
        1 for each line of a pixel's window that has a nonzero message to W, else 0.
    sweeps : int
        Number of sweeps so far.
    moved : int
        Number of pixels with a changed message in the last sweep; -1 before the first sweep.
    """

    s: np.ndarray
    to_s: np.ndarray
    to_w: np.ndarray
    held: np.ndarray
    sweeps: int = 0
    moved: int = -1


def start_leaf(layer: FeatureLayer, n_rows: int) -> LeafMessages:
    """Return the messages of a leaf (range) of ``n_rows`` images before their first update: all are 0."""
    channels, height, width = layer.image
    room = message_room((height, width), layer.window, layer.n_features)
    to_s, to_w = (np.zeros((n_rows, channels, room), np.int16) for _ in range(2))
    held = np.zeros((n_rows, channels, height * width, layer.window[0]), np.uint8)
    return LeafMessages(layer.prior_beliefs(n_rows), to_s, to_w, held)


def leaf_bytes(layer: FeatureLayer, n_rows: int) -> int:
    """Return the size in bytes of the messages of a leaf (range) of ``n_rows`` images."""
    channels, height, width = layer.image
    room = message_room((height, width), layer.window, layer.n_features)
    held = layer.n_pixels * layer.window[0]
    return n_rows * (4 * channels * room + 4 * int(np.prod(layer.places)) + held)


def visit_leaves(
    leaves: Sequence[LeafMessages],
    evidence: np.ndarray,
    beliefs: np.ndarray,
    first_rows: Sequence[int],
    seed: int,
    n_sweeps: int,
    damping: float,
    backend: Backend,
) -> list[tuple[LeafMessages, np.ndarray]]:
    """Update the messages of several leaves until no message changes, at most ``n_sweeps`` times.

    A leaf is a range of images; all ``leaves`` have equal numbers of images and of earlier sweeps. They stay
    unchanged. They share the kernel calls, and the result of each leaf is that of a call for it alone.

    Parameters
    ----------
    evidence : ndarray of int32, shape (leaves, images, channels, height, width)
        Log odds of the pixels, in units of 1/256 nat.
    beliefs : ndarray of int32, shape (channels, h, w, F)
        Log odds of the weights W in units of 1/256 nat, including the messages of these leaves.
    first_rows : sequence of int
        Row number of the first image of each leaf. Seed, sweep and this number decide the order of the
        pixels.
    damping : float
        Weight of a new message in the average of the new and the old message.

    Returns
    -------
    list of (LeafMessages, ndarray of int32)
        New messages of each leaf, and the change of the sum of its messages to W, shape (channels, h, w, F).
    """
    xp, before, rows = backend.xp, leaves[0].sweeps, np.array(first_rows)
    evidence, w = xp.asarray(evidence), xp.asarray(np.stack([beliefs] * len(leaves)))
    parts = ([getattr(leaf, name) for leaf in leaves] for name in ("s", "to_s", "to_w", "held"))
    s, *kept = (xp.asarray(np.stack(part)) for part in parts)
    kernel = backend.kernel("hcn_sweep_messages")
    moved, done = np.full(len(leaves), -1), np.full(len(leaves), before)
    for sweep in range(before, before + n_sweeps):
        order = xp.asarray(shuffled(seed, "hcn sweep", sweep, rows, evidence[0].size))
        done[moved != 0] = sweep + 1
        moved = backend.to_host(kernel(evidence, order, s, w, *kept, damping))
        if not moved.any():
            break
    changes = backend.to_host(w) - beliefs
    s, to_s, to_w, held = (backend.to_host(a) for a in (s, *kept))
    return [
        (LeafMessages(s[k], to_s[k], to_w[k], held[k], int(done[k]), int(moved[k])), changes[k])
        for k in range(len(leaves))
    ]


@dataclass(frozen=True)
class LeafState(EvidenceState):
    """Log odds of the weights W, including the messages of all images, and progress of the leaves.

    The log odds are multiples of 1/256 nat. A leaf is a fixed range of images, and a sweep updates the
    messages of all its pixels once.

    Attributes
    ----------
    moved, last_moved : int
        Number of pixels that changed a message in the last sweep over their leaf: in this epoch so far, and
        in the epoch before.
    left, last_left : int
        Number of leaves with fewer than ``max_sweeps`` sweeps: in this epoch so far, and in the epoch before.
    """

    moved: int = 0
    last_moved: int = -1
    left: int = 0
    last_left: int = -1


class StoredFeatureLeaf(TypedDict):
    """Stored data of a leaf (range of images): its `LeafMessages` as a dict, and its last change of W."""

    messages: dict[str, Any]
    change: np.ndarray


@dataclass(frozen=True)
class BatchFeatureLearner(OnlineFeatureLearner):
    """Batch learning of one layer (a :class:`~scalelatent.contract.learners.StoredRangeLearner`).

    It is Algorithm 1 of Lázaro-Gredilla et al. (2016). A leaf is a fixed range of images. A sweep updates the
    messages of all its pixels once. A visit loads the stored messages of a leaf, sweeps, and stores them.

    Attributes
    ----------
    damping : float
        Weight of a new message in the average of the new and the old message.
    n_rows : int
        Number of images in all leaves.
    single_leaf_sweeps : int
        Number of sweeps per visit if a single leaf holds all images. With several leaves a visit has one
        sweep, because the other leaves also change the log odds of W.
    max_sweeps : int
        Upper bound of the sweeps over a leaf in all visits.
    """

    damping: float = 1.0
    n_rows: int = 1
    single_leaf_sweeps: int = 1
    max_sweeps: int = 60

    @property
    def requirements(self) -> BlockRequirements:
        fixed = 48 * int(np.prod(self.layer.weights_shape))
        # An update needs memory for the old and the new messages, the bytes read from disk, and the bytes to
        # write, for which the arrays are joined; in addition for the orders of the pixels.
        return BlockRequirements(scratch=(fixed, 5 * leaf_bytes(self.layer, 1) + 24 * self.layer.n_pixels))

    def layout(self) -> Layout:
        return Layout((("evidence", self.layer.weights_shape), ("moved", ()), ("left", ())))

    def make_single_leaf_learner(self, n_rows: int, sweeps: int) -> BatchFeatureLearner:
        """Return the learner for one range (leaf) of ``n_rows`` images, with ``sweeps`` sweeps per update."""
        return replace(self, n_rows=n_rows, single_leaf_sweeps=sweeps)

    def start(self, restart: int = 0) -> LeafState:
        first = self.layer.first_beliefs(self.seed, restart)
        return LeafState(from_units(to_units(first)), first)

    def visit(
        self, prepared: PreparedEvidence, block: Block, kept: StoredFeatureLeaf | None
    ) -> StoredFeatureLeaf:
        """Update the messages of one leaf (a fixed range of images) once, and return the data to store.

        ``kept`` is the data that the last update returned, or None before the first update. ``block`` has the
        images. A single leaf of all images is updated ``single_leaf_sweeps`` times.
        """
        return self.visit_leaves(prepared, [block], [kept])[0]

    def visit_leaves(
        self, prepared: PreparedEvidence, blocks: Sequence[Block], kept: Sequence[StoredFeatureLeaf | None]
    ) -> list[StoredFeatureLeaf]:
        """Update the messages of several leaves (ranges of images), and return the data to store for each.

        Leaves with equal numbers of images and of earlier sweeps share kernel calls. A leaf that has had
        ``max_sweeps`` sweeps stays unchanged.
        """
        state, backend = prepared
        beliefs, found, groups = to_units(state.beliefs), {}, defaultdict(list)
        olds = [
            start_leaf(self.layer, len(block.x)) if leaf is None else LeafMessages(**leaf["messages"])
            for block, leaf in zip(blocks, kept, strict=True)
        ]
        for k, (block, old) in enumerate(zip(blocks, olds, strict=True)):
            if old.sweeps < self.max_sweeps:
                groups[len(block.x), old.sweeps].append(k)
            else:
                found[k] = replace(old, moved=0), np.zeros_like(beliefs)
        for (rows, swept), which in groups.items():
            sweeps = min(self.single_leaf_sweeps if rows == self.n_rows else 1, self.max_sweeps - swept)
            most = max(1, KERNEL_CALL_BYTES // leaf_bytes(self.layer, rows))
            for some in (which[a : a + most] for a in range(0, len(which), most)):
                evidence = np.stack([self.layer.read_evidence(blocks[k]) for k in some])
                firsts = [int(row_numbers(blocks[k])[0]) for k in some]
                how = self.seed, sweeps, self.damping, backend
                visits = visit_leaves([olds[k] for k in some], evidence, beliefs, firsts, *how)
                found |= dict(zip(some, visits, strict=True))
        return [
            StoredFeatureLeaf(messages=dict(vars(found[k][0])), change=found[k][1])
            for k in range(len(blocks))
        ]

    def exchange(
        self, prepared: PreparedEvidence, kept: StoredFeatureLeaf | None, new: StoredFeatureLeaf, stats: Stats
    ) -> None:
        stats["evidence"][...] += from_units(new["change"])
        stats["moved"][...] += new["messages"]["moved"]
        stats["left"][...] += new["messages"]["sweeps"] < self.max_sweeps

    def step(self, state: EvidenceState, stats: Stats, n_rows: int) -> LeafState:
        assert isinstance(state, LeafState)
        beliefs = state.beliefs + stats["evidence"]
        if not self.layer.is_exact(to_units(np.clip(beliefs, -(2.0**22), 2.0**22))):
            feature = int(np.abs(beliefs).max(axis=(0, 1, 2)).argmax())
            raise DivergenceError(
                f"layer 1: beliefs in the weights of feature {feature} have reached "
                f"{np.abs(beliefs).max():,.0f} nats, too large for exact sums: lower damping, raise p01 and "
                "p10, or set online=True"
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
