"""Keep rows in memory between passes, in one cache per process. A piece is the rows of one read."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    from scalelatent.kernels.arrays import HostRows

# Default size of a row cache: SMALL_BYTES if reading rows is faster than computing, otherwise the share
# DEFAULT_SHARE of the memory of the process.
SMALL_BYTES, DEFAULT_SHARE = 2**27, 0.3
CACHE_VARIABLE = "SCALELATENT_CACHE_BYTES"

Piece: TypeAlias = "tuple[HostRows, np.ndarray | None, np.ndarray | None]"
"""Contiguous rows: (x as ndarray or CsrRows, label codes or outputs or None, weights or None)."""


def memory_limit() -> int:
    """Return the bytes that this process may use: a Dask worker's limit, else that of `machine_memory`."""
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
    """Return (bytes that this process may use on this machine, name of the limit)."""
    # Containers and batch systems show the host's memory, but kill a process at the limit of its cgroup.
    limits = [(_installed_memory(), "the machine")]
    for file, name in _cgroup_files():
        try:
            limits.append((int(file.read_text()), name))
        except (OSError, ValueError):  # there is no such cgroup, or its limit is "max"
            continue
    return min((limit for limit in limits if limit[0] > 0), key=lambda limit: limit[0])


def _cgroup_files() -> Iterator[tuple[Path, str]]:
    """Yield (file, name) of the memory limits of the process's cgroups and all their parents."""
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
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 * 2**30


class PieceCache:
    """Thread-safe cache of pieces (rows of one read) by key, with an upper bound of ``limit`` bytes.

    Each pass reads all pieces in the same order, so a least-recently-used cache would evict each piece just
    before its next use. This cache keeps the pieces that it has, and evicts only pieces that were not used in
    the last two passes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._pieces: dict[Hashable, tuple[Piece, int]] = {}
        self._touched: dict[Hashable, int] = {}
        self._clock = 0
        self._lock = threading.Lock()

    def resize(self, limit: int) -> None:
        """Change the limit in bytes, and evict rows until the cache is within the limit."""
        with self._lock:
            self.limit = limit
            for key in list(self._pieces):
                if self.used <= limit:
                    return
                self._drop(key)

    def start_pass(self) -> None:
        """Count a pass, so that rows that were not used in the last two passes can be evicted."""
        with self._lock:
            self._clock += 1

    def get(self, key: Hashable) -> Piece | None:
        with self._lock:
            found = self._pieces.get(key)
            if found is not None:
                self._touched[key] = self._clock
            return found[0] if found else None

    def put(self, key: Hashable, piece: Piece) -> bool:
        """Store a piece (rows of one read) if there is room, and return True if it is stored.

        The arrays of the piece must not change later.
        """
        size = sum(a.nbytes for a in piece if a is not None)
        with self._lock:
            if key in self._pieces:
                return True
            if not self._make_room(size):
                return False
            self._pieces[key] = (piece, size)
            self._touched[key] = self._clock
            self.used += size
            return True

    def make_room(self, size: int) -> bool:
        """Evict rows that were not used in the last two passes; return True if ``size`` bytes are free."""
        with self._lock:
            return self._make_room(size)

    def _make_room(self, size: int) -> bool:
        if self.used + size > self.limit:
            for unused in [k for k, t in self._touched.items() if t < self._clock - 2]:
                if self.used + size > self.limit:
                    self._drop(unused)
        return self.used + size <= self.limit

    def _drop(self, key: Hashable) -> None:
        self.used -= self._pieces.pop(key)[1]
        del self._touched[key]

    def clear(self) -> None:
        with self._lock:
            self._pieces.clear()
            self._touched.clear()
            self.used = 0


_shared: PieceCache | None = None
_shared_lock = threading.Lock()


def shared_cache(size: float | None = None) -> PieceCache:
    """Return the cache of this process, resized to ``size`` (bytes, or a share of its memory) if given.

    The environment variable SCALELATENT_CACHE_BYTES, in bytes, takes precedence over ``size``.
    """
    global _shared
    fixed = os.environ.get(CACHE_VARIABLE)
    with _shared_lock:
        if _shared is None:
            _shared = PieceCache(SMALL_BYTES if fixed is None else int(fixed))
        if size is not None and fixed is None:
            _shared.resize(compute_limit(size, memory_limit()))
        return _shared


def compute_limit(size: float, memory: int) -> int:
    """Return the bytes of a cache of ``size`` (bytes, or a share) in a process that may use ``memory`` bytes.

    The default ``SMALL_BYTES`` is reduced to a tenth of the memory if that is less.
    """
    if size == SMALL_BYTES:
        return min(SMALL_BYTES, memory // 10)
    return int(size * memory if 0 < size <= 1 else size)


def parse_cache(value: Any) -> float | None:
    """Return the user's cache size as bytes or as a share of the memory; None for "auto"."""
    if value is None or value == "auto":
        return None
    try:
        if isinstance(value, str):
            from dask.utils import parse_bytes

            # parse_bytes would convert the share "0.3" to 0 bytes.
            value = value if value.replace(".", "", 1).isdecimal() else parse_bytes(value)
        size = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, KeyError):
        size = float("nan")
    if not 0 <= size < float("inf"):
        raise ValueError(
            f"cache={value!r}: give 'auto', an amount of memory such as '512MiB' (0 for none), or a share of "
            "each process's memory such as 0.3"
        )
    return size
