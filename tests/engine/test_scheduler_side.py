"""The scheduler plugin decides which worker computes the spans (row ranges of tasks) of a dead worker.

All spans of one shard go to one other worker. After a second death they go to no worker.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scalelatent.engine.dask.scheduler_policies import SpanGuard


class SchedulerState:
    """The part of a scheduler's state that the plugin reads and changes."""

    allowed_failures = 3

    def __init__(self, **spans: list[tuple[str, int, int]]) -> None:
        """Start with spans (key, first row, one past the last row) of each worker."""
        self.workers = {name: SimpleNamespace(address=name, nthreads=1, processing=set()) for name in spans}
        self.tasks: dict[str, Any] = {}
        for name, own in spans.items():
            for key, *rows in own:
                self.tasks[key] = Task(key, self.workers[name], rows)
                self.workers[name].processing.add(self.tasks[key])
        self.guard = SpanGuard()
        self.guard.scheduler = self

    @property
    def running(self) -> list[Any]:
        return list(self.workers.values())

    def lose(self, worker: str, expected: bool = False) -> None:
        keys = {task.key for task in self.workers.pop(worker).processing}
        message = {
            "action": "remove-worker",
            "worker": worker,
            "processing-tasks": keys,
            "expected": expected,
        }
        self.guard.log_event("all", message)

    def doomed(self) -> set[str]:
        return {key for key, task in self.tasks.items() if task.suspicious >= self.allowed_failures}

    def bound(self) -> dict[str, str]:
        return {
            k: next(iter(t.worker_restrictions)) for k, t in self.tasks.items() if not t.loose_restrictions
        }


class Task:
    def __init__(self, key: str, worker: Any, rows: list[int]) -> None:
        self.key, self.state, self.processing_on, self.suspicious = key, "processing", worker, 0
        self.annotations = {"scalelatent": ["fit/train", *rows]}
        self.worker_restrictions, self.loose_restrictions = {worker.address}, True


@pytest.mark.parametrize("others", [{"b": [], "c": []}, {"b": [], "c": [], "d": [("far", 800, 900)]}])
def test_spans_of_one_shard_go_to_one_worker(others: dict[str, Any]) -> None:
    cluster = SchedulerState(a=[("i", 0, 100), ("j", 50, 150), ("k", 300, 400)], **others)
    cluster.lose("a")
    assert cluster.doomed() == {"i", "j", "k"}
    bound = cluster.bound()
    # The spans i and j are bound to one worker, because their rows are in the same shard, which may kill it.
    # The rows of k are in another shard, so any worker may compute k.
    assert set(bound) == {"i", "j"}
    assert len(set(bound.values()) - {"d"}) == 1


def test_spans_go_to_the_worker_that_already_reads_the_shard() -> None:
    cluster = SchedulerState(
        a=[("i", 0, 100)], b=[], c=[("j", 50, 150), ("m", 150, 250)], d=[("n", 600, 700)]
    )
    cluster.lose("a")
    assert cluster.bound() == {"i": "c"}
    assert cluster.doomed() == {"i", "j"}  # If c dies with this shard, too, i and j fail.


def test_spans_are_free_again_when_their_worker_is_retired() -> None:
    cluster = SchedulerState(a=[("i", 0, 100), ("j", 50, 150)], b=[])
    cluster.lose("a")
    assert set(cluster.bound()) == {"i", "j"}
    cluster.workers["b"].processing = {cluster.tasks["i"], cluster.tasks["j"]}
    cluster.lose("b", expected=True)
    assert cluster.bound() == {}


def test_spans_that_the_fit_has_restricted_stay_on_their_worker() -> None:
    cluster = SchedulerState(a=[("i", 0, 100), ("j", 50, 150)], b=[])
    for task in cluster.tasks.values():
        task.loose_restrictions = False
    cluster.lose("a")
    assert set(cluster.bound().values()) == {"a"}


def test_keys_of_finished_tasks_are_forgotten() -> None:
    cluster = SchedulerState(a=[("i", 0, 100), ("j", 50, 150)], b=[], c=[])
    cluster.lose("a")
    assert set(cluster.guard._bound) == {"i", "j"}
    cluster.tasks.clear()
    cluster.lose("b")
    assert cluster.guard._bound == {}


def test_a_waiting_span_is_free_again_if_its_worker_dies_of_another_cause() -> None:
    cluster = SchedulerState(a=[("i", 0, 100), ("j", 50, 150)], b=[])
    cluster.lose("a")
    cluster.tasks["j"].state = "waiting"  # Task j waits, because the parameters of j were lost with worker a.
    cluster.workers["b"].processing = {cluster.tasks["i"]}
    cluster.lose("b")
    assert set(cluster.bound()) == {"i"}
    assert cluster.doomed() >= {"i"}
