"""Rows in another form, converted when they are read: another dtype, dense rows as CSR, CSR rows as dense."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import numpy as np

from scalelatent.data import csr, schema
from scalelatent.errors import DataError

from .sources import RowSource, WrappedRows

__all__ = ["CastRows", "DenseRows", "SparseRows", "cast"]


class CastRows(WrappedRows):
    """Rows, dense or CSR, of another dtype: exactly, or, if asked for, as near as it allows."""

    def __init__(self, source: RowSource, dtype: np.dtype[Any], lossy: bool, what: str) -> None:
        if source.sparse:
            dtype = csr.check_dtype(dtype, "the dtype to convert to")
        super().__init__(source, dtype=dtype)
        self._lossy, self._what = lossy, what

    def read(self, start: int, stop: int) -> Any:
        rows = self._source.read(start, stop)
        (csr.check_values if self.sparse else schema.check_finite)(rows, start, self._what)
        values, exact = cast(rows.data if self.sparse else rows, self.dtype, self._lossy)
        if not (self._lossy or exact.all()):
            self._refuse(rows, int(np.flatnonzero(~exact)[0]), start)
        if not self.sparse:
            return values
        return csr.csr_of(values, rows.indices, rows.indptr, self.shape[1])

    def _refuse(self, rows: Any, entry: int, start: int) -> NoReturn:
        if self.sparse:
            row = int(np.searchsorted(rows.indptr, entry, side="right")) - 1
            column, value = int(rows.indices[entry]), rows.data[entry]
        else:
            row, column = divmod(entry, schema.n_features(self.shape[1:]))
            value = rows.reshape(-1)[entry]
        raise DataError(
            f"{self._what}: row {start + row}, column {column} is {value}, which {self.dtype} cannot hold "
            "exactly; choose another dtype, or take the nearest values with --lossy (lossy=True)"
        )


class DenseRows(WrappedRows):
    """CSR rows as dense ones."""

    def __init__(self, source: RowSource) -> None:
        super().__init__(source)
        self.sparse = self.knows_entries = False

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.asarray(self._source.read(start, stop).toarray())


class SparseRows(WrappedRows):
    """Dense rows as CSR ones; the axes of a row become one, zeros are left out."""

    def __init__(self, source: RowSource) -> None:
        shape = (source.shape[0], schema.n_features(source.shape[1:]))
        super().__init__(source, shape, csr.check_dtype(source.dtype, "the rows"))
        self.sparse, self.knows_entries = True, False

    @functools.cached_property
    def nnz(self) -> int:  # type: ignore[override]
        """Numbers that are not zero; reads all rows, once."""
        return self._count(0, self.shape[0])

    def entries(self, start: int, stop: int) -> int:
        return self.nnz if (start, stop) == (0, self.shape[0]) else self._count(start, stop)

    def _count(self, start: int, stop: int) -> int:
        return sum(int(np.count_nonzero(self._source.read(a, b))) for a, b in self.pieces(start, stop))

    def read(self, start: int, stop: int) -> Any:
        rows = self._source.read(start, stop).reshape(stop - start, self.shape[1])
        row, column = np.nonzero(rows)
        pointers = np.searchsorted(row, np.arange(stop - start + 1))
        columns = column.astype(csr.index_dtype(self.shape[1]))
        return csr.csr_of(rows[row, column], columns, pointers, self.shape[1])


def cast(x: np.ndarray, dtype: np.dtype[Any], lossy: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Values in another dtype, and which of them it holds exactly."""
    wide = x.dtype.kind in "iu" and x.dtype.itemsize == 8 and dtype.kind == "f"  # numpy calls that safe
    if np.can_cast(x.dtype, dtype, "safe") and not wide:
        return x.astype(dtype, copy=False), np.broadcast_to(True, x.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        within = _fits(x, dtype)
        plain = x.astype(dtype)
        # A float may round up beyond the range of the integers it came from; coming back then says nothing.
        exact = within & _fits(plain, x.dtype) & (plain.astype(x.dtype) == x)
        if not lossy:
            return plain, exact
        if dtype.kind == "b":
            return x != 0, exact
        low, high = _range(dtype)
        near = np.rint(x) if x.dtype.kind == "f" and dtype.kind in "iu" else x
        values = np.where(_fits(near, dtype), near, 0).astype(dtype)
        values[_above(near, high)] = high
        values[_below(near, low)] = low
    return values, exact


def _range(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Least and largest value of a type, as Python numbers."""
    if dtype.kind == "b":
        return 0, 1
    if dtype.kind == "f":
        return float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _fits(x: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Whether values lie in the range of a type."""
    low, high = _range(dtype)
    return np.isfinite(x) & ~_above(x, high) & ~_below(x, low)


def _above(x: np.ndarray, high: Any) -> np.ndarray:
    """Values > high, compared without rounding `high` up to a float that is not below the values."""
    if x.dtype.kind == "f":
        # The largest integers are 2**k - 1, which a float can only round to 2**k.
        return x >= float(high + 1) if isinstance(high, int) else x > high
    return np.full(x.shape, False) if int(_range(x.dtype)[1]) <= high else x > x.dtype.type(int(high))


def _below(x: np.ndarray, low: Any) -> np.ndarray:
    """Values < low."""
    if x.dtype.kind == "f":
        return x < float(low)
    return np.full(x.shape, False) if int(_range(x.dtype)[0]) >= low else x < x.dtype.type(int(low))
