"""Locations that need more than an address: fsspec options, or store objects of zarr."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from scalelatent.errors import DataError, StoreError

from .access import Access, known_access
from .disk import LocalLocation, check_address, is_local, locate
from .location import Location
from .objects import READS_AT_ONCE, ObjectLocation, scrub

if TYPE_CHECKING:
    from collections.abc import Hashable

    from zarr.abc.store import ByteRequest, Store

_T = TypeVar("_T")
# Id of the process that used obstore first. In a fork of this process obstore would wait forever.
_obstore_users: list[int] = []


def find_location(thing: Any, storage_options: Mapping[str, Any] | None = None) -> Location:
    """Return the location of an address, with fsspec options, or of a store of zarr, obstore or fsspec."""
    if isinstance(thing, (str, os.PathLike, Location)) and storage_options is None:
        return locate(thing)
    if isinstance(thing, (str, os.PathLike)):
        return _with_options(os.fspath(thing), storage_options or {})
    if storage_options is not None:
        raise DataError(
            f"storage_options apply to addresses only, but a {type(thing).__name__} was given: leave them out"
        )
    from zarr.storage import LocalStore, StorePath

    store, path = (thing.store, thing.path) if isinstance(thing, StorePath) else (_as_zarr_store(thing), "")
    if isinstance(store, LocalStore):
        return LocalLocation(os.path.join(store.root, path))
    return StoreLocation(Access.from_options({}, store), path)


def locate_recorded(url: str, mark: str | None) -> Location:
    """Return the location of an address and the mark of its access, both as stored in records."""
    if mark is None:
        return locate(url)
    access = known_access(mark)
    if access is None:
        raise DataError(
            f"{url} was opened with storage options or a store object, which "
            "run folders do not record: open it again with open_dataset, and pass the result"
        )
    if access.store is None:
        return ObjectLocation(url, access)
    return StoreLocation(access, url.removeprefix(_store_name(access.store)).strip("/"))


def _with_options(url: str, options: Mapping[str, Any]) -> Location:
    if is_local(url):
        raise DataError(
            f"{url} is on a disk, which has no storage_options: leave them out (they configure "
            "fsspec for addresses such as 's3://bucket/name')"
        )
    check_address(url)
    return ObjectLocation(url, Access.from_options(options))


def _as_zarr_store(thing: Any) -> Store:
    from zarr.abc.store import Store

    if isinstance(thing, Store):
        return thing
    kind = f"{type(thing).__module__}.{type(thing).__name__}"
    if kind == "fsspec.mapping.FSMap":
        from zarr.storage import FsspecStore

        return FsspecStore.from_mapper(thing, read_only=True)
    if kind.startswith("obstore."):
        from zarr.storage import ObjectStore

        return ObjectStore(thing, read_only=True)
    raise DataError(
        f"a {kind} is not a location: give a path, an address such "
        "as 's3://bucket/name', or a store of zarr, "
        "obstore or fsspec (fs.get_mapper(path))"
    )


class StoreLocation(Location):
    """A read-only folder of a zarr store."""

    # zarr runs all stores in one event loop, and the methods of this class make the caller's thread wait for
    # that loop. zarr itself reads from the store directly, because through these methods the loop would wait
    # for a thread that waits for the loop.

    access: Access

    def __init__(self, access: Access, path: str = "") -> None:
        from zarr.storage import ObjectStore, StorePath

        from .zarrstore import FolderStore

        name = _store_name(access.store)
        super().__init__(f"{name}/{path}" if path else name)
        self.access, self._path = access, path
        self.shared = not _in_memory(access.store)
        self._uses_obstore = isinstance(_unwrap(access.store), ObjectStore)
        self.reads_at_once = READS_AT_ONCE if self.shared else 1
        if self._uses_obstore and not _obstore_users:
            _obstore_users.append(os.getpid())
        self._store = FolderStore(access.store, path)
        self._wait("", StorePath.open(access.store, path="", mode=None))  # Some stores must be opened first.

    def __reduce__(self) -> tuple[object, ...]:
        return StoreLocation, (self.access, self._path)

    def at(self, key: str) -> StoreLocation:
        return StoreLocation(self.access, self._store.at(key))

    def zarr_store(self, *, read_only: bool) -> Store:
        return self._store if read_only else self._refuse()

    def read(self, key: str) -> bytes | None:
        return self._wait(key, self._get(key))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self._wait(key, self._part((key, start, length)))

    def read_ranges(self, ranges: Sequence[tuple[str, int, int] | str]) -> list[bytes]:
        async def parts() -> list[bytes]:
            return await asyncio.gather(*map(self._part, ranges))

        return self._wait("", parts()) if ranges else []

    def keys(self, prefix: str) -> list[str]:
        async def names() -> list[str]:
            return [name async for name in self._store.list_dir(prefix)]

        try:
            found = self._wait(prefix, names())
        except FileNotFoundError:
            return []
        return sorted({name.rstrip("/").rsplit("/", 1)[-1] for name in found} - {""})

    def has(self, key: str) -> bool:
        return self._wait(key, self._store.exists(key))

    def stamp(self, key: str) -> Hashable:
        data = self.read(key)
        return None if data is None else (hashlib.blake2b(data).hexdigest(), len(data))

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise StoreError(
            f"{self.url} is a store object, which can only be read: write to a path or an address"
        )

    make = write = create = delete = delete_tree = replacing = remove_folders = _refuse

    async def _get(self, key: str, part: ByteRequest | None = None) -> bytes | None:
        from zarr.core.buffer import default_buffer_prototype

        found = await self._store.get(key, default_buffer_prototype(), part)
        return None if found is None else found.to_bytes()

    async def _part(self, item: tuple[str, int, int] | str) -> bytes:
        from zarr.abc.store import RangeByteRequest, SuffixByteRequest

        key, start, length = (item, 0, None) if isinstance(item, str) else item
        part: ByteRequest | None = None
        if length is not None:
            part = RangeByteRequest(start, start + length) if start >= 0 else SuffixByteRequest(-start)
        found = await self._get(key, part)
        if found is None:
            raise FileNotFoundError(self.name_of(key))
        return found[:length]

    def _wait(self, key: str, answer: Coroutine[object, None, _T]) -> _T:
        """Wait for the answer of the store and return it; translate errors of its library."""
        from zarr.core.sync import sync

        if self._uses_obstore and _obstore_users[0] != os.getpid():
            answer.close()
            raise StoreError(
                f"{self.url}: obstore does not work in a process that was forked from a user of obstore. "
                "Start processes with 'spawn' or 'forkserver' (option multiprocessing_context of a torch "
                "DataLoader), or pass open_dataset the address instead of the store"
            )
        try:
            return sync(answer)
        except (FileNotFoundError, StoreError):
            raise
        except Exception as error:  # Each library has its own errors.
            name = self.name_of(key) if key else self.url
            raise StoreError(f"{name}: {type(error).__name__}: {scrub(error)}") from error


def _store_name(store: Store) -> str:
    """Return the name of a store in messages: its type and description, without credentials."""
    kind = type(store).__name__
    name = scrub(re.sub(r"^\w+://|[<>]", "", str(store)))
    name = re.sub(r"\?[^\s\"')]*", "?…", name)
    return f"store://{name if name.startswith(kind) else f'{kind}({name})'}"


def _unwrap(store: Any) -> Any:
    """Return the store inside all wrapper stores."""
    from zarr.storage import WrapperStore

    while isinstance(store, WrapperStore):
        store = store._store
    return store


def _in_memory(store: Store) -> bool:
    """Return whether the content of a store is in the memory of this process."""
    from zarr.storage import FsspecStore, MemoryStore, ObjectStore

    store = _unwrap(store)
    if isinstance(store, FsspecStore):
        protocol = store.fs.protocol
        return "memory" in ((protocol,) if isinstance(protocol, str) else protocol)
    if isinstance(store, ObjectStore):
        return type(store.store).__name__ == "MemoryStore"
    return isinstance(store, MemoryStore)
