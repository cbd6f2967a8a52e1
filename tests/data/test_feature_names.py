"""Datasets take the names of their features from their source, and keep them on disk and in each copy."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from scalelatent.data import (
    Dataset,
    append_rows,
    convert_dataset,
    create_dataset,
    open_dataset,
    shuffle_dataset,
)
from scalelatent.data.read.selected import select_rows
from scalelatent.errors import DataError

NAMES = ["w", "h", "größe", "d"]
ROWS = np.arange(40.0).reshape(10, 4)
LABELS = np.arange(10) % 2
FRAME = pd.DataFrame(ROWS, columns=NAMES).assign(kind=LABELS)


def named_dataset(rows: np.ndarray = ROWS) -> Dataset:
    return Dataset.from_arrays(rows, LABELS, feature_names=NAMES)


def read_names(ds: Dataset) -> list[str] | None:
    return None if ds.feature_names is None else ds.feature_names.tolist()


def make_polars_frame(lazy: bool) -> Any:
    frame = pytest.importorskip("polars").from_pandas(FRAME)
    return frame.lazy() if lazy else frame


def make_anndata() -> Dataset:
    adata = pytest.importorskip("anndata").AnnData(ROWS.copy())
    adata.var_names = NAMES
    return Dataset.from_arrays(adata.X, feature_names=adata.var_names)


SOURCES: dict[str, Callable[[], Dataset]] = {
    "pandas": lambda: Dataset.from_dataframe(FRAME, label="kind"),
    "polars": lambda: Dataset.from_dataframe(make_polars_frame(False), label="kind"),
    "polars lazy": lambda: Dataset.from_dataframe(make_polars_frame(True), label="kind"),
    "chosen columns": lambda: Dataset.from_dataframe(FRAME, features=NAMES, weight="kind"),
    "a frame as an array": lambda: Dataset.from_arrays(FRAME[NAMES]),
    "a polars frame as an array": lambda: Dataset.from_arrays(make_polars_frame(True).select(NAMES)),
    "AnnData": make_anndata,
    "an array": named_dataset,
}


@pytest.mark.parametrize("source", SOURCES)
def test_sources_with_names(source: str, tmp_path: Path) -> None:
    ds = SOURCES[source]()
    assert read_names(ds) == NAMES
    stored = ds.save(tmp_path / "d")
    assert read_names(stored) == read_names(stored[3:]) == NAMES
    np.testing.assert_array_equal(stored.read_x(0, 10), ROWS)


@pytest.mark.parametrize(
    "rows",
    [ROWS, FRAME[NAMES].set_axis([0, 1, 2, 3], axis=1), pd.DataFrame({"pixels": list(ROWS)})],
    ids=["an array", "a frame with numbers as names", "a column of lists"],
)
def test_sources_without_names(rows: Any, tmp_path: Path) -> None:
    is_list = isinstance(rows, pd.DataFrame) and rows.shape[1] == 1
    pa = pytest.importorskip("pyarrow")
    flat = pa.FixedSizeListArray.from_arrays(pa.array(ROWS.ravel()), 4)
    ds = Dataset.from_dataframe(pa.table({"pixels": flat})) if is_list else Dataset.from_arrays(rows)
    assert ds.feature_names is None
    stored = ds.save(tmp_path / "d")
    assert stored.feature_names is None
    assert not (tmp_path / "d" / "feature_names").exists()
    assert stored.attrs["columns"] == ["x"]


COPIES: dict[str, Callable[[Dataset, Path], Dataset]] = {
    "save": lambda ds, out: ds.save(out),
    "slice": lambda ds, out: ds[2:7],
    "without labels": lambda ds, out: ds.without_labels().save(out),
    "weights": lambda ds, out: ds.with_weight(np.ones(10)).save(out),
    "target": lambda ds, out: ds.with_target(Dataset.from_arrays(np.eye(10))).save(out),
    "selected": lambda ds, out: select_rows(ds, [1, 5]),
    "selected, target": lambda ds, out: select_rows(ds.with_target(Dataset.from_arrays(np.eye(10))), [1, 5]),
    "dtype": lambda ds, out: convert_dataset(ds, out, dtype="f4"),
    "range": lambda ds, out: convert_dataset(ds, out, rows=(1, 4)),
    "sparse": lambda ds, out: convert_dataset(ds, out, sparse=True),
    "dense": lambda ds, out: convert_dataset(
        convert_dataset(ds, f"{out}-csr", sparse=True), out, sparse=False
    ),
    "shuffled": lambda ds, out: shuffle_dataset(ds, out, seed=0),
    "appended": lambda ds, out: append_rows(ds.save(out).url or "", ds[:3]),
    "pickle": lambda ds, out: pickle.loads(pickle.dumps(ds)),
}


@pytest.mark.parametrize("stored", [False, True], ids=["memory", "stored"])
@pytest.mark.parametrize("copy", COPIES)
def test_copies_keep_the_names(copy: str, stored: bool, tmp_path: Path) -> None:
    ds = named_dataset().save(tmp_path / "d") if stored else named_dataset()
    found = COPIES[copy](ds, tmp_path / "out")
    assert read_names(found) == NAMES
    if found.url is not None:
        assert read_names(open_dataset(found.url)) == NAMES


def test_images_have_no_names(tmp_path: Path) -> None:
    ds = named_dataset()
    assert convert_dataset(ds, tmp_path / "a", crop=0, resize=(1, 1)).feature_names is None
    with pytest.raises(DataError, match=r"3 feature names for rows of shape \(4,\)"):
        Dataset.from_arrays(ROWS, feature_names=NAMES[:3])
    with pytest.raises(DataError, match=r"4 feature names for rows of shape \(2, 2\)"):
        create_dataset(tmp_path / "b", 10, (2, 2), "f4", feature_names=NAMES)
    assert not (tmp_path / "b").exists()


def test_a_writer_takes_names(tmp_path: Path) -> None:
    writer = create_dataset(tmp_path / "d", 10, (4,), "f8", feature_names=NAMES)
    for i in range(writer.n_shards):
        writer.write_shard(i, ROWS[slice(*writer.shard_bounds(i))])
    assert read_names(writer.finalize()) == NAMES


def test_appended_rows_have_the_same_names(tmp_path: Path) -> None:
    ds = named_dataset().save(tmp_path / "d")
    other = Dataset.from_arrays(ROWS, LABELS, feature_names=["w", "d", "größe", "h"])
    with pytest.raises(DataError, match=r"feature 1 is 'd' instead of 'h'. Nothing was appended"):
        append_rows(ds.url or "", other)
    assert len(open_dataset(ds.url or "")) == 10
    assert len(append_rows(ds.url or "", Dataset.from_arrays(ROWS, LABELS))) == 20
    assert not list(Path(ds.url or "").glob("append-*/feature_names"))


def test_workers_do_not_read_names(tmp_path: Path) -> None:
    """Feature names are in their own array, which is not read to open a dataset or to read its rows."""
    names = [f"ENSG{i:011d}" for i in range(30_000)]
    url = Dataset.from_arrays(np.zeros((3, 30_000), "u1"), feature_names=names).save(tmp_path / "d").url or ""
    assert (tmp_path / "d" / "zarr.json").stat().st_size < 10_000
    assert read_names(open_dataset(url)) == names
    shutil.rmtree(tmp_path / "d" / "feature_names")
    ds = open_dataset(url)
    assert not ds.read_x(0, 3).any()
    with pytest.raises(DataError, match=r"names of its features, .*d/feature_names, are missing or damaged"):
        assert ds.feature_names is None


def test_names_do_not_change_the_fingerprint(tmp_path: Path) -> None:
    bare = Dataset.from_arrays(ROWS, LABELS)
    assert named_dataset().fingerprint() == bare.fingerprint()
    assert named_dataset().save(tmp_path / "a").fingerprint() == bare.save(tmp_path / "b").fingerprint()


def test_names_do_not_stop_xarray_from_reading_the_rows(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    ds = named_dataset().save(tmp_path / "d")
    plain = xarray.open_zarr(ds.url, consolidated=False)
    np.testing.assert_array_equal(plain.x, ROWS)
