"""What a fit will need, before anything runs: tasks, bytes, seconds; and the refusal of what cannot fit.

Peak memory is a function of block, statistic and model alone; rows enter through the block cache only, which
is bounded. The terms are those of the code: each is named after what holds it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelatent.data.grid import FAN_IN
from scalelatent.errors import PlanError
from scalelatent.models.base import Block, Stats

from .backend import make_backend
from .cache import DEFAULT_SHARE, memory_limit
from .passes import Stage, choose_level, spans_of
from .reading import AHEAD
from .threads import resolve_jobs, single_threaded

# Resident size of a worker that has imported everything and compiled its kernels, rounded up.
PROCESS_BYTES = 450 * 2**20
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
    pieces = source.pieces(0, min(len(source), 10**6)) if getattr(source, "is_stored", False) else []
    piece = max((b - a for a, b in pieces), default=0) * (source.nbytes // len(source)) if pieces else 0
    ahead = max(AHEAD, 2 * getattr(source, "reads_at_once", 1))  # in flight, packed and unpacked
    blocks = grid.block_rows * (2 * p + min(width, 2**14)) * 8
    return {
        "process": PROCESS_BYTES,
        "pieces read ahead": resources.threads * (ahead + 2) * piece,
        "blocks and buffers": resources.threads * blocks,
        "statistics in a span": resources.threads * (2 + (FAN_IN - 1) * level) * stat,
        "statistics waiting for their siblings": (FAN_IN * max(grid.depth - level, 0) + 2) * stat,
        "constants and states": constants,
    }


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
    begin = time.perf_counter()
    source.read_x(0, n)
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    source.read_x(0, n)
    reading = min(first, time.perf_counter() - begin) / n
    rng = np.random.default_rng(0)
    x = rng.standard_normal((min(stage.grids["train"].block_rows, n), p), dtype=np.float32)
    block = Block(x, (np.arange(len(x)) % max(codes, 1)).astype(np.int32), None, 0)
    with single_threaded():
        backend = make_backend("cpu")
        prepared = reduction.prepare(state, backend)
        stats = Stats.zeros(reduction.layout())
        reduction.accumulate(prepared, block, stats)
        begin, rounds = time.perf_counter(), 0
        while time.perf_counter() - begin < 0.2:
            reduction.accumulate(prepared, block, stats)
            rounds += 1
        computing = (time.perf_counter() - begin) / (rounds * len(x))
    return {"read_seconds_per_row": reading, "compute_seconds_per_row": computing}


def cache_bytes(resources: Resources, dataset_bytes: int) -> int:
    """Bytes the block cache may come to hold."""
    return min(int(DEFAULT_SHARE * resources.memory), dataset_bytes)
