"""What every place can do: disks (disk.py) and object stores (objects.py)."""

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

__all__ = ["FROM_ENVIRONMENT", "REMOVED", "Location"]

FROM_ENVIRONMENT = (
    "credentials come from the environment (for s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "AWS_PROFILE with ~/.aws/credentials; for az: AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY), "
    "never from an address or a job file"
)

REMOVED = "scalelatent-removed"
"""Attribute 'format' of what is being removed; there only while that lasts, or after it was stopped."""
_BEING_REMOVED = json.dumps(
    {"zarr_format": 3, "node_type": "group", "attributes": {"format": REMOVED}}
).encode()


class Location(ABC):
    """A folder, by its url; keys are relative to it, with `/` between parts."""

    shared: bool = True
    access: Access | None = None
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
        """Its zarr store."""

    @abstractmethod
    def make(self) -> None:
        """Make the folder, where the place has folders; what is there stays."""

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """A file whole, or None where there is none."""

    @abstractmethod
    def read_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from `start` on (less than 0: from the end), fewer where the file is shorter."""

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
        """Write a small file whole: a reader sees the old one or the new one, never a part."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Write a small file whole where none lies; False where one does. Of several, one succeeds: no two
        may give the same bytes, by which a writer knows its own again."""

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
    def stamp(self, key: str) -> Hashable:
        """Something hashable that changes when the file is written again."""

    @abstractmethod
    def replacing(self) -> contextlib.AbstractContextManager[Location]:
        """Where to write what replaces the content of this place; its `zarr.json` has to be written last."""

    def clear(self, *, whole: bool = True) -> None:
        """Delete everything here."""
        if whole and self.has("zarr.json"):
            try:
                self.write("zarr.json", _BEING_REMOVED)
            except OSError:  # a full disk: then there is nothing left that says what this was
                self.delete("zarr.json")
        for name in self.keys(""):
            if name != "zarr.json":
                self.delete_tree(name)
        self.delete("zarr.json")
        self.delete_tree("")

    @abstractmethod
    def remove_folders(self) -> None:
        """Remove this folder and the one above it where they are empty."""

    def local_path(self, key: str) -> str | None:
        """Path of the key's file where it can be opened as a local file, else None."""
        return None

    def free_bytes(self) -> int | None:
        """Bytes that can still be written here, or None where that is not known."""
        return None

    def sync(self, key: str) -> None:
        """Wait until a file that was written outlives a power failure (objects do once they are put)."""
        if not self.has(key):
            raise FileNotFoundError(self.name_of(key))

    def name_of(self, key: str) -> str:
        """Path or address of the file of a key."""
        return self.local_path(key) or f"{self.url}/{key}"
