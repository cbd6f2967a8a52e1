"""Thread pools of libraries: one thread each while a fit runs, restored after. Parallelism is Dask's, or ours
over spans.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from numbers import Integral
from typing import Any, TypeVar

T = TypeVar("T")


@lru_cache(maxsize=1)
def _controller() -> Any:
    import numpy.linalg  # noqa: F401  both BLAS libraries have to be loaded before the controller looks
    import scipy.linalg  # noqa: F401
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


class _OneThread:
    """The limit of the whole process: whoever comes first sets it, whoever leaves last takes it back.

    Each on its own would restore what it found, and so, ending while another goes on, either let the pools
    loose under it or leave them limited for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._blas: Any = None
        self._zarr: Any = None

    def enter(self) -> None:
        """One more user."""
        import zarr

        with self._lock:
            if not self._users:
                _take_control()
                self._blas = _controller().select(user_api="blas").limit(limits=1)
                self._zarr = zarr.config.set({"threading.max_workers": 1})
            self._users += 1

    def leave(self) -> None:
        """One user less."""
        with self._lock:
            self._users -= 1
            if not self._users:
                _take_control()
                self._blas.restore_original_limits()
                _take_control()
                self._zarr.__exit__(None, None, None)


def _take_control() -> None:
    """Let the calling thread set the limits of OpenBLAS.

    From threadpoolctl 3.8 on only the thread that set one first may, and all others do nothing in silence.
    """
    for library in _controller().lib_controllers:
        clear = getattr(library, "clear_controlling_thread", None)
        if clear is not None:
            clear(force=True)


_one_thread = _OneThread()


@contextmanager
def single_threaded() -> Iterator[None]:
    """BLAS and zarr use one thread each inside, in all threads of the process; once nobody is inside any
    more, what was set before is restored.

    Examples
    --------
    >>> with single_threaded():
    ...     pass
    """
    _one_thread.enter()
    try:
        # OpenMP counts by calling thread, not by process.
        with _controller().select(user_api="openmp").limit(limits=1):
            yield
    finally:
        _one_thread.leave()


def within(seconds: float, call: Callable[[], T]) -> T:
    """What a call returns, waited for only so long: for requests to a cluster that may never be answered.

    Parameters
    ----------
    seconds : float
    call : callable
        Runs in a thread of its own, which is left to itself after that.

    Raises
    ------
    TimeoutError
        No answer yet; and whatever the call raises.

    Examples
    --------
    >>> within(5.0, lambda: 2)
    2
    """
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # noqa: BLE001  raised in the calling thread
            answers.put((None, error))

    threading.Thread(target=work, name="bounded-call", daemon=True).start()
    try:
        value, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer in {seconds:g} s") from None
    if error is not None:
        raise error
    return value


def available_cores() -> int:
    """Cores that this process may use (its affinity, not the machine's count).

    Examples
    --------
    >>> available_cores() >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resolve_jobs(n_jobs: int | None) -> int:
    """Threads that ``n_jobs`` means: None or -1 is all cores, as in scikit-learn.

    Raises
    ------
    ValueError
        0, or not a whole number.

    Examples
    --------
    >>> resolve_jobs(3)
    3
    """
    if n_jobs is None or n_jobs == -1:
        return available_cores()
    if not isinstance(n_jobs, Integral) or isinstance(n_jobs, bool) or n_jobs == 0:
        raise ValueError(f"n_jobs={n_jobs!r}: give a number of threads of at least 1, or None for all cores")
    return int(n_jobs) if n_jobs > 0 else max(1, available_cores() + 1 + int(n_jobs))
