"""Locations on a disk, and `locate`, which returns the location of an address of any kind."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from scalelatent.errors import DataError, StoreError

from .location import FROM_ENVIRONMENT, REMOVED, Location
from .objects import ObjectLocation
from .plain_files import open_plain

if TYPE_CHECKING:
    from collections.abc import Hashable

    from zarr.abc.store import Store

__all__ = [
    "REMOVED",
    "LocalLocation",
    "Location",
    "check_address",
    "file_name",
    "is_local",
    "locate",
]


class LocalLocation(Location):
    """A folder on a file system of this machine (`/path`, `relative/path`, `file:///path`)."""

    def __init__(self, url: str) -> None:
        path = _path_of(url)
        if "\0" in path:
            raise StoreError(f"{path!r} is not a path: it contains a NUL character; remove it")
        self.path = Path(os.path.abspath(os.path.expanduser(path)))
        super().__init__(str(self.path))

    def at(self, key: str) -> LocalLocation:
        return LocalLocation(str(self.path / key))

    def zarr_store(self, *, read_only: bool) -> Store:
        from .zarrstore import PlainStore

        return PlainStore(self.path, read_only=read_only)

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def read(self, key: str) -> bytes | None:
        try:
            with open(open_plain(self.path / key), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _unreadable_error(self.path / key, error) from error

    def read_range(self, key: str, start: int, length: int) -> bytes:
        with open(open_plain(self.path / key), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(start if start >= 0 else max(0, size + start))
            return file.read(length)

    def write(self, key: str, data: bytes, *, durable: bool = False) -> None:
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

    def create(self, key: str, data: bytes) -> bool:
        path = self.path / key
        aside = f".{path.name}.{uuid.uuid4().hex[:12]}.partial"
        self.write(str(path.with_name(aside)), data, durable=True)
        try:
            os.link(path.with_name(aside), path)
        except FileExistsError:
            return False
        except OSError:  # The file system has no links; a reader may then see a partial file.
            try:
                with open(path, "xb") as file:
                    file.write(data)
            except FileExistsError:
                return False
        finally:
            path.with_name(aside).unlink(missing_ok=True)
        _sync_folder(path.parent)
        return True

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self.path / key).unlink()

    def delete_tree(self, prefix: str) -> None:
        path = self.path / prefix
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif prefix:  # If the location itself is a link, the link is kept.
            self.delete(prefix)

    def keys(self, prefix: str) -> list[str]:
        try:
            return sorted(p.name for p in (self.path / prefix).iterdir() if not p.name.endswith(".partial"))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unreadable_error(self.path / prefix, error) from error

    def has(self, key: str) -> bool:
        try:
            return stat.S_ISREG(os.stat(self.path / key).st_mode)
        except PermissionError as error:
            raise _unreadable_error(self.path / key, error) from error
        except OSError:  # Links that form a circle, and names that are too long, count as missing files.
            return False

    def is_empty(self) -> bool:
        try:
            self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return not self.path.is_symlink()
        except OSError as error:
            raise _unreadable_error(self.path, error) from error
        # A writer that was killed may have left partial files, which are no content.
        return self.path.is_dir() and not self.keys("")

    def stamp(self, key: str) -> Hashable:
        try:
            status = (self.path / key).stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    @contextlib.contextmanager
    def replacing(self) -> Iterator[Location]:
        aside = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex[:8]}")
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            yield LocalLocation(str(aside))
            old = aside.with_name(f"{aside.name}.old")
            _exchange(aside, self.path, old)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        # Remove the old content last, because `_exchange` restores the old content after an error.
        if old.is_symlink():
            old.unlink()
        else:
            shutil.rmtree(old, ignore_errors=True)

    def remove_folders(self) -> None:
        with contextlib.suppress(OSError):
            if self.path.exists():
                self.path.rmdir()
            self.path.parent.rmdir()

    def local_path(self, key: str) -> str | None:
        return os.path.join(self.path, key) if key else str(self.path)

    def free_bytes(self) -> int | None:
        for folder in (self.path, *self.path.parents):
            if folder.exists():
                return shutil.disk_usage(folder).free
        return None

    def sync(self, key: str) -> None:
        with open(open_plain(self.path / key), "rb") as file:
            os.fsync(file.fileno())
        _sync_folder((self.path / key).parent)


_NEXT_STEPS = {
    errno.ENAMETOOLONG: "shorten the name, or move it to a shorter path",
    errno.ELOOP: "this link leads back to itself: remove it",
}


def _unreadable_error(path: Path, error: OSError) -> StoreError:
    step = _NEXT_STEPS.get(error.errno or 0, "let this user read it")
    return StoreError(f"{path} cannot be read: {error.strerror or error}; {step}, or choose another place")


def _exchange(new: Path, location: Path, old: Path) -> None:
    """Rename `location` to `old` and `new` to `location`; if the second rename fails, undo the first one."""
    try:
        os.replace(location, old)
    except FileNotFoundError:
        os.replace(new, location)
        return
    try:
        os.replace(new, location)
    except BaseException:
        if not os.path.lexists(location):
            os.replace(old, location)
        raise


def _sync_folder(path: Path) -> None:
    """Make a rename durable; do nothing on file systems that cannot sync a folder."""
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


def _path_of(url: str) -> str:
    """Return the path of a plain path or of a `file://` address."""
    if url[:7].lower() != "file://":
        return url
    return unquote(url[7:].removeprefix("localhost") if url[7:].startswith("localhost/") else url[7:])


def is_local(url: str | os.PathLike[str]) -> bool:
    """Return whether an address names a local file or folder."""
    text = os.fspath(url)
    return "://" not in text or text.lower().startswith("file://")


def file_name(path: str | os.PathLike[str]) -> str:
    """Return the last part of a path or address, such as "rows.zarr"."""
    return Path(path).name


_SECRET_OPTIONS = re.compile(r"key|secret|token|passw|credential|sig\b|signature|sas\b", re.IGNORECASE)
# Azure addresses have the form `container@account`; a colon before the `@` means user and password.
_AZURE_SCHEMES = ("abfs", "abfss", "az", "adl", "wasb", "wasbs")


def check_address(url: str) -> None:
    """Raise `StoreError` for an address that contains credentials or a query; the message hides both."""
    scheme, mark, rest = url.partition("://")
    if not mark or is_local(url):
        return
    host, slash, path = rest.partition("/")
    user, at, bucket = host.rpartition("@")
    azure = scheme.lower() in _AZURE_SCHEMES and ":" not in user
    clean, query, options = f"{bucket if at and not azure else host}{slash}{path}".partition("?")
    shown = f"{scheme}://{'…@' if at and not azure else ''}{clean}{'?…' if query else ''}"
    if (at and not azure) or (query and _SECRET_OPTIONS.search(options)):
        raise StoreError(f"the address {shown!r} contains credentials: remove them; {FROM_ENVIRONMENT}")
    if query:
        raise StoreError(f"the address {shown!r} has a query ('?…'), which is not supported: remove it")


def locate(url: str | os.PathLike[str] | Location) -> Location:
    """Return the location of a path or url; a location is returned unchanged."""
    if isinstance(url, Location):
        return url
    text = os.fspath(url)
    if not isinstance(text, str) or not text:
        raise DataError(f"{url!r} is not an address: give a path or an address such as 's3://bucket/name'")
    if is_local(text):
        return LocalLocation(text)
    check_address(text)
    return ObjectLocation(text)
