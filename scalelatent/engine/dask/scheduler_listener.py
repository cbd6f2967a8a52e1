"""Events from the scheduler to a driver: workers that join or leave, and passes that are done.

A client has one handler per topic, so two fits with one client share the handler (`test_news.py`).
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

# Topic of the events that the dashboard page shows (see scalelatent.monitor).
TOPIC = "scalelatent"
# Topic of the events that a worker has compiled a kernel.
KERNELS = f"{TOPIC}-kernels"
# Number of topics that all fits share for the events of their passes. The scheduler keeps the last events of
# each topic forever, so a topic per fit would fill its memory (thousand_passes.py).
_PASS_TOPICS = 8

Handler = Callable[[dict[str, Any]], None]
Event = tuple[float, Any]  # seconds since the epoch, message


def pass_topic(token: str) -> str:
    """Return the topic of the events that a fit's tasks send to the driver whose token is ``token``."""
    return f"{TOPIC}-pass-{zlib.crc32(token.encode()) % _PASS_TOPICS}"


def as_message(value: object) -> str | None:
    """Return a value as JSON text, or None if JSON would not restore an equal value."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return None
    return text if json.loads(text) == value else None


class Listener:
    """Subscriptions of one client; any number of fits can add handlers to a topic."""

    def __init__(self, client: Client) -> None:
        self._client = weakref.proxy(client)
        self._handlers: dict[str, list[Handler]] = {}
        self._others: dict[str, Callable[[Event], object] | None] = {}
        self._lock = threading.Lock()

    def add_handler(self, topic: str, handler: Handler) -> None:
        """Call ``handler`` with each message of a topic, in the client's thread."""
        with self._lock:
            handlers = self._handlers.setdefault(topic, [])
            if not handlers:
                if topic not in self._others:
                    # A handler that other code has set for the topic is still called.
                    self._others[topic] = topic_handler(self._client, topic)
                self._client.subscribe_topic(topic, self._spread(topic))
            handlers.append(handler)

    def remove_handler(self, topic: str, handler: Handler) -> None:
        """Remove a handler, and unsubscribe from the topic after its last handler."""
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
    """Return the listener of a client; each client has one listener."""
    with _listeners_lock:
        if client not in _listeners:
            _listeners[client] = Listener(client)
        return _listeners[client]
