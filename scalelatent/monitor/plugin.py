"""The scheduler plugin: collects the jobs' messages and shows them (page, JSON, Prometheus)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed import SchedulerPlugin

from scalelatent.engine.dask import hooks

from .board import Board
from .handlers import ROUTES
from .messages import TOPIC
from .metrics import hide, show

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dask.typing import Key
    from distributed import Client, Scheduler

PLUGIN = "scalelatent"
DRIVER_PREFIX = "scalelatent-job-"
KEYS_TOLD = 50


class ScalelatentPlugin(SchedulerPlugin):
    """Page ``/scalelatent``, ``/scalelatent.json`` and metrics of the jobs on a scheduler.

    Register it with `install`, or start the scheduler with ``--preload scalelatent.monitor.preload``.
    """

    name = PLUGIN
    idempotent = True

    def __init__(self) -> None:
        self.scheduler: Scheduler | None = None
        self.board: Board | None = None
        self._workers: dict[str, Any] = {}

    async def start(self, scheduler: Scheduler) -> None:
        """Begin to listen; a scheduler that is just starting calls this twice."""
        if self.scheduler is not None:
            return
        self.scheduler, self.board = scheduler, Board()
        for when, message in hooks.past_events(scheduler, TOPIC):
            self.board.feed(message, when)
        self._workers = dict(scheduler.workers)
        self._forgive(scheduler, scheduler.tasks)
        if hooks.add_routes(
            scheduler, [(path, handler, {"scheduler": scheduler}) for path, handler in ROUTES]
        ):
            hooks.add_page(scheduler, PLUGIN)
        show(self.board)

    def log_event(self, topic: str, msg: object) -> None:
        """Take in a message of a job, or the scheduler's word that a worker is gone."""
        if self.board is None:
            return
        if topic == TOPIC:
            self.board.feed(msg)
        elif topic == "all":
            lost = hooks.lost_worker(topic, msg)
            if lost is not None:
                self._tell_lost(lost)

    def update_graph(self, scheduler: Scheduler, *, keys: Iterable[Key], **kwargs: object) -> None:
        """Let drivers of jobs be retried from the first lost worker on."""
        self._forgive(scheduler, keys)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        state = scheduler.workers.get(worker)
        self._workers[worker] = state  # a removed worker's name and memory are asked for after it has gone
        name = str(getattr(state, "name", ""))
        scheduler.log_event(TOPIC, {"kind": "joined", "worker": worker, "name": name})

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: object) -> None:
        """Let drivers of jobs be retried any number of times."""
        self._workers.pop(worker, None)
        self._forgive(scheduler, scheduler.tasks)

    def _forgive(self, scheduler: Scheduler, keys: Iterable[Key]) -> None:
        for key in [key for key in keys if isinstance(key, str) and key.startswith(DRIVER_PREFIX)]:
            hooks.forgive(scheduler, key)

    async def close(self) -> None:
        """Take the metrics away with the scheduler."""
        if self.board is not None:
            hide(self.board)

    def _tell_lost(self, lost: hooks.LostWorker) -> None:
        state = self._workers.get(lost.worker)
        memory = getattr(getattr(state, "memory", None), "process", None)
        message = {
            "kind": "lost",
            "worker": lost.worker,
            "name": str(getattr(state, "name", "")),
            "keys": lost.keys[:KEYS_TOLD],
            "n_keys": len(lost.keys),
            "memory": memory,
            "memory_limit": getattr(state, "memory_limit", None),
            "expected": lost.expected,
        }
        assert self.scheduler is not None, "it has started"
        self.scheduler.log_event(TOPIC, message)


def install(client: Client) -> str:
    """Put the page, the JSON and the metrics on a scheduler, once; returns why where that fails."""
    try:
        client.register_plugin(ScalelatentPlugin(), name=PLUGIN)
    except ImportError as error:
        assert client.scheduler is not None
        where = f"the scheduler {client.scheduler.address}"
        return f"{where} cannot import scalelatent ({error}): install it there too"
    except Exception as error:  # noqa: BLE001  a job must not fail for want of a page
        return f"the scheduler does not take the page: {type(error).__name__}: {error}"
    return ""
