"""The client of a cluster, with bounded waits, and errors that say what to do.

Law 8 needs it; `test_survive.py` and `test_watch.py` read the errors.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from scalelatent.engine.threads import call_with_timeout
from scalelatent.errors import RunError, ScalelatentError

from .asking import ask_every_worker

if TYPE_CHECKING:
    from distributed import Client

# Of an answer that a fit waits for: a bound.
CALL_SECONDS = 60.0
T = TypeVar("T")


@dataclass(frozen=True)
class ClusterMember:
    """A worker of the cluster."""

    threads: int
    running: bool
    name: str
    host: str
    memory: int
    memory_limit: int
    gpus: float = 0.0


class Link:
    """Calls to a scheduler."""

    def __init__(self, client: Client) -> None:
        self.client = client

    @property
    def address(self) -> str:
        """Address of the scheduler."""
        scheduler = getattr(self.client, "scheduler", None)
        return str(scheduler.address if scheduler is not None else "(closed)")

    def call(self, what: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call something of the client."""
        try:
            return function(*args, **options)
        except ScalelatentError:
            raise
        # AttributeError and RuntimeError are what closed clients and their loops come up with.
        except (OSError, TimeoutError, CancelledError, AttributeError, RuntimeError) as error:
            raise self.lost(what, error) from error

    def lost(self, what: str, error: BaseException | str) -> RunError:
        """The error for a scheduler that cannot be reached."""
        status = getattr(self.client, "status", "closed")
        word = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        if status == "closed":
            return RunError(
                f"the client of the scheduler {self.address} was closed while {what} ({word}): connect "
                "again, then resume the run; finished passes are kept"
            )
        return RunError(
            f"the scheduler {self.address} was lost while {what} ({word}): start it and its workers again, "
            "or name another one, then resume the run; finished passes are kept"
        )

    @property
    def connected(self) -> bool:
        """Whether the client has a scheduler."""
        return bool(getattr(self.client, "status", "closed") == "running")

    def _asked(self, what: str, function: Callable[[], T]) -> T:
        return self.call(what, lambda: call_with_timeout(CALL_SECONDS, function))

    def threads(self) -> dict[str, int]:
        """Address of each worker -> its threads."""
        return dict(sorted(self._asked("its workers were counted", self.client.nthreads).items()))

    def processing(self) -> dict[str, list[str]]:
        """Address of each worker -> keys of the tasks that it has."""
        found = self._asked("its tasks were looked at", self.client.processing)
        return {address: [str(key) for key in keys] for address, keys in found.items()}

    def members(self) -> dict[str, ClusterMember]:
        """Address of each worker -> what the scheduler knows of it."""
        found = self._asked("its workers were looked at", partial(self.client.scheduler_info, n_workers=-1))
        return {address: _member(info) for address, info in sorted(found["workers"].items())}

    def ask_workers(
        self, what: str, function: Callable[..., T], *args: Any, seconds: float = CALL_SECONDS
    ) -> dict[str, T]:
        """Run a function on every worker, beside its tasks; address -> answer."""
        ask = partial(ask_every_worker, self.client, function, *args, seconds=seconds)
        answers: dict[str, T] = {}
        for address, answer in self.call(what, ask).items():
            if isinstance(answer, OSError):
                raise RunError(
                    f"worker {address} of {self.address} was lost while {what} ({answer}); start again"
                )
            if isinstance(answer, Exception):
                raise answer
            answers[address] = answer
        return answers


def _member(info: dict[str, Any]) -> ClusterMember:
    return ClusterMember(
        threads=int(info.get("nthreads", 1)),
        running=info.get("status", "running") == "running",
        name=str(info.get("name", "")),
        host=str(info.get("host", "")),
        memory=int(info.get("metrics", {}).get("memory", 0)),
        memory_limit=int(info.get("memory_limit") or 0),
        gpus=float(info.get("resources", {}).get("GPU", 0)),
    )
