"""Row sources: what the columns of a dataset are read from, and those over arrays of other libraries."""

from __future__ import annotations

import bisect
import itertools
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from scalelatent.data import csr
from scalelatent.data.schema import refuse_masked
from scalelatent.errors import DataError

from .containers import is_backed_csr, opened

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import dask.array as da
    import h5py
    import zarr
    from scipy.sparse import csr_array

    from scalelatent.data.layout import ChunkLayout
    from scalelatent.kernels.arrays import DenseOrCsr
    from scalelatent.typing import LabelsLike, RowsLike, SlicedArray, SparseLike


class RowSource(ABC):
    """Rows that can be read in runs."""

    shape: tuple[int, ...]
    """(n_rows, *feature_shape)."""
    dtype: np.dtype
    sparse: bool = False
    """Whether the rows are CSR."""
    knows_entries: bool = False
    """Whether `nnz` costs nothing; some sources have to read all rows for it."""
    reads_at_once: int = 1
    """Reads in flight that pay: more than 1 where each waits for a network."""

    @abstractmethod
    def read(self, start: int, stop: int) -> DenseOrCsr:
        """Rows `start:stop`: an ndarray (a view where they are in memory), or a `csr_array` of CSR rows."""

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows `start:stop` cut where reading is cheapest."""
        return [(start, stop)] if stop > start else []

    def shards(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        """(file, first row, one past its last row) of the shards of the rows `start:stop`."""
        return []

    @property
    def layout(self) -> ChunkLayout | None:
        """Chunks, shards and codec of stored rows."""
        return None

    def entries(self, start: int, stop: int) -> int:
        """Stored entries of the CSR rows `start:stop`."""
        raise TypeError(f"{type(self).__name__} holds dense rows")

    @property
    def nnz(self) -> int:
        """Stored entries of all CSR rows."""
        return self.entries(0, self.shape[0])


class StoredColumn(RowSource):
    """A column of a stored dataset, whose chunks have checksums (checksums.py)."""

    shard_rows: int

    @property
    @abstractmethod
    def n_tiles(self) -> int:
        """Shards side by side that hold the columns of the same rows."""

    @property
    @abstractmethod
    def n_crcs(self) -> int:
        """Chunks that all shards have room for."""

    @property
    @abstractmethod
    def packing(self) -> str:
        """How the chunks are cut and packed."""

    @abstractmethod
    def seal(self, crcs: np.ndarray) -> None:
        """Refuse from now on each chunk whose checksum is not this one (n_crcs,)."""

    @abstractmethod
    def crcs_of(self, shard: int) -> slice:
        """Which of the checksums are those of a shard."""

    def read_tile(self, start: int, stop: int, tile: int) -> DenseOrCsr:
        """Of the rows `start:stop` only the columns of one tile."""
        return self.read(start, stop)


class WrappedRows(RowSource):
    """The rows of another source, changed when they are read; cut as they are there."""

    def __init__(
        self, source: RowSource, shape: tuple[int, ...] | None = None, dtype: np.dtype | None = None
    ) -> None:
        self._source = source
        self.shape = source.shape if shape is None else shape
        self.dtype = source.dtype if dtype is None else dtype
        self.sparse, self.knows_entries = source.sparse, source.knows_entries
        self.reads_at_once = source.reads_at_once

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        return self._source.pieces(start, stop)

    def shards(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        return self._source.shards(start, stop)

    @property
    def layout(self) -> ChunkLayout | None:
        return self._source.layout

    def entries(self, start: int, stop: int) -> int:
        return self._source.entries(start, stop)


class ArrayRows(RowSource):
    """Rows of anything that slices like a numpy array: ndarray, memmap, h5py dataset."""

    def __init__(self, array: SlicedArray) -> None:
        self.shape = tuple(array.shape)
        self.dtype = np.dtype(array.dtype)
        self._array = array

    def read(self, start: int, stop: int) -> np.ndarray:
        return _native(np.asarray(self._array[start:stop]))


class ZarrRows(RowSource):
    """Rows of a zarr array outside our datasets; an absent chunk reads as zarr's fill value."""

    def __init__(self, array: zarr.Array) -> None:
        self.shape = tuple(array.shape)
        self.dtype = np.dtype(array.dtype)
        self._array = array
        self._step = int(array.chunks[0]) if array.chunks else 1  # without axes it is refused later

    def read(self, start: int, stop: int) -> np.ndarray:
        return _native(np.asarray(self._array[start:stop]))

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        return _cut(start, stop, range((start // self._step + 1) * self._step, stop, self._step))


# Chunks of a dask array up to this many bytes are computed together: each computation visits all chunks of
# the array, which takes a few ms for thousands of them.
_TOGETHER_BYTES = 2**22


class DaskRows(RowSource):
    """Rows of a dask array, computed chunk by chunk (small chunks together) when they are read; nothing is
    kept.
    """

    def __init__(self, array: da.Array, what: str = "x") -> None:
        self._what = what
        if any(s != s for s in array.shape):  # NaN: dask does not know
            unknown = "rows" if array.shape[0] != array.shape[0] else "columns"
            raise DataError(
                f"the dask array {what} does not know its number of {unknown} (shape with nan); call "
                f"{what}.compute_chunk_sizes()"
            )
        if hasattr(getattr(array, "_meta", None), "tocsr"):
            raise _sparse_blocks(array._meta)
        self.shape = tuple(int(s) for s in array.shape)
        self.dtype = np.dtype(array.dtype)
        self._array = array
        self._edges = np.cumsum(array.chunks[0]).tolist()
        row_bytes = max(1, int(np.prod(self.shape[1:])) * self.dtype.itemsize)
        self._together = max(1, _TOGETHER_BYTES // row_bytes)  # rows

    def lazy(self, start: int, stop: int) -> da.Array:
        """Rows `start:stop` as a dask array, uncomputed."""
        return self._array[start:stop]

    @property
    def token(self) -> str:
        """Dask's own name of the array: a token of how its content is made."""
        return str(self._array.name)

    def read(self, start: int, stop: int) -> np.ndarray:
        out = np.empty((stop - start, *self.shape[1:]), self.dtype.newbyteorder("="))
        for a, b in self.pieces(start, stop):  # one piece at a time, so no more than one is in memory
            chunks = _cut(a, b, self._within(a, b))
            try:
                out[a - start : b - start] = self._computed(a, b)
            except Exception:
                if len(chunks) == 1:
                    raise
                for c, d in chunks:  # one by one, so that the error names the chunk
                    out[c - start : d - start] = self._computed(c, d)
        return out

    def _computed(self, start: int, stop: int) -> np.ndarray:
        """Compute rows, and refuse chunks of another shape than the array says, sparse and masked ones."""
        block = self._array[start:stop].compute(scheduler=_dask_scheduler())
        if hasattr(block, "tocsr"):  # dask did not know
            raise _sparse_blocks(block)
        if np.shape(block) != (stop - start, *self.shape[1:]):
            raise DataError(
                f"the chunk of rows {start} to {stop - 1} of the dask array has shape {np.shape(block)}, but "
                f"the array says {(stop - start, *self.shape[1:])}: correct the function that makes them, or "
                "call compute_chunk_sizes() on the array"
            )
        refuse_masked(block, self._what, start)
        return np.asarray(block)

    def _within(self, start: int, stop: int) -> list[int]:
        """Edges of chunks between two rows."""
        return self._edges[bisect.bisect_right(self._edges, start) : bisect.bisect_left(self._edges, stop)]

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Chunks, clipped; small ones together."""
        edges = [start]
        for edge, following in itertools.pairwise([*self._within(start, stop), stop]):
            if following - edges[-1] > self._together:
                edges.append(edge)
        return _cut(edges[0], stop, edges[1:])


def _sparse_blocks(block: object) -> DataError:
    return DataError(
        f"the dask array has sparse blocks ({type(block).__name__}), which cannot be read in rows; compute "
        "it to a scipy CSR matrix, or write its blocks with create_dataset"
    )


def _dask_scheduler() -> str | None:
    distributed = sys.modules.get("distributed")
    try:
        if distributed is not None and distributed.Client.current() is not None:
            return None
    except ValueError:  # there is none
        pass
    return "synchronous"  # the engine runs a thread a core already


def _cut(start: int, stop: int, inner: Iterable[int]) -> list[tuple[int, int]]:
    edges = [start, *inner, stop]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def _native(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


class CsrSource(RowSource):
    """Rows of a scipy sparse matrix or array; other formats become CSR first."""

    sparse = True
    knows_entries = True

    def __init__(self, matrix: SparseLike, what: str = "x", first_row: int = 0) -> None:
        if len(matrix.shape) != 2:
            raise DataError(
                f"{what} is a sparse array of shape {matrix.shape}; rows x features are needed: two axes"
            )
        rows = matrix.tocsr()
        self.shape = tuple(int(s) for s in rows.shape)
        self.dtype = csr.check_dtype(rows.dtype, what)
        values = rows.data.astype(self.dtype, copy=False)
        self._rows = csr.canonical(values, rows.indices, rows.indptr, self.shape[1], first_row, what)[0]

    def entries(self, start: int, stop: int) -> int:
        return int(self._rows.indptr[stop] - self._rows.indptr[start])

    def read(self, start: int, stop: int) -> csr_array:
        pointers = self._rows.indptr[start : stop + 1]
        a, b = int(pointers[0]), int(pointers[-1])
        return csr.csr_of(
            self._rows.data[a:b], self._rows.indices[a:b], pointers - pointers[0], self.shape[1]
        )


class BackedCsr(RowSource):
    """CSR rows in three arrays of an open file (HDF5 or zarr), as AnnData stores them; read run by run."""

    sparse = True
    knows_entries = True

    def __init__(self, group: h5py.Group | zarr.Group, shape: Sequence[int], what: str = "x") -> None:
        self._what = what
        missing = [part for part in ("data", "indices", "indptr") if part not in group]
        if missing:
            raise DataError(
                f"{what} has no array {missing[0]!r}, so it holds no CSR rows; write the file again"
            )
        self._data, self._indices, self._indptr = (group[part] for part in ("data", "indices", "indptr"))
        self.shape = tuple(int(side) for side in shape)
        self.dtype = csr.check_dtype(np.dtype(self._data.dtype), what)
        sizes = [part.shape for part in (self._data, self._indices, self._indptr)]
        if len(self.shape) != 2 or sizes != [sizes[0], sizes[0], (self.shape[0] + 1,)]:
            raise DataError(
                f"{what} says shape {self.shape}, but its arrays data, indices and indptr have shapes "
                f"{sizes[0]}, {sizes[1]} and {sizes[2]}; the arrays do not belong together: write the "
                "file again"
            )

    @property
    def n_stored(self) -> int:
        """Entries that the file holds, before entries of the same place are added."""
        return int(self._data.shape[0])

    def pointers(self, start: int, stop: int) -> np.ndarray:
        """Row pointers of the rows `start:stop`, checked: int64 (stop - start + 1,)."""
        found = np.asarray(self._indptr[start : stop + 1]).astype(np.int64, copy=False)
        bad = np.flatnonzero((np.diff(found) < 0) | (found[1:] > self.n_stored) | (found[:-1] < 0))
        if bad.size:
            i = int(bad[0])
            raise DataError(
                f"{self._what}: row {start + i} goes from entry {found[i]} to {found[i + 1]} of "
                f"{self.n_stored}; the array indptr is damaged: write the file again"
            )
        return found

    def entries(self, start: int, stop: int) -> int:
        return int(self._indptr[stop]) - int(self._indptr[start])

    def read(self, start: int, stop: int) -> csr_array:
        return self.read_counted(start, stop)[0]

    def read_counted(self, start: int, stop: int) -> tuple[csr_array, int, int]:
        """Rows `start:stop`, how many of the rows had to be sorted, and how many entries were added up."""
        pointers = self.pointers(start, stop)
        a, b = int(pointers[0]), int(pointers[-1])
        data = np.asarray(self._data[a:b]).astype(self.dtype, copy=False)
        indices = np.asarray(self._indices[a:b]).astype(np.int64, copy=False)
        return csr.canonical(data, indices, pointers - a, self.shape[1], start, self._what)


def is_dask(x: object) -> bool:
    """Whether `x` is a dask array, without importing dask."""
    module = sys.modules.get("dask.array")
    return module is not None and isinstance(x, module.Array)


def is_zarr(x: object) -> TypeGuard[zarr.Array]:
    """Whether `x` is a zarr array, without importing zarr."""
    module = sys.modules.get("zarr")
    return module is not None and isinstance(x, module.Array)


def as_source(x: RowsLike | LabelsLike, what: str = "x") -> RowSource:
    """The row source for an array-like."""
    x = opened(x, what)
    if is_dask(x):
        return DaskRows(x, what)
    if is_zarr(x):
        return ZarrRows(x)
    if csr.is_sparse(x):
        return CsrSource(x, what)
    if is_backed_csr(x):
        return BackedCsr(x.group, x.shape, what)
    refuse_masked(x, what)
    if isinstance(x, np.ndarray) or (
        not hasattr(x, "__array_ufunc__")  # a data frame, whose slices are not arrays
        and all(hasattr(x, name) for name in ("shape", "dtype", "__getitem__"))
        and not hasattr(x, "iloc")
    ):
        return ArrayRows(np.asarray(x) if isinstance(x, np.ndarray) else x)
    try:
        return ArrayRows(np.asarray(x))
    except (ValueError, TypeError) as error:
        raise DataError(f"{what} cannot be read as an array: {error}; pass rows of equal length") from error
