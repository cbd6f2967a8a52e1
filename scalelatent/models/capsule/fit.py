"""A capsule fit as steps: projection, second moments, first weights, passes of EM or epochs."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from scalelatent.contract.stats import Stats
from scalelatent.errors import DataError
from scalelatent.estimators.steps import Begin, Collect, Derive, Learn, Map, Remember, Rows, Steps
from scalelatent.kernels.streams import stream
from scalelatent.models.capsule.model.em import CapsuleEM, CapsuleState, initial_state
from scalelatent.models.capsule.model.members import Members, build_members
from scalelatent.models.capsule.model.predict import CapsuleRows
from scalelatent.models.capsule.model.start import random_start, schedule_arrays, subspace_start
from scalelatent.reductions.moments import Project, SecondMoments, leading_eigenvectors
from scalelatent.reductions.tally import CONFUSION_METRICS, ScoreTally

from .online_fit import ALL_ROWS, online_step
from .settings import (
    check_classes,
    check_labels,
    choose_dim,
    class_counts,
    class_weights,
    plain_dim,
    projected_width,
)


def fit_steps(model: Any, rows: Mapping[str, Rows]) -> Steps:
    """A whole fit by any algorithm, see :mod:`.steps`; sets the model's learned attributes.

    Raises
    ------
    DataError, ValueError
        Before the first pass: what :meth:`.CapsuleRegression.fit` says of them.
    """
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
        step = online_step(model, em, sums["weight"], sums["count"], w, rows, classes)
    result = yield step
    w, decided = step.learner.weights(result.state), None
    if held is not None and members.n_members > 1:
        # Each member's best is of another pass: what they decide together is told by a pass of its own, over
        # the rows as they were given, as in `score`.
        tally = ScoreTally(CapsuleRows(members, w, basis, "probabilities"), len(classes))
        found = yield Collect(f"decision-{result.state.iteration}", tally, held, classes)
        decided = float(CONFUSION_METRICS["error"](found["confusion"]))
    model._keep(classes, em, basis, result, w, np.array(sums["weight"]), np.array(sums["count"]), decided)


def _last_fit(model: Any, members: Members, width: int, classes: np.ndarray) -> dict[str, np.ndarray]:
    """W and basis of the fit that ``warm_start`` starts from; empty where there is none.

    Raises
    ------
    ValueError
        That fit was of another shape.
    """
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
    model: Any,
    rows: Mapping[str, Rows],
    members: Members,
    classes: np.ndarray,
    class_weight: np.ndarray | None,
    first: np.ndarray | None,
) -> Generator[Any, Any, tuple[CapsuleEM, Stats, np.ndarray]]:
    """The learner with the second moments of the rows, these, and the first W (``first`` where it is given).

    Raises
    ------
    DataError
        A class whose rows all have weight 0, or hold zeros alone.
    """
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
