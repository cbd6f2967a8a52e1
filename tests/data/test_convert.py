"""Datasets are converted to other layouts, codecs, dtypes and image sizes.

A conversion changes only the properties that are requested. It keeps all values or refuses, and it accepts
zarr arrays of other programs.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from scalelatent.data import Dataset, append_rows, convert_dataset, open_dataset
from scalelatent.data.write.convert import open_source
from scalelatent.errors import DataError

N = 95
X = np.random.Generator(np.random.Philox(3)).integers(0, 256, (N, 3, 2)).astype("u1")
Y = np.array([f"class {i % 4}" for i in range(N)])
WEIGHT = np.arange(N) / 4


@pytest.fixture
def stored(tmp_path: Path) -> Dataset:
    whole = Dataset.from_arrays(X, Y, sample_weight=WEIGHT)
    return whole.save(tmp_path / "ds", chunk_rows=10, shard_rows=20)


def assert_same(a: Dataset, b: Dataset) -> None:
    assert (a.n_rows, a.feature_shape) == (b.n_rows, b.feature_shape)
    np.testing.assert_array_equal(a.read_x(0, len(a)), b.read_x(0, len(b)))
    np.testing.assert_array_equal(a.read_y(0, len(a)), b.read_y(0, len(b)))
    np.testing.assert_array_equal(a.read_weight(0, len(a)), b.read_weight(0, len(b)))
    assert a.classes is not None
    assert a.classes.tolist() == b.classes.tolist()  # type: ignore[union-attr]


def read_layout(ds: Dataset) -> tuple[Any, ...]:
    layout = ds._columns.x.layout  # type: ignore[attr-defined]
    return layout.chunk_rows, layout.shard_rows, layout.compressor


@pytest.mark.parametrize("codec", ["zstd", "lz4", None, "auto"])
def test_a_new_codec_keeps_the_fingerprint(stored: Dataset, tmp_path: Path, codec: str | None) -> None:
    out = convert_dataset(stored, tmp_path / "out", compressor=codec)
    assert_same(out, stored)
    assert read_layout(out) == (10, 20, "lz4" if codec == "auto" else codec)
    assert out.fingerprint() == stored.fingerprint()
    back = convert_dataset(out, tmp_path / "back", compressor="lz4")
    assert back.fingerprint() == stored.fingerprint()
    assert (tmp_path / "back/x/c/1/0/0").read_bytes() == (tmp_path / "ds/x/c/1/0/0").read_bytes()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (10, 20)),
        ({"chunk_rows": 5}, (5, 20)),
        ({"shard_rows": 50}, (10, 50)),
        # The old chunks of 10 rows do not divide shards of 25 rows, so a chunk becomes a whole shard.
        ({"shard_rows": 25}, (25, 25)),
        ({"chunk_rows": 30}, (30, 120)),
        ({"chunk_rows": "auto", "shard_rows": "auto"}, (95, 95)),
    ],
)
def test_properties_that_are_not_requested_stay(
    stored: Dataset, tmp_path: Path, asked: dict[str, Any], expected: tuple[int, int]
) -> None:
    out = convert_dataset(str(stored.url), tmp_path / "out", **asked)
    assert_same(out, stored)
    assert read_layout(out) == (*expected, "lz4")
    again = convert_dataset(out, tmp_path / "again", chunk_rows=10, shard_rows=20)
    assert again.fingerprint() == stored.fingerprint()
    assert out.attrs["provenance"]["importer"] == "convert"
    assert out.attrs["provenance"]["content"] == stored.fingerprint()


def test_rows_are_selected_and_their_dtype_is_converted(stored: Dataset, tmp_path: Path) -> None:
    out = convert_dataset(stored, tmp_path / "out", rows=(30, 70), dtype="f4", chunk_rows=8)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out.read_x(0, 40), X[30:70].reshape(40, 6))
    assert out.read_y(0, 40).tolist() == Y[30:70].tolist()
    back = convert_dataset(out, tmp_path / "back", dtype="u1")
    np.testing.assert_array_equal(back.read_x(0, 40), X[30:70].reshape(40, 6))
    assert back.dtype == np.uint8


def test_lossy_conversion_must_be_requested(tmp_path: Path) -> None:
    x = X.reshape(N, 6).astype("f8")
    x[33, 4] = 255.6
    ds = Dataset.from_arrays(x).save(tmp_path / "ds", chunk_rows=10)
    with pytest.raises(DataError, match=r"row 33, column 4 is 255\.6, which uint8 cannot hold.*--lossy"):
        convert_dataset(ds, tmp_path / "out", dtype="u1")
    assert not (tmp_path / "out").exists()
    out = convert_dataset(ds, tmp_path / "out", dtype="u1", lossy=True)
    assert out.read_x(33, 34)[0, 4] == 255
    with pytest.raises(DataError, match="complex"):
        convert_dataset(ds, tmp_path / "other", dtype=complex)


def test_appended_parts_become_one(stored: Dataset, tmp_path: Path) -> None:
    grown = append_rows(str(stored.url), Dataset.from_arrays(X, Y, sample_weight=WEIGHT))
    out = convert_dataset(grown, tmp_path / "out", shard_rows=20)
    assert_same(out, grown)
    assert "segments" not in out.attrs
    twice = Dataset.from_arrays(
        np.concatenate([X, X]), np.concatenate([Y, Y]), sample_weight=np.concatenate([WEIGHT, WEIGHT])
    )
    assert out.fingerprint() == twice.save(tmp_path / "twice", chunk_rows=10, shard_rows=20).fingerprint()


@pytest.mark.parametrize("version", [2, 3])
def test_foreign_zarr_arrays_become_a_dataset(tmp_path: Path, version: Any) -> None:
    # Ignore zarr's warning that its standard does not have strings of fixed width yet.
    warnings.simplefilter("ignore")
    group = zarr.create_group(tmp_path / "g", zarr_format=version)
    for name, values in (("X", X), ("label", Y.astype("S")), ("y", np.arange(N)), ("other", X[:5])):
        made = group.create_array(name, shape=values.shape, dtype=values.dtype, chunks=(7, *values.shape[1:]))
        made[...] = values
    nested = group.create_group("deep").create_array("rows", shape=X.shape, dtype="u1", chunks=(7, 3, 1))
    nested[...] = X
    out = convert_dataset(tmp_path / "g", tmp_path / "out")
    np.testing.assert_array_equal(out.read_x(0, N), X.reshape(N, 6))
    assert out.read_y(0, N).tolist() == list(range(N))
    other = convert_dataset(tmp_path / "g", tmp_path / "out2", x="deep/rows", y="label", shard_rows=50)
    np.testing.assert_array_equal(other.read_x(0, N), X.reshape(N, 6))
    assert other.read_y(0, N).tolist() == Y.tolist()
    single = convert_dataset(tmp_path / "g/X", tmp_path / "out3")
    np.testing.assert_array_equal(single.read_x(0, N), X.reshape(N, 6))
    assert not single.has_y
    for wrong, message in (
        ({"x": "rows"}, r"no array 'rows'; it holds X, label, other, y: name one with --x KEY"),
        ({"y": "deep"}, "no array 'deep'"),
        ({"x": "other"}, "x has 5 rows, but y has 95"),
    ):
        with pytest.raises(DataError, match=message):
            convert_dataset(tmp_path / "g", tmp_path / "no", **wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="single zarr array"):
        open_source(tmp_path / "g/X", y="y")
    group.create_array("x", shape=(3, 3), dtype="u1")
    with pytest.raises(DataError, match=r"2 arrays that could be 'x'"):
        open_source(tmp_path / "g")
    assert not (tmp_path / "no").exists()


def test_invalid_conversions_are_refused(stored: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        convert_dataset(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "readme").write_text("")
    with pytest.raises(DataError, match="neither a dataset nor a zarr array or group"):
        convert_dataset(tmp_path / "text", tmp_path / "out")
    with pytest.raises(DataError, match="cannot replace itself"):
        convert_dataset(stored, str(stored.url), overwrite=True)
    with pytest.raises(DataError, match=r"rows 90:96 are outside of the rows 0:95"):
        convert_dataset(stored, tmp_path / "out", rows=(90, 96))
    with pytest.raises(DataError, match="chunk_rows is 'many'"):
        convert_dataset(stored, tmp_path / "out", chunk_rows="many")
    (tmp_path / "ds/x/c/2/0/0").unlink()
    with pytest.raises(DataError, match=r"rows 40:60 of 'x'\) is missing"):
        convert_dataset(stored, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert open_dataset(str(stored.url)).n_rows == N


def test_dense_rows_are_read_twice_to_become_sparse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first read counts the entries other than 0, which set the sizes of files to write."""
    from scalelatent.data.read.chunks import StoredRows

    x = np.eye(40, dtype="f4")
    ds = Dataset.from_arrays(x, np.arange(40) % 3).save(tmp_path / "dense", chunk_rows=10, shard_rows=10)
    rows = [0]
    read = StoredRows.read

    def counting(self: StoredRows, start: int, stop: int) -> np.ndarray:
        rows[0] += (stop - start) * (len(self.shape) == 2)
        return read(self, start, stop)

    monkeypatch.setattr(StoredRows, "read", counting)
    out = convert_dataset(ds, tmp_path / "sparse", sparse=True, shard_rows=4)
    assert rows[0] == 2 * 40
    monkeypatch.undo()
    np.testing.assert_array_equal(out.read_x(0, 40).toarray(), x)


def test_shard_rows_and_chunk_rows_must_be_whole_numbers(stored: Dataset, tmp_path: Path) -> None:
    out = convert_dataset(stored, tmp_path / "a", shard_rows=np.int64(8), chunk_rows=np.int32(4))  # type: ignore[arg-type]
    assert (out._columns.x.layout.shard_rows, out._columns.x.layout.chunk_rows) == (8, 4)  # type: ignore[attr-defined]
    for wrong in (2.0, "many"):
        with pytest.raises(DataError, match=f"shard_rows is {wrong!r}, but it must be a"):
            convert_dataset(stored, tmp_path / "b", shard_rows=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("channels", [(), (3,)])
def test_images_are_cropped_and_resized_by_area_means(tmp_path: Path, channels: tuple[int, ...]) -> None:
    x = np.random.Generator(np.random.Philox(5)).integers(0, 256, (30, 10, 12, *channels)).astype("u1")
    ds = Dataset.from_arrays(x, Y[:30]).save(tmp_path / "in", chunk_rows=7, shard_rows=14)
    inner = x[:, 1:-1, 1:-1]
    cropped = convert_dataset(ds, tmp_path / "cropped", crop=1)
    assert cropped.dtype == np.uint8
    np.testing.assert_array_equal(cropped.read_x(0, 30), inner.reshape(30, -1))
    np.testing.assert_array_equal(cropped.read_y(0, 30), Y[:30])
    # The cropped images of 8 x 10 pixels become 4 x 5 pixels, each the mean of 2 x 2 pixels.
    halved = convert_dataset(ds, tmp_path / "halved", crop=1, resize=(4, 5))
    means = inner.reshape(30, 4, 2, 5, 2, *channels).mean(axis=(2, 4))
    np.testing.assert_allclose(halved.read_x(0, 30), means.reshape(30, -1), rtol=1e-6)
    assert halved.dtype == np.float32
    # Images of 10 x 12 pixels become 3 x 8 pixels. The expected values divide each pixel into 3 x 2 parts, so
    # that a new pixel is the mean of 10 x 3 parts.
    odd = convert_dataset(ds, tmp_path / "odd", resize=(3, 8), dtype="u1", lossy=True).read_x(0, 30)
    fine = x.repeat(3, axis=1).repeat(2, axis=2).reshape(30, 3, 10, 8, 3, *channels).mean(axis=(2, 4))
    np.testing.assert_array_equal(odd, np.rint(np.float32(fine)).reshape(30, -1))
    assert halved.attrs["provenance"]["resize"] == [4, 5]


def test_flat_rows_of_square_size_are_images_and_others_are_refused(tmp_path: Path) -> None:
    flat = Dataset.from_arrays(np.arange(64.0).reshape(4, 16))
    out = convert_dataset(flat, tmp_path / "out", resize=(2, 2))
    assert out.feature_shape == (2, 2)
    np.testing.assert_allclose(out.read_x(0, 1)[0], [2.5, 4.5, 10.5, 12.5])
    line = Dataset.from_arrays(np.zeros((4, 15)))
    for rows, how, message in (
        (line, {"crop": 1}, r"shape \(15,\) are not images"),
        (flat, {"crop": 2}, "crop=2 removes all pixels of images of 4x4: give a number from 0 to 1"),
        (flat, {"resize": (0, 2)}, "has no pixel"),
        (flat, {"crop": -1}, "crop=-1"),
    ):
        with pytest.raises(DataError, match=message):
            convert_dataset(rows, tmp_path / "none", **how)  # type: ignore[arg-type]
    sparse = convert_dataset(flat, tmp_path / "sparse", sparse=True)
    with pytest.raises(DataError, match="CSR rows are not images"):
        convert_dataset(sparse, tmp_path / "none", crop=1)
    assert not (tmp_path / "none").exists()
