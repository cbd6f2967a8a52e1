"""Ctrl-C that loses nothing: the first one asks the fit to stop at a checkpoint, the second one stops now."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from scalelatent.engine.callbacks import Callback

__all__ = ["StopRequest", "stop_on_signals"]


class StopRequest(Callback):
    """Leave the fit at the next place where nothing is lost, once a stop was asked for.

    It leaves by `KeyboardInterrupt`, not by a true `on_pass_end`: that would mean "converged", and the run
    would be finished rather than resumable.

    Attributes
    ----------
    signal : int or None
        The signal that asked for it.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def on_progress(self, info: dict[str, Any]) -> None:
        """Leave within a pass; the engine keeps what is complete."""
        self._leave()

    def on_pass_end(self, record: dict[str, Any]) -> None:
        """Leave between two passes."""
        self._leave()

    def _leave(self) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt(self.signal)


@contextmanager
def stop_on_signals(request: StopRequest, tell: Callable[[str], None]) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a request; a second SIGINT interrupts at once.

    Parameters
    ----------
    request : StopRequest
        Also among the callbacks of the fit.
    tell : callable
        Called with one line for the user.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; whoever runs us from another one stops us his way
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if request.signal is not None:
            raise KeyboardInterrupt(number)
        request.signal = number
        tell("stopping at the next checkpoint; press Ctrl-C again to stop at once")

    earlier = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
