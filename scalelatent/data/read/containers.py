"""Open containers of other libraries as arrays that are read by rows, without computing lazy data."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from scalelatent.data.schema import refuse_masked
from scalelatent.errors import DataError

from .frames import FrameColumns, arrow_table

if TYPE_CHECKING:
    import anndata.abc
    import polars
    import pyarrow
    import torch
    import xarray

    from scalelatent.typing import FrameLike


class SlicedRows:
    """Array-like that calls the function `read(start, stop)` when its rows are sliced."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        read: Callable[[int, int], np.ndarray],
        columns: Sequence[str] = (),
    ) -> None:
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)
        self._read = read
        self.columns = columns  # names of the features, like the columns of a data frame; empty without names

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def __getitem__(self, key: slice | tuple[slice, ...]) -> np.ndarray:
        rows, *rest = key if isinstance(key, tuple) else (key,)
        start, stop, step = rows.indices(len(self))
        return self._read(start, max(start, stop))[(slice(None, None, step), *rest)]


def is_instance(x: object, module: str, *names: str) -> bool:
    """Return whether `x` is an instance of one of the named classes, without importing the module."""
    found = sys.modules.get(module)
    # While another thread still imports the module, a class may be missing; x is then no instance of it.
    return isinstance(x, tuple(kind for name in names if (kind := getattr(found, name, None)) is not None))


def is_lazy(x: object) -> bool:
    """Return whether `x` becomes an array whose rows are read only when they are needed."""
    return (
        isinstance(x, SlicedRows)
        or is_instance(x, "xarray", "DataArray")
        or _is_lazy_frame(x)
        or _is_dask_frame(x)
        or is_backed_csr(x)
    )


def is_backed_csr(x: object) -> TypeGuard[anndata.abc.CSRDataset]:
    """Return whether `x` is a CSR matrix in the open file of an AnnData object (backed mode)."""
    return is_instance(x, "anndata.abc", "CSRDataset")


def _is_lazy_frame(x: object) -> TypeGuard[polars.LazyFrame]:
    return is_instance(x, "polars", "LazyFrame")


def _is_dask_frame(x: object) -> bool:
    return is_instance(x, "dask.dataframe", "DataFrame", "Series")


def _is_cupy(x: object) -> bool:
    return is_instance(x, "cupy", "ndarray") or is_instance(x, "cupyx.scipy.sparse", "spmatrix")


def _is_cudf(x: object) -> bool:
    return is_instance(x, "cudf", "DataFrame", "Series", "Index")


def is_on_gpu(x: Any) -> bool:
    """Return whether `x` is on a GPU: an array of CuPy or torch, or a data frame of cuDF."""
    return _is_cupy(x) or _is_cudf(x) or (is_instance(x, "torch", "Tensor") and bool(x.is_cuda))


def opened(x: Any, name: str = "x") -> Any:
    """Return a container of another library as an array, without computing lazy data; keep other values."""
    if isinstance(x, np.ma.MaskedArray):
        refuse_masked(x, name)
        return x.data
    if isinstance(x, str | os.PathLike):
        path = os.fspath(x)
        raise DataError(
            f"{name} is the string {path!r:.200}, which holds no rows; if it is the path of a dataset, pass "
            f"the rows: scalelatent.open_dataset({path!r:.200})"
        )
    if is_instance(x, "xarray", "DataArray"):
        return x.data if x.chunks is not None else _wrap_data_array(x)
    if is_instance(x, "torch", "Tensor"):
        return _convert_tensor(x, name)
    if _is_cupy(x):
        return x.get()  # copy to the host, because workers without a GPU also read the rows
    if _is_cudf(x):
        return x.to_pandas()
    if hasattr(type(x), "__cuda_array_interface__"):
        raise DataError(
            f"{name} is a {type(x).__module__}.{type(x).__name__} on a GPU, which cannot be read there; pass "
            f"cupy.asarray({name}) or a copy on the host (arrays of CuPy, cuDF and torch are copied)"
        )
    if is_instance(x, "polars", "LazyFrame") or is_instance(x, "pyarrow", "Table", "RecordBatch"):
        return frame_rows(x, FrameColumns(_read_arrow_schema(x), name))
    if is_instance(x, "pyarrow", "Array", "ChunkedArray"):
        table = arrow_table({name: x})
        return FrameColumns(table.schema, name, label=name, features=[]).labels(table)
    if is_instance(x, "anndata", "AnnData"):
        raise DataError(
            f"{name} is an AnnData object, which contains labels and several matrices; pass its rows and "
            "labels: Dataset.from_arrays(adata.X, adata.obs['cell_type'], feature_names=adata.var_names)"
        )
    if is_instance(x, "anndata.abc", "CSCDataset"):
        raise DataError(
            f"{name} is a sparse matrix in a file, stored by columns (CSC), which cannot be read in rows; "
            "read it into memory, adata = adata.to_memory(), or write the file again after "
            "adata.X = adata.X.tocsr()"
        )
    if is_instance(x, "zarr", "Group") or is_instance(x, "h5py", "Group"):
        names = sorted(key for key in x if hasattr(x[key], "shape"))
        raise DataError(
            f"{name} is a {type(x).__module__.split('.')[0]} group, not an array. Pass one of its arrays "
            f"({', '.join(names[:5]) or 'it holds none'}), for example group[{(names or ['x'])[0]!r}]; use "
            "open_dataset for a dataset of scalelatent"
        )
    if _is_dask_frame(x):
        raise DataError(
            f"{name} is a Dask DataFrame, whose number of rows is unknown; pass "
            f"{name}.to_dask_array(lengths=True), which counts the rows"
        )
    return x


def frame_parts(
    frame: FrameLike | dict[str, Any], label: str | None, weight: str | None, features: Sequence[str] | None
) -> tuple[SlicedRows, np.ndarray | None, np.ndarray | None]:
    """Return rows, labels and weights of a data frame; of a lazy frame, compute only labels and weights."""
    if _is_dask_frame(frame):
        opened(frame, "the frame")
    lazy = _is_lazy_frame(frame)
    rows: Any = frame if lazy else arrow_table(frame)
    columns = FrameColumns(
        _read_arrow_schema(rows), "the frame", label=label, weight=weight, features=features
    )
    others = [name for name in (label, weight) if name is not None]
    table = arrow_table(rows.select(others).collect()) if lazy and others else rows
    return (
        frame_rows(rows, columns),
        None if label is None else columns.labels(table),
        None if weight is None else columns.weights(table),
    )


def frame_rows(frame: Any, columns: FrameColumns) -> SlicedRows:
    """Return the features of an Arrow table, or of a polars lazy frame, which each read executes."""
    lazy = _is_lazy_frame(frame)
    n_rows = _count_rows(frame) if lazy else frame.num_rows

    def read(start: int, stop: int) -> np.ndarray:
        part = frame.slice(start, stop - start)
        return columns.rows(arrow_table(part.select(columns.names).collect()) if lazy else part, start)

    return SlicedRows((n_rows, *columns.feature_shape), columns.dtype, read, columns.feature_names or ())


def _read_arrow_schema(frame: pyarrow.Table | polars.LazyFrame) -> pyarrow.Schema:
    """Return the Arrow schema of a table or of a lazy frame, without computing rows."""
    if not _is_lazy_frame(frame):
        return frame.schema
    from polars import DataFrame

    return arrow_table(DataFrame(schema=frame.collect_schema())).schema


def _count_rows(frame: polars.LazyFrame) -> int:
    from polars import len as count

    return int(frame.select(count()).collect().item())


def _wrap_data_array(x: xarray.DataArray) -> SlicedRows:
    """Return a DataArray without Dask chunks, in memory or in an open file, as an array read by rows."""
    return SlicedRows(tuple(map(int, x.shape)), np.dtype(x.dtype), lambda a, b: np.asarray(x[a:b].values))


def _convert_tensor(x: torch.Tensor, name: str) -> np.ndarray:
    try:
        return np.asarray(x.detach().cpu().numpy())
    except TypeError as error:  # bfloat16 and other types that numpy does not have
        raise DataError(
            f"{name} is a tensor of {x.dtype}, a type that numpy lacks; convert it first, for example with "
            f"{name}.float()"
        ) from error
