"""What a fit will need, before anything runs: tasks, bytes, seconds; and the refusal of what cannot fit.

Peak memory is a function of block, statistic and model alone; rows enter through the block cache only, which
is bounded. The terms are those of the code: each is named after what holds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelatent.data.grid import FAN_IN
from scalelatent.errors import PlanError
from scalelatent.models.base import Block
from scalelatent.models.stats import Stats

from .ahead import AHEAD
from .backend import make_backend
from .cache import DEFAULT_SHARE, memory_limit
from .executor import KEEP_REPLICAS
from .feeding import AHEAD as SLABS_AHEAD
from .feeding import SLAB_BYTES
from .order import RowOrder
from .passes import Stage, choose_level, spans_of
from .reading import Meter, Reader, rows_for
from .threads import resolve_jobs, single_threaded

# Resident size of a worker that has imported everything and compiled its kernels, rounded up.
PROCESS_BYTES = 450 * 2**20
# Freed memory that the allocator keeps for each thread, in workers so set (dask/allocator.py).
KEPT_BYTES = 2**25
ALLOWED_SHARE = 0.6
MAX_TASKS = 10_000
PROBE_ROWS = 8192


@dataclass(frozen=True)
class RowShape:
    """Stands for rows that do not exist yet (projected ones): a length and a width."""

    n_rows: int
    n_features: int

    def __len__(self) -> int:
        return self.n_rows


@dataclass(frozen=True)
class Resources:
    """Where a fit would run.

    Attributes
    ----------
    workers, threads : int
        Processes, and threads of each.
    memory : int
        Bytes that each process may use.
    """

    workers: int
    threads: int
    memory: int


def find_resources(client: Any, n_jobs: int | None, limit: str | int | float | None) -> Resources:
    """Workers, threads and memory of a cluster, or of this process.

    Examples
    --------
    >>> find_resources(None, 2, "4GB").threads
    2
    """
    from dask.utils import parse_bytes

    given = None if limit in (None, "auto", 0) else int(parse_bytes(limit))  # type: ignore[arg-type]
    if client is None:
        return Resources(1, resolve_jobs(n_jobs), given or memory_limit())
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    limits = [int(w["memory_limit"]) for w in workers if w["memory_limit"]]
    threads = max([int(w["nthreads"]) for w in workers], default=1)
    return Resources(max(len(workers), 1), threads, given or min(limits, default=memory_limit()))


def stage_memory(stage: Stage, resources: Resources, source: Any, constants: int) -> dict[str, int]:
    """Bytes of one worker while it runs a stage, by what holds them.

    Parameters
    ----------
    stage : Stage
    resources : Resources
    source : Dataset
        Rows as they are read.
    constants : int
        Bytes of the stage's constants and states (moments, factors, weights).
    """
    grid, reduction = stage.grids["train"], stage.reductions["train"]
    stat, p = reduction.layout().nbytes, stage.datasets["train"].n_features
    width = max(1, reduction.layout().size // max(p, 1))
    level = choose_level(grid, reduction, resources.workers * resources.threads)
    piece = _piece_bytes(source)
    ahead = max(AHEAD, 2 * getattr(source, "reads_at_once", 1))  # in flight, packed and unpacked
    blocks = grid.block_rows * (2 * p + min(width, 2**14)) * 8
    return {
        "process": process_bytes(resources.threads),
        "pieces read ahead": resources.threads * (ahead + 2) * piece,
        "blocks and buffers": resources.threads * blocks,
        "statistics in a span": resources.threads * (2 + (FAN_IN - 1) * level) * stat,
        "statistics waiting for their siblings": (FAN_IN * max(grid.depth - level, 0) + 2) * stat,
        "constants and states": constants,
    }


def process_bytes(threads: int) -> int:
    """What a process holds before any rows.

    Examples
    --------
    >>> process_bytes(2) - process_bytes(1) == KEPT_BYTES
    True
    """
    return PROCESS_BYTES + threads * KEPT_BYTES


def steps_memory(
    learner: Any,
    order: RowOrder,
    n_features: int,
    resources: Resources,
    source: Any,
    row_bytes: int,
    constants: int,
    state: int,
    keeps_leaves: bool,
) -> dict[str, int]:
    """Bytes of one worker while it takes steps over minibatches, all chains of them, by what holds them.

    Parameters
    ----------
    learner : OnlineLearner
    order : RowOrder
    n_features, row_bytes : int
        Of the rows that are learnt from; bytes as they are stored.
    source : Dataset
        Rows as they are read.
    constants, state : int
        Bytes of the learner, and of one state.
    keeps_leaves : bool
        What a leaf contributed before is read, and what it does now written.
    """
    layout, chains = learner.layout(), order.n_chains
    stored = getattr(source, "is_stored", False)
    # A chain holds the runs of the buffer in use and of the next; without shuffling a few runs.
    runs = 2 * order.buffer_runs if order.shuffle else 2 + -(-order.chain_rows // order.run_rows)
    held = min(2 * order.n_rows, chains * runs * order.run_rows) if stored else 0
    slab = chains * max(SLAB_BYTES, order.chain_rows * row_bytes)
    threads = min(resources.threads, chains)
    width = min(max(1, layout.size // n_features), 2**14)
    # A thread merges as it goes. On a cluster a step's come from all sides, and none waits for its sibling.
    depth = chains.bit_length() + 1
    summed = min(chains, (depth if resources.workers == 1 else 2 * depth * resources.workers) * threads)
    return {
        "process": process_bytes(resources.threads),
        "pieces read ahead": 4 * _piece_bytes(source),
        "rows of the buffers": held * (row_bytes + 12),
        "rows of the next steps": (SLABS_AHEAD + 2) * slab,
        "blocks and buffers": threads * order.chain_rows * (2 * n_features + width) * 8,
        "statistics of the chains": (summed + 3 + 2 * threads * keeps_leaves) * layout.nbytes,
        "records of their rows": 4 * 8 * order.batch_rows * layout.row_width,
        "constants and states": constants + (KEEP_REPLICAS + 2) * state,
    }


def _piece_bytes(source: Any) -> int:
    """Bytes of the largest piece of rows that is read at once."""
    pieces = source.pieces(0, min(len(source), 10**6)) if getattr(source, "is_stored", False) else []
    return max((b - a for a, b in pieces), default=0) * (source.nbytes // len(source)) if pieces else 0


def check_fits(name: str, parts: Mapping[str, int], resources: Resources, remedy: str) -> int:
    """Peak bytes of a worker without its cache.

    Raises
    ------
    PlanError
        Above 60 % of the worker's memory: naming the largest term and the setting that would fit.
    """
    peak, allowed = sum(parts.values()), int(ALLOWED_SHARE * resources.memory)
    if peak > allowed:
        if peak - parts["process"] < parts["process"] // 4:
            remedy = "a worker process itself takes most of it"
        largest = max((k for k in parts if k != "process"), key=lambda k: parts[k])
        raise PlanError(
            f"{name} would need {peak / 2**20:,.0f} MiB a worker ({largest}: {parts[largest] / 2**20:,.0f} "
            "MiB), above the "
            f"{ALLOWED_SHARE:.0%} of {resources.memory / 2**20:,.0f} MiB that a fit may take: {remedy}, or "
            "give each worker "
            f"{peak / ALLOWED_SHARE / 2**30:,.1f} GiB ([cluster] memory_limit)"
        )
    return peak


def describe_stage(stage: Stage, resources: Resources) -> dict[str, Any]:
    """Tasks, tree and statistic of a pass.

    Raises
    ------
    PlanError
        More than 10,000 tasks a pass.
    """
    grid, reduction = stage.grids["train"], stage.reductions["train"]
    tasks = len(spans_of(stage, resources.workers * resources.threads))
    if tasks > MAX_TASKS:
        wanted = grid.leaf_rows * -(-tasks // MAX_TASKS)
        raise PlanError(
            f"{stage.name} would make {tasks} tasks a pass, above {MAX_TASKS}: set [engine] "
            f"leaf_rows to {wanted} or more"
        )
    return {
        "rows": stage.rows,
        "block_rows": grid.block_rows,
        "leaf_rows": grid.leaf_rows,
        "leaves": grid.n_leaves,
        "tree_depth": grid.depth,
        "tasks_per_pass": tasks,
        "statistic_bytes": reduction.layout().nbytes,
    }


def describe_steps(learner: Any, order: RowOrder) -> dict[str, Any]:
    """Steps of an epoch and statistic of a chain."""
    return {
        "rows": order.n_rows,
        "batch_rows": order.batch_rows,
        "chains": order.n_chains,
        "steps_per_pass": order.n_steps,
        "buffer_rows": order.buffer_rows if order.shuffle else 0,
        "statistic_bytes": 8 * learner.layout().length(order.chain_rows),
    }


def probe(stage: Stage, state: Any, source: Any, codes: int) -> dict[str, float]:
    """Seconds a row of reading and of computing on one thread, from a few thousand rows.

    Parameters
    ----------
    stage : Stage
        Its training reduction runs on noise of the right shape: time does not depend on the values.
    state : object
    source : Dataset
        Rows that are read for the reading rate.
    codes : int
        Number of classes of the made labels.
    """
    reduction, p = stage.reductions["train"], stage.datasets["train"].n_features
    n = min(PROBE_ROWS, len(source))
    reading = seconds_of(lambda: source.read_x(0, n)) / n
    block = _noise(min(stage.grids["train"].block_rows, n), p, codes)
    with single_threaded():
        prepared = reduction.prepare(state, make_backend("cpu"))
        stats = Stats.zeros(reduction.layout())
        computing = seconds_of(lambda: reduction.accumulate(prepared, block, stats), 0.2) / len(block.x)
    return {"read_seconds_per_row": reading, "compute_seconds_per_row": computing}


def probe_steps(
    learner: Any, state: Any, order: RowOrder, source: Any, n_features: int, codes: int
) -> dict[str, float]:
    """Seconds a row of reading and of computing on one thread, and seconds a step beside its rows.

    Parameters
    ----------
    learner : OnlineLearner or LeafLearner
    state : object
        Its first.
    order : RowOrder
    source : Dataset
        Rows that are read for the reading rate.
    n_features, codes : int
        Of the noise and its labels.
    """
    n = min(PROBE_ROWS, len(source))
    reader = Reader(source, None, Meter(), **rows_for(learner))
    reading = seconds_of(lambda: reader.read(0, n)) / n
    block = _noise(min(order.chain_rows, n), n_features, codes)
    if reader.targets is not None:
        v = np.random.default_rng(1).integers(0, 2, (len(block.x), reader.target_width), dtype=np.uint8)
        x = v if reader.targets.source == "x" else block.x
        block = reader.block(x, v, None, 0, block.rows)
    with single_threaded():
        prepared = learner.prepare(state, make_backend("cpu"))
        stats = Stats.zeros(learner.layout(), len(block.x))
        if hasattr(learner, "visit"):
            computing = seconds_of(lambda: learner.visit(prepared, block), 0.2)
            learner.exchange(prepared, None, learner.visit(prepared, block), stats)
        else:
            computing = seconds_of(lambda: learner.run_chain(prepared, block, stats), 0.2)
        stepping = seconds_of(lambda: learner.step(state, stats, len(block.x)))
    return {
        "read_seconds_per_row": reading,
        "compute_seconds_per_row": computing / len(block.x),
        "seconds_per_step": stepping,
    }


def _noise(rows: int, p: int, codes: int) -> Block:
    x = np.random.default_rng(0).standard_normal((rows, p), dtype=np.float32)
    y = (np.arange(rows) % max(codes, 1)).astype(np.int32)
    return Block(x, y, None, 0, np.arange(rows))


def seconds_of(call: Callable[[], Any], least: float = 0.0) -> float:
    """Of a call: the faster of two, or the mean of as many as ``least`` seconds take after the first.

    Examples
    --------
    >>> 0 <= seconds_of(lambda: None) < 1
    True
    """
    times: list[float] = []
    while len(times) < 2 or sum(times[1:]) < least:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return float(np.mean(times[1:])) if least else min(times)


def cache_bytes(resources: Resources, dataset_bytes: int) -> int:
    """Bytes the block cache may come to hold."""
    return min(int(DEFAULT_SHARE * resources.memory), dataset_bytes)
