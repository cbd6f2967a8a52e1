"""Convert the columns of tables to rows of numbers with Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.errors import DataError

if TYPE_CHECKING:
    from types import ModuleType

    import pyarrow

    from scalelatent.typing import FrameLike

_SHOWN = 20  # maximum number of names of columns or layers in an error message


def join_names(names: Iterable[object]) -> str:
    """Return the first `_SHOWN` names, joined for an error message."""
    found = [repr(str(name)) for name in names]
    return (", ".join(found[:_SHOWN]) or "none") + (", …" if len(found) > _SHOWN else "")


def import_pyarrow(action: str) -> ModuleType:
    """Return the module pyarrow; if it is not installed, raise a `DataError` that begins with `action`."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{action} needs pyarrow: install it with pip install 'scalelatent[arrow]'"
        ) from error
    return pyarrow


def arrow_table(frame: FrameLike | dict[str, pyarrow.Array]) -> pyarrow.Table:
    """Return a data frame (pandas, polars, any Arrow interface) or a dict of columns as an Arrow table."""
    pa = import_pyarrow("reading a data frame")
    try:
        if hasattr(frame, "iloc"):  # the index of pandas is not a feature
            return pa.Table.from_pandas(frame, preserve_index=False)
        return frame if isinstance(frame, pa.Table) else pa.table(frame)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"a {type(frame).__name__} cannot be read as a table: {error}; pass a frame of pandas or "
            "polars, or an Arrow table"
        ) from error


class FrameColumns:
    """Selection of the feature, label and weight columns of a table, and their conversion to arrays.

    Features are columns of numbers, or of lists of numbers with a fixed size. A single column of nested lists
    or of tensors defines the shape of a row. The dtype of the rows is the common dtype of all features.
    """

    def __init__(
        self,
        schema: pyarrow.Schema,
        name: str,
        *,
        label: str | None = None,
        weight: str | None = None,
        features: Sequence[str] | None = None,
    ) -> None:
        self.name, self.label, self.weight = name, label, weight
        others = [n for n in (label, weight) if n is not None]
        self.names = [n for n in schema.names if n not in others] if features is None else list(features)
        for column in (*others, *self.names):
            if (count := schema.names.count(column)) != 1:
                raise DataError(
                    f"{name} has {f'{count} columns' if count else 'no column'} {column!r}; its columns are "
                    f"{join_names(schema.names)}: choose some with label=, weight= and features= (--label, "
                    "--weight, --features)"
                )
        found_types = [self._find_number_type(n, schema.field(n).type) for n in self.names]
        self._widths = [int(np.prod(shape)) for _, shape in found_types]
        self.dtype = np.result_type(*(dtype for dtype, _ in found_types)) if found_types else np.dtype("f8")
        alone = len(found_types) == 1 and found_types[0][1]
        self.feature_shape: tuple[int, ...] = alone or (sum(self._widths),)
        self._flat = not any(shape for _, shape in found_types)
        self.label_type = None if label is None else self._label_type(schema.field(label).type)

    @property
    def feature_names(self) -> list[str] | None:
        """Names of the features; None if a column holds more than one feature."""
        return self.names if self.feature_shape == (len(self.names),) else None

    @property
    def all_names(self) -> list[str]:
        """Names of the feature, label and weight columns."""
        return list(dict.fromkeys([*self.names, *(n for n in (self.label, self.weight) if n is not None)]))

    def rows(self, table: pyarrow.Table | pyarrow.RecordBatch, first_row: int = 0) -> np.ndarray:
        """Return the features of a table (n, *feature_shape); messages count rows from `first_row`."""
        out = np.empty((table.num_rows, sum(self._widths)), self.dtype)
        done = 0
        for batch in _select_batches(table, self.names):
            out[done : done + batch.num_rows] = self._to_matrix(batch, first_row + done)
            done += batch.num_rows
        return out.reshape(-1, *self.feature_shape)

    def labels(self, table: pyarrow.Table | pyarrow.RecordBatch, first_row: int = 0) -> np.ndarray:
        """Return the labels of a table (n,), numbers or strings; dictionary columns give their values."""
        assert self.label is not None
        assert self.label_type is not None
        parts: list[np.ndarray] = []
        for batch in _select_batches(table, [self.label]):
            column = batch.column(0)
            self._refuse_nulls(column, self.label, first_row + sum(map(len, parts)))
            if import_pyarrow(self.name).types.is_dictionary(column.type):
                values = column.dictionary.to_numpy(zero_copy_only=False)[column.indices.to_numpy()]
            else:
                values = column.to_numpy(zero_copy_only=False)
            parts.append(values.astype(str) if self.label_type.kind == "U" else values)
        return np.concatenate(parts) if parts else np.empty(0, self.label_type)

    def weights(self, table: pyarrow.Table | pyarrow.RecordBatch, first_row: int = 0) -> np.ndarray:
        """Return the weights of a table, float64 (n,)."""
        assert self.weight is not None
        alone = FrameColumns(table.schema, self.name, features=[self.weight])
        return alone.rows(table, first_row).reshape(-1).astype(np.float64)

    def _to_matrix(self, batch: pyarrow.RecordBatch, first_row: int) -> np.ndarray:
        """Return the features of a record batch (n, width)."""
        pa = import_pyarrow(self.name)
        columns = []
        for name, width in zip(self.names, self._widths, strict=True):
            values = _unwrap_extension(batch.column(name))
            self._refuse_nulls(values, name, first_row)
            while pa.types.is_fixed_size_list(values.type):
                values = _unwrap_extension(values.flatten())
                self._refuse_nulls(values, name, first_row, width)
            columns.append(values)
        # Arrow cannot make a matrix of booleans, so booleans are converted to bytes first.
        plain = np.dtype(np.uint8) if self.dtype == bool else self.dtype
        try:
            kind = pa.from_numpy_dtype(plain)
            columns = [c if c.type == kind else c.cast(kind) for c in columns]
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{self.name}: not all numbers of rows {first_row}:{first_row + batch.num_rows} are exact in "
                f"{self.dtype}, the common type of the features: {error}; choose fewer columns (features=, "
                "--features), or cast them first"
            ) from error
        if self._flat:
            tensor = pa.RecordBatch.from_arrays(columns, names=[str(i) for i in range(len(columns))])
            return np.asarray(tensor.to_tensor().to_numpy()).astype(self.dtype, copy=False)
        parts = [c.to_numpy(zero_copy_only=False).reshape(batch.num_rows, -1) for c in columns]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)).astype(self.dtype, copy=False)

    def _find_number_type(self, name: str, kind: pyarrow.DataType) -> tuple[np.dtype, tuple[int, ...]]:
        """Return the dtype and the shape of the value that a column adds to each row."""
        types = import_pyarrow(self.name).types
        shape: tuple[int, ...] = tuple(
            getattr(kind, "shape", None) or ()
        )  # only types of tensors have a shape
        value = _storage_type(kind)
        sizes: tuple[int, ...] = ()
        while types.is_fixed_size_list(value):
            sizes += (value.list_size,)
            value = _storage_type(value.value_type)
        if not (types.is_integer(value) or types.is_floating(value) or types.is_boolean(value)):
            values = "text" if _is_text(types, value) else str(kind)
            if types.is_list(value) or types.is_large_list(value):
                values = "lists of varying size"
            raise DataError(
                f"{self.name}: column {name!r} holds {values}, but features must be numbers or lists of "
                "numbers of a fixed size; exclude it with features= (--features), or use it as the label"
            )
        return np.dtype(value.to_pandas_dtype()), shape or sizes

    def _label_type(self, kind: pyarrow.DataType) -> np.dtype:
        types = import_pyarrow(self.name).types
        value = kind.value_type if types.is_dictionary(kind) else kind
        if types.is_integer(value) or types.is_floating(value) or types.is_boolean(value):
            return np.dtype(value.to_pandas_dtype())
        if _is_text(types, value):
            return np.dtype(str)
        raise DataError(
            f"{self.name}: column {self.label!r} holds {kind}, but labels must be numbers or strings; choose "
            "another column with label= (--label)"
        )

    def _refuse_nulls(self, column: pyarrow.Array, name: str, first_row: int, width: int = 1) -> None:
        if not column.null_count:
            return
        at = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(
            f"{self.name}: row {first_row + at // width}, column {name!r} is null; fill such values, or "
            "remove those rows"
        )


def _select_batches(
    table: pyarrow.Table | pyarrow.RecordBatch, names: list[str]
) -> list[pyarrow.RecordBatch]:
    chosen = table.select(names)
    return chosen.to_batches() if hasattr(chosen, "to_batches") else [chosen]


def _is_text(types: ModuleType, kind: pyarrow.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind) or str(kind) == "string_view"


def _storage_type(kind: pyarrow.DataType) -> pyarrow.DataType:
    """Return the storage type of an Arrow extension type (tensors), or `kind` itself."""
    return getattr(kind, "storage_type", kind)


def _unwrap_extension(column: pyarrow.Array) -> pyarrow.Array:
    return getattr(column, "storage", column)
