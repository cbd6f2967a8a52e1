"""Import zarr arrays of other programs, also virtual ones: references into other files (kerchunk)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data.dataset import Dataset
from scalelatent.data.write.convert import open_arrays

from .files import PathOrUrl
from .stream import ArrayReader, import_rows, read_errors

if TYPE_CHECKING:
    from typing import Unpack

    from .stream import ImportOptions


def import_zarr(
    source: PathOrUrl,
    url: PathOrUrl,
    x: str | None = None,
    y: str | None = None,
    **options: Unpack[ImportOptions],
) -> Dataset:
    """Import rows and labels from zarr arrays, or from a file of references to parts of other files.

    Parameters
    ----------
    source : url
        A zarr array (format 2 or 3), a group of arrays, or references that kerchunk or VirtualiZarr wrote
        (``.json``, ``.parq``): zarr then reads the files that they name, with the codecs of those files.
    url : str
        Dataset to write.
    x, y : str, optional
        Arrays of a group with rows and labels; by default ``x`` or ``X``, and ``y`` or ``Y`` if it exists.
    **options
        See `import_npy`.

    Returns
    -------
    Dataset
        Rows in the dtype of the array.

    Raises
    ------
    DataError
        A missing array; a chunk, or a file named in the references, that cannot be read; NaN or infinity
        (with row and column); an output that exists. No dataset stays behind.

    Examples
    --------
    >>> import tempfile, zarr
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = zarr.save_group(f"{folder}/a.zarr", x=np.eye(3), y=np.arange(3))
    ...     import_zarr(f"{folder}/a.zarr", "memory://doc-zarr", overwrite=True)
    <Dataset 3 rows x (3,) float64, 3 classes, 'memory://doc-zarr'>
    """
    rows, labels = open_arrays(source, x=x, y=y)
    source_name = f"zarr {os.fspath(source)}"
    return import_rows(
        lambda: ZarrReader(rows, source_name),
        None if labels is None else lambda: ZarrReader(labels, f"{source_name}, labels"),
        url,
        importer="zarr",
        sources=[source],
        provenance={"x": x, "y": y},
        **options,
    )


class ZarrReader(ArrayReader):
    """Rows of a zarr array."""

    def read(self, rows: int) -> np.ndarray:
        a = self._next_row
        with read_errors(self.name, a, a + rows, "check the files that hold its chunks"):
            return super().read(rows)
