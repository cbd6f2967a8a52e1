"""The importer of CSR rows in npz archives reads all layouts of arrays, and refuses every bad file."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from typer.testing import CliRunner

from scalelatent.cli import app
from scalelatent.data import append_rows, import_csr, open_dataset
from scalelatent.errors import DataError

X = sp.random_array((200, 30), density=0.1, rng=np.random.default_rng(0), format="csr").astype("f4")
TOPICS = (sp.random_array((200, 6), density=0.3, rng=np.random.default_rng(1), format="csr") > 0).tocsr()


def make_arrays(prefix: str = "X_", x: Any = X, **more: Any) -> dict[str, Any]:
    found = {"data": x.data, "indices": x.indices, "indptr": x.indptr, "shape": np.array(x.shape)}
    return {prefix + k: v for k, v in found.items()} | more


def write_npz(path: Path, arrays: dict[str, Any], packed: bool = False) -> Path:
    (np.savez_compressed if packed else np.savez)(path, **arrays)
    return path


def assert_same(ds: Any, x: Any) -> None:
    found = ds.read_x(0, len(ds))
    assert found.dtype == x.dtype
    assert found.has_canonical_format
    assert (found != x).nnz == 0
    assert found.nnz == x.nnz


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", [sp.csr_matrix, sp.csr_array])
def test_archives_of_scipy_are_read(packed: bool, kind: Any, tmp_path: Path) -> None:
    sp.save_npz(tmp_path / "x.npz", kind(X), compressed=packed)
    calls: list[tuple[int, int]] = []
    ds = import_csr(tmp_path / "x.npz", tmp_path / "ds", shard_rows=64, progress=lambda *c: calls.append(c))
    assert_same(ds, X)
    assert calls == [(64, 200), (128, 200), (192, 200), (200, 200)]
    assert ds.pieces() == [(0, 64), (64, 128), (128, 192), (192, 200)]
    provenance = ds.attrs["provenance"]
    assert (provenance["importer"], provenance["source"]) == ("csr", ["x.npz"])
    assert "rows_sorted" not in provenance


@pytest.mark.parametrize("index", ["i4", "i8", "u4"])
def test_prefixes_values_and_shape_are_found(index: str, tmp_path: Path) -> None:
    arrays = make_arrays(X_tf=np.arange(X.nnz, dtype="u2"), unrelated=np.zeros(3))
    arrays["X_indices"] = arrays["X_indices"].astype(index)
    path = write_npz(tmp_path / "x.npz", arrays)
    assert_same(import_csr(path, tmp_path / "1"), X)
    counts = import_csr(path, tmp_path / "2", values="tf", csr_prefix="X_")
    assert counts.dtype == np.uint16
    np.testing.assert_array_equal(counts.read_x(0, 200).data, np.arange(X.nnz))
    assert_same(import_csr(write_npz(tmp_path / "y.npz", make_arrays("words_")), tmp_path / "3"), X)


@pytest.mark.parametrize("where", ["key", "prefix", "found"])
def test_labels_targets_and_multilabels_are_read(where: str, tmp_path: Path) -> None:
    labels, names, targets = np.arange(200) % 4, np.array(["a", "b"])[np.arange(200) % 2], X.toarray()[:, :3]
    topics = make_arrays("Y_", TOPICS)
    del topics["Y_data"]  # A matrix without values has ones as entries.
    for i, y in enumerate((labels, names, targets, topics)):
        many = isinstance(y, dict)
        more, name = {"labels": y}, "labels"
        if many:
            more, name = dict(y), "Y"
        elif where == "found":
            more = {"Y": y}
        path = write_npz(tmp_path / "x.npz", make_arrays(**more))
        ds = import_csr(path, tmp_path / f"{i}", y=None if where == "found" else name, shard_rows=70)
        assert_same(ds, X)
        assert ds.y_kind == ["labels", "labels", "targets", "multilabel"][i]
        found = ds.read_y(50, 150)
        if many:
            assert (found != TOPICS[50:150].astype(found.dtype)).nnz == 0
        else:
            np.testing.assert_array_equal(found, y[50:150])
        assert str(tmp_path) not in json.dumps(ds.attrs)


def test_rows_are_appended_to_sparse_rows(tmp_path: Path) -> None:
    ds = import_csr(write_npz(tmp_path / "x.npz", make_arrays()), tmp_path / "ds")
    assert_same(append_rows(tmp_path / "ds", ds)[200:], X)


def test_unsorted_and_duplicate_entries_are_repaired_and_counted(tmp_path: Path) -> None:
    columns, data = np.array([3, 1, 2, 2, 0, 4]), np.array([1, 2, 3, 4, 5, 6], "f4")
    arrays = {"data": data, "indices": columns, "indptr": np.array([0, 2, 5, 6]), "shape": np.array([3, 5])}
    ds = import_csr(write_npz(tmp_path / "x.npz", arrays), tmp_path / "ds", shard_rows=2)
    assert ds.read_x(0, 3).toarray().tolist() == [[0, 2, 0, 1, 0], [5, 0, 7, 0, 0], [0, 0, 0, 0, 6]]
    assert ds.attrs["provenance"]["rows_sorted"] == 2
    assert ds.attrs["provenance"]["entries_added"] == 1


def test_rows_without_entries_are_read(tmp_path: Path) -> None:
    empty = sp.csr_array((7, 3), dtype="f4")
    sp.save_npz(tmp_path / "empty.npz", empty)
    assert_same(import_csr(tmp_path / "empty.npz", tmp_path / "empty"), empty)


def assert_refused(tmp_path: Path, path: Any, *parts: str, **options: Any) -> None:
    with pytest.raises(DataError) as error:
        import_csr(path, tmp_path / "out", shard_rows=50, **options)
    for part in parts:
        assert part in str(error.value)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
    with pytest.raises(DataError, match="does not exist"):
        open_dataset(tmp_path / "out")


def make_bad_archive(**changes: Any) -> dict[str, Any]:
    arrays = make_arrays("")
    for name, change in changes.items():
        arrays[name] = change(arrays[name].copy()) if callable(change) else change
    return arrays


def replace_array(place: int, value: Any) -> Any:
    def change(array: np.ndarray) -> np.ndarray:
        array[place] = value
        return array

    return change


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        (make_bad_archive(indptr=replace_array(0, 1)), ["'indptr' begins with 1; row pointers begin with 0"]),
        (make_bad_archive(indptr=replace_array(70, 0)), ["'indptr' falls from", "at row 69"]),
        (
            make_bad_archive(indptr=replace_array(-1, 10**6)),
            ["row 199 ends at entry 1000000, but there are 600"],
        ),
        (make_bad_archive(indptr=lambda a: a[:-5]), ["the shape says 200 rows, but", "has 195"]),
        (make_bad_archive(indptr=lambda a: a[:1]), ["the shape says 200 rows, but", "has 0"]),
        (
            make_bad_archive(indptr=lambda a: np.minimum(a, 590)),
            ["'indptr' ends at 590, but there are 600 entries"],
        ),
        ({k: v for k, v in make_arrays("").items() if k != "shape"}, ["has no array 'shape'"]),
        (make_bad_archive(indptr=lambda a: a * 1.0), ["'indptr' has dtype float64; integers are needed"]),
        (
            make_bad_archive(indices=replace_array(400, 30)),
            ["has an entry in column 30, but columns are 0 to 29", "row 1"],
        ),
        (make_bad_archive(indices=replace_array(3, -2)), ["row 2 has an entry in column -2"]),
        (make_bad_archive(indices=lambda a: a.reshape(2, -1)), ["'indices' has shape (2, 300)"]),
        (make_bad_archive(indices=lambda a: a[:-1]), ["600 values, but", "599 columns"]),
        (make_bad_archive(data=replace_array(100, np.nan)), ["is nan; rows must be finite numbers"]),
        (make_bad_archive(data=lambda a: a.astype(complex)), ["complex numbers"]),
        (make_bad_archive(data=lambda a: a.astype("f2")), ["convert the values to float32"]),
        (make_bad_archive(data=lambda a: a.astype(object)), ["Python objects"]),
        (make_bad_archive(shape=np.array([200])), ["two numbers are needed"]),
        (make_bad_archive(shape=np.array([200, 0])), ["has shape (200, 0), which is empty"]),
        (make_bad_archive(format=np.array(b"csc")), ["format 'csc'", "tocsr()"]),
        (make_bad_archive(y=np.zeros(7)), ["holds 200 rows, but", "7 labels"]),
        (make_bad_archive(y=np.zeros((200, 2, 2))), ["labels must be one per row, shape (n,), or targets"]),
        ({"x": np.zeros((3, 3))}, ["has no arrays indptr and indices", "scalelatent data import npz"]),
        (make_arrays("A_") | make_arrays("B_"), ["several sets of CSR arrays", "'A', 'B'", "--csr-prefix"]),
        (
            {k: v for k, v in make_arrays("X_", X_tf=X.data).items() if k != "X_data"},
            ["--values name one of tf"],
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    assert_refused(tmp_path, tmp_path / "x.npz", *parts)


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "x.npz", make_arrays())
    assert_refused(tmp_path, path, "has no arrays Z_indptr and Z_indices", "under 'X'", csr_prefix="Z")
    assert_refused(tmp_path, path, "no array 'X_tf' of values", values="tf")
    assert_refused(tmp_path, path, "has no array 'labels'", y="labels")
    assert_refused(tmp_path, tmp_path / "none.npz", "does not exist")


@pytest.mark.parametrize("packed", [True, False])
def test_truncated_and_damaged_archives_are_refused(packed: bool, tmp_path: Path) -> None:
    whole = write_npz(tmp_path / "x.npz", make_arrays(""), packed).read_bytes()
    short = tmp_path / "short.npz"
    for keep in (0, 100, len(whole) // 2, len(whole) - 10):
        short.write_bytes(whole[:keep])
        assert_refused(tmp_path, short, "is not an npz archive, or is truncated")
    short.write_text("no archive at all")
    assert_refused(tmp_path, short, "is not an npz archive")
    with zipfile.ZipFile(tmp_path / "x.npz") as archive:
        places = {i.filename: i.header_offset for i in archive.infolist()}
    for name in ("data", "indices", "indptr"):
        raw = bytearray(whole)
        at = places[f"{name}.npy"] + 400
        raw[at : at + 8] = bytes(b ^ 255 for b in raw[at : at + 8])
        short.write_bytes(raw)
        assert_refused(tmp_path, short, "short.npz")


def test_the_command_imports_csr_rows(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "x.npz", make_arrays(X_tf=X.data, y=np.arange(200) % 2))
    args = ["data", "import", "csr", str(path), str(tmp_path / "ds"), "--csr-prefix", "X", "--values", "tf"]
    done = CliRunner().invoke(app, [*args, "--json"])
    found = json.loads(done.stdout)
    assert (found["nnz"], found["classes"], found["rows"]) == (X.nnz, [0, 1], 200)
    again = CliRunner().invoke(app, args)
    assert again.exit_code == 2
    assert "exists" in again.stderr


@pytest.mark.realdata
def test_rows_of_rcv1_are_those_of_the_archive(data_root: Path, tmp_path: Path) -> None:
    path = data_root / "rcv1" / "rcv1v2_subset27613.npz"
    ds = import_csr(path, tmp_path / "ds", values="tf")
    assert (ds.n_rows, ds.n_features, ds.nnz) == (27613, 47236, 2144845)
    assert (ds.y_kind, ds.n_targets, ds.dtype) == ("multilabel", 101, np.uint16)
    with np.load(path) as whole:
        np.testing.assert_array_equal(ds.read_x(20000, 27613).data, whole["X_tf"][whole["X_indptr"][20000] :])
        first = whole["Y_indices"][: whole["Y_indptr"][1]]
    np.testing.assert_array_equal(ds.read_y(0, 1).indices, np.sort(first))
