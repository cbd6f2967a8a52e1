"""Prometheus metrics of the jobs, served at ``/metrics`` of the scheduler."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .board import JobBoard

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

LABELS = ("job", "model", "pool")
# Label of values of a whole job, which are not split into those of CPU workers and of GPU workers.
ALL_POOLS = "all"


class JobCollector:
    """Prometheus collector that computes metrics on each scrape, from all jobs of schedulers in this process.

    It excludes jobs that a `JobBoard` has dropped, so the number of time series has an upper bound.
    """

    def __init__(self) -> None:
        self.boards: weakref.WeakSet[JobBoard] = weakref.WeakSet()

    def describe(self) -> list[Metric]:
        """Return no metrics, so that the registry does not collect at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        rows = CounterMetricFamily(
            "scalelatent_rows", "Rows computed; pool is all if workers do not report it", labels=LABELS
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
        seen: set[tuple[str, str]] = set()
        for board in list(self.boards):
            for job in list(board.jobs.values()):
                labels = (job.id, job.model)
                if labels in seen:
                    continue
                seen.add(labels)
                for pool, count in (job.workers.pool_rows or {ALL_POOLS: int(job.rows)}).items():
                    rows.add_metric([*labels, pool], count)
                for pool, count in (job.spans_redone or {ALL_POOLS: 0}).items():
                    redone.add_metric([*labels, pool], count)
                for family, key in ((passes, "pass"), (objective, "objective")):
                    if job.record.get(key) is not None:
                        family.add_metric([*labels, ALL_POOLS], job.record[key])
        yield from (rows, passes, objective, redone)


_collector: JobCollector | None = None
_lock = threading.Lock()


def add_board(board: JobBoard) -> bool:
    """Add the jobs of a scheduler to ``/metrics``; return False if prometheus_client is not installed."""
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


def remove_board(board: JobBoard) -> None:
    """Remove the jobs of a scheduler from ``/metrics``."""
    if _collector is not None:
        _collector.boards.discard(board)
