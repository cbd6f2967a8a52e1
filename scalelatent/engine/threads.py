"""Limit the thread pools of BLAS, OpenMP and zarr, and choose the number of threads of a fit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

T = TypeVar("T")


@lru_cache(maxsize=1)
def _controller() -> ThreadpoolController:
    import numpy.linalg  # noqa: F401  both BLAS libraries must be loaded before the controller is created
    import scipy.linalg  # noqa: F401
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def _take_control() -> None:
    """Allow the calling thread to set the limits of OpenBLAS."""
    # Since threadpoolctl 3.8, only the thread that set a limit first can change it; others are ignored.
    for library in _controller().lib_controllers:
        clear = getattr(library, "clear_controlling_thread", None)
        if clear is not None:
            clear(force=True)


_lock = threading.Lock()  # protects the two variables below
_users = 0  # number of `single_threaded` statements that run now, in any thread
_limits: tuple[Any, Any] = None, None  # limits of (BLAS, zarr) while there are users


@contextmanager
def single_threaded() -> Iterator[None]:
    """Limit BLAS, zarr and OpenMP to one thread each inside the ``with`` statement.

    The first of several overlapping statements sets the limits of the process, and the last one restores the
    earlier limits.
    """
    import zarr

    global _users, _limits
    with _lock:
        if not _users:
            _take_control()
            blas = _controller().select(user_api="blas").limit(limits=1)
            _limits = blas, zarr.config.set({"threading.max_workers": 1})
        _users += 1
    try:
        # The limit of OpenMP holds only for the calling thread; the other limits hold for the process.
        with _controller().select(user_api="openmp").limit(limits=1):
            yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _take_control()
                _limits[0].restore_original_limits()
                _take_control()
                _limits[1].__exit__(None, None, None)


def call_with_timeout(seconds: float, call: Callable[[], T]) -> T:
    """Return ``call()``, or raise a TimeoutError after ``seconds``; calls to a cluster may hang."""
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:  # noqa: BLE001  raised in the calling thread
            results.put((None, error))

    threading.Thread(target=work, name="bounded-call", daemon=True).start()
    try:
        value, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer in {seconds:g} s") from None
    if error is not None:
        raise error
    return value


def usable_cores() -> int:
    """Return the number of cores that a batch system or a container allows this process."""
    from dask.system import cpu_count  # Dask takes longer to import than the engine

    return int(cpu_count())


def resolve_jobs(n_jobs: int | None) -> int:
    """Return the number of threads for ``n_jobs``; -1 means all cores that this process may use."""
    # None: use joblib's setting (`joblib.parallel_config`), which is one thread in a worker of a grid search.
    if n_jobs is None:
        return min(_joblib_jobs() or usable_cores(), usable_cores())
    if not isinstance(n_jobs, Integral) or isinstance(n_jobs, bool) or n_jobs == 0:
        raise ValueError(f"n_jobs={n_jobs!r}: give a number of threads of at least 1, or None for all cores")
    return int(n_jobs) if n_jobs > 0 else max(1, usable_cores() + 1 + int(n_jobs))


def _joblib_jobs() -> int | None:
    """Return the number of jobs of joblib's present configuration; None if the user has not set it."""
    from joblib import effective_n_jobs  # noqa: TID251  only reads a setting
    from joblib.parallel import get_active_backend  # noqa: TID251

    backend, n_jobs = get_active_backend()
    return None if n_jobs is None and not backend.nesting_level else int(effective_n_jobs(None))
