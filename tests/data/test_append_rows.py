"""Appending gives the concatenation of all parts; a failed append leaves the old rows unchanged."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelatent.data import Dataset, append_rows, open_dataset
from scalelatent.data.write import append as module
from scalelatent.errors import DataError
from scalelatent.storage import lease
from scalelatent.storage.disk import LocalLocation, locate

N = 120
X = np.arange(N * 4).reshape(N, 2, 2).astype("i4")
LABELS = {
    "none": None,
    "numbers": (np.arange(N) // 7 * 5 % 11).astype("u1"),
    "strings": np.array([f"{'hbxaq'[i // 25]}{i % 3}" for i in range(N)]),
}
WEIGHT = np.arange(N) / 3


def make_part(kind: str, a: int, b: int) -> Dataset:
    y = LABELS[kind]
    return Dataset.from_arrays(X[a:b], None if y is None else y[a:b], sample_weight=WEIGHT[a:b])


def _check(ds: Dataset, kind: str, n_rows: int) -> None:
    assert ds.n_rows == n_rows
    np.testing.assert_array_equal(ds.read_x(0, n_rows), X[:n_rows].reshape(n_rows, 4))
    np.testing.assert_array_equal(ds.read_weight(0, n_rows), WEIGHT[:n_rows])
    y = LABELS[kind]
    if y is None:
        assert not ds.has_y
        return
    np.testing.assert_array_equal(ds.read_y(0, n_rows), y[:n_rows])
    assert ds.classes is not None
    np.testing.assert_array_equal(ds.classes, np.unique(y[:n_rows]))
    np.testing.assert_array_equal(ds.classes[ds.read_codes(0, n_rows)], y[:n_rows])


@settings(max_examples=6, deadline=None)
@given(
    kind=st.sampled_from(sorted(LABELS)),
    cuts=st.lists(st.integers(1, N - 1), min_size=1, max_size=5, unique=True),
    rows=st.tuples(st.integers(0, N), st.integers(0, N)),
)
def test_appending_is_concatenation(kind: str, cuts: list[int], rows: tuple[int, int]) -> None:
    edges = [*sorted(cuts), N]
    ds = make_part(kind, 0, edges[0]).save("memory://grown", shard_rows=9, overwrite=True)
    for a, b in itertools.pairwise(edges):
        before = ds.fingerprint()
        ds = append_rows("memory://grown", make_part(kind, a, b), shard_rows=11)
        assert ds.fingerprint() != before
        _check(ds, kind, b)
    a, b = sorted(rows)
    np.testing.assert_array_equal(ds.read_x(a, b), X[a:b].reshape(b - a, 4))
    pieces = ds.pieces(a, b)
    assert [p for piece in pieces for p in range(*piece)] == list(range(a, b))
    again = ds.save("memory://again", shard_rows=20, overwrite=True)
    whole = make_part(kind, 0, N).save("memory://whole", shard_rows=20, overwrite=True)
    assert again.fingerprint() == whole.fingerprint()


def test_few_segments_after_many_appends(tmp_path: Path) -> None:
    ds = make_part("numbers", 0, 30).save(tmp_path / "ds", shard_rows=9)
    for i in range(30, 54):
        opened = ds
        ds = append_rows(tmp_path / "ds", make_part("numbers", i, i + 1))
        assert len(ds.attrs["segments"]) <= 1 + (i - 29).bit_length()
        if i % 5 == 0:  # A dataset opened before an append has its old rows.
            _check(opened, "numbers", i)
    _check(ds, "numbers", 54)
    kept = {s["path"] for old in (ds, opened) for s in old.attrs["segments"]}
    left = {p.name for p in (tmp_path / "ds").iterdir() if p.name.startswith("append-")}
    assert left <= kept


def test_same_parts_give_the_same_fingerprint(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_part("strings", 0, 30).save(tmp_path / name)
        append_rows(tmp_path / name, make_part("strings", 30, 90))
    assert open_dataset(tmp_path / "a").fingerprint() == open_dataset(tmp_path / "b").fingerprint()
    record = open_dataset(tmp_path / "a").attrs["provenance"]["appended"]
    assert [r["rows"] for r in record] == [60]


def test_other_processes_open_appended_rows_by_the_spec(tmp_path: Path) -> None:
    make_part("strings", 0, 30).save(tmp_path / "ds")
    ds = append_rows(tmp_path / "ds", make_part("strings", 30, N))
    _check(Dataset.from_spec(ds.spec()), "strings", N)
    assert ds[20:50].read_y(0, 30).tolist() == LABELS["strings"][20:50].tolist()  # type: ignore[index]


class ProcessKilled(BaseException):
    """Exception in place of SIGKILL; once it was raised, all changes of the disk fail."""


def fail_writes_after(monkeypatch: pytest.MonkeyPatch, n_writes: int) -> list[int]:
    """Let only the first ``n_writes`` changes of the disk succeed; the returned list holds their number."""
    from zarr.storage import LocalStore

    done = [0]

    def count() -> None:
        if done[0] >= n_writes:
            raise ProcessKilled
        done[0] += 1

    for owner, names in ((LocalLocation, ("write", "delete")), (LocalStore, ("set", "delete", "delete_dir"))):
        for name in names:
            original = getattr(owner, name)
            if owner is LocalStore:

                async def changed(self: Any, *a: Any, _original: Any = original, **k: Any) -> Any:
                    count()
                    return await _original(self, *a, **k)

            else:

                def changed(self: Any, *a: Any, _original: Any = original, **k: Any) -> Any:  # type: ignore[misc]
                    count()
                    return _original(self, *a, **k)

            monkeypatch.setattr(owner, name, changed)
    return done


def test_an_append_killed_at_any_write_leaves_the_old_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_part("strings", 0, 30).save(tmp_path / "before", shard_rows=10)
    append_rows(tmp_path / "before", make_part("strings", 30, 50), shard_rows=20)
    n_writes = 0
    while True:
        target = tmp_path / f"ds{n_writes}"
        shutil.copytree(tmp_path / "before", target)
        with monkeypatch.context() as patch:
            done = fail_writes_after(patch, n_writes)
            try:
                append_rows(target, make_part("strings", 50, 80))
                finished = done[0] < n_writes
            except ProcessKilled:
                finished = False
        opened = open_dataset(target)
        found = opened.n_rows
        assert found in (50, 80), n_writes
        _check(opened, "strings", found)
        if finished:
            break
        ds = append_rows(target, make_part("strings", found, N))
        _check(ds, "strings", N)
        before_last = {s["path"] for s in opened.attrs["segments"]}
        left = {p.name for p in target.iterdir() if p.name.startswith("append-")}
        assert left <= {s["path"] for s in ds.attrs["segments"]} | before_last, n_writes
        n_writes += 1
    assert found == 80
    assert n_writes > 10


def test_a_failed_append_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = make_part("numbers", 0, 60).save(tmp_path / "ds")
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))

    def raise_disk_full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_commit", raise_disk_full)
        with pytest.raises(OSError):
            append_rows(tmp_path / "ds", make_part("numbers", 60, N))
    from scalelatent.data.write.shards import ShardWriter

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "_paths_to_delete", raise_disk_full)
        with pytest.raises(DataError, match=r"appending failed: .*No space left.*the dataset is unchanged"):
            append_rows(tmp_path / "ds", make_part("numbers", 60, N))
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before
    assert open_dataset(tmp_path / "ds").fingerprint() == ds.fingerprint()


def call_after_writing(monkeypatch: pytest.MonkeyPatch, do: Any) -> None:
    """Call ``do`` once, when an append has written its rows, but not yet listed them as a segment (part)."""
    write = module._write_segment

    def written(*arguments: Any) -> Any:
        segment = write(*arguments)
        monkeypatch.setattr(module, "_write_segment", write)
        do()
        return segment

    monkeypatch.setattr(module, "_write_segment", written)


@pytest.mark.parametrize("url", ["disk", "memory://two-appends"])
def test_a_second_append_at_the_same_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    target = url if "://" in url else str(tmp_path / url)
    make_part("numbers", 0, 60).save(target, overwrite=True)

    def second() -> None:
        with pytest.raises(DataError, match=rf"is being appended to by process {os.getpid()} on .* since 20"):
            append_rows(target, make_part("numbers", 60, 70))

    call_after_writing(monkeypatch, second)
    ds = append_rows(target, make_part("numbers", 60, 90))
    _check(ds, "numbers", 90)
    _check(append_rows(target, make_part("numbers", 90, N)), "numbers", N)
    assert not locate(target).has(module._LOCK)


_SLOW_APPEND_PROGRAM = """
import sys, time
from scalelatent.data.write import append
def slow(*arguments):
    print("writing", flush=True)
    time.sleep(60)
append._write_segment = slow
from scalelatent.data import append_rows
append_rows(sys.argv[1], sys.argv[1])
"""


def test_a_killed_append_leaves_no_lock(tmp_path: Path) -> None:
    make_part("numbers", 0, 60).save(tmp_path / "ds")
    run = [sys.executable, "-c", _SLOW_APPEND_PROGRAM, str(tmp_path / "ds")]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        with pytest.raises(DataError, match=f"is being appended to by process {process.pid} on "):
            append_rows(tmp_path / "ds", make_part("numbers", 60, N))
        process.kill()
    _check(append_rows(tmp_path / "ds", make_part("numbers", 60, N)), "numbers", N)


def test_an_abandoned_lock_in_an_object_store_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    make_part("numbers", 0, 60).save("memory://left", overwrite=True)
    held = {"doing": "being appended to", "pid": 7, "host": "far", "since": 0}
    locate("memory://left").write(f"{module._LOCK}/000001.json", json.dumps(held).encode())
    expected = (
        r"by process 7 on far since 1970-01-01 00:00:00 UTC; wait until that process has finished "
        r"\(if that process has ended, its lease ends in \d+ s\), then"
    )
    with pytest.raises(DataError, match=expected):
        append_rows("memory://left", make_part("numbers", 60, N))
    monkeypatch.setattr(lease, "STALE_SECONDS", -1.0)
    _check(append_rows("memory://left", make_part("numbers", 60, N)), "numbers", N)


def test_a_change_by_another_host_without_a_lock_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some file systems, locks have no effect on other hosts, so a second append may begin."""
    make_part("numbers", 0, 60).save(tmp_path / "ds")

    def second() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, "hold_lock", lambda *_: contextlib.nullcontext())
            patch.setattr(module, "_remove_unlisted", lambda *_: None)
            append_rows(tmp_path / "ds", make_part("numbers", 60, 70))

    call_after_writing(monkeypatch, second)
    with pytest.raises(DataError, match="was changed by another process"):
        append_rows(tmp_path / "ds", make_part("numbers", 60, N))
    _check(open_dataset(tmp_path / "ds"), "numbers", 70)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (Dataset.from_arrays(X[:5].reshape(5, 4), np.arange(5), sample_weight=np.ones(5)), "feature_shape"),
        (
            Dataset.from_arrays(X[:5].astype("i8"), np.arange(5), sample_weight=np.ones(5)),
            "dtype int64 instead",
        ),
        (
            Dataset.from_arrays(X[:5], list("abcde"), sample_weight=np.ones(5)),
            "labels strings instead of num",
        ),
        (Dataset.from_arrays(X[:5], sample_weight=np.ones(5)), "labels None instead of numbers"),
        (Dataset.from_arrays(X[:5], np.arange(5)), "weights no instead of yes"),
        (
            Dataset.from_arrays(X[:5], np.arange(5) + 253, sample_weight=np.ones(5)),
            "label 256, which does not fit into its labels, uint8",
        ),
    ],
)
def test_rows_of_another_kind_are_refused(tmp_path: Path, rows: Dataset, message: str) -> None:
    ds = make_part("numbers", 0, 60).save(tmp_path / "ds")
    with pytest.raises(DataError, match=message) as error:
        append_rows(tmp_path / "ds", rows)
    assert "Nothing was appended" in str(error.value)
    assert open_dataset(tmp_path / "ds").fingerprint() == ds.fingerprint()
    assert not [p for p in (tmp_path / "ds").iterdir() if p.name.startswith("append")]


def test_a_missing_dataset_is_refused(tmp_path: Path) -> None:
    ds = make_part("numbers", 0, 30).save(tmp_path / "ds")
    for url, source in (("ds", "nowhere"), ("nowhere", "ds")):
        with pytest.raises(DataError, match="nowhere does not exist"):
            append_rows(tmp_path / url, tmp_path / source)
    assert [p.name for p in tmp_path.iterdir()] == ["ds"]
    assert open_dataset(tmp_path / "ds").fingerprint() == ds.fingerprint()


def test_a_dataset_may_be_appended_to_itself(tmp_path: Path) -> None:
    ds = make_part("strings", 0, 30).save(tmp_path / "ds")
    twice = append_rows(tmp_path / "ds", ds)
    np.testing.assert_array_equal(twice.read_x(30, 60), ds.read_x(0, 30))


def test_a_lost_or_foreign_segment_is_reported(tmp_path: Path) -> None:
    make_part("numbers", 0, 30).save(tmp_path / "ds")
    ds = append_rows(tmp_path / "ds", make_part("numbers", 30, 60))
    path = tmp_path / "ds" / ds.attrs["segments"][1]["path"]
    path.rename(tmp_path / "away")
    with pytest.raises(DataError, match=f"appended rows in {path.name} cannot be opened"):
        open_dataset(tmp_path / "ds")
    make_part("numbers", 0, 30).save(path)
    with pytest.raises(DataError, match="does not contain the rows that were appended"):
        open_dataset(tmp_path / "ds")
