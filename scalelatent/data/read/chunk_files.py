"""Read chunks from shards on disk or in an object store: locate, verify (checksums) and decode bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import crc32c
import numpy as np

from scalelatent.data.layout import codecs_of, named_codecs, tile_columns_of
from scalelatent.storage.plain_files import open_plain

if TYPE_CHECKING:
    import zarr

    from scalelatent.storage.disk import Location

ABSENT = 2**64 - 1  # offset in a shard index of a chunk that was never written
_CRC_BYTES = 4
_MAX_INDEXES = 4096  # maximum number of cached indexes of one reader; an index has 16 bytes per chunk


class DamagedFileError(Exception):
    """Error for a shard file that has changed since it was written."""


class ChunkReader(Protocol):
    """Interface to the bytes of chunks in a file or from an object store."""

    def extent(self, chunk: int, sharded: bool) -> tuple[int, int]:
        """Return the offset and the length, in bytes, of chunk number `chunk` in its file or object."""
        ...

    def read(self, offset: int, length: int) -> bytes: ...

    def read_into(self, target: np.ndarray, offset: int) -> bytes:
        """Fill `target` with the bytes of a chunk that begin at `offset`; return the checksum after them."""
        ...


class FetchedChunk:
    """Bytes of one chunk that was fetched from an object store."""

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


class ShardIndexCache:
    """Cache of the indexes of shards in an object store: the byte offset and length of each chunk."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._cache: dict[str, np.ndarray] = {}

    def get(self, keys: list[str], n_chunks: int) -> dict[str, np.ndarray]:
        """Return the indexes of shards with `n_chunks` chunks each; fetch missing indexes in one call."""
        found = {key: index for key in keys if (index := self._cache.get(key)) is not None}
        missing = [key for key in keys if key not in found]
        length = 16 * n_chunks + _CRC_BYTES
        fetched = self._location.read_ranges([(key, -length, length) for key in missing])
        for key, raw in zip(missing, fetched, strict=True):
            try:
                found[key] = _parse_index(raw, n_chunks)
            except DamagedFileError as damage:
                raise DamagedFileError(f"{damage} ({self._location.name_of(key)})") from damage
        if len(self._cache) > _MAX_INDEXES:
            self._cache = {}
        self._cache |= found
        return found

    def clear(self) -> None:
        self._cache = {}


def _parse_index(raw: bytes, n_chunks: int) -> np.ndarray:
    if len(raw) < 16 * n_chunks + _CRC_BYTES:
        raise DamagedFileError(
            f"it has {len(raw)} bytes, fewer than its index of {16 * n_chunks + _CRC_BYTES} bytes"
        )
    return np.frombuffer(_verify_checksum(raw, "its index")[0], "<u8").reshape(-1, 2)


def index_entry(index: np.ndarray, chunk: int) -> tuple[int, int]:
    """Return (offset, length) of a chunk in bytes, from the index of its shard."""
    offset, length = (int(v) for v in index[chunk])
    if offset == ABSENT:
        raise DamagedFileError(f"its chunk {chunk} was never written")
    return offset, length


class ShardFile:
    """Shard file that is open for reading; it returns the bytes of each chunk."""

    def __init__(self, path: str, n_chunks: int) -> None:
        self.n_chunks = n_chunks
        self._fd = open_plain(path)
        self.size = os.fstat(self._fd).st_size
        self._index: np.ndarray | None = None

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def extent(self, chunk: int, sharded: bool) -> tuple[int, int]:
        if not sharded:
            return 0, self.size
        if self._index is None:
            length = min(self.size, 16 * self.n_chunks + _CRC_BYTES)
            self._index = _parse_index(self.read(self.size - length, length), self.n_chunks)
        offset, length = index_entry(self._index, chunk)
        if offset + length > self.size:
            raise DamagedFileError(
                f"its chunk {chunk} ends at byte {offset + length}, but the file has {self.size} bytes"
            )
        return offset, length

    def read(self, offset: int, length: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        if len(data) != length:
            raise DamagedFileError(f"expected {length} bytes at byte {offset}, found {len(data)}")
        return data

    def read_into(self, target: np.ndarray, offset: int) -> bytes:
        tail = bytearray(_CRC_BYTES)
        view = target.reshape(-1).view(np.uint8).data
        done = os.preadv(self._fd, [view, tail], offset)
        while done < len(view) + _CRC_BYTES:  # a read returns at most 2 GiB, and less after a signal
            rest = (
                [view[done:], memoryview(tail)]
                if done < len(view)
                else [memoryview(tail)[done - len(view) :]]
            )
            more = os.preadv(self._fd, rest, offset + done)
            if not more:
                raise DamagedFileError(
                    f"expected {len(view) + _CRC_BYTES} bytes at byte {offset}, found {done}"
                )
            done += more
        return bytes(tail)


Decoder = Callable[[ChunkReader, int, np.ndarray], bytes]
"""Function that fills an array from a chunk and returns the verified checksum."""


def _verify_checksum(data: bytes, name: str) -> tuple[memoryview, bytes]:
    """Verify the checksum at the end of `data`; return the bytes before the checksum, and the checksum."""
    if len(data) < _CRC_BYTES:
        raise DamagedFileError(f"{name} has {len(data)} bytes")
    body = np.frombuffer(data, np.uint8)[:-_CRC_BYTES]
    checksum = data[-_CRC_BYTES:]
    if crc32c.crc32c(body.data).to_bytes(4, "little") != checksum:
        raise DamagedFileError(f"the checksum of {name} is wrong")
    return body.data, checksum


def find_decoder(array: zarr.Array) -> Decoder | None:
    """Return a decoder for the chunks of an array, or None if only zarr can decode the chunks."""
    shards, chain = codecs_of(array)
    if shards is not None:
        index = [name for name, _ in named_codecs(shards["index_codecs"])]
        if shards.get("index_location", "end") != "end" or index != ["bytes", "crc32c"]:
            return None
    # Decoders support chunks of whole rows, and tiles (chunks of some columns) if each tile is one file.
    plain = all(c == s for c, s in zip(array.chunks[1:], array.shape[1:], strict=True))
    plain = plain or (tile_columns_of(array) is not None and shards is None)
    names = [name for name, _ in chain]
    if not (plain and has_our_keys(array) and names[:1] == ["bytes"]):
        return None
    if chain[0][1].get("endian", "little") != "little":
        return None
    if names == ["bytes", "crc32c"]:
        return _raw_decoder(shards is not None)
    if names in (["bytes", "zstd", "crc32c"], ["bytes", "blosc", "crc32c"]):
        return _packed_decoder(shards is not None, names[1])
    return None


def has_our_keys(array: zarr.Array) -> bool:
    """Return whether the files of an array have zarr's default names, such as `c/0/0`."""
    keys = array.metadata.to_dict()["chunk_key_encoding"]
    return keys["name"] == "default" and (keys.get("configuration") or {}).get("separator", "/") == "/"


def _raw_decoder(sharded: bool) -> Decoder:
    def decode(file: ChunkReader, chunk: int, out: np.ndarray) -> bytes:
        offset, length = file.extent(chunk, sharded)
        if length != out.nbytes + _CRC_BYTES:
            raise DamagedFileError(f"chunk {chunk} has {length} bytes instead of {out.nbytes + _CRC_BYTES}")
        checksum = file.read_into(out, offset)
        if crc32c.crc32c(out.reshape(-1).view(np.uint8).data).to_bytes(4, "little") != checksum:
            raise DamagedFileError(f"the checksum of chunk {chunk} is wrong")
        return checksum

    return decode


def _packed_decoder(sharded: bool, codec: str) -> Decoder:
    import numcodecs.blosc
    import numcodecs.zstd

    # Blosc uses its own thread pool only in the main thread, so the number of threads does not multiply.
    unpack = {"zstd": numcodecs.zstd.decompress, "blosc": numcodecs.blosc.decompress}[codec]

    def decode(file: ChunkReader, chunk: int, out: np.ndarray) -> bytes:
        body, checksum = _verify_checksum(file.read(*file.extent(chunk, sharded)), f"chunk {chunk}")
        try:
            unpack(body, out.reshape(-1).view(np.uint8))
        except (RuntimeError, ValueError) as error:
            raise DamagedFileError(f"chunk {chunk} cannot be decompressed: {error}") from error
        return checksum

    return decode
