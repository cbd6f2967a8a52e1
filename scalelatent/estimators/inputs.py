"""Validation of the rows, labels and weights that users pass."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.exceptions import DataConversionWarning
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data

from scalelatent.data import Dataset
from scalelatent.data.csr import place_of
from scalelatent.data.read.containers import is_lazy, opened
from scalelatent.data.read.sources import is_dask
from scalelatent.data.schema import check_label_values, refuse_masked
from scalelatent.errors import DataError, warn_user
from scalelatent.reductions.moments import OUTLIER_SHARE

if TYPE_CHECKING:
    import numpy.typing as npt

    from scalelatent.kernels.arrays import DenseOrCsr
    from scalelatent.typing import LabelsLike, RowsLike, SlicedArray, ValidationLike, WeightsLike

FLOAT32_MAX = np.finfo(np.float32).max
# Warn if float32 rounding exceeds ROUNDED_SHARE of a feature's standard deviation. The check reads
# ROUNDED_RUNS ranges of ROUNDED_RUN_ROWS rows each, spread over the dataset.
ROUNDED_SHARE, ROUNDED_RUNS, ROUNDED_RUN_ROWS = 0.01, 4, 64
# Warn of an outlier row only if there are at least this many rows; in fewer rows, one often dominates.
MANY_ROWS = 20
# The largest sample weight must be from 1 / LARGEST_WEIGHT to LARGEST_WEIGHT, so that sums over a billion
# rows fit into float64.
LARGEST_WEIGHT = 1e30
VALIDATION_OPTIONS: dict[str, Any] = {
    "accept_sparse": "csr",
    "accept_large_sparse": True,
    "dtype": "numeric",
    "order": "C",
    "ensure_all_finite": False,
}


def is_in_memory(x: object) -> bool:
    """Return whether scikit-learn validates ``x`` (arrays and lists); other containers are read in blocks."""
    lazy = (
        isinstance(x, (Dataset, np.memmap))
        or is_dask(x)
        or is_lazy(x)
        or type(x).__module__.split(".")[0] in ("zarr", "h5py")
    )
    return not lazy


def find_image_shape(x: npt.ArrayLike) -> tuple[int, ...] | None:
    """Return the shape (n, h, w) or (n, channels, h, w) of image rows, or None for other rows."""
    first: Any = x
    depth = 0
    while isinstance(first, (list, tuple)) and first:
        first, depth = first[0], depth + 1
    if depth + (getattr(first, "ndim", None) or 0) not in (3, 4):
        return None
    shape = np.shape(x)
    return shape if len(shape) in (3, 4) else None


def validate_rows(estimator: BaseEstimator, *arrays: Any, name: str = "X", **checks: Any) -> Any:
    """Return the arrays as scikit-learn's ``validate_data`` returns them.

    Refuse masked entries, whose mask scikit-learn would drop, and shorten its error messages to one line.
    """
    for array, letter in zip(arrays, "Xy", strict=False):
        refuse_masked(array, letter)
    check_frame(arrays[0], name)
    try:
        return validate_data(estimator, *arrays, **checks)
    except (ValueError, TypeError) as error:
        if "Found array with dim" in str(error):
            text = str(error).rstrip(".")
            raise type(error)(f"{text}. Give each row one axis: X.reshape(len(X), -1)") from None
        if "\n" not in str(error):
            raise
        odd = [a for a in arrays if "Complex" in str(error) and np.iscomplexobj(a)]
        raise type(error)(shorten_error(str(error), (odd or arrays)[0])) from None


def check_frame(frame: Any, name: str) -> None:
    """Raise DataError for a data frame without columns, with duplicate names or non-numeric columns.

    Rows that are not in a data frame are not checked.
    """
    if not (hasattr(frame, "columns") and hasattr(frame, "dtypes")):
        return
    names = list(frame.columns)
    if not names:
        raise DataError(f"{name} is a data frame of shape {frame.shape}, without columns: give at least one")
    if twice := sorted({str(n) for n in names if names.count(n) > 1}):
        raise DataError(
            f"{name} has more than one column of each of these names: {', '.join(twice[:5])}. Rename or drop "
            "them, so that each column has a name of its own"
        )
    for column, kind in zip(names, frame.dtypes, strict=True):
        code = getattr(kind, "kind", None)  # polars dtypes have no attribute ``kind``
        values = f"values of type {kind}"
        if code == "O" and str(kind) != "category":  # text, or Python objects that may be numbers
            bad = next((i for i, value in enumerate(frame[column]) if not _is_real(value)), None)
            if bad is None:
                continue
            values = f"{frame[column].iloc[bad]!r:.40} in row {bad}"
        elif code in tuple("buifc") or (code is None and (kind.is_numeric() or str(kind) == "Boolean")):
            continue
        raise DataError(
            f"{name}: column {column!r} holds {values}, but features are numbers. Drop the column, or turn "
            "it into numbers: text and categories for example by OneHotEncoder, dates by a difference to one "
            "day"
        )


def _is_real(value: object) -> bool:
    """Return whether a value converts to a number. A missing value passes; a later check names its row."""
    try:
        return value is None or float(value) is not None  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def shorten_error(text: str, array: RowsLike | LabelsLike) -> str:
    """Return an error message of scikit-learn in one line, with the shape of the array, not its values."""
    try:
        shown = np.asarray(array)
        description = f"an array of shape {shown.shape}, {shown.dtype}"
    except ValueError:
        description = f"a {type(array).__name__}"
    if text.startswith("The feature names should match"):  # the text lists one name per line
        text = text.strip().replace(":\n- ", ": ").replace("\n- ", ", ").replace(".\n", ". ")
        return text.replace("\n", ". ").rstrip(".") + ". Pass the columns of the fit, in their order"
    first, _, rest = text.partition("\n")
    advice = rest[rest.index("Reshape your data") :] if "Reshape your data" in rest else ""
    return f"{first.rstrip(':. ')}: {description}{f'. {advice}' if advice else ''}"


def add_weights(ds: Dataset, y: LabelsLike | None, sample_weight: WeightsLike | None) -> Dataset:
    """Return a given Dataset with the given weights. Refuse ``y``, because a Dataset has its own labels."""
    if y is not None:
        raise DataError(
            "y was given beside a Dataset, which brings its own labels: leave y out, or give arrays"
        )
    return ds if sample_weight is None else ds.with_weight(sample_weight)


def check_weights(sample_weight: WeightsLike, n_rows: int) -> np.ndarray:
    """Return finite, nonnegative float64 weights (n), whose largest is in the range of LARGEST_WEIGHT."""
    weights = np.asarray(sample_weight, np.float64)
    if weights.ndim == 0:
        weights = np.full(n_rows, weights)
    if weights.shape != (n_rows,):
        raise ValueError(
            f"sample_weight.shape == {weights.shape}, expected {(n_rows,)}: give one weight a row"
        )
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError("sample_weight has negative values, NaN or infinity: give numbers of at least 0")
    check_any_weight(weights)
    largest = float(weights.max())
    if not 1 / LARGEST_WEIGHT <= largest <= LARGEST_WEIGHT:
        raise ValueError(
            f"the largest sample_weight is {largest:g}, outside of {1 / LARGEST_WEIGHT:g} to "
            f"{LARGEST_WEIGHT:g}: divide sample_weight by its mean"
        )
    return weights


def check_any_weight(weight: Any) -> None:
    """Raise DataError if the weights of all rows are 0, because no row would be left to train on."""
    if weight is not None and not np.any(weight):
        raise DataError(
            "sample_weight is 0 for all rows, a total of zero: give at least one row a weight above 0"
        )


def warn_of_rounding(model: BaseEstimator, ds: Dataset) -> None:
    """Warn if rounding to float32 removes much of the spread of a feature.

    Models that convert rows to float32 before they subtract a mean call this function. It reads at most 256
    rows, and none if float32 holds all values of their dtype.
    """
    if ds.is_sparse or np.can_cast(ds.dtype, np.float32):
        return
    runs = {int(a) for a in np.linspace(0, max(0, len(ds) - ROUNDED_RUN_ROWS), ROUNDED_RUNS)}
    x = np.concatenate([ds.read_x(a, min(a + ROUNDED_RUN_ROWS, len(ds))) for a in sorted(runs)])
    with np.errstate(all="ignore"):  # the fit itself reports NaN and infinity, with row and feature
        spread = (x - x.min(axis=0)).astype(np.float64).std(axis=0)
        largest = np.abs(x.astype(np.float64)).max(axis=0)
        share = largest * (0.5 * np.finfo(np.float32).eps) / spread
        # Skip constant features: the spread of a computed constant is rounding error only.
        share[spread <= (0.0 if x.dtype.kind != "f" else 64 * np.finfo(x.dtype).eps) * largest] = 0.0
        bad = np.flatnonzero(share > ROUNDED_SHARE)
    if not len(bad):
        return
    worst = int(bad[share[bad].argmax()])
    name = f"column {model.feature_names_in_[worst]!r}" if hasattr(model, "feature_names_in_") else None
    warn_user(
        f"{name or f'feature {worst}'} has values up to {largest[worst]:g} and a standard deviation of "
        f"{spread[worst]:g}, of which rounding takes {min(share[worst], 1.0):.0%} when rows become float32 "
        f"({len(bad)} of {ds.n_features} features lose more than {ROUNDED_SHARE:.0%}). Subtract the mean of "
        "each feature and divide by its standard deviation first, for example by StandardScaler",
        DataConversionWarning,
    )


def warn_of_outlier(url: str | None, row: int | None, n_rows: int) -> None:
    """Warn if the squared length of one row is most of the sum over all rows; never for a few rows."""
    if row is not None and n_rows >= MANY_ROWS:
        warn_user(
            f"{url or 'X'}: row {row} has more than {OUTLIER_SHARE:.0%} of the squared lengths of the rows "
            "about their mean, so that the others hardly count: look at it, and leave it out or scale it"
        )


def rows_and_labels(validation: ValidationLike) -> tuple[RowsLike, LabelsLike | None]:
    """Return validation rows as a pair (X, y); y is None for a Dataset, which has its own labels."""
    if isinstance(validation, Dataset):
        return validation, None
    try:
        X, y = validation
    except (TypeError, ValueError):
        raise DataError(f"validation={type(validation).__name__}: give a Dataset or a pair (X, y)") from None
    return X, y


def check_labels(y: LabelsLike) -> None:
    """Check labels as scikit-learn does, and name the first invalid label in an array of Python objects."""
    found = np.asarray(y)
    if found.dtype.kind == "O":
        kinds = [str if isinstance(label, str) else Real for label in found.ravel()[:1]]
        for row, label in enumerate(found.ravel()):
            if not isinstance(label, kinds[0]):
                other = "" if label is None or row == 0 else f", and row 0 is {found.ravel()[0]!r:.40}"
                raise ValueError(
                    f"Unknown label type: unknown. The label of row {row} is {label!r:.40} "
                    f"({type(label).__name__}){other}; labels are all whole numbers or all strings, one a row"
                )
        if found.size and kinds[0] is Real:
            raise ValueError(
                f"Unknown label type: unknown. y holds numbers as Python objects: that of row 0 is "
                f"{found.ravel()[0]!r:.40} ({type(found.ravel()[0]).__name__}). Give an array of one type of "
                "number, for example y.astype(int)"
            )
    check_classification_targets(found)


def check_classes(ds: Dataset, who: str) -> None:
    """Raise DataError for targets, multi-labels and fractional labels; ``who`` names the classifier."""
    if ds.y_kind not in ("labels", None):
        raise DataError(
            f"{ds.url or 'y'}: there are {ds.n_targets} {ds.y_kind} columns a row, but "
            f"{who} learns from one label a row: pass y of shape (n,) (one column: "
            "y.ravel())"
        )
    classes = ds.classes
    if classes is not None and classes.dtype.kind == "f" and (broken := classes[classes % 1 != 0]).size:
        raise DataError(
            f"{ds.url or 'y'}: unknown label type: continuous. {broken[0]} is a number with a fraction, "
            f"one of {len(classes)} different ones, but {who} learns from classes: give "
            "whole numbers or strings"
        )


def to_column(values: LabelsLike | WeightsLike | None) -> SlicedArray | None:
    """Return an array (n,) of labels or weights; zarr, dask and memmap arrays are not read yet."""
    given = opened(values, "y")
    if given is None or not is_in_memory(given):
        return given
    check_label_values(given, "y")
    kind = np.asarray(given).dtype.kind
    if kind == "c":
        raise ValueError(
            f"Complex data not supported: {np.shape(given)} labels or weights are complex numbers"
        )
    column = column_or_1d(given)
    if kind == "O":
        check_labels(column)
    return column


def check_finite(x: DenseOrCsr, name: str, first: int = 0, largest: float = float(FLOAT32_MAX)) -> None:
    """Raise DataError for NaN, infinity and values beyond float32 (or ``largest``).

    The message names the first such row and feature. Row numbers start at ``first``.
    """
    if x.dtype.kind != "f":
        return
    values = x if isinstance(x, np.ndarray) else x.data
    # If any value is NaN, min() and max() return NaN, and the comparison is false.
    if not values.size or (float(values.min()) >= -largest and float(values.max()) <= largest):
        return
    bad = ~(np.abs(values) <= np.float64(largest))  # a Python float would be rounded to the dtype of x
    entry = int(np.flatnonzero(bad)[0])
    (row, feature), value = place_of(x, entry), values.reshape(-1)[entry]
    kind = "a value beyond float32, in which rows are computed on"
    if abs(value) <= FLOAT32_MAX:
        kind = f"a value beyond {largest:g}, whose products are beyond float32"
    if not np.isfinite(value):
        kind = "NaN" if np.isnan(value) else "an infinite value (inf)"
    remedy = "Scale the rows" if np.isfinite(value) else "Clean these rows, or leave them out"
    raise DataError(f"{name} contains {kind}: row {first + row}, feature {feature} is {value}. {remedy}")
