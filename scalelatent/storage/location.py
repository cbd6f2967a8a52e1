"""Interface of all locations: folders on disks (disk.py) and prefixes in object stores (objects.py)."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from zarr.abc.store import Store

    from .access import Access

FROM_ENVIRONMENT = (
    "credentials come from the environment (for s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "AWS_PROFILE with ~/.aws/credentials; for az: AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY), "
    "never from an address or a job file"
)

REMOVED = "scalelatent-removed"
"""Attribute 'format' of a dataset during its removal; it remains only if the removal was interrupted."""
_BEING_REMOVED = json.dumps(
    {"zarr_format": 3, "node_type": "group", "attributes": {"format": REMOVED}}
).encode()


class Location(ABC):
    """A folder with a url; keys are relative to the folder, with `/` between parts."""

    shared: bool = True
    access: Access | None = None
    reads_at_once: int = 1

    def __init__(self, url: str) -> None:
        self.url = url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @abstractmethod
    def at(self, key: str) -> Location:
        """Return the location of the folder `key` below this one."""

    @abstractmethod
    def zarr_store(self, *, read_only: bool) -> Store:
        """Return the zarr store of this location."""

    def make(self) -> None:  # noqa: B027 - object stores have no folders
        """Create the folder, if the storage has folders; keep existing content."""

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """Return the content of a file, or None if there is no file."""

    @abstractmethod
    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes from `start` (negative: from the end), fewer if the file is shorter."""

    def read_ranges(self, ranges: Sequence[tuple[str, int, int] | str]) -> list[bytes]:
        """Return the bytes of several ranges `(key, start, length)` or whole files `key`, in one call."""
        return [self._read_item(item) for item in ranges]

    def _read_item(self, item: tuple[str, int, int] | str) -> bytes:
        if not isinstance(item, str):
            return self.read_range(*item)
        data = self.read(item)
        if data is None:
            raise FileNotFoundError(self.name_of(item))
        return data

    @abstractmethod
    def write(self, key: str, data: bytes, *, durable: bool = False) -> None:
        """Write a small file atomically: a reader sees the old or the new content, never a part."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Create a small file atomically; return False if it exists.

        If several writers try, one succeeds. Each writer must give different bytes, because it recognises its
        own file by the content.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete a file; do nothing if there is no file."""

    @abstractmethod
    def delete_tree(self, prefix: str) -> None:
        """Delete all files below a prefix; do nothing if there are no files."""

    @abstractmethod
    def keys(self, prefix: str) -> list[str]:
        """Return the sorted names of the files and folders directly below a prefix."""

    @abstractmethod
    def has(self, key: str) -> bool:
        """Return whether there is a file with this key."""

    def is_empty(self) -> bool:
        """Return whether this location has no content."""
        return not self.keys("")

    @abstractmethod
    def stamp(self, key: str) -> Hashable:
        """Return a hashable value that changes when the file is written again; None without a file."""

    @abstractmethod
    def replacing(self) -> contextlib.AbstractContextManager[Location]:
        """Yield an empty location; at the end of the ``with`` block, its content replaces the old content.

        The caller writes the final `zarr.json` last, so that an interrupted write does not look complete.
        """

    def clear(self, *, whole: bool = True) -> None:
        """Delete all content; with `whole`, first mark the dataset as being removed."""
        if whole and self.has("zarr.json"):
            try:
                self.write("zarr.json", _BEING_REMOVED)
            except OSError:  # On a full disk nothing can be written, so delete the file instead.
                self.delete("zarr.json")
        for name in self.keys(""):
            if name != "zarr.json":
                self.delete_tree(name)
        self.delete("zarr.json")
        self.delete_tree("")

    def remove_folders(self) -> None:  # noqa: B027 - object stores have no folders
        """Remove this folder and its parent folder if they are empty."""

    def local_path(self, key: str) -> str | None:
        """Return the path of the key's file if it can be opened as a local file, else None."""
        return None

    def free_bytes(self) -> int | None:
        """Return the free bytes of this location, or None if they are not known."""
        return None

    def sync(self, key: str) -> None:
        """Wait until a written file survives a power failure; a written object survives at once."""
        if not self.has(key):
            raise FileNotFoundError(self.name_of(key))

    def name_of(self, key: str) -> str:
        """Return the path or address of the file of a key, for messages."""
        return self.local_path(key) or f"{self.url}/{key}"
