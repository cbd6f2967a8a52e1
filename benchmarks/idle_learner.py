"""Learner that computes almost nothing, so that a benchmark measures the engine that runs fits."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Layout, Stats

sys.modules.setdefault("scalelatent.idle_learner", sys.modules[__name__])


@dataclass(frozen=True)
class IdleLearner:
    """Online learner whose chains (row sequences of a step) sleep for ``seconds``.

    The state of the fit has ``numbers`` numbers, so that messages have a chosen size.
    """

    numbers: int
    seconds: float = 0.0
    requirements = BlockRequirements()

    def layout(self) -> Layout:
        return Layout((("gradient", (self.numbers,)),))

    def flops_per_row(self) -> float:
        return 1.0

    def prepare(self, state: Any, backend: Any) -> None:
        return None

    def run_chain(self, prepared: None, block: Block, stats: Stats) -> None:
        stats["gradient"][0] += float(block.x[0, 0])
        if self.seconds:
            time.sleep(self.seconds)  # Sleeping chains do not compete for cores.

    def step(self, state: Any, stats: Stats, n_rows: int) -> Any:
        return {"w": state["w"] + stats["gradient"]}

    def end_epoch(self, state: Any) -> Any:
        return state

    def summary(self, state: Any) -> dict[str, Any]:
        return {}

    def is_done(self, state: Any) -> bool:
        return False

    def start(self) -> Any:
        return {"w": np.zeros(self.numbers)}


# A run folder stores only types of modules of scalelatent, so the class gets such a module name.
IdleLearner.__module__ = "scalelatent.idle_learner"
