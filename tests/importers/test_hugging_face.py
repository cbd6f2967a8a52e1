"""Hugging Face datasets on disk: numbers, lists, images, names of classes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import scalelatent.data as data
from scalelatent.errors import DataError

hf = pytest.importorskip("datasets")

N = 60
PIXELS = np.random.default_rng(0).integers(0, 256, (N, 6, 5)).astype("u1")
CODES = np.arange(N) % 3
NAMES = ["cat", "ant", "bee"]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    hf.disable_progress_bars()


def _png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


def _save(columns: dict[str, Any], features: dict[str, Any], folder: Path) -> Path:
    hf.Dataset.from_dict(columns, features=hf.Features(features)).save_to_disk(folder)
    return folder


def _images(folder: Path, pixels: list[np.ndarray] | None = None) -> Path:
    found = list(PIXELS) if pixels is None else pixels
    columns = {"image": [{"bytes": _png(p), "path": None} for p in found], "label": CODES[: len(found)]}
    return _save(columns, {"image": hf.Image(), "label": hf.ClassLabel(names=NAMES)}, folder)


def test_images_and_names_of_classes_are_read(tmp_path: Path) -> None:
    ds = data.import_hf(_images(tmp_path / "in"), tmp_path / "ds", label="label", shard_rows=17)
    assert ds.feature_shape == (6, 5)
    np.testing.assert_array_equal(ds.read_x(0, N), PIXELS.reshape(N, -1))
    assert ds.classes is not None
    assert ds.classes.tolist() == sorted(NAMES)
    assert ds.read_y(0, N).tolist() == np.array(NAMES)[CODES].tolist()


def test_columns_of_numbers_are_read_from_a_split(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(N, 4)).astype("f4")
    columns = {"v": values.tolist(), "kind": np.array(NAMES)[CODES], "w": np.arange(N) / 4}
    features = {
        "v": hf.List(hf.Value("float32"), length=4),
        "kind": hf.Value("string"),
        "w": hf.Value("float64"),
    }
    whole = hf.Dataset.from_dict(columns, features=hf.Features(features))
    # Rows are selected by indices, which are stored next to the rows.
    chosen = whole.select(range(N - 1, -1, -1))
    hf.DatasetDict({"train": whole, "test": chosen}).save_to_disk(tmp_path / "in")
    ds = data.import_hf(tmp_path / "in", tmp_path / "ds", split="test", label="kind", weight="w")
    np.testing.assert_array_equal(ds.read_x(0, N), values[::-1])
    assert ds.read_y(0, 3).tolist() == np.array(NAMES)[CODES[::-1]][:3].tolist()
    np.testing.assert_array_equal(ds.read_weight(0, N), np.arange(N)[::-1] / 4)
    with pytest.raises(DataError, match=r"has the splits train, test; choose one with --split"):
        data.import_hf(tmp_path / "in", tmp_path / "other", label="kind")


def test_wrong_splits_columns_and_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist, or is no folder"):
        data.import_hf(tmp_path / "no", tmp_path / "ds")
    odd = _images(tmp_path / "odd", [*PIXELS[:9], PIXELS[9, :3]])
    with pytest.raises(DataError, match=r"image of row 9 is \(3, 5\) uint8, but that of row 0 is \(6, 5\)"):
        data.import_hf(odd, tmp_path / "ds", label="label")
    ds = data.import_hf(odd, tmp_path / "ds", label="label", size=(3, 5), color="rgb")
    assert ds.feature_shape == (3, 5, 3)
    with pytest.raises(DataError, match=r"'image' holds images, and there are others \(image, label\)"):
        data.import_hf(odd, tmp_path / "other")
