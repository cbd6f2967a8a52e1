"""Dense and CSR rows with labels, targets, multi-labels or no y can be shuffled, appended and converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from scalelatent.data import Dataset, append_rows, convert_dataset, shuffle_dataset, shuffled_rows
from scalelatent.errors import DataError

N, P = 90, 12
_RNG = np.random.Generator(np.random.Philox(11))
DENSE = (_RNG.integers(0, 6, (N, P)) * (_RNG.random((N, P)) < 0.2)).astype("f4")
DENSE[40:44] = 0  # These four rows have no entries.
TARGETS = _RNG.standard_normal((N, 3))
TOPICS = (_RNG.random((N, 7)) < 0.3).astype("u1")
LABELS = np.array(["x", "b", "m"])[np.arange(N) % 3]
X = {"dense": DENSE, "csr": sparse.csr_array(DENSE)}
Y = {"none": None, "labels": LABELS, "targets": TARGETS, "multilabel": sparse.csr_array(TOPICS)}
WHOLE_Y = {"labels": LABELS, "targets": TARGETS, "multilabel": TOPICS}

every_kind = pytest.mark.parametrize(
    ("x_kind", "y_kind"), [(x, y) for x in X for y in Y if (x, y) != ("dense", "labels")]
)


def make_dataset(x_kind: str, y_kind: str, a: int = 0, b: int = N) -> Dataset:
    y = Y[y_kind]
    return Dataset.from_arrays(X[x_kind][a:b], None if y is None else y[a:b])


def to_numpy(values: Any) -> np.ndarray:
    return values.toarray() if sparse.issparse(values) else values


def _check(ds: Dataset, x_kind: str, y_kind: str, order: np.ndarray) -> None:
    n = ds.n_rows
    assert n == len(order)
    assert ds.is_sparse == (x_kind == "csr")
    assert ds.y_kind == (None if y_kind == "none" else y_kind)
    np.testing.assert_array_equal(to_numpy(ds.read_x(0, n)), DENSE[order])
    np.testing.assert_array_equal(to_numpy(ds.read_x(7, 31)), DENSE[order[7:31]])
    if ds.is_sparse:
        assert ds.nnz == np.count_nonzero(DENSE[order])
        assert ds[7:31].nnz == np.count_nonzero(DENSE[order[7:31]])
    if y_kind != "none":
        np.testing.assert_array_equal(to_numpy(ds.read_y(0, n)), WHOLE_Y[y_kind][order])


@every_kind
def test_rows_of_every_kind_are_shuffled(tmp_path: Path, x_kind: str, y_kind: str) -> None:
    stored = make_dataset(x_kind, y_kind).save(tmp_path / "in", shard_rows=25)
    few = shuffle_dataset(stored, tmp_path / "few", seed=4, memory=6000, shard_rows=20)
    _check(few, x_kind, y_kind, shuffled_rows(4, N))
    much = shuffle_dataset(make_dataset(x_kind, y_kind), tmp_path / "much", seed=4, shard_rows=20)
    assert few.fingerprint() == much.fingerprint()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["few", "in", "much"]


@every_kind
def test_rows_of_every_kind_are_appended_and_converted(tmp_path: Path, x_kind: str, y_kind: str) -> None:
    make_dataset(x_kind, y_kind, 0, 30).save(tmp_path / "ds", shard_rows=12)
    append_rows(tmp_path / "ds", make_dataset(x_kind, y_kind, 30, 35))
    append_rows(tmp_path / "ds", make_dataset(x_kind, y_kind, 35, 41).save(tmp_path / "more", shard_rows=4))
    grown = append_rows(tmp_path / "ds", make_dataset(x_kind, y_kind, 41, N), shard_rows=20)
    _check(grown, x_kind, y_kind, np.arange(N))
    again = convert_dataset(grown, tmp_path / "again", shard_rows=12)
    _check(again, x_kind, y_kind, np.arange(N))
    whole = make_dataset(x_kind, y_kind).save(tmp_path / "whole", shard_rows=12)
    assert again.fingerprint() == whole.fingerprint()
    packed = convert_dataset(whole, tmp_path / "packed", compressor="zstd")
    assert packed.fingerprint() == whole.fingerprint()
    other = "dense" if x_kind == "csr" else "csr"
    turned = convert_dataset(whole, tmp_path / "turned", sparse=other == "csr", shard_rows=12)
    _check(turned, other, y_kind, np.arange(N))
    back = convert_dataset(turned, tmp_path / "back", sparse=x_kind == "csr", shard_rows=12)
    assert back.fingerprint() == whole.fingerprint()
    small = convert_dataset(whole, tmp_path / "small", dtype="u1", rows=(5, 80))
    assert small.dtype == np.uint8
    _check(convert_dataset(small, tmp_path / "f", dtype="f4"), x_kind, y_kind, np.arange(5, 80))


def test_the_error_names_csr_values_that_a_conversion_would_change(tmp_path: Path) -> None:
    x = DENSE.copy()
    x[50, 7] = 2.5
    ds = Dataset.from_arrays(sparse.csr_array(x)).save(tmp_path / "ds", shard_rows=20)
    with pytest.raises(DataError, match=r"row 50, column 7 is 2\.5, which uint8 cannot hold"):
        convert_dataset(ds, tmp_path / "out", dtype="u1")
    assert not (tmp_path / "out").exists()
    out = convert_dataset(ds, tmp_path / "out", dtype="u1", lossy=True)
    assert out.read_x(50, 51).toarray()[0, 7] == 2
    with pytest.raises(DataError, match="float16, which sparse rows of scipy cannot have"):
        convert_dataset(ds, tmp_path / "other", dtype="f2")
    with pytest.raises(DataError, match="CSR rows have row groups instead of chunks"):
        convert_dataset(ds, tmp_path / "other", chunk_rows=5)


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (("csr", "none"), ("dense", "none"), "rows dense instead of CSR"),
        (("csr", "labels"), ("csr", "multilabel"), "labels 7 multilabel columns of uint8 instead of strings"),
        (("dense", "targets"), ("dense", "labels"), "labels strings instead of 3 targets columns of float64"),
    ],
)
def test_rows_of_another_kind_are_not_appended(
    tmp_path: Path, ours: tuple[str, str], theirs: tuple[str, str], message: str
) -> None:
    before = make_dataset(*ours).save(tmp_path / "ds")
    with pytest.raises(DataError, match=message):
        append_rows(tmp_path / "ds", make_dataset(*theirs))
    assert append_rows(tmp_path / "ds", make_dataset(*ours)).n_rows == 2 * before.n_rows


def test_images_become_csr_rows_of_one_axis(tmp_path: Path) -> None:
    ds = Dataset.from_arrays(DENSE.reshape(N, 3, 4).astype("u1")).save(tmp_path / "ds")
    out = convert_dataset(ds, tmp_path / "out", sparse=True)
    assert out.feature_shape == (P,)
    np.testing.assert_array_equal(out.read_x(0, N).toarray(), DENSE)
