"""Reading the rows of a stored dataset: straight from its shard files where possible, else through zarr.

zarr's pipeline costs about a millisecond a call and hands out fill values for a chunk that is not there. The
reader here knows the few codecs our writer uses, so a chunk is one `pread` (in an object store: one ranged
request, several at once), one checksum and one decompression into the caller's array; and whatever is
missing, cut short or damaged is a `DataError` that says where.
"""

from __future__ import annotations

import copy
import errno
import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from scalelatent.errors import DataError, ShardError

from .layout import Layout, layout_of, tile_columns_of

if TYPE_CHECKING:
    import zarr

    from .store import Location

__all__ = ["StoredRows"]

_ABSENT = 2**64 - 1  # how a shard index marks a chunk that was never written
_CRC_BYTES = 4
_KEPT_INDEXES = 4096


class StoredRows:
    """Rows of one array of a stored dataset, a row source (see sources.py).

    Parameters
    ----------
    location : Location
        The place of the dataset.
    array : zarr.Array
        An array (n, ...) of it, cut along its first axis, or (n, p) and cut into tiles along both.
    repair : str
        The next step to name when a chunk is lost.
    """

    def __init__(self, location: Location, array: zarr.Array, repair: str) -> None:
        self.shape: tuple[int, ...] = array.shape
        self.dtype: np.dtype[Any] = array.dtype
        self.chunk_rows: int = array.chunks[0]
        self.shard_rows: int = (array.shards or array.chunks)[0]
        self._location = location
        self._array: Any = array
        self._name = array.name.strip("/")
        self._repair = repair
        self._sharded = array.shards is not None
        self._tile = tile_columns_of(array)
        self._where: str | None = None
        self._holder: tuple[int, int] | None = None
        self.reads_at_once = location.reads_at_once
        self._has_files = location.local_path("") is not None
        fast = hasattr(os, "preadv") or not self._has_files
        self._decoder = _find_decoder(array) if fast else None
        self._indexes = _Indexes(location)

    def sibling(self, name: str, length: int, chunk: int, where: str, rows: tuple[int, int]) -> StoredRows:
        """The reader of another array (length,) of the same type and codecs, without a look at its metadata.

        Parameters
        ----------
        name : str
            Its path in the dataset.
        length, chunk : int
            Its numbers, and those of one of its chunks; all chunks lie in one shard.
        where : str
            What messages say of its rows.
        rows : (int, int)
            The rows that are lost with it.
        """
        other = copy.copy(self)
        other.shape, other.chunk_rows, other.shard_rows = (length,), chunk, -(-length // chunk) * chunk
        other._name, other._where, other._holder, other._array = name, where, rows, None
        return other

    def _opened(self) -> Any:
        if self._array is None:
            import zarr

            store = self._location.zarr_store(read_only=True)
            self._array = zarr.open_array(store, path=self._name, mode="r")
        return self._array

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows `start:stop` in a new array of their stored dtype."""
        out = np.empty((stop - start, *self.shape[1:]), self.dtype)
        if self._decoder is not None and not self._has_files:
            self._read_objects(start, stop, out)
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

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The chunks of the rows `start:stop`, clipped."""
        step = self.chunk_rows
        edges = [start, *range((start // step + 1) * step, stop, step), stop]
        return list(itertools.pairwise(edges))

    def shards(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        """(file, first row, one past its last row) of the shards that hold the rows `start:stop`."""
        size, n = self.shard_rows, self.shape[0]
        return [
            (self._location.name_of(self.shard_key(s)), s * size, min((s + 1) * size, n))
            for s in range(start // size, -(-stop // size))
        ]

    @property
    def layout(self) -> Layout:
        """Chunks, shards and codec."""
        return layout_of(self._array)

    def shard_key(self, shard: int, tile: int = 0) -> str:
        """Key of a shard's file."""
        return "/".join([self._name, "c", str(shard), *(str(tile) for _ in self.shape[1:])])

    def _tiles(self) -> list[tuple[int, Any]]:
        """Number and columns of each tile of a row."""
        if self._tile is None:
            return [(0, ...)]
        firsts = range(0, self.shape[1], self._tile)
        return [(i, (slice(None), slice(first, first + self._tile))) for i, first in enumerate(firsts)]

    def _read_shard(self, shard: int, start: int, stop: int, out: np.ndarray) -> None:
        """Rows `start:stop`, all in one shard, into `out`."""
        assert self._decoder is not None
        for tile, columns in self._tiles():
            path = self._location.local_path(self.shard_key(shard, tile))
            assert path is not None
            try:
                with _ShardFile(path, self.shard_rows // self.chunk_rows) as file:
                    for a, b in self.pieces(start, stop):
                        self._decode(file, a, b, out[a - start : b - start][columns])
            except (_Damage, OSError) as error:
                self._raise(shard, error, tile)

    def _decode(self, file: _Chunks, start: int, stop: int, target: np.ndarray) -> None:
        """Rows of one chunk; it is checked and decoded whole, also when only some of its rows are wanted."""
        assert self._decoder is not None
        chunk, first = divmod(start, self.chunk_rows)
        chunk %= self.shard_rows // self.chunk_rows
        if stop - start == self.chunk_rows and self._tile is None:
            self._decoder(file, chunk, target)
            return
        width = self.shape[1:] if self._tile is None else (self._tile,)
        whole = np.empty((self.chunk_rows, *width), self.dtype)
        self._decoder(file, chunk, whole)
        rows = whole[first : first + stop - start]
        target[...] = rows if self._tile is None else rows[:, : target.shape[1]]

    def _read_objects(self, start: int, stop: int, out: np.ndarray) -> None:
        """Rows `start:stop` from objects: a window of requests at a time, so that few packed bytes wait."""
        pieces = [(*piece, *tile) for piece in self.pieces(start, stop) for tile in self._tiles()]
        pieces = pieces if start < stop else []
        window = 2 * self.reads_at_once
        for i in range(0, len(pieces), window):
            part = pieces[i : i + window]
            shards = [(a // self.shard_rows, tile) for a, _, tile, _ in part]
            keys = [self.shard_key(*shard) for shard in shards]
            at = 0
            try:
                ranges = self._ranges([(a, b) for a, b, _, _ in part], keys)
                for at, data in enumerate(self._location.read_ranges(ranges)):
                    a, b, _, columns = part[at]
                    self._decode(_Fetched(data), a, b, out[a - start : b - start][columns])
            except (_Damage, OSError) as error:
                self._indexes.forget()  # whatever is wrong, the objects are not those they were read from
                names = map(self._location.name_of, keys)
                told = next((k for k, name in enumerate(names) if name in str(error)), at)
                self._raise(shards[told][0], error, shards[told][1])

    def _ranges(self, pieces: list[tuple[int, int]], keys: list[str]) -> list[tuple[str, int, int] | str]:
        """Where the chunks of some pieces lie, each in its key's object."""
        if not self._sharded:
            return list(keys)
        per_shard = self.shard_rows // self.chunk_rows
        indexes = self._indexes.get(list(dict.fromkeys(keys)), per_shard)
        return [
            (key, *_entry(indexes[key], a // self.chunk_rows % per_shard))
            for key, (a, _) in zip(keys, pieces, strict=True)
        ]

    def _read_with_zarr(self, shard: int, start: int, stop: int, out: np.ndarray) -> None:
        """The same through zarr, which hands out fill values for a shard that is not there: look first."""
        for tile, _ in self._tiles():
            if not self._location.has(self.shard_key(shard, tile)):
                self._raise(shard, FileNotFoundError(), tile)
        try:
            out[...] = self._opened()[start:stop]
        except Exception as error:  # noqa: BLE001 - each codec has errors of its own
            self._raise(shard, error)

    def _raise(self, shard: int, error: Exception, tile: int = 0) -> NoReturn:
        first, last = shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.shape[0])
        if isinstance(error, FileNotFoundError):
            what = "is missing"
        elif isinstance(error, _Damage):
            what = f"is damaged: {error}"
        elif isinstance(error, OSError):
            what = f"cannot be read: {error.strerror or error}"
        else:
            what = f"cannot be decoded: {error}"
        name = self._location.name_of(self.shard_key(shard, tile))
        where = self._where or f"rows {first}:{last} of '{self._name}'"
        words = f"dataset {self._location.url}: shard file {name} ({where}) {what}. {self._repair}"
        lost = not isinstance(error, OSError) or error.errno == errno.EIO
        if lost or isinstance(error, FileNotFoundError):
            raise ShardError(words, name, *(self._holder or (first, last))) from error
        # Whether the rows are still there, nobody knows: the place refuses, or is away.
        raise DataError(words) from error


class _Damage(Exception):
    """A shard file is not what its writer left."""


class _Chunks(Protocol):
    """Chunks as bytes."""

    def extent(self, chunk: int, sharded: bool) -> tuple[int, int]:
        """Offset and length of a chunk's bytes."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """These bytes."""
        ...

    def read_into(self, target: np.ndarray, offset: int) -> bytes:
        """Fill `target`; return the checksum that follows it."""
        ...


class _Fetched:
    """One chunk, fetched from an object store."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def extent(self, chunk: int, sharded: bool) -> tuple[int, int]:
        return 0, len(self._data)

    def read(self, offset: int, length: int) -> bytes:
        return self._data

    def read_into(self, target: np.ndarray, offset: int) -> bytes:
        flat = target.reshape(-1).view(np.uint8)
        flat[...] = np.frombuffer(self._data, np.uint8, len(flat))
        return self._data[len(flat) :]


class _Indexes:
    """The indexes of shards in an object store, each fetched once; the last few thousand are kept."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._kept: dict[str, np.ndarray] = {}

    def get(self, keys: list[str], n_chunks: int) -> dict[str, np.ndarray]:
        """Those of some objects of `n_chunks` each; what is not at hand is fetched at once."""
        found = {key: index for key in keys if (index := self._kept.get(key)) is not None}
        missing = [key for key in keys if key not in found]
        length = 16 * n_chunks + _CRC_BYTES
        fetched = self._location.read_ranges([(key, -length, length) for key in missing])
        for key, raw in zip(missing, fetched, strict=True):
            try:
                found[key] = _parse_index(raw, n_chunks)
            except _Damage as damage:
                raise _Damage(f"{damage} ({self._location.name_of(key)})") from damage
        if len(self._kept) > _KEPT_INDEXES:
            self._kept = {}
        self._kept |= found
        return found

    def forget(self) -> None:
        """Fetch all of them anew."""
        self._kept = {}


def _parse_index(raw: bytes, n_chunks: int) -> np.ndarray:
    if len(raw) < 16 * n_chunks + _CRC_BYTES:
        raise _Damage(f"it has {len(raw)} bytes, not even its index of {16 * n_chunks + _CRC_BYTES}")
    return np.frombuffer(_checked(raw, "its index"), "<u8").reshape(-1, 2)


def _entry(index: np.ndarray, chunk: int) -> tuple[int, int]:
    offset, length = (int(v) for v in index[chunk])
    if offset == _ABSENT:
        raise _Damage(f"its chunk {chunk} was never written")
    return offset, length


class _ShardFile:
    """An open shard file: where each of its chunks lies."""

    def __init__(self, path: str, n_chunks: int) -> None:
        self.n_chunks = n_chunks
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self.size = os.fstat(self._fd).st_size
        self._index: np.ndarray | None = None

    def __enter__(self) -> _ShardFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def extent(self, chunk: int, sharded: bool) -> tuple[int, int]:
        """Offset and length of a chunk's bytes."""
        if not sharded:
            return 0, self.size
        if self._index is None:
            length = min(self.size, 16 * self.n_chunks + _CRC_BYTES)
            self._index = _parse_index(self.read(self.size - length, length), self.n_chunks)
        offset, length = _entry(self._index, chunk)
        if offset + length > self.size:
            raise _Damage(f"its chunk {chunk} ends at byte {offset + length}, but the file at {self.size}")
        return offset, length

    def read(self, offset: int, length: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        if len(data) != length:
            raise _Damage(f"{length} bytes expected at byte {offset}, {len(data)} found")
        return data

    def read_into(self, target: np.ndarray, offset: int) -> bytes:
        """Fill `target`; return the checksum that follows it."""
        tail = bytearray(_CRC_BYTES)
        view = target.reshape(-1).view(np.uint8).data
        done = os.preadv(self._fd, [view, tail], offset)
        while done < len(view) + _CRC_BYTES:  # a read may stop early: at 2 GiB, or after a signal
            rest = (
                [view[done:], memoryview(tail)]
                if done < len(view)
                else [memoryview(tail)[done - len(view) :]]
            )
            more = os.preadv(self._fd, rest, offset + done)
            if not more:
                raise _Damage(f"{len(view) + _CRC_BYTES} bytes expected at byte {offset}, {done} found")
            done += more
        return bytes(tail)


_Decoder = Callable[[_Chunks, int, np.ndarray], None]


def _checked(data: bytes, what: str) -> memoryview:
    """The bytes without their checksum, which has to be right."""
    import crc32c

    if len(data) < _CRC_BYTES:
        raise _Damage(f"{what} has {len(data)} bytes")
    body = np.frombuffer(data, np.uint8)[:-_CRC_BYTES]
    if crc32c.crc32c(body.data).to_bytes(4, "little") != data[-_CRC_BYTES:]:
        raise _Damage(f"the checksum of {what} is wrong")
    return body.data


def _find_decoder(array: zarr.Array) -> _Decoder | None:
    """A function that fills an array from a chunk of a shard file, or None where only zarr can decode it."""
    from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec, ZstdCodec

    codecs = array.metadata.codecs
    sharded = len(codecs) == 1 and isinstance(codecs[0], ShardingCodec)
    if sharded:
        if codecs[0].index_location.value != "end" or len(codecs[0].index_codecs) != 2:
            return None
        codecs = codecs[0].codecs
    # Rows whole, or tiles that are a file each.
    plain = all(c == s for c, s in zip(array.chunks[1:], array.shape[1:], strict=True))
    plain = plain or (tile_columns_of(array) is not None and not sharded)
    separator = getattr(array.metadata.chunk_key_encoding, "separator", "/")
    if not (plain and separator == "/" and codecs and isinstance(codecs[0], BytesCodec)):
        return None
    if getattr(codecs[0].endian, "value", "little") != "little" or not isinstance(codecs[-1], Crc32cCodec):
        return None
    if len(codecs) == 2:
        return _raw_decoder(sharded)
    if len(codecs) == 3 and isinstance(codecs[1], (ZstdCodec, BloscCodec)):
        return _packed_decoder(sharded, "zstd" if isinstance(codecs[1], ZstdCodec) else "blosc")
    return None


def _raw_decoder(sharded: bool) -> _Decoder:
    import crc32c

    def decode(file: _Chunks, chunk: int, out: np.ndarray) -> None:
        offset, length = file.extent(chunk, sharded)
        if length != out.nbytes + _CRC_BYTES:
            raise _Damage(f"chunk {chunk} has {length} bytes instead of {out.nbytes + _CRC_BYTES}")
        checksum = file.read_into(out, offset)
        if crc32c.crc32c(out.reshape(-1).view(np.uint8).data).to_bytes(4, "little") != checksum:
            raise _Damage(f"the checksum of chunk {chunk} is wrong")

    return decode


def _packed_decoder(sharded: bool, codec: str) -> _Decoder:
    import numcodecs.blosc
    import numcodecs.zstd

    # Blosc decodes in the calling thread unless that is the main thread, so its pool and ours do not
    # multiply.
    unpack = {"zstd": numcodecs.zstd.decompress, "blosc": numcodecs.blosc.decompress}[codec]

    def decode(file: _Chunks, chunk: int, out: np.ndarray) -> None:
        body = _checked(file.read(*file.extent(chunk, sharded)), f"chunk {chunk}")
        try:
            unpack(body, out.reshape(-1).view(np.uint8))
        except (RuntimeError, ValueError) as error:
            raise _Damage(f"chunk {chunk} does not unpack: {error}") from error

    return decode
