"""Events report a span (row range of a task) whose workers died; suspected workers pause for a while."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scalelatent.engine.dask import watch
from scalelatent.engine.dask.link import ClusterMember, Link
from scalelatent.engine.dask.online_steps import Segment
from scalelatent.engine.dask.watch import Watch, WorkerDied
from scalelatent.engine.dask.window import Work
from scalelatent.engine.executor import Place
from scalelatent.engine.passes import Span
from scalelatent.errors import RunError


class Pass(Work):
    def item_rows(self, item: Span) -> int:
        return 100

    def about(self, item: Span) -> dict[str, Any]:
        return {"part": item.part, "span": item.index, "rows": [100 * item.index, 100 * item.index + 100]}


@pytest.fixture
def case() -> tuple[Watch, Pass, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    window = SimpleNamespace(refresh=lambda threads: None)
    executor = SimpleNamespace(
        token="t", callbacks=SimpleNamespace(on_event=events.append), look_at_workers=lambda: {"a": 1}
    )
    current = Pass("capsule_estep", 7, "t", 1000)
    current.window = window  # type: ignore[assignment]
    current.items = {"key": Span("train", 0, 3)}
    return Watch(executor), current, events  # type: ignore[arg-type]


def test_deaths_are_reported_with_span_rows_host_and_memory(case: Any) -> None:
    watcher, current, events = case
    watcher.members = {"tcp://a:1": ClusterMember(True, "10.0.0.1", 3 * 2**29, 2**31)}
    for address in ("tcp://a:1", "tcp://b:2"):
        watcher._worker_events.append(
            {"action": "remove-worker", "worker": address, "processing-tasks": {"key", "x"}}
        )
    watcher._process_worker_events(current)
    words = watcher.describe_killed_task(current, "key", "tcp://b:2")
    assert words.startswith(
        "span 3 (rows 300:400 of the train rows) of pass 7 of capsule_estep was with 2 workers when they died"
    )
    assert "tcp://a:1 on 10.0.0.1, 1.50 GiB of 2.0 GiB in use at its peak; tcp://b:2" in words
    assert [event["event"] for event in events] == ["worker_lost", "span_redone"] * 2
    assert events[1]["rows"] == [300, 400]


def test_online_steps_are_reported_as_segments(case: Any) -> None:
    watcher, _, events = case
    place = Place(0, 12)
    segment = Segment(SimpleNamespace(token="t", stage=SimpleNamespace(name="toy_step")), place, 0)
    segment.window = SimpleNamespace(refresh=lambda threads: None)  # type: ignore[assignment]
    segment.items = {"one": place, "two": place}
    watcher._worker_events.append(
        {"action": "remove-worker", "worker": "a", "processing-tasks": ["one", "two"]}
    )
    with pytest.raises(WorkerDied, match="worker a died"):
        watcher._process_worker_events(segment)
    (lost,) = events
    assert (lost["event"], lost["segments"], "spans" in lost) == ("worker_lost", 1, False)
    words = "the segment after step 12 of epoch 1 of toy_step was with 1 worker when it died: a"
    assert watcher.describe_killed_task(segment, "one", "a") == words
    assert [segment.format_count(n) for n in (1, 2)] == ["1 segment", "2 segments"]


def test_waiting_items_are_reported_in_singular_and_plural(case: Any) -> None:
    _, current, _ = case
    assert [current.format_count(n) for n in (0, 1, 2)] == ["0 spans", "1 span", "2 spans"]


def test_a_retired_worker_does_not_count_as_a_death(case: Any) -> None:
    watcher, current, events = case
    watcher._worker_events.append(
        {"action": "remove-worker", "worker": "a", "processing-tasks": {"key"}, "expected": True}
    )
    watcher._process_worker_events(current)
    assert watcher.deaths == {}
    assert events[0]["expected"] is True


def test_lost_results_are_reported_and_do_not_count_as_deaths(case: Any) -> None:
    watcher, current, events = case
    watcher._worker_events.append(
        {"action": "remove-worker", "worker": "a", "processing-tasks": set(), "lost-computed-tasks": {"key"}}
    )
    watcher._process_worker_events(current)
    assert watcher.deaths == {}
    assert events[1]["event"] == "span_redone"
    assert events[1]["why"] == "its worker was lost with the result"


def test_deaths_of_an_earlier_pass_are_forgotten(case: Any) -> None:
    watcher, current, _ = case
    watcher.deaths = {("capsule_estep", 6, 1): ["a"], ("capsule_estep", 7, 1): ["b"]}
    watcher.start(current)
    assert watcher.deaths == {("capsule_estep", 7, 1): ["b"]}


def test_a_suspected_worker_is_used_again_later(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, _, _ = case
    now = watch.time.monotonic()
    watcher.avoided = {"a": now, "gone": now}
    assert watcher.trusted({"a": 1, "b": 2}) == {"b": 2}
    assert set(watcher.avoided) == {"a"}
    assert watcher.trusted({"a": 1}) == {"a": 1}  # A suspected worker is better than none.
    monkeypatch.setattr(watch, "AVOID_SECONDS", 0.0)
    assert watcher.trusted({"a": 1, "b": 2}) == {"a": 1, "b": 2}


@pytest.mark.parametrize("error", [OSError("no route"), TimeoutError(), AttributeError("scheduler")])
@pytest.mark.parametrize(
    ("status", "words"), [("closed", "was closed while"), ("connecting", "was lost while")]
)
def test_the_error_of_a_call_names_the_lost_scheduler(error: Exception, status: str, words: str) -> None:
    def fail() -> None:
        raise error

    link = Link(SimpleNamespace(status=status, scheduler=SimpleNamespace(address="tcp://head:8786")))
    with pytest.raises(RunError, match=rf"tcp://head:8786 {words} workers were counted .*resume the run"):
        link.call("workers were counted", fail)


def test_reports_of_workers_reach_the_right_driver(case: Any) -> None:
    watcher, _, _ = case
    received, paces = list[Any](), list[Any]()
    watcher._executor.receive = received.append
    watcher._executor.pools = SimpleNamespace(pace=SimpleNamespace(receive=paces.append))
    cut, pace = {"driver": "t", "cut": {"event": "blocks_cut", "rows": 128}}, {"driver": "t", "pace": 1.0}
    for message in (cut, pace, {**cut, "driver": "another"}, {**pace, "driver": "another"}):
        watcher._receive_pass_event(message)
    assert received == [cut["cut"]]
    assert paces == [pace]
