"""Fits that share a client receive messages until they remove their handlers; the user's handler stays."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from scalelatent.engine.dask.scheduler_listener import Listener, as_message, listener


class Client:
    status = "running"

    def __init__(self) -> None:
        self._event_handlers: dict[str, Any] = {}
        self.subscribed: set[str] = set()

    def subscribe_topic(self, topic: str, handler: Any) -> None:
        self._event_handlers[topic] = handler
        self.subscribed.add(topic)

    def unsubscribe_topic(self, topic: str) -> None:
        self.subscribed.discard(topic)

    def publish(self, topic: str, message: Any) -> None:
        if topic in self.subscribed:
            self._event_handlers[topic]((0.0, message))


def test_each_of_two_fits_receives_messages_until_it_removes_its_handler() -> None:
    client, first, second = Client(), list[Any](), list[Any]()
    subscriptions = Listener(client)
    subscriptions.add_handler("t", first.append)
    subscriptions.add_handler("t", second.append)
    client.publish("t", 1)
    subscriptions.remove_handler("t", first.append)
    client.publish("t", 2)
    subscriptions.remove_handler("t", second.append)
    assert client.subscribed == set()
    subscriptions.add_handler("t", first.append)
    client.publish("t", 3)
    assert (first, second) == ([1, 3], [1, 2])


def test_the_users_own_handler_still_receives_messages() -> None:
    client, own, ours = Client(), list[Any](), list[Any]()
    client.subscribe_topic("all", own.append)
    subscriptions = Listener(client)
    for _ in range(2):
        subscriptions.add_handler("all", ours.append)
        client.publish("all", "x")
        subscriptions.remove_handler("all", ours.append)
    assert ours == ["x", "x"]
    assert own == [(0.0, "x"), (0.0, "x")]
    client.publish("all", "y")
    assert own[-1] == (0.0, "y")


def test_a_listener_does_not_keep_its_client_alive() -> None:
    client = Client()
    assert listener(client) is listener(client)
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("value", [(1, 2), {"a": (1,)}, {1: 2}, {"a": object()}, {"a": float("nan")}])
def test_values_that_json_would_change_are_refused_as_messages(value: Any) -> None:
    assert as_message(value) is None
