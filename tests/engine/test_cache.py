"""The piece cache: bounded, safe, and made for cyclic scans."""

from __future__ import annotations

import threading
from pathlib import Path

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


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts_also_where_only_its_own_group_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """A batch system bounds a job's group, and the root of all groups has no limit."""
    outer, own, root = tmp_path / "outer", tmp_path / "own", tmp_path / "root"
    outer.write_text(f"{512 * 2**20}\n")
    own.write_text(f"{768 * 2**20}\n")
    root.write_text("max\n")
    files = [(own, "own"), (outer, f"cgroup v{version}"), (tmp_path / "none", "none"), (root, "root")]
    monkeypatch.setattr(module, "_cgroup_files", lambda: iter(files))
    assert module.machine_memory() == (512 * 2**20, f"cgroup v{version}")
    assert memory_limit() == 512 * 2**20
    own.write_text("max\n")
    outer.write_text(f"{2**63 - 4096}\n")  # how v1 says that there is none
    assert module.machine_memory()[1] == "the machine"


def test_groups_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text
    lines = "4:cpu,memory:/job/7\n0::/slurm/job_7\n"
    monkeypatch.setattr(
        Path, "read_text", lambda self: lines if str(self) == "/proc/self/cgroup" else read(self)
    )
    found = [str(file) for file, _ in module._cgroup_files()]
    assert found[:3] == [
        f"/sys/fs/cgroup/memory/{group}memory.limit_in_bytes" for group in ("job/7/", "job/", "")
    ]
    assert "/sys/fs/cgroup/slurm/job_7/memory.max" in found
