"""A capsule fit: classes and widths, the steps, online learners, and what all of it will need."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.parameters import is_number
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.data.layout import choose_layout
from scalelatent.engine.backend import make_backend
from scalelatent.engine.checkpoints import KEEP_STATES
from scalelatent.engine.incremental import count_leaves, leaf_order
from scalelatent.engine.mapwrite import block_rows
from scalelatent.engine.order import RowOrder
from scalelatent.engine.passes import Stage, seconds_per_row
from scalelatent.engine.plan import (
    ALLOWED_SHARE,
    Forecast,
    RowShape,
    describe_steps,
    steps_memory,
)
from scalelatent.engine.rates import (
    cpu_seconds,
    eigen_seconds,
    map_rate,
    noise,
    rates,
    reduction_rate,
    scratch_rates,
)
from scalelatent.errors import DataError, PlanError
from scalelatent.estimators.base import tell_cut
from scalelatent.estimators.steps import (
    Begin,
    Collect,
    Derive,
    Learn,
    LearnOnline,
    Map,
    Remember,
    Rows,
    Steps,
)
from scalelatent.kernels.streams import stream
from scalelatent.models.capsule.model.em import CapsuleEM, CapsulePass, CapsuleState, initial_state
from scalelatent.models.capsule.model.incremental import CapsuleIncremental, incremental_state
from scalelatent.models.capsule.model.members import Members, build_members
from scalelatent.models.capsule.model.online import (
    CapsuleStepwise,
    OnlineCapsule,
    OnlineState,
    online_state,
)
from scalelatent.models.capsule.model.passive import CapsulePassiveAggressive
from scalelatent.models.capsule.model.predict import CapsuleRows
from scalelatent.models.capsule.model.start import random_start, schedule_arrays, subspace_start
from scalelatent.reductions.eigen import leading_eigenvectors
from scalelatent.reductions.moments import Project, SecondMoments
from scalelatent.reductions.tally import CONFUSION_METRICS, ScoreTally

if TYPE_CHECKING:
    from .estimator import CapsuleRegression

AUTO_PROJECTION = 196
CAPSULE_DIM = 8
COUNT_ROWS = 2**20
ONLINE_PARAMETERS = ("n_epochs", "batch_rows", "n_chains", "kappa", "t0", "aggressiveness")
BATCH_ROWS, RUN_ROWS, BUFFER_RUNS = 1024, 1024, 16
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
# Seconds of a step of an online algorithm beside its chains and its M-step.
STEP_SECONDS = 1e-4


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


def choose_dim(model: CapsuleRegression, counts: np.ndarray, width: int, where: str) -> Any:
    """``capsule_dim``, or eight, cut to what the rows allow."""
    if model.capsule_dim is not None:
        return model.capsule_dim
    if model.init != "subspace":
        return CAPSULE_DIM
    members = build_members(model.architecture, len(counts), 1)
    fewest = min(
        int(counts[labels == i].sum()) for labels in members.labels for i in range(members.dims.shape[1])
    )
    dim = max(min(CAPSULE_DIM, width, fewest), 1)
    if dim < CAPSULE_DIM and counts.all():
        found = f"{width} columns" if width <= fewest else f"{fewest} rows for a capsule"
        tell_cut("capsule_dim", dim, CAPSULE_DIM, f"{where} have {found}")
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


def class_weights(class_weight: Any, classes: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
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
    members: Members, train: Rows | Dataset, counts: np.ndarray, width: int | None, init: str
) -> None:
    """Refuse capsules that the rows cannot fill, before any work."""
    where, p = train.url or "the training rows", width or train.n_features
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
    if largest > p and init == "subspace":
        raise ValueError(
            f"capsule_dim={largest} is above the {p} "
            f"{'directions of the projection' if width else 'features'}: give at most {p}, or "
            "init='random'"
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
    dim = choose_dim(model, counts, width or train.n_features, where)
    members = build_members(model.architecture, len(classes), dim)
    check_classes(members, train, counts, width, model.init)
    weights = class_weights(model.class_weight, classes, counts)
    last = _last_fit(model, members, width or train.n_features, classes)
    most = int(model.max_iter if model.algorithm == "em" else model.n_epochs)
    model.seed_, rows = yield Begin(
        {"members": members.n_members, "max_iter": most, "capsule_dim": plain_dim(members.dims)},
        keeps_records=model.algorithm == "incremental",
        all_rows="" if model.algorithm == "em" else ALL_ROWS,
    )
    last = yield Remember("start", last)
    held = rows.get("validation")
    basis, rows = yield from project_steps(rows, width, last.get("basis"))
    em, sums, w = yield from start_steps(model, rows, members, classes, weights, last.get("W"))

    def predictor(state: CapsuleState) -> CapsuleRows:
        return CapsuleRows(members, em.weights(state), basis, "probabilities")

    if model.algorithm == "em":
        step: Any = Learn("estep", em, initial_state(w, members.n_members), rows, classes, predictor)
    else:
        step = online_step(model, em, sums["weight"], sums["count"], w, rows, classes, model.seed_)
    result = yield step
    w, decided = step.learner.weights(result.state), None
    if held is not None and members.n_members > 1:
        # Each member's best is of another pass: what they decide together is told by a pass of its own, over
        # the rows as they were given, as in `score`.
        tally = ScoreTally(CapsuleRows(members, w, basis, "probabilities"), len(classes))
        found = yield Collect(f"decision-{result.state.iteration}", tally, held, classes)
        decided = float(CONFUSION_METRICS["error"](found["confusion"]))
    model._keep(classes, em, basis, result, w, (np.array(sums["weight"]), np.array(sums["count"])), decided)


def _last_fit(
    model: CapsuleRegression, members: Members, width: int, classes: np.ndarray
) -> dict[str, np.ndarray]:
    """W and basis of the fit that ``warm_start`` starts from; empty where there is none."""
    w = getattr(model, "W_", None) if model.warm_start else None
    if w is None:
        return {}
    if w.shape != (members.total_dim, width) or not np.array_equal(model.classes_, classes):
        raise ValueError(
            f"warm_start: the last fit has weights of shape {w.shape} and classes {model.classes_.tolist()}, "
            f"this one {(members.total_dim, width)} and {classes.tolist()}: fit with warm_start=False"
        )
    return {"W": w} if model.projection_ is None else {"W": w, "basis": model.projection_}


def project_steps(
    rows: Mapping[str, Rows], width: int | None, basis: np.ndarray | None
) -> Generator[Any, Any, tuple[np.ndarray | None, Mapping[str, Rows]]]:
    """Basis of the projection, and the projected rows: one pass for the moments, one to write."""
    if width is None:
        return None, rows
    train = rows["train"]
    if basis is None or basis.shape != (train.n_features, width):
        stats = yield Collect("svd", SecondMoments(train.n_features), train)
        basis = yield Derive(_leading_directions, (stats["moment"][0], width))
    projected = {}
    for name, part in rows.items():
        projected[name] = yield Map(f"project-{name}", Project(basis), part)
    return basis, projected


def _check_zeros(moment: np.ndarray, classes: np.ndarray, each: bool) -> None:
    """Refuse rows that are all zeros, and where first weights span the rows of each class a class of them."""
    zeros = [str(name) for name, own in zip(classes, moment, strict=True) if not np.trace(own)]
    if len(zeros) == len(classes):
        raise DataError(
            "every feature of every row is 0, so that there is nothing to learn: look at the rows"
        )
    if zeros and each:
        raise DataError(
            f"every feature of every row of class {', '.join(zeros)} is 0, and nothing spans its capsule: "
            "look at these rows, leave the class out, or use init='random'"
        )


def _leading_directions(moment: np.ndarray, width: int) -> np.ndarray:
    return leading_eigenvectors(moment, width)[1]


def start_steps(
    model: CapsuleRegression,
    rows: Mapping[str, Rows],
    members: Members,
    classes: np.ndarray,
    class_weight: np.ndarray | None,
    first: np.ndarray | None,
) -> Generator[Any, Any, tuple[CapsuleEM, Stats, np.ndarray]]:
    """The learner, the second moments of the rows, and the first W (``first`` where it is given)."""
    train = rows["train"]
    reduction = SecondMoments(train.n_features, len(classes), class_weight)
    stats = yield Collect("moments", reduction, train, classes)
    moment, weight = stats["moment"], stats["weight"]
    if not (weight > 0).all():
        raise DataError(
            f"class {classes[int(np.argmin(weight))]!s} has no weight: give each class rows with "
            "sample_weight and class_weight above 0"
        )
    _check_zeros(moment, classes, first is None and model.init != "random")
    nu, patience, scheduled = schedule_arrays(model.nu_schedule)
    learner = CapsuleEM(
        members=members,
        moment=moment,
        nu=nu,
        patience=patience,
        scheduled=scheduled,
        momentum=float(model.momentum),
        ridge=float(model.ridge),
        tol=float(model.tol or 0),
        max_iter=int(model.max_iter),
        class_weight=class_weight,
        has_validation=int("validation" in rows),
    )
    if first is None and model.init == "random":
        rng = stream(model.seed_, "capsule-start")
        first = random_start(members, moment, weight, float(model.init_scale), rng)
    elif first is None:
        first = yield Derive(subspace_start, (members, moment, weight))
    return learner, stats, first


# -- online algorithms -----------------------------------------------------------------------------------


def row_order(
    model: CapsuleRegression, n_rows: int, members: Members, options: Mapping[str, Any], seed: int
) -> RowOrder:
    """The rows of each step: a function of parameters, seed and engine options."""
    chains = int(model.n_chains)
    if model.algorithm == "incremental":
        least = LEAF_ROWS_A_DIMENSION * members.total_dim
        batch = None if model.batch_rows is None else int(model.batch_rows)
        return leaf_order(n_rows, chains, batch, min_leaf_rows=least)
    buffer = int(options.get("buffer_runs") or BUFFER_RUNS)
    # Few rows: shorter runs, so that each chain gets some from all over and permutes all it has.
    run = int(options.get("run_rows") or min(RUN_ROWS, n_rows // (buffer * chains) + 1))
    return RowOrder(n_rows, seed, batch_rows(model), n_chains=chains, run_rows=run, buffer_runs=buffer)


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

    incremental = model.algorithm == "incremental"
    if incremental:
        # Leaves are the same whatever the options say.
        learner: OnlineCapsule = CapsuleIncremental(em, weight, count, count_leaves(order({})))
        state: OnlineState = incremental_state(w, members.n_members)
    else:
        state = online_state(w, members.n_members)
        if model.algorithm == "stepwise":
            learner = CapsuleStepwise(em, weight, count, float(model.kappa), float(model.t0))
        else:
            learner = CapsulePassiveAggressive(em, weight, count, float(model.aggressiveness))
    return LearnOnline(
        model.algorithm, learner, state, rows, classes, order, int(model.n_epochs), keeps_leaves=incremental
    )


# -- what it will need -----------------------------------------------------------------------------------


def plan(model: CapsuleRegression, told: Forecast) -> dict[str, Any]:
    train, validation, resources = told.train, told.held, told.resources
    classes = train.classes
    assert classes is not None
    width = projected_width(model.projection, train.n_features)
    if told.measure:
        counts = class_counts(train, classes)
        dim = choose_dim(model, counts, width or train.n_features, train.url or "the training rows")
        members = build_members(model.architecture, len(classes), dim)
        check_classes(members, train, counts, width, model.init)
    else:
        most = min(CAPSULE_DIM, width or train.n_features)
        dim = most if model.capsule_dim is None else model.capsule_dim
        members = build_members(model.architecture, len(classes), dim)
    check_width(width, train, len(classes), resources.memory)
    p = width or train.n_features
    told.labels(train)
    told.labels(validation)
    parts: dict[str, Any] = {"train": train}
    if validation is not None:
        parts["validation"] = validation
    weights, moments = members.total_dim * p * 8, len(classes) * p * p * 8
    factors = len({labels.tobytes() for labels in members.labels >= 0}) * 2 * p * p * 8
    scratch = 0
    if width is not None:
        narrower = "make the rows narrower: keep the columns that matter, or reduce them first"
        held = 3 * train.n_features**2 * 8
        stage = told.stage(
            "svd", {"train": SecondMoments(train.n_features)}, {"train": train}, held, narrower
        )
        told.add("svd", told.a_pass(stage, _rates(told, stage, None, 0)))
        told.add("directions", told.rate(lambda: eigen_seconds(train.n_features), 0.0))
        for name, rows in list(parts.items()):
            parts[name] = RowShape(len(rows), p, train.is_stored)
            told.add(f"project-{name}", _projecting(told, rows, p))
            scratch += parts[name].nbytes if train.is_stored else 0
    rows = parts["train"]
    stage = told.stage(
        "moments",
        {"train": SecondMoments(p, len(classes))},
        {"train": rows},
        2 * moments,
        f"set projection below {p}",
    )
    told.add("moments", told.a_pass(stage, _rates(told, stage, None, len(classes))))
    pairs = _eigenproblems(members, model.init)
    told.add("start", told.rate(lambda: pairs * eigen_seconds(p), 0.0))
    em = _learner(model, members, len(classes), p, int(validation is not None))
    w = np.random.default_rng(0).normal(size=(members.total_dim, p))
    out, passes = told.out, _passes(model)
    if model.algorithm == "em":
        stage = told.stage("estep", em, parts, moments + factors + 8 * weights, SMALLER)
        block, arrays = stage.grids["train"].block_rows, 3
        state = initial_state(w, members.n_members)
        usual, full = _estep_rates(told, stage, em, state, len(classes))
        beside = 2 * members.total_dim * p**2 / MSTEP_RATE
        per_pass, slowest = (told.a_pass(stage, one) + beside for one in (usual, full))
        fewest, expected, longest = (passes[key] for key in ("at_least", "expected", "at_most"))
        told.add("estep", per_pass * expected, per_pass * fewest, slowest * longest)
        out["probe"] = {
            "read_seconds_per_row": told.reading(rows),
            "compute_seconds_per_row": usual["train"],
            "seconds_per_pass": per_pass,
        }
        shorter = "lower max_iter, or set algorithm='stepwise', which learns in a few passes"
    else:
        ones = np.ones(len(classes))
        step = online_step(model, em, ones, ones, w, {"train": Rows(train)}, classes, 0)
        order = step.order(told.options)
        arrays = 6 if step.keeps_leaves else 5
        row_bytes = 4 * p if width else train.nbytes // len(train)
        memory = steps_memory(
            step.learner,
            order,
            p,
            resources,
            train,
            row_bytes,
            moments + factors,
            arrays * weights,
            step.keeps_leaves,
        )
        told.fits(step.name, describe_steps(step.learner, order), memory, SMALLER)
        told.caches(None, rows.nbytes if train.is_stored else 0)
        per_epoch = _epoch_seconds(told, step, order, rows, row_bytes, len(classes))
        if validation is not None:
            scoring = {"train": em.reductions()["validation"]}
            stage = told.stage("validation", scoring, {"train": parts["validation"]}, 2 * weights, SMALLER)
            per_epoch["validation"] = told.a_pass(
                stage, _rates(told, stage, initial_state(w, members.n_members), len(classes))
            )
        if step.keeps_leaves:
            leaves = order.n_steps * order.n_chains * step.learner.layout().nbytes
            scratch += (KEEP_STATES + 1) * leaves
            per_epoch["leaves"] = told.rate(lambda: leaves * sum(scratch_rates()), 0.0)
        block, seconds = order.chain_rows, sum(per_epoch.values())
        fewest, expected, longest = (passes[key] for key in ("at_least", "expected", "at_most"))
        told.add(step.name, seconds * expected, seconds * fewest, seconds * longest)
        out["probe"] = {**per_epoch, "seconds_per_pass": seconds}
        shorter = "lower n_epochs"
    of_a_row = 2.0 * p * (members.total_dim + (train.n_features if width else 0)) / PREDICT_RATE
    out["predicting_seconds_per_row"] = told.row_seconds(of_a_row, told.reading(train))
    out["scratch_bytes"] = scratch
    out["device_bytes"] = 4 * (members.total_dim * p + block * (2 * p + members.total_dim))
    out["checkpoint_bytes"] = arrays * weights
    out["passes"] = passes
    model_bytes = weights + moments + (8 * train.n_features * p if width else 0)
    return told.told(scratch + KEEP_STATES * arrays * weights + 2 * model_bytes, shorter)


def _rates(told: Forecast, stage: Stage, state: Any, codes: int) -> dict[str, float]:
    """Seconds a row of each part of a stage, on one thread of those that there are."""
    found = {}
    for part, reduction in stage.reductions.items():
        dataset, rows = stage.datasets[part], stage.grids[part].block_rows
        p, dtype = dataset.n_features, dataset.dtype
        threads = told.resources.slots
        found[part] = told.rate(
            lambda: reduction_rate(stage.name, reduction, state, rows, p, dtype, codes, threads),  # noqa: B023  called here
            seconds_per_row(reduction),
        )
    return found


def _estep_rates(
    told: Forecast, stage: Stage, em: CapsuleEM, state: Any, codes: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds a row as they will usually be, and where every row takes part in both products."""
    full = _rates(told, stage, state, codes)
    grid, p = stage.grids["train"], em.moment.shape[1]
    dtype = getattr(stage.datasets["train"], "dtype", "float32")
    first = CapsulePass(em.members, p, em.nu, None, False)
    product = told.rate(
        lambda: reduction_rate(
            "capsule_scores", first, state, grid.block_rows, p, dtype, codes, told.resources.slots
        ),
        full["train"] / 2,
    )
    return {**full, "train": product + ACTIVE * max(full["train"] - product, 0.0)}, full


def _projecting(told: Forecast, rows: Dataset, width: int) -> float:
    """Seconds of projecting rows, and of writing them where they are stored."""
    p, resources = rows.n_features, told.resources
    basis = np.broadcast_to(np.float64(0.01), (p, width))
    nominal = 2.0 * p * width / 6e10
    rate = told.rate(
        lambda: map_rate(
            "capsule_project", Project(basis), min(block_rows(p), len(rows)), p, rows.dtype, resources.slots
        ),
        nominal,
    )
    slots = resources.slots
    if rows.is_stored:
        shards = choose_layout(len(rows), (width,), np.dtype("float32")).n_shards(len(rows))
        slots = min(slots, shards)
        rate += told.rate(lambda: scratch_rates()[0] * 4 * width, 0.0)
    return len(rows) * told.row_seconds(rate, told.reading(rows), slots)


def _eigenproblems(members: Members, init: str) -> int:
    """Matrices whose eigenvectors the first weights and the M-step take."""
    masks = members.labels >= 0
    count = len({mask.tobytes() for mask in masks})
    if init == "subspace":
        keys = set()
        for r in range(members.n_members):
            for i, d in enumerate(members.dims[r]):
                keys.add(((members.labels[r] == i).tobytes(), int(d)))
        count += len(keys)
    return count


def _epoch_seconds(
    told: Forecast, step: LearnOnline, order: RowOrder, rows: Dataset | RowShape, row_bytes: int, codes: int
) -> dict[str, float]:
    """Seconds of an epoch, by what takes them."""
    learner, p, threads = (
        step.learner,
        step.learner.em.moment.shape[1],
        min(told.resources.slots, order.n_chains),
    )
    what = f"capsule_{step.name} {order.chain_rows}x{p} {learner.layout().size} {codes}"

    def chain() -> float:
        def make() -> Any:
            prepared = learner.prepare(step.state, make_backend("cpu"))
            block = noise(order.chain_rows, p, "float32", codes)
            stats = Stats.zeros(learner.layout(), order.chain_rows)
            if step.keeps_leaves:
                return lambda: learner.exchange(prepared, None, learner.visit(prepared, block, None), stats)
            return lambda: learner.run_chain(prepared, block, stats)

        return cpu_seconds(make, threads) / order.chain_rows

    def stepping() -> float:
        def make() -> Any:
            backend = make_backend("cpu")
            block = noise(order.chain_rows, p, "float32", codes)
            stats = Stats.zeros(learner.layout(), order.chain_rows)
            prepared = learner.prepare(step.state, backend)
            if step.keeps_leaves:
                learner.exchange(prepared, None, learner.visit(prepared, block, None), stats)
            else:
                learner.run_chain(prepared, block, stats)

            def call() -> None:
                learner.step(step.state, stats, order.batch_rows)
                for _ in range(threads):
                    learner.prepare(step.state, backend)

            return call

        return cpu_seconds(make, 1)

    nominal = learner.flops_per_row() / 6e10
    computing = told.rate(lambda: rates.get(f"{what} t{threads}", chain), nominal)
    beside = told.rate(lambda: rates.get(f"{what} {order.batch_rows} step t{threads}", stepping), 1e-4)
    reading = told.reading(rows) + told.gathering(row_bytes)
    overhead = STEP_SECONDS * order.n_steps
    return {
        "rows": order.n_rows * told.row_seconds(computing, reading, threads),
        "steps": order.n_steps * beside + overhead,
    }


def _learner(
    model: CapsuleRegression, members: Members, n_classes: int, p: int, has_validation: int
) -> CapsuleEM:
    nu, patience, scheduled = schedule_arrays(model.nu_schedule)
    # Zeros without memory: only shapes matter here.
    moment = np.broadcast_to(np.zeros(()), (n_classes, p, p))
    return CapsuleEM(members, moment, nu, patience, scheduled, 0.0, 0.0, 0.0, 1, None, has_validation)


def _passes(model: CapsuleRegression) -> dict[str, int]:
    """Fewest and most passes, or epochs, and how many there usually are."""
    most = int(model.max_iter if model.algorithm == "em" else model.n_epochs)
    nu, patience, scheduled = schedule_arrays(model.nu_schedule)
    least = int(patience.sum()) if scheduled else most
    usual = round(PASSES_OF_PATIENCE * least) if scheduled and model.algorithm == "em" else most
    if model.tol:
        # A round takes a step and the pass that finds it flat; of epochs all but the first round need one.
        least = min(least, 2 * len(nu) if model.algorithm == "em" else len(nu) + 1)
    return {"at_least": min(least, most), "expected": min(usual, most), "at_most": most}
