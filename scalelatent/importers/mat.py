"""Import MATLAB files: version 7.3 (HDF5) shard by shard; versions 4 to 7 in memory, 2 GB per variable."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data.dataset import Dataset
from scalelatent.data.read.array_names import choose_arrays
from scalelatent.errors import DataError

from .files import PathOrUrl, open_file
from .hdf5 import Hdf5Reader, describe_arrays, open_h5
from .stream import ArrayReader, RowReader, import_rows

if TYPE_CHECKING:
    from typing import Unpack

    from .stream import ImportOptions

_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"


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

    Rows of version 7.3 are streamed: memory is bounded by a few shards. Older files store a variable column
    by column in one compressed piece, which must be read whole: at most 2 GB by the format. Labels are read
    whole.

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
        Rows (n, ...) in the dtype of the file; labels (n,) from a vector, or targets (n, v). Labels that are
        whole numbers become integers, also if MATLAB stored them as floats.

    Raises
    ------
    DataError
        A file that is missing, truncated, damaged or no MATLAB file; a variable that is missing (the message
        lists the variables of the file) or has a wrong type or shape; NaN or infinity; another number of
        labels than rows; an output that exists. No dataset stays behind.

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
        rows = source.rows(x_name, rows_last)
        labels = None
        if y_name is not None:
            found = source.rows(y_name, False)
            labels = ArrayReader(_as_labels(np.asarray(found.read(found.n_rows))), found.name)
            _check_row_axis(rows, labels.n_rows, rows_last)
        return import_rows(
            lambda: rows,
            None if labels is None else lambda: labels,
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

    def rows(self, name: str, rows_last: bool) -> RowReader:
        full_name = f"{self._source_name}, variable {name!r}"
        array = self._file[name]
        if self.variables[name] == "sparse":
            raise _sparse_error(full_name, name)
        if array.attrs.get("MATLAB_empty"):
            raise DataError(f"{full_name} is empty; nothing to import")
        if array.attrs.get("MATLAB_class") in (b"char", b"cell"):
            raise _text_error(full_name)
        return Hdf5Reader(array, full_name, is_matlab=True, rows_last=rows_last)


class _Version5:
    """MATLAB file of version 4 to 7, whose variables are read whole."""

    def __init__(self, path: PathOrUrl, source_name: str) -> None:
        from scipy.io import whosmat

        self._path, self._source_name = path, source_name
        self.variables = {name: f"{shape} {kind}" for name, shape, kind in self._read(whosmat)}

    def close(self) -> None:
        """Do nothing, because scipy opens and closes the file in each read."""

    def _read(self, read: Any, **options: Any) -> Any:
        try:
            return read(self._path, **options)
        except Exception as error:  # scipy's readers raise errors of many types for a damaged file
            raise DataError(
                f"{self._source_name} is no MATLAB file, or is truncated or damaged: {error}; download or "
                "copy it again"
            ) from error

    def rows(self, name: str, rows_last: bool) -> RowReader:
        from scipy.io import loadmat

        values = self._read(loadmat, variable_names=[name])[name]
        full_name = f"{self._source_name}, variable {name!r}"
        if not isinstance(values, np.ndarray):
            raise _sparse_error(full_name, name)
        if values.dtype.kind in "OU":
            raise _text_error(full_name)
        return ArrayReader(np.moveaxis(values, -1, 0) if rows_last else values, full_name)


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


def _as_labels(values: np.ndarray) -> np.ndarray:
    """Return labels as (n,), integers if all are whole numbers; targets stay (n, v)."""
    if values.ndim == 2 and 1 in values.shape:
        values = values.ravel()
    if values.dtype.kind != "f" or values.ndim > 1 or not np.isfinite(values).all():
        return values
    if not np.array_equal(values, np.trunc(values)):
        return values
    is_small = values.min() >= -(2**31) and values.max() < 2**31
    return values.astype(np.int32 if is_small else np.int64)


def _check_row_axis(rows: RowReader, n_labels: int, rows_last: bool) -> None:
    """Raise `DataError` with the right option if the number of labels fits the other axis of the array."""
    if rows.n_rows != n_labels and len(rows.shape) > 1 and rows.shape[1 if rows_last else -1] == n_labels:
        here, there = ("last", "first") if rows_last else ("first", "last")
        step = "leave --rows-last out (rows_last=False)" if rows_last else "add --rows-last (rows_last=True)"
        raise DataError(
            f"{rows.name} has {rows.n_rows} rows along its {here} axis, but there are {n_labels} labels, "
            f"as many as rows along the {there}; {step}"
        )


def _sparse_error(full_name: str, name: str) -> DataError:
    return DataError(
        f"{full_name} is a sparse matrix; save it with scipy.sparse.save_npz and use `scalelatent data "
        f"import csr`, or make it dense in MATLAB: {name} = full({name})"
    )


def _text_error(full_name: str) -> DataError:
    return DataError(
        f"{full_name} holds text or cells, and rows and labels are numbers; number the labels in MATLAB: "
        "[names, ~, y] = unique(y)"
    )
