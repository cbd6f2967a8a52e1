"""`scalelatent report RUN DATA` adds figures of rows of DATA; wrong folders and rows are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.errors import DataError, RunError
from tests.jobs.test_end_to_end import run_command

CLUSTERED = np.random.default_rng(0).normal(size=(120, 64)) + 3 * np.eye(3, 64)[np.arange(120) % 3]
BITS = (np.random.default_rng(1).random((120, 64)) < 0.4).astype(np.uint8)
Y = np.arange(120) % 3

# Each kind of model, with an estimator whose fit is short, its rows, and a figure that needs rows.
FITTED: dict[str, tuple[Any, np.ndarray, str]] = {
    "capsule": (sl.CapsuleRegression(capsule_dim=2, max_iter=2), CLUSTERED, "confusion"),
    "mbn": (
        sl.MultilayerBootstrapNetwork(decay=0.5, n_clusterings=4, k1=8, n_components=2),
        CLUSTERED,
        "output",
    ),
    "crbm": (
        sl.ConditionalRBM(n_hidden=3, n_epochs=1, corruption={"kind": "flip", "rate": 0.1}),
        BITS,
        "restored",
    ),
    "hcn": (
        sl.HierarchicalCompositionalNetwork([(2, (2, 2))], image_shape=(8, 8), batch_size=5),
        BITS,
        "parts",
    ),
    "linear_mixture": (
        sl.LinearMixtureClassifier(n_components=1, n_dims=2, max_iter=2),
        CLUSTERED,
        "confusion",
    ),
    "linear_density": (sl.LinearMixture(n_components=2, n_dims=2, max_iter=2), CLUSTERED, "reconstructions"),
}


@pytest.fixture
def fitted_folder(tmp_path: Path) -> Any:
    """Return a function that fits a model of a kind on rows in memory.

    The function saves other rows as ``rows.zarr``, and returns the name of a figure that needs rows.
    """

    def fit(kind: str) -> str:
        model, x, figure = FITTED[kind]
        labels = (Y,) if x is CLUSTERED else ()
        sl.Dataset.from_arrays(x[80:], *(y[80:] for y in labels)).save(tmp_path / "rows.zarr")
        model.set_params(random_state=0, n_jobs=1)
        model.fit(x[:80], *(y[:80] for y in labels), run_dir=tmp_path / "run")
        return figure

    return fit


def list_figures(folder: Path) -> set[str]:
    return {file.stem for file in (folder / "run" / "report").glob("*.png")}


@pytest.mark.parametrize("kind", FITTED)
def test_given_rows_fill_the_sections_that_need_rows(fitted_folder: Any, tmp_path: Path, kind: str) -> None:
    figure = fitted_folder(kind)
    run_command("report", "run", cwd=tmp_path)
    assert figure not in list_figures(tmp_path)  # The fit's rows were in memory, so they are lost.
    reported = run_command("report", "run", "rows.zarr", "--rows", "0:30", "--json", cwd=tmp_path).json()
    assert figure in list_figures(tmp_path)
    page = Path(tmp_path, reported["report"]).read_text()
    assert "evaluation" in page
    assert "30" in page
    assert "at hand" not in page


def test_rows_of_another_width_are_refused(fitted_folder: Any, tmp_path: Path) -> None:
    fitted_folder("capsule")
    sl.Dataset.from_arrays(CLUSTERED[:, :9]).save(tmp_path / "other.zarr")
    said = run_command("report", "run", "other.zarr", cwd=tmp_path, code=2).err
    assert "other.zarr has 9 features per row, but the model was fitted to rows of 64" in said
    said = run_command("report", "run", "--rows", "0:10", cwd=tmp_path, code=2).err
    assert "--rows and --target need DATA" in said


def list_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run folder, a saved model, a dataset, an empty folder and a folder of notes."""
    folder = tmp_path_factory.mktemp("places")
    model = sl.CapsuleRegression(capsule_dim=2, max_iter=2, random_state=0)
    model.fit(CLUSTERED, Y, run_dir=folder / "runs" / "run").save(folder / "model.zarr")
    sl.Dataset.from_arrays(CLUSTERED, Y).save(folder / "rows.zarr")
    (folder / "empty").mkdir()
    (folder / "text").mkdir()
    (folder / "text" / "notes.txt").write_text("notes")
    return folder


# Each entry has a path that is no run folder, the message about this path, and the advice of the message.
WRONG = [
    ("nothing", "does not exist", "the folder that [job] out of a job file, or run_dir in Python, names"),
    ("empty", "is an empty folder, not a run folder", "the folder that"),
    ("text", "is a folder with notes.txt, not a run folder", "the folder that"),
    ("text/notes.txt", "is a file, not a run folder", "the folder that"),
    ("rows.zarr", "is a dataset, not a run folder", "the folder that"),
    ("model.zarr", "is a saved model, not a run folder", "the folder that"),
    ("runs", "is a folder with run, not a run folder", "runs/run"),
    ("runs/run/model.zarr", "is a saved model, not a run folder", "runs/run"),
    ("runs/run/job.json", "is a file, not a run folder", "runs/run"),
]


@pytest.mark.parametrize(("name", "found", "advice"), WRONG, ids=[row[0] for row in WRONG])
def test_a_wrong_run_folder_is_described_and_nothing_is_written(
    places: Path, name: str, found: str, advice: str
) -> None:
    before = list_files(places)
    said = run_command("report", name, cwd=places, code=2).err
    assert f"{places / name} {found}; give {places if '/' in advice else ''}" in said
    assert said.strip().endswith(advice) or advice in said
    assert list_files(places) == before


@pytest.mark.parametrize("name", ["rows.zarr", "model.zarr", "runs/run/model.zarr", "text/notes.txt"])
def test_a_report_and_a_fit_are_not_written_into_a_dataset_or_a_model(places: Path, name: str) -> None:
    before, model = list_files(places), sl.load_model(places / "model.zarr")
    with pytest.raises(DataError, match="not a run folder; give another folder"):
        model.report(places / name)
    with pytest.raises(RunError, match="choose another `run_dir`"):
        model.fit(CLUSTERED, Y, run_dir=places / name)
    assert list_files(places) == before


def test_a_report_on_wrong_rows_creates_no_folder(places: Path, tmp_path: Path) -> None:
    model = sl.load_model(places / "model.zarr")
    with pytest.raises(DataError, match="has 9 features per row"):
        model.report(tmp_path / "new" / "page", data=CLUSTERED[:, :9])
    with pytest.raises(DataError, match="rows x features are needed"):
        model.report(tmp_path / "new" / "page", data=[1, 2])
    assert list_files(tmp_path) == []


def test_a_refused_search_leaves_no_folder(tmp_path: Path) -> None:
    search = sl.Search(sl.CapsuleRegression(capsule_dim=2), {"no_parameter": [1]})
    with pytest.raises(ValueError, match="no_parameter"):
        search.fit(CLUSTERED, Y, run_dir=tmp_path / "new" / "run")
    assert list_files(tmp_path) == []


def test_a_second_fit_into_a_run_folder_is_refused_before_the_plan(places: Path, tmp_path: Path) -> None:
    text = (
        f"[job]\nout = '{places / 'runs' / 'run'}'\n[data]\ntrain = 'missing.zarr'\n[model]\nkind = 'capsule'"
    )
    (tmp_path / "job.toml").write_text(text)
    said = run_command("fit", "job.toml", cwd=tmp_path, code=2).err
    assert "already contains a run (state: done)" in said
    assert "plan" not in said


def test_a_folder_in_place_of_a_job_file_is_described(places: Path, tmp_path: Path) -> None:
    said = run_command("plan", places / "runs" / "run", cwd=tmp_path, code=2).err
    assert f"to resume a run folder: scalelatent resume {places / 'runs' / 'run'}" in said
    (tmp_path / "job.toml").write_text("")
    assert (
        f"not a job file; give {tmp_path / 'job.toml'}"
        in run_command("plan", tmp_path, cwd=tmp_path, code=2).err
    )


def test_attach_names_no_model_if_there_is_none(places: Path, tmp_path: Path) -> None:
    shutil.copytree(places / "runs" / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model.zarr")
    assert "model.zarr" not in run_command("attach", "run", cwd=tmp_path).out
