"""Locks on places: one driver of a run folder, one writer of a dataset.

On a disk a lock is a file that the system locks: whether its holder lives is known at once, without any
clock, also after SIGKILL. The modification time of the file is a heartbeat, for where that lock does not
reach: a holder on another host, or any holder where the file system has no locks, is gone after
`STALE_SECONDS` of silence. In an object store a lock is a lease (lease.py).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from scalelatent import _file_locks
from scalelatent.errors import DataError, StoreError

from .lease import HEARTBEAT_SECONDS, STALE_SECONDS, ObjectLock, seen_gone, this_process
from .location import Location
from .objects import ObjectLocation
from .plain_files import open_plain, refuse_special

__all__ = ["FileLock", "Lock", "alone", "lock_of"]

_TRIES = 20
_PROBE_SECONDS = 0.25  # `holder` locks a file for a moment


class Lock(Protocol):
    """A lock that one process holds at a time."""

    @property
    def lost(self) -> bool:
        """Whether another process has taken over from this one."""

    def acquire(self) -> None:
        """Take it, or raise a `BlockingIOError`."""

    def release(self) -> None:
        """Give it back; safe to call when it is not held."""

    def holder(self) -> dict[str, Any] | None:
        """`{"pid", "host", …}` of the process that holds it, or None."""


def lock_of(place: Location, key: str, **doing: object) -> Lock:
    """The lock `key` of a place, not taken; what the holder is `doing` is told to others."""
    if isinstance(place, ObjectLocation):
        return ObjectLock(place, key, **doing)
    return FileLock(place.name_of(key), **doing)


class FileLock:
    """A lock in a file of its own."""

    def __init__(self, file: str | os.PathLike[str], **doing: object) -> None:
        self.file = Path(file)
        self.lost = False
        self._doing, self._token = doing, ""
        self._descriptor: int | None = None
        self._stop = threading.Event()
        self._beat: threading.Thread | None = None

    def acquire(self) -> None:
        me = this_process() | self._doing
        self._token = me["token"]
        for _ in range(_TRIES):
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if self._taken(descriptor, json.dumps(me).encode()):
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        else:
            raise BlockingIOError(f"{self.file} is taken by others again and again")
        self._descriptor, self.lost = descriptor, False
        self._stop.clear()
        self._beat = threading.Thread(target=self._keep_fresh, name="lock-heartbeat", daemon=True)
        self._beat.start()

    def _taken(self, descriptor: int, record: bytes) -> bool:
        """Lock an open file; False where its holder removed it meanwhile, so that it locks nothing."""
        refuse_special(os.fstat(descriptor).st_mode, self.file)
        locked = _file_locks.take(descriptor, _PROBE_SECONDS)
        if locked is False or self._held_by_record(locked):
            raise BlockingIOError(f"{self.file} is held")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(self.file)):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, record, 0)
                os.fsync(descriptor)
                return True
        return False

    def release(self) -> None:
        if self._descriptor is None:
            return
        self._stop.set()
        if self._beat is not None:
            self._beat.join(timeout=5)
        # Where the file system is out of reach, the lock ends with the descriptor, or by silence.
        with suppress(OSError):
            if not self.lost and self._is_mine():
                os.unlink(self.file)
        os.close(self._descriptor)
        self._descriptor = None

    def holder(self) -> dict[str, Any] | None:
        try:
            descriptor = os.open(self.file, os.O_RDWR)
        except FileNotFoundError:
            return None
        except OSError:  # a folder that may be read but not written: the file's own word must do
            return self._written() if self._fresh() else None
        try:
            locked = _file_locks.take(descriptor, shared=True)
            if locked is False:
                return self._written() or {}
            return self._written() if self._held_by_record(locked) else None
        finally:
            os.close(descriptor)

    def _held_by_record(self, locked: bool | None) -> bool:
        """Whether the file tells of a living holder that the system's lock does not reach."""
        written = self._written()
        if not written or not self._fresh():
            return False
        return written.get("host") != socket.gethostname() or (locked is None and not seen_gone(written))

    def _fresh(self) -> bool:
        try:
            return time.time() - self.file.stat().st_mtime < STALE_SECONDS
        except FileNotFoundError:
            return False

    def _is_mine(self) -> bool:
        written = self._written()
        return written is not None and written.get("token") == self._token

    def _written(self) -> dict[str, Any] | None:
        try:
            with open(open_plain(self.file)) as file:
                written = json.load(file)
        except (OSError, ValueError):
            return None
        return written if isinstance(written, dict) else None

    def _keep_fresh(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                if self._written() is not None and not self._is_mine():
                    self.lost = True
                    return
                os.utime(self.file)
            except OSError:  # out of reach for now; if it stays so, the lock ends by silence
                continue


@contextmanager
def alone(location: Location, key: str, doing: str) -> Iterator[None]:
    """Hold the lock `key` of a stored dataset while it changes.

    Where locks do not reach another host it may slip in: what changes a dataset compares, before its last
    write, what it began with.
    """
    lock = lock_of(location, key, doing=doing, since=time.time())
    try:
        lock.acquire()
    except BlockingIOError as error:
        told = _told(lock.holder() or {})
        raise DataError(f"{location.url} is {told}, then try again") from error
    except StoreError:
        raise
    except OSError as error:
        raise DataError(
            f"{location.url} cannot be changed: {location.name_of(key)}: {error.strerror or error}; put that "
            "right, then try again"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _told(holder: dict[str, Any]) -> str:
    """Who holds a lock, and what to wait for."""
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder["since"]))
        who = f"{holder['doing']} by process {holder['pid']} on {holder['host']} since {since}"
    except (KeyError, TypeError):  # just taken, or just given back
        who = "being changed by another process"
    left = holder.get("seconds_left")
    lease = "" if left is None else f" (if that process is gone, its lease ends in {left} s)"
    return f"{who}; wait until that is done{lease}"
