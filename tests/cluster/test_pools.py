"""Workers get rows in proportion to their speed, wait little at the end of a pass, and give the same bits.

The kernel of these tests sleeps as long as the given speed of its worker requires, so the speed of the test
machine does not matter.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import scalelatent as sl
from scalelatent import CapsuleRegression, Dataset
from scalelatent.engine.batch_loop import fit_batches
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.callbacks import Callback
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.dask.executor import DaskExecutor
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.passes import make_stage
from scalelatent.errors import RunError
from tests.helpers import HookLog

SPEEDS = (1.0, 1.0, 20.0)
LEAF_ROWS, LEAVES, PASSES, IDEAL_PASS_SECONDS = 8, 600, 6, 1.2
pytestmark = pytest.mark.slow


def import_benchmark(name: str) -> Any:
    """Import a module of the folder ``benchmarks`` by its path, because the folder is no package."""
    if name not in sys.modules:
        path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


paced = import_benchmark("paced_learner")


@pytest.fixture(scope="module")
def pool(start_other_cluster: Callable[..., Any]) -> Iterator[Any]:
    from distributed import Client

    with (
        start_other_cluster(len(SPEEDS)) as cluster,
        Client(cluster, timeout=30, set_as_default=False) as client,
    ):
        client.wait_for_workers(len(SPEEDS), timeout=60)
        client.upload_file(paced.__file__)
        yield client


@pytest.fixture(scope="module")
def pool_fit(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return a fit on the three workers, the blocks that each computed, and the same fit in this process."""
    folder = tmp_path_factory.mktemp("pool")
    x = np.random.Generator(np.random.Philox(3)).normal(size=(LEAF_ROWS * LEAVES, 8)).astype("f4")
    dataset = Dataset.from_arrays(x).save(folder / "rows", chunk_rows=LEAF_ROWS * 16)
    learner = paced.PacedLearner(IDEAL_PASS_SECONDS * sum(SPEEDS) / len(x), SPEEDS, PASSES)
    stage = make_stage(
        "paced_estep", learner, {"train": dataset}, "cpu", block_rows=LEAF_ROWS, leaf_rows=LEAF_ROWS
    )
    log, store = HookLog(), EngineStore(folder / "run")
    executor = DaskExecutor(pool, store, checkpoint_seconds=3600, callbacks=log)
    there = fit_batches(executor, stage, learner.start(), callbacks=log, store=store)
    here = fit_batches(
        InProcessExecutor(1, cache=PieceCache(0)), stage, learner.start(), callbacks=Callback()
    )
    blocks = pool.run(paced.list_computed_blocks)
    speeds = executor.pools.speeds(stage, executor.threads)
    names = {w["name"]: a for a, w in pool.scheduler_info(n_workers=-1)["workers"].items()}
    return SimpleNamespace(
        there=there,
        here=here,
        blocks=blocks,
        speeds=speeds,
        log=log,
        fast=names[len(SPEEDS) - 1],
        stage=stage,
    )


def test_a_pool_gives_the_bits_of_one_process(pool_fit: SimpleNamespace) -> None:
    assert [r["objective"] for r in pool_fit.there.history] == [r["objective"] for r in pool_fit.here.history]
    assert pool_fit.there.state["shift"] == pool_fit.here.state["shift"]


def test_every_row_is_computed_once(pool_fit: SimpleNamespace) -> None:
    """No pass was restarted and no running task was moved, which would compute rows again."""
    rows = [0] * PASSES
    for own in pool_fit.blocks.values():
        for iteration, n, _, _ in own:
            rows[iteration] += n
    assert rows == [LEAF_ROWS * LEAVES] * PASSES
    assert [e for e in pool_fit.log.infos("event") if e["event"] in ("span_redone", "worker_lost")] == []


def test_the_speeds_of_workers_are_measured(pool_fit: SimpleNamespace) -> None:
    found = pool_fit.speeds.speeds
    slow = [speed for address, speed in found.items() if address != pool_fit.fast]
    assert 8 < found[pool_fit.fast] / statistics.mean(slow) < 30


def test_the_fast_worker_gets_its_share_and_does_not_wait(pool_fit: SimpleNamespace) -> None:
    """After its speed is measured, the fast worker has nearly its share of the rows.

    Other programs may delay a pass, so the test uses the median share and the shortest wait of the passes.
    """
    shares, idle = [], []
    for number in range(2, PASSES):
        there = {a: [b for b in own if b[0] == number] for a, own in pool_fit.blocks.items()}
        begin = min(b[2] for own in there.values() for b in own)
        end = max(b[3] for own in there.values() for b in own)
        fast = there[pool_fit.fast]
        shares.append(sum(b[1] for b in fast) / (LEAF_ROWS * LEAVES))
        idle.append((end - max(b[3] for b in fast)) / (end - begin))
    # The fast worker has 20 times the speed of each of two others, so it should compute 20 of 22 parts of the
    # rows, a share of 0.91.
    assert 0.75 < statistics.median(shares) < 0.97
    assert min(idle) < 0.15


def test_the_devices_that_computed_are_reported(pool_fit: SimpleNamespace) -> None:
    reported = [event for event in pool_fit.log.infos("event") if event["event"] == "devices"]
    assert [event["devices"] for event in reported] == ["cpu 3 workers"]


def test_dask_does_not_move_tasks_of_a_pool(pool: Any, pool_fit: SimpleNamespace) -> None:
    def fast_tasks() -> list[str]:
        from distributed import stealing

        return sorted(stealing.fast_tasks)

    assert "paced_estep_pool" in pool.run_on_scheduler(fast_tasks)


def test_a_fit_on_gpus_needs_a_gpu_worker(pool: Any, rows: SimpleNamespace) -> None:
    model = CapsuleRegression(capsule_dim=2, max_iter=2, random_state=0, device="gpu")
    with pytest.raises(RunError, match="none of the 3 workers .* offers the resource GPU.*--gpus 1"):
        model.fit(rows.train, client=pool)


def test_only_the_worker_of_a_gpu_computes_with_it(
    rows: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker declares a GPU that does not exist.

    With device="gpu" this worker gets all tasks, and reports CuPy if it is missing. With "cpu" both workers
    compute, and the bits are those of one process.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7,1")
    options: dict[str, Any] = {"capsule_dim": 2, "max_iter": 2, "random_state": 0, "projection": None}
    engine = {"block_rows": 64, "leaf_rows": 128}
    with sl.cluster("local", workers=1, threads=2, gpus=1, dashboard_address=None) as client:
        found = client.run(read_visible_gpus)
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        reported = {w["name"]: (w["nthreads"], w["resources"].get("GPU")) for w in workers}
        if importlib.util.find_spec("cupy") is None:
            with pytest.raises(RunError, match="CuPy"):
                CapsuleRegression(device="gpu", **options).fit(rows.train, client=client, engine=engine)
        there = CapsuleRegression(device="cpu", **options).fit(rows.train, client=client, engine=engine)
    assert reported == {"cpu-0": (2, None), "gpu-0": (1, 1)}
    assert dict(found.values()) == {"cpu-0": "-1", "gpu-0": "GPU-7"}
    here = CapsuleRegression(device="cpu", n_jobs=1, **options).fit(rows.train, engine=engine)
    np.testing.assert_array_equal(there.W_, here.W_)


def read_visible_gpus(dask_worker: Any) -> tuple[str, str | None]:
    return dask_worker.name, os.environ.get("CUDA_VISIBLE_DEVICES")
