"""Opening of regular files only, because `open` would wait forever for a FIFO without a writer."""

from __future__ import annotations

import errno
import os
import stat

_KIND_NAMES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class SpecialFileError(OSError):
    """Error of a path that is not a regular file."""


def open_plain(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading and return its descriptor."""
    flags = getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        refuse_special(os.fstat(descriptor).st_mode, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refuse_special(mode: int, path: str | os.PathLike[str]) -> None:
    """Raise `SpecialFileError` if a file mode (`st_mode`) is not that of a regular file."""
    kind = stat.S_IFMT(mode)
    if kind != stat.S_IFREG:
        number = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
        message = f"it is {_KIND_NAMES.get(kind, 'something else')}, not a regular file"
        raise SpecialFileError(number, message, os.fspath(path))
