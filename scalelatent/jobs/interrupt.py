"""Stops that lose nothing: Ctrl-C, SIGTERM or `scalelatent cancel` ask the fit to stop at a checkpoint."""

from __future__ import annotations

import getpass
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from scalelatent.engine.callbacks import Callback
from scalelatent.errors import JobError
from scalelatent.monitor.times import time_text
from scalelatent.storage.disk import is_local

if TYPE_CHECKING:
    from .runfolder import RunFolder

CANCEL = "cancel"

# How often a driver looks for a request to cancel: a disk answers at once, an object store takes its price.
DISK_SECONDS, STORE_SECONDS = 0.5, 2.0


class StopRequest(Callback):
    """Leave the fit at the next place where nothing is lost, once a stop was asked for."""

    def __init__(self) -> None:
        self.by: str | None = None

    def ask(self, by: str) -> None:
        """Request the stop; the first requester is recorded."""
        self.by = self.by or by

    def check(self) -> None:
        """Leave if a stop was asked for."""
        if self.by is not None:
            raise KeyboardInterrupt(self.by)

    def on_wait(self) -> None:
        """Leave while the executor waits or computes."""
        self.check()

    def on_progress(self, info: dict[str, Any]) -> None:
        """Leave within a pass; the engine keeps what is complete."""
        self.check()

    def on_pass_end(self, record: dict[str, Any]) -> None:
        self.check()


def ask_cancel(folder: RunFolder) -> None:
    """Ask the driver of a run to stop, by a file in its folder: that reaches it wherever it runs."""
    start = folder.read_state().get("starts", 0)
    asked = {"who": _user(), "host": socket.gethostname(), "time": time_text(), "start": start}
    folder.place.write(CANCEL, json.dumps(asked).encode())


def cancel_asked(folder: RunFolder) -> dict[str, Any] | None:
    """The requester of a stop of the current start of a run, or None."""
    content = folder.place.read(CANCEL)
    if content is None:
        return None
    try:
        asked = dict(json.loads(content))
    except (ValueError, TypeError):
        asked = {}  # made by hand, say with `touch`
    start = folder.read_state().get("starts", 0)
    return asked if asked.get("start", start) == start else None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return "?"


@contextmanager
def stop_on_signals(request: StopRequest, tell: Callable[[str], None]) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a request; a second SIGINT interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; a caller in another thread stops us its own way
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if request.by is not None:
            raise KeyboardInterrupt(number)
        request.ask(signal.Signals(number).name)
        tell("stopping at the next checkpoint; press Ctrl-C again to stop at once")

    earlier = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_cancel(request: StopRequest, folder: RunFolder) -> Iterator[None]:
    """Turn a request to cancel that someone writes into the run folder into a request to stop."""
    ended = threading.Event()

    def watch() -> None:
        seconds = DISK_SECONDS if is_local(folder.url) else STORE_SECONDS
        while not ended.wait(seconds):
            try:
                asked = cancel_asked(folder)
            except (OSError, JobError):  # out of reach for now: the next look may see it
                continue
            if asked is not None:
                request.ask(f"scalelatent cancel, {asked.get('who', '?')} on {asked.get('host', '?')}")
                return

    watcher = threading.Thread(target=watch, name="scalelatent-cancel-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join(timeout=STORE_SECONDS)
        if request.by is not None:
            with suppress(OSError):
                folder.place.delete(CANCEL)
