"""Types for annotations of what users hand in.

Importing it costs nothing: the libraries that it names are a type checker's alone. An alias is as wide as
what is accepted; where a library of it is not installed, a type checker takes anything.
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
    """A sparse matrix or array, of scipy or another library."""

    @property
    def shape(self) -> Any: ...

    def tocsr(self) -> Any: ...


class ArrowFrame(Protocol):
    """A data frame with Arrow's interface: of pandas, polars, pyarrow and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


_Arrays: TypeAlias = (
    "npt.ArrayLike | SlicedArray | zarr.Array | dask.array.Array | xarray.DataArray | torch.Tensor"
)

FrameLike: TypeAlias = "ArrowFrame | polars.LazyFrame"
"""A data frame of pandas, polars or pyarrow, or of another library with Arrow's interface."""

RowsLike: TypeAlias = "Dataset | _Arrays | SparseLike | FrameLike | anndata.abc.CSRDataset"
"""Rows (n, features): a Dataset, arrays of numpy, zarr, dask, xarray and torch, sparse, frames, lists;
sparse rows of a backed AnnData."""

LabelsLike: TypeAlias = "Dataset | _Arrays | SparseLike"
"""Labels (n,) or outputs (n, v); outputs may be the rows of a Dataset, or sparse."""

WeightsLike: TypeAlias = "_Arrays"
"""Weights of rows (n,), or one number for all where scikit-learn takes that."""

ValidationLike: TypeAlias = "Dataset | tuple[RowsLike, LabelsLike | None] | list[Any]"
"""Rows that are held out: a Dataset that brings its labels, or a pair (X, y)."""

RandomState: TypeAlias = "int | np.integer | np.random.Generator | np.random.RandomState | None"
"""A seed of at least 0, what draws one, or None for another seed each time."""

ClientLike: TypeAlias = "Client | HasScheduler"
"""A cluster to compute on: a client, or an object of Dask's (LocalCluster, KubeCluster, SLURMCluster)."""
