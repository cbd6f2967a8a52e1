"""Functions that are called when a kernel is compiled.

This module does not import numba, which takes half a second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

Observer = Callable[[str, float | None], None]
_observers: list[Observer] = []


def add_observer(observer: Observer) -> None:
    """Call ``observer(kernel name, None)`` before each compilation and ``(name, seconds)`` after it."""
    _observers.append(observer)


@contextlib.contextmanager
def observe_compilation(observer: Observer) -> Iterator[None]:
    """Call ``observer`` before and after each compilation of a kernel inside the ``with`` statement."""
    add_observer(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextlib.contextmanager
def report_compilation(name: str) -> Iterator[None]:
    """Report to all observers that the block of the ``with`` statement compiles this kernel."""
    begin, observers = time.perf_counter(), tuple(_observers)
    for observer in observers:
        observer(name, None)
    try:
        yield
    finally:
        for observer in observers:
            observer(name, time.perf_counter() - begin)
