"""Services for tasks on a worker: check for cancellation, and send events to the driver and the dashboard.

Dask does not stop a running task, so each task checks at each block of rows whether it was cancelled
(`test_survive.py`). The dashboard page /scalelatent shows the reported rows.
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

from scalelatent.engine.backend import read_used_gpu_memory
from scalelatent.engine.callbacks import kernel_event
from scalelatent.engine.halving import make_split_event
from scalelatent.engine.plan import KEPT_BYTES
from scalelatent.engine.reading import StopEvent
from scalelatent.errors import DeviceLostError
from scalelatent.kernels.compile_observers import add_observer

from .hooks import call_later, is_task_needed, worker_settings
from .scheduler_listener import KERNELS, TOPIC

if TYPE_CHECKING:
    from distributed import Worker

    from scalelatent.contract.learners import Backend

_log = logging.getLogger(__name__)

# Address of a driver: (topic of events, token of the pass, token of the driver).
Fit = tuple[str, ...]
CHECK_SECONDS = 0.5  # minimum seconds between two checks whether a running task was cancelled
# Seconds between two reports of a running task. A task without a report for six times as long counts as
# hanging.
BEAT_SECONDS = 10.0
# Minimum seconds between two reports of finished tasks from one worker; a report sums all tasks since the
# last report. With two workers and tasks of one second, reports take the scheduler 3.5 % of a core
# (submit.py).
REPORT_SECONDS = 1.0
PACE_SHARE = 0.2  # relative change of the average seconds per row after which a worker reports it again
PACE_NEW = 0.3  # weight of the newest task in the moving average of the seconds per row
PACE_OUTLIER = 3.0  # a task counts as at most this multiple of the average, so that a pause counts little
# Seconds that a worker waits before it ends its own process, so that its event loop can send events.
SENDING_SECONDS = 1.0
KEEP_PACES = 32  # maximum number of averages: one for training and one for validation rows per stage
_SUMS = ("rows", "bytes", "seconds", "wait_seconds", "spans")


def current_worker() -> Worker | None:
    """Return the Dask worker whose task runs in this thread, or None."""
    from distributed import get_worker

    try:
        return get_worker()
    except ValueError:
        return None


def worker_threads() -> int:
    """Return the number of threads of the worker whose task runs in this thread; 1 without a worker."""
    worker = current_worker()
    return 1 if worker is None else int(worker_settings(worker)["threads"])


class ReportTimer:
    """Timer that decides when a task sends its next progress report; consecutive tasks can share a timer."""

    def __init__(self) -> None:
        self._next = time.monotonic() + BEAT_SECONDS

    def due(self, now: float) -> bool:
        """Return True if a report is due, and start the next interval."""
        if now < self._next:
            return False
        self._next = now + BEAT_SECONDS
        return True


class TaskStop(StopEvent):
    """Stop event of the task in this thread; it is set after the scheduler has cancelled the task."""

    def __init__(self, fit: Fit | None = None, beat: ReportTimer | None = None) -> None:
        super().__init__()
        self._worker, self._fit = current_worker(), fit
        self._key = None if self._worker is None else self._worker.get_current_task()
        self._next, self._beat = time.monotonic() + CHECK_SECONDS, beat or ReportTimer()

    def is_set(self) -> bool:
        """Return True if the task was cancelled; ask the worker at most once per `CHECK_SECONDS`."""
        now = time.monotonic()
        if self._worker is None or now < self._next:
            return False
        self._next = now + CHECK_SECONDS
        return not is_task_needed(self._worker, self._key)

    def moved(self) -> None:
        """Send a progress report to the driver if one is due; called at each block of rows."""
        if self._fit is not None and self._beat.due(time.monotonic()):
            send_to_driver(self._fit, {"beat": str(self._key)})


def send_to_driver(fit: Fit, message: dict[str, Any]) -> None:
    """Send a message from a task to its driver without waiting."""
    worker = current_worker()
    if worker is not None:
        worker.log_event(fit[0], {"fit": fit[1], **message})


def report_smaller_blocks(fit: Fit, backend: Backend, before: Mapping[str, int]) -> None:
    """Notify the driver if this worker's GPU has halved its blocks since ``row_limits`` was ``before``."""
    worker = current_worker()
    for work, rows in backend.row_limits.items() - before.items():
        if worker is not None:
            event = make_split_event(work, rows, backend.device, worker.address)
            send_to_driver(fit, {"driver": fit[-1], "cut": event})


@contextmanager
def restart_on_lost_gpu(fit: Fit) -> Iterator[None]:
    """End this worker's process if its GPU refuses all work; the nanny restarts the process.

    Dask reassigns the tasks to other workers. Without a nanny the driver receives the error.
    """
    try:
        yield
    except DeviceLostError as error:
        worker = current_worker()
        if worker is not None and worker_settings(worker)["nanny"]:
            message = f"{worker.address} is restarted, and its tasks go to other workers. {error}"
            event = {"event": "card_lost", "worker": worker.address, "message": message}
            send_to_driver(fit, {"driver": fit[-1], "cut": event})
            _log.error(message)
            time.sleep(SENDING_SECONDS)
            os._exit(1)
        raise


def report_kernels() -> None:
    """Send an event to all drivers for each kernel that this worker compiles."""
    first = current_worker()

    def report_to_drivers(kernel: str, seconds: float | None) -> None:
        # In a thread that a task has started, `current_worker` returns None.
        worker = current_worker() or first
        if worker is not None:
            worker.log_event(KERNELS, kernel_event(kernel, seconds, worker=worker.address))

    if first is not None:
        add_observer(report_to_drivers)


def find_run_folder(folder: str) -> str:
    """Return the run folder of a path that may end with ``/engine``; events are grouped by run folder."""
    return folder.removesuffix("/engine")


class WorkReports:
    """Sender of reports about finished tasks to the dashboard: at most one message per stage and second."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, ...], dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._sent = 0.0

    def add_tasks(
        self, folder: str, stage: str, part: str, where: Mapping[str, int], device: str, rows: int,
        nbytes: int, seconds: float, wait_seconds: float, parts: int = 1,
    ) -> None:  # fmt: skip
        """Add finished tasks to the next report; ``where`` names the pass, step or shard of the last task."""
        worker = current_worker()
        if worker is None:
            return
        key = find_run_folder(folder), stage, part
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
            waiting = self._waiting.setdefault(key, message)
            if waiting is not message:
                sums = {k: waiting[k] + message[k] for k in _SUMS}
                waiting.update(message)
                waiting.update(sums)
            delay = self._sent + REPORT_SECONDS - time.monotonic()
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
            **read_used_gpu_memory(),
        }
        for message in messages:
            worker.log_event(TOPIC, {**message, **about})


work_reports = WorkReports()


class PaceReports:
    """Moving averages of the seconds per row of this process's tasks; a driver receives them after a change.

    Each average excludes its first task, which includes the compilation of kernels.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str, str], list[float]] = OrderedDict()
        self._lock = threading.Lock()

    def add_rows(self, fit: Fit, stage: str, part: str, rows: int, seconds: float, device: str) -> None:
        """Add a task to the average for its stage and rows (train or validation); send a changed average."""
        pace = self.averaged((fit[-1], stage, part), seconds / max(rows, 1))
        worker = current_worker()
        if pace is not None and worker is not None:
            about = {"driver": fit[-1], "worker": worker.address, "device": device}
            send_to_driver(fit, {"stage": stage, "part": part, "pace": pace, **about})

    def averaged(self, key: tuple[str, str, str], pace: float) -> float | None:
        """Add a task's seconds per row to an average; return the average if it must be sent, else None."""
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


pace_reports = PaceReports()

# Value that Dask gives the environment variable MALLOC_TRIM_THRESHOLD_ of its workers. Another value was set
# by the user.
DASK_TRIM_THRESHOLD = "65536"
# The allocator reuses the memory of freed arrays of at most this number of bytes. Larger arrays contain rows,
# whose memory data/read/chunks.py reuses. This value was chosen without measurements of other values.
LARGEST_BYTES = 2**24
# Numbers of the parameters of `mallopt`, as in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def reuse_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Let the C allocator reuse freed memory, at most 32 MiB per thread; return True if it was changed.

    If the user has set an environment variable of the allocator, the allocator is not changed.
    """
    # Dask starts workers with MALLOC_TRIM_THRESHOLD_=65536, so that idle workers use little memory. With this
    # setting, glibc requests new memory pages for each array above 128 kB. In steps of a conditional RBM on
    # two workers, these requests took a fifth of the time.
    decided = "MALLOC_MMAP_THRESHOLD_" in environ or "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")
    if decided or environ.get("MALLOC_TRIM_THRESHOLD_") != DASK_TRIM_THRESHOLD:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # This C library is not glibc.
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
