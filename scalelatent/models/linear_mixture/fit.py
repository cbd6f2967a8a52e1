"""The fit of a mixture of linear models as steps, and what it will need."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterator, Mapping
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
from scalelatent.models.linear_mixture.kernels.reference import Frame, smoothing_taps
from scalelatent.models.linear_mixture.model.em import (
    FINISH,
    FINISHING_PASSES,
    MAIN,
    Mixture,
    MixtureEM,
    MixtureState,
    initial_state,
)
from scalelatent.models.linear_mixture.model.held_out import FittedRows
from scalelatent.models.linear_mixture.model.online import StepwiseMixture, StepwiseState, stepwise_state
from scalelatent.models.linear_mixture.model.pancakes import Pancakes, cut_directions, directions_cut
from scalelatent.models.linear_mixture.model.recognise import (
    HELD_OUT_ROWS,
    TEMPERATURES,
    TemperaturePass,
)
from scalelatent.models.linear_mixture.model.start import (
    LEAST_ROWS,
    SAMPLE_ROWS,
    seed_centres,
    start_pancakes,
)
from scalelatent.reductions.moments import OUTLIER_SHARE, Project
from scalelatent.reductions.temperature import choose_temperature

from .output import DENSE, Fitted, MixtureRows

if TYPE_CHECKING:
    from .estimator import LinearMixture, LinearMixtureClassifier

    AnyMixture: TypeAlias = LinearMixture | LinearMixtureClassifier

_log = logging.getLogger("scalelatent")

COUNT_ROWS = 2**20
# Directions beside those of the model, at least; images have a multiple of so many.
SPARE, MULTIPLE = 4, 8
# Smallest noise, whatever the rows.
LEAST_FLOOR = 1e-12
START_PASSES, SETTLE_PASSES = 10, 5
# Numbers of the M-step a second.
MSTEP_RATE = 2e10
# Stepwise EM: passes over the sample before it, and over all rows after it where there are tangents.
SAMPLE_PASSES, TANGENT_PASSES = 5, 3
ONLINE_PARAMETERS = ("n_epochs", "batch_rows")
# Rows of a step, at most, or so many for a sub-class; parts of a step that are computed independently.
BATCH_ROWS, ROWS_A_COMPONENT, N_CHAINS = 1024, 20, 4
ALL_ROWS = "stepwise EM learns in an order of all rows: set algorithm='em', or leave out the bad ones first"
# Squares of smaller features are near the end of float32, 1e-38.
LEAST_VARIANCE = 1e-30
FEWER = "lower n_components or n_dims"
# Defaults, chosen by test errors of classifiers and test likelihoods of densities (benchmarks/defaults.py).
# A classifier has one dimension per 16 features, a density one per 2; both have at most 10. Each component
# has at least 5 rows per dimension in a classifier, 10 in a density; its mean counts as a dimension.
FEATURES_A_DIM, ROWS_A_DIM, DENSITY_ROWS_A_DIM, MOST_DIMS, MOST_COMPONENTS = 16, 5, 10, 10, 20


# -- what a fit is told -----------------------------------------------------------------------------------


def width_of(n_dims: float, max_dims: int, p: int) -> int:
    """Directions that images have: those of the model and some spare, a multiple of 8."""
    wanted = max_dims if 0 < n_dims < 1 else int(n_dims)
    return min(p, -(-(wanted + SPARE) // MULTIPLE) * MULTIPLE)


def settled(model: AnyMixture, counts: np.ndarray, p: int, labelled: bool, where: str) -> AnyMixture:
    """Return the model with numbers in the place of None: ``n_dims`` by features, ``n_components`` by rows.

    ``counts`` are the rows of each class, and ``p`` is the number of features of a row after projection.
    """
    if model.n_dims is not None and model.n_components is not None:
        return model
    chosen: dict[str, Any] = {}
    last = model._fitted if model.warm_start and hasattr(model, "_fitted") else None
    if model.n_dims is None and last is not None:
        chosen["n_dims"] = last.pancakes.n_dims
    elif model.n_dims is None:
        chosen["n_dims"] = dims = min(p // (FEATURES_A_DIM if labelled else 2), MOST_DIMS)
        if dims < MOST_DIMS:
            warn_reduced("n_dims", dims, MOST_DIMS, f"{where} have {p} features")
    if model.n_components is None and last is not None:
        before = np.bincount(last.classes, minlength=len(counts))
        chosen["n_components"] = before.tolist() if labelled else int(before[0])
    elif model.n_components is None:
        dims = chosen.get("n_dims", model.n_dims)
        needed = (ROWS_A_DIM if labelled else DENSITY_ROWS_A_DIM) * (
            1 + (model.max_dims if 0 < dims < 1 else int(dims))
        )
        components = np.clip(counts // needed, 1, MOST_COMPONENTS)
        chosen["n_components"] = components.tolist() if labelled else int(components[0])
        what = "a class of" if labelled else "only"
        if (fewest := int(components.min())) < MOST_COMPONENTS:
            warn_reduced("n_components", fewest, MOST_COMPONENTS, f"{where} have {what} {counts.min()} rows")
    return copy(model).set_params(**chosen)


def components_of(model: AnyMixture, n_classes: int) -> np.ndarray:
    """Sub-classes of each class."""
    given: Any = model.n_components
    if not is_list(given):
        return np.full(max(n_classes, 1), int(given))
    if len(given) != n_classes:
        raise ValueError(
            f"n_components={list(given)!r} has {len(given)} numbers, and there are {n_classes} classes: give "
            "one number, or one for each class"
        )
    return np.array([int(k) for k in given])


def shape_of(model: AnyMixture, train: Dataset | Rows) -> tuple[int, int] | None:
    """Height and width of the images that rows are; None where they need be none."""
    if not len(model.tangents) and not model.smoothing:
        return None
    what = "tangents" if len(model.tangents) else "smoothing"
    dataset = train.dataset if isinstance(train, Rows) else train
    where, p = f"rows of {dataset.url}" if dataset.url else "the rows", dataset.n_features
    if dataset.is_sparse:
        raise DataError(
            f"{what} are of images, and {where} are CSR rows: give dense rows, or leave {what} out"
        )
    if model.image_shape is not None:
        return given_shape(model, where, p)
    shape = dataset.feature_shape
    if len(shape) == 2:
        return int(shape[0]), int(shape[1])
    if len(shape) > 2:
        raise DataError(
            f"{what} are of grey images, and {where} have the shape {shape}: convert them to "
            f"grey, or leave {what} out"
        )
    side = math.isqrt(p)
    hint = f"image_shape=({side}, {side})" if side * side == p else "image_shape=(height, width)"
    raise DataError(f"{what} are of images, and {where} have {p} features in a line: give {hint}")


def given_shape(model: AnyMixture, where: str, p: int) -> tuple[int, int]:
    """The parameter ``image_shape``, which fits rows of p features."""
    height, width = (int(n) for n in model.image_shape)  # type: ignore[union-attr]
    if height * width != p:
        raise DataError(
            f"image_shape=({height}, {width}) has {height * width} pixels, and {where} have {p} features"
        )
    return height, width


def frame_of(model: AnyMixture, shape: tuple[int, int] | None) -> Frame | None:
    """Tangents of the rows."""
    if shape is None or not len(model.tangents):
        return None
    return Frame(tuple(model.tangents), shape, float(model.tangent_smoothing))


def check_n_dims(model: AnyMixture, n_features: int) -> None:
    """Refuse dimensions that the rows have no room for."""
    if model.n_dims is not None and model.n_dims >= max(n_features, 1):
        raise ValueError(
            f"n_dims={model.n_dims}: rows have {n_features} feature(s); give at most {n_features - 1}"
        )


def make_mixture(
    model: AnyMixture, components: np.ndarray, n_classes: int, p: int, floor: float, frame: Frame | None
) -> Mixture:
    """Constants of a fit."""
    light = float(model.recognition_tangent_weight)
    heavy = float(model.tangent_weight)
    return Mixture(
        n_features=p,
        classes=np.repeat(np.arange(len(components)), components),
        n_classes=n_classes,
        likelihood=model.likelihood,
        assignment=model.assignment,
        temperature=float(model.temperature or 0.0),
        floor=floor,
        frame=frame if heavy or light else None,
        tangent_weight=heavy,
        finish_weight=light,
    )


def make_learner(model: AnyMixture, mixture: Mixture) -> MixtureEM:
    """The learner of all passes."""
    share = float(model.n_dims) if 0 < model.n_dims < 1 else 0.0
    return MixtureEM(
        mixture,
        min(int(model.max_dims), mixture.n_features) if share else int(model.n_dims),
        width_of(model.n_dims, model.max_dims, mixture.n_features),
        share=share,
        start_passes=START_PASSES,
        settle_passes=SETTLE_PASSES,
        max_iter=int(model.max_iter),
        tol=float(model.tol or 0.0),
    )


# -- the rows that a fit starts from -----------------------------------------------------------------------


def _codes(rows: Rows, classes: np.ndarray | None) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, class of each row, -1 where it has no weight or is masked), in pieces."""
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


def class_counts(rows: Rows, classes: np.ndarray | None) -> np.ndarray:
    """Rows of each class; rows of weight 0 count as absent."""
    n = 1 if classes is None else len(classes)
    return sum((np.bincount(c[c >= 0], minlength=n) for _, c in _codes(rows, classes)), np.zeros(n, int))


def check_counts(rows: Rows, counts: np.ndarray, components: np.ndarray, classes: np.ndarray | None) -> None:
    """Refuse more sub-classes than rows, by name."""
    where = rows.url or "the training rows"
    for i, (n, k) in enumerate(zip(counts, components, strict=True)):
        if n >= k:
            continue
        if classes is None:
            raise DataError(f"{where}: n_components={k} needs as many rows; there are {n}")
        raise DataError(
            f"{where}: class {classes[i]} has {n} rows, fewer than its {k} sub-classes: lower n_components, "
            "give one number for each class, or more rows"
        )


def sample_rows(
    rows: Rows, classes: np.ndarray | None, counts: np.ndarray, components: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of some rows of each class, in rising order, and their classes."""
    chosen = []
    for c, (n, k) in enumerate(zip(counts, components, strict=True)):
        size = min(int(n), max(SAMPLE_ROWS * int(k), LEAST_ROWS // len(counts)))
        chosen.append(np.sort(stream(seed, "linear-mixture-sample", c).choice(int(n), size, replace=False)))
    seen, numbers, found = np.zeros(len(counts), int), [], []
    for first, codes in _codes(rows, classes):
        for c in range(len(counts)):
            own = np.flatnonzero(codes == c)
            a, b = np.searchsorted(chosen[c], [seen[c], seen[c] + len(own)])
            numbers.append(first + own[chosen[c][a:b] - seen[c]])
            found.append(np.full(b - a, c))
            seen[c] += len(own)
    number, code = np.concatenate(numbers), np.concatenate(found)
    order = np.argsort(number, kind="stable")
    return number[order], code[order]


def sampled(sets: StoredSets | SomeOfSet, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the sample and their classes, without those of bad shards."""
    x = np.asarray(sets.read(0))
    there = np.ones(len(x), dtype=bool)
    there[list(sets.missing)] = False
    return (x, codes) if there.all() else (x[there], codes[there])


def outlier_of(sets: StoredSets | SomeOfSet) -> int | None:
    """Position in the sample of a row that outweighs all others, or None."""
    x = np.asarray(sets.read(0), dtype=np.float64)
    squares = ((x - x.mean(axis=0)) ** 2).sum(axis=1)
    largest = int(squares.argmax())
    return largest if squares[largest] > OUTLIER_SHARE * squares.sum() > 0 else None


def start_of(
    sets: StoredSets | SomeOfSet,
    codes: np.ndarray,
    components: np.ndarray,
    width: int,
    seed: int,
) -> tuple[Pancakes, float]:
    """First pancakes, and the mean variance of a feature."""
    x, codes = sampled(sets, codes)
    variance = float(x.var(axis=0, dtype=np.float64).mean())

    def centres_of(c: int) -> np.ndarray:
        return seed_centres(x[codes == c], int(components[c]), stream(seed, "linear-mixture-start", c))

    centres = run_parts(centres_of, range(len(components)))
    return start_pancakes(np.concatenate(centres), width, seed), variance


# -- the steps ---------------------------------------------------------------------------------------------


def fit_steps(given: AnyMixture, rows: Mapping[str, Rows], classes: np.ndarray | None) -> Steps:
    """A whole fit; sets the learned attributes of the model ``given``. ``classes`` is None without labels."""
    given._check_params()
    train = rows["train"]
    n_classes = 0 if classes is None else len(classes)
    counts = yield Derive(class_counts, (train, classes))
    where, p = train.url or "the training rows", train.n_features
    model = settled(given, counts, p, classes is not None, where)
    components = components_of(model, n_classes)
    check_counts(train, counts, components, classes)
    if "validation" in rows:  # labels that are no class of the training rows
        yield Derive(class_counts, (rows["validation"], classes))
    shape = shape_of(model, train)
    check_n_dims(model, p)
    last = last_fit(model, components, classes, p)
    model.seed_, rows = yield Begin(
        {"max_iter": most_passes(model), "n_components": int(components.sum())},
        keeps_records=True,
        all_rows="" if model.algorithm == "em" else ALL_ROWS,
    )
    frame = frame_of(model, shape)
    numbers, codes = yield Derive(sample_rows, (rows["train"], classes, counts, components, model.seed_))
    kept = yield Remember("start", last)
    basis, rows = yield from smooth_steps(model, rows, shape)
    about = {"rows": len(numbers)}
    sets = yield Gather("sample", ChosenRows(numbers, p), rows["train"], about, kept=False)
    width = width_of(model.n_dims, model.max_dims, p)
    first, variance = yield Derive(start_of, (sets, codes, components, width, model.seed_))
    found = yield Derive(outlier_of, (sets,))
    warn_of_outlier(train.url, None if found is None else int(numbers[found]), len(numbers))
    if 0 < variance < LEAST_VARIANCE:
        raise DataError(
            f"{where}: features have a mean variance of {variance:g}, and their products vanish in float32: "
            f"multiply the rows by about {variance**-0.5:.0e}"
        )
    floor = max(float(model.noise_floor) * variance, LEAST_FLOOR)
    mixture = make_mixture(model, components, n_classes, p, floor, frame)
    em = make_learner(model, mixture)
    if kept:
        arrays = (kept[name] for name in ("means", "bases", "values", "noise", "weights"))
        first = Pancakes(*arrays, n_dims=int(kept["n_dims"]))  # type: ignore[misc]
        state = initial_state(mixture, first, MAIN)
    else:
        state = initial_state(mixture, first)

    def predictor(state: MixtureState) -> MixtureRows:
        return MixtureRows(fitted_of(mixture, state, basis, None), "probabilities")

    if model.algorithm == "em":
        result = yield Learn("em", em, state, {"train": rows["train"]}, classes, predictor)
        end, history = result.state, result.history
    else:
        if not kept:
            # Of the sample alone: steps need sub-classes that are settled somewhat.
            state = yield Derive(_fitted_on, (em, state, sets, codes, counts, model.device))
        learner = stepwise_learner(model, mixture, em.width)
        begun = stepwise_state(learner.mixture, state.now, _mass(state))
        k, n, seed = mixture.n_components, len(rows["train"].dataset), model.seed_

        def order(options: Mapping[str, Any]) -> RowOrder:
            return row_order(model, k, n, options, seed)

        train_rows = {"train": rows["train"]}
        epochs = int(model.n_epochs)
        result = yield LearnOnline("stepwise", learner, begun, train_rows, classes, order, epochs)
        end, history = _finished(result.state, float(counts.sum())), result.history
        if mixture.frame is not None:
            first_of_few = replace(end, phase=FINISH, held=end.now)
            few = replace(em, finish_passes=TANGENT_PASSES)
            result = yield Learn("tangents", few, first_of_few, train_rows, classes, predictor)
            end, history = result.state, [*history, *result.history]
    fitted = fitted_of(mixture, end, None, frame)
    if n_classes > 1:
        temperature = yield from temperature_steps(model, recognising(model, fitted), rows, classes, end)
        fitted = replace(fitted, temperature=temperature)
    warn_reduced_directions(fitted)
    given.seed_ = model.seed_
    given._keep(replace(fitted, basis=basis), end.iteration, history, classes)


# -- stepwise EM -------------------------------------------------------------------------------------------


def _fitted_on(
    em: MixtureEM,
    state: MixtureState,
    sets: StoredSets | SomeOfSet,
    codes: np.ndarray,
    counts: np.ndarray,
    device: str,
) -> MixtureState:
    """State after some passes over the sample; its rows count for all of their class."""
    x, codes = sampled(sets, codes)
    em = replace(em, mixture=replace(em.mixture, frame=None), max_iter=SAMPLE_PASSES, finish_passes=0)
    work, backend = em.reductions()["train"], make_backend("reference" if device == "reference" else "cpu")
    share = counts / np.maximum(np.bincount(codes, minlength=len(counts)), 1)
    block = Block(x, codes.astype(np.int32), share[codes], 0)
    while not em.is_done(state):
        stats = Stats.zeros(work.layout())
        work.accumulate(work.prepare(state, backend), block, stats)
        state = em.update(state, {"train": stats})
    return state


def stepwise_learner(model: AnyMixture, mixture: Mixture, width: int) -> StepwiseMixture:
    """The learner, which clusters without tangents."""
    mixture = replace(mixture, frame=None)
    return StepwiseMixture(mixture, width, n_epochs=int(model.n_epochs))


def row_order(model: AnyMixture, k: int, n_rows: int, options: Mapping[str, Any], seed: int) -> RowOrder:
    """Which rows each step gets."""
    batch = model.batch_rows
    if batch is None:
        batch = max(min(n_rows // 8, max(BATCH_ROWS, ROWS_A_COMPONENT * k)), 1)
    return RowOrder.choose(n_rows, seed, -(-int(batch) // N_CHAINS) * N_CHAINS, N_CHAINS, options)


def _mass(state: MixtureState) -> np.ndarray:
    """Rows of each sub-class; after a warm start shares, each class the same."""
    return state.counts if state.counts.any() else state.now.weights


def _finished(state: StepwiseState, rows: float) -> MixtureState:
    """Of the last step; the rows of sub-classes are their running shares of all."""
    counts = state.mass * (rows / max(float(state.mass.sum()), LEAST_FLOOR))
    return replace(state.now, counts=counts, objective=state.objective, iteration=state.epoch)


def most_passes(model: AnyMixture) -> int:
    """Passes of all phases."""
    if model.algorithm == "stepwise":
        return int(model.n_epochs) + (TANGENT_PASSES if len(model.tangents) else 0)
    dense, soft = model.likelihood in DENSE, model.assignment == "soft"
    settling = SETTLE_PASSES if dense or soft else 0
    return START_PASSES + settling + int(model.max_iter) + (0 if dense else FINISHING_PASSES)


def last_fit(
    model: AnyMixture, components: np.ndarray, classes: np.ndarray | None, p: int
) -> dict[str, np.ndarray]:
    """Pancakes of the fit that ``warm_start`` goes on from; empty where there is none."""
    if not model.warm_start or not hasattr(model, "_fitted"):
        return {}
    fitted, now = model._fitted, model._fitted.pancakes
    known = getattr(model, "classes_", None)
    same = known is None if classes is None else known is not None and np.array_equal(known, classes)
    wanted = np.repeat(np.arange(len(components)), components)
    same = same and np.array_equal(fitted.classes, wanted) and fitted.likelihood == model.likelihood
    q = width_of(model.n_dims, model.max_dims, p)
    dims = now.n_dims if 0 < model.n_dims < 1 else int(model.n_dims)
    if (
        not same
        or now.bases.shape[1:] != (p, q)
        or now.n_dims != dims
        or (fitted.basis is not None) != bool(model.smoothing)
    ):
        raise ValueError(
            f"warm_start: the last fit has {len(fitted.classes)} sub-classes of {now.n_dims} dimensions by "
            f"{fitted.likelihood!r} on {now.means.shape[1]} features, this one {len(wanted)} of {dims} by "
            f"{model.likelihood!r} on {p}, or other classes: fit with warm_start=False"
        )
    arrays = {name: getattr(now, name) for name in ("means", "bases", "values", "noise", "weights")}
    return {**arrays, "n_dims": np.array(now.n_dims)}


def smooth_steps(
    model: AnyMixture, rows: Mapping[str, Rows], shape: tuple[int, int] | None
) -> Generator[Step, Any, tuple[np.ndarray | None, Mapping[str, Rows]]]:
    """The matrix that smooths rows, or None, and the smoothed rows."""
    if not model.smoothing or shape is None:
        return None, rows
    # Derived, so that candidates of a search have the same matrix, and so the same rows.
    matrix = yield Derive(smoothing_matrix, (shape, float(model.smoothing)))
    smoothed = {}
    for name, part in rows.items():
        smoothed[name] = yield Map(f"project-{name}", Project(matrix), part)
    return matrix, smoothed


def smoothing_matrix(shape: tuple[int, int], smoothing: float) -> np.ndarray:
    """Matrix (p, p) that rows are multiplied by to smooth images."""
    taps = smoothing_taps(smoothing)
    bands = [sum(tap * np.eye(size, k=k - len(taps) // 2) for k, tap in enumerate(taps)) for size in shape]
    return np.kron(*bands)


def fitted_of(mixture: Mixture, state: MixtureState, basis: np.ndarray | None, frame: Frame | None) -> Fitted:
    """What predictions of a state come from, without sub-classes that were dropped."""
    alive = state.now.weights > 0
    now = cut_directions(state.now, state.counts, mixture.likelihood)
    per_class = np.add.reduceat(state.counts, mixture.starts[:-1])
    priors = per_class / max(float(per_class.sum()), LEAST_FLOOR)
    likelihood = mixture.likelihood if state.phase >= MAIN else "error"
    scale = max(state.objective if np.isfinite(state.objective) else 1.0, LEAST_FLOOR)
    temperature = 1.0 if likelihood in DENSE else scale
    counts = np.maximum(state.counts[alive], LEAST_FLOOR)
    return Fitted(
        now.part(alive),
        mixture.classes[alive],
        priors,
        likelihood,
        temperature,
        basis,
        frame,
        counts,
        mixture.floor,
    )


def recognising(model: AnyMixture, fitted: Fitted) -> Fitted:
    """What row maps need: tangents, if rows are recognised by their distance."""
    by_tangents = model.recognition == "tangent-distance"
    if by_tangents and fitted.frame is None:
        raise ValueError(
            "recognition='tangent-distance' needs tangents, and this model holds none: "
            "set tangents and fit again"
        )
    return replace(fitted, frame=fitted.frame if by_tangents else None)


def warn_reduced_directions(fitted: Fitted) -> None:
    """Say once of a fit that some sub-classes have fewer directions than others."""
    h = fitted.pancakes.n_dims
    few = np.flatnonzero(directions_cut(fitted.counts, h))
    if len(few):
        _log.warning(
            "%d of %d sub-classes have too few rows for n_dims=%d (the smallest has %.0f): what their rows "
            "do not span was cut; lower n_components or n_dims",
            len(few),
            len(fitted.counts),
            h,
            float(fitted.counts[few].min()),
        )


def temperature_steps(
    model: AnyMixture,
    fitted: Fitted,
    rows: Mapping[str, Rows],
    classes: np.ndarray | None,
    state: MixtureState,
) -> Generator[Step, Any, float]:
    """The temperature of class probabilities with the least log-loss of validation, else training rows."""
    dense = fitted.likelihood in DENSE
    noise = fitted.pancakes.noise.reshape(len(fitted.classes), -1).mean(axis=1)
    p, h = fitted.pancakes.means.shape[1], fitted.pancakes.n_dims
    scale = float(p) if dense else max(float(noise.mean()) * (p - h), LEAST_FLOOR)
    temperatures = scale * TEMPERATURES
    rows_of_fit, every = None, 1
    held = "validation" if "validation" in rows else "train"
    if held == "train":
        rows_of_fit = FittedRows(fitted.pancakes, fitted.counts, fitted.likelihood)
        every = max(1, len(rows[held].dataset) // HELD_OUT_ROWS)
    tried = TemperaturePass(fitted.recogniser(), temperatures, rows_of_fit, every)
    stats: Stats = yield Collect(f"temperature-{state.iteration}", tried, rows[held], classes)
    return choose_temperature(temperatures, np.array(stats["loss"]))


# -- what it will need -------------------------------------------------------------------------------------


def plan(model: AnyMixture, told: Forecast, classes: np.ndarray | None) -> dict[str, Any]:
    """What a fit of these rows would need."""
    train, n = told.train, len(told.train)
    n_classes = 0 if classes is None else len(classes)
    even, p = np.full(max(n_classes, 1), n // max(n_classes, 1)), train.n_features
    model = settled(model, even, p, classes is not None, train.url or "the training rows")
    components, shape = components_of(model, n_classes), shape_of(model, train)
    k = int(components.sum())
    check_n_dims(model, p)
    if k > n:
        what = "components" if classes is None else "sub-classes"
        raise DataError(
            f"{train.url or 'X'}: {n:,} rows are fewer than the {k:,} {what} that n_components asks for: "
            "lower n_components, or give more rows"
        )
    mixture = make_mixture(model, components, n_classes, p, 1.0, frame_of(model, shape))
    em = make_learner(model, mixture)
    told.codes = n_classes
    if classes is not None:
        told.add_label_reading()
    if model.smoothing:
        told.add_map("project", Project(np.broadcast_to(np.float64(0.01), (p, p))))
    state_bytes = 8 * k * (p * (em.width + 2) + em.width)
    sample = sum(max(SAMPLE_ROWS * int(c), LEAST_ROWS // len(components)) for c in components)
    sample_bytes = 4 * p * min(n, sample)
    told.add_seconds("sample", n * told.row_seconds(0.0, told.reading_seconds(train)))
    held = 6 * state_bytes + 3 * sample_bytes  # the M-step makes the next state part by part
    mstep = k * 8.0 * p * em.width**2 / MSTEP_RATE
    if model.algorithm == "stepwise":
        learner = stepwise_learner(model, mixture, em.width)
        order = row_order(model, k, n, told.options, 0)
        told.add_steps("stepwise", learner, order, held, 2 * state_bytes, FEWER, n_epochs=int(model.n_epochs))
        stage = make_stage(f"{model._kind}_em", em, told.rows, "cpu")
        mstep *= order.n_steps
    else:
        stage = told.add_stage("em", em, held, FEWER)
    at = None
    if told.measure:  # bases of a thousand sub-classes take as long as a pass
        start = start_pancakes(np.random.default_rng(0).normal(size=(k, p)), em.width, 0)
        at = initial_state(mixture, start.cut(min(em.n_dims, em.width)), MAIN)
    about = f" {mixture.likelihood} {mixture.assignment} {model.tangents}"
    rates = told.measure_rates(stage, at, about=about)
    most = most_passes(model)
    least = most - int(model.max_iter) - START_PASSES + 4
    if model.algorithm == "stepwise":
        told.add_seconds(
            "start", min(n, sample) * rates["train"] * (START_PASSES + SETTLE_PASSES + SAMPLE_PASSES)
        )
        least = most
    passes = {"at_least": min(most, least), "expected": most, "at_most": most}
    told.add_passes(model.algorithm, told.pass_seconds(stage, rates) + mstep, passes)
    of_a_row = 2.0 * p * k * (em.width + 1) / 3e10
    if n_classes > 1:
        some = told.held or train
        told.add_seconds("temperature", len(some) * told.row_seconds(of_a_row, told.reading_seconds(train)))
    block = stage.grids["train"].block_rows
    told.out["device_bytes"] = 4 * (k * p * (em.width + 2) + 4 * block * p)
    return told.finish(
        "lower max_iter or n_components",
        checkpoint=2 * state_bytes,
        model=state_bytes,
        kept=sample_bytes,
        predicting=of_a_row,
    )
