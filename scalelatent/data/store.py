"""Where a dataset lies: one small class per kind of place, chosen by the scheme of its url.

A `Location` hands zarr its store and does the few things the data layer needs beside zarr: read and write a
small file whole, list, delete. To add a kind of place (fsspec, obstore), write one class and enter it in
`SCHEMES`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from scalelatent.errors import DataError

if TYPE_CHECKING:
    from zarr.abc.store import Store

__all__ = ["SCHEMES", "LocalLocation", "Location", "MemoryLocation", "locate"]


class Location(ABC):
    """A place that holds one zarr hierarchy; keys are relative to it, with `/` between parts."""

    shared: bool
    """Whether another process (on this machine or one that sees the same files) can open it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @abstractmethod
    def zarr_store(self, *, read_only: bool) -> Store:
        """The zarr store of this place."""

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """A file whole, or None where there is none."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Write a small file whole: a reader sees the old one or the new one, never a part."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete a file or everything below a key; nothing there is no error."""

    @abstractmethod
    def keys(self, prefix: str) -> list[str]:
        """Names of the files directly below a prefix, sorted."""

    @abstractmethod
    def has(self, key: str) -> bool:
        """Whether there is a file with this key."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing at all lies here."""

    @abstractmethod
    def stamp(self, key: str) -> Any:
        """Something hashable that changes when the file is written anew."""

    def clear(self) -> None:
        """Delete everything here."""
        self.delete("")

    def local_path(self, key: str) -> str | None:
        """Path of the key's file where it can be opened as a local file, else None."""
        return None

    def free_bytes(self) -> int | None:
        """Bytes that can still be written here, or None where nobody knows."""
        return None

    def name_of(self, key: str) -> str:
        """What a person would call the file of a key."""
        return self.local_path(key) or f"{self.url}/{key}"


class LocalLocation(Location):
    """A folder on a file system of this machine (`/path`, `relative/path`, `file:///path`)."""

    shared = True

    def __init__(self, url: str) -> None:
        path = url.removeprefix("file://")
        self.path = Path(os.path.abspath(os.path.expanduser(path)))
        super().__init__(str(self.path))

    def zarr_store(self, *, read_only: bool) -> Store:
        """The zarr store of this place."""
        from zarr.storage import LocalStore

        return LocalStore(self.path, read_only=read_only)

    def read(self, key: str) -> bytes | None:
        """A file whole, or None where there is none."""
        try:
            return (self.path / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, key: str, data: bytes) -> None:
        """Write a small file whole: a reader sees the old one or the new one, never a part."""
        path = self.path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        try:
            aside.write_bytes(data)
            aside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise

    def delete(self, key: str) -> None:
        """Delete a file or everything below a key; nothing there is no error."""
        path = self.path / key
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def keys(self, prefix: str) -> list[str]:
        """Names of the files directly below a prefix, sorted."""
        try:
            return sorted(p.name for p in (self.path / prefix).iterdir() if not p.name.endswith(".partial"))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def has(self, key: str) -> bool:
        """Whether there is a file with this key."""
        return (self.path / key).is_file()

    def is_empty(self) -> bool:
        """Whether nothing at all lies here."""
        if not self.path.exists():
            return True
        return self.path.is_dir() and not any(self.path.iterdir())

    def stamp(self, key: str) -> Any:
        """Something hashable that changes when the file is written anew."""
        try:
            status = (self.path / key).stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def local_path(self, key: str) -> str | None:
        """Path of the key's file where it can be opened as a local file, else None."""
        return os.path.join(self.path, key)

    def free_bytes(self) -> int | None:
        """Bytes that can still be written here, or None where nobody knows."""
        for folder in (self.path, *self.path.parents):
            if folder.exists():
                return shutil.disk_usage(folder).free
        return None


class MemoryLocation(Location):
    """Memory of this process (`memory://name`): for tests and small work; lost when the process ends."""

    shared = False
    _stores: ClassVar[dict[str, dict[str, Any]]] = {}
    _lock = threading.Lock()

    def __init__(self, url: str) -> None:
        name = url.removeprefix("memory://").strip("/")
        if not name:
            raise DataError("'memory://' needs a name: write for example 'memory://trial'")
        super().__init__(f"memory://{name}")
        with self._lock:
            self._files = self._stores.setdefault(name, {})

    def zarr_store(self, *, read_only: bool) -> Store:
        """The zarr store of this place."""
        from zarr.storage import MemoryStore

        return MemoryStore(self._files, read_only=read_only)

    def read(self, key: str) -> bytes | None:
        """A file whole, or None where there is none."""
        buffer = self._files.get(key)
        return None if buffer is None else buffer.to_bytes()

    def write(self, key: str, data: bytes) -> None:
        """Write a small file whole: a reader sees the old one or the new one, never a part."""
        from zarr.core.buffer import default_buffer_prototype

        self._files[key] = default_buffer_prototype().buffer.from_bytes(data)

    def delete(self, key: str) -> None:
        """Delete a file or everything below a key; nothing there is no error."""
        for name in list(self._files):
            if key in ("", name) or name.startswith(key + "/"):
                self._files.pop(name, None)

    def keys(self, prefix: str) -> list[str]:
        """Names of the files directly below a prefix, sorted."""
        head = prefix.rstrip("/") + "/"
        return sorted({k[len(head) :].split("/")[0] for k in list(self._files) if k.startswith(head)})

    def has(self, key: str) -> bool:
        """Whether there is a file with this key."""
        return key in self._files

    def is_empty(self) -> bool:
        """Whether nothing at all lies here."""
        return not self._files

    def stamp(self, key: str) -> Any:
        """Something hashable that changes when the file is written anew."""
        return id(self._files.get(key))


SCHEMES: dict[str, type[Location]] = {"": LocalLocation, "file": LocalLocation, "memory": MemoryLocation}
"""Kinds of place by the scheme of their url."""


def locate(url: str | os.PathLike[str]) -> Location:
    """The place a url names.

    Parameters
    ----------
    url : str or path-like
        A local path, `file:///path` or `memory://name`.

    Returns
    -------
    Location
        The place; nothing is opened or made.

    Raises
    ------
    DataError
        The scheme is not one of `SCHEMES`.

    Examples
    --------
    >>> locate("memory://trial").url
    'memory://trial'
    """
    text = os.fspath(url)
    if not isinstance(text, str) or not text:
        raise DataError(f"{url!r} is not the address of a dataset: give a path or 'memory://name'")
    scheme = text.split("://", 1)[0].lower() if "://" in text else ""
    if scheme not in SCHEMES:
        known = ", ".join(sorted(f"{s}://" for s in SCHEMES if s))
        raise DataError(
            f"{text}: addresses with '{scheme}://' cannot be opened by this version; use a local path or "
            f"one of {known}"
        )
    return SCHEMES[scheme](text)
