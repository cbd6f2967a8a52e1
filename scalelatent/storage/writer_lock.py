"""One writer at a time for a stored dataset that changes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

from scalelatent.errors import DataError

from .disk import Location
from .plain_files import refuse_special

if TYPE_CHECKING:
    from .objects import ObjectLocation

__all__ = ["alone"]

_TRIES = 20
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # a file system without locks


@contextlib.contextmanager
def alone(location: Location, key: str, doing: str) -> Iterator[None]:
    """Hold the lock `key` of a place."""
    path = location.local_path(key)
    me = {"doing": doing, "pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    if path is None:
        from .objects import ObjectLocation

        assert isinstance(location, ObjectLocation)
        with _object(location, key, json.dumps({**me, "token": uuid.uuid4().hex}).encode()):
            yield
    else:
        with _file(path, location.url, json.dumps(me).encode()):
            yield


@contextlib.contextmanager
def _file(path: str, url: str, content: bytes) -> Iterator[None]:
    descriptor = _take(path, url)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content, 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _take(path: str, url: str) -> int:
    """Descriptor of the locked file."""
    import fcntl

    for _ in range(_TRIES):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                refuse_special(os.fstat(descriptor).st_mode, path)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise DataError(
                f"{url} cannot be changed: {path}: {error.strerror}; put that right, then try again"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            told = _told(os.pread(descriptor, 4096, 0))
            os.close(descriptor)
            raise DataError(f"{url} is {told}; wait until that is done, then try again") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)  # its holder removed it between the two calls: it locks nothing any more
    raise DataError(f"{url} is changed by others again and again; try again later")


@contextlib.contextmanager
def _object(location: ObjectLocation, key: str, content: bytes) -> Iterator[None]:
    # A first request whose answer was lost may have put it: then it is ours, and bears our token.
    if not location.create(key, content) and (found := location.read(key)) != content:
        raise DataError(
            f"{location.url} is {_told(found or b'')}; wait until that is done. If that process is gone, "
            f"remove {location.name_of(key)}, then try again"
        )
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            location.delete(key)


def _told(content: bytes) -> str:
    """Who holds a lock, in words."""
    try:
        held = json.loads(content)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(held["since"]))
        return f"{held['doing']} by process {held['pid']} on {held['host']} since {since}"
    except (ValueError, KeyError, TypeError):  # just taken, or just given back
        return "being changed by another process"
