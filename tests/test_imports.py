"""What an import costs and brings along."""

from __future__ import annotations

import subprocess
import sys

import pytest

import scalelatent as sl

HEAVY = ["zarr", "numba", "dask", "distributed", "sklearn", "scipy", "matplotlib", "pydantic", "bokeh"]


def loaded_after(code: str) -> set[str]:
    report = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("code", ["import scalelatent", "import scalelatent.cli"])
def test_nothing_heavy_is_imported(code):
    loaded = loaded_after(code)
    assert not loaded & set(HEAVY)


def test_numpy_is_not_needed_to_print_help():
    assert "numpy" not in loaded_after("import scalelatent.cli")


def test_models_import_neither_storage_nor_cluster():
    loaded = loaded_after("import scalelatent.models.capsule.model")
    assert not loaded & {"zarr", "dask", "distributed", "sklearn", "scalelatent.data", "scalelatent.engine"}


def test_every_public_name_is_there():
    for name in sl.__all__:
        assert getattr(sl, name) is not None
        assert name in dir(sl)
    with pytest.raises(AttributeError, match="no attribute 'CapsulRegression'"):
        _ = sl.CapsulRegression


def test_show_versions(capsys):
    sl.show_versions()
    text = capsys.readouterr().out
    assert text.startswith(f"scalelatent    {sl.__version__}\n")
    assert "numpy" in text
