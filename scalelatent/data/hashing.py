"""Content of a dataset's rows as a hash, for rows that no writer has sealed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from .csr import parts_of
from .read.sources import DaskRows

if TYPE_CHECKING:
    from .dataset import Dataset

__all__ = ["hash_rows", "hash_weight"]

_HASH_ROWS = 4096  # rows hashed at a time; fixed, because CSR rows are hashed run by run


def hash_rows(ds: Dataset) -> str:
    """SHA-256 over the rows, labels and weights of a dataset in memory, in hexadecimal: one pass."""
    digest = hashlib.sha256(f"{ds.n_rows} {ds.feature_shape} {ds.dtype.str}".encode())
    source = ds._columns.x
    if ds.is_sparse:
        digest.update(b"csr")
    if isinstance(source, DaskRows):
        # Computing the array to hash it would cost as much as a pass; its name stands for its content.
        digest.update(f"dask {source.token} {ds._start}".encode())
    for a, b in [] if isinstance(source, DaskRows) else ds.pieces():
        for u in range(a, b, _HASH_ROWS):
            _hash_into(digest, ds.read_x(u, min(u + _HASH_ROWS, b)))
    if ds.has_y and ds._columns.paired is None:
        y = ds.read_y(0, ds.n_rows)
        kind = "" if ds.y_kind == "labels" else f" {ds.y_kind} {ds.n_targets}"
        digest.update(f"y {y.dtype.str}{kind}".encode())
        _hash_into(digest, y)
    if not ds.has_weight:
        return digest.hexdigest()
    return f"{digest.hexdigest()[:32]}{hash_weight(ds)[:32]}"


def hash_weight(ds: Dataset) -> str:
    """SHA-256 of the weights."""
    return hashlib.sha256(np.ascontiguousarray(ds.read_weight(0, ds.n_rows)).tobytes()).hexdigest()


def _hash_into(digest: Any, rows: Any) -> None:
    parts = (rows,) if isinstance(rows, np.ndarray) else parts_of(rows)
    for part in parts:
        digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
