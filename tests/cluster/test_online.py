"""Online fits on a cluster have small tasks, and the bits of one process, also if workers die."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent.data import Dataset, open_dataset
from scalelatent.engine import batch_loop as loop
from scalelatent.engine import online_loop as online
from scalelatent.engine.batch_loop import LoopResult
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.dask import online_steps as dask_online
from scalelatent.engine.dask.executor import DaskExecutor
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.online_loop import fit_online
from scalelatent.engine.order import RowOrder
from scalelatent.engine.passes import make_stage
from scalelatent.errors import DataError
from tests.helpers import load_online_toys

from .test_failures import EverySpan

P, K, ROWS, BATCH = 12, 4, 960, 48
STEPS = ROWS // BATCH
pytestmark = pytest.mark.slow  # The tests of this file take about a minute, so only `.ci/run` runs them.

toys = load_online_toys()
LEARNERS = {"gradient": toys.Logistic(P, K), "walk": toys.Walk(P, K), "evidence": toys.Evidence(P)}


@pytest.fixture(scope="module")
def rows_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with stored rows: ``train`` and ``validation``."""
    folder = tmp_path_factory.mktemp("online")
    centres = np.random.Generator(np.random.Philox(9)).normal(size=(K, P))
    for name, n, seed in (("train", ROWS, 1), ("validation", 400, 2)):
        rng = np.random.Generator(np.random.Philox(seed))
        y = rng.integers(0, K, n)
        x = (centres[y] + rng.normal(size=(n, P))).astype("f4")
        Dataset.from_arrays(x, y).save(folder / name, chunk_rows=60, shard_rows=300)
    return folder


def upload_learners(client: Any) -> None:
    """Send the module of the toy learners to all workers; Dask also sends it to workers that join later."""
    client.upload_file(toys.__file__)


@pytest.fixture(scope="module")
def workers(client: Any) -> Any:
    upload_learners(client)
    return client


@pytest.fixture
def killable_workers(mortal_cluster: Any) -> Any:
    upload_learners(mortal_cluster)
    return mortal_cluster


@pytest.fixture(scope="module")
def run(rows_folder: Path) -> Callable[..., LoopResult]:
    def run(
        client: Any, where: Path | None, kind: str = "gradient", *, spread: str = "all", callback: Any = (),
        epochs: int = 2, chains: int = 4, train: Any = None, batch: int = BATCH, **options: Any,
    ) -> LoopResult:  # fmt: skip
        learner = LEARNERS[kind]
        train = open_dataset(rows_folder / "train") if train is None else train
        datasets = {"train": train}
        if kind == "gradient":
            datasets["validation"] = open_dataset(rows_folder / "validation")
        stage = make_stage("toy_step", learner, datasets, "cpu", train.classes, block_rows=64, leaf_rows=64)
        store = None if where is None else EngineStore(where)
        if client is None:
            executor: Any = InProcessExecutor(1, store, cache=PieceCache(0))
        else:
            executor = DaskExecutor(client, store)
            executor.spread = spread
        order = RowOrder(len(train), 3, batch, n_chains=chains, run_rows=64, buffer_runs=4)
        return fit_online(
            executor, stage, learner.start(), order=order, n_epochs=epochs,
            callbacks=Callbacks(callback), store=store, **options,
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def fit_alone(run: Any) -> Callable[..., LoopResult]:
    """Return a function like ``run`` that fits in this process, once for each set of options."""
    kept: dict[str, LoopResult] = {}

    def get(kind: str = "gradient", **options: Any) -> LoopResult:
        key = f"{kind} {sorted(options.items())}"
        if key not in kept:
            kept[key] = run(None, None, kind, **options)
        return kept[key]

    return get


def assert_same(a: LoopResult, b: LoopResult) -> None:
    assert a.state.keys() == b.state.keys()
    for key in a.state:
        np.testing.assert_array_equal(a.state[key], b.state[key], err_msg=key)
    keys = ("pass", "steps", "rows_seen", "objective")
    assert [[r[k] for k in keys] for r in a.history] == [[r[k] for k in keys] for r in b.history]


# -- a cluster gives the bits of one process -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gradient", "walk", "evidence"])
@pytest.mark.parametrize("spread", ["one", "all", "auto"])
def test_a_cluster_gives_the_bits_of_one_process(
    workers: Any, run: Any, fit_alone: Any, tmp_path: Path, kind: str, spread: str
) -> None:
    there = run(workers, tmp_path, kind, spread=spread)
    assert_same(there, fit_alone(kind))
    assert sum(r["rows"] for r in there.history) == 2 * ROWS
    nbytes = ROWS * (4 * P + 4)
    assert there.history[0]["bytes_read"] >= nbytes * 0.8


@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.slow), 2])
def test_any_number_of_workers_gives_the_same_bits(
    workers: Any, run: Any, fit_alone: Any, tmp_path: Path, count: int
) -> None:
    import time

    workers.cluster.scale(count)
    deadline = time.monotonic() + 60
    while len(workers.nthreads()) != count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers.nthreads()) == count
    for chains in (4, 3):
        assert_same(
            run(workers, tmp_path / str(chains), chains=chains, epochs=1), fit_alone(chains=chains, epochs=1)
        )


def test_validation_and_reports_within_an_epoch_are_the_same(
    workers: Any, run: Any, fit_alone: Any, tmp_path: Path
) -> None:
    options = {"validate_steps": 8, "report_steps": 5}
    there = run(workers, tmp_path, **options)
    assert_same(there, fit_alone(**options))
    assert len(there.history) == 2 * 6  # Each of two epochs has records at steps 5, 8, 10, 15, 16, 20.


def test_auto_spreads_only_long_steps_over_workers(workers: Any) -> None:
    class Fake:
        threads, refresh = {"a": 1, "b": 1}, staticmethod(lambda: None)

    steps = dask_online.DaskSteps.__new__(dask_online.DaskSteps)
    steps._order, steps._spread, steps._one, steps._cost = (
        RowOrder(100, 0, 40, n_chains=4),
        "auto",
        None,
        0.01,
    )
    assert steps._use_one(2)  # Without measured durations, one worker is used.
    steps._one = steps._work = 0.015
    # Two workers would need 7.5 ms for computing and 10 ms for sending, which is more than 15 ms on one.
    assert steps._use_one(2)
    steps._one = steps._work = 0.03
    assert not steps._use_one(2)
    steps._cost = 0.05  # Sending takes 50 ms on a busy network.
    assert steps._use_one(2)
    assert steps._use_one(1)


def test_steps_return_to_one_worker_if_only_its_first_steps_were_slow(
    workers: Any, run: Any, fit_alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    kept = {name: getattr(dask_online.DaskSteps, name) for name in ("_on_one", "_on_all")}

    def noted(name: str) -> Any:
        def call(self: Any, *args: Any) -> Any:
            out = kept[name](self, *args)
            if not found:  # Pretend that the first steps took 5 s, like steps that load kernels.
                self._one = self._work = 5.0
                # With durations of seconds, the noise of this machine does not change the choice of workers.
                self._cost = 1.0
            found.append(name)
            return out

        return call

    for name in kept:
        monkeypatch.setattr(dask_online.DaskSteps, name, noted(name))
    assert_same(run(workers, tmp_path, spread="auto", epochs=3), fit_alone(epochs=3))
    assert found[:2] == ["_on_one", "_on_all"]
    assert set(found[2:]) == {"_on_one"}


# -- interrupted fits and killed workers ---------------------------------------------------------------------


class CallAtRows(Callback):
    """Callback that calls a function once, when a share of the rows of one epoch is computed."""

    def __init__(self, number: int, share: float, action: Callable[[], None]) -> None:
        self.number, self.share, self.action, self.done = number, share, action, False

    def on_progress(self, info: dict[str, Any]) -> None:
        if self.done or info["stage"] != "toy_step" or info["pass"] != self.number:
            return
        if info["rows_done"] >= self.share * info["rows_total"]:
            self.done = True
            self.action()


@pytest.fixture(autouse=True)
def report_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "Progress", EverySpan)
    monkeypatch.setattr(online, "Progress", EverySpan)
    monkeypatch.setattr(dask_online, "SEGMENT_STEPS", 5)
    monkeypatch.setattr(dask_online, "SEGMENT_SECONDS", 0.05)


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("spread", ["one", "all"])
@pytest.mark.parametrize("where", ["cluster", "here"])
def test_an_online_fit_resumes_on_a_cluster_or_in_one_process(
    workers: Any, run: Any, fit_alone: Any, tmp_path: Path, where: str, spread: str, scheduler_tasks: Any
) -> None:
    first, second = (workers, None) if where == "cluster" else (None, workers)
    for number, share in ((1, 0.1), (1, 0.7), (2, 1.0)):
        folder = tmp_path / f"{number}-{share}"
        with pytest.raises(KeyboardInterrupt):
            run(first, folder, spread=spread, callback=CallAtRows(number, share, _interrupt))
        assert EngineStore(folder).latest_state("toy_step")[0] >= STEPS * (number - 1 + share / 2)
        assert scheduler_tasks(wait=5) <= 0
        assert_same(run(second, folder, spread=spread), fit_alone())


@pytest.mark.parametrize("spread", [pytest.param("one", marks=pytest.mark.slow), "all"])
@pytest.mark.parametrize("victims", [pytest.param("one", marks=pytest.mark.slow), "all"])
def test_workers_killed_within_an_epoch_change_no_bit(
    killable_workers: Any,
    run: Any,
    fit_alone: Any,
    worker_pids: Any,
    tmp_path: Path,
    spread: str,
    victims: str,
) -> None:
    there = sorted(worker_pids(killable_workers).values())

    def kill() -> None:
        for pid in there[: 1 if victims == "one" else 2]:
            os.kill(pid, signal.SIGKILL)

    killers = [CallAtRows(1, 0.3, kill)]
    if victims == "one":  # The other worker is killed in the second epoch.

        def kill_other() -> None:
            os.kill(there[1], signal.SIGKILL)

        killers.append(CallAtRows(2, 0.5, kill_other))
    result = run(killable_workers, tmp_path, spread=spread, callback=killers)
    assert all(killer.done for killer in killers)
    assert_same(result, fit_alone())


def test_a_segment_is_repeated_if_its_worker_has_no_replica(
    workers: Any, run: Any, fit_alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two segments (consecutive minibatch steps) raise StateLost, as if a worker lacked the state before."""
    lost: list[int] = []
    original = dask_online.DaskSteps._on_all

    def forgetful(self: Any, segment: Any, place: Any, stop: int, names: list[str]) -> Any:
        if "-r" in segment.token:
            lost.append(place.step)
        elif len(set(lost)) < 2:

            def forget() -> None:
                from scalelatent.engine.dask import online_tasks as online_sites

                original = online_sites.FitOnWorker.follow

                def follow(site: Any, before: Any, results: Any) -> Any:
                    online_sites.FitOnWorker.follow = original
                    raise online_sites.StateLost("gone")

                online_sites.FitOnWorker.follow = follow

            self.executor.client.run(forget)
        return original(self, segment, place, stop, names)

    monkeypatch.setattr(dask_online.DaskSteps, "_on_all", forgetful)
    assert_same(run(workers, tmp_path, epochs=1), fit_alone(epochs=1))
    # Both segments (consecutive minibatch steps) that the test lost were repeated. On a busy machine, more
    # may be lost.
    assert len(set(lost)) >= 2


def test_the_error_names_a_damaged_shard_that_a_worker_found(
    workers: Any, run: Any, rows_folder: Path, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(rows_folder / "train", tmp_path / "train")
    shard = tmp_path / "train" / "x" / "c" / "2" / "0"
    shard.write_bytes(bytes(shard.stat().st_size))
    for spread in ("one", "all"):
        with pytest.raises(DataError, match=r"shard file .*x/c/2/0 \(rows 600:900 of 'x'\) is damaged"):
            run(workers, tmp_path / spread, spread=spread, train=open_dataset(tmp_path / "train"))


# -- number and size of tasks and files ----------------------------------------------------------------------

TASK_KEY = re.compile(
    r"toy_(step|close|epoch|params|mstep|step_validation.*)-(e\d{4}-s\d{5}(-c\d\d)?|it\d{4}.*)-\w+"
)


def test_tasks_are_small_and_have_readable_names(
    workers: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dask.utils import key_split
    from distributed import Future
    from distributed.protocol.pickle import dumps

    found: list[tuple[str, int]] = []
    original = workers.submit

    def submit(function: Any, *args: Any, **options: Any) -> Any:
        def strip(value: Any) -> Any:
            if isinstance(value, Future):
                return value.key
            return [strip(v) for v in value] if isinstance(value, list) else value

        found.append((options["key"], len(dumps((function, [strip(a) for a in args])))))
        return original(function, *args, **options)

    monkeypatch.setattr(workers, "submit", submit)
    run(workers, tmp_path / ("a" * 150), epochs=3)
    assert [key for key, size in found if not TASK_KEY.fullmatch(key) or size >= 10_000] == []
    assert len({key for key, _ in found}) == len(found)
    steps = [key for key, _ in found if key.startswith("toy_step-")]
    assert len(steps) == 3 * STEPS * 2
    assert any(key.startswith("toy_step-e0003-s00012-c02-") for key in steps)
    assert {key_split(key) for key in steps} == {"toy_step"}


def count_kept_objects() -> tuple[int, int, int]:
    import threading

    from scalelatent.engine.dask import online_tasks as online_sites
    from scalelatent.engine.dask import pass_tasks as tasks

    feeds = sum(t.name == "scalelatent-feed" for t in threading.enumerate())
    return len(tasks._recent._kept), len(online_sites.sites), feeds


def count_tasks_and_files(
    run: Any, client: Any, folder: Path, every: int, scheduler_tasks: Any, **options: Any
) -> Any:
    seen: list[tuple[int, ...]] = []

    class Watch(Callback):
        def on_report(self, record: dict[str, Any]) -> None:
            if record["steps"] % every == 0:
                sizes = [max(column) for column in zip(*client.run(count_kept_objects).values(), strict=True)]
                seen.append((scheduler_tasks(), len(client.futures), len(list(folder.iterdir())), *sizes))

        on_pass_end = on_report

    run(client, folder, "evidence", callback=Watch(), report_steps=every, **options)
    gc.collect()
    return [max(column) for column in zip(*seen, strict=True)], seen


@pytest.mark.parametrize("spread", ["one", "all"])
def test_no_task_of_a_segment_remains(
    workers: Any, run: Any, tmp_path: Path, scheduler_tasks: Any, spread: str
) -> None:
    (tasks, futures, files, recent, sites, feeds), _ = count_tasks_and_files(
        run, workers, tmp_path, 5, scheduler_tasks, epochs=2, spread=spread
    )
    # The limits allow for two segments (consecutive minibatch steps): one that runs, and one whose tasks are
    # being released.
    assert tasks <= 4 * 5
    assert futures <= 4
    assert files <= 8
    assert recent <= 8
    assert sites <= 2
    assert feeds <= 3
    assert scheduler_tasks(wait=5) <= 0


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["one", "all"])
def test_tasks_and_files_do_not_grow_over_1000_steps(
    workers: Any, run: Any, fit_alone: Any, tmp_path: Path, scheduler_tasks: Any, spread: str
) -> None:
    top, seen = count_tasks_and_files(
        run, workers, tmp_path, 120, scheduler_tasks, epochs=9, spread=spread, batch=8
    )
    assert len(seen) >= 9
    assert top[0] <= 4 * 5
    assert top[1] <= 4
    assert seen[-1][2] <= seen[2][2] + 2  # The first checkpoint adds two files: a durable state and its mark.
    assert top[3] <= 8
    assert top[4] <= 2
