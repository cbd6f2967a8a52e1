"""Prometheus metrics of the jobs, on the scheduler's own ``/metrics``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .board import Board

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

LABELS = ("job", "model", "pool")
# Progress of a job as a whole belongs to no pool.
ALL = "all"


class JobCollector:
    """Metrics made when they are scraped, from the boards of this process's schedulers.

    A job that a board has forgotten is left out, so the number of series is bounded.
    """

    def __init__(self) -> None:
        self.boards: weakref.WeakSet[Board] = weakref.WeakSet()

    def describe(self) -> list[Metric]:
        """Nothing: names are checked when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metric families."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        rows = CounterMetricFamily(
            "scalelatent_rows", "Rows computed; pool is all where workers do not tell", labels=LABELS
        )
        passes = GaugeMetricFamily(
            "scalelatent_pass", "Last finished pass of the current stage", labels=LABELS
        )
        objective = GaugeMetricFamily(
            "scalelatent_objective", "Objective after the last finished pass", labels=LABELS
        )
        redone = CounterMetricFamily(
            "scalelatent_spans_redone", "Spans computed again after a failure", labels=LABELS
        )
        told: set[tuple[str, str]] = set()
        for board in list(self.boards):
            for job in list(board.jobs.values()):
                labels = (job.id, job.model)
                if labels in told:
                    continue
                told.add(labels)
                for pool, count in (job.workers.pool_rows or {ALL: int(job.rows)}).items():
                    rows.add_metric([*labels, pool], count)
                for pool, count in (job.spans_redone or {ALL: 0}).items():
                    redone.add_metric([*labels, pool], count)
                for family, key in ((passes, "pass"), (objective, "objective")):
                    if job.record.get(key) is not None:
                        family.add_metric([*labels, ALL], job.record[key])
        yield from (rows, passes, objective, redone)


_collector: JobCollector | None = None
_lock = threading.Lock()


def show(board: Board) -> bool:
    """Add a board's jobs to ``/metrics``; False without prometheus_client."""
    global _collector
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return False
    with _lock:
        if _collector is None:
            _collector = JobCollector()
            REGISTRY.register(_collector)
        _collector.boards.add(board)
    return True


def hide(board: Board) -> None:
    """Take a board's jobs away again."""
    if _collector is not None:
        _collector.boards.discard(board)
