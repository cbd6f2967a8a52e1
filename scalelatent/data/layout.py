"""How rows are cut into chunks and shards, and which codec packs them; the defaults were measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError

from .schema import n_features

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import zarr
    from zarr.abc.codec import BytesBytesCodec

COMPRESSORS = ("zstd", "lz4", None)
"""zstd level 1; Blosc-LZ4; nothing. A CRC-32C is put around each chunk in any case."""

# Defaults, from benchmarks/results/data_layouts.json (warm page cache, one thread; a memmap copies at 9 - 18
# GB/s).
# - Codec. Digits: none 3.3 - 7 GB/s, LZ4 1.7 - 3 GB/s and 3.1 x smaller, zstd 0.9 - 1.3 GB/s and 4.8 x
#   smaller. LZ4: zstd would cost as much time as the kernels that eat the rows, none three times the disk.
#   float32 noise packs 1.08 x: none.
# - Chunks: 1,024 to 16,384 rows of 784 bytes read alike; 4 MB keeps the buffers of a few threads in cache.
# - Shards: one or eight chunks a file read alike. Packed rows get up to 16 MB a file, so that object stores
#   see few files; unpacked ones (also the scratch of a run) a file per chunk, which is read straight into
#   place.
CHUNK_BYTES = 4 << 20
MAX_CHUNK_ROWS = 16_384
SHARD_BYTES = 16 << 20
MAX_SHARD_ROWS = 65_536
# A row group is read whole by a pass, and a few of them are in memory at a time.
GROUP_BYTES = 8 << 20

_MOST_PACKED = 250  # times smaller that LZ4 makes rows of zeros

WRITE_CONFIG: dict[str, Any] = {"write_empty_chunks": True}
"""zarr does not store this setting: it is given each time an array is opened to write."""


@dataclass(frozen=True)
class ChunkLayout:
    """Chunks, shards and codec of a dataset's rows."""

    chunk_rows: int
    """Rows of a chunk: what one read decodes."""
    shard_rows: int
    """Rows of a shard: one file, one writer. A multiple of `chunk_rows`; equal to it: no sharding codec."""
    compressor: str | None
    """One of `COMPRESSORS`, or 'auto' for CSR rows, whose arrays differ."""
    tile_columns: int | None = None
    """Columns of a tile where rows of one axis are cut across, too: then a shard is one tile."""

    def least_bytes(self, numbers: int, dtype: np.dtype) -> int:
        """Bytes that so many numbers take at least, however well they pack."""
        plain = self.compressor is None or (self.compressor == "auto" and dtype.kind == "f")
        return numbers * dtype.itemsize // (1 if plain else _MOST_PACKED)

    def n_shards(self, n_rows: int) -> int:
        return -(-n_rows // self.shard_rows)

    def n_tiles(self, n_features: int) -> int:
        """Shards side by side that hold the rows' columns."""
        return 1 if self.tile_columns is None else -(-n_features // self.tile_columns)


def choose_layout(
    n_rows: int,
    feature_shape: tuple[int, ...],
    dtype: np.dtype,
    *,
    chunk_rows: int | None = None,
    shard_rows: int | None = None,
    compressor: str | None = "auto",
    tile_columns: int | None = None,
    beside: int = 0,
) -> ChunkLayout:
    """Fill in what the caller left open; `beside` is the bytes of other columns in a row (dense targets)."""
    if tile_columns is not None:
        # A tile is one chunk and one file.
        chunk_rows = shard_rows = shard_rows or chunk_rows
    if compressor == "auto":
        compressor = None if dtype.kind == "f" else "lz4"
    if compressor not in COMPRESSORS:
        raise DataError(f"compressor is {compressor!r}, but it has to be 'auto', 'zstd', 'lz4' or None")
    sizes = {"chunk_rows": chunk_rows, "shard_rows": shard_rows, "tile_columns": tile_columns}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise DataError(f"{name} is {size}, but it has to be at least 1")
    if chunk_rows and shard_rows and shard_rows % chunk_rows:
        raise DataError(
            f"shard_rows is {shard_rows}, but it has to be a multiple of chunk_rows ({chunk_rows}), because "
            f"a chunk lies in one shard; give for example {-(-shard_rows // chunk_rows) * chunk_rows}"
        )
    row_bytes = max(1, n_features(feature_shape) * dtype.itemsize)
    if chunk_rows is None:
        chunk_rows = _chunk_rows(
            row_bytes, n_rows if shard_rows is None else min(shard_rows, n_rows), shard_rows
        )
    chunk_rows = min(chunk_rows, n_rows)
    if shard_rows is None:
        room = min(SHARD_BYTES // (row_bytes + beside), MAX_SHARD_ROWS) // chunk_rows
        whole_chunk = compressor is None or tile_columns is not None
        shard_rows = chunk_rows * (1 if whole_chunk else _power_of_two(room))
    whole = -(-n_rows // chunk_rows) * chunk_rows
    return ChunkLayout(chunk_rows, min(shard_rows, whole), compressor, tile_columns)


def choose_csr_layout(
    n_rows: int,
    nnz: int,
    dtype: np.dtype,
    *,
    shard_rows: int | None = None,
    chunk_rows: int | None = None,
    compressor: str | None = "auto",
    beside: int = 0,
) -> ChunkLayout:
    """The layout of CSR rows: rows of a row group, by the mean bytes of a row."""
    if compressor not in ("auto", *COMPRESSORS):
        raise DataError(f"compressor is {compressor!r}, but it has to be 'auto', 'zstd', 'lz4' or None")
    if chunk_rows is not None:
        raise DataError(
            f"chunk_rows is {chunk_rows}, but CSR rows have row groups, not chunks; give shard_rows, the "
            "rows of a row group"
        )
    if shard_rows is not None and shard_rows < 1:
        raise DataError(f"shard_rows is {shard_rows}, but it has to be at least 1")
    if shard_rows is None:
        row_bytes = nnz / n_rows * (dtype.itemsize + 4) + 8 + beside
        shard_rows = min(_power_of_two(int(GROUP_BYTES / row_bytes)), MAX_SHARD_ROWS)
    shard_rows = min(shard_rows, n_rows)
    return ChunkLayout(shard_rows, shard_rows, compressor)


def _chunk_rows(row_bytes: int, limit: int, shard_rows: int | None) -> int:
    """Rows of a chunk, at most `limit`; where the shard is given, a divisor of it."""
    wanted = min(_power_of_two(CHUNK_BYTES // row_bytes), MAX_CHUNK_ROWS)
    if limit <= wanted or shard_rows is None:
        return min(limit, wanted)
    least = -(-shard_rows // wanted)
    parts = next((k for k in range(least, 8 * least) if shard_rows % k == 0), 1)
    return shard_rows // parts


def _power_of_two(rows: int) -> int:
    """The largest power of two up to `rows`, at least 1: blocks and leaves then end where chunks end."""
    return 1 << max(0, rows.bit_length() - 1)


def codecs(compressor: str | None, dtype: np.dtype) -> list[BytesBytesCodec]:
    """The bytes-to-bytes codecs of a chunk; CRC-32C is outermost, so damage is found before decoding."""
    from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

    shuffle = "shuffle" if dtype.itemsize > 1 else "noshuffle"
    packed: dict[str | None, list[BytesBytesCodec]] = {
        None: [],
        "zstd": [ZstdCodec(level=1)],
        # Shuffling bits costs half of the reading rate, and single bytes get larger by it.
        "lz4": [BloscCodec(cname="lz4", clevel=5, shuffle=shuffle, typesize=dtype.itemsize)],
    }
    return [*packed[compressor], Crc32cCodec()]


def layout_of(array: zarr.Array) -> ChunkLayout:
    """The layout of an array that `begin_dataset` made."""
    _, chain = codecs_of(array)
    packers = [name for name, _ in chain if name in ("zstd", "blosc")]
    kind = "zstd" if "zstd" in packers else "lz4" if packers else None
    return ChunkLayout(array.chunks[0], (array.shards or array.chunks)[0], kind, tile_columns_of(array))


Codecs = list[tuple[str, dict[str, Any]]]
"""Names and settings of the codecs of a chunk, as `zarr.json` has them."""


def codecs_of(array: zarr.Array) -> tuple[dict[str, Any] | None, Codecs]:
    """The settings of the shards of an array, if it has any, and the codecs of its chunks."""
    chain = named_codecs(array.metadata.to_dict().get("codecs", ()))
    if len(chain) == 1 and chain[0][0] == "sharding_indexed":
        shards = chain[0][1]
        return shards, named_codecs(shards["codecs"])
    return None, chain


def named_codecs(chain: Iterable[str | Mapping[str, Any]]) -> Codecs:
    """Stored codecs by name; one without settings may be its name alone."""
    return [
        (codec, {}) if isinstance(codec, str) else (codec["name"], codec.get("configuration") or {})
        for codec in chain
    ]


def packing_of(array: zarr.Array) -> str:
    """How an array is cut and packed, to notice when other software has packed it again."""
    sizes = layout_of(array)
    names = [name for name, _ in codecs_of(array)[1]]
    return "/".join(map(str, [sizes.chunk_rows, sizes.shard_rows, sizes.tile_columns, *names]))


def tile_columns_of(array: zarr.Array) -> int | None:
    """Columns of a tile where an array is cut across its rows, too, else None."""
    return int(array.chunks[1]) if array.ndim == 2 and array.chunks[1] < array.shape[1] else None
