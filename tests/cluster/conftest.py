"""Fixtures of cluster tests: a small cluster on loopback, rows on disk, and fits in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalelatent import CapsuleRegression, Dataset
from scalelatent.jobs import runner
from scalelatent.jobs.resolve import load_job
from tests.cluster.processes import Processes
from tests.helpers import read_model_files

ENGINE = {"block_rows": 64, "leaf_rows": 128}
OPTIONS: dict[str, Any] = {"capsule_dim": 2, "max_iter": 5, "random_state": 0, "projection": None}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


def _rows(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    rng = np.random.Generator(np.random.Philox(seed))
    pick = rng.integers(0, len(x), n)
    return np.clip(x[pick] + rng.integers(-2, 3, (n, 64)), 0, 16).astype(np.uint8), y[pick].astype(np.int64)


def start_cluster(workers: int, **more: Any) -> Any:
    from distributed import LocalCluster

    options = {"memory_limit": 0, "env": {"SCALELATENT_CACHE_BYTES": "0"}, **more}
    return LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=True,
        host="127.0.0.1", dashboard_address="127.0.0.1:0", silence_logs=50, **options,
    )  # fmt: skip


@pytest.fixture(scope="session")
def client() -> Iterator[Any]:
    """Start two worker processes that do not cache rows, and return their client."""
    from distributed import Client

    cluster = start_cluster(2)
    try:
        with Client(cluster, timeout=30, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            yield client
    finally:
        # On a busy machine a nanny (the process of Dask that watches a worker) may have replaced its worker
        # by one that the cluster object does not know. Closing the cluster then raises KeyError, after all
        # processes have ended.
        with suppress(KeyError):
            cluster.close(timeout=60)


@pytest.fixture(scope="session")
def start_other_cluster() -> Callable[..., Any]:
    """Return a function that starts a separate cluster for a test."""
    return start_cluster


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Write 10,000 training and 1,500 validation rows, that is, 79 and 12 leaves (fixed ranges of rows)."""
    folder = tmp_path_factory.mktemp("rows")
    x, y = _rows(10_000, 1)
    vx, vy = _rows(1_500, 2)
    return SimpleNamespace(
        x=x, y=y, vx=vx, vy=vy, folder=folder,
        train=Dataset.from_arrays(x, y).save(folder / "train", chunk_rows=300, shard_rows=1200),
        validation=Dataset.from_arrays(vx, vy).save(folder / "validation", chunk_rows=500),
    )  # fmt: skip


@pytest.fixture(scope="session")
def fit(rows: SimpleNamespace) -> Callable[..., CapsuleRegression]:
    """Return a function that fits on the stored rows; its arguments go to the estimator or to ``fit``."""

    def run(client: Any = None, run_dir: Any = None, callbacks: Any = (), **more: Any) -> CapsuleRegression:
        call = {k: more.pop(k) for k in ("resume", "sample_weight") if k in more}
        engine = {**ENGINE, **more.pop("engine", {})}
        x, y, held = more.pop("x", rows.train), more.pop("y", None), more.pop("validation", rows.validation)
        model = CapsuleRegression(**{**OPTIONS, "n_jobs": 1, **more})
        return model.fit(
            x, y, validation=held, client=client, run_dir=run_dir, callbacks=callbacks, engine=engine, **call
        )

    return run


@pytest.fixture(scope="session")
def fit_alone(fit: Callable[..., CapsuleRegression]) -> Callable[..., CapsuleRegression]:
    """Return a function like ``fit`` that fits in this process, once for each set of parameters."""
    kept: dict[str, CapsuleRegression] = {}

    def run(**more: Any) -> CapsuleRegression:
        key = repr(sorted(more.items()))
        if key not in kept:
            kept[key] = fit(**more)
        return kept[key]

    return run


@pytest.fixture(scope="session")
def assert_same() -> Callable[[CapsuleRegression, CapsuleRegression], None]:
    """Return a check that two fits have identical weights, and identical errors in the records of passes."""

    def check(a: CapsuleRegression, b: CapsuleRegression) -> None:
        np.testing.assert_array_equal(a.W_, b.W_)
        keys = ("pass", "objective", "train_error", "validation_error", "nu", "rows")
        assert [[r[k] for k in keys] for r in a.history_] == [[r[k] for k in keys] for r in b.history_]
        assert a.best_validation_error_ == b.best_validation_error_

    return check


@pytest.fixture
def worker_pids() -> Callable[[Any], dict[str, int]]:
    return lambda client: client.run(os.getpid)


@pytest.fixture
def mortal_cluster() -> Iterator[Any]:
    """Start a separate cluster for a test that kills its processes, and return its client."""
    from distributed import Client

    with start_cluster(2) as cluster, Client(cluster, timeout=30) as client:
        client.wait_for_workers(2, timeout=60)
        yield client


@pytest.fixture
def scheduler_tasks(client: Any) -> Callable[..., int]:
    """Return a function that waits up to ``wait`` seconds for a test's tasks to end, and counts the rest."""
    import gc
    import time

    def known() -> int:
        return client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))

    gc.collect()
    before = known()

    def count(wait: float = 0.0) -> int:
        deadline = time.monotonic() + wait
        gc.collect()
        while (n := known() - before) > 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        return n

    return count


@pytest.fixture(scope="module")
def undisturbed(dataset_folder: Path) -> dict[str, bytes]:
    """Fit the job of ``dataset_folder`` in this process, and return the files of its model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_report", lambda *_: None)
        result = runner.run_new_job(
            load_job(dataset_folder / "job.toml", settings=[f"job.out={dataset_folder / 'oracle'}"])
        )
    return read_model_files(result.folder)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    try:
        yield started
    finally:
        started.close()
