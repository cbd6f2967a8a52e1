"""What an import costs and brings along."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
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
    told = {line.split()[0]: line.split(maxsplit=1)[1] for line in text.splitlines() if line}
    import llvmlite.binding
    import numba
    from threadpoolctl import threadpool_info

    assert told["numpy"] == np.__version__
    assert "not known" not in text
    assert llvmlite.binding.get_host_cpu_name() in told["cpu"]
    assert f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores" in told["cpu"]
    assert threadpool_info()[0]["internal_api"] in told["blas"]
    assert told["numba"] == numba.__version__
    assert told["compiler"].startswith("LLVM ")
    assert {"Blosc", "Sharding,", "Zstd,"} <= set(text.split())
    assert "fits run in this process" in told["cluster"]


def test_a_broken_library_does_not_break_the_report(capsys, monkeypatch):
    import threadpoolctl

    def broken():
        raise OSError("no such library")

    monkeypatch.setattr(threadpoolctl, "threadpool_info", broken)
    sl.show_versions()
    assert "not known (OSError: no such library)" in capsys.readouterr().out
