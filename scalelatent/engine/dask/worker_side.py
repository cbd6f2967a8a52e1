"""What a task knows of its cluster: whether it is still wanted, and how to tell what it did.

`test_survive.py` needs it (a cancelled span ends within two seconds; Dask does not stop what runs), and the
page /scalelatent, which tells rows.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from scalelatent.engine.callbacks import kernel_event
from scalelatent.engine.halving import make_split_event
from scalelatent.engine.plan import KEPT_BYTES
from scalelatent.engine.reading import StopEvent
from scalelatent.errors import DeviceLostError
from scalelatent.kernels.observers import observe

from .hooks import call_later, task_wanted, worker_settings
from .scheduler_listener import KERNELS, TOPIC

if TYPE_CHECKING:
    from distributed import Worker

_log = logging.getLogger(__name__)

# (topic, token of the pass, token of the driver): by which a driver knows the news of its own tasks.
Fit = tuple[str, ...]
# Bounds: for how long a task goes on that is not wanted any more (test_survive.py), and between words of one
# that computes (watch.HANG_SECONDS is six of them).
CHECK_SECONDS, BEAT_SECONDS = 0.5, 10.0
# Spans of a second are told together: a scheduler hears from each of its workers once a second at most. So it
# takes 3.5 % of a core with two workers and spans of a second (submit.py).
NEWS_SECONDS = 1.0
# A worker tells its pace again once it has changed by this share; a span has this one in it, and counts as at
# most so many times as slow as those before: a machine that stood still for a moment is not slow. With these
# device_pools.py finds its speeds, and test_pools.py has steady workers tell theirs once.
PACE_SHARE, PACE_NEW, PACE_OUTLIER = 0.2, 0.3, 3.0
# Before a worker ends itself it waits this long, so that its event loop sends what was logged.
SENDING_SECONDS = 1.0
KEEP_PACES = 32  # of parts of stages: a bound
_SUMS = ("rows", "bytes", "seconds", "wait_seconds", "spans")


def _worker() -> Worker | None:
    """The worker whose task runs in this thread, or None."""
    from distributed import get_worker

    try:
        return get_worker()
    except ValueError:
        return None


def worker_threads() -> int:
    """Threads of the worker whose task runs in this thread; 1 where there is none."""
    worker = _worker()
    return 1 if worker is None else int(worker_settings(worker)["threads"])


class Beat:
    """When a task has to say next that it computes; short tasks that follow one another share one."""

    def __init__(self) -> None:
        self._next = time.monotonic() + BEAT_SECONDS

    def due(self, now: float) -> bool:
        """Whether it is time."""
        if now < self._next:
            return False
        self._next = now + BEAT_SECONDS
        return True


class TaskStop(StopEvent):
    """Whether the task of this thread is to stop: the scheduler wants it no more."""

    def __init__(self, fit: Fit | None = None, beat: Beat | None = None) -> None:
        super().__init__()
        self._worker, self._fit = _worker(), fit
        self._key = None if self._worker is None else self._worker.get_current_task()
        self._next, self._beat = time.monotonic() + CHECK_SECONDS, beat or Beat()

    def is_set(self) -> bool:
        """Look, twice a second at most."""
        now = time.monotonic()
        if self._worker is None or now < self._next:
            return False
        self._next = now + CHECK_SECONDS
        return not task_wanted(self._worker, self._key)

    def moved(self) -> None:
        """Another block is done."""
        if self._fit is not None and self._beat.due(time.monotonic()):
            tell(self._fit, {"beat": str(self._key)})


def tell(fit: Fit, message: dict[str, Any]) -> None:
    """Tell the driver something from a task, without waiting."""
    worker = _worker()
    if worker is not None:
        worker.log_event(fit[0], {"fit": fit[1], **message})


def tell_cut(fit: Fit, what: str, rows: int, device: str) -> None:
    """Tell the driver that blocks are computed in halves here."""
    worker = _worker()
    if worker is not None:
        tell(fit, {"driver": fit[-1], "cut": make_split_event(what, rows, device, worker.address)})


@contextmanager
def leaving_lost_card(fit: Fit) -> Iterator[None]:
    """End this worker's process where its card refuses all work; the nanny starts it again.

    Dask gives the tasks to other workers. Without a nanny the error goes to the driver.
    """
    try:
        yield
    except DeviceLostError as error:
        worker = _worker()
        if worker is not None and worker_settings(worker)["nanny"]:
            message = f"{worker.address} is restarted, and its tasks go to other workers. {error}"
            event = {"event": "card_lost", "worker": worker.address, "message": message}
            tell(fit, {"driver": fit[-1], "cut": event})
            _log.error(message)
            time.sleep(SENDING_SECONDS)
            os._exit(1)
        raise


def tell_of_kernels() -> None:
    """Tell all drivers from now on when this worker compiles a kernel, since each of them may wait for it."""
    first = _worker()

    def tell_all(kernel: str, seconds: float | None) -> None:
        worker = _worker() or first  # a thread of a task's own knows none
        if worker is not None:
            worker.log_event(KERNELS, kernel_event(kernel, seconds, worker=worker.address))

    if first is not None:
        observe(tell_all)


def run_of(folder: str) -> str:
    """Run folder of an engine's folder, by which news are told apart."""
    return folder.removesuffix("/engine")


class WorkNews:
    """News of spans, steps and shards of outputs that are done, those of a stage in one message a second."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, ...], dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._sent = 0.0

    def add(
        self, folder: str, stage: str, part: str, where: Mapping[str, int], device: str, rows: int,
        nbytes: int, seconds: float, wait_seconds: float, parts: int = 1,
    ) -> None:  # fmt: skip
        """Tell of some, now or with the next ones; ``where`` is the last one: pass, span, step or shard."""
        worker = _worker()
        if worker is None:
            return
        key = run_of(folder), stage, part
        message: dict[str, Any] = {
            "kind": "span",
            "run": key[0],
            "stage": stage,
            "part": part,
            **where,
            "spans": parts,
            "rows": rows,
            "bytes": nbytes,
            "seconds": round(seconds, 6),
            "wait_seconds": round(wait_seconds, 6),
            "device": device,
        }
        with self._lock:
            first = not self._waiting
            kept = self._waiting.setdefault(key, message)
            if kept is not message:
                sums = {k: kept[k] + message[k] for k in _SUMS}
                kept.update(message)
                kept.update(sums)
            delay = self._sent + NEWS_SECONDS - time.monotonic()
        if first:
            call_later(worker, max(delay, 0.0), self._flush, worker)

    def _flush(self, worker: Worker) -> None:
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


work_news = WorkNews()


class PaceNews:
    """Seconds a row of this process's spans, told to a driver when they have changed."""

    # The first span of a part is left out: kernels are compiled in it.

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str, str], list[float]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, fit: Fit, stage: str, part: str, rows: int, seconds: float, device: str) -> None:
        """Take note of a span."""
        pace = self.averaged((fit[-1], stage, part), seconds / max(rows, 1))
        worker = _worker()
        if pace is not None and worker is not None:
            about = {"driver": fit[-1], "worker": worker.address, "device": device}
            tell(fit, {"stage": stage, "part": part, "pace": pace, **about})

    def averaged(self, key: tuple[str, str, str], pace: float) -> float | None:
        """The average, where it is to be told."""
        with self._lock:
            known = self._kept.get(key)
            if known is None:
                self._kept[key] = []
                while len(self._kept) > KEEP_PACES:
                    self._kept.popitem(last=False)
                return None
            self._kept.move_to_end(key)
            if known:
                pace = (1 - PACE_NEW) * known[0] + PACE_NEW * min(pace, PACE_OUTLIER * known[0])
                known[0] = pace
                if abs(pace / known[1] - 1) < PACE_SHARE:
                    return None
            known[:] = [pace, pace]
            return pace


pace_news = PaceNews()

# What Dask sets by default; other values are a user's decision.
OF_DASK = "65536"
# Larger arrays go back at once: pieces of rows, which have a memory of their own (data/read/chunks.py). With
# this number, and chains summed where they are computed, steps of conditional RBMs on two workers went from
# 0.60 to 0.83 of one process; other numbers were not tried.
LARGEST_BYTES = 2**24
# Numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_pages(environ: Mapping[str, str] = os.environ) -> bool:
    """Let the allocator of this process keep what is freed, at most 32 MiB a thread, if Dask forbade it."""
    # Dask starts workers with MALLOC_TRIM_THRESHOLD_=65536, so that they look small while they idle. As a
    # side effect glibc no longer learns how large the arrays of a program are: each above 128 kB gets fresh
    # pages, again and again; in steps of a conditional RBM over two workers that was a fifth of the time.
    # Another value of the variable, or MALLOC_MMAP_THRESHOLD_ or GLIBC_TUNABLES, is a user's decision.
    decided = "MALLOC_MMAP_THRESHOLD_" in environ or "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")
    if decided or environ.get("MALLOC_TRIM_THRESHOLD_") != OF_DASK:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
