"""Report the start, progress, warnings and end of a run to its run folder and to the cluster."""

from __future__ import annotations

import errno
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from scalelatent.engine.callbacks import Callback
from scalelatent.errors import RunError, ScalelatentError
from scalelatent.monitor.events import RunLog
from scalelatent.monitor.messages import TOPIC
from scalelatent.monitor.times import epoch_seconds, time_text
from scalelatent.storage.disk import Location, is_local

if TYPE_CHECKING:
    from distributed import Client

    from .runfolder import RunFolder
    from .spec import Job

# Minimum seconds between two writes of the progress, on a disk and in an object store.
DISK_SECONDS, STORE_SECONDS = 1.0, 5.0
PUBLISH_SECONDS = 5.0  # seconds that the scheduler may take to accept a state message


@contextmanager
def report_warnings(folder: RunFolder, print_line: Callable[[str], None]) -> Iterator[None]:
    """Print each `UserWarning` of the ``with`` block without file and line number, and log it as an event."""
    global _shown
    mine = threading.get_ident()
    with _lock:
        if warnings.showwarning is not _show:
            _shown, warnings.showwarning = warnings.showwarning, _show
        _listening[mine] = (folder, print_line)
    try:
        yield
    finally:
        with _lock:
            del _listening[mine]
            if not _listening and warnings.showwarning is _show:
                warnings.showwarning = _shown


_lock = threading.Lock()
_listening: dict[int, tuple[RunFolder, Callable[[str], None]]] = {}
_shown: Callable[..., None] = warnings.showwarning


def _show(message: Warning | str, category: type[Warning], *more: Any, **other: Any) -> None:
    with _lock:
        alone = next(iter(_listening.values())) if len(_listening) == 1 else None
        found = _listening.get(threading.get_ident(), alone)
    if found is None or not issubclass(category, UserWarning):
        _shown(message, category, *more, **other)
        return
    folder, print_line = found
    print_line(f"warning: {message}")
    with suppress(OSError, RunError):
        folder.event("warning", message=str(message))


class ProgressFile(Callback):
    """Callback that updates ``progress.json``, which `scalelatent attach` shows during a pass."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._seconds = DISK_SECONDS if is_local(folder.url) else STORE_SECONDS
        self._written_at = float("-inf")

    def on_stage(self, info: dict[str, Any]) -> None:
        """Reset the progress at the start of a stage, because the file describes the previous stage."""
        self._written_at = float("-inf")
        self.on_progress({**info, "pass": 0, "rows_done": 0, "rows_total": info.get("rows") or 0})

    def on_progress(self, info: dict[str, Any]) -> None:
        """Write the progress if the last write was at least `_seconds` ago."""
        now = time.monotonic()
        if now - self._written_at >= self._seconds:
            self._written_at = now
            keys = ("stage", "layer", "layers", "k", "pass", "rows_done", "rows_total", "rows_per_s")
            with suppress(OSError):  # a failed report must not end a fit
                self._folder.write_progress({key: info.get(key) for key in keys})


class DeviceRecorder(Callback):
    """Callback that stores the number of CPU and GPU workers in ``found``, and prints messages about them."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line = print_line
        self.found: dict[str, Any] = {}

    def on_event(self, info: dict[str, Any]) -> None:
        if info.get("event") == "devices":
            self.found = {"devices": info["devices"]}
        if info.get("event") in ("devices", "blocks_cut", "card_lost") and "message" in info:
            self._print_line(info["message"])


def publish_state(client: Client | None, folder: RunFolder, job: Job, state: Mapping[str, Any]) -> None:
    """Send the state of a run to the cluster for its dashboard page; ignore errors."""
    if client is None or client.scheduler is None or client.status != "running":
        return
    message = {"kind": "state", "run": folder.url, "job": state["id"], "model": job.kind}
    message |= {"name": job.job.name or state["id"]}
    message |= {key: state.get(key) for key in ("state", "error", "driver", "report")}
    message |= {key: epoch_seconds(state.get(key)) for key in ("submitted", "began")}
    # The run folder is the record. The dashboard may miss this message, so an error must not stop the run.
    with suppress(Exception):
        client.sync(client.scheduler.log_event, topic=TOPIC, msg=message, callback_timeout=PUBLISH_SECONDS)


def add_dashboard_page(client: Client | None) -> None:
    """Add the page ``/scalelatent`` to a cluster's dashboard, if possible."""
    from scalelatent.monitor import install

    if client is not None:
        install(client)


class RunRecord:
    """Record of a run's start, progress and end, written to the run folder and sent to the cluster."""

    def __init__(self, folder: RunFolder, job: Job, client: Client | None = None) -> None:
        self.folder, self.job, self.client = folder, job, client
        self._log: RunLog | None = None

    def begin(self, driver: str, resume: bool) -> None:
        """Record the start of a run; the caller holds the lock of the run folder."""
        self._state = self.folder.update_state(state="running", error=None, driver=driver, began=time_text())
        self.folder.event("state", state="running", resume=resume, driver=driver, pid=os.getpid())

    def callbacks(self) -> list[Callback]:
        """Return the callbacks that write to the run folder and, on a cluster, publish the progress."""
        job, state = self.job, self._state
        publish_state(self.client, self.folder, job, state)
        self._log = RunLog(self.folder)
        callbacks: list[Callback] = [self._log, ProgressFile(self.folder)]
        if self.client is None:
            return callbacks
        from scalelatent.monitor.publish import ClusterLog

        known = {"job": state["id"], "model": job.kind, "name": job.job.name or state["id"]}
        known |= {"submitted": epoch_seconds(state.get("submitted")), "driver": state.get("driver")}
        return [*callbacks, ClusterLog(self.client, self.folder.url, **known)]

    def done(
        self, scores: Mapping[str, Any], ended: Mapping[str, Any], report: str | None = None, **more: object
    ) -> None:
        """Record the run as done; call this after the model is saved."""
        state = self.folder.update_state(state="done", error=None, **scores, **ended)
        self.folder.event("state", state="done", **more, **ended)
        publish_state(self.client, self.folder, self.job, {**state, "report": report})

    def record_error(
        self, error: BaseException, next_step: str, *, by: str = "", lost: str | None = None
    ) -> BaseException:
        """Record that the run failed, was stopped, or lost its scheduler; return the error to raise."""
        raised = (
            explain_os_error(error, self.folder.location, next_step) if isinstance(error, OSError) else error
        )
        if isinstance(error, KeyboardInterrupt):
            state, text = "cancelled", f"stopped{by and f' by {by}'}; {next_step}"
        elif lost is not None:
            # A driver without a cluster cannot know whether another driver has started. The state stays
            # "running"; readers report the run as failed as soon as its lock is free.
            state, text = "running", f"the scheduler {lost} was lost ({raised}); {next_step}"
        elif isinstance(raised, ScalelatentError):
            state, text = "failed", str(raised)
        else:
            state, text = "failed", f"{type(raised).__name__}: {raised}"
        if self._log is not None:
            with suppress(OSError, RunError):
                self._log.write_last_pass()
        with suppress(OSError, RunError):
            expected = isinstance(raised, ScalelatentError | KeyboardInterrupt)
            more = {} if expected else {"traceback": "".join(traceback.format_exception(raised))}
            self.folder.event("state", state=state, error=text, **more)
            publish_state(
                self.client, self.folder, self.job, self.folder.update_state(state=state, error=text)
            )
        return raised


def explain_os_error(error: OSError, location: Location, next_step: str) -> Exception:
    """Return a readable error for a full disk, with the next step; return other errors unchanged."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    free = location.free_bytes() or 0
    return RunError(
        f"no space left while writing {error.filename or location.url} ({free / 2**20:,.0f} MiB free); free "
        f"some space, then {next_step}"
    )
