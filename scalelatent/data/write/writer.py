"""Create a dataset and write its shards with `DatasetWriter`, which opens the finished dataset."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from scalelatent.data.dataset import Dataset, open_dataset

from .create import begin_dataset
from .shards import ShardWriter

if TYPE_CHECKING:
    import numpy.typing as npt


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
            Shards are missing; the message counts them and names the first.
        """
        self.finish()
        return open_dataset(self.url)


def create_dataset(
    url: str | os.PathLike[str],
    n_rows: int,
    feature_shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    *,
    y_dtype: npt.DTypeLike | None = None,
    y_kind: str = "labels",
    n_targets: int | None = None,
    classes: npt.ArrayLike | None = None,
    nnz: int | None = None,
    weighted: bool = False,
    chunk_rows: int | None = None,
    shard_rows: int | None = None,
    compressor: str | None = "auto",
    tile_columns: int | None = None,
    provenance: dict[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> DatasetWriter:
    """Create a dataset on disk (or in memory) and return the writer of its shards.

    Parameters
    ----------
    url : str
        Where to; see `locate`.
    n_rows : int
        Number of rows, at least 1.
    feature_shape : tuple of int
        Shape of one row.
    dtype : dtype
        Type of the rows: bool, integer or float.
    y_dtype : dtype, optional
        Type of the labels (targets, multi-labels); None means none. Not needed with string `classes`.
    y_kind : {'labels', 'targets', 'multilabel'}
        Labels (n,), targets (n, n_targets), or CSR multi-labels (n, n_targets).
    n_targets : int, optional
        Columns of targets and multi-labels.
    classes : array-like, optional
        The distinct labels. Needed for string labels, which are stored as codes; found while writing
        otherwise.
    nnz : int, optional
        The rows are CSR of about so many stored entries in all, by which row groups are sized; rows are then
        of one axis. None: dense rows.
    weighted : bool
        Whether each row has a weight.
    chunk_rows, shard_rows : int, optional
        Rows of a chunk and of a shard (a multiple of it); chosen by measurement if left open (layout.py). For
        CSR rows `shard_rows` are the rows of a row group.
    compressor : {'auto', 'zstd', 'lz4', None}
        Codec of the rows. 'auto' compresses bytes (and the columns of CSR rows) and leaves floats alone.
    tile_columns : int, optional
        Cut dense rows of one axis across, too: a shard then holds so many columns of its rows, and has a
        writer of its own. Such rows have neither labels nor weights.
    provenance : dict, optional
        Where the rows come from; JSON-able. The software version is added.
    resume : bool
        Go on with a dataset that was begun with the same arguments; a new one is made where there is none.
    overwrite : bool
        Replace a dataset that lies there.

    Returns
    -------
    DatasetWriter
        Write each shard, then `finalize`.

    Raises
    ------
    DataError
        Something lies there already, or an argument cannot be.

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
    place = begin_dataset(
        url,
        n_rows,
        feature_shape,
        dtype,
        y_dtype=y_dtype,
        y_kind=y_kind,
        n_targets=n_targets,
        classes=classes,
        nnz=nnz,
        weighted=weighted,
        chunk_rows=chunk_rows,
        shard_rows=shard_rows,
        compressor=compressor,
        tile_columns=tile_columns,
        provenance=provenance,
        resume=resume,
        overwrite=overwrite,
    )
    return DatasetWriter(place)
