"""HDF5 files, read in bands of whole chunks: each chunk is unpacked once, memory is bounded by a band."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data.dataset import Dataset
from scalelatent.data.schema import n_features
from scalelatent.errors import DataError
from scalelatent.storage.disk import is_local

from .files import find_keys, open_file
from .stream import Progress, RowReader, import_rows

if TYPE_CHECKING:
    from typing import Unpack

    import h5py

    from scalelatent.data.schema import LayoutOptions

_SHOWN = 3


def check_storage(
    array: h5py.Dataset,
    what: str,
    allow_external: bool = False,
    seen: frozenset[tuple[str, str]] = frozenset(),
) -> None:
    """Refuse an array whose numbers lie outside of its file, and parts of one that HDF5 would make up."""
    raw = list(array.external or ())
    sources = array.virtual_sources() if array.is_virtual else []
    if (raw or sources) and not allow_external:
        names = list(dict.fromkeys([name for name, _, _ in raw] + [s.file_name for s in sources]))
        shown = ", ".join(map(repr, names[:_SHOWN])) + (
            f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
        )
        kind = "by external raw storage" if raw else "as a virtual dataset"
        raise DataError(
            f"{what} does not hold its numbers: {kind} it takes them from {shown}. Look at what those are, "
            "then import it with `scalelatent data import hdf5 --allow-external` (allow_external=True)"
        )
    if raw:
        _check_raw(array, raw, what)
    here = (os.path.realpath(array.file.filename), array.name)
    if here in seen:
        raise DataError(f"{what} is a virtual dataset of itself; nothing to import")
    for source in sources:
        _check_source(array, source, what, seen | {here})


def _check_raw(array: h5py.Dataset, raw: list[tuple[str, int, int]], what: str) -> None:
    left = array.nbytes
    for name, offset, size in raw:
        path = os.path.join(os.environ.get("HDF5_EXTFILE_PREFIX", ""), name)
        wanted = min(size, left)
        found = os.path.getsize(path) if os.path.isfile(path) else None
        if found is None or found < offset + wanted:
            there = "is missing" if found is None else f"has {found:,} bytes of {offset + wanted:,}"
            raise DataError(
                f"{what}: its raw storage {path!r} {there}, and HDF5 would read zeros instead; put that file "
                "there (a relative name counts from the current folder)"
            )
        left -= wanted


def _check_source(array: h5py.Dataset, source: Any, what: str, seen: frozenset[tuple[str, str]]) -> None:
    import h5py

    where = f"{what}: its source {source.dset_name!r} in {source.file_name!r}"
    if "%" in source.file_name + source.dset_name:
        raise DataError(
            f"{where} is a pattern of names, of which a missing one cannot be told; copy the array "
            "to a file of its own first"
        )
    step = "put that file there, or copy the array to a file of its own where it is whole"
    try:
        if source.file_name == ".":
            _check_found(array.file, source, where, step, seen)
            return
        with h5py.File(_found(array.file.filename, source.file_name), "r") as file:
            _check_found(file, source, where, step, seen)
    except OSError as error:
        raise DataError(
            f"{where} cannot be opened, and HDF5 would read fill values instead: {error}; {step}"
        ) from error


def _found(virtual: str, name: str) -> str:
    """The file that HDF5 takes for a name: beside the virtual one, else from the current folder."""
    beside = os.path.join(os.environ.get("HDF5_VDS_PREFIX") or os.path.dirname(virtual), name)
    return beside if os.path.exists(beside) else name


def _check_found(
    file: h5py.File, source: Any, where: str, step: str, seen: frozenset[tuple[str, str]]
) -> None:
    import h5py

    found = file.get(source.dset_name)
    if not isinstance(found, h5py.Dataset):
        raise DataError(f"{where} is not in that file, and HDF5 would read fill values instead; {step}")
    declared = source.src_space.shape  # empty where all of the source is meant, whatever its shape
    short = any(want > have for want, have in zip(declared, found.shape, strict=False))
    if short or (not declared and found.size < source.vspace.get_select_npoints()):
        raise DataError(
            f"{where} has shape {found.shape}, which is less than the virtual dataset takes from it, and "
            f"HDF5 would read fill values instead; {step}"
        )
    check_storage(found, where, True, seen)


_BAND_BYTES = 2 << 20
_MAX_BAND_BYTES = 64 << 20


def import_hdf5(
    file: str | os.PathLike[str],
    url: str | os.PathLike[str],
    x: str | None = None,
    y: str | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    shuffle: int | None = None,
    allow_external: bool = False,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Import rows and labels from an HDF5 file; memory is bounded by a few shards.

    Rows are read in bands of whole HDF5 chunks, so that each chunk is unpacked once. Where one chunk spans so
    many rows that a band would take more than 64 MiB, chunks are unpacked several times instead.

    Parameters
    ----------
    file : path
        The file. Needs h5py: ``pip install 'scalelatent[hdf5]'``.
    url : str
        Where the dataset goes.
    x, y : str, optional
        Names of the arrays, paths where they lie in groups (``train/data``). By default the one array called
        ``x``, in either case, in any group, and, where it is there, ``y`` in the same group.
    allow_external : bool
        Take arrays whose numbers lie in other files, too: external raw storage may name any file of this
        machine, and virtual datasets any other HDF5 file.
    overwrite, progress, shuffle, **layout
        See `import_npy`.

    Returns
    -------
    Dataset
        Rows (n, ...) and labels (n,), numbers or strings, or targets (n, v), in the types of the file.

    Raises
    ------
    DataError
        A file that is missing, cut short, damaged or no HDF5 file; an array that is not in it (the message
        lists those that are), that lies in other files, or is of another type or shape; NaN or infinity;
        labels of another number; rows that the disk cannot hold; an output that exists. No dataset is left
        behind.

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
    where = f"HDF5 file {os.fspath(file)}"
    with open_h5(file, "HDF5 file") as opened:
        arrays = describe_arrays(opened)
        x_name, y_name = find_keys(arrays, x, y, where)

        def rows(name: str) -> H5Rows:
            what = f"{where}, array {name!r}"
            check_storage(opened[name], what, allow_external)
            return H5Rows(opened[name], what)

        return import_rows(
            lambda: rows(x_name),
            None if y_name is None else lambda: rows(y_name),
            url,
            importer="hdf5",
            sources=[file],
            options={"x": x_name, "y": y_name} | ({"external": True} if allow_external else {}),
            overwrite=overwrite,
            progress=progress,
            shuffle=shuffle,
            **layout,
        )


def open_h5(path: str | os.PathLike[str], what: str) -> h5py.File:
    """Open an HDF5 file to read, or say what is wrong with it."""
    raw = open_file(path, what)  # its messages say more than HDF5's
    where = f"{what} {os.fspath(path)}"
    try:
        import h5py
    except ImportError as error:
        raise DataError(
            f"{where} cannot be read without h5py: install it with pip install 'scalelatent[hdf5]'"
        ) from error
    try:
        if is_local(path):  # by its name, which virtual datasets are relative to
            raw.close()
            return h5py.File(path, "r")
        return h5py.File(raw, "r")
    except OSError as error:
        raw.close()
        raise DataError(
            f"{where} is no HDF5 file, or is truncated: {error}; download or copy it again, or use another "
            "importer"
        ) from error


def describe_arrays(file: h5py.File) -> dict[str, str]:
    """Path -> shape and type of every array in the file."""
    import h5py

    found: dict[str, str] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = f"{item.shape} {item.dtype}"

    file.visititems(visit)
    return found


class H5Rows(RowReader):
    """Rows of an HDF5 array, in order."""

    def __init__(
        self, array: h5py.Dataset, name: str, *, matlab: bool = False, rows_last: bool = False
    ) -> None:
        import h5py

        if array.shape is None or len(array.shape) == 0:
            raise DataError(
                f"{name} holds no array, but a single value or nothing; rows x features are needed"
            )
        self.name = name
        self._strings = h5py.check_string_dtype(array.dtype) is not None
        self._array = array.asstr("utf-8") if self._strings else array
        self._matlab = matlab
        self._axis = len(array.shape) - 1 if matlab != rows_last else 0
        # Axes of what HDF5 reads, in the order of a row of the dataset: the rows first.
        features = [a for a in range(len(array.shape)) if a != self._axis]
        self._order = [self._axis, *(reversed(features) if matlab else features)]
        self.shape = tuple(int(array.shape[a]) for a in self._order)
        self.dtype = np.dtype(str) if self._strings else array.dtype
        if 0 in self.shape:
            raise DataError(f"{name} has shape {self.shape}, which is empty: nothing to import")
        self._band_rows = self._choose_band(array)
        self._band = np.empty(0)
        self._row = self._taken = 0

    def _choose_band(self, array: h5py.Dataset) -> int:
        """Rows to read at a time: whole chunks, about 4 MiB, never much more than 64 MiB."""
        row_bytes = max(1, n_features(self.shape[1:]) * array.dtype.itemsize)
        chunk = 1 if array.chunks is None else int(array.chunks[self._axis])
        if chunk * row_bytes > _MAX_BAND_BYTES:
            return max(1, _MAX_BAND_BYTES // row_bytes)
        return chunk * max(1, _BAND_BYTES // (chunk * row_bytes))

    def read(self, rows: int) -> np.ndarray:
        kind = np.dtype(object) if self.dtype.kind == "U" else self.dtype.newbyteorder("=")
        out = np.empty((rows, *self.shape[1:]), kind)
        filled = 0
        while filled < rows:
            if self._taken == len(self._band):
                self._band = np.empty(0)  # before the next one is read: one in memory, not two
                self._band, self._taken = self._read_band(), 0
            count = min(rows - filled, len(self._band) - self._taken)
            out[filled : filled + count] = self._band[self._taken : self._taken + count]
            filled += count
            self._taken += count
        return out.astype(str) if self.dtype.kind == "U" else out

    def _read_band(self) -> np.ndarray:
        """The next rows as HDF5 reads them, their axes in order."""
        a, b = self._row, min(self._row + self._band_rows, self.n_rows)
        window = (slice(None),) * self._axis + (slice(a, b),)
        try:
            band = self._array[window]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{self.name} is damaged in rows {a}:{b}: {error}; download or copy the file again"
            ) from error
        self._row = b
        return np.asarray(band).transpose(self._order)

    def close(self) -> None:
        self._band = np.empty(0)
