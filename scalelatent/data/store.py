"""Where things lie: datasets, run folders and models, on a disk or in an object store.

A `Location` is a folder by its url, whatever the url's scheme. Everything that scalelatent keeps goes through
one: it hands zarr its store, and does what is needed beside zarr: read and write a small file whole, list,
delete. Disks are here, object stores in objects.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelatent.errors import DataError, StoreError

if TYPE_CHECKING:
    from zarr.abc.store import Store

__all__ = ["LocalLocation", "Location", "check_address", "is_local", "locate"]


class Location(ABC):
    """A folder, by its url; keys are relative to it, with `/` between parts.

    Attributes
    ----------
    url : str
        Its name for people and for `locate`.
    shared : bool
        Whether another process (on this machine or one that sees the same files) can open it.
    reads_at_once : int
        Reads in flight that pay: 1 for a disk, more where each read waits for a network.
    """

    shared: bool = True
    reads_at_once: int = 1

    def __init__(self, url: str) -> None:
        self.url = url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @abstractmethod
    def at(self, key: str) -> Location:
        """The folder of a key below this one."""

    @abstractmethod
    def zarr_store(self, *, read_only: bool) -> Store:
        """The zarr store of this place."""

    @abstractmethod
    def make(self) -> None:
        """Make the folder where the place knows folders; what is there stays."""

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """A file whole, or None where there is none."""

    @abstractmethod
    def read_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from `start` on (less than 0: from the end), fewer where the file is shorter.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        """

    def read_ranges(self, wanted: Sequence[tuple[str, int, int] | str]) -> list[bytes]:
        """Several ranges `(key, start, length)`, or whole files `key`, as one call; see `read_range`."""
        return [self._one(item) for item in wanted]

    def _one(self, item: tuple[str, int, int] | str) -> bytes:
        if not isinstance(item, str):
            return self.read_range(*item)
        data = self.read(item)
        if data is None:
            raise FileNotFoundError(self.name_of(item))
        return data

    @abstractmethod
    def write(self, key: str, data: bytes, *, durable: bool = False) -> None:
        """Write a small file whole: a reader sees the old one or the new one, never a part.

        `durable` waits until it outlives a power failure (object stores always do).
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete a file; none there is no error."""

    @abstractmethod
    def delete_tree(self, prefix: str) -> None:
        """Delete everything below a prefix; nothing there is no error."""

    @abstractmethod
    def keys(self, prefix: str) -> list[str]:
        """Names of the files and folders directly below a prefix, sorted."""

    @abstractmethod
    def has(self, key: str) -> bool:
        """Whether there is a file with this key."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing at all lies here."""

    @abstractmethod
    def stamp(self, key: str) -> Any:
        """Something hashable that changes when the file is written anew."""

    @abstractmethod
    def replacing(self) -> contextlib.AbstractContextManager[Location]:
        """Where to write what takes this place's content over; its `zarr.json` has to be written last.

        A disk gives a folder aside, renamed at the end. An object store knows no rename: it gives the place
        itself, emptied, and what is there counts only with its `zarr.json`.
        """

    def clear(self) -> None:
        """Delete everything here: first what says that it is whole."""
        self.delete("zarr.json")
        self.delete_tree("")

    @abstractmethod
    def remove_folders(self) -> None:
        """Remove this folder and the one above it where they are empty and the place knows folders."""

    def local_path(self, key: str) -> str | None:
        """Path of the key's file where it can be opened as a local file, else None."""
        return None

    def free_bytes(self) -> int | None:
        """Bytes that can still be written here, or None where nobody knows."""
        return None

    def sync(self, key: str) -> None:
        """Wait until a file that was written outlives a power failure (objects do once they are put).

        Raises
        ------
        FileNotFoundError
            There is no such file.
        """
        if not self.has(key):
            raise FileNotFoundError(self.name_of(key))

    def name_of(self, key: str) -> str:
        """What a person would call the file of a key."""
        return self.local_path(key) or f"{self.url}/{key}"


class LocalLocation(Location):
    """A folder on a file system of this machine (`/path`, `relative/path`, `file:///path`)."""

    def __init__(self, url: str) -> None:
        path = url.removeprefix("file://")
        self.path = Path(os.path.abspath(os.path.expanduser(path)))
        super().__init__(str(self.path))

    def at(self, key: str) -> LocalLocation:
        """The folder of a key below this one."""
        return LocalLocation(str(self.path / key))

    def zarr_store(self, *, read_only: bool) -> Store:
        """The zarr store of this place."""
        from zarr.storage import LocalStore

        return LocalStore(self.path, read_only=read_only)

    def make(self) -> None:
        """Make the folder; what is there stays."""
        self.path.mkdir(parents=True, exist_ok=True)

    def read(self, key: str) -> bytes | None:
        """A file whole, or None where there is none."""
        try:
            return (self.path / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from `start` on (less than 0: from the end), fewer where the file is shorter."""
        with open(self.path / key, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(start if start >= 0 else max(0, size + start))
            return file.read(length)

    def write(self, key: str, data: bytes, *, durable: bool = False) -> None:
        """Write a small file whole: a reader sees the old one or the new one, never a part."""
        path = self.path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
        try:
            with open(aside, "wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
        if durable:
            _sync_folder(path.parent)

    def delete(self, key: str) -> None:
        """Delete a file; none there is no error."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self.path / key).unlink()

    def delete_tree(self, prefix: str) -> None:
        """Delete everything below a prefix; nothing there is no error."""
        path = self.path / prefix
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            self.delete(prefix)

    def keys(self, prefix: str) -> list[str]:
        """Names of the files and folders directly below a prefix, sorted."""
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

    @contextlib.contextmanager
    def replacing(self) -> Iterator[Location]:
        """A folder aside; it takes this one's name at the end, and goes where that is not reached."""
        aside = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex[:8]}")
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            yield LocalLocation(str(aside))
            if self.path.is_dir():
                shutil.rmtree(self.path)
            os.replace(aside, self.path)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def remove_folders(self) -> None:
        """Remove this folder and the one above it where they are empty."""
        with contextlib.suppress(OSError):
            if self.path.exists():
                self.path.rmdir()
            self.path.parent.rmdir()

    def local_path(self, key: str) -> str | None:
        """Path of the key's file where it can be opened as a local file, else None."""
        return os.path.join(self.path, key) if key else str(self.path)

    def free_bytes(self) -> int | None:
        """Bytes that can still be written here, or None where nobody knows."""
        for folder in (self.path, *self.path.parents):
            if folder.exists():
                return shutil.disk_usage(folder).free
        return None

    def sync(self, key: str) -> None:
        """Wait until a file that was written outlives a power failure."""
        with open(self.path / key, "rb") as file:
            os.fsync(file.fileno())
        _sync_folder((self.path / key).parent)


def _sync_folder(path: Path) -> None:
    """Make a rename durable; file systems that cannot sync a folder keep their own order."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def is_local(url: str | os.PathLike[str]) -> bool:
    """Whether an address is that of a local file or folder.

    Examples
    --------
    >>> is_local("runs/a"), is_local("s3://bucket/a")
    (True, False)
    """
    text = os.fspath(url)
    return "://" not in text or text.lower().startswith("file://")


# `container@account` is how Azure writes an address; with a colon before the `@` it is user and password.
_SECRETS = re.compile(r"key|secret|token|passw|credential|sig\b|signature|sas\b", re.IGNORECASE)
_AZURE = ("abfs", "abfss", "az", "adl", "wasb", "wasbs")
FROM_ENVIRONMENT = (
    "credentials come from the environment (for s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "AWS_PROFILE with ~/.aws/credentials), never from an address or a job file"
)


def check_address(url: str) -> None:
    """Refuse an address that carries credentials; the message does not repeat them.

    Parameters
    ----------
    url : str

    Raises
    ------
    StoreError
        A user or password before the host, or a query or fragment.

    Examples
    --------
    >>> check_address("s3://bucket/mnist.zarr")
    >>> check_address("s3://me:my-password@bucket/mnist.zarr")
    Traceback (most recent call last):
    ...
    scalelatent.errors.StoreError: the address 's3://…@bucket/mnist.zarr' carries credentials: ...
    """
    scheme, mark, rest = url.partition("://")
    if not mark or is_local(url):
        return
    host, slash, path = rest.partition("/")
    user, at, bucket = host.rpartition("@")
    azure = scheme.lower() in _AZURE and ":" not in user
    clean, query, options = f"{bucket if at and not azure else host}{slash}{path}".partition("?")
    shown = f"{scheme}://{'…@' if at and not azure else ''}{clean}{'?…' if query else ''}"
    if (at and not azure) or (query and _SECRETS.search(options)):
        raise StoreError(f"the address {shown!r} carries credentials: take them out; {FROM_ENVIRONMENT}")
    if query:
        raise StoreError(f"the address {shown!r} has a query ('?…'), which means nothing here: leave it out")


def locate(url: str | os.PathLike[str] | Location) -> Location:
    """The place a url names.

    Parameters
    ----------
    url : str or path-like
        A local path, `file:///path`, `s3://bucket/key`, `gs://bucket/key`, `memory://name`, or another
        protocol that fsspec knows. A `Location` is given back as it is.

    Returns
    -------
    Location
        The place; nothing is opened or made.

    Raises
    ------
    StoreError
        No address, one that carries credentials, an unknown protocol, or one whose package is not installed.

    Examples
    --------
    >>> locate("memory://trial").at("model.zarr").url
    'memory://trial/model.zarr'
    """
    if isinstance(url, Location):
        return url
    text = os.fspath(url)
    if not isinstance(text, str) or not text:
        raise DataError(f"{url!r} is not an address: give a path or a url such as 's3://bucket/name'")
    if is_local(text):
        return LocalLocation(text)
    check_address(text)
    from .objects import ObjectLocation

    return ObjectLocation(text)
