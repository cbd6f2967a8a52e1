"""Which spans of a pass are to be computed, and which an interrupted run has left."""

from __future__ import annotations

from collections.abc import Iterator

from .checkpoints import EngineStore
from .grid import FAN_IN, RowGrid
from .passes import Span, Stage, spans_of

# A finished span is worth keeping where writing it costs under a twentieth of computing it: a file, and its
# bytes.
_FILE_SECONDS, _DISK_RATE, _SAVE_SHARE = 2e-3, 5e8, 0.05


def worth_saving(seconds: float, nbytes: int, checkpoint_seconds: float) -> bool:
    """Whether a finished span is kept for a resume in mid-pass.

    Examples
    --------
    >>> worth_saving(0.01, 1000, 30.0), worth_saving(10.0, 1000, 30.0), worth_saving(0.01, 1000, 0)
    (False, True, True)
    """
    return checkpoint_seconds <= 0 or seconds * _SAVE_SHARE > _FILE_SECONDS + nbytes / _DISK_RATE


def plan_spans(
    stage: Stage,
    iteration: int,
    store: EngineStore | None,
    workers: int,
    task_seconds: float | None = None,
) -> tuple[list[Span], list[Span]]:
    """(spans to do, spans that an interrupted run left finished), which cover all leaves once.

    Finished spans are known by name only; whoever reads one and cannot, computes it. ``task_seconds`` as of
    :func:`.passes.choose_level`.
    """
    spans = spans_of(stage, workers, task_seconds)
    left = set() if store is None else set(store.nodes(stage.name, iteration))
    if not left:
        return spans, []
    todo: list[Span] = []
    kept: list[Span] = []
    for part, grid in stage.grids.items():
        level = next(span.level for span in spans if span.part == part)
        have = {(span.level, span.index) for span in left if span.part == part}
        for node in _cover(grid, level, have):
            (kept if node in have else todo).append(Span(part, *node))
    return todo, kept


def _cover(grid: RowGrid, level: int, have: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Nodes that cover all leaves: those at hand, and beside them nodes of ``level`` or below."""
    # Nodes with something at hand under them.
    above = {
        (up, index // FAN_IN ** (up - low)) for low, index in have for up in range(low + 1, grid.depth + 1)
    }

    def walk(node: tuple[int, int]) -> Iterator[tuple[int, int]]:
        if node in have or (node[0] <= level and node not in above):
            yield node
            return
        first = node[1] * FAN_IN
        for index in range(first, min(first + FAN_IN, grid.n_nodes(node[0] - 1))):
            yield from walk((node[0] - 1, index))

    return walk((grid.depth, 0))
