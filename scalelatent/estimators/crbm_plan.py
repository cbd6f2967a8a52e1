"""What the fit of a conditional RBM will need, before anything runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.passes import BLOCK_ROWS, given_grid, make_stage
from scalelatent.engine.plan import (
    PROBE_ROWS,
    Resources,
    cache_bytes,
    check_fits,
    describe_stage,
    describe_steps,
    seconds_of,
    stage_memory,
    steps_memory,
)
from scalelatent.engine.threads import single_threaded
from scalelatent.models.base import Block
from scalelatent.models.crbm.learners import LEARNERS
from scalelatent.models.crbm.limits import BLOCKS, MESSAGE_BYTES
from scalelatent.models.crbm.online import CrbmLearner
from scalelatent.models.crbm.predict import sweeps_in
from scalelatent.models.stats import Stats

from .crbm_fit import make_learner, row_order

REMEDY = "lower n_hidden, or set n_chains lower"
# Sweeps that are timed: seconds are a line through both.
TIMED = (4, 12)


def plan(
    model: Any, train: Dataset, held: Dataset | None, resources: Resources, options: dict[str, Any]
) -> dict[str, Any]:
    """What a fit of these rows would need; see :meth:`.ConditionalRBM.plan`."""
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
    peak = check_fits("crbm_learn", memory, resources, REMEDY)
    stages = {"learn": {**describe_steps(learner, order), "memory_bytes": memory, "peak_bytes": peak}}
    out: dict[str, Any] = {"stages": stages, "resources": vars(resources)}
    if held is not None:
        grid = given_grid(options)
        stage = make_stage("crbm_validation", {"train": learner.validation()}, {"train": held}, "cpu", **grid)
        memory = stage_memory(stage, resources, held, state + _kernel_bytes(learner, resources))
        peak = check_fits(stage.name, memory, resources, REMEDY)
        stages["validation"] = {
            **describe_stage(stage, resources),
            "memory_bytes": memory,
            "peak_bytes": peak,
        }
    out["cache_bytes"] = cache_bytes(resources, train.nbytes if train.is_stored else 0)
    out["peak_bytes_per_worker"] = max(stage["peak_bytes"] for stage in stages.values()) + out["cache_bytes"]
    out["device_bytes"] = _device_bytes(learner)
    out["checkpoint_bytes"] = state
    slots = min(resources.workers * resources.threads, order.n_chains)
    out["probe"] = _probe(learner, train)
    return out | _seconds(
        model, learner, order, out["probe"], slots, 0 if held is None else len(held), resources
    )


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
    matrix, most = 4 * edges, max(learner.chain_rows, BLOCK_ROWS if learner.has_validation else 0)

    def group(rows: int) -> int:
        return max(1, min(rows, MESSAGE_BYTES // matrix)) * matrix

    messages = max(2 * group(learner.chain_rows), group(BLOCK_ROWS) if learner.has_validation else 0)
    return 4 * (2 * learner.shape.n_parameters + 4 * edges + most * (v + (2 + BLOCKS) * h)) + messages


def _probe(learner: CrbmLearner, train: Dataset) -> dict[str, float]:
    """Seconds a row on one thread beside the sweeps, of a sweep, of a step, and of reading."""
    shape, rng = learner.shape, np.random.default_rng(0)
    n = min(PROBE_ROWS, len(train))
    reading = seconds_of(lambda: train.read_x(0, n)) / n
    rows = min(learner.chain_rows, len(train))
    x = rng.integers(0, 2, (rows, shape.n_observed)).astype(np.float32)
    v = rng.integers(0, 2, (rows, shape.n_visible)).astype(np.uint8)
    block, state = Block(x, v, None, 0, np.arange(rows)), learner.start(shape.start(rng, 0.01))
    backend, times = make_backend("cpu"), []
    with single_threaded():
        for sweeps in TIMED if LEARNERS[learner.learner].couples else TIMED[:1]:
            timed = replace(learner, n_sweeps=sweeps, local_steps=0)
            prepared, stats = timed.prepare(state, backend), Stats.zeros(timed.layout(), rows)
            run = partial(timed.run_chain, prepared, block, stats)
            times.append(seconds_of(run, 0.1) / rows)
        stepping = seconds_of(lambda: timed.step(state, stats, rows))
    sweep = max((times[-1] - times[0]) / (TIMED[1] - TIMED[0]), 0.0)
    return {
        "read_seconds_per_row": reading,
        "row_seconds_beside_sweeps": max(times[0] - sweep * TIMED[0] * (len(times) > 1), 0.0),
        "seconds_per_sweep_and_row": sweep,
        "seconds_per_step": stepping,
    }


def _seconds(
    model: Any,
    learner: CrbmLearner,
    order: Any,
    probe: dict[str, float],
    slots: int,
    n_held: int,
    resources: Resources,
) -> dict[str, Any]:
    """Seconds of the first epoch and of all: sweeps grow with the epoch."""
    epochs = int(model.n_epochs)
    sweep, beside = probe["seconds_per_sweep_and_row"], probe["row_seconds_beside_sweeps"]
    threads = max(resources.workers * resources.threads, 1)

    def epoch(number: int) -> float:
        row = beside + sweep * sweeps_in(learner.n_sweeps, number)
        steps = order.n_steps * probe["seconds_per_step"]
        return order.n_rows * row / slots + n_held * row / threads + steps

    every = [epoch(number) for number in range(1, epochs + 1)]
    least = min(int(model.patience or epochs) + 1, epochs) if n_held else epochs
    passes = {"at_least": least, "at_most": epochs}
    return {
        "seconds_per_pass": every[0],
        "passes": passes,
        "expected_seconds_at_least": float(sum(every[:least])),
        "expected_seconds_at_most": float(sum(every)),
    }
