"""Memory that a worker frees and soon takes again: kept by its allocator, not given back to the system.

Dask starts workers with ``MALLOC_TRIM_THRESHOLD_=65536``, so that they look small while they idle. A side
effect is that glibc no longer learns how large the arrays of a program are: each above 128 kB gets fresh
pages from the system, cleared at their first use, again and again. In steps of a conditional RBM over two
workers that was a fifth of the time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from scalelatent.engine.plan import KEPT_BYTES

__all__ = ["keep_pages"]

# What Dask sets by default; other values are somebody's decision.
OF_DASK = "65536"
# Larger arrays go back at once: pieces of rows, which have a memory of their own (data/recycled.py).
LARGEST_BYTES = 2**24
# Numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_pages(environ: Mapping[str, str] = os.environ) -> bool:
    """Let the allocator of this process keep what is freed, at most 32 MiB a thread, if Dask forbade it.

    Whoever wants it otherwise sets another ``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, or
    ``glibc.malloc`` in ``GLIBC_TUNABLES``, before the worker starts.

    Parameters
    ----------
    environ : mapping
        What the process was started with.

    Returns
    -------
    bool
        Whether anything was changed: not where a user has set a threshold, and not without glibc.

    Examples
    --------
    >>> keep_pages({"MALLOC_TRIM_THRESHOLD_": "1000000"})  # a user's own
    False
    """
    decided = "MALLOC_MMAP_THRESHOLD_" in environ or "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")
    if decided or environ.get("MALLOC_TRIM_THRESHOLD_") != OF_DASK:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
