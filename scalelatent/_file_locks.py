"""Locks of the operating system on open files; the system releases a lock when its process ends.

The package filelock does not suffice: these functions lock a file that is open already, support shared locks,
and distinguish a file system without locks (None) from a lock of another process (False).
"""

from __future__ import annotations

import contextlib
import errno
import time

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Error numbers of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_POLL_SECONDS = 0.01


def lock_file(file: int, patience: float = 0.0, *, shared: bool = False) -> bool | None:
    """Lock an open file.

    Return False if another process held the lock for `patience` seconds, None if the system has no locks.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            if fcntl is None:
                return None
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise
        else:
            return True


def unlock_file(file: int) -> None:
    """Unlock a file. Closing it would not unlock it if a forked process has it open as well."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
