"""Several learners (members) that share one pass: rows are read and decoded once for all learners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, BatchLearner, Block, LeafReduction, Reduction
from scalelatent.contract.stats import Layout, Stats
from scalelatent.engine.grid import RowGrid
from scalelatent.engine.passes import Stage, make_stage
from scalelatent.engine.reading import RowMask
from scalelatent.kernels.sparse_rows import CsrRows

if TYPE_CHECKING:
    from scalelatent.data import Dataset

# Codes of the numpy types whose values float32 represents exactly. Rows of these types are converted to
# float32 once for all members (learners).
_EXACT = ("?", "b", "B", "h", "H", "e")
# Upper bound, in bytes, of the sums of all members (learners) that a GPU keeps in its memory until the end of
# a leaf (a group of blocks of rows).
LEAF_BYTES = 2**31


@dataclass(frozen=True)
class MemberRows:
    """Rows that one learner uses for one purpose, such as "train": a dataset, and the mask of a fold."""

    dataset: Dataset
    mask: RowMask | None = None


@dataclass(frozen=True)
class MemberReduction:
    """Reduction of one member (learner) of a joint pass, computed in blocks of ``block_rows`` rows."""

    member: str
    part: str  # name of the member's rows: "train" or "validation"
    reduction: Reduction
    mask: RowMask | None
    block_rows: int = 0

    def blocks(self, block: Block) -> Iterator[Block]:
        """Yield the rows of a joint block in the blocks that the member alone would receive."""
        step, n = self.block_rows or len(block.x), len(block.x)
        for a in range(0, n, step):
            own = block if n <= step else _slice_block(block, a, min(a + step, n))
            visible = own if self.mask is None else self.mask.apply(own)
            if visible is not None:
                yield visible


def _slice_block(block: Block, a: int, b: int) -> Block:
    y, weight = block.y, block.weight
    return replace(
        block,
        x=block.x[a:b],
        y=None if y is None else y[a:b],
        weight=None if weight is None else weight[a:b],
        start=block.start + a,
    )


@dataclass(frozen=True)
class JointReduction:
    """Reduction that combines the reductions of several members (learners), which share blocks of rows."""

    slots: tuple[MemberReduction, ...]  # one entry per member (learner)

    @cached_property
    def _layouts(self) -> list[tuple[Layout, slice]]:
        out, start = [], 0
        for slot in self.slots:
            layout = slot.reduction.layout()
            out.append((layout, slice(start, start + layout.size)))
            start += layout.size
        return out

    @cached_property
    def _layout(self) -> Layout:
        return Layout(
            tuple(
                (f"{i}.{name}", shape)
                for i, (layout, _) in enumerate(self._layouts)
                for name, shape in layout.fields
            )
        )

    @property
    def requirements(self) -> BlockRequirements:
        """Requirements of the joint pass: contents of blocks, and the largest scratch memory of a member.

        The contents of blocks, such as labels, are equal for all members. Rows stay in the memory of a GPU if
        all members accept rows on a GPU.
        """
        requirements = [slot.reduction.requirements for slot in self.slots]
        on_gpu = all(one.reads_on_gpu for one in requirements)
        csr, targets, unlabelled = requirements[0].form
        scratch = [one.scratch for one in requirements if one.scratch is not None]
        largest = (max(fixed for fixed, _ in scratch), max(each for _, each in scratch)) if scratch else None
        return BlockRequirements(csr, targets, scratch=largest, unlabelled=unlabelled, reads_on_gpu=on_gpu)

    def layout(self) -> Layout:
        """Return the layout of the joint statistic: the fields of all members (learners) in their order."""
        return self._layout

    def flops_per_row(self) -> float:
        """Return the floating-point operations per row, summed over all members (learners)."""
        return sum(slot.reduction.flops_per_row() for slot in self.slots)

    def prepare(self, state: JointState | None, backend: Backend) -> tuple[Backend, list[object]]:
        states = {} if state is None else state.members
        return backend, [slot.reduction.prepare(states.get(slot.member), backend) for slot in self.slots]

    def accumulate(self, prepared: tuple[Backend, list[object]], block: Block, stats: Stats) -> None:
        """Add the block to the statistic of every member (learner) that uses any row of the block."""
        self.add_block(prepared, block, stats, [None] * len(self.slots))

    def make_leaf_sums(self, prepared: tuple[Backend, list[object]], stats: Stats) -> list[Any]:
        """Return the arrays to which each member (learner) adds its sums in a leaf (a group of blocks).

        The entry of a member is None if it adds to its statistic directly, because its reduction has no such
        arrays, or the arrays of all members would exceed ``LEAF_BYTES``.
        """
        sums, room = [], LEAF_BYTES
        for slot, own, (layout, span) in zip(self.slots, prepared[1], self._layouts, strict=True):
            if isinstance(slot.reduction, LeafReduction) and layout.nbytes <= room:
                sums.append(slot.reduction.make_leaf_sums(own, Stats(layout, stats.vector[span])))
                room -= layout.nbytes
            else:
                sums.append(None)
        return sums

    def add_block(
        self, prepared: tuple[Backend, list[object]], block: Block, stats: Stats, sums: list[Any]
    ) -> None:
        """Add the block to the statistic of each member (learner).

        ``sums`` has one entry per member, from `make_leaf_sums`. A member whose entry is not None adds the
        block to this entry; `add_leaf_sums` adds the entry to the statistic after the leaf (group of blocks).
        """
        backend, of_slots = prepared
        exact = not isinstance(block.x, CsrRows) and block.x.dtype.char in _EXACT
        if len(self.slots) > 1 and exact:
            block = replace(block, x=backend.asarray(block.x, np.float32, "joint rows"))
        for slot, own, (layout, span), kept in zip(self.slots, of_slots, self._layouts, sums, strict=True):
            reduction, own_stats = slot.reduction, Stats(layout, stats.vector[span])
            for visible in slot.blocks(block):
                if kept is not None and isinstance(reduction, LeafReduction):
                    reduction.add_block(own, visible, own_stats, kept)
                else:
                    reduction.accumulate(own, visible, own_stats)

    def add_leaf_sums(self, prepared: tuple[Backend, list[object]], stats: Stats, sums: list[Any]) -> None:
        """Add ``sums``, the arrays from :meth:`make_leaf_sums`, to the statistics of members (learners)."""
        for slot, own, (layout, span), kept in zip(self.slots, prepared[1], self._layouts, sums, strict=True):
            if kept is not None and isinstance(slot.reduction, LeafReduction):
                slot.reduction.add_leaf_sums(own, Stats(layout, stats.vector[span]), kept)

    def split(self, stats: Stats) -> list[Stats]:
        """Return the statistic of each member (learner), as views of the joint statistic."""
        return [Stats(layout, stats.vector[span]) for layout, span in self._layouts]


@dataclass(frozen=True)
class JointState:
    """States of the members (learners) in training, and error messages of members that diverged."""

    members: dict[str, Any]
    failed: dict[str, str] = field(default_factory=dict)
    iteration: int = 0


@dataclass(frozen=True)
class JointLearner:
    """Batch learner that trains several batch learners, its members, in the same passes."""

    members: dict[str, Any]
    # For each set of shared rows, by name, the reductions over these rows: tuples (member, "train" or
    # "validation", mask of a fold or None, rows per block)
    parts: dict[str, tuple[tuple[str, str, RowMask | None, int], ...]]
    until: int = 0  # pass after which the learner stops; 0: no limit

    @cached_property
    def _reductions(self) -> dict[str, JointReduction]:
        own = {name: learner.reductions() for name, learner in self.members.items()}
        return {
            part: JointReduction(
                tuple(
                    MemberReduction(name, its, own[name][its], mask, rows) for name, its, mask, rows in wanted
                )
            )
            for part, wanted in self.parts.items()
        }

    def reductions(self) -> Mapping[str, Reduction]:
        return self._reductions

    def update(self, state: JointState, stats: Mapping[str, Stats]) -> JointState:
        """Update every member (learner) once. Mark a member that diverges as failed; all others continue."""
        own: dict[str, dict[str, Stats]] = {name: {} for name in self.members}
        for part, reduction in self._reductions.items():
            for slot, piece in zip(reduction.slots, reduction.split(stats[part]), strict=True):
                own[slot.member][slot.part] = piece
        members, failed = {}, dict(state.failed)
        for name, learner in self.members.items():
            try:
                members[name] = learner.update(state.members[name], own[name])
            except (FloatingPointError, np.linalg.LinAlgError) as error:
                members[name], failed[name] = state.members[name], str(error)
        return JointState(members, failed, state.iteration + 1)

    def summary(self, state: JointState) -> dict[str, Any]:
        """Return the measurements of the best member (learner), and of each member under ``members``."""
        own = {
            name: learner.summary(state.members[name])
            for name, learner in self.members.items()
            if name not in state.failed
        }
        best: dict[str, Any] = min(own.values(), key=watched_error, default={})
        return {**best, "pass": state.iteration, "candidates": len(self.members), "members": own}

    def find_ended(self, state: JointState) -> list[str]:
        """Return the names of the members (learners) that are done or have failed."""
        return [
            name
            for name, learner in self.members.items()
            if name in state.failed or learner.is_done(state.members[name])
        ]

    def is_done(self, state: JointState) -> bool:
        """Return True at pass ``until``, or if a member has ended; a new stage then trains the others."""
        return bool(self.find_ended(state)) or (self.until > 0 and state.iteration >= self.until)


def watched_error(summary: Mapping[str, Any]) -> float:
    """Return the error by which members are compared, from a member's summary; infinity without an error."""
    value = summary.get("best_error", summary.get("objective"))
    return float(value) if value is not None and np.isfinite(value) else float("inf")


def _make_own_grids(
    name: str,
    work: Any,
    rows: Mapping[str, MemberRows],
    device: str,
    grid: Mapping[str, Any],
) -> dict[str, RowGrid]:
    """Return the grid of each set of rows of a member: blocks of rows, and leaves (groups of blocks).

    Each grid is that of a pass for this member alone, with the options ``grid``. A held-out fold is a mask
    of the training dataset, so it has the grid of the training rows.
    """
    made = make_stage(name, work, {p: part.dataset for p, part in rows.items()}, device, None, **grid).grids
    for part, chosen in rows.items():
        if chosen.mask is not None and chosen.mask.inside and chosen.dataset is rows["train"].dataset:
            made = {**made, part: made["train"]}
    return dict(made)


class _SharedRows:
    """Sets of rows, each read once in a joint pass for all learners with this dataset and leaf size."""

    def __init__(self) -> None:
        self._names: dict[tuple[object, ...], list[str]] = {}
        self.datasets: dict[str, Any] = {}
        self.grids: dict[str, RowGrid] = {}

    def find_or_add(self, wanted: str, dataset: Dataset, grid: RowGrid, reduction: Reduction) -> str:
        """Return the name of the shared rows over which a joint pass can sum ``reduction``.

        If no shared rows have this dataset, equal leaves (groups of blocks) and equal block contents, add new
        shared rows. Their name is ``wanted``, followed by a number if this name is in use.
        """
        # If all rows are in one leaf (group of blocks), the leaf size has no effect.
        key = id(dataset), grid.leaf_rows if grid.n_leaves > 1 else 0, reduction.requirements.form
        for name in self._names.setdefault(key, []):
            small, large = sorted((grid, self.grids[name]), key=lambda one: one.block_rows)
            if large.block_rows % small.block_rows == 0 or large.block_rows >= grid.n_rows:
                self.grids[name] = large
                return name
        name, n = wanted, 1
        while name in self.datasets:
            n += 1
            name = f"{wanted}{n}"
        self._names[key].append(name)
        self.datasets[name], self.grids[name] = dataset, grid
        return name


def make_joint_stage(
    name: str,
    members: Mapping[str, tuple[BatchLearner, Mapping[str, MemberRows]]],
    device: str,
    classes: np.ndarray | None,
    *,
    until: int = 0,
    **grid: Any,
) -> Stage:
    """Return a stage (passes over rows) that trains all members (learners) with a :class:`JointLearner`."""
    found, parts = _SharedRows(), {}  # type: ignore[var-annotated]
    for key, (learner, rows) in members.items():
        own, reductions = _make_own_grids(name, learner, rows, device, grid), learner.reductions()
        for part in own:
            joint = found.find_or_add(part, rows[part].dataset, own[part], reductions[part])
            parts.setdefault(joint, []).append((key, part, rows[part].mask, own[part].block_rows))
    learner_of_all = JointLearner(
        {key: learner for key, (learner, _) in members.items()},
        {part: tuple(wanted) for part, wanted in parts.items()},
        until,
    )
    return Stage(name, learner_of_all, found.datasets, found.grids, device, classes)


def make_joint_sums(
    name: str,
    wanted: Sequence[tuple[Reduction, MemberRows]],
    device: str,
    classes: np.ndarray | None,
    **grid: int | None,
) -> tuple[Stage, list[tuple[str, int]]]:
    """Return a stage that computes all reductions in one pass, and the place of each result.

    A place is (name of the shared rows, index of the reduction among all reductions over these rows).
    """
    found, slots, places = _SharedRows(), {}, []  # type: ignore[var-annotated]
    for i, (reduction, part) in enumerate(wanted):
        own = _make_own_grids(name, {"train": reduction}, {"train": part}, device, grid)["train"]
        joint = found.find_or_add("train", part.dataset, own, reduction)
        slots.setdefault(joint, []).append(
            MemberReduction(str(i), "train", reduction, part.mask, own.block_rows)
        )
        places.append((joint, len(slots[joint]) - 1))
    work = {part: JointReduction(tuple(own)) for part, own in slots.items()}
    return Stage(name, work, found.datasets, found.grids, device, classes), places
