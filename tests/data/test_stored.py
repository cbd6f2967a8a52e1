"""Damaged or unfinished datasets are refused; datasets that zarr or earlier versions wrote are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent.data import Dataset, create_dataset, open_dataset
from scalelatent.errors import DataError

X = np.random.Generator(np.random.Philox(1)).integers(0, 9, (100, 4)).astype("u1")
Y = np.arange(100) % 3


@pytest.fixture(params=["auto", None, "zstd"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset:
    layout = {"compressor": request.param, "chunk_rows": 10, "shard_rows": 20}
    return Dataset.from_arrays(X, Y).save(tmp_path / "ds", **layout)


def edit_attributes(path: Path, **changes: Any) -> None:
    meta = json.loads((path / "zarr.json").read_text())
    meta["attributes"].update(changes)
    (path / "zarr.json").write_text(json.dumps(meta))


def assert_damage_is_reported(ds: Dataset, column: str, shard: int, what: str) -> None:
    a, b = shard * 20, shard * 20 + 20
    file = Path(str(ds.url), column, "c", str(shard), *(["0"] if column == "x" else []))
    read = ds.read_x if column == "x" else ds.read_codes
    with pytest.raises(DataError, match=what) as error:
        read(a + 5, a + 8)
    for part in (str(ds.url), str(file), f"rows {a}:{b} of '{column}'", "Restore that file"):
        assert part in str(error.value)
    read(0, 20)  # Other shards can be read.


@pytest.mark.parametrize("column", ["x", "y"])
def test_a_missing_shard_is_an_error_and_not_a_fill_value(stored: Dataset, column: str) -> None:
    file = Path(str(stored.url), column, "c", "3", *(["0"] if column == "x" else []))
    file.unlink()
    assert_damage_is_reported(stored, column, 3, "is missing")


@pytest.mark.parametrize("column", ["x", "y"])
@pytest.mark.parametrize("how", ["flip", "cut", "empty", "longer"])
def test_a_damaged_shard_is_an_error(stored: Dataset, column: str, how: str) -> None:
    file = Path(str(stored.url), column, "c", "2", *(["0"] if column == "x" else []))
    content = bytearray(file.read_bytes())
    if how == "flip":
        content[3] ^= 1
    elif how == "longer":
        content += b"12345"
    else:
        content = content[: len(content) // 2] if how == "cut" else bytearray()
    file.write_bytes(content)
    assert_damage_is_reported(stored, column, 2, "is damaged")


@pytest.mark.parametrize("through", ["ours", "zarr"])
def test_missing_and_damaged_objects_are_errors(through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from scalelatent.data.read import chunks
    from scalelatent.storage.disk import locate

    if through == "zarr":
        monkeypatch.setattr(chunks, "find_decoder", lambda array: None)
    ds = Dataset.from_arrays(X, Y).save("memory://damage", overwrite=True, chunk_rows=10, shard_rows=20)
    store = locate("memory://damage")
    np.testing.assert_array_equal(ds.read_x(0, 100), X)
    store.write("x/c/1/0", store.read("x/c/1/0")[:-9])  # type: ignore[index]
    # The dataset is opened again, because an open dataset has already read the index of the shard.
    ds = open_dataset("memory://damage")
    what = "cannot be decoded" if through == "zarr" else "is damaged: the checksum of its index"
    with pytest.raises(DataError, match=rf"rows 20:40 of 'x'\) {what}"):
        ds.read_x(15, 25)
    store.delete("x/c/1/0")
    with pytest.raises(DataError, match=r"rows 20:40 of 'x'\) is missing"):
        ds.read_x(15, 25)


def test_chunks_of_zeros_are_written(tmp_path: Path) -> None:
    ds = Dataset.from_arrays(np.zeros((50, 3), "f4"), np.zeros(50, int)).save(tmp_path / "ds", chunk_rows=20)
    assert sorted(p.name for p in (tmp_path / "ds" / "x" / "c").iterdir()) == ["0", "1", "2"]
    assert not ds.read_x(0, 50).any()
    assert ds.classes.tolist() == [0]


def test_a_newer_format_version_is_refused(stored: Dataset) -> None:
    edit_attributes(Path(str(stored.url)), format_version=4)
    with pytest.raises(
        DataError, match=r"format_version 4; this scalelatent .* reads versions up to 3: install a newer"
    ):
        open_dataset(str(stored.url))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "not a scalelatent dataset"),
        ({"format_version": "x"}, "must be a whole number"),
        ({"feature_shape": None}, "feature_shape"),
        ({"feature_shape": [9]}, "feature_shape"),
        ({"complete": False}, "incomplete"),
    ],
)
def test_damaged_attributes_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    Dataset.from_arrays(X, Y).save(tmp_path / "ds")
    edit_attributes(tmp_path / "ds", **changes)
    with pytest.raises(DataError, match=message) as error:
        open_dataset(tmp_path / "ds")
    assert str(tmp_path / "ds") in str(error.value)


def test_paths_that_are_not_datasets_are_refused(tmp_path: Path) -> None:
    import zarr

    with pytest.raises(DataError, match="does not exist; create a dataset with"):
        open_dataset(tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("")
    with pytest.raises(DataError, match=r"is a folder with file, not a dataset; create a dataset"):
        open_dataset(tmp_path / "folder")
    zarr.create_array(tmp_path / "array", data=X)
    with pytest.raises(DataError, match=r"single zarr array.*from_arrays"):
        open_dataset(tmp_path / "array")
    with pytest.raises(DataError, match="'nosuch://' are not known here"):
        open_dataset("nosuch://bucket/x")
    with pytest.raises(DataError, match="needs a name"):
        open_dataset("memory://")


def test_damaged_metadata_and_missing_arrays_are_refused(tmp_path: Path) -> None:
    Dataset.from_arrays(X, Y).save(tmp_path / "ds")
    shutil.copytree(tmp_path / "ds", tmp_path / "two")
    (tmp_path / "ds" / "zarr.json").write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        open_dataset(tmp_path / "ds")
    shutil.rmtree(tmp_path / "two" / "x")
    with pytest.raises(DataError, match="array 'x' is missing"):
        open_dataset(tmp_path / "two")


@pytest.mark.parametrize("column", ["y", "weight"])
@pytest.mark.parametrize("names", ["strings", "numbers"])
@pytest.mark.parametrize("reported", [True, False])
def test_a_lost_column_is_an_error(tmp_path: Path, column: str, names: str, reported: bool) -> None:
    y = [f"c{label}" for label in Y] if names == "strings" else Y
    Dataset.from_arrays(X, y, sample_weight=np.ones(100)).save(tmp_path / "ds")
    if not reported:  # Imitate earlier versions, which wrote no list of columns.
        meta = json.loads((tmp_path / "ds/zarr.json").read_text())
        assert meta["attributes"].pop("columns") == ["x", "y", "weight"]
        (tmp_path / "ds/zarr.json").write_text(json.dumps(meta))
        assert open_dataset(tmp_path / "ds").has_weight
    (tmp_path / "ds" / column / "zarr.json").unlink()
    if column == "weight" and not reported:
        # Without the list of columns, nothing in the files shows that the dataset had weights.
        assert not open_dataset(tmp_path / "ds").has_weight
        return
    with pytest.raises(DataError, match=rf"array '{column}' is missing|{column}/zarr\.json is missing"):
        open_dataset(tmp_path / "ds")


def test_an_unfinished_dataset_does_not_open(tmp_path: Path) -> None:
    writer = create_dataset(tmp_path / "ds", 100, (4,), "u1", shard_rows=50)
    writer.write_shard(0, X[:50])
    with pytest.raises(DataError, match="its writer finished only 1 shards"):
        open_dataset(tmp_path / "ds")
    with pytest.raises(
        DataError, match=r"1 of 2 shards are not written, the first is shard 1 \(rows 50:100\)"
    ):
        writer.finalize()


def test_zarr_reads_a_dataset_without_this_package(tmp_path: Path) -> None:
    import zarr

    Dataset.from_arrays(X.reshape(100, 2, 2), Y).save(tmp_path / "ds")
    group = zarr.open_group(tmp_path / "ds", mode="r")
    np.testing.assert_array_equal(group["x"][:].reshape(100, 4), X)
    assert dict(group.members()).keys() == {"x", "y", "digest", "crc"}
    assert group["x"].metadata.dimension_names == ("row", "feature_0", "feature_1")


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"compressors": "gzip"}, "bytes + gzip"),
        ({"compressors": "gzip", "shards": (60, 4)}, "bytes + gzip in shards"),
        ({"serializer": "big"}, "bytes + zstd"),
        ({"index_location": "start"}, "bytes + zstd in shards"),
        ({"chunk_key_encoding": {"name": "default", "separator": "."}}, "bytes + zstd"),
        ({"chunk_key_encoding": {"name": "v2", "separator": "/"}}, "bytes + zstd"),
    ],
)
def test_codecs_that_only_zarr_knows_are_decoded_by_zarr(
    how: dict[str, Any], named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If zarr has rewritten rows with one of its own codecs, zarr decodes the rows; one log line says so."""
    import zarr
    from zarr import codecs

    x = X.astype("i4")
    Dataset.from_arrays(x, Y).save(tmp_path / "ds")
    group = zarr.open_group(tmp_path / "ds", mode="r+")
    if how.get("compressors") == "gzip":
        how = {**how, "compressors": codecs.GzipCodec()}
    if "serializer" in how:
        how = {"serializer": codecs.BytesCodec(endian="big")}
    if "index_location" in how:
        inner = [codecs.BytesCodec(), codecs.ZstdCodec()]
        shards = codecs.ShardingCodec(chunk_shape=(30, 4), codecs=inner, index_location="start")
        how = {"serializer": shards, "compressors": None, "chunks": (60, 4)}
    group.create_array("x", data=x, **{"chunks": (30, 4), **how}, overwrite=True)
    ds = open_dataset(tmp_path / "ds")
    np.testing.assert_array_equal(ds.read_x(7, 77), x[7:77])
    ds.read_x(0, 10)
    open_dataset(tmp_path / "ds").read_x(0, 10)
    lines = [record.getMessage() for record in caplog.records if record.name == "scalelatent"]
    assert len(lines) == 1
    assert lines[0].startswith(
        f"dataset {tmp_path / 'ds'}: 'x' is stored as {named}, which only zarr can decode"
    )


@pytest.mark.parametrize("compressor", ["zstd", "lz4", None])
@pytest.mark.parametrize("shard_rows", [20, 40])
def test_own_codecs_are_decoded_without_zarr(
    compressor: str | None, shard_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package decodes its own codecs itself, because releases of zarr describe them differently."""
    from scalelatent.data.read.chunks import StoredRows

    Dataset.from_arrays(X, Y).save(
        tmp_path / "ds", compressor=compressor, chunk_rows=20, shard_rows=shard_rows
    )
    monkeypatch.delattr(StoredRows, "_read_with_zarr")
    ds = open_dataset(tmp_path / "ds")
    np.testing.assert_array_equal(ds.read_x(7, 77), X[7:77])
    np.testing.assert_array_equal(ds.read_codes(7, 77), Y[7:77])


def test_unreadable_metadata_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ds" / "zarr.json").mkdir(parents=True)
    for use in (open_dataset, lambda path: Dataset.from_arrays(X).save(path, overwrite=True)):
        with pytest.raises(
            DataError, match=r"zarr\.json cannot be read: it is a folder, not a regular file; let"
        ):
            use(tmp_path / "ds")
    assert (tmp_path / "ds" / "zarr.json").is_dir()


@pytest.mark.parametrize("url", ["FILE://{}", "file://{}", "File://localhost{}"])
def test_file_urls_are_paths(tmp_path: Path, url: str) -> None:
    Dataset.from_arrays(X).save(tmp_path / "a b%c")
    address = url.format(str(tmp_path / "a%20b%25c"))
    assert open_dataset(address).url == str(tmp_path / "a b%c")
    with pytest.raises(DataError, match="does not exist"):
        open_dataset(tmp_path / "a%20b%25c")  # Only URLs contain escapes such as %20.
