"""The system's lock on an open file, which ends with its process however that ends.

Of our own, not filelock's: a lock is taken on a descriptor that is open already (its record is read and
written under the lock, and it is compared with the file of that name), shared by who only asks for the
holder, and a file system without locks (None) is told from a lock that is held.
"""

from __future__ import annotations

import contextlib
import errno
import time

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_POLL_SECONDS = 0.01


def take(file: int, patience: float = 0.0, *, shared: bool = False) -> bool | None:
    """Lock a file: False where another process holds it for `patience` seconds, None without locks here."""
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


def give_back(file: int) -> None:
    """Unlock a file; closing it would not do where a process forked meanwhile has it open, too."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
