"""`convert_dataset` reads zarr arrays and groups of other programs, and refuses damaged ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

from scalelatent.data import convert_dataset
from scalelatent.errors import DataError

ROWS = np.random.default_rng(0).normal(size=(120, 5)).astype("<f4")
LABELS = (np.arange(120) % 4).astype("<i8")


def test_groups_and_arrays_are_read(tmp_path: Path) -> None:
    zarr.save_group(tmp_path / "a.zarr", rows=ROWS, labels=LABELS, zarr_format=2)
    ds = convert_dataset(tmp_path / "a.zarr", tmp_path / "ds", x="rows", y="labels")
    np.testing.assert_array_equal(ds.read_x(0, 120), ROWS)
    np.testing.assert_array_equal(ds.read_y(0, 120), LABELS)
    with pytest.raises(DataError, match=r"no array 'x'; it holds labels, rows: name one with --x"):
        convert_dataset(tmp_path / "a.zarr", tmp_path / "other")


def test_strings_of_any_length_are_labels(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    group.create_array("x", data=ROWS)
    names = np.array(["short", "a longer name"])[LABELS % 2]
    group.create_array("y", shape=names.shape, dtype=str)[:] = names
    np.testing.assert_array_equal(convert_dataset(tmp_path / "a.zarr", tmp_path / "ds").read_y(0, 120), names)


def test_damaged_chunks_are_refused(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "a.zarr", data=ROWS, chunks=(40, 5))
    chunk = tmp_path / "a.zarr/c/1/0"
    assert array.shape == ROWS.shape
    chunk.write_bytes(chunk.read_bytes()[:10])
    with pytest.raises(DataError, match=r"zarr array .*: rows \d+:\d+ cannot be read: .*check the files"):
        convert_dataset(tmp_path / "a.zarr", tmp_path / "ds")
    assert not (tmp_path / "ds").exists()
