"""Batch learning of one layer of features, which stores belief-propagation messages in the run folder.

The algorithm is Algorithm 1 of Lázaro-Gredilla et al., "Hierarchical compositional feature learning" (2016).

A leaf is a fixed, contiguous range of images. One file per leaf stores the last belief-propagation messages
of the pixels of its images. A visit loads the messages of one leaf, updates them once or a few times, and
stores the new messages. The visit starts from the log odds of the weights W at the end of the last step, and
returns by how much the messages of the leaf change these log odds. A step visits several leaves in parallel,
and adds their changes to the log odds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.models.hcn.kernels.pixel_order import shuffled
from scalelatent.models.hcn.kernels.units import UNITS_PER_NAT, from_units, to_units
from scalelatent.models.hcn.kernels.windows import message_room

from .evidence_learner import EvidenceState, OnlineFeatureLearner, PreparedEvidence
from .layer import FeatureLayer, row_numbers

# Upper bound of the bytes of belief-propagation messages that one kernel call updates, unless a single range
# of images (leaf) has more. The host needs twice this memory, for the old and the new messages.
KERNEL_CALL_BYTES = 2**31


@dataclass(frozen=True)
class LeafMessages:
    """Belief-propagation messages of a leaf (range of images) between two sweeps (updates of all pixels).

    Attributes
    ----------
    s : ndarray of int32, shape (images, HS, WS, F)
        Log odds of F features at HS x WS positions, in units of 1/256 nat: the prior plus all messages of
        pixels to a position.
    to_s, to_w : ndarray of int16, shape (images, channels, messages)
        Messages of the pixels to positions and to weights W, in units of 1/256 nat. The last `MESSAGE_ROOM`
        entries are unused.
    held : ndarray of uint8, shape (images, channels, height * width, h)
        Flags of the h rows of a feature whose weights can turn on a pixel: 1 for a row with a nonzero message
        of the pixel in ``to_w``, else 0.
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
    """Return the first belief-propagation messages, all 0, of a leaf: a range of ``n_rows`` images."""
    channels, height, width = layer.image
    room = message_room((height, width), layer.window, layer.n_features)
    to_s, to_w = (np.zeros((n_rows, channels, room), np.int16) for _ in range(2))
    held = np.zeros((n_rows, channels, height * width, layer.window[0]), np.uint8)
    return LeafMessages(layer.prior_beliefs(n_rows), to_s, to_w, held)


def leaf_bytes(layer: FeatureLayer, n_rows: int) -> int:
    """Return the bytes of the belief-propagation messages of a leaf: a range of ``n_rows`` images."""
    leaf = start_leaf(layer, 0)
    arrays = leaf.s, leaf.to_s, leaf.to_w, leaf.held
    return n_rows * sum(math.prod(a.shape[1:]) * a.itemsize for a in arrays)


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
    """Return updated messages of several leaves (ranges of images), after at most ``n_sweeps`` sweeps.

    A sweep updates the belief-propagation messages of all pixels once; the sweeps end early if no message
    changes. The leaves share kernel calls; each leaf gets the same result as in a call for it alone.

    Parameters
    ----------
    leaves : sequence of LeafMessages
        Messages of each leaf, which stay unchanged. All leaves have equal numbers of images and of earlier
        sweeps.
    evidence : ndarray of int32, shape (leaves, images, channels, height, width)
        Log odds of the pixels, in units of 1/256 nat.
    beliefs : ndarray of int32, shape (channels, h, w, F)
        Log odds of the weights W of F features of h x w pixels, in units of 1/256 nat, including the messages
        of these leaves.
    first_rows : sequence of int
        Row number of the first image of each leaf. The order of the pixels is a function of the seed, the
        number of the sweep and this row number.
    damping : float
        Weight of a new message in the average of the new and the old message.

    Returns
    -------
    list of (LeafMessages, ndarray of int32)
        For each leaf the new messages, and the change of the log odds of the weights in the shape of
        ``beliefs``.
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
    """State of a fit that stores belief-propagation messages; its log odds are multiples of 1/256 nat.

    A leaf is a fixed range of images. A sweep updates the messages of all pixels of a leaf once.

    Attributes
    ----------
    moved, last_moved : int
        Number of pixels with a changed message in the last sweep over their leaf, summed over the leaves that
        were visited in this epoch so far, and in the last complete epoch; -1 before the first epoch ends.
    left, last_left : int
        Number of leaves with fewer than ``max_sweeps`` sweeps, among those that were visited in this epoch so
        far, and in the last complete epoch; -1 before the first epoch ends.
    """

    moved: int = 0
    last_moved: int = -1
    left: int = 0
    last_left: int = -1


class StoredFeatureLeaf(TypedDict):
    """Stored data of a leaf (range of images): the fields of `LeafMessages` by name, and ``change``.

    ``change`` is the change of the log odds of weights by the last visit, in units of 1/256 nat.
    """

    messages: dict[str, Any]
    change: np.ndarray


@dataclass(frozen=True)
class BatchFeatureLearner(OnlineFeatureLearner):
    """Batch learning of one layer (a :class:`~scalelatent.contract.learners.StoredRangeLearner`).

    The algorithm is Algorithm 1 of Lázaro-Gredilla et al. (2016). A leaf is a fixed range of images. A sweep
    updates the belief-propagation messages of all pixels of a leaf once. A visit loads the stored messages of
    a leaf, runs one or several sweeps, and stores the new messages.

    Attributes
    ----------
    damping : float
        Weight of a new message in the average of the new and the old message.
    n_rows : int
        Number of images in all leaves.
    single_leaf_sweeps : int
        Number of sweeps per visit if a single leaf holds all images. With several leaves a visit has one
        sweep, because the other leaves also change the log odds of the weights.
    max_sweeps : int
        Upper bound of the number of sweeps over a leaf, summed over all visits.
    """

    damping: float = 1.0
    n_rows: int = 1
    single_leaf_sweeps: int = 1
    max_sweeps: int = 60

    @property
    def requirements(self) -> BlockRequirements:
        # A visit (update of the messages of a range of images, a leaf) holds these messages up to five times:
        # as read from disk, before and after the update, and twice as bytes to write. A visit also holds
        # random orders of the pixels.
        each = 5 * leaf_bytes(self.layer, 1) + 24 * self.layer.n_pixels
        return BlockRequirements(scratch=(48 * self.layer.n_weights, each))

    def layout(self) -> Layout:
        return Layout((("evidence", self.layer.weights_shape), ("moved", ()), ("left", ())))

    def start(self, restart: int = 0) -> LeafState:
        first = self.layer.first_beliefs(self.seed, restart)
        return LeafState(from_units(to_units(first)), first)

    def visit(
        self, prepared: PreparedEvidence, block: Block, kept: StoredFeatureLeaf | None
    ) -> StoredFeatureLeaf:
        """Update the belief-propagation messages of one leaf (range of images); return the data to store.

        ``block`` has the images. ``kept`` is the data that the last visit stored; None in the first visit.
        """
        return self.visit_leaves(prepared, [block], [kept])[0]

    def visit_leaves(
        self, prepared: PreparedEvidence, blocks: Sequence[Block], kept: Sequence[StoredFeatureLeaf | None]
    ) -> list[StoredFeatureLeaf]:
        """Update the belief-propagation messages of leaves (ranges of images); return the data to store.

        Leaves with equal numbers of images and of earlier sweeps (updates of all pixels) share kernel calls.
        The messages of a leaf stay unchanged after ``max_sweeps`` sweeps.
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

    def replace_contribution(
        self, prepared: PreparedEvidence, kept: StoredFeatureLeaf | None, new: StoredFeatureLeaf, stats: Stats
    ) -> None:
        stats["evidence"][...] += from_units(new["change"])
        stats["moved"][...] += new["messages"]["moved"]
        stats["left"][...] += new["messages"]["sweeps"] < self.max_sweeps

    def step(self, state: EvidenceState, stats: Stats, n_rows: int) -> LeafState:
        assert isinstance(state, LeafState)
        beliefs = state.beliefs + stats["evidence"]
        units = np.clip(beliefs, -(2.0**22), 2.0**22) * UNITS_PER_NAT
        self.layer.check_overflow(units, 1, "damping, raise p01 and p10, or set online=True")
        moved, left = state.moved + int(stats["moved"]), state.left + int(stats["left"])
        return replace(state, moved=moved, left=left).complete_step(beliefs, n_rows)

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
