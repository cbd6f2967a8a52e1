"""What both executors offer; the loops know nothing else of where work runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from scalelatent.contract.stats import Stats

from .callbacks import Callback
from .order import RowOrder
from .passes import Stage

# Rows done so far, rows of the pass.
OnRows = Callable[[int, int], None]
# States of an online fit that a worker keeps.
KEEP_REPLICAS = 3


@dataclass(frozen=True)
class StepResult:
    """What the driver sees of a pass: scalars, and a handle of the state that followed.

    Attributes
    ----------
    summary : dict
        The learner's scalars.
    done : bool
        The learner wants no more passes.
    rows, bytes_read : int
        Rows seen and bytes decoded from storage (0 where all came from the cache), over all workers.
    state : object
        The next state, or whatever stands for it on the cluster.
    """

    summary: dict[str, Any]
    done: bool
    rows: int
    bytes_read: int
    state: Any


@dataclass(frozen=True)
class Place:
    """How far an online fit is: steps done of an epoch (both from 0), and whether the state has been
    validated since.

    Examples
    --------
    >>> Place(2, 5).total(RowOrder(n_rows=100, seed=0, batch_rows=10))
    25
    """

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
class Advance:
    """Steps that are done.

    Attributes
    ----------
    step : int
        Steps of the epoch done so far.
    state : object
        Handle of the state after them.
    bytes_read : int
        Bytes decoded from storage since the last one.
    """

    step: int
    state: Any
    bytes_read: int


class OnlineSteps(AbstractContextManager["OnlineSteps"], Protocol):
    """The steps of one online fit; leaving the context ends its threads and tasks. ``callbacks`` are asked
    now and then whether to go on, and told of what happens.
    """

    callbacks: Callback

    def put(self, place: Place, state: Any, *, kept: bool = False) -> Any:
        """Make a state known to whoever computes; returns its handle. ``kept``: the run folder has it."""
        ...

    def get(self, place: Place, handle: Any) -> Any:
        """The state of a handle."""
        ...

    def steps(self, place: Place, stop: int, handle: Any) -> Iterator[Advance]:
        """Do the steps from a place up to ``stop`` of its epoch, one or some at a time."""
        ...

    def end_epoch(self, place: Place, handle: Any) -> Any:
        """The learner's ``end_epoch``; ``place`` is the start of the next epoch."""
        ...

    def summary(self, place: Place, handle: Any) -> tuple[dict[str, Any], bool]:
        """The learner's scalars, and whether it is done."""
        ...


class Executor(Protocol):
    """Runs passes and maps. ``workers`` is the number of spans that run at once; ``keeps_states`` says that
    states lie in the run folder before the loop hears of them.
    """

    workers: int
    keeps_states: bool

    def put_state(self, stage: Stage, iteration: int, state: Any) -> Any:
        """Make a state known to whoever computes; returns its handle."""
        ...

    def get_state(self, stage: Stage, iteration: int, handle: Any) -> Any:
        """The state of a handle."""
        ...

    def step(self, stage: Stage, iteration: int, handle: Any, on_rows: OnRows) -> StepResult:
        """One pass of a learner, and its M-step."""
        ...

    def end(self) -> None:
        """No further pass of this fit follows: call off what may have begun."""
        ...

    def online_steps(self, stage: Stage, order: RowOrder, n_epochs: int) -> OnlineSteps:
        """The steps of an online learner over the training rows of a stage."""
        ...

    def collect(self, stage: Stage, on_rows: OnRows) -> dict[str, Stats]:
        """One pass of reductions without a state."""
        ...

    def run_map(self, task: Any, on_rows: OnRows) -> None:
        """Write the missing shards of an :class:`~.outputs.OutputTask`."""
        ...
