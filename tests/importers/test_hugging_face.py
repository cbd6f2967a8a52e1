"""Hugging Face datasets on disk: numbers, lists, images, names of classes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import scalelatent.data as data
from scalelatent.errors import DataError

N = 60
PIXELS = np.random.default_rng(0).integers(0, 256, (N, 6, 5)).astype("u1")
CODES = np.arange(N) % 3
NAMES = ["cat", "ant", "bee"]


def _png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


def _save(table: pa.Table, features: dict[str, Any], folder: Path) -> Path:
    """Write a folder as `save_to_disk` of datasets 5.2 does, in two files."""
    folder.mkdir(parents=True)
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (table.slice(0, 7), table.slice(7)), strict=True):
        with pa.ipc.new_stream(folder / name, table.schema) as file:
            file.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def _images(folder: Path, pixels: list[np.ndarray] | None = None) -> Path:
    found = list(PIXELS) if pixels is None else pixels
    table = pa.table(
        {"image": [{"bytes": _png(p), "path": None} for p in found], "label": CODES[: len(found)]}
    )
    return _save(
        table, {"image": {"_type": "Image"}, "label": {"names": NAMES, "_type": "ClassLabel"}}, folder
    )


def test_images_and_names_of_classes_are_read(tmp_path: Path) -> None:
    ds = data.import_hf(_images(tmp_path / "in"), tmp_path / "ds", label="label", shard_rows=17)
    assert ds.feature_shape == (6, 5)
    np.testing.assert_array_equal(ds.read_x(0, N), PIXELS.reshape(N, -1))
    assert ds.classes is not None
    assert ds.classes.tolist() == sorted(NAMES)
    assert ds.read_y(0, N).tolist() == np.array(NAMES)[CODES].tolist()


def test_columns_of_numbers_are_read_from_a_split(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(N, 4)).astype("f4")
    table = pa.table(
        {
            "v": pa.array(values.tolist(), pa.list_(pa.float32(), 4)),
            "kind": np.array(NAMES)[CODES],
            "w": np.arange(N) / 4,
        }
    )
    for split, rows in (("train", table), ("test", table.take(np.arange(N)[::-1]))):
        _save(rows, {"v": {"_type": "List"}, "kind": {"_type": "Value"}}, tmp_path / "in" / split)
    (tmp_path / "in" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    ds = data.import_hf(tmp_path / "in", tmp_path / "ds", split="test", label="kind", weight="w")
    np.testing.assert_array_equal(ds.read_x(0, N), values[::-1])
    assert ds.read_y(0, 3).tolist() == np.array(NAMES)[CODES[::-1]][:3].tolist()
    np.testing.assert_array_equal(ds.read_weight(0, N), np.arange(N)[::-1] / 4)
    with pytest.raises(DataError, match=r"has the splits train, test; choose one with --split"):
        data.import_hf(tmp_path / "in", tmp_path / "other", label="kind")


def test_a_folder_of_the_package_datasets_is_read(tmp_path: Path) -> None:
    hf = pytest.importorskip("datasets")
    columns = {"v": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "label": [0, 1, 2]}
    features = {"v": hf.List(hf.Value("float32"), length=2), "label": hf.ClassLabel(names=NAMES)}
    whole = hf.Dataset.from_dict(columns, features=hf.Features(features))
    whole.select([2, 0]).save_to_disk(tmp_path / "in")
    ds = data.import_hf(tmp_path / "in", tmp_path / "ds", label="label")
    assert ds.read_x(0, 2).tolist() == [[5, 6], [1, 2]]
    assert ds.read_y(0, 2).tolist() == ["bee", "cat"]


def test_wrong_splits_columns_and_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist, or is no folder"):
        data.import_hf(tmp_path / "no", tmp_path / "ds")
    (tmp_path / "text").mkdir()
    with pytest.raises(
        DataError, match=r"text cannot be read \(FileNotFoundError.*give a folder that `save_to_disk`"
    ):
        data.import_hf(tmp_path / "text", tmp_path / "ds")
    odd = _images(tmp_path / "odd", [*PIXELS[:9], PIXELS[9, :3]])
    with pytest.raises(DataError, match=r"image of row 9 is \(3, 5\) uint8, but that of row 0 is \(6, 5\)"):
        data.import_hf(odd, tmp_path / "ds", label="label")
    ds = data.import_hf(odd, tmp_path / "ds", label="label", size=(3, 5), color="rgb")
    assert ds.feature_shape == (3, 5, 3)
    with pytest.raises(DataError, match=r"'image' holds images, and there are others \(image, label\)"):
        data.import_hf(odd, tmp_path / "other")
