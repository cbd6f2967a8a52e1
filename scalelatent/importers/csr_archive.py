"""CSR rows in npz archives: scipy's `save_npz`, or arrays under a prefix, read as a stream.

Three arrays of one archive are read side by side, a row group at a time; none is ever whole in memory.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data.csr import canonical, check_dtype
from scalelatent.data.dataset import Dataset
from scalelatent.data.layout import GROUP_BYTES, choose_csr_layout
from scalelatent.errors import DataError

from .files import find_key
from .npy import open_array, open_member, open_npy, open_npz, read_header, read_small
from .stream import Progress, RowReader, RowStream, string_classes, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from scipy.sparse import csr_array

_SCAN = 1 << 20
_PARTS = ("indices", "indptr")


def choose_group_rows(
    read_pointers: Callable[[int, int], np.ndarray],
    n_rows: int,
    nnz: int,
    dtype: np.dtype,
    wanted: int | None,
) -> tuple[int, int]:
    """Return how many rows a row group holds, so that every group is small, and the last row pointer.

    All row pointers are read once, in order: `read_pointers(a, b)` returns those of the rows `a:b`.
    """
    rows = choose_csr_layout(n_rows, nnz, dtype, shard_rows=wanted).shard_rows
    sizes = [rows >> k for k in range(rows.bit_length())] if wanted is None else [rows]
    most = dict.fromkeys(sizes, 0)
    last = 0
    for first in range(0, n_rows, rows):
        part = read_pointers(first, min(first + rows, n_rows))
        for size in sizes:
            edges = np.append(part[:-1:size], part[-1])
            most[size] = max(most[size], int(np.diff(edges).max()))
        last = int(part[-1])
    entry = dtype.itemsize + 4
    fits = [size for size in sizes if most[size] * entry <= 4 * GROUP_BYTES]
    return max(fits, default=1 if wanted is None else rows), last


class CsrStream(RowReader):
    """CSR rows of an archive, read in order."""

    sparse = True
    nnz: int

    def __init__(
        self,
        archive: zipfile.ZipFile,
        path: str | os.PathLike[str],
        prefix: str,
        values: str | None = None,
        *,
        pattern: bool = False,
    ) -> None:
        self.name = f"npz file {os.fspath(path)}" + (f", CSR arrays {prefix!r}" if prefix else "")
        self._archive, self._path, self._head = archive, path, f"{prefix}_" if prefix else ""
        check_format(archive, path, self._head)
        self._open_streams: list[Any] = []
        self.values = self._find_values(values, pattern)
        self._pointers = self._vector("indptr")
        self._columns = self._vector("indices")
        self._data = None if self.values is None else self._vector(self.values)
        for part in (self._pointers, self._columns):
            if part.dtype.kind not in "iu":
                raise DataError(f"{part.name} has dtype {part.dtype}; integers are needed: save it again")
        self.dtype = np.dtype(np.uint8)
        if self._data is not None:
            self.dtype = check_dtype(self._data.dtype, self._data.name)
            if self._data.length != self._columns.length:
                raise DataError(
                    f"{self._data.name} has {self._data.length} values, but {self._columns.name} has "
                    f"{self._columns.length} columns; one value an entry is needed: name others with --values"
                )
        self.nnz = self._columns.length
        self.shape = self._find_shape(self._pointers.length - 1)
        self.group_rows = 0
        self._unsorted = self._added = self._row = 0

    @property
    def notes(self) -> dict[str, int]:
        """What had to be put right."""
        found = {"rows_sorted": self._unsorted, "entries_added": self._added}
        return {name: count for name, count in found.items() if count}

    def plan(self, group_rows: int | None) -> None:
        """Look through the row pointers: check them, and choose row groups that are small everywhere."""
        self.group_rows, last = choose_group_rows(
            lambda a, b: self._read_pointers(b - a, a), self.n_rows, self.nnz, self.dtype, group_rows
        )
        if last != self.nnz:
            raise DataError(
                f"{self._pointers.name} ends at {last}, but there are {self.nnz} entries; the arrays do not "
                "belong together"
            )
        self._pointers.finish()
        self._pointers = self._vector("indptr")
        self._last = 0

    def read(self, rows: int) -> csr_array:
        pointers = self._read_pointers(rows, self._row)
        count = int(pointers[-1] - pointers[0])
        columns = self._columns.read(count)
        if columns.dtype.kind == "u":
            columns = columns.astype(np.int64)
        data = np.ones(count, np.uint8) if self._data is None else self._data.read(count)
        found, unsorted, added = canonical(
            data, columns, pointers - pointers[0], self.shape[1], self._row, self.name
        )
        self._unsorted, self._added, self._row = (
            self._unsorted + unsorted,
            self._added + added,
            self._row + rows,
        )
        return found

    def finish(self) -> None:
        for stream in (self._columns, self._data):
            if stream is not None:
                stream.finish()

    def close(self) -> None:
        for stream in self._open_streams:
            stream.close()

    def _read_pointers(self, rows: int, first: int) -> np.ndarray:
        """The pointers of the next rows, the one before them included: int64 (rows + 1,)."""
        if first == 0:
            self._last = int(self._pointers.read(1)[0])
            if self._last != 0:
                raise DataError(f"{self._pointers.name} begins with {self._last}; row pointers begin with 0")
        part = np.empty(rows + 1, np.int64)
        part[0] = self._last
        part[1:] = self._pointers.read(rows)
        falls = np.flatnonzero(np.diff(part) < 0)
        if falls.size:
            i = int(falls[0])
            raise DataError(
                f"{self._pointers.name} falls from {part[i]} to {part[i + 1]} at row {first + i}; row "
                "pointers have to rise. The array is damaged, or it is not an indptr"
            )
        if part[-1] > self.nnz:
            i = int(np.argmax(part > self.nnz)) - 1
            raise DataError(
                f"{self._pointers.name}: row {first + i} ends at entry {part[i + 1]}, but there are "
                f"{self.nnz}; the arrays do not belong together"
            )
        self._last = int(part[-1])
        return part

    def _find_values(self, values: str | None, pattern: bool) -> str | None:
        keys = keys_of(self._archive)
        name = "data" if values is None else values
        if self._head + name in keys:
            return name
        if pattern and values is None:
            return None
        others = [k.removeprefix(self._head) for k in keys if k.startswith(self._head) and self._head]
        others = [k for k in others if k not in (*_PARTS, "shape", "format")]
        hint = f"; with --values name one of {', '.join(others)}" if others else ""
        raise DataError(
            f"npz file {os.fspath(self._path)} has no array {self._head + name!r} of values{hint}"
        )

    def _find_shape(self, n_rows: int) -> tuple[int, int]:
        if n_rows < 1:
            raise DataError(f"{self.name} holds no rows ({self._pointers.name} is too short)")
        key = f"{self._head}shape"
        if key not in keys_of(self._archive):
            highest = -1
            scan = self._vector("indices")
            for first in range(0, self.nnz, _SCAN):
                highest = max(highest, int(scan.read(min(_SCAN, self.nnz - first)).max()))
            return n_rows, max(highest + 1, 1)
        shape = read_small(self._archive, self._path, key)
        if shape.shape != (2,) or shape.dtype.kind not in "iu" or (shape < 0).any():
            raise DataError(
                f"npz file {os.fspath(self._path)}, array {key!r} is {shape}; two numbers are needed"
            )
        rows, columns = (int(v) for v in shape)
        if rows != n_rows:
            raise DataError(
                f"{self.name}: the shape says {rows} rows, but {self._pointers.name} has {n_rows}; the "
                "arrays do not belong together"
            )
        if columns < 1:
            raise DataError(f"{self.name}: the shape says {columns} columns; at least one is needed")
        return rows, columns

    def _vector(self, part: str) -> _Vector:
        vector = _Vector(self._archive, self._path, self._head + part)
        self._open_streams.append(vector)
        return vector


class _Vector:
    """Numbers of a one-dimensional array of an archive, in order; it may be empty."""

    def __init__(self, archive: zipfile.ZipFile, path: str | os.PathLike[str], key: str) -> None:
        self.name = f"npz file {os.fspath(path)}, array {key!r}"
        with open_array(archive, path, key) as file:
            shape, _, dtype = read_header(file, self.name, scalar=True)
        if len(shape) != 1:
            raise DataError(f"{self.name} has shape {shape}; CSR rows are made of arrays of one axis")
        self.dtype, self.length = dtype, shape[0]
        self._stream: RowStream | None = open_member(archive, path, key) if self.length else None

    def read(self, count: int) -> np.ndarray:
        if self._stream is None or count == 0:
            return np.zeros(0, self.dtype.newbyteorder("="))
        return self._stream.read(count)

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.finish()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


def keys_of(archive: zipfile.ZipFile) -> list[str]:
    """Names of the arrays of an npz archive."""
    return [n.removesuffix(".npy") for n in archive.namelist()]


def prefixes_of(archive: zipfile.ZipFile) -> list[str]:
    """Prefixes under which there are CSR arrays; empty for scipy's own."""
    keys = set(keys_of(archive))
    heads = [k.removesuffix("indptr") for k in keys if k == "indptr" or k.endswith("_indptr")]
    return sorted(h.rstrip("_") for h in heads if f"{h}indices" in keys)


def check_format(archive: zipfile.ZipFile, path: str | os.PathLike[str], head: str) -> None:
    """Refuse scipy's other formats, which cannot be read in rows."""
    if f"{head}format" not in keys_of(archive):
        return
    kind = read_small(archive, path, f"{head}format").item()
    kind = kind.decode("ascii", "replace") if isinstance(kind, bytes) else str(kind)
    if kind != "csr":
        raise DataError(
            f"npz file {os.fspath(path)} holds a sparse matrix in format {kind!r}, which cannot be read in "
            f"rows; save it again with scipy.sparse.save_npz(path, matrix.tocsr())"
        )


def import_csr(
    file: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    csr_prefix: str | None = None,
    values: str | None = None,
    y: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    shuffle: int | None = None,
    **layout: Any,
) -> Dataset:
    """Import CSR rows from an npz archive, compressed or not; memory is bounded by one row group.

    Columns in any order are sorted and entries of the same place are added, as scipy means them; the
    provenance says of how many.

    Parameters
    ----------
    file : path
        What `scipy.sparse.save_npz` writes, or any npz with the arrays of CSR rows.
    url : str
        Where the dataset goes.
    csr_prefix : str, optional
        The rows are the arrays `P_data`, `P_indices`, `P_indptr` and, where it is there, `P_shape`. By
        default those without a prefix, or with the prefix `x` (any case), or with the only one there is.
    values : str, optional
        Values `P_<values>` instead of `P_data`: one pattern with several kinds of values.
    y : str, optional
        Labels (n,), targets (n, v) or multi-labels: the name of an array of the archive, the prefix of CSR
        arrays in it (without values: ones), or an npy or npz file. By default `y` in any case, where it is
        there.
    overwrite, progress, shuffle, **layout
        See `import_npy`; `shard_rows` are the rows of a row group.

    Returns
    -------
    Dataset
        CSR rows in the type of the values.

    Raises
    ------
    DataError
        A file that is missing, cut short or no npz; arrays that are missing or do not fit together; row
        pointers that fall; columns out of range; NaN or infinity (with row and column); an output that
        exists. No dataset is left behind.

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
        prefix = _find_prefix(archive, file, csr_prefix)
        x = CsrStream(archive, file, prefix, values)
        opened.callback(x.close)
        x.plan(layout.pop("shard_rows", None))
        labels, shown, classes = _open_y(archive, file, y, opened)
        if isinstance(labels, CsrStream):
            labels.plan(x.group_rows)
        return write_rows(
            url,
            x,
            labels,
            classes=classes,
            importer="csr",
            sources=[file],
            options={"options": {"csr_prefix": prefix, "values": x.values, "y": shown}},
            overwrite=overwrite,
            progress=progress,
            shuffle=shuffle,
            shard_rows=x.group_rows,
            **layout,
        )


def _find_prefix(archive: zipfile.ZipFile, path: str | os.PathLike[str], wanted: str | None) -> str:
    found = prefixes_of(archive)
    if wanted is not None:
        if wanted.rstrip("_") in found:
            return wanted.rstrip("_")
    elif "" in found:
        return ""
    else:
        rows = [p for p in found if p.lower() == "x"] or found
        if len(rows) == 1:
            return rows[0]
    keys = keys_of(archive)
    check_format(archive, path, "")
    head = "indptr and indices" if wanted is None else f"{wanted}_indptr and {wanted}_indices"
    known = f"; CSR arrays are there under {', '.join(map(repr, found))}" if found else ""
    several = wanted is None and len(found) > 1
    problem = "has several sets of CSR arrays" if several else f"has no arrays {head}"
    raise DataError(
        f"npz file {os.fspath(path)} {problem}{known}. It holds {', '.join(keys) or 'nothing'}: name the "
        "prefix with --csr-prefix P "
        "(csr_prefix='P'), or import dense rows with `scalelatent data import npz`"
    )


def _open_y(
    archive: zipfile.ZipFile, path: str | os.PathLike[str], y: str | None, opened: contextlib.ExitStack
) -> tuple[RowReader | None, str | None, np.ndarray | None]:
    """(stream of y or None, what provenance calls it, classes of string labels)."""
    if y is not None and y not in keys_of(archive) and os.path.exists(y):
        return _open_y_file(y, opened)
    heads = [p for p in prefixes_of(archive) if p and (p == y or (y is None and p.lower() == "y"))]
    if heads:
        return _csr(archive, path, heads[0], opened), heads[0], None
    key = find_key(keys_of(archive), "y", y, f"npz file {os.fspath(path)}")
    if key is None:
        return None, None, None
    return _with_classes(lambda: open_member(archive, path, key), key, opened)


def _open_y_file(path: str, opened: contextlib.ExitStack) -> tuple[RowReader, str, np.ndarray | None]:
    shown = os.path.basename(path)
    if not zipfile.is_zipfile(path):
        return _with_classes(lambda: open_npy(path, "labels"), shown, opened)
    archive = opened.enter_context(open_npz(path))
    if prefixes_of(archive):
        return _csr(archive, path, _find_prefix(archive, path, None), opened), shown, None
    keys = keys_of(archive)
    found = keys if len(keys) == 1 else [key for key in keys if key.lower() == "y"]
    if len(found) != 1:
        raise DataError(
            f"npz file {path} of labels holds {', '.join(keys) or 'nothing'}: it has to hold one array, or "
            "one called y, or CSR arrays of multi-labels; save the labels alone, for example as an npy file"
        )
    return _with_classes(lambda: open_member(archive, path, found[0]), shown, opened)


def _csr(
    archive: zipfile.ZipFile, path: str | os.PathLike[str], prefix: str, opened: contextlib.ExitStack
) -> CsrStream:
    stream = CsrStream(archive, path, prefix, pattern=True)
    opened.callback(stream.close)
    return stream


def _with_classes(
    open_y: Callable[[], RowReader], shown: str, opened: contextlib.ExitStack
) -> tuple[RowReader, str, np.ndarray | None]:
    def stream() -> RowReader:
        found = open_y()
        opened.callback(found.close)
        return found

    y = stream()
    if len(y.shape) > 2:
        raise DataError(f"{y.name} has shape {y.shape}; y is labels (n,) or targets (n, v)")
    if y.dtype.kind not in "US":
        return y, shown, None
    classes = string_classes(y)
    return stream(), shown, classes
