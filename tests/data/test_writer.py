"""Dataset writers write shards in any order, resume, refuse invalid input, and report full disks."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent.data import Dataset, DatasetWriter, append_rows, create_dataset, open_dataset
from scalelatent.errors import DataError

X = np.random.Generator(np.random.Philox(2)).standard_normal((95, 4)).astype("f4")
Y = np.arange(95) % 3


def _create(url: Any, **options: Any) -> DatasetWriter:
    return create_dataset(url, 95, (4,), "f4", y_dtype="i8", chunk_rows=10, shard_rows=20, **options)


def _write(writer: DatasetWriter, shard: int) -> None:
    a, b = writer.shard_bounds(shard)
    writer.write_shard(shard, X[a:b], Y[a:b])


@pytest.mark.parametrize("url", ["memory://order", "folder"])
def test_shards_may_be_written_in_any_order_by_any_writer_twice(url: str, tmp_path: Path) -> None:
    url = url if "://" in url else str(tmp_path / url)
    writer = _create(url, overwrite=True)
    _write(writer, 4)
    other = DatasetWriter.attach(url)
    assert [other.is_done(i) for i in range(5)] == [False, False, False, False, True]
    rebuild, arguments = other.__reduce__()
    for shard in (2, 0, 4, 1, 3):
        _write(rebuild(*arguments), shard)
    ds = writer.finalize()
    np.testing.assert_array_equal(ds.read_x(0, 95), X)
    np.testing.assert_array_equal(ds.read_y(0, 95), Y)
    first = ds.fingerprint()
    again = _create(url, overwrite=True)
    for shard in range(5):
        _write(again, shard)
    assert again.finalize().fingerprint() == first


def test_a_resume_writes_only_missing_shards(tmp_path: Path) -> None:
    writer = _create(tmp_path / "ds", provenance={"seed": 1})
    for shard in (0, 3):
        _write(writer, shard)
    resumed = _create(tmp_path / "ds", provenance={"seed": 1}, resume=True)
    todo = [i for i in range(resumed.n_shards) if not resumed.is_done(i)]
    assert todo == [1, 2, 4]
    for shard in todo:
        _write(resumed, shard)
    np.testing.assert_array_equal(resumed.finalize().read_x(0, 95), X)
    for changed, name in (
        ({"provenance": {"seed": 2}}, "seed was 1, now 2"),
        ({"weighted": True}, "weights"),
    ):
        with pytest.raises(DataError, match=name):
            _create(tmp_path / "ds", **{"provenance": {"seed": 1}, **changed}, resume=True)


def test_resume_of_a_finished_dataset_finds_damage(tmp_path: Path) -> None:
    writer = _create(tmp_path / "ds")
    for shard in range(5):
        _write(writer, shard)
    ds = writer.finalize()
    (tmp_path / "ds/x/c/1/0").unlink()
    content = bytearray((tmp_path / "ds/x/c/2/0").read_bytes())
    content[7] ^= 4
    (tmp_path / "ds/x/c/2/0").write_bytes(content)
    resumed = _create(tmp_path / "ds", resume=True)
    assert [i for i in range(5) if not resumed.is_done(i)] == [1, 2]
    for shard in (1, 2):
        _write(resumed, shard)
    assert resumed.finalize().fingerprint() == ds.fingerprint()
    np.testing.assert_array_equal(open_dataset(tmp_path / "ds").read_x(0, 95), X)


def test_writing_again_does_not_change_a_finished_dataset(tmp_path: Path) -> None:
    writer = _create(tmp_path / "ds")
    for shard in range(5):
        _write(writer, shard)
    ds = writer.finalize()
    late = DatasetWriter.attach(tmp_path / "ds")
    with pytest.raises(DataError, match=r"is finished, and its rows 0:20 differ from the given rows"):
        late.write_shard(0, np.zeros((20, 4), "f4"), Y[:20])
    with pytest.raises(DataError, match="is finished"):
        late.write_shard(0, X[:20], (Y[:20] + 1) % 3)
    np.testing.assert_array_equal(open_dataset(tmp_path / "ds").read_x(0, 95), X)
    _write(late, 0)  # An existing shard may be written again with the same rows.
    assert not (tmp_path / "ds/_shards").exists()
    assert late.finalize().fingerprint() == ds.fingerprint()


def test_the_first_shards_of_an_appended_dataset_are_unchanged(tmp_path: Path) -> None:
    """Appended labels may add classes, which changes the codes that a reader returns, not those on disk."""
    names = np.array(["d", "b"])[Y % 2]
    Dataset.from_arrays(X, names).save(tmp_path / "ds", shard_rows=20, chunk_rows=20)
    ds = append_rows(tmp_path / "ds", Dataset.from_arrays(X[:5], list("aaaaa")))
    writer = DatasetWriter.attach(tmp_path / "ds")
    assert all(writer.is_done(i) for i in range(writer.n_shards))
    (tmp_path / "ds/y/c/1").unlink()
    assert [i for i in range(writer.n_shards) if not writer.is_done(i)] == [1]
    writer.write_shard(1, X[20:40], names[20:40])
    assert writer.finalize().fingerprint() == ds.fingerprint()
    np.testing.assert_array_equal(open_dataset(tmp_path / "ds").read_y(0, 95), names)


def test_a_dataset_killed_at_its_creation_is_resumed(tmp_path: Path) -> None:
    writer = _create(tmp_path / "ds")
    shutil.rmtree(tmp_path / "ds/digest")
    shutil.rmtree(tmp_path / "ds/x")
    writer = _create(tmp_path / "ds", resume=True)
    for shard in range(5):
        _write(writer, shard)
    np.testing.assert_array_equal(writer.finalize().read_x(0, 95), X)


def test_a_damaged_marker_counts_as_missing(tmp_path: Path) -> None:
    writer = _create(tmp_path / "ds")
    _write(writer, 0)
    (tmp_path / "ds/_shards/000000.json").write_text('{"dig')
    assert not writer.is_done(0)


def test_an_existing_output_is_not_overwritten(tmp_path: Path) -> None:
    Dataset.from_arrays(X).save(tmp_path / "ds")
    with pytest.raises(DataError, match=r"exists; choose another output, or replace it with --ov[^,]*$"):
        _create(tmp_path / "ds")
    with pytest.raises(DataError, match="cannot replace itself"):
        open_dataset(tmp_path / "ds").save(tmp_path / "ds", overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    for overwrite in (False, True):  # Folders of other files stay in both cases.
        with pytest.raises(DataError, match="not a scalelatent dataset, so it is not replaced"):
            _create(tmp_path / "mine", overwrite=overwrite)
    assert (tmp_path / "mine" / "thesis.txt").exists()
    _create(tmp_path / "started")
    with pytest.raises(DataError, match=r"unfinished.*--resume"):
        _create(tmp_path / "started")
    (tmp_path / "empty").mkdir()
    _create(tmp_path / "empty")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[:19]}, r"shape \(19, 4\), but this shard has shape \(20, 4\)"),
        ({"x": X[:20].astype("f8")}, "float64, which does not fit into the dataset's float32"),
        ({"y": Y[:19]}, "19 labels for 20 rows"),
        ({"y": None}, "labels of rows 20:40 are missing: pass y"),
        ({"y": Y[:20] + 0.5}, r"label .*0\.5.* of row 20 does not fit into int64"),
        ({"weight": np.ones(20)}, "not part of this dataset"),
    ],
)
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    writer = _create(tmp_path / "ds")
    with pytest.raises(DataError, match=message):
        writer.write_shard(1, **{"x": X[20:40], "y": Y[20:40], **change})
    assert not writer.is_done(1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_error_names_row_and_column_of_nan_or_infinity(tmp_path: Path, bad: float) -> None:
    rows = X[20:40].copy()
    rows[7, 2] = bad
    with pytest.raises(DataError, match="row 27, column 2"):
        _create(tmp_path / "ds").write_shard(1, rows, Y[20:40])


def test_invalid_arguments_of_a_writer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 rows"):
        create_dataset(tmp_path / "a", 0, (4,), "f4")
    with pytest.raises(DataError, match=r"multiple of chunk_rows \(3\).*give for example 12"):
        create_dataset(tmp_path / "a", 100, (4,), "f4", chunk_rows=3, shard_rows=10)
    with pytest.raises(DataError, match="must be at least 1"):
        create_dataset(tmp_path / "a", 100, (4,), "f4", chunk_rows=0)
    with pytest.raises(DataError, match="compressor is 'zip'"):
        create_dataset(tmp_path / "a", 100, (4,), "f4", compressor="zip")
    with pytest.raises(DataError, match="complex"):
        create_dataset(tmp_path / "a", 100, (4,), complex)
    with pytest.raises(DataError, match="are stored as codes of classes; pass `classes`"):
        create_dataset(tmp_path / "a", 100, (4,), "f4", y_dtype="U3")
    with pytest.raises(IndexError, match="shards 0 to 4"):
        _create(tmp_path / "b").shard_bounds(5)
    assert not (tmp_path / "a").exists()


def test_a_full_disk_leaves_earlier_shards_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zarr.storage import LocalStore

    writer = _create(tmp_path / "ds")
    _write(writer, 0)
    put = LocalStore.set

    async def full(self: Any, key: str, value: Any, *rest: Any) -> None:
        if key.startswith("x/c/1/"):
            raise OSError(errno.ENOSPC, "No space left on device")
        await put(self, key, value, *rest)

    monkeypatch.setattr(LocalStore, "set", full)
    with pytest.raises(
        DataError, match=r"shard 1 \(rows 20:40\) failed: the disk is full.*MB free.*--resume"
    ) as error:
        _write(writer, 1)
    assert str(tmp_path / "ds") in str(error.value)
    assert writer.is_done(0)
    assert not writer.is_done(1)
    assert not (tmp_path / "ds/y/c/1").exists()
    monkeypatch.undo()
    for shard in range(1, 5):
        _write(writer, shard)
    np.testing.assert_array_equal(writer.finalize().read_x(0, 95), X)


_LIMITED = """
import resource, sys
import numpy as np
from scalelatent.data import create_dataset
from scalelatent.errors import DataError
writer = create_dataset(sys.argv[1], 3000, (100,), "f4", shard_rows=1000)
writer.write_shard(0, np.ones((1000, 100), "f4"))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    writer.write_shard(1, np.ones((1000, 100), "f4"))
except DataError as error:
    print(error)
print(writer.is_done(0), writer.is_done(1))
"""


def test_the_error_names_the_file_size_limit_of_the_system(tmp_path: Path) -> None:
    run = [sys.executable, "-c", _LIMITED, str(tmp_path / "ds")]
    out = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "the disk is full or a quota is reached" in out
    assert "True False" in out
    assert sorted(p.name for p in (tmp_path / "ds/x/c").iterdir()) == ["0", "1"]
    assert not list((tmp_path / "ds").rglob("*.partial*"))
    assert not (tmp_path / "ds/x/c/1/0").exists()


def test_saving_a_slice_keeps_classes_and_weights(tmp_path: Path) -> None:
    ds = Dataset.from_arrays(X, Y, sample_weight=np.arange(95))[10:40]
    calls: list[tuple[int, int]] = []
    stored = ds.save(tmp_path / "ds", shard_rows=8, progress=lambda done, total: calls.append((done, total)))
    np.testing.assert_array_equal(stored.read_weight(0, 30), np.arange(10, 40))
    assert stored.classes.tolist() == [0, 1, 2]
    assert calls == [(8, 30), (16, 30), (24, 30), (30, 30)]
    assert stored.known_finite
    second = stored.with_weight(np.ones(30)).save(tmp_path / "two")
    assert second.attrs["provenance"]["importer"] == "save"
    assert second.read_weight(0, 2).tolist() == [1, 1]


@pytest.mark.parametrize("n_rows", [95, 94, 80, 75, 60, 21])
def test_a_dataset_may_shrink_to_its_actual_rows(tmp_path: Path, n_rows: int) -> None:
    """A dataset that was created for 95 rows and shrunk to ``n_rows`` equals one created for ``n_rows``."""
    writer = _create(tmp_path / "ds", provenance={"seed": 1})
    for shard in range(n_rows // 20):
        _write(writer, shard)
    writer.shrink(n_rows)
    assert (writer.n_rows, writer.n_shards) == (n_rows, -(-n_rows // 20))
    if n_rows % 20:
        _write(writer, n_rows // 20)
    writer.note({"left_out": 95 - n_rows})
    writer.finalize()
    ds = open_dataset(tmp_path / "ds")
    np.testing.assert_array_equal(ds.read_x(0, n_rows), X[:n_rows])
    np.testing.assert_array_equal(ds.read_y(0, n_rows), Y[:n_rows])
    assert ds.attrs["provenance"].items() >= {"seed": 1, "left_out": 95 - n_rows}.items()
    plain = create_dataset(
        tmp_path / "plain", n_rows, (4,), "f4", y_dtype="i8", chunk_rows=1, shard_rows=writer.shard_rows
    )
    for shard in range(plain.n_shards):
        _write(plain, shard)
    assert plain.finalize().fingerprint() == ds.fingerprint()


def test_shrinking_refuses_to_lose_rows(tmp_path: Path) -> None:
    writer = _create(tmp_path / "ds")
    for shard in (0, 3):
        _write(writer, shard)
    for n_rows, message in (
        (96, "has 95 rows; it cannot shrink to 96"),
        (0, "cannot shrink to 0"),
        (70, "shard 3, which begins at row 60, is already written"),
        (15, "shard 0, which begins at row 0, is already written"),
    ):
        with pytest.raises(DataError, match=message):
            writer.shrink(n_rows)
    assert writer.n_rows == 95


@pytest.mark.parametrize("column", ["x", "y"])
def test_dtypes_that_zarr_does_not_support_are_refused(tmp_path: Path, column: str) -> None:
    wide = np.ones((5, 3), np.longdouble)
    with pytest.raises(DataError, match=f"ds: {column} holds float128, which cannot be stored; convert it"):
        (Dataset.from_arrays(wide) if column == "x" else Dataset.from_arrays(np.ones((5, 2)), wide)).save(
            tmp_path / "ds"
        )
    assert not (tmp_path / "ds").exists()


def test_the_error_names_the_row_of_an_invalid_weight(tmp_path: Path) -> None:
    writer = create_dataset(tmp_path / "ds", 40, (4,), "f4", weighted=True, shard_rows=20)
    weight = np.ones(20)
    weight[3] = -1
    with pytest.raises(DataError, match="the weight of row 23 is -1"):
        writer.write_shard(1, X[20:40], weight=weight)


def test_markers_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an object store, each read of a marker file is a request, and 10,000 requests would take minutes."""
    from scalelatent.storage.objects import ObjectLocation

    writer = _create("memory://markers", overwrite=True)
    for shard in range(5):
        _write(writer, shard)
    together: list[int] = []
    read_ranges, read = ObjectLocation.read_ranges, ObjectLocation.read

    def counting(self: ObjectLocation, wanted: Any) -> list[bytes]:
        together.append(len(wanted))
        return read_ranges(self, wanted)

    alone: list[str] = []

    def reading(self: ObjectLocation, key: str) -> bytes | None:
        alone.append(key)
        return read(self, key)

    monkeypatch.setattr(ObjectLocation, "read_ranges", counting)
    monkeypatch.setattr(ObjectLocation, "_read_item", lambda self, key: read(self, key))
    monkeypatch.setattr(ObjectLocation, "read", reading)
    writer.finalize()
    assert 5 in together
    assert not [key for key in alone if key.startswith("_shards")]


def test_an_overwrite_without_disk_space_keeps_the_old_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk has no space for the new rows, even after compression, the overwrite is refused at once."""
    from scalelatent.storage.disk import LocalLocation

    old = Dataset.from_arrays(np.ones((1000, 100), "f4")).save(tmp_path / "a")
    monkeypatch.setattr(LocalLocation, "free_bytes", lambda self: 1000)
    with pytest.raises(DataError, match=r"2,000 rows of shape \(100,\) .* free there"):
        create_dataset(tmp_path / "a", 2000, (100,), "f4", overwrite=True)
    assert open_dataset(tmp_path / "a").fingerprint() == old.fingerprint()
    with pytest.raises(DataError, match=r"after compression"):
        create_dataset(tmp_path / "b", 10**9, (100,), "u1")
    create_dataset(tmp_path / "b", 2000, (100,), "u1")
    create_dataset(tmp_path / "a", 900, (100,), "f4", overwrite=True)
