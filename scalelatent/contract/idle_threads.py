"""Let a model's M-step use the threads of the engine that would otherwise wait for its result.

The engine calls :func:`allow_threads` around an M-step, and the M-step gives independent parts of its work to
:func:`run_parts`. The M-step alone decides how its work is split into parts, so the result is bitwise
identical for any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TypeVar

Part = TypeVar("Part")
T = TypeVar("T")

_allowed_threads: ContextVar[int] = ContextVar("scalelatent_allowed_threads", default=1)


@contextmanager
def allow_threads(threads: int) -> Iterator[None]:
    """Let :func:`run_parts` use up to ``threads`` threads inside the ``with`` statement."""
    token = _allowed_threads.set(threads)
    try:
        yield
    finally:
        _allowed_threads.reset(token)


def run_parts(run: Callable[[Part], T], parts: Sequence[Part]) -> list[T]:
    """Return ``run(part)`` for each part, in order; after the first error no further part starts."""
    threads = min(_allowed_threads.get(), len(parts))
    if threads < 2:
        return [run(part) for part in parts]

    def run_alone(part: Part) -> T:
        with allow_threads(1):  # so that a nested `run_parts` starts no threads (it might wait forever)
            return run(part)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="scalelatent-idle")
    try:
        # Each thread gets a copy of the caller's context, which contains numpy's error settings.
        futures = [pool.submit(copy_context().run, run_alone, part) for part in parts]
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)
