"""Arrays of received messages are aligned to their type before they are used in computations."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from scalelatent.engine.dask.pass_tasks import TaskParams, align_arrays


@dataclass(frozen=True)
class State:
    w: np.ndarray
    more: Any = None


def send_unaligned(value: Any) -> Any:
    """Return a copy of the value whose arrays start at unaligned addresses, as in a received message."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    odd = [memoryview(b"." * (i % 3 + 1) + bytes(b))[i % 3 + 1 :] for i, b in enumerate(buffers)]
    return pickle.loads(data, buffers=odd)


def test_received_parameters_are_aligned_to_their_type() -> None:
    w = np.random.default_rng(0).normal(size=(30, 20)).astype("f4")
    state = State(w, {"same": w, "list": [np.arange(5.0)], "pair": (np.arange(3), "text", None)})
    assert not send_unaligned(state).w.flags.aligned
    got = send_unaligned(TaskParams(state))
    assert got.state.w.flags.aligned
    assert got.state.more["same"] is got.state.w
    assert got.state.more["list"][0].flags.aligned
    assert got.state.more["pair"][0].flags.aligned
    assert got.state.more["pair"][1:] == ("text", None)
    np.testing.assert_array_equal(got.state.w, w)
    np.testing.assert_array_equal(got.state.more["list"][0], np.arange(5.0))


def test_products_of_received_parameters_have_the_same_bits() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(150, 12)), rng.normal(size=(150, 12))
    np.testing.assert_array_equal(send_unaligned(TaskParams(a)).state.T @ b, a.T @ b)


class Pair(NamedTuple):
    a: np.ndarray
    b: int


def test_received_named_tuples_keep_their_type() -> None:
    got = send_unaligned(TaskParams(Pair(np.arange(4.0), 1))).state
    assert isinstance(got, Pair)
    assert got.a.flags.aligned


def test_aligned_arrays_are_not_copied() -> None:
    state = State(np.zeros(3), 5)
    assert align_arrays(state) is state
    tree = {"a": state.w, "b": [1, "x"]}
    assert align_arrays(tree)["a"] is state.w
