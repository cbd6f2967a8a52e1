"""A capsule fit: classes and widths, the steps, online learners, and what all of it will need."""

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
from scalelatent.engine.checkpoints import KEEP_STATES
from scalelatent.engine.incremental import count_leaves, make_leaf_order
from scalelatent.engine.order import RowOrder
from scalelatent.engine.plan import ALLOWED_SHARE, Forecast
from scalelatent.engine.rates import make_noise
from scalelatent.errors import DataError, PlanError
from scalelatent.estimators.base import warn_reduced
from scalelatent.estimators.inputs import warn_of_outlier
from scalelatent.estimators.steps import (
    Begin,
    Collect,
    Derive,
    Learn,
    LearnOnline,
    Map,
    Remember,
    Rows,
    Step,
    Steps,
)
from scalelatent.kernels.streams import stream
from scalelatent.models.capsule.model.em import CapsuleEM, CapsulePass, CapsuleState, initial_state
from scalelatent.models.capsule.model.incremental import CapsuleIncremental, incremental_state
from scalelatent.models.capsule.model.members import Members, build_members
from scalelatent.models.capsule.model.online import (
    CapsuleStepwise,
    OnlineState,
    online_state,
)
from scalelatent.models.capsule.model.passive import CapsulePassiveAggressive
from scalelatent.models.capsule.model.predict import CalibrationPass, CapsuleRows, RowFrame
from scalelatent.models.capsule.model.start import random_start, schedule_arrays, subspace_start
from scalelatent.reductions.confusion import CONFUSION_METRICS, ConfusionCounts
from scalelatent.reductions.eigen import leading_eigenvectors
from scalelatent.reductions.intercept import Intercept, recentred
from scalelatent.reductions.moments import Project, SecondMoments, outlier
from scalelatent.reductions.temperature import choose_temperature

from .parameters import algorithm_of, max_passes

if TYPE_CHECKING:
    from .estimator import CapsuleRegression

AUTO_PROJECTION = 196
CAPSULE_DIM = 8
COUNT_ROWS = 2**20
# The mean of this many rows is near enough to that of all for sums of squares in float64.
FIRST_ROWS = 1024
# Largest ridge of a feature, in its own mean squares: more would let the units of other features decide.
OWN_SQUARES = 10.0
# Row weights whose mean is between 1 and this are taken as numbers of rows; a factor of others has no effect.
REPEATED_ROWS = 10
# Temperatures of class probabilities that are tried. Where all training rows are right the least is the best
# for them, though not for other rows: on eight small sets the best for these were .02 to .17.
TEMPERATURES = np.geomspace(0.05, 5.0, 61)
# Training rows that the temperature is chosen by, at most.
CALIBRATION_ROWS = 20_000
ONLINE_PARAMETERS = ("n_epochs", "batch_rows", "n_chains", "kappa", "t0", "aggressiveness")
BATCH_ROWS = 1024
# Fewest and most passes of the online algorithms; between them this many rows altogether.
EPOCHS = 10, 50
EPOCHS_OF_ROWS = 500_000
# Incremental EM: fewer rows in a leaf than this many for each row of W would be exchanged at more cost than
# they are computed on.
LEAF_ROWS_A_DIMENSION = 4
# Why an online fit leaves out no rows.
ALL_ROWS = (
    "an online fit takes each row in an order of its own and cannot leave some out in its midst; choose "
    "algorithm = 'em'"
)
SMALLER = "lower capsule_dim, or set projection lower"
# Of rows that take part in the second product: few, once the first passes have settled most of them.
ACTIVE = 0.15
# Passes of a schedule, as a multiple of the sum of its patience: 403 to 737 where that is 248, on MNIST.
PASSES_OF_PATIENCE = 2.2
# Operations a second of the M-step's products, in float64, and of predictions.
MSTEP_RATE, PREDICT_RATE = 2e10, 3e10


# -- what a fit is told -----------------------------------------------------------------------------------


def projected_width(projection: str | int | None, n_features: int) -> int | None:
    """Width of the projected rows, None for no projection."""
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


def too_wide(width: int | None, n_features: int, n_classes: int, memory: int) -> str | None:
    """What helps where the second moments of rows this wide do not fit into a process, else None."""
    matrices, p = (3, n_features) if width is not None else (2 * n_classes, n_features)
    allowed = ALLOWED_SHARE * memory
    if matrices * 8 * p * p <= allowed:
        return None
    fit = int(math.sqrt(allowed / (8 * matrices)))
    remedy = "" if width is not None or fit < 2 else f", or set projection to at most {min(fit, p)}"
    return (
        f"{p} features make a matrix of second moments of {8 * p * p / 2**30:.1f} GiB, of which {matrices} "
        f"are needed; up to {fit} features fit. Keep the columns that matter (the most frequent ones, or "
        "sklearn.feature_selection), or reduce the rows first (sklearn.random_projection, "
        f"sklearn.decomposition.TruncatedSVD){remedy}, or give each worker "
        f"{matrices * 8 * p * p / ALLOWED_SHARE / 2**30:.1f} GiB ([cluster] memory_limit)"
    )


def choose_dim(model: CapsuleRegression, counts: np.ndarray, columns: int, where: str) -> int | Sequence[int]:
    """``capsule_dim``, or eight, cut to what the rows allow."""
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
        found = f"{columns} columns" if columns <= fewest else f"{fewest} rows for a capsule"
        if columns <= fewest and model.fit_intercept:
            found = f"{columns - 1} columns and an intercept"
        warn_reduced("capsule_dim", dim, CAPSULE_DIM, f"{where} have {found}")
    return dim


def plain_dim(dims: np.ndarray) -> int | list[int]:
    """Dimension of all capsules, or one for each class."""
    return int(dims[0, 0]) if (dims == dims[0, 0]).all() else dims[0].tolist()


def check_width(width: int | None, train: Dataset, n_classes: int, memory: int) -> None:
    """Refuse rows whose second moments cannot fit, before any work."""
    remedy = too_wide(width, train.n_features, n_classes, memory)
    if remedy:
        raise PlanError(f"{train.url or 'the training rows'}: {remedy}")


def class_counts(rows: Rows | Dataset, classes: np.ndarray) -> np.ndarray:
    """Rows of each class, read in pieces; rows of weight 0 count as absent."""
    counts = np.zeros(len(classes), dtype=np.int64)
    for dataset in [rows] if isinstance(rows, Dataset) else rows.pieces():
        for start in range(0, len(dataset), COUNT_ROWS):
            stop = min(start + COUNT_ROWS, len(dataset))
            codes = dataset.read_codes(start, stop, classes)
            if (weight := dataset.read_weight(start, stop)) is not None:
                codes = codes[weight > 0]
            counts += np.bincount(codes, minlength=len(classes))
    return counts


def class_weights(
    class_weight: Mapping[Any, float] | str | None, classes: np.ndarray, counts: np.ndarray
) -> np.ndarray | None:
    """Weights of the classes in their order, or None."""
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
            f"class_weight={dict(class_weight)!r}: classes are {list(known)}, weights finite numbers above 0"
        )
    for c, value in class_weight.items():
        weights[known[c]] = value
    return weights


def check_labels(held: Rows | Dataset | None, classes: np.ndarray) -> None:
    """Refuse validation labels that are not classes of the training rows, before any work."""
    if held is not None:
        class_counts(held, classes)


def check_classes(
    members: Members, train: Rows | Dataset, counts: np.ndarray, columns: int, init: str
) -> None:
    """Refuse capsules that the rows cannot fill, before any work."""
    where = train.url or "the training rows"
    assert train.classes is not None
    if (counts == 0).any():
        missing = [str(c) for c in train.classes[counts == 0]]
        if train.has_weight:
            raise DataError(
                f"{where}: class {', '.join(missing)} has no weight: give each class rows with "
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


# -- the steps -------------------------------------------------------------------------------------------


def fit_steps(model: CapsuleRegression, rows: Mapping[str, Rows]) -> Steps:
    """A whole fit by any algorithm, see :mod:`.steps`; sets the model's learned attributes."""
    model._check_params()
    train, classes = rows["train"], rows["train"].classes
    assert classes is not None
    build_members(model.architecture, len(classes), 1 if model.capsule_dim is None else model.capsule_dim)
    counts = yield Derive(class_counts, (train, classes))
    if "validation" in rows:
        yield Derive(check_labels, (rows["validation"], classes))
    width = projected_width(model.projection, train.n_features)
    where = train.url or "the training rows"
    columns = n_columns(model, width or train.n_features)
    dim = choose_dim(model, counts, columns, where)
    members = build_members(model.architecture, len(classes), dim)
    check_classes(members, train, counts, columns, model.init)
    weights = class_weights(model.class_weight, classes, counts)
    last = _last_fit(model, members, columns, classes)
    algorithm = algorithm_of(model)
    most = max_passes(model) if algorithm == "em" else most_epochs(model, len(train.dataset))
    model.seed_, rows = yield Begin(
        {"members": members.n_members, "max_iter": most, "capsule_dim": plain_dim(members.dims)},
        keeps_records=algorithm == "incremental",
        all_rows="" if algorithm == "em" else ALL_ROWS,
    )
    last = yield Remember("start", last)
    held = rows.get("validation")
    frame, rows = yield from project_steps(model, rows, width, last)
    em, sums, w, frame = yield from start_steps(model, rows, frame, members, classes, weights, last.get("W"))

    def predictor(state: CapsuleState) -> CapsuleRows:
        return CapsuleRows(members, em.weights(state), frame, "probabilities")

    if algorithm == "em":
        result = yield Learn("estep", em, initial_state(w, members.n_members), rows, classes, predictor)
        w = em.weights(result.state)
    else:
        step = online_step(model, em, sums["weight"], sums["count"], w, rows, classes, model.seed_)
        result = yield step
        w = step.learner.weights(result.state)
    decided = None
    if held is not None and members.n_members > 1:
        # Each member's best is of another pass: a pass of its own measures what they decide together, over
        # the rows as they were given, as in `score`.
        confusion = ConfusionCounts(CapsuleRows(members, w, frame, "probabilities"), len(classes))
        found = yield Collect(f"decision-{result.state.iteration}", confusion, held, classes)
        decided = float(CONFUSION_METRICS["error"](found["confusion"]))
        if result.state.together_error < decided:
            w, decided = result.state.together, result.state.together_error
    probabilities = CapsuleRows(members, w, RowFrame(frame.row_intercept), "probabilities")
    temperature = yield from temperature_steps(model, probabilities, rows, classes, weights)
    model._keep(classes, em, frame, result, w, (np.array(sums["weight"]), np.array(sums["count"])), decided)
    model._set_learned(temperature_=temperature)


def temperature_steps(
    model: CapsuleRegression,
    probabilities: CapsuleRows,
    rows: Mapping[str, Rows],
    classes: np.ndarray,
    class_weight: np.ndarray | None,
) -> Generator[Step, Any, float]:
    """The temperature with the least log-loss of validation rows, else of some training rows."""
    if model.temperature is not None:
        return float(model.temperature)
    if held := rows.get("validation"):
        tried = CalibrationPass(probabilities, TEMPERATURES, None, 1)
    else:
        held = rows["train"]
        every = max(1, len(held.dataset) // CALIBRATION_ROWS)
        tried = CalibrationPass(probabilities, TEMPERATURES, class_weight, every)
    stats: Stats = yield Collect("temperature", tried, held, classes)
    return choose_temperature(TEMPERATURES, np.array(stats["loss"]))


def n_columns(model: CapsuleRegression, width: int) -> int:
    """Columns of W as it is fitted: those of the (projected) rows and of the intercept."""
    return width + bool(model.fit_intercept)


def _last_fit(
    model: CapsuleRegression, members: Members, columns: int, classes: np.ndarray
) -> dict[str, np.ndarray]:
    """W, projection and intercept of the fit that ``warm_start`` starts from; empty where there is none."""
    if not (model.warm_start and hasattr(model, "W_")):
        return {}
    w, intercept, matrix = model._weights(), model._frame.intercept, model._frame.matrix
    if w.shape != (members.total_dim, columns) or not np.array_equal(model.classes_, classes):
        raise ValueError(
            f"warm_start: the last fit has weights of shape {w.shape} and classes {model.classes_.tolist()}, "
            f"this one {(members.total_dim, columns)} and {classes.tolist()}: fit with warm_start=False"
        )
    last = {"W": w}
    if matrix is not None:
        last["matrix"] = matrix
    if intercept is not None:
        last |= {"mean": intercept.mean, "constant": np.array(intercept.constant)}
    return last


def first_mean(rows: Dataset) -> Intercept:
    """Return an intercept about the mean of the first rows, for the pass that finds the mean of all rows."""
    mean = np.zeros(rows.n_features)
    try:
        x = rows.read_x(0, min(FIRST_ROWS, len(rows)))
        with np.errstate(invalid="ignore", over="ignore"):
            mean = np.asarray(x if isinstance(x, np.ndarray) else x.toarray(), dtype=np.float64).mean(axis=0)
    except DataError:
        pass  # rows that cannot be read are for the pass to report, or to leave out
    return Intercept(np.where(np.abs(mean) <= LARGEST_VALUE, mean, 0.0).astype(np.float32), 1.0)


def project_steps(
    model: CapsuleRegression, rows: Mapping[str, Rows], width: int | None, last: Mapping[str, np.ndarray]
) -> Generator[Step, Any, tuple[RowFrame, Mapping[str, Rows]]]:
    """The frame as far as it is known, and the projected rows: one pass for the moments, one to write."""
    intercept = Intercept(last["mean"], float(last["constant"])) if "mean" in last else None
    if width is None:
        return RowFrame(intercept), rows
    frame = RowFrame(intercept, last.get("matrix"))
    train = rows["train"]
    if frame.matrix is None:
        first = (yield Derive(first_mean, (train.dataset,))) if model.fit_intercept else None
        stats = yield Collect("svd", SecondMoments(train.n_features, intercept=first), train)
        _warn_of_outlier(stats, train)
        frame = yield Derive(_leading_frame, (stats["moment"], first, width))
    assert frame.matrix is not None
    projected = {}
    for name, part in rows.items():
        projected[name] = yield Map(f"project-{name}", Project(frame.matrix, frame.intercept), part)
    return frame, projected


def _warn_of_outlier(stats: Stats, rows: Rows) -> None:
    """Warn where one row decides the mean and the directions of all; without an intercept nobody looks."""
    if "outlier" in stats.layout.slices:
        warn_of_outlier(rows.url, outlier(stats), len(rows.dataset))


def _leading_frame(moment: np.ndarray, first: Intercept | None, width: int) -> RowFrame:
    if first is None:
        return RowFrame(None, leading_eigenvectors(moment[0], width)[1])
    moment, intercept = recentred(moment, first)
    values, basis = leading_eigenvectors(moment[0, :-1, :-1], width)
    # As long as the projected rows.
    share = np.sqrt(max(values.sum(), 0.0) / max(np.trace(moment[0, :-1, :-1]), np.finfo(float).tiny))
    intercept = replace(intercept, constant=float(intercept.constant * share) or 1.0)
    return RowFrame.projecting(intercept, basis)


def _check_zeros(moment: np.ndarray, classes: np.ndarray, each: bool, has_intercept: bool) -> None:
    """Refuse rows that do not vary, and where first weights span the rows of each class a class of zeros."""
    squares = np.diagonal(moment, axis1=1, axis2=2)
    if not squares[:, : squares.shape[1] - has_intercept].any():
        alike = "every row is the same" if has_intercept else "every feature of every row is 0"
        raise DataError(f"{alike}, so that there is nothing to learn: look at the rows")
    zeros = [str(name) for name, own in zip(classes, squares, strict=True) if not own.any()]
    if zeros and each:
        raise DataError(
            f"every feature of every row of class {', '.join(zeros)} is 0, and nothing spans its capsule: "
            "look at these rows, leave the class out, or use fit_intercept=True"
        )


def start_steps(
    model: CapsuleRegression,
    rows: Mapping[str, Rows],
    frame: RowFrame,
    members: Members,
    classes: np.ndarray,
    class_weight: np.ndarray | None,
    first: np.ndarray | None,
) -> Generator[Step, Any, tuple[CapsuleEM, Stats, np.ndarray, RowFrame]]:
    """The learner, the second moments of the rows, the first W (``first`` if it is given), and the frame."""
    train = rows["train"]
    intercept = frame.row_intercept
    found = intercept is not None or frame.matrix is not None or not model.fit_intercept
    if not found:
        intercept = yield Derive(first_mean, (train.dataset,))
    reduction = SecondMoments(train.n_features, len(classes), class_weight, intercept)
    stats = yield Collect("moments", reduction, train, classes)
    moment, weight = stats["moment"], stats["weight"]
    if not (weight > 0).all():
        raise DataError(
            f"class {classes[int(np.argmin(weight))]!s} has no weight: give each class rows with "
            "sample_weight and class_weight above 0"
        )
    if not found:
        _warn_of_outlier(stats, train)
        moment, intercept = yield Derive(recentred, (moment, intercept))
        frame = RowFrame(intercept, None)
    _check_zeros(moment, classes, first is None and model.init != "random", model.fit_intercept)
    # Weights may be numbers of rows, or units of any size.
    n_rows, mean = float(stats["count"].sum()), float(weight.sum() / stats["count"].sum())
    n_rows *= mean if 1 <= mean <= REPEATED_ROWS else 1
    learner = em_learner(model, frame, members, moment, n_rows, "validation" in rows, class_weight)
    if first is None and model.init == "random":
        rng = stream(model.seed_, "capsule-start")
        first = random_start(members, moment, weight, float(model.init_scale), rng)
    elif first is None:
        first = yield Derive(subspace_start, (members, moment, weight))
    return learner, stats, first, frame


def em_learner(
    model: CapsuleRegression,
    frame: RowFrame,
    members: Members,
    moment: np.ndarray,
    n_rows: float,
    has_validation: bool,
    class_weight: np.ndarray | None = None,
) -> CapsuleEM:
    nu, patience, scheduled = schedule_arrays(model.nu_schedule)
    if model.ridge is None:
        ridge = one_row_more(moment.sum(axis=0), n_rows, frame.matrix is None)
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
        max_iter=max_passes(model),
        class_weight=class_weight,
        has_validation=int(has_validation),
        intercept=frame.row_intercept,
    )


def one_row_more(moment: np.ndarray, n_rows: float, in_units: bool) -> np.ndarray:
    """Return a ridge (p,) that counts as much as one row more of independent features.

    ``moment`` (p, p) are the second moments of ``n_rows`` rows. Directions of a projection get their mean
    square. Features, which may be ``in_units`` of their own, get the median of theirs (pixels share a unit),
    and at most ten times their own.
    """
    squares = np.diagonal(moment) / n_rows
    if not in_units:
        return np.full(len(squares), squares.mean())
    return np.minimum(np.median(squares[squares > 0]) if squares.any() else 0.0, OWN_SQUARES * squares)


# -- online algorithms -----------------------------------------------------------------------------------


def row_order(
    model: CapsuleRegression, n_rows: int, members: Members, options: Mapping[str, Any], seed: int
) -> RowOrder:
    """The rows of each step: a function of parameters, seed and engine options."""
    chains = int(model.n_chains)
    if algorithm_of(model) == "incremental":
        least = LEAF_ROWS_A_DIMENSION * members.total_dim
        batch = None if model.batch_rows is None else int(model.batch_rows)
        return make_leaf_order(n_rows, chains, batch, min_leaf_rows=least)
    return RowOrder.choose(n_rows, seed, batch_rows(model), chains, options)


def most_epochs(model: CapsuleRegression, n_rows: int) -> int:
    """Largest number of passes of an online algorithm: the parameter, or fewer the more rows there are."""
    if model.n_epochs is not None:
        return int(model.n_epochs)
    return min(max(EPOCHS_OF_ROWS // n_rows, EPOCHS[0]), EPOCHS[1])


def batch_rows(model: CapsuleRegression) -> int:
    """Rows of a step: the parameter, or 1,024 (the next multiple of ``n_chains``)."""
    if model.batch_rows is not None:
        return int(model.batch_rows)
    return -(-BATCH_ROWS // int(model.n_chains)) * int(model.n_chains)


def online_step(
    model: CapsuleRegression,
    em: CapsuleEM,
    weight: np.ndarray,
    count: np.ndarray,
    w: np.ndarray,
    rows: Mapping[str, Rows],
    classes: np.ndarray,
    seed: int,
) -> LearnOnline:
    """What an online algorithm asks for."""
    members, n_rows = em.members, len(rows["train"].dataset)

    def order(options: Mapping[str, Any]) -> RowOrder:
        return row_order(model, n_rows, members, options, seed)

    incremental = algorithm_of(model) == "incremental"
    if incremental:
        # Leaves are the same whatever the options say.
        learner: CapsuleIncremental | CapsuleStepwise | CapsulePassiveAggressive = CapsuleIncremental(
            em, weight, count, count_leaves(order({}))
        )
        state: OnlineState = incremental_state(w, members.n_members)
    else:
        state = online_state(w, members.n_members)
        if algorithm_of(model) == "stepwise":
            learner = CapsuleStepwise(em, weight, count, float(model.kappa), float(model.t0))
        else:
            learner = CapsulePassiveAggressive(em, weight, count, float(model.aggressiveness))
    return LearnOnline(
        algorithm_of(model),
        learner,
        state,
        rows,
        classes,
        order,
        most_epochs(model, n_rows),
        keeps_leaves=incremental,
    )


# -- what it will need -----------------------------------------------------------------------------------


def plan(model: CapsuleRegression, told: Forecast) -> dict[str, Any]:
    train, held, classes = told.train, told.held, told.train.classes
    assert classes is not None
    width, n_classes = projected_width(model.projection, train.n_features), len(classes)
    members = _planned_members(model, told, width, classes)
    check_width(width, train, n_classes, told.resources.memory)
    p, told.codes = n_columns(model, width or train.n_features), n_classes
    together = held is not None and members.n_members > 1  # the weights that decided best
    no_rows = np.zeros(train.n_features, dtype=np.float32)
    frame = RowFrame(Intercept(no_rows, 1.0) if model.fit_intercept else None)
    told.add_label_reading()
    weights, moments = 8 * members.total_dim * p, 8 * n_classes * p * p
    held_moments = moments + 16 * p * p * len({labels.tobytes() for labels in members.labels >= 0})
    if width is not None:
        narrower = "make the rows narrower: keep the columns that matter, or reduce them first"
        moments_of_all = SecondMoments(train.n_features, intercept=frame.intercept)
        told.add_single_pass("svd", moments_of_all, 24 * train.n_features**2, narrower)
        told.add_eigenvectors("directions", train.n_features)
        shape = n_columns(model, train.n_features), p
        matrix = np.broadcast_to(np.float64(0.01), shape)
        told.add_map("project", Project(matrix, frame.intercept))
        frame = RowFrame(frame.intercept, matrix)
    intercept = frame.row_intercept
    columns = p if intercept is None else p - 1  # of the rows that passes read
    moment_pass = SecondMoments(columns, n_classes, None, intercept)
    told.add_single_pass("moments", moment_pass, 2 * moments, f"set projection below {p}")
    told.add_eigenvectors("start", p, _eigenproblems(members, model.init))
    # Zeros without memory: only shapes matter here.
    zeros = np.broadcast_to(np.zeros(()), (n_classes, p, p))
    em = em_learner(model, frame, members, zeros, 1.0, held is not None)
    w, passes = np.random.default_rng(0).normal(size=(members.total_dim, p)), _passes(model, train.n_rows)
    state = initial_state(w, members.n_members)
    if algorithm_of(model) == "em":
        stage = told.add_stage("estep", em, held_moments + 8 * weights, SMALLER)
        block, arrays = stage.grids["train"].block_rows, 4 if together else 3
        full = told.measure_rates(stage, state)
        # Every row takes part in the first product, few of them in the second.
        scores: dict[str, CapsulePass[CapsuleState]] = {
            "train": CapsulePass(members, p, em.nu, None, False, intercept)
        }
        product = told.measure_rates(replace(stage, name="capsule_scores", work=scores), state)["train"]
        usual = {**full, "train": product + ACTIVE * max(full["train"] - product, 0.0)}
        beside = 2 * members.total_dim * p**2 / MSTEP_RATE
        told.add_passes(
            "estep",
            told.pass_seconds(stage, usual) + beside,
            passes,
            slowest=told.pass_seconds(stage, full) + beside,
        )
        shorter = "lower max_iter, or set algorithm='stepwise', which learns in a few passes"
    else:
        ones = np.ones(n_classes)
        step = online_step(model, em, ones, ones, w, {"train": Rows(train)}, classes, 0)
        order, leaves, learner = step.order(told.options), step.keeps_leaves, step.learner
        block, arrays = order.chain_rows, (6 if leaves else 5) + together
        told.add_steps(
            step.name,
            learner,
            order,
            held_moments,
            arrays * weights,
            SMALLER,
            n_epochs=step.n_epochs,
            keeps_leaves=leaves,
        )
        row, beside = told.measure_chain(
            f"capsule_{step.name} {block}x{p} {learner.layout().size} {n_classes}",
            learner,
            lambda: (step.state, make_noise(block, columns, "float32", n_classes)),
            order,
            rows=block,
            keeps_leaves=leaves,
        )
        an_epoch = told.epoch_seconds(order, row, beside)
        if held is not None:
            stage = told.add_stage("validation", {"validation": learner.validation()}, 2 * weights, SMALLER)
            an_epoch += told.pass_seconds(stage, told.measure_rates(stage, step.state))
        if leaves:
            kept = order.n_steps * order.n_chains * learner.layout().nbytes
            told.scratch += (KEEP_STATES + 1) * kept
            an_epoch += kept * sum(told.scratch_rates())
        told.add_passes(step.name, an_epoch, passes)
        shorter = "lower n_epochs"
    if model.temperature is None:
        some, products = told.held or train, 2.0 * members.total_dim * p / PREDICT_RATE
        told.add_seconds("temperature", len(some) * told.row_seconds(products, told.reading_seconds(some)))
    told.out["device_bytes"] = 4 * (members.total_dim * p + block * (2 * p + members.total_dim))
    return told.finish(
        shorter,
        checkpoint=arrays * weights,
        model=weights + moments + (8 * train.n_features * p if width else 0),
        predicting=2.0 * p * (members.total_dim + (train.n_features if width else 0)) / PREDICT_RATE,
    )


def _planned_members(
    model: CapsuleRegression, told: Forecast, width: int | None, classes: np.ndarray
) -> Members:
    """The members of the fit, from its labels; before anything is read those of the largest capsules."""
    train, p = told.train, n_columns(model, width or told.train.n_features)
    if not told.measure:
        dim = min(CAPSULE_DIM, p) if model.capsule_dim is None else model.capsule_dim
        return build_members(model.architecture, len(classes), dim)
    counts = class_counts(train, classes)
    dim = choose_dim(model, counts, p, train.url or "the training rows")
    members = build_members(model.architecture, len(classes), dim)
    check_classes(members, train, counts, p, model.init)
    return members


def _eigenproblems(members: Members, init: str) -> int:
    """Matrices whose eigenvectors the first weights and the M-step take."""
    factors, subspaces = {mask.tobytes() for mask in members.labels >= 0}, set()
    if init == "subspace":
        subspaces = {
            ((labels == i).tobytes(), int(d))
            for labels, dims in zip(members.labels, members.dims, strict=True)
            for i, d in enumerate(dims)
        }
    return len(factors) + len(subspaces)


def _passes(model: CapsuleRegression, n_rows: int) -> dict[str, int]:
    """Fewest and most passes, or epochs, and how many there usually are."""
    most = max_passes(model) if algorithm_of(model) == "em" else most_epochs(model, n_rows)
    nu, patience, scheduled = schedule_arrays(model.nu_schedule)
    least = int(patience.sum()) if scheduled else most
    usual = round(PASSES_OF_PATIENCE * least) if scheduled and algorithm_of(model) == "em" else most
    if model.tol:
        # A round takes a step and the pass that finds it flat; of epochs all but the first round need one.
        least = min(least, 2 * len(nu) if algorithm_of(model) == "em" else len(nu) + 1)
    return {"at_least": min(least, most), "expected": min(usual, most), "at_most": most}
