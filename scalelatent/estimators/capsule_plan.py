"""What a capsule fit will need, before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalelatent.data import Dataset
from scalelatent.engine.passes import Stage, given_grid, make_stage
from scalelatent.engine.plan import (
    Resources,
    RowShape,
    cache_bytes,
    check_fits,
    describe_stage,
    describe_steps,
    probe,
    probe_steps,
    stage_memory,
    steps_memory,
)
from scalelatent.engine.store import KEEP_STATES
from scalelatent.models.capsule.members import Members, build_members
from scalelatent.models.capsule.model import CapsuleEM, initial_state
from scalelatent.models.capsule.moments import SecondMoments
from scalelatent.models.capsule.start import schedule_arrays

from .capsule_fit import (
    check_classes,
    check_params,
    check_width,
    choose_dim,
    class_counts,
    projected_width,
)
from .capsule_online import online_step
from .steps import LearnOnline, Rows

SMALLER = "lower capsule_dim, or set projection lower"


def plan(
    model: Any,
    train: Dataset,
    validation: Dataset | None,
    resources: Resources,
    options: dict[str, Any],
) -> dict[str, Any]:
    """What a fit of these rows would need; see :meth:`.CapsuleRegression.plan`."""
    check_params(model)
    classes = train.classes
    assert classes is not None
    width, counts = projected_width(model.projection, train.n_features), class_counts(train, classes)
    dim = choose_dim(model, counts, width or train.n_features, train.url or "the training rows")
    members = build_members(model.architecture, len(classes), dim)
    check_classes(members, train, counts, width, model.init)
    check_width(width, train, len(classes), resources.memory)
    p = width or train.n_features
    rows = RowShape(len(train), p)
    parts: dict[str, Any] = {"train": rows}
    if validation is not None:
        parts["validation"] = RowShape(len(validation), p)
    em = _learner(model, members, len(classes), p, int(validation is not None))
    weights, moments = members.total_dim * p * 8, len(classes) * p * p * 8
    factors = len({labels.tobytes() for labels in members.labels >= 0}) * 2 * p * p * 8
    report = _Report(resources, train, given_grid(options))
    if width is not None:
        narrower = "make the rows narrower: keep the columns that matter, or reduce them first"
        reduction = {"train": SecondMoments(train.n_features)}
        report.passes("svd", reduction, {"train": train}, 3 * train.n_features**2 * 8, narrower)
    reduction = {"train": SecondMoments(p, len(classes))}
    report.passes("moments", reduction, {"train": rows}, 2 * moments, f"set projection below {p}")
    nbytes = len(train) * p * 4 if width else train.nbytes
    out = report.out
    out["scratch_bytes"] = nbytes if width and train.is_stored else 0
    w = np.random.default_rng(0).normal(size=(members.total_dim, p))
    if model.algorithm == "em":
        stage = report.passes("estep", em, parts, moments + factors + 8 * weights, SMALLER)
        block, arrays = stage.grids["train"].block_rows, 3
        rates = probe(stage, initial_state(w, members.n_members), train, len(classes))
        per_pass = report.seconds(rates, stage.rows, nbytes, resources.workers * resources.threads)
    else:
        ones = np.ones(len(classes))
        step = online_step(model, em, ones, ones, w, {"train": Rows(train)}, classes)
        order = step.order(options)
        arrays = 6 if step.keeps_leaves else 5
        report.steps(step, order, nbytes // len(train), moments + factors, arrays * weights, SMALLER)
        if validation is not None:
            scoring = {"train": em.reductions()["validation"]}
            report.passes("validation", scoring, {"train": parts["validation"]}, 2 * weights, SMALLER)
        if step.keeps_leaves:
            leaves = order.n_steps * order.n_chains * step.learner.layout().nbytes
            out["scratch_bytes"] += (KEEP_STATES + 1) * leaves
        block = order.chain_rows
        rates = probe_steps(step.learner, step.state, order, train, p, len(classes))
        slots = min(resources.workers * resources.threads, order.n_chains)
        per_pass = report.seconds(rates, len(train), nbytes, slots)
        per_pass["seconds_per_pass"] += order.n_steps * rates["seconds_per_step"]
    out["cache_bytes"] = cache_bytes(resources, nbytes if train.is_stored else 0)
    most = max(stage["peak_bytes"] for stage in out["stages"].values())
    out["peak_bytes_per_worker"] = most + out["cache_bytes"]
    out["device_bytes"] = 4 * (members.total_dim * p + block * (2 * p + members.total_dim))
    out["checkpoint_bytes"] = arrays * weights
    out["probe"] = {**rates, **per_pass}
    out["passes"] = _passes(model)
    out["expected_seconds_at_least"] = out["probe"]["seconds_per_pass"] * out["passes"]["at_least"]
    return out


def _learner(model: Any, members: Members, n_classes: int, p: int, has_validation: int) -> CapsuleEM:
    nu, patience, scheduled = schedule_arrays(model.nu_schedule)
    # Zeros without memory: only shapes matter here.
    moment = np.broadcast_to(np.zeros(()), (n_classes, p, p))
    return CapsuleEM(members, moment, nu, patience, scheduled, 0.0, 0.0, 0.0, 1, None, has_validation)


class _Report:
    """What is planned so far: ``out["stages"]`` by name."""

    def __init__(self, resources: Resources, train: Dataset, grid: dict[str, Any]) -> None:
        self.out: dict[str, Any] = {"stages": {}, "resources": vars(resources)}
        self._resources, self._train, self._grid = resources, train, grid

    def passes(self, name: str, work: Any, parts: dict[str, Any], held: int, remedy: str) -> Stage:
        """A stage of passes, ``held`` being the bytes of its constants and states.

        Raises
        ------
        PlanError
            It does not fit.
        """
        stage = make_stage(f"capsule_{name}", work, parts, "cpu", **self._grid)
        memory = stage_memory(stage, self._resources, self._train, held)
        self._add(name, describe_stage(stage, self._resources), memory, remedy)
        return stage

    def steps(
        self, step: LearnOnline, order: Any, row_bytes: int, constants: int, state: int, remedy: str
    ) -> None:
        """Steps over minibatches; bytes of a row, of the constants and of one state.

        Raises
        ------
        PlanError
            They do not fit.
        """
        p = step.learner.em.moment.shape[1]
        memory = steps_memory(
            step.learner,
            order,
            p,
            self._resources,
            self._train,
            row_bytes,
            constants,
            state,
            step.keeps_leaves,
        )
        self._add(step.name, describe_steps(step.learner, order), memory, remedy)

    def _add(self, name: str, described: dict[str, Any], memory: dict[str, int], remedy: str) -> None:
        peak = check_fits(f"capsule_{name}", memory, self._resources, remedy)
        self.out["stages"][name] = {**described, "memory_bytes": memory, "peak_bytes": peak}

    def seconds(self, rates: dict[str, float], rows: int, nbytes: int, slots: int) -> dict[str, Any]:
        """Seconds of a pass over rows, and what bounds it."""
        compute = rates["compute_seconds_per_row"] * rows / slots
        cached = cache_bytes(self._resources, nbytes) >= nbytes or not self._train.is_stored
        read = 0.0 if cached else rates["read_seconds_per_row"] * rows / slots
        return {
            "seconds_per_pass": max(compute, read),
            "bound_by": "reading" if read > compute else "computing",
        }


def _passes(model: Any) -> dict[str, int]:
    """Fewest and most passes, or epochs."""
    most = int(model.max_iter if model.algorithm == "em" else model.n_epochs)
    nu, patience, scheduled = schedule_arrays(model.nu_schedule)
    least = int(patience.sum()) if scheduled else most
    if model.tol:
        # A round takes a step and the pass that finds it flat; of epochs all but the first round need one.
        least = min(least, 2 * len(nu) if model.algorithm == "em" else len(nu) + 1)
    return {"at_least": min(least, most), "at_most": most}
