"""Rows of one dtype as rows of another: exactly, or, if asked for, as near as the type allows."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from scalelatent.errors import DataError

from . import csr, schema
from .read.sources import RowSource, is_csr

__all__ = ["CastRows", "cast", "cast_rows"]


def cast_rows(source: Any, dtype: np.dtype[Any], lossy: bool, what: str) -> CastRows:
    """A row source, dense or CSR, whose rows are converted when they are read."""
    if not is_csr(source):
        return CastRows(source, dtype, lossy, what)
    return CastCsr(source, csr.check_dtype(dtype, "the dtype to convert to"), lossy, what)


class CastRows:
    """A row source whose rows are converted when they are read (see sources.py)."""

    def __init__(self, source: RowSource, dtype: np.dtype[Any], lossy: bool, what: str) -> None:
        self._source, self._lossy, self._what = source, lossy, what
        self.shape: tuple[int, ...] = source.shape
        self.dtype: np.dtype[Any] = dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows `start:stop`, converted.

        Raises
        ------
        DataError
            A value that the type cannot hold, with its row and column.
        """
        rows = self._source.read(start, stop)
        schema.check_finite(rows, start, self._what)
        out, exact = cast(rows, self.dtype, self._lossy)
        if not (self._lossy or exact.all()):
            i, j = divmod(int(np.flatnonzero(~exact)[0]), schema.n_features(self.shape[1:]))
            self._refuse(start + i, j, rows.reshape(len(rows), -1)[i, j])
        return out

    def _refuse(self, row: int, column: int, value: Any) -> NoReturn:
        raise DataError(
            f"{self._what}: row {row}, column {column} is {value}, which {self.dtype} cannot hold exactly; "
            "choose another dtype, or take the nearest values with --lossy (lossy=True)"
        )

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows `start:stop` cut where reading is cheapest."""
        return self._source.pieces(start, stop)


class CastCsr(CastRows):
    """The same of CSR rows."""

    sparse = True
    _source: Any

    @property
    def nnz(self) -> int:
        """Stored entries."""
        return int(self._source.nnz)

    def entries(self, start: int, stop: int) -> int:
        """Stored entries of the rows `start:stop`."""
        return int(self._source.entries(start, stop))

    def read(self, start: int, stop: int) -> Any:
        """Rows `start:stop`, converted; see `CastRows.read`."""
        rows = self._source.read(start, stop)
        csr.check_values(rows, start, self._what)
        values, exact = cast(rows.data, self.dtype, self._lossy)
        if not (self._lossy or exact.all()):
            entry = int(np.flatnonzero(~exact)[0])
            row = start + int(np.searchsorted(rows.indptr, entry, side="right")) - 1
            self._refuse(row, int(rows.indices[entry]), rows.data[entry])
        return csr.csr_of(values, rows.indices, rows.indptr, self.shape[1])


def cast(x: np.ndarray, dtype: np.dtype[Any], lossy: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Values in another dtype, and which of them it holds exactly.

    Parameters
    ----------
    x : ndarray
        Bool, integer or finite float.
    dtype : dtype
        Bool, integer or float.
    lossy : bool
        Round to the nearest value of the type, and values beyond its range to its ends; to bool: not zero.

    Returns
    -------
    values : ndarray
        Those that are not exact mean something only if `lossy`.
    exact : bool ndarray of the same shape

    Examples
    --------
    >>> values, exact = cast(np.array([1.0, 2.5, 300.0]), np.dtype("u1"), lossy=True)
    >>> values.tolist(), exact.tolist()
    ([1, 2, 255], [True, False, False])
    """
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
