"""Locks on locations: a run folder has one driver, a dataset has one writer.

On a disk a lock is a file that the operating system locks, so other processes see at once that the holder has
ended, also after SIGKILL. If the holder is on another host, or the file system has no locks, the modification
time of the file is a heartbeat: the lock is free after `STALE_SECONDS` without a heartbeat. In an object
store a lock is a lease (lease.py).
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

from .lease import HEARTBEAT_SECONDS, STALE_SECONDS, ObjectLock, has_ended, this_process
from .location import Location
from .objects import ObjectLocation
from .plain_files import open_plain, refuse_special

# Attempts to lock the file; an attempt fails if the last holder removes the file in the meantime.
_MAX_TRIES = 20
# Seconds to retry, because a process that only calls `holder` also locks the file, for milliseconds.
_PROBE_SECONDS = 0.25


class Lock(Protocol):
    """A lock that one process holds at a time."""

    @property
    def lost(self) -> bool:
        """True if another process has taken the lock from this one."""

    def acquire(self) -> None:
        """Take the lock; raise `BlockingIOError` if another process holds it."""

    def release(self) -> None:
        """Release the lock; do nothing if it is not held."""

    def holder(self) -> dict[str, Any] | None:
        """Return `{"pid", "host", …}` of the process that holds the lock, or None."""


def find_lock(location: Location, key: str, **doing: object) -> Lock:
    """Return the lock `key` of a location, not yet taken; `doing` describes the holder to other processes."""
    if isinstance(location, ObjectLocation):
        return ObjectLock(location, key, **doing)
    return FileLock(location.name_of(key), **doing)


class FileLock:
    """A lock that is a file on a disk."""

    def __init__(self, file: str | os.PathLike[str], **doing: object) -> None:
        self.file = Path(file)
        self.lost = False
        self._doing, self._token = doing, ""
        self._descriptor: int | None = None
        self._stop = threading.Event()
        self._heartbeat: threading.Thread | None = None

    def acquire(self) -> None:
        me = this_process() | self._doing
        self._token = me["token"]
        for _ in range(_MAX_TRIES):
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if self._lock_file(descriptor, json.dumps(me).encode()):
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        else:
            raise BlockingIOError(f"{self.file} was locked by other processes at each attempt")
        self._descriptor, self.lost = descriptor, False
        self._stop.clear()
        self._heartbeat = threading.Thread(target=self._keep_fresh, name="lock-heartbeat", daemon=True)
        self._heartbeat.start()

    def _lock_file(self, descriptor: int, record: bytes) -> bool:
        """Lock an open file; return False if its last holder has removed the file in the meantime."""
        refuse_special(os.fstat(descriptor).st_mode, self.file)
        locked = _file_locks.lock_file(descriptor, _PROBE_SECONDS)
        if locked is False or self._record_shows_holder(locked):
            raise BlockingIOError(f"{self.file} is locked by another process")
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
        if self._heartbeat is not None:
            self._heartbeat.join(timeout=5)
        # If the file system cannot be reached, the lock ends when the file is closed, or after STALE_SECONDS.
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
        except OSError:  # The file is read-only for this user, so only its content and age are known.
            return self._read_record() if self._is_fresh() else None
        try:
            locked = _file_locks.lock_file(descriptor, shared=True)
            if locked is False:
                return self._read_record() or {}
            return self._read_record() if self._record_shows_holder(locked) else None
        finally:
            os.close(descriptor)

    def _record_shows_holder(self, locked: bool | None) -> bool:
        """Return whether the lock file names a holder that may still run, although the system shows no lock.

        Such a holder is on another host, or on a file system without locks.
        """
        written = self._read_record()
        if not written or not self._is_fresh():
            return False
        return written.get("host") != socket.gethostname() or (locked is None and not has_ended(written))

    def _is_fresh(self) -> bool:
        try:
            return time.time() - self.file.stat().st_mtime < STALE_SECONDS
        except FileNotFoundError:
            return False

    def _is_mine(self) -> bool:
        written = self._read_record()
        return written is not None and written.get("token") == self._token

    def _read_record(self) -> dict[str, Any] | None:
        try:
            with open(open_plain(self.file)) as file:
                written = json.load(file)
        except (OSError, ValueError):
            return None
        return written if isinstance(written, dict) else None

    def _keep_fresh(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                if self._read_record() is not None and not self._is_mine():
                    self.lost = True
                    return
                os.utime(self.file)
            except OSError:  # The file cannot be reached now; if this lasts, the lock expires.
                continue


@contextmanager
def hold_lock(location: Location, key: str, doing: str) -> Iterator[None]:
    """Hold the lock `key` of a stored dataset while this process changes the dataset.

    If locks do not reach other hosts, two processes may hold the lock. Each change of a dataset therefore
    checks, before its last write, that the dataset is still in the state in which the change started.
    """
    lock = find_lock(location, key, doing=doing, since=time.time())
    try:
        lock.acquire()
    except BlockingIOError as error:
        holder = _describe_holder(lock.holder() or {})
        raise DataError(f"{location.url} is {holder}, then try again") from error
    except StoreError:
        raise
    except OSError as error:
        raise DataError(
            f"{location.url} cannot be changed: {location.name_of(key)}: {error.strerror or error}; "
            "correct this problem, then try again"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _describe_holder(holder: dict[str, Any]) -> str:
    """Return text for an error message: who holds a lock, and how long to wait."""
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder["since"]))
        who = f"{holder['doing']} by process {holder['pid']} on {holder['host']} since {since}"
    except (KeyError, TypeError):  # The lock was taken or released just now.
        who = "being changed by another process"
    seconds = holder.get("seconds_left")
    lease = "" if seconds is None else f" (if that process has ended, its lease ends in {seconds} s)"
    return f"{who}; wait until that process has finished{lease}"
