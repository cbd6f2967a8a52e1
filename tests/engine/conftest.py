"""Toy reduction and batch learner, whose results depend on the order in which the engine adds rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.data import Dataset
from scalelatent.engine.passes import Stage, make_stage
from tests.helpers import load_online_toys


@dataclass(frozen=True)
class OrderedSums:
    """A reduction whose float sums differ in their last bits if rows are added in another order."""

    p: int
    requirements = BlockRequirements()

    def layout(self) -> Layout:
        return Layout((("total", (self.p,)), ("classes", (8,)), ("weight", ())))

    def flops_per_row(self) -> float:
        return 100.0

    def prepare(self, state: Any, backend: Any) -> float:
        return 1.0 if state is None else float(state["shift"])

    def accumulate(self, prepared: float, block: Block, stats: Stats) -> None:
        if not np.isfinite(block.x).all():
            raise ValueError(f"row {block.start + int(np.argwhere(~np.isfinite(block.x))[0][0])} is bad")
        weight = np.ones(len(block.x)) if block.weight is None else block.weight
        rows = np.sin(block.x.astype("f8") * prepared) * weight[:, None]
        stats["total"][:] += rows.sum(axis=0)
        stats["weight"][...] += weight.sum()
        if block.y is not None:
            stats["classes"][:] += np.bincount(block.y, rows[:, 0], minlength=8)


@dataclass(frozen=True)
class WanderingLearner:
    """A batch learner whose next state depends on all bits of the sums of the last pass."""

    p: int
    passes: int
    validated: bool = False

    def reductions(self) -> dict[str, OrderedSums]:
        return {
            "train": OrderedSums(self.p),
            **({"validation": OrderedSums(self.p)} if self.validated else {}),
        }

    def update(self, state: dict[str, Any], stats: dict[str, Stats]) -> dict[str, Any]:
        total = sum(float(s["total"].sum()) + float(s["classes"] @ np.arange(8)) for s in stats.values())
        trail = np.append(state["trail"], total)
        return {"shift": 1.0 + np.tanh(total / 50), "trail": trail, "iteration": state["iteration"] + 1}

    def summary(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"pass": state["iteration"], "objective": float(state["trail"][-1]), "train_error": 0.5}

    def is_done(self, state: dict[str, Any]) -> bool:
        return state["iteration"] >= self.passes


def make_first_state() -> dict[str, Any]:
    return {"shift": 1.0, "trail": np.zeros(0), "iteration": 0}


def make_rows(n: int, p: int = 3, seed: int = 0, weighted: bool = False) -> Dataset:
    rng = np.random.Generator(np.random.Philox(seed))
    x = (rng.normal(size=(n, p)) * 10.0 ** rng.integers(-3, 3, (n, p))).astype("f4")
    return Dataset.from_arrays(
        x, rng.integers(0, 8, n), sample_weight=rng.uniform(0.1, 2, n) if weighted else None
    )


def make_toy_stage(
    train: Dataset, passes: int = 3, validation: Dataset | None = None, block: int = 8, leaf: int = 16
) -> Stage:
    learner = WanderingLearner(train.n_features, passes, validation is not None)
    datasets = {"train": train} | ({} if validation is None else {"validation": validation})
    return make_stage("toy_estep", learner, datasets, "cpu", np.arange(8), block_rows=block, leaf_rows=leaf)


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    """Return the toy learner, its reduction (sums over rows), and functions that make its inputs."""
    return SimpleNamespace(
        Sums=OrderedSums,
        Wander=WanderingLearner,
        start=make_first_state,
        rows=make_rows,
        stage=make_toy_stage,
    )


@pytest.fixture(scope="session")
def online() -> Any:
    """Return the module of the toy online learners."""
    return load_online_toys()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("scalelatent")]
    assert not left, f"threads that outlived their pass: {left}"
