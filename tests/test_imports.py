"""Importing parts of the package loads few modules, and imports are declared and free of cycles."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from dask.system import cpu_count

import scalelatent as sl

HEAVY = ["zarr", "numba", "dask", "distributed", "sklearn", "scipy", "matplotlib", "pydantic", "bokeh"]


def list_modules_after(code: str) -> set[str]:
    report = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("code", ["import scalelatent", "import scalelatent.cli"])
def test_importing_the_package_loads_no_heavy_module(code):
    loaded = list_modules_after(code)
    assert not loaded & set(HEAVY)


def test_numpy_is_not_needed_to_print_help():
    assert "numpy" not in list_modules_after("import scalelatent.cli")


@pytest.mark.parametrize("module", ["submit", "control", "clusterdriver"])
def test_verbs_of_submitted_jobs_load_no_models(module):
    """Each `submit`, `status` and `cancel` would take half a second longer if it imported the models."""
    assert not list_modules_after(f"import scalelatent.jobs.{module}") & (
        set(HEAVY) - {"pydantic"} | {"numpy"}
    )


@pytest.mark.parametrize("name", ["CapsuleRegression", "MultilayerBootstrapNetwork", "CompressiveMBN"])
def test_an_estimator_loads_little_except_base_classes_of_scikit_learn(name):
    """Numba, Dask and zarr are imported later, by the first fit that needs them."""
    loaded = list_modules_after(f"import scalelatent as sl; sl.{name}")
    beside = loaded - list_modules_after("import sklearn.base, sklearn.utils.multiclass")
    assert {module.split(".")[0] for module in beside} - sys.stdlib_module_names <= {"scalelatent", "crc32c"}
    assert not loaded & {"sklearn.metrics", "sklearn.model_selection", "sklearn.cluster"}


def test_models_import_neither_storage_nor_cluster():
    loaded = list_modules_after("import scalelatent.models.capsule.model.em")
    assert not loaded & {"zarr", "dask", "distributed", "sklearn", "scalelatent.data", "scalelatent.engine"}


ROOT = Path(__file__).parents[1]
PACKAGES = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "cupy": "cupy-cuda13x",
    "cupy_backends": "cupy-cuda13x",
}
# Undeclared imports. IPython is used only inside a notebook, and anndata and xarray only for objects that
# users pass, so these packages are then installed.
OTHERS = {"scalelatent", "IPython", "anndata", "xarray"}


def find_imported() -> dict[str, str]:
    """Return the imported packages (names as in pyproject.toml), each with a file that imports it."""
    found = {}
    for file in sorted((ROOT / "scalelatent").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in {name.split(".")[0] for name in names} - sys.stdlib_module_names - OTHERS:
                found[PACKAGES.get(name, name.replace("_", "-"))] = str(file.relative_to(ROOT))
    return found


def test_imported_packages_are_the_declared_ones():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = [v for k, v in project["optional-dependencies"].items() if k not in ("test", "bench", "docs")]
    needed, wished = (
        {re.split(r"[<>=\[]", line)[0] for line in lines}
        for lines in (project["dependencies"], [line for lines in optional for line in lines])
    )
    imported = find_imported()
    assert {name: file for name, file in imported.items() if name not in needed | wished} == {}
    assert needed - imported.keys() == set()


def test_every_public_name_can_be_imported():
    for name in sl.__all__:
        assert getattr(sl, name) is not None
        assert name in dir(sl)
    with pytest.raises(AttributeError, match="no attribute 'CapsulRegression'"):
        _ = sl.CapsulRegression


def test_show_versions_lists_packages(capsys):
    sl.show_versions()
    text = capsys.readouterr().out
    assert text.startswith(f"scalelatent    {sl.__version__}\n")
    reported = {line[:14].strip(): line[15:] for line in text.splitlines() if line}
    import llvmlite.binding
    import numba
    from threadpoolctl import threadpool_info

    assert reported["numpy"] == np.__version__
    assert "not known" not in text
    assert llvmlite.binding.get_host_cpu_name() in reported["cpu"]
    assert f"{cpu_count()} of {os.cpu_count()} logical CPUs" in reported["cpu"]
    for pool in threadpool_info():
        assert pool["user_api"] != "blas" or f"blas threads   {pool['internal_api']} " in text
    assert f"\nnumba          {numba.__version__}\n" in text
    assert reported["numba"].startswith(f"{numba.__version__}, LLVM ")


def test_a_broken_library_does_not_break_the_report(capsys, monkeypatch):
    import threadpoolctl

    def broken():
        raise OSError("no such library")

    monkeypatch.setattr(threadpoolctl, "threadpool_info", broken)
    sl.show_versions()
    assert "blas threads   OSError: no such library\n" in capsys.readouterr().out


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions count; imports for type checkers (TYPE_CHECKING) do not."""
    import grimp

    graph = grimp.build_graph("scalelatent", exclude_type_checking_imports=True)
    left = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while free := {module for module, imported in left.items() if not imported}:
        left = {module: imported - free for module, imported in left.items() if module not in free}
    assert left == {}
