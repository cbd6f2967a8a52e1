"""Jobs, and commands on a run, refuse datasets with other feature names than those of the fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import scalelatent as sl
from tests.jobs.test_end_to_end import run_command

pytest.importorskip("pyarrow")

NAMES = ["w", "h", "d", "t"]
LABELS = np.arange(90) % 3
ROWS = np.random.default_rng(0).normal(size=(90, 4)) + 3 * np.eye(4)[LABELS]
JOB = """
[job]
seed = 1
out = "run"
[data]
train = "train.zarr"
validation = "train.zarr"
test = "train.zarr"
[model]
kind = "{kind}"
"""
KINDS = {
    "capsule": "capsule_dim = 2\nmax_iter = 2",
    "linear_mixture": "n_components = 1\nn_dims = 1\nmax_iter = 2",
}


def write_csv(path: Path, names: list[str]) -> None:
    order = [NAMES.index(name) for name in names]
    lines = [f"{','.join(map(str, row))},{label}" for row, label in zip(ROWS[:, order], LABELS, strict=True)]
    path.write_text("\n".join([",".join([*names, "kind"]), *lines]) + "\n")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a job file, and two tables whose columns differ in their order."""
    folder = tmp_path_factory.mktemp("names")
    for name, columns in (("train", NAMES), ("other", ["h", "w", "d", "t"])):
        write_csv(folder / f"{name}.csv", columns)
        run_command("data", "import", "csv", f"{name}.csv", f"{name}.zarr", "--label", "kind", cwd=folder)
    (folder / "job.toml").write_text(JOB.format(kind=request.param) + KINDS[request.param])
    run_command("fit", "job.toml", cwd=folder)
    return folder


def test_a_job_keeps_names(folder: Path) -> None:
    assert sl.load_model(folder / "run").feature_names_in_.tolist() == NAMES
    run_command("predict", "run", "train.zarr", "--out", "out.zarr", cwd=folder)
    assert sl.open_dataset(folder / "out.zarr").feature_names is None
    assert "feature names" not in run_command("score", "run", "train.zarr", cwd=folder).err
    run_command("report", "run", cwd=folder)


@pytest.mark.parametrize("key", ["validation", "test"])
@pytest.mark.parametrize("verb", ["fit", "plan"])
def test_a_job_refuses_other_names_before_work(folder: Path, key: str, verb: str) -> None:
    change = ("--set", f"data.{key}=other.zarr", "--set", "job.out=none")
    said = run_command(verb, "job.toml", *change, cwd=folder, code=2).err
    assert f"[data] {key} = '{folder / 'other.zarr'}': The feature names should match" in said
    assert "must be in the same order as they were in fit" in said
    assert not (folder / "none").exists()


@pytest.mark.parametrize(
    "verb",
    [
        ("predict", "run", "other.zarr", "--out", "no.zarr"),
        ("score", "run", "other.zarr"),
        ("report", "run", "other.zarr"),
    ],
    ids=["predict", "score", "report"],
)
def test_verbs_refuse_other_names(folder: Path, verb: tuple[str, ...]) -> None:
    said = run_command(*verb, cwd=folder, code=2).err
    assert "Feature names must be in the same order as they were in fit" in said
    assert len(said.strip().splitlines()) == 1
    assert not (folder / "no.zarr").exists()
