"""AnnData files in HDF5 and zarr are read as anndata wrote them, and every kind of bad file is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.sparse as sp
import zarr

from scalelatent import data
from scalelatent.data import import_h5ad
from scalelatent.errors import DataError

N, P = 83, 11
FORMS = ["h5ad", "zarr"]


def _matrix() -> sp.csr_matrix:
    """Return CSR rows, some of which are empty, including the first and the last one."""
    matrix = sp.random(N, P, 0.3, "lil", np.float32, np.random.default_rng(0))
    matrix[[0, 5, 6, N - 1]] = 0
    return matrix.tocsr()


ROWS = _matrix()
DENSE = ROWS.toarray()
KINDS = np.array(["T", "B", "NK"])[np.arange(N) % 3]


def _obs() -> dict[str, Any]:
    pd = pytest.importorskip("pandas")
    return {
        "kind": pd.Categorical(KINDS, categories=["unused", "T", "NK", "B"]),
        "cluster": pd.Categorical(np.arange(N) % 4 + 10),
        "text": [f"{name} {i % 5}" for i, name in enumerate(KINDS)],
        "number": np.arange(N) % 4,
        "flag": np.arange(N) % 2 == 0,
        "whole": pd.array(np.arange(N) % 3, dtype="Int64"),
    }


def _write(path: Path, x: Any = ROWS, obs: dict[str, Any] | None = None, **layers: Any) -> Path:
    anndata, pd = pytest.importorskip("anndata"), pytest.importorskip("pandas")
    table = pd.DataFrame(_obs() if obs is None else obs, index=[f"cell {i}" for i in range(N)])
    names = pd.DataFrame(index=[f"gene {i}" for i in range(P)])
    adata = anndata.AnnData(x, table, names, layers=layers)
    (adata.write_h5ad if path.suffix == ".h5ad" else adata.write_zarr)(path)
    return path


def _by_hand(path: Path, **parts: Any) -> Path:
    """Write a file of CSR rows as anndata would write it, or with invalid parts."""
    with h5py.File(path, "w") as file:
        arrays = {"data": ROWS.data, "indices": ROWS.indices, "indptr": ROWS.indptr} | parts
        for name, values in arrays.items():
            file[f"X/{name}"] = values
        file["X"].attrs.update({"encoding-type": "csr_matrix", "shape": (N, P)})
        file["obs/number"], file["var/_index"] = np.arange(N) % 4, [f"gene {i}" for i in range(P)]
        file["var"].attrs["_index"] = "_index"
    return path


def _dense(ds: data.Dataset) -> np.ndarray:
    rows = ds.read_x(0, len(ds))
    return rows if isinstance(rows, np.ndarray) else rows.toarray()


def _refused(path: Path, message: str, **how: Any) -> None:
    out = path.parent / "out"
    with pytest.raises(DataError, match=message) as error:
        import_h5ad(path, out, **how)
    assert str(path) in str(error.value)
    assert not out.exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shard_rows", [None, 1, 7, N])
def test_rows_and_layers_are_read_back(tmp_path: Path, form: str, shard_rows: int | None) -> None:
    path = _write(tmp_path / f"a.{form}", dense=DENSE * 2, counts=(ROWS * 3).astype("i4"))
    how = {} if shard_rows is None else {"shard_rows": shard_rows}
    for layer, factor, sparse in ((None, 1, True), ("dense", 2, False), ("counts", 3, True)):
        ds = import_h5ad(path, tmp_path / "ds", layer=layer, overwrite=True, **how)
        assert ds.is_sparse == sparse
        np.testing.assert_array_equal(_dense(ds), (DENSE * factor).astype(ds.dtype))
        assert ds.nnz == (ROWS.nnz if sparse else None)
    provenance = ds.attrs["provenance"]
    assert (provenance["importer"], provenance["source"], provenance["layer"]) == (
        "h5ad",
        [path.name],
        "counts",
    )
    assert ds.feature_names is not None
    assert ds.feature_names.tolist() == [f"gene {i}" for i in range(P)]
    assert "gene" not in json.dumps(ds.attrs)  # every worker reads the attributes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("label", ["kind", "cluster", "text", "number", "flag", "whole"])
def test_every_kind_of_label_is_read(tmp_path: Path, form: str, label: str) -> None:
    """Categories without rows do not become classes."""
    ds = import_h5ad(_write(tmp_path / f"a.{form}"), tmp_path / "ds", label=label, shard_rows=20)
    expected = np.asarray(_obs()[label])
    np.testing.assert_array_equal(ds.read_y(0, N), expected)
    np.testing.assert_array_equal(ds.classes, np.unique(expected))


@pytest.mark.parametrize("form", FORMS)
def test_the_error_names_rows_without_a_label(tmp_path: Path, form: str) -> None:
    import pandas as pd

    missing = np.arange(N) == 70
    obs = {
        "kind": pd.Categorical(np.where(missing, None, KINDS)),
        "whole": pd.arrays.IntegerArray(np.arange(N), missing),
        "float": np.where(missing, np.nan, 1.0),
    }
    path = _write(tmp_path / f"a.{form}", obs=obs)
    for label in obs:
        _refused(path, rf"row 70 has no value in the column '{label}' of obs.*notna", label=label)
    assert len(import_h5ad(path, tmp_path / "ds")) == N


@pytest.mark.parametrize("form", FORMS)
def test_the_error_names_missing_layers_and_columns(tmp_path: Path, form: str) -> None:
    path = _write(tmp_path / f"a.{form}", counts=ROWS)
    _refused(path, r"no layer 'x'; its layers are 'counts': .*--layer NAME", layer="x")
    for label in ("x", "kind/codes"):
        _refused(path, r"no column '.*' in obs; it has .*'kind', 'number', .*--label COLUMN", label=label)
    (tmp_path / "b").mkdir()
    _refused(_write(tmp_path / f"b/b.{form}", None, counts=ROWS), "no X; its layers are 'counts'")


@pytest.mark.parametrize("form", FORMS)
def test_rows_stored_by_columns_are_refused_with_the_remedy(tmp_path: Path, form: str) -> None:
    path = _write(tmp_path / f"a.{form}", ROWS.tocsc(), other=ROWS.tocsc())
    _refused(path, r"X is a sparse matrix stored by columns.*adata.X = adata.X.tocsr\(\)")
    _refused(path, r"adata.layers\['other'\] = adata.layers\['other'\].tocsr\(\)", layer="other")


@pytest.mark.parametrize("form", FORMS)
def test_the_error_names_infinite_values(tmp_path: Path, form: str) -> None:
    bad = ROWS.copy()
    bad.data[-1] = np.nan
    row, column = N - 1 - int(np.argmax(np.diff(ROWS.indptr)[::-1] > 0)), int(ROWS.indices[-1])
    for x in (bad, bad.toarray()):
        folder = tmp_path / str(sp.issparse(x))
        folder.mkdir()
        _refused(_write(folder / f"a.{form}", x), rf"row {row}\b.*{column}\b.* is nan")


def test_the_package_anndata_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has row pointers of 64 bits, unsigned columns in any order, and duplicate entries."""
    monkeypatch.setitem(sys.modules, "anndata", None)
    order = np.concatenate(
        [np.arange(a, b)[::-1] for a, b in zip(ROWS.indptr, ROWS.indptr[1:], strict=False)]
    )
    twice = np.repeat(order, 2)
    parts = {
        "data": ROWS.data[twice] / 2,
        "indices": ROWS.indices[twice].astype("u2"),
        "indptr": ROWS.indptr.astype("i8") * 2,
    }
    ds = import_h5ad(_by_hand(tmp_path / "a.h5ad", **parts), tmp_path / "ds", label="number", shard_rows=10)
    np.testing.assert_array_equal(_dense(ds), DENSE)
    np.testing.assert_array_equal(ds.read_y(0, N), np.arange(N) % 4)
    assert ds.attrs["provenance"]["entries_added"] == ROWS.nnz
    assert ds.attrs["provenance"]["rows_sorted"] == np.sum(np.diff(ROWS.indptr) > 1)


def test_shuffled_rows_keep_their_labels(tmp_path: Path) -> None:
    path = _by_hand(tmp_path / "a.h5ad")
    plain = import_h5ad(path, tmp_path / "plain", label="number")
    ds = import_h5ad(path, tmp_path / "ds", label="number", shuffle=3)
    assert ds.fingerprint() == data.shuffle_dataset(plain, tmp_path / "other", seed=3).fingerprint()


def test_row_groups_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups are small if a few rows have nearly all entries."""
    monkeypatch.setattr("scalelatent.importers.csr_archive.GROUP_BYTES", 100)
    ds = import_h5ad(_by_hand(tmp_path / "a.h5ad"), tmp_path / "ds")
    assert max(int(ROWS.indptr[b] - ROWS.indptr[a]) for a, b in ds.pieces()) * 8 <= 400
    np.testing.assert_array_equal(_dense(ds), DENSE)


def _falling() -> np.ndarray:
    pointers = ROWS.indptr.copy()
    pointers[20] = pointers[22]
    pointers[21] = pointers[20] - 1
    return pointers


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"indptr": _falling()}, r"row 20 goes from entry .* the array indptr is damaged"),
        ({"indptr": ROWS.indptr[:-1]}, r"has shape \(83, 11\), but .* do not belong together"),
        ({"indptr": np.minimum(ROWS.indptr, 9)}, r"indptr goes from 0 to 9, but there are \d+ entries"),
        ({"indptr": ROWS.indptr + 1}, r"row \d+ goes from entry"),
        ({"indices": ROWS.indices[:-1]}, r"do not belong together"),
        ({"indices": ROWS.indices + P}, r"has an entry in column \d+, but columns are 0 to 10"),
        ({"data": ROWS.data.astype("f2")}, r"float16.*convert the values"),
        ({"data": ROWS.data.astype("S")}, r"X"),
    ],
)
def test_damaged_rows_are_refused(tmp_path: Path, parts: dict[str, Any], message: str) -> None:
    _refused(_by_hand(tmp_path / "a.h5ad", **parts), message)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5ad"
    with h5py.File(path, "w") as file:
        file["X"] = DENSE
    _refused(path, r"is not an AnnData file.*it holds 'X'.*data import hdf5")
    path.write_bytes(b"no such thing")
    _refused(path, "is no HDF5 file")
    _refused(tmp_path / "none.h5ad", "does not exist")
    zarr.save_group(tmp_path / "a.zarr", x=DENSE)
    _refused(tmp_path / "a.zarr", r"is not an AnnData file.*'x'.*data import zarr")
    (tmp_path / "folder").mkdir()
    _refused(tmp_path / "folder", "zarr cannot open it")
    with h5py.File(path, "w") as file:
        file["X"], file["obs"], file["var"] = DENSE, [b"a"], [b"b"]
    _refused(path, r"before version 0.7; read it with anndata and write it again")
    with h5py.File(_by_hand(path), "r+") as file:
        del file["X"].attrs["encoding-type"]
    _refused(path, r"a group without an encoding-type")


def test_numbers_of_other_files_are_not_read(tmp_path: Path) -> None:
    _by_hand(tmp_path / "other.h5ad")
    path = _by_hand(tmp_path / "a.h5ad")
    for name in ("X/data", "X", "obs/number"):
        with h5py.File(_by_hand(path), "r+") as file:
            del file[name]
            file[name] = h5py.ExternalLink(tmp_path / "other.h5ad", name)
        _refused(path, "takes its numbers from other files", label="number")


def test_columns_of_old_versions_and_unusual_types_are_read(tmp_path: Path) -> None:
    path = _by_hand(tmp_path / "a.h5ad")
    with h5py.File(path, "r+") as file:
        file["obs/kind"] = (np.arange(N) % 3).astype("i1")
        file["obs/__categories/kind"] = ["T", "B", "NK"]
        file["obs/late"] = file["obs/kind"][()] + 1
        file["obs/__categories/late"] = ["T", "B", "NK"]
        file["obs/pair/values"] = np.arange(N)
        file["obs/pair"].attrs["encoding-type"] = "awkward-array"
        file["obs/short"] = np.arange(5)
        file["obs/wide"], file["obs/complex"] = np.ones((N, 2)), np.ones(N, "c8")
        file["obs/new/codes"] = (np.arange(N) % 3).astype("i1")
        file["obs/new/categories/values"] = ["T", "B", "NK"]
        file["obs/new/categories/mask"] = np.zeros(3, bool)
        file["obs/new"].attrs["encoding-type"] = "categorical"
    for label in ("kind", "new"):
        ds = import_h5ad(path, tmp_path / "ds", label=label, overwrite=True)
        np.testing.assert_array_equal(ds.read_y(0, N), KINDS)
    _refused(path, r"shape \(83, 2\) and dtype float64, and labels are .* one for every row", label="wide")
    _refused(path, r"dtype complex64, and labels are", label="complex")
    _refused(path, r"row 2 has the code 3, but there are 3 categories", label="late")
    _refused(path, r"stored as awkward-array, and labels are categories, strings or numbers", label="pair")
    _refused(path, r"83 rows, but .* holds 5 labels", label="short")
    with h5py.File(path, "r+") as file:
        del file["var/_index"]
        file["var/_index"] = ["one"]
    _refused(path, "1 variables in var, but .* has 11 columns")


def test_an_empty_x_counts_as_missing(tmp_path: Path) -> None:
    with h5py.File(_by_hand(tmp_path / "a.h5ad"), "r+") as file:
        file.move("X", "layers/counts")
        file["X"] = h5py.Empty("f4")
    _refused(tmp_path / "a.h5ad", "no X; its layers are 'counts'")
    assert import_h5ad(tmp_path / "a.h5ad", tmp_path / "ds", layer="counts").nnz == ROWS.nnz
