"""Fixtures for tests of jobs: a stand-in for an estimator, a small dataset, and a folder with a job file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

PARAMETERS = {
    "capsule_dim": 8,
    "algorithm": "em",
    "nu_schedule": "paper",
    "max_iter": 5,
    "tol": None,
    "random_state": None,
    "device": "auto",
    "n_jobs": None,
}


class FakeEstimator:
    """Estimator that only counts passes, in place of a fit; it resumes from the file ``engine/passes``."""

    _kind = "capsule"
    fail: BaseException | None = None  # Exception that ``fit`` raises after pass 2.
    before_pass: Any = None  # Function of the pass number that ``fit`` calls before each pass.

    def __init__(self, **params: Any) -> None:
        self.params = params

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return dict(self.params)

    def fit(
        self,
        x,
        y=None,
        *,
        validation=None,
        client=None,
        run_dir=None,
        resume=False,
        callbacks=(),
        engine=None,
        verbose=None,
    ):
        self.asked = {"rows": x.n_rows, "client": client, "engine": engine, "resume": resume}
        counter = Path(run_dir, "engine", "passes")
        done = int(counter.read_text()) if resume and counter.exists() else 0
        counter.parent.mkdir(exist_ok=True)
        for callback in callbacks:
            callback.on_fit_start({"rows": x.n_rows, "max_iter": self.params["max_iter"]})
        for number in range(done + 1, self.params["max_iter"] + 1):
            if self.before_pass is not None:
                type(self).before_pass(number)
            counter.write_text(str(number))
            record = {
                "pass": number,
                "stage": "em",
                "objective": 1.0 / number,
                "train_error": 0.5,
                "rows": x.n_rows,
            }
            record |= {"seconds": 0.01, "validation_error": None, "nu": 0.0}
            for callback in callbacks:
                callback.on_pass_end(record)
            if self.fail is not None and number == 2:
                raise self.fail
        for callback in callbacks:
            callback.on_fit_end({"passes": self.params["max_iter"], "seconds": 0.1})
        self.n_iter_ = self.params["max_iter"]
        self.n_features_in_ = x.n_features
        self.classes_ = x.classes
        return self

    def score(self, x, y=None, *, callbacks=()):
        return 0.75

    def predict(self, x, out=None):
        return np.zeros(len(x), dtype=int)

    def plan(self, train, *, validation=None, client=None, memory_limit=None):
        return {"rows": train.n_rows, "peak_bytes_per_worker": 3 * 2**20}

    def save(self, url, *, overwrite=False):
        os.makedirs(url)
        Path(url, "model.json").write_text(json.dumps(self.params))


@pytest.fixture
def use_fake_estimator(monkeypatch: pytest.MonkeyPatch) -> type[FakeEstimator]:
    """Let jobs of kind "capsule" fit a `FakeEstimator` and write one file as report; return its class."""
    from scalelatent.contract.kinds import Kind
    from scalelatent.contract.parameters import Anything, Parameter, Parameters
    from scalelatent.jobs import runner

    class FakeEstimatorOfTest(FakeEstimator):
        pass

    def build(job):
        return FakeEstimatorOfTest(**job.estimator_params())

    def report(result, data, reported):
        result.folder.location.write("report/index.html", b"<html></html>")
        result.report = result.folder.report_url

    known = (Parameter(name, default, Anything(), "") for name, default in PARAMETERS.items())
    table = Parameters(tuple(known))
    real = Kind.load_parameters
    monkeypatch.setattr(Kind, "load_parameters", lambda kind: table if kind.name == "capsule" else real(kind))
    monkeypatch.setattr(runner, "build_estimator", build)
    monkeypatch.setattr(runner, "_report", report)
    return FakeEstimatorOfTest


@pytest.fixture(scope="session")
def write_small_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dataset of 400 rows with 16 features in four classes; return its path."""
    from scalelatent import Dataset

    rng = np.random.default_rng(7)
    y = np.arange(400) % 4
    centres = rng.uniform(0, 1, (4, 16))
    x = np.clip(centres[y] + rng.normal(0, 0.1, (400, 16)), 0, 1).astype(np.float32)
    url = tmp_path_factory.mktemp("small") / "small.zarr"
    Dataset.from_arrays(x, y).save(str(url))
    return url


@pytest.fixture
def job_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_small_dataset: Path) -> SimpleNamespace:
    """Change into a new folder with a dataset, ``small.zarr``, and a job file; return their paths."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SCALELATENT_") and "__" in name]:
        monkeypatch.delenv(name)
    shutil.copytree(write_small_dataset, tmp_path / "small.zarr")
    job = tmp_path / "job.toml"
    job.write_text(
        """
        [job]
        name = "small"
        seed = 3
        out = "run"

        [data]
        train = "small.zarr"
        train_rows = "0:300"
        validation = "small.zarr"
        validation_rows = "300:350"
        test = "small.zarr"
        test_rows = "350:"

        [model]
        kind = "capsule"
        capsule_dim = 2
        max_iter = 5
        tol = "none"
        """
    )
    return SimpleNamespace(path=tmp_path, job=job, data=tmp_path / "small.zarr", run=tmp_path / "run")
