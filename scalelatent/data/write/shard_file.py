"""One-dimensional arrays as shard files, written without zarr: the inverse of the reader in chunks.py.

zarr needs about ten milliseconds to create and write a small array, and a row group has three. The files here
are the same: any zarr v3 reads them (a test does).
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data.layout import codecs

if TYPE_CHECKING:
    import zarr

__all__ = ["GROUP_JSON", "array_json", "shard_bytes", "template"]

GROUP_JSON = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()


@functools.lru_cache(maxsize=64)
def template(dtype: str, compressor: str | None) -> zarr.Array:
    """An array (1,) in memory with the codecs of a sharded array of this type."""
    import zarr

    return zarr.create_array(
        zarr.storage.MemoryStore(),
        shape=(1,),
        dtype=np.dtype(dtype),
        chunks=(1,),
        shards=(1,),
        compressors=codecs(compressor, np.dtype(dtype)),
        fill_value=0,
    )


@functools.lru_cache(maxsize=64)
def _metadata(dtype: str, compressor: str | None) -> str:
    return json.dumps(template(dtype, compressor).metadata.to_dict())


def array_json(length: int, chunk: int, dtype: str, compressor: str | None) -> bytes:
    """The `zarr.json` of an array (length,) whose chunks all lie in one shard."""
    meta = json.loads(_metadata(dtype, compressor))
    meta["shape"] = [length]
    meta["chunk_grid"]["configuration"]["chunk_shape"] = [max(1, -(-length // chunk)) * chunk]
    meta["codecs"][0]["configuration"]["chunk_shape"] = [chunk]
    return json.dumps(meta).encode()


def shard_bytes(values: np.ndarray, chunk: int, compressor: str | None) -> bytes:
    """The shard file of an array: its chunks, each packed and with a checksum, then where they lie.

    Parameters
    ----------
    values : ndarray (length,)
        At least one number.
    chunk : int
        Numbers of a chunk; the last one is filled up with zeros.
    compressor : str or None
        One of `layout.COMPRESSORS`.
    """
    parts, places, at = [], [], 0
    for first in range(0, len(values), chunk):
        piece = np.ascontiguousarray(values[first : first + chunk])
        if len(piece) < chunk:
            piece = np.concatenate([piece, np.zeros(chunk - len(piece), piece.dtype)])
        body = _summed(_pack(piece, compressor))
        parts.append(body)
        places += [at, len(body)]
        at += len(body)
    return b"".join([*parts, _summed(np.array(places, "<u8").tobytes())])


def _pack(piece: np.ndarray, compressor: str | None) -> bytes:
    import numcodecs.blosc
    import numcodecs.zstd

    little = piece.astype(piece.dtype.newbyteorder("<"), copy=False)
    if compressor is None:
        return little.tobytes()
    if compressor == "zstd":
        return bytes(numcodecs.zstd.compress(little.view(np.uint8), 1))
    how = numcodecs.blosc.SHUFFLE if piece.itemsize > 1 else numcodecs.blosc.NOSHUFFLE
    return bytes(numcodecs.blosc.Blosc(cname="lz4", clevel=5, shuffle=how).encode(little))


def _summed(body: bytes) -> bytes:
    import crc32c

    return body + crc32c.crc32c(body).to_bytes(4, "little")
