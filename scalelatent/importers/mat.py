"""MATLAB files: version 7.3 (HDF5) is streamed, versions 4 to 7 hold at most 2 GB a variable."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from scalelatent.data.dataset import Dataset
from scalelatent.errors import DataError

from .files import find_keys, open_file
from .hdf5 import H5Rows, check_storage, describe_arrays, open_h5
from .stream import LABEL_ROWS, ArrayStream, Chain, Progress, RowReader, import_rows

if TYPE_CHECKING:
    from typing import Unpack

    import h5py

    from scalelatent.data.schema import LayoutOptions

_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_ITEM_BYTES = {"double": 8, "single": 4, "int64": 8, "uint64": 8, "int32": 4, "uint32": 4}
_ITEM_BYTES |= {"int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "logical": 1, "char": 4}


def import_mat(
    file: str | os.PathLike[str],
    url: str | os.PathLike[str],
    x: str | None = None,
    y: str | None = None,
    *,
    rows_last: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    shuffle: int | None = None,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Import rows and labels from a MATLAB file.

    Files of version 7.3 are streamed: memory is bounded by a few shards. Older ones store a variable column
    by column, in one packed piece, so it has to be read whole: at most 2 GB by the format, and one that is
    larger than the free memory is refused before it is read.

    Parameters
    ----------
    file : path
        The file. Version 7.3 needs h5py: ``pip install 'scalelatent[hdf5]'``.
    url : str
        Where the dataset goes.
    x, y : str, optional
        Names of the variables; by default those called ``x`` and, where it is there, ``y``, in either case.
    rows_last : bool
        Rows lie along the last axis of `x`, as in images h x w x n; by default along the first.
    overwrite, progress, shuffle, **layout
        See `import_npy`.

    Returns
    -------
    Dataset
        Rows (n, ...) in the type of the file; labels (n,) from a vector, a matrix of characters or a cell
        array of strings, or targets (n, v). Labels that are whole numbers become integers, whatever MATLAB
        stored them as.

    Raises
    ------
    DataError
        A file that is missing, cut short, damaged, no MATLAB file or too large for the memory; a variable
        that is not in it (the message lists those that are), of another type or shape; NaN or infinity;
        labels of another number; an output that exists. No dataset is left behind.

    Examples
    --------
    >>> import tempfile
    >>> from scipy.io import savemat
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     savemat(f"{folder}/a.mat", {"X": np.eye(3), "Y": np.array([5.0, 6.0, 5.0])})
    ...     import_mat(f"{folder}/a.mat", "memory://doc-mat", overwrite=True).classes.tolist()
    [5, 6]
    """
    where = f"MATLAB file {os.fspath(file)}"
    with _open(file, where) as source:
        x_name, y_name = find_keys(source.variables, x, y, where)
        source.load([name for name in (x_name, y_name) if name is not None])
        if y_name is not None:
            n_labels = source.labels(y_name).n_rows
            _check_axis(source, x_name, n_labels, rows_last)
        return import_rows(
            lambda: source.rows(x_name, rows_last),
            None if y_name is None else lambda: _whole_numbers(source, y_name),
            url,
            importer="mat",
            sources=[file],
            options={"x": x_name, "y": y_name} | ({"rows_last": True} if rows_last else {}),
            overwrite=overwrite,
            progress=progress,
            shuffle=shuffle,
            **layout,
        )


class _Version73:
    """A file of version 7.3: HDF5, its axes in reverse order."""

    def __init__(self, path: str | os.PathLike[str], where: str) -> None:
        self._file = open_h5(path, "MATLAB file")
        self._where = where
        arrays = {k: v for k, v in describe_arrays(self._file).items() if not k.startswith("#")}
        sparse = [k for k, v in self._file.items() if "MATLAB_sparse" in v.attrs]
        self.variables = arrays | dict.fromkeys(sparse, "sparse")

    def __enter__(self) -> _Version73:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def load(self, names: list[str]) -> None:
        """Check the variables that will be read."""
        for name in names:
            if self.variables[name] == "sparse":
                _refuse_sparse(self._where, name)
            if self._file[name].attrs.get("MATLAB_empty"):
                raise DataError(f"{self._where}, variable {name!r} is empty; nothing to import")

    def rows(self, name: str, rows_last: bool) -> RowReader:
        what = f"{self._where}, variable {name!r}"
        check_storage(self._file[name], what)
        return H5Rows(self._file[name], what, matlab=True, rows_last=rows_last)

    def labels(self, name: str) -> RowReader:
        array, what = self._file[name], f"{self._where}, variable {name!r}"
        check_storage(array, what)
        kind = array.attrs.get("MATLAB_class", b"")
        if kind == b"char":
            return _H5Strings(array, what)
        is_row = len(array.shape) == 2 and array.shape[1] == 1
        return (_H5Strings if kind == b"cell" else H5Rows)(array, what, matlab=True, rows_last=is_row)


class _H5Strings(H5Rows):
    """Labels from a matrix of characters, or from a cell array of strings."""

    def __init__(self, array: h5py.Dataset, name: str, **how: Any) -> None:
        super().__init__(array, name, **(how or {"matlab": True}))
        self._cells = bool(how)
        self._of = array.file
        self.dtype = np.dtype(str)
        if not self._cells:
            self._width, self.shape = self.shape[1], self.shape[:1]

    def _read_band(self) -> np.ndarray:
        band = super()._read_band()
        if not self._cells:
            return np.array([_text(codes) for codes in band], object)
        texts = []
        for row, reference in enumerate(band.reshape(len(band), -1)[:, 0], self._row - len(band)):
            cell = self._of[reference]
            if cell.attrs.get("MATLAB_class") != b"char":
                raise DataError(
                    f"{self.name}: the label of row {row} is not a string; labels have to be strings"
                )
            check_storage(cell, f"{self.name}, row {row}")
            texts.append("" if cell.attrs.get("MATLAB_empty") else _text(cell[()].ravel()))
        return np.array(texts, object).reshape(band.shape)


def _text(codes: np.ndarray) -> str:
    """A string from its UTF-16 code units; MATLAB pads the shorter rows of a matrix with blanks."""
    return codes.astype("<u2").tobytes().decode("utf-16-le").rstrip()


class _Version5:
    """A file of version 4 to 7: variables are read whole, once, in column order."""

    def __init__(self, path: str | os.PathLike[str], where: str) -> None:
        from scipy.io import whosmat

        self._path, self._where = path, where
        self._found = {name: (shape, kind) for name, shape, kind in self._read(whosmat, path)}
        self.variables = {name: f"{shape} {kind}" for name, (shape, kind) in self._found.items()}
        self._values: dict[str, Any] = {}

    def __enter__(self) -> _Version5:
        return self

    def __exit__(self, *_: object) -> None:
        self._values.clear()

    def _read(self, read: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return read(*args, **kwargs)
        except Exception as error:  # scipy's readers raise whatever a damaged file leads to
            raise DataError(
                f"{self._where} is no MATLAB file, or is truncated or damaged: {error}; download or copy it "
                "again"
            ) from error

    def load(self, names: list[str]) -> None:
        """Read the variables, if they fit into memory."""
        from scipy.io import loadmat

        needed = sum(math.prod(self._found[n][0]) * _ITEM_BYTES.get(self._found[n][1], 8) for n in names)
        free = psutil.virtual_memory().available
        if needed > free:
            raise DataError(
                f"{self._where}: variables {', '.join(names)} take {needed / 1e6:,.0f} MB and have to be "
                f"read whole, because files before version 7.3 are stored column by column; only "
                f"{free / 1e6:,.0f} MB of memory are free. Save them with save(..., '-v7.3') in MATLAB: such "
                "files are streamed"
            )
        for name in names:
            if self._found[name][1] == "sparse":
                _refuse_sparse(self._where, name)
        self._values = self._read(loadmat, self._path, variable_names=names)

    def rows(self, name: str, rows_last: bool) -> RowReader:
        values = np.asarray(self._values[name])
        return ArrayStream(np.moveaxis(values, -1, 0) if rows_last else values, self._name(name))

    def labels(self, name: str) -> RowReader:
        values = np.asarray(self._values[name])
        if values.ndim == 2 and 1 in values.shape:
            values = values.ravel()
        if values.dtype == object:
            values = np.array([self._label(name, row, cell) for row, cell in enumerate(values)])
        if values.dtype.kind == "U":
            values = np.char.rstrip(values)
        return ArrayStream(values, self._name(name))

    def _label(self, name: str, row: int, cell: Any) -> str:
        text = np.asarray(cell)
        if text.dtype.kind != "U" or text.size > 1:
            raise DataError(
                f"{self._name(name)}: the label of row {row} is not a string; labels have to be strings"
            )
        return str(text.reshape(-1)[0]) if text.size else ""

    def _name(self, name: str) -> str:
        return f"{self._where}, variable {name!r}"


class _Integers(Chain):
    """Labels that are whole numbers, as integers."""

    def __init__(self, labels: RowReader, dtype: np.dtype) -> None:
        super().__init__([labels])
        self.dtype = dtype

    def read(self, rows: int) -> np.ndarray:
        return np.asarray(super().read(rows).astype(self.dtype))


def _open(path: str | os.PathLike[str], where: str) -> _Version73 | _Version5:
    with open_file(path, "MATLAB file") as file:
        head = file.read(520)
    if head[512:] == _HDF5_MAGIC:
        return _Version73(path, where)
    if head.startswith(_HDF5_MAGIC):
        raise DataError(
            f"{where} is an HDF5 file that MATLAB did not write, so its axes are not MATLAB's; use "
            "`scalelatent data import hdf5`"
        )
    if not head:
        raise DataError(f"{where} is empty; download or copy it again")
    return _Version5(path, where)


def _whole_numbers(source: _Version73 | _Version5, name: str) -> RowReader:
    """The labels of a variable; floats that are all whole numbers as int32 or int64."""
    labels = source.labels(name)
    if labels.dtype.kind != "f" or labels.shape[1:] not in ((), (1,)):
        return labels
    low = high = 0.0
    for a in range(0, labels.n_rows, LABEL_ROWS):
        part = labels.read(min(LABEL_ROWS, labels.n_rows - a))
        if not np.array_equal(part, np.trunc(part)) or not np.isfinite(part).all():
            return source.labels(name)
        low, high = min(low, float(part.min())), max(high, float(part.max()))
    kind = np.int32 if low >= -(2**31) and high < 2**31 else np.int64
    return _Integers(source.labels(name), np.dtype(kind))


def _check_axis(source: _Version73 | _Version5, name: str, n_labels: int, rows_last: bool) -> None:
    """Say which option helps where the labels count the rows of the other axis."""
    wrong, right = source.rows(name, rows_last), source.rows(name, not rows_last)
    if wrong.n_rows != n_labels == right.n_rows:
        here, there = ("last", "first") if rows_last else ("first", "last")
        step = "leave --rows-last out (rows_last=False)" if rows_last else "add --rows-last (rows_last=True)"
        raise DataError(
            f"{wrong.name} has {wrong.n_rows} rows along its {here} axis, but there are {n_labels} labels, "
            f"as many as rows along the {there}; {step}"
        )


def _refuse_sparse(where: str, name: str) -> None:
    raise DataError(
        f"{where}, variable {name!r} is a sparse matrix; save it with scipy.sparse.save_npz and use "
        f"`scalelatent data import csr`, or make it dense in MATLAB: {name} = full({name})"
    )
