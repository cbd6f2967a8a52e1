"""Memory for rows that are read: used again once nobody looks at it.

A pass out of core reads megabytes at a time and lets them go. Fresh memory for each comes page by page from
the operating system, which takes as long as the copy into it and holds up the threads that compute.
"""

from __future__ import annotations

import math
import sys
import threading

import numpy as np

# Smaller arrays come from memory that the allocator keeps anyway.
SMALLEST = 2**18
KEPT, KEPT_BYTES = 8, 2**26
_lock = threading.Lock()
_kept: list[np.ndarray] = []
# References to a buffer that nobody looks at: the list above, the loop's name, the argument of getrefcount.
_ALONE = 3


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array as of ``numpy.empty``, perhaps in the memory of one that nobody holds any more.

    Whoever holds the array, or a view of it, keeps its memory from being used again.

    Parameters
    ----------
    shape : tuple of int
    dtype : dtype

    Returns
    -------
    ndarray

    Examples
    --------
    >>> empty((2, 3), np.dtype("float32")).shape
    (2, 3)
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < SMALLEST or nbytes > KEPT_BYTES // 2:
        return np.empty(shape, dtype)
    return _buffer(nbytes).view(dtype).reshape(shape)


def _buffer(nbytes: int) -> np.ndarray:
    with _lock:
        for i in reversed(range(len(_kept))):  # what was used last may still be in a cache
            buffer = _kept[i]
            if buffer.nbytes == nbytes and sys.getrefcount(buffer) == _ALONE:
                _kept.append(_kept.pop(i))
                return buffer
        buffer = np.empty(nbytes, np.uint8)
        _kept.append(buffer)
        while len(_kept) > KEPT or sum(b.nbytes for b in _kept) > KEPT_BYTES:
            _kept.pop(0)
        return buffer
