"""Scheduler plugin that collects the messages of jobs and publishes them (page, JSON, Prometheus)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed import SchedulerPlugin

from scalelatent.engine.dask import hooks

from .board import JobBoard
from .handlers import ROUTES
from .messages import TOPIC
from .metrics import add_board, remove_board

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dask.typing import Key
    from distributed import Client, Scheduler

PLUGIN = "scalelatent"
DRIVER_PREFIX = "scalelatent-job-"
MAX_KEYS = 50  # upper bound on the task keys in a message about a lost worker


class ScalelatentPlugin(SchedulerPlugin):
    """Plugin that adds ``/scalelatent``, ``/scalelatent.json`` and metrics of jobs to a scheduler.

    Register it with `install`, or start the scheduler with ``--preload scalelatent.monitor.preload``.
    """

    name = PLUGIN
    idempotent = True

    def __init__(self) -> None:
        self.scheduler: Scheduler | None = None
        self.board: JobBoard | None = None
        self._workers: dict[str, Any] = {}

    async def start(self, scheduler: Scheduler) -> None:
        """Start to receive messages, once: a scheduler that is starting calls this method twice."""
        if self.scheduler is not None:
            return
        self.scheduler, self.board = scheduler, JobBoard()
        for when, message in hooks.past_events(scheduler, TOPIC):
            self.board.update(message, when)
        self._workers = dict(scheduler.workers)
        self._reset_suspicion(scheduler, scheduler.tasks)
        if hooks.add_routes(
            scheduler, [(path, handler, {"scheduler": scheduler}) for path, handler in ROUTES]
        ):
            hooks.add_page(scheduler, PLUGIN)
        add_board(self.board)

    def log_event(self, topic: str, msg: object) -> None:
        """Process a message of a job, or an event of the scheduler that a worker is lost."""
        if self.board is None:
            return
        if topic == TOPIC:
            self.board.update(msg)
        elif topic == "all":
            lost = hooks.lost_worker(topic, msg)
            if lost is not None:
                self._publish_lost(lost)

    def update_graph(self, scheduler: Scheduler, *, keys: Iterable[Key], **kwargs: object) -> None:
        """Allow Dask to retry the driver tasks of new jobs after any number of lost workers."""
        self._reset_suspicion(scheduler, keys)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Remember the worker: if it is lost, a message reports its name and memory."""
        self._workers[worker] = scheduler.workers.get(worker)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: object) -> None:
        """Allow Dask to retry driver tasks of jobs any number of times, also after this lost worker."""
        self._workers.pop(worker, None)
        self._reset_suspicion(scheduler, scheduler.tasks)

    def _reset_suspicion(self, scheduler: Scheduler, keys: Iterable[Key]) -> None:
        for key in [key for key in keys if isinstance(key, str) and key.startswith(DRIVER_PREFIX)]:
            hooks.reset_suspicion(scheduler, key)

    async def close(self) -> None:
        """Remove the metrics when the scheduler closes."""
        if self.board is not None:
            remove_board(self.board)

    def _publish_lost(self, lost: hooks.LostWorker) -> None:
        state = self._workers.get(lost.worker)
        memory = getattr(getattr(state, "memory", None), "process", None)
        message = {
            "kind": "lost",
            "worker": lost.worker,
            "name": str(getattr(state, "name", "")),
            "keys": lost.keys[:MAX_KEYS],
            "n_keys": len(lost.keys),
            "memory": memory,
            "memory_limit": getattr(state, "memory_limit", None),
            "expected": lost.expected,
        }
        assert self.scheduler is not None, "it has started"
        self.scheduler.log_event(TOPIC, message)


def install(client: Client) -> str:
    """Add the page ``/scalelatent``, its JSON and job metrics to a scheduler; return why it fails, or ""."""
    try:
        client.register_plugin(ScalelatentPlugin(), name=PLUGIN)
    except ImportError as error:
        assert client.scheduler is not None
        where = f"the scheduler {client.scheduler.address}"
        return f"{where} cannot import scalelatent ({error}); install scalelatent there"
    except Exception as error:  # noqa: BLE001  a job must not fail because of the page
        return f"the scheduler does not accept the page: {type(error).__name__}: {error}"
    return ""
