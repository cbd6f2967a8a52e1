"""Confusion matrix and log-loss of a classifier from one pass over the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block, RowMap
from scalelatent.contract.stats import Layout, Stats


def _balanced_accuracy(confusion: np.ndarray) -> float:
    rows = confusion.sum(axis=1)
    present = rows > 0
    return float(np.mean(np.diag(confusion)[present] / rows[present]))


def _f1_macro(confusion: np.ndarray) -> float:
    total = confusion.sum(axis=0) + confusion.sum(axis=1)
    present = total > 0
    return float(np.mean(2 * np.diag(confusion)[present] / total[present]))


def _accuracy(confusion: np.ndarray) -> float:
    return float(np.trace(confusion) / confusion.sum())


CONFUSION_METRICS: dict[str, Callable[[np.ndarray], Any]] = {
    "accuracy": _accuracy,
    "error": lambda confusion: float((confusion.sum() - np.trace(confusion)) / confusion.sum()),
    "balanced_accuracy": _balanced_accuracy,
    "f1_macro": _f1_macro,
    "confusion": lambda confusion: confusion.tolist(),
}
"""Metrics of a confusion matrix, shape (true classes, predicted classes)."""

SCORERS: dict[str, Callable[[Stats], float]] = {
    "accuracy": lambda stats: _accuracy(stats["confusion"]),
    "balanced_accuracy": lambda stats: _balanced_accuracy(stats["confusion"]),
    "f1_macro": lambda stats: _f1_macro(stats["confusion"]),
    "neg_log_loss": lambda stats: -float(stats["log_loss"]) / float(stats["confusion"].sum()),
}
"""Scores from the statistics of :class:`ConfusionCounts`, by scikit-learn's names; greater is better."""


@dataclass(frozen=True)
class ConfusionCounts:
    """Reduction to the confusion matrix and the log-loss (nats) of a classifier, both weighted by row."""

    row_map: RowMap  # gives the probabilities of the classes, (rows, n_classes)
    n_classes: int

    @property
    def requirements(self) -> BlockRequirements:
        """Requirements of the row map, which need not compute predicted labels here."""
        return replace(self.row_map.requirements, labels=False)

    def layout(self) -> Layout:
        return Layout((("confusion", (self.n_classes, self.n_classes)), ("log_loss", ())))

    def flops_per_row(self) -> float:
        """Return a rough number of operations, because a row map does not report its own."""
        return 1e4

    def prepare(self, state: object, backend: Backend) -> object:
        return self.row_map.prepare(backend)

    def accumulate(self, prepared: object, block: Block, stats: Stats) -> None:
        assert block.y is not None
        p = self.row_map.apply(prepared, block)
        weight = np.ones(len(block.y)) if block.weight is None else block.weight
        np.add.at(stats["confusion"], (block.y, p.argmax(axis=1)), weight)
        right = p[np.arange(len(block.y)), block.y].astype(np.float64)
        stats["log_loss"][...] -= weight @ np.log(np.maximum(right, np.finfo(np.float64).tiny))
