"""NumPy's npy and npz files, read as a stream: no array is ever whole in memory, nothing is unpickled."""

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
from scalelatent.errors import DataError
from scalelatent.storage.disk import is_https, is_local

from .files import file_size, find_keys, local_copy, open_file
from .stream import ArrayStream, Progress, RowStream, import_rows

if TYPE_CHECKING:
    from typing import Unpack

    from scalelatent.data.schema import LayoutOptions

    from .stream import RowReader

_SMALL = 64


def import_npy(
    file: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    y: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    shuffle: int | None = None,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Import an npy file of rows (n, ...) and, if given, one of labels (n,); memory is bounded by one shard.

    Parameters
    ----------
    file : path
        Rows: bool, integers or floats, C or Fortran order.
    url : str
        Where the dataset goes.
    y : path, optional
        Labels: numbers or strings.
    overwrite : bool
        Replace a dataset that lies there.
    progress : callable, optional
        Called with (rows done, rows in all).
    shuffle : int, optional
        Seed of a shuffle of all rows; by default they keep their order.
    **layout
        `chunk_rows`, `shard_rows`, `compressor` of `create_dataset`.

    Returns
    -------
    Dataset
        The rows, in the type of the file.

    Raises
    ------
    DataError
        A file that is missing, cut short, too long or no npy file; Python objects; NaN or infinity (with row
        and column); labels of another number; an output that exists. No dataset is left behind.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/x.npy", np.eye(3))
    ...     import_npy(f"{folder}/x.npy", "memory://doc-npy", overwrite=True)
    <Dataset 3 rows x (3,) float64, 'memory://doc-npy'>
    """
    options = {"importer": "npy", "sources": [file] if y is None else [file, y]}
    return import_rows(
        lambda: open_npy(file, "rows"),
        None if y is None else lambda: open_npy(y, "labels"),
        url,
        overwrite=overwrite,
        progress=progress,
        shuffle=shuffle,
        **options,
        **layout,
    )


def import_npz(
    file: str | os.PathLike[str],
    url: str | os.PathLike[str],
    x: str | None = None,
    y: str | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    shuffle: int | None = None,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Import rows and labels from an npz archive, compressed or not; memory is bounded by one shard.

    Parameters
    ----------
    file : path
        The archive.
    url : str
        Where the dataset goes.
    x, y : str, optional
        Names of the arrays in the archive; by default `x` and, where it is there, `y`, in either case.
    overwrite, progress, shuffle, **layout
        See `import_npy`.

    Returns
    -------
    Dataset
        The rows, in the type of the file.

    Raises
    ------
    DataError
        As `import_npy`; also an array that is not in the archive (the message lists those that are).

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/a.npz", X=np.eye(3), Y=["a", "b", "a"])
    ...     import_npz(f"{folder}/a.npz", "memory://doc-npz", overwrite=True).read_y(0, 3).tolist()
    ['a', 'b', 'a']
    """
    with open_npz(file) as archive:
        keys = [n.removesuffix(".npy") for n in archive.namelist()]
        x_name, y_name = find_keys(keys, x, y, f"npz file {os.fspath(file)}")
        options = {"importer": "npz", "sources": [file], "options": {"x": x_name, "y": y_name}}
        return import_rows(
            lambda: open_member(archive, file, x_name),
            None if y_name is None else lambda: open_member(archive, file, y_name),
            url,
            overwrite=overwrite,
            progress=progress,
            shuffle=shuffle,
            **options,
            **layout,
        )


@contextlib.contextmanager
def open_npz(file: str | os.PathLike[str]) -> Iterator[zipfile.ZipFile]:
    """The archive, closed at the end."""
    with open_file(file, "npz file") as raw:
        try:
            archive = zipfile.ZipFile(raw)
        except zipfile.BadZipFile as error:
            raise DataError(
                f"npz file {os.fspath(file)} is not an npz archive, or is truncated: {error}; download or "
                "copy it again"
            ) from error
        yield archive


def read_small(archive: zipfile.ZipFile, path: str | os.PathLike[str], key: str) -> np.ndarray:
    """A small array of an archive whole, such as a shape."""
    name = f"npz file {os.fspath(path)}, array {key!r}"
    with open_array(archive, path, key) as file:
        shape, _, dtype = read_header(file, name, scalar=True)
        if len(shape) > 1 or math.prod(shape) > _SMALL:
            raise DataError(f"{name} has shape {shape}; a few numbers are needed")
        try:
            raw = file.read(math.prod(shape) * dtype.itemsize)
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise DataError(f"{name} is damaged: {error}; save or copy it again") from error
    if len(raw) < math.prod(shape) * dtype.itemsize:
        raise DataError(f"{name} is cut short; save or copy it again")
    return np.frombuffer(raw, dtype).reshape(shape)


def open_npy(path: str | os.PathLike[str], what: str) -> RowReader:
    """Rows of an npy file; a memory map where it is in Fortran order."""
    raw = open_file(path, f"npy file of {what}")
    name = f"npy file {os.fspath(path)}"
    try:
        shape, fortran, dtype = read_header(raw, name)
        stream = RowStream(raw, name, shape, dtype, raw.tell())
        stream.check_size(file_size(raw))
        if fortran and len(shape) > 1:
            raw.close()
            if is_https(path):
                path = local_copy(path, f"npy file of {what}")
            elif not is_local(path):
                raise DataError(
                    f"{name} is stored column by column (Fortran order), which is read through a memory "
                    "map; copy it to a disk first"
                )
            # Rows of columns, through a memory map: slow, but bounded.
            return ArrayStream(np.load(path, mmap_mode="r", allow_pickle=False), name)
        return stream
    except BaseException:
        raw.close()
        raise


def open_member(archive: zipfile.ZipFile, path: str | os.PathLike[str], key: str) -> RowStream:
    """A stream over one array of an npz archive."""
    name = f"npz file {os.fspath(path)}, array {key!r}"
    file = open_array(archive, path, key)
    shape, fortran, dtype = read_header(file, name)
    if fortran and len(shape) > 1:
        raise DataError(
            f"{name} is stored column by column (Fortran order), which cannot be read in rows; save it again "
            f"with np.savez(..., {key}=np.ascontiguousarray(array)), or as an npy file"
        )
    stream = RowStream(file, name, shape, dtype, file.tell())
    stream.check_size(archive.getinfo(_member(archive, key)).file_size)
    return stream


def open_array(archive: zipfile.ZipFile, path: str | os.PathLike[str], key: str) -> IO[bytes]:
    """The file of one array of an npz archive."""
    try:
        return archive.open(_member(archive, key))
    except (OSError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise DataError(
            f"npz file {os.fspath(path)}, array {key!r} is damaged where it begins: {error}; download or "
            "copy it again"
        ) from error


def _member(archive: zipfile.ZipFile, key: str) -> str:
    return f"{key}.npy" if f"{key}.npy" in archive.namelist() else key


def read_header(
    file: IO[bytes], name: str, *, scalar: bool = False
) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether in Fortran order, and dtype; arrays of Python objects are refused."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        version = np.lib.format.read_magic(file)
        if version not in readers:
            raise DataError(
                f"{name} has npy version {version}; versions 1.0 and 2.0 can be read: save it again"
            )
        shape, fortran, dtype = readers[version](file)
    except DataError:
        raise
    except (ValueError, EOFError, OSError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(
            f"{name} is not an npy array, or is damaged at byte 0: {error}; save or copy it again"
        ) from error
    if dtype.hasobject:
        raise DataError(
            f"{name} holds Python objects, which only pickle can read; it is refused because such a file "
            "can run any code. Save it again as numbers or strings, for example np.save(path, "
            "array.astype('float32'))"
        )
    if len(shape) == 0 and not scalar:
        raise DataError(f"{name} holds a single number; rows x features are needed")
    return tuple(shape), fortran, dtype
