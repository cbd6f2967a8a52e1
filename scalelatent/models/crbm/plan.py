"""What the fit of a conditional RBM will need, before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.order import RowOrder
from scalelatent.engine.passes import BLOCK_ROWS
from scalelatent.engine.plan import Forecast, Resources, describe_steps, steps_memory
from scalelatent.engine.rates import cpu_seconds, rates
from scalelatent.models.crbm.kernels.limits import BLOCKS, MESSAGE_BYTES
from scalelatent.models.crbm.model.negative_phases import LEARNERS
from scalelatent.models.crbm.model.online import CrbmLearner
from scalelatent.models.crbm.model.predict import sweeps_in

from .fit import make_learner, row_order

REMEDY = "lower n_hidden, or set n_chains lower"
# Sweeps that are timed: seconds are a line through both.
TIMED = (4, 12)
# Seconds of a step beside its chains and its parameters.
STEP_SECONDS = 1.5e-4


def plan(
    model: Any,
    train: Dataset,
    held: Dataset | None,
    resources: Resources,
    options: dict[str, Any],
    *,
    measure: bool = True,
) -> dict[str, Any]:
    """What a fit of these rows would need; see :meth:`.ConditionalRBM.plan`.

    Parameters
    ----------
    measure : bool
        Measure what is not known of this machine.
    """
    learner, order = make_learner(model, train, held, 0), row_order(model, len(train), options)
    shape = learner.shape
    # Parameters, velocity and the best ones, of which Dask keeps a few states.
    copies = 1 + bool(learner.momentum) + (held is not None)
    state = 4 * (copies * shape.n_parameters + learner.n_particles * shape.n_hidden)
    row_bytes = train.nbytes // len(train) + shape.n_visible
    memory = steps_memory(
        learner,
        order,
        train.n_features,
        resources,
        train,
        row_bytes,
        _kernel_bytes(learner, resources),
        state,
        False,
    )
    told = Forecast("crbm", train, resources, options, measure)
    told.fits("learn", describe_steps(learner, order), memory, REMEDY)
    told.caches(None, len(train) * row_bytes if train.is_stored else 0)
    if held is not None:
        work = {"train": learner.validation()}
        told.stage("validation", work, {"train": held}, state + _kernel_bytes(learner, resources), REMEDY)
    out = told.out
    out["device_bytes"] = _device_bytes(learner)
    out["checkpoint_bytes"] = state
    out["probe"] = _probe(told, learner, order)
    out |= _seconds(told, model, learner, order, out["probe"], 0 if held is None else len(held))
    return told.told(3 * state + 8 * shape.n_parameters, "lower n_epochs, n_sweeps or n_hidden")


def _kernel_bytes(learner: CrbmLearner, resources: Resources) -> int:
    """Coupling, gradient and message matrices of each thread, float32."""
    edges = learner.shape.n_visible * learner.shape.n_hidden
    return resources.threads * 4 * (learner.shape.n_parameters + 6 * edges)


def _device_bytes(learner: CrbmLearner) -> int:
    """Parameters, gradient, and messages: of a chain's rows with pair beliefs, or of validation; and what a
    graph's thread blocks tell each other.
    """
    v, h = learner.shape.n_visible, learner.shape.n_hidden
    edges = v * h
    matrix, most = 4 * max(edges, 1), max(learner.chain_rows, BLOCK_ROWS if learner.has_validation else 0)

    def group(rows: int) -> int:
        return max(1, min(rows, MESSAGE_BYTES // matrix)) * matrix

    messages = max(2 * group(learner.chain_rows), group(BLOCK_ROWS) if learner.has_validation else 0)
    return 4 * (2 * learner.shape.n_parameters + 4 * edges + most * (v + (2 + BLOCKS) * h)) + messages


def _probe(told: Forecast, learner: CrbmLearner, order: RowOrder) -> dict[str, float]:
    """Seconds a row on one thread beside the sweeps, of a sweep, of a step, and of reading."""
    shape, train = learner.shape, told.train
    rows, threads = min(learner.chain_rows, len(train)), min(told.resources.slots, order.n_chains)
    couples = LEARNERS[learner.learner].couples
    what = (
        f"crbm {learner.learner} {shape.n_visible}x{shape.n_hidden}x{shape.n_observed} {rows} "
        f"{order.n_chains} {learner.gibbs_steps} {learner.momentum > 0} {learner.local_steps > 0} "
        f"{learner.tol is None}"
    )

    def run(sweeps: int, stepping: bool) -> float:
        rng = np.random.default_rng(0)
        x = rng.integers(0, 2, (rows, shape.n_observed)).astype(np.float32)
        v = rng.integers(0, 2, (rows, shape.n_visible)).astype(np.uint8)
        block, state = Block(x, v, None, 0, np.arange(rows)), learner.start(shape.start(rng, 0.01))
        timed = replace(learner, n_sweeps=sweeps, local_steps=0)

        def make() -> Any:
            prepared, stats = timed.prepare(state, make_backend("cpu")), Stats.zeros(timed.layout(), rows)
            if not stepping:
                return lambda: timed.run_chain(prepared, block, stats)
            timed.run_chain(prepared, block, stats)
            backend = make_backend("cpu")

            def call() -> None:
                timed.step(state, stats, rows)
                timed.prepare(state, backend)

            return call

        return cpu_seconds(make, 1) if stepping else cpu_seconds(make, threads) / rows

    if not told.measure:
        return {
            "read_seconds_per_row": 0.0,
            "row_seconds_beside_sweeps": 4.0 * shape.n_weights / 6e10,
            "seconds_per_sweep_and_row": shape.n_visible * shape.n_hidden / 2e9 if couples else 0.0,
            "seconds_per_step": 1e-4,
        }
    times = [
        rates.get(f"{what} {sweeps} t{threads}", lambda: run(sweeps, False))  # noqa: B023  called here
        for sweeps in (TIMED if couples else TIMED[:1])
    ]
    sweep = max((times[-1] - times[0]) / (TIMED[1] - TIMED[0]), 0.0)
    return {
        "read_seconds_per_row": told.reading(train),
        "row_seconds_beside_sweeps": max(times[0] - sweep * TIMED[0] * (len(times) > 1), 0.0),
        "seconds_per_sweep_and_row": sweep,
        "seconds_per_step": rates.get(f"{what} step", lambda: run(TIMED[0], True)),
    }


def _seconds(
    told: Forecast, model: Any, learner: CrbmLearner, order: RowOrder, probe: dict[str, float], n_held: int
) -> dict[str, Any]:
    """Seconds of the first epoch and of all, which are added: sweeps grow with the epoch."""
    epochs, resources = int(model.n_epochs), told.resources
    slots = min(resources.slots, order.n_chains)
    sweep, beside = probe["seconds_per_sweep_and_row"], probe["row_seconds_beside_sweeps"]
    row_bytes = told.train.nbytes / len(told.train) + learner.shape.n_visible
    reading = probe["read_seconds_per_row"] + told.gathering(row_bytes)
    steps = order.n_steps * (probe["seconds_per_step"] + STEP_SECONDS)

    def epoch(number: int) -> tuple[float, float]:
        row = beside + sweep * sweeps_in(learner.n_sweeps, number)
        learning = order.n_rows * told.row_seconds(row, reading, slots) + steps
        return learning, n_held * told.row_seconds(row, reading)

    every = [epoch(number) for number in range(1, epochs + 1)]
    least = min(int(model.patience or epochs) + 1, epochs) if n_held else epochs
    told.add("learn", sum(one for one, _ in every), sum(one for one, _ in every[:least]))
    if n_held:
        told.add("validation", sum(one for _, one in every), sum(one for _, one in every[:least]))
    row = beside + sweep * sweeps_in(learner.n_sweeps, epochs)
    return {
        "seconds_per_pass": sum(every[0]),
        "predicting_seconds_per_row": told.row_seconds(row, reading),
        "passes": {"at_least": least, "at_most": epochs},
    }
