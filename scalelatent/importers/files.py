"""Open the files that importers read: on a disk or in an object store, plain or gzip."""

from __future__ import annotations

import gzip
import os
from typing import IO, cast

from scalelatent.errors import DataError
from scalelatent.storage.disk import is_local, locate
from scalelatent.storage.object_file import open_object
from scalelatent.storage.objects import ObjectLocation
from scalelatent.storage.plain_files import open_plain

PathOrUrl = str | os.PathLike[str]

_GZIP_MAGIC = b"\x1f\x8b"


def file_size(file: IO[bytes]) -> int:
    """Return the size of an open file in bytes; the position in the file does not change."""
    position = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(position)
    return size


def refuse_web(path: PathOrUrl, kind: str) -> None:
    """Raise `DataError` for a file on a web server."""
    if os.fspath(path).lower().startswith(("https://", "http://")):
        raise DataError(f"{kind} {os.fspath(path)} is on a web server; download it, and import the copy")


def open_file(path: PathOrUrl, kind: str) -> IO[bytes]:
    """Open a file on a disk or in an object store; raise `DataError` if that fails.

    `kind`, for example "npy file of rows", names the file in error messages.
    """
    refuse_web(path, kind)
    try:
        if not is_local(path):
            folder, _, key = os.fspath(path).rpartition("/")
            location = locate(folder)
            assert isinstance(location, ObjectLocation)
            return open_object(location, key)
        return open(path, "rb", opener=lambda name, _: open_plain(name))
    except FileNotFoundError as error:
        raise DataError(f"{kind} {os.fspath(path)} does not exist; check the path") from error
    except OSError as error:
        raise DataError(
            f"{kind} {os.fspath(path)} cannot be read: {error.strerror}; check the path"
        ) from error


def open_maybe_gzip(path: PathOrUrl, kind: str) -> IO[bytes]:
    """Open a file like `open_file`, and unpack it if its first bytes are those of gzip."""
    raw = open_file(path, kind)
    try:
        is_packed = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        return cast("IO[bytes]", _GzipFile(raw)) if is_packed else raw
    except BaseException:
        raw.close()
        raise


def is_gzip(file: IO[bytes]) -> bool:
    """Return whether a file from `open_maybe_gzip` is unpacked while it is read."""
    return isinstance(file, gzip.GzipFile)


class _GzipFile(gzip.GzipFile):
    """Gzip file that also closes the packed file."""

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__(fileobj=raw)
        self._raw = raw

    def close(self) -> None:
        super().close()
        self._raw.close()
