"""The columns of a dataset: what all slices of it share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from scalelatent.errors import DataError

from . import csr, schema
from .binary_targets import PairedRows
from .read.sources import ArrayRows, RowSource, as_source, is_csr, is_dask, is_zarr

__all__ = ["Columns", "Shifted", "label_source"]


class Columns:
    """What all slices of a dataset share: its row sources, its classes and where it lies."""

    def __init__(
        self,
        x: RowSource,
        y: RowSource | None = None,
        weight: RowSource | None = None,
        *,
        url: str | None = None,
        attrs: schema.DatasetAttrs | None = None,
        shared: bool = False,
    ) -> None:
        self.x, self.y, self.weight = x, y, weight
        self.url, self.attrs, self.shared = url, attrs, shared
        self.weight_is_own = False

    @property
    def paired(self) -> PairedRows | None:
        """The rows of another dataset that stand in the place of `y`."""
        return self.y if isinstance(self.y, PairedRows) else None

    @property
    def coded(self) -> bool:
        """Whether `y` is stored as codes of classes."""
        return self.attrs is not None and self.attrs.codes and self.paired is None

    @property
    def y_kind(self) -> str | None:
        """'labels', 'targets', 'multilabel', or None without `y`."""
        if self.y is None:
            return None
        if self.attrs is not None and self.paired is None:
            return self.attrs.y_kind
        if len(self.y.shape) == 1:
            return "labels"
        return "multilabel" if is_csr(self.y) else "targets"

    @property
    def classes_known(self) -> bool:
        """Whether `classes` costs nothing."""
        return self.y_kind != "labels" or self.attrs is not None or "classes" in self.__dict__

    @functools.cached_property
    def classes(self) -> np.ndarray | None:
        """Sorted distinct labels, looked through once; None without labels, or with too many."""
        if self.y is None or self.y_kind != "labels":
            return None
        if self.attrs is not None:
            stored = None if self.attrs.codes else self.y.dtype
            return None if self.attrs.classes is None else np.asarray(self.attrs.classes, dtype=stored)
        found: np.ndarray | None = None
        for a, b in self.y.pieces(0, self.y.shape[0]):
            part = schema.distinct_labels(schema.as_labels(self.y.read(a, b), "y"), a, "y")
            found = part if found is None else np.union1d(found, part)
            if len(found) > schema.MAX_CLASSES:
                return None
        return found

    def remembered(self, key: Any, make: Callable[[], np.ndarray]) -> np.ndarray:
        """The last array made for a key; one is kept."""
        kept = self.__dict__.get("_remembered")
        if kept is None or kept[0] != key:
            kept = self.__dict__["_remembered"] = (key, make())
        return kept[1]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of stored columns, empty for others."""
        return "" if self.attrs is None or self.attrs.fingerprint is None else self.attrs.fingerprint

    def reweighted(self, weight: RowSource) -> Columns:
        """The same columns with other weights; another process cannot open those."""
        other = Columns(self.x, self.y, weight, url=self.url, attrs=self.attrs, shared=False)
        other.weight_is_own = True
        if "classes" in self.__dict__:
            other.__dict__["classes"] = self.__dict__["classes"]
        return other

    def with_target(self, target: PairedRows) -> Columns:
        """The same columns with the rows of another dataset in the place of `y`."""
        shared = self.shared and target.dataset.is_stored
        other = Columns(self.x, target, self.weight, url=self.url, attrs=self.attrs, shared=shared)
        other.weight_is_own = self.weight_is_own
        return other


class Shifted(ArrayRows):
    """A column that begins at row `first` of its dataset."""

    def __init__(self, array: np.ndarray, first: int) -> None:
        super().__init__(array)
        self._first = first

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows counted from the start of the dataset."""
        return super().read(start - self._first, stop - self._first)


def label_source(y: Any) -> RowSource:
    """The row source of labels (n,), targets (n, v) or sparse multi-labels (n, v)."""
    if csr.is_sparse(y):
        return csr.CsrSource(y, "y")
    lazy = is_dask(y) or is_zarr(y)
    schema.refuse_masked(y, "y")
    schema.refuse_mixed(y, "y")
    array = y if lazy or isinstance(y, np.ndarray) else np.asarray(y)
    if len(array.shape) == 1 and not lazy:
        return ArrayRows(schema.as_labels(array, "y"))
    source = as_source(array, "y")
    if len(source.shape) not in (1, 2) or 0 in source.shape[1:]:
        raise DataError(
            f"y has shape {source.shape}; it has to be labels, one per row, of shape (n,), or targets of "
            "shape (n, v)"
        )
    if len(source.shape) == 2:
        schema.check_rows_dtype(source.dtype, "y")
    return source
