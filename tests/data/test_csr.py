"""Datasets store CSR rows, multi-labels and targets, on disk and in memory; invalid rows are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelatent.data import Dataset, DatasetWriter, create_dataset, open_dataset
from scalelatent.data import csr as csr_module
from scalelatent.data.csr import canonical_csr
from scalelatent.data.csr_store import _chunk_length
from scalelatent.errors import DataError

ROWS, COLUMNS, TOPICS = 300, 40, 7


def make_random_csr(rows: int, columns: int, density: float, dtype: Any, seed: int = 0) -> sp.csr_array:
    rng = np.random.default_rng(seed)
    out = sp.random_array((rows, columns), density=density, rng=rng, format="csr")
    out.data = (out.data * 200 + 1).astype(dtype)
    return out


def assert_same_csr(a: Any, b: Any) -> None:
    """Assert that two CSR arrays have the same shape, dtype and entries, stored zeros included."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    for x, y in zip(csr_module.unpack_csr(a), csr_module.unpack_csr(b), strict=True):
        np.testing.assert_array_equal(x, y)


X = make_random_csr(ROWS, COLUMNS, 0.1, "f4")
Y = np.arange(ROWS) % 3
TOPICS_OF = (make_random_csr(ROWS, TOPICS, 0.3, "u1", 1) != 0).astype(np.uint8)


@st.composite
def matrices(draw: Any) -> sp.csr_array:
    rows, columns = draw(st.integers(1, 30)), draw(st.integers(1, 12))
    dtype = draw(st.sampled_from(["f4", "f8", "u1", "i4", "?"]))
    counts = draw(st.lists(st.integers(0, columns), min_size=rows, max_size=rows))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    indices = [np.sort(rng.choice(columns, n, replace=False)) for n in counts]
    data = rng.integers(0, 100, sum(counts)).astype(dtype)  # Some stored entries are 0.
    return sp.csr_array(
        (data, np.concatenate(indices).astype("i4"), np.r_[0, np.cumsum(counts)]), shape=(rows, columns)
    )


@settings(max_examples=40, deadline=None)
@given(x=matrices(), group=st.integers(1, 31), local=st.booleans(), cut=st.data())
def test_any_csr_matrix_is_read_back_from_any_store_and_row_groups(
    x: sp.csr_array, group: int, local: bool, cut: Any, tmp_path_factory: Any
) -> None:
    url = str(tmp_path_factory.mktemp("csr") / "ds") if local else "memory://csr-property"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scalelatent.data.csr_store.CHUNK_ENTRIES", cut.draw(st.integers(1, 20)))
        ds = Dataset.from_arrays(x).save(url, overwrite=True, shard_rows=group)
        a = cut.draw(st.integers(0, x.shape[0]))
        b = cut.draw(st.integers(a, x.shape[0]))
        assert_same_csr(ds.read_x(0, x.shape[0]), x)
        assert_same_csr(ds.read_x(a, b), x[a:b])
        assert (ds.is_sparse, ds.nnz) == (True, x.nnz)
        if b > a:
            assert ds[a:b].nnz == x[a:b].nnz
            assert_same_csr(ds[a:b].read_x(0, b - a), x[a:b])
        pieces = ds.pieces()
        assert [p for piece in pieces for p in range(*piece)] == list(range(x.shape[0]))
        if local:
            shutil.rmtree(url)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), max_size=8), min_size=1, max_size=8)
)
def test_unsorted_and_duplicate_entries_are_read_as_scipy_does(rows: list[list[tuple[int, int]]]) -> None:
    indices = np.array([c for row in rows for c, _ in row], "i4")
    data = np.array([v for row in rows for _, v in row], "f8")
    indptr = np.r_[0, np.cumsum([len(row) for row in rows])]
    found, unsorted, added = canonical_csr(data, indices, indptr, 6, 0, "x")
    wanted = sp.csr_array((data.copy(), indices.copy(), indptr), shape=(len(rows), 6))
    wanted.sum_duplicates()
    assert_same_csr(found, wanted)
    assert found.has_canonical_format
    assert unsorted == sum(any(row[i + 1][0] < row[i][0] for i in range(len(row) - 1)) for row in rows)
    assert added == len(data) - wanted.nnz


@pytest.mark.parametrize("kind", ["csr_matrix", "csr_array", "csc_matrix", "coo_array", "lil_matrix"])
def test_every_sparse_format_is_accepted(kind: str) -> None:
    ds = Dataset.from_arrays(getattr(sp, kind)(X), Y)
    assert_same_csr(ds.read_x(0, ROWS), X)
    assert ds.fingerprint() == Dataset.from_arrays(X, Y).fingerprint()
    assert ds.fingerprint() != Dataset.from_arrays(X.toarray(), Y).fingerprint()
    assert repr(ds) == "<Dataset 300 CSR rows x (40,) float32, labels>"


def test_rows_in_memory_are_views() -> None:
    part = Dataset.from_arrays(X).read_x(10, 20)
    assert np.shares_memory(part.data, X.data)
    assert np.shares_memory(part.indices, X.indices)


def test_column_indices_beyond_31_bits_are_stored() -> None:
    wide = sp.csr_array((np.ones(2), np.array([0, 2**31 + 5]), np.array([0, 1, 2])), shape=(2, 2**31 + 6))
    ds = Dataset.from_arrays(wide).save("memory://csr-wide", overwrite=True)
    assert_same_csr(ds.read_x(0, 2), wide)


@pytest.mark.parametrize("url", ["memory://kinds", "folder"])
@pytest.mark.parametrize(
    ("y", "kind"), [(Y, "labels"), (X.toarray()[:, :5], "targets"), (TOPICS_OF, "multilabel"), (None, None)]
)
@pytest.mark.parametrize("x", [X, X.toarray()])
def test_every_kind_of_y_is_stored_with_dense_and_csr_rows(
    x: Any, y: Any, kind: Any, url: str, tmp_path: Path
) -> None:
    url = url if "://" in url else str(tmp_path / url)
    held = Dataset.from_arrays(x, y, sample_weight=np.arange(ROWS))
    ds = held.save(url, overwrite=True, shard_rows=64)
    again = ds.save("memory://kinds-again", overwrite=True, shard_rows=50)
    for one in (held, ds, again, ds[10:]):
        first = ROWS - len(one)
        assert one.y_kind == kind
        assert one.n_targets == (None if kind in (None, "labels") else y.shape[1])
        assert (one.classes is None) == (kind != "labels")
        np.testing.assert_array_equal(one.read_weight(3, 9), np.arange(first + 3, first + 9))
        if kind == "multilabel":
            assert_same_csr(one.read_y(60, 70), y[first + 60 : first + 70])
        elif kind:
            np.testing.assert_array_equal(one.read_y(60, 70), y[first + 60 : first + 70])
        if kind in ("targets", "multilabel"):
            with pytest.raises(DataError, match=f"{kind} columns per row instead of one label"):
                one.read_codes(0, 1)
    # Earlier releases can read dense rows with labels or no y, so such datasets keep format version 1.
    old = kind in (None, "labels") and not sp.issparse(x)
    assert ds.attrs["format_version"] == (1 if old else 2)
    assert ("x_kind" in ds.attrs) == (not old)
    if "://" not in url:
        assert Dataset.from_spec(json.loads(json.dumps(ds[4:].spec()))).fingerprint() == ds[4:].fingerprint()


def test_datasets_that_differ_only_in_y_have_different_fingerprints() -> None:
    prints = {Dataset.from_arrays(X, y).fingerprint() for y in (None, Y, Y[:, None], TOPICS_OF)}
    assert len(prints) == 4
    stored = {
        Dataset.from_arrays(X, y).save("memory://prints", overwrite=True).fingerprint()
        for y in (None, Y, Y[:, None], TOPICS_OF)
    }
    assert len(stored) == 4


def open_writer(url: Any, **options: Any) -> DatasetWriter:
    return create_dataset(url, ROWS, (COLUMNS,), "f4", nnz=X.nnz, shard_rows=100, y_dtype="i8", **options)


def _write(writer: DatasetWriter, shard: int) -> None:
    a, b = writer.shard_bounds(shard)
    writer.write_shard(shard, X[a:b], Y[a:b])


def test_writers_in_any_order_resume_and_repair(tmp_path: Path) -> None:
    url = tmp_path / "ds"
    for shard in (2, 0):
        _write(open_writer(url) if shard == 2 else DatasetWriter.attach(url), shard)
    with pytest.raises(DataError, match=r"1 of 3 shards are not written, the first is shard 1"):
        DatasetWriter.attach(url).finalize()
    with pytest.raises(DataError, match="incomplete: its writer finished only 2 shards"):
        open_dataset(url)
    writer = open_writer(url, resume=True)
    assert [writer.is_done(i) for i in range(3)] == [True, False, True]
    (url / "x/000002/indices/c/0").unlink()
    assert not writer.is_done(2)
    for shard in (1, 2):
        _write(writer, shard)
    first = writer.finalize().fingerprint()
    assert first == write_all_shards("memory://csr-twice").fingerprint()
    shutil.rmtree(url / "x/000001")
    writer = DatasetWriter.attach(url)
    assert [writer.is_done(i) for i in range(3)] == [True, False, True]
    _write(writer, 1)
    assert writer.is_done(1)
    assert_same_csr(open_dataset(url).read_x(0, ROWS), X)


def write_all_shards(url: str) -> Dataset:
    writer = open_writer(url, overwrite=True)
    for shard in range(3):
        _write(writer, shard)
    return writer.finalize()


def test_a_resume_with_other_kinds_of_rows_is_refused(tmp_path: Path) -> None:
    open_writer(tmp_path / "ds")
    with pytest.raises(DataError, match="x_kind was 'csr', now 'dense'"):
        create_dataset(tmp_path / "ds", ROWS, (COLUMNS,), "f4", y_dtype="i8", resume=True)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("x/000001/data/c/0", "unlink", r"row group x/000001, rows 100:200 of 'x'\) is missing"),
        ("x/000001/indices/c/0", "flip", r"indices/c/0 \(row group x/000001, .*\) is damaged"),
        ("x/000001/indptr/c/0", "cut", r"indptr/c/0 \(row group x/000001, .*\) is damaged"),
        ("x/000001", "tree", r"row group x/000001, rows 100:200 of 'x'\) is missing"),
        ("x/zarr.json", "unlink", "CSR column 'x' is missing or its zarr.json is damaged"),
        ("x/nnz/c/0", "flip", "table 'x/nnz'"),
    ],
)
def test_the_error_names_lost_and_damaged_row_groups(
    file: str, damage: str, message: str, tmp_path: Path
) -> None:
    ds = Dataset.from_arrays(X, Y).save(tmp_path / "ds", shard_rows=100)
    path = tmp_path / "ds" / file
    if damage == "tree":
        shutil.rmtree(path)
    elif damage == "unlink":
        path.unlink()
    else:
        raw = bytearray(path.read_bytes())
        if damage == "flip":
            raw[len(raw) // 3] ^= 255
        path.write_bytes(bytes(raw[: len(raw) // 2] if damage == "cut" else raw))
    with pytest.raises(DataError, match=message):
        open_dataset(ds.url or "").read_x(0, ROWS)
    if file.startswith("x/000001"):
        # Rows of the other row groups (files of some rows) can still be read.
        assert_same_csr(open_dataset(ds.url or "").read_x(0, 100), X[:100])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda w: w.write_shard(0, X[:100].toarray(), Y[:100]), "given as ndarray, but this column is CSR"),
        (
            lambda w: w.write_shard(0, X[:99], Y[:100]),
            r"\(99, 40\), but this shard has shape \(100, 4",
        ),
        (lambda w: w.write_shard(0, X[:100].astype("f8"), Y[:100]), "float64, which does not fit"),
        (lambda w: w.write_shard(1, make_csr_with_nan(), Y[:100]), "row 107, column 3 is nan"),
    ],
)
def test_invalid_csr_rows_are_refused(make: Any, message: str) -> None:
    writer = open_writer("memory://csr-wrong", overwrite=True)
    with pytest.raises(DataError, match=message):
        make(writer)
    assert not any(writer.is_done(i) for i in range(3))


def make_csr_with_nan() -> sp.csr_array:
    x = X[:100].tolil()
    x[7, 3] = np.nan
    return x.tocsr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_shape": (4, 10), "nnz": 5}, "CSR rows have one axis"),
        ({"nnz": -1}, "at least 0 entries"),
        ({"nnz": 5, "chunk_rows": 4}, "row groups instead of chunks"),
        ({"nnz": 5, "shard_rows": 0}, "must be at least 1"),
        ({"nnz": 5, "compressor": "gzip"}, "compressor is 'gzip'"),
        ({"nnz": 5, "dtype": "f2"}, "convert the values to float32"),
        ({"y_kind": "ranks"}, "y_kind is 'ranks'"),
        ({"y_kind": "targets", "y_dtype": "f4"}, "at least one column"),
        ({"n_targets": 4}, "labels have none"),
        ({"y_kind": "targets", "n_targets": 4}, "needs y_dtype"),
    ],
)
def test_invalid_arguments_leave_no_files(options: dict[str, Any], message: str) -> None:
    arguments = {"feature_shape": (COLUMNS,), "dtype": "f4", **options}
    with pytest.raises(DataError, match=message):
        create_dataset("memory://csr-arguments", 10, **arguments)
    with pytest.raises(DataError, match="does not exist"):
        open_dataset("memory://csr-arguments")


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X.astype(complex), None, "complex numbers"),
        (X, TOPICS_OF[:10], r"x has 300 rows, but y has 10 \(shape \(10, 7\)\)"),
        (X, np.zeros((ROWS, 2, 2)), "one label per row"),
        (X, np.full((ROWS, 2), "a"), "real numbers"),
        (sp.csr_array((np.ones(1), np.array([7]), np.array([0, 1])), shape=(1, 8)), None, None),
    ],
)
def test_invalid_csr_arrays_are_refused(x: Any, y: Any, message: str | None) -> None:
    if message is None:
        # Scipy checks indices only when it makes an array, so only this package can find the index 8.
        x.indices[0] = 8
        message = "row 0 has an entry in column 8, but columns are 0 to 7"
    with pytest.raises(DataError, match=message):
        Dataset.from_arrays(x, y)


def test_the_error_names_the_row_of_a_sum_that_overflows() -> None:
    with pytest.raises(DataError, match="row 12 add up to 300, which does not fit into uint8"):
        canonical_csr(np.array([150, 150], "u1"), np.array([1, 1]), np.array([0, 0, 0, 2]), 3, 10, "x")


def test_chunks_of_a_row_group_are_equal_parts() -> None:
    for length in (0, 1, 131_072, 131_073, 1_000_000):
        chunk = _chunk_length(length)
        assert 1 <= chunk <= 131_072
        assert -(-max(length, 1) // chunk) * chunk - length < max(8, length / chunk + 2)


def test_row_groups_are_sized_by_bytes() -> None:
    from scalelatent.data.layout import choose_csr_layout

    f4 = np.dtype("f4")
    assert choose_csr_layout(10**6, 76 * 10**6, f4).shard_rows == 8192
    assert choose_csr_layout(10**6, 76 * 10**8, f4).shard_rows == 128
    assert choose_csr_layout(100, 7600, f4).shard_rows == 100
    assert choose_csr_layout(10**9, 0, f4).shard_rows == 65_536


def test_dask_arrays_of_sparse_blocks_are_refused() -> None:
    da = pytest.importorskip("dask.array")
    x = da.from_array(X.toarray(), chunks=(100, 40)).map_blocks(sp.csr_matrix)
    with pytest.raises(DataError, match="the dask array has sparse blocks"):
        Dataset.from_arrays(x)


@pytest.mark.parametrize("compressor", ["auto", "zstd", "lz4", None])
@pytest.mark.parametrize("dtype", ["f4", "f8", "u1", "i8", "?"])
def test_plain_zarr_reads_the_files(dtype: str, compressor: str | None, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    x = X.astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scalelatent.data.csr_store.CHUNK_ENTRIES", 128)
        ds = Dataset.from_arrays(x).save(tmp_path / "ds", shard_rows=120, compressor=compressor)
        assert_same_csr(ds.read_x(0, ROWS), x)
    group = zarr.open_group(tmp_path / "ds", mode="r")
    assert sorted(group["x"].group_keys()) == ["000000", "000001", "000002"]
    for i, first in enumerate(range(0, ROWS, 120)):
        part = group[f"x/{i:06d}"]
        wanted = x[first : first + 120]
        found = sp.csr_array((part["data"][:], part["indices"][:], part["indptr"][:]), shape=wanted.shape)
        assert_same_csr(found, wanted)
        assert part["data"].dtype == x.dtype
        assert part["data"].shards[0] >= part["data"].chunks[0]
