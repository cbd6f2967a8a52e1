"""Reading the rows of a stored dataset: straight from its shard files where possible, else through zarr.

zarr's pipeline costs about a millisecond a call and hands out fill values for a chunk that is not there. The
reader here knows the few codecs our writer uses, so a chunk is one `pread`, one checksum and one
decompression into the caller's array; and whatever is missing, cut short or damaged is a `DataError` that
says where.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from scalelatent.errors import DataError

if TYPE_CHECKING:
    import zarr

    from .store import Location

__all__ = ["StoredRows"]

_ABSENT = 2**64 - 1  # how a shard index marks a chunk that was never written
_CRC_BYTES = 4


class StoredRows:
    """Rows of one array of a stored dataset, a row source (see sources.py).

    Parameters
    ----------
    location : Location
        The place of the dataset.
    array : zarr.Array
        An array (n, ...) of it, cut along its first axis only.
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
        self._where: str | None = None
        self._decoder = _find_decoder(array) if _has_files(location) else None

    def sibling(self, name: str, length: int, chunk: int, where: str) -> StoredRows:
        """The reader of another array (length,) of the same type and codecs, without a look at its metadata.

        Parameters
        ----------
        name : str
            Its path in the dataset.
        length, chunk : int
            Its numbers, and those of one of its chunks; all chunks lie in one shard.
        where : str
            What messages say of its rows.
        """
        other = copy.copy(self)
        other.shape, other.chunk_rows, other.shard_rows = (length,), chunk, -(-length // chunk) * chunk
        other._name, other._where, other._array = name, where, None
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

    def shard_key(self, shard: int) -> str:
        """Key of a shard's file."""
        return "/".join([self._name, "c", str(shard), *("0" for _ in self.shape[1:])])

    def _read_shard(self, shard: int, start: int, stop: int, out: np.ndarray) -> None:
        """Rows `start:stop`, all in one shard, into `out`."""
        assert self._decoder is not None
        path = self._location.local_path(self.shard_key(shard))
        assert path is not None
        try:
            with _ShardFile(path, self.shard_rows // self.chunk_rows) as file:
                for a, b in self.pieces(start, stop):
                    chunk = a // self.chunk_rows
                    first = chunk * self.chunk_rows
                    target = out[a - start : b - start]
                    if b - a == self.chunk_rows:
                        self._decoder(file, chunk % file.n_chunks, target)
                    else:  # a chunk is checked and decoded whole, also when only some of its rows are wanted
                        whole = np.empty((self.chunk_rows, *self.shape[1:]), self.dtype)
                        self._decoder(file, chunk % file.n_chunks, whole)
                        target[...] = whole[a - first : b - first]
        except (_Damage, OSError) as error:
            self._raise(shard, error)

    def _read_with_zarr(self, shard: int, start: int, stop: int, out: np.ndarray) -> None:
        """The same through zarr, which hands out fill values for a shard that is not there: look first."""
        if not self._location.has(self.shard_key(shard)):
            self._raise(shard, FileNotFoundError())
        try:
            out[...] = self._opened()[start:stop]
        except Exception as error:  # noqa: BLE001 - each codec has errors of its own
            self._raise(shard, error)

    def _raise(self, shard: int, error: Exception) -> NoReturn:
        first, last = shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.shape[0])
        if isinstance(error, FileNotFoundError):
            what = "is missing"
        elif isinstance(error, _Damage):
            what = f"is damaged: {error}"
        elif isinstance(error, OSError):
            what = f"cannot be read: {error.strerror or error}"
        else:
            what = f"cannot be decoded: {error}"
        name = self._location.name_of(self.shard_key(shard))
        where = self._where or f"rows {first}:{last} of '{self._name}'"
        raise DataError(
            f"dataset {self._location.url}: shard file {name} ({where}) {what}. {self._repair}"
        ) from error


def _has_files(location: Location) -> bool:
    """Whether shard files can be read by position; object stores and some systems cannot."""
    return location.local_path("") is not None and hasattr(os, "preadv")


class _Damage(Exception):
    """A shard file is not what its writer left."""


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
            length = 16 * self.n_chunks
            if self.size < length + _CRC_BYTES:
                raise _Damage(f"it has {self.size} bytes, not even its index of {length + _CRC_BYTES}")
            raw = self.read(self.size - length - _CRC_BYTES, length + _CRC_BYTES)
            self._index = np.frombuffer(_checked(raw, "its index"), "<u8").reshape(-1, 2)
        offset, length = (int(v) for v in self._index[chunk])
        if offset == _ABSENT:
            raise _Damage(f"its chunk {chunk} was never written")
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


_Decoder = Callable[[_ShardFile, int, np.ndarray], None]


def _checked(data: bytes, what: str) -> memoryview:
    """The bytes without their checksum, which has to be right."""
    import google_crc32c

    if len(data) < _CRC_BYTES:
        raise _Damage(f"{what} has {len(data)} bytes")
    body = np.frombuffer(data, np.uint8)[:-_CRC_BYTES]
    if google_crc32c.value(body).to_bytes(4, "little") != data[-_CRC_BYTES:]:
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
    plain = all(c == s for c, s in zip(array.chunks[1:], array.shape[1:], strict=True))
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
    import google_crc32c

    def decode(file: _ShardFile, chunk: int, out: np.ndarray) -> None:
        offset, length = file.extent(chunk, sharded)
        if length != out.nbytes + _CRC_BYTES:
            raise _Damage(f"chunk {chunk} has {length} bytes instead of {out.nbytes + _CRC_BYTES}")
        checksum = file.read_into(out, offset)
        if google_crc32c.value(out.reshape(-1).view(np.uint8)).to_bytes(4, "little") != checksum:
            raise _Damage(f"the checksum of chunk {chunk} is wrong")

    return decode


def _packed_decoder(sharded: bool, codec: str) -> _Decoder:
    import numcodecs.blosc
    import numcodecs.zstd

    # Blosc decodes in the calling thread unless that is the main thread, so its pool and ours do not
    # multiply.
    unpack = {"zstd": numcodecs.zstd.decompress, "blosc": numcodecs.blosc.decompress}[codec]

    def decode(file: _ShardFile, chunk: int, out: np.ndarray) -> None:
        body = _checked(file.read(*file.extent(chunk, sharded)), f"chunk {chunk}")
        try:
            unpack(body, out.reshape(-1).view(np.uint8))
        except (RuntimeError, ValueError) as error:
            raise _Damage(f"chunk {chunk} does not unpack: {error}") from error

    return decode
