"""Datasets over arrays read what numpy reads; invalid arrays are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalelatent.data import Dataset, open_dataset
from scalelatent.errors import DataError

DTYPES = ("bool", "uint8", "int16", "int64", "float32", "float64", ">f4")


def make_rows(n: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = np.random.Generator(np.random.Philox(n)).integers(0, 100, (n, *shape))
    return values.astype(dtype)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_stored_rows_equal_the_numpy_array(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    n = data.draw(st.integers(1, 120), "n")
    shape = data.draw(st.sampled_from([(1,), (7,), (3, 2), (2, 2, 2)]), "shape")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    chunk = data.draw(st.integers(6, 60), "chunk_rows")
    shard = chunk * data.draw(st.integers(1, 4), "chunks per shard")
    codec = data.draw(st.sampled_from(["auto", None, "zstd", "lz4"]), "compressor")
    memory = data.draw(st.booleans(), "memory")
    x, y = make_rows(n, shape, dtype), np.arange(n) % 5 - 2
    url = "memory://property" if memory else str(tmp_path_factory.mktemp("rows") / "ds")
    original = Dataset.from_arrays(x, y, sample_weight=np.arange(n))
    ds = original.save(url, overwrite=True, chunk_rows=chunk, shard_rows=shard, compressor=codec)
    a = data.draw(st.integers(0, n - 1), "a")
    b = data.draw(st.integers(a + 1, n), "b")
    cut = ds[a:b]
    flat = x.reshape(n, -1)
    for part, first in ((ds, 0), (cut, a)):
        u = data.draw(st.integers(0, len(part)), "u")
        v = data.draw(st.integers(u, len(part)), "v")
        rows = slice(first + u, first + v)
        got = part.read_x(u, v)
        assert got.dtype == x.dtype.newbyteorder("=")
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got, flat[rows])
        np.testing.assert_array_equal(part.read_y(u, v), y[rows])
        np.testing.assert_array_equal(part.classes[part.read_codes(u, v)], y[rows])
        np.testing.assert_array_equal(part.read_weight(u, v), np.arange(n)[rows])
        pieces = part.pieces(u, v)
        assert [i for p, q in pieces for i in range(p, q)] == list(range(u, v))
        assert all(q - p <= chunk for p, q in pieces)
    assert ds.feature_shape == shape


@given(st.integers(1, 40), st.integers(-50, 50), st.integers(-50, 50))
def test_slices_follow_pythons_rules(n: int, a: int, b: int) -> None:
    ds = Dataset.from_arrays(np.arange(n, dtype="f4")[:, None])
    expected = list(range(n))[a:b]
    if not expected:
        with pytest.raises(DataError, match="contains no row"):
            ds[a:b]
    else:
        assert ds[a:b].read_x(0, len(expected))[:, 0].tolist() == expected
        inner = ds[a:b][1:] if len(expected) > 1 else ds[a:b]
        assert inner.read_x(0, 1)[0, 0] == expected[min(1, len(expected) - 1)]


def test_rows_in_memory_are_read_as_views() -> None:
    x = np.zeros((10, 4, 4), "f4")
    ds = Dataset.from_arrays(x)
    assert np.shares_memory(ds[2:8].read_x(1, 3), x)
    assert ds.pieces() == [(0, 10)]
    assert ds.known_finite is False
    assert not ds.has_y
    assert ds.classes is None


def test_memmaps_and_fortran_order_are_read(tmp_path: Path) -> None:
    x = np.asfortranarray(make_rows(30, (3, 4), "f8"))
    np.save(tmp_path / "x.npy", x)
    ds = Dataset.from_arrays(np.load(tmp_path / "x.npy", mmap_mode="r"))
    np.testing.assert_array_equal(ds.read_x(5, 9), x.reshape(30, -1)[5:9])
    assert Dataset.from_arrays(np.ascontiguousarray(x)).fingerprint() == ds.fingerprint()


def test_zarr_array_is_read_by_chunks() -> None:
    import zarr

    x = make_rows(50, (3,), "f4")
    array = zarr.create_array({}, data=x, chunks=(8, 3))
    ds = Dataset.from_arrays(array, zarr.create_array({}, data=np.arange(50) % 3))
    np.testing.assert_array_equal(ds.read_x(3, 47), x[3:47])
    assert ds.pieces(3, 20) == [(3, 8), (8, 16), (16, 20)]
    assert ds.classes.tolist() == [0, 1, 2]


def test_dask_array_is_computed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    da = pytest.importorskip("dask.array")
    monkeypatch.setattr("scalelatent.data.read.sources._MAX_READ_BYTES", 0)
    computed: list[int] = []

    def block(values: np.ndarray) -> np.ndarray:
        computed.append(len(values))
        return values * 2

    x = make_rows(40, (4,), "f4")
    lazy = da.from_array(x, chunks=(16, 4)).map_blocks(block, dtype="f4", meta=np.empty((0, 4), "f4"))
    ds = Dataset.from_arrays(lazy, da.arange(40, chunks=7) % 2)
    assert computed == []
    assert ds.pieces() == [(0, 16), (16, 32), (32, 40)]
    np.testing.assert_array_equal(ds.read_x(16, 32), x[16:32] * 2)
    assert computed == [16]
    np.testing.assert_array_equal(ds[10:35].read_x(0, 25), x[10:35] * 2)
    assert ds.read_codes(0, 4).tolist() == [0, 1, 0, 1]
    with pytest.raises(DataError, match="compute_chunk_sizes"):
        Dataset.from_arrays(lazy[lazy[:, 0] > 3])


def test_importing_the_package_imports_no_heavy_library() -> None:
    import subprocess
    import sys

    code = (
        "import sys, scalelatent.data, scalelatent.data.dataset, scalelatent.generators.digits;"
        "print([m for m in ('zarr', 'dask', 'numba', 'sklearn', 'numcodecs') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "labels", [list("bcab"), np.array(list("bcab"), object), np.array([b"b", b"c", b"a", b"b"])]
)
def test_string_labels_become_codes(labels: Any, tmp_path: Path) -> None:
    ds = Dataset.from_arrays(np.ones((4, 2)), labels)
    for part in (ds, ds.save(tmp_path / "ds"), open_dataset(tmp_path / "ds")[0:4]):
        assert part.classes.tolist() == ["a", "b", "c"]
        assert part.read_y(0, 4).tolist() == list("bcab")
        assert part.read_codes(1, 4).tolist() == [2, 0, 1]


def test_codes_refer_to_the_given_classes() -> None:
    ds = Dataset.from_arrays(np.ones((4, 2)), [3, 1, 3, 2])
    assert ds.read_codes(0, 4).dtype == np.int32
    assert ds.read_codes(0, 4, np.array([1, 2, 3, 9])).tolist() == [2, 0, 2, 1]
    with pytest.raises(DataError, match=r"label of row 3 is 2, which is not one of the 2 classes \(1, 3\)"):
        ds[1:].read_codes(0, 3, np.array([1, 3]))
    with pytest.raises(DataError, match="do not fit the classes"):
        ds.read_codes(0, 1, np.array(["a"]))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((0, 3)), None, "at least one row"),
        (np.zeros((3, 0)), None, "at least one row and one feature"),
        (np.zeros(3), None, "Reshape your data"),
        (np.zeros((3, 2), complex), None, "complex numbers"),
        (np.zeros((3, 2), object), None, "Python objects"),
        (np.array([["a"]]), None, "real numbers"),
        ([[1, 2], [3]], None, "rows of equal length"),
        (np.zeros((3, 2)), [1, 2], r"x has 3 rows, but y has 2 \(shape \(2,\)\)"),
        (np.zeros((3, 2)), [[1, 2, 3]], "one per row"),
        (np.zeros((3, 2)), [1, "a", None], "row 1 is 'a' .str., and row 0 is 1 .int."),
        (np.zeros((3, 2)), [1j, 1, 1], "integers, floats, booleans or strings"),
    ],
)
def test_invalid_arrays_are_refused(x: Any, y: Any, message: str) -> None:
    y = y if y is None else np.array(y, dtype=object if None in np.ravel(np.array(y, object)) else None)
    with pytest.raises(DataError, match=message):
        Dataset.from_arrays(x, y)


def test_invalid_weights_and_labels_are_refused() -> None:
    x = np.zeros((3, 2))
    with pytest.raises(DataError, match="weight of row 1 is -1"):
        Dataset.from_arrays(x, sample_weight=[1, -1, 1])
    with pytest.raises(DataError, match=r"shape \(2,\), but there are 3 rows"):
        Dataset.from_arrays(x).with_weight([1, 2])
    with pytest.raises(DataError, match="label of row 2 is nan"):
        _ = Dataset.from_arrays(x, [1, 2, np.nan]).classes
    with pytest.raises(DataError, match="has no labels"):
        Dataset.from_arrays(x).read_codes(0, 1)
    with pytest.raises(DataError, match="step 1"):
        Dataset.from_arrays(x)[::2]
    with pytest.raises(IndexError, match="0:3"):
        Dataset.from_arrays(x).read_x(0, 4)


def test_a_spec_opens_the_same_rows_in_another_process(tmp_path: Path) -> None:
    x = make_rows(20, (3,), "u1")
    ds = Dataset.from_arrays(x, np.arange(20) % 2).save(tmp_path / "ds")
    spec = json.loads(json.dumps(ds[4:9].spec()))
    again = Dataset.from_spec(spec)
    np.testing.assert_array_equal(again.read_x(0, 5), x[4:9])
    assert again.fingerprint() == ds[4:9].fingerprint() != ds.fingerprint()
    Dataset.from_arrays(x[::-1]).save(tmp_path / "ds", overwrite=True)
    with pytest.raises(DataError, match="has changed since"):
        Dataset.from_spec(spec)


@pytest.mark.parametrize("kind", ["arrays", "memory", "weights"])
def test_the_spec_of_rows_in_memory_is_refused_and_names_save(kind: str, tmp_path: Path) -> None:
    ds = Dataset.from_arrays(np.ones((4, 2)))
    if kind == "memory":
        ds = ds.save("memory://spec", overwrite=True)
    elif kind == "weights":
        ds = ds.save(tmp_path / "ds").with_weight(np.ones(4))
    assert not ds.is_stored
    with pytest.raises(DataError, match=r"Dataset\.save"):
        ds.spec()


def test_fingerprints_differ_if_the_content_does(tmp_path: Path) -> None:
    x, y = make_rows(20, (3,), "f4"), np.arange(20) % 2
    prints = {
        Dataset.from_arrays(x).fingerprint(),
        Dataset.from_arrays(x, y).fingerprint(),
        Dataset.from_arrays(x[::-1]).fingerprint(),
        Dataset.from_arrays(x, sample_weight=y).fingerprint(),
        Dataset.from_arrays(x)[1:].fingerprint(),
    }
    assert len(prints) == 5
    one = Dataset.from_arrays(x, y).save(tmp_path / "1", chunk_rows=5, shard_rows=10)
    two = Dataset.from_arrays(x, y).save(tmp_path / "2", chunk_rows=10, shard_rows=10, compressor="zstd")
    assert one.fingerprint() == two.fingerprint()
    assert one.with_weight(y).fingerprint() != one.fingerprint()


@pytest.mark.parametrize("y", [np.arange(20) % 2, np.array(["a", "b"] * 10), np.eye(20)])
def test_rows_without_labels_are_the_same_rows(y: np.ndarray, tmp_path: Path) -> None:
    x = make_rows(20, (3,), "f4")
    labelled = Dataset.from_arrays(x, y).save(tmp_path / "ds", chunk_rows=5, shard_rows=10)
    for ds in (Dataset.from_arrays(x, y), labelled):
        bare = ds[4:9].without_labels()
        np.testing.assert_array_equal(bare.read_x(0, 5), x[4:9])
        assert (bare.has_y, bare.y_kind, bare.classes, bare.n_targets) == (False, None, None, None)
        assert bare.without_labels() is bare
        assert bare.fingerprint() != ds[4:9].fingerprint()
        assert len({ds.without_labels().fingerprint(), ds.fingerprint(), bare.fingerprint()}) == 3
        with pytest.raises(DataError, match="has no labels"):
            bare.read_y(0, 5)
    again = Dataset.from_spec(json.loads(json.dumps(bare.spec())))
    assert not again.has_y
    assert again.fingerprint() == bare.fingerprint()
    weighted = bare.with_weight(np.ones(5))
    assert not weighted.has_y
    assert weighted.fingerprint() != labelled[4:9].with_weight(np.ones(5)).fingerprint()
    saved = bare.save(tmp_path / "bare")
    assert saved.y_kind is None
    np.testing.assert_array_equal(saved.read_x(0, 5), x[4:9])
