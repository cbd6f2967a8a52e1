"""Memory that is used again, and never under somebody's eyes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from scalelatent.data import buffers

SHAPE, DTYPE = (300, 256), np.dtype("float32")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_kept", [])


def place(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_what_was_let_go_is_used_again() -> None:
    first = buffers.empty(SHAPE, DTYPE)
    at = place(first)
    second = buffers.empty(SHAPE, DTYPE)
    assert place(second) != at
    del first
    assert place(buffers.empty(SHAPE[::-1], np.dtype("int32"))) == at
    assert len(buffers._kept) == 2


@pytest.mark.parametrize("hold", [lambda a: a, lambda a: a[3:5], lambda a: a.T.reshape(-1)[:1], memoryview])
def test_what_is_looked_at_stays(hold) -> None:  # type: ignore[no-untyped-def]
    array = buffers.empty(SHAPE, DTYPE)
    array[...] = 7.0
    held = hold(array)
    del array
    for _ in range(2 * buffers.KEPT):
        buffers.empty(SHAPE, DTYPE)[...] = -1.0
    assert (np.asarray(held) == 7.0).all()


def test_little_is_kept() -> None:
    arrays = [buffers.empty(SHAPE, DTYPE) for _ in range(3 * buffers.KEPT)]
    assert len({place(a) for a in arrays}) == len(arrays)
    assert len(buffers._kept) == buffers.KEPT
    large = [buffers.empty((buffers.KEPT_BYTES // 3,), np.dtype("u1")) for _ in range(4)]
    assert sum(b.nbytes for b in buffers._kept) <= buffers.KEPT_BYTES
    del large
    buffers.empty((4,), DTYPE), buffers.empty((buffers.KEPT_BYTES,), np.dtype("u1"))
    assert all(buffers.SMALLEST <= b.nbytes < buffers.KEPT_BYTES for b in buffers._kept)


def test_threads_never_share() -> None:
    wrong = []

    def work(number: float) -> None:
        for _ in range(300):
            array = buffers.empty(SHAPE, DTYPE)
            array[...] = number
            if not (array == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
