"""A fit on a cluster equals the fit in this process bit by bit, and leaves nothing on the cluster."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask.array as da
import numpy as np
import pytest

import scalelatent as sl
from scalelatent import Callback, CapsuleRegression, Dataset


@pytest.mark.parametrize("workers", [1, 4, 2])
def test_any_number_of_workers_gives_the_same_bits(
    client: Any, fit: Any, fit_alone: Any, assert_same: Any, workers: int
) -> None:
    client.cluster.scale(workers)
    client.wait_for_workers(workers, timeout=60)
    import time

    deadline = time.monotonic() + 30
    while len(client.nthreads()) != workers and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(client.nthreads()) == workers
    assert_same(fit(client), fit_alone())


@pytest.mark.parametrize(
    "options",
    [
        {"architecture": "all_vs_all", "capsule_dim": 1},
        {"architecture": "one_vs_all", "nu_schedule": None, "class_weight": "balanced"},
        {"projection": 20},
        {"capsule_dim": [1, 2, 3, 1, 2, 3, 1, 2, 3, 4], "init": "random", "ridge": 1.0},
        {"validation": None, "engine": {"block_rows": 10_000, "leaf_rows": 10_000}},
        {"device": "reference", "max_iter": 2},
    ],
    ids=lambda o: ",".join(o),
)
def test_every_kind_of_fit_gives_the_same_bits(
    client: Any, fit: Any, fit_alone: Any, assert_same: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    assert_same(fit(client, run_dir=tmp_path / "run", **options), fit_alone(**options))


def test_a_fit_without_a_run_folder_leaves_no_files(
    client: Any, fit: Any, fit_alone: Any, assert_same: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert_same(fit(client), fit_alone())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["numpy", "dask", "memory dataset", "weighted"])
def test_arrays_are_fitted_on_a_cluster(
    client: Any, fit: Any, fit_alone: Any, assert_same: Any, rows: SimpleNamespace, tmp_path: Path, form: str
) -> None:
    weight = np.random.Generator(np.random.Philox(1)).uniform(0.2, 2, len(rows.x))
    given: dict[str, Any] = {
        "numpy": {"x": rows.x, "y": rows.y, "validation": (rows.vx, rows.vy)},
        "dask": {"x": da.from_array(rows.x, chunks=(1700, 64)), "y": rows.y},
        "memory dataset": {"x": Dataset.from_arrays(rows.x, rows.y)},
        "weighted": {"x": rows.x, "y": rows.y, "sample_weight": weight},
    }[form]
    model = fit(client, run_dir=tmp_path / "run", **given)
    assert_same(model, fit(**given) if form == "weighted" else fit_alone())
    left = [p for p in (tmp_path / "run").rglob("*") if p.name.endswith(".zarr")]
    assert left == [tmp_path / "run" / "model.zarr"]


def test_arrays_are_written_to_the_given_scratch_folder(
    client: Any, fit: Any, fit_alone: Any, assert_same: Any, rows: SimpleNamespace, tmp_path: Path
) -> None:
    seen: list[Path] = []

    class Look(Callback):
        def on_pass_end(self, record: dict[str, Any]) -> None:
            seen.extend((tmp_path / "scratch").rglob("*.zarr"))

    model = fit(
        client, run_dir=tmp_path / "run", x=rows.x, y=rows.y, callbacks=Look(),
        engine={"scratch": str(tmp_path / "scratch")},
    )  # fmt: skip
    assert_same(model, fit_alone())
    assert seen
    assert list((tmp_path / "scratch").rglob("*.zarr")) == []


def test_the_context_manager_of_a_cluster_is_used_by_fits(
    fit: Any, fit_alone: Any, assert_same: Any, rows: SimpleNamespace
) -> None:
    with sl.cluster("local", workers=1, dashboard_address=None) as client:
        assert client.scheduler.address.startswith("tcp://127.0.0.1")
        before = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.transition_counter)
        assert_same(fit(), fit_alone())
        assert client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.transition_counter) > before + 50
    assert_same(fit(), fit_alone())  # The next fit runs in this process again.


def test_outputs_are_written_by_the_workers(
    client: Any, fit_alone: Any, rows: SimpleNamespace, tmp_path: Path
) -> None:
    model = fit_alone()
    there = model.predict(rows.train, out=tmp_path / "there", client=client)
    here = model.predict(rows.train, out=tmp_path / "here")
    for name in ("there", "here"):
        assert (tmp_path / name / "zarr.json").exists()
    files = [
        {
            str(p.relative_to(tmp_path / n)): p.read_bytes()
            for p in sorted((tmp_path / n).rglob("*"))
            if p.is_file()
        }
        for n in ("there", "here")
    ]
    assert files[0] == files[1]
    assert there.fingerprint() == here.fingerprint()
    np.testing.assert_array_equal(there.read_y(0, 10_000), model.predict(rows.x))


# -- bytes that a pass reads, tasks and messages that it sends -----------------------------------------------


@pytest.mark.parametrize("architecture", ["multiclass", "all_vs_all"])
def test_a_pass_reads_each_block_once_for_any_architecture(
    client: Any, fit: Any, rows: SimpleNamespace, architecture: str
) -> None:
    model = fit(client, architecture=architecture, capsule_dim=1)
    one_pass = 11_500 * (64 + 4)  # A row has 64 pixels (uint8) and a class (int32).
    assert [r["bytes_read"] for r in model.history_] == [one_pass] * 5
    assert [r["rows"] for r in model.history_] == [11_500] * 5


def test_rows_that_fit_into_the_caches_are_read_once(
    client: Any, fit: Any, fit_alone: Any, assert_same: Any
) -> None:
    def keep(limit: int) -> None:
        from scalelatent.engine import cache

        cache._shared = cache.PieceCache(limit)

    client.run(keep, 10**8)
    try:
        model = fit(client)
    finally:
        client.run(keep, 0)
    assert_same(model, fit_alone())
    read = [r["bytes_read"] for r in model.history_]
    # In the first pass, the caches already contain rows, because the stage of second moments has read them.
    assert read[0] <= 11_500 * 68
    # Occasionally a span (row range of a task) goes to another worker, which reads its rows again.
    assert sum(read[2:]) < 11_500 * 68


@pytest.fixture
def submitted_tasks(client: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Return a list that receives, for each sent task, (key, bytes of the pickled task, dependencies)."""
    from distributed.protocol.pickle import dumps

    from scalelatent.engine.dask.graph import Graph

    found: list[tuple[str, int, int]] = []
    original = Graph.send

    def send(graph: Graph, *args: Any, **options: Any) -> Any:
        for key, task in graph.tasks.items():
            found.append((key, len(dumps(task)), len(task.dependencies)))
        return original(graph, *args, **options)

    monkeypatch.setattr(Graph, "send", send)
    return found


@pytest.fixture
def sent_graphs(client: Any, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Return a list that receives the set of keys of each graph that is sent to the scheduler."""
    found: list[set[str]] = []
    original = client._graph_to_futures

    def send(expr: Any, *args: Any, **options: Any) -> Any:
        found.append(set(expr.__dask_graph__()))
        return original(expr, *args, **options)

    monkeypatch.setattr(client, "_graph_to_futures", send)
    return found


TASK_KEY = re.compile(
    r"capsule_(params|mstep|info|estep|moments|svd|decision-\d+|temperature|(estep_|moments_|svd_|decision-\d+_|temperature_)?(merge))-it\d{4}(-[svt]\d{4}|-[tv]\d-\d{4}|-train-root|-validation-root|-\w+-\d{4})?-[0-9a-f]{6}\d+"
)


def test_tasks_are_few_and_small_and_have_readable_names(
    client: Any, fit: Any, submitted_tasks: list[tuple[str, int, int]], tmp_path: Path
) -> None:
    from dask.utils import key_split

    model = fit(
        client,
        run_dir=tmp_path / ("a" * 150),
        architecture="all_vs_all",
        capsule_dim=4,
        max_iter=3,
        projection=30,
    )
    # The parameters have more bytes than the limit of a task below, so no task can contain them.
    assert model.W_.nbytes > 80_000
    assert submitted_tasks
    for key, size, futures in submitted_tasks:
        assert size < 10_000, key
        # A task depends at most on eight merged results of each of two statistics, and on the parameters.
        assert futures <= 8 * 2 + 1, key
    esteps = [key for key, _, _ in submitted_tasks if key.startswith("capsule_estep")]
    strange = [
        k for k, _, _ in submitted_tasks if not TASK_KEY.fullmatch(k) and not k.startswith("capsule_project")
    ]
    assert strange == []
    assert len({key for key, _, _ in submitted_tasks}) == len(submitted_tasks)
    counts = [sum(f"-it{number:04d}-" in key for key in esteps) for number in (1, 2, 3, 4, 5)]
    # The fit may start pass 4 before it knows that pass 3 was the last, but never pass 5.
    assert counts[0] == counts[1] == counts[2] >= counts[3]
    assert counts[4] == 0
    for number in (1, 2, 3):
        assert sum(key.startswith(f"capsule_mstep-it{number:04d}") for key, _, _ in submitted_tasks) == 1
    assert any(re.match(r"capsule_estep-it0002-s0001", key) for key in esteps)
    assert {key_split(key) for key in esteps} == {
        "capsule_estep"
    }  # The dashboard of Dask shows one bar for these tasks.


def test_a_pass_is_one_message(client: Any, fit: Any, sent_graphs: list[set[str]]) -> None:
    """All tasks of a pass are sent in one message if the duration of a span (row range of a task) is known.

    The first passes, whose durations are unknown, are not tested.
    """
    fit(client, max_iter=12, nu_schedule=None)
    for number in range(3, 13):
        about = [keys for keys in sent_graphs if any(f"_estep-it{number:04d}-" in key for key in keys)]
        assert len(about) == 1, number
        assert any(key.startswith(f"capsule_mstep-it{number:04d}-") for key in about[0])
        assert sum("_estep-" in key for key in about[0]) >= 3
    assert len(sent_graphs) < 2 * 12 + 10


@pytest.mark.slow
def test_tasks_and_files_do_not_grow_over_200_passes(
    client: Any, fit: Any, scheduler_tasks: Any, tmp_path: Path
) -> None:
    def sizes() -> dict[str, int]:
        from scalelatent.engine.dask import pass_tasks as tasks

        return {"recent": len(tasks._recent._kept)}

    from scalelatent.engine.dask.cluster_pass import CHAIN_PASSES

    seen: list[tuple[int, int, int, int]] = []

    class Watch(Callback):
        def on_pass_end(self, record: dict[str, Any]) -> None:
            if record["pass"] % 40 == 0:
                recent = max(s["recent"] for s in client.run(sizes).values())
                folder = len(list((tmp_path / "run" / "engine").iterdir()))
                seen.append((scheduler_tasks(), len(client.futures), recent, folder))

    few = Dataset.from_arrays(*draw_few_rows()).save(tmp_path / "few")
    model = fit(
        client,
        run_dir=tmp_path / "run",
        x=few,
        validation=None,
        max_iter=200,
        nu_schedule=None,
        callbacks=Watch(),
    )
    assert model.n_iter_ == 200
    tasks, futures, recent, folder = (max(column) for column in zip(*seen, strict=True))
    # The scheduler has a chain of passes (each needs the state of the one before), one pass that has started
    # after this chain, and one that is being released.
    assert tasks <= 5 * (CHAIN_PASSES + 2)
    assert futures <= 2 * 10
    assert recent <= 8
    assert folder <= 13  # Files of records, of states and of notes.
    assert seen[-1][3] <= seen[0][3]
    # The count is relative to the start of this test, so it is negative if older tasks were released.
    assert scheduler_tasks(wait=5) <= 0


def draw_few_rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.Philox(3))
    return rng.normal(size=(600, 8)).astype("f4"), rng.integers(0, 3, 600)


def test_the_scheduler_releases_all_tasks_of_a_fit(client: Any, fit: Any, scheduler_tasks: Any) -> None:
    fit(client)
    # The count is relative to the start of this test, so it is negative if older tasks were released.
    assert scheduler_tasks(wait=5) <= 0


def test_a_fit_does_not_limit_the_thread_pools_of_this_process(client: Any, fit: Any) -> None:
    from threadpoolctl import threadpool_info

    before = [p["num_threads"] for p in threadpool_info()]
    fit(client, max_iter=1)
    assert [p["num_threads"] for p in threadpool_info()] == before


def test_two_fits_run_at_once(
    client: Any, fit: Any, fit_alone: Any, assert_same: Any, tmp_path: Path
) -> None:
    import threading

    got: dict[int, CapsuleRegression] = {}
    threads = [
        threading.Thread(
            target=lambda d=d: got.__setitem__(d, fit(client, run_dir=tmp_path / str(d), capsule_dim=d))
        )
        for d in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert_same(got[1], fit_alone(capsule_dim=1))
    assert_same(got[2], fit_alone(capsule_dim=2))
