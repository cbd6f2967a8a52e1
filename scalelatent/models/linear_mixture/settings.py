"""Sizes and settings of a fit, from the parameters of a model: components, directions, images, tangents."""

from __future__ import annotations

import math
from copy import copy
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from scalelatent.contract.parameters import is_list
from scalelatent.data import Dataset
from scalelatent.errors import DataError
from scalelatent.estimators.base import warn_reduced
from scalelatent.estimators.steps import MappedRows
from scalelatent.models.linear_mixture.kernels.reference import TangentSpec
from scalelatent.models.linear_mixture.model.components import LEAST_FLOOR
from scalelatent.models.linear_mixture.model.e_step import MixtureSettings
from scalelatent.models.linear_mixture.model.em import MixtureEM

if TYPE_CHECKING:
    from .estimator import LinearMixture, LinearMixtureClassifier

    AnyMixture: TypeAlias = LinearMixture | LinearMixtureClassifier

# Smallest number of spare columns of a basis, in addition to the directions of the model.
SPARE_COLUMNS = 4
# The number of columns of a basis, spare columns included, is a multiple of this number, or the number of
# features.
COLUMN_MULTIPLE = 8
# Largest number of passes of k-means.
START_PASSES = 10
# Largest number of passes with hard assignment by the reconstruction error. These passes come before soft
# assignment or another likelihood.
SETTLE_PASSES = 5

# The defaults below were chosen by test errors of classifiers and test likelihoods of densities
# (benchmarks/defaults.py). A dimension is a direction of a component.

# If the median class has fewer than CHOICE_ROWS rows, a classifier may choose at most one dimension per this
# many features.
FEATURES_PER_DIM = 16
# If the median class has fewer than CHOICE_ROWS rows, a classifier may choose at most this many dimensions.
FEWEST_DIMS = 10
# If the median class has at least this many rows, a classifier may exceed FEWEST_DIMS and one dimension per
# FEATURES_PER_DIM features, up to CLASSIFIER_DIMS and half the number of features.
CHOICE_ROWS = 60
# With CHOICE_ROWS rows or more, a classifier may choose one dimension per this many rows of the median class.
CHOICE_ROWS_PER_DIM = 20
# Largest number of dimensions that a classifier may choose if the median class has at least CHOICE_ROWS rows.
CLASSIFIER_DIMS = 20
# Largest default number of dimensions of a density. For few features, the default is half their number.
DENSITY_DIMS = 10
# Smallest number of rows per dimension of a component in a classifier; the mean counts as one dimension.
ROWS_PER_DIM = 5
# Smallest number of rows per dimension of a component in a density; the mean counts as one dimension.
DENSITY_ROWS_PER_DIM = 10
# Largest default number of components of a class, or of a density.
MAX_COMPONENTS = 20


def count_columns(n_dims: int, p: int) -> int:
    """Return the number of columns of a basis: ``n_dims`` directions of the model and spare columns."""
    return min(p, -(-(n_dims + SPARE_COLUMNS) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE)


def set_n_dims(model: AnyMixture, p: int, n_classes: int) -> AnyMixture:
    """Return the model with ``n_dims`` set, or None if cross-validation of several classes chooses it."""
    n_dims: int | None = model.n_dims
    if n_dims is None and model.warm_start and hasattr(model, "_fitted"):
        n_dims = model._fitted.components.n_dims
    elif n_dims is None and n_classes < 2:
        n_dims = min(p // 2, DENSITY_DIMS)
        if n_dims < DENSITY_DIMS:
            warn_reduced("n_dims", n_dims, DENSITY_DIMS, f"the rows have {p} features")
    return copy(model).set_params(n_dims=n_dims)


def set_likelihood(model: AnyMixture, train: Dataset, n_classes: int) -> AnyMixture:
    """Return the model with ``likelihood`` set, or None if cross-validation of dense rows chooses it."""
    likelihood: str | None = model.likelihood
    if likelihood is None and model.warm_start and hasattr(model, "_fitted"):
        likelihood = model._fitted.likelihood
    elif likelihood is None and (n_classes < 2 or len(model.tangents) or train.is_sparse):
        likelihood = "error"
    return copy(model).set_params(likelihood=likelihood)


def count_possible_dims(model: AnyMixture, counts: np.ndarray, p: int) -> int:
    """Return the largest n_dims that a classifier may choose for ``counts`` rows of p features per class."""
    rows = int(np.median(counts))
    most = min(p // FEATURES_PER_DIM, FEWEST_DIMS)
    if rows >= CHOICE_ROWS:
        most = max(most, min(p // 2, rows // CHOICE_ROWS_PER_DIM, CLASSIFIER_DIMS))
    if model.n_components is not None and (sizes := count_components(model, len(counts))).max() > 1:
        most = min(most, int(np.median(counts // (ROWS_PER_DIM * sizes))) - 1)
    return max(most, 0)


def set_n_components(model: AnyMixture, counts: np.ndarray, labelled: bool, warn: bool = True) -> AnyMixture:
    """Return the model with ``n_components`` set; if it was None, from ``counts``, the rows per class.

    If ``n_dims`` is None, the number of components is the largest that the rows allow for 0 dimensions.
    """
    if model.n_components is not None:
        return model
    if model.warm_start and hasattr(model, "_fitted"):
        sizes = np.bincount(model._fitted.classes, minlength=len(counts))
    else:
        sizes = counts // (
            (ROWS_PER_DIM if labelled else DENSITY_ROWS_PER_DIM) * (1 + int(model.n_dims or 0))
        )
        sizes = np.clip(sizes, 1, MAX_COMPONENTS)
        if warn and model.n_dims is not None and (fewest := int(sizes.min())) < MAX_COMPONENTS:
            why = f"the training rows have only {counts.min()} rows{' in a class' * labelled}"
            warn_reduced("n_components", fewest, MAX_COMPONENTS, why)
    return copy(model).set_params(n_components=sizes.tolist() if labelled else int(sizes[0]))


def count_components(model: AnyMixture, n_classes: int) -> np.ndarray:
    """Return the number of components of each class; one number if ``n_classes`` is 0 (no labels)."""
    given: Any = model.n_components
    if not is_list(given):
        return np.full(max(n_classes, 1), int(given))
    if len(given) != n_classes:
        raise ValueError(
            f"n_components={list(given)!r} has {len(given)} numbers, and there are {n_classes} classes: give "
            "one number, or one for each class"
        )
    return np.array([int(k) for k in given])


def find_image_shape(model: AnyMixture, train: Dataset | MappedRows) -> tuple[int, int] | None:
    """Return height and width of the images in the rows, or None if the model needs no images.

    Raises
    ------
    DataError
        The model needs images, and the rows are not images.
    """
    if not len(model.tangents) and not model.smoothing:
        return None
    what = "tangents" if len(model.tangents) else "smoothing"
    dataset = train.dataset if isinstance(train, MappedRows) else train
    where, p = f"rows of {dataset.url}" if dataset.url else "the rows", dataset.n_features
    if dataset.is_sparse:
        raise DataError(
            f"{what} needs images, and {where} are CSR rows: give dense rows, or leave {what} out"
        )
    if model.image_shape is not None:
        height, width = (int(n) for n in model.image_shape)
        if height * width != p:
            raise DataError(
                f"image_shape=({height}, {width}) has {height * width} pixels, and {where} have {p} "
                "features: give height and width of the images"
            )
        return height, width
    shape = dataset.feature_shape
    if len(shape) == 2:
        return int(shape[0]), int(shape[1])
    if len(shape) > 2:
        raise DataError(
            f"{what} needs grey images, and {where} have the shape {shape}: convert them to grey, or leave "
            f"{what} out"
        )
    side = math.isqrt(p)
    hint = f"image_shape=({side}, {side})" if side * side == p else "image_shape=(height, width)"
    raise DataError(f"{what} needs images, and {where} have {p} features without a shape: give {hint}")


def make_tangent_spec(model: AnyMixture, shape: tuple[int, int] | None) -> TangentSpec | None:
    """Return the tangents of images of this shape, or None if the model uses none."""
    if shape is None or not len(model.tangents):
        return None
    return TangentSpec(tuple(model.tangents), shape, float(model.tangent_smoothing))


def check_n_dims(model: AnyMixture, n_features: int) -> None:
    """Raise a ValueError if the components have as many directions as the rows have features."""
    if model.n_dims is not None and model.n_dims >= max(n_features, 1):
        raise ValueError(
            f"n_dims={model.n_dims}: rows have {n_features} feature(s); give at most {n_features - 1}"
        )


def make_settings(
    model: AnyMixture, sizes: np.ndarray, n_classes: int, p: int, variance: float, spec: TangentSpec | None
) -> MixtureSettings:
    """Return the constants of a fit.

    ``sizes`` are the numbers of components of each class, and ``variance`` is the mean variance of a feature.
    """
    finish_weight = float(model.recognition_tangent_weight)
    tangent_weight = float(model.tangent_weight)
    return MixtureSettings(
        n_features=p,
        classes=np.repeat(np.arange(len(sizes)), sizes),
        n_classes=n_classes,
        likelihood=model.likelihood,
        assignment=model.assignment,
        temperature=float(model.temperature or 0.0),
        floor=max(float(model.noise_floor) * variance, LEAST_FLOOR),
        tangent_spec=spec if tangent_weight or finish_weight else None,
        tangent_weight=tangent_weight,
        finish_weight=finish_weight,
    )


def make_learner(model: AnyMixture, settings: MixtureSettings) -> MixtureEM:
    """Return the learner of EM over passes with the parameters of the model."""
    return MixtureEM(
        settings,
        int(model.n_dims),
        count_columns(int(model.n_dims), settings.n_features),
        start_passes=START_PASSES,
        settle_passes=SETTLE_PASSES,
        max_iter=int(model.max_iter),
        tol=float(model.tol or 0.0),
    )
