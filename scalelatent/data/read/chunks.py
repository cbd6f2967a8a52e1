"""Read the rows of a stored dataset directly from its shard files if possible, else through zarr."""

from __future__ import annotations

import copy
import errno
import functools
import itertools
import logging
import os
from collections import deque
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from scalelatent.data.layout import ChunkLayout, codecs_of, layout_of, packing_of, tile_columns_of
from scalelatent.errors import DataError, ShardError
from scalelatent.storage.plain_files import SpecialFileError

from .chunk_files import (
    ChunkReader,
    DamagedFileError,
    FetchedChunk,
    ShardFile,
    ShardIndexCache,
    find_decoder,
    has_our_keys,
    index_entry,
)
from .sources import StoredColumn

if TYPE_CHECKING:
    from types import EllipsisType

    ColumnIndex = EllipsisType | tuple[slice, slice]  # array index of some columns; `...` selects all columns

    import zarr

    from scalelatent.storage.disk import Location

logger = logging.getLogger("scalelatent")

# `RecyclingAllocator` reuses buffers of MIN_BYTES to MAX_BYTES and keeps at most MAX_FREE free ones. New
# memory costs a page fault per page, and its release stalls other cores (benchmarks/streamed_pass.py). The C
# library already reuses smaller arrays; larger arrays are read only once.
MIN_BYTES, MAX_BYTES = 2**18, 2**24
MAX_FREE = 4


@functools.lru_cache(maxsize=256)
def _warn_slow_decoding(url: str, name: str, codecs: str) -> None:
    """Warn once per array that only the zarr library, which is slower, can decode its chunks."""
    logger.warning(
        "dataset %s: '%s' is stored as %s, which only zarr can decode, slower than our own reader; the "
        "rows are the same. `scalelatent data convert` writes a dataset that reads faster.",
        url, name, codecs,
    )  # fmt: skip


class StoredRows(StoredColumn):
    """Rows of one stored array; a file (shard) holds all columns, or some columns (a tile), of some rows."""

    def __init__(self, location: Location, array: zarr.Array, repair: str) -> None:
        self.shape = array.shape
        self.dtype = array.dtype
        self.chunk_rows: int = array.chunks[0]
        self.shard_rows = (array.shards or array.chunks)[0]
        self._location = location
        self._array: zarr.Array | None = array
        self._name = array.name.strip("/")
        self._repair = repair
        self._sharded = array.shards is not None
        self._tile = tile_columns_of(array)
        self._description: str | None = None
        self._row_range: tuple[int, int] | None = None
        self.reads_at_once = location.reads_at_once
        self._has_files = location.local_path("") is not None
        fast = hasattr(os, "preadv") or not self._has_files
        self._decoder = find_decoder(array) if fast else None
        self._has_our_keys = has_our_keys(array)
        if fast and self._decoder is None:
            shards, chain = codecs_of(array)
            names = " + ".join(name for name, _ in chain)
            _warn_slow_decoding(location.url, self._name, f"{names} in shards" if shards else names)
        self._indexes = ShardIndexCache(location)
        self._memory = RecyclingAllocator()
        self._crcs: np.ndarray | None = None
        self._only: int | None = None  # the only tile (group of columns) to read; None reads all columns

    def sibling(self, name: str, length: int, chunk: int, where: str, rows: tuple[int, int]) -> StoredRows:
        """Return a reader of another array (length,) with the same codecs; its metadata file is not read."""
        other = copy.copy(self)
        other.shape, other.chunk_rows, other.shard_rows = (length,), chunk, -(-length // chunk) * chunk
        other._name, other._description, other._row_range, other._array = name, where, rows, None
        return other

    @property
    def n_tiles(self) -> int:
        return len(self._tiles())

    @property
    def packing(self) -> str:
        return packing_of(self._open_array())

    @property
    def n_crcs(self) -> int:
        return -(-self.shape[0] // self.shard_rows) * self.n_tiles * self._chunks_per_shard

    def expect_crcs(self, crcs: np.ndarray) -> None:
        self._crcs = crcs.reshape(-1, self.n_tiles, self._chunks_per_shard)

    def crcs_of(self, shard: int) -> slice:
        """Return the slice of the column's checksums that belongs to the shard file number `shard`."""
        return slice(shard * self._chunks_per_shard, (shard + 1) * self._chunks_per_shard)

    @property
    def _chunks_per_shard(self) -> int:
        return self.shard_rows // self.chunk_rows

    def _open_array(self) -> zarr.Array:
        if self._array is None:
            import zarr

            store = self._location.zarr_store(read_only=True)
            self._array = zarr.open_array(store, path=self._name, mode="r")
        return self._array

    def read(self, start: int, stop: int) -> np.ndarray:
        out = self._memory.empty((stop - start, *self.shape[1:]), self.dtype)
        if self._decoder is not None and not self._has_files:
            self._read_from_object_store(start, stop, out)
            return out
        row = start
        while row < stop:
            shard = row // self.shard_rows
            end = min(stop, (shard + 1) * self.shard_rows)
            target = out[row - start : end - start]
            if self._decoder is None:
                self._read_with_zarr(shard, row, end, target)
            else:
                self._read_shard(shard, row, end, target)
            row = end
        return out

    def read_tile(self, start: int, stop: int, tile: int) -> np.ndarray:
        """Return the rows `start:stop` of one tile (group of columns); open only the files of this tile."""
        other = copy.copy(self)
        other._only = tile
        return other.read(start, stop)[self._tiles()[tile][1]]

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        step = self.chunk_rows
        edges = [start, *range((start // step + 1) * step, stop, step), stop]
        return list(itertools.pairwise(edges))

    def shards(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        size, n = self.shard_rows, self.shape[0]
        return [
            (self._location.name_of(self.shard_key(s)), s * size, min((s + 1) * size, n))
            for s in range(start // size, -(-stop // size))
        ]

    @property
    def layout(self) -> ChunkLayout:
        return layout_of(self._open_array())

    def shard_key(self, shard: int, tile: int = 0) -> str:
        if not self._has_our_keys:
            coords = (shard, *(tile for _ in self.shape[1:]))
            return f"{self._name}/{self._open_array().metadata.encode_chunk_key(coords)}"
        return "/".join([self._name, "c", str(shard), *(str(tile) for _ in self.shape[1:])])

    def _tiles(self) -> list[tuple[int, ColumnIndex]]:
        """Return (number, array index) of each tile (group of columns, in separate files) to read."""
        if self._tile is None:
            return [(0, ...)]
        firsts = range(0, self.shape[1], self._tile)
        tiles: list[tuple[int, ColumnIndex]] = [
            (i, (slice(None), slice(first, first + self._tile))) for i, first in enumerate(firsts)
        ]
        return tiles if self._only is None else [tiles[self._only]]

    def _read_shard(self, shard: int, start: int, stop: int, out: np.ndarray) -> None:
        """Read the rows `start:stop` of one shard into `out`."""
        assert self._decoder is not None
        for tile, columns in self._tiles():
            path = self._location.local_path(self.shard_key(shard, tile))
            assert path is not None
            try:
                with ShardFile(path, self._chunks_per_shard) as file:
                    for a, b in self.pieces(start, stop):
                        self._decode(file, a, b, out[a - start : b - start][columns], tile)
            except (DamagedFileError, OSError) as error:
                self._raise_for_shard(shard, error, tile)

    def _decode(self, file: ChunkReader, start: int, stop: int, target: np.ndarray, tile: int = 0) -> None:
        """Decode the rows `start:stop` of one chunk into `target`; the whole chunk is checked and decoded."""
        assert self._decoder is not None
        chunk, first = divmod(start, self.chunk_rows)
        shard, chunk = divmod(chunk, self._chunks_per_shard)
        if stop - start == self.chunk_rows and self._tile is None:
            self._compare(self._decoder(file, chunk, target), shard, tile, chunk)
            return
        width = self.shape[1:] if self._tile is None else (self._tile,)
        whole = np.empty((self.chunk_rows, *width), self.dtype)
        self._compare(self._decoder(file, chunk, whole), shard, tile, chunk)
        rows = whole[first : first + stop - start]
        target[...] = rows if self._tile is None else rows[:, : target.shape[1]]

    def _compare(self, checksum: bytes, shard: int, tile: int, chunk: int) -> None:
        """Raise an error if a chunk's checksum differs from that in the dataset's table of checksums."""
        if self._crcs is None:
            return
        found, written = int.from_bytes(checksum, "little"), int(self._crcs[shard, tile, chunk])
        if found != written:
            raise DamagedFileError(
                f"its chunk {chunk} is intact, but differs from the chunk that was written (checksum "
                f"{found:08x} instead of {written:08x}), as if the file came from another dataset"
            )

    def _read_from_object_store(self, start: int, stop: int, out: np.ndarray) -> None:
        """Fetch the rows `start:stop` from an object store into the array `out`, some chunks at a time."""
        pieces = [(*piece, *tile) for piece in self.pieces(start, stop) for tile in self._tiles()]
        pieces = pieces if start < stop else []
        window = 2 * self.reads_at_once
        for i in range(0, len(pieces), window):
            part = pieces[i : i + window]
            shards = [(a // self.shard_rows, tile) for a, _, tile, _ in part]
            keys = [self.shard_key(*shard) for shard in shards]
            at = 0
            try:
                ranges = self._locate_chunks([(a, b) for a, b, _, _ in part], keys)
                for at, data in enumerate(self._location.read_ranges(ranges)):
                    a, b, _, columns = part[at]
                    self._decode(FetchedChunk(data), a, b, out[a - start : b - start][columns], shards[at][1])
            except (DamagedFileError, OSError) as error:
                self._indexes.clear()  # files in the store may have changed since the indexes were read
                names = map(self._location.name_of, keys)
                bad = next((k for k, name in enumerate(names) if name in str(error)), at)
                self._raise_for_shard(shards[bad][0], error, shards[bad][1])

    def _locate_chunks(
        self, pieces: list[tuple[int, int]], keys: list[str]
    ) -> list[tuple[str, int, int] | str]:
        """Return (key, offset, length) of the chunk of each row range, in bytes, or the key of a file."""
        if not self._sharded:
            return list(keys)
        chunks_per_shard = self._chunks_per_shard
        indexes = self._indexes.get(list(dict.fromkeys(keys)), chunks_per_shard)
        return [
            (key, *index_entry(indexes[key], a // self.chunk_rows % chunks_per_shard))
            for key, (a, _) in zip(keys, pieces, strict=True)
        ]

    def _read_with_zarr(self, shard: int, start: int, stop: int, out: np.ndarray) -> None:
        """Read rows through zarr, after a check for missing files, for which zarr returns fill values."""
        for tile, _ in self._tiles():
            if not self._location.has(self.shard_key(shard, tile)):
                self._raise_for_shard(shard, FileNotFoundError(), tile)
        try:
            out[...] = self._open_array()[start:stop]
        except Exception as error:  # noqa: BLE001 - each codec has errors of its own
            self._raise_for_shard(shard, error)

    def _raise_for_shard(self, shard: int, error: Exception, tile: int = 0) -> NoReturn:
        first, last = shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.shape[0])
        if isinstance(error, FileNotFoundError):
            problem = "is missing"
        elif isinstance(error, DamagedFileError):
            problem = f"is damaged: {error}"
        elif isinstance(error, OSError):
            problem = f"cannot be read: {error.strerror or error}"
        else:
            problem = f"cannot be decoded: {error}"
        name = self._location.name_of(self.shard_key(shard, tile))
        where = self._description or f"rows {first}:{last} of '{self._name}'"
        message = f"dataset {self._location.url}: shard file {name} ({where}) {problem}."
        is_lost = not isinstance(error, OSError) or error.errno == errno.EIO
        if is_lost or isinstance(error, (FileNotFoundError, SpecialFileError)):
            raise ShardError(
                f"{message} {self._repair}", name, *(self._row_range or (first, last))
            ) from error
        # The file cannot be read: access is denied, or the storage is unreachable. The rows need no repair.
        raise DataError(
            f"{message} Its rows may be intact: try again when this process can read the file"
        ) from error


class RecyclingAllocator:
    """Allocator of uninitialized arrays; it reuses the memory of an array after all views are deleted."""

    def __init__(self) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=MAX_FREE)

    def __reduce__(self) -> tuple[object, ...]:
        return RecyclingAllocator, ()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not MIN_BYTES <= nbytes <= MAX_BYTES:
            return np.empty(shape, dtype)
        raw = self._take_free_buffer(nbytes)
        raw = np.empty(nbytes, np.uint8) if raw is None else raw
        return np.asarray(_RecycledBuffer(raw, self._free)).view(dtype).reshape(shape)

    def _take_free_buffer(self, nbytes: int) -> np.ndarray | None:
        """Return a free buffer of `nbytes` bytes, or None; free buffers of other sizes are discarded."""
        while True:
            try:
                raw = self._free.pop()
            except IndexError:
                return None
            if raw.nbytes == nbytes:
                return raw


class _RecycledBuffer:
    """Owner of one buffer; all arrays over the buffer refer to the owner. Without arrays, it is reused."""

    def __init__(self, raw: np.ndarray, free: deque[np.ndarray]) -> None:
        self.__array_interface__ = raw.__array_interface__
        self._raw, self._free = raw, free

    def __del__(self) -> None:
        self._free.append(self._raw)
