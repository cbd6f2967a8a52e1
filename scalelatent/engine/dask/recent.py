"""What a process has loaded of a run, kept for its next tasks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class RecentObjects:
    """The last few loaded stages and states of a process, so that its tasks read each file once.

    Keys are tuples whose first entry tells the run.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # Slot (the key itself where none is named) -> key, object.
        self._kept: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, load: Callable[[], Any], slot: Any = None) -> Any:
        """The object of a key, loaded by ``load()`` where it is not at hand.

        Objects of one ``slot`` replace each other: states of a fit, of which only the newest is wanted.
        """
        with self._lock:
            kept = self._kept.get(key if slot is None else slot)
            if kept is not None and kept[0] == key:
                self._kept.move_to_end(key if slot is None else slot)
                return kept[1]
        value = load()
        self.put(key, value, slot)
        return value

    def put(self, key: Any, value: Any, slot: Any = None) -> None:
        """Keep an object."""
        slot = key if slot is None else slot
        with self._lock:
            self._kept[slot] = key, value
            self._kept.move_to_end(slot)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)

    def forget(self, run: Any) -> None:
        """Let go of all objects of a run."""
        with self._lock:
            for slot in [slot for slot, (key, _) in self._kept.items() if key[0] == run]:
                del self._kept[slot]
