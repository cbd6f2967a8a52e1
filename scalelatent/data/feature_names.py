"""Names of the features of a dataset: how they are stored, and how a model compares them."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from scalelatent.errors import DataError, warn_user

from .layout import make_codecs

if TYPE_CHECKING:
    from collections.abc import Iterable

    import zarr

    from scalelatent.storage.location import Location

NAMES_ARRAY = "feature_names"
"""Name of the stored array. It is not an attribute, because every worker reads the attributes."""
_SHOWN = 5  # maximum number of names in an error message, as in scikit-learn

Model = TypeVar("Model")


def as_names(names: Iterable[object] | None, feature_shape: tuple[int, ...], name: str) -> np.ndarray | None:
    """Return names as an array of str objects (n_features,); raise a `DataError` if their number is wrong."""
    if names is None:
        return None
    found = np.array(list(map(str, names)), dtype=object)
    if feature_shape != found.shape:
        raise DataError(
            f"{name}: there are {len(found)} feature names for rows of shape {feature_shape}; give one name "
            "per feature, for rows with one axis"
        )
    return found


def frame_names(frame: Any) -> list[str] | None:
    """Return the column names of a data frame; None for other rows, or if a name is not a str."""
    names = list(getattr(frame, "columns", ()))
    return names if names and all(isinstance(name, str) for name in names) else None


def write_names(group: zarr.Group, names: np.ndarray) -> None:
    """Write the names to the group of a dataset, as the bytes of a JSON list."""
    text = np.frombuffer(json.dumps(names.tolist()).encode(), np.uint8)
    how: dict[str, Any] = {"dimension_names": ("byte",), "compressors": make_codecs("zstd", text.dtype)}
    group.create_array(NAMES_ARRAY, shape=text.shape, dtype=text.dtype, chunks=text.shape, **how)[:] = text


def read_names(location: Location) -> np.ndarray:
    """Return the names that `write_names` wrote."""
    import zarr

    try:
        array = zarr.open_array(
            location.zarr_store(read_only=True), path=NAMES_ARRAY, mode="r", zarr_format=3
        )
        return np.array(json.loads(np.asarray(array[:]).tobytes()), dtype=object)
    except Exception as error:  # zarr raises errors of several types
        raise DataError(
            f"dataset {location.url}: the names of its features, {location.name_of(NAMES_ARRAY)}, are "
            "missing or damaged; restore that folder from a copy, or import the data again"
        ) from error


def check_names(model: Any, names: np.ndarray | None) -> None:
    """Compare names with `model.feature_names_in_`; if they differ, raise or warn like scikit-learn."""
    fitted, kind = getattr(model, "feature_names_in_", None), type(model).__name__
    if fitted is None or names is None:
        if fitted is not None:
            warn_user(f"X does not have valid feature names, but {kind} was fitted with feature names")
        if names is not None:
            warn_user(f"X has feature names, but {kind} was fitted without feature names")
    else:
        check_same_names(fitted, names)


def check_same_names(fitted: np.ndarray, names: np.ndarray) -> None:
    """Raise a `DataError`, in scikit-learn's words, if `names` differ from the feature names of the fit."""
    if np.array_equal(fitted, names):
        return
    new, missing = sorted(set(names) - set(fitted)), sorted(set(fitted) - set(names))
    parts = [
        f"{which}: {', '.join(some[:_SHOWN])}{', ...' if len(some) > _SHOWN else ''}"
        for which, some in (
            ("Feature names unseen at fit time", new),
            ("Feature names seen at fit time, yet now missing", missing),
        )
        if some
    ]
    raise DataError(
        "The feature names should match those that were passed during fit. "
        f"{'. '.join(parts) or 'Feature names must be in the same order as they were in fit'}. Pass the "
        "columns of the fit, in their order"
    )


def without_names(model: Model) -> Model:
    """Return a copy of a model without `feature_names_in_`, for arrays whose names were compared before."""
    if not hasattr(model, "feature_names_in_"):
        return model
    model = copy.copy(model)
    del model.feature_names_in_
    return model
