"""One driver per run folder: a lock that dies with its process."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .plain_files import open_plain, refuse_special

if TYPE_CHECKING:
    from .disk import Location
    from .lease import ObjectLock

__all__ = ["FolderLock", "folder_lock"]

HEARTBEAT_SECONDS = 15.0
STALE_SECONDS = 90.0


def folder_lock(place: Location) -> FolderLock | ObjectLock:
    """The lock of a run folder, of the kind its place has."""
    from .objects import ObjectLocation

    if isinstance(place, ObjectLocation):
        from .lease import ObjectLock

        return ObjectLock(place)
    return FolderLock(place.name_of(""))


class FolderLock:
    """The lock of one folder, in its file ``lock``."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.file = Path(folder, "lock")
        self.lost = False
        self._token = uuid.uuid4().hex
        self._descriptor: int | None = None
        self._stop = threading.Event()
        self._beat: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock."""
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            refuse_special(os.fstat(descriptor).st_mode, self.file)
            _take(descriptor)
            if self._held_elsewhere():
                raise BlockingIOError(f"{self.file} is held on another host")
            os.ftruncate(descriptor, 0)
            who = {"pid": os.getpid(), "host": socket.gethostname(), "token": self._token}
            os.write(descriptor, json.dumps(who).encode())
            os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, self.lost = descriptor, False
        self._stop.clear()
        self._beat = threading.Thread(target=self._keep_fresh, name="run-folder-heartbeat", daemon=True)
        self._beat.start()

    def release(self) -> None:
        """Give the lock back; safe to call when it is not held."""
        if self._descriptor is None:
            return
        self._stop.set()
        if self._beat is not None:
            self._beat.join(timeout=5)
        try:
            # The file stays: unlinking it would let two processes lock two files of one name.
            if not self.lost:
                os.ftruncate(self._descriptor, 0)
        except OSError:  # a file system out of reach: the lock ends with the descriptor, or by silence
            pass
        finally:
            os.close(self._descriptor)
            self._descriptor = None

    def holder(self) -> dict[str, Any] | None:
        """Return ``{"pid", "host"}`` of the process that holds the lock, or None."""
        try:
            descriptor = os.open(self.file, os.O_RDWR)
        except FileNotFoundError:
            return None
        except OSError:  # a folder one may read but not write: the file's own word must do
            return self._written() if self._fresh() else None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._written() or {}
        else:
            return self._written() if self._held_elsewhere() else None
        finally:
            os.close(descriptor)

    def _held_elsewhere(self) -> bool:
        written = self._written()
        return written is not None and written.get("host") != socket.gethostname() and self._fresh()

    def _fresh(self) -> bool:
        return time.time() - self.file.stat().st_mtime < STALE_SECONDS

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
                written = self._written()
                if written is not None and written.get("token") != self._token:
                    self.lost = True
                    return
                os.utime(self.file)
            except OSError:  # out of reach for now; if it stays so, the lock ends by silence
                continue


def _take(descriptor: int) -> None:
    """Take the lock, patient for the moment in which a `status` looks at it."""
    for attempt in range(6):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt == 5:
                raise
            time.sleep(0.05)
