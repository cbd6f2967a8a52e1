"""One pass over a dataset: choose blocks, leaves and spans, and compute the statistic of one span.

A leaf is a group of consecutive blocks whose statistics are summed in order; a span is the rows of one task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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

from .backend import CupyBackend
from .cache import PieceCache
from .grid import FAN_IN, RowGrid
from .halving import accumulate_leaf
from .quarantine import Ranges
from .reading import Meter, Reader, StopEvent, iter_blocks, iter_gpu_blocks, name_dataset_in_errors

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset

    from .checkpoints import EngineStore

COUNTERS = 2  # numbers appended to every statistic's vector: rows done, bytes read
# Default upper bounds of a block: bytes and rows on a CPU, bytes on a GPU; and the smallest block in rows.
# Blocks are larger than a CPU cache, so that threads rarely wait for Python's lock, but not larger than a
# chunk of a dataset with the default layout.
BLOCK_BYTES, BLOCK_ROWS, GPU_BLOCK_BYTES, LEAST_BLOCK = 2**22, 4096, 2**26, 256
# Maximum ratio of the time that merging the statistics of leaves (groups of blocks) takes to the time that
# computing these statistics takes.
MERGE_SHARE = 0.02
FEW_LEAVES = 16  # maximum number of leaves (groups of blocks) of a reduction that sets `merge_share`
# A dataset gets two leaves (groups of blocks) from this multiple of the preferred rows of a leaf on.
_TWO_LEAVES_FACTOR = 1.5
MIN_TASK_SECONDS = 0.03  # minimum seconds of a task on a cluster
# Seconds that Dask's scheduler spends on one task, and the largest share of its time for one job.
SCHEDULER_SECONDS, SCHEDULER_SHARE = 1.5e-3, 0.5
# Bytes per second between workers; sending a statistic may take this share of the time to compute it.
SEND_RATE, SEND_SHARE = 5e8, 0.1
# Assumed bytes per second of summing statistics, and flops per second of one core; they determine the sizes
# of leaves (groups of blocks) and tasks.
_MERGE_RATE, FLOP_RATE = 2e10, 6e10
_GPU_FLOP_RATE = 2e13  # flops per second of one GPU; a third of the float32 peak of an H100


@dataclass(frozen=True)
class Span:
    """Rows of one task: all leaves (groups of blocks) below the node ``(level, index)`` of the tree of sums.

    ``part`` names the rows: "train", or "validation".
    """

    part: str
    level: int
    index: int


@dataclass(frozen=True)
class Stage:
    """A learner or reduction with its datasets: the constants of one pass, many passes, or an online fit."""

    name: str  # shown on the dashboard, such as "capsule_estep"
    work: Work
    datasets: Mapping[str, Dataset]  # by part: "train", and "validation" if a pass also reads validation rows
    grids: Mapping[str, RowGrid]  # keys as in `datasets`; online training rows have no grid
    device: str = "auto"  # or "cpu", "gpu", "reference"
    classes: np.ndarray | None = None  # kernels receive the position of a label in this array
    skipped: Mapping[str, Ranges] = field(default_factory=dict)  # by part: rows of bad shards, not read
    cache: float | None = None  # row cache of each process: bytes, or (up to 1) a share of its memory

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """Reductions by part of the rows: "train" and, if there are validation rows, "validation"."""
        return _get_reductions(self.work)

    @property
    def batch(self) -> BatchLearner:
        """Learner of this stage, which must be a learner by passes over all rows."""
        return cast(BatchLearner, self.work)

    @property
    def online(self) -> OnlineLearner:
        """Learner of this stage, which must be a learner by minibatches."""
        return cast(OnlineLearner, self.work)

    @property
    def rows(self) -> int:
        return sum(grid.n_rows for grid in self.grids.values())


def _get_reductions(work: Work) -> Mapping[str, Reduction]:
    if isinstance(work, Mapping):
        return work
    if isinstance(work, BatchLearner):
        return work.reductions()
    return {"validation": work.validation()} if isinstance(work, ValidatedLearner) else {}


def make_stage(
    name: str,
    work: Work,
    datasets: Mapping[str, Any],  # `plan` gives shapes of rows in place of datasets
    device: str,
    classes: np.ndarray | None = None,
    *,
    block_rows: int | None = None,
    leaf_rows: int | None = None,
    gpu_blocks: bool = False,
) -> Stage:
    """Return a stage whose rows are divided into blocks and leaves (groups of blocks) for its reductions.

    ``gpu_blocks`` chooses the large blocks that suit GPUs; clusters with CPU workers use smaller blocks.
    """
    reductions = dict(_get_reductions(work))
    online = not isinstance(work, (Mapping, BatchLearner))
    if online and "validation" not in datasets:
        reductions.clear()
    on_gpu = gpu_blocks and block_rows is None and leaf_rows is None
    if on_gpu:
        width = max(dataset.n_features for dataset in datasets.values())
        requested = max(
            (reduction.requirements.block_rows or 0 for reduction in reductions.values()), default=0
        )
        block_rows = max(choose_gpu_block_rows(width), requested)
    grids = {
        part: choose_grid(datasets[part], reduction, block_rows, leaf_rows, on_gpu)
        for part, reduction in reductions.items()
    }
    parts = (["train"] if online else []) + list(grids)
    return Stage(name, work, {part: datasets[part] for part in parts}, grids, device, classes)


def choose_gpu_block_rows(n_features: int) -> int:
    """Return the rows of a block that keeps a GPU busy."""
    return _round_up_to_power(GPU_BLOCK_BYTES / (4 * max(n_features, 1)), 2048, 65536)


def select_grid_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the [engine] options ``block_rows`` and ``leaf_rows`` that the user set."""
    return {k: options[k] for k in ("block_rows", "leaf_rows") if options.get(k) is not None}


def choose_grid(
    dataset: Dataset,
    reduction: Reduction,
    block_rows: int | None = None,
    leaf_rows: int | None = None,
    on_gpu: bool = False,
) -> RowGrid:
    """Return the division of rows into blocks and leaves (groups of blocks); workers do not change it.

    Leaves are so large that merging their statistics costs little. A GPU computes rows faster than a CPU
    merges statistics, so its leaves are larger; still there are at least half of `FEW_LEAVES` for several
    GPUs, unless a leaf would be smaller than a block.
    """
    n, requirements, is_free = len(dataset), reduction.requirements, block_rows is None
    block_rows = choose_block_rows(dataset.n_features, block_rows, leaf_rows, requirements.block_rows)
    if leaf_rows is None:
        merge_rows = 3 * reduction.layout().nbytes / _MERGE_RATE / seconds_per_row(reduction)
        if on_gpu:
            merge_rows = min(merge_rows * _GPU_FLOP_RATE / FLOP_RATE, MERGE_SHARE * n / FEW_LEAVES)
        target = max(merge_rows / MERGE_SHARE, n / 1024)
        if requirements.merge_share is not None and n < FEW_LEAVES * max(target, block_rows):
            target = max(merge_rows / requirements.merge_share, n / FEW_LEAVES)
            if is_free:
                return _make_few_leaves(n, target, block_rows)
        leaf_rows = block_rows * _round_up_to_power(target / block_rows, 1, 2**20)
    return RowGrid(n, min(block_rows, max(n, 1)), leaf_rows // block_rows)


def _make_few_leaves(n: int, target: float, block_rows: int) -> RowGrid:
    """Return a grid of an even number of equal leaves (groups of blocks), so that threads end together."""
    count = n / max(target, min(block_rows, n / 4), 1.0)
    leaf_rows = math.ceil(max(n, 1) / (2 * max(round(count / 2), 1) if count >= _TWO_LEAVES_FACTOR else 1))
    blocks = math.ceil(leaf_rows / block_rows)
    return RowGrid(n, math.ceil(leaf_rows / blocks), blocks)


def choose_block_rows(
    n_features: int, block_rows: int | None = None, leaf_rows: int | None = None, requested: int | None = None
) -> int:
    """Return the rows of a block: the user's number, or a divisor of ``leaf_rows`` near ``requested``.

    An error for wrong options does not depend on ``n_features``, so a session can check the options early.
    """
    for name, value in (("block_rows", block_rows), ("leaf_rows", leaf_rows)):
        if value is not None and value < 1:
            raise JobError(f"{name}={value}: set [engine] {name} to at least 1, or leave it out")
    if block_rows is None:
        default = _round_up_to_power(BLOCK_BYTES / (4 * max(n_features, 1)), LEAST_BLOCK, BLOCK_ROWS)
        block_rows = requested or default
        if leaf_rows is not None:
            block_rows = _fit_block_to_leaf(block_rows, leaf_rows)
    if leaf_rows is not None and leaf_rows % block_rows:
        raise JobError(
            f"leaf_rows={leaf_rows} is not a multiple of block_rows={block_rows}: set [engine] leaf_rows to "
            f"{-(-leaf_rows // block_rows) * block_rows}"
        )
    return block_rows


def seconds_per_row(reduction: Reduction | StepLearner) -> float:
    """Return a rough estimate of the seconds per row on one core, before any measurement."""
    return max(reduction.flops_per_row(), 1.0) / FLOP_RATE


def _fit_block_to_leaf(block_rows: int, leaf_rows: int) -> int:
    """Return a number of rows near ``block_rows`` that divides ``leaf_rows``, which the user has set."""
    common = math.gcd(block_rows, leaf_rows)
    if leaf_rows <= block_rows:
        return leaf_rows
    if common >= LEAST_BLOCK:
        return common
    if _find_largest_divisor(leaf_rows, LEAST_BLOCK) >= LEAST_BLOCK // 4:
        return _find_largest_divisor(leaf_rows, block_rows)
    return leaf_rows if leaf_rows <= BLOCK_ROWS else LEAST_BLOCK


def _find_largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``most``."""
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)


def _round_up_to_power(value: float, low: int, high: int) -> int:
    power = low
    while power < value and power < high:
        power *= 2
    return power


def cluster_task_seconds(workers: int) -> float:
    """Return the shortest seconds of a task for which the scheduler can send tasks to all workers in time."""
    return max(MIN_TASK_SECONDS, workers * SCHEDULER_SECONDS / SCHEDULER_SHARE)


def choose_level(grid: RowGrid, reduction: Reduction, workers: int, task_seconds: float | None = None) -> int:
    """Return the tree level whose nodes become tasks, so that tasks are long, but enough for all workers."""
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


def list_spans(stage: Stage, workers: int, task_seconds: float | None = None) -> list[Span]:
    """Return all spans (ranges of rows, one per task) of a pass; training rows come first."""
    out = []
    for part, reduction in stage.reductions.items():
        level = choose_level(stage.grids[part], reduction, workers, task_seconds)
        out += [Span(part, level, i) for i in range(stage.grids[part].n_nodes(level))]
    return out


class PassContext:
    """Data with which one thread computes a pass: the prepared state, and readers of its rows."""

    def __init__(self, stage: Stage, state: object, backend: Backend, cache: PieceCache | None) -> None:
        self.stage = stage
        self.backend = backend
        self.meter = Meter()
        if isinstance(backend, CupyBackend):
            backend.start_pass()
        self.reductions = dict(stage.reductions)
        self._state = state
        self._prepared: dict[str, Any] = {}
        self._readers = {
            part: Reader(
                stage.datasets[part],
                cache,
                self.meter,
                stage.classes,
                requirements=reduction.requirements,
                skipped=stage.skipped.get(part, ()),
            )
            for part, reduction in self.reductions.items()
        }

    def run_span(self, span: Span, stop_event: StopEvent) -> np.ndarray:
        """Return the vector of one span (rows of a task): statistic, number of rows, bytes read."""
        grid, reduction = self.stage.grids[span.part], self.reductions[span.part]
        layout = reduction.layout()
        if span.part not in self._prepared:
            self._prepared[span.part] = reduction.prepare(self._state, self.backend)
        prepared, before = self._prepared[span.part], self.meter.bytes_read
        start, stop = grid.node_rows(span.level, span.index)
        work_name = f"{self.stage.name}/{span.part}"
        reader, blocks = self._readers[span.part], grid.blocks(start, stop)
        if reduction.requirements.reads_on_gpu and isinstance(self.backend, CupyBackend):
            rows = iter_gpu_blocks(reader, blocks, stop_event, self.backend)
        else:
            rows = iter_blocks(reader, blocks, stop_event)

        def add_leaf(leaf: int, vector: np.ndarray) -> None:
            stats, leaf_blocks = Stats(layout, vector[: layout.size]), grid.blocks(*grid.node_rows(0, leaf))
            of_leaf = islice(rows, len(leaf_blocks))
            if self.backend.gpu_errors:  # a GPU, which may run out of memory
                reread = partial(iter_blocks, reader, leaf_blocks, stop_event)
                accumulate_leaf(self.backend, work_name, reduction, prepared, of_leaf, reread, stats)
            else:
                for block in of_leaf:
                    reduction.accumulate(prepared, block, stats)

        with name_dataset_in_errors(self.stage.datasets[span.part]), closing(rows):
            total = sum_leaves(grid, span.level, span.index, vector_length(reduction), add_leaf)
        total[layout.size] = stop - start
        total[layout.size + 1] = self.meter.bytes_read - before
        return total


def sum_leaves(
    grid: RowGrid,
    level: int,
    node: int,
    size: int,
    add_leaf: Callable[[int, np.ndarray], None],
    unused: list[np.ndarray] | None = None,
) -> np.ndarray:
    """Return the sum of the leaves (groups of blocks) below a tree node, added in the order of the tree.

    ``add_leaf`` adds the statistic of a leaf, given by its number, to a vector of ``size`` zeros. ``unused``
    contains vectors to use again, because a new vector per leaf would take longer than the additions.
    """
    unused = [] if unused is None else unused
    if level == 0:
        vector = unused.pop() if unused else np.empty(size)
        vector.fill(0.0)
        add_leaf(node, vector)
        return vector
    first = node * FAN_IN
    total = sum_leaves(grid, level - 1, first, size, add_leaf, unused)
    for child in range(first + 1, min(first + FAN_IN, grid.n_nodes(level - 1))):
        vector = sum_leaves(grid, level - 1, child, size, add_leaf, unused)
        total += vector
        unused.append(vector)
    return total


def vector_length(reduction: Reduction) -> int:
    """Return the length of the vector of a span (rows of a task): statistic, rows and bytes read."""
    return reduction.layout().size + COUNTERS


def split_vector(stage: Stage, part: str, vector: np.ndarray) -> tuple[Stats, int, int]:
    """Return (statistic, rows, bytes read) from the sum over all rows of ``part`` ("train", "validation")."""
    layout = stage.reductions[part].layout()
    return Stats(layout, vector[: layout.size]), int(vector[-COUNTERS]), int(vector[-COUNTERS + 1])


# Estimated seconds per file and bytes per second of a disk. The result of a task is saved if writing it takes
# less than this share of the seconds of the task.
_FILE_SECONDS, _DISK_RATE, _SAVE_SHARE = 2e-3, 5e8, 0.05


def is_worth_saving(seconds: float, nbytes: int, checkpoint_seconds: float) -> bool:
    """Return True if the result of a task should be saved, so that a resume in the same pass can reuse it."""
    return checkpoint_seconds <= 0 or seconds * _SAVE_SHARE > _FILE_SECONDS + nbytes / _DISK_RATE


def plan_spans(
    stage: Stage,
    iteration: int,
    store: EngineStore | None,
    workers: int,
    task_seconds: float | None = None,
) -> tuple[list[Span], list[Span]]:
    """Return (spans to compute, spans with saved sums); the spans (rows of a task) cover all rows."""
    spans = list_spans(stage, workers, task_seconds)
    finished = set() if store is None else set(store.nodes(stage.name, iteration))
    if not finished:
        return spans, []
    todo: list[Span] = []
    reused: list[Span] = []
    for part, grid in stage.grids.items():
        level = next(span.level for span in spans if span.part == part)
        saved = {(span.level, span.index) for span in finished if span.part == part}
        for node in _cover_leaves(grid, level, saved):
            (reused if node in saved else todo).append(Span(part, *node))
    return todo, reused


def _cover_leaves(grid: RowGrid, level: int, saved: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield tree nodes (level, index) that cover each row once: saved nodes, and nodes up to ``level``."""
    ancestors = {
        (up, index // FAN_IN ** (up - low)) for low, index in saved for up in range(low + 1, grid.depth + 1)
    }

    def walk(node: tuple[int, int]) -> Iterator[tuple[int, int]]:
        if node in saved or (node[0] <= level and node not in ancestors):
            yield node
            return
        first = node[1] * FAN_IN
        for index in range(first, min(first + FAN_IN, grid.n_nodes(node[0] - 1))):
            yield from walk((node[0] - 1, index))

    return walk((grid.depth, 0))
