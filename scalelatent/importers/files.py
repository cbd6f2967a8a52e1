"""The files that importers read: opening them, and which array of one holds the rows and which the labels."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, cast

from scalelatent.errors import DataError
from scalelatent.storage.disk import file_name, is_https, is_local, locate
from scalelatent.storage.object_file import open_object
from scalelatent.storage.objects import ObjectLocation
from scalelatent.storage.plain_files import open_plain

_MAX_SHOWN = 20


def find_keys(
    arrays: Sequence[str] | Mapping[str, str], x: str | None, y: str | None, where: str
) -> tuple[str, str | None]:
    """Names of the arrays that hold rows and labels; labels may be absent."""
    rows = find_key(arrays, "x", x, where)
    assert rows is not None
    group = rows.rpartition("/")[0]
    beside = [name for name in arrays if name.rpartition("/")[0] == group]
    return rows, find_key(arrays if y else beside, "y", y, where)


def find_key(arrays: Sequence[str] | Mapping[str, str], role: str, key: str | None, where: str) -> str | None:
    """Name of the array that plays a role, "x" or "y"; labels may be absent. See `find_keys`."""
    if key:
        found = [name for name in arrays if name == key.strip("/")]
    else:
        found = [name for name in arrays if name.rpartition("/")[2].lower() == role]
    if len(found) == 1:
        return found[0]
    if not key and not found and role == "y":
        return None
    if key:
        problem = f"has no array {key!r}"
    else:
        problem = f"has {len(found)} arrays that could be {role!r}" if found else f"has no array {role!r}"
    raise DataError(f"{where} {problem}; it holds {_list(arrays)}: name one with --{role} KEY ({role}='KEY')")


def _list(arrays: Sequence[str] | Mapping[str, str]) -> str:
    what = arrays if isinstance(arrays, Mapping) else {}
    names = [f"{name} {what[name]}" if name in what else name for name in arrays]
    rest = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return (", ".join(names[:_MAX_SHOWN]) or "nothing") + rest


_GZIP_MAGIC = b"\x1f\x8b"


_CHECKSUM = re.compile(r"(md5|sha1|sha256|sha512)=([0-9a-f]+)")
_DOWNLOAD_SECONDS = 60


def file_size(file: IO[bytes]) -> int:
    """Bytes of an open file, which stays where it is."""
    at = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(at)
    return size


def cache_folder(given: str | os.PathLike[str] | None = None) -> Path:
    import pooch

    return Path(given or os.environ.get("SCALELATENT_CACHE") or pooch.os_cache("scalelatent"))


def local_copy(address: str | os.PathLike[str], what: str) -> Path:
    """A file of a web server in the cache, downloaded if it is not there; the address has its checksum."""
    import pooch

    url, _, fragment = os.fspath(address).partition("#")
    given = _CHECKSUM.fullmatch(fragment.lower())
    if given is None:
        raise DataError(
            f"{what} {url}: a download needs a checksum, so that the rows are the same each "
            f"time; write it behind the address, {url}#sha256=…"
        )
    downloader = pooch.HTTPDownloader(timeout=_DOWNLOAD_SECONDS)
    checksum = f"{given[1]}:{given[2]}"
    name = f"{given[2][:16]}-{file_name(url)}"
    try:
        return Path(pooch.retrieve(url, checksum, name, cache_folder() / "downloads", downloader=downloader))
    except (OSError, ValueError) as error:  # of the network (requests); of the checksum
        raise DataError(
            f"{what} {url} could not be downloaded as the file with {checksum}: {error}; check "
            "address and checksum, or download it elsewhere and import the file"
        ) from error


def open_file(path: str | os.PathLike[str], what: str) -> IO[bytes]:
    """Open a file to read, on a disk, in an object store or of a web server, or say what is wrong with it."""
    if is_https(path):
        path = local_copy(path, what)
    try:
        if not is_local(path):
            folder, _, key = os.fspath(path).rpartition("/")
            place = locate(folder)
            assert isinstance(place, ObjectLocation)
            return open_object(place, key)
        return open(path, "rb", opener=lambda name, _: open_plain(name))
    except FileNotFoundError as error:
        raise DataError(f"{what} {os.fspath(path)} does not exist; check the path") from error
    except OSError as error:
        raise DataError(
            f"{what} {os.fspath(path)} cannot be read: {error.strerror}; check the path"
        ) from error


def open_maybe_gzip(path: str | os.PathLike[str], what: str) -> IO[bytes]:
    """Open a file to read that may be packed with gzip, which its content tells and not its name."""
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
