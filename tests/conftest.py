"""Settings of hypothesis and of test processes, and fixtures that return folders of the real data."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import settings

# Hypothesis draws the same examples in every run; HYPOTHESIS_PROFILE=more draws more and other ones. There is
# no deadline, because the first call of a numba kernel compiles it and test machines are busy.
settings.register_profile("scalelatent", deadline=None, derandomize=True, database=None, max_examples=60)
settings.register_profile("more", deadline=None, derandomize=False, database=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "scalelatent"))

# BLAS and OpenMP use one thread, as in a fit, because several test processes share the cores.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

ROOT = Path(__file__).resolve().parent.parent


def find_real_data() -> Path | None:
    """Return the folder of the real data, SCALELATENT_DATA or ../shared/data beside the checkout, or None."""
    named = os.environ.get("SCALELATENT_DATA")
    if named:
        folder = Path(named).expanduser()
        return folder if folder.is_dir() else None
    beside = ROOT.parent / "shared" / "data"
    return beside if beside.is_dir() else None


# Tests in these folders are marked slow, because most of them start a cluster, an object store or a script of
# the folder cluster/. UNMARKED_FILES are not: they test identical bits, and killed workers and drivers.
SLOW_FOLDERS = ("cluster", "stores", "recipes")
UNMARKED_FILES = ("test_same_bits.py", "test_failures.py")
MAX_PROCESSES = 4


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes of ``-n auto``: of CPUs, at most MAX_PROCESSES; 0 for selected tests."""
    from dask.system import cpu_count

    is_selection = config.option.keyword or config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    return 0 if is_selection else min(MAX_PROCESSES, cpu_count())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents or item.path.name in UNMARKED_FILES:
            continue
        if item.path.relative_to(here).parts[0] in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)
    if importlib.util.find_spec("torch") is None:
        skip = pytest.mark.skip(reason="needs PyTorch: the extra torch")
        for item in items:
            if item.nodeid.startswith("scalelatent/models/mbn/compressive"):
                item.add_marker(skip)
    if find_real_data() is None:
        skip = pytest.mark.skip(reason="real data: set SCALELATENT_DATA to the folder that holds mnist/")
        for item in items:
            if "realdata" in item.keywords:
                item.add_marker(skip)


# Modules that a worker imports before its first tasks are done.
WORKER_IMPORTS = [
    "distributed.nanny",
    "distributed.worker",
    "scalelatent.engine.dask.online_tasks",
    "scalelatent.engine.dask.pass_tasks",
    "scalelatent.engine.dask.trial",
    "scalelatent.models.capsule.fit",
    "scalelatent.models.crbm.fit",
    "scalelatent.models.mbn.fit",
    "zarr",
]


@pytest.fixture(scope="session", autouse=True)
def _preload_worker_imports(request: pytest.FixtureRequest) -> None:
    """Fork the workers of this process from a process that has imported scalelatent and Dask.

    A new interpreter takes two seconds of processor time to import both, and there are hundreds of workers.
    Workers that the command line starts are not forked: they start as they do for users.
    """
    if not any(item.get_closest_marker("cluster") for item in request.session.items):
        return
    import dask
    from distributed.utils import get_mp_context

    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    get_mp_context().set_forkserver_preload(WORKER_IMPORTS)  # This replaces Dask's preload list.


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Return the folder of the real data (for tests marked `realdata`)."""
    folder = find_real_data()
    if folder is None:
        pytest.skip("real data: set SCALELATENT_DATA to the folder that holds mnist/")
    return folder


@pytest.fixture(scope="session")
def mnist_dir(data_root: Path) -> Path:
    """Return the folder of the four MNIST IDX files (for tests marked `realdata`)."""
    folder = data_root / "mnist"
    if not folder.is_dir():
        pytest.skip(f"real data: {folder} is missing")
    return folder
