"""Tiles (shards that have some of the columns of their rows) may be written by several writers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from scalelatent.data import DatasetWriter, create_dataset, open_dataset
from scalelatent.data.write.create import link_dataset
from scalelatent.errors import DataError
from scalelatent.storage.disk import locate

N, P = 103, 17


@pytest.fixture
def rows() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 60_000, (N, P)).astype(np.uint16)


def _create(url: Any, **options: Any) -> DatasetWriter:
    return create_dataset(url, N, (P,), "u2", **{"shard_rows": 40, "tile_columns": 5, **options})


def _write(writer: DatasetWriter, rows: np.ndarray, shards: Any) -> None:
    for shard in shards:
        start, stop = writer.shard_bounds(shard)
        first, last = writer.shard_columns(shard)
        writer.write_shard(shard, rows[start:stop, first:last])


@pytest.mark.parametrize("compressor", [None, "lz4", "zstd"])
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_tiles_written_in_any_order_give_the_rows(
    rows: np.ndarray, tmp_path: Path, kind: str, compressor: str | None
) -> None:
    url = f"{tmp_path}/t.zarr" if kind == "disk" else f"memory://tiles-{compressor}"
    writer = _create(url, compressor=compressor)
    assert (writer.n_shards, writer.n_tiles) == (12, 4)
    assert [writer.shard_columns(i) for i in (0, 3, 7)] == [(0, 5), (15, 17), (15, 17)]
    assert [writer.shard_bounds(i) for i in (3, 4, 11)] == [(0, 40), (40, 80), (80, 103)]
    _write(writer, rows, reversed(range(12)))
    ds = writer.finalize()
    np.testing.assert_array_equal(ds.read_x(0, N), rows)
    np.testing.assert_array_equal(ds[13:91].read_x(2, 50), rows[15:63])
    assert ds.pieces() == [(0, 40), (40, 80), (80, 103)]
    assert all(map(DatasetWriter.attach(url).is_done, range(12)))
    if kind == "disk":
        np.testing.assert_array_equal(zarr.open_group(url, mode="r")["x"][...], rows)


def test_a_resume_writes_only_missing_tiles(rows: np.ndarray, tmp_path: Path) -> None:
    url = tmp_path / "t.zarr"
    _write(_create(url), rows, [1, 6, 7])
    again = _create(url, resume=True)
    missing = [i for i in range(again.n_shards) if not again.is_done(i)]
    assert missing == [0, 2, 3, 4, 5, 8, 9, 10, 11]
    with pytest.raises(DataError, match="9 of 12 shards are not written, the first is shard 0"):
        again.finalize()
    (url / "x" / "c" / "1" / "2").unlink()
    assert not again.is_done(6)
    _write(again, rows, [*missing, 6])
    np.testing.assert_array_equal(again.finalize().read_x(0, N), rows)


def test_the_error_names_a_lost_or_damaged_tile(rows: np.ndarray, tmp_path: Path) -> None:
    url = tmp_path / "t.zarr"
    writer = _create(url, compressor=None)
    _write(writer, rows, range(12))
    writer.finalize()
    tile = url / "x" / "c" / "1" / "2"
    whole = tile.read_bytes()
    tile.write_bytes(whole[:50] + b"\0\1\2\3" + whole[54:])
    assert [i for i in range(12) if not writer.is_done(i)] == [6]
    np.testing.assert_array_equal(open_dataset(url).read_x(0, 40), rows[:40])
    with pytest.raises(DataError, match=r"x/c/1/2 \(rows 40:80 of 'x'\) is damaged: the checksum"):
        open_dataset(url).read_x(39, 41)
    tile.unlink()
    with pytest.raises(DataError, match=r"x/c/1/2 \(rows 40:80 of 'x'\) is missing"):
        open_dataset(url).read_x(0, N)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"y_dtype": "u1"}, "tile_columns=5 is only possible for dense rows of one axis without labels"),
        ({"weighted": True}, "without labels or weights"),
        ({"nnz": 10}, "only possible for dense rows"),
        ({"tile_columns": 0}, "tile_columns is 0, but it must be at least 1"),
    ],
)
def test_invalid_tiles_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _create(tmp_path / "t.zarr", **options)
    with pytest.raises(DataError, match=r"given with shape \(40, 17\), but this shard has shape \(40, 5\)"):
        _create(tmp_path / "u.zarr").write_shard(0, np.zeros((40, 17), "u2"))


def test_a_finished_dataset_is_linked_to_a_second_path(rows: np.ndarray, tmp_path: Path) -> None:
    writer = _create(tmp_path / "t.zarr")
    _write(writer, rows, range(12))
    ds = writer.finalize()
    for url in (str(tmp_path / "linked.zarr"), "memory://linked"):
        assert link_dataset(ds, locate(url)) == ds.fingerprint()
        assert open_dataset(url).fingerprint() == ds.fingerprint()
        np.testing.assert_array_equal(open_dataset(url).read_x(0, N), rows)
    # On one disk both datasets share this file, so the shard is not copied.
    assert (tmp_path / "linked.zarr/x/c/0/0").stat().st_ino == (tmp_path / "t.zarr/x/c/0/0").stat().st_ino
