"""Rows are read ahead for minibatch steps, once per epoch, and released if the steps pause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from scalelatent.data import Dataset
from scalelatent.engine import feeding
from scalelatent.engine.feeding import Feed
from scalelatent.engine.order import RowOrder
from scalelatent.engine.reading import Meter, Reader

ROWS, P = 640, 8


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    x = np.arange(ROWS * P, dtype="f4").reshape(ROWS, P)
    return Dataset.from_arrays(x).save(tmp_path_factory.mktemp("feed") / "rows", chunk_rows=32)


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "SLAB_STEPS", 2)
    monkeypatch.setattr(feeding, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(feeding, "IDLE_SECONDS", 0.1)


@contextmanager
def make_feed(rows: Dataset, **options: Any) -> Iterator[tuple[Feed, Reader]]:
    reader = Reader(rows, None, Meter())
    order = RowOrder(ROWS, 5, 16, run_rows=32, buffer_runs=4, **options)
    feed = Feed(reader, order, range(order.n_chains), 2)
    try:
        yield feed, reader
    finally:
        feed.close()


@pytest.mark.parametrize("in_memory", [False, True], ids=["stored", "in memory"])
def test_held_out_rows_are_not_read(rows: Dataset, in_memory: bool) -> None:
    dataset = Dataset.from_arrays(rows.read_x(0, ROWS)) if in_memory else rows
    order = RowOrder(ROWS - ROWS // 10, 5, 16, run_rows=32, buffer_runs=4, n_chains=2, held=(1, 10))
    feed = Feed(Reader(dataset, None, Meter()), order, range(2), 1)
    seen = []
    for step in range(order.n_steps):
        for block in feed.blocks(0, step):
            assert block is not None
            assert block.rows is not None
            np.testing.assert_array_equal(np.asarray(block.x)[:, 0], block.rows * P)
            seen.extend(block.rows.tolist())
    feed.close()
    assert sorted(seen) == [row for row in range(ROWS) if row % 10 != 9]


def list_reader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "scalelatent-feed"]


def _is_true_within(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def test_a_long_step_causes_no_second_read(rows: Dataset) -> None:
    with make_feed(rows) as (feed, reader):
        for step in range(40):
            feed.blocks(0, step)
            if step % 8 == 3:
                time.sleep(0.3)  # The consumer computes for 0.3 s.
            feed.finish_step()
        read = reader.meter.bytes_read
        # The reader has read the epoch once. It may also have read ahead up to two buffers of the next epoch,
        # each of which has 128 rows.
        assert ROWS * P * 4 <= read <= (ROWS + 2 * 128) * P * 4


def test_an_idle_feed_releases_its_thread_and_resumes_when_used(rows: Dataset) -> None:
    with make_feed(rows) as (feed, _):
        first = feed.blocks(0, 0)[0]
        assert first is not None
        time.sleep(0.3)
        assert list_reader_threads()  # The reader waits while the caller computes.
        feed.finish_step()
        assert _is_true_within(lambda: not list_reader_threads())
        assert not feed._runs
        assert not feed._ready
        again = feed.blocks(0, 4)[0]
        assert again is not None
        assert len(again.x) == 16


def test_a_dead_reader_thread_is_restarted(rows: Dataset) -> None:
    with make_feed(rows) as (feed, _):
        feed._thread = threading.Thread()  # This thread was never started, so it counts as dead.
        assert feed.blocks(0, 0)[0] is not None


def test_waiting_for_rows_can_be_interrupted(rows: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    def hang(self: Reader, start: int, stop: int) -> Any:
        never.wait(30)
        raise OSError("no answer")

    def leave() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Reader, "read", hang)
    monkeypatch.setattr(feeding, "CLOSE_SECONDS", 0.1)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), make_feed(rows) as (feed, _):
        feed.blocks(0, 0, leave)
    assert time.monotonic() - begin < 10  # Closing did not wait for the hanging read.
    never.set()
    assert _is_true_within(lambda: not list_reader_threads())


def test_closing_does_not_wait_for_unfinished_reads(rows: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    read, reads = Reader.read, list[int]()

    def slow(self: Reader, start: int, stop: int) -> Any:
        reads.append(start)
        time.sleep(0.05)
        return read(self, start, stop)

    monkeypatch.setattr(Reader, "read", slow)
    with make_feed(rows, n_chains=4) as (feed, _):
        feed.blocks(0, 0)
        seen = len(reads)
    assert len(reads) <= seen + 2


def test_a_closed_feed_raises_an_error(rows: Dataset) -> None:
    with make_feed(rows) as (feed, _):
        pass
    with pytest.raises(RuntimeError, match="closed"):
        feed.blocks(0, 0)


@pytest.mark.parametrize("epochs", [3, 30])
def test_memory_of_the_row_order_does_not_grow(rows: Dataset, epochs: int) -> None:
    reader = Reader(rows, None, Meter())
    order = RowOrder(ROWS, 5, 32, n_chains=2, run_rows=32, buffer_runs=2)
    feed = Feed(reader, order, range(2), epochs)
    try:
        for epoch in range(epochs):
            for step in range(order.n_steps):
                feed.blocks(epoch, step)
        infos = [cached.cache_info() for cached in feed._permutations.values()]
        assert all(0 < info.currsize <= feeding.BUFFERS for info in infos)
        assert all(info.hits for info in infos)
    finally:
        feed.close()
