"""Online algorithms of a capsule fit: their parameters, learners and orders of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from scalelatent.engine.incremental import count_leaves, leaf_order
from scalelatent.engine.order import RowOrder
from scalelatent.estimators.steps import LearnOnline, Rows
from scalelatent.models.capsule.model.em import CapsuleEM
from scalelatent.models.capsule.model.incremental import CapsuleIncremental, incremental_state
from scalelatent.models.capsule.model.members import Members
from scalelatent.models.capsule.model.online import (
    CapsuleStepwise,
    OnlineCapsule,
    OnlineState,
    online_state,
)
from scalelatent.models.capsule.model.passive import CapsulePassiveAggressive

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


def row_order(model: Any, n_rows: int, members: Members, options: Mapping[str, Any]) -> RowOrder:
    """Which rows each step gets: a function of the parameters, the seed and the ``[engine]`` options
    run_rows and buffer_runs.
    """
    chains = int(model.n_chains)
    if model.algorithm == "incremental":
        least = LEAF_ROWS_A_DIMENSION * members.total_dim
        batch = None if model.batch_rows is None else int(model.batch_rows)
        return leaf_order(n_rows, chains, batch, min_leaf_rows=least)
    buffer = int(options.get("buffer_runs") or BUFFER_RUNS)
    # Few rows: shorter runs, so that each chain gets some from all over and permutes all it has.
    run = int(options.get("run_rows") or min(RUN_ROWS, n_rows // (buffer * chains) + 1))
    return RowOrder(n_rows, model.seed_, batch_rows(model), n_chains=chains, run_rows=run, buffer_runs=buffer)


def batch_rows(model: Any) -> int:
    """Rows of a step: the parameter, or 1,024 (the next multiple of ``n_chains``)."""
    if model.batch_rows is not None:
        return int(model.batch_rows)
    return -(-BATCH_ROWS // int(model.n_chains)) * int(model.n_chains)


def online_step(
    model: Any,
    em: CapsuleEM,
    weight: np.ndarray,
    count: np.ndarray,
    w: np.ndarray,
    rows: Mapping[str, Rows],
    classes: np.ndarray,
) -> LearnOnline:
    """What an online algorithm asks for.

    Parameters
    ----------
    em : CapsuleEM
        Constants of the fit.
    weight, count : ndarray of float64, shape (classes,)
        Sum of row weights of each class, and rows whose weight is above 0.
    w : ndarray of float64, shape (D, p)
        First weights.
    """
    members, n_rows = em.members, len(rows["train"].dataset)

    def order(options: Mapping[str, Any]) -> RowOrder:
        return row_order(model, n_rows, members, options)

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
