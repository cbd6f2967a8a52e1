"""Blocks made of pieces (rows read together) are the same for any division into pieces.

Reading ahead is limited, errors reach the caller, and threads end.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.data import Dataset
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.reading import (
    AHEAD,
    AHEAD_BYTES,
    Meter,
    Reader,
    StopEvent,
    Stopped,
    _limit_read_ahead,
    iter_blocks,
    name_dataset_in_errors,
)
from scalelatent.errors import DataError, RunError


class CountedRows:
    """Stand-in for a stored dataset, divided into pieces (rows read together), which counts its reads."""

    is_stored, has_y, has_weight, n_features = True, True, True, 2
    reads_at_once, is_sparse = 1, True

    def __init__(self, n: int, edges: list[int], fail_at: int | None = None) -> None:
        self.n, self.edges, self.fail_at = n, sorted({0, n, *edges}), fail_at
        self.reads: list[tuple[int, int]] = []
        self.release = threading.Event()
        self.release.set()

    def fingerprint(self) -> str:
        return "rows"

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        inner = [start, *(e for e in self.edges if start < e < stop), stop]
        return list(itertools.pairwise(inner))

    def read_x(self, start: int, stop: int) -> np.ndarray:
        self.reads.append((start, stop))
        self.release.wait(10)
        if self.fail_at is not None and start <= self.fail_at < stop:
            raise DataError(f"row {self.fail_at} is lost")
        return np.stack([np.arange(start, stop), -np.arange(start, stop)], axis=1).astype("f4")

    def read_codes(
        self, start: int, stop: int, classes: np.ndarray, *, unlabelled: bool = False
    ) -> np.ndarray:
        return (np.arange(start, stop) % len(classes)).astype(np.int32)

    def read_weight(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop) + 0.5


def list_blocks(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    return [(a, min(a + size, stop)) for a in range(start, stop, size)]


def _check(reader: Reader, start: int, stop: int, size: int) -> None:
    blocks = list_blocks(start, stop, size)
    found = list(iter_blocks(reader, blocks, StopEvent()))
    assert [(b.start, b.start + len(b.x)) for b in found] == blocks
    for block, (a, b) in zip(found, blocks, strict=True):
        np.testing.assert_array_equal(block.x[:, 0], np.arange(a, b))
        np.testing.assert_array_equal(block.x[:, 1], -np.arange(a, b))
        np.testing.assert_array_equal(block.y, np.arange(a, b) % 3)
        np.testing.assert_array_equal(block.weight, np.arange(a, b) + 0.5)


@given(
    st.integers(1, 60),
    st.lists(st.integers(1, 60), max_size=12),
    st.integers(1, 20),
    st.integers(0, 50),
    st.booleans(),
)
def test_blocks_equal_the_rows_for_any_pieces(
    n: int, edges: list[int], size: int, first: int, cached: bool
) -> None:
    rows = CountedRows(n, [e for e in edges if e < n])
    first = min(first, n - 1)
    reader = Reader(rows, PieceCache(10**6) if cached else None, Meter(), np.arange(3))
    _check(reader, first, n, size)
    before = len(rows.reads)
    _check(reader, first, n, size)
    assert len(rows.reads) == before if cached else len(rows.reads) == 2 * before


def test_blocks_within_a_piece_are_views_and_others_are_copies() -> None:
    rows = CountedRows(40, [20])
    found = list(iter_blocks(Reader(rows, None, Meter(), np.arange(3)), list_blocks(0, 40, 8), StopEvent()))
    assert [b.x.base is not None for b in found] == [True, True, False, True, True]


def test_rows_in_memory_are_not_copied() -> None:
    x = np.arange(40.0).reshape(20, 2)
    meter = Meter()
    reader = Reader(Dataset.from_arrays(x, np.zeros(20, int)), PieceCache(10**6), meter, np.arange(1))
    for block in iter_blocks(reader, list_blocks(0, 20, 6), StopEvent()):
        assert np.shares_memory(block.x, x)
    assert meter.bytes_read == 0


def test_without_classes_labels_are_not_read() -> None:
    rows = CountedRows(10, [])
    rows.read_codes = None  # type: ignore[assignment]
    (block,) = iter_blocks(Reader(rows, None, Meter()), [(0, 10)], StopEvent())
    assert block.y is None


def test_labels_are_positions_in_the_models_classes(tmp_path: Path) -> None:
    """A dataset that lacks some of the model's classes has the model's codes for its labels.

    Pieces (rows read together) with these codes are cached separately.
    """
    y = np.array([5, 9, 9, 5, 7, 7])
    stored = Dataset.from_arrays(np.zeros((6, 1), "f4"), y).save(tmp_path / "ds")
    cache = PieceCache(10**6)
    for classes in ([5, 7, 9], [1, 5, 7, 8, 9]):
        (block,) = iter_blocks(Reader(stored, cache, Meter(), np.array(classes)), [(0, 6)], StopEvent())
        np.testing.assert_array_equal(np.array(classes)[block.y], y)
        assert block.y.dtype == np.int32
    with pytest.raises(DataError, match="label of row 4 is 7"):
        list(iter_blocks(Reader(stored, cache, Meter(), np.array([5, 9])), [(0, 6)], StopEvent()))


def test_rows_from_the_cache_do_not_count_as_read() -> None:
    rows, meter = CountedRows(64, list(range(8, 64, 8))), Meter()
    reader = Reader(rows, PieceCache(10**6), meter, np.arange(3))
    size = 64 * (2 * 4 + 4 + 8)  # float32 x, int32 codes, float64 weights
    _check(reader, 0, 64, 8)
    assert meter.bytes_read == size
    _check(reader, 0, 64, 8)
    assert meter.bytes_read == size
    bare = Meter()
    _check(Reader(rows, None, bare, np.arange(3)), 0, 64, 8)
    _check(Reader(rows, None, bare, np.arange(3)), 0, 64, 8)


def test_the_reader_reads_a_bounded_number_of_pieces_ahead() -> None:
    rows = CountedRows(100, list(range(1, 100)))
    source = iter_blocks(Reader(rows, None, Meter(), np.arange(3)), list_blocks(0, 100, 1), StopEvent())
    next(source)
    deadline = time.monotonic() + 5
    while len(rows.reads) < 1 + AHEAD and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.1)  # A reader without a limit would read on.
    # One piece (rows read together) was used, AHEAD pieces are queued, and one more may wait for space.
    assert 1 + AHEAD <= len(rows.reads) <= 2 + AHEAD
    source.close()
    assert len(rows.reads) <= 3 + AHEAD


def test_fewer_large_pieces_are_read_ahead() -> None:
    def how_far(row_bytes: int) -> int:
        dataset = SimpleNamespace(is_sparse=False, n_features=row_bytes, dtype=np.dtype("u1"))
        return _limit_read_ahead(dataset, [(0, 100), (100, 130)], 0)

    assert [how_far(AHEAD_BYTES // 100 // n) for n in (1, 2, 3, 100)] == [1, 2, AHEAD, AHEAD]
    assert how_far(AHEAD_BYTES) == 1


def test_reading_overlaps_computing() -> None:
    rows = CountedRows(30, [10, 20])
    source = iter_blocks(Reader(rows, None, Meter(), np.arange(3)), list_blocks(0, 30, 10), StopEvent())
    next(source)
    deadline = time.monotonic() + 5
    while len(rows.reads) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(rows.reads) == 3  # The reads happened while this thread held the first block.
    source.close()


@pytest.mark.parametrize("fail_at", [0, 11, 29])
def test_an_error_of_the_reader_reaches_the_caller(fail_at: int) -> None:
    rows = CountedRows(30, [10, 20], fail_at)
    good = 0
    with pytest.raises(DataError, match=f"row {fail_at} is lost"):
        for _ in iter_blocks(Reader(rows, None, Meter(), np.arange(3)), list_blocks(0, 30, 5), StopEvent()):
            good += 1
    assert good == fail_at // 10 * 2


def test_an_error_of_the_consumer_ends_the_reader_thread() -> None:
    rows = CountedRows(1000, list(range(1, 1000)))
    with pytest.raises(ZeroDivisionError):
        for _ in iter_blocks(Reader(rows, None, Meter(), np.arange(3)), list_blocks(0, 1000, 1), StopEvent()):
            1 / 0  # noqa: B018
    import gc

    gc.collect()
    assert len(rows.reads) < 20


@pytest.mark.parametrize("cached", [True, False])
def test_a_stop_takes_effect_at_the_next_block(cached: bool) -> None:
    rows, stop = CountedRows(100, [50]), StopEvent()
    source = iter_blocks(
        Reader(rows, PieceCache(10**6) if cached else None, Meter(), np.arange(3)),
        list_blocks(0, 100, 10),
        stop,
    )
    next(source)
    stop.set()
    with pytest.raises(Stopped):
        next(source)


def test_without_blocks_nothing_is_read() -> None:
    rows = CountedRows(10, [])
    assert list(iter_blocks(Reader(rows, None, Meter(), np.arange(3)), [], StopEvent())) == []
    assert rows.reads == []


def test_threads_read_one_dataset_safely(toy: SimpleNamespace, tmp_path: Path) -> None:
    stored = toy.rows(400).save(tmp_path / "ds", chunk_rows=16)
    expected = stored.read_x(0, 400)
    cache, wrong = PieceCache(3000), []

    def work() -> None:
        for _ in range(3):
            rows: Any = iter_blocks(
                Reader(stored, cache, Meter(), np.arange(8)), list_blocks(0, 400, 30), StopEvent()
            )
            if not np.array_equal(np.concatenate([b.x for b in rows]), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert not any(t.is_alive() for t in threads)


def test_the_out_of_memory_error_names_settings_that_a_resume_accepts(toy: SimpleNamespace) -> None:
    """The error suggests memory_limit and threads for a resume. It suggests block_rows only for a new run,
    because the bits of a run depend on it.
    """
    with (
        pytest.raises(
            RunError,
            match=r"memory_limit, threads\), then resume the run; or start again .*block_rows",
        ),
        name_dataset_in_errors(toy.rows(10)),
    ):
        raise MemoryError("2 GiB")


def test_bytes_are_counted_by_many_threads() -> None:
    meter = Meter()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [meter.count(1) for _ in range(20_000)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert meter.bytes_read == 160_000
