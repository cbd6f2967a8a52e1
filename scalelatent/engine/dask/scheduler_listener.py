"""What the scheduler tells a driver by itself: workers that come and go, and passes that are done.

A client has one handler a topic, and two fits may share it (`test_news.py`).
"""

from __future__ import annotations

import json
import threading
import weakref
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .hooks import topic_handler

if TYPE_CHECKING:
    from distributed import Client

# Events of the jobs' own news, for the dashboard page (see scalelatent.monitor).
TOPIC = "scalelatent"
# Kernels that workers compile.
KERNELS = f"{TOPIC}-kernels"
# The scheduler keeps the last events of each topic it ever heard of, so passes share a few: a bound, by which
# 1 kB a pass is left in it (thousand_passes.py).
_PASS_TOPICS = 8

Handler = Callable[[dict[str, Any]], None]
Event = tuple[float, Any]  # seconds since the epoch, message


def pass_topic(token: str) -> str:
    """Topic by which the passes of a fit are told to its driver."""
    return f"{TOPIC}-pass-{zlib.crc32(token.encode()) % _PASS_TOPICS}"


def as_message(value: object) -> str | None:
    """A value as text, or None where it would not come back as it is."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return None
    return text if json.loads(text) == value else None


class Listener:
    """Topics of one client, each for any number of fits."""

    # A client has one handler a topic; two fits with one client share it.

    def __init__(self, client: Client) -> None:
        self._client = weakref.proxy(client)
        self._handlers: dict[str, list[Handler]] = {}
        self._others: dict[str, Callable[[Event], object] | None] = {}
        self._lock = threading.Lock()

    def add(self, topic: str, handler: Handler) -> None:
        """Call ``handler`` with each message, in the client's thread."""
        with self._lock:
            handlers = self._handlers.setdefault(topic, [])
            if not handlers:
                if topic not in self._others:
                    # A user's own handler of the topic goes on hearing.
                    self._others[topic] = topic_handler(self._client, topic)
                self._client.subscribe_topic(topic, self._spread(topic))
            handlers.append(handler)

    def remove(self, topic: str, handler: Handler) -> None:
        """Call it no more."""
        with self._lock:
            handlers = self._handlers[topic]
            handlers.remove(handler)
            if not handlers and self._others[topic] is None and self._client.status == "running":
                self._client.unsubscribe_topic(topic)

    def _spread(self, topic: str) -> Callable[[Event], object]:
        def spread(event: Event) -> object:
            for handler in tuple(self._handlers[topic]):
                handler(event[1])
            other = self._others[topic]
            return other(event) if other is not None else None

        return spread


_listeners: weakref.WeakKeyDictionary[Client, Listener] = weakref.WeakKeyDictionary()
_listeners_lock = threading.Lock()


def listener(client: Client) -> Listener:
    """The listener of a client."""
    with _listeners_lock:
        if client not in _listeners:
            _listeners[client] = Listener(client)
        return _listeners[client]
