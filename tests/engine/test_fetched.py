"""A fit waits a limited time for a result of a worker; a result that does not arrive is computed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scalelatent.engine.dask.executor import DaskExecutor
from scalelatent.engine.dask.link import Link
from scalelatent.engine.dask.watch import NoProgress
from scalelatent.engine.dask.window import TaskEnded
from scalelatent.errors import RunError


class Task:
    """Stand-in for a future: ``result`` sets status ``after``, then raises ``error`` unless it is None."""

    key = "toy-1"

    def __init__(self, status: str, error: Exception | None = None, after: str = "finished") -> None:
        self.status, self._error, self._after = status, error, after

    def result(self, seconds: float) -> str:
        assert seconds <= 60
        self.status = self._after
        if self._error is not None:
            raise self._error
        return "sums"


@pytest.fixture
def executor() -> DaskExecutor:
    executor = DaskExecutor.__new__(DaskExecutor)
    client: Any = SimpleNamespace(status="running", scheduler=SimpleNamespace(address="tcp://head:8786"))
    executor.link = Link(client)
    return executor


@pytest.mark.parametrize("status", ["pending", "lost"])
def test_a_pending_result_is_not_fetched(executor: Any, status: str) -> None:
    assert executor.fetched(Task(status)) == ()


def test_a_finished_result_is_fetched(executor: Any) -> None:
    assert executor.fetched(Task("finished")) == ("sums",)


@pytest.mark.parametrize("error", [TimeoutError(), OSError("gone")])
def test_a_result_that_is_lost_during_the_fetch_is_awaited_again(executor: Any, error: Exception) -> None:
    assert executor.fetched(Task("finished", error, after="lost")) == ()


def test_a_result_that_never_arrives_is_computed_again(executor: Any) -> None:
    with pytest.raises(NoProgress, match="the result of toy-1 could not be fetched within 60 s"):
        executor.fetched(Task("finished", TimeoutError()))


def test_a_lost_scheduler_is_named(executor: Any) -> None:
    with pytest.raises(RunError, match="tcp://head:8786 was lost while the result of toy-1 was fetched"):
        executor.fetched(Task("finished", OSError("gone")))


@pytest.mark.parametrize("status", ["error", "cancelled"])
def test_a_failed_task_is_reported_with_its_item(executor: Any, status: str) -> None:
    with pytest.raises(TaskEnded) as ended:
        executor.fetched(Task(status), 7)
    assert ended.value.item == 7
