"""`DatasetColumns`: the row sources, the classes and the location that all slices of a dataset share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.errors import DataError, ShardError

from . import csr, schema
from .feature_names import NAMES_ARRAY, as_names, read_names
from .read.containers import SlicedRows, opened
from .read.sources import ArrayRows, CsrSource, RowSource, as_source, is_dask, is_zarr

if TYPE_CHECKING:
    from scalelatent.kernels.arrays import DenseOrCsr
    from scalelatent.storage.location import Location
    from scalelatent.typing import LabelsLike

    from .dataset import Dataset


class DatasetColumns:
    """Row sources (readers) of `x`, `y` and weights, classes and location, for all slices of a dataset."""

    def __init__(
        self,
        x: RowSource,
        y: RowSource | None = None,
        weight: RowSource | None = None,
        *,
        place: Location | None = None,
        attrs: schema.DatasetAttrs | None = None,
        shared: bool = False,
        feature_names: np.ndarray | None = None,
    ) -> None:
        self.x, self.y, self.weight = x, y, weight
        self._names = feature_names
        self.place, self.attrs, self.shared = place, attrs, shared
        self.weight_is_own = False
        self.y_is_dropped = False

    @property
    def url(self) -> str | None:
        return None if self.place is None else self.place.url

    @functools.cached_property
    def feature_names(self) -> np.ndarray | None:
        """Names of the features, read at the first use if they are stored; None without names."""
        if len(self.x.shape) != 2:
            return None
        if self.attrs is None or NAMES_ARRAY not in (self.attrs.columns or ()):
            return self._names
        assert self.place is not None
        return as_names(read_names(self.place), self.x.shape[1:], f"dataset {self.url}")

    @property
    def paired(self) -> PairedRows | None:
        """Rows of another dataset that `Dataset.with_target` has set as `y`, or None."""
        return self.y if isinstance(self.y, PairedRows) else None

    @property
    def has_codes(self) -> bool:
        """True if `y` is stored as codes of classes."""
        return self.attrs is not None and self.attrs.codes and self.paired is None

    @property
    def y_kind(self) -> str | None:
        """Kind of `y`: 'labels', 'targets', 'multilabel', or None without `y`."""
        if self.y is None:
            return None
        if self.attrs is not None and self.paired is None:
            return self.attrs.y_kind
        if len(self.y.shape) == 1:
            return "labels"
        return "multilabel" if self.y.sparse else "targets"

    @functools.cached_property
    def classes(self) -> np.ndarray | None:
        """Sorted distinct labels, read at the first use; None without labels, or above `MAX_CLASSES`."""
        if self.y is None or self.y_kind != "labels":
            return None
        if self.attrs is not None:
            stored = None if self.attrs.codes else self.y.dtype
            return None if self.attrs.classes is None else np.asarray(self.attrs.classes, dtype=stored)
        distinct: np.ndarray | None = None
        for a, b in self.y.pieces(0, self.y.shape[0]):
            part = schema.distinct_labels(schema.as_labels(self.y.read(a, b), "y"), a, "y")
            distinct = part if distinct is None else np.union1d(distinct, part)
            if len(distinct) > schema.MAX_CLASSES:
                return None
        return distinct

    def cached_codes(self, key: object, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the class codes that are cached for `key`; if there are none, cache those of `make()`."""
        cached = self.__dict__.get("_codes")
        if cached is None or cached[0] != key:
            cached = self.__dict__["_codes"] = (key, make())
        return cached[1]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of stored columns; empty for columns in memory."""
        return "" if self.attrs is None or self.attrs.fingerprint is None else self.attrs.fingerprint

    def _copy_with(self, **values: object) -> DatasetColumns:
        """Return a copy with the attributes in `values`, without cached classes and class codes."""
        other = copy.copy(self)
        other.__dict__.pop("classes", None)
        other.__dict__.pop("_codes", None)
        other.__dict__.update(values)
        return other

    def with_weight(self, weight: RowSource) -> DatasetColumns:
        """Return the same columns with new weights; weights in memory cannot be opened by other processes."""
        own_classes = {"classes": self.classes} if "classes" in self.__dict__ else {}
        return self._copy_with(weight=weight, shared=False, weight_is_own=True, **own_classes)

    def with_target(self, target: PairedRows) -> DatasetColumns:
        """Return the same columns with the rows of another dataset as `y`."""
        return self._copy_with(y=target, shared=self.shared and target.dataset.is_stored)

    def without_y(self) -> DatasetColumns:
        """Return the same columns without `y`."""
        return self._copy_with(y=None, y_is_dropped=True)

    def require_y(self, name: str) -> RowSource:
        """Return the row source of `y`; without `y` raise a `DataError` that calls the dataset `name`."""
        if self.y is None:
            raise DataError(f"{name} has no labels; pass y, or import the rows together with their labels")
        return self.y

    def read_y(self, start: int, stop: int, name: str) -> DenseOrCsr:
        """Return labels, targets or multi-labels of the rows `start:stop` of the whole dataset."""
        stored = self.require_y(name).read(start, stop)
        if self.y_kind != "labels":
            return stored
        if not self.has_codes:
            return schema.as_labels(stored, "y", start)
        assert self.classes is not None
        return self.classes[_check_codes(self.classes, stored, start, name)]

    def read_codes(
        self,
        rows: tuple[int, int],
        classes: np.ndarray | None,
        name: str,
        within: tuple[int, int],
        unlabelled: bool = False,
    ) -> np.ndarray:
        """Return the class codes of rows; for labels in memory, cache the codes of the slice `within`."""
        stored, (start, stop) = self.require_y(name), rows
        if self.y_kind != "labels":
            raise DataError(
                f"{name} has {stored.shape[1]} {self.y_kind} columns per row instead of one label, so its "
                "rows have no classes; give rows with labels (n,), for example "
                "Dataset.from_arrays(ds.read_x(0, n), labels)"
            )
        if self.has_codes and classes is None:
            assert self.classes is not None
            return _check_codes(self.classes, stored.read(start, stop), start, name)
        known = self.classes if classes is None else np.asarray(classes)
        if known is None:
            raise DataError(
                f"{name} has more than {schema.MAX_CLASSES} distinct labels, which is too many for classes; "
                "give targets, or fewer labels"
            )

        def encode(a: int, b: int) -> np.ndarray:
            return schema.encode_labels(self.read_y(a, b, name), known, a, name, unlabelled)

        if isinstance(stored, ArrayRows) and not self.has_codes:
            # Encode all labels in memory once and cache the codes, so that later passes reuse the codes.
            key = (known.dtype.str, known.tobytes(), unlabelled, *within)
            return self.cached_codes(key, lambda: encode(*within))[start - within[0] : stop - within[0]]
        return encode(start, stop)

    def read_targets(self, start: int, stop: int, name: str) -> np.ndarray:
        """Return the binary outputs of the rows `start:stop`, uint8 (rows, outputs)."""
        if self.y_kind in (None, "labels"):
            has = "no outputs" if self.y is None else "one label per row"
            raise DataError(
                f"{name} has {has}, but outputs must be zeros and ones of shape (n, v): pass them as y, or "
                "use the rows of another dataset as outputs (Dataset.with_target(other) or [data] target)"
            )
        stored = self.require_y(name).read(start, stop)
        paired = self.paired
        if paired is None:
            return as_binary(stored, start, f"y of {name}")
        named = f"dataset {paired.dataset.url}" if paired.dataset.url else f"the target of {name}"
        return as_binary(stored, paired.row_number(start), named)

    def y_options(self, name: str) -> schema.OutputOptions:
        """Return the arguments of `create_dataset` for a new dataset with the same kind of `y`."""
        if self.y_kind is None:
            return {}
        if self.y_kind != "labels":
            y = self.require_y(name)
            return {
                "y_dtype": y.dtype.newbyteorder("="),
                "y_kind": self.y_kind,
                "n_targets": int(y.shape[1]),
            }
        dtype = self.read_y(0, 1, name).dtype
        if dtype.kind != "U":
            return {"y_dtype": dtype, "classes": self.classes}
        if self.classes is None:
            raise schema.too_many_strings(name)
        return {"classes": self.classes}


class OffsetColumn(ArrayRows):
    """Column in memory that begins at row `first` of its dataset."""

    def __init__(self, array: np.ndarray, first: int) -> None:
        super().__init__(array)
        self._first = first

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the rows `start:stop`, counted from the start of the dataset."""
        return super().read(start - self._first, stop - self._first)


def label_source(y: LabelsLike) -> RowSource:
    """Return the row source for labels (n,), targets (n, v) or sparse multi-labels (n, v)."""
    if csr.is_sparse(y):
        return CsrSource(y, "y")
    given = opened(y, "y")
    lazy = is_dask(given) or is_zarr(given) or isinstance(given, SlicedRows)
    schema.check_label_values(given, "y")
    array = given if lazy or isinstance(given, np.ndarray) else np.asarray(given)
    if len(array.shape) == 1 and not lazy:
        return ArrayRows(schema.as_labels(array, "y"))
    source = as_source(array, "y")
    if len(source.shape) not in (1, 2) or 0 in source.shape[1:]:
        raise DataError(
            f"y has shape {source.shape}; give one label per row, shape (n,), or targets of shape (n, v)"
        )
    if len(source.shape) == 2:
        schema.check_rows_dtype(source.dtype, "y")
    return source


class PairedRows(RowSource):
    """Rows of one dataset that are the targets of another dataset."""

    def __init__(self, dataset: Dataset, first: int, n_rows: int) -> None:
        self.dataset, self._first = dataset, first
        self.shape = (n_rows, dataset.n_features)
        self.dtype = dataset.dtype
        self.sparse = dataset.is_sparse

    @property
    def nnz(self) -> int:
        return self.dataset.nnz or 0

    def count_entries(self, start: int, stop: int) -> int:
        return int(self.slice_rows(start, stop).nnz or 0)

    def slice_rows(self, start: int, stop: int) -> Dataset:
        """Return the rows of the target dataset that belong to the rows `start:stop`, as a dataset."""
        return self.dataset[start - self._first : stop - self._first]

    def row_number(self, row: int) -> int:
        """Return the row number, in the whole target dataset, of the targets of row `row`."""
        return self.dataset.extent[0] + row - self._first

    def read(self, start: int, stop: int) -> DenseOrCsr:
        try:
            return self.dataset.read_x(start - self._first, stop - self._first)
        except ShardError as error:  # name the target dataset, not the dataset of `x`
            raise error.moved(url=self.dataset.url) from error.__cause__

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        cut = self.dataset.pieces(start - self._first, stop - self._first)
        return [(a + self._first, b + self._first) for a, b in cut]


def as_binary(rows: DenseOrCsr, first_row: int, name: str) -> np.ndarray:
    """Return rows of zeros and ones as dense uint8; raise a `DataError` at any other value."""
    values = _as_bits(rows, first_row, name)
    if csr.is_sparse(rows):
        out = np.zeros(rows.shape, np.uint8)
        out[np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr)), rows.indices] = values
        return out
    return values


def _as_bits(rows: DenseOrCsr, first_row: int, name: str) -> np.ndarray:
    """Return the stored values of rows as uint8; raise a `DataError` at a value other than 0 and 1."""
    values = rows if isinstance(rows, np.ndarray) else rows.data
    if values.dtype == np.bool_:
        return values.view(np.uint8)
    if values.dtype == np.uint8:
        if not values.size or values.max() <= 1:
            return values
        good = values <= 1
    else:
        one = values == 1
        good = one | (values == 0)
        if good.all():
            return one.view(np.uint8)
    at = int(np.flatnonzero(~good)[0])
    row, column = csr.place_of(rows, at)
    raise DataError(
        f"{name}: column {column} of row {first_row + row} is {values.reshape(-1)[at]}, but an output must "
        f"be 0 or 1; make the outputs binary first, for example Dataset.from_arrays((v > 127).astype('u1'))"
    )


def _check_codes(classes: np.ndarray, codes: np.ndarray, first_row: int, name: str) -> np.ndarray:
    if codes.size and not (codes.min() >= 0 and codes.max() < len(classes)):
        i = int(np.flatnonzero((codes < 0) | (codes >= len(classes)))[0])
        raise DataError(
            f"{name}: the label of row {first_row + i} is code {codes[i]}, but there are {len(classes)} "
            "classes; import the data again"
        )
    return codes.astype(np.int32)
