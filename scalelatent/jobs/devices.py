"""Which devices have computed a run, for its record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scalelatent.engine.callbacks import Callback

__all__ = ["DevicesSeen"]


class DevicesSeen(Callback):
    """Remembers what the engine tells of devices, and says it where the result hangs on them.

    Parameters
    ----------
    tell : callable
        Called with one line for the user.

    Attributes
    ----------
    told : dict
        ``devices`` in words, such as ``"cpu 3 workers, gpu 1 worker"``; empty where nothing was told.

    Examples
    --------
    >>> seen = DevicesSeen(print)
    >>> seen.on_event({"event": "devices", "cpu": 3, "devices": "cpu 3 workers"})
    >>> seen.told
    {'devices': 'cpu 3 workers'}
    >>> seen.on_event({"event": "blocks_cut", "rows": 128, "message": "GPU 0: its memory has ended"})
    GPU 0: its memory has ended
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.told: dict[str, Any] = {}

    def on_event(self, info: dict[str, Any]) -> None:
        """Take note of devices."""
        if info.get("event") == "devices":
            self.told = {"devices": info["devices"]}
        if info.get("event") in ("devices", "blocks_cut") and "message" in info:
            self._tell(info["message"])
