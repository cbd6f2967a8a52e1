"""Stop a fit at a checkpoint, without loss, after Ctrl-C, SIGTERM or `scalelatent cancel`."""

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

CANCEL_FILE = "cancel"

# Seconds between checks for a cancel request, on a disk and in an object store, where each check costs money.
DISK_SECONDS, STORE_SECONDS = 0.5, 2.0


class StopRequest(Callback):
    """Callback that interrupts the fit at the next checkpoint after a stop was requested."""

    def __init__(self) -> None:
        self.by: str | None = None

    def stop(self, by: str) -> None:
        """Request the stop of the fit; `by` describes the first requester, for messages."""
        self.by = self.by or by

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if a stop was requested."""
        if self.by is not None:
            raise KeyboardInterrupt(self.by)

    def on_wait(self) -> None:
        """Raise `KeyboardInterrupt` while the executor waits or computes, if a stop was requested."""
        self.check()

    def on_progress(self, info: dict[str, Any]) -> None:
        """Raise `KeyboardInterrupt` in a pass if a stop was requested; a resume continues in this pass."""
        self.check()

    def on_pass_end(self, record: dict[str, Any]) -> None:
        self.check()


def request_cancel(folder: RunFolder) -> None:
    """Request a stop with a file in the run folder, which the driver reads on any machine."""
    start = folder.read_state().get("starts", 0)
    asked = {"who": _user_name(), "host": socket.gethostname(), "time": time_text(), "start": start}
    folder.location.write(CANCEL_FILE, json.dumps(asked).encode())


def read_cancel_request(folder: RunFolder) -> dict[str, Any] | None:
    """Return the cancel request (user, host, time) since the last start of a run; None without a request."""
    content = folder.location.read(CANCEL_FILE)
    if content is None:
        return None
    try:
        asked = dict(json.loads(content))
    except (ValueError, TypeError):
        asked = {}  # a file made by hand, for example with `touch`
    start = folder.read_state().get("starts", 0)
    return asked if asked.get("start", start) == start else None


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return "?"


@contextmanager
def stop_on_signals(request: StopRequest, print_line: Callable[[str], None]) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a request to stop the fit; a second SIGINT interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if request.by is not None:
            raise KeyboardInterrupt(number)
        request.stop(signal.Signals(number).name)
        print_line("stopping at the next checkpoint; press Ctrl-C again to stop at once")

    earlier = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_cancel(request: StopRequest, folder: RunFolder) -> Iterator[None]:
    """Watch the run folder for a cancel file, and turn the file into a stop request."""
    ended = threading.Event()

    def watch_folder() -> None:
        seconds = DISK_SECONDS if is_local(folder.url) else STORE_SECONDS
        while not ended.wait(seconds):
            try:
                asked = read_cancel_request(folder)
            except (OSError, JobError):  # the folder is unreachable; the next check may succeed
                continue
            if asked is not None:
                request.stop(f"scalelatent cancel, {asked.get('who', '?')} on {asked.get('host', '?')}")
                return

    watcher = threading.Thread(target=watch_folder, name="scalelatent-cancel-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join(timeout=STORE_SECONDS)
        if request.by is not None:
            with suppress(OSError):
                folder.location.delete(CANCEL_FILE)
