"""The fit of a mixture of linear models as steps of the engine, and the forecast of its time and memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.order import RowOrder
from scalelatent.engine.passes import make_stage
from scalelatent.engine.plan import Forecast
from scalelatent.engine.rowsets import ChosenRows
from scalelatent.errors import DataError
from scalelatent.estimators.inputs import warn_of_outlier
from scalelatent.estimators.steps import (
    AddRowMap,
    ComputeValue,
    MappedRows,
    StartFit,
    Step,
    Steps,
    StoreArrays,
    StoreRowSets,
    SumStatistic,
    TrainBatch,
    TrainOnline,
)
from scalelatent.models.linear_mixture.kernels.reference import make_axis_smoothing_matrix
from scalelatent.models.linear_mixture.model.components import (
    DENSITY_LIKELIHOODS,
    LEAST_FLOOR,
    Components,
    count_missing_directions,
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
from scalelatent.models.linear_mixture.model.start import LEAST_ROWS, SAMPLE_ROWS, start_components
from scalelatent.models.linear_mixture.model.stepwise import StepwiseMixture, initial_stepwise_state
from scalelatent.reductions.moments import Projection
from scalelatent.reductions.temperature import choose_temperature

from .choosing import choose_likelihood, choose_n_dims, fit_in_memory
from .output import FittedMixture, MixtureRowMap
from .sample import check_class_counts, choose_sample, count_class_rows, find_outlier, initialise, read_sample
from .settings import (
    SETTLE_PASSES,
    START_PASSES,
    check_n_dims,
    count_columns,
    count_components,
    count_possible_dims,
    find_image_shape,
    make_learner,
    make_settings,
    make_tangent_spec,
    set_likelihood,
    set_n_components,
    set_n_dims,
)

if TYPE_CHECKING:
    from .settings import AnyMixture

_log = logging.getLogger("scalelatent")

# Assumed floating-point operations per second of the M-step in a forecast of the fit.
MSTEP_RATE = 2e10
# Number of EM passes over a sample with which stepwise EM starts.
SAMPLE_PASSES = 5
# Number of passes over all rows with which stepwise EM ends if there are tangents.
TANGENT_PASSES = 3
# Parameters that only stepwise EM uses.
STEPWISE_PARAMETERS = ("n_epochs", "batch_rows")
# Default upper bound of the rows of a step of stepwise EM; mixtures of many components have a larger bound.
BATCH_ROWS = 1024
# Default number of rows per component in a step of stepwise EM, if this gives more than BATCH_ROWS rows.
ROWS_PER_COMPONENT = 20
# Number of parts (chains) of a step that are computed independently. Another number changes the rounding.
N_CHAINS = 4
# Error message of stepwise EM if some rows cannot be read.
ALL_ROWS = "stepwise EM needs an order of all rows: set algorithm='em', or remove the bad rows before the fit"
# Smallest mean variance of features, apart from 0, that a fit accepts; squares of smaller features are near
# the smallest float32, 1e-38.
LEAST_VARIANCE = 1e-30
# Advice in the error message of a fit that needs too much memory.
REMEDY = "lower n_components or n_dims"


def fit_steps(given: AnyMixture, rows: Mapping[str, MappedRows], classes: np.ndarray | None) -> Steps:
    """Yield the steps of a whole fit, and set the learned attributes of ``given``.

    ``classes`` is None if the model has no labels.
    """
    given._check_params()
    train = rows["train"]
    n_classes = 0 if classes is None else len(classes)
    counts = yield ComputeValue(count_class_rows, (train, classes))
    where, p, labelled = train.url or "the training rows", train.n_features, classes is not None
    model = set_likelihood(set_n_dims(given, p, n_classes), train.dataset, n_classes)
    sizes = count_components(set_n_components(model, counts, labelled, warn=False), n_classes)
    check_class_counts(train, counts, sizes, classes)
    if "validation" in rows:  # raises an error for labels that are no class of the training rows
        yield ComputeValue(count_class_rows, (rows["validation"], classes))
    shape = find_image_shape(model, train)
    check_n_dims(model, p)
    last = read_last_fit(model, sizes, classes, p)
    model.seed_, rows = yield StartFit(
        {"max_iter": count_most_passes(model)},
        keeps_records=True,
        all_rows="" if model.algorithm == "em" else ALL_ROWS,
    )
    spec = make_tangent_spec(model, shape)
    numbers, codes = yield ComputeValue(choose_sample, (rows["train"], classes, counts, sizes, model.seed_))
    remembered = yield StoreArrays("start", last)
    matrix, rows = yield from smooth_steps(model, rows, shape)
    about = {"rows": len(numbers)}
    sets = yield StoreRowSets("sample", ChosenRows(numbers, p), rows["train"], about, kept=False)
    x, codes = yield ComputeValue(read_sample, (sets, codes))
    if model.n_dims is None:
        most = count_possible_dims(model, counts, p)
        model.n_dims = yield ComputeValue(choose_n_dims, (x, codes, most, model.seed_))
    if model.likelihood is None:
        model = yield ComputeValue(choose_likelihood, (model, x, codes, model.seed_))
    model = set_n_components(model, counts, labelled)
    sizes = count_components(model, n_classes)
    width = count_columns(int(model.n_dims), p)
    first, variance = yield ComputeValue(initialise, (x, codes, sizes, width, model.seed_))
    outlier = yield ComputeValue(find_outlier, (sets,))
    warn_of_outlier(train.url, None if outlier is None else int(numbers[outlier]), len(numbers))
    if 0 < variance < LEAST_VARIANCE:
        raise DataError(
            f"{where}: features have a mean variance of {variance:g}, and their products vanish in float32: "
            f"multiply the rows by about {variance**-0.5:.0e}"
        )
    settings = make_settings(model, sizes, n_classes, p, variance, spec)
    em = make_learner(model, settings)
    if remembered:
        arrays = {name: array for name, array in remembered.items() if name != "n_dims"}
        state = initial_state(settings, Components(**arrays, n_dims=int(remembered["n_dims"])), MAIN)
    else:
        state = initial_state(settings, first)

    def predictor(state: MixtureState) -> MixtureRowMap:
        return MixtureRowMap(FittedMixture.from_state(settings, state, matrix), "probabilities")

    if model.algorithm == "em":
        result = yield TrainBatch("em", em, state, {"train": rows["train"]}, classes, predictor)
        end, history = result.state, result.history
    else:
        if not remembered:  # passes over the sample give the components from which the steps start
            state = yield ComputeValue(_fit_sample, (em, state, x, codes, counts, model.device))
        end, history = yield from stepwise_steps(model, em, state, rows, classes, counts, predictor)
    fitted = FittedMixture.from_state(settings, end, None, spec)
    if n_classes > 1:
        recognised = apply_recognition(model, fitted)
        temperature = yield from temperature_steps(recognised, rows, classes, end)
        fitted = replace(fitted, temperature=temperature)
    warn_missing_directions(fitted)
    given.seed_ = model.seed_
    given._keep(replace(fitted, matrix=matrix), end.iteration, history, classes)


def count_most_passes(model: AnyMixture) -> int:
    """Return the largest possible number of passes of all phases together."""
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
    width = count_columns(int(model.n_dims), p)
    if (
        not is_same
        or fitted.likelihood != model.likelihood
        or last.bases.shape[1:] != (p, width)
        or last.n_dims != int(model.n_dims)
        or (fitted.matrix is not None) != bool(model.smoothing)
    ):
        raise ValueError(
            f"warm_start=True: the last fit has {len(fitted.classes)} components of {last.n_dims} dimensions "
            f"by {fitted.likelihood!r} on {last.means.shape[1]} features, and this fit "
            f"{len(component_classes)} of {model.n_dims} by {model.likelihood!r} on {p}, or the classes or "
            "smoothing differ: set warm_start=False"
        )
    return {**last.arrays(), "n_dims": np.array(last.n_dims)}


def smooth_steps(
    model: AnyMixture, rows: Mapping[str, MappedRows], shape: tuple[int, int] | None
) -> Generator[Step, Any, tuple[np.ndarray | None, Mapping[str, MappedRows]]]:
    """Return the matrix that smooths the rows, or None, and the smoothed rows."""
    if not model.smoothing or shape is None:
        return None, rows
    # Candidates of a search share the matrix (the result of a `ComputeValue` step) and the smoothed rows.
    matrix = yield ComputeValue(make_smoothing_matrix, (shape, float(model.smoothing)))
    smoothed = {}
    for name, part in rows.items():
        smoothed[name] = yield AddRowMap(f"project-{name}", Projection(matrix), part)
    return matrix, smoothed


def make_smoothing_matrix(shape: tuple[int, int], smoothing: float) -> np.ndarray:
    """Return the matrix (p, p) by which rows are multiplied to smooth images; ``smoothing`` is in pixels."""
    return np.kron(*(make_axis_smoothing_matrix(size, smoothing) for size in shape))


def apply_recognition(model: AnyMixture, fitted: FittedMixture) -> FittedMixture:
    """Return the fitted mixture for the parameter ``recognition``: with tangents for "tangent-distance" only.

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
    fitted: FittedMixture, rows: Mapping[str, MappedRows], classes: np.ndarray | None, state: MixtureState
) -> Generator[Step, Any, float]:
    """Return the temperature of class probabilities with the least log-loss.

    The loss is that of the validation rows. Without validation rows it is that of training rows, each scored
    as if the fit had not used it.
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
    stats: Stats = yield SumStatistic(f"temperature-{state.iteration}", reduction, rows[part], classes)
    return choose_temperature(temperatures, np.array(stats["loss"]))


# -- stepwise EM -------------------------------------------------------------------------------------------


def stepwise_steps(
    model: AnyMixture,
    em: MixtureEM,
    state: MixtureState,
    rows: Mapping[str, MappedRows],
    classes: np.ndarray | None,
    counts: np.ndarray,
    predictor: Callable[[MixtureState], MixtureRowMap],
) -> Generator[Step, Any, tuple[MixtureState, list[dict[str, Any]]]]:
    """Run stepwise EM, then passes of EM over all rows if there are tangents; return state and history."""
    settings, train = em.settings, {"train": rows["train"]}
    learner = make_stepwise_learner(model, settings, em.width)
    # A warm start has no counts of rows; the weights of the components then give each class the same mass.
    mass = state.counts if state.counts.any() else state.components.weights
    start = initial_stepwise_state(learner.settings, state.components, mass)
    n, seed = len(rows["train"].dataset), model.seed_

    def order(options: Mapping[str, Any]) -> RowOrder:
        return choose_row_order(model, settings.n_components, n, options, seed)

    result = yield TrainOnline("stepwise", learner, start, train, classes, order, int(model.n_epochs))
    online, history = result.state, result.history
    # The shares of the rows that belong to each component, scaled to the number of training rows.
    row_counts = online.mass * (float(counts.sum()) / max(float(online.mass.sum()), LEAST_FLOOR))
    end = replace(online.mixture, counts=row_counts, objective=online.objective, iteration=online.epoch)
    if settings.tangent_spec is not None:
        last = replace(em, finish_passes=TANGENT_PASSES)
        start_last = replace(end, phase=FINISH, assigned_by=end.components)
        result = yield TrainBatch("tangents", last, start_last, train, classes, predictor)
        end, history = result.state, [*history, *result.history]
    return end, history


def _fit_sample(
    em: MixtureEM, state: MixtureState, x: np.ndarray, codes: np.ndarray, counts: np.ndarray, device: str
) -> MixtureState:
    """Return the state after EM passes over the sample; each class weighs as much as in the training rows."""
    settings = replace(em.settings, tangent_spec=None)
    em = replace(em, settings=settings, max_iter=SAMPLE_PASSES, finish_passes=0)
    share = counts / np.maximum(np.bincount(codes, minlength=len(counts)), 1)
    return fit_in_memory(em, state, Block(x, codes.astype(np.int32), share[codes], 0), device)


def make_stepwise_learner(model: AnyMixture, settings: MixtureSettings, width: int) -> StepwiseMixture:
    """Return the learner of stepwise EM, which uses no tangents."""
    return StepwiseMixture(replace(settings, tangent_spec=None), width, n_epochs=int(model.n_epochs))


def choose_row_order(
    model: AnyMixture, k: int, n_rows: int, options: Mapping[str, Any], seed: int
) -> RowOrder:
    """Return the order of rows in stepwise EM of k components; a step has a multiple of `N_CHAINS` rows."""
    batch = model.batch_rows
    if batch is None:
        batch = max(min(n_rows // 8, max(BATCH_ROWS, ROWS_PER_COMPONENT * k)), 1)
    return RowOrder.choose(n_rows, seed, -(-int(batch) // N_CHAINS) * N_CHAINS, N_CHAINS, options)


# -- the forecast ------------------------------------------------------------------------------------------


def plan_fit(model: AnyMixture, forecast: Forecast, classes: np.ndarray | None) -> dict[str, Any]:
    """Return the forecast of the time and memory of a fit, whose training rows are ``forecast.train``."""
    train, n = forecast.train, len(forecast.train)
    n_classes, p = 0 if classes is None else len(classes), train.n_features
    even = np.full(max(n_classes, 1), n // max(n_classes, 1))
    model = set_n_dims(model, p, n_classes)
    if model.n_dims is None:  # the largest number that the fit may choose
        model.n_dims = count_possible_dims(model, even, p)
    is_chosen = set_likelihood(model, train, n_classes).likelihood is None
    model.likelihood = model.likelihood or "error"  # a fit by factor analysis takes about as long
    model = set_n_components(model, even, classes is not None, warn=False)
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
        forecast.add_map("project", Projection(np.broadcast_to(np.float64(0.01), (p, p))))
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
    if forecast.measure:  # only for measurements: random bases of 1,000 components take as long as a pass
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
    if is_chosen:
        forecast.add_seconds("choice", min(n, sample) * rates["train"] * most)
    passes = {"at_least": min(most, least), "expected": most, "at_most": most}
    forecast.add_passes(model.algorithm, forecast.pass_seconds(stage, rates) + mstep, passes)
    seconds_per_row = 2.0 * p * k * (em.width + 1) / 3e10
    if n_classes > 1:
        some = forecast.validation or train
        of_a_row = forecast.row_seconds(seconds_per_row, forecast.reading_seconds(train))
        forecast.add_seconds("temperature", len(some) * of_a_row)
    block = stage.grids["train"].block_rows
    forecast.out["device_bytes"] = 4 * (k * p * (em.width + 2) + 4 * block * p)
    return forecast.finish_plan(
        "lower max_iter or n_components",
        checkpoint=2 * state_bytes,
        model=state_bytes,
        kept=sample_bytes,
        predicting=seconds_per_row,
    )
