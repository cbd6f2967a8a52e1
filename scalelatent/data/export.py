"""Convert a dataset to lazy arrays of Dask."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError

from .read.containers import SlicedRows

if TYPE_CHECKING:
    import dask.array as da

    from .dataset import Dataset


def as_dask(ds: Dataset) -> tuple[da.Array, da.Array | None, da.Array | None]:
    """Return rows, labels (or None) and weights (or None) of a dataset as dask arrays."""
    if ds.is_sparse or ds.y_kind == "multilabel":
        raise DataError(
            f"{ds.url or 'the dataset'} has CSR columns, but dask arrays are dense; write dense rows first: "
            "`scalelatent data convert --dense` (convert_dataset(ds, out, sparse=False))"
        )
    lazy = ds.lazy(0, len(ds))
    x = _make_dask_column(ds, "x", (len(ds), *ds.feature_shape), ds.dtype) if lazy is None else lazy[0]
    y = None
    if ds.has_y:
        one = ds.read_y(0, 1)
        dtype = one.dtype if ds.classes is None else ds.classes.dtype
        y = _make_dask_column(ds, "y", (len(ds), *one.shape[1:]), dtype)
    return x, y, _make_dask_column(ds, "weight", (len(ds),), np.dtype("f8")) if ds.has_weight else None


def _read_column(
    ds: Dataset, name: str, shape: tuple[int, ...], dtype: np.dtype, start: int, stop: int
) -> np.ndarray:
    read = {"x": ds.read_x, "y": ds.read_y, "weight": ds.read_weight}[name]
    return np.asarray(read(start, stop)).reshape(stop - start, *shape[1:]).astype(dtype, copy=False)


def _make_dask_column(ds: Dataset, name: str, shape: tuple[int, ...], dtype: np.dtype) -> da.Array:
    """Return a column as a dask array, with one block for each chunk of the rows on disk."""
    import dask.array as da

    pieces = ds.pieces()
    rows = tuple(b - a for a, b in pieces) if len(pieces) > 1 else "auto"
    chunks: Any = (rows, *((side,) for side in shape[1:]))
    # A stored dataset is pickled as its spec, so each task opens the dataset where the task runs.
    read = functools.partial(_read_column, ds, name, shape, dtype)
    return da.from_array(
        SlicedRows(shape, dtype, read),
        chunks=chunks,
        name=f"{name}-{ds.fingerprint()[:16]}" if ds.is_stored else False,
        asarray=False,
        fancy=False,
        meta=np.empty((0,) * len(shape), dtype),
    )
