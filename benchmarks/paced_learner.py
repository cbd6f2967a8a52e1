"""Batch learner that sleeps for each row, as long as a worker of a given speed would compute.

Sleeping needs no core, so that two cores are enough for many workers. Dask sends this file to the workers.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Layout, Stats

sys.modules.setdefault("scalelatent.paced_learner", sys.modules[__name__])

# Blocks of rows that this process computed: (pass from 0, number of rows, start and end by time.time()).
blocks: list[tuple[int, int, float, float]] = []
# The operating system ended earlier sleeps late by these seconds (at most 0.01); the next sleep is shorter.
overslept_seconds = 0.0


def get_worker_speed(speeds: tuple[float, ...]) -> float | None:
    """Return the speed of the worker that runs this thread, or None outside a worker.

    The name of a worker is its index in ``speeds``.
    """
    from distributed import get_worker

    try:
        return speeds[int(get_worker().name)]
    except ValueError:
        return None


@dataclass(frozen=True)
class PacedSums:
    """Computation of a pass: it sums sines of the rows, and sleeps ``row_seconds`` per row at speed 1.

    The last bits of the sums depend on the order of the rows, so that a test detects another order.
    """

    requirements = BlockRequirements()

    row_seconds: float
    speeds: tuple[float, ...]

    def layout(self) -> Layout:
        return Layout((("total", (8,)),))

    def flops_per_row(self) -> float:
        return 6e10 * self.row_seconds

    def prepare(self, state: Any, backend: Any) -> tuple[float, int, float | None]:
        return float(state["shift"]), int(state["iteration"]), get_worker_speed(self.speeds)

    def accumulate(self, prepared: tuple[float, int, float | None], block: Block, stats: Stats) -> None:
        global overslept_seconds
        shift, iteration, speed = prepared
        begin = time.time()
        stats["total"][:] += np.sin(block.x.astype("f8") + shift).sum(axis=0)
        if speed is not None:
            due = begin + len(block.x) * self.row_seconds / speed
            time.sleep(max(0.0, due - overslept_seconds - time.time()))
            end = time.time()
            overslept_seconds = min(max(0.0, end - due + overslept_seconds), 0.01)
            blocks.append((iteration, len(block.x), begin, end))


@dataclass(frozen=True)
class PacedLearner:
    """Learner that runs ``passes`` passes of PacedSums."""

    row_seconds: float
    speeds: tuple[float, ...]
    passes: int

    def reductions(self) -> dict[str, PacedSums]:
        return {"train": PacedSums(self.row_seconds, self.speeds)}

    def start(self) -> dict[str, Any]:
        return {"shift": 0.0, "iteration": 0}

    def update(self, state: dict[str, Any], stats: dict[str, Stats]) -> dict[str, Any]:
        shift = float(np.sin(stats["train"]["total"].sum()))
        return {"shift": shift, "iteration": state["iteration"] + 1}

    def summary(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"pass": state["iteration"], "objective": state["shift"], "train_error": 0.0}

    def is_done(self, state: dict[str, Any]) -> bool:
        return state["iteration"] >= self.passes


def list_computed_blocks(dask_worker: Any) -> list[tuple[int, int, float, float]]:
    """Return the blocks that a worker has computed; Dask calls this function on the worker."""
    return list(sys.modules["scalelatent.paced_learner"].blocks)


# Run folders store only types of this package, so these classes get the name of a module of scalelatent.
for _type in (PacedSums, PacedLearner):
    _type.__module__ = "scalelatent.paced_learner"
