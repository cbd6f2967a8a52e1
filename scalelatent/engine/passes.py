"""One pass: its parts, their grids, and the function that a task runs over a span."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from scalelatent.contract.learners import (
    Backend,
    BatchLearner,
    OnlineLearner,
    Reduction,
    StepLearner,
    ValidatedLearner,
    Work,
)
from scalelatent.contract.stats import Stats
from scalelatent.errors import JobError

from .cache import PieceCache
from .grid import FAN_IN, RowGrid
from .halving import accumulate_leaf
from .quarantine import Ranges
from .reading import Meter, Reader, StopEvent, iter_blocks, naming

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset

    from .checkpoints import EngineStore

COUNTERS = 2  # rows done, bytes read: appended to every vector
# Kernels take a block strip by strip, so its size is not a cache's: what counts is that threads, which hand
# Python's lock to each other, do so seldom, and that a block is no larger than a chunk of the usual layout.
BLOCK_BYTES, BLOCK_ROWS, GPU_BLOCK_BYTES, LEAST_BLOCK = 2**22, 4096, 2**26, 256
MERGE_SHARE, FEW_LEAVES = 0.02, 16
# From so many leaves' worth of rows on there are two.
_TWO_LEAVES = 1.5
MIN_TASK_SECONDS = 0.03
# What a task costs the one scheduler, and the share of its core that one job may take.
SCHEDULER_SECONDS, SCHEDULER_SHARE = 1.5e-3, 0.5
# Bytes a second between workers, and the share of computing a span that sending its statistic may cost.
SEND_RATE, SEND_SHARE = 5e8, 0.1
# Orders of magnitude for sizes only, never for results: bytes/s of merging in cache, flop/s of one core.
_MERGE_RATE, FLOP_RATE = 2e10, 6e10


@dataclass(frozen=True)
class Span:
    """A node of one part's tree: all leaves below ``(level, index)``."""

    part: str
    level: int
    index: int


@dataclass(frozen=True)
class Stage:
    """What one or many passes run on."""

    name: str  # read on the dashboard: "capsule_estep"
    work: Work  # an online learner's training rows come in minibatches: only validation rows have a grid
    datasets: Mapping[str, Dataset]  # by part: training rows, validation rows, which share one pass
    grids: Mapping[str, RowGrid]
    device: str = "auto"  # or "cpu", "gpu", "reference"
    classes: np.ndarray | None = None  # their positions are the codes that kernels see
    skipped: Mapping[str, Ranges] = field(default_factory=dict)  # rows left out, see quarantine
    cache: float | None = None  # what rows may take of a process's cache, see shared_cache

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """Part name -> reduction."""
        return _reductions(self.work)

    @property
    def batch(self) -> BatchLearner:
        """The learner of a stage of many passes."""
        return cast(BatchLearner, self.work)

    @property
    def online(self) -> OnlineLearner:
        """The learner of a stage of steps."""
        return cast(OnlineLearner, self.work)

    @property
    def rows(self) -> int:
        return sum(grid.n_rows for grid in self.grids.values())


def _reductions(work: Work) -> Mapping[str, Reduction]:
    if isinstance(work, Mapping):
        return work
    if isinstance(work, BatchLearner):
        return work.reductions()
    return {"validation": work.validation()} if isinstance(work, ValidatedLearner) else {}


def make_stage(
    name: str,
    work: Work,
    datasets: Mapping[str, Any],  # datasets; of a plan also rows that do not exist yet, by their shape
    device: str,
    classes: np.ndarray | None = None,
    *,
    block_rows: int | None = None,
    leaf_rows: int | None = None,
    card_blocks: bool = False,
) -> Stage:
    """Return a stage with grids chosen for its reductions.

    ``card_blocks`` makes blocks as large as a card wants them; a mixed cluster shares smaller ones.
    """
    reductions = dict(_reductions(work))
    online = not isinstance(work, (Mapping, BatchLearner))
    if online and "validation" not in datasets:
        reductions.clear()
    if card_blocks and block_rows is None and leaf_rows is None:
        width = max(dataset.n_features for dataset in datasets.values())
        wished = max((reduction.wants.block_rows or 0 for reduction in reductions.values()), default=0)
        block_rows = max(card_block(width), wished)
    grids = {
        part: choose_grid(datasets[part], reduction, block_rows, leaf_rows)
        for part, reduction in reductions.items()
    }
    parts = (["train"] if online else []) + list(grids)
    return Stage(name, work, {part: datasets[part] for part in parts}, grids, device, classes)


def card_block(n_features: int) -> int:
    """Return the rows of a block that is worth a launch on a card."""
    return _power_of_two(GPU_BLOCK_BYTES / (4 * max(n_features, 1)), 2048, 65536)


def given_grid(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of [engine] about blocks and leaves."""
    return {k: options[k] for k in ("block_rows", "leaf_rows") if options.get(k) is not None}


def choose_grid(
    dataset: Dataset, reduction: Reduction, block_rows: int | None = None, leaf_rows: int | None = None
) -> RowGrid:
    """Blocks worth a call, and leaves so large that merging costs little: the same on any cluster."""
    n, wants, chosen = len(dataset), reduction.wants, block_rows is None
    block_rows = choose_block(dataset.n_features, block_rows, leaf_rows, wants.block_rows)
    if leaf_rows is None:
        least = 3 * reduction.layout().nbytes / _MERGE_RATE / seconds_per_row(reduction)
        wanted = max(least / MERGE_SHARE, n / 1024)
        if wants.merge_share is not None and n < FEW_LEAVES * max(wanted, block_rows):
            wanted = max(least / wants.merge_share, n / FEW_LEAVES)
            if chosen:
                return _few_leaves(n, wanted, block_rows)
        leaf_rows = block_rows * _power_of_two(wanted / block_rows, 1, 2**20)
    return RowGrid(n, min(block_rows, max(n, 1)), leaf_rows // block_rows)


def _few_leaves(n: int, wanted: float, wished: int) -> RowGrid:
    """Few leaves of one size and even in number, so that threads end together."""
    many = n / max(wanted, min(wished, n / 4), 1.0)
    leaf_rows = math.ceil(max(n, 1) / (2 * max(round(many / 2), 1) if many >= _TWO_LEAVES else 1))
    blocks = math.ceil(leaf_rows / wished)
    return RowGrid(n, math.ceil(leaf_rows / blocks), blocks)


def choose_block(
    n_features: int, block_rows: int | None = None, leaf_rows: int | None = None, wished: int | None = None
) -> int:
    """Rows of a block: as given, else as requested or suits a call, such that it divides a given leaf."""
    # What passes here for one number of features passes for any: a fit is refused before it begins.
    for name, value in (("block_rows", block_rows), ("leaf_rows", leaf_rows)):
        if value is not None and value < 1:
            raise JobError(f"{name}={value}: set [engine] {name} to at least 1, or leave it out")
    if block_rows is None:
        usual = _power_of_two(BLOCK_BYTES / (4 * max(n_features, 1)), LEAST_BLOCK, BLOCK_ROWS)
        block_rows = wished or usual
        if leaf_rows is not None:
            block_rows = _fitting(block_rows, leaf_rows)
    if leaf_rows is not None and leaf_rows % block_rows:
        raise JobError(
            f"leaf_rows={leaf_rows} is not a multiple of block_rows={block_rows}: set [engine] leaf_rows to "
            f"{-(-leaf_rows // block_rows) * block_rows}"
        )
    return block_rows


def seconds_per_row(reduction: Reduction | StepLearner) -> float:
    """Order of magnitude on one core, before anything was measured."""
    return max(reduction.flops_per_row(), 1.0) / FLOP_RATE


def _fitting(block_rows: int, leaf_rows: int) -> int:
    """The block that a leaf of the user's size allows."""
    common = math.gcd(block_rows, leaf_rows)
    if leaf_rows <= block_rows:
        return leaf_rows
    if common >= LEAST_BLOCK:
        return common
    if _divisor(leaf_rows, LEAST_BLOCK) >= LEAST_BLOCK // 4:
        return _divisor(leaf_rows, block_rows)
    return leaf_rows if leaf_rows <= BLOCK_ROWS else LEAST_BLOCK


def _divisor(number: int, most: int) -> int:
    """The largest divisor up to ``most``."""
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)


def _power_of_two(value: float, low: int, high: int) -> int:
    power = low
    while power < value and power < high:
        power *= 2
    return power


def cluster_task_seconds(workers: int) -> float:
    """Least seconds of a span on a cluster."""
    return max(MIN_TASK_SECONDS, workers * SCHEDULER_SECONDS / SCHEDULER_SHARE)


def choose_level(grid: RowGrid, reduction: Reduction, workers: int, task_seconds: float | None = None) -> int:
    """Level of the spans."""
    if task_seconds is None:
        sending = reduction.layout().nbytes / SEND_RATE
        task_seconds = max(cluster_task_seconds(workers), sending / SEND_SHARE)
    per_row = seconds_per_row(reduction)
    level = 0
    while level < grid.depth:
        seconds = grid.leaf_rows * FAN_IN**level * per_row
        if seconds >= task_seconds and grid.n_nodes(level + 1) < 4 * workers:
            break
        if grid.n_nodes(level + 1) < workers:
            break
        level += 1
    return level


def spans_of(stage: Stage, workers: int, task_seconds: float | None = None) -> list[Span]:
    """All spans of a pass, the training rows first; see :func:`choose_level`."""
    out = []
    for part, reduction in stage.reductions.items():
        level = choose_level(stage.grids[part], reduction, workers, task_seconds)
        out += [Span(part, level, i) for i in range(stage.grids[part].n_nodes(level))]
    return out


class PassContext:
    """One state prepared for one thread: parameters on its device, readers of its parts."""

    def __init__(self, stage: Stage, state: object, backend: Backend, cache: PieceCache | None) -> None:
        self.stage = stage
        self.backend = backend
        self.meter = Meter()
        self.reductions = dict(stage.reductions)
        self._state = state
        self._prepared: dict[str, Any] = {}
        self._readers = {
            part: Reader(
                stage.datasets[part],
                cache,
                self.meter,
                stage.classes,
                wants=reduction.wants,
                skipped=stage.skipped.get(part, ()),
            )
            for part, reduction in self.reductions.items()
        }

    def run_span(self, span: Span, stop_event: StopEvent) -> np.ndarray:
        """Read, compute and reduce one span: the statistic of its node, then the counters."""
        grid, reduction, layout = (
            self.stage.grids[span.part],
            self.reductions[span.part],
            self.reductions[span.part].layout(),
        )
        if span.part not in self._prepared:
            self._prepared[span.part] = reduction.prepare(self._state, self.backend)
        prepared, before = self._prepared[span.part], self.meter.bytes_read
        start, stop = grid.node_rows(span.level, span.index)
        what = f"{self.stage.name}/{span.part}"
        per_leaf = [grid.blocks(*grid.leaf_range(leaf)) for leaf in grid.node_leaves(span.level, span.index)]
        rows = iter_blocks(
            self._readers[span.part], [block for leaf in per_leaf for block in leaf], stop_event
        )
        tree = _NodeTree(span.level, vector_length(reduction))
        with naming(self.stage.datasets[span.part]), closing(rows):
            for leaf in per_leaf:
                vector = tree.zeros()
                stats = Stats(layout, vector[: layout.size])
                blocks = islice(rows, len(leaf))
                if self.backend.card_errors:  # a card, whose memory may end
                    again = partial(iter_blocks, self._readers[span.part], leaf, stop_event)
                    accumulate_leaf(self.backend, what, reduction, prepared, blocks, again, stats)
                else:
                    for block in blocks:
                        reduction.accumulate(prepared, block, stats)
                tree.add(vector)
        total = tree.total()
        total[layout.size] = stop - start
        total[layout.size + 1] = self.meter.bytes_read - before
        return total


class _NodeTree:
    """The tree below one span, fed leaf by leaf."""

    # A node's sum grows in the vector of its first child, and vectors that were added are used again: fresh
    # pages for each leaf would cost more than the additions.

    def __init__(self, level: int, size: int) -> None:
        self._sums: list[np.ndarray | None] = [None] * (level + 1)
        self._counts = [0] * (level + 1)
        self._top, self._size = level, size
        self._free: list[np.ndarray] = []

    def zeros(self) -> np.ndarray:
        """A vector for the next leaf."""
        if not self._free:
            return np.zeros(self._size)
        vector = self._free.pop()
        vector.fill(0.0)
        return vector

    def add(self, vector: np.ndarray, level: int = 0) -> None:
        """Take a child of the open node of a level (the leaf itself at the top of a span of one leaf)."""
        held = self._sums[level]
        if held is None:
            self._sums[level] = vector
        else:
            held += vector
            self._free.append(vector)
        self._counts[level] += 1
        if level < self._top and self._counts[level] == FAN_IN:
            self._close(level)

    def _close(self, level: int) -> None:
        held = self._sums[level]
        self._sums[level], self._counts[level] = None, 0
        if held is not None:
            self.add(held, level + 1)

    def total(self) -> np.ndarray:
        """Sum of the span, once all its leaves are in."""
        for level in range(self._top):
            self._close(level)
        root = self._sums[self._top]
        assert root is not None
        return root


def vector_length(reduction: Reduction) -> int:
    """Length of the vector of a span: its statistic and counters."""
    return reduction.layout().size + COUNTERS


def split_vector(stage: Stage, part: str, vector: np.ndarray) -> tuple[Stats, int, int]:
    """(statistic, rows, bytes read) of a part's root vector."""
    layout = stage.reductions[part].layout()
    return Stats(layout, vector[: layout.size]), int(vector[-COUNTERS]), int(vector[-COUNTERS + 1])


# A finished span is worth keeping where writing it costs under a twentieth of computing it: a file, and its
# bytes.
_FILE_SECONDS, _DISK_RATE, _SAVE_SHARE = 2e-3, 5e8, 0.05


def worth_saving(seconds: float, nbytes: int, checkpoint_seconds: float) -> bool:
    """Whether a finished span is kept for a resume in mid-pass."""
    return checkpoint_seconds <= 0 or seconds * _SAVE_SHARE > _FILE_SECONDS + nbytes / _DISK_RATE


def plan_spans(
    stage: Stage,
    iteration: int,
    store: EngineStore | None,
    workers: int,
    task_seconds: float | None = None,
) -> tuple[list[Span], list[Span]]:
    """(spans to do, spans that an interrupted run left finished), which cover all leaves once."""
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
