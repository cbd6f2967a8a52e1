"""Outputs of rows in passes, minibatches and maps are the same from memory, disk and pairs of datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from scalelatent.contract.block_requirements import Corruption, Targets
from scalelatent.data import Dataset, create_dataset
from scalelatent.engine import reading
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.callbacks import Callbacks
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.mapwrite import map_rows, map_to_array, start_map
from scalelatent.engine.online_loop import fit_online
from scalelatent.engine.order import RowOrder
from scalelatent.engine.passes import make_stage
from scalelatent.errors import DataError
from scalelatent.kernels.corruption import corrupt

N, P, V = 150, 4, 6
RNG = np.random.Generator(np.random.Philox(4))
X, OUT = RNG.integers(0, 2, (N, P)).astype("u1"), RNG.integers(0, 2, (N, V)).astype("u1")
NOISE = Corruption("flip", rate=0.34, seed=8)

Make = Callable[[str, Path], Dataset]


def give_pair(form: str, folder: Path) -> Dataset:
    """Return the rows and outputs as a dataset, in one of several forms."""
    if form == "memory":
        return Dataset.from_arrays(X, OUT)
    if form == "floats":
        return Dataset.from_arrays(X, OUT.astype("f8"))
    if form == "multilabel":
        return Dataset.from_arrays(X, scipy.sparse.csr_array(OUT)).save(folder / "m", shard_rows=40)
    x = Dataset.from_arrays(X).save(folder / "x", chunk_rows=20, shard_rows=60)
    if form == "memory beside stored":
        return x.with_target(Dataset.from_arrays(OUT.astype(bool)))
    return x.with_target(Dataset.from_arrays(OUT).save(folder / "v", chunk_rows=32, shard_rows=64))


FORMS = ("memory", "floats", "multilabel", "memory beside stored", "stored pair")


def clean_outputs(form: str, folder: Path) -> Dataset:
    """Return a dataset whose rows are the outputs (clean images), which `Targets` corrupts to get inputs."""
    rows = {"floats": OUT.astype("f8"), "multilabel": scipy.sparse.csr_array(OUT)}.get(form, OUT)
    ds = Dataset.from_arrays(rows)
    return ds.save(folder / "c", shard_rows=60) if form in ("multilabel", "stored pair") else ds


def fit(learner: Any, ds: Dataset, *, jobs: int = 1, cache: int = 0, folder: Path | None = None) -> Any:
    parts = {"train": ds} | ({} if learner.validation_targets is None else {"validation": ds})
    stage = make_stage("toy_step", learner, parts, "cpu", block_rows=16, leaf_rows=32)
    store = None if folder is None else EngineStore(folder)
    order = RowOrder(N, 5, 18, n_chains=3, run_rows=16, buffer_runs=3)
    executor = InProcessExecutor(jobs, store, 0.0, PieceCache(cache))
    return fit_online(
        executor, stage, learner.start(), order=order, n_epochs=2, callbacks=Callbacks(()), store=store
    ).state


def assert_same(a: Any, b: Any) -> None:
    for key in a:
        np.testing.assert_array_equal(a[key], b[key], err_msg=key)


@pytest.fixture
def expected_fit(online: Any) -> Any:
    """Return a function that fits by a plain loop over blocks of the arrays."""

    def by_hand(learner: Any, x_of: Callable[[np.ndarray, int, bool], np.ndarray]) -> Any:
        from scalelatent.contract.learners import Block
        from scalelatent.contract.stats import Stats

        state, order = learner.start(), RowOrder(N, 5, 18, n_chains=3, run_rows=16, buffer_runs=3)
        for epoch in range(2):
            for step in range(order.n_steps):
                vectors = []
                for chain in range(3):
                    rows, stats = order.rows(epoch, step, chain), Stats.zeros(learner.layout())
                    if len(rows):
                        block = Block(
                            x_of(rows, epoch, False), OUT[rows], None, int(rows[0]), rows, epoch, chain
                        )
                        learner.run_chain(learner.prepare(state, None), block, stats)
                    vectors.append(stats.vector)
                total = Stats(learner.layout(), vectors[0] + vectors[1] + vectors[2])
                state = learner.step(state, total, order.step_rows(step))
            leaves, held = [], learner.validation()
            for first in range(0, N, 32):
                stats = Stats.zeros(held.layout())
                for a in range(first, min(first + 32, N), 16):
                    rows = np.arange(a, min(a + 16, first + 32, N))
                    held.accumulate(
                        held.prepare(state, None), Block(x_of(rows, 0, True), OUT[rows], None, a), stats
                    )
                leaves.append(stats.vector)
            state = learner.validated(state, Stats(held.layout(), sum(leaves[1:], leaves[0])))
        return state

    return by_hand


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cache", [0, 10**6])
def test_minibatches_and_passes_receive_rows_and_outputs(
    online: Any, expected_fit: Any, tmp_path: Path, form: str, cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With this limit, outputs are read a few rows at a time.
    monkeypatch.setattr(reading, "TARGET_BYTES", 100)
    learner = online.Outputs(P, V, Targets(), Targets())
    ds = give_pair(form, tmp_path)
    found = fit(learner, ds, cache=cache)
    assert_same(found, expected_fit(learner, lambda rows, epoch, held: X[rows]))
    assert_same(fit(learner, ds, jobs=3, cache=cache), found)


@pytest.mark.parametrize("form", FORMS)
def test_corrupted_inputs_depend_on_row_and_epoch(
    online: Any, expected_fit: Any, tmp_path: Path, form: str
) -> None:
    """Inputs that are corrupted outputs differ by row and epoch; validation rows have the same
    inputs in each epoch.
    """
    held = Corruption("occlude", size=(1, 2), shape=(2, 3), seed=8, stage="corruption-validation")
    learner = online.Outputs(P, V, Targets("x", NOISE), Targets("x", held))

    def x_of(rows: np.ndarray, epoch: int, validation: bool) -> np.ndarray:
        how = {"kind": "flip", "rate": 0.34, "stage": "corruption"}
        if validation:
            how = {"kind": "occlude", "size": (1, 2), "shape": (2, 3), "stage": "corruption-validation"}
        return corrupt(OUT[rows], rows, epoch, seed=8, **how)

    ds = clean_outputs(form, tmp_path)
    found = fit(learner, ds, folder=tmp_path / "run")
    assert_same(found, expected_fit(learner, x_of))
    assert_same(fit(learner, ds, jobs=3), found)


def test_outputs_without_inputs_can_be_learned(online: Any, expected_fit: Any) -> None:
    learner = online.Outputs(0, V, Targets("x"), Targets("x"))
    found = fit(learner, Dataset.from_arrays(OUT))
    assert_same(found, expected_fit(learner, lambda rows, epoch, held: np.empty((len(rows), 0), np.uint8)))


@pytest.mark.parametrize("form", FORMS)
def test_maps_receive_outputs(
    online: Any, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "scalelatent.data.create_dataset",
        lambda *a, **k: create_dataset(*a, **{"chunk_rows": 25, "shard_rows": 50, **k}),
    )
    cases = [
        (give_pair(form, tmp_path / "p"), Targets(), X),
        (clean_outputs(form, tmp_path / "c"), Targets("x", NOISE), None),
    ]
    for i, (ds, targets, x) in enumerate(cases):
        row_map = online.Concatenation(P, V, targets)
        if x is None:
            x = corrupt(OUT, np.arange(N), kind="flip", rate=0.34, seed=8, stage="corruption")[:, :P]
        wanted = np.hstack([x, OUT])
        np.testing.assert_array_equal(map_to_array(row_map, ds, "cpu", 2), wanted)
        task = start_map("toy_map", ds, row_map, tmp_path / f"out{i}", "cpu", with_labels=False)
        written = map_rows(InProcessExecutor(1), task, lambda done, total: None)
        np.testing.assert_array_equal(written.read_x(0, N), wanted)


@pytest.mark.parametrize("stored", [False, True])
def test_the_error_names_an_invalid_output(online: Any, tmp_path: Path, stored: bool) -> None:
    bad = OUT.copy()
    bad[77, 2] = 3
    v = Dataset.from_arrays(bad)
    v = v.save(tmp_path / "v.zarr", chunk_rows=16) if stored else v
    ds = Dataset.from_arrays(X).with_target(v)
    with pytest.raises(DataError, match="column 2 of row 77 is 3, but an output must be 0 or 1"):
        fit(online.Outputs(P, V, Targets()), ds)
    with pytest.raises(DataError, match="column 2 of row 77 is 3"):
        fit(online.Outputs(P, V, Targets("x")), v)
    with pytest.raises(DataError, match="one label per row"):
        fit(online.Outputs(P, V, Targets()), Dataset.from_arrays(X, np.arange(N) % 3))


def test_invalid_requests_for_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="source='z' is not one of"):
        Targets("z")
    with pytest.raises(ValueError, match="a corruption makes inputs"):
        Targets("y", NOISE)
