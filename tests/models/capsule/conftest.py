"""Make rows, a learner and initial weights for the tests of the online learners (stepwise EM, streams)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.models.capsule.model.em import CapsuleEM
from scalelatent.models.capsule.model.members import build_members

ARCHITECTURES = ["multiclass", "one_vs_all", "all_vs_all"]
P, CLASSES = 6, 3


def make_case(architecture: str = "multiclass", nu: Any = 0.0, momentum: float = 0.0, **more: Any) -> Any:
    """Return rows x, labels y, row weights, their totals and counts per class, a learner em, weights W."""
    rng = np.random.Generator(np.random.Philox(5))
    members = build_members(architecture, CLASSES, 2)
    y = rng.integers(0, CLASSES, 90).astype(np.int32)
    x = (rng.normal(size=(90, P)) * (1 + 2 * np.eye(P)[y])).astype(np.float32)
    weight = rng.uniform(0.5, 2.0, 90)
    x64 = x.astype(np.float64)
    moment = np.stack([(x64[y == c] * weight[y == c, None]).T @ x64[y == c] for c in range(CLASSES)])
    totals, counts = np.bincount(y, weight, CLASSES), np.bincount(y, minlength=CLASSES)
    constants: dict[str, Any] = {
        "ridge": 0.0, "tol": 0.0, "max_iter": 9, "class_weight": None, "has_validation": 0,
        "nu": np.atleast_1d(nu), "patience": np.array([99]), "scheduled": 1, **more,
    }  # fmt: skip
    em = CapsuleEM(members=members, moment=moment, momentum=momentum, **constants)
    w = rng.normal(size=(members.total_dim, P))
    sums = {"weight": weight, "totals": totals, "counts": counts}
    return SimpleNamespace(x=x, y=y, em=em, w=w, m=members.n_members, **sums)


def make_block(data: Any, rows: Any = slice(None), epoch: int = 0) -> Block:
    numbers = np.arange(len(data.x))[rows]
    return Block(data.x[rows], data.y[rows], data.weight[rows], int(numbers[0]), numbers, epoch)
