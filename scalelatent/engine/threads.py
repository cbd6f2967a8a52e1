"""Thread pools of libraries: one thread each while a fit runs, restored after. Parallelism is Dask's, or ours
over spans.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from numbers import Integral
from typing import Any


@lru_cache(maxsize=1)
def _controller() -> Any:
    import numpy.linalg  # noqa: F401  both BLAS libraries have to be loaded before the controller looks
    import scipy.linalg  # noqa: F401
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@contextmanager
def single_threaded() -> Iterator[None]:
    """BLAS and zarr use one thread each inside; what was set before is restored at the end.

    Examples
    --------
    >>> with single_threaded():
    ...     pass
    """
    import zarr

    with _controller().limit(limits=1), zarr.config.set({"threading.max_workers": 1}):
        yield


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
