"""Threads that would wait for a step: who has them lends them, and a step may share its parts among them.

An engine whose threads wait for an M-step lends them (:func:`lend`); the step hands independent parts of its
work to :func:`in_parts`. Which parts there are belongs to the step, never to the threads, so its bits do not
depend on how many were lent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TypeVar

Part = TypeVar("Part")
T = TypeVar("T")

_lent: ContextVar[int] = ContextVar("scalelatent_lent_threads", default=1)


@contextmanager
def lend(threads: int) -> Iterator[None]:
    """Inside, :func:`in_parts` may use so many threads."""
    token = _lent.set(threads)
    try:
        yield
    finally:
        _lent.reset(token)


def in_parts(run: Callable[[Part], T], parts: Sequence[Part]) -> list[T]:
    """What ``run`` makes of each part, in their order; where one raises, no more parts begin."""
    threads = min(_lent.get(), len(parts))
    if threads < 2:
        return [run(part) for part in parts]

    def alone(part: Part) -> T:
        with lend(1):  # parts of parts would wait for threads that wait for them
            return run(part)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="scalelatent-idle")
    try:
        # Each has the caller's context: how numpy warns is part of it.
        running = [pool.submit(copy_context().run, alone, part) for part in parts]
        return [one.result() for one in running]
    finally:
        pool.shutdown(cancel_futures=True)
