"""Opening the files that importers read."""

from __future__ import annotations

import gzip
import os
from typing import IO, cast

from scalelatent.errors import DataError
from scalelatent.storage.plain_files import open_plain

__all__ = ["is_packed", "open_file", "open_maybe_gzip"]

_GZIP_MAGIC = b"\x1f\x8b"


def open_file(path: str | os.PathLike[str], what: str) -> IO[bytes]:
    """Open a file to read, or say what is wrong with it."""
    try:
        return open(path, "rb", opener=lambda name, _: open_plain(name))
    except FileNotFoundError as error:
        raise DataError(f"{what} {os.fspath(path)} does not exist; check the path") from error
    except OSError as error:
        raise DataError(
            f"{what} {os.fspath(path)} cannot be read: {error.strerror}; check the path"
        ) from error


def open_maybe_gzip(path: str | os.PathLike[str], what: str) -> IO[bytes]:
    """Open a file to read that may be packed with gzip, which its content tells and not its name.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with gzip.open(f"{folder}/a", "wb") as file:
    ...         _ = file.write(b"content")
    ...     with open_maybe_gzip(f"{folder}/a", "file") as file:
    ...         is_packed(file), file.read()
    (True, b'content')
    """
    raw = open_file(path, what)
    try:
        packed = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        return cast("IO[bytes]", _GzipFile(raw)) if packed else raw
    except BaseException:
        raw.close()
        raise


def is_packed(file: IO[bytes]) -> bool:
    """Whether a file of `open_maybe_gzip` is unpacked as it is read."""
    return isinstance(file, gzip.GzipFile)


class _GzipFile(gzip.GzipFile):
    """One that also closes the file below."""

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__(fileobj=raw)
        self._raw = raw

    def close(self) -> None:
        super().close()
        self._raw.close()
