"""Grids have suitable sizes; any division of a pass into spans (row ranges of tasks) gives the same bits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.stats import Layout
from scalelatent.data import Dataset
from scalelatent.engine import passes
from scalelatent.engine.backend import make_backend
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.grid import RowGrid, TreeReducer
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.passes import (
    PassContext,
    Span,
    choose_block_rows,
    choose_grid,
    choose_level,
    list_spans,
    make_stage,
)
from scalelatent.engine.plan import Resources, stage_memory
from scalelatent.engine.reading import StopEvent
from scalelatent.errors import DataError, JobError


def run_by_spans(stage: Any, level: int) -> np.ndarray:
    context = PassContext(stage, None, make_backend("cpu"), PieceCache(0))
    reducer = TreeReducer(stage.grids["train"])
    for index in reversed(range(stage.grids["train"].n_nodes(level))):
        reducer.add(level, index, context.run_span(Span("train", level, index), StopEvent()))
    return reducer.root()


@given(st.integers(1, 700), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_spans_of_every_level_give_the_same_bits(
    toy: SimpleNamespace, n: int, block: int, blocks: int, weighted: bool, seed: int
) -> None:
    ds = toy.rows(n, seed=seed, weighted=weighted)
    stage = make_stage(
        "toy",
        {"train": toy.Sums(3)},
        {"train": ds},
        "cpu",
        np.arange(8),
        block_rows=block,
        leaf_rows=block * blocks,
    )
    roots = [run_by_spans(stage, level) for level in range(stage.grids["train"].depth + 1)]
    for root in roots[1:]:
        np.testing.assert_array_equal(root, roots[0])
    assert roots[0][-2] == n  # The last number but one counts the rows.
    assert roots[0][-1] == 0  # The last number counts bytes that were read from files.


@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 4), st.integers(0, 99))
def test_any_number_of_threads_gives_the_same_bits(
    toy: SimpleNamespace, n: int, block: int, blocks: int, seed: int
) -> None:
    stage = make_stage(
        "toy", {"train": toy.Sums(3)}, {"train": toy.rows(n, seed=seed)}, "cpu", np.arange(8),
        block_rows=block, leaf_rows=block * blocks,
    )  # fmt: skip
    oracle = run_by_spans(stage, 0)[:-2]
    for jobs in (1, 2, 3, 4):
        stats = InProcessExecutor(jobs, cache=PieceCache(0)).collect(stage, lambda done, total: None)["train"]
        np.testing.assert_array_equal(stats.vector, oracle)


@pytest.mark.parametrize("chunk_rows", [3, 64, 1000])
@pytest.mark.parametrize("cache_bytes", [0, 2000, 10**9])
def test_stored_rows_of_any_layout_give_the_same_bits(
    toy: SimpleNamespace, tmp_path: Path, chunk_rows: int, cache_bytes: int
) -> None:
    ds = toy.rows(233, weighted=True)
    stored = ds.save(tmp_path / "ds", chunk_rows=chunk_rows, shard_rows=chunk_rows * 2)
    oracle = run_by_spans(toy.stage(ds, block=5, leaf=20), 0)[:-2]
    stage = toy.stage(stored, block=5, leaf=20)
    collected = make_stage(
        "toy", {"train": toy.Sums(3)}, {"train": stored}, "cpu", np.arange(8), block_rows=5, leaf_rows=20
    )
    assert stage.grids == collected.grids
    for jobs in (1, 3):
        executor = InProcessExecutor(jobs, cache=PieceCache(cache_bytes))
        for _ in range(2):  # The second pass reads from the cache if the cache is large enough for all rows.
            stats = executor.collect(collected, lambda done, total: None)["train"]
            np.testing.assert_array_equal(stats.vector, oracle)


def test_the_grid_decides_the_bits_so_these_tests_can_fail(toy: SimpleNamespace) -> None:
    ds = toy.rows(500)
    roots = {
        run_by_spans(toy.stage(ds, block=b, leaf=lf), 0)[:-2].tobytes()
        for b, lf in ((8, 16), (4, 16), (8, 8))
    }
    assert len(roots) > 1


@pytest.mark.parametrize(
    ("leaf", "block"), [(100, 100), (2048, 2048), (6144, 2048), (8192, 4096), (4864, 256)]
)
def test_a_leaf_size_may_be_set_without_a_block_size(toy: SimpleNamespace, leaf: int, block: int) -> None:
    grid = toy.stage(toy.rows(20_000), block=None, leaf=leaf).grids["train"]
    assert (grid.leaf_rows, grid.block_rows) == (leaf, block)


@given(st.integers(1, 10**7), st.integers(1, 4000), st.floats(1, 1e7), st.integers(1, 10**7))
def test_the_grid_suits_the_cache_and_the_number_of_rows(n: int, p: int, flops: float, size: int) -> None:
    ds = type("Rows", (), {"__len__": lambda self: n, "n_features": p})()
    reduction: Any = SimpleNamespace(
        requirements=BlockRequirements(),
        flops_per_row=lambda: flops,
        layout=lambda: Layout((("a", (size,)),)),
    )
    grid = choose_grid(ds, reduction)
    assert grid.n_rows == n
    assert grid.block_rows == n if n < 256 else 256 <= grid.block_rows <= passes.BLOCK_ROWS
    # A block of float32 rows has at most twice BLOCK_BYTES, unless 256 rows, the minimum, already have more
    # bytes.
    assert grid.block_rows * p * 4 <= max(2 * passes.BLOCK_BYTES, 256 * p * 4)
    assert grid.n_leaves <= 1024
    merge = 3 * 8 * size / passes._MERGE_RATE
    compute = grid.leaf_rows * flops / passes.FLOP_RATE
    assert merge <= passes.MERGE_SHARE * compute * (1 + 1e-9) or grid.n_leaves == 1


@given(st.integers(1, 10**7), st.floats(1, 1e7), st.integers(1, 10**7), st.sampled_from([512, 2**15]))
def test_a_reduction_may_request_block_rows_and_many_leaves(
    n: int, flops: float, size: int, block: int
) -> None:
    ds = type("Rows", (), {"__len__": lambda self: n, "n_features": 256})()

    def grid(requirements: BlockRequirements) -> RowGrid:
        reduction: Any = SimpleNamespace(
            requirements=requirements, flops_per_row=lambda: flops, layout=lambda: Layout((("a", (size,)),))
        )
        return choose_grid(ds, reduction)

    usual, wished = (
        grid(BlockRequirements(block_rows=block)),
        grid(BlockRequirements(block_rows=block, merge_share=0.08)),
    )
    assert usual.block_rows == min(block, n)
    merging = 3 * 8 * size / passes._MERGE_RATE / (flops / passes.FLOP_RATE)
    if n / max(merging / passes.MERGE_SHARE, n / 1024, block) >= 16:
        assert wished == usual
        return
    assert usual.n_leaves <= 2 * wished.n_leaves <= 32
    # Leaves (fixed ranges of rows) may be shorter by the factor 0.75, because an odd number is made even.
    assert 0.75 * merging <= 0.08 * wished.leaf_rows * (1 + 1e-9) or wished.n_leaves == 1
    assert wished.n_leaves == 1 or wished.n_leaves % 2 == 0 or n < 256
    assert wished.leaf_rows >= wished.block_rows >= min(block, n // 4) // 2


@pytest.mark.parametrize(("block", "leaf", "advice"), [(8, 12, 16), (100, 50, 100), (7, 15, 21)])
def test_a_leaf_that_is_not_a_multiple_of_blocks_is_refused(
    toy: SimpleNamespace, block: int, leaf: int, advice: int
) -> None:
    with pytest.raises(
        ValueError, match=f"leaf_rows={leaf} is not a multiple of block_rows={block}.*leaf_rows to {advice}"
    ):
        choose_grid(toy.rows(1000), toy.Sums(3), block, leaf)


@given(leaf=st.integers(1, 20_000), p=st.integers(1, 5000))
def test_a_leaf_size_is_valid_for_any_number_of_columns_or_for_none(leaf: int, p: int) -> None:
    """A projection changes the number of columns, so a leaf size that depended on it could fail in a fit."""

    def block(columns: int) -> int | None:
        try:
            return choose_block_rows(columns, None, leaf)
        except JobError:
            return None

    found, first = block(p), block(1)
    assert (found is None) == (first is None)
    if found is None:
        assert leaf > passes.BLOCK_ROWS
        assert choose_block_rows(p, None, -(-leaf // 256) * 256)  # The error recommends this leaf size.
    else:
        assert leaf % found == 0
        assert found <= passes.BLOCK_ROWS
        assert found >= min(leaf, 64)


@pytest.mark.parametrize(
    "options", [{"block_rows": 0}, {"block_rows": -4}, {"block_rows": 8, "leaf_rows": -8}]
)
def test_block_and_leaf_sizes_below_one_are_refused(toy: SimpleNamespace, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1|no multiple"):
        choose_grid(toy.rows(1000), toy.Sums(3), **options)


@given(st.integers(1, 5000), st.integers(1, 2000), st.floats(1, 1e9))
def test_choose_level_keeps_workers_busy_and_tasks_long(leaves: int, workers: int, flops: float) -> None:
    grid = RowGrid(leaves * 10, 10, 1)
    reduction: Any = SimpleNamespace(flops_per_row=lambda: flops, layout=lambda: Layout((("a", ()),)))
    level = choose_level(grid, reduction, workers)
    assert 0 <= level <= grid.depth
    assert grid.n_nodes(level) >= min(workers, leaves)
    seconds = grid.leaf_rows * 8**level * flops / passes.FLOP_RATE
    # Spans (row ranges of tasks) are shorter only if workers would otherwise be idle.
    if seconds < passes.cluster_task_seconds(workers) and level < grid.depth:
        assert grid.n_nodes(level + 1) < workers


@given(st.integers(1, 900), st.integers(1, 900), st.integers(1, 16))
def test_spans_tile_all_parts(toy: SimpleNamespace, n: int, held: int, workers: int) -> None:
    stage = toy.stage(toy.rows(n), validation=toy.rows(held))
    seen: dict[str, list[int]] = {"train": [], "validation": []}
    for span in list_spans(stage, workers):
        start, stop = stage.grids[span.part].node_rows(span.level, span.index)
        seen[span.part] += range(start, stop)
    assert seen == {"train": list(range(n)), "validation": list(range(held))}
    assert stage.rows == n + held


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_error_of_a_bad_row_names_the_dataset_and_the_next_step(
    toy: SimpleNamespace, jobs: int, tmp_path: Path
) -> None:
    x = np.zeros((100, 3), "f4")
    x[41, 1] = np.nan
    memory = Dataset.from_arrays(x, np.zeros(100, int))
    with pytest.raises(DataError, match=r"the given arrays: row 41 is bad\. Clean these rows"):
        InProcessExecutor(jobs).collect(
            make_stage("toy", {"train": toy.Sums(3)}, {"train": memory}, "cpu", block_rows=8, leaf_rows=8),
            lambda done, total: None,
        )


def test_a_plan_includes_the_scratch_memory_of_a_reduction(toy: SimpleNamespace) -> None:
    class Needs(toy.Sums):
        requirements = BlockRequirements(scratch=(2**20, 100))

    resources = Resources(1, 2, 2**32)
    for work, bytes_of_a_thread in ((toy.Sums(3), 64 * (2 * 3 + 4) * 8), (Needs(3), 2**20 + 64 * (12 + 100))):
        stage = make_stage(
            "toy", {"train": work}, {"train": toy.rows(500)}, "cpu", block_rows=64, leaf_rows=64
        )
        parts = stage_memory(stage, resources, stage.datasets["train"], 0)
        assert parts["blocks and buffers"] == 2 * bytes_of_a_thread


def test_spans_are_longer_if_they_send_many_bytes() -> None:
    def level(size: int) -> int:
        reduction: Any = SimpleNamespace(flops_per_row=lambda: 1e6, layout=lambda: Layout((("a", (size,)),)))
        return choose_level(RowGrid(4096 * 4096, 4096, 1), reduction, 30)

    # There are 512 spans (row ranges of tasks) of half a second each, which send less than a megabyte.
    assert level(10) == level(10**5) == 1
    assert level(5 * 10**6) == 2  # A span (row range of a task) sends 40 MB.
