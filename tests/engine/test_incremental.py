"""The run folder stores the newest contribution of each leaf (a fixed range of rows) to the sums of a fit."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.data import Dataset
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.incremental import DropLeaves, KeptLeaves, count_leaves
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.online_loop import fit_online
from scalelatent.engine.order import RowOrder
from scalelatent.engine.passes import make_stage
from scalelatent.errors import RunError
from tests.helpers import InterruptAt


@dataclass(frozen=True)
class LeafSums:
    """Learner that adds up, over leaves (ranges of rows), the sum of a leaf's rows times a factor.

    The factor changes with each step, so a sum of another step would change the total.
    """

    requirements = BlockRequirements()

    def layout(self) -> Layout:
        return Layout((("total", (2,)), ("visits", ())))

    def flops_per_row(self) -> float:
        return 4.0

    def prepare(self, state: Any, backend: Any) -> Any:
        return state

    def visit(self, state: Any, block: Any, kept: Any) -> Any:
        assert (kept is None) == (block.epoch == 0)
        return {"sum": block.x.astype("f8").sum(axis=0) * np.cos(state["total"] + block.epoch)}

    def replace_contribution(self, state: Any, old: Any, new: Any, stats: Stats) -> None:
        stats["total"][...] += new["sum"] - (0.0 if old is None else old["sum"])
        stats["visits"][...] += 1

    def step(self, state: Any, stats: Stats, n_rows: int) -> Any:
        visits = state["visits"] + int(stats["visits"])
        return {"total": state["total"] + stats["total"], "visits": visits}

    def end_epoch(self, state: Any) -> Any:
        return state

    def summary(self, state: Any) -> dict[str, Any]:
        return {"objective": float(state["total"].sum())}

    def is_done(self, state: Any) -> bool:
        return False

    def validation(self) -> Any:
        return None  # This learner has no validation rows.


sys.modules.setdefault("scalelatent.incremental_toys", sys.modules[__name__])

X = np.random.Generator(np.random.Philox(3)).normal(size=(103, 2)).astype("f4")


def fit(folder: Path, jobs: int = 1, epochs: int = 3, callback: Any = (), **options: Any) -> Any:
    order = RowOrder(len(X), 0, 16, n_chains=2, shuffle=False)
    learner = KeptLeaves(LeafSums(), str(folder), "toy")
    stage = make_stage("toy_leaves", learner, {"train": Dataset.from_arrays(X)}, "cpu")
    store = EngineStore(folder)
    cleaner = DropLeaves(learner)
    result = fit_online(
        InProcessExecutor(jobs, store, 30.0, PieceCache(0)),
        stage,
        {"total": np.zeros(2), "visits": 0},
        order=order,
        n_epochs=epochs,
        callbacks=Callbacks([cleaner, *([callback] if callback else [])]),
        store=store,
        **options,
    )
    return result, cleaner


def compute_by_hand(epochs: int = 3) -> np.ndarray:
    order = RowOrder(len(X), 0, 16, n_chains=2, shuffle=False)
    kept: dict[int, Any] = {}
    total = np.zeros(2)
    for epoch in range(epochs):
        for step in range(order.n_steps):
            changes = []
            for chain in (0, 1):
                rows = order.rows(epoch, step, chain)
                if len(rows):
                    new = X[rows].astype("f8").sum(axis=0) * np.cos(total + epoch)
                    changes.append(new - kept.get(int(rows[0]), 0.0))
                    kept[int(rows[0])] = new
            total = total + np.sum(changes, axis=0)
        assert len(kept) == count_leaves(order)
    return total


def test_a_new_contribution_of_a_leaf_replaces_the_old_one(tmp_path: Path) -> None:
    one, _ = fit(tmp_path / "one")
    np.testing.assert_allclose(one.state["total"], compute_by_hand(), rtol=1e-12)
    two, _ = fit(tmp_path / "two", jobs=2)
    np.testing.assert_array_equal(two.state["total"], one.state["total"])
    assert one.state["visits"] == 3 * 14


def test_leaves_cover_all_rows_and_are_the_same_each_epoch() -> None:
    for n_rows, chains, batch in [(103, 2, 16), (103, 4, 16), (97, 3, 9), (5, 4, 8), (1000, 4, 128)]:
        order = RowOrder(n_rows, 0, batch, n_chains=chains, shuffle=False)
        epochs = [[order.rows(e, s, c) for s in range(order.n_steps) for c in range(chains)] for e in (0, 1)]
        assert sorted(np.concatenate(epochs[0]).tolist()) == list(range(n_rows))
        assert all(np.array_equal(a, b) for a, b in zip(*epochs, strict=True))
        assert all((np.diff(rows) == 1).all() for rows in epochs[0])
        assert sum(len(rows) > 0 for rows in epochs[0]) == count_leaves(order)


@pytest.mark.parametrize("at", [1, 3, 4, 6, 9])
def test_an_interrupted_or_killed_fit_resumes_with_the_same_bits(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed fit repeats steps whose contributions are already in its run folder."""
    monkeypatch.setattr("scalelatent.engine.batch_loop.Progress.__call__", report_every_step)
    whole, _ = fit(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", callback=InterruptAt(at * 2 - 1, "progress"), checkpoint_steps=5)
    states = sorted((tmp_path / "run").glob("state-*.rec"))
    if len(states) > 1:  # Imitate a fit that was killed before its last checkpoint.
        states[-1].unlink()
    again, _ = fit(tmp_path / "run")
    np.testing.assert_array_equal(again.state["total"], whole.state["total"])


def report_every_step(progress: Any, done: int, total: int) -> None:
    progress._callbacks.on_progress({"rows_done": done})


def test_files_do_not_grow_with_epochs(tmp_path: Path) -> None:
    order = RowOrder(len(X), 0, 16, n_chains=2, shuffle=False)
    _, cleaner = fit(tmp_path, epochs=12, checkpoint_steps=order.n_steps)
    files = list(tmp_path.glob("leaf-*.rec"))
    assert 0 < len(files) <= 5 * count_leaves(order)
    (tmp_path / "leaf-other-000000-0.rec").write_text("another stage's")
    cleaner.drop()
    assert [path.name for path in tmp_path.glob("leaf-*.rec")] == ["leaf-other-000000-0.rec"]


def test_the_error_names_a_lost_or_damaged_contribution(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callback=StopAfter(1))
    for path in tmp_path.glob("leaf-toy-000000-*.rec"):
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RunError, match=r"leaf-toy-000000-\d+.rec.*start the fit again in another run_dir"):
        fit(tmp_path)


class StopAfter(Callback):
    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_pass_end(self, record: dict[str, Any]) -> None:
        if record["pass"] == self.epochs:
            raise KeyboardInterrupt


def test_a_fit_writes_nothing_into_the_folder_of_another_run(tmp_path: Path) -> None:
    _, run = EngineStore(tmp_path).ref
    learner = KeptLeaves(LeafSums(), str(tmp_path), "toy", run)
    block = Block(np.ones((3, 2), "f4"), None, None, 0)
    stats = Stats.zeros(learner.layout())
    learner.run_chain({"total": np.zeros(2), "visits": 0}, block, stats)
    (tmp_path / learner.name(0, 0)).unlink()
    (tmp_path / "run-id").write_text("another")
    with pytest.raises(RunError, match=f"belongs to run another now.*task of run {run}"):
        learner.run_chain({"total": np.zeros(2), "visits": 0}, block, stats)
    assert not (tmp_path / learner.name(0, 0)).exists()
