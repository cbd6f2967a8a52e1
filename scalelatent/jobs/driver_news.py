"""What a driver tells besides its logs: how far the pass is, in the run folder; its state, to the cluster."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from scalelatent.engine.callbacks import Callback
from scalelatent.errors import RunError
from scalelatent.monitor.times import epoch_seconds
from scalelatent.storage.disk import is_local

if TYPE_CHECKING:
    from distributed import Client

    from .runfolder import RunFolder
    from .spec import Job

__all__ = ["TOPIC", "DevicesSeen", "ProgressFile", "announce", "cluster_log", "install_page", "warnings_told"]

TOPIC = "scalelatent"
DISK_SECONDS, STORE_SECONDS = 1.0, 5.0
ANNOUNCE_SECONDS = 5.0


@contextmanager
def warnings_told(folder: RunFolder, tell: Callable[[str], None]) -> Iterator[None]:
    """Warnings for users as a line and an event, without the place in the code."""
    global _shown
    mine = threading.get_ident()
    with _lock:
        if warnings.showwarning is not _show:
            _shown, warnings.showwarning = warnings.showwarning, _show
        _listening[mine] = (folder, tell)
    try:
        yield
    finally:
        with _lock:
            del _listening[mine]
            if not _listening and warnings.showwarning is _show:
                warnings.showwarning = _shown


_lock = threading.Lock()
_listening: dict[int, tuple[RunFolder, Callable[[str], None]]] = {}
_shown: Callable[..., Any] = warnings.showwarning


def _show(message: Any, category: Any, *more: Any, **other: Any) -> None:
    with _lock:
        alone = next(iter(_listening.values())) if len(_listening) == 1 else None
        found = _listening.get(threading.get_ident(), alone)
    if found is None or not issubclass(category, UserWarning):
        _shown(message, category, *more, **other)
        return
    folder, tell = found
    tell(f"warning: {message}")
    with suppress(OSError, RunError):
        folder.event("warning", message=str(message))


class ProgressFile(Callback):
    """Keep ``progress.json`` fresh: what `scalelatent attach` shows within a pass."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._seconds = DISK_SECONDS if is_local(folder.url) else STORE_SECONDS
        self._told = float("-inf")

    def on_stage(self, info: dict[str, Any]) -> None:
        """Write that nothing is done of it yet; what stands there is of another one."""
        self._told = float("-inf")
        self.on_progress({**info, "pass": 0, "rows_done": 0, "rows_total": info.get("rows") or 0})

    def on_progress(self, info: dict[str, Any]) -> None:
        """Write it, if the last time is long enough ago."""
        now = time.monotonic()
        if now - self._told >= self._seconds:
            self._told = now
            keys = ("stage", "layer", "layers", "k", "pass", "rows_done", "rows_total", "rows_per_s")
            with suppress(OSError):  # no news is no reason to end a fit
                self._folder.tell_progress({key: info.get(key) for key in keys})


class DevicesSeen(Callback):
    """Keeps which devices computed, for the run's record; says it where the result depends on it.

    ``told`` holds ``devices`` in words, such as ``"cpu 3 workers, gpu 1 worker"``.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.told: dict[str, Any] = {}

    def on_event(self, info: dict[str, Any]) -> None:
        if info.get("event") == "devices":
            self.told = {"devices": info["devices"]}
        if info.get("event") in ("devices", "blocks_cut") and "message" in info:
            self._tell(info["message"])


def announce(client: Client | None, folder: RunFolder, job: Job, state: Mapping[str, Any]) -> None:
    """Tell the cluster the state of a run, for its dashboard page; silent where it does not listen."""
    if client is None or client.scheduler is None or client.status != "running":
        return
    news = {"kind": "state", "run": folder.url, "job": state["id"], "model": job.kind}
    news |= {"name": job.job.name or state["id"]}
    news |= {key: state.get(key) for key in ("state", "error", "driver", "report")}
    news |= {key: epoch_seconds(state.get(key)) for key in ("submitted", "began")}
    # The run folder is the record; a watcher may miss a line, but must not stop a run.
    with suppress(Exception):
        client.sync(client.scheduler.log_event, topic=TOPIC, msg=news, callback_timeout=ANNOUNCE_SECONDS)


def install_page(client: Client | None) -> None:
    """Put the page ``/scalelatent`` on a cluster's dashboard, where that can be done."""
    from scalelatent.monitor import install

    if client is not None:
        install(client)


def cluster_log(
    client: Client | None, folder: RunFolder, job: Job, state: Mapping[str, Any]
) -> list[Callback]:
    """Return the callback that tells a cluster of passes and progress; none without a cluster."""
    if client is None:
        return []
    from scalelatent.monitor.publish import ClusterLog

    known = {"job": state["id"], "model": job.kind, "name": job.job.name or state["id"]}
    known |= {"submitted": epoch_seconds(state.get("submitted")), "driver": state.get("driver")}
    return [ClusterLog(client, folder.url, **known)]
