"""What both executors offer; the loops know nothing else of where work runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from scalelatent.contract.stats import Stats

from .callbacks import Callback
from .order import RowOrder
from .passes import Stage

if TYPE_CHECKING:
    from .mapwrite import OutputTask
    from .quarantine import Quarantine

# A state, or what stands for it where it lies on the cluster: an executor makes it, and alone reads it.
Handle = TypeVar("Handle")
# Rows done so far, rows of the pass.
OnRows = Callable[[int, int], None]
# States of an online fit that a worker keeps.
KEEP_REPLICAS = 3


@dataclass(frozen=True)
class StepResult(Generic[Handle]):
    """What the driver sees of a pass: scalars, and a handle of the state that followed."""

    summary: dict[str, Any]
    done: bool
    rows: int
    bytes_read: int  # decoded from storage, over all workers; 0 where all came from caches
    state: Handle


@dataclass(frozen=True)
class Place:
    """How far an online fit is."""

    epoch: int = 0
    step: int = 0
    validated: bool = False

    def total(self, order: RowOrder) -> int:
        """Steps since the start."""
        return self.epoch * order.n_steps + self.step

    def rows_seen(self, order: RowOrder) -> int:
        """Training rows since the start."""
        return self.epoch * order.n_rows + min(self.step * order.batch_rows, order.n_rows)


@dataclass(frozen=True)
class Advance(Generic[Handle]):
    """Steps that are done."""

    step: int  # steps of the epoch done so far
    state: Handle  # after them
    bytes_read: int  # since the last one


class OnlineSteps(AbstractContextManager["OnlineSteps[Handle]"], Protocol[Handle]):
    """The steps of one online fit."""

    callbacks: Callback

    def put(self, place: Place, state: object, *, kept: bool = False) -> Handle:
        """Make a state known where it is needed; returns its handle. ``kept``: the run folder has it."""

    def get(self, place: Place, handle: Handle) -> Any:
        """The state of a handle."""

    def steps(self, place: Place, stop: int, handle: Handle) -> Iterator[Advance[Handle]]:
        """Do the steps from a place up to ``stop`` of its epoch, one or some at a time."""

    def end_epoch(self, place: Place, handle: Handle) -> Handle:
        """The learner's ``end_epoch``; ``place`` is the start of the next epoch."""

    def summary(self, place: Place, handle: Handle) -> tuple[dict[str, Any], bool]:
        """The learner's scalars, and whether it is done."""


class Executor(Protocol[Handle]):
    """Runs passes and maps."""

    @property
    def workers(self) -> int:
        """Spans that run at once."""

    @property
    def keeps_states(self) -> bool:
        """Whether a step leaves its state in the run folder."""

    @property
    def quarantine(self) -> Quarantine:
        """The shards that a fit leaves out."""

    def put_state(self, stage: Stage, iteration: int, state: object) -> Handle:
        """Make a state known where it is needed; returns its handle."""

    def get_state(self, stage: Stage, iteration: int, handle: Handle) -> Any:
        """The state of a handle."""

    def step(self, stage: Stage, iteration: int, handle: Handle, on_rows: OnRows) -> StepResult[Handle]:
        """One pass of a learner, and its M-step."""

    def end(self) -> None:
        """No further pass of this fit follows: call off what may have begun."""

    def online_steps(self, stage: Stage, order: RowOrder, n_epochs: int) -> OnlineSteps[Any]:
        """The steps of an online learner over the training rows of a stage."""

    def collect(self, stage: Stage, on_rows: OnRows) -> dict[str, Stats]:
        """One pass of reductions without a state."""

    def run_map(self, task: OutputTask, on_rows: OnRows) -> None:
        """Write the missing shards of an :class:`~.outputs.OutputTask`."""
