"""Check CSR rows in memory, and sort the columns of each row and add entries of the same column."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from scalelatent.errors import DataError

from .schema import check_rows_dtype, n_features

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from scipy.sparse import csr_array

    from scalelatent.kernels.arrays import DenseOrCsr


def is_sparse(x: object) -> TypeGuard[csr_array]:
    """Return whether `x` is a scipy sparse matrix or array, without importing scipy."""
    module = sys.modules.get("scipy.sparse")
    return module is not None and bool(module.issparse(x))


def index_dtype(n_features: int) -> np.dtype:
    """Return the dtype of column indices: int32 if all indices fit, else int64."""
    return np.dtype(np.int32 if n_features <= np.iinfo(np.int32).max else np.int64)


def check_dtype(dtype: np.dtype, name: str) -> np.dtype:
    """Raise a `DataError` for a dtype that scipy's CSR rows cannot have; return it in native byte order."""
    native = check_rows_dtype(dtype, name)
    if native.kind == "f" and native.itemsize not in (4, 8):
        raise DataError(
            f"{name} has dtype {dtype}, which sparse rows of scipy cannot have; convert the values to float32"
        )
    return native


def csr_of(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, n_features: int) -> csr_array:
    """Return a CSR array over arrays that the caller has checked; values and columns are not copied."""
    from scipy.sparse import csr_array

    rows = len(indptr) - 1
    narrow = indices.dtype == np.int32 and int(indptr[-1]) <= np.iinfo(np.int32).max
    pointers = indptr.astype(np.int32 if narrow else np.int64, copy=False)
    columns = indices if narrow else indices.astype(np.int64, copy=False)
    # `csr_array((data, indices, indptr))` would check the arrays again, and copy a view of a longer array.
    out = csr_array((rows, n_features), dtype=data.dtype)
    out.data, out.indices, out.indptr = data, columns, pointers
    out.has_sorted_indices = True
    out.has_canonical_format = True
    return out


def unpack_csr(rows: csr_array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return values, column indices and row pointers in the dtypes for storage and hashing."""
    return (
        np.ascontiguousarray(rows.data),
        np.ascontiguousarray(rows.indices, dtype=index_dtype(rows.shape[1])),
        np.ascontiguousarray(rows.indptr, dtype=np.int64),
    )


def stack(parts: list[csr_array]) -> csr_array:
    """Concatenate CSR arrays along the rows."""
    if len(parts) == 1:
        return parts[0]
    counts = np.concatenate([np.diff(part.indptr) for part in parts])
    return csr_of(
        np.concatenate([part.data for part in parts]),
        np.concatenate([part.indices for part in parts]),
        np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]),
        parts[0].shape[1],
    )


def concatenate(parts: Sequence[DenseOrCsr]) -> DenseOrCsr:
    """Return the rows of dense or of CSR arrays as one array; a single array is returned without a copy."""
    if isinstance(parts[0], np.ndarray):
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    return stack(list(parts))


def canonical_csr(
    data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, n_features: int, first_row: int, name: str
) -> tuple[csr_array, int, int]:
    """Return (rows with sorted, unique columns; number of unsorted rows; number of merged entries)."""

    def row_of(entry: int) -> int:
        return first_row + int(np.searchsorted(indptr, entry, side="right")) - 1

    if len(indices):
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= n_features:
            entry = int(np.flatnonzero((indices < 0) | (indices >= n_features))[0])
            raise DataError(
                f"{name}: row {row_of(entry)} has an entry in column {int(indices[entry])}, but columns "
                f"are 0 to {n_features - 1}; correct the columns, or the number of features in the shape"
            )
    columns = indices.astype(index_dtype(n_features), copy=False)
    falls = columns[1:] <= columns[:-1]
    starts = indptr[1:-1]  # the first entry of a row has no predecessor in the row
    falls[starts[(starts > 0) & (starts < len(columns))] - 1] = False
    if not falls.any():
        return csr_of(data, columns, indptr, n_features), 0, 0
    row = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    descends = np.flatnonzero(columns[1:] < columns[:-1])
    unsorted = len(np.unique(row[descends[row[descends] == row[descends + 1]]]))
    order = np.lexsort((columns, row))
    data, columns, row = data[order], columns[order], row[order]
    new = np.r_[True, (columns[1:] != columns[:-1]) | (row[1:] != row[:-1])]
    first = np.flatnonzero(new)
    values = _sum_groups(data, first, lambda group: first_row + int(row[first[group]]), name)
    counts = np.bincount(row[first], minlength=len(indptr) - 1)
    pointers = np.concatenate([[0], np.cumsum(counts)])
    return csr_of(values, columns[first], pointers, n_features), unsorted, len(data) - len(first)


def _sum_groups(data: np.ndarray, first: np.ndarray, row_of: Callable[[int], int], name: str) -> np.ndarray:
    """Return the sum of each group of consecutive values; `first` holds the index where each group begins."""
    if len(first) == len(data):
        return data
    if data.dtype.kind == "b":
        return np.logical_or.reduceat(data, first)
    wide = {"i": np.int64, "u": np.uint64}.get(data.dtype.kind, np.float64)
    sums = np.add.reduceat(data.astype(wide, copy=False), first)
    out = sums.astype(data.dtype, copy=False)
    if data.dtype.kind in "iu" and not np.array_equal(out, sums):
        group = int(np.flatnonzero(out != sums)[0])
        raise DataError(
            f"{name}: entries of the same column in row {row_of(group)} add up to {sums[group]}, which "
            f"does not fit into {data.dtype}; store the values in a wider type"
        )
    return out


def place_of(rows: DenseOrCsr, entry: int) -> tuple[int, int]:
    """Return the row and the column of the stored value number `entry`, in the order of storage."""
    if isinstance(rows, np.ndarray):
        return divmod(entry, n_features(rows.shape[1:]))
    return int(np.searchsorted(rows.indptr, entry, side="right")) - 1, int(rows.indices[entry])


def check_finite(rows: DenseOrCsr, first_row: int, name: str) -> None:
    """Raise a `DataError` that names row and column of the first NaN or infinity of dense or CSR rows."""
    values = rows if isinstance(rows, np.ndarray) else rows.data
    if values.dtype.kind != "f" or not values.size:
        return
    # If the sum overflows, all values may still be finite, so each value is checked below.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum(dtype=np.float64)):
            return
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        row, column = place_of(rows, int(bad[0]))
        raise DataError(
            f"{name}: row {first_row + row}, column {column} is {values.reshape(-1)[bad[0]]}; rows must be "
            f"finite numbers. Replace or drop such values, then try again"
        )
