"""Items (tasks) are sent to workers in batches, in proportion to threads and speeds.

Every item is computed once, and a pass takes nearly the shortest possible time.
"""

from __future__ import annotations

import heapq
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.engine.dask.pools import split_span
from scalelatent.engine.dask.window import AT_ONCE, MOST_AHEAD, Costs, TaskEnded, Window
from scalelatent.engine.grid import RowGrid
from scalelatent.engine.passes import Span

COSTS_OF_SHORT_TASKS = Costs(lambda item: 1e-3, True)


class Future:
    def __init__(self) -> None:
        self.status = "pending"

    def release(self) -> None:
        self.status = "released"


class FakeCluster:
    """Cluster that receives batches of items (tasks), and finishes items when a test asks for it."""

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


def finish_items(cluster: FakeCluster, window: Window, some: int) -> list[int]:
    waiting = [i for i, f in cluster.futures.items() if f.status == "pending"]
    for item in waiting[:some]:
        cluster.futures[item].status = "finished"
    return window.poll()


@given(
    st.integers(0, 60),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(2, 8),
    st.integers(1, 5),
)
def test_every_item_is_sent_once_and_the_queue_is_bounded(
    n: int, threads: list[int], depth: int, some: int
) -> None:
    cluster, names = FakeCluster(), {f"w{i}": count for i, count in enumerate(threads)}
    window = Window(names, range(n), cluster.send, Costs(lambda item: 1e-3, True, depth))
    window.open()
    done: list[int] = []
    for _ in range(10 * n + 1):
        for name, count in names.items():
            assert sum(worker == name for _, worker in window.pending.values()) <= depth * count
        done += finish_items(cluster, window, some)
        if window.all_sent and not window.pending:
            break
    assert sorted(done) == list(range(n))
    given = [item for batch in cluster.batches for item, _ in batch]
    assert sorted(given) == list(range(n))
    assert cluster.last == [False] * (len(cluster.last) - 1) + [True] * bool(n)


def test_a_short_pass_is_one_batch_with_contiguous_rows_per_worker() -> None:
    cluster = FakeCluster()
    Window({"a": 1, "b": 3}, range(16), cluster.send, COSTS_OF_SHORT_TASKS).open()
    assert cluster.last == [True]
    there = dict(cluster.batches[0])
    assert [item for item, worker in there.items() if worker == "a"] == [0, 1, 2, 3]


def test_a_new_worker_takes_items_from_the_others() -> None:
    cluster = FakeCluster()
    window = Window({"a": 1}, range(20), cluster.send)
    window.open()
    window.refresh({"a": 1, "b": 2})
    assert [worker for _, worker in cluster.batches[1]] == ["b"] * 4
    # The new worker b receives the items (tasks) that worker a would have reached last.
    assert [item for item, _ in cluster.batches[1]] == [19, 18, 17, 16]


def test_items_of_a_lost_worker_go_to_the_others() -> None:
    cluster = FakeCluster()
    window = Window({"a": 1, "b": 1}, range(8), cluster.send)
    window.open()
    window.refresh({"a": 1})
    while not window.all_sent or window.pending:
        assert finish_items(cluster, window, 1)
    assert sorted(cluster.futures) == list(range(8))


def test_a_lost_result_is_awaited_and_an_error_is_reported() -> None:
    cluster = FakeCluster()
    window = Window({"a": 1}, range(2), cluster.send)
    window.open()
    cluster.futures[0].status = "lost"
    assert window.poll() == []
    cluster.futures[0].status = "finished"
    cluster.futures[1].status = "error"
    with pytest.raises(TaskEnded) as ended:
        window.poll()
    assert ended.value.item == 1
    window.cancel()
    assert cluster.futures[1].status == "released"
    assert window.poll() == []


def test_items_without_a_future_are_not_pending() -> None:
    sent: list[Any] = []
    window = Window({"a": 1}, range(3), lambda batch, last: sent.append(batch) or {}, COSTS_OF_SHORT_TASKS)
    window.open()
    assert window.all_sent
    assert not window.pending


@pytest.mark.parametrize(("costs", "first"), [
    (Costs(), 2), (Costs(lambda item: 10.0, True), 2), (Costs(lambda item: MOST_AHEAD / 20, True), 20),
    (Costs(lambda item: 1e-3, True, most=7), 7),
])  # fmt: skip
def test_short_items_are_sent_many_at_once_up_to_the_queue_limit(costs: Costs, first: int) -> None:
    cluster = FakeCluster()
    Window({"a": 1}, range(100), cluster.send, costs).open()
    assert len(cluster.batches[0]) == first


# -- workers of unequal speed --------------------------------------------------------------------------------

SHORTEST_SECONDS = 0.03
POOLS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1.0, 1.5, 2.0, 5.0, 20.0, 50.0])), min_size=1,
                 max_size=8)  # fmt: skip


class SimulatedPool:
    """Workers with true speeds that compute the tasks of a window, which may assume other speeds."""

    def __init__(
        self,
        n_leaves: int,
        workers: list[tuple[int, float]],
        seconds: float,
        assumed_speeds: Any = None,
        level: int = 9,
    ) -> None:
        self.grid = RowGrid(n_leaves, 1, 1)
        self.threads = {f"w{i}": threads for i, (threads, _) in enumerate(workers)}
        self.speeds = {f"w{i}": speed for i, (_, speed) in enumerate(workers)}
        self.capacity = sum(threads * speed for threads, speed in workers)
        # Seconds of a leaf (range of rows) at speed 1. If all workers are busy, a pass takes ``seconds``.
        self.leaf = seconds * self.capacity / n_leaves
        level = min(level, self.grid.depth)
        spans = [Span("train", level, i) for i in range(self.grid.n_nodes(level))]
        speeds = assumed_speeds or self.speeds
        costs = Costs(
            self.work, True, 1e9, lambda threads: speeds, lambda s: split_span(s, self.grid), SHORTEST_SECONDS
        )
        self.window = Window(self.threads, spans, self.send, costs)
        self.free = {w: [0.0] * n for w, n in self.threads.items()}
        self.running: list[Any] = []
        self.now = self.end = self.latency = 0.0
        self.given: list[tuple[Span, str]] = []
        self.batches = 0

    def work(self, span: Span) -> float:
        a, b = self.grid.node_rows(span.level, span.index)
        return (b - a) * self.leaf

    def send(self, batch: list[tuple[Span, str]], last: bool) -> dict[Span, Future]:
        self.batches += 1
        self.given += batch
        futures = {span: Future() for span, _ in batch}
        for span, worker in batch:
            until = max(heapq.heappop(self.free[worker]), self.now) + self.work(span) / self.speeds[worker]
            heapq.heappush(self.free[worker], until)
            heapq.heappush(self.running, (until + self.latency, span.level, span.index, futures[span]))
            self.end = max(self.end, until)
        return futures

    def run(self, latency: float = 0.0) -> float:
        """Return the seconds of the pass.

        The window receives the end of each span (row range of a task) ``latency`` seconds late.
        """
        self.latency = latency
        self.window.open()
        while self.running:
            self.now, _, _, future = heapq.heappop(self.running)
            future.status = "finished"
            self.window.poll()
        assert self.window.all_sent
        assert not self.window.pending
        return self.end

    def shortest_seconds(self) -> float:
        """Return the shortest possible seconds of a pass.

        All leaves (ranges of rows) are of equal size, and no leaf is split.
        """
        leaves = self.grid.n_leaves
        ends = ((k + 1) * self.leaf / self.speeds[w] for w, n in self.threads.items() for _ in range(n)
                for k in range(leaves))  # fmt: skip
        return heapq.nsmallest(leaves, ends)[-1]


@given(st.integers(1, 400), POOLS, st.sampled_from([0.1, 0.7, 3.0, 40.0, 900.0]), st.integers(0, 9))
def test_every_leaf_is_computed_once_in_nearly_the_best_time(
    n_leaves: int, workers: list[tuple[int, float]], seconds: float, level: int
) -> None:
    pool = SimulatedPool(n_leaves, workers, seconds, level=level)
    end = pool.run()
    there = [leaf for span, _ in pool.given for leaf in pool.grid.node_leaves(span.level, span.index)]
    assert sorted(there) == list(range(n_leaves))
    finest = max(SHORTEST_SECONDS, seconds / 128)
    assert end <= 1.15 * pool.shortest_seconds() + finest + pool.leaf / max(pool.speeds.values())
    assert pool.window.seconds == pytest.approx(0.0, abs=1e-6 * seconds)
    if seconds <= AT_ONCE:
        assert pool.batches == 1


@pytest.mark.parametrize("seconds", [1.0, 5.0, 60.0])
def test_a_gpu_worker_hardly_waits_for_cpu_workers(seconds: float) -> None:
    """Every message of a worker reaches the process of the fit 30 ms late."""
    pool = SimulatedPool(1000, [(1, 1.0)] * 3 + [(1, 20.0)], seconds)
    assert pool.run(latency=0.03) < 1.03 * seconds
    share = sum(pool.work(span) for span, worker in pool.given if worker == "w3") / pool.leaf / 1000
    assert share == pytest.approx(20 / 23, rel=0.02)


def test_wrong_speeds_cost_little() -> None:
    """A worker that is twice as fast as assumed takes items from the others, and a slower one loses items."""
    assumed_speeds = {"w0": 1.0, "w1": 1.0, "w2": 1.0, "w3": 10.0}
    pool = SimulatedPool(1000, [(1, 1.0), (1, 2.0), (1, 0.7), (1, 20.0)], 20.0, assumed_speeds)
    assert pool.run(latency=0.03) < 1.08 * 20.0


def test_a_worker_that_would_end_last_gets_nothing() -> None:
    """A worker with a twentieth of the speed would compute one of 15 leaves (fixed ranges of rows) last."""
    pool = SimulatedPool(15, [(1, 1.0), (1, 20.0)], 10.0)
    assert pool.run() == pytest.approx(pool.shortest_seconds())
    assert {worker for _, worker in pool.given} == {"w1"}


def test_all_threads_of_a_worker_are_busy() -> None:
    pool = SimulatedPool(64, [(4, 1.0), (4, 1.0)], 1000.0)
    assert pool.run(latency=0.1) < 1.01 * 1000.0


def test_workers_keep_contiguous_ranges_of_rows() -> None:
    """The cache of the worker contains these rows in the next pass."""
    runs = []
    for _ in range(2):
        pool = SimulatedPool(512, [(1, 1.0), (1, 3.0)], 0.5)
        pool.run()
        mine = [s for s, worker in pool.given if worker == "w1"]
        runs.append({leaf for s in mine for leaf in pool.grid.node_leaves(s.level, s.index)})
    assert runs[0] == runs[1]
    assert len(runs[0] & set(range(128, 512))) > 0.95 * len(runs[0])


def test_items_of_a_lost_worker_of_a_pool_go_to_the_remaining_ones() -> None:
    pool = SimulatedPool(200, [(1, 1.0), (1, 5.0)], 30.0)
    pool.window.open()
    assert not pool.window.all_sent
    first = len(pool.given)
    pool.window.refresh({"w0": 1})
    pool.run()
    leaves = [leaf for s, _ in pool.given for leaf in pool.grid.node_leaves(s.level, s.index)]
    assert sorted(leaves) == list(range(200))
    assert {worker for _, worker in pool.given[first:]} == {"w0"}


def test_children_cover_a_span() -> None:
    grid = RowGrid(100, 1, 1)
    assert split_span(Span("train", 2, 1), grid) == [Span("train", 1, i) for i in range(8, 13)]
    assert split_span(Span("train", 0, 1), grid) == []


def test_a_thousand_workers_cost_the_driver_little() -> None:
    pool = SimulatedPool(1000, [(1, 1.0)] * 900 + [(1, 20.0)] * 100, 0.5)
    begin = time.process_time()
    pool.window.open()
    assert time.process_time() - begin < 5.0  # An idle machine needs about 1 s.
    assert len(pool.given) == 1000
