"""Zarr stores that read and write locations."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.storage import LocalStore, WrapperStore

from .plain_files import refuse_special

if TYPE_CHECKING:
    from zarr.core.buffer import Buffer, BufferPrototype

    from .objects import ObjectLocation


class PlainStore(LocalStore):
    """A local zarr store that refuses to read FIFOs and other special files."""

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if not stat.S_ISDIR(mode := os.stat(self.root / key).st_mode):
                refuse_special(mode, self.root / key)
        return await super().get(key, prototype, byte_range)


class WatchedStore(WrapperStore[Store]):
    """A store that calls a function with each key and its bytes before the file is written."""

    def __init__(self, store: Store, watch: Callable[[str, np.ndarray], None] | None = None) -> None:
        super().__init__(store)
        self._watch = watch

    async def set(self, key: str, value: Buffer) -> None:
        if self._watch is not None:
            self._watch(key, np.asarray(value.as_numpy_array()))
        await self._store.set(key, value)


class LocationStore(Store):
    """A zarr store that reads and writes through an `ObjectLocation`, which retries failed requests."""

    supports_writes = True
    supports_deletes = True
    supports_listing = True
    supports_partial_writes = False

    def __init__(self, location: ObjectLocation, *, read_only: bool = False) -> None:
        super().__init__(read_only=read_only)
        self._location = location

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, LocationStore) and self._location.url == other._location.url
        return same and self.read_only == other.read_only  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self._location.url, self.read_only))

    def __repr__(self) -> str:
        return f"LocationStore({self._location.url!r})"

    def with_read_only(self, read_only: bool = False) -> LocationStore:
        return LocationStore(self._location, read_only=read_only)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        data = await asyncio.to_thread(self._get, key, byte_range)
        return None if data is None else prototype.buffer.from_bytes(data)

    def _get(self, key: str, part: ByteRequest | None) -> bytes | None:
        try:
            if isinstance(part, RangeByteRequest):
                return self._location.read_range(key, part.start, part.end - part.start)
            if isinstance(part, SuffixByteRequest):
                return self._location.read_range(key, -part.suffix, part.suffix)
        except FileNotFoundError:
            return None
        data = self._location.read(key)
        offset = part.offset if isinstance(part, OffsetByteRequest) else 0
        return None if data is None else data[offset:]

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        return await asyncio.to_thread(self._location.has, key)

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()
        await asyncio.to_thread(self._location.write, key, value.to_bytes())

    async def set_partial_values(self, key_start_values: Iterable[tuple[str, int, object]]) -> None:
        raise NotImplementedError

    async def delete(self, key: str) -> None:
        self._check_writable()
        await asyncio.to_thread(self._location.delete, key)

    async def list(self) -> AsyncIterator[str]:
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in await asyncio.to_thread(self._location.all_keys):
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for name in await asyncio.to_thread(self._location.keys, prefix.rstrip("/")):
            yield name
