"""Thread pools of libraries."""

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
    import numpy.linalg  # noqa: F401  both BLAS libraries have to be loaded before the controller looks
    import scipy.linalg  # noqa: F401
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


class _OneThread:
    """The limit of the whole process: the first to come sets it, the last to leave takes it back."""

    # Each on its own would restore what it found, and so either let the pools loose under another or leave
    # them limited for ever.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._blas: Any = None
        self._zarr: Any = None

    def enter(self) -> None:
        import zarr

        with self._lock:
            if not self._users:
                _take_control()
                self._blas = _controller().select(user_api="blas").limit(limits=1)
                self._zarr = zarr.config.set({"threading.max_workers": 1})
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                _take_control()
                self._blas.restore_original_limits()
                _take_control()
                self._zarr.__exit__(None, None, None)


def _take_control() -> None:
    """Let the calling thread set the limits of OpenBLAS."""
    # From threadpoolctl 3.8 on only the thread that set a limit first may change it; all others do nothing in
    # silence.
    for library in _controller().lib_controllers:
        clear = getattr(library, "clear_controlling_thread", None)
        if clear is not None:
            clear(force=True)


_one_thread = _OneThread()


@contextmanager
def single_threaded() -> Iterator[None]:
    """BLAS and zarr use one thread each inside, in all threads of the process."""
    _one_thread.enter()
    try:
        # OpenMP counts by calling thread, not by process.
        with _controller().select(user_api="openmp").limit(limits=1):
            yield
    finally:
        _one_thread.leave()


def within(seconds: float, call: Callable[[], T]) -> T:
    """What a call returns, waited for only so long: for requests to a cluster that may never be answered."""
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


def usable_cores() -> int:
    """Return the number of cores that a batch system or a container allows this process."""
    from dask.system import cpu_count  # Dask takes longer to import than the engine

    return int(cpu_count())


def resolve_jobs(n_jobs: int | None) -> int:
    """Threads that ``n_jobs`` means: -1 is all cores that a batch system or a container allows."""
    # None is what joblib.parallel_config says: one thread in a worker of joblib's, as in a grid search with
    # n_jobs=-1.
    if n_jobs is None:
        return min(_joblib_jobs() or usable_cores(), usable_cores())
    if not isinstance(n_jobs, Integral) or isinstance(n_jobs, bool) or n_jobs == 0:
        raise ValueError(f"n_jobs={n_jobs!r}: give a number of threads of at least 1, or None for all cores")
    return int(n_jobs) if n_jobs > 0 else max(1, usable_cores() + 1 + int(n_jobs))


def _joblib_jobs() -> int | None:
    """What joblib was set to, or its worker that calls is left with; None where it was not set."""
    # It reads a setting here, and stores nothing.
    from joblib import effective_n_jobs  # noqa: TID251
    from joblib.parallel import get_active_backend  # noqa: TID251

    backend, n_jobs = get_active_backend()
    return None if n_jobs is None and not backend.nesting_level else int(effective_n_jobs(None))
