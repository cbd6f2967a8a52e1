"""What a capsule fit will need, before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.data.layout import choose_layout
from scalelatent.engine.backend import make_backend
from scalelatent.engine.checkpoints import KEEP_STATES
from scalelatent.engine.mapwrite import block_rows
from scalelatent.engine.passes import Stage, seconds_per_row
from scalelatent.engine.plan import Forecast, Resources, RowShape, describe_steps, steps_memory
from scalelatent.engine.rates import (
    cpu_seconds,
    eigen_seconds,
    map_rate,
    noise,
    rates,
    reduction_rate,
    scratch_rates,
)
from scalelatent.estimators.steps import LearnOnline, Rows
from scalelatent.models.capsule.model.em import CapsuleEM, CapsulePass, initial_state
from scalelatent.models.capsule.model.members import Members, build_members
from scalelatent.models.capsule.model.start import schedule_arrays
from scalelatent.reductions.moments import Project, SecondMoments

from .online_fit import online_step
from .settings import (
    CAPSULE_DIM,
    check_classes,
    check_width,
    choose_dim,
    class_counts,
    projected_width,
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


def plan(
    model: Any,
    train: Dataset,
    validation: Dataset | None,
    resources: Resources,
    options: dict[str, Any],
    *,
    measure: bool = True,
) -> dict[str, Any]:
    """What a fit of these rows would need; see :meth:`.CapsuleRegression.plan`.

    Parameters
    ----------
    measure : bool
        Look at the labels, and measure what is not known of this machine.
    """
    model._check_params()
    classes = train.classes
    assert classes is not None
    width = projected_width(model.projection, train.n_features)
    if measure:
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
    told = Forecast("capsule", train, resources, options, measure)
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
        step = online_step(model, em, ones, ones, w, {"train": Rows(train)}, classes)
        order = step.order(options)
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
    told: Forecast, step: LearnOnline, order: Any, rows: Any, row_bytes: int, codes: int
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


def _learner(model: Any, members: Members, n_classes: int, p: int, has_validation: int) -> CapsuleEM:
    nu, patience, scheduled = schedule_arrays(model.nu_schedule)
    # Zeros without memory: only shapes matter here.
    moment = np.broadcast_to(np.zeros(()), (n_classes, p, p))
    return CapsuleEM(members, moment, nu, patience, scheduled, 0.0, 0.0, 0.0, 1, None, has_validation)


def _passes(model: Any) -> dict[str, int]:
    """Fewest and most passes, or epochs, and how many there usually are."""
    most = int(model.max_iter if model.algorithm == "em" else model.n_epochs)
    nu, patience, scheduled = schedule_arrays(model.nu_schedule)
    least = int(patience.sum()) if scheduled else most
    usual = round(PASSES_OF_PATIENCE * least) if scheduled and model.algorithm == "em" else most
    if model.tol:
        # A round takes a step and the pass that finds it flat; of epochs all but the first round need one.
        least = min(least, 2 * len(nu) if model.algorithm == "em" else len(nu) + 1)
    return {"at_least": min(least, most), "expected": min(usual, most), "at_most": most}
