"""The fit of a conditional RBM: checks of the inputs, steps of the fit, and the forecast of `plan`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from scalelatent.contract.block_requirements import Corruption, Targets
from scalelatent.contract.learners import Block
from scalelatent.contract.parameters import is_number, is_whole
from scalelatent.data import Dataset
from scalelatent.data.read.selected import select_rows
from scalelatent.engine.order import RowOrder, held_rows
from scalelatent.engine.passes import BLOCK_ROWS, FLOP_RATE
from scalelatent.engine.plan import STEP_SECONDS, Forecast
from scalelatent.engine.reading import as_rows, join_rows
from scalelatent.errors import DataError, warn_user
from scalelatent.estimators.base import warn_reduced
from scalelatent.estimators.steps import ComputeValue, MappedRows, StartFit, Steps, StoreArrays, TrainOnline
from scalelatent.kernels.corruption import check_corruption
from scalelatent.kernels.streams import stream
from scalelatent.models.crbm.kernels.inference import (
    BLOCKS,
    MESSAGE_BYTES,
    check_weights,
    find_largest_magnitude,
)
from scalelatent.models.crbm.model.beliefs import choose_n_sweeps
from scalelatent.models.crbm.model.columns import ColumnUnits
from scalelatent.models.crbm.model.energy import CrbmShape
from scalelatent.models.crbm.model.negative_phases import LEARNERS
from scalelatent.models.crbm.model.online import CrbmLearner
from scalelatent.models.crbm.model.state import CrbmState

from .parameters import (
    MIN_GAIN,
    PATIENCE,
    PATIENCE_ROWS,
    RATES,
    choose_batch_size,
    choose_n_chains,
    choose_n_epochs,
    count_epochs,
    count_step_rows,
    stops_early,
)

if TYPE_CHECKING:
    from .estimator import ConditionalRBM

_log = logging.getLogger("scalelatent")

# Name of the random stream that corrupts rows for scores and for the report; training has another stream.
TEST_STAGE = "corruption-test"
# Reason in the error of a fit that should skip rows that cannot be read.
ALL_ROWS = "a conditional RBM shuffles all rows in advance and cannot skip some of them during the fit"
# End of the warning about rows whose inference did not converge to the tolerance ``tol``.
REMEDY = "give more sweeps (n_sweeps) or a larger tol"
# Advice in the error of a fit that needs too much memory.
SMALLER = "lower n_hidden, or set n_chains lower"
# Limits of the sample from which the scale of each column of x is estimated: rows, contiguous ranges of rows,
# and bytes.
SAMPLE_ROWS, SAMPLE_RANGES, SAMPLE_BYTES = 10_000, 64, 2**28
# `plan` measures the seconds of an inference with these numbers of sweeps (rounds of messages between units).
# It assumes that the seconds are linear in the number of sweeps.
TIMED_SWEEPS = (4, 12)


def pack_parameters(
    W: npt.ArrayLike, bv: npt.ArrayLike, bh: npt.ArrayLike, Wvx: npt.ArrayLike | None,
    Whx: npt.ArrayLike | None,
) -> tuple[CrbmShape, np.ndarray]:  # fmt: skip
    """Return numbers of units and the parameter vector; raise DataError if arrays do not fit each other."""
    given = {"W": W, "Wvx": Wvx, "Whx": Whx, "bv": bv, "bh": bh}
    arrays: dict[str, np.ndarray] = {}
    for name, value in given.items():
        try:
            arrays[name] = np.zeros((0, 0)) if value is None else np.asarray(value, dtype=np.float32)
        except (TypeError, ValueError):
            raise DataError(f"{name}: give an array of real numbers, not {type(value).__name__}") from None
    if arrays["W"].ndim != 2:
        raise DataError(f"W has shape {arrays['W'].shape}: give couplings of shape (v, h)")
    (v, h), x = arrays["W"].shape, max(a.shape[-1] if a.ndim else 0 for a in (arrays["Wvx"], arrays["Whx"]))
    shape = CrbmShape(v, h, x)
    flat = np.zeros(shape.n_parameters, dtype=np.float32)
    for name, (place, expected) in shape.layout.slices.items():
        if given[name] is None and name in ("Wvx", "Whx"):
            continue
        if arrays[name].shape != expected:
            raise DataError(
                f"{name} has shape {arrays[name].shape}, but with W of shape {(v, h)} it must be {expected}"
                + (f" (x = {x})" if name in ("Wvx", "Whx") else "")
            )
        if not np.isfinite(arrays[name]).all():
            raise DataError(f"{name} has non-finite values (NaN or inf, in float32)")
        flat[place] = arrays[name].reshape(-1)
    check_weights(find_largest_magnitude(arrays["W"]))
    return shape, flat


def make_rates(model: ConditionalRBM, n_rows: int) -> np.ndarray:
    """Return an array of learning rates of epochs of ``n_rows`` rows; later epochs use the last rate."""
    given: Any = model.learning_rate
    if given is None:
        given = [(rate, count_epochs(n_rows, rows, least)) for rate, rows, least in RATES]
    pairs = [(given, 1)] if is_number(given) else given
    return np.repeat([float(rate) for rate, _ in pairs], [int(n) for _, n in pairs])


def make_corruption(given: Any, ds: Dataset, seed: int, stage: str = "corruption") -> Corruption:
    """Return the corruption that the parameter ``corruption`` describes, with the random stream ``stage``."""
    keys = {"flip": {"kind", "rate"}, "occlude": {"kind", "size", "shape"}}
    kind = given.get("kind") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in keys or set(given) - keys[kind]:
        raise ValueError(
            f'corruption={given!r}: give {{"kind": "flip", "rate": 0.1}} or {{"kind": "occlude", "size": 8}} '
            "(with the images' shape where rows have none), or None"
        )
    if kind == "flip":
        how: dict[str, Any] = {"rate": given.get("rate", 0.1)}
        if not is_number(how["rate"]):
            raise ValueError(f"corruption={given!r}: rate must be a share from 0 to 1")
    else:
        side = round(ds.n_features**0.5)
        shape = given.get("shape")
        if shape is None:
            shape = ds.feature_shape if len(ds.feature_shape) == 2 else (side, side)
        how = {
            "size": _read_sides(given, "size", given.get("size", 8)),
            "shape": _read_sides(given, "shape", shape),
        }
    check_corruption(kind, ds.n_features, **how)
    return Corruption(kind, seed=seed, stage=stage, **how)


def _read_sides(given: Any, name: str, value: Any) -> tuple[int, int]:
    """Return (height, width) in pixels from ``value``, which is one number or two numbers."""
    both = (value, value) if is_whole(value) else tuple(value) if np.iterable(value) else ()
    if len(both) != 2 or not all(map(is_whole, both)):
        raise ValueError(
            f"corruption={given!r}: {name} must be a whole number of pixels, or two of them (height, width)"
        )
    return int(both[0]), int(both[1])


def check_rows(model: ConditionalRBM, train: Dataset) -> None:
    """Raise DataError for row weights, for targets that do not fit the model, or for missing inputs."""
    where = train.url or "the rows"
    if model.corruption is not None and train.has_targets:
        raise DataError(
            f"{where}: corruption makes the inputs from clean rows, but there are outputs y as well: leave "
            "out y (the targets), or set corruption=None"
        )
    if train.has_weight:
        raise DataError(
            f"{where}: the rows have weights, but a conditional RBM learns from all rows equally: leave out "
            "the weights"
        )
    if model._source == "plain" and train.has_targets:
        raise DataError(
            f"{where}: there are outputs y, but a plain RBM learns rows alone: leave out the target, or set "
            "conditional=True"
        )
    if model._source == "plain" and model.learner in ("logistic", "cd-percloss"):
        raise DataError(
            f"learner={model.learner!r} starts from a prediction from x, and a plain RBM has no x: pass X, "
            "or choose learner='cd', 'pcd' or 'mle-bp' for a plain RBM"
        )


def check_batch(model: ConditionalRBM, train: Dataset) -> None:
    """Raise DataError if a step needs more rows than the data has; the message suggests a batch size."""
    n = count_training_rows(model, train)
    rows = count_step_rows(model, n)
    if rows <= n:
        return
    unit = choose_n_chains(model, n) if model.local_steps or model.n_chains else 1
    if model.local_steps:
        local = f" (batch_size x local_steps x n_chains = {rows} rows)"
        fits, lower = n // (unit * int(model.local_steps)), "local_steps or n_chains"
    else:
        local, fits, lower = "", n // unit * unit, "n_chains"
    given = "" if model.batch_size is None else ", and batch_size"
    remedy = f"set batch_size to {fits}" if fits and given else f"lower {lower}{given}"
    raise DataError(
        f"{train.url or 'the rows'}: a step of batch_size={choose_batch_size(model, n)}{local} is larger "
        f"than the data, which has {n} rows: {remedy}"
    )


def check_patience(model: ConditionalRBM, validated: bool) -> None:
    """Raise ValueError if ``patience`` is set, but there are no validation rows."""
    if model.patience is not None and not validated:
        raise ValueError(
            f"patience={model.patience} waits for a better validation error, but there are no validation "
            "rows: pass validation (in a job [data] validation), or leave patience out"
        )


def make_shape(model: ConditionalRBM, train: Dataset) -> CrbmShape:
    """Return the numbers of outputs, hidden units and columns of x of the model that ``train`` needs."""
    hidden = 0 if model.learner == "logistic" else int(model.n_hidden)
    if model._source == "pairs":
        return CrbmShape(int(train.n_targets or 0), hidden, train.n_features)
    v = train.n_features
    return CrbmShape(v, hidden, v if model._source == "corruption" else 0)


def choose_targets(model: ConditionalRBM, ds: Dataset, seed: int, stage: str = "corruption") -> Targets:
    """Return the source of the outputs v of a dataset: its targets or, for a plain RBM, its rows.

    With ``corruption`` and without targets, the rows are the outputs, and corrupted copies are the inputs x.
    """
    if model._source == "plain":
        return Targets("x")
    if model._source == "corruption" and not ds.has_targets:
        return Targets("x", make_corruption(model.corruption, ds, seed, stage))
    return Targets()


def hold_out(train: Dataset, split: tuple[int, int]) -> Dataset:
    """Return the held-out rows of a dataset with their outputs, in memory.

    With ``split`` = (rows, period), the last ``rows`` rows of each ``period`` rows are held out.
    """
    some = select_rows(train, held_rows(split, len(train)))
    n, x = len(some), some.read_x(0, len(some))
    rows = Dataset.from_arrays(x.reshape(n, *train.feature_shape) if isinstance(x, np.ndarray) else x)
    return rows.with_target(Dataset.from_arrays(some.read_targets(0, n))) if some.has_targets else rows


@lru_cache(maxsize=256)
def log_held_rows(n_held: int, n_rows: int, where: str) -> None:
    """Log a warning that rows are held out; the cache prevents that a process repeats the same warning."""
    _log.warning(
        "n_epochs=None holds out %d of the %d rows of %s, and ends the fit when their error stops falling; "
        "pass validation rows, or set n_epochs to a number or 'paper', to learn from all rows",
        n_held,
        n_rows,
        where,
    )


def count_training_rows(model: ConditionalRBM, train: Dataset) -> int:
    """Return the number of training rows that are not held out for validation."""
    return len(train) - len(held_rows(model._held, len(train)))


def make_order(model: ConditionalRBM, train: Dataset, options: Mapping[str, Any], seed: int) -> RowOrder:
    """Return the order in which the fit reads rows; ``options`` are the ``[engine]`` options of the job."""
    n = count_training_rows(model, train)
    return RowOrder.choose(
        n, seed, count_step_rows(model, n), choose_n_chains(model, n), options, model._held
    )


def make_learner(model: ConditionalRBM, train: Dataset, validation: Dataset | None, seed: int) -> CrbmLearner:
    """Return a learner with the model's settings, and with defaults for those that are None."""
    n = count_training_rows(model, train)
    shape, chains, size = make_shape(model, train), choose_n_chains(model, n), choose_batch_size(model, n)
    waits = stops_early(model) and validation is not None and model.patience is None
    steps = LEARNERS[model.learner].gibbs_steps if model.gibbs_steps is None else int(model.gibbs_steps)
    held_targets = Targets()
    if validation is not None:
        held_targets = choose_targets(model, validation, seed, "corruption-validation")
    return CrbmLearner(
        shape=shape,
        learner=model.learner,
        rates=make_rates(model, n),
        momentum=float(model.momentum),
        weight_decay=float(model.weight_decay),
        n_sweeps=None if model.n_sweeps is None else int(model.n_sweeps),
        tol=None if model.tol is None else float(model.tol),
        gibbs_steps=steps,
        n_chains=chains,
        chain_rows=size if model.local_steps else size // chains,
        local_steps=int(model.local_steps or 0),
        seed=seed,
        patience=count_epochs(n, PATIENCE_ROWS, PATIENCE) if waits else int(model.patience or 0),
        gain=MIN_GAIN if waits else 0.0,
        has_validation=validation is not None,
        targets=choose_targets(model, train, seed),
        validation_targets=held_targets,
        validation_inference=model.inference or LEARNERS[model.learner].inference,
    )


def fit_steps(model: ConditionalRBM, rows: Mapping[str, MappedRows]) -> Steps:
    """Yield the steps of a fit; the caller runs each step and sends its result. Set learned attributes."""
    train = rows["train"].dataset
    validation = rows["validation"].dataset if "validation" in rows else None
    model._check_params()
    model._check_rows(train, validation)
    check_patience(model, validation is not None)
    # This call only checks that the corruption fits the rows; the learner of the fit needs a seed.
    make_learner(model, train, validation, 0)
    n = count_training_rows(model, train)
    size, epochs = choose_batch_size(model, n), choose_n_epochs(model, n, validation is not None)
    if size < choose_batch_size(model):
        warn_reduced("batch_size", size, choose_batch_size(model), f"{train.url or 'the data'} has {n} rows")
    if n < len(train):
        log_held_rows(len(train) - n, len(train), train.url or "X")
    info = {"max_iter": epochs, "batch_size": size}
    model.seed_, rows = yield StartFit(info, all_rows=ALL_ROWS)
    model.batch_size_ = size
    learner = make_learner(model, train, validation, model.seed_)
    if model._source == "pairs":
        learner = replace(learner, units=(yield ComputeValue(measure_columns, (train,))))
    theta = choose_start(model, learner)
    start = yield StoreArrays("start", {"theta": theta})

    def order(options: Mapping[str, Any]) -> RowOrder:
        return make_order(model, train, options, model.seed_)

    state = learner.start(np.ascontiguousarray(start["theta"]))
    result = yield TrainOnline("learn", learner, state, rows, None, order, epochs)
    model._keep(learner, result.state, result.history)
    warn_unconverged(model, result.history)


def measure_columns(train: Dataset) -> ColumnUnits | None:
    """Return shift and scale of columns of x, from at most 10,000 rows; None if x is used unchanged."""
    n = len(train)
    size = min(n, SAMPLE_ROWS, max(SAMPLE_BYTES // (8 * train.n_features), 1))
    width = -(-size // SAMPLE_RANGES) if size < n else n
    starts = np.linspace(0, n - width, size // width, dtype=int)
    return ColumnUnits.measure(join_rows([as_rows(train.read_x(a, a + width)) for a in starts]))


def choose_start(model: ConditionalRBM, learner: CrbmLearner) -> np.ndarray:
    """Return the parameters of the last fit for a warm start, else small random parameters.

    If the last fit was logistic regression, a warm start adds hidden units with small random weights.
    """
    shape, units = learner.shape, learner.units
    theta = None
    if model.warm_start and hasattr(model, "W_"):
        last = model._shape
        if last != replace(shape, n_hidden=0):
            check_shape(model, shape, "warm_start", "fit with warm_start=False")
        theta = model._theta if units is None else units.convert_to_standardised(last, model._theta)
        if last == shape:
            return theta
    start = shape.start(stream(model.seed_, "crbm-start"), float(model.init_scale))
    if theta is not None:
        found, params = last.split(theta), shape.split(start)
        params.Wvx[...], params.bv[...] = found.Wvx, found.bv
    return start


def check_shape(
    model: ConditionalRBM,
    shape: CrbmShape,
    call: str = "partial_fit",
    remedy: str = (
        "set n_hidden and learner back, or start again with fit; warm_start=True keeps the parameters "
        "of logistic regression"
    ),
) -> None:
    """Raise ValueError if ``shape`` differs from the numbers of units of the fitted model."""
    if model._shape != shape:
        raise ValueError(f"{call}: the last fit was of another shape ({model._shape}, now {shape}): {remedy}")


def warn_unconverged(model: ConditionalRBM, history: list[dict[str, Any]]) -> None:
    """Warn if ``tol`` is set and rows of the last epoch did not meet it."""
    if model.tol is None or not history or history[-1].get("converged") is None:
        return
    missed = 1.0 - float(history[-1]["converged"])
    if missed > 0:
        warn_user(
            f"tol={model.tol:g} was not met by {missed:.1%} of the rows within {history[-1]['n_sweeps']} "
            f"sweeps in the last epoch: {REMEDY}; or lower learning_rate"
        )


def resize_state(learner: CrbmLearner, state: CrbmState) -> CrbmState:
    """Return the state with a new velocity, or new Gibbs chains, if changed parameters need another size."""
    fresh = learner.start(state.theta)
    others = {
        name: getattr(fresh, name)
        for name in ("velocity", "particles")
        if getattr(fresh, name).shape != getattr(state, name).shape
    }
    return replace(state, **others)


def plan(model: ConditionalRBM, forecast: Forecast) -> dict[str, Any]:
    """Return the forecast of a fit, which the method `plan` reports: memory, disk and seconds."""
    train, validation, options = forecast.train, forecast.validation, forecast.options
    learner, order = make_learner(model, train, validation, 0), make_order(model, train, options, 0)
    shape, epochs = learner.shape, choose_n_epochs(model, order.n_rows, validation is not None)
    # A state has the parameters, with momentum their last change, and with validation rows the best ones.
    copies = 1 + bool(learner.momentum) + (validation is not None)
    state = 4 * (copies * shape.n_parameters + learner.n_particles * shape.n_hidden)
    # Each thread has a gradient, and its kernels have six matrices of the size of W.
    kernels = forecast.resources.threads * 4 * (shape.n_parameters + 6 * shape.n_visible * shape.n_hidden)
    forecast.add_steps(
        "learn", learner, order, kernels, state, SMALLER, n_epochs=epochs, extra_bytes=shape.n_visible
    )
    if validation is not None:
        forecast.add_stage("validation", {"validation": learner.validation()}, state + kernels, SMALLER)
    row, sweep, step = _measure_seconds(forecast, learner, order)

    def row_seconds(epoch: int) -> float:
        return row + sweep * choose_n_sweeps(learner.n_sweeps, epoch)

    # Each epoch may have another number of sweeps (rounds of messages), so their seconds differ.
    every = [
        forecast.epoch_seconds(order, row_seconds(n), step, extra_bytes=shape.n_visible)
        for n in range(1, epochs + 1)
    ]
    least = min(learner.patience + 1, epochs) if learner.patience and validation is not None else epochs
    forecast.add_seconds("learn", sum(every), sum(every[:least]))
    measuring = []
    if validation is not None:
        reading = forecast.reading_seconds(validation)
        n_rows = len(validation)
        measuring = [n_rows * forecast.row_seconds(row_seconds(k), reading) for k in range(1, epochs + 1)]
        forecast.add_seconds("validation", sum(measuring), sum(measuring[:least]))
    forecast.set_passes(every[0] + sum(measuring[:1]), least, epochs)
    forecast.out["device_bytes"] = _count_device_bytes(learner)
    return forecast.finish_plan(
        "lower n_epochs, n_sweeps or n_hidden",
        checkpoint=state,
        model=4 * shape.n_parameters,
        predicting=row_seconds(epochs),
    )


def _count_device_bytes(learner: CrbmLearner) -> int:
    """Return the bytes of a fit on a GPU: parameters, gradient, messages, and data that blocks exchange."""
    v, h = learner.shape.n_visible, learner.shape.n_hidden
    edges = v * h
    matrix, most = 4 * max(edges, 1), max(learner.chain_rows, BLOCK_ROWS if learner.has_validation else 0)

    def count_bytes(rows: int) -> int:
        return max(1, min(rows, MESSAGE_BYTES // matrix)) * matrix

    messages = max(
        2 * count_bytes(learner.chain_rows), count_bytes(BLOCK_ROWS) if learner.has_validation else 0
    )
    return 4 * (2 * learner.shape.n_parameters + 4 * edges + most * (v + (2 + BLOCKS) * h)) + messages


def _measure_seconds(forecast: Forecast, learner: CrbmLearner, order: RowOrder) -> tuple[float, float, float]:
    """Return seconds: of a row without inference, of a sweep (round of messages) of a row, and of a step."""
    shape, sends_messages = learner.shape, LEARNERS[learner.learner].sends_messages
    rows = min(learner.chain_rows, order.n_rows)
    if not forecast.measure:
        sweep = shape.n_visible * shape.n_hidden / 2e9 if sends_messages else 0.0
        return 4.0 * shape.n_weights / FLOP_RATE, sweep, STEP_SECONDS
    name = (
        f"crbm {learner.learner} {shape.n_visible}x{shape.n_hidden}x{shape.n_observed} {rows} "
        f"{order.n_chains} {learner.gibbs_steps} {learner.momentum > 0} {learner.local_steps > 0} "
        f"{learner.tol is None}"
    )

    def make_inputs() -> tuple[CrbmState, Block]:
        rng = np.random.default_rng(0)
        x = rng.integers(0, 2, (rows, shape.n_observed)).astype(np.float32)
        v = rng.integers(0, 2, (rows, shape.n_visible)).astype(np.uint8)
        return learner.start(shape.start(rng, 0.01)), Block(x, v, None, 0, np.arange(rows))

    def measure(sweeps: int) -> tuple[float, float]:
        timed = replace(learner, n_sweeps=sweeps, local_steps=0)
        return forecast.measure_chain(f"{name} {sweeps}", timed, make_inputs, order, rows=rows)

    few, step = measure(TIMED_SWEEPS[0])
    sweep = (
        max((measure(TIMED_SWEEPS[1])[0] - few) / (TIMED_SWEEPS[1] - TIMED_SWEEPS[0]), 0.0)
        if sends_messages
        else 0.0
    )
    return max(few - sweep * TIMED_SWEEPS[0], 0.0), sweep, step
