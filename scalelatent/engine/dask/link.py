"""Calls of a Dask client with timeouts, whose errors name the user's next step (`test_survive.py`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from scalelatent.engine.threads import call_with_timeout
from scalelatent.errors import RunError, ScalelatentError

from .hooks import offers_gpu
from .timed_calls import ask_every_worker, ask_workers

if TYPE_CHECKING:
    from distributed import Client

CALL_SECONDS = 60.0  # seconds that a fit waits for an answer of the scheduler or of the workers
T = TypeVar("T")
# How a worker uses a GPU: it computes on one, its machine has one that it does not use, or it sees none.
Gpu = Literal["used", "unused", "none"]


@dataclass(frozen=True)
class ClusterMember:
    """Properties of one worker of the cluster; memory in bytes."""

    running: bool
    host: str
    memory: int
    memory_limit: int


class Link:
    """Connection to Dask's scheduler; each call has a timeout, and its error names the user's next step."""

    def __init__(self, client: Client) -> None:
        self.client = client

    @property
    def address(self) -> str:
        """Address of the scheduler, or "(closed)" if the client is closed."""
        scheduler = getattr(self.client, "scheduler", None)
        return str(scheduler.address if scheduler is not None else "(closed)")

    def call(self, action: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call a function that asks the scheduler; if the call fails, raise a RunError.

        ``action`` completes the sentence "the scheduler was lost while …".
        """
        try:
            return function(*args, **options)
        except ScalelatentError:
            raise
        # A closed client and its event loop raise AttributeError and RuntimeError.
        except (OSError, TimeoutError, CancelledError, AttributeError, RuntimeError) as error:
            raise self.lost(action, error) from error

    def lost(self, action: str, error: BaseException | str) -> RunError:
        """Return the error for a scheduler that cannot be reached, or for a closed client."""
        status = getattr(self.client, "status", "closed")
        cause = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        if status == "closed":
            return RunError(
                f"the client of the scheduler {self.address} was closed while {action} ({cause}): connect "
                "again, then resume the run; finished passes are kept"
            )
        return RunError(
            f"the scheduler {self.address} was lost while {action} ({cause}): start the scheduler and its "
            "workers again, or choose another scheduler, then resume the run; finished passes are kept"
        )

    @property
    def connected(self) -> bool:
        """True if the client is connected to a scheduler."""
        return bool(getattr(self.client, "status", "closed") == "running")

    def _call_in_time(self, action: str, function: Callable[[], T]) -> T:
        return self.call(action, lambda: call_with_timeout(CALL_SECONDS, function))

    def threads(self) -> dict[str, int]:
        """Return the number of threads of each worker, by address."""
        return dict(sorted(self._call_in_time("its workers were counted", self.client.nthreads).items()))

    def processing(self) -> dict[str, list[str]]:
        """Return the keys of the running and queued tasks of each worker, by address."""
        found = self._call_in_time("its tasks were listed", self.client.processing)
        return {address: [str(key) for key in keys] for address, keys in found.items()}

    def members(self) -> dict[str, ClusterMember]:
        """Return the scheduler's information about each worker, by address."""
        get_info = partial(self.client.scheduler_info, n_workers=-1)
        found = self._call_in_time("its workers were listed", get_info)
        return {
            address: ClusterMember(
                running=info.get("status", "running") == "running",
                host=str(info.get("host", "")),
                memory=int(info.get("metrics", {}).get("memory", 0)),
                memory_limit=int(info.get("memory_limit") or 0),
            )
            for address, info in sorted(found["workers"].items())
        }

    def find_gpus(self) -> dict[str, Gpu]:
        """Return how each worker uses a GPU ("used", "unused" or "none"), by address of the worker."""
        return self._call_in_time("GPUs were listed", partial(find_gpus, self.client))

    def ask_workers(
        self, action: str, function: Callable[..., T], *args: Any, seconds: float = CALL_SECONDS
    ) -> dict[str, T]:
        """Run a function on every worker at once, even if tasks run there; return the results by address."""
        ask = partial(ask_every_worker, self.client, function, *args, seconds=seconds)
        answers: dict[str, T] = {}
        for address, answer in self.call(action, ask).items():
            if isinstance(answer, OSError):
                raise RunError(
                    f"worker {address} of {self.address} was lost while {action} ({answer}); fit again"
                )
            if isinstance(answer, Exception):
                raise answer
            answers[address] = answer
        return answers


def find_gpus(client: Client) -> dict[str, Gpu]:
    """Return how each worker uses a GPU ("used", "unused" or "none"), by address of the worker.

    A worker computes on a GPU if it offers the resource GPU, or if dask-cuda has started it.
    """
    workers = client.scheduler_info(n_workers=-1)["workers"]
    found: dict[str, Gpu] = {
        address: "used" if info.get("resources", {}).get("GPU") else "none"
        for address, info in sorted(workers.items())
    }
    # Dask reports the GPU of a worker's machine only if pynvml is installed there, which dask-cuda requires.
    seeing = [a for a, gpu in found.items() if gpu == "none" and workers[a].get("gpu", {}).get("name")]
    if seeing:
        answers = ask_workers(client, offers_gpu, workers=seeing)
        found |= {address: "used" if answers[address] is True else "unused" for address in seeing}
    return found
