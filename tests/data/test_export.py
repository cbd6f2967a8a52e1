"""Datasets become Dask arrays, and xarray opens stored datasets."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from scalelatent.data import Dataset, open_dataset
from scalelatent.errors import DataError

ROWS = np.random.default_rng(0).integers(0, 256, (500, 4, 3)).astype("u1")
NAMES = np.array(["a", "b", "c"])[np.arange(500) % 3]
WEIGHTS = np.arange(500) / 7


@pytest.fixture
def stored(tmp_path: Path) -> Dataset:
    ds = Dataset.from_arrays(ROWS, NAMES, sample_weight=WEIGHTS)
    return ds.save(tmp_path / "ds", chunk_rows=64, shard_rows=128)


def test_stored_rows_become_dask_arrays(stored: Dataset) -> None:
    x, y, weight = stored[10:450].to_dask()
    assert y is not None
    assert weight is not None
    assert x.chunks[0][:2] == (54, 64)
    x, y, weight = pickle.loads(pickle.dumps((x, y, weight)))
    assert len(pickle.dumps(x)) < 10_000
    np.testing.assert_array_equal(x.compute(), ROWS[10:450])
    np.testing.assert_array_equal(x[5:300, 1:, 2].compute(), ROWS[15:310, 1:, 2])
    assert y.compute().tolist() == NAMES[10:450].tolist()
    np.testing.assert_array_equal(weight.compute(), WEIGHTS[10:450])


def test_rows_in_memory_become_dask_arrays() -> None:
    targets = np.eye(3)[np.arange(500) % 3]
    x, y, weight = Dataset.from_arrays(ROWS, targets).to_dask()
    assert y is not None
    assert weight is None
    np.testing.assert_array_equal(x.compute(), ROWS)
    np.testing.assert_array_equal(y.compute(), targets)
    again, _, _ = Dataset.from_arrays(x)[7:].to_dask()
    np.testing.assert_array_equal(again.compute(), ROWS[7:])


def test_sparse_rows_do_not_become_dask_arrays() -> None:
    from scipy.sparse import csr_array

    with pytest.raises(DataError, match=r"has CSR columns, .*data convert --dense"):
        Dataset.from_arrays(csr_array(np.eye(4))).to_dask()


def test_xarray_opens_stored_rows_with_named_dimensions(stored: Dataset) -> None:
    xr = pytest.importorskip("xarray")
    opened = xr.open_zarr(stored.url, consolidated=False)
    assert opened.x.dims == ("row", "feature_0", "feature_1")
    np.testing.assert_array_equal(opened.x.values, ROWS)
    np.testing.assert_array_equal(opened.weight.values, WEIGHTS)
    # A dataset can be made from the DataArray, and reads its rows lazily.
    np.testing.assert_array_equal(Dataset.from_arrays(opened.x).read_x(3, 9), ROWS[3:9].reshape(6, -1))


def test_a_dataset_whose_tables_have_no_dimension_names_opens(stored: Dataset) -> None:
    """Earlier releases wrote the tables of digests and checksums without names of their dimensions."""
    import json

    for table in ("digest", "crc"):
        meta = Path(stored.url or "") / table / "zarr.json"
        reported = json.loads(meta.read_text())
        assert reported.pop("dimension_names")
        meta.write_text(json.dumps(reported))
    again = open_dataset(stored.url or "")
    assert again.fingerprint() == stored.fingerprint()
    np.testing.assert_array_equal(again.read_x(0, 500), ROWS.reshape(500, -1))
