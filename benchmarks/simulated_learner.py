"""Learner and map that compute almost nothing, so that a benchmark measures the engine that runs fits."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Layout, Stats

sys.modules.setdefault("scalelatent.simulated_learner", sys.modules[__name__])


@dataclass(frozen=True)
class CountReduction:
    """Computation of a pass: it counts rows, and sleeps ``seconds`` seconds per block of rows.

    Its sum is an array of ``numbers`` numbers, so that the cost of sending the sum can be varied.
    """

    requirements = BlockRequirements()

    numbers: int
    seconds: float

    def layout(self) -> Layout:
        return Layout((("total", (self.numbers,)),))

    def flops_per_row(self) -> float:
        return 1.0

    def prepare(self, state: Any, backend: Any) -> None:
        return None

    def accumulate(self, prepared: None, block: Block, stats: Stats) -> None:
        stats["total"][0] += len(block.x)
        if self.seconds:
            time.sleep(self.seconds)  # Sleeping workers do not compete for cores.


@dataclass(frozen=True)
class CountLearner:
    """Batch learner that counts rows in ``passes`` passes; its state has ``numbers`` numbers.

    Each block of rows sleeps for ``seconds`` seconds, in place of computing.
    """

    numbers: int
    passes: int
    seconds: float = 0.0

    def reductions(self) -> dict[str, CountReduction]:
        return {"train": CountReduction(self.numbers, self.seconds)}

    def start(self) -> dict[str, Any]:
        return {"w": np.zeros(self.numbers), "iteration": 0}

    def update(self, state: dict[str, Any], stats: dict[str, Stats]) -> dict[str, Any]:
        return {"w": np.array(stats["train"]["total"]), "iteration": state["iteration"] + 1}

    def summary(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"pass": state["iteration"], "objective": float(state["w"][0]), "train_error": 0.0}

    def is_done(self, state: dict[str, Any]) -> bool:
        return state["iteration"] >= self.passes


@dataclass(frozen=True)
class EchoMap:
    """Map (computation with an output for each row) whose output is its input."""

    features: int
    requirements = BlockRequirements()

    def output(self) -> tuple[tuple[int, ...], str]:
        return (self.features,), "uint8"

    def prepare(self, backend: Any) -> None:
        return None

    def apply(self, prepared: None, block: Block) -> np.ndarray:
        return block.x


# A run folder stores only types of modules of scalelatent, so these classes get such a module name.
for _type in (CountReduction, CountLearner, EchoMap):
    _type.__module__ = "scalelatent.simulated_learner"
