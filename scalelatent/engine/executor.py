"""What both executors offer; the loops know nothing else of where work runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from scalelatent.models.base import Stats

from .passes import Stage

# Rows done so far, rows of the pass.
OnRows = Callable[[int, int], None]


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


class Executor(Protocol):
    """Runs passes and maps. ``workers`` is the number of spans that run at once."""

    workers: int

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

    def collect(self, stage: Stage, on_rows: OnRows) -> dict[str, Stats]:
        """One pass of reductions without a state."""
        ...

    def run_map(self, task: Any, on_rows: OnRows) -> None:
        """Write the missing shards of a :class:`~.mapwrite.MapTask`."""
        ...
