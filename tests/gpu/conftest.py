"""Fixtures that test CUDA kernels without a GPU: compiled for the processor, with a stand-in for CuPy."""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from scalelatent.engine import backend
from scalelatent.kernels.cuda import Kernels

HERE = Path(__file__).resolve().parent


def import_helper(name: str):
    """Import a helper module of this folder by its path, because this folder is no package."""
    full = f"gpu_tests_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, HERE / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


@pytest.fixture(scope="session")
def load_helper():
    return import_helper


@pytest.fixture
def cases():
    """Return the module with inputs and comparisons that tests of emulated and of real devices share."""
    return import_helper("cases")


@pytest.fixture(scope="session")
def cuda_text() -> str:
    return Kernels("scalelatent.models.capsule.kernels").text


@pytest.fixture(scope="session")
def emulate(tmp_path_factory):
    """Return a function that compiles the kernels of a model's gpu.cu for this processor.

    For example, ``emulate("mbn")`` does so for bootstrap networks. Each model is compiled once per session.
    """
    emulation = import_helper("emulation")
    if emulation.compiler() is None or not sys.platform.startswith("linux"):
        pytest.skip("the CUDA text on a processor needs a C++ compiler and Linux")

    @cache
    def compiled(model: str):
        text = Kernels(f"scalelatent.models.{model}.kernels").text
        return emulation.Emulated(text, tmp_path_factory.mktemp(f"emulated_{model}"))

    return compiled


@pytest.fixture(scope="session")
def emulated(emulate):
    """Return the compiled kernels that the stand-in for CuPy launches: those of capsules.

    A module that tests another model overrides this fixture, and the fixture ``fake`` then uses its kernels.
    """
    return emulate("capsule")


def _unload_gpu_modules() -> None:
    backend.find_kernel.cache_clear()
    # Keep the module of backends, because other modules have imported its functions.
    bodies = [name for name in sys.modules if re.fullmatch(r"scalelatent\.models\.\w+\.kernels\.gpu", name)]
    for name in bodies:
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(child, None)


def pytest_generate_tests(metafunc):
    """Run tests with ``turns`` in each order (of threads and blocks) of TURNS; all but the first are slow."""
    if "turns" in metafunc.fixturenames:
        first, *others = import_helper("emulation").TURNS
        metafunc.parametrize(
            "turns", [first, *(pytest.param(turns, marks=pytest.mark.slow) for turns in others)]
        )


@pytest.fixture
def turns():
    """Return the order in which emulated threads and blocks run.

    The hook pytest_generate_tests above replaces the result by each of the orders.
    """


@pytest.fixture
def fake(emulated, turns):
    """Replace CuPy by its stand-in, and return it; modules that import CuPy are loaded again."""
    fake_cupy = import_helper("fake_cupy")
    _unload_gpu_modules()
    backend._ON_DEVICE.clear()  # Forget the backends of earlier tests.
    emulated.turns = turns
    before = fake_cupy.install(emulated)
    yield fake_cupy
    fake_cupy.remove(before)
    _unload_gpu_modules()


@pytest.fixture
def real():
    """Return CuPy for tests marked `gpu`; skip the test on a machine without a device."""
    cupy = pytest.importorskip("cupy")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        count = 0
    if not count:
        pytest.skip("CuPy finds no CUDA device here")
    return cupy
