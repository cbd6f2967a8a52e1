"""Objects of an object store as readable files: each read requests a range of bytes, with retries."""

from __future__ import annotations

import io
from typing import IO, TYPE_CHECKING, cast

if TYPE_CHECKING:
    from .objects import ObjectLocation

_BUFFER_BYTES = 4 << 20


def open_object(location: ObjectLocation, key: str) -> IO[bytes]:
    """Open an object for reading; raise `FileNotFoundError` if there is no object."""
    found = location.stamp(key)
    if found is None:
        raise FileNotFoundError(location.name_of(key))
    return cast("IO[bytes]", io.BufferedReader(_ObjectFile(location, key, int(found[1])), _BUFFER_BYTES))


class _ObjectFile(io.RawIOBase):
    """Unbuffered file that requests a range for each read; `open_object` adds a buffer of 4 MiB."""

    def __init__(self, location: ObjectLocation, key: str, size: int) -> None:
        self._location, self._key, self._size, self._at = location, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = min(len(buffer), self._size - self._at)
        if count <= 0:
            return 0
        part = self._location.read_range(self._key, self._at, count)
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)
