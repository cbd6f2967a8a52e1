"""Steps of a capsule fit: input checks, first weights, the learner; and the plan of its time and memory."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.finite import LARGEST_VALUE
from scalelatent.contract.parameters import is_number
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.engine.order import RowOrder
from scalelatent.engine.plan import ALLOWED_SHARE, Forecast
from scalelatent.engine.rates import make_noise
from scalelatent.errors import DataError, PlanError, warn_deprecated
from scalelatent.estimators.base import warn_reduced
from scalelatent.estimators.inputs import warn_of_outlier
from scalelatent.estimators.steps import (
    AddRowMap,
    ComputeValue,
    MappedRows,
    StartFit,
    Step,
    Steps,
    StoreArrays,
    SumStatistic,
    TrainBatch,
    TrainOnline,
)
from scalelatent.kernels.streams import stream
from scalelatent.models.capsule.model.em import CapsuleEM, CapsulePass, CapsuleState, initial_state
from scalelatent.models.capsule.model.members import Members, build_members
from scalelatent.models.capsule.model.online import CapsuleStepwise, online_state
from scalelatent.models.capsule.model.predict import CalibrationPass, CapsuleRows, RowFrame
from scalelatent.models.capsule.model.start import parse_schedule, random_start, subspace_start
from scalelatent.reductions.confusion import CONFUSION_METRICS, ConfusionCounts
from scalelatent.reductions.eigen import leading_eigenvectors
from scalelatent.reductions.intercept import Intercept, recenter
from scalelatent.reductions.moments import Projection, SecondMoments, find_outlier
from scalelatent.reductions.temperature import choose_temperature

from .parameters import DEPRECATED_ALGORITHMS, get_algorithm, get_max_passes

if TYPE_CHECKING:
    from .estimator import CapsuleRegression

# Width of the projected rows with projection="auto", as in section 3.1 of Saul (2021).
AUTO_PROJECTION = 196
# Default dimension of the capsules.
CAPSULE_DIM = 8
# Number of labels that are read at a time when the rows of each class are counted.
COUNT_ROWS = 2**20
# Number of rows at the start of a dataset whose mean is the first estimate of the mean of all rows. Squares
# are summed around this estimate in float64, so a better estimate is not needed.
FIRST_ROWS = 1024
# Largest default ridge of a feature, as a multiple of its own mean square. A larger ridge would depend on the
# units of other features.
OWN_SQUARES = 10.0
# If the mean row weight is between 1 and this number, a row of weight 2 counts as two rows. Otherwise each
# row counts as one row on average, and multiplying all weights by one number has no effect.
REPEATED_ROWS = 10
# Temperatures to try. If all training rows are predicted correctly, the lowest temperature has the smallest
# log-loss on them, but not on other rows. On eight small datasets the best temperatures for other rows were
# between 0.02 and 0.17.
TEMPERATURES = np.geomspace(0.05, 5.0, 61)
# One-versus-all fits with validation rows try ``TEMPERATURES`` divided by this number. One-versus-all
# probabilities are divided by their sum, so with many classes they are nearly equal and need a low
# temperature: the best temperature for UMIST's 20 classes was 0.01.
ONE_VS_ALL_DIVISOR = 5.0
# Largest number of training rows with which the temperature is chosen.
CALIBRATION_ROWS = 20_000
# Parameters that only stepwise EM reads.
ONLINE_PARAMETERS = ("n_epochs", "batch_rows", "n_chains", "kappa", "t0")
# Default rows per step of stepwise EM.
BATCH_ROWS = 1024
# Default epochs of stepwise EM: as many as read EPOCHS_OF_ROWS rows, but in the range EPOCHS.
EPOCHS = 10, 50
EPOCHS_OF_ROWS = 500_000
# Reason why stepwise EM cannot exclude rows that cannot be read.
ALL_ROWS = (
    "an online fit reads the rows in random order and cannot exclude rows during the fit; choose "
    "algorithm = 'em'"
)
# Advice in the error of a fit that needs too much memory.
SMALLER = "lower capsule_dim, or set projection lower"
# Share of rows that take part in the second matrix product of a pass (residuals times rows), on average over
# a fit of MNIST.
ACTIVE = 0.15
# Expected passes of a fit per pass of patience, summed over the rounds (thresholds nu) of the schedule.
# Fits of MNIST with a summed patience of 248 passes needed 403 to 737 passes.
PASSES_PER_PATIENCE = 2.2
# Floating point operations per second of the M-step's products (float64) and of predictions.
MSTEP_RATE, PREDICT_RATE = 2e10, 3e10


# -- parameters and labels ---------------------------------------------------------------------------------


def choose_projected_width(projection: str | int | None, n_features: int) -> int | None:
    """Return the width of the projected rows, or None for no projection."""
    if projection is None:
        return None
    if isinstance(projection, str) and projection == "auto":
        return AUTO_PROJECTION if n_features > AUTO_PROJECTION else None
    if int(projection) > n_features:
        raise ValueError(
            f"projection={projection} is above the {n_features} features of the rows: give at most "
            f"{n_features}, or None for no projection"
        )
    return int(projection)


def check_width(width: int | None, train: Dataset, n_classes: int, memory: int) -> None:
    """Raise PlanError if the second moments of the rows do not fit into ``memory`` bytes of a process."""
    p = train.n_features
    matrices = 3 if width is not None else 2 * n_classes
    allowed = ALLOWED_SHARE * memory
    if matrices * 8 * p * p <= allowed:
        return
    fit = int(math.sqrt(allowed / (8 * matrices)))
    remedy = "" if width is not None or fit < 2 else f", or set projection to at most {min(fit, p)}"
    raise PlanError(
        f"{train.url or 'the training rows'}: {p} features need {matrices} matrices of second moments of "
        f"{8 * p * p / 2**30:.1f} GiB each, but only {fit} features fit. Keep the columns that matter (the "
        "most frequent ones, or sklearn.feature_selection), or reduce the rows first "
        f"(sklearn.random_projection, sklearn.decomposition.TruncatedSVD){remedy}, or give each worker "
        f"{matrices * 8 * p * p / ALLOWED_SHARE / 2**30:.1f} GiB ([cluster] memory_limit)"
    )


def choose_dim(model: CapsuleRegression, counts: np.ndarray, columns: int) -> int | Sequence[int]:
    """Return ``capsule_dim`` or, for None, 8 or as many as the columns and the smallest class allow."""
    if model.capsule_dim is not None:
        return model.capsule_dim
    if model.init != "subspace":
        return CAPSULE_DIM
    members = build_members(model.architecture, len(counts), 1)
    fewest = min(
        int(counts[labels == i].sum()) for labels in members.labels for i in range(members.dims.shape[1])
    )
    dim = max(min(CAPSULE_DIM, columns, fewest), 1)
    if dim < CAPSULE_DIM and counts.all():
        found = f"{columns} columns" if columns <= fewest else f"only {fewest} rows in a class"
        if columns <= fewest and model.fit_intercept:
            found = f"{columns - 1} columns and an intercept"
        warn_reduced("capsule_dim", dim, CAPSULE_DIM, f"the training rows have {found}")
    return dim


def simplify_dims(dims: np.ndarray) -> int | list[int]:
    """Return the dimension of all capsules, or a list with the dimension of each class if they differ."""
    return int(dims[0, 0]) if (dims == dims[0, 0]).all() else dims[0].tolist()


def count_classes(rows: MappedRows | Dataset, classes: np.ndarray) -> np.ndarray:
    """Return the number of rows of each class, without rows of weight 0; raise DataError for other labels."""
    counts = np.zeros(len(classes), dtype=np.int64)
    for dataset in [rows] if isinstance(rows, Dataset) else rows.pieces():
        for start in range(0, len(dataset), COUNT_ROWS):
            stop = min(start + COUNT_ROWS, len(dataset))
            codes = dataset.read_codes(start, stop, classes)
            if (weight := dataset.read_weight(start, stop)) is not None:
                codes = codes[weight > 0]
            counts += np.bincount(codes, minlength=len(classes))
    return counts


def resolve_class_weight(
    class_weight: Mapping[Any, float] | str | None, classes: np.ndarray, counts: np.ndarray
) -> np.ndarray | None:
    """Return the weights of the classes in their order, or None."""
    if class_weight is None:
        return None
    if class_weight != "balanced" if isinstance(class_weight, str) else not isinstance(class_weight, Mapping):
        raise ValueError(
            f"class_weight={class_weight!r}: give 'balanced', a dict of class to weight, or None"
        )
    if isinstance(class_weight, str):
        return counts.sum() / (len(classes) * np.maximum(counts, 1.0))
    known = {c.item() if isinstance(c, np.generic) else c: i for i, c in enumerate(classes)}
    unknown = [c for c in class_weight if c not in known]
    weights = np.ones(len(classes))
    if unknown or not all(is_number(value) and value > 0 for value in class_weight.values()):
        raise ValueError(
            f"class_weight={dict(class_weight)!r}: the classes are {list(known)}, and weights must be "
            "finite numbers above 0"
        )
    for c, value in class_weight.items():
        weights[known[c]] = value
    return weights


def check_classes(
    members: Members, train: MappedRows | Dataset, counts: np.ndarray, columns: int, init: str
) -> None:
    """Raise an error, before any work, if a class has no rows or too few for its capsule."""
    where = train.url or "the training rows"
    assert train.classes is not None
    if (counts == 0).any():
        missing = [str(c) for c in train.classes[counts == 0]]
        if train.has_weight:
            raise DataError(
                f"{where}: class(es) {', '.join(missing)} have no weight: give each class rows with "
                "sample_weight above 0"
            )
        raise DataError(
            f"{where}: class(es) {', '.join(missing)} have no rows: train on rows of every class (a slice "
            "keeps the classes of the whole dataset)"
        )
    largest = int(members.dims.max())
    if largest > columns and init == "subspace":
        raise ValueError(
            f"capsule_dim={largest} is above the {columns} columns of the rows (features or directions of "
            f"the projection, and the intercept): give at most {columns}, or init='random'"
        )
    if init != "subspace":
        return
    for r in range(members.n_members):
        for i, d in enumerate(members.dims[r]):
            own = members.labels[r] == i
            if counts[own].sum() < d:
                names = ", ".join(str(c) for c in train.classes[own])
                raise DataError(
                    f"{where}: class {names} has {counts[own].sum()} rows, fewer than its capsule "
                    f"dimension {d}: lower capsule_dim to {counts[own].sum()}, give more rows, or use "
                    "init='random'"
                )


# -- steps of a fit ----------------------------------------------------------------------------------------


def fit_steps(model: CapsuleRegression, rows: Mapping[str, MappedRows]) -> Steps:
    """Yield the steps of a fit, and set the fitted attributes of the model."""
    model._check_params()
    warn_of_algorithm(model)
    train, classes = rows["train"], rows["train"].classes
    assert classes is not None
    build_members(model.architecture, len(classes), 1 if model.capsule_dim is None else model.capsule_dim)
    counts = yield ComputeValue(count_classes, (train, classes))
    if "validation" in rows:
        yield ComputeValue(count_classes, (rows["validation"], classes))  # raises an error for other labels
    width = choose_projected_width(model.projection, train.n_features)
    columns = count_columns(model, width or train.n_features)
    dim = choose_dim(model, counts, columns)
    members = build_members(model.architecture, len(classes), dim)
    check_classes(members, train, counts, columns, model.init)
    weights = resolve_class_weight(model.class_weight, classes, counts)
    last = _read_last_fit(model, members, columns, classes)
    algorithm = get_algorithm(model)
    most = get_max_passes(model) if algorithm == "em" else get_max_epochs(model, len(train.dataset))
    about = {"members": members.n_members, "architecture": members.architecture}
    model.seed_, rows = yield StartFit(
        {**about, "max_iter": most, "capsule_dim": simplify_dims(members.dims)},
        all_rows="" if algorithm == "em" else ALL_ROWS,
    )
    last = yield StoreArrays("start", last)
    validation = rows.get("validation")
    frame, rows = yield from projection_steps(model, rows, width, last)
    em, sums, w, frame = yield from start_steps(model, rows, frame, members, classes, weights, last.get("W"))

    def predictor(state: CapsuleState) -> CapsuleRows:
        return CapsuleRows(members, em.weights(state), frame, "probabilities")

    if algorithm == "em":
        result = yield TrainBatch("estep", em, initial_state(w, members.n_members), rows, classes, predictor)
        w = em.weights(result.state)
    else:
        step = make_online_step(model, em, sums["weight"], sums["count"], w, rows, classes, model.seed_)
        result = yield step
        w = step.learner.weights(result.state)
    decided = None
    if validation is not None and members.n_members > 1:
        # Each member has its best weights from a different pass, so one more pass measures the error of their
        # joint decision. This pass reads the original validation rows, as `score` does.
        confusion = ConfusionCounts(CapsuleRows(members, w, frame, "probabilities"), len(classes))
        found = yield SumStatistic(f"decision-{result.state.iteration}", confusion, validation, classes)
        decided = float(CONFUSION_METRICS["error"](found["confusion"]))
        if result.state.together_error < decided:
            w, decided = result.state.together, result.state.together_error
    probabilities = CapsuleRows(members, w, RowFrame(frame.row_intercept), "probabilities")
    temperature = yield from temperature_steps(model, probabilities, rows, classes, weights)
    model._keep(classes, em, frame, result, w, (np.array(sums["weight"]), np.array(sums["count"])), decided)
    model._set_fitted_attributes(temperature_=temperature)


def temperature_steps(
    model: CapsuleRegression,
    probabilities: CapsuleRows,
    rows: Mapping[str, MappedRows],
    classes: np.ndarray,
    class_weight: np.ndarray | None,
) -> Generator[Step, Any, float]:
    """Return the temperature with the smallest log-loss on validation rows, else on some training rows."""
    if model.temperature is not None:
        return float(model.temperature)
    temperatures = TEMPERATURES
    if measured := rows.get("validation"):
        if probabilities.members.architecture == "one_vs_all":
            temperatures = TEMPERATURES / ONE_VS_ALL_DIVISOR
        tried = CalibrationPass(probabilities, temperatures, None, 1)
    else:
        measured = rows["train"]
        every = max(1, len(measured.dataset) // CALIBRATION_ROWS)
        tried = CalibrationPass(probabilities, temperatures, class_weight, every)
    stats: Stats = yield SumStatistic("temperature", tried, measured, classes)
    return choose_temperature(temperatures, np.array(stats["loss"]))


def warn_of_algorithm(model: CapsuleRegression) -> None:
    """Warn that stepwise EM replaces an ``algorithm`` that only earlier versions had."""
    if model.algorithm in DEPRECATED_ALGORITHMS:
        warn_deprecated(
            f"CapsuleRegression(algorithm={model.algorithm!r})",
            "this fit uses algorithm='stepwise', which has the lower test error in less time",
            since="0.1",
        )


def count_columns(model: CapsuleRegression, width: int) -> int:
    """Return the number of columns of W: one per column of the (projected) rows, and one for an intercept."""
    return width + bool(model.fit_intercept)


def _read_last_fit(
    model: CapsuleRegression, members: Members, columns: int, classes: np.ndarray
) -> dict[str, np.ndarray]:
    """Return W, projection and intercept of the fit that ``warm_start`` continues; empty if there is none."""
    if not (model.warm_start and hasattr(model, "W_")):
        return {}
    w, intercept, matrix = model._weights(), model._frame.intercept, model._frame.matrix
    if w.shape != (members.total_dim, columns) or not np.array_equal(model.classes_, classes):
        raise ValueError(
            f"warm_start: the last fit has weights of shape {w.shape} and classes {model.classes_.tolist()}, "
            f"but this fit has {(members.total_dim, columns)} and {classes.tolist()}: fit with "
            "warm_start=False"
        )
    last = {"W": w}
    if matrix is not None:
        last["matrix"] = matrix
    if intercept is not None:
        last |= {"mean": intercept.mean, "constant": np.array(intercept.constant)}
    return last


def guess_intercept(rows: Dataset) -> Intercept:
    """Return an intercept with the mean of the first rows; a pass then computes the mean of all rows."""
    mean = np.zeros(rows.n_features)
    try:
        x = rows.read_x(0, min(FIRST_ROWS, len(rows)))
        with np.errstate(invalid="ignore", over="ignore"):
            mean = np.asarray(x if isinstance(x, np.ndarray) else x.toarray(), dtype=np.float64).mean(axis=0)
    except DataError:
        pass  # the pass over all rows reports or excludes rows that cannot be read
    return Intercept(np.where(np.abs(mean) <= LARGEST_VALUE, mean, 0.0).astype(np.float32), 1.0)


def projection_steps(
    model: CapsuleRegression,
    rows: Mapping[str, MappedRows],
    width: int | None,
    last: Mapping[str, np.ndarray],
) -> Generator[Step, Any, tuple[RowFrame, Mapping[str, MappedRows]]]:
    """Yield the steps that project rows on ``width`` directions; return the map and the projected rows.

    One pass computes second moments, and another writes the projected rows. The map consists of an intercept
    and the projection. If ``width`` is None, rows are not projected, and the map has only the intercept of
    ``last``, the fit that a warm start continues. Without such a fit, `start_steps` estimates the intercept.
    """
    intercept = Intercept(last["mean"], float(last["constant"])) if "mean" in last else None
    if width is None:
        return RowFrame(intercept), rows
    frame = RowFrame(intercept, last.get("matrix"))
    train = rows["train"]
    if frame.matrix is None:
        first = (yield ComputeValue(guess_intercept, (train.dataset,))) if model.fit_intercept else None
        stats = yield SumStatistic("svd", SecondMoments(train.n_features, intercept=first), train)
        _warn_of_outlier(stats, train)
        frame = yield ComputeValue(_make_projection, (stats["moment"], first, width))
    assert frame.matrix is not None
    projected = {}
    for name, part in rows.items():
        projected[name] = yield AddRowMap(f"project-{name}", Projection(frame.matrix, frame.intercept), part)
    return frame, projected


def _warn_of_outlier(stats: Stats, rows: MappedRows) -> None:
    """Warn if a single row dominates the mean and the directions of a fit with an intercept."""
    if "outlier" in stats.layout.slices:
        warn_of_outlier(rows.url, find_outlier(stats), len(rows.dataset))


def _make_projection(moment: np.ndarray, first: Intercept | None, width: int) -> RowFrame:
    """Return the map of rows to their leading directions, from second moments about the mean of ``first``."""
    if first is None:
        return RowFrame(None, leading_eigenvectors(moment[0], width)[1])
    moment, intercept = recenter(moment, first)
    values, basis = leading_eigenvectors(moment[0, :-1, :-1], width)
    # Scale the constant column like the projected rows, whose length is smaller than that of the rows.
    share = np.sqrt(max(values.sum(), 0.0) / max(np.trace(moment[0, :-1, :-1]), np.finfo(float).tiny))
    intercept = replace(intercept, constant=float(intercept.constant * share) or 1.0)
    return RowFrame.from_projection(intercept, basis)


def _check_zeros(moment: np.ndarray, classes: np.ndarray, each: bool, has_intercept: bool) -> None:
    """Raise DataError if the rows do not vary; with ``each``, also if a class has only rows of zeros."""
    squares = np.diagonal(moment, axis1=1, axis2=2)
    if not squares[:, : squares.shape[1] - has_intercept].any():
        alike = "every row is the same" if has_intercept else "every feature of every row is 0"
        raise DataError(f"{alike}, so there is nothing to learn: check the rows")
    zeros = [str(name) for name, own in zip(classes, squares, strict=True) if not own.any()]
    if zeros and each:
        raise DataError(
            f"every feature of every row of class {', '.join(zeros)} is 0, so its capsule has no directions: "
            "check these rows, remove the class, or use fit_intercept=True"
        )


def start_steps(
    model: CapsuleRegression,
    rows: Mapping[str, MappedRows],
    frame: RowFrame,
    members: Members,
    classes: np.ndarray,
    class_weight: np.ndarray | None,
    first: np.ndarray | None,
) -> Generator[Step, Any, tuple[CapsuleEM, Stats, np.ndarray, RowFrame]]:
    """Return learner, second moments of the rows, initial W (``first`` if given), and map of the rows."""
    train = rows["train"]
    intercept = frame.row_intercept
    found = intercept is not None or frame.matrix is not None or not model.fit_intercept
    if not found:
        intercept = yield ComputeValue(guess_intercept, (train.dataset,))
    reduction = SecondMoments(train.n_features, len(classes), class_weight, intercept)
    stats = yield SumStatistic("moments", reduction, train, classes)
    moment, weight = stats["moment"], stats["weight"]
    if not (weight > 0).all():
        raise DataError(
            f"class {classes[int(np.argmin(weight))]!s} has no weight: give each class rows with "
            "sample_weight and class_weight above 0"
        )
    if not found:
        _warn_of_outlier(stats, train)
        moment, intercept = yield ComputeValue(recenter, (moment, intercept))
        frame = RowFrame(intercept, None)
    _check_zeros(moment, classes, first is None and model.init != "random", model.fit_intercept)
    # Weights may be counts of repeated rows, or may have any unit.
    n_rows, mean = float(stats["count"].sum()), float(weight.sum() / stats["count"].sum())
    n_rows *= mean if 1 <= mean <= REPEATED_ROWS else 1
    learner = make_em_learner(model, frame, members, moment, n_rows, "validation" in rows, class_weight)
    if first is None and model.init == "random":
        rng = stream(model.seed_, "capsule-start")
        first = random_start(members, moment, weight, float(model.init_scale), rng)
    elif first is None:
        first = yield ComputeValue(subspace_start, (members, moment, weight))
    return learner, stats, first, frame


def make_em_learner(
    model: CapsuleRegression,
    frame: RowFrame,
    members: Members,
    moment: np.ndarray,
    n_rows: float,
    has_validation: bool,
    class_weight: np.ndarray | None = None,
) -> CapsuleEM:
    """Return the batch learner with the parameters of the model."""
    nu, patience, scheduled = parse_schedule(model.nu_schedule)
    if model.ridge is None:
        ridge = choose_ridge(moment.sum(axis=0), n_rows, frame.matrix is None)
    else:
        ridge = np.full(moment.shape[1], float(model.ridge))
    return CapsuleEM(
        members=members,
        moment=moment,
        nu=nu,
        patience=patience,
        scheduled=scheduled,
        momentum=float(model.momentum),
        ridge=ridge,
        tol=float(model.tol or 0),
        max_iter=get_max_passes(model),
        class_weight=class_weight,
        has_validation=int(has_validation),
        intercept=frame.row_intercept,
    )


def choose_ridge(moment: np.ndarray, n_rows: float, in_units: bool) -> np.ndarray:
    """Return the default ridge (p,), which has the effect of one more row of independent features.

    ``moment`` (p, p) are the second moments of ``n_rows`` rows. Directions of a projection share a unit and
    get their mean square. If features may differ in their units (``in_units``), each feature gets the median
    of all mean squares, which suits pixels, but at most ten times its own mean square.
    """
    squares = np.diagonal(moment) / n_rows
    if not in_units:
        return np.full(len(squares), squares.mean())
    return np.minimum(np.median(squares[squares > 0]) if squares.any() else 0.0, OWN_SQUARES * squares)


# -- stepwise EM -------------------------------------------------------------------------------------------


def get_max_epochs(model: CapsuleRegression, n_rows: int) -> int:
    """Return the largest number of epochs of stepwise EM; by default fewer for more rows."""
    if model.n_epochs is not None:
        return int(model.n_epochs)
    return min(max(EPOCHS_OF_ROWS // n_rows, EPOCHS[0]), EPOCHS[1])


def get_batch_rows(model: CapsuleRegression) -> int:
    """Return the rows per step: the parameter, or 1,024 rounded up to a multiple of ``n_chains``."""
    if model.batch_rows is not None:
        return int(model.batch_rows)
    return -(-BATCH_ROWS // int(model.n_chains)) * int(model.n_chains)


def make_online_step(
    model: CapsuleRegression,
    em: CapsuleEM,
    weight: np.ndarray,
    count: np.ndarray,
    w: np.ndarray,
    rows: Mapping[str, MappedRows],
    classes: np.ndarray,
    seed: int,
) -> TrainOnline:
    """Return the fit step of stepwise EM, which starts from the weights ``w`` (D, p)."""
    n_rows = len(rows["train"].dataset)

    def order(options: Mapping[str, Any]) -> RowOrder:
        return RowOrder.choose(n_rows, seed, get_batch_rows(model), int(model.n_chains), options)

    learner = CapsuleStepwise(em, weight, count, float(model.kappa), float(model.t0))
    state = online_state(w, em.members.n_members)
    return TrainOnline("stepwise", learner, state, rows, classes, order, get_max_epochs(model, n_rows))


# -- plan --------------------------------------------------------------------------------------------------


def plan(model: CapsuleRegression, forecast: Forecast) -> dict[str, Any]:
    """Return the predicted passes, seconds and bytes of a fit."""
    train, validation, classes = forecast.train, forecast.validation, forecast.train.classes
    assert classes is not None
    width, n_classes = choose_projected_width(model.projection, train.n_features), len(classes)
    members = _plan_members(model, forecast, width, classes)
    check_width(width, train, n_classes, forecast.resources.memory)
    p, forecast.codes = count_columns(model, width or train.n_features), n_classes
    # The state of several members also has the weights with the lowest error of their joint decision.
    together = validation is not None and members.n_members > 1
    no_rows = np.zeros(train.n_features, dtype=np.float32)
    frame = RowFrame(Intercept(no_rows, 1.0) if model.fit_intercept else None)
    forecast.add_label_reading()
    weights, moments = 8 * members.total_dim * p, 8 * n_classes * p * p
    held_moments = moments + 16 * p * p * len(members.class_sets)
    if width is not None:
        narrower = "make the rows narrower: keep the columns that matter, or reduce them first"
        moments_of_all = SecondMoments(train.n_features, intercept=frame.intercept)
        forecast.add_single_pass("svd", moments_of_all, 24 * train.n_features**2, narrower)
        forecast.add_eigenvectors("directions", train.n_features)
        shape = count_columns(model, train.n_features), p
        matrix = np.broadcast_to(np.float64(0.01), shape)
        forecast.add_map("project", Projection(matrix, frame.intercept))
        frame = RowFrame(frame.intercept, matrix)
    intercept = frame.row_intercept
    columns = p if intercept is None else p - 1  # columns of the rows that passes read
    moment_pass = SecondMoments(columns, n_classes, None, intercept)
    forecast.add_single_pass("moments", moment_pass, 2 * moments, f"set projection below {p}")
    forecast.add_eigenvectors("start", p, _count_eigenproblems(members, model.init))
    # Zeros whose array takes no memory; `plan` needs only its shape.
    zeros = np.broadcast_to(np.zeros(()), (n_classes, p, p))
    em = make_em_learner(model, frame, members, zeros, 1.0, validation is not None)
    w, passes = (
        np.random.default_rng(0).normal(size=(members.total_dim, p)),
        _estimate_passes(model, train.n_rows),
    )
    state = initial_state(w, members.n_members)
    if get_algorithm(model) == "em":
        stage = forecast.add_stage("estep", em, held_moments + 8 * weights, SMALLER)
        block, arrays = stage.grids["train"].block_rows, 4 if together else 3
        full = forecast.measure_rates(stage, state)
        # All rows take part in the first matrix product of a pass, but few in the second.
        scores = {"train": CapsulePass(members, p, em.nu, None, False, intercept)}
        product = forecast.measure_rates(replace(stage, name="capsule_scores", work=scores), state)["train"]
        usual = {**full, "train": product + ACTIVE * max(full["train"] - product, 0.0)}
        update_seconds = 2 * members.total_dim * p**2 / MSTEP_RATE
        forecast.add_passes(
            "estep",
            forecast.pass_seconds(stage, usual) + update_seconds,
            passes,
            slowest=forecast.pass_seconds(stage, full) + update_seconds,
        )
        shorter = "lower max_iter, or set algorithm='stepwise', which learns in a few passes"
    else:
        ones = np.ones(n_classes)
        step = make_online_step(model, em, ones, ones, w, {"train": MappedRows(train)}, classes, 0)
        order, learner = step.order(forecast.options), step.learner
        block, arrays = order.chain_rows, 5 + together
        forecast.add_steps(
            step.name,
            learner,
            order,
            held_moments,
            arrays * weights,
            SMALLER,
            n_epochs=step.n_epochs,
        )
        row_seconds, update_seconds = forecast.measure_chain(
            f"capsule_{step.name} {block}x{p} {learner.layout().size} {n_classes}",
            learner,
            lambda: (step.state, make_noise(block, columns, "float32", n_classes)),
            order,
            rows=block,
        )
        seconds_per_epoch = forecast.epoch_seconds(order, row_seconds, update_seconds)
        if validation is not None:
            stage = forecast.add_stage(
                "validation", {"validation": learner.validation()}, 2 * weights, SMALLER
            )
            seconds_per_epoch += forecast.pass_seconds(stage, forecast.measure_rates(stage, step.state))
        forecast.add_passes(step.name, seconds_per_epoch, passes)
        shorter = "lower n_epochs"
    if model.temperature is None:
        some, products = forecast.validation or train, 2.0 * members.total_dim * p / PREDICT_RATE
        forecast.add_seconds(
            "temperature", len(some) * forecast.row_seconds(products, forecast.reading_seconds(some))
        )
    forecast.out["architecture"] = members.architecture
    forecast.out["device_bytes"] = 4 * (members.total_dim * p + block * (2 * p + members.total_dim))
    return forecast.finish_plan(
        shorter,
        checkpoint=arrays * weights,
        model=weights + moments + (8 * train.n_features * p if width else 0),
        predicting=2.0 * p * (members.total_dim + (train.n_features if width else 0)) / PREDICT_RATE,
    )


def _plan_members(
    model: CapsuleRegression, forecast: Forecast, width: int | None, classes: np.ndarray
) -> Members:
    """Return the members that `plan` expects for the fit.

    If the forecast may not measure, labels are not read, and the capsules have the largest dimension that
    they can have.
    """
    train, p = forecast.train, count_columns(model, width or forecast.train.n_features)
    if not forecast.measure:
        dim = min(CAPSULE_DIM, p) if model.capsule_dim is None else model.capsule_dim
        return build_members(model.architecture, len(classes), dim)
    counts = count_classes(train, classes)
    dim = choose_dim(model, counts, p)
    members = build_members(model.architecture, len(classes), dim)
    check_classes(members, train, counts, p, model.init)
    return members


def _count_eigenproblems(members: Members, init: str) -> int:
    """Return the number of matrices whose eigenvectors the first weights and the M-step need."""
    subspaces = set()
    if init == "subspace":
        subspaces = {
            ((labels == i).tobytes(), int(d))
            for labels, dims in zip(members.labels, members.dims, strict=True)
            for i, d in enumerate(dims)
        }
    return len(members.class_sets) + len(subspaces)


def _estimate_passes(model: CapsuleRegression, n_rows: int) -> dict[str, int]:
    """Return the fewest, the expected and the most passes or epochs of a fit."""
    most = get_max_passes(model) if get_algorithm(model) == "em" else get_max_epochs(model, n_rows)
    nu, patience, scheduled = parse_schedule(model.nu_schedule)
    least = int(patience.sum()) if scheduled else most
    usual = round(PASSES_PER_PATIENCE * least) if scheduled and get_algorithm(model) == "em" else most
    if model.tol:
        # A round of batch EM needs a step, and a pass that measures no progress. An epoch can do both, except
        # in the first round.
        least = min(least, 2 * len(nu) if get_algorithm(model) == "em" else len(nu) + 1)
    return {"at_least": min(least, most), "expected": min(usual, most), "at_most": most}
