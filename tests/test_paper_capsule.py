"""Each experiment of benchmarks/paper_capsule.py also runs on other data than those of the paper."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from scalelatent.data import create_dataset

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="benchmarks/ is not part of this copy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with training and test images of three classes."""
    path = tmp_path_factory.mktemp("data")
    means = np.random.default_rng(0).integers(0, 200, (3, 4, 5))
    for name, n in (("train", 120), ("test", 30)):
        rng, y = np.random.default_rng(n), (np.arange(n) % 3).astype(np.uint8)
        writer = create_dataset(str(path / f"{name}.zarr"), n, (4, 5), "uint8", y_dtype="uint8")
        writer.write_shard(0, (means[y] + rng.integers(0, 40, (n, 4, 5))).astype(np.uint8), y)
        writer.finalize()
    return path


@pytest.mark.parametrize("experiment", ["dims", "architectures", "convergence", "starts"])
def test_each_experiment_accepts_a_folder(
    experiment: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("paper_capsule")
    out = tmp_path / "out.json"
    options = ["--data", folder, "--passes", 3, "--dims", "1,2", "--starts", 1, "--jobs", 1, "--out", out]
    monkeypatch.setattr(sys, "argv", list(map(str, ["paper_capsule.py", experiment, *options])))
    module.main()
    results = json.loads(out.read_text())["results"]
    assert len(results) == {"dims": 2, "architectures": 4, "convergence": 4, "starts": 4}[experiment]
    if experiment in ("dims", "architectures"):
        assert [r["test_error"] for r in results if r["capsule_dim"] == 1] == [0.0] * (len(results) // 2)
    assert out.with_suffix(".png").exists()
