"""Previews of a dataset: repr and notebooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from scalelatent.data import Dataset, append_rows, open_dataset
from scalelatent.data.read.sources import WrappedRows
from scalelatent.data.write.convert import convert_dataset

X = np.arange(60, dtype="f4").reshape(20, 3)
Y = np.array(["a", "b<", "a", "c"] * 5)


class UnreadableRows(WrappedRows):
    """A source of rows that must not be read."""

    def read(self, start: int, stop: int) -> Any:
        raise AssertionError("read was called")

    def count_entries(self, start: int, stop: int) -> int:
        raise AssertionError("entries was called")

    @property
    def nnz(self) -> int:
        return self._source.nnz


def make_datasets(folder: Path) -> dict[str, Dataset]:
    dense, sparse = Dataset.from_arrays(X, Y), Dataset.from_arrays(csr_array(X), csr_array(X > 30))
    grown = dense.save(folder / "grown")
    append_rows(folder / "grown", dense)
    return {
        "memory": Dataset.from_arrays(X, Y),
        "stored": dense.save(folder / "a"),
        "slice": open_dataset(folder / "a")[2:9],
        "csr": sparse.save(folder / "b"),
        "csr slice": open_dataset(folder / "b")[2:9],
        "csr memory": sparse,
        "joined": open_dataset(str(grown.url)),
        "weighted": Dataset.from_arrays(X, X, sample_weight=np.ones(20)).save(folder / "w"),
        "packed": convert_dataset(folder / "b", folder / "c", sparse=False),
        "target": dense.with_target(dense),
    }


EXPECTED = {
    "memory": "<Dataset 20 rows x (3,) float32, labels>",
    "stored": "<Dataset 20 rows x (3,) float32, 3 classes, '{}/a'>",
    "slice": "<Dataset 7 rows x (3,) float32, 3 classes, rows 2:9 of '{}/a'>",
    "csr": "<Dataset 20 CSR rows x (3,) float32, 3 topics (multi-label), '{}/b'>",
    "csr slice": "<Dataset 7 CSR rows x (3,) float32, 3 topics (multi-label), rows 2:9 of '{}/b'>",
    "csr memory": "<Dataset 20 CSR rows x (3,) float32, 3 topics (multi-label)>",
    "joined": "<Dataset 40 rows x (3,) float32, 3 classes, '{}/grown'>",
    "weighted": "<Dataset 20 rows x (3,) float32, 3 targets, weighted, '{}/w'>",
    "packed": "<Dataset 20 rows x (3,) float32, 3 topics (multi-label), '{}/c'>",
    "target": "<Dataset 20 rows x (3,) float32, 3 targets>",
}


def test_the_repr_of_a_dataset_reads_no_rows(tmp_path: Path) -> None:
    found = make_datasets(tmp_path)
    for ds in found.values():
        ds._columns.x = UnreadableRows(ds._columns.x)
        if ds._columns.y is not None:
            ds._columns.y = UnreadableRows(ds._columns.y)
    assert {name: repr(ds).replace(str(tmp_path), "{}") for name, ds in found.items()} == EXPECTED
    for ds in found.values():
        page = ds._repr_html_()
        assert page.startswith("<table>")
        assert len(page) < 2000
    page = found["slice"]._repr_html_()
    for text in ("7 (2:9)", "float32", "a, b&lt;, c", str(tmp_path / "a")):
        assert text in page
    assert "59 (98.3 %)" in found["csr"]._repr_html_()


def test_the_repr_of_reshaped_rows_reads_no_rows(tmp_path: Path) -> None:
    from scalelatent.data.columns import Columns
    from scalelatent.data.read.sources import ArrayRows, CsrSource
    from scalelatent.data.write.convert import DenseRows, SparseRows

    sparse = Dataset(Columns(SparseRows(UnreadableRows(ArrayRows(X)))))
    dense = Dataset(Columns(DenseRows(UnreadableRows(CsrSource(csr_array(X))))))
    assert (repr(sparse), repr(dense)) == (
        "<Dataset 20 CSR rows x (3,) float32>",
        "<Dataset 20 rows x (3,) float32>",
    )
    assert "entries" not in sparse._repr_html_()
    assert "240 B in memory" in dense._repr_html_()
