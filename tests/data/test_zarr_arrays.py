"""Zarr arrays of other programs, and references into files of other formats."""

from __future__ import annotations

import json
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


def write_references(folder: Path) -> Path:
    """Write a binary file and references that describe it as a zarr group; return their path."""
    (folder / "raw.bin").write_bytes(b"HEAD" + ROWS.tobytes() + LABELS.tobytes())
    refs: dict[str, object] = {".zgroup": json.dumps({"zarr_format": 2})}
    at = 4
    for name, array, rows in (("x", ROWS, 40), ("y", LABELS, 120)):
        chunks = [rows, *array.shape[1:]]
        meta = {"zarr_format": 2, "shape": array.shape, "chunks": chunks, "dtype": array.dtype.str}
        meta |= {"compressor": None, "filters": None, "fill_value": 0, "order": "C"}
        refs[f"{name}/.zarray"] = json.dumps(meta)
        size = array[:rows].nbytes
        for i in range(len(array) // rows):
            refs[f"{name}/{i}" + ".0" * (array.ndim - 1)] = [str(folder / "raw.bin"), at, size]
            at += size
    path = folder / "refs.json"
    path.write_text(json.dumps({"version": 1, "refs": refs}))
    return path


def test_virtual_references_are_read(tmp_path: Path) -> None:
    refs = write_references(tmp_path)
    ds = convert_dataset(refs, tmp_path / "ds", shard_rows=50)
    np.testing.assert_array_equal(ds.read_x(0, 120), ROWS)
    np.testing.assert_array_equal(ds.read_y(0, 120), LABELS)


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_missing_and_short_referenced_files_are_refused(harm: str, tmp_path: Path) -> None:
    refs = write_references(tmp_path)
    raw = tmp_path / "raw.bin"
    if harm == "missing":
        raw.unlink()
    else:
        raw.write_bytes(raw.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"zarr array .*: rows 0:\d+ cannot be read: .*check the files"):
        convert_dataset(refs, tmp_path / "ds")
    assert not (tmp_path / "ds").exists()


def test_references_of_kerchunk_are_read(tmp_path: Path) -> None:
    kerchunk = pytest.importorskip("kerchunk.hdf")
    import h5py

    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=ROWS, chunks=(32, 5), compression="gzip")
        file["y"] = LABELS
    found = kerchunk.SingleHdf5ToZarr(str(tmp_path / "a.h5")).translate()
    (tmp_path / "refs.json").write_text(json.dumps(found))
    ds = convert_dataset(tmp_path / "refs.json", tmp_path / "ds")
    np.testing.assert_array_equal(ds.read_x(0, 120), ROWS)
