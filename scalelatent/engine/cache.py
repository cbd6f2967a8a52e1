"""A bounded cache of pieces of rows, one for each process."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    from scalelatent.kernels.arrays import HostRows

# Bytes of a cache where rows are read ahead in time, and the share of a process's memory where they are not.
SMALL_BYTES, DEFAULT_SHARE = 2**27, 0.3
CACHE_VARIABLE = "SCALELATENT_CACHE_BYTES"

Piece: TypeAlias = "tuple[HostRows, np.ndarray | None, np.ndarray | None]"
"""Columns of a run of rows: rows (ndarray or CsrRows), label codes, weights; None where there is none."""


def memory_limit() -> int:
    """Bytes this process may use: the Dask worker's limit, the control group's, or the machine's memory."""
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
    """Bytes that the machine lets this process use, and what sets the limit."""
    # Containers and batch systems show the host's memory, but kill at the limit of their control group (v2 or
    # v1).
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
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 * 2**30


class PieceCache:
    """Pieces by key, at most ``limit`` bytes; safe for several threads."""

    # Passes are cyclic scans, on which "least recently used" evicts each piece just before it is wanted. So
    # pieces are admitted up to the limit and stay; only those that two whole passes did not touch make room.

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._pieces: dict[Hashable, tuple[Piece, int]] = {}
        self._touched: dict[Hashable, int] = {}
        self._clock = 0
        self._lock = threading.Lock()

    def resize(self, limit: int) -> None:
        """Allow more bytes, or fewer: what is over goes at once."""
        with self._lock:
            self.limit = limit
            for key in list(self._pieces):
                if self.used <= limit:
                    return
                self._drop(key)

    def start_pass(self) -> None:
        """Advance the clock by which unused pieces are told."""
        with self._lock:
            self._clock += 1

    def get(self, key: Hashable) -> Piece | None:
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
            self._drop(key)

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


def shared_cache(asked: float | None = None) -> PieceCache:
    """The cache of this process, :data:`SMALL_BYTES` at first."""
    global _shared
    given = os.environ.get(CACHE_VARIABLE)
    with _shared_lock:
        if _shared is None:
            _shared = PieceCache(SMALL_BYTES if given is None else int(given))
        if asked is not None and given is None:
            _shared.resize(limit_of(asked, memory_limit()))
        return _shared


def limit_of(asked: float, memory: int) -> int:
    """Bytes of a cache in a process that may use ``memory``; the small one is never above a tenth of it."""
    if asked == SMALL_BYTES:
        return min(SMALL_BYTES, memory // 10)
    return int(asked * memory if 0 < asked <= 1 else asked)


def parse_cache(value: Any) -> float | None:
    """What a user says of the cache as :func:`shared_cache` takes it; None for "auto"."""
    if value is None or value == "auto":
        return None
    try:
        if isinstance(value, str):
            from dask.utils import parse_bytes

            # Of "0.3" that would make no bytes.
            value = value if value.replace(".", "", 1).isdecimal() else parse_bytes(value)
        found = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, KeyError):
        found = float("nan")
    if not 0 <= found < float("inf"):
        raise ValueError(
            f"cache={value!r}: give 'auto', an amount of memory such as '512MiB' (0 for none), or a share of "
            "each process's memory such as 0.3"
        )
    return found
