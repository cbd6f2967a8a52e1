"""Import AnnData files (HDF5, or a zarr folder): rows, one column of labels, names of the variables."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data.dataset import Dataset
from scalelatent.data.read.containers import missing_label_error
from scalelatent.data.read.frames import listed
from scalelatent.data.read.sources import BackedCsr
from scalelatent.errors import DataError
from scalelatent.storage.disk import is_local, locate

from .csr_archive import choose_group_rows
from .files import PathOrUrl
from .hdf5 import Hdf5Reader, open_h5
from .stream import CsrReader, RowReader, import_rows, read_errors
from .zarr_arrays import ZarrReader

if TYPE_CHECKING:
    from typing import Unpack

    from scipy.sparse import csr_array

    from .stream import ImportOptions

_COPY_AGAIN = "download or copy the file again"
_WRITE_AGAIN = "read it with anndata and write it again: anndata.read_h5ad(FILE).write_h5ad(NEW)"


def import_h5ad(
    file: PathOrUrl,
    url: PathOrUrl,
    *,
    layer: str | None = None,
    label: str | None = None,
    **options: Unpack[ImportOptions],
) -> Dataset:
    """Import the rows of an AnnData file, sparse (CSR) or dense; memory is bounded by a few shards.

    Columns of CSR rows in any order are sorted and entries of the same place are added; the provenance counts
    both. The names of the variables become `feature_names`. The package anndata is not needed.

    Parameters
    ----------
    file : path
        An HDF5 file (``.h5ad``), which needs h5py (``pip install 'scalelatent[hdf5]'``), or a folder that
        ``AnnData.write_zarr`` wrote.
    url : str
        Dataset to write.
    layer : str, optional
        Layer that holds the rows; by default ``X``.
    label : str, optional
        Column of ``obs`` that holds labels: categories, strings or numbers, one for every row.
    **options
        See `import_npy`; `shard_rows` is the number of rows of a row group if rows are sparse.

    Returns
    -------
    Dataset
        Rows (n, variables), dense or CSR as they are in the file; unused categories do not become classes.

    Raises
    ------
    DataError
        A file that is missing, truncated, damaged or no AnnData file; no such layer or column (the message
        lists those that exist); rows stored by columns (CSC); a row without a label; NaN or infinity (with
        row and column); an output that exists. No dataset stays behind.

    Examples
    --------
    >>> import tempfile, anndata, pandas as pd, scipy.sparse as sp
    >>> obs = pd.DataFrame({"cell_type": ["B", "T", "B"]}, index=["c0", "c1", "c2"])
    >>> adata = anndata.AnnData(sp.eye_array(3, 5, format="csr"), obs=obs)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     adata.write_h5ad(f"{folder}/a.h5ad")
    ...     import_h5ad(f"{folder}/a.h5ad", "memory://doc-h5ad", label="cell_type", overwrite=True)
    <Dataset 3 CSR rows x (5,) float64, 2 classes, 'memory://doc-h5ad'>
    """
    source_name = f"AnnData file {os.fspath(file)}"
    with contextlib.ExitStack() as opened:
        root = _open_group(file, source_name, opened)
        key = "X" if layer is None else f"layers/{layer}"
        layers = list(root["layers"]) if "layers" in root else []
        # For rows without X some versions of anndata write no X, and others a value without a shape.
        has_x = "X" in root and (_is_group(root["X"]) or bool(root["X"].shape))
        if not (has_x if layer is None else layer in layers):
            missing = "X" if layer is None else f"layer {layer!r}"
            raise DataError(
                f"{source_name} has no {missing}; its layers are {listed(layers)}: name one with --layer "
                "NAME (layer='NAME')"
            )
        x = _open_rows(root, key, f"{source_name}, {key}")
        if isinstance(x, _AnnDataCsrReader):
            options["shard_rows"] = x.plan(options.get("shard_rows"))
        names = _read_names(root, x, source_name)
        return import_rows(
            lambda: x,
            None if label is None else lambda: _ColumnReader(root, "obs", label, source_name),
            url,
            importer="h5ad",
            sources=[file],
            provenance={"layer": layer, "label": label},
            feature_names=names,
            **options,
        )


def _open_group(file: PathOrUrl, source_name: str, opened: contextlib.ExitStack) -> Any:
    """Open the file or the folder as a group of h5py or of zarr; `opened` closes it."""
    path = os.fspath(file)
    is_folder = os.path.isdir(path) if is_local(file) else path.rstrip("/").endswith(".zarr")
    if is_folder:
        import zarr

        try:
            root: Any = zarr.open_group(locate(file).zarr_store(read_only=True), mode="r")
        except Exception as error:  # zarr raises errors of several types
            raise DataError(
                f"{source_name} is a folder, but zarr cannot open it: {error}; check the path"
            ) from error
    else:
        root = opened.enter_context(open_h5(file, "AnnData file"))
    if not {"obs", "var"} <= set(root.keys()):
        kind = "zarr" if is_folder else "hdf5"
        raise DataError(
            f"{source_name} is not an AnnData file, because it has no obs and var; it holds "
            f"{listed(root.keys())}. Import arrays of other files with `scalelatent data import {kind}`"
        )
    if not (_is_group(root["obs"]) and _is_group(root["var"])):
        raise DataError(f"{source_name} has the form of anndata before version 0.7; {_WRITE_AGAIN}")
    return root


def _is_group(item: Any) -> bool:
    return not hasattr(item, "dtype")


def _open_rows(root: Any, key: str, source_name: str) -> RowReader:
    """Return a reader of X or of a layer."""
    item = root[key]
    if not _is_group(item):
        return _open_array(root, key, source_name)
    kind = item.attrs.get("encoding-type")
    if kind == "csc_matrix":
        rows = "adata.X" if key == "X" else f"adata.layers[{key.partition('/')[2]!r}]"
        raise DataError(
            f"{source_name} is a sparse matrix stored by columns (CSC), which cannot be read in rows; write "
            f"the file again after {rows} = {rows}.tocsr()"
        )
    if kind != "csr_matrix" or "shape" not in item.attrs:
        raise DataError(
            f"{source_name} is stored as {kind or 'a group without an encoding-type'}, and rows are "
            f"csr_matrix or array; {_WRITE_AGAIN}"
        )
    for part in item:
        _refuse_elsewhere(root, item[part], source_name)
    return _AnnDataCsrReader(BackedCsr(item, item.attrs["shape"], source_name), source_name)


def _open_array(root: Any, key: str, source_name: str) -> RowReader:
    """Return a reader of an array; raise `DataError` if its numbers are in another file."""
    array = root[key]
    _refuse_elsewhere(root, array, source_name)
    return ZarrReader(array, source_name) if hasattr(array, "metadata") else Hdf5Reader(array, source_name)


def _refuse_elsewhere(root: Any, array: Any, source_name: str) -> None:
    """Raise `DataError` for an HDF5 array whose numbers are in another file."""
    if not hasattr(array, "external"):
        return
    if array.external or array.is_virtual or array.file.filename != root.file.filename:
        raise DataError(f"{source_name} takes its numbers from other files; {_WRITE_AGAIN}")


def _read_names(root: Any, x: RowReader, source_name: str) -> list[str] | None:
    """Return the names of the variables, or None if the file has none."""
    width = x.shape[1] if len(x.shape) == 2 else 0
    index = root["var"].attrs.get("_index", "_index")
    if not width or index not in root["var"]:
        return None
    names = _ColumnReader(root, "var", index, source_name)
    if names.n_rows != width:
        raise DataError(
            f"{source_name} has {names.n_rows} variables in var, but {x.name} has {width} columns; the file "
            "is damaged: write it again"
        )
    return [str(name) for name in names.read(width)]


class _AnnDataCsrReader(CsrReader):
    """CSR rows of an AnnData file."""

    nnz: int

    def __init__(self, rows: BackedCsr, name: str) -> None:
        self.name, self.shape, self.dtype = name, rows.shape, rows.dtype
        if 0 in self.shape:
            raise DataError(f"{name} has shape {self.shape}, which is empty: nothing to import")
        self._rows = rows

    def plan(self, group_rows: int | None) -> int:
        """Check all row pointers, and return the number of rows of a row group."""
        self.nnz = self._rows.n_stored
        with read_errors(self.name, 0, self.n_rows, _COPY_AGAIN):
            rows, last = choose_group_rows(self._rows.pointers, self.n_rows, self.nnz, self.dtype, group_rows)
            first = int(self._rows.pointers(0, 0)[0])
        if (first, last) != (0, self.nnz):
            raise DataError(
                f"{self.name}: indptr goes from {first} to {last}, but there are {self.nnz} entries; the "
                "arrays do not belong together: write the file again"
            )
        return rows

    def read(self, rows: int) -> csr_array:
        a = self._next_row
        with read_errors(self.name, a, a + rows, _COPY_AGAIN):
            return self.count_repairs(self._rows.read_counted(a, a + rows))


class _ColumnReader(RowReader):
    """One column of obs or var: strings, numbers, or the values of categories."""

    def __init__(self, root: Any, table: str, column: str, source_name: str) -> None:
        self.name = f"{source_name}, {table} column {column!r}"
        self._source_name, self._label, self._next_row = source_name, column, 0
        group = root[table]
        known = [name for name in group if name != "__categories"]
        if column not in known:
            raise DataError(
                f"{source_name} has no column {column!r} in {table}; it has {listed(known)}: name one with "
                "--label COLUMN (label='COLUMN')"
            )
        path, self._mask, self._categories = f"{table}/{column}", None, None
        kind = group[column].attrs.get("encoding-type")
        if kind == "categorical":
            self._categories = self._read_all(root, f"{path}/categories")
            path = f"{path}/codes"
        elif f"{table}/__categories/{column}" in root:  # as anndata before version 0.8 wrote categories
            self._categories = self._read_all(root, f"{table}/__categories/{column}")
        elif str(kind).startswith("nullable-"):
            self._mask = _open_array(root, f"{path}/mask", self.name)
            path = f"{path}/values"
        elif _is_group(group[column]):
            raise DataError(
                f"{self.name} is stored as {kind}, and labels are categories, strings or numbers; name "
                "another column"
            )
        self._values = _open_array(root, path, self.name)
        self.shape = self._values.shape
        self.dtype = (self._values if self._categories is None else self._categories).dtype
        if self.dtype.kind in "OT":
            self.dtype = np.dtype(str)
        if len(self.shape) != 1 or self.dtype.kind not in "buifU":
            raise DataError(
                f"{self.name} has shape {self.shape} and dtype {self.dtype}, and labels are categories, "
                "strings or numbers, one for every row; name another column"
            )

    def _read_all(self, root: Any, path: str) -> np.ndarray:
        path = f"{path}/values" if _is_group(root[path]) else path  # nullable strings, none of them missing
        array = _open_array(root, path, self.name) if root[path].shape[0] else None
        found = np.empty(0, str) if array is None else array.read(array.n_rows)
        return _as_plain(found)

    def read(self, rows: int) -> np.ndarray:
        a, self._next_row = self._next_row, self._next_row + rows
        with read_errors(self.name, a, a + rows, _COPY_AGAIN):
            values = self._values.read(rows)
            missing = np.zeros(rows, bool) if self._mask is None else self._mask.read(rows).astype(bool)
        if self._categories is not None:
            missing = values < 0
        elif values.dtype.kind == "f":
            missing = missing | np.isnan(values)
        if missing.any():
            raise missing_label_error(self._source_name, self._label, a + int(np.argmax(missing)))
        if self._categories is not None:
            if values.max() >= len(self._categories):
                raise DataError(
                    f"{self.name}: row {a + int(np.argmax(values))} has the code {values.max()}, but there "
                    f"are {len(self._categories)} categories; the file is damaged: write it again"
                )
            return self._categories[values]
        return _as_plain(values)


def _as_plain(values: np.ndarray) -> np.ndarray:
    """Return strings of any kind as strings of one width, and numbers as they are."""
    # numpy does not cast its variable-width strings (kind "T") to the width of the longest one.
    return values.astype(object).astype(str) if values.dtype.kind in "OT" else values
