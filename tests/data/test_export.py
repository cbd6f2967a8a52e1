"""Datasets as arrays of other libraries: Dask, xarray, torch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

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


def test_xarray_names_the_dimensions(stored: Dataset) -> None:
    xr = pytest.importorskip("xarray")
    found = stored.to_xarray()
    assert found.x.dims == ("row", "feature_0", "feature_1")
    np.testing.assert_array_equal(found.x.values, ROWS)
    assert found.y.values.tolist() == NAMES.tolist()
    opened = xr.open_zarr(stored.url, consolidated=False)
    assert opened.x.dims == found.x.dims
    np.testing.assert_array_equal(opened.x.values, ROWS)
    np.testing.assert_array_equal(opened.weight.values, WEIGHTS)
    # The DataArray is read lazily as a dataset again.
    np.testing.assert_array_equal(Dataset.from_arrays(opened.x).read_x(3, 9), ROWS[3:9].reshape(6, -1))


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_receives_each_row_once_in_the_order_of_seed_and_epoch(stored: Dataset, workers: int) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    numbered = Dataset.from_arrays(np.arange(500.0)[:, None], np.arange(500) % 3)

    def rows(seed: int | None, epoch: int) -> tuple[list[float], list[int]]:
        given = numbered.to_torch(seed=seed, batch_size=16, piece_rows=40)
        given.set_epoch(epoch)
        found: list[Any] = list(
            DataLoader(given, batch_size=None, num_workers=workers, timeout=60 * (workers > 0))
        )
        x, y = (torch.cat(parts) for parts in zip(*found, strict=True))
        return x[:, 0].tolist(), y.tolist()

    first = rows(3, 0)
    assert sorted(first[0]) == list(range(500))
    assert first[1] == [int(v) % 3 for v in first[0]]
    assert rows(3, 0) == first
    if workers == 0:
        assert rows(3, 1) != first != rows(4, 0)
        assert rows(None, 0)[0] == list(range(500))


def test_torch_loaders_of_a_stored_dataset_pickle_only_its_path(stored: Dataset) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    given = stored.to_torch(seed=0)
    assert len(given) == 500
    sent = pickle.dumps(given)
    assert len(sent) < 10_000
    assert len(pickle.loads(sent)) == 500
    x, y, weight = next(iter(DataLoader(given, batch_size=8)))
    assert (tuple(x.shape), x.dtype, y.dtype) == ((8, 4, 3), torch.uint8, torch.int64)
    at = [int(np.flatnonzero((row.numpy() == ROWS).all(axis=(1, 2)))[0]) for row in x]
    assert [stored.classes[int(code)] for code in y] == NAMES[at].tolist()  # type: ignore[index]
    np.testing.assert_array_equal(weight.numpy(), WEIGHTS[at])


def test_a_dataset_without_names_of_tables_opens(stored: Dataset) -> None:
    """Earlier releases wrote datasets of tables without names."""
    import json

    for table in ("digest", "crc"):
        meta = Path(stored.url or "") / table / "zarr.json"
        reported = json.loads(meta.read_text())
        assert reported.pop("dimension_names")
        meta.write_text(json.dumps(reported))
    again = open_dataset(stored.url or "")
    assert again.fingerprint() == stored.fingerprint()
    np.testing.assert_array_equal(again.read_x(0, 500), ROWS.reshape(500, -1))
