"""Online fits report records, obey callbacks, and give the same bits for any number of threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.data import Dataset
from scalelatent.engine import feeding
from scalelatent.engine.batch_loop import LoopResult
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.online_loop import fit_online
from scalelatent.engine.order import RowOrder
from scalelatent.engine.passes import make_stage
from scalelatent.errors import DataError, RunError
from tests.helpers import HookLog

P, K = 5, 3


def make_blobs(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.Philox(seed))
    y = rng.integers(0, K, n)
    centres = np.random.Generator(np.random.Philox(99)).normal(size=(K, P))
    return (centres[y] + rng.normal(size=(n, P))).astype("f4"), y


def fit(
    learner: Any,
    train: Dataset,
    *,
    validation: Dataset | None = None,
    chains: int = 3,
    batch: int = 24,
    epochs: int = 2,
    jobs: int = 1,
    folder: Path | None = None,
    callback: Any = (),
    cache: int = 0,
    order: dict[str, Any] | None = None,
    **options: Any,
) -> LoopResult:
    datasets = {"train": train} | ({} if validation is None else {"validation": validation})
    stage = make_stage("toy_step", learner, datasets, "cpu", train.classes, block_rows=16, leaf_rows=16)
    store = None if folder is None else EngineStore(folder)
    seconds = options.setdefault("checkpoint_seconds", 30.0)
    executor = InProcessExecutor(jobs, store, seconds, PieceCache(cache))
    rows = RowOrder(
        len(train), 5, batch, n_chains=chains, **{"run_rows": 16, "buffer_runs": 3, **(order or {})}
    )
    return fit_online(
        executor, stage, learner.start(), order=rows, n_epochs=epochs,
        callbacks=Callbacks(callback), store=store, **options,
    )  # fmt: skip


def assert_same(a: Any, b: Any) -> None:
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_array_equal(a[key], b[key], err_msg=key)


@pytest.fixture(scope="module")
def make_learner(online: Any) -> dict[str, Callable[[], Any]]:
    return {
        "gradient": lambda: online.Logistic(P, K),
        "walk": lambda: online.Walk(P, K),
        "evidence": lambda: online.Evidence(P),
    }


# -- the result equals that of a plain loop ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gradient", "walk", "evidence"])
@pytest.mark.parametrize("chains", [1, 3])
def test_an_online_fit_equals_a_loop_over_rows(make_learner: Any, kind: str, chains: int) -> None:
    """The loop of this test computes the same steps without the engine."""
    from scalelatent.contract.learners import Block
    from scalelatent.contract.stats import Stats

    x, y = make_blobs(130)
    learner = make_learner[kind]()
    state, order = learner.start(), RowOrder(130, 5, 24, n_chains=chains, run_rows=16, buffer_runs=3)
    for epoch in range(2):
        for step in range(order.n_steps):
            total = Stats.zeros(learner.layout())
            for chain in range(chains):
                rows = order.rows(epoch, step, chain)
                one = Stats.zeros(learner.layout())
                if len(rows):
                    learner.run_chain(
                        learner.prepare(state, None),
                        Block(x[rows], y[rows].astype("i4"), None, rows[0], rows, epoch),
                        one,
                    )
                total = total.merge(one)
            state = learner.step(state, total, order.step_rows(step))
        state = learner.end_epoch(state)
    assert_same(fit(learner, Dataset.from_arrays(x, y), chains=chains).state, state)


@pytest.mark.parametrize("kind", ["gradient", "walk", "evidence"])
def test_same_bits_for_threads_storage_and_cache(make_learner: Any, kind: str, tmp_path: Path) -> None:
    x, y = make_blobs(500)
    arrays = Dataset.from_arrays(x, y)
    whole = fit(make_learner[kind](), arrays, chains=4).state
    for jobs in (2, 3, 8):
        assert_same(fit(make_learner[kind](), arrays, chains=4, jobs=jobs).state, whole)
    for chunk in (7, 100, 500):
        stored = arrays.save(tmp_path / str(chunk), chunk_rows=chunk)
        for cache in (0, 3000, 10**6):
            assert_same(fit(make_learner[kind](), stored, chains=4, jobs=2, cache=cache).state, whole)


@pytest.mark.parametrize("stored", [False, True])
def test_csr_rows_give_the_bits_of_dense_rows(online: Any, tmp_path: Path, stored: bool) -> None:
    """A learner gets dense blocks, or CSR blocks if it requests them; both give the bits of dense rows."""
    from scipy.sparse import csr_array

    from scalelatent.kernels.sparse_rows import CsrRows

    x, y = make_blobs(300)
    x[np.abs(x) < 0.8] = 0
    x[[5, 6, 299]] = 0  # Rows 5, 6 and 299 have no CSR entries.
    rows = Dataset.from_arrays(csr_array(x), y)
    rows = rows.save(tmp_path / "rows", shard_rows=70) if stored else rows
    whole = fit(online.Walk(P, K), Dataset.from_arrays(x, y))
    assert_same(fit(online.Walk(P, K), rows).state, whole.state)

    class Taker(online.Walk):
        requirements = BlockRequirements(csr=True)

        def run_chain(self, prepared: Any, block: Any, stats: Any) -> None:
            assert isinstance(block.x, CsrRows)
            super().run_chain(prepared, replace(block, x=block.x.to_dense()), stats)

    assert_same(fit(Taker(P, K), rows).state, whole.state)


def test_weights_reach_the_chains_row_by_row(online: Any) -> None:
    """A row of weight 2 changes the step of a batch as much as two copies of the row."""
    x, y = make_blobs(40)
    weight = np.where(np.arange(40) % 3, 1.0, 2.0)
    learner = online.Logistic(P, K)
    options = {"batch": 1000, "chains": 1, "epochs": 1}
    one = fit(learner, Dataset.from_arrays(x, y, sample_weight=weight), **options).state["w"] * 40
    again = np.repeat(np.arange(40), weight.astype(int))
    two = fit(learner, Dataset.from_arrays(x[again], y[again]), **options).state["w"] * len(again)
    np.testing.assert_allclose(one, two, rtol=1e-9)


def test_the_number_of_chains_changes_the_result(online: Any) -> None:
    rows = Dataset.from_arrays(*make_blobs(200))
    states = [fit(online.Walk(P, K), rows, chains=c).state["w"] for c in (1, 2, 3)]
    assert not np.array_equal(states[0], states[1])
    assert not np.array_equal(states[1], states[2])


def test_rows_are_read_once_per_epoch_or_once_if_they_fit_in_memory(
    online: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With longer slabs (ranges of stored rows), the rows of two epochs would be in memory at once.
    monkeypatch.setattr(feeding, "SLAB_STEPS", 2)
    rows = Dataset.from_arrays(*make_blobs(640)).save(tmp_path / "rows")
    nbytes = 640 * (4 * P + 4)
    options = {"chains": 1, "batch": 16, "epochs": 3}
    kept = fit(online.Evidence(P), rows, cache=10**6, **options)
    assert sum(r["bytes_read"] for r in kept.history) == nbytes
    again = fit(online.Evidence(P), rows, cache=0, **options)
    # Slabs (ranges of stored rows) of the end of one epoch may still be in memory at the start of the next.
    assert 2.5 * nbytes < sum(r["bytes_read"] for r in again.history) <= 3 * nbytes


# -- records and callbacks -----------------------------------------------------------------------------------


def test_each_epoch_has_one_record_and_reports_in_between(online: Any) -> None:
    log = HookLog()
    rows, held = Dataset.from_arrays(*make_blobs(100)), Dataset.from_arrays(*make_blobs(60, 1))
    result = fit(online.Logistic(P, K), rows, validation=held, callback=log, report_steps=2, validate_steps=3)
    # An epoch has 5 steps: reports follow steps 2 and 4, a validation step 3, and both step 5.
    assert [(r["pass"], r["steps"], r["rows_seen"]) for r in result.history] == [
        (1, 2, 48), (1, 3, 72), (1, 4, 96), (1, 5, 100), (2, 7, 148), (2, 8, 172), (2, 9, 196), (2, 10, 200),
    ]  # fmt: skip
    assert [r["steps"] for r in log.infos("pass_end")] == [5, 10]
    assert [r["steps"] for r in log.infos("report")] == [2, 3, 4, 7, 8, 9]
    assert sum(r["rows"] for r in result.history) == 200
    assert result.state["seen"] == 4
    assert result.state["epochs"] == 2
    assert [r["validation_error"] is None for r in result.history] == [True] + 7 * [False]
    reported = [i for i in log.infos("progress") if i["stage"] == "toy_step"]
    assert reported[-1]["rows_done"] == reported[-1]["rows_total"] == 100
    assert {i["stage"] for i in log.infos("progress")} == {"toy_step", "toy_step_validation"}
    assert all(r["stage"] == "toy_step" and r["seconds"] >= 0 for r in result.history)


def test_reports_do_not_change_the_fit(online: Any) -> None:
    rows = Dataset.from_arrays(*make_blobs(100))
    assert_same(
        fit(online.Logistic(P, K), rows).state,
        fit(online.Logistic(P, K), rows, report_steps=1).state,
    )


def test_a_learner_that_is_done_ends_the_fit(online: Any) -> None:
    rows, held = Dataset.from_arrays(*make_blobs(300)), Dataset.from_arrays(*make_blobs(60, 1))
    learner = online.Logistic(P, K, patience=2)
    result = fit(learner, rows, validation=held, epochs=50)
    assert result.state["worse"] == 2
    assert result.state["epochs"] < 50


@pytest.mark.parametrize("stop_at", [3, 5])
def test_a_callback_stops_the_fit(online: Any, tmp_path: Path, stop_at: int) -> None:
    log = HookLog(stop_at, "steps")
    result = fit(
        online.Logistic(P, K),
        Dataset.from_arrays(*make_blobs(100)),
        callback=log,
        report_steps=3,
        folder=tmp_path,
    )
    assert result.state["steps"] == stop_at
    assert log.infos("event")[-1]["event"] == "stopped_by_callback"
    total, tree, _ = EngineStore(tmp_path).latest_state("toy_step")
    assert total == stop_at
    assert_same(tree["state"], result.state)


def test_online_checkpoints_have_the_requested_interval(online: Any, tmp_path: Path) -> None:
    log = HookLog()
    fit(
        online.Evidence(P),
        Dataset.from_arrays(*make_blobs(240)),
        callback=log,
        folder=tmp_path,
        checkpoint_steps=4,
    )
    assert [(i["pass"], i["step"]) for i in log.infos("checkpoint")] == [
        (0, 4), (0, 8), (1, 2), (1, 6), (1, 10), (2, 0),
    ]  # fmt: skip
    assert Path(log.infos("checkpoint")[-1]["path"]).exists()


# -- refusals and failures -----------------------------------------------------------------------------------


def test_an_order_of_another_number_of_rows_is_refused(online: Any) -> None:
    stage = make_stage("toy_step", online.Evidence(P), {"train": Dataset.from_arrays(*make_blobs(10))}, "cpu")
    with pytest.raises(ValueError, match="order has 11 rows, but the stage has 10 training rows"):
        fit_online(
            InProcessExecutor(1), stage, {}, order=RowOrder(11, 0, 2), n_epochs=1, callbacks=Callbacks()
        )


def test_a_resume_with_another_row_order_is_refused(online: Any, tmp_path: Path) -> None:
    rows = Dataset.from_arrays(*make_blobs(100))
    fit(online.Evidence(P), rows, folder=tmp_path)
    with pytest.raises(
        RunError, match="another order of rows .*batch_rows=24.*resume with the same settings"
    ):
        fit(online.Evidence(P), rows, folder=tmp_path, batch=12)


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("stored", [False, True])
def test_the_error_names_a_bad_row_or_shard(online: Any, tmp_path: Path, jobs: int, stored: bool) -> None:
    x, y = make_blobs(100)
    rows = Dataset.from_arrays(x, y)
    if stored:
        rows = rows.save(tmp_path / "rows")
        shard = next(p for p in (tmp_path / "rows" / "x").rglob("*") if p.is_file() and p.name != "zarr.json")
        shard.write_bytes(b"\0" * shard.stat().st_size)
        match = "shard file .* is damaged"
    else:
        x[41, 2] = np.nan
        match = "row 41 is bad"
    with pytest.raises(DataError, match=match):
        fit(online.Logistic(P, K), rows, jobs=jobs)


def test_a_failing_learner_ends_the_fit_after_the_last_step_is_stored(online: Any, tmp_path: Path) -> None:
    class Broken(online.Evidence):
        def step(self, state: Any, stats: Any, n_rows: int) -> Any:
            if state["trail"] and not hasattr(self, "left"):
                raise FloatingPointError("not finite")
            return super().step(state, stats, n_rows)

    with pytest.raises(FloatingPointError, match="not finite"):
        fit(Broken(P), Dataset.from_arrays(*make_blobs(100)), folder=tmp_path)
    assert EngineStore(tmp_path).latest_state("toy_step")[0] == 1


# -- the quality of a fit on sorted rows ---------------------------------------------------------------------


def test_a_sorted_dataset_trains_to_the_error_of_a_shuffled_one(online: Any) -> None:
    x, y = make_blobs(20_000)
    held = Dataset.from_arrays(*make_blobs(4000, 1))
    by_class = np.argsort(y, kind="stable")
    options = {"validation": held, "chains": 2, "batch": 64, "epochs": 3}
    runs = {"order": {"run_rows": 128, "buffer_runs": 16}}
    shuffled = fit(online.Logistic(P, K), Dataset.from_arrays(x, y), **options, **runs)
    ordered = fit(online.Logistic(P, K), Dataset.from_arrays(x[by_class], y[by_class]), **options, **runs)
    as_stored = fit(
        online.Logistic(P, K),
        Dataset.from_arrays(x[by_class], y[by_class]),
        **options,
        order={"run_rows": 128, "shuffle": False},
    )
    assert ordered.state["error"] < shuffled.state["error"] + 0.01
    # If rows in stored order gave as good a result as shuffled rows, the assertion above would show nothing.
    assert as_stored.state["error"] > shuffled.state["error"] + 0.03


# -- callbacks interrupt a fit within a step -----------------------------------------------------------------


class LeaveAtCall(Callback):
    """Callback that raises KeyboardInterrupt after ``after`` calls; ``asked`` has their times in seconds."""

    def __init__(self, after: int = 10**9) -> None:
        self.after, self.asked = after, list[float]()

    def on_wait(self) -> None:
        self.asked.append(time.monotonic())
        if len(self.asked) > self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("jobs", [1, 3])
def test_callbacks_may_interrupt_within_a_step_without_loss(online: Any, tmp_path: Path, jobs: int) -> None:
    class Slow(online.Walk):
        ran: ClassVar[list[float]] = []

        def run_chain(self, prepared: Any, block: Any, stats: Any) -> None:
            time.sleep(0.1)
            self.ran.append(time.monotonic())
            super().run_chain(prepared, block, stats)

    rows = Dataset.from_arrays(*make_blobs(48))
    options = {"chains": 12, "batch": 24, "epochs": 1}
    whole = fit(online.Walk(P, K), rows, **options).state
    leave = LeaveAtCall(after=1)
    with pytest.raises(KeyboardInterrupt):
        fit(Slow(P, K), rows, jobs=jobs, callback=leave, folder=tmp_path, **options)
    assert len(Slow.ran) < 12  # The fit ended within a step.
    # Other threads finish the chain (part of a step) that they have started.
    assert len([t for t in Slow.ran if t > leave.asked[-1] + 0.05]) < jobs
    again = LeaveAtCall()
    assert_same(fit(Slow(P, K), rows, jobs=jobs, callback=again, folder=tmp_path, **options).state, whole)
    gaps = np.diff(again.asked)
    assert len(gaps) >= 2
    assert gaps.max() < 0.5 * 3  # Callbacks are called every half second; test machines are busy.
