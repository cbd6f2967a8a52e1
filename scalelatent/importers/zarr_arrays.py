"""Zarr arrays made elsewhere, also virtual ones: references into files of other kinds (kerchunk)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data.dataset import Dataset
from scalelatent.data.write.convert import open_arrays
from scalelatent.errors import DataError

from .stream import ArrayStream, Progress, import_rows

if TYPE_CHECKING:
    from typing import Unpack

    from scalelatent.data.schema import LayoutOptions


def import_zarr(
    source: str | os.PathLike[str],
    url: str | os.PathLike[str],
    x: str | None = None,
    y: str | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    shuffle: int | None = None,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Import rows and labels from zarr arrays, or from a file of references to parts of other files.

    Parameters
    ----------
    source : url
        A zarr array (format 2 or 3), a group of some, or references as kerchunk and VirtualiZarr write them
        (``.json``, ``.parq``): zarr then reads the files that they name, with the codecs that those need.
    url : str
        Where the dataset goes.
    x, y : str, optional
        Arrays of a group that hold rows and labels; by default ``x`` and, where it is there, ``y``, in either
        case.
    overwrite, progress, shuffle, **layout
        See `import_npy`.

    Returns
    -------
    Dataset
        The rows, in the type of the array.

    Raises
    ------
    DataError
        No such array; a chunk, or a file that is referred to, that cannot be read; NaN or infinity (with row
        and column); an output that exists. No dataset is left behind.

    Examples
    --------
    >>> import tempfile, zarr
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = zarr.save_group(f"{folder}/a.zarr", x=np.eye(3), y=np.arange(3))
    ...     import_zarr(f"{folder}/a.zarr", "memory://doc-zarr", overwrite=True)
    <Dataset 3 rows x (3,) float64, 3 classes, 'memory://doc-zarr'>
    """
    rows, labels = open_arrays(source, x=x, y=y)
    what = f"zarr {os.fspath(source)}"
    return import_rows(
        lambda: ZarrChunks(rows, what),
        None if labels is None else lambda: ZarrChunks(labels, f"{what}, labels"),
        url,
        importer="zarr",
        sources=[source],
        options={"x": x, "y": y},
        overwrite=overwrite,
        progress=progress,
        shuffle=shuffle,
        **layout,
    )


class ZarrChunks(ArrayStream):
    """Rows of a zarr array, in order."""

    def read(self, rows: int) -> np.ndarray:
        first = self._next
        try:
            return super().read(rows)
        except Exception as error:  # of zarr, of fsspec and of each codec
            raise DataError(
                f"{self.name}: rows {first}:{first + rows} cannot be read: {error}; check the files that its "
                "chunks lie in"
            ) from error
