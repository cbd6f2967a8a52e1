"""Choose the sizes of chunks and shards and the codec for stored rows; the defaults were measured."""

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
"""Codecs: zstd level 1, Blosc-LZ4, or no compression. Each chunk also gets a CRC-32C checksum."""

# The defaults come from benchmarks/results/data_layouts.json (warm page cache, one thread; a memmap copies
# 9 - 18 GB/s).
# - Codec: digits read at 3.3 - 7 GB/s without a codec, at 1.7 - 3 GB/s with LZ4 (3.1 x smaller) and at
#   0.9 - 1.3 GB/s with zstd (4.8 x smaller). Integers use LZ4, because zstd takes as long as the kernels that
#   use the rows. Floats use no codec, because float32 noise shrinks only 1.08 x.
# - Chunks: 1,024 to 16,384 rows of 784 bytes read equally fast; 4 MB keep the buffers of a few threads in
#   cache.
# - Shards: one or eight chunks per file read equally fast. Compressed shards have up to 16 MB, for few files
#   in object stores. Uncompressed shards have one chunk, which is read directly into its array.
CHUNK_BYTES = 4 << 20
MAX_CHUNK_ROWS = 16_384
SHARD_BYTES = 16 << 20
MAX_SHARD_ROWS = 65_536
# Bytes of one CSR row group; a pass reads whole row groups and has a few of them in memory at one time.
GROUP_BYTES = 8 << 20

MAX_RATIO = 250
"""Highest compression ratio of all codecs: LZ4 with rows of zeros."""

WRITE_CONFIG: dict[str, Any] = {"write_empty_chunks": True}
"""Setting for every array that is opened for writing, because zarr does not store the setting."""


@dataclass(frozen=True)
class ChunkLayout:
    """Chunks, shards and codec of a dataset's rows."""

    chunk_rows: int
    """Rows per chunk, the unit that one read decodes."""
    shard_rows: int
    """Rows per shard (one file, one writer), a multiple of `chunk_rows`; no sharding codec if equal."""
    compressor: str | None
    """One of `COMPRESSORS`, or 'auto' for CSR rows, whose arrays use different codecs."""
    tile_columns: int | None = None
    """Columns per tile if rows with one axis are also split by columns; each shard is then one tile."""

    def n_shards(self, n_rows: int) -> int:
        return -(-n_rows // self.shard_rows)

    def n_tiles(self, n_features: int) -> int:
        """Return the number of tiles: groups of at most `tile_columns` columns with separate shard files."""
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
    target_bytes: int = 0,
) -> ChunkLayout:
    """Return the layout of dense rows; choose sizes that are None. `target_bytes` is bytes of `y` per row."""
    if tile_columns is not None:
        # A tile (some columns of a range of rows) is one chunk and one file.
        chunk_rows = shard_rows = shard_rows or chunk_rows
    _check_choices(compressor, chunk_rows=chunk_rows, shard_rows=shard_rows, tile_columns=tile_columns)
    if compressor == "auto":
        compressor = None if dtype.kind == "f" else "lz4"
    if chunk_rows and shard_rows and shard_rows % chunk_rows:
        raise DataError(
            f"shard_rows is {shard_rows}, but it must be a multiple of chunk_rows ({chunk_rows}), because "
            f"a shard consists of whole chunks; give for example {-(-shard_rows // chunk_rows) * chunk_rows}"
        )
    row_bytes = max(1, n_features(feature_shape) * dtype.itemsize)
    if chunk_rows is None:
        chunk_rows = _chunk_rows(
            row_bytes, n_rows if shard_rows is None else min(shard_rows, n_rows), shard_rows
        )
    chunk_rows = min(chunk_rows, n_rows)
    if shard_rows is None:
        room = min(SHARD_BYTES // (row_bytes + target_bytes), MAX_SHARD_ROWS) // chunk_rows
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
    target_bytes: int = 0,
) -> ChunkLayout:
    """Return the layout of CSR rows; the mean bytes of a row determine the rows per row group."""
    _check_choices(compressor, shard_rows=shard_rows)
    if chunk_rows is not None:
        raise DataError(
            f"chunk_rows is {chunk_rows}, but CSR rows have row groups instead of chunks; give "
            "shard_rows, the number of rows of a row group"
        )
    if shard_rows is None:
        row_bytes = nnz / n_rows * (dtype.itemsize + 4) + 8 + target_bytes
        shard_rows = min(_power_of_two(int(GROUP_BYTES / row_bytes)), MAX_SHARD_ROWS)
    shard_rows = min(shard_rows, n_rows)
    return ChunkLayout(shard_rows, shard_rows, compressor)


def _check_choices(compressor: str | None, **sizes: int | None) -> None:
    """Raise a `DataError` for an unknown codec or a size below 1."""
    if compressor not in ("auto", *COMPRESSORS):
        raise DataError(f"compressor is {compressor!r}, but it must be 'auto', 'zstd', 'lz4' or None")
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise DataError(f"{name} is {size}, but it must be at least 1")


def _chunk_rows(row_bytes: int, limit: int, shard_rows: int | None) -> int:
    """Return the rows per chunk: at most `limit`, and a divisor of `shard_rows` if this is not None."""
    best = min(_power_of_two(CHUNK_BYTES // row_bytes), MAX_CHUNK_ROWS)
    if limit <= best or shard_rows is None:
        return min(limit, best)
    least = -(-shard_rows // best)
    parts = next((k for k in range(least, 8 * least) if shard_rows % k == 0), 1)
    return shard_rows // parts


def _power_of_two(rows: int) -> int:
    """Return the largest power of two <= `rows`, at least 1.

    Fits also read ranges of a power of two rows, so these ranges end at the ends of chunks.
    """
    return 1 << max(0, rows.bit_length() - 1)


def make_codecs(compressor: str | None, dtype: np.dtype) -> list[BytesBytesCodec]:
    """Return the codecs of a chunk; CRC-32C comes last, so that damage is detected before decoding."""
    from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

    shuffle = "shuffle" if dtype.itemsize > 1 else "noshuffle"
    packed: dict[str | None, list[BytesBytesCodec]] = {
        None: [],
        "zstd": [ZstdCodec(level=1)],
        # No bit shuffling: it halves the read throughput, and one-byte values would take more space.
        "lz4": [BloscCodec(cname="lz4", clevel=5, shuffle=shuffle, typesize=dtype.itemsize)],
    }
    return [*packed[compressor], Crc32cCodec()]


def layout_of(array: zarr.Array) -> ChunkLayout:
    """Return the chunks, shards and codec of an array that `begin_dataset` created."""
    _, chain = codecs_of(array)
    packers = [name for name, _ in chain if name in ("zstd", "blosc")]
    kind = "zstd" if "zstd" in packers else "lz4" if packers else None
    return ChunkLayout(array.chunks[0], (array.shards or array.chunks)[0], kind, tile_columns_of(array))


Codecs = list[tuple[str, dict[str, Any]]]
"""Names and settings of the codecs of a chunk, as stored in `zarr.json`."""


def codecs_of(array: zarr.Array) -> tuple[dict[str, Any] | None, Codecs]:
    """Return the sharding settings of an array, or None, and the codecs of its chunks."""
    chain = named_codecs(array.metadata.to_dict().get("codecs", ()))
    if len(chain) == 1 and chain[0][0] == "sharding_indexed":
        shards = chain[0][1]
        return shards, named_codecs(shards["codecs"])
    return None, chain


def named_codecs(chain: Iterable[str | Mapping[str, Any]]) -> Codecs:
    """Return stored codecs as (name, settings); zarr may store a codec without settings as a bare name."""
    return [
        (codec, {}) if isinstance(codec, str) else (codec["name"], codec.get("configuration") or {})
        for codec in chain
    ]


def packing_of(array: zarr.Array) -> str:
    """Return a text of chunk sizes and codecs, which changes if other software repacks the array."""
    sizes = layout_of(array)
    names = [name for name, _ in codecs_of(array)[1]]
    return "/".join(map(str, [sizes.chunk_rows, sizes.shard_rows, sizes.tile_columns, *names]))


def tile_columns_of(array: zarr.Array) -> int | None:
    """Return the columns per chunk if an array is also split by columns (into tiles), else None."""
    return int(array.chunks[1]) if array.ndim == 2 and array.chunks[1] < array.shape[1] else None
