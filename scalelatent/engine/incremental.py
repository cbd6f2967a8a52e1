"""Online learning that stores data for each leaf (a fixed range of rows) in the run folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import (
    Backend,
    Block,
    MultiRangeLearner,
    Prepared,
    Reduction,
    State,
    StoredRangeLearner,
)
from scalelatent.contract.stats import Layout, Stats
from scalelatent.errors import RunError
from scalelatent.storage.disk import locate
from scalelatent.storage.record import read_record

from .callbacks import Callback
from .checkpoints import KEEP_STATES, EngineStore
from .order import RowOrder

_LEAF = re.compile(r"leaf-(?P<stage>.+)-(?P<epoch>\d{6,})-(?P<row>\d+)\.rec")


@dataclass(frozen=True)
class KeptLeaves(Generic[State, Prepared]):
    """Adapter that makes a `StoredRangeLearner` an online learner; its data is stored in the run folder.

    Each chain of a step is a leaf (a fixed range of rows), and all leaves of a step use the same state. The
    data of a leaf is stored per epoch and never replaced, so that a repeated task reads the same data again.
    """

    learner: StoredRangeLearner[State, Prepared, Any]
    folder: str
    stage: str
    run: str | None = None

    @property
    def requirements(self) -> BlockRequirements:
        return self.learner.requirements

    def layout(self) -> Layout:
        return self.learner.layout()

    def flops_per_row(self) -> float:
        return float(self.learner.flops_per_row())

    def prepare(self, state: State, backend: Backend) -> Prepared:
        return self.learner.prepare(state, backend)

    def name(self, epoch: int, row: int) -> str:
        """Return the file name of the data of a leaf (fixed range of rows) after its visit in an epoch."""
        return f"leaf-{self.stage}-{epoch:06d}-{row}.rec"

    def run_chain(self, prepared: Prepared, block: Block, stats: Stats) -> None:
        """Compute and store the data of a leaf (range of rows); add new minus old data to ``stats``."""
        old = self._read(block)
        self._store(prepared, block, old, self.learner.visit(prepared, block, old), stats)

    def _read(self, block: Block) -> Any:
        """Return the data that were stored for these rows in the previous epoch; None in the first epoch."""
        if block.epoch == 0:
            return None
        try:
            return read_record(self.folder, self.name(block.epoch - 1, block.start))
        except RunError as error:
            raise RunError(
                f"{error}. Incremental learning needs the data of each leaf from the previous epoch: "
                "start the fit again in another run_dir"
            ) from error

    def _store(self, prepared: Prepared, block: Block, old: Any, new: Any, stats: Stats) -> None:
        EngineStore(self.folder, self.run).write(self.name(block.epoch, block.start), new, durable=False)
        self.learner.replace_contribution(prepared, old, new, stats)

    def step(self, state: State, stats: Stats, n_rows: int) -> State:
        return self.learner.step(state, stats, n_rows)

    def end_epoch(self, state: State) -> State:
        return self.learner.end_epoch(state)

    def summary(self, state: State) -> dict[str, float | int | None]:
        return dict(self.learner.summary(state))

    def is_done(self, state: State) -> bool:
        return bool(self.learner.is_done(state))

    def validation(self) -> Reduction[State, Any]:
        return self.learner.validation()

    def validated(self, state: State, stats: Stats) -> State:
        return self.learner.validated(state, stats)


class KeptLeavesOnGpu(KeptLeaves[State, Prepared]):
    """:class:`KeptLeaves` of a learner that processes several ranges of rows in one call, on GPUs."""

    def run_chains(self, prepared: Prepared, blocks: Sequence[Block], stats: Sequence[Stats]) -> None:
        """Process several leaves (ranges of rows) in one call, each as in `run_chain`."""
        assert isinstance(self.learner, MultiRangeLearner)
        olds = [self._read(block) for block in blocks]
        news = self.learner.visit_leaves(prepared, blocks, olds)
        for leaf in zip(blocks, olds, news, stats, strict=True):
            self._store(prepared, *leaf)


def keep_leaves(
    learner: StoredRangeLearner[Any, Any, Any], folder: str, stage: str, run: str | None
) -> KeptLeaves[Any, Any]:
    """Return an online learner that stores the data of ``learner`` for each leaf (rows) in ``folder``."""
    kind = KeptLeavesOnGpu if isinstance(learner, MultiRangeLearner) else KeptLeaves
    return kind(learner, folder, stage, run)


class DropLeaves(Callback):
    """Callback that removes the stored data of leaves (ranges of rows) which no checkpoint needs."""

    def __init__(self, learner: KeptLeaves) -> None:
        self._learner = learner
        self._epochs: list[int] = []

    def on_checkpoint(self, info: dict[str, Any]) -> None:
        """Remove data of old epochs, which no resume from one of the newest KEEP_STATES checkpoints needs."""
        self._epochs = [*self._epochs, int(info["pass"])][-KEEP_STATES:]
        if len(self._epochs) < KEEP_STATES:  # older checkpoints of an earlier run may still exist
            return
        self.drop(self._epochs[0] - 1)

    def drop(self, before: int | None = None) -> None:
        """Remove the data of all epochs, or only of epochs before the epoch ``before``."""
        place = locate(self._learner.folder)
        for name in place.keys(""):
            found = _LEAF.fullmatch(name)
            if found is None or found["stage"] != self._learner.stage:
                continue
            if before is None or int(found["epoch"]) < before:
                place.delete(name)


def count_leaves(order: RowOrder) -> int:
    """Return the number of leaves: all chains (parts of minibatches) with rows in the steps of an epoch."""
    last = order.step_rows(order.n_steps - 1)
    return (order.n_steps - 1) * order.n_chains + min(last, order.n_chains)
