"""Matrices of AnnData objects, in memory or in a file that is read lazily, are rows of datasets and fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from scalelatent import CapsuleRegression, Dataset, MultilayerBootstrapNetwork
from scalelatent.data.read.sources import BackedCsr
from scalelatent.errors import DataError

anndata = pytest.importorskip("anndata")
pd = pytest.importorskip("pandas")

N = 90
ROWS = sp.random(N, 7, 0.4, "csr", np.float32, np.random.default_rng(0))
ROWS.data = np.round(ROWS.data * 8)
KINDS = np.array(["T", "B", "NK"])[np.arange(N) % 3]


def make_anndata(x: Any = ROWS, **layers: Any) -> Any:
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical(KINDS, categories=["unused", "T", "NK", "B"]),
            "number": np.arange(N) % 3,
            "some": pd.Categorical(np.where(np.arange(N) == 4, None, KINDS)),
        },
        index=[f"cell {i}" for i in range(N)],
    )
    return anndata.AnnData(x, obs, layers=layers)


def open_backed(path: Path, x: Any = ROWS) -> Any:
    make_anndata(x).write_h5ad(path)
    return anndata.read_h5ad(path, backed="r")


def write_zarr(path: Path) -> Any:
    import zarr

    make_anndata().write_zarr(path)
    return anndata.io.sparse_dataset(zarr.open_group(path, mode="r")["X"])


def _dataset(adata: Any, label: str) -> Dataset:
    return Dataset.from_arrays(adata.X, adata.obs[label], feature_names=adata.var_names)


def make_model() -> Any:
    return CapsuleRegression(capsule_dim=2, max_iter=2, random_state=0, n_jobs=1)


def test_objects_in_memory_and_backed_objects_give_the_same_dataset(tmp_path: Path) -> None:
    memory = _dataset(make_anndata(), "kind")
    lazy = _dataset(open_backed(tmp_path / "a.h5ad"), "kind")
    for ds in (memory, lazy):
        assert ds.is_sparse
        np.testing.assert_array_equal(ds.read_y(0, N), KINDS)
        np.testing.assert_array_equal(ds.classes, ["B", "NK", "T"])
        assert (ds.nnz, ds[4:9].nnz) == (ROWS.nnz, ROWS[4:9].nnz)
    assert memory.fingerprint() == lazy.fingerprint() == Dataset.from_arrays(ROWS, KINDS).fingerprint()
    saved = lazy.save(tmp_path / "ds")
    assert saved.fingerprint() == memory.save(tmp_path / "other").fingerprint()
    assert saved.feature_names is not None
    assert saved.feature_names.tolist() == make_anndata().var_names.tolist()
    for a, b in ((0, N), (17, 41), (40, 40), (N - 1, N)):
        np.testing.assert_array_equal(lazy.read_x(a, b).toarray(), ROWS[a:b].toarray())


def test_backed_rows_are_read_lazily(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    original = BackedCsr.read

    def note(self: BackedCsr, start: int, stop: int) -> Any:
        read.append((start, stop))
        return original(self, start, stop)

    monkeypatch.setattr(BackedCsr, "read", note)
    ds = _dataset(open_backed(tmp_path / "a.h5ad"), "number")
    assert not read
    ds[10:30].read_x(5, 9)
    assert read == [(15, 19)]


def test_layers_and_dense_matrices_are_read(tmp_path: Path) -> None:
    dense = ROWS.toarray()
    adata = make_anndata(dense, counts=ROWS * 2, columns=ROWS.tocsc())
    np.testing.assert_array_equal(Dataset.from_arrays(adata.X).read_x(0, N), dense)
    np.testing.assert_array_equal(
        Dataset.from_arrays(adata.layers["counts"]).read_x(0, N).toarray(), 2 * dense
    )
    np.testing.assert_array_equal(Dataset.from_arrays(adata.layers["columns"]).read_x(0, N).toarray(), dense)
    lazy = _dataset(open_backed(tmp_path / "a.h5ad", dense), "number")
    np.testing.assert_array_equal(lazy.read_x(3, 50), dense[3:50])
    view = adata[10:20]
    np.testing.assert_array_equal(_dataset(view, "kind").read_y(0, 10), KINDS[10:20])


@pytest.mark.parametrize("form", ["sparse", "dense", "zarr"])
def test_fits_on_backed_rows_have_the_same_bits(tmp_path: Path, form: str) -> None:
    dense = ROWS.toarray()
    labels = np.arange(N) % 3
    if form == "zarr":
        rows = write_zarr(tmp_path / "a.zarr")
    else:
        rows = open_backed(tmp_path / "a.h5ad", ROWS if form == "sparse" else dense).X
    expected = make_model().fit(dense, labels)
    fitted = make_model().fit(rows, labels)
    np.testing.assert_array_equal(fitted.W_, expected.W_)
    np.testing.assert_array_equal(fitted.predict(rows), expected.predict(dense))
    named = make_model().fit(rows, make_anndata().obs["kind"])
    assert named.score(rows, make_anndata().obs["kind"]) == make_model().fit(dense, KINDS).score(dense, KINDS)


def test_refusals_name_the_next_step(tmp_path: Path) -> None:
    adata = make_anndata(counts=ROWS)
    labels = np.arange(N) % 3
    for use in (
        lambda: make_model().fit(adata, labels),
        lambda: make_model().fit(ROWS, labels).predict(adata),
        lambda: MultilayerBootstrapNetwork(decay=0.5, n_clusterings=2, k1=3).fit(adata),
        lambda: Dataset.from_arrays(adata),
    ):
        with pytest.raises(DataError, match=r"AnnData object.*from_arrays\(adata\.X, adata\.obs\["):
            use()
    columns = open_backed(tmp_path / "a.h5ad", ROWS.tocsc())
    for use in (
        lambda: make_model().fit(columns.X, labels),
        lambda: Dataset.from_arrays(columns.X),
    ):
        with pytest.raises(DataError, match=r"stored by columns \(CSC\).*adata.X.tocsr\(\)"):
            use()
    with pytest.raises(DataError, match="label of row 4 is missing.*drop such rows"):
        _dataset(adata, "some")


def test_the_error_names_infinite_values_of_backed_rows(tmp_path: Path) -> None:
    bad = ROWS.copy()
    bad.data[0] = np.inf
    row = int(np.argmax(np.diff(ROWS.indptr) > 0))
    with pytest.raises(DataError, match=rf"row {row}, feature {ROWS.indices[0]} is inf"):
        make_model().fit(open_backed(tmp_path / "a.h5ad", bad).X, np.arange(N) % 3)
