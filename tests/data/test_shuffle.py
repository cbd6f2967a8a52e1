"""A shuffle draws a uniformly random order, the same for any memory limit, and leaves no temporary files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelatent.data import Dataset, open_dataset, shuffle_dataset, shuffled_rows
from scalelatent.data.write import shuffle as module
from scalelatent.errors import DataError

N = 95
X = np.arange(N * 3).reshape(N, 3).astype("u2")
Y = np.array([f"class {i % 7}" for i in range(N)])
WEIGHT = np.arange(N) / 2


@pytest.fixture
def rows(tmp_path: Path) -> Dataset:
    whole = Dataset.from_arrays(X, Y, sample_weight=WEIGHT)
    return whole.save(tmp_path / "rows", chunk_rows=10, shard_rows=20)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**64), n_rows=st.integers(1, 500))
def test_the_order_is_a_bijection_that_depends_on_seed_and_rows(seed: int, n_rows: int) -> None:
    order = shuffled_rows(seed, n_rows)
    assert sorted(order.tolist()) == list(range(n_rows))
    np.testing.assert_array_equal(order, shuffled_rows(seed, n_rows))


def test_all_orders_are_equally_likely() -> None:
    """A chi-squared test compares 4800 shuffles of 4 rows with equal frequencies of all 24 orders."""
    orders = [tuple(shuffled_rows(seed, 4).tolist()) for seed in range(4800)]
    counts = np.array([orders.count(o) for o in set(orders)])
    assert len(counts) == 24
    # For uniform orders, chi-squared with 23 degrees of freedom exceeds 50 in one of 1000 cases. The seeds
    # are fixed, so the result is always the same.
    assert ((counts - 200) ** 2 / 200).sum() < 50


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 99), memory=st.integers(600, 30_000), shard=st.integers(9, 95))
def test_memory_and_layout_do_not_change_the_order(seed: int, memory: int, shard: int) -> None:
    source = Dataset.from_arrays(X, Y, sample_weight=WEIGHT)
    layout: dict[str, Any] = {"shard_rows": shard, "overwrite": True}
    out = shuffle_dataset(source, "memory://shuffled", seed=seed, memory=memory, **layout)
    order = shuffled_rows(seed, N)
    np.testing.assert_array_equal(out.read_x(0, N), X[order])
    np.testing.assert_array_equal(out.read_y(0, N), Y[order])
    np.testing.assert_array_equal(out.read_weight(0, N), WEIGHT[order])
    assert out.classes is not None
    assert out.classes.tolist() == sorted(set(Y))


def test_many_buckets_are_shuffled_through_files(
    rows: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = type(module.locate(tmp_path)).write

    def seen(self: Any, key: str, data: bytes) -> None:
        if ".shuffle-" in self.url:
            written.append(key)
        write(self, key, data)

    monkeypatch.setattr(type(module.locate(tmp_path)), "write", seen)
    calls: list[tuple[int, int]] = []
    few = shuffle_dataset(
        rows, tmp_path / "few", seed=5, memory=1500, progress=lambda *c: calls.append(c), shard_rows=20
    )
    assert len({key.split("/")[0] for key in written}) > 5
    # At least one bucket (the rows of one range of the new order) was written in several parts.
    assert len(written) > len({key.split("/")[0] for key in written})
    assert few.fingerprint() == shuffle_dataset(rows, tmp_path / "all", seed=5, shard_rows=20).fingerprint()
    assert few.fingerprint() != shuffle_dataset(rows, tmp_path / "x", seed=6, shard_rows=20).fingerprint()
    assert calls == sorted(calls)
    assert calls[-1] == (N, N)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all", "few", "rows", "x"]
    record = few.attrs["provenance"]
    assert (record["importer"], record["seed"], record["content"]) == ("shuffle", 5, rows.fingerprint())


def test_slices_arrays_and_urls_are_shuffled(rows: Dataset, tmp_path: Path) -> None:
    order = shuffled_rows(2, 30)
    sliced = shuffle_dataset(rows[10:40], tmp_path / "slice", seed=2)
    np.testing.assert_array_equal(sliced.read_x(0, 30), X[10:40][order])
    arrays = shuffle_dataset(Dataset.from_arrays(X[10:40]), tmp_path / "arrays", seed=2, memory=200)
    np.testing.assert_array_equal(arrays.read_x(0, 30), X[10:40][order])
    assert not arrays.has_y
    np.testing.assert_array_equal(
        shuffle_dataset(str(rows.url), "memory://by-url", seed=1, overwrite=True).read_x(0, N),
        X[shuffled_rows(1, N)],
    )


@pytest.mark.parametrize("failing", ["read", "write", "bucket", "shard"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_shuffle_leaves_no_files(
    rows: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: BaseException
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    if failing == "read":
        calls = iter(range(3))
        read = module.RowBatch.read
        monkeypatch.setattr(module.RowBatch, "read", lambda *a: read(*a) if next(calls, 9) < 2 else fail())
    elif failing == "write":
        calls = iter(range(3))
        location_type = type(module.locate(tmp_path))
        write = location_type.write
        monkeypatch.setattr(
            location_type,
            "write",
            lambda self, *a: write(self, *a) if "rows" in self.url or next(calls, 9) < 2 else fail(),
        )
    elif failing == "bucket":
        monkeypatch.setattr(module._Buckets, "_read", fail)
    else:
        monkeypatch.setattr(module.RowBatch, "concatenate", fail)
    with pytest.raises((DataError, OSError, KeyboardInterrupt)):
        shuffle_dataset(rows, tmp_path / "out", seed=0, memory=1500)
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]


_SLOW_SHUFFLE_PROGRAM = """
import sys, time
from scalelatent.data import shuffle_dataset
from scalelatent.data.write import shuffle
cut = shuffle._split_by_shards
def slow(*arguments):
    print("half", flush=True)
    time.sleep(60)
shuffle._split_by_shards = slow
shuffle_dataset(sys.argv[1], sys.argv[2], seed=0, memory=1500)
"""


def test_an_interrupted_shuffle_leaves_no_files(rows: Dataset, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SLOW_SHUFFLE_PROGRAM, str(rows.url), str(tmp_path / "out")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"half\n"
    assert any(".shuffle-" in p.name for p in tmp_path.iterdir())
    os.kill(child.pid, signal.SIGINT)
    child.communicate(timeout=30)
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]


def test_the_error_names_a_lost_bucket(
    rows: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = module._split_by_shards

    def lose(buckets: Any, bounds: Any) -> Any:
        buckets._flush()
        names = iter([buckets._location.keys("2")[0]])
        monkeypatch.setattr(type(buckets._location), "keys", lambda self, folder: [*names, "gone"])
        return cut(buckets, bounds)

    monkeypatch.setattr(module, "_split_by_shards", lose)
    with pytest.raises(DataError, match=r"out\.shuffle-.*gone, a bucket of the shuffle, is missing"):
        shuffle_dataset(rows, tmp_path / "out", seed=0, memory=1500)


def test_invalid_shuffles_are_refused(rows: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match="seed is -1"):
        shuffle_dataset(rows, out, seed=-1)
    with pytest.raises(DataError, match=r"memory is 3 bytes, but shuffling 95 rows .* needs at least \d+"):
        shuffle_dataset(rows, out, seed=0, memory=3)
    with pytest.raises(DataError, match="cannot replace itself"):
        shuffle_dataset(rows, str(rows.url), seed=0, overwrite=True)
    with pytest.raises(DataError, match="nowhere does not exist"):
        shuffle_dataset(tmp_path / "nowhere", out, seed=0)
    shuffle_dataset(rows, out, seed=0)
    with pytest.raises(DataError, match="out exists"):
        shuffle_dataset(rows, out, seed=1)
    np.testing.assert_array_equal(open_dataset(out).read_x(0, N), X[shuffled_rows(0, N)])


def test_label_sorted_rows_are_mixed(tmp_path: Path) -> None:
    y = np.repeat(np.arange(10), 500)
    ds = shuffle_dataset(Dataset.from_arrays(y[:, None].astype("u1"), y), tmp_path / "out", seed=0)
    runs = 1 + int((np.diff(ds.read_y(0, 5000)) != 0).sum())
    assert 4300 < runs < 4700  # A random order has about 4500 runs of labels, the sorted order 10.
