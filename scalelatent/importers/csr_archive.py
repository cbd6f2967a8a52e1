"""CSR rows in npz archives: scipy's `save_npz`, or arrays under a prefix, read as a stream.

Three arrays of one archive are read side by side, a row group at a time; none is ever whole in memory.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from typing import TYPE_CHECKING, Any

from scalelatent.errors import DataError

from .csr_stream import CsrStream, check_format, keys_of, prefixes_of
from .keys import find_key
from .npy import open_member, open_npy, open_npz
from .stream import Progress, string_classes, write_rows

if TYPE_CHECKING:
    import numpy as np

    from scalelatent.data.dataset import Dataset

__all__ = ["CsrStream", "import_csr"]


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
    overwrite : bool
        Replace a dataset that lies there.
    progress : callable, optional
        Called with (rows done, rows in all).
    shuffle : int, optional
        Seed of a shuffle of all rows; by default they keep their order.
    **layout
        `shard_rows` (rows of a row group), `compressor` of `create_dataset`.

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
) -> tuple[Any, str | None, np.ndarray | None]:
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


def _open_y_file(path: str, opened: contextlib.ExitStack) -> tuple[Any, str, np.ndarray | None]:
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
    open_y: Any, shown: str, opened: contextlib.ExitStack
) -> tuple[Any, str, np.ndarray | None]:
    def stream() -> Any:
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
