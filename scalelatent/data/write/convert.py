"""Convert rows to other chunks, shards, codecs, dtypes or row ranges, and open zarr arrays as datasets."""

from __future__ import annotations

import functools
import math
import operator
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data import csr, schema
from scalelatent.data.columns import DatasetColumns
from scalelatent.data.dataset import Dataset, open_dataset
from scalelatent.data.read.array_names import choose_array
from scalelatent.data.read.sources import RowSource, WrappedRows
from scalelatent.data.write.batches import Progress
from scalelatent.errors import DataError
from scalelatent.storage.disk import REMOVED, locate
from scalelatent.storage.write_checks import check_not_own_input, format_of

from .create import copy_rows, derive_provenance

if TYPE_CHECKING:
    import numpy.typing as npt
    import zarr

    from scalelatent.data.layout import ChunkLayout
    from scalelatent.data.schema import LayoutOptions
    from scalelatent.kernels.arrays import DenseOrCsr


def convert_dataset(
    source: Dataset | str | os.PathLike[str],
    out_url: str | os.PathLike[str],
    *,
    rows: tuple[int, int] | None = None,
    dtype: npt.DTypeLike | None = None,
    lossy: bool = False,
    sparse: bool | None = None,
    crop: int = 0,
    resize: tuple[int, int] | None = None,
    x: str | None = None,
    y: str | None = None,
    chunk_rows: int | str | None = None,
    shard_rows: int | str | None = None,
    compressor: str | None = "keep",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Dataset:
    """Write the rows of a dataset, or of a zarr array of other software, to a new dataset in another form.

    Properties without an argument stay unchanged. The fingerprint depends on the rows and the shards, not on
    the chunks and the codec.

    Parameters
    ----------
    source : Dataset or url
        A dataset, a zarr array of rows (format 2 or 3), or a zarr group with arrays of rows and labels.
    out_url : str
        Path or address of the new dataset.
    rows : (int, int), optional
        Convert only the rows `start:stop`.
    dtype : dtype, optional
        Dtype of the new rows. A value that the dtype cannot represent exactly is an error unless `lossy`.
    lossy : bool, default False
        Round to the nearest value of `dtype`, and clip values to its range.
    sparse : bool, optional
        Write CSR rows (True; the axes of a row become one axis) or dense rows (False).
    crop : int, default 0
        Number of pixels to remove on each side of an image. Rows with one axis must be square images.
    resize : (int, int), optional
        Height and width of the new images, after the crop. Each new pixel is the mean of the area that it
        covers, as float32 (float64 for float64 rows) unless `dtype` is given.
    x, y : str, optional
        Names of the arrays of rows and labels in a zarr group; by default `x` and, if it exists, `y`, in
        upper or lower case.
    chunk_rows, shard_rows : int or 'auto', optional
        Rows per chunk and per shard; by default those of the source. 'auto' chooses them for the size of a
        row, as it does for zarr arrays of other software.
    compressor : {'keep', 'auto', 'zstd', 'lz4', None}, default 'keep'
        Codec of the rows.
    overwrite : bool, default False
        Replace an existing dataset at `out_url`.
    progress : callable, optional
        Function that is called with (rows done, total rows).

    Returns
    -------
    Dataset
        The new dataset.

    Raises
    ------
    DataError
        If the source, array or rows do not exist; a value does not fit (the message names row and column);
        the output exists or is the source; the source is damaged; or the disk is full. A partial output is
        removed.

    Examples
    --------
    >>> from scalelatent.data import Dataset
    >>> ds = Dataset.from_arrays(np.array([[0.0, 1.0], [254.0, 255.0]]))
    >>> convert_dataset(ds, "memory://doc-u", dtype="u1", rows=(1, 2), overwrite=True).read_x(0, 1)
    array([[254, 255]], dtype=uint8)
    """
    if not isinstance(source, Dataset):
        check_not_own_input(out_url, source)
    ds = source if isinstance(source, Dataset) else open_source(source, x=x, y=y)
    parameters: dict[str, Any] = {}
    if rows is not None:
        a, b = rows
        if not 0 <= a < b <= ds.n_rows:
            raise DataError(f"rows {a}:{b} are outside of the rows 0:{ds.n_rows} of {ds.url or 'the source'}")
        ds = ds[a:b]
        parameters["rows"] = [a, b]
    origin = ds
    new_sizes = crop != 0 or resize is not None or (sparse is not None and sparse != ds.is_sparse)
    layout = _choose_layout(ds._columns.x.layout, new_sizes, chunk_rows, shard_rows, compressor)
    name = ds.url or "the rows"
    if crop != 0 or resize is not None:
        parameters |= {"crop": crop, "resize": None if resize is None else list(resize)}
        ds = _with_rows(ds, ResizedRows(ds._columns.x, crop, resize, name))
    if dtype is not None and np.dtype(dtype) != ds.dtype:
        parameters["dtype"] = str(np.dtype(dtype))
        kind = schema.check_rows_dtype(np.dtype(dtype), "the dtype to convert to")
        ds = _with_rows(ds, CastRows(ds._columns.x, kind, lossy, name))
    if sparse is not None and sparse != ds.is_sparse:
        ds = _with_rows(ds, (SparseRows if sparse else DenseRows)(ds._columns.x))
    elif ds.is_sparse and chunk_rows is None:
        layout["chunk_rows"] = None  # row groups have no chunk size
    provenance = derive_provenance(origin, "convert", **parameters)
    copy_rows(ds, out_url, provenance=provenance, overwrite=overwrite, progress=progress, **layout)
    return open_dataset(out_url)


def _choose_layout(
    old: ChunkLayout | None,
    new_sizes: bool,
    chunk_rows: int | str | None,
    shard_rows: int | str | None,
    compressor: str | None,
) -> LayoutOptions:
    """Return the layout arguments of `create_dataset`: the requested values, else those of the source.

    With `new_sizes` the size of a row changes, so the chunk and shard sizes of the source are not used.
    """
    keeps = old is not None and not new_sizes
    chunks = _choose_size(chunk_rows, "chunk_rows", old.chunk_rows if old is not None and keeps else None)
    shards = _choose_size(shard_rows, "shard_rows", old.shard_rows if old is not None and keeps else None)
    if chunks and shards and shards % chunks:
        if chunk_rows is None:  # keep the requested shard size; the chunk size is chosen to divide it
            chunks = None
        elif shard_rows is None:
            shards = None
    if compressor == "keep":
        compressor = "auto" if old is None else old.compressor
    return {"chunk_rows": chunks, "shard_rows": shards, "compressor": compressor}


def _choose_size(rows: int | str | None, name: str, old_size: int | None) -> int | None:
    """Return the requested number of rows, `old_size` if none is requested, or None for 'auto'."""
    if rows is None or rows == "auto":
        return old_size if rows is None else None
    try:
        return operator.index(rows)  # type: ignore[arg-type]
    except TypeError as error:
        raise DataError(f"{name} is {rows!r}, but it must be a whole number of rows or 'auto'") from error


def _with_rows(ds: Dataset, x: RowSource) -> Dataset:
    """Return the dataset with `x` as its rows, and with the same labels and weights."""
    old = ds._columns
    columns = DatasetColumns(
        x, old.y, old.weight, place=old.place, attrs=old.attrs, feature_names=old.feature_names
    )
    return Dataset(columns, ds._start, ds._stop)


class ResizedRows(WrappedRows):
    """Grey-scale or colour images, cropped and then resized to float means over areas of pixels."""

    def __init__(self, source: RowSource, crop: int, size: tuple[int, int] | None, name: str) -> None:
        if source.sparse:
            raise DataError(
                f"{name}: CSR rows are not images that can be cropped or resized; convert them to dense rows "
                "first"
            )
        self._shape = _image_shape(source.shape[1:], name)
        height, width = (side - 2 * crop for side in self._shape[:2])
        if crop < 0 or min(height, width) < 1:
            raise DataError(
                f"{name}: crop={crop} removes all pixels of images of {self._shape[0]}x{self._shape[1]}: "
                f"give a number from 0 to {(min(self._shape[:2]) - 1) // 2}"
            )
        self._crop, self._maps, self._name = crop, None, name
        dtype = source.dtype
        if size is not None:
            if min(size) < 1:
                raise DataError(f"{name}: resize={size[0]}x{size[1]} has no pixel: give two numbers above 0")
            self._maps = _make_area_weights(height, size[0]), _make_area_weights(width, size[1])
            height, width = size
            dtype = np.dtype("f8" if dtype == np.float64 else "f4")
        super().__init__(source, (source.shape[0], height, width, *self._shape[2:]), dtype)

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = np.asarray(self._source.read(start, stop)).reshape(stop - start, *self._shape)
        height, width = self._shape[:2]
        rows = rows[:, self._crop : height - self._crop, self._crop : width - self._crop]
        if self._maps is None:
            return np.ascontiguousarray(rows)
        csr.check_finite(rows, start, self._name)
        down, across = self._maps
        planes = rows if rows.ndim == 3 else np.moveaxis(rows, 3, 1)
        found = down @ planes.astype(np.float64) @ across.T
        found = found if rows.ndim == 3 else np.moveaxis(found, 1, 3)
        return np.ascontiguousarray(found, dtype=self.dtype)


def _image_shape(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Return height, width and optional channels of images; rows with one axis have to be square images."""
    if len(shape) in (2, 3):
        return tuple(shape)
    if len(shape) == 1 and (side := math.isqrt(shape[0])) ** 2 == shape[0]:
        return (side, side)
    raise DataError(
        f"{name}: rows of shape {tuple(shape)} are not images that can be cropped or resized; import them "
        "with their height and width"
    )


def _make_area_weights(old: int, new: int) -> np.ndarray:
    """Return a matrix (new, old) of weights: the share of each old pixel in the range of each new pixel."""
    edges = np.arange(new + 1) * (old / new)
    starts = np.arange(old)
    shared = np.minimum(edges[1:, None], starts + 1) - np.maximum(edges[:-1, None], starts)
    shared = np.maximum(shared, 0.0)
    return shared / shared.sum(axis=1, keepdims=True)


class CastRows(WrappedRows):
    """Dense or CSR rows in another dtype: exact values, or, with `lossy`, the nearest values."""

    def __init__(self, source: RowSource, dtype: np.dtype, lossy: bool, name: str) -> None:
        if source.sparse:
            dtype = csr.check_dtype(dtype, "the dtype to convert to")
        super().__init__(source, dtype=dtype)
        self._lossy, self._name = lossy, name

    def read(self, start: int, stop: int) -> DenseOrCsr:
        rows = self._source.read(start, stop)
        csr.check_finite(rows, start, self._name)
        stored = rows if isinstance(rows, np.ndarray) else rows.data
        values, exact = cast(stored, self.dtype, self._lossy)
        if not (self._lossy or exact.all()):
            entry = int(np.flatnonzero(~exact)[0])
            row, column = csr.place_of(rows, entry)
            raise DataError(
                f"{self._name}: row {start + row}, column {column} is {stored.reshape(-1)[entry]}, which "
                f"{self.dtype} cannot hold exactly; choose another dtype, or round to the nearest value with "
                "--lossy (lossy=True)"
            )
        if isinstance(rows, np.ndarray):
            return values
        return csr.csr_of(values, rows.indices, rows.indptr, self.shape[1])


class DenseRows(WrappedRows):
    """CSR rows, converted to dense rows when they are read."""

    def __init__(self, source: RowSource) -> None:
        super().__init__(source)
        self.sparse = False

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = self._source.read(start, stop)
        return rows if isinstance(rows, np.ndarray) else np.asarray(rows.toarray())


class SparseRows(WrappedRows):
    """Dense rows, converted to CSR rows when they are read; the axes of a row are flattened to one axis."""

    def __init__(self, source: RowSource) -> None:
        shape = (source.shape[0], schema.n_features(source.shape[1:]))
        super().__init__(source, shape, csr.check_dtype(source.dtype, "the rows"))
        self.sparse = True

    @functools.cached_property
    def nnz(self) -> int:
        """Number of values that are not zero; the first use reads all rows."""
        return self._count(0, self.shape[0])

    def count_entries(self, start: int, stop: int) -> int:
        return self.nnz if (start, stop) == (0, self.shape[0]) else self._count(start, stop)

    def _count(self, start: int, stop: int) -> int:
        return sum(int(np.count_nonzero(self._source.read(a, b))) for a, b in self.pieces(start, stop))

    def read(self, start: int, stop: int) -> DenseOrCsr:
        rows = self._source.read(start, stop).reshape(stop - start, self.shape[1])
        row, column = np.nonzero(rows)
        pointers = np.searchsorted(row, np.arange(stop - start + 1))
        columns = column.astype(csr.index_dtype(self.shape[1]))
        return csr.csr_of(rows[row, column], columns, pointers, self.shape[1])


def cast(x: np.ndarray, dtype: np.dtype, lossy: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the values in another dtype, and a mask of the values that the dtype holds exactly."""
    # NumPy calls a cast from 8-byte integers to floats safe, although the cast rounds large values.
    wide = x.dtype.kind in "iu" and x.dtype.itemsize == 8 and dtype.kind == "f"
    if np.can_cast(x.dtype, dtype, "safe") and not wide:
        return x.astype(dtype, copy=False), np.broadcast_to(True, x.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        within = _is_in_range(x, dtype)
        plain = x.astype(dtype)
        exact = within & (plain.astype(x.dtype) == x)
        if dtype.kind == "f":
            # A float may round up beyond the integer range of `x`; the cast back to integers is undefined.
            exact &= _is_in_range(plain, x.dtype)
        if not lossy:
            return plain, exact
        if dtype.kind == "b":
            return x != 0, exact
        low, high = _get_value_range(dtype)
        near = np.rint(x) if x.dtype.kind == "f" and dtype.kind in "iu" else x
        values = np.where(_is_in_range(near, dtype), near, 0).astype(dtype)
        values[_exceeds(near, high)] = high
        values[near < low] = low
    return values, exact


def _get_value_range(dtype: np.dtype) -> tuple[float, float]:
    """Return the smallest and the largest value of a dtype, as Python numbers."""
    if dtype.kind == "b":
        return 0, 1
    if dtype.kind == "f":
        return float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _is_in_range(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a mask of the finite values inside the range of a dtype."""
    low, high = _get_value_range(dtype)
    return np.isfinite(x) & ~_exceeds(x, high) & (x >= low)


def _exceeds(x: np.ndarray, high: float) -> np.ndarray:
    """Return a mask of the values > high, without the error from rounding an integer `high` to a float."""
    if x.dtype.kind == "f" and isinstance(high, int):
        # The largest value of an integer dtype is 2**k - 1, which may round to 2**k as a float.
        return x >= float(high + 1)
    return x > high


def open_source(url: str | os.PathLike[str], *, x: str | None = None, y: str | None = None) -> Dataset:
    """Open a stored dataset, or zarr arrays of other software as a dataset."""
    location = locate(url)
    if format_of(location) in (schema.FORMAT, REMOVED) or location.is_empty():
        if x is not None or y is not None:
            raise DataError(f"{location.url} is a dataset, which has its own x and y; leave out --x and --y")
        return open_dataset(url)
    return Dataset.from_arrays(*open_arrays(url, x=x, y=y))


def open_arrays(
    url: str | os.PathLike[str], *, x: str | None = None, y: str | None = None
) -> tuple[zarr.Array, zarr.Array | np.ndarray | None]:
    """Return rows and labels (or None) from zarr arrays at `url`."""
    import zarr

    location = locate(url)
    try:
        found = zarr.open(location.zarr_store(read_only=True), mode="r")
    except Exception as error:  # zarr raises several kinds of errors
        raise DataError(
            f"{location.url} is neither a dataset nor a zarr array or group ({error}); give a "
            "dataset, or import the files in it with `scalelatent data import`"
        ) from error
    if isinstance(found, zarr.Array):
        if x is not None or y is not None:
            raise DataError(
                f"{location.url} is a single zarr array, which contains no array {x or y!r}; leave out --x "
                "and --y"
            )
        return found, None
    rows = _open_group_array(found, location.url, "x", x)
    labels = _open_group_array(found, location.url, "y", y)
    if labels is not None and labels.dtype.kind not in "buif":
        labels = np.asarray(labels[...]).astype(object).astype(str)  # zarr has several dtypes of strings
    return rows, labels


def _open_group_array(group: zarr.Group, url: str, role: str, key: str | None) -> zarr.Array | None:
    """Return the array of a group that holds the rows (role 'x') or labels ('y'); None without labels."""
    names = sorted(group.array_keys())
    if key is not None and key not in names and hasattr(group.get(key), "dtype"):
        names.append(key)  # an array of an inner group
    name = choose_array(names, role, key, f"zarr group {url}")
    return None if name is None else group[name]
