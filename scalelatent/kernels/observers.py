"""Who is told of kernels that are compiled; apart from numba, which takes half a second to import."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

Observer = Callable[[str, float | None], None]
_observers: list[Observer] = []


def observe(observer: Observer) -> None:
    """Call a function with each kernel that is compiled here: with None before, with its seconds after."""
    _observers.append(observer)


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """See :func:`observe`, for a while."""
    observe(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextlib.contextmanager
def told(name: str) -> Iterator[None]:
    """Tell them of a kernel that is compiled inside."""
    begin, observers = time.perf_counter(), tuple(_observers)
    for observer in observers:
        observer(name, None)
    try:
        yield
    finally:
        for observer in observers:
            observer(name, time.perf_counter() - begin)
