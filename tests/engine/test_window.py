"""Items are handed out in batches, in proportion to threads, and all of them once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.engine.dask.window import TaskEnded, Window, depth_for


class Future:
    def __init__(self) -> None:
        self.status = "pending"

    def release(self) -> None:
        self.status = "released"


class Cluster:
    """Takes batches, and finishes items when told to."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, str]]] = []
        self.last: list[bool] = []
        self.futures: dict[int, Future] = {}

    def send(self, batch: list[tuple[int, str]], last: bool) -> dict[int, Future]:
        self.batches.append(batch)
        self.last.append(last)
        futures = {item: Future() for item, _ in batch}
        self.futures.update(futures)
        return futures


def _finish(cluster: Cluster, window: Window, some: int) -> list[int]:
    waiting = [i for i, f in cluster.futures.items() if f.status == "pending"]
    for item in waiting[:some]:
        cluster.futures[item].status = "finished"
    return window.look()


@given(
    st.integers(0, 60),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(2, 8),
    st.integers(1, 5),
)
def test_all_items_once_and_never_too_many(n: int, threads: list[int], depth: int, some: int) -> None:
    cluster, names = Cluster(), {f"w{i}": count for i, count in enumerate(threads)}
    window = Window(names, range(n), cluster.send, depth)
    window.open()
    done: list[int] = []
    for _ in range(10 * n + 1):
        for name, count in names.items():
            assert sum(worker == name for _, worker in window.pending.values()) <= depth * count
        done += _finish(cluster, window, some)
        if window.given and not window.pending:
            break
    assert sorted(done) == list(range(n))
    given = [item for batch in cluster.batches for item, _ in batch]
    assert sorted(given) == list(range(n))
    assert cluster.last == [False] * (len(cluster.last) - 1) + [True] * bool(n)


def test_a_pass_that_fits_is_one_batch_each_worker_its_own_run_of_rows() -> None:
    cluster = Cluster()
    Window({"a": 1, "b": 3}, range(16), cluster.send, depth=16).open()
    assert cluster.last == [True]
    there = dict(cluster.batches[0])
    assert [item for item, worker in there.items() if worker == "a"] == [0, 1, 2, 3]


def test_a_new_worker_takes_from_the_others() -> None:
    cluster = Cluster()
    window = Window({"a": 1}, range(20), cluster.send)
    window.open()
    window.refresh({"a": 1, "b": 2})
    assert [worker for _, worker in cluster.batches[1]] == ["b"] * 4
    assert [item for item, _ in cluster.batches[1]] == [19, 18, 17, 16]  # what a would reach last


def test_what_a_lost_worker_was_to_get_goes_to_the_others() -> None:
    cluster = Cluster()
    window = Window({"a": 1, "b": 1}, range(8), cluster.send)
    window.open()
    window.refresh({"a": 1})
    while not window.given or window.pending:
        assert _finish(cluster, window, 1)
    assert sorted(cluster.futures) == list(range(8))


def test_a_lost_result_is_waited_for_and_an_error_is_told() -> None:
    cluster = Cluster()
    window = Window({"a": 1}, range(2), cluster.send)
    window.open()
    cluster.futures[0].status = "lost"
    assert window.look() == []
    cluster.futures[0].status = "finished"
    cluster.futures[1].status = "error"
    with pytest.raises(TaskEnded) as ended:
        window.look()
    assert ended.value.item == 1
    window.cancel()
    assert cluster.futures[1].status == "released"
    assert window.look() == []


def test_items_without_a_future_are_their_senders() -> None:
    sent: list[Any] = []
    window = Window({"a": 1}, range(3), lambda batch, last: sent.append(batch) or {}, depth=8)
    window.open()
    assert window.given
    assert not window.pending


def test_depth_of_short_and_of_large_items() -> None:
    assert depth_for(None) == depth_for(10.0) == 2
    assert 2 < depth_for(0.2) < depth_for(0.05) <= depth_for(1e-9) == 32
    assert depth_for(0.001, 2**26) == 2
