"""Define the attributes of stored datasets and check rows, labels and weights, without importing zarr."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np

from scalelatent.errors import DataError
from scalelatent.storage.location import REMOVED

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from scalelatent.typing import WeightsLike

FORMAT = "scalelatent-dataset"
FORMAT_VERSION = 3
Y_KINDS = ("labels", "targets", "multilabel")
MAX_CLASSES = 65_536
"""Maximum number of classes, which are stored in the attributes of a dataset."""


Label = str | int | float
"""Type of a label in JSON; a bool counts as an int."""


class Segment(TypedDict):
    """Attributes of one segment of a dataset: the rows of one append, or the rows before the first append."""

    path: str
    """Folder below the dataset's folder; "" for the first part."""
    rows: int
    fingerprint: str
    classes: list[Label] | None


class CrcTable(TypedDict):
    """Description of a dataset's table of checksums: hash of the table, rows per shard, columns."""

    hash: str
    shard_rows: NotRequired[int]
    columns: dict[str, list[Any]]
    """Column name -> [number of checksums, packing of the chunks]."""


class DatasetSpec(TypedDict):
    """JSON values (URL, rows, fingerprint, …) with which another process opens the same rows."""

    url: str
    start: int
    stop: int
    fingerprint: str
    access: NotRequired[str]
    without_labels: NotRequired[bool]
    target: NotRequired[DatasetSpec]


class LayoutOptions(TypedDict, total=False):
    """Arguments of `create_dataset` for the sizes of chunks and shards and the compression of rows."""

    chunk_rows: int | None
    shard_rows: int | None
    compressor: str | None
    tile_columns: int | None


class OutputOptions(TypedDict, total=False):
    """Arguments of `create_dataset` for the column of labels, targets or multi-labels."""

    y_dtype: npt.DTypeLike | None
    y_kind: str
    n_targets: int | None
    classes: npt.ArrayLike | None


class CreateOptions(LayoutOptions, OutputOptions, total=False):
    """Optional arguments of `create_dataset`; their defaults are those of `begin_dataset`."""

    nnz: int | None
    weighted: bool
    feature_names: Sequence[str] | np.ndarray | None
    provenance: dict[str, Any] | None
    resume: bool
    overwrite: bool


@dataclass(frozen=True)
class DatasetAttrs:
    """Attributes of a dataset's zarr group."""

    feature_shape: tuple[int, ...]
    """Shape of one row of `x`, for example (28, 28)."""
    classes: list[Label] | None = None
    """Sorted distinct labels, numbers or strings; None without labels."""
    codes: bool = False
    """True if `y` holds indices into `classes` (string labels) instead of the labels themselves."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Origin of the rows: importer or generator, its parameters, file names, software version."""
    fingerprint: str | None = None
    """SHA-256 of the content; None until the last shard is written."""
    complete: bool = False
    """True if the writer has finished; readers refuse an unfinished dataset."""
    x_kind: str = "dense"
    """Kind of the rows: 'dense' or 'csr'."""
    y_kind: str = "labels"
    """Kind of `y`, one of `Y_KINDS`; unused without `y`."""
    n_targets: int | None = None
    """Number of columns of `y`; None for labels."""
    segments: list[Segment] | None = None
    """Parts of a dataset to which rows were appended; None for other datasets."""
    columns: list[str] | None = None
    """Names of the stored arrays; None in datasets of old versions. A missing array is an error."""
    crc: CrcTable | None = None
    """Description of the table `crc` of checksums; None in datasets of versions without checksums."""
    format: str = FORMAT

    @property
    def format_version(self) -> int:
        """Lowest format version that can represent these attributes."""
        if self.segments is not None:
            return 3
        return 1 if (self.x_kind, self.y_kind) == ("dense", "labels") else 2

    def to_json(self) -> dict[str, Any]:
        values = {**asdict(self), "feature_shape": list(self.feature_shape)}
        for name in ("segments", "columns", "crc"):
            if values[name] is None:
                del values[name]
        if self.format_version == 1:
            for name in ("x_kind", "y_kind", "n_targets"):
                del values[name]
        return {**values, "format_version": self.format_version}

    @property
    def own_classes(self) -> list[Label] | None:
        """Classes of the codes in this folder: after appends, the classes of the first segment."""
        return self.segments[0]["classes"] if self.codes and self.segments else self.classes

    @classmethod
    def from_json(cls, attrs: object, url: str) -> DatasetAttrs:
        """Check the attributes of the group at `url` (format, version, then the rest), and return them."""
        if isinstance(attrs, dict) and attrs.get("format") == REMOVED:
            raise DataError(
                f"{url} is being removed, or its removal was interrupted: its rows are deleted; write them "
                "again"
            )
        if not isinstance(attrs, dict) or attrs.get("format") != FORMAT:
            found = attrs.get("format") if isinstance(attrs, dict) else None
            raise DataError(
                f"{url} is a zarr group but not a scalelatent dataset (its attribute 'format' is "
                f"{found!r:.40}, not {FORMAT!r}); create a dataset with `scalelatent data import`, or pass "
                "its arrays to Dataset.from_arrays"
            )
        version = attrs.get("format_version")
        if not isinstance(version, int) or version < 1:
            raise DataError(
                f"{url}: attribute 'format_version' is {version!r}, but it must be a whole number from 1 on; "
                "import the data again"
            )
        if version > FORMAT_VERSION:
            raise DataError(
                f"{url} has format_version {version}; this scalelatent ({software()}) reads versions up "
                f"to {FORMAT_VERSION}: install a newer scalelatent"
            )
        known = {f.name: attrs[f.name] for f in fields(cls) if f.name in attrs}
        if (
            known.get("x_kind", "dense") not in ("dense", "csr")
            or known.get("y_kind", "labels") not in Y_KINDS
        ):
            raise DataError(
                f"{url}: attributes 'x_kind' and 'y_kind' are {known.get('x_kind')!r} and "
                f"{known.get('y_kind')!r}, but they must be 'dense' or 'csr', and one of "
                f"{', '.join(map(repr, Y_KINDS))}; import the data again"
            )
        try:
            shape = tuple(int(s) for s in attrs["feature_shape"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{url}: attribute 'feature_shape' is missing or damaged; import the data again"
            ) from error
        if not _is_crc(known.get("crc")):
            raise DataError(f"{url}: attribute 'crc' is damaged; import the data again")
        return cls(**known | {"feature_shape": shape})


def _is_crc(crc: Any) -> bool:
    """Return whether an attribute `crc` is None or a valid `CrcTable`."""
    if crc is None:
        return True
    try:
        sizes = [int(size) for size, _ in crc["columns"].values()]
        return (
            "hash" in crc and "x" in crc["columns"] and min(sizes) >= 0 and int(crc.get("shard_rows", 1)) > 0
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return False


def software() -> str:
    """Return the version of scalelatent, for the provenance of a dataset."""
    return str(getattr(sys.modules.get("scalelatent"), "__version__", "unknown"))


def check_rows_dtype(dtype: np.dtype, name: str) -> np.dtype:
    """Raise a `DataError` unless rows are real numbers; return their dtype in native byte order."""
    if dtype.kind not in "buif":
        kind = {"O": "Python objects", "c": "complex numbers"}.get(dtype.kind, f"values of type {dtype}")
        raise DataError(
            f"{name} holds {kind} (dtype {dtype}); rows must be real numbers: bool, integers or floats. "
            f"Convert them first, for example with x.astype('float32')"
        )
    return dtype.newbyteorder("=")


def refuse_masked(values: object, name: str, first_row: int = 0) -> None:
    """Raise a `DataError` that names row and feature of the first masked entry of a `numpy.ma` array."""
    if isinstance(values, (list, tuple)):
        for row, value in enumerate(values, first_row):
            if isinstance(value, np.ma.MaskedArray):
                refuse_masked(value[None], name, row)
        return
    if not isinstance(values, np.ma.MaskedArray) or not np.ma.is_masked(values):
        return
    mask = np.atleast_1d(np.ma.getmaskarray(values))
    bad = np.flatnonzero(mask)
    row, feature = divmod(int(bad[0]), max(1, mask[0].size))
    where = f"row {first_row + row}" + (f", feature {feature}" if mask.ndim > 1 else "")
    raise DataError(
        f"{name} is a masked array: {where} is masked ({len(bad)} of {mask.size} entries are masked), but "
        "all entries must be known. Fill them (x.filled(0)), or remove those rows (np.ma.compress_rows(x))"
    )


def as_labels(y: object, name: str, first_row: int = 0) -> np.ndarray:
    """Return labels as a 1-D array of numbers or fixed-width strings; no copy if `y` is such an array."""
    refuse_masked(y, name, first_row)
    check_label_values(y, name, first_row)
    labels = y if isinstance(y, np.ndarray) else np.asarray(y)
    if labels.ndim != 1:
        raise DataError(
            f"{name} has shape {labels.shape}; give one label per row, shape (n,): use y.ravel() for one "
            "column"
        )
    if labels.dtype.kind == "O":
        labels = _convert_objects(labels, name)
    elif labels.dtype.kind == "S":
        labels = _decode_utf8(labels, name, first_row)
    if labels.dtype.kind not in "buifU":
        raise DataError(
            f"{name} has dtype {labels.dtype}; labels must be integers, floats, booleans or strings; convert "
            "them first"
        )
    return labels if labels.dtype.isnative else labels.astype(labels.dtype.newbyteorder("="))


def check_label_values(y: Any, name: str, first_row: int = 0) -> None:
    """Raise a `DataError` that names the row of the first label that numpy would change or refuse.

    Such labels are missing values of a pandas column, strings among numbers, and strings that end in NUL.
    """
    if hasattr(y, "isna"):
        missing = np.argwhere(np.asarray(y.isna()))
        if len(missing):
            raise DataError(
                f"{name}: the label of row {first_row + int(missing[0][0])} is missing. Label or drop such "
                "rows, then try again"
            )
        y = np.asarray(y)
    if isinstance(y, np.ndarray) and y.ndim == 1 and y.dtype.kind == "O":
        y = y.tolist()
    if not isinstance(y, (list, tuple)):
        return
    are_text = {issubclass(t, (str, bytes)) for t in set(map(type, y))}
    if are_text == {True}:
        bad = next((i for i, label in enumerate(y) if label[-1:] in ("\0", b"\0")), None)
        if bad is not None:
            raise DataError(
                f"{name}: the label of row {first_row + bad} is {y[bad]!r:.40}, which ends in the character "
                "NUL. Arrays of strings drop this character: remove it, or use another label"
            )
    if len(are_text) < 2:
        return
    text = isinstance(y[0], (str, bytes))
    row = next(i for i, label in enumerate(y) if isinstance(label, (str, bytes)) != text)
    raise DataError(
        f"{name} has labels of mixed types. The label of row {first_row + row} is {y[row]!r:.40} "
        f"({type(y[row]).__name__}), and row {first_row} is {y[0]!r:.40} ({type(y[0]).__name__}); labels "
        "must be all numbers or all strings"
    )


def _decode_utf8(labels: np.ndarray, name: str, first_row: int) -> np.ndarray:
    """Return labels of bytes decoded as UTF-8 strings."""
    try:
        return np.char.decode(labels, "utf-8")
    except UnicodeDecodeError as error:
        bad = next(i for i, label in enumerate(labels.tolist()) if not _is_utf8(label))
        raise DataError(
            f"{name}: the label of row {first_row + bad} is {labels[bad].item()!r}, which is not UTF-8 text; "
            "decode the labels first, for example with np.char.decode(y, 'latin-1')"
        ) from error


def _is_utf8(label: bytes) -> bool:
    try:
        label.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def check_stored_dtype(dtype: np.dtype, name: str) -> np.dtype:
    """Raise a `DataError` for a dtype that zarr cannot store; return the dtype."""
    if dtype.kind == "f" and dtype.itemsize > 8:
        raise DataError(
            f"{name} holds {dtype}, which cannot be stored; convert it first, for example with "
            "x.astype('float64')"
        )
    return dtype


def _convert_objects(labels: np.ndarray, name: str) -> np.ndarray:
    """Return Python objects, which are all strings or all numbers, as an array of strings or of numbers."""
    if all(isinstance(v, str) for v in labels):
        return labels.astype(str)
    try:
        numbers = np.array(labels.tolist())
    except (ValueError, TypeError):
        numbers = labels
    if numbers.ndim != 1 or numbers.dtype.kind not in "buif":
        bad = next((i for i, v in enumerate(labels) if not isinstance(v, (str, int, float, np.number))), 0)
        raise DataError(
            f"{name} holds Python objects; row {bad} is {labels[bad]!r} ({type(labels[bad]).__name__}). "
            "Labels must be all numbers or all strings"
        )
    return numbers


def distinct_labels(labels: np.ndarray, first_row: int, name: str) -> np.ndarray:
    """Return the sorted distinct labels; raise a `DataError` that names the row of a non-finite label."""
    if labels.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(labels))
        if bad.size:
            raise DataError(
                f"{name}: the label of row {first_row + bad[0]} is {labels[bad[0]]}; labels must be "
                f"finite. Label or drop such rows, then try again"
            )
    return np.unique(labels)


def as_classes(distinct: np.ndarray, name: str) -> np.ndarray | None:
    """Return distinct labels as classes. Above `MAX_CLASSES`: return None for numbers, raise for strings."""
    if len(distinct) <= MAX_CLASSES:
        return distinct
    if distinct.dtype.kind == "U":
        raise too_many_strings(name)
    return None


def too_many_strings(name: str) -> DataError:
    """Return the error for more distinct string labels than `MAX_CLASSES`."""
    return DataError(
        f"{name}: there are more than {MAX_CLASSES:,} distinct labels that are strings. Strings are stored "
        "as codes of classes, and this is the maximum number of classes. Give numbers instead, or no "
        "labels: names of rows are not classes"
    )


def encode_labels(
    labels: np.ndarray, classes: np.ndarray, first_row: int, name: str, unlabelled: bool = False
) -> np.ndarray:
    """Return the index of each label in the sorted `classes`, int32; an unknown label raises a `DataError`.

    With `unlabelled`, the label -1 gets the code -1, unless -1 is one of the classes.
    """
    if labels.dtype.kind != classes.dtype.kind and "U" in (labels.dtype.kind, classes.dtype.kind):
        raise DataError(
            f"{name}: labels of type {labels.dtype} do not fit the classes, which are of type {classes.dtype}"
        )
    codes = np.searchsorted(classes, labels)
    codes[codes == len(classes)] = 0
    wrong = classes[codes] != labels
    if unlabelled and labels.dtype.kind != "U":
        none = wrong & (labels == -1)
        codes[none], wrong = -1, wrong & ~none
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        shown = ", ".join(map(str, classes[:10].tolist())) + (", …" if len(classes) > 10 else "")
        raise DataError(
            f"{name}: the label of row {first_row + i} is {labels[i].item()!r}, which is not one of the "
            f"{len(classes)} classes ({shown}); correct the label, or remove such rows"
        )
    return codes.astype(np.int32)


def check_weight(weight: WeightsLike, n_rows: int, name: str, first_row: int = 0) -> np.ndarray:
    """Check that row weights are finite and >= 0; return float64 (n_rows,). Errors count from `first_row`."""
    refuse_masked(weight, name, first_row)
    out = np.ascontiguousarray(weight, dtype=np.float64)
    if out.shape != (n_rows,):
        raise DataError(
            f"{name}: weights have shape {out.shape}, but there are {n_rows} rows: give one weight per row"
        )
    bad = np.flatnonzero(~(np.isfinite(out) & (out >= 0)))
    if bad.size:
        raise DataError(
            f"{name}: the weight of row {first_row + bad[0]} is {out[bad[0]]}; weights must be finite "
            "and >= 0"
        )
    return out


def n_features(feature_shape: tuple[int, ...]) -> int:
    """Return the number of values in one row."""
    return math.prod(feature_shape)
