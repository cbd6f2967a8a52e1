"""What a task knows of its cluster: whether it is still wanted, and how to tell what it did."""

from __future__ import annotations

import threading
import time
from typing import Any

from .hooks import task_wanted
from .news import TOPIC

# (topic, token): by which a driver knows the news of its own tasks.
Fit = tuple[str, str]
CHECK_SECONDS, BEAT_SECONDS = 0.5, 10.0
# Spans of a second are told together: a scheduler hears from each of its workers once a second at most.
NEWS_SECONDS = 1.0
_SUMS = ("rows", "bytes", "seconds", "wait_seconds", "spans")


def _worker() -> Any:
    """The worker whose task runs in this thread, or None."""
    from distributed import get_worker

    try:
        return get_worker()
    except ValueError:
        return None


class TaskStop:
    """Whether the task of this thread is to stop: the scheduler wants it no more.

    Stands where threads of one process have an Event. As long as blocks go by, the driver hears of it.

    Parameters
    ----------
    fit : Fit or None

    Examples
    --------
    >>> TaskStop().is_set()  # no task at all
    False
    """

    def __init__(self, fit: Fit | None = None) -> None:
        self._worker, self._fit = _worker(), fit
        self._key = None if self._worker is None else self._worker.get_current_task()
        now = time.monotonic()
        self._next, self._beat = now + CHECK_SECONDS, now + BEAT_SECONDS

    def is_set(self) -> bool:
        """Look, twice a second at most."""
        now = time.monotonic()
        if self._worker is None or now < self._next:
            return False
        self._next = now + CHECK_SECONDS
        return not task_wanted(self._worker, self._key)

    def moved(self) -> None:
        """Another block is done."""
        now = time.monotonic()
        if self._fit is not None and now >= self._beat:
            self._beat = now + BEAT_SECONDS
            tell(self._fit, {"beat": str(self._key)})


def tell(fit: Fit, message: dict[str, Any]) -> None:
    """Tell the driver something from a task, without waiting."""
    worker = _worker()
    if worker is not None:
        worker.log_event(fit[0], {"fit": fit[1], **message})


def run_of(folder: str) -> str:
    """Run folder of an engine's folder, by which news are told apart.

    Examples
    --------
    >>> run_of("/runs/first/engine"), run_of("/tmp/scalelatent-x")
    ('/runs/first', '/tmp/scalelatent-x')
    """
    return folder.removesuffix("/engine")


class SpanNews:
    """News of finished spans, each part of a stage in one message a second."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._sent = 0.0

    def add(self, message: dict[str, Any]) -> None:
        """Tell of a span, now or with the next ones."""
        worker = _worker()
        if worker is None:
            return
        key = tuple(message[k] for k in ("run", "stage", "part"))
        with self._lock:
            first = not self._waiting
            kept = self._waiting.setdefault(key, message)
            if kept is not message:
                sums = {k: kept[k] + message[k] for k in _SUMS}
                kept.update(message)
                kept.update(sums)
            delay = self._sent + NEWS_SECONDS - time.monotonic()
        if first:
            worker.loop.add_callback(worker.loop.call_later, max(delay, 0.0), self._flush, worker)

    def _flush(self, worker: Any) -> None:
        import psutil

        with self._lock:
            messages, self._waiting = list(self._waiting.values()), {}
            self._sent = time.monotonic()
        about = {
            "worker": worker.address,
            "name": str(worker.name),
            "rss": psutil.Process().memory_info().rss,
        }
        for message in messages:
            worker.log_event(TOPIC, {**message, **about})


span_news = SpanNews()
