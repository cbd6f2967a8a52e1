"""The stand-in for CuPy has only names that CuPy has. These tests need CuPy, but no device."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture
def stand_in(load_helper):
    return load_helper("fake_cupy")


def test_every_name_of_the_stand_in_exists_in_cupy(stand_in):
    pytest.importorskip("cupy")
    for module, names in stand_in.NAMES.items():
        # First look for an attribute of the parent, as the package does: cupy.cuda.driver is only an
        # attribute, and an import of its package would load cuBLAS.
        parent, _, last = module.rpartition(".")
        try:
            there = importlib.import_module(parent) if "libs" in parent else importlib.import_module("cupy")
            for name in [last] if "libs" in parent else module.split(".")[1:]:
                there = getattr(there, name)
        except ImportError as error:
            pytest.skip(f"{module} needs a CUDA library that is not here: {error}")
        missing = [name for name in names if not hasattr(there, name)]
        assert not missing, f"{module} has no {missing}"


def test_every_method_of_the_stand_in_exists_in_cupy(stand_in):
    cupy = pytest.importorskip("cupy")
    pairs = [
        (stand_in.ndarray, cupy.ndarray),
        (stand_in.Stream, cupy.cuda.Stream),
        (stand_in.Event, cupy.cuda.Event),
        (stand_in.MemoryPointer, cupy.cuda.MemoryPointer),
        (stand_in.RawModule, cupy.RawModule),
        (stand_in.RawKernel, cupy.RawKernel),
        (stand_in._Pool, cupy.cuda.MemoryPool),
    ]
    for fake, real in pairs:
        names = {name for name in vars(fake) if not name.startswith("_")} - {"library"}
        assert names <= set(dir(real)), fake
    assert issubclass(cupy.cuda.memory.OutOfMemoryError, MemoryError)
    assert issubclass(cupy.cuda.runtime.CUDARuntimeError, RuntimeError)
