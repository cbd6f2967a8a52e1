"""Row sources: the interface that reads a column of a dataset, and readers of other libraries' arrays."""

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

from .containers import is_backed_csr, is_instance, opened

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
    """Rows that can be read by contiguous ranges."""

    shape: tuple[int, ...]
    """Shape (n_rows, *feature_shape)."""
    dtype: np.dtype
    sparse: bool = False
    """True if the rows are CSR."""
    reads_at_once: int = 1
    """Best number of parallel reads; more than 1 if each read waits for a network."""

    @abstractmethod
    def read(self, start: int, stop: int) -> DenseOrCsr:
        """Return the rows `start:stop` as an ndarray (a view of rows in memory) or as a `csr_array`."""

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Split the rows `start:stop` into the ranges that are cheapest to read, for example by chunks."""
        return [(start, stop)] if stop > start else []

    def shards(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        """Return (file, first row, one past the last row) of each shard of the rows `start:stop`."""
        return []

    @property
    def layout(self) -> ChunkLayout | None:
        """Chunks, shards and codec of stored rows; None for other rows."""
        return None

    def count_entries(self, start: int, stop: int) -> int:
        """Return the number of stored entries of the CSR rows `start:stop`."""
        raise TypeError(f"{type(self).__name__} holds dense rows")

    @property
    def nnz(self) -> int:
        """Number of stored entries of all CSR rows."""
        return self.count_entries(0, self.shape[0])


class StoredColumn(RowSource):
    """Column of a stored dataset, with a checksum (CRC-32C) for each chunk."""

    shard_rows: int

    @property
    @abstractmethod
    def n_tiles(self) -> int:
        """Number of tiles: groups of columns with separate shard files; 1 if shards hold whole rows."""

    @property
    @abstractmethod
    def n_crcs(self) -> int:
        """Number of checksums: number of shards x chunks per full shard."""

    @property
    @abstractmethod
    def packing(self) -> str:
        """Text that identifies the sizes and codecs of the chunks."""

    @abstractmethod
    def expect_crcs(self, crcs: np.ndarray) -> None:
        """Set the expected checksums (n_crcs,); later reads refuse a chunk with another checksum."""

    @abstractmethod
    def crcs_of(self, shard: int) -> slice:
        """Return the slice of the column's checksums that belongs to shard number `shard`."""

    def read_tile(self, start: int, stop: int, tile: int) -> DenseOrCsr:
        """Return the rows `start:stop` of one tile (group of columns); without tiles, all columns."""
        return self.read(start, stop)


class WrappedRows(RowSource):
    """Rows of another source, or only its first rows; subclasses convert the values when they are read."""

    def __init__(
        self, source: RowSource, shape: tuple[int, ...] | None = None, dtype: np.dtype | None = None
    ) -> None:
        self._source = source
        self.shape = source.shape if shape is None else shape
        self.dtype = source.dtype if dtype is None else dtype
        self.sparse, self.reads_at_once = source.sparse, source.reads_at_once

    def read(self, start: int, stop: int) -> DenseOrCsr:
        return self._source.read(start, stop)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        return self._source.pieces(start, stop)

    def shards(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        return self._source.shards(start, stop)

    @property
    def layout(self) -> ChunkLayout | None:
        return self._source.layout

    def count_entries(self, start: int, stop: int) -> int:
        return self._source.count_entries(start, stop)


class ArrayRows(RowSource):
    """Rows of an object that slices like a numpy array: ndarray, memmap, h5py dataset."""

    def __init__(self, array: SlicedArray) -> None:
        self.shape = tuple(array.shape)
        self.dtype = np.dtype(array.dtype)
        self._array = array

    def read(self, start: int, stop: int) -> np.ndarray:
        return _in_native_order(np.asarray(self._array[start:stop]))


class ZarrRows(RowSource):
    """Rows of a zarr array outside a stored dataset; a missing chunk reads as zarr's fill value."""

    def __init__(self, array: zarr.Array) -> None:
        self.shape = tuple(array.shape)
        self.dtype = np.dtype(array.dtype)
        self._array = array
        self._step = int(array.chunks[0]) if array.chunks else 1  # arrays without axes are refused later

    def read(self, start: int, stop: int) -> np.ndarray:
        try:
            return _in_native_order(np.asarray(self._array[start:stop]))
        except Exception as error:  # zarr, its stores and its codecs raise errors of many types
            raise DataError(
                f"zarr array {self._array.store_path}: rows {start}:{stop} cannot be read: {error}; check "
                "the files that hold its chunks"
            ) from error

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        return _split_range(start, stop, range((start // self._step + 1) * self._step, stop, self._step))


# Maximum bytes of neighbouring dask chunks that one computation combines. Each computation visits all chunks
# of the array, which takes a few ms for thousands of chunks.
_MAX_READ_BYTES = 2**22


class DaskRows(RowSource):
    """Rows of a dask array; each read computes the chunks again, and small chunks are computed together."""

    def __init__(self, array: da.Array, name: str = "x") -> None:
        self._name = name
        if any(s != s for s in array.shape):  # NaN: the size is unknown
            unknown = "rows" if array.shape[0] != array.shape[0] else "columns"
            raise DataError(
                f"the dask array {name} has an unknown number of {unknown} (nan in its shape); call "
                f"{name}.compute_chunk_sizes()"
            )
        if hasattr(getattr(array, "_meta", None), "tocsr"):
            raise _sparse_blocks(array._meta)
        self.shape = tuple(int(s) for s in array.shape)
        self.dtype = np.dtype(array.dtype)
        self._array = array
        self._edges = np.cumsum(array.chunks[0]).tolist()
        row_bytes = max(1, int(np.prod(self.shape[1:])) * self.dtype.itemsize)
        self._max_rows = max(1, _MAX_READ_BYTES // row_bytes)

    def lazy(self, start: int, stop: int) -> da.Array:
        """Return the rows `start:stop` as a dask array, without computing the rows."""
        return self._array[start:stop]

    @property
    def token(self) -> str:
        """Dask's name of the array, which identifies the computation of its content."""
        return str(self._array.name)

    def read(self, start: int, stop: int) -> np.ndarray:
        out = np.empty((stop - start, *self.shape[1:]), self.dtype.newbyteorder("="))
        for a, b in self.pieces(start, stop):  # only the chunks of one range are in memory at a time
            chunks = _split_range(a, b, self._edges_within(a, b))
            try:
                out[a - start : b - start] = self._compute(a, b)
            except Exception:
                if len(chunks) == 1:
                    raise
                for c, d in chunks:  # retry each chunk, so that the error names the chunk
                    out[c - start : d - start] = self._compute(c, d)
        return out

    def _compute(self, start: int, stop: int) -> np.ndarray:
        """Compute the rows `start:stop`; refuse results that are sparse, masked or of an unexpected shape."""
        block = self._array[start:stop].compute(scheduler=_dask_scheduler())
        if hasattr(block, "tocsr"):  # a sparse block, although dask's metadata announced a dense one
            raise _sparse_blocks(block)
        if np.shape(block) != (stop - start, *self.shape[1:]):
            raise DataError(
                f"the chunk of rows {start} to {stop - 1} of the dask array has shape {np.shape(block)}, but "
                f"the shape of the array implies {(stop - start, *self.shape[1:])}: correct the function of "
                "the chunks, or call compute_chunk_sizes() on the array"
            )
        refuse_masked(block, self._name, start)
        return np.asarray(block)

    def _edges_within(self, start: int, stop: int) -> list[int]:
        """Return the chunk edges strictly between two rows."""
        return self._edges[bisect.bisect_right(self._edges, start) : bisect.bisect_left(self._edges, stop)]

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Split the rows `start:stop` at the ends of dask chunks; combine small chunks into one range."""
        edges = [start]
        for edge, following in itertools.pairwise([*self._edges_within(start, stop), stop]):
            if following - edges[-1] > self._max_rows:
                edges.append(edge)
        return _split_range(edges[0], stop, edges[1:])


def _sparse_blocks(block: object) -> DataError:
    return DataError(
        f"the dask array has sparse blocks ({type(block).__name__}), which cannot be read by rows; compute "
        "it as a scipy CSR matrix, or write its blocks with create_dataset"
    )


def _dask_scheduler() -> str | None:
    distributed = sys.modules.get("distributed")
    try:
        if distributed is not None and distributed.Client.current() is not None:
            return None
    except ValueError:  # this process has no client of distributed
        pass
    return "synchronous"  # a fit already runs one thread per core, so dask must not start more threads


def _split_range(start: int, stop: int, inner: Iterable[int]) -> list[tuple[int, int]]:
    edges = [start, *inner, stop]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def _in_native_order(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


class CsrSource(RowSource):
    """Rows of a scipy sparse matrix or array; other formats are converted to CSR once."""

    sparse = True

    def __init__(self, matrix: SparseLike, name: str = "x", first_row: int = 0) -> None:
        if len(matrix.shape) != 2:
            raise DataError(
                f"{name} is a sparse array of shape {matrix.shape}; give two axes, rows x features"
            )
        rows = matrix.tocsr()
        self.shape = tuple(int(s) for s in rows.shape)
        self.dtype = csr.check_dtype(rows.dtype, name)
        values = rows.data.astype(self.dtype, copy=False)
        self._rows = csr.canonical_csr(values, rows.indices, rows.indptr, self.shape[1], first_row, name)[0]

    def count_entries(self, start: int, stop: int) -> int:
        return int(self._rows.indptr[stop] - self._rows.indptr[start])

    def read(self, start: int, stop: int) -> csr_array:
        pointers = self._rows.indptr[start : stop + 1]
        a, b = int(pointers[0]), int(pointers[-1])
        return csr.csr_of(
            self._rows.data[a:b], self._rows.indices[a:b], pointers - pointers[0], self.shape[1]
        )


class BackedCsr(RowSource):
    """CSR rows in three arrays of an open file (HDF5 or zarr) in AnnData's format."""

    sparse = True

    def __init__(self, group: h5py.Group | zarr.Group, shape: Sequence[int], name: str = "x") -> None:
        self._name = name
        missing = [part for part in ("data", "indices", "indptr") if part not in group]
        if missing:
            raise DataError(
                f"{name} has no array {missing[0]!r}, so it holds no CSR rows; write the file again"
            )
        self._data, self._indices, self._indptr = (group[part] for part in ("data", "indices", "indptr"))
        self.shape = tuple(int(side) for side in shape)
        self.dtype = csr.check_dtype(np.dtype(self._data.dtype), name)
        sizes = [part.shape for part in (self._data, self._indices, self._indptr)]
        if len(self.shape) != 2 or sizes != [sizes[0], sizes[0], (self.shape[0] + 1,)]:
            raise DataError(
                f"{name} has shape {self.shape}, but its arrays data, indices and indptr have shapes "
                f"{sizes[0]}, {sizes[1]} and {sizes[2]}; the arrays do not belong together: write the "
                "file again"
            )

    def _pointers(self, start: int, stop: int) -> np.ndarray:
        """Return the checked row pointers of the rows `start:stop`, int64 (stop - start + 1,)."""
        found = np.asarray(self._indptr[start : stop + 1]).astype(np.int64, copy=False)
        n_entries = self._data.shape[0]
        bad = np.flatnonzero((np.diff(found) < 0) | (found[1:] > n_entries) | (found[:-1] < 0))
        if bad.size:
            i = int(bad[0])
            raise DataError(
                f"{self._name}: row {start + i} goes from entry {found[i]} to {found[i + 1]} of "
                f"{n_entries}; the array indptr is damaged: write the file again"
            )
        return found

    def count_entries(self, start: int, stop: int) -> int:
        return int(self._indptr[stop]) - int(self._indptr[start])

    def read(self, start: int, stop: int) -> csr_array:
        pointers = self._pointers(start, stop)
        a, b = int(pointers[0]), int(pointers[-1])
        data = np.asarray(self._data[a:b]).astype(self.dtype, copy=False)
        indices = np.asarray(self._indices[a:b]).astype(np.int64, copy=False)
        return csr.canonical_csr(data, indices, pointers - a, self.shape[1], start, self._name)[0]


def is_dask(x: object) -> bool:
    """Return whether `x` is a dask array, without importing dask."""
    return is_instance(x, "dask.array", "Array")


def is_zarr(x: object) -> TypeGuard[zarr.Array]:
    """Return whether `x` is a zarr array, without importing zarr."""
    return is_instance(x, "zarr", "Array")


def as_source(x: RowsLike | LabelsLike, name: str = "x") -> RowSource:
    """Return the row source for an array-like."""
    x = opened(x, name)
    if is_dask(x):
        return DaskRows(x, name)
    if is_zarr(x):
        return ZarrRows(x)
    if csr.is_sparse(x):
        return CsrSource(x, name)
    if is_backed_csr(x):
        return BackedCsr(x.group, x.shape, name)
    refuse_masked(x, name)
    if isinstance(x, np.ndarray) or (
        not hasattr(x, "__array_ufunc__")  # not a data frame, whose slices are not arrays
        and all(hasattr(x, attribute) for attribute in ("shape", "dtype", "__getitem__"))
        and not hasattr(x, "iloc")
    ):
        return ArrayRows(np.asarray(x) if isinstance(x, np.ndarray) else x)
    try:
        return ArrayRows(np.asarray(x))
    except (ValueError, TypeError) as error:
        raise DataError(f"{name} cannot be read as an array: {error}; pass rows of equal length") from error
