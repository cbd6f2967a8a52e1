"""Spans (row ranges of tasks) cover each leaf (a fixed range of rows) once, whatever spans are stored."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.grid import RowGrid
from scalelatent.engine.passes import Span, _cover_leaves, plan_spans


@st.composite
def draw_grid(draw: st.DrawFn) -> tuple[RowGrid, int, set[tuple[int, int]]]:
    grid = RowGrid(draw(st.integers(1, 700)), 1, 1)
    nodes = [(level, i) for level in range(grid.depth + 1) for i in range(grid.n_nodes(level))]
    have = draw(st.sets(st.sampled_from(nodes), max_size=12))
    return grid, draw(st.integers(0, grid.depth)), have


@given(draw_grid())
def test_every_leaf_is_covered_once(case: tuple[RowGrid, int, set[tuple[int, int]]]) -> None:
    grid, level, have = case
    nodes = list(_cover_leaves(grid, level, have))
    leaves = [leaf for node in nodes for leaf in grid.node_leaves(*node)]
    assert sorted(leaves) == list(range(grid.n_leaves))
    for node in nodes:
        assert node in have or node[0] <= level
        # No new span (row range) contains a stored span, which would then be recomputed.
        inside = set(grid.node_leaves(*node))
        assert node in have or not any(
            inside.issuperset(grid.node_leaves(*other)) for other in have if other[0] < node[0]
        )


def test_missing_spans_are_found_without_reading_the_stored_ones(
    toy: SimpleNamespace, tmp_path: Path, monkeypatch: object
) -> None:
    """Stored spans (row ranges) are found by file name; no sums are loaded, so a damaged file counts, too."""
    stage, store = toy.stage(toy.rows(150)), EngineStore(tmp_path)
    for index in (0, 3):
        store.save_node(stage.name, 0, Span("train", 0, index), np.zeros(3))
    (tmp_path / f"node-{stage.name}-000000-train-0-3.rec").write_bytes(b"torn")
    todo, kept = plan_spans(stage, 0, store, 1)
    assert kept == [Span("train", 0, 0), Span("train", 0, 3)]
    assert Span("train", 0, 1) in todo
    assert plan_spans(stage, 1, store, 1)[1] == []
