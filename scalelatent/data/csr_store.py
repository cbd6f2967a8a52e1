"""Write and read CSR columns on disk: row groups `x/000042/{data,indices,indptr}`, each with one writer."""

from __future__ import annotations

import copy
import functools
import json
import threading
from typing import TYPE_CHECKING

import crc32c
import numpy as np

from scalelatent.errors import DataError, ShardError

from . import csr
from .checksums import chunk_crcs
from .layout import ChunkLayout, make_codecs
from .read.chunks import StoredRows
from .read.sources import StoredColumn

if TYPE_CHECKING:
    import zarr
    from scipy.sparse import csr_array

    from scalelatent.storage.disk import Location

CHUNK_ENTRIES = 1 << 17
"""Maximum number of entries in one chunk of a row group."""
_PARTS = ("data", "indices", "indptr")
GROUP_JSON = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()


def create_csr(
    group: zarr.Group,
    name: str,
    shape: tuple[int, int],
    dtype: np.dtype,
    group_rows: int,
    compressor: str | None,
) -> None:
    """Create the CSR column `name` without rows: its attributes and the table of entries per row group."""
    auto = compressor == "auto"
    kinds = {
        "data": (None if dtype.kind == "f" else "lz4") if auto else compressor,
        "indices": "lz4" if auto else compressor,
        "indptr": "zstd",
    }
    attributes = {
        "encoding": "csr",
        "shape": list(shape),
        "dtype": dtype.str,
        "group_rows": group_rows,
        "compressors": kinds,
    }
    column = group.create_group(name, attributes=attributes)
    n_groups = -(-shape[0] // group_rows)
    column.create_array("nnz", shape=(n_groups,), dtype="i8", chunks=(n_groups,), fill_value=-1)


class _Column:
    """Metadata of one stored CSR matrix (rows or multi-labels), shared by the writer and the reader."""

    def __init__(self, location: Location, group: zarr.Group, name: str) -> None:
        try:
            self._group: zarr.Group = group[name]
            a = dict(self._group.attrs)
            self.shape: tuple[int, ...] = (int(a["shape"][0]), int(a["shape"][1]))
            self.dtype: np.dtype = np.dtype(a["dtype"])
            self.group_rows = int(a["group_rows"])
            self.compressors: dict[str, str | None] = dict(a["compressors"])
        except Exception as error:  # the array is missing, or its metadata cannot be read
            raise DataError(
                f"{location.url}: CSR column '{name}' is missing or its zarr.json is damaged; import again"
            ) from error
        self.name = name
        self._location = location

    @property
    def packing(self) -> str:
        """Text of row group size and compressors, which changes if other software repacks the rows."""
        return "/".join([str(self.group_rows), *(str(self.compressors[part]) for part in _PARTS)])

    def bounds(self, number: int) -> tuple[int, int]:
        return number * self.group_rows, min((number + 1) * self.group_rows, self.shape[0])


class CsrGroups(_Column):
    """Writer of the row groups of a CSR column, with the methods of zarr arrays that `ShardWriter` calls."""

    shards = None

    def __init__(self, location: Location, group: zarr.Group, name: str) -> None:
        super().__init__(location, group, name)
        self.crcs: dict[int, list[int]] = {}
        """Row group -> checksums of its chunks, kept from the write until `ShardWriter` removes them."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """Rows per row group and number of columns."""
        return self.group_rows, self.shape[1]

    def __setitem__(self, rows: slice, values: csr_array) -> None:
        """Write `values` as the row group with the row numbers `rows`; its folder must be empty."""
        number = rows.start // self.group_rows
        folder = self.folder(number)
        crcs: list[int] = []
        for part, column in zip(_PARTS, csr.unpack_csr(values), strict=True):
            codec = column.dtype.str, self.compressors[part]
            chunk = _chunk_length(len(column))
            self._location.write(f"{folder}/{part}/zarr.json", array_json(len(column), chunk, *codec))
            if len(column):
                data = shard_bytes(column, chunk, codec[1])
                crcs += chunk_crcs(data, _n_chunks(len(column)))
                self._location.write(f"{folder}/{part}/c/0", data)
        self._location.write(f"{folder}/zarr.json", GROUP_JSON)
        self.crcs[number] = crcs

    def write_entry_counts(self, counts: list[int]) -> None:
        """Write the number of stored entries of each row group, after all row groups are written."""
        self._group["nnz"][...] = np.array(counts, dtype=np.int64)

    def keys(self, number: int, nnz: int) -> list[str]:
        """Return the paths, inside the dataset, of the files of a row group with `nnz` entries."""
        return [f"{self.folder(number)}/{p}/c/0" for p in (_PARTS if nnz else _PARTS[2:])]

    def folder(self, number: int) -> str:
        """Return the path, inside the dataset, of the folder of a row group."""
        return f"{self.name}/{number:06d}"


def _chunk_length(length: int) -> int:
    """Return the chunk length for an array; chunks have nearly equal lengths, to avoid padding with zeros."""
    parts = max(1, -(-length // CHUNK_ENTRIES))
    return max(1, -(-length // parts))


def _n_chunks(length: int) -> int:
    return -(-length // _chunk_length(length))


class StoredCsr(_Column, StoredColumn):
    """Rows of a CSR column of a finished dataset."""

    sparse = True
    n_tiles = 1

    def __init__(self, location: Location, group: zarr.Group, name: str, repair: str) -> None:
        super().__init__(location, group, name)
        self.shard_rows = self.group_rows
        self._repair = repair
        try:
            counts = np.asarray(self._group["nnz"][...])
        except Exception as error:
            raise DataError(f"{location.url}: table '{name}/nnz' is missing or damaged; {repair}") from error
        if len(counts) != -(-self.shape[0] // self.group_rows) or (counts < 0).any():
            raise DataError(
                f"{location.url}: table '{name}/nnz' does not fit {self.shape[0]} rows in row groups of "
                f"{self.group_rows}; {repair}"
            )
        self._counts = counts
        self._crcs: np.ndarray | None = None
        self._readers: tuple[StoredRows, ...] | None = None
        self._lock = threading.Lock()

    @property
    def nnz(self) -> int:
        return int(self._counts.sum())

    @functools.cached_property
    def _crc_edges(self) -> np.ndarray:
        """Index of the first checksum of each array of each row group, and the number of checksums."""
        parts = [
            _n_chunks(length)
            for number, nnz in enumerate(self._counts.tolist())
            for length in (nnz, nnz, self.bounds(number)[1] - self.bounds(number)[0] + 1)
        ]
        return np.concatenate([[0], np.cumsum(parts, dtype=np.int64)])

    @property
    def n_crcs(self) -> int:
        return int(self._crc_edges[-1])

    def expect_crcs(self, crcs: np.ndarray) -> None:
        self._crcs = crcs

    def crcs_of(self, number: int) -> slice:
        return slice(int(self._crc_edges[3 * number]), int(self._crc_edges[3 * number + 3]))

    @property
    def layout(self) -> ChunkLayout:
        kind = self.compressors["data"]
        same = kind == self.compressors["indices"]
        return ChunkLayout(self.group_rows, self.group_rows, kind if same else "auto")

    def count_entries(self, start: int, stop: int) -> int:
        total = 0
        for number, a, b in self._parts(start, stop):
            first, _ = self.bounds(number)
            whole = (first + a, first + b) == self.bounds(number)
            pointers = None if whole else self._reader(number, 2).read(a, b + 1)
            total += int(self._counts[number] if pointers is None else pointers[-1] - pointers[0])
        return total

    def read(self, start: int, stop: int) -> csr_array:
        parts = [self._read_group(*part) for part in self._parts(start, stop)]
        if parts:
            return csr.stack(parts)
        nothing = np.zeros(0, self.dtype), np.zeros(0, csr.index_dtype(self.shape[1])), np.zeros(1, np.int64)
        return csr.csr_of(*nothing, self.shape[1])

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        return [
            (number * self.group_rows + a, number * self.group_rows + b)
            for number, a, b in self._parts(start, stop)
        ]

    def shards(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        numbers = [number for number, _, _ in self._parts(start, stop)]
        return [(self._location.name_of(f"{self.name}/{n:06d}"), *self.bounds(n)) for n in numbers]

    def _parts(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (row group, first row inside the group, one past the last) for the rows `start:stop`."""
        out, row = [], start
        while row < stop:
            number = row // self.group_rows
            first, last = self.bounds(number)
            out.append((number, row - first, min(stop, last) - first))
            row = last
        return out

    def _read_group(self, number: int, start: int, stop: int) -> csr_array:
        first, last = self.bounds(number)
        nnz = int(self._counts[number])
        pointers = self._reader(number, 2).read(start, stop + 1)
        a, b = int(pointers[0]), int(pointers[-1])
        whole = stop - start == last - first
        if not (0 <= a <= b <= nnz) or (whole and (a, b) != (0, nnz)) or (np.diff(pointers) < 0).any():
            words = f"the row pointers of {self._name_row_group(number)} do not fit its {nnz} entries"
            raise ShardError(
                f"dataset {self._location.url}: {words}. {self._repair}",
                self._location.name_of(f"{self.name}/{number:06d}"),
                first,
                last,
            )
        data, indices = (self._reader(number, part).read(a, b) if b > a else None for part in (0, 1))
        if data is None or indices is None:
            data, indices = np.zeros(0, self.dtype), np.zeros(0, csr.index_dtype(self.shape[1]))
        return csr.csr_of(data, indices, pointers - a, self.shape[1])

    def _name_row_group(self, number: int) -> str:
        first, last = self.bounds(number)
        return f"row group {self.name}/{number:06d}, rows {first}:{last} of '{self.name}'"

    def _reader(self, number: int, part: int) -> StoredRows:
        """Return the reader of one array of a row group; `part` is the index of the array in `_PARTS`."""
        first, last = self.bounds(number)
        length = last - first + 1 if part == 2 else int(self._counts[number])
        path = f"{self.name}/{number:06d}/{_PARTS[part]}"
        reader = self._templates()[part].sibling(
            path, length, _chunk_length(length), self._name_row_group(number), (first, last)
        )
        if self._crcs is not None:
            at = 3 * number + part
            reader.expect_crcs(self._crcs[self._crc_edges[at] : self._crc_edges[at + 1]])
        return reader

    def _templates(self) -> tuple[StoredRows, ...]:
        """Return readers of values, indices and row pointers; `_reader` copies them for each row group."""
        with self._lock:
            if self._readers is None:
                dtypes = (self.dtype, csr.index_dtype(self.shape[1]), np.dtype(np.int64))
                self._readers = tuple(
                    StoredRows(
                        self._location, codec_template(dtype.str, self.compressors[part]), self._repair
                    )
                    for part, dtype in zip(_PARTS, dtypes, strict=True)
                )
            return self._readers


# The functions below write small arrays as shard files without zarr, because zarr needs ten milliseconds for
# each of the three arrays of a row group. The files are identical, and any zarr v3 reader can read them.


@functools.lru_cache(maxsize=64)
def codec_template(dtype: str, compressor: str | None) -> zarr.Array:
    """Return a zarr array (1,) in memory with the codecs of a sharded array of this dtype."""
    import zarr

    return zarr.create_array(
        zarr.storage.MemoryStore(),
        shape=(1,),
        dtype=np.dtype(dtype),
        chunks=(1,),
        shards=(1,),
        compressors=make_codecs(compressor, np.dtype(dtype)),
        fill_value=0,
    )


def array_json(length: int, chunk: int, dtype: str, compressor: str | None) -> bytes:
    """Return the `zarr.json` of an array (length,) with all its chunks in one shard."""
    meta = copy.deepcopy(codec_template(dtype, compressor).metadata.to_dict())
    meta["shape"] = [length]
    meta["chunk_grid"]["configuration"]["chunk_shape"] = [max(1, -(-length // chunk)) * chunk]
    meta["codecs"][0]["configuration"]["chunk_shape"] = [chunk]
    return json.dumps(meta).encode()


def shard_bytes(values: np.ndarray, chunk: int, compressor: str | None) -> bytes:
    """Return the bytes of a shard file: each compressed chunk with a checksum, then the index of chunks."""
    parts, places, at = [], [], 0
    for first in range(0, len(values), chunk):
        piece = np.ascontiguousarray(values[first : first + chunk])
        if len(piece) < chunk:
            piece = np.concatenate([piece, np.zeros(chunk - len(piece), piece.dtype)])
        body = _append_checksum(_compress(piece, compressor))
        parts.append(body)
        places += [at, len(body)]
        at += len(body)
    return b"".join([*parts, _append_checksum(np.array(places, "<u8").tobytes())])


def _compress(piece: np.ndarray, compressor: str | None) -> bytes:
    import numcodecs.blosc
    import numcodecs.zstd

    little = piece.astype(piece.dtype.newbyteorder("<"), copy=False)
    if compressor is None:
        return little.tobytes()
    if compressor == "zstd":
        return bytes(numcodecs.zstd.compress(little.view(np.uint8), 1))
    shuffle = numcodecs.blosc.SHUFFLE if piece.itemsize > 1 else numcodecs.blosc.NOSHUFFLE
    return bytes(numcodecs.blosc.Blosc(cname="lz4", clevel=5, shuffle=shuffle).encode(little))


def _append_checksum(body: bytes) -> bytes:
    return body + crc32c.crc32c(body).to_bytes(4, "little")
