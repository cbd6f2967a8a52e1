"""Import MATLAB files: version 7.3 (HDF5) as a stream; versions 4 to 7 in memory, up to 2 GB a variable."""

from __future__ import annotations

import contextlib
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from scalelatent.data.dataset import Dataset
from scalelatent.data.read.array_names import choose_arrays
from scalelatent.errors import DataError

from .files import PathOrUrl, open_file
from .hdf5 import Hdf5Reader, check_storage, describe_arrays, open_h5
from .stream import LABEL_ROWS, ArrayReader, RowReader, import_rows

if TYPE_CHECKING:
    from typing import Unpack

    import h5py

    from .stream import ImportOptions

_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
# Bytes of one value of each MATLAB type (which MATLAB calls a class), as scipy stores it in memory.
_ITEM_BYTES = {"double": 8, "single": 4, "int64": 8, "uint64": 8, "int32": 4, "uint32": 4}
_ITEM_BYTES |= {"int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "logical": 1, "char": 4}


def import_mat(
    file: PathOrUrl,
    url: PathOrUrl,
    x: str | None = None,
    y: str | None = None,
    *,
    rows_last: bool = False,
    **options: Unpack[ImportOptions],
) -> Dataset:
    """Import rows and labels from a MATLAB file.

    Files of version 7.3 are streamed: memory is bounded by a few shards. Older files store a variable column
    by column in one compressed piece, which must be read whole: at most 2 GB by the format. A variable that
    is larger than the free memory is refused before it is read.

    Parameters
    ----------
    file : path
        The file. Version 7.3 needs h5py: ``pip install 'scalelatent[hdf5]'``.
    url : str
        Dataset to write.
    x, y : str, optional
        Names of the variables; by default ``x`` or ``X``, and ``y`` or ``Y`` if it exists.
    rows_last : bool
        Rows are along the last axis of `x`, as in images h x w x n; by default along the first.
    **options
        See `import_npy`.

    Returns
    -------
    Dataset
        Rows (n, ...) in the dtype of the file; labels (n,) from a vector, a matrix of characters or a cell
        array of strings, or targets (n, v). Labels that are whole numbers become integers, also if MATLAB
        stored them as floats.

    Raises
    ------
    DataError
        A file that is missing, truncated, damaged, no MATLAB file or too large for the memory; a variable
        that is missing (the message lists the variables of the file) or has a wrong type or shape; NaN or
        infinity; another number of labels than rows; an output that exists. No dataset stays behind.

    Examples
    --------
    >>> import tempfile
    >>> from scipy.io import savemat
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     savemat(f"{folder}/a.mat", {"X": np.eye(3), "Y": np.array([5.0, 6.0, 5.0])})
    ...     import_mat(f"{folder}/a.mat", "memory://doc-mat", overwrite=True).classes.tolist()
    [5, 6]
    """
    source_name = f"MATLAB file {os.fspath(file)}"
    with contextlib.closing(_open_mat(file, source_name)) as source:
        x_name, y_name = choose_arrays(source.variables, x, y, source_name)
        source.load([name for name in (x_name, y_name) if name is not None])
        if y_name is not None:
            _check_row_axis(source, x_name, source.labels(y_name).n_rows, rows_last)
        return import_rows(
            lambda: source.rows(x_name, rows_last),
            None if y_name is None else lambda: _whole_numbers(source, y_name),
            url,
            importer="mat",
            sources=[file],
            provenance={"x": x_name, "y": y_name} | ({"rows_last": True} if rows_last else {}),
            **options,
        )


class _Version73:
    """MATLAB file of version 7.3: HDF5, whose axes are in reverse order."""

    def __init__(self, path: PathOrUrl, source_name: str) -> None:
        self._file = open_h5(path, "MATLAB file")
        self._source_name = source_name
        arrays = {k: v for k, v in describe_arrays(self._file).items() if not k.startswith("#")}
        sparse = [k for k, v in self._file.items() if "MATLAB_sparse" in v.attrs]
        self.variables = arrays | dict.fromkeys(sparse, "sparse")

    def close(self) -> None:
        self._file.close()

    def load(self, names: list[str]) -> None:
        """Raise `DataError` if a variable cannot be read: a sparse or an empty one."""
        for name in names:
            if self.variables[name] == "sparse":
                _refuse_sparse(self._source_name, name)
            if self._file[name].attrs.get("MATLAB_empty"):
                raise DataError(f"{self._source_name}, variable {name!r} is empty; nothing to import")

    def rows(self, name: str, rows_last: bool) -> RowReader:
        full_name = f"{self._source_name}, variable {name!r}"
        check_storage(self._file[name], full_name)
        return Hdf5Reader(self._file[name], full_name, is_matlab=True, rows_last=rows_last)

    def labels(self, name: str) -> RowReader:
        array, full_name = self._file[name], f"{self._source_name}, variable {name!r}"
        check_storage(array, full_name)
        matlab_class = array.attrs.get("MATLAB_class", b"")
        if matlab_class == b"char":
            return _TextReader(array, full_name)
        is_row_vector = len(array.shape) == 2 and array.shape[1] == 1
        reader = _CellReader if matlab_class == b"cell" else Hdf5Reader
        return reader(array, full_name, is_matlab=True, rows_last=is_row_vector)


class _TextReader(Hdf5Reader):
    """Labels in a matrix of characters, one label per row."""

    def __init__(self, array: h5py.Dataset, name: str) -> None:
        super().__init__(array, name, is_matlab=True)
        self.dtype, self.shape = np.dtype(str), self.shape[:1]

    def read_band(self) -> np.ndarray:
        return np.array([_text(codes) for codes in super().read_band()], object)


class _CellReader(Hdf5Reader):
    """Labels in a cell array of strings: references to arrays of characters in the same file."""

    def __init__(self, array: h5py.Dataset, name: str, **axes: bool) -> None:
        super().__init__(array, name, **axes)
        self._file = array.file
        self.dtype = np.dtype(str)

    def read_band(self) -> np.ndarray:
        band = super().read_band()
        texts = []
        for row, reference in enumerate(band.reshape(len(band), -1)[:, 0], self._row - len(band)):
            cell = self._file[reference]
            if cell.attrs.get("MATLAB_class") != b"char":
                raise DataError(
                    f"{self.name}: the label of row {row} is not a string; labels must be strings"
                )
            check_storage(cell, f"{self.name}, row {row}")
            texts.append("" if cell.attrs.get("MATLAB_empty") else _text(cell[()].ravel()))
        return np.array(texts, object).reshape(band.shape)


def _text(codes: np.ndarray) -> str:
    """Return a string from its UTF-16 code units, without the blanks that pad the rows of a matrix."""
    return codes.astype("<u2").tobytes().decode("utf-16-le").rstrip()


class _Version5:
    """MATLAB file of version 4 to 7, whose variables are read whole, once, in column order."""

    def __init__(self, path: PathOrUrl, source_name: str) -> None:
        from scipy.io import whosmat

        self._path, self._source_name = path, source_name
        self._found = {name: (shape, kind) for name, shape, kind in self._read(whosmat, path)}
        self.variables = {name: f"{shape} {kind}" for name, (shape, kind) in self._found.items()}
        self._values: dict[str, Any] = {}

    def close(self) -> None:
        self._values.clear()

    def _read(self, read: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return read(*args, **kwargs)
        except Exception as error:  # scipy's readers raise errors of many types for a damaged file
            raise DataError(
                f"{self._source_name} is no MATLAB file, or is truncated or damaged: {error}; download or "
                "copy it again"
            ) from error

    def load(self, names: list[str]) -> None:
        """Read the variables; raise `DataError` if they do not fit into memory."""
        from scipy.io import loadmat

        needed = sum(math.prod(self._found[n][0]) * _ITEM_BYTES.get(self._found[n][1], 8) for n in names)
        free = psutil.virtual_memory().available
        if needed > free:
            raise DataError(
                f"{self._source_name}: variables {', '.join(names)} take {needed / 1e6:,.0f} MB and must be "
                f"read whole, because files before version 7.3 are stored column by column; only "
                f"{free / 1e6:,.0f} MB of memory are free. Save them with save(..., '-v7.3') in MATLAB: such "
                "files are streamed"
            )
        for name in names:
            if self._found[name][1] == "sparse":
                _refuse_sparse(self._source_name, name)
        self._values = self._read(loadmat, self._path, variable_names=names)

    def rows(self, name: str, rows_last: bool) -> RowReader:
        values = np.asarray(self._values[name])
        return ArrayReader(np.moveaxis(values, -1, 0) if rows_last else values, self._describe(name))

    def labels(self, name: str) -> RowReader:
        values = np.asarray(self._values[name])
        if values.ndim == 2 and 1 in values.shape:
            values = values.ravel()
        if values.dtype == object:
            values = np.array([self._read_label(name, row, cell) for row, cell in enumerate(values)])
        if values.dtype.kind == "U":
            values = np.char.rstrip(values)
        return ArrayReader(values, self._describe(name))

    def _read_label(self, name: str, row: int, cell: Any) -> str:
        text = np.asarray(cell)
        if text.dtype.kind != "U" or text.size > 1:
            raise DataError(
                f"{self._describe(name)}: the label of row {row} is not a string; labels must be strings"
            )
        return str(text.reshape(-1)[0]) if text.size else ""

    def _describe(self, name: str) -> str:
        return f"{self._source_name}, variable {name!r}"


class _IntegerReader(RowReader):
    """Labels that are floats without fraction, as integers."""

    def __init__(self, labels: RowReader, dtype: np.dtype) -> None:
        self.name, self.shape, self.dtype = labels.name, labels.shape, dtype
        self._labels = labels

    def read(self, rows: int) -> np.ndarray:
        return np.asarray(self._labels.read(rows)).astype(self.dtype)


def _open_mat(path: PathOrUrl, source_name: str) -> _Version73 | _Version5:
    with open_file(path, "MATLAB file") as file:
        head = file.read(520)
    if head[512:] == _HDF5_MAGIC:
        return _Version73(path, source_name)
    if head.startswith(_HDF5_MAGIC):
        raise DataError(
            f"{source_name} is an HDF5 file that MATLAB did not write, so its axes are not MATLAB's; use "
            "`scalelatent data import hdf5`"
        )
    if not head:
        raise DataError(f"{source_name} is empty; download or copy it again")
    return _Version5(path, source_name)


def _whole_numbers(source: _Version73 | _Version5, name: str) -> RowReader:
    """Return a reader of the labels; as int32 or int64 if all of them are whole numbers."""
    labels = source.labels(name)
    if labels.dtype.kind != "f" or labels.shape[1:] not in ((), (1,)):
        return labels
    low = high = 0.0
    for a in range(0, labels.n_rows, LABEL_ROWS):
        part = labels.read(min(LABEL_ROWS, labels.n_rows - a))
        if not np.array_equal(part, np.trunc(part)) or not np.isfinite(part).all():
            return source.labels(name)
        low, high = min(low, float(part.min())), max(high, float(part.max()))
    dtype = np.int32 if low >= -(2**31) and high < 2**31 else np.int64
    return _IntegerReader(source.labels(name), np.dtype(dtype))


def _check_row_axis(source: _Version73 | _Version5, name: str, n_labels: int, rows_last: bool) -> None:
    """Raise `DataError` with the right option if the rows are along the other axis, as the labels show."""
    wrong, right = source.rows(name, rows_last), source.rows(name, not rows_last)
    if wrong.n_rows != n_labels == right.n_rows:
        here, there = ("last", "first") if rows_last else ("first", "last")
        step = "leave --rows-last out (rows_last=False)" if rows_last else "add --rows-last (rows_last=True)"
        raise DataError(
            f"{wrong.name} has {wrong.n_rows} rows along its {here} axis, but there are {n_labels} labels, "
            f"as many as rows along the {there}; {step}"
        )


def _refuse_sparse(source_name: str, name: str) -> None:
    raise DataError(
        f"{source_name}, variable {name!r} is a sparse matrix; save it with scipy.sparse.save_npz and use "
        f"`scalelatent data import csr`, or make it dense in MATLAB: {name} = full({name})"
    )
