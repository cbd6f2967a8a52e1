"""Appending a dataset, or the rows of a file, to a stored dataset."""

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
from .npy import import_npy, import_npz

if TYPE_CHECKING:
    from typing import Unpack

    from scalelatent.data.schema import LayoutOptions


def append_rows(
    url: str | os.PathLike[str],
    source: Dataset | str | os.PathLike[str],
    *,
    x: str | None = None,
    y: str | None = None,
    progress: Progress | None = None,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Append rows to a stored dataset.

    The rows go to a segment of their own inside the dataset's folder; the last thing written is the list of
    segments, and only then do readers see them. Whatever stops an append, the dataset is as it was, and the
    next append removes what was left. A segment that is not larger than the new rows is rewritten together
    with them, so n appends make about log2(n) segments; `convert_dataset` makes one of all. Datasets that are
    open already keep their old rows up to the next but one append. One append at a time: a second one is
    refused while the first goes on.

    Parameters
    ----------
    url : str
        The dataset that grows.
    source : Dataset, url or path
        What is appended: a dataset, or an `.npz` or `.npy` file. Its rows need the same feature shape and
        dtype; its labels the same kind and, where they are new, join the classes; weights both or none.
    x, y : str, optional
        Arrays of an `.npz` file that hold rows and labels; by default `x` and `y`, in either case. Where the
        dataset has CSR rows, `x` is the prefix of the arrays of such (see `import_csr`).
    progress : callable, optional
        Called with (rows done, rows in all).
    **layout
        `chunk_rows`, `shard_rows`, `compressor` of `create_dataset`, for the new rows.

    Returns
    -------
    Dataset
        The dataset with all its rows, and with a new fingerprint.

    Raises
    ------
    DataError
        Rows or labels of another kind, a damaged source, a full disk, or another append at the same time. The
        dataset is as it was.

    Examples
    --------
    >>> import numpy as np
    >>> from scalelatent.data import Dataset
    >>> place = "memory://doc-append"
    >>> _ = Dataset.from_arrays(np.zeros((3, 2)), ["a", "c", "c"]).save(place, overwrite=True)
    >>> append_rows(place, Dataset.from_arrays(np.ones((2, 2)), ["b", "a"])).read_y(0, 5).tolist()
    ['a', 'c', 'c', 'b', 'a']
    """
    return append_opened(url, lambda target: _opened(source, target, x, y), progress=progress, **layout)


@contextmanager
def _opened(
    source: Dataset | str | os.PathLike[str], target: Dataset, x: str | None, y: str | None
) -> Iterator[Dataset]:
    """The rows to append; those of a file by way of a dataset beside the target, removed afterwards."""
    kind = "" if isinstance(source, Dataset) else Path(os.fspath(source)).suffix.lower()
    if (x is not None or y is not None) and kind != ".npz":
        raise DataError(
            f"x={x!r} and y={y!r} name arrays of an .npz file, which {source} is not; leave out --x and --y"
        )
    if isinstance(source, Dataset):
        yield source
        return
    if kind not in (".npz", ".npy"):
        yield open_dataset(source)
        return
    aside = locate(f"{target.url}.{PREFIX}{uuid.uuid4().hex[:8]}")
    with scratch(aside):
        try:
            if kind == ".npy":
                rows = import_npy(source, aside.url)
            elif target.is_sparse:
                rows = import_csr(source, aside.url, csr_prefix=x, y=y)
            else:
                rows = import_npz(source, aside.url, x=x, y=y)
        except DataError as error:
            if "--csr-prefix" in str(error):
                error.add_note("(`data append` takes the prefix by --x, append_rows by x=)")
            raise
        yield rows
