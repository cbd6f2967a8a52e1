"""Types of the rows, labels, weights and clusters that users pass to functions.

Only type checkers import the libraries that the types name. Without such a library, they accept any object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import anndata.abc
    import dask.array
    import numpy as np
    import numpy.typing as npt
    import polars
    import torch
    import xarray
    import zarr
    from distributed import Client

    from .data.dataset import Dataset
    from .deploy.clusters import HasScheduler

__all__ = [
    "ArrowFrame",
    "ClientLike",
    "FrameLike",
    "LabelsLike",
    "RandomState",
    "RowsLike",
    "SlicedArray",
    "SparseLike",
    "ValidationLike",
    "WeightsLike",
]


class SlicedArray(Protocol):
    """Array that is sliced like a NumPy array: a zarr array, an h5py dataset or a memmap."""

    @property
    def shape(self) -> tuple[Any, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __getitem__(self, rows: slice, /) -> Any: ...

    def __len__(self) -> int: ...


class SparseLike(Protocol):
    """Sparse matrix or array of scipy, or of another library with a method `tocsr`."""

    @property
    def shape(self) -> Any: ...

    def tocsr(self) -> Any: ...


class ArrowFrame(Protocol):
    """Data frame with Arrow's interface, for example of pandas, polars or pyarrow."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


_Arrays: TypeAlias = (
    "npt.ArrayLike | SlicedArray | zarr.Array | dask.array.Array | xarray.DataArray | torch.Tensor"
)

FrameLike: TypeAlias = "ArrowFrame | polars.LazyFrame"
"""Data frame with Arrow's interface (pandas, polars, pyarrow), or a lazy frame of polars."""

RowsLike: TypeAlias = "Dataset | _Arrays | SparseLike | FrameLike | anndata.abc.CSRDataset"
"""Rows (n, features): a Dataset, an array (numpy, zarr, dask, xarray, torch), a list, a sparse matrix, a data
frame, or the CSR matrix of an AnnData object whose file is open (backed mode)."""

LabelsLike: TypeAlias = "Dataset | _Arrays | SparseLike"
"""Labels (n,) or outputs (n, v); outputs may also be a sparse matrix, or the rows of a Dataset."""

WeightsLike: TypeAlias = "_Arrays"
"""Weights of the rows (n,); estimators also accept one number as the weight of every row."""

ValidationLike: TypeAlias = "Dataset | tuple[RowsLike, LabelsLike | None] | list[Any]"
"""Validation rows: a Dataset that contains the labels, or a pair (X, y)."""

RandomState: TypeAlias = "int | np.integer | np.random.Generator | np.random.RandomState | None"
"""A seed of at least 0, a random generator that draws the seed, or None for another seed in each fit."""

ClientLike: TypeAlias = "Client | HasScheduler"
"""Dask cluster to compute on: a client, or a cluster object (LocalCluster, KubeCluster, SLURMCluster)."""
