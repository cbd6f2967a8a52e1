"""Import NumPy's npy and npz files as a stream: no array is whole in memory, and nothing is unpickled."""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

import numpy as np

from scalelatent.data.dataset import Dataset
from scalelatent.data.read.array_names import choose_arrays
from scalelatent.errors import DataError
from scalelatent.storage.disk import is_local

from .files import PathOrUrl, file_size, open_file
from .stream import ArrayReader, BinaryReader, import_rows

if TYPE_CHECKING:
    from typing import Unpack

    from .stream import ImportOptions, RowReader

# Maximum number of values in an array that describes other arrays, such as a shape.
_MAX_SMALL_VALUES = 64
_UNPACK_ERRORS = (OSError, EOFError, zlib.error, zipfile.BadZipFile)


def import_npy(
    file: PathOrUrl, url: PathOrUrl, *, y: PathOrUrl | None = None, **options: Unpack[ImportOptions]
) -> Dataset:
    """Import an npy file of rows (n, ...) and optionally one of labels (n,); memory is bounded by one shard.

    Parameters
    ----------
    file : path
        Rows: bool, integers or floats, in C or Fortran order.
    url : str
        Dataset to write.
    y : path, optional
        Labels: numbers or strings.
    **options
        Options of all importers. `overwrite` (bool): replace the dataset at `url`. `progress` (callable):
        called with (rows done, total rows). `shuffle` (int): seed of a shuffle of all rows; by default rows
        keep their order. `chunk_rows`, `shard_rows`, `compressor`: see `create_dataset`.

    Returns
    -------
    Dataset
        Rows in the dtype of the file.

    Raises
    ------
    DataError
        A file that is missing, truncated, too long or no npy file; Python objects; NaN or infinity (with row
        and column); another number of labels than rows; an output that exists. No dataset stays behind.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/x.npy", np.eye(3))
    ...     import_npy(f"{folder}/x.npy", "memory://doc-npy", overwrite=True)
    <Dataset 3 rows x (3,) float64, 'memory://doc-npy'>
    """
    return import_rows(
        lambda: open_npy(file, "rows"),
        None if y is None else lambda: open_npy(y, "labels"),
        url,
        importer="npy",
        sources=[file] if y is None else [file, y],
        **options,
    )


def import_npz(
    file: PathOrUrl,
    url: PathOrUrl,
    x: str | None = None,
    y: str | None = None,
    **options: Unpack[ImportOptions],
) -> Dataset:
    """Import rows and labels from an npz archive, compressed or not; memory is bounded by one shard.

    Parameters
    ----------
    file : path
        The archive.
    url : str
        Dataset to write.
    x, y : str, optional
        Names of the arrays with rows and labels; by default `x` or `X`, and `y` or `Y` if it exists.
    **options
        See `import_npy`.

    Returns
    -------
    Dataset
        Rows in the dtype of the file.

    Raises
    ------
    DataError
        As `import_npy`; also a missing array (the message lists the arrays of the archive).

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/a.npz", X=np.eye(3), Y=["a", "b", "a"])
    ...     import_npz(f"{folder}/a.npz", "memory://doc-npz", overwrite=True).read_y(0, 3).tolist()
    ['a', 'b', 'a']
    """
    with open_npz(file) as archive:
        x_name, y_name = choose_arrays(array_names(archive), x, y, f"npz file {os.fspath(file)}")
        return import_rows(
            lambda: open_member(archive, file, x_name),
            None if y_name is None else lambda: open_member(archive, file, y_name),
            url,
            importer="npz",
            sources=[file],
            provenance={"x": x_name, "y": y_name},
            **options,
        )


@contextlib.contextmanager
def open_npz(file: PathOrUrl) -> Iterator[zipfile.ZipFile]:
    with open_file(file, "npz file") as raw:
        try:
            archive = zipfile.ZipFile(raw)
        except zipfile.BadZipFile as error:
            raise DataError(
                f"npz file {os.fspath(file)} is not an npz archive, or is truncated: {error}; download or "
                "copy it again"
            ) from error
        yield archive


def array_names(archive: zipfile.ZipFile) -> list[str]:
    """Return the names of the arrays in an npz archive."""
    return [name.removesuffix(".npy") for name in archive.namelist()]


def read_small(archive: zipfile.ZipFile, path: PathOrUrl, key: str) -> np.ndarray:
    """Return a whole array of at most 64 values of an archive, such as a shape."""
    name = f"npz file {os.fspath(path)}, array {key!r}"
    with open_array(archive, path, key) as file:
        shape, _, dtype = read_header(file, name, allow_scalar=True)
        if len(shape) > 1 or math.prod(shape) > _MAX_SMALL_VALUES:
            raise DataError(f"{name} has shape {shape}; a few numbers are needed")
        try:
            raw = file.read(math.prod(shape) * dtype.itemsize)
        except _UNPACK_ERRORS as error:
            raise DataError(f"{name} is damaged: {error}; save or copy it again") from error
    if len(raw) < math.prod(shape) * dtype.itemsize:
        raise DataError(f"{name} is truncated; save or copy it again")
    return np.frombuffer(raw, dtype).reshape(shape)


def open_npy(path: PathOrUrl, content: str) -> RowReader:
    """Return a reader of an npy file; `content` ("rows" or "labels") names the file in messages."""
    raw = open_file(path, f"npy file of {content}")
    name = f"npy file {os.fspath(path)}"
    try:
        shape, is_fortran, dtype = read_header(raw, name)
        reader = BinaryReader(raw, name, shape, dtype, raw.tell())
        reader.check_size(file_size(raw))
        if not is_fortran or len(shape) == 1:
            return reader
        raw.close()
        if not is_local(path):
            raise DataError(
                f"{name} is stored column by column (Fortran order), which is read through a memory map; "
                "copy it to a disk first"
            )
        # In Fortran order, the values of one row are far apart in the file. A memory map reads such rows
        # slowly, but needs little memory.
        return ArrayReader(np.load(path, mmap_mode="r", allow_pickle=False), name)
    except BaseException:
        raw.close()
        raise


def open_member(
    archive: zipfile.ZipFile, path: PathOrUrl, key: str, *, allow_empty: bool = False
) -> BinaryReader:
    """Return a reader of one array of an npz archive; raise `DataError` if it is empty and must not be."""
    name = f"npz file {os.fspath(path)}, array {key!r}"
    file = open_array(archive, path, key)
    shape, is_fortran, dtype = read_header(file, name)
    if is_fortran and len(shape) > 1:
        raise DataError(
            f"{name} is stored column by column (Fortran order), which cannot be read in rows; save it again "
            f"with np.savez(..., {key}=np.ascontiguousarray(array)), or as an npy file"
        )
    reader = BinaryReader(file, name, shape, dtype, file.tell(), allow_empty=allow_empty)
    reader.check_size(archive.getinfo(_member(archive, key)).file_size)
    return reader


def open_array(archive: zipfile.ZipFile, path: PathOrUrl, key: str) -> IO[bytes]:
    try:
        return archive.open(_member(archive, key))
    except (*_UNPACK_ERRORS, RuntimeError, NotImplementedError) as error:
        raise DataError(
            f"npz file {os.fspath(path)}, array {key!r} is damaged at its start: {error}; download or copy "
            "it again"
        ) from error


def _member(archive: zipfile.ZipFile, key: str) -> str:
    return f"{key}.npy" if f"{key}.npy" in archive.namelist() else key


def read_header(
    file: IO[bytes], name: str, *, allow_scalar: bool = False
) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return (shape, True for Fortran order, dtype) from an npy header; raise `DataError` for objects."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        version = np.lib.format.read_magic(file)
        if version not in readers:
            raise DataError(
                f"{name} has npy version {version}; versions 1.0 and 2.0 can be read: save it again"
            )
        shape, is_fortran, dtype = readers[version](file)
    except DataError:
        raise
    except (*_UNPACK_ERRORS, ValueError) as error:
        raise DataError(
            f"{name} is not an npy array, or is damaged at byte 0: {error}; save or copy it again"
        ) from error
    if dtype.hasobject:
        raise DataError(
            f"{name} holds Python objects, which only pickle can read; it is refused because such a file can "
            "run any code. Save it again as numbers or strings, for example np.save(path, "
            "array.astype('float32'))"
        )
    if len(shape) == 0 and not allow_scalar:
        raise DataError(f"{name} holds a single number; rows x features are needed")
    return tuple(shape), is_fortran, dtype
