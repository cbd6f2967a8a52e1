"""Create a dataset and write its shards with `DatasetWriter`, which opens the finished dataset."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from scalelatent.data.dataset import Dataset, open_dataset

from .create import begin_dataset
from .shards import ShardWriter

if TYPE_CHECKING:
    from typing import Unpack

    import numpy.typing as npt

    from scalelatent.data.schema import CreateOptions


class DatasetWriter(ShardWriter):
    """Writer of the shards of one dataset, from `create_dataset` or, in another process, from `attach`.

    Threads and processes may write different shards at the same time. A shard that is written twice with the
    same rows gives an identical file.
    """

    def finalize(self) -> Dataset:
        """Check that every shard is written, mark the dataset complete, and open the dataset.

        Raises
        ------
        DataError
            If shards are missing; the message has their number and the first of them.
        """
        self.finish()
        return open_dataset(self.url)


def create_dataset(
    url: str | os.PathLike[str],
    n_rows: int,
    feature_shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    **options: Unpack[CreateOptions],
) -> DatasetWriter:
    """Create a dataset on a disk, in an object store or in memory, and return the writer of its shards.

    Parameters
    ----------
    url : str
        Path or address of the new dataset; see `locate`.
    n_rows : int
        Number of rows, at least 1.
    feature_shape : tuple of int
        Shape of one row.
    dtype : dtype
        Dtype of the rows: bool, integer or float.
    y_dtype : dtype, optional
        Dtype of the labels, targets or multi-labels. None (default): the dataset has none of them, or string
        labels, whose `classes` define the dtype.
    y_kind : {'labels', 'targets', 'multilabel'}, default 'labels'
        Labels (n,), targets (n, n_targets), or CSR multi-labels (n, n_targets).
    n_targets : int, optional
        Number of columns of targets or multi-labels.
    classes : array-like, optional
        Distinct labels. Required for string labels, which are stored as codes. Numeric classes are collected
        during writing if `classes` is None.
    nnz : int, optional
        Approximate number of stored entries if the rows are CSR; it determines the size of row groups. CSR
        rows have one axis. None (default): dense rows.
    weighted : bool, default False
        Whether each row has a weight.
    feature_names : sequence of str, optional
        One name per feature, for rows with one axis.
    chunk_rows, shard_rows : int, optional
        Rows per chunk and rows per shard, a multiple of `chunk_rows`. By default both depend on the size of a
        row (layout.py). For CSR rows `shard_rows` is the number of rows of a row group.
    compressor : {'auto', 'zstd', 'lz4', None}, default 'auto'
        Codec of the rows. 'auto' compresses integers and the indices of CSR rows, but not floats.
    tile_columns : int, optional
        Number of columns per tile. Dense rows with one axis, without labels and weights, can also be split by
        columns; each shard then holds one tile of its rows, and has its own writer.
    provenance : dict, optional
        Origin of the rows, as values for JSON. The software version is added.
    resume : bool, default False
        Continue an unfinished dataset that was created with the same arguments. If there is no dataset, a new
        one is created.
    overwrite : bool, default False
        Replace an existing dataset at `url`.

    Returns
    -------
    DatasetWriter
        Write each shard, then call `finalize`.

    Raises
    ------
    DataError
        If `url` has content that may not be replaced, the disk has too little space, or an argument is
        invalid.

    Examples
    --------
    >>> import numpy as np
    >>> place = "memory://doc-create"
    >>> writer = create_dataset(place, 5, (2,), "f4", y_dtype="u1", shard_rows=3, overwrite=True)
    >>> for i in range(writer.n_shards):
    ...     a, b = writer.shard_bounds(i)
    ...     writer.write_shard(i, np.ones((b - a, 2), "f4"), np.arange(a, b))
    >>> writer.finalize().classes.tolist()
    [0, 1, 2, 3, 4]
    """
    return DatasetWriter(begin_dataset(url, n_rows, feature_shape, dtype, **options))
