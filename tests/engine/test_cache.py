"""The cache of pieces (rows read together) is bounded, thread-safe, and suited to cyclic scans."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent import CapsuleRegression, Dataset
from scalelatent.engine import cache as module
from scalelatent.engine import rates
from scalelatent.engine.cache import PieceCache, memory_limit, shared_cache


def make_piece(n: int) -> tuple[np.ndarray | None, ...]:
    return np.zeros(n, np.uint8), None, None


def test_the_size_of_a_piece_includes_all_columns() -> None:
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
def test_the_cache_stays_within_its_limit_and_returns_the_right_pieces(
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
            piece = make_piece(size)
            known = cache.get(key)
            if cache.put(key, piece):
                put[key] = piece if known is None else known
                # If a key that the cache has is put again, the cache keeps the first piece.
                assert cache.get(key) is put[key]
        assert 0 <= cache.used <= limit
        kept = [cache.get(k) for k in range(10)]
        assert cache.used == sum(p[0].nbytes for p in kept if p is not None)


def test_a_cyclic_scan_has_hits_for_the_pieces_that_fit() -> None:
    """Four of ten pieces fit and stay; if the least recently used were evicted, no scan would have a hit."""
    cache = PieceCache(4 * 100)
    hits = []
    for _ in range(5):
        cache.start_pass()
        count = 0
        for key in range(10):
            if cache.get(key) is None:
                cache.put(key, make_piece(100))
            else:
                count += 1
        hits.append(count)
    assert hits == [0, 4, 4, 4, 4]


def test_pieces_that_two_passes_did_not_use_are_evicted() -> None:
    cache = PieceCache(300)
    cache.start_pass()
    for key in "abc":
        cache.put(key, make_piece(100))
    for _ in range(2):
        cache.start_pass()
        assert not cache.put("new", make_piece(100))
    cache.get("b")
    cache.start_pass()
    assert cache.put("new", make_piece(100))
    # The cache has evicted only one of the unused pieces a and c, because the new piece has the same size.
    assert (cache.get("a") is None) != (cache.get("c") is None)
    assert cache.get("b") is not None


def test_nothing_is_dropped_for_a_piece_larger_than_the_cache() -> None:
    cache = PieceCache(100)
    assert not cache.put("huge", make_piece(101))
    assert cache.put("a", make_piece(100))
    assert not cache.put("b", make_piece(1))
    assert cache.get("a") is not None


def test_clear_empties_the_cache() -> None:
    cache = PieceCache(100)
    cache.put("a", make_piece(100))
    cache.clear()
    assert (cache.used, cache.get("a")) == (0, None)
    assert cache.put("b", make_piece(100))


def test_threads_share_the_cache_safely() -> None:
    cache = PieceCache(1000)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(500):
            key = int(rng.integers(30))
            if cache.get(key) is None:
                cache.put(key, make_piece(key * 10))
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
    assert shared_cache().limit == module.SMALL_BYTES
    assert shared_cache(0.25).limit == int(0.25 * memory_limit())
    assert shared_cache().limit == int(0.25 * memory_limit())
    monkeypatch.setenv("SCALELATENT_CACHE_BYTES", "777")
    # A share of memory that this process has set takes precedence over the environment variable.
    assert shared_cache(1e6).limit == int(0.25 * memory_limit())


def test_a_smaller_limit_applies_at_once() -> None:
    cache = PieceCache(300)
    for key in "abc":
        cache.put(key, make_piece(100))
    cache.resize(150)
    assert (cache.used, cache.limit) == (100, 150)
    assert sum(cache.get(key) is not None for key in "abc") == 1
    cache.resize(0)
    assert cache.used == 0


@pytest.mark.parametrize("value", ["much", -1, "-1GB", float("nan"), float("inf"), True, [1]])
def test_a_limit_that_is_not_an_amount_of_memory_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^cache=.*: give 'auto', an amount of memory such as"):
        module.parse_cache(value)


@pytest.fixture
def no_cache_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALELATENT_CACHE_BYTES", raising=False)
    monkeypatch.setattr(module, "_shared", None)


def _fit(ds: Dataset, **engine: object) -> np.ndarray:
    model = CapsuleRegression(capsule_dim=2, projection=None, max_iter=4, random_state=0, n_jobs=2)
    return model.fit(ds, engine=engine).W_


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> list[Dataset]:
    """Return a stored dataset, and one with eight times as many rows."""
    x = np.random.default_rng(0).normal(size=(40_000, 40)).astype(np.float32)
    folder = tmp_path_factory.mktemp("rows")
    few, many = (Dataset.from_arrays(x[:n], np.arange(n) % 3) for n in (5000, 40_000))
    return [few.save(folder / "few.zarr"), many.save(folder / "many.zarr")]


def test_the_cache_does_not_grow_with_the_number_of_rows(
    stored: list[Dataset], monkeypatch: pytest.MonkeyPatch, no_cache_yet: None
) -> None:
    few, many = stored
    small = int(1.5 * few.nbytes)
    monkeypatch.setattr(rates, "SMALL_BYTES", small)
    monkeypatch.setattr(rates, "read_seconds", lambda dataset: 0.0)
    for ds in stored:
        _fit(ds)
        assert 0 < shared_cache().used <= small
    assert few.nbytes < small < many.nbytes / 4


@pytest.mark.parametrize(("share", "many"), [(1.1, True), (0.9, False)])
def test_slow_storage_makes_the_cache_keep_more_rows(
    stored: list[Dataset], monkeypatch: pytest.MonkeyPatch, no_cache_yet: None, share: float, many: bool
) -> None:
    monkeypatch.setattr(rates, "SMALL_BYTES", 2**20)
    monkeypatch.setattr(rates, "seconds_per_row", lambda work: 1.0)
    monkeypatch.setattr(rates, "read_seconds", lambda dataset: share)
    _fit(stored[1])
    assert (shared_cache().limit == int(module.DEFAULT_SHARE * memory_limit())) is many
    assert (shared_cache().used > stored[1].nbytes) is many


def test_the_cache_keeps_more_only_of_rows_that_are_read_again(
    stored: list[Dataset], monkeypatch: pytest.MonkeyPatch, no_cache_yet: None
) -> None:
    monkeypatch.setattr(rates, "SMALL_BYTES", 2**20)
    monkeypatch.setattr(rates, "read_seconds", lambda dataset: 1.0)
    used = []
    for n_epochs in (1, 2):
        model = CapsuleRegression(capsule_dim=2, algorithm="stepwise", n_epochs=n_epochs, n_jobs=1)
        model.set_params(random_state=0, projection=None, temperature=1.0).fit(stored[1])
        used.append(shared_cache().used)
    assert used[0] <= 2**20 < stored[1].nbytes < used[1]


def test_a_lost_shard_does_not_prevent_the_choice_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_cache_yet: None
) -> None:
    """The choice of the cache ignores a missing shard; the pass that reads the shard may exclude it."""
    monkeypatch.setattr(rates, "SMALL_BYTES", 64)
    x = np.random.default_rng(0).normal(size=(500, 10)).astype(np.float32)
    ds = Dataset.from_arrays(x, np.arange(500) % 3).save(tmp_path / "d.zarr", chunk_rows=50, shard_rows=50)
    Path(ds.shards(0, 1)[0][0]).unlink()
    assert rates.read_seconds(ds) > 0
    assert _fit(ds, on_bad_shard="skip").shape == (12, 10)


def test_the_size_of_the_cache_changes_no_bit(stored: list[Dataset], no_cache_yet: None) -> None:
    weights = []
    for cache, least, most in ((0, 0, 0), ("3MiB", 1, 3 * 2**20), (0.2, 2**22, 2**30)):
        weights.append(_fit(stored[1], cache=cache))
        assert least <= shared_cache().used <= most
    assert np.array_equal(weights[0], weights[1])
    assert np.array_equal(weights[0], weights[2])
    with pytest.raises(ValueError, match="cache='lots'"):
        _fit(stored[0], cache="lots")


def test_memory_limit_is_no_more_than_the_machine_has() -> None:
    import psutil

    assert 2**20 < memory_limit() <= psutil.virtual_memory().total


@pytest.mark.parametrize("version", [1, 2])
def test_the_lowest_limit_of_the_control_groups_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """A batch system limits the control groups of a job, while the root group has no limit."""
    outer, own, root = tmp_path / "outer", tmp_path / "own", tmp_path / "root"
    outer.write_text(f"{512 * 2**20}\n")
    own.write_text(f"{768 * 2**20}\n")
    root.write_text("max\n")
    files = [(own, "own"), (outer, f"cgroup v{version}"), (tmp_path / "none", "none"), (root, "root")]
    monkeypatch.setattr(module, "_cgroup_files", lambda: iter(files))
    assert module.machine_memory() == (512 * 2**20, f"cgroup v{version}")
    assert memory_limit() == 512 * 2**20
    own.write_text("max\n")
    outer.write_text(f"{2**63 - 4096}\n")  # Version 1 of control groups writes this number for "no limit".
    assert module.machine_memory()[1] == "the machine"


def test_the_control_groups_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
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
