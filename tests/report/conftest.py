"""Fixtures of report tests: small fitted models of each architecture, and run folders like those of jobs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.datasets import load_digits

from scalelatent import CapsuleRegression, Dataset
from scalelatent.report import style
from scalelatent.report.build import build_report

TRAIN = 1300


@cache
def fitted(**params):
    """Fit a model to the first TRAIN digits, and return it and the other digits (dataset, x, y)."""
    x, y = load_digits(return_X_y=True)
    model = CapsuleRegression(random_state=0, n_jobs=1, **{"max_iter": 8} | params).fit(x[:TRAIN], y[:TRAIN])
    data = Dataset.from_arrays(x[TRAIN:].reshape(-1, 8, 8).astype(np.uint8), y[TRAIN:])
    return SimpleNamespace(model=model, data=data, x=x[TRAIN:], y=y[TRAIN:])


@pytest.fixture(scope="session", autouse=True)
def draw_small_figures():
    """Draw figures at a low resolution, which is faster; the tests check only the content of figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "DPI", 48)
        yield


@pytest.fixture(scope="session")
def digits():
    return fitted


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """Return a function that writes a run folder for a model."""

    def write(model, *, history=None, data=None, name="digits"):
        folder = tmp_path_factory.mktemp("report") / "run"
        folder.mkdir()
        job = {
            "format": "scalelatent-job",
            "format_version": 1,
            "job": {"name": name, "seed": 0, "out": str(folder)},
            "data": {"train": "train.zarr", "validation": None, "test": "test.zarr"} | (data or {}),
            "model": {"kind": "capsule", "capsule_dim": 2, "tol": None},
            "origins": {"model.capsule_dim": "job file"},
        }
        (folder / "job.json").write_text(json.dumps(job))
        lines = [json.dumps(record) + "\n" for record in (model.history_ if history is None else history)]
        (folder / "metrics.jsonl").write_text("".join(lines))
        (folder / "events.jsonl").write_text(json.dumps({"event": "fit_started", "rows": TRAIN}) + "\n")
        return folder

    return write


@pytest.fixture
def page_of():
    """Return a function that builds a report, and returns its text and the names of its pictures."""

    def build(folder, model, data):
        job = {"job": {"name": "images"}, "data": {"test": "x.zarr"}}
        (folder / "job.json").write_text(json.dumps(job))
        page = " ".join(Path(build_report(folder, model=model, data=data)).read_text().split())
        return page, sorted(file.stem for file in (folder / "report").glob("*.png"))

    return build
