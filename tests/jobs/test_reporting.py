"""`scalelatent report RUN DATA`: the report of a run on given rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scalelatent as sl
from tests.jobs.test_end_to_end import scalelatent

CLUSTERED = np.random.default_rng(0).normal(size=(120, 64)) + 3 * np.eye(3, 64)[np.arange(120) % 3]
BITS = (np.random.default_rng(1).random((120, 64)) < 0.4).astype(np.uint8)
Y = np.arange(120) % 3

# Of each kind: a model that fits in a moment, its rows, and a figure that needs rows.
FITTED: dict[str, tuple[Any, np.ndarray, str]] = {
    "capsule": (sl.CapsuleRegression(capsule_dim=2, max_iter=2), CLUSTERED, "confusion"),
    "mbn": (sl.MultilayerBootstrapNetwork(n_clusterings=4, k1=8, n_components=2), CLUSTERED, "output"),
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
def given(tmp_path: Path) -> Any:
    """Fit a kind on rows in memory, and store others."""

    def fit(kind: str) -> str:
        model, x, figure = FITTED[kind]
        labels = (Y,) if x is CLUSTERED else ()
        sl.Dataset.from_arrays(x[80:], *(y[80:] for y in labels)).save(tmp_path / "rows.zarr")
        model.set_params(random_state=0, n_jobs=1)
        model.fit(x[:80], *(y[:80] for y in labels), run_dir=tmp_path / "run")
        return figure

    return fit


def figures(folder: Path) -> set[str]:
    return {file.stem for file in (folder / "run" / "report").glob("*.png")}


@pytest.mark.parametrize("kind", FITTED)
def test_given_rows_fill_the_sections_that_need_rows(given: Any, tmp_path: Path, kind: str) -> None:
    figure = given(kind)
    scalelatent("report", "run", cwd=tmp_path)
    assert figure not in figures(tmp_path)  # the rows of the fit lived in memory
    told = scalelatent("report", "run", "rows.zarr", "--rows", "0:30", "--json", cwd=tmp_path).json()
    assert figure in figures(tmp_path)
    page = Path(tmp_path, told["report"]).read_text()
    assert "given" in page
    assert "30" in page
    assert "at hand" not in page


def test_rows_of_another_kind_are_refused(given: Any, tmp_path: Path) -> None:
    given("capsule")
    sl.Dataset.from_arrays(CLUSTERED[:, :9]).save(tmp_path / "other.zarr")
    said = scalelatent("report", "run", "other.zarr", cwd=tmp_path, code=2).err
    assert "other.zarr has 9 features per row, but the model was fitted to rows of 64" in said
    said = scalelatent("report", "run", "--rows", "0:10", cwd=tmp_path, code=2).err
    assert "--rows and --target need DATA" in said
