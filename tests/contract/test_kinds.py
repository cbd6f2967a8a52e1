"""Kinds (models that job files name) of this and other packages are found; a broken kind gives a warning."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from scalelatent.contract import kinds
from scalelatent.contract.kinds import Kind, find_kernels, find_kind, load_all_kinds, load_own_kinds
from scalelatent.errors import JobError

MEANS = Kind("means", estimator="m:Means", parameters="m:TABLE", kernels={"means_step": {"numba": "a:b"}})


@pytest.fixture
def declare_entry_points(monkeypatch):
    """Return a function that replaces all entry points: its keyword arguments are their names and values."""

    def declare(**values):
        points = [EntryPoint(name, value, kinds.GROUP) for name, value in values.items()]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
        load_all_kinds.cache_clear()

    yield declare
    monkeypatch.undo()
    load_all_kinds.cache_clear()


def test_own_kinds_are_found_in_folders_of_models():
    folders = {path.parent.name for path in Path(kinds.__file__).parents[1].glob("models/*/__init__.py")}
    found = {kind.estimator.split(".")[2] for kind in load_own_kinds().values()}
    assert {"capsule", "crbm", "mbn"} <= found <= folders


def test_the_parameter_table_of_a_kind_is_that_of_its_estimator():
    for kind in load_own_kinds().values():
        assert kind.load_parameters() is kind.estimator_class()._parameters


def test_own_kinds_are_declared_like_those_of_other_packages():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {kinds.GROUP: {"scalelatent": kinds.OWN_ENTRY_POINT}}


def test_a_kind_of_another_package_is_found(declare_entry_points):
    declare_entry_points(scalelatent=kinds.OWN_ENTRY_POINT, means=f"{__name__}:MEANS")
    assert find_kind("means") is MEANS
    assert find_kernels("means_step") == {"numba": "a:b"}
    assert set(load_all_kinds()) == {*load_own_kinds(), "means"}
    with pytest.raises(JobError, match=r"did you mean 'means'"):
        find_kind("mean")


def test_own_kinds_are_found_without_loading_other_packages(declare_entry_points):
    declare_entry_points(broken="no_such_module:KIND")
    assert find_kind("capsule").name == "capsule"
    assert find_kernels("capsule_estep")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("no_such_module:KIND", "ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{__name__}:NOWHERE", "AttributeError"),
        ("sys:path", "is not a scalelatent.contract.kinds.Kind"),
        ("sys:maxsize", "TypeError"),
        (f"{__name__}:DUPLICATE", "another package already defines the kind 'capsule'"),
    ],
)
def test_a_broken_entry_point_is_a_warning(declare_entry_points, value, why):
    declare_entry_points(broken=value)
    with pytest.warns(UserWarning, match=f"entry point broken = '{value}' of scalelatent.models: .*{why}"):
        assert set(load_all_kinds()) == set(load_own_kinds())


DUPLICATE = Kind("capsule", estimator="a:B", parameters="a:C")


def test_the_warning_names_a_broken_package(tmp_path):
    info = tmp_path / "broken_models-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-models\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{kinds.GROUP}]\nbroken = no_such_module:KIND\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); from scalelatent.contract import kinds; "
    done = subprocess.run(
        [sys.executable, "-c", code + "print(sorted(kinds.load_all_kinds()))"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(sorted(load_own_kinds()))
    assert "package broken-models 1.2: its models are ignored" in done.stderr


def test_reading_job_files_imports_little():
    code = "import sys; from scalelatent.contract.kinds import load_own_kinds; "
    code += "[kind.load_parameters() for kind in load_own_kinds().values()]; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    imported = set(done.stdout.split())
    assert "scalelatent.models.mbn.parameters" in imported
    assert not {"numba", "scipy", "sklearn", "zarr", "dask"} & imported
