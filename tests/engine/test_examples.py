"""Tests by example of functions too small for a file of their own: checks of values, chains, task graphs, row
orders, quarantine and texts of plans.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.finite import LARGEST_VALUE, find_nonfinite, find_too_large, make_divergence_error
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.data import Dataset
from scalelatent.engine.cache import compute_limit
from scalelatent.engine.chains import RowCheck, apply_step, run_chains
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.dask.cluster_pass import key_of
from scalelatent.engine.dask.graph import Graph
from scalelatent.engine.dask.trial import clear_attempts, count_attempts
from scalelatent.engine.executor import Place
from scalelatent.engine.order import RowOrder, permutation
from scalelatent.engine.plan import make_summary
from scalelatent.engine.quarantine import BadShard, Quarantine, check_choice, whole_shards
from scalelatent.engine.reading import slice_column
from scalelatent.engine.resume_identity import named_values
from scalelatent.kernels.cuda import matrix_layout


def test_bad_values_are_reported_with_row_and_feature() -> None:
    def block(value: float, dtype: str = "f8") -> Block:
        return Block(np.array([[0.0, value]], dtype), None, None, 7)

    assert find_nonfinite(block(np.nan)) == "row 7, feature 1 is nan"
    assert find_nonfinite(block(1e39)) == "row 7, feature 1 is 1e+39, beyond float32: scale the features"
    reported = "row 7, feature 1 is 1e+38, too large for products in float32: scale the features below 1e+18"
    assert find_nonfinite(block(1e38), LARGEST_VALUE) == find_too_large(block(1e38, "f4")) == reported
    assert "the weights have grown" in str(make_divergence_error([0], "pass 7", "lower it"))
    assert "with the initial weights" in str(make_divergence_error([0], "pass 1", "lower it"))


def test_a_row_check_calls_its_function_at_most_once_per_interval() -> None:
    calls: list[int] = []
    check = RowCheck(lambda: calls.append(1), seconds=3600)
    check()
    check()
    assert calls == [1]


def test_a_step_merges_its_chains_and_updates_the_state() -> None:
    class Mean:
        requirements = BlockRequirements()

        def layout(self) -> Layout:
            return Layout((("total", (2,)),))

        def prepare(self, state: Any, backend: Any) -> Any:
            return state

        def run_chain(self, prepared: Any, block: Block, stats: Stats) -> None:
            stats["total"][:] += block.x.sum(axis=0)

        def step(self, state: Any, stats: Stats, n_rows: int) -> Any:
            return 0.5 * state + 0.5 * stats["total"] / n_rows

    learner: Any = Mean()
    rows = Block(np.ones((4, 2)), None, None, 0, rows=np.arange(4))
    sums = run_chains(learner, np.zeros(2), [rows], None)
    assert apply_step(learner, np.zeros(2), sums, 4).tolist() == [0.5, 0.5]


def test_sizes_keys_and_texts_of_small_functions() -> None:
    assert matrix_layout((2, 3), (40, 4), 4) == (True, 10)
    assert matrix_layout((3, 2), (4, 40), 4) == (False, 10)
    assert (compute_limit(0.25, 400), compute_limit(64, 400)) == (100, 64)
    params = {"capsule_dim": 4, "estimator": {"nu_schedule": [(0.5, 3)]}}
    assert named_values(params) == {"capsule_dim": "4", "estimator.nu_schedule": "[[0.5, 3]]"}
    stage: Any = SimpleNamespace(name="capsule_estep")
    assert key_of(stage, None, 6, "s0042", "ab12cd") == "capsule_estep-it0007-s0042-ab12cd"
    assert key_of(stage, "mstep", 6, "", "ab12cd") == "capsule_mstep-it0007-ab12cd"
    assert Place(2, 5).total(RowOrder(n_rows=100, seed=0, batch_rows=10)) == 25
    seconds = dict.fromkeys(
        ("expected_seconds", "expected_seconds_at_least", "expected_seconds_at_most"), 350.0
    )
    plan = seconds | {"peak_bytes_per_worker": 700 * 2**20, "disk_bytes": 41 * 10**8}
    assert make_summary(plan) == "about 6 min, 700 MiB a worker, 4.1 GB of disk"


def test_a_task_graph_keeps_workers_and_priorities() -> None:
    graph = Graph()
    graph.add("one", int, "1", worker="tcp://10.0.0.1:40000", priority=5)
    graph.add("sum", sum, [graph.ref("one"), graph.ref("one")])
    assert sorted(graph.tasks) == ["one", "sum"]
    assert (graph.workers, graph.priorities) == ({"one": ["tcp://10.0.0.1:40000"]}, {"one": 5})


def test_drivers_that_end_without_a_report_are_counted() -> None:
    store = EngineStore("memory://tests-ends-without-word")
    assert [count_attempts(store, "capsule_estep", number) for number in (1, 7, 7)] == [0, 1, 2]
    clear_attempts(store)
    assert count_attempts(store, "capsule_estep", 7) == 0


def test_a_permutation_has_every_row_once() -> None:
    assert sorted(permutation(0, 0, 0, 4).tolist()) == [0, 1, 2, 3]


def test_row_ranges_of_pieces_and_of_excluded_shards() -> None:
    held = [((0, 2), (np.arange(2), None, None)), ((2, 4), (np.arange(2, 4), None, None))]
    assert slice_column(held, 0, 1, 3).tolist() == [1, 2]
    assert slice_column(held, 1, 1, 3) is None
    rows = Dataset.from_arrays(np.zeros((90, 2), np.uint8))
    stored = rows.save("memory://tests-whole-shards", chunk_rows=10, shard_rows=40)
    assert (whole_shards(stored, 35, 45), whole_shards(stored[30:], 55, 60)) == ((0, 80), (80, 90))
    quarantine = Quarantine("skip")
    quarantine.shards.append(BadShard("rows.zarr", "rows.zarr/x/c/1", 100, 200, 3, "workers died of it"))
    assert quarantine.excluded_rows(SimpleNamespace(place=None, url="rows.zarr", extent=(150, 400))) == (
        (0, 50),
    )
    with pytest.raises(ValueError, match="'stop' or 'skip', not 'skp': did you mean 'skip'"):
        check_choice("skp")
