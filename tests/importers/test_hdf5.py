"""The importer of HDF5 files reads all layouts, types and groups, and refuses every kind of bad file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from scalelatent.data import import_hdf5, open_dataset
from scalelatent.errors import DataError
from scalelatent.importers import hdf5

X = np.random.Generator(np.random.Philox(4)).integers(0, 256, (53, 5, 4)).astype("u1")
Y = (np.arange(53) % 7).astype("i4")


def make(path: Path, **arrays: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, value in arrays.items():
            file[name.replace("__", "/")] = value
    return path


def assert_refused(path: Path, message: str, out: Path, **keys: Any) -> None:
    with pytest.raises(DataError, match=message) as error:
        import_hdf5(path, out, **keys)
    assert str(path) in str(error.value)
    assert not out.exists()


@hypothesis.given(
    chunk_rows=st.integers(1, 53),
    chunk_columns=st.integers(1, 5),
    cache_bytes=st.integers(1, 3000),
    shard_rows=st.integers(1, 60),
    packed=st.booleans(),
)
@hypothesis.settings(max_examples=15, deadline=None)
def test_any_layout_gives_the_same_rows(
    chunk_rows: int, chunk_columns: int, cache_bytes: int, shard_rows: int, packed: bool
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setitem(hdf5._CACHE, "rdcc_nbytes", cache_bytes)
        with h5py.File(f"{name}/a.h5", "w") as file:
            how: dict[str, Any] = {"compression": "gzip"} if packed else {}
            file.create_dataset("x", data=X, chunks=(chunk_rows, chunk_columns, 4), **how)
            file["y"] = Y
        ds = import_hdf5(f"{name}/a.h5", f"{name}/ds", shard_rows=shard_rows)
        np.testing.assert_array_equal(ds.read_x(0, 53), X.reshape(53, -1))
        np.testing.assert_array_equal(ds.read_y(0, 53), Y)


def test_files_are_opened_with_a_larger_chunk_cache(tmp_path: Path) -> None:
    """HDF5 with a cache of 4 MiB unpacks a chunk once, even if two shards (of 7 rows) share the chunk."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(10, 5, 4))
    with hdf5.open_h5(tmp_path / "a.h5", "HDF5 file") as opened:
        settings = opened.id.get_access_plist().get_cache()
    assert settings[1:] == (100_003, 4 << 20, 1.0)
    ds = import_hdf5(tmp_path / "a.h5", tmp_path / "ds", shard_rows=7)
    np.testing.assert_array_equal(ds.read_x(0, 53), X.reshape(53, -1))


@pytest.mark.parametrize("kind", ["?", "u1", "i8", ">f4", "f8", "f2"])
def test_all_dtypes_are_read(tmp_path: Path, kind: str) -> None:
    path = make(tmp_path / "a.h5", X=X.astype(kind), Y=Y[:, None])
    ds = import_hdf5(path, tmp_path / "ds")
    assert ds.dtype == np.dtype(kind).newbyteorder("=")
    np.testing.assert_array_equal(ds.read_x(0, 53), X.astype(kind).reshape(53, -1))
    np.testing.assert_array_equal(ds.read_y(0, 53), Y)


def test_targets_are_read(tmp_path: Path) -> None:
    targets = np.stack([Y / 2, Y * 3.0], 1)
    ds = import_hdf5(make(tmp_path / "a.h5", x=X, y=targets), tmp_path / "ds", shard_rows=9)
    assert ds.y_kind == "targets"
    np.testing.assert_array_equal(ds.read_y(0, 53), targets)
    assert_refused(
        make(tmp_path / "b.h5", x=X, y=targets * 1j), "'y' holds complex numbers", tmp_path / "out"
    )


@pytest.mark.parametrize("fixed", [False, True])
def test_string_labels_are_read(tmp_path: Path, fixed: bool) -> None:
    words = np.array(["zwölf", "b", "ccc"])[Y % 3]
    stored = np.char.encode(words, "utf-8") if fixed else words.astype(object)
    ds = import_hdf5(make(tmp_path / "a.h5", x=X, y=stored), tmp_path / "ds", shard_rows=9)
    assert ds.read_y(0, 53).tolist() == words.tolist()
    assert ds.classes.tolist() == ["b", "ccc", "zwölf"]


def test_arrays_are_found_in_groups_and_by_name(tmp_path: Path) -> None:
    path = make(tmp_path / "a.h5", train__X=X, train__y=Y, test__x=X[:9], test__y=Y[:9], other=Y)
    assert_refused(
        path, r"has 2 arrays that could be 'x'; it holds .*train/X \(53, 5, 4\) uint8", tmp_path / "out"
    )
    ds = import_hdf5(path, tmp_path / "ds", x="/test/x")
    assert (len(ds), ds.has_y) == (9, True)
    assert ds.attrs["provenance"].items() >= {"x": "test/x", "y": "test/y", "source": ["a.h5"]}.items()
    assert_refused(path, r"has no array 'test'; .*--x KEY", tmp_path / "out", x="test")
    assert_refused(path, r"has no array 'test/t'; .*--y KEY", tmp_path / "out", x="test/x", y="test/t")
    with pytest.raises(
        DataError, match=r"array 'train/X' holds 53 rows, but .*array 'test/y' holds 9 labels"
    ):
        import_hdf5(path, tmp_path / "out", x="train/X", y="test/y")
    assert not (tmp_path / "out").exists()


def test_invalid_arrays_are_refused(tmp_path: Path) -> None:
    path, out = tmp_path / "a.h5", tmp_path / "out"
    assert_refused(make(path, x=Y), r"array 'x' has shape \(53,\); rows x features are needed", out)
    assert_refused(make(path, x=3.0), "array 'x' holds no array, but a single value or nothing", out)
    assert_refused(
        make(path, x=h5py.Empty("f4")), "array 'x' holds no array, but a single value or nothing", out
    )
    assert_refused(make(path, x=X[:0]), r"array 'x' has shape \(0, 5, 4\), which is empty", out)
    assert_refused(make(path, x=X.astype("c8")), "array 'x' holds complex numbers", out)
    assert_refused(make(path, x=X.astype("S3")), "array 'x' holds values of type", out)
    compound = np.zeros((53, 2), [("a", "f4"), ("b", "i4")])
    assert_refused(make(path, x=compound), "rows must be real numbers", out)
    assert_refused(make(path, x=X, y=X), r"array 'y' has shape \(53, 5, 4\); labels must be one per row", out)
    assert_refused(make(path, data=X), "has no array 'x'; it holds data .*: name one with --x KEY", out)
    assert_refused(make(path), "has no array 'x'; it holds nothing", out)
    bad = X.astype("f4")
    bad[33, 2, 1] = np.inf
    assert_refused(make(path, x=bad), "array 'x': row 33, column 9 is inf", out)
    labels = Y.astype("f4")
    labels[40] = np.nan
    make(path, x=X, y=labels)
    with pytest.raises(DataError, match="the label of row 40 is nan"):
        import_hdf5(path, out)
    assert not out.exists()


def test_invalid_hdf5_files_are_refused(tmp_path: Path) -> None:
    path, out = make(tmp_path / "a.h5", x=X.repeat(90, 0), y=Y.repeat(90)), tmp_path / "out"
    content = path.read_bytes()
    for bad in (content[: len(content) // 2], b"", b"some text that is no HDF5"):
        path.write_bytes(bad)
        assert_refused(path, "is no HDF5 file, or is truncated: .*download or copy it again", out)
    assert_refused(tmp_path / "none.h5", "HDF5 file .*none.h5 does not exist; check the path", out)


def test_a_damaged_chunk_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        array = file.create_dataset("x", data=X, chunks=(10, 5, 4), compression="gzip", fletcher32=True)
        info = array.id.get_chunk_info(3)
    content = bytearray(path.read_bytes())
    content[info.byte_offset + info.size // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"array 'x' is damaged in rows 0:53.*copy the file again"):
        import_hdf5(path, tmp_path / "out")
    with pytest.raises(DataError, match="does not exist"):
        open_dataset(tmp_path / "out")


@pytest.mark.realdata
def test_rows_of_usps_are_those_of_the_file(data_root: Path, tmp_path: Path) -> None:
    path = data_root / "usps" / "usps.h5"
    counts = {"train": [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644]}
    counts["test"] = [359, 264, 198, 166, 200, 160, 170, 147, 166, 177]
    for group, expected in counts.items():
        ds = import_hdf5(path, tmp_path / group, f"{group}/data", f"{group}/target")
        assert np.bincount(ds.read_codes(0, len(ds))).tolist() == expected
        with h5py.File(path) as file:
            np.testing.assert_array_equal(ds.read_x(0, len(ds)), file[group]["data"][...])


def test_a_path_with_spaces_is_whole_in_messages(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"HDF5 file .*/no such file\.h5 does not exist"):
        import_hdf5(tmp_path / "no such file.h5", tmp_path / "ds")
    (tmp_path / "a b.h5").write_bytes(b"x" * 600)
    with pytest.raises(DataError, match=r"HDF5 file .*/a b\.h5 is no HDF5 file"):
        import_hdf5(tmp_path / "a b.h5", tmp_path / "ds")


def test_numbers_in_other_files_are_refused(tmp_path: Path) -> None:
    """Arrays with numbers in another file are refused, because HDF5 reads zeros if that file is absent."""
    message = "'{}' takes its numbers from other files .*copy the array to a file of its own"
    (tmp_path / "other.bin").write_bytes(bytes(range(80)))
    path, out = tmp_path / "a.h5", tmp_path / "out"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", shape=(4, 20), dtype="u1", external=str(tmp_path / "other.bin"))
    assert_refused(path, message.format("x"), out)
    with h5py.File(path, "w") as file:
        file["x"] = X
        file.create_dataset("y", shape=(53,), dtype="u1", external=str(tmp_path / "other.bin"))
    assert_refused(path, message.format("y"), out)
    layout = h5py.VirtualLayout(shape=(10, 5, 4), dtype="u1")
    layout[...] = h5py.VirtualSource("b.h5", "x", shape=(10, 5, 4))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout)
    assert_refused(path, message.format("x"), out)


def test_links_to_other_files_are_not_followed(tmp_path: Path) -> None:
    make(tmp_path / "b.h5", x=X)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = h5py.ExternalLink(str(tmp_path / "b.h5"), "/x")
    assert_refused(tmp_path / "a.h5", "has no array 'x'", tmp_path / "out")
    assert_refused(tmp_path / "a.h5", "has no array 'x'", tmp_path / "out", x="x")


@pytest.mark.parametrize("dtype", ["f8", "u1"])
def test_rows_that_the_disk_cannot_hold_are_refused_before_any_is_written(tmp_path: Path, dtype: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", shape=(10**12, 1000), dtype=dtype, chunks=(1000, 1000))
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"1,000,000,000,000 rows of shape \(1000,\).* GB are free there"):
        import_hdf5(tmp_path / "a.h5", out)
    assert not out.exists()
