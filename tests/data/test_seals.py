"""A dataset refuses files that belong to another dataset, and paths that are not regular files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from scalelatent.data import Dataset, append_rows, check_dataset, create_dataset, open_dataset
from scalelatent.errors import DataError, ShardError
from scalelatent.storage.disk import locate

N, P = 60, 6


def make_arrays(kind: str, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    x: Any = random.integers(1, 9, (N, P)).astype("f4" if kind == "floats" else "u1")
    y: Any = random.integers(0, 3, N)
    # For every seed the entries are in the same columns, so shards of two datasets have equal sizes.
    if kind == "csr":
        x = csr_array(np.where(np.arange(P) % 2, x, 0).astype("f4"))
        y = csr_array((np.arange(P) % 3 == 0) * random.integers(1, 5, (N, P)).astype("u1"))
    if kind == "targets":
        y = random.integers(0, 2, (N, 4)).astype("u1")
    return {"x": x, "y": y, "sample_weight": random.random(N)}


def _save(kind: str, seed: int, url: str) -> Dataset:
    arrays = make_arrays(kind, seed)
    if kind != "tiled":
        how = {"shard_rows": 20} | ({} if kind == "csr" else {"chunk_rows": 10})
        return Dataset.from_arrays(**arrays).save(url, overwrite=True, **how)
    writer = create_dataset(url, N, (P,), "u1", shard_rows=20, tile_columns=4, overwrite=True)
    for shard in range(writer.n_shards):
        rows, columns = slice(*writer.shard_bounds(shard)), slice(*writer.shard_columns(shard))
        writer.write_shard(shard, arrays["x"][rows, columns])
    return writer.finalize()


def _read(ds: Dataset) -> None:
    ds.read_x(22, 25), ds.has_y and ds.read_y(22, 25), ds.read_weight(22, 25)


@pytest.mark.parametrize("scheme", ["", "memory://seals"])
@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("ints", "x/c/1/0"), ("ints", "y/c/1"), ("ints", "weight/c/1"), ("floats", "x/c/1/0"),
        ("targets", "y/c/1/0"), ("tiled", "x/c/1/0"), ("tiled", "x/c/1/1"), ("csr", "x/000001/data/c/0"),
        ("csr", "y/000001/data/c/0"),
    ],
)  # fmt: skip
def test_a_shard_of_another_dataset_of_the_same_shape_is_refused(
    kind: str, key: str, scheme: str, tmp_path: Path
) -> None:
    here, there = (scheme or str(tmp_path)) + "/a", (scheme or str(tmp_path)) + "/b"
    _save(kind, 1, here), _save(kind, 2, there)
    _read(open_dataset(here))
    raw = locate(there).read(key)
    assert raw not in (None, locate(here).read(key))
    locate(here).write(key, raw)
    with pytest.raises(
        ShardError, match=r"intact, but differs from the chunk that was written.*Restore"
    ) as error:
        _read(open_dataset(here))
    assert (error.value.start, error.value.stop) == (20, 40)
    assert error.value.file.endswith(key)
    open_dataset(here).read_x(0, 20)


def test_a_copy_of_the_same_file_is_accepted(tmp_path: Path) -> None:
    ds = _save("ints", 1, str(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.copyfile(tmp_path / "b/x/c/1/0", tmp_path / "a/x/c/1/0")
    np.testing.assert_array_equal(open_dataset(str(ds.url)).read_x(0, N), make_arrays("ints", 1)["x"])


def test_appended_rows_have_digests(tmp_path: Path) -> None:
    _save("ints", 1, str(tmp_path / "a"))
    ds = append_rows(tmp_path / "a", Dataset.from_arrays(**make_arrays("ints", 3)))
    segment = next(tmp_path.glob("a/append-*"))
    shutil.copyfile(tmp_path / "a/weight/c/0", segment / "weight/c/0")
    with pytest.raises(DataError):
        open_dataset(str(ds.url)).read_weight(N, N + 1)


@pytest.mark.parametrize("appended", [False, True])
def test_a_changed_table_of_digests_is_refused(tmp_path: Path, appended: bool) -> None:
    _save("ints", 1, str(tmp_path / "a")), _save("ints", 2, str(tmp_path / "b"))
    if appended:
        append_rows(tmp_path / "a", Dataset.from_arrays(**{**make_arrays("ints", 3), "y": np.full(N, 7)}))
    open_dataset(tmp_path / "a")
    shutil.copytree(tmp_path / "b/digest", tmp_path / "a/digest", dirs_exist_ok=True)
    with pytest.raises(
        DataError, match=r"table of digests, .*a/digest, does not match its fingerprint .*restore"
    ):
        open_dataset(tmp_path / "a")
    shutil.rmtree(tmp_path / "a/digest")
    with pytest.raises(DataError, match="table of digests, .*a/digest, is missing"):
        open_dataset(tmp_path / "a")


def test_a_changed_table_of_checksums_is_refused(tmp_path: Path) -> None:
    _save("ints", 1, str(tmp_path / "a")), _save("ints", 2, str(tmp_path / "b"))
    shutil.copyfile(tmp_path / "b/crc/c/0", tmp_path / "a/crc/c/0")
    with pytest.raises(DataError, match=r"table of checksums, .*crc/c/0, .* was not written with it"):
        open_dataset(tmp_path / "a")


@pytest.mark.parametrize(
    ("crc", "what"),
    [
        ([], "attribute 'crc' is damaged"),
        ("x", "attribute 'crc' is damaged"),
        ({"hash": "0", "columns": []}, "attribute 'crc' is damaged"),
        ({"hash": "0", "columns": {"y": [1, "1"]}}, "attribute 'crc' is damaged"),
        ({"hash": "0", "columns": {"x": [-1, "1"]}}, "attribute 'crc' is damaged"),
        ({"hash": "0", "columns": {"x": [1, "1"]}, "shard_rows": 0}, "attribute 'crc' is damaged"),
        ({"hash": "0", "columns": {"x": [10**15, "1"]}}, "table of checksums, .*crc/c/0, is missing"),
    ],
)
def test_an_invalid_checksum_attribute_is_refused(tmp_path: Path, crc: Any, what: str) -> None:
    _save("ints", 1, str(tmp_path / "a"))
    meta = json.loads((tmp_path / "a/zarr.json").read_text())
    meta["attributes"]["crc"] = crc
    (tmp_path / "a/zarr.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match=what):
        open_dataset(tmp_path / "a")
    if what.startswith("attribute"):
        with pytest.raises(DataError, match=what):
            check_dataset(tmp_path / "a")
    else:
        assert check_dataset(tmp_path / "a").bad[0].file.endswith("crc")


def test_a_table_of_digests_of_another_length_is_refused(tmp_path: Path) -> None:
    _save("ints", 1, str(tmp_path / "a"))
    Dataset.from_arrays(**make_arrays("ints", 1)).save(str(tmp_path / "b"), chunk_rows=10, shard_rows=10)
    shutil.rmtree(tmp_path / "a/digest")
    shutil.copytree(tmp_path / "b/digest", tmp_path / "a/digest")
    with pytest.raises(DataError, match=r"table of digests, .*a/digest, does not match its fingerprint"):
        open_dataset(tmp_path / "a")
    assert check_dataset(tmp_path / "a").bad[0].file.endswith("digest")


def test_a_dataset_without_checksums_opens_and_reads(tmp_path: Path) -> None:
    _save("csr", 1, str(tmp_path / "a"))
    remove_checksum_table(tmp_path / "a")
    _read(open_dataset(tmp_path / "a"))
    append_rows(tmp_path / "a", Dataset.from_arrays(**make_arrays("csr", 3)))
    _read(open_dataset(tmp_path / "a")[40:])


def remove_checksum_table(path: Path) -> None:
    """Remove the table of checksums from a dataset, as in datasets of earlier versions."""
    meta = json.loads((path / "zarr.json").read_text())
    del meta["attributes"]["crc"]
    (path / "zarr.json").write_text(json.dumps(meta))
    shutil.rmtree(path / "crc")


@pytest.mark.parametrize("packed_otherwise", [False, True])
def test_a_shard_of_another_dataset_is_repaired(
    tmp_path: Path, packed_otherwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.data import make_digits, repair_dataset

    first = make_digits(tmp_path / "a", 300, seed=1, shard_rows=100)
    make_digits(tmp_path / "b", 300, seed=2, shard_rows=100)
    x = first.read_x(0, 300)
    shutil.copyfile(tmp_path / "b/x/c/1/0/0", tmp_path / "a/x/c/1/0/0")
    if packed_otherwise:  # Another version of the compressor may give other bytes.
        use_other_compression_level(tmp_path / "a")
    made = repair_dataset(tmp_path / "a")
    assert made.fingerprint() == first.fingerprint()
    np.testing.assert_array_equal(open_dataset(tmp_path / "a").read_x(0, 300), x)


def use_other_compression_level(path: Path) -> None:
    """Set compression level 1 in the metadata of a dataset; the level applies to shards written later."""
    meta = json.loads((path / "x/zarr.json").read_text())
    codecs = meta["codecs"]
    inner = codecs[0]["configuration"]["codecs"] if codecs[0]["name"] == "sharding_indexed" else codecs
    next(c for c in inner if c["name"] == "blosc")["configuration"]["clevel"] = 1
    (path / "x/zarr.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("key", "call"),
    [
        ("x/c/1/0", lambda ds: ds.read_x(20, 21)),
        ("y/c/1", lambda ds: ds.read_y(20, 21)),
        ("x/zarr.json", lambda ds: open_dataset(ds.url)),
        ("zarr.json", lambda ds: open_dataset(ds.url)),
        ("crc/c/0", lambda ds: open_dataset(ds.url)),
        ("digest/c/0/0", lambda ds: open_dataset(ds.url)),
    ],
)
def test_a_fifo_in_the_place_of_a_file_is_refused(tmp_path: Path, key: str, call: Any) -> None:
    ds = _save("ints", 1, str(tmp_path / "a"))
    (tmp_path / "a" / key).unlink()
    os.mkfifo(tmp_path / "a" / key)
    with pytest.raises(DataError):
        call(ds)


def test_the_error_names_a_fifo(tmp_path: Path) -> None:
    ds = _save("ints", 1, str(tmp_path / "a"))
    (tmp_path / "a/x/c/1/0").unlink()
    os.mkfifo(tmp_path / "a/x/c/1/0")
    with pytest.raises(ShardError, match=r"x/c/1/0 .*rows 20:40.* a FIFO .*not a regular file. Restore"):
        ds.read_x(20, 21)


def test_rows_compressed_again_by_zarr_are_read_and_reported_as_unchecked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import zarr

    _save("ints", 1, str(tmp_path / "a"))
    x = make_arrays("ints", 1)["x"]
    zarr.open_group(tmp_path / "a", mode="r+").create_array("x", data=x, chunks=(15, P), overwrite=True)
    np.testing.assert_array_equal(open_dataset(tmp_path / "a").read_x(7, 55), x[7:55])
    assert "'x' has been compressed again" in caplog.text
    _save("ints", 2, str(tmp_path / "b"))
    shutil.copytree(tmp_path / "b/digest", tmp_path / "a/digest", dirs_exist_ok=True)
    with pytest.raises(DataError, match="table of digests"):
        open_dataset(tmp_path / "a")


def test_a_fifo_in_the_place_of_a_lock_is_not_waited_for(tmp_path: Path) -> None:
    ds = _save("ints", 1, str(tmp_path / "a"))
    os.mkfifo(tmp_path / "a/_append.lock")
    with pytest.raises(DataError, match=r"_append\.lock: it is a FIFO .*not a regular file"):
        append_rows(tmp_path / "a", ds)


def test_a_fifo_in_the_place_of_an_imported_file_is_refused(tmp_path: Path) -> None:
    from scalelatent.data import import_npy

    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(DataError, match=r"x\.npy cannot be read: it is a FIFO"):
        import_npy(tmp_path / "x.npy", tmp_path / "a")
