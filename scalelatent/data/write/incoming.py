"""Rows, labels and weights as a writer is given them, checked before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalelatent.data import schema
from scalelatent.data.csr import CsrSource, check_values, is_sparse
from scalelatent.data.csr_store import CsrGroups
from scalelatent.errors import DataError

__all__ = ["as_rows_of", "as_weight_of", "as_y_of"]


def as_rows_of(
    column: Any, attrs: schema.DatasetAttrs, url: str, x: Any, start: int, stop: int, tile_width: int | None
) -> Any:
    """Rows `start:stop` as the column `x` of a dataset stores them.

    Parameters
    ----------
    column : zarr.Array or CsrGroups
    attrs : DatasetAttrs
    url : str
        Of the dataset, for messages.
    x : array-like or scipy sparse (stop - start, ...)
    start, stop : int
    tile_width : int or None
        Columns of a tile of rows that are cut across.

    Raises
    ------
    DataError
        Another shape, a type that does not fit, NaN or infinity.
    """
    what = f"{url}: rows {start}:{stop}"
    if isinstance(column, CsrGroups):
        return _as_csr_of(column, url, x, start, stop, what)
    if is_sparse(x):
        raise DataError(f"{what} are sparse, but the dataset is dense; pass x.toarray()")
    schema.refuse_masked(x, what, start)
    rows = np.asarray(x)
    shape: tuple[int, ...] = (stop - start, *attrs.feature_shape)
    flat = (stop - start, schema.n_features(attrs.feature_shape))
    if tile_width is not None:
        shape = flat = (stop - start, tile_width)
    if rows.shape not in (shape, flat):
        raise DataError(f"{what} were given with shape {rows.shape}, but this shard has shape {shape}")
    if not np.can_cast(rows.dtype, column.dtype, "safe"):
        raise DataError(
            f"{what} are {rows.dtype}, which does not fit into the dataset's {column.dtype}; convert them"
        )
    schema.check_finite(rows, start, url)
    return np.ascontiguousarray(rows, dtype=column.dtype).reshape(shape)


def as_y_of(
    column: Any, attrs: schema.DatasetAttrs, url: str, y: Any, start: int, stop: int
) -> tuple[Any, list[Any] | None]:
    """Labels, targets or multi-labels of rows `start:stop` as the column `y` of a dataset stores them.

    Parameters
    ----------
    column : zarr.Array, CsrGroups or None
        None where the dataset has none.

    Returns
    -------
    values : ndarray, scipy sparse or None
    distinct : list or None
        The labels among them, where they are few and are not stored as codes.

    Raises
    ------
    DataError
        They are missing or too many, do not fit, or are not of the dataset's classes.
    """
    what = f"{url}: labels of rows {start}:{stop}"
    if (y is None) != (column is None):
        raise DataError(
            f"{what}: {'labels are needed' if y is None else 'the dataset was made without labels'}"
        )
    if y is None or column is None:
        return None, None
    if isinstance(column, CsrGroups):
        return _as_csr_of(column, url, y, start, stop, what), None
    if attrs.y_kind == "targets":
        return _as_targets_of(column, attrs, url, y, start, stop, what), None
    labels = schema.as_labels(y, what)
    if len(labels) != stop - start:
        raise DataError(f"{what}: {len(labels)} labels for {stop - start} rows; give one label a row")
    distinct = schema.distinct_labels(labels, start, url)
    known = attrs.own_classes
    if known is not None:
        codes = schema.encode_labels(labels, np.asarray(known), start, url)
        if attrs.codes:
            return codes.astype(column.dtype), None
    stored = labels.astype(column.dtype)
    if not np.array_equal(stored, labels):
        i = int(np.flatnonzero(stored != labels)[0])
        raise DataError(f"{what}: label {labels[i]!r} of row {start + i} does not fit into {column.dtype}")
    few = len(distinct) <= schema.MAX_CLASSES
    return stored, distinct.astype(column.dtype).tolist() if few else None


def as_weight_of(column: Any, url: str, weight: Any, start: int, stop: int) -> np.ndarray | None:
    """Weights of rows `start:stop`, of a dataset that has some.

    Raises
    ------
    DataError
        They are missing or not wanted, or one is negative, NaN or infinite.
    """
    what = f"{url}: rows {start}:{stop}"
    if (weight is None) != (column is None):
        raise DataError(f"{what}: {'weights are needed' if weight is None else 'the dataset has no weights'}")
    return None if weight is None else schema.check_weight(weight, stop - start, what, start)


def _as_csr_of(column: CsrGroups, url: str, x: Any, start: int, stop: int, what: str) -> Any:
    if not is_sparse(x):
        raise DataError(
            f"{what} were given as {type(x).__name__}, but this column is CSR; pass a scipy sparse array"
        )
    source = CsrSource(x, url, start)
    if source.shape != (stop - start, column.shape[1]):
        raise DataError(
            f"{what} were given with shape {source.shape}, but this shard has shape "
            f"{(stop - start, column.shape[1])}"
        )
    if not np.can_cast(source.dtype, column.dtype, "safe"):
        raise DataError(
            f"{what} are {source.dtype}, which does not fit into the dataset's {column.dtype}; convert them"
        )
    rows = source.read(0, stop - start)
    check_values(rows, start, url)
    return rows if rows.dtype == column.dtype else rows.astype(column.dtype)


def _as_targets_of(
    column: Any, attrs: schema.DatasetAttrs, url: str, y: Any, start: int, stop: int, what: str
) -> np.ndarray:
    schema.refuse_masked(y, what, start)
    targets = np.asarray(y)
    shape = (stop - start, attrs.n_targets)
    fits = targets.dtype.kind in "buif" and np.can_cast(targets.dtype, column.dtype, "safe")
    if targets.shape != shape or not fits:
        raise DataError(
            f"{what}: targets of shape {targets.shape} and dtype {targets.dtype} were given, but the "
            f"dataset's are {shape}, {column.dtype}"
        )
    schema.check_finite(targets, start, f"{url}: targets")
    return np.ascontiguousarray(targets, dtype=column.dtype)
