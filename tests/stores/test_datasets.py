"""In an object store, one PUT writes a shard of a dataset; ranged requests, several at once, read rows."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent import Dataset
from scalelatent.data import create_dataset, import_npz, import_parquet, make_digits, open_dataset
from scalelatent.engine.reading import Meter, Reader, StopEvent, iter_blocks
from scalelatent.errors import DataError
from scalelatent.storage.disk import locate

from .conftest import S3

X = np.random.default_rng(1).integers(0, 255, (600, 8), dtype=np.uint8)
Y = np.arange(600) % 3


def save(url: str, **layout: Any) -> Dataset:
    return Dataset.from_arrays(X, Y).save(url, chunk_rows=20, shard_rows=100, **layout)


def test_a_shard_is_one_put(s3: S3) -> None:
    save(s3.at("a.zarr"))
    puts = [path for method, path, _ in s3.proxy.requests if method in ("PUT", "POST") and "/x/c/" in path]
    assert sorted(re.findall(r"x/c/(\d+)/0", " ".join(puts))) == [str(i) for i in range(6)]
    last = [path for method, path, _ in s3.proxy.requests if method == "PUT"][-1]
    assert last.endswith("a.zarr/zarr.json")  # This file, written last, completes the dataset.


def test_writing_to_an_empty_url_deletes_only_markers(s3: S3) -> None:
    save(s3.at("a.zarr"))
    deletes = [path for method, path, _ in s3.proxy.requests if method == "DELETE" or "?delete" in path]
    assert len(deletes) <= 1, deletes  # One request deletes the markers of shards.
    listings = [path for method, path, _ in s3.proxy.requests if method == "GET" and "list-type" in path]
    assert len(listings) < 10, listings


def test_importers_read_files_in_a_store(s3: S3, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    np.savez_compressed(tmp_path / "a.npz", x=X, y=Y)
    columns = {f"p{i}": X[:, i] for i in range(8)} | {"y": Y}
    for part, (a, b) in enumerate([(0, 250), (250, 600)]):
        pyarrow.parquet.write_table(pa.table(columns).slice(a, b - a), tmp_path / f"{part}.parquet")
    folder = locate(s3.at("files"))
    for name in ("a.npz", "0.parquet", "1.parquet"):
        folder.write(f"{'tables/' * name.endswith('parquet')}{name}", (tmp_path / name).read_bytes())
    found = [import_npz(f"{folder.url}/a.npz", tmp_path / "npz")]
    for number, which in enumerate(("", "/*.parquet")):
        source = f"{folder.url}/tables{which}"
        found.append(import_parquet(source, tmp_path / f"table-{number}", label="y"))
    for ds in found:
        np.testing.assert_array_equal(ds.read_x(0, 600), X)
        np.testing.assert_array_equal(ds.read_y(0, 600), Y)
    with pytest.raises(DataError, match=r"files/no.npz does not exist"):
        import_npz(f"{folder.url}/no.npz", tmp_path / "no")


@pytest.mark.parametrize("compressor", ["auto", None, "zstd"])
@pytest.mark.parametrize("shard_rows", [100, 300])
def test_rows_are_read_back_from_a_store(s3: S3, compressor: str | None, shard_rows: int) -> None:
    ds = Dataset.from_arrays(X, Y, sample_weight=np.arange(600.0)).save(
        s3.at("a.zarr"), chunk_rows=100, shard_rows=shard_rows, compressor=compressor
    )
    np.testing.assert_array_equal(ds.read_x(0, 600), X)
    np.testing.assert_array_equal(ds.read_x(33, 458), X[33:458])
    np.testing.assert_array_equal(ds.read_y(33, 458), Y[33:458])
    np.testing.assert_array_equal(ds.read_weight(5, 7), [5, 6])
    assert ds.read_x(7, 7).shape == (0, 8)
    assert ds.is_stored
    again = Dataset.from_spec(ds[10:50].spec())
    np.testing.assert_array_equal(again.read_x(0, 40), X[10:50])


def test_an_index_is_read_once_and_chunks_by_their_range(s3: S3) -> None:
    save(s3.at("a.zarr"))
    ds = open_dataset(s3.at("a.zarr"))
    s3.proxy.requests.clear()
    ds.read_x(0, 200)
    ds.read_x(100, 130)
    asked = [(path[-7:], byte_range) for _, path, byte_range in s3.proxy.requests]
    assert sum(str(r).startswith("bytes=-") for _, r in asked) == 2  # These are the indexes of two shards.
    assert len(asked) == 2 + 10 + 2
    assert all(r is not None for _, r in asked)


def test_a_pass_requests_several_chunks_at_once_and_keeps_their_order(s3: S3) -> None:
    ds = save(s3.at("a.zarr"))
    ds.read_x(0, 600)  # Read all indexes before the barrier delays requests.
    reader = Reader(ds, None, Meter())
    s3.proxy.gate = threading.Barrier(3)  # Each of three requests waits for the other two.
    try:
        blocks = [(a, a + 50) for a in range(0, 600, 50)]
        found = [block.x for block in iter_blocks(reader, blocks, StopEvent())]
    finally:
        s3.proxy.gate = None
    np.testing.assert_array_equal(np.concatenate(found), X)
    assert reader.meter.bytes_read == X.nbytes
    assert s3.proxy.most_in_flight >= 3


def test_a_reader_that_stops_early_leaves_no_thread(s3: S3) -> None:
    ds = save(s3.at("a.zarr"))
    blocks = iter_blocks(Reader(ds, None, Meter()), [(a, a + 20) for a in range(0, 600, 20)], StopEvent())
    next(blocks)
    blocks.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("scalelatent-read")]


def test_reads_and_writes_survive_answers_of_503(s3: S3) -> None:
    with s3.proxy.turning_away(0.15):
        ds = save(s3.at("a.zarr"))
        np.testing.assert_array_equal(ds.read_x(0, 600), X)
    assert s3.proxy.turned_away > 5


def test_incomplete_answers_are_requested_again(s3: S3) -> None:
    with s3.proxy.breaking_off(0.15):
        ds = save(s3.at("a.zarr"))
        np.testing.assert_array_equal(ds.read_x(0, 600), X)
        np.testing.assert_array_equal(open_dataset(s3.at("a.zarr")).read_x(33, 458), X[33:458])
        assert len(locate(s3.at("a.zarr")).keys("x/c")) == 6
    assert s3.proxy.broken_off > 5


def test_missing_and_damaged_objects_are_reported_within_a_pass(s3: S3) -> None:
    ds = save(s3.at("a.zarr"))
    store = locate(s3.at("a.zarr"))
    whole = store.read("x/c/3/0")
    assert whole is not None
    store.delete("x/c/3/0")
    with pytest.raises(DataError, match=r"shard file s3://.*/x/c/3/0 \(rows 300:400 of 'x'\) is missing"):
        ds.read_x(0, 600)
    store.write("x/c/3/0", whole[:-9])
    with pytest.raises(DataError, match=r"x/c/3/0 \(rows 300:400 of 'x'\) is damaged"):
        ds.read_x(0, 600)
    store.write("x/c/3/0", b"?" + whole[1:])
    with pytest.raises(DataError, match=r"x/c/3/0 \(rows 300:400 of 'x'\) is damaged: the checksum"):
        ds.read_x(290, 330)
    store.write("x/c/3/0", whole[:40])
    with pytest.raises(DataError, match=r"x/c/3/0 \(rows 300:400 of 'x'\) is damaged: it has 40 bytes"):
        ds.read_x(300, 310)
    store.write("x/c/3/0", whole)
    np.testing.assert_array_equal(ds.read_x(0, 600), X)


def test_a_denied_request_is_reported_within_a_pass(s3: S3) -> None:
    ds = save(s3.at("a.zarr"))
    with (
        s3.proxy.denying(lambda method, path: path.endswith("x/c/3/0")),
        pytest.raises(DataError, match=r"rows 300:400 of 'x'\) cannot be read: .*permission denied"),
    ):
        ds.read_x(0, 600)


def test_an_interrupted_writer_resumes(s3: S3) -> None:
    url = s3.at("a.zarr")
    layout: dict[str, Any] = {"y_dtype": "i8", "chunk_rows": 20, "shard_rows": 100}
    writer = create_dataset(url, 600, (8,), "u1", **layout)
    for i in (0, 1):
        writer.write_shard(i, X[i * 100 : (i + 1) * 100], Y[i * 100 : (i + 1) * 100])
    denied = s3.proxy.denying(lambda method, path: method == "PUT" and path.endswith("_shards/000002.json"))
    with denied, pytest.raises(DataError, match=r"writing shard 2 .*permission denied.*--resume"):
        # This call writes the rows of shard 2 but not its marker, so the shard does not count as finished.
        writer.write_shard(2, X[200:300], Y[200:300])
    with pytest.raises(DataError, match="is incomplete: its writer finished only 2 shards"):
        open_dataset(url)
    writer = create_dataset(url, 600, (8,), "u1", **layout, resume=True)
    assert [writer.is_done(i) for i in range(6)] == [True, True] + [False] * 4
    for i in range(2, 6):
        writer.write_shard(i, X[i * 100 : (i + 1) * 100], Y[i * 100 : (i + 1) * 100])
    ds = writer.finalize()
    np.testing.assert_array_equal(ds.read_x(0, 600), X)
    assert ds.fingerprint() == save("memory://stores-writer", overwrite=True).fingerprint()
    assert "_shards" not in locate(url).keys("")


def test_generators_and_importers_write_to_a_store(s3: S3, tmp_path: Any) -> None:
    here = make_digits(str(tmp_path / "digits.zarr"), 300)
    there = make_digits(s3.at("digits.zarr"), 300)
    assert there.fingerprint() == here.fingerprint()
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    ds = import_npz(tmp_path / "a.npz", s3.at("npz.zarr"))
    np.testing.assert_array_equal(ds.read_x(0, 600), X)
    np.savez(tmp_path / "bad.npz", x=np.full((10, 3), np.nan), y=np.zeros(10))
    with pytest.raises(DataError):
        import_npz(tmp_path / "bad.npz", s3.at("bad.npz"))
    assert locate(s3.at("bad.npz")).is_empty()  # No incomplete file remains.
    with pytest.raises(DataError, match=r"exists; choose another output"):
        import_npz(tmp_path / "a.npz", s3.at("npz.zarr"))


def test_urls_without_a_dataset_are_refused(s3: S3) -> None:
    with pytest.raises(DataError, match=r"s3://.*/nothing does not exist; create a dataset"):
        open_dataset(s3.at("nothing"))
    with pytest.raises(DataError, match="there is no bucket 'no-such-bucket'"):
        open_dataset("s3://no-such-bucket/a.zarr")
    with pytest.raises(DataError, match="there is no bucket 'no-such-bucket'"):
        make_digits("s3://no-such-bucket/a.zarr", 300)
