"""Pools of any speeds, simulated: all rows once, near the best that whole leaves allow, cheaply."""

from __future__ import annotations

import heapq
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.engine.dask.shares import AT_ONCE, FINEST, Shares, cut
from scalelatent.engine.grid import FAN_IN, RowGrid
from scalelatent.engine.passes import Span

SHORTEST = 0.03
POOLS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1.0, 1.5, 2.0, 5.0, 20.0, 50.0])), min_size=1,
                 max_size=8)  # fmt: skip


class Pool:
    """Workers of true speeds that compute what `Shares`, which believes in other speeds, hands out."""

    def __init__(
        self,
        leaves: int,
        workers: list[tuple[int, float]],
        seconds: float,
        believed: Any = None,
        level: int = 9,
    ) -> None:
        self.grid = RowGrid(leaves, 1, 1)
        self.threads = {f"w{i}": threads for i, (threads, _) in enumerate(workers)}
        self.speeds = {f"w{i}": speed for i, (_, speed) in enumerate(workers)}
        self.capacity = sum(threads * speed for threads, speed in workers)
        self.leaf = seconds * self.capacity / leaves  # work of a leaf: `seconds` is the ideal
        self.seconds = seconds
        level = min(level, self.grid.depth)
        spans = [Span("train", level, i) for i in range(self.grid.n_nodes(level))]
        self.shares = Shares(
            spans, self.work, lambda s: cut(s, {"train": self.grid}, FAN_IN), self.threads,
            believed or self.speeds, SHORTEST,
        )  # fmt: skip
        self.given: list[tuple[Span, str]] = []
        self.batches = 0

    def work(self, span: Span) -> float:
        a, b = self.grid.node_rows(span.level, span.index)
        return (b - a) * self.leaf

    def run(self, latency: float = 0.0) -> float:
        """Seconds of the pass; the driver hears of spans so much later than they end."""
        free = {w: [0.0] * n for w, n in self.threads.items()}
        heard: list[Any] = []
        now = end = 0.0
        while True:
            batch = self.shares.hand_out()
            self.batches += bool(batch)
            self.given += batch
            for span, worker in batch:
                until = max(heapq.heappop(free[worker]), now) + self.work(span) / self.speeds[worker]
                heapq.heappush(free[worker], until)
                heapq.heappush(heard, (until + latency, span.level, span.index, worker))
                end = max(end, until)
            if not heard:
                return end
            now, level, index, worker = heapq.heappop(heard)
            self.shares.done(worker, Span("train", level, index))

    def best(self) -> float:
        """The shortest pass of equal leaves that are not cut."""
        leaves = self.grid.n_leaves
        ends = ((k + 1) * self.leaf / self.speeds[w] for w, n in self.threads.items() for _ in range(n)
                for k in range(leaves))  # fmt: skip
        return heapq.nsmallest(leaves, ends)[-1]


@given(st.integers(1, 400), POOLS, st.sampled_from([0.1, 0.7, 3.0, 40.0, 900.0]), st.integers(0, 9))
def test_every_leaf_once_and_near_the_best(
    leaves: int, workers: list[tuple[int, float]], seconds: float, level: int
) -> None:
    pool = Pool(leaves, workers, seconds, level=level)
    end = pool.run()
    there = [leaf for span, _ in pool.given for leaf in pool.grid.node_leaves(span.level, span.index)]
    assert sorted(there) == list(range(leaves))
    finest = max(SHORTEST, seconds / FINEST)
    assert end <= 1.15 * pool.best() + finest + pool.leaf / max(pool.speeds.values())
    assert not pool.shares
    assert pool.shares.horizon() == pytest.approx(0.0, abs=1e-6 * seconds)
    if seconds <= AT_ONCE:
        assert pool.batches == 1


@pytest.mark.parametrize("seconds", [1.0, 5.0, 60.0])
def test_a_card_beside_processors_never_waits_for_them(seconds: float) -> None:
    """With a driver that hears of everything 30 ms late."""
    pool = Pool(1000, [(1, 1.0)] * 3 + [(1, 20.0)], seconds)
    assert pool.run(latency=0.03) < 1.03 * seconds
    share = sum(pool.work(span) for span, worker in pool.given if worker == "w3") / pool.leaf / 1000
    assert share == pytest.approx(20 / 23, rel=0.02)


def test_wrong_speeds_cost_little() -> None:
    """Who is twice as fast as was believed takes from the others; who is slower leaves to them."""
    believed = {"w0": 1.0, "w1": 1.0, "w2": 1.0, "w3": 10.0}
    pool = Pool(1000, [(1, 1.0), (1, 2.0), (1, 0.7), (1, 20.0)], 20.0, believed)
    assert pool.run(latency=0.03) < 1.08 * 20.0


def test_who_would_end_last_gets_nothing() -> None:
    """Of 15 leaves a worker of a twentieth of the speed would take one, and all would wait for it."""
    pool = Pool(15, [(1, 1.0), (1, 20.0)], 10.0)
    assert pool.run() == pytest.approx(pool.best())
    assert {worker for _, worker in pool.given} == {"w1"}


def test_threads_of_a_worker_all_have_something_to_do_however_long_spans_are() -> None:
    pool = Pool(64, [(4, 1.0), (4, 1.0)], 1000.0)
    assert pool.run(latency=0.1) < 1.01 * 1000.0


def test_rows_are_dealt_in_runs_that_stay_with_their_worker() -> None:
    """Its cache holds them in the next pass."""
    runs = []
    for _ in range(2):
        pool = Pool(512, [(1, 1.0), (1, 3.0)], 0.5)
        pool.run()
        mine = [s for s, worker in pool.given if worker == "w1"]
        runs.append({leaf for s in mine for leaf in pool.grid.node_leaves(s.level, s.index)})
    assert runs[0] == runs[1]
    assert len(runs[0] & set(range(128, 512))) > 0.95 * len(runs[0])


def test_what_a_lost_worker_was_to_get_goes_to_those_that_are_left() -> None:
    pool = Pool(200, [(1, 1.0), (1, 5.0)], 30.0)
    first = pool.shares.hand_out()
    for span, worker in first:
        pool.shares.done(worker, span)
    pool.shares.set_workers({"w0": 1}, {"w0": 1.0})
    del pool.threads["w1"], pool.speeds["w1"]
    pool.run()
    spans = [span for span, _ in first + pool.given]
    assert sorted(leaf for s in spans for leaf in pool.grid.node_leaves(s.level, s.index)) == list(range(200))
    assert {worker for _, worker in pool.given} == {"w0"}


def test_a_thousand_workers_cost_the_driver_little() -> None:
    pool = Pool(1000, [(1, 1.0)] * 900 + [(1, 20.0)] * 100, 0.5)
    begin = time.process_time()
    given = pool.shares.hand_out()
    assert time.process_time() - begin < 5.0  # a second where nothing else runs
    assert len(given) == 1000


def test_cut_covers_a_span() -> None:
    grid = RowGrid(100, 1, 1)
    grids = {"train": SimpleNamespace(n_nodes=grid.n_nodes)}
    spans = cut(Span("train", 2, 1), grids, FAN_IN)
    assert spans == [Span("train", 1, i) for i in range(8, 13)]
