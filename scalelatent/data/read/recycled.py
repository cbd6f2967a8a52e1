"""Memory of rows that nobody holds any more, used again.

Pages that come fresh from the system cost a fault each, and go back by a call that stops the other cores:
rows that are read, used once and dropped pay for both (benchmarks/streamed_pass.py).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

__all__ = ["Recycled"]

# Smaller arrays come from memory that the allocator keeps anyhow; larger ones are read once.
LEAST_BYTES, MOST_BYTES = 2**18, 2**24
MOST_KEPT = 4


class Recycled:
    """Uninitialized arrays whose memory comes back when they, and all views of them, are gone.

    Any thread may take arrays and drop them. At most `MOST_KEPT` pieces of `MOST_BYTES` are kept; they are
    neither copied nor pickled.

    Examples
    --------
    >>> memory = Recycled()
    >>> rows = memory.empty((1024, 64), np.dtype("f8"))
    >>> address, last = rows.ctypes.data, rows[1000:]
    >>> del rows
    >>> memory.empty((1024, 64), np.dtype("f8")).ctypes.data == address  # the last rows are still used
    False
    >>> del last
    >>> memory.empty((1024, 64), np.dtype("f8")).ctypes.data == address
    True
    """

    def __init__(self) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=MOST_KEPT)

    def __reduce__(self) -> Any:
        return Recycled, ()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An array as of `numpy.empty`."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not LEAST_BYTES <= nbytes <= MOST_BYTES:
            return np.empty(shape, dtype)
        raw = self._taken(nbytes)
        raw = np.empty(nbytes, np.uint8) if raw is None else raw
        return np.asarray(_Lease(raw, self._free)).view(dtype).reshape(shape)

    def _taken(self, nbytes: int) -> np.ndarray | None:
        """A free piece of this size; others are of rows that are no longer read, and are let go."""
        while True:
            try:
                raw = self._free.pop()
            except IndexError:
                return None
            if raw.nbytes == nbytes:
                return raw


class _Lease:
    """What all views of an array hold in the end: numpy stops there, since it is no array itself."""

    def __init__(self, raw: np.ndarray, free: deque[np.ndarray]) -> None:
        self.__array_interface__ = raw.__array_interface__
        self._raw, self._free = raw, free

    def __del__(self) -> None:
        self._free.append(self._raw)
