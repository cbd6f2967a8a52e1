"""Compute and compare the fingerprint, shard digests and chunk checksums of a finished dataset."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError

from .csr import unpack_csr
from .read.chunk_files import ABSENT

if TYPE_CHECKING:
    import zarr

    from scalelatent.data.schema import CrcTable, Label
    from scalelatent.kernels.arrays import DenseOrCsr
    from scalelatent.storage.disk import Location

    from .read.sources import StoredColumn
    from .schema import DatasetAttrs

_log = logging.getLogger(__name__)


def fingerprint_of(
    attrs: DatasetAttrs,
    n_rows: int,
    dtype: np.dtype,
    y_dtype: np.dtype | None,
    shard_rows: int,
    classes: list[Label] | None,
    digests: np.ndarray,
) -> str:
    """Return the fingerprint of a dataset: the SHA-256 of attributes and `digests` (shards, 16), as hex."""
    head = [n_rows, list(attrs.feature_shape), dtype.str, classes, attrs.codes, shard_rows]
    if (attrs.x_kind, attrs.y_kind) != ("dense", "labels"):
        head += [attrs.x_kind, attrs.y_kind, attrs.n_targets, str(y_dtype)]
    return hashlib.sha256(json.dumps(head).encode() + digests.tobytes()).hexdigest()


def shard_digest(*columns: DenseOrCsr | None) -> bytes:
    """Return the first 16 bytes of the SHA-256 of a shard's values, before they are compressed."""
    digest = hashlib.sha256()
    for column in columns:
        if column is not None:
            for part in (column,) if isinstance(column, np.ndarray) else unpack_csr(column):
                digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.digest()[:16]


def read_digests(group: zarr.Group, url: str) -> np.ndarray:
    """Return the stored hash of each shard, uint8 (shards, 16), or raise a `DataError` if it is damaged."""
    try:
        return np.asarray(group["digest"][...], dtype=np.uint8)
    except Exception as error:  # the array is missing or cannot be read
        raise DataError(
            f"{url}: the table of digests, {url}/digest, is missing or damaged; restore that folder from a "
            "copy, or write the dataset again"
        ) from error


def check_digests(
    location: Location, attrs: DatasetAttrs, columns: dict[str, StoredColumn], group: zarr.Group
) -> None:
    """Raise a `DataError` if the stored hashes of the shards do not match the fingerprint of the dataset."""
    first = None if attrs.segments is None else attrs.segments[0]
    expected = attrs.fingerprint if first is None else first["fingerprint"]
    x, y = columns["x"], columns.get("y")
    digests = read_digests(group, location.url)
    rows = x.shard_rows if attrs.crc is None else int(attrs.crc.get("shard_rows", x.shard_rows))
    fits = len(digests) == -(-x.shape[0] // rows) * x.n_tiles
    if not fits and (attrs.crc is None or attrs.crc["columns"]["x"][1] != x.packing):
        return  # other software repacked the rows, so the old shard size is unknown
    y_dtype = None if y is None else np.dtype(y.dtype)
    classes = attrs.classes if first is None or first["classes"] is None else first["classes"]
    found = fingerprint_of(attrs, x.shape[0], np.dtype(x.dtype), y_dtype, rows, classes, digests)
    # When an append added classes, early versions did not store the former numeric classes, so the
    # fingerprint of the rows before the append cannot be computed.
    unknown = first is not None and first["classes"] is None and attrs.classes is not None
    if not fits or (found != expected and not unknown):
        raise DataError(
            f"dataset {location.url}: its table of digests, {location.name_of('digest')}, does not match "
            f"its fingerprint {str(expected)[:12]}: the table was changed, or it belongs to another dataset; "
            "restore that folder and zarr.json from one copy, or write the dataset again"
        )


def chunk_crcs(data: bytes | np.ndarray, n_chunks: int | None) -> list[int]:
    """Return the checksum (CRC-32C) that follows each chunk in a shard file; 0 for a missing chunk.

    `n_chunks` is None for a file without an index, which holds one chunk.
    """
    raw = np.frombuffer(data, np.uint8)
    if n_chunks is None:
        ends, there = np.array([len(raw)]), np.array([True])
    else:
        index = np.frombuffer(raw[len(raw) - 16 * n_chunks - 4 : -4].tobytes(), "<u8").reshape(-1, 2)
        there = index[:, 0] != ABSENT
        ends = np.where(there, index.sum(axis=1), 4).astype(np.int64)
    crcs = np.ascontiguousarray(raw[ends[:, None] + np.arange(-4, 0)]).view("<u4")[:, 0]
    return np.where(there, crcs, 0).tolist()


def write_crcs(
    group: zarr.Group, parts: dict[str, np.ndarray], packing: dict[str, str], shard_rows: int
) -> CrcTable:
    """Write the checksums of all chunks as one array; return the attribute `crc`, which describes it."""
    crcs = np.concatenate(list(parts.values()))
    size = max(1, len(crcs))
    how: dict[str, Any] = {"compressors": None, "fill_value": 0, "config": {"write_empty_chunks": True}}
    how["dimension_names"] = ("chunk",)
    table = group.create_array("crc", shape=(size,), dtype="<u4", chunks=(size,), overwrite=True, **how)
    table[: len(crcs)] = crcs
    columns = {name: [len(part), packing[name]] for name, part in parts.items()}
    return {"hash": _hash_crcs(crcs), "shard_rows": shard_rows, "columns": columns}


def split_crcs(location: Location, crc: CrcTable) -> dict[str, np.ndarray] | None:
    """Return the stored chunk checksums by column; None if their table is missing or has a wrong size."""
    sizes = {name: int(size) for name, (size, _) in crc["columns"].items()}
    total, raw = sum(sizes.values()), location.read("crc/c/0") or b""
    if len(raw) != 4 * max(1, total):
        return None
    table = np.frombuffer(raw, "<u4", total).astype(np.uint32)
    ends = np.cumsum(list(sizes.values()))
    return {name: table[end - size : end] for (name, size), end in zip(sizes.items(), ends, strict=True)}


def use_crc_table(location: Location, attrs: DatasetAttrs, columns: dict[str, StoredColumn]) -> None:
    """Give the stored checksums, if any, to the column readers, which then check all chunks they read."""
    if attrs.crc is None:
        return
    parts = split_crcs(location, attrs.crc)
    packing = {name: how for name, (_, how) in attrs.crc["columns"].items()}
    if parts is None or _hash_crcs(np.concatenate(list(parts.values()))) != attrs.crc["hash"]:
        name = location.name_of("crc/c/0")
        raise DataError(
            f"dataset {location.url}: its table of checksums, {name}, is missing or was not "
            "written with it; restore that file and zarr.json from one copy, or write the dataset again"
        )
    for name, column in columns.items():
        if packing.get(name) == column.packing and len(parts[name]) == column.n_crcs:
            column.expect_crcs(parts[name])
        else:
            _log.warning(
                "dataset %s: '%s' has been compressed again since the dataset was finished, so its checksums "
                "cannot be compared; `scalelatent data check` compares its rows instead",
                location.url,
                name,
            )


def _hash_crcs(crcs: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(crcs, "<u4").tobytes()).hexdigest()[:32]
