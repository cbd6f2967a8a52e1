"""Import HDF5 files, one shard of the new dataset at a time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data.dataset import Dataset
from scalelatent.data.read.array_names import choose_arrays
from scalelatent.errors import DataError
from scalelatent.storage.disk import is_local

from .files import PathOrUrl, open_file
from .stream import RowReader, import_rows

if TYPE_CHECKING:
    from typing import Unpack

    import h5py

    from .stream import ImportOptions

# Bytes of unpacked chunks that HDF5 keeps for each array, so that a chunk whose rows belong to two shards is
# unpacked once. As HDF5 recommends, the hash table of this cache has a prime number of slots, about 100 per
# chunk. With `rdcc_w0` = 1, HDF5 first discards chunks that were read completely.
_CACHE = {"rdcc_nbytes": 4 << 20, "rdcc_nslots": 100_003, "rdcc_w0": 1.0}


def import_hdf5(
    file: PathOrUrl,
    url: PathOrUrl,
    x: str | None = None,
    y: str | None = None,
    **options: Unpack[ImportOptions],
) -> Dataset:
    """Import rows and labels from an HDF5 file; memory is bounded by a few shards and 8 MiB of chunks.

    Each HDF5 chunk is unpacked once, unless the chunks of a range of rows take more than 4 MiB.

    Parameters
    ----------
    file : path
        The file. Needs h5py: ``pip install 'scalelatent[hdf5]'``.
    url : str
        Dataset to write.
    x, y : str, optional
        Names of the arrays, with the path of their groups (``train/data``). By default the only array called
        ``x`` or ``X`` in any group, and ``y`` or ``Y`` in the same group if it exists.
    **options
        See `import_npy`.

    Returns
    -------
    Dataset
        Rows (n, ...) and labels (n,), numbers or strings, or targets (n, v), in the dtypes of the file.

    Raises
    ------
    DataError
        A file that is missing, truncated, damaged or no HDF5 file; an array that is missing (the message
        lists the arrays of the file), takes its numbers from other files (external raw storage, virtual
        datasets), or has a wrong dtype or shape; NaN or infinity; another number of labels than rows; rows
        that the disk cannot hold; an output that exists. No dataset stays behind.

    Examples
    --------
    >>> import tempfile
    >>> import h5py
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with h5py.File(f"{folder}/a.h5", "w") as file:
    ...         file["train/X"], file["train/Y"] = np.eye(3), [5, 6, 5]
    ...     import_hdf5(f"{folder}/a.h5", "memory://doc-hdf5", overwrite=True)
    <Dataset 3 rows x (3,) float64, 2 classes, 'memory://doc-hdf5'>
    """
    source_name = f"HDF5 file {os.fspath(file)}"
    with open_h5(file, "HDF5 file") as opened:
        x_name, y_name = choose_arrays(describe_arrays(opened), x, y, source_name)

        def reader(name: str) -> Hdf5Reader:
            return Hdf5Reader(opened[name], f"{source_name}, array {name!r}")

        return import_rows(
            lambda: reader(x_name),
            None if y_name is None else lambda: reader(y_name),
            url,
            importer="hdf5",
            sources=[file],
            provenance={"x": x_name, "y": y_name},
            **options,
        )


def open_h5(path: PathOrUrl, kind: str) -> h5py.File:
    """Open an HDF5 file to read; raise `DataError` if that fails."""
    raw = open_file(path, kind)  # messages of `open_file` are clearer than those of HDF5
    source_name = f"{kind} {os.fspath(path)}"
    try:
        import h5py
    except ImportError as error:
        raise DataError(
            f"{source_name} cannot be read without h5py: install it with pip install 'scalelatent[hdf5]'"
        ) from error
    try:
        if is_local(path):  # HDF5 reads a file faster by its path than through a Python object
            raw.close()
            return h5py.File(path, "r", **_CACHE)
        return h5py.File(raw, "r", **_CACHE)
    except OSError as error:
        raw.close()
        raise DataError(
            f"{source_name} is no HDF5 file, or is truncated: {error}; download or copy it again, or use "
            "another importer"
        ) from error


def describe_arrays(file: h5py.File) -> dict[str, str]:
    """Map the path of every array in the file to its shape and dtype, as text for messages."""
    import h5py

    found: dict[str, str] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = f"{item.shape} {item.dtype}"

    file.visititems(visit)
    return found


class Hdf5Reader(RowReader):
    """Reader of the rows of an HDF5 array; with `is_matlab` its axes are in reverse order, as in MATLAB.

    Arrays whose numbers are in other files are refused: these can be any files of this machine, and HDF5
    reads zeros without an error if they are absent.
    """

    def __init__(
        self, array: h5py.Dataset, name: str, *, is_matlab: bool = False, rows_last: bool = False
    ) -> None:
        import h5py

        if array.shape is None or len(array.shape) == 0:
            raise DataError(
                f"{name} holds no array, but a single value or nothing; rows x features are needed"
            )
        if array.external or array.is_virtual:
            raise DataError(
                f"{name} takes its numbers from other files (external raw storage or a virtual dataset); "
                "copy the array to a file of its own"
            )
        self.name = name
        is_text = h5py.check_string_dtype(array.dtype) is not None
        self._array = array.asstr("utf-8") if is_text else array
        self._row_axis = len(array.shape) - 1 if is_matlab != rows_last else 0
        feature_axes = [a for a in range(len(array.shape)) if a != self._row_axis]
        self._axes = [self._row_axis, *(reversed(feature_axes) if is_matlab else feature_axes)]
        self.shape = tuple(int(array.shape[a]) for a in self._axes)
        self.dtype = np.dtype(str) if is_text else array.dtype
        if 0 in self.shape:
            raise DataError(f"{name} has shape {self.shape}, which is empty: nothing to import")
        self._next_row = 0

    def read(self, rows: int) -> np.ndarray:
        a, b = self._next_row, self._next_row + rows
        try:
            part = self._array[(slice(None),) * self._row_axis + (slice(a, b),)]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{self.name} is damaged in rows {a}:{b}: {error}; download or copy the file again"
            ) from error
        self._next_row = b
        dtype = self.dtype if self.dtype.kind == "U" else self.dtype.newbyteorder("=")
        return np.ascontiguousarray(np.asarray(part).transpose(self._axes), dtype)
