"""Files of earlier versions open, and interrupted fits resume, except those of a removed algorithm."""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import scalelatent as sl
from scalelatent.errors import RunError
from scalelatent.storage.old_names import MOVED_MODULES

from .write import list_fits, list_learned, make_pairs, make_rows

VERSIONS = sorted(file.name for file in Path(__file__).parent.glob("version_*.zip"))


@pytest.fixture(scope="module", params=VERSIONS)
def unpacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with zipfile.ZipFile(Path(__file__).parent / request.param) as archive:
        archive.extractall(folder)
    return folder


def test_archives_of_earlier_versions_exist() -> None:
    assert VERSIONS


def test_datasets_of_earlier_versions_open(unpacked: Path) -> None:
    ds = sl.open_dataset(unpacked / "rows.zarr")
    x, y = make_rows()
    assert_array_equal(ds.read_x(0, len(ds)), x)
    assert_array_equal(ds.read_y(0, len(ds)), y)
    assert ds.feature_names is None


@pytest.mark.parametrize("name", [*list_fits(), "incremental"])
def test_models_of_earlier_versions_load(unpacked: Path, name: str) -> None:
    assert_allclose(
        list_learned(sl.load_model(unpacked / f"{name}.model")),
        np.load(unpacked / f"{name}.npy"),
        rtol=1e-6,
    )


def test_bootstrap_networks_of_earlier_versions_load_with_their_centroids(unpacked: Path) -> None:
    found = sl.load_model(unpacked / "network.model").transform(make_rows()[0])
    assert_allclose(found, np.load(unpacked / "network.npy"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", list(list_fits()))
def test_interrupted_fits_of_earlier_versions_resume(unpacked: Path, name: str) -> None:
    model, paired = list_fits()[name]
    reported: list[int] = []

    class EventLog(sl.Callback):
        def on_pass_end(self, record: dict[str, int]) -> None:
            reported.append(record["pass"])

    model.fit(
        *(make_pairs() if paired else make_rows()),
        run_dir=unpacked / f"{name}.run",
        resume=True,
        callbacks=[EventLog()],
    )
    assert reported[0] == 3  # Passes 1 and 2 are not repeated.
    assert_allclose(list_learned(model), np.load(unpacked / f"{name}.npy"), rtol=1e-5, atol=1e-6)


def test_interrupted_incremental_fits_are_refused(unpacked: Path) -> None:
    """Runs of ``algorithm="incremental"``, a method of version 0.1.0, cannot resume as stepwise EM."""
    model = sl.CapsuleRegression(
        algorithm="incremental", capsule_dim=2, random_state=0, projection=None, fit_intercept=False, ridge=0,
        n_epochs=3,
    )  # fmt: skip
    with pytest.warns(FutureWarning, match="algorithm='incremental'"), pytest.raises(RunError) as error:
        model.fit(*make_rows(), run_dir=unpacked / "incremental.run", resume=True)
    assert "algorithm" in str(error.value)


def test_the_new_modules_of_old_names_can_be_imported() -> None:
    for module in MOVED_MODULES.values():
        importlib.import_module(module)
