"""Interface of the executors, through which the loops run work in this process or on a cluster."""

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

# Handle: a state, or a reference to a state on a cluster. Only the executor that made a handle can read it.
Handle = TypeVar("Handle")
OnRows = Callable[[int, int], None]  # called with (number of finished rows, number of all rows)
KEEP_REPLICAS = 3  # number of copies of recent states of an online fit that a worker keeps in memory


@dataclass(frozen=True)
class StepResult(Generic[Handle]):
    """Result of a pass for the driver: measurements, and a handle (reference) of the next state."""

    summary: dict[str, Any]
    done: bool
    rows: int
    bytes_read: int  # bytes decoded from storage by all workers; 0 if all rows came from caches
    state: Handle


@dataclass(frozen=True)
class Place:
    """Position of an online fit: epoch, step of the epoch, and whether this position was validated."""

    epoch: int = 0
    step: int = 0
    validated: bool = False

    def total(self, order: RowOrder) -> int:
        """Return the number of minibatch steps from the start of the fit to this position."""
        return self.epoch * order.n_steps + self.step

    def rows_seen(self, order: RowOrder) -> int:
        """Return the number of training rows that the fit has used from its start to this position."""
        return self.epoch * order.n_rows + min(self.step * order.batch_rows, order.n_rows)


@dataclass(frozen=True)
class Advance(Generic[Handle]):
    """Progress of an online fit after one or more steps."""

    step: int  # number of finished steps of the epoch
    state: Handle  # state after these steps
    bytes_read: int  # bytes read since the previous report


class OnlineSteps(AbstractContextManager["OnlineSteps[Handle]"], Protocol[Handle]):
    """Runner of the minibatch steps of one online fit, in this process or on a cluster."""

    callbacks: Callback

    def put(self, place: Place, state: object, *, is_written: bool = False) -> Handle:
        """Store a state; return its handle. ``is_written`` is True if the run folder contains the state."""

    def get(self, place: Place, handle: Handle) -> Any:
        """Return the state to which a handle refers, at the position ``place``."""

    def steps(self, place: Place, stop: int, handle: Handle) -> Iterator[Advance[Handle]]:
        """Run the steps from ``place`` up to step ``stop`` of its epoch; yield after one or more steps."""

    def end_epoch(self, place: Place, handle: Handle) -> Handle:
        """Apply the learner's ``end_epoch`` to the state; ``place`` is the start of the next epoch."""

    def summary(self, place: Place, handle: Handle) -> tuple[dict[str, Any], bool]:
        """Return the learner's scalars, and True if the learner is done."""


class Executor(Protocol[Handle]):
    """Runner of passes, minibatch steps and row maps, in this process or on a cluster."""

    @property
    def workers(self) -> int:
        """Number of tasks that run at the same time."""

    @property
    def keeps_states(self) -> bool:
        """True if each pass, or each group of minibatch steps, writes its state into the run folder."""

    @property
    def quarantine(self) -> Quarantine:
        """List of bad shards, whose rows the fit excludes."""

    def put_state(self, stage: Stage, iteration: int, state: object) -> Handle:
        """Make a state available to the workers, and return a handle with which a pass can start."""

    def get_state(self, stage: Stage, iteration: int, handle: Handle) -> Any:
        """Return the state to which a handle refers."""

    def step(self, stage: Stage, iteration: int, handle: Handle, on_rows: OnRows) -> StepResult[Handle]:
        """Run one pass over the rows and compute the next state from its sums (the M-step)."""

    def end(self) -> None:
        """Cancel passes that were started in advance; a loop calls this method when its fit has ended."""

    def online_steps(self, stage: Stage, order: RowOrder, n_epochs: int) -> OnlineSteps[Any]:
        """Return a runner of an online learner's steps over the training rows of a stage."""

    def collect(self, stage: Stage, on_rows: OnRows) -> dict[str, Stats]:
        """Run one pass of reductions that need no state; return their statistics ("train", "validation")."""

    def run_map(self, task: OutputTask, on_rows: OnRows) -> None:
        """Write all shards of an output dataset that are not written yet."""
