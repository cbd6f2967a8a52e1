"""Import CSR rows from npz archives: those of `scipy.sparse.save_npz`, or arrays whose names share a prefix.

The arrays `data`, `indices` and `indptr` are read together, one row group (the rows of a shard) at a time.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data.csr import canonical_csr, check_dtype
from scalelatent.data.dataset import Dataset
from scalelatent.data.read.array_names import choose_array
from scalelatent.errors import DataError

from .files import PathOrUrl
from .npy import array_names, open_member, open_npz, read_small
from .stream import BinaryReader, RowReader, import_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from scipy.sparse import csr_array

    from .stream import ImportOptions


class NpzCsrReader(RowReader):
    """Reader of the CSR rows of an npz archive; it sorts a row's columns and sums entries of the same column.

    If the archive has no array of values, `is_pattern=True` makes all stored entries 1 instead of an error.
    """

    nnz: int
    sparse = True
    _next_row = _rows_sorted = _entries_added = 0

    def __init__(
        self,
        archive: zipfile.ZipFile,
        path: PathOrUrl,
        prefix: str,
        values: str | None = None,
        *,
        is_pattern: bool = False,
    ) -> None:
        self.name = f"npz file {os.fspath(path)}" + (f", CSR arrays {prefix!r}" if prefix else "")
        self._archive, self._path, self._prefix = archive, path, f"{prefix}_" if prefix else ""
        _check_format(archive, path, self._prefix)
        self._vectors: list[BinaryReader] = []
        self.values = self._find_values(values, is_pattern)
        self._pointers = self._open_vector("indptr")
        self._columns = self._open_vector("indices")
        self._data = None if self.values is None else self._open_vector(self.values)
        for vector in (self._pointers, self._columns):
            if vector.dtype.kind not in "iu":
                raise DataError(f"{vector.name} has dtype {vector.dtype}; integers are needed: save it again")
        self.dtype = np.dtype(np.uint8)
        if self._data is not None:
            self.dtype = check_dtype(self._data.dtype, self._data.name)
            if self._data.n_rows != self._columns.n_rows:
                raise DataError(
                    f"{self._data.name} has {self._data.n_rows} values, but {self._columns.name} has "
                    f"{self._columns.n_rows} columns; one value an entry is needed: name others with --values"
                )
        self.nnz = self._columns.n_rows
        self.shape = self._find_shape(self._pointers.n_rows - 1)

    def read(self, rows: int) -> csr_array:
        pointers = self._read_pointers(rows, self._next_row)
        count = int(pointers[-1] - pointers[0])
        columns = self._columns.read(count)
        if columns.dtype.kind == "u":
            columns = columns.astype(np.int64)
        data = np.ones(count, np.uint8) if self._data is None else self._data.read(count)
        rows_read, n_sorted, n_added = canonical_csr(
            data, columns, pointers - pointers[0], self.shape[1], self._next_row, self.name
        )
        self._next_row += rows
        self._rows_sorted += n_sorted
        self._entries_added += n_added
        return rows_read

    @property
    def notes(self) -> dict[str, int]:
        counts = {"rows_sorted": self._rows_sorted, "entries_added": self._entries_added}
        return {name: count for name, count in counts.items() if count}

    def finish(self) -> None:
        if self._last_pointer != self.nnz:
            raise DataError(
                f"{self._pointers.name} ends at {self._last_pointer}, but there are {self.nnz} entries; the "
                "arrays do not belong together"
            )
        for vector in (self._pointers, self._columns, self._data):
            if vector is not None:
                vector.finish()

    def close(self) -> None:
        for vector in self._vectors:
            vector.close()

    def _read_pointers(self, rows: int, first: int) -> np.ndarray:
        """Return the first entry of each of the next rows, and the end of the last row, int64 (rows + 1,)."""
        if first == 0:
            self._last_pointer = int(self._pointers.read(1)[0])
            if self._last_pointer != 0:
                raise DataError(
                    f"{self._pointers.name} begins with {self._last_pointer}; row pointers begin with 0"
                )
        pointers = np.empty(rows + 1, np.int64)
        pointers[0] = self._last_pointer
        pointers[1:] = self._pointers.read(rows)
        falls = np.flatnonzero(np.diff(pointers) < 0)
        if falls.size:
            i = int(falls[0])
            raise DataError(
                f"{self._pointers.name} falls from {pointers[i]} to {pointers[i + 1]} at row {first + i}; "
                "row pointers must not fall. The array is damaged, or it is not an indptr"
            )
        if pointers[-1] > self.nnz:
            i = int(np.argmax(pointers > self.nnz)) - 1
            raise DataError(
                f"{self._pointers.name}: row {first + i} ends at entry {pointers[i + 1]}, but there are "
                f"{self.nnz}; the arrays do not belong together"
            )
        self._last_pointer = int(pointers[-1])
        return pointers

    def _find_values(self, values: str | None, is_pattern: bool) -> str | None:
        """Return the name, without the prefix, of the array of values; None if all stored entries are 1."""
        names = array_names(self._archive)
        name = "data" if values is None else values
        if self._prefix + name in names:
            return name
        if is_pattern and values is None:
            return None
        others = [n.removeprefix(self._prefix) for n in names if self._prefix and n.startswith(self._prefix)]
        others = [n for n in others if n not in ("indices", "indptr", "shape", "format")]
        hint = f"; with --values name one of {', '.join(others)}" if others else ""
        raise DataError(
            f"npz file {os.fspath(self._path)} has no array {self._prefix + name!r} of values{hint}"
        )

    def _find_shape(self, n_rows: int) -> tuple[int, int]:
        """Return (rows, columns) from the array `shape`, after a comparison with the row pointers."""
        key = f"{self._prefix}shape"
        if key not in array_names(self._archive):
            raise DataError(
                f"npz file {os.fspath(self._path)} has no array {key!r}, which holds the numbers of rows and "
                "columns; save it too"
            )
        shape = read_small(self._archive, self._path, key)
        if shape.shape != (2,) or shape.dtype.kind not in "iu" or (shape < 0).any():
            raise DataError(
                f"npz file {os.fspath(self._path)}, array {key!r} is {shape}; two numbers are needed"
            )
        rows, width = (int(v) for v in shape)
        if rows != n_rows:
            raise DataError(
                f"{self.name}: the shape says {rows} rows, but {self._pointers.name} has {n_rows}; the "
                "arrays do not belong together"
            )
        if rows < 1 or width < 1:
            raise DataError(f"{self.name} has shape ({rows}, {width}), which is empty: nothing to import")
        return rows, width

    def _open_vector(self, name: str) -> BinaryReader:
        vector = open_member(self._archive, self._path, self._prefix + name, allow_empty=True)
        self._vectors.append(vector)
        if len(vector.shape) != 1:
            raise DataError(
                f"{vector.name} has shape {vector.shape}; CSR rows are made of arrays of one axis"
            )
        return vector


def _find_prefixes(archive: zipfile.ZipFile) -> list[str]:
    """Return the prefix of each group of CSR arrays; "" for the arrays of `scipy.sparse.save_npz`."""
    names = set(array_names(archive))
    heads = [n.removesuffix("indptr") for n in names if n == "indptr" or n.endswith("_indptr")]
    return sorted(head.rstrip("_") for head in heads if f"{head}indices" in names)


def _check_format(archive: zipfile.ZipFile, path: PathOrUrl, prefix: str) -> None:
    """Raise `DataError` for sparse formats of scipy that cannot be read in rows."""
    if f"{prefix}format" not in array_names(archive):
        return
    kind = read_small(archive, path, f"{prefix}format").item()
    kind = kind.decode("ascii", "replace") if isinstance(kind, bytes) else str(kind)
    if kind != "csr":
        raise DataError(
            f"npz file {os.fspath(path)} holds a sparse matrix in format {kind!r}, which cannot be read in "
            f"rows; save it again with scipy.sparse.save_npz(path, matrix.tocsr())"
        )


def import_csr(
    file: PathOrUrl,
    url: PathOrUrl,
    *,
    csr_prefix: str | None = None,
    values: str | None = None,
    y: str | None = None,
    **options: Unpack[ImportOptions],
) -> Dataset:
    """Import CSR rows from an npz archive, compressed or not; memory is bounded by one row group.

    Unsorted columns of a row are sorted, and entries of the same row and column are added, as in scipy. The
    provenance has the number of sorted rows and of added entries.

    Parameters
    ----------
    file : path
        An archive that `scipy.sparse.save_npz` wrote, or any npz archive with the four arrays of CSR rows.
    url : str
        Dataset to write.
    csr_prefix : str, optional
        The rows are the arrays `P_data`, `P_indices`, `P_indptr` and `P_shape`. By default the arrays without
        a prefix, or with the prefix `x` (any case), or with the only prefix.
    values : str, optional
        Use the values `P_<values>` instead of `P_data`, if the archive has several values for each entry.
    y : str, optional
        Labels (n,), targets (n, v) or multi-labels: the name of an array of the archive, or the prefix of CSR
        arrays in the archive (ones if it has no values). By default `y` or `Y`, if it exists.
    **options
        See `import_npy`; `shard_rows` is the number of rows of a row group.

    Returns
    -------
    Dataset
        CSR rows in the dtype of the values.

    Raises
    ------
    DataError
        A file that is missing, truncated or no npz archive; arrays that are missing or do not belong
        together; row pointers that fall; columns out of range; NaN or infinity (with row and column); an
        output that exists. No dataset stays behind.

    Examples
    --------
    >>> import tempfile, scipy.sparse as sp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sp.save_npz(f"{folder}/a.npz", sp.eye_array(3, 5, format="csr"))
    ...     import_csr(f"{folder}/a.npz", "memory://doc-csr", overwrite=True)
    <Dataset 3 CSR rows x (5,) float64, 'memory://doc-csr'>
    """
    with contextlib.ExitStack() as opened:
        archive = opened.enter_context(open_npz(file))
        prefix = _choose_prefix(archive, file, csr_prefix)
        x = NpzCsrReader(archive, file, prefix, values)
        opened.callback(x.close)
        y_name, open_y = _find_y(archive, file, y, opened)
        return import_rows(
            lambda: x,
            open_y,
            url,
            importer="csr",
            sources=[file],
            provenance={"options": {"csr_prefix": prefix, "values": x.values, "y": y_name}},
            **options,
        )


def _choose_prefix(archive: zipfile.ZipFile, path: PathOrUrl, prefix: str | None) -> str:
    found = _find_prefixes(archive)
    if prefix is not None:
        if prefix.rstrip("_") in found:
            return prefix.rstrip("_")
    elif "" in found:
        return ""
    else:
        rows = [p for p in found if p.lower() == "x"] or found
        if len(rows) == 1:
            return rows[0]
    _check_format(archive, path, "")
    arrays = "indptr and indices" if prefix is None else f"{prefix}_indptr and {prefix}_indices"
    known = f"; CSR arrays are there under {', '.join(map(repr, found))}" if found else ""
    is_ambiguous = prefix is None and len(found) > 1
    problem = "has several sets of CSR arrays" if is_ambiguous else f"has no arrays {arrays}"
    names = ", ".join(array_names(archive)) or "nothing"
    raise DataError(
        f"npz file {os.fspath(path)} {problem}{known}. It holds {names}: "
        "name the prefix with --csr-prefix P (csr_prefix='P'), or import dense rows with `scalelatent data "
        "import npz`"
    )


def _find_y(
    archive: zipfile.ZipFile, path: PathOrUrl, y: str | None, opened: contextlib.ExitStack
) -> tuple[str | None, Callable[[], RowReader] | None]:
    """Return the array name of the labels, for the provenance, and a function that opens them; or Nones."""
    prefixes = [p for p in _find_prefixes(archive) if p and (p == y or (y is None and p.lower() == "y"))]
    if prefixes:
        labels = NpzCsrReader(archive, path, prefixes[0], is_pattern=True)
        opened.callback(labels.close)
        return prefixes[0], lambda: labels
    name = choose_array(array_names(archive), "y", y, f"npz file {os.fspath(path)}")
    return name, None if name is None else lambda: open_member(archive, path, name)
