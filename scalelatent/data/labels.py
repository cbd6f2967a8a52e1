"""What the column `y` of a dataset says: labels as they were given, and as codes of classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError

from . import schema
from .binary_targets import as_binary
from .read.sources import ArrayRows

if TYPE_CHECKING:
    from .columns import Columns
    from .read.sources import RowSource

__all__ = ["column", "read_codes", "read_targets", "read_y", "y_options"]


def column(columns: Columns, what: str) -> RowSource:
    """The row source of labels, targets or multi-labels; `what` is what messages call the dataset."""
    if columns.y is None:
        raise DataError(f"{what} has no labels; give y, or import the rows together with their labels")
    return columns.y


def read_y(columns: Columns, start: int, stop: int, what: str) -> Any:
    """What belongs to the rows `start:stop`; see `Dataset.read_y`."""
    stored = column(columns, what).read(start, stop)
    if columns.y_kind != "labels":
        return stored
    if not columns.coded:
        return schema.as_labels(stored, "y", start)
    assert columns.classes is not None
    return columns.classes[_checked(columns.classes, stored, start, what)]


def read_codes(
    columns: Columns,
    rows: tuple[int, int],
    classes: np.ndarray | None,
    what: str,
    within: tuple[int, int],
) -> np.ndarray:
    """Codes of the rows `rows`, which lie in the rows `within` of a dataset; see `Dataset.read_codes`."""
    stored, (start, stop) = column(columns, what), rows
    if columns.y_kind != "labels":
        raise DataError(
            f"{what} has {stored.shape[1]} {columns.y_kind} columns a row instead of one label, so its rows "
            "have no classes; give rows with labels (n,), for example Dataset.from_arrays(ds.read_x(0, n), "
            "labels)"
        )
    if columns.coded and classes is None:
        assert columns.classes is not None
        return _checked(columns.classes, stored.read(start, stop), start, what)
    known = columns.classes if classes is None else np.asarray(classes)
    if known is None:
        raise DataError(f"{what} has more than {schema.MAX_CLASSES} distinct labels: they are no classes")

    def encode(a: int, b: int) -> np.ndarray:
        return schema.encode_labels(read_y(columns, a, b, what), known, a, what)

    if isinstance(stored, ArrayRows) and not columns.coded:
        # Labels in memory are looked up once, not every pass.
        key = (known.dtype.str, known.tobytes(), *within)
        return columns.remembered(key, lambda: encode(*within))[start - within[0] : stop - within[0]]
    return encode(start, stop)


def read_targets(columns: Columns, start: int, stop: int, what: str) -> np.ndarray:
    """Binary outputs of the rows `start:stop`; see `Dataset.read_targets`."""
    if columns.y_kind in (None, "labels"):
        has = "no outputs" if columns.y is None else "one label a row"
        raise DataError(
            f"{what} has {has}, and zeros and ones of shape (n, v) are needed: give them as y, or have the "
            "rows of another dataset as outputs, Dataset.with_target(other) or [data] target"
        )
    stored = column(columns, what).read(start, stop)
    paired = columns.paired
    if paired is None:
        return as_binary(stored, start, f"y of {what}")
    named = f"dataset {paired.dataset.url}" if paired.dataset.url else f"the target of {what}"
    return as_binary(stored, paired.number(start), named)


def y_options(columns: Columns, what: str) -> dict[str, Any]:
    """The arguments of `create_dataset` that make room for the same `y`.

    Raises
    ------
    DataError
        Strings that are no classes.
    """
    if columns.y_kind is None:
        return {}
    if columns.y_kind != "labels":
        y = column(columns, what)
        return {
            "y_dtype": y.dtype.newbyteorder("="),
            "y_kind": columns.y_kind,
            "n_targets": int(y.shape[1]),
        }
    dtype = read_y(columns, 0, 1, what).dtype
    if dtype.kind != "U":
        return {"y_dtype": dtype, "classes": columns.classes}
    if columns.classes is None:
        raise schema.too_many_strings(what)
    return {"classes": columns.classes}


def _checked(classes: np.ndarray, codes: np.ndarray, first_row: int, what: str) -> np.ndarray:
    if codes.size and not (codes.min() >= 0 and codes.max() < len(classes)):
        i = int(np.flatnonzero((codes < 0) | (codes >= len(classes)))[0])
        raise DataError(
            f"{what}: the label of row {first_row + i} is code {codes[i]}, but there are {len(classes)} "
            "classes; import the data again"
        )
    return codes.astype(np.int32)
