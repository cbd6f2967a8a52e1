"""The fit of a mixture of linear models as steps of the engine, and the forecast of its time and memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from scalelatent.contract.idle_threads import run_parts
from scalelatent.contract.learners import Block
from scalelatent.contract.parameters import is_list
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.order import RowOrder
from scalelatent.engine.passes import make_stage
from scalelatent.engine.plan import Forecast
from scalelatent.engine.rowsets import ChosenRows, SomeOfSet, StoredSets
from scalelatent.errors import DataError
from scalelatent.estimators.base import warn_reduced
from scalelatent.estimators.inputs import warn_of_outlier
from scalelatent.estimators.steps import (
    Begin,
    Collect,
    Derive,
    Gather,
    Learn,
    LearnOnline,
    Map,
    Remember,
    Rows,
    Step,
    Steps,
)
from scalelatent.kernels.streams import stream
from scalelatent.models.linear_mixture.kernels.reference import TangentSpec, smoothing_taps
from scalelatent.models.linear_mixture.model.choose_dims import count_wrong
from scalelatent.models.linear_mixture.model.components import (
    DENSITY_LIKELIHOODS,
    Components,
    count_missing_directions,
    remove_missing_directions,
)
from scalelatent.models.linear_mixture.model.e_step import (
    FINISH,
    MAIN,
    MixtureSettings,
    MixtureState,
    initial_state,
)
from scalelatent.models.linear_mixture.model.em import FINISHING_PASSES, MixtureEM
from scalelatent.models.linear_mixture.model.leave_one_out import LeaveOneOut
from scalelatent.models.linear_mixture.model.recognition import (
    TEMPERATURE_ROWS,
    TEMPERATURES,
    TemperaturePass,
)
from scalelatent.models.linear_mixture.model.start import (
    LEAST_ROWS,
    SAMPLE_ROWS,
    seed_centres,
    start_components,
)
from scalelatent.models.linear_mixture.model.stepwise import (
    StepwiseMixture,
    StepwiseState,
    initial_stepwise_state,
)
from scalelatent.reductions.moments import OUTLIER_SHARE, Project
from scalelatent.reductions.temperature import choose_temperature

from .output import FittedMixture, MixtureRowMap

if TYPE_CHECKING:
    from .estimator import LinearMixture, LinearMixtureClassifier

    AnyMixture: TypeAlias = LinearMixture | LinearMixtureClassifier

_log = logging.getLogger("scalelatent")

# Class codes are read for this many rows at a time.
COUNT_ROWS = 2**20
# A basis has at least this many spare columns in addition to the directions of the model, and a multiple of
# MULTIPLE columns in total.
SPARE, MULTIPLE = 4, 8
# Lower bound of the noise variance, for rows that do not vary.
LEAST_FLOOR = 1e-12
# Maximum passes of k-means, and of the hard assignment by reconstruction error that precedes a likelihood or
# a soft assignment.
START_PASSES, SETTLE_PASSES = 10, 5
# Operations per second of the M-step, for the forecast.
MSTEP_RATE = 2e10
# Stepwise EM starts with this many passes over a sample. With tangents it ends with this many passes over all
# rows.
SAMPLE_PASSES, TANGENT_PASSES = 5, 3
STEPWISE_PARAMETERS = ("n_epochs", "batch_rows")
# A step has at most this many rows, or this many per component if that is more. Chains of a step are computed
# independently of each other; their number is part of the result.
BATCH_ROWS, ROWS_PER_COMPONENT, N_CHAINS = 1024, 20, 4
ALL_ROWS = "stepwise EM needs an order of all rows: set algorithm='em', or remove the bad rows before the fit"
# Below this mean variance, squares of features are near the smallest float32, 1e-38.
LEAST_VARIANCE = 1e-30
REMEDY = "lower n_components or n_dims"
# Defaults, chosen by test errors of classifiers and test likelihoods of densities (benchmarks/defaults.py).
# A classifier chooses at most one dimension per 16 features and at most 10. If classes have 60 rows or more,
# it may choose one per 20 rows, but at most half the features and 20. A density has one per 2 features, at
# most 10. A component has at least 5 rows per dimension in a classifier, 10 in a density; its mean counts as
# a dimension.
CHOICE_ROWS, CHOICE_ROWS_PER_DIM, FEATURES_PER_DIM, FEWEST_DIMS = 60, 20, 16, 10
ROWS_PER_DIM, DENSITY_ROWS_PER_DIM, CLASSIFIER_DIMS, DENSITY_DIMS, MAX_COMPONENTS = 5, 10, 20, 10, 20


# -- sizes and settings ------------------------------------------------------------------------------------


def count_directions(n_dims: float, max_dims: int, p: int) -> int:
    """Return the number of columns of a basis: the directions of the model and some spare ones."""
    needed = max_dims if 0 < n_dims < 1 else int(n_dims)
    return min(p, -(-(needed + SPARE) // MULTIPLE) * MULTIPLE)


def set_n_dims(model: AnyMixture, p: int, n_classes: int) -> AnyMixture:
    """Return the model with a number as ``n_dims``, or None if rows of several classes must choose it."""
    n_dims: float | None = model.n_dims
    if n_dims is None and model.warm_start and hasattr(model, "_fitted"):
        n_dims = model._fitted.components.n_dims
    elif n_dims is None and n_classes < 2:
        n_dims = min(p // 2, DENSITY_DIMS)
        if n_dims < DENSITY_DIMS:
            warn_reduced("n_dims", n_dims, DENSITY_DIMS, f"the rows have {p} features")
    return copy(model).set_params(n_dims=n_dims)


def count_possible_dims(model: AnyMixture, counts: np.ndarray, p: int) -> int:
    """Return the most dimensions that a classifier may choose for ``counts`` rows of p features per class."""
    rows = int(np.median(counts))
    most = min(p // FEATURES_PER_DIM, FEWEST_DIMS)
    if rows >= CHOICE_ROWS:
        most = max(most, min(p // 2, rows // CHOICE_ROWS_PER_DIM, CLASSIFIER_DIMS))
    if model.n_components is not None and (sizes := count_components(model, len(counts))).max() > 1:
        most = min(most, int(np.median(counts // (ROWS_PER_DIM * sizes))) - 1)
    return max(most, 0)


def set_n_components(model: AnyMixture, counts: np.ndarray, labelled: bool) -> AnyMixture:
    """Return the model with numbers as ``n_components``: the default follows the rows ``counts`` per class.

    If ``n_dims`` is None, the components are as many as the rows allow for 0 dimensions.
    """
    if model.n_components is not None:
        return model
    if model.warm_start and hasattr(model, "_fitted"):
        sizes = np.bincount(model._fitted.classes, minlength=len(counts))
    else:
        dims = model.max_dims if 0 < (model.n_dims or 0) < 1 else int(model.n_dims or 0)
        sizes = counts // ((ROWS_PER_DIM if labelled else DENSITY_ROWS_PER_DIM) * (1 + dims))
        sizes = np.clip(sizes, 1, MAX_COMPONENTS)
        if model.n_dims is not None and (fewest := int(sizes.min())) < MAX_COMPONENTS:
            why = f"the training rows have only {counts.min()} rows{' in a class' * labelled}"
            warn_reduced("n_components", fewest, MAX_COMPONENTS, why)
    return copy(model).set_params(n_components=sizes.tolist() if labelled else int(sizes[0]))


def choose_n_dims(sets: StoredSets | SomeOfSet, codes: np.ndarray, most: int, seed: int) -> int:
    """Return the number of directions, at most ``most``, with the fewest errors in the sample."""
    if not most:
        return 0
    x, codes = read_sample(sets, codes)
    is_finite = np.isfinite(x).all(axis=1)  # the first pass names the others in its error
    return int(count_wrong(x[is_finite], codes[is_finite], most, seed).argmin())


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


def find_image_shape(model: AnyMixture, train: Dataset | Rows) -> tuple[int, int] | None:
    """Return height and width of the images in the rows, or None if the model needs no images.

    Raises
    ------
    DataError
        The model needs images, and the rows are not images.
    """
    if not len(model.tangents) and not model.smoothing:
        return None
    what = "tangents" if len(model.tangents) else "smoothing"
    dataset = train.dataset if isinstance(train, Rows) else train
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
    model: AnyMixture, sizes: np.ndarray, n_classes: int, p: int, floor: float, spec: TangentSpec | None
) -> MixtureSettings:
    """Return the constants of a fit; ``sizes`` are the components of each class."""
    finish_weight = float(model.recognition_tangent_weight)
    tangent_weight = float(model.tangent_weight)
    return MixtureSettings(
        n_features=p,
        classes=np.repeat(np.arange(len(sizes)), sizes),
        n_classes=n_classes,
        likelihood=model.likelihood,
        assignment=model.assignment,
        temperature=float(model.temperature or 0.0),
        floor=floor,
        tangent_spec=spec if tangent_weight or finish_weight else None,
        tangent_weight=tangent_weight,
        finish_weight=finish_weight,
    )


def make_learner(model: AnyMixture, settings: MixtureSettings) -> MixtureEM:
    """Return the batch learner."""
    share = float(model.n_dims) if 0 < model.n_dims < 1 else 0.0
    return MixtureEM(
        settings,
        min(int(model.max_dims), settings.n_features) if share else int(model.n_dims),
        count_directions(model.n_dims, model.max_dims, settings.n_features),
        variance_share=share,
        start_passes=START_PASSES,
        settle_passes=SETTLE_PASSES,
        max_iter=int(model.max_iter),
        tol=float(model.tol or 0.0),
    )


# -- the sample and the first components -------------------------------------------------------------------


def _iterate_codes(rows: Rows, classes: np.ndarray | None) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, class of each row) in pieces; rows of weight 0 and masked rows have the class -1."""
    dataset, mask = rows.dataset, rows.mask
    for first in range(0, len(dataset), COUNT_ROWS):
        stop = min(first + COUNT_ROWS, len(dataset))
        if classes is None:
            codes = np.zeros(stop - first, dtype=np.int32)
        else:
            codes = np.array(dataset.read_codes(first, stop, classes))
        if (weight := dataset.read_weight(first, stop)) is not None:
            codes[weight <= 0] = -1
        if mask is not None:
            number = np.arange(first, stop)
            inside = (number >= mask.start) & (number < mask.stop)
            codes[inside != mask.inside] = -1
        yield first, codes


def count_class_rows(rows: Rows, classes: np.ndarray | None) -> np.ndarray:
    """Return the number of rows of each class; rows of weight 0 do not count."""
    n = 1 if classes is None else len(classes)
    parts = (np.bincount(codes[codes >= 0], minlength=n) for _, codes in _iterate_codes(rows, classes))
    return sum(parts, np.zeros(n, int))


def check_class_counts(rows: Rows, counts: np.ndarray, sizes: np.ndarray, classes: np.ndarray | None) -> None:
    """Raise a DataError that names a class with fewer rows (``counts``) than components (``sizes``)."""
    where = rows.url or "the training rows"
    for i, (n, k) in enumerate(zip(counts, sizes, strict=True)):
        if n >= k:
            continue
        if classes is None:
            raise DataError(f"{where}: n_components={k} needs at least {k} rows, and there are {n}")
        raise DataError(
            f"{where}: class {classes[i]} has {n} rows, fewer than its {k} components: lower n_components, "
            "give one number for each class, or add rows"
        )


def choose_sample(
    rows: Rows, classes: np.ndarray | None, counts: np.ndarray, sizes: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Choose rows of each class at random; return their indices, ascending, and their classes."""
    chosen = []
    for c, (n, k) in enumerate(zip(counts, sizes, strict=True)):
        size = min(int(n), max(SAMPLE_ROWS * int(k), LEAST_ROWS // len(counts)))
        chosen.append(np.sort(stream(seed, "linear-mixture-sample", c).choice(int(n), size, replace=False)))
    seen, numbers, codes_of = np.zeros(len(counts), int), [], []
    for first, codes in _iterate_codes(rows, classes):
        for c in range(len(counts)):
            own = np.flatnonzero(codes == c)
            a, b = np.searchsorted(chosen[c], [seen[c], seen[c] + len(own)])
            numbers.append(first + own[chosen[c][a:b] - seen[c]])
            codes_of.append(np.full(b - a, c))
            seen[c] += len(own)
    number, code = np.concatenate(numbers), np.concatenate(codes_of)
    order = np.argsort(number, kind="stable")
    return number[order], code[order]


def read_sample(sets: StoredSets | SomeOfSet, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the sample and their classes, without rows of bad shards."""
    x = np.asarray(sets.read(0))
    is_there = np.ones(len(x), dtype=bool)
    is_there[list(sets.missing)] = False
    return (x, codes) if is_there.all() else (x[is_there], codes[is_there])


def find_outlier(sets: StoredSets | SomeOfSet) -> int | None:
    """Return the position in the sample of a row that outweighs all others, or None."""
    x = np.asarray(sets.read(0), dtype=np.float64)
    squares = ((x - x.mean(axis=0)) ** 2).sum(axis=1)
    largest = int(squares.argmax())
    return largest if squares[largest] > OUTLIER_SHARE * squares.sum() > 0 else None


def initialise(
    sets: StoredSets | SomeOfSet, codes: np.ndarray, sizes: np.ndarray, width: int, seed: int
) -> tuple[Components, float]:
    """Return the first components, and the mean variance of a feature in the sample."""
    x, codes = read_sample(sets, codes)
    variance = float(x.var(axis=0, dtype=np.float64).mean())

    def seed_class(c: int) -> np.ndarray:
        return seed_centres(x[codes == c], int(sizes[c]), stream(seed, "linear-mixture-start", c))

    centres = run_parts(seed_class, range(len(sizes)))
    return start_components(np.concatenate(centres), width, seed), variance


# -- the steps ---------------------------------------------------------------------------------------------


def fit_steps(given: AnyMixture, rows: Mapping[str, Rows], classes: np.ndarray | None) -> Steps:
    """Yield the steps of a whole fit, and set the learned attributes of ``given``.

    ``classes`` is None if the model has no labels.
    """
    given._check_params()
    train = rows["train"]
    n_classes = 0 if classes is None else len(classes)
    counts = yield Derive(count_class_rows, (train, classes))
    where, p, labelled = train.url or "the training rows", train.n_features, classes is not None
    model = set_n_dims(given, p, n_classes)
    sizes = count_components(set_n_components(model, counts, labelled), n_classes)
    check_class_counts(train, counts, sizes, classes)
    if "validation" in rows:  # raises an error for labels that are no class of the training rows
        yield Derive(count_class_rows, (rows["validation"], classes))
    shape = find_image_shape(model, train)
    check_n_dims(model, p)
    last = read_last_fit(model, sizes, classes, p)
    model.seed_, rows = yield Begin(
        {"max_iter": count_most_passes(model)},
        keeps_records=True,
        all_rows="" if model.algorithm == "em" else ALL_ROWS,
    )
    spec = make_tangent_spec(model, shape)
    numbers, codes = yield Derive(choose_sample, (rows["train"], classes, counts, sizes, model.seed_))
    remembered = yield Remember("start", last)
    matrix, rows = yield from smooth_steps(model, rows, shape)
    about = {"rows": len(numbers)}
    sets = yield Gather("sample", ChosenRows(numbers, p), rows["train"], about, kept=False)
    if model.n_dims is None:
        most = count_possible_dims(model, counts, p)
        model.n_dims = yield Derive(choose_n_dims, (sets, codes, most, model.seed_))
    model = set_n_components(model, counts, labelled)
    sizes = count_components(model, n_classes)
    width = count_directions(model.n_dims, model.max_dims, p)
    first, variance = yield Derive(initialise, (sets, codes, sizes, width, model.seed_))
    outlier = yield Derive(find_outlier, (sets,))
    warn_of_outlier(train.url, None if outlier is None else int(numbers[outlier]), len(numbers))
    if 0 < variance < LEAST_VARIANCE:
        raise DataError(
            f"{where}: features have a mean variance of {variance:g}, and their products vanish in float32: "
            f"multiply the rows by about {variance**-0.5:.0e}"
        )
    floor = max(float(model.noise_floor) * variance, LEAST_FLOOR)
    settings = make_settings(model, sizes, n_classes, p, floor, spec)
    em = make_learner(model, settings)
    if remembered:
        arrays = {name: array for name, array in remembered.items() if name != "n_dims"}
        state = initial_state(settings, Components(**arrays, n_dims=int(remembered["n_dims"])), MAIN)
    else:
        state = initial_state(settings, first)

    def predictor(state: MixtureState) -> MixtureRowMap:
        return MixtureRowMap(make_fitted(settings, state, matrix, None), "probabilities")

    if model.algorithm == "em":
        result = yield Learn("em", em, state, {"train": rows["train"]}, classes, predictor)
        end, history = result.state, result.history
    else:
        if not remembered:  # steps need components that have converged to some degree
            state = yield Derive(_fit_sample, (em, state, sets, codes, counts, model.device))
        end, history = yield from stepwise_steps(model, em, state, rows, classes, counts, predictor)
    fitted = make_fitted(settings, end, None, spec)
    if n_classes > 1:
        recognised = apply_recognition(model, fitted)
        temperature = yield from temperature_steps(recognised, rows, classes, end)
        fitted = replace(fitted, temperature=temperature)
    warn_missing_directions(fitted)
    given.seed_ = model.seed_
    given._keep(replace(fitted, matrix=matrix), end.iteration, history, classes)


def count_most_passes(model: AnyMixture) -> int:
    """Return the most passes of all phases together."""
    if model.algorithm == "stepwise":
        return int(model.n_epochs) + (TANGENT_PASSES if len(model.tangents) else 0)
    is_density = model.likelihood in DENSITY_LIKELIHOODS
    settling = SETTLE_PASSES if is_density or model.assignment == "soft" else 0
    return START_PASSES + settling + int(model.max_iter) + (0 if is_density else FINISHING_PASSES)


def read_last_fit(
    model: AnyMixture, sizes: np.ndarray, classes: np.ndarray | None, p: int
) -> dict[str, np.ndarray]:
    """Return the components from which ``warm_start`` continues; empty if there are none.

    Raises
    ------
    ValueError
        The last fit had other classes or sizes.
    """
    if not model.warm_start or not hasattr(model, "_fitted"):
        return {}
    fitted, last = model._fitted, model._fitted.components
    known = getattr(model, "classes_", None)
    is_same = known is None if classes is None else known is not None and np.array_equal(known, classes)
    component_classes = np.repeat(np.arange(len(sizes)), sizes)
    is_same = is_same and np.array_equal(fitted.classes, component_classes)
    width = count_directions(model.n_dims, model.max_dims, p)
    dims = last.n_dims if 0 < model.n_dims < 1 else int(model.n_dims)
    if (
        not is_same
        or fitted.likelihood != model.likelihood
        or last.bases.shape[1:] != (p, width)
        or last.n_dims != dims
        or (fitted.matrix is not None) != bool(model.smoothing)
    ):
        raise ValueError(
            f"warm_start=True: the last fit has {len(fitted.classes)} components of {last.n_dims} dimensions "
            f"by {fitted.likelihood!r} on {last.means.shape[1]} features, and this fit "
            f"{len(component_classes)} of {dims} by {model.likelihood!r} on {p}, or the classes or smoothing "
            "differ: set warm_start=False"
        )
    return {**last.arrays(), "n_dims": np.array(last.n_dims)}


def smooth_steps(
    model: AnyMixture, rows: Mapping[str, Rows], shape: tuple[int, int] | None
) -> Generator[Step, Any, tuple[np.ndarray | None, Mapping[str, Rows]]]:
    """Return the matrix that smooths the rows, or None, and the smoothed rows."""
    if not model.smoothing or shape is None:
        return None, rows
    # A derived value is shared by the candidates of a search, and so are the rows that it makes.
    matrix = yield Derive(make_smoothing_matrix, (shape, float(model.smoothing)))
    smoothed = {}
    for name, part in rows.items():
        smoothed[name] = yield Map(f"project-{name}", Project(matrix), part)
    return matrix, smoothed


def make_smoothing_matrix(shape: tuple[int, int], smoothing: float) -> np.ndarray:
    """Return the matrix (p, p) by which rows are multiplied to smooth images; ``smoothing`` is in pixels."""
    taps = smoothing_taps(smoothing)
    bands = [sum(tap * np.eye(size, k=k - len(taps) // 2) for k, tap in enumerate(taps)) for size in shape]
    return np.kron(*bands)


def make_fitted(
    settings: MixtureSettings, state: MixtureState, matrix: np.ndarray | None, spec: TangentSpec | None
) -> FittedMixture:
    """Return what predictions need, without the components that were dropped."""
    is_alive = state.components.weights > 0
    components = remove_missing_directions(state.components, state.counts, settings.likelihood)
    per_class = np.add.reduceat(state.counts, settings.starts[:-1])
    likelihood = settings.likelihood if state.phase >= MAIN else "error"
    scale = max(state.objective if np.isfinite(state.objective) else 1.0, LEAST_FLOOR)
    return FittedMixture(
        components.select(is_alive),
        settings.classes[is_alive],
        per_class / max(float(per_class.sum()), LEAST_FLOOR),
        likelihood,
        1.0 if likelihood in DENSITY_LIKELIHOODS else scale,
        matrix,
        spec,
        np.maximum(state.counts[is_alive], LEAST_FLOOR),
        settings.floor,
    )


def apply_recognition(model: AnyMixture, fitted: FittedMixture) -> FittedMixture:
    """Return the fitted mixture with tangents only if ``recognition`` is "tangent-distance".

    Raises
    ------
    ValueError
        The fit had no tangents.
    """
    by_tangents = model.recognition == "tangent-distance"
    if by_tangents and fitted.tangent_spec is None:
        raise ValueError(
            "recognition='tangent-distance' needs tangents, and this model was fitted without: set tangents "
            "and fit again"
        )
    return replace(fitted, tangent_spec=fitted.tangent_spec if by_tangents else None)


def warn_missing_directions(fitted: FittedMixture) -> None:
    """Log a warning if rows of some components do not span all directions."""
    h = fitted.components.n_dims
    short = np.flatnonzero(count_missing_directions(fitted.counts, h))
    if len(short):
        _log.warning(
            "%d of %d components have too few rows for n_dims=%d (the smallest has %.0f): directions that "
            "their rows do not span were removed; lower n_components or n_dims",
            len(short),
            len(fitted.counts),
            h,
            float(fitted.counts[short].min()),
        )


def temperature_steps(
    fitted: FittedMixture, rows: Mapping[str, Rows], classes: np.ndarray | None, state: MixtureState
) -> Generator[Step, Any, float]:
    """Return the temperature of class probabilities with the least log-loss.

    The loss is that of validation rows; without them, that of training rows as if left out of the fit.
    """
    noise = fitted.components.noise.reshape(len(fitted.classes), -1).mean(axis=1)
    p, h = fitted.components.means.shape[1], fitted.components.n_dims
    is_density = fitted.likelihood in DENSITY_LIKELIHOODS
    scale = float(p) if is_density else max(float(noise.mean()) * (p - h), LEAST_FLOOR)
    temperatures = scale * TEMPERATURES
    leave_one_out, every, part = None, 1, "validation"
    if part not in rows:
        part = "train"
        leave_one_out = LeaveOneOut(fitted.components, fitted.counts, fitted.likelihood)
        every = max(1, len(rows[part].dataset) // TEMPERATURE_ROWS)
    reduction = TemperaturePass(fitted.recogniser(), temperatures, leave_one_out, every)
    stats: Stats = yield Collect(f"temperature-{state.iteration}", reduction, rows[part], classes)
    return choose_temperature(temperatures, np.array(stats["loss"]))


# -- stepwise EM -------------------------------------------------------------------------------------------


def stepwise_steps(
    model: AnyMixture,
    em: MixtureEM,
    state: MixtureState,
    rows: Mapping[str, Rows],
    classes: np.ndarray | None,
    counts: np.ndarray,
    predictor: Callable[[MixtureState], MixtureRowMap],
) -> Generator[Step, Any, tuple[MixtureState, list[dict[str, Any]]]]:
    """Run stepwise EM, and with tangents the last passes over all rows; return the state and the history."""
    settings, train = em.settings, {"train": rows["train"]}
    learner = make_stepwise_learner(model, settings, em.width)
    # After a warm start there are no counts: weights give each class the same mass.
    mass = state.counts if state.counts.any() else state.components.weights
    start = initial_stepwise_state(learner.settings, state.components, mass)
    n, seed = len(rows["train"].dataset), model.seed_

    def order(options: Mapping[str, Any]) -> RowOrder:
        return choose_row_order(model, settings.n_components, n, options, seed)

    result = yield LearnOnline("stepwise", learner, start, train, classes, order, int(model.n_epochs))
    end, history = _end_stepwise(result.state, float(counts.sum())), result.history
    if settings.tangent_spec is not None:
        last = replace(em, finish_passes=TANGENT_PASSES)
        start_last = replace(end, phase=FINISH, assigned_by=end.components)
        result = yield Learn("tangents", last, start_last, train, classes, predictor)
        end, history = result.state, [*history, *result.history]
    return end, history


def _fit_sample(
    em: MixtureEM,
    state: MixtureState,
    sets: StoredSets | SomeOfSet,
    codes: np.ndarray,
    counts: np.ndarray,
    device: str,
) -> MixtureState:
    """Return the state after passes over the sample, whose rows have the total weight of their class."""
    x, codes = read_sample(sets, codes)
    settings = replace(em.settings, tangent_spec=None)
    em = replace(em, settings=settings, max_iter=SAMPLE_PASSES, finish_passes=0)
    work, backend = em.reductions()["train"], make_backend("reference" if device == "reference" else "cpu")
    share = counts / np.maximum(np.bincount(codes, minlength=len(counts)), 1)
    block = Block(x, codes.astype(np.int32), share[codes], 0)
    while not em.is_done(state):
        stats = Stats.zeros(work.layout())
        work.accumulate(work.prepare(state, backend), block, stats)
        state = em.update(state, {"train": stats})
    return state


def make_stepwise_learner(model: AnyMixture, settings: MixtureSettings, width: int) -> StepwiseMixture:
    """Return the online learner, which uses no tangents."""
    return StepwiseMixture(replace(settings, tangent_spec=None), width, n_epochs=int(model.n_epochs))


def choose_row_order(
    model: AnyMixture, k: int, n_rows: int, options: Mapping[str, Any], seed: int
) -> RowOrder:
    """Return the order in which k components see the rows; a step has a multiple of `N_CHAINS` rows."""
    batch = model.batch_rows
    if batch is None:
        batch = max(min(n_rows // 8, max(BATCH_ROWS, ROWS_PER_COMPONENT * k)), 1)
    return RowOrder.choose(n_rows, seed, -(-int(batch) // N_CHAINS) * N_CHAINS, N_CHAINS, options)


def _end_stepwise(state: StepwiseState, rows: float) -> MixtureState:
    """Return the state of the last step, with the running shares of all rows as counts."""
    counts = state.mass * (rows / max(float(state.mass.sum()), LEAST_FLOOR))
    return replace(state.mixture, counts=counts, objective=state.objective, iteration=state.epoch)


# -- the forecast ------------------------------------------------------------------------------------------


def plan_fit(model: AnyMixture, forecast: Forecast, classes: np.ndarray | None) -> dict[str, Any]:
    """Return the forecast of time and memory of a fit of these rows."""
    train, n = forecast.train, len(forecast.train)
    n_classes, p = 0 if classes is None else len(classes), train.n_features
    even = np.full(max(n_classes, 1), n // max(n_classes, 1))
    model = set_n_dims(model, p, n_classes)
    if model.n_dims is None:  # the most that the fit may choose
        model.n_dims = count_possible_dims(model, even, p)
    model = set_n_components(model, even, classes is not None)
    sizes, shape = count_components(model, n_classes), find_image_shape(model, train)
    k = int(sizes.sum())
    check_n_dims(model, p)
    if k > n:
        raise DataError(
            f"{train.url or 'X'}: {n:,} rows are fewer than the {k:,} components that n_components asks for: "
            "lower n_components, or give more rows"
        )
    settings = make_settings(model, sizes, n_classes, p, 1.0, make_tangent_spec(model, shape))
    em = make_learner(model, settings)
    forecast.codes = n_classes
    if classes is not None:
        forecast.add_label_reading()
    if model.smoothing:
        forecast.add_map("project", Project(np.broadcast_to(np.float64(0.01), (p, p))))
    state_bytes = 8 * k * (p * (em.width + 2) + em.width)
    sample = sum(max(SAMPLE_ROWS * int(c), LEAST_ROWS // len(sizes)) for c in sizes)
    sample_bytes = 4 * p * min(n, sample)
    forecast.add_seconds("sample", n * forecast.row_seconds(0.0, forecast.reading_seconds(train)))
    memory = 6 * state_bytes + 3 * sample_bytes
    mstep = k * 8.0 * p * em.width**2 / MSTEP_RATE
    if model.algorithm == "stepwise":
        learner = make_stepwise_learner(model, settings, em.width)
        order = choose_row_order(model, k, n, forecast.options, 0)
        epochs = int(model.n_epochs)
        forecast.add_steps("stepwise", learner, order, memory, 2 * state_bytes, REMEDY, n_epochs=epochs)
        stage = make_stage(f"{model._kind}_em", em, forecast.rows, "cpu")
        mstep *= order.n_steps
    else:
        stage = forecast.add_stage("em", em, memory, REMEDY)
    state = None
    if forecast.measure:  # random bases of a thousand components take as long as a pass, so only if needed
        start = start_components(np.random.default_rng(0).normal(size=(k, p)), em.width, 0)
        state = initial_state(settings, start.with_n_dims(min(em.n_dims, em.width)), MAIN)
    about = f" {settings.likelihood} {settings.assignment} {model.tangents}"
    rates = forecast.measure_rates(stage, state, about=about)
    most = count_most_passes(model)
    least = most - int(model.max_iter) - START_PASSES + 4
    if model.algorithm == "stepwise":
        passes_of_sample = START_PASSES + SETTLE_PASSES + SAMPLE_PASSES
        forecast.add_seconds("start", min(n, sample) * rates["train"] * passes_of_sample)
        least = most
    passes = {"at_least": min(most, least), "expected": most, "at_most": most}
    forecast.add_passes(model.algorithm, forecast.pass_seconds(stage, rates) + mstep, passes)
    seconds_per_row = 2.0 * p * k * (em.width + 1) / 3e10
    if n_classes > 1:
        some = forecast.validation or train
        of_a_row = forecast.row_seconds(seconds_per_row, forecast.reading_seconds(train))
        forecast.add_seconds("temperature", len(some) * of_a_row)
    block = stage.grids["train"].block_rows
    forecast.out["device_bytes"] = 4 * (k * p * (em.width + 2) + 4 * block * p)
    return forecast.finish(
        "lower max_iter or n_components",
        checkpoint=2 * state_bytes,
        model=state_bytes,
        kept=sample_bytes,
        predicting=seconds_per_row,
    )
