"""A job with ``labels = false`` in the section [data] ignores the labels of its training rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.data import Dataset
from scalelatent.errors import JobError
from scalelatent.generators.images import image_set
from scalelatent.jobs.datasets import open_job_data
from scalelatent.jobs.recorder import why_python_only
from scalelatent.jobs.resolve import resolve
from scalelatent.jobs.runfolder import RunFolder
from tests.jobs.test_end_to_end import run_command

pytestmark = pytest.mark.filterwarnings("ignore:.*weights still changed")

X, Y = image_set("traits", size=5, gap=1).rows(0, 60)
JOB = """
[job]
seed = 1
out = "run"
[data]
train = "traits.zarr"
train_rows = ":40"
labels = false
test = "traits.zarr"
test_rows = "40:"
[model]
kind = "hcn"
layers = [[4, 5]]
templates = 3
n_epochs = 4
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    Dataset.from_arrays(X, Y).save(folder / "traits.zarr")
    (folder / "job.toml").write_text(JOB)
    return folder


def fit_in_python() -> Any:
    m = sl.HierarchicalCompositionalNetwork([(4, 5)], templates=3, n_epochs=4, random_state=1)
    return m.fit(X[:40])


def test_a_job_finds_clusters_of_labelled_rows(folder: Path) -> None:
    """Templates are clusters, found without labels; the labels of the test rows measure the error."""
    plan = run_command("plan", "job.toml", "--json", cwd=folder).json()
    assert "templates" in plan["plan"]["stages"]
    run_command("fit", "job.toml", cwd=folder)
    m, same = sl.load_model(folder / "run"), fit_in_python()
    assert m.template_classes_.tolist() == [0, 1, 2]
    for found, wanted in zip(m.beliefs_, same.beliefs_, strict=True):
        np.testing.assert_array_equal(found, wanted)
    state = run_command("status", "run", "--json", cwd=folder).json()
    assert state["test_error"] == pytest.approx(1 - same.score(X[40:], Y[40:]))
    # If the job uses the labels, the model has their two classes.
    run_command("fit", "job.toml", "--out", "reported", "--set", "data.labels=true", cwd=folder)
    assert sl.load_model(folder / "reported").classes_.tolist() == [0, 1]


def read_data_section(folder: Path, kind: str, **data: Any) -> Any:
    named = {"train": str(folder / "traits.zarr"), **data}
    stored = {"job": {"out": "run"}, "data": named, "model": {"kind": kind}}
    return open_job_data(resolve(stored, environ={}))


@pytest.mark.parametrize("kind", ["hcn", "mbn", "linear_density"])
def test_only_training_rows_lose_their_labels(folder: Path, kind: str) -> None:
    url = str(folder / "traits.zarr")
    data = read_data_section(folder, kind, labels=False, train_rows="5:30", validation=url, test=url)
    assert not data.train.has_y
    np.testing.assert_array_equal(data.train.read_x(0, 25), X[5:30].reshape(25, -1))
    assert data.validation.has_y
    assert data.test.has_y
    assert read_data_section(folder, kind).train.has_y


@pytest.mark.parametrize("kind", ["capsule", "linear_mixture", "crbm"])
def test_kinds_that_need_labels_refuse_the_option(folder: Path, kind: str) -> None:
    says = f"labels = false: a model of kind '{kind}' learns from labels or outputs; remove the key"
    with pytest.raises(JobError, match=says):
        read_data_section(folder, kind, labels=False)


def test_a_value_that_is_not_boolean_is_refused(folder: Path) -> None:
    said = run_command("plan", "job.toml", "--set", "data.labels=3", cwd=folder, code=2)
    assert "[data] labels = 3" in said.err


def test_fits_in_python_without_labels_can_be_resumed_as_jobs(folder: Path, tmp_path: Path) -> None:
    """The run folder states which rows the fit used, so that the command line can open these rows."""
    stored = sl.open_dataset(folder / "traits.zarr")
    m = sl.HierarchicalCompositionalNetwork([(4, 5)], templates=3, n_epochs=2, random_state=1)
    m.fit(stored[:40].without_labels(), validation=stored[40:], run_dir=tmp_path / "run")
    job = RunFolder(tmp_path / "run").read_job()
    assert job.data.labels is False
    assert not open_job_data(job).train.has_y
    assert why_python_only(job) == ""
    said = json.loads((tmp_path / "run" / "job.json").read_text())["data"]
    assert (said["train_rows"], said["validation_rows"]) == ("0:40", "40:60")
