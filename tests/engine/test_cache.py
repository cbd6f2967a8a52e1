"""The piece cache: bounded, safe, and made for cyclic scans."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.engine import cache as module
from scalelatent.engine.cache import PieceCache, memory_limit, shared_cache


def _piece(n: int) -> tuple[np.ndarray | None, ...]:
    return np.zeros(n, np.uint8), None, None


def test_all_columns_count() -> None:
    cache = PieceCache(100)
    assert cache.put("a", (np.zeros(3), np.zeros(2, np.int32), np.zeros(1)))
    assert cache.used == 3 * 8 + 2 * 4 + 8


@given(
    st.integers(0, 300),
    st.lists(
        st.tuples(st.sampled_from(["pass", "get", "put"]), st.integers(0, 9), st.integers(0, 120)),
        max_size=60,
    ),
)
def test_never_more_than_the_limit_and_never_a_wrong_piece(
    limit: int, steps: list[tuple[str, int, int]]
) -> None:
    cache, put = PieceCache(limit), {}
    for what, key, size in steps:
        if what == "pass":
            cache.start_pass()
        elif what == "get":
            found = cache.get(key)
            assert found is None or found is put[key]
        else:
            piece = _piece(size)
            known = cache.get(key)
            if cache.put(key, piece):
                put[key] = piece if known is None else known
                assert cache.get(key) is put[key]  # an older piece of the same rows stays
        assert 0 <= cache.used <= limit
        kept = [cache.get(k) for k in range(10)]
        assert cache.used == sum(p[0].nbytes for p in kept if p is not None)


def test_a_cyclic_scan_keeps_what_fits() -> None:
    """'Least recently used' would have no hit at all here."""
    cache = PieceCache(4 * 100)
    hits = []
    for _ in range(5):
        cache.start_pass()
        count = 0
        for key in range(10):
            if cache.get(key) is None:
                cache.put(key, _piece(100))
            else:
                count += 1
        hits.append(count)
    assert hits == [0, 4, 4, 4, 4]


def test_pieces_that_two_whole_passes_did_not_touch_make_room() -> None:
    cache = PieceCache(300)
    cache.start_pass()
    for key in "abc":
        cache.put(key, _piece(100))
    for _ in range(2):
        cache.start_pass()
        assert not cache.put("new", _piece(100))
    cache.get("b")
    cache.start_pass()
    assert cache.put("new", _piece(100))
    assert (cache.get("a") is None) != (cache.get("c") is None)  # one was enough
    assert cache.get("b") is not None


def test_nothing_is_dropped_for_a_piece_that_does_not_fit_anyway() -> None:
    cache = PieceCache(100)
    assert not cache.put("huge", _piece(101))
    assert cache.put("a", _piece(100))
    assert not cache.put("b", _piece(1))
    assert cache.get("a") is not None


def test_clear() -> None:
    cache = PieceCache(100)
    cache.put("a", _piece(100))
    cache.clear()
    assert (cache.used, cache.get("a")) == (0, None)
    assert cache.put("b", _piece(100))


def test_threads() -> None:
    cache = PieceCache(1000)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(500):
            key = int(rng.integers(30))
            if cache.get(key) is None:
                cache.put(key, _piece(key * 10))
            if key == 0:
                cache.start_pass()

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert cache.used == sum(p[0].nbytes for k in range(30) if (p := cache.get(k)) is not None) <= 1000


def test_the_shared_cache_takes_its_limit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_shared", None)
    monkeypatch.setenv("SCALELATENT_CACHE_BYTES", "12345")
    assert shared_cache().limit == 12345
    assert shared_cache() is shared_cache()
    monkeypatch.setattr(module, "_shared", None)
    monkeypatch.delenv("SCALELATENT_CACHE_BYTES")
    assert shared_cache().limit == int(0.3 * memory_limit())


def test_memory_limit_is_no_more_than_the_machine_has() -> None:
    import psutil

    assert 2**20 < memory_limit() <= psutil.virtual_memory().total
