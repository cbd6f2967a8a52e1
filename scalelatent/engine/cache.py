"""A bounded cache of pieces of rows, one for each process: data that fits is read once.

Passes are cyclic scans, and on those "least recently used" throws out each piece just before it is wanted. So
pieces are admitted until the limit is reached and then stay; only pieces that two whole passes did not touch
make room for new ones.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

DEFAULT_SHARE = 0.3

Piece = tuple[Any, ...]
"""Columns of a run of rows: rows (ndarray or CsrRows), label codes, weights; None where there is none."""


def memory_limit() -> int:
    """Bytes this process may use: the Dask worker's limit, the control group's, or the machine's memory.

    Examples
    --------
    >>> memory_limit() > 2**20
    True
    """
    import sys

    if "distributed" in sys.modules:
        from distributed import get_worker

        try:
            limit = get_worker().memory_manager.memory_limit
            if limit:
                return int(limit)
        except (ValueError, AttributeError):
            pass
    return machine_memory()[0]


def machine_memory() -> tuple[int, str]:
    """Bytes that the machine lets this process use, and what sets the limit.

    Containers and batch systems show the host's memory, but kill at the limit of their control group (v2 or
    v1): that of the process itself where it can be seen, else that of the root.

    Examples
    --------
    >>> machine_memory()[0] > 2**20
    True
    """
    limits = [(_installed_memory(), "the machine")]
    for file, name in _cgroup_files():
        try:
            limits.append((int(file.read_text()), name))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min((limit for limit in limits if limit[0] > 0), key=lambda limit: limit[0])


def _cgroup_files() -> Iterator[tuple[Path, str]]:
    """Where limits may stand: of the process's own groups, of those around them, and of the root."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        own = Path(path.lstrip("/"))
        for group in (own, *own.parents):
            if not controllers:
                yield root / group / "memory.max", "cgroup v2"
            elif "memory" in controllers.split(","):
                yield root / "memory" / group / "memory.limit_in_bytes", "cgroup v1"
    yield root / "memory.max", "cgroup v2"
    yield root / "memory" / "memory.limit_in_bytes", "cgroup v1"


def _installed_memory() -> int:
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 * 2**30


class PieceCache:
    """Pieces by key, at most ``limit`` bytes; safe for several threads.

    Examples
    --------
    >>> import numpy as np
    >>> cache = PieceCache(limit=100)
    >>> cache.put("a", (np.zeros(10),))
    True
    >>> cache.put("b", (np.zeros(10),)), cache.get("b") is None
    (False, True)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._pieces: dict[Hashable, tuple[Piece, int]] = {}
        self._touched: dict[Hashable, int] = {}
        self._clock = 0
        self._lock = threading.Lock()

    def start_pass(self) -> None:
        """Advance the clock by which unused pieces are told."""
        with self._lock:
            self._clock += 1

    def get(self, key: Hashable) -> Piece | None:
        """The piece, or None."""
        with self._lock:
            found = self._pieces.get(key)
            if found is not None:
                self._touched[key] = self._clock
            return found[0] if found else None

    def put(self, key: Hashable, piece: Piece) -> bool:
        """Keep the piece if there is room; its arrays must not be changed afterwards."""
        size = sum(a.nbytes for a in piece if a is not None)
        with self._lock:
            if key in self._pieces:
                return True
            if self.used + size > self.limit:
                self._drop_unused(size)
            if self.used + size > self.limit:
                return False
            self._pieces[key] = (piece, size)
            self._touched[key] = self._clock
            self.used += size
            return True

    def _drop_unused(self, wanted: int) -> None:
        for key in [k for k, t in self._touched.items() if t < self._clock - 2]:
            if self.used + wanted <= self.limit:
                return
            self.used -= self._pieces.pop(key)[1]
            del self._touched[key]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._pieces.clear()
            self._touched.clear()
            self.used = 0


_shared: PieceCache | None = None
_shared_lock = threading.Lock()


def shared_cache() -> PieceCache:
    """The cache of this process: 30 % of its memory limit, or ``SCALELATENT_CACHE_BYTES``."""
    global _shared
    with _shared_lock:
        if _shared is None:
            import os

            asked: Any = os.environ.get("SCALELATENT_CACHE_BYTES")
            _shared = PieceCache(int(asked) if asked is not None else int(DEFAULT_SHARE * memory_limit()))
        return _shared
