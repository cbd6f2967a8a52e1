"""Row sources: what a dataset's columns can be read from. One `read(start, stop)` for arrays, zarr and dask.

A source has `shape`, `dtype`, `read(start, stop)` and `pieces(start, stop)`. Nothing here imports zarr or
dask unless the caller already holds such an array.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, Protocol

import numpy as np

from scalelatent.data.csr import CsrSource, is_sparse
from scalelatent.data.schema import refuse_masked
from scalelatent.errors import DataError

__all__ = ["ArrayRows", "DaskRows", "RowSource", "ZarrRows", "as_source", "is_csr"]


class RowSource(Protocol):
    """Rows that can be read in runs."""

    shape: tuple[int, ...]
    """(n_rows, *feature_shape)."""
    dtype: np.dtype[Any]

    def read(self, start: int, stop: int) -> Any:
        """Rows `start:stop`, (stop - start, *feature_shape); a view where the rows are in memory.

        An ndarray; a `scipy.sparse.csr_array` of a source of CSR rows; see `is_csr`.
        """
        ...

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows `start:stop` cut where reading is cheapest."""
        ...


def is_csr(source: Any) -> bool:
    """Whether the rows of a source are CSR: it says so by an attribute `sparse`, and then has `nnz`.

    Asking for `nnz` instead would count it, for which some have to read all rows.
    """
    return bool(getattr(source, "sparse", False))


class ArrayRows:
    """Rows of anything that slices like a numpy array: ndarray, memmap, h5py dataset."""

    def __init__(self, array: Any) -> None:
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype: np.dtype[Any] = np.dtype(array.dtype)
        self._array = array

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows `start:stop`."""
        return _native(np.asarray(self._array[start:stop]))

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows `start:stop` cut where reading is cheapest."""
        return [(start, stop)] if stop > start else []


class ZarrRows:
    """Rows of a zarr array that is none of our datasets; an absent chunk reads as zarr's fill value."""

    def __init__(self, array: Any) -> None:
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype: np.dtype[Any] = np.dtype(array.dtype)
        self._array = array
        self._step = int(array.chunks[0])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows `start:stop`."""
        return _native(np.asarray(self._array[start:stop]))

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows `start:stop` cut where reading is cheapest."""
        return _cut(start, stop, range((start // self._step + 1) * self._step, stop, self._step))


class DaskRows:
    """Rows of a dask array, computed block by block when they are read; nothing is kept.

    With a default `distributed.Client` its workers compute the block (persisted blocks live there); else the
    calling thread does, because the engine already runs one thread per core.
    """

    def __init__(self, array: Any, what: str = "x") -> None:
        self._what = what
        if any(s != s for s in array.shape):  # NaN: dask does not know
            raise DataError(
                "the dask array does not know its number of rows (shape with nan); call "
                "compute_chunk_sizes() on it"
            )
        if hasattr(getattr(array, "_meta", None), "tocsr"):
            raise DataError(
                f"the dask array has sparse blocks ({type(array._meta).__name__}), which cannot be read in "
                "rows; compute it to a scipy CSR matrix, or write its blocks with create_dataset"
            )
        self.shape: tuple[int, ...] = tuple(int(s) for s in array.shape)
        self.dtype: np.dtype[Any] = np.dtype(array.dtype)
        self._array = array
        self._edges = np.cumsum(array.chunks[0]).tolist()

    def lazy(self, start: int, stop: int) -> Any:
        """Rows `start:stop` as a dask array, uncomputed."""
        return self._array[start:stop]

    @property
    def token(self) -> str:
        """Dask's own name of the array: a token of how its content is made."""
        return str(self._array.name)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows `start:stop`."""
        out = np.empty((stop - start, *self.shape[1:]), self.dtype.newbyteorder("="))
        for a, b in self.pieces(start, stop):  # one block at a time, so no more than one is in memory
            block = self._array[a:b].compute(scheduler=_dask_scheduler())
            refuse_masked(block, self._what, a)
            out[a - start : b - start] = block
        return out

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows `start:stop` cut where reading is cheapest."""
        return _cut(start, stop, (e for e in self._edges if start < e < stop))


def _dask_scheduler() -> str | None:
    distributed = sys.modules.get("distributed")
    try:
        if distributed is not None and distributed.Client.current() is not None:
            return None
    except ValueError:  # nobody has made one
        pass
    return "synchronous"


def _cut(start: int, stop: int, inner: Any) -> list[tuple[int, int]]:
    edges = [start, *inner, stop]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def _native(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def is_dask(x: Any) -> bool:
    """Whether `x` is a dask array, without importing dask."""
    module = sys.modules.get("dask.array")
    return module is not None and isinstance(x, module.Array)


def is_zarr(x: Any) -> bool:
    """Whether `x` is a zarr array, without importing zarr."""
    module = sys.modules.get("zarr")
    return module is not None and isinstance(x, module.Array)


def as_source(x: Any, what: str = "x") -> RowSource:
    """The row source for an array-like.

    Raises
    ------
    DataError
        Dask arrays of sparse blocks, and whatever numpy cannot turn into an array.
    """
    if is_dask(x):
        return DaskRows(x, what)
    if is_zarr(x):
        return ZarrRows(x)
    if is_sparse(x):
        return CsrSource(x, what)
    refuse_masked(x, what)
    if isinstance(x, np.ndarray) or (
        not hasattr(x, "__array_ufunc__")  # a data frame, whose slices are no arrays
        and all(hasattr(x, name) for name in ("shape", "dtype", "__getitem__"))
        and not hasattr(x, "iloc")
    ):
        return ArrayRows(np.asarray(x) if isinstance(x, np.ndarray) else x)
    try:
        return ArrayRows(np.asarray(x))
    except (ValueError, TypeError) as error:
        raise DataError(f"{what} cannot be read as an array: {error}; pass rows of equal length") from error
