"""Append a dataset, or the rows of a file, to a stored dataset."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from scalelatent.data.dataset import Dataset, open_dataset
from scalelatent.data.write.append import PREFIX, append_opened
from scalelatent.data.write.batches import Progress
from scalelatent.errors import DataError
from scalelatent.storage.disk import locate
from scalelatent.storage.write_checks import scratch

from .csr_archive import import_csr
from .files import PathOrUrl
from .npy import import_npy, import_npz

if TYPE_CHECKING:
    from typing import Unpack

    from scalelatent.data.schema import LayoutOptions


def append_rows(
    url: PathOrUrl,
    source: Dataset | PathOrUrl,
    *,
    x: str | None = None,
    y: str | None = None,
    progress: Progress | None = None,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Append rows to a stored dataset.

    The rows go to a new segment inside the dataset's folder. The list of segments is written last, and only
    then readers see the rows. If an append is interrupted, the dataset stays as it was, and the next append
    removes the incomplete segment. A segment that is not larger than the new rows is rewritten together with
    them, so n appends make about log2(n) segments; `convert_dataset` makes one of all. A dataset that is
    already open keeps its rows until the second append after it was opened. Only one append runs at a time: a
    second one raises `DataError`.

    Parameters
    ----------
    url : str
        The dataset that grows.
    source : Dataset, url or path
        Rows to append: a dataset, or an `.npz` or `.npy` file. They need the feature shape and dtype of the
        dataset, and its kind of labels; new labels become new classes. Either both have weights or none.
    x, y : str, optional
        Arrays of an `.npz` file with rows and labels; by default `x` or `X`, and `y` or `Y`. If the dataset
        has CSR rows, `x` is the prefix of CSR arrays (see `import_csr`).
    progress : callable, optional
        Called with (rows done, total rows).
    **layout
        `chunk_rows`, `shard_rows`, `compressor` of `create_dataset`, for the new rows.

    Returns
    -------
    Dataset
        The dataset with all its rows and a new fingerprint.

    Raises
    ------
    DataError
        Rows or labels of another kind, a damaged source, a full disk, or another append at the same time. The
        dataset stays as it was.

    Examples
    --------
    >>> import numpy as np
    >>> from scalelatent.data import Dataset
    >>> place = "memory://doc-append"
    >>> _ = Dataset.from_arrays(np.zeros((3, 2)), ["a", "c", "c"]).save(place, overwrite=True)
    >>> append_rows(place, Dataset.from_arrays(np.ones((2, 2)), ["b", "a"])).read_y(0, 5).tolist()
    ['a', 'c', 'c', 'b', 'a']
    """
    return append_opened(url, lambda target: _open_source(source, target, x, y), progress=progress, **layout)


@contextmanager
def _open_source(
    source: Dataset | PathOrUrl, target: Dataset, x: str | None, y: str | None
) -> Iterator[Dataset]:
    """Open the rows to append; a file is first imported to a temporary dataset next to the target."""
    suffix = "" if isinstance(source, Dataset) else Path(os.fspath(source)).suffix.lower()
    if (x is not None or y is not None) and suffix != ".npz":
        raise DataError(
            f"x={x!r} and y={y!r} name arrays of an .npz file, which {source} is not; leave out --x and --y"
        )
    if isinstance(source, Dataset):
        yield source
        return
    if suffix not in (".npz", ".npy"):
        yield open_dataset(source)
        return
    temporary = locate(f"{target.url}.{PREFIX}{uuid.uuid4().hex[:8]}")
    with scratch(temporary):
        try:
            if suffix == ".npy":
                rows = import_npy(source, temporary.url)
            elif target.is_sparse:
                rows = import_csr(source, temporary.url, csr_prefix=x, y=y)
            else:
                rows = import_npz(source, temporary.url, x=x, y=y)
        except DataError as error:
            if "--csr-prefix" in str(error):
                error.add_note("(`data append` takes the prefix by --x, append_rows by x=)")
            raise
        yield rows
