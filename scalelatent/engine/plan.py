"""What a fit will need, before anything runs: tasks, bytes, seconds; and the refusal of what cannot fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from dask.system import cpu_count

from scalelatent.contract.learners import Reduction, StepLearner, Work
from scalelatent.errors import PlanError

from .cache import SMALL_BYTES, limit_of, memory_limit, parse_cache
from .executor import KEEP_REPLICAS
from .feeding import AHEAD as SLABS_AHEAD
from .feeding import SLAB_BYTES
from .grid import FAN_IN
from .order import RowOrder
from .passes import Stage, choose_level, given_grid, make_stage, seconds_per_row, spans_of
from .rates import GATHER_RATE, choose_cache, label_seconds, read_seconds
from .reading import AHEAD
from .threads import resolve_jobs

if TYPE_CHECKING:
    from distributed import Client

# Resident size of a process that has imported everything (pandas and pyarrow too, where scikit-learn finds
# them: 60 MiB) and compiled its kernels (70 MiB; tests/estimators/test_plan_check.py), and of a worker that
# loads its own.
PROCESS_BYTES, WORKER_BYTES = 448 * 2**20, 240 * 2**20
# Freed memory that the allocator keeps for each thread, in workers so set (dask/worker_side.py).
KEPT_BYTES = 2**25
ALLOWED_SHARE = 0.6
MAX_TASKS = 10_000
# Seconds of a pass beside its rows, and of a task: in this process, and on a cluster, whose scheduler hands
# out tasks while they compute.
PASS_SECONDS, TASK_SECONDS = 1e-3, 2e-4
CLUSTER_PASS_SECONDS, CLUSTER_TASK_SECONDS = 0.02, 2e-3
# A fit that would take longer is told of before it begins.
LONG_SECONDS = 3600.0


class PlannedRows(Protocol):
    """What a plan asks of rows: a `Dataset`, or a `RowShape` in the place of one."""

    @property
    def n_features(self) -> int: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_stored(self) -> bool: ...
    @property
    def reads_at_once(self) -> int: ...

    def __len__(self) -> int: ...
    def pieces(self, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]: ...
    def fingerprint(self) -> str: ...
    def read_x(self, start: int, stop: int) -> Any: ...


@dataclass(frozen=True)
class RowShape:
    """Stands for rows that do not exist yet (projected ones), which will be on disk or not."""

    n_rows: int
    n_features: int
    is_stored: bool = False
    reads_at_once = 1
    dtype = np.dtype(np.float32)

    def __len__(self) -> int:
        return self.n_rows

    @property
    def nbytes(self) -> int:
        """Of float32 rows."""
        return 4 * self.n_rows * self.n_features

    def pieces(self, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
        """None: there is nothing to read yet."""
        return []

    def fingerprint(self) -> str:
        raise TypeError("rows that do not exist have no fingerprint")

    def read_x(self, start: int, stop: int) -> Any:
        raise TypeError("rows that do not exist cannot be read")


@dataclass(frozen=True)
class Resources:
    """Where a fit would run."""

    workers: int
    threads: int  # of each worker
    memory: int  # bytes that each worker may use
    cores: int = 0  # of all, which also read; 0: twice the threads
    on_cluster: bool = False

    @property
    def slots(self) -> int:
        """Threads that compute at once."""
        return self.workers * self.threads

    def to_dict(self) -> dict[str, int]:
        """As a plan tells them."""
        return {"workers": self.workers, "threads": self.threads, "memory": self.memory}


def find_resources(client: Client | None, n_jobs: int | None, limit: str | int | float | None) -> Resources:
    """Workers, threads and memory of a cluster, or of this process."""
    from dask.utils import parse_bytes

    given = None if limit in (None, "auto", 0) else int(parse_bytes(limit))  # type: ignore[arg-type]
    if client is None:
        return Resources(1, resolve_jobs(n_jobs), given or memory_limit(), cpu_count())
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    # Workers of other machines are taken to have a core for each of their threads.
    here = all(str(w.get("host", "127.0.0.1")).startswith("127.") for w in workers)
    cores = cpu_count() if here else sum(int(w["nthreads"]) for w in workers)
    limits = [int(w["memory_limit"]) for w in workers if w["memory_limit"]]
    threads = max([int(w["nthreads"]) for w in workers], default=1)
    memory = given or min(limits, default=memory_limit())
    return Resources(max(len(workers), 1), threads, memory, cores, True)


def stage_memory(stage: Stage, resources: Resources, source: PlannedRows, constants: int) -> dict[str, int]:
    """Bytes of one worker while it runs a stage, by what holds them."""
    grid, reduction = stage.grids["train"], stage.reductions["train"]
    stat, p = reduction.layout().nbytes, stage.datasets["train"].n_features
    level = choose_level(grid, reduction, resources.workers * resources.threads)
    piece = _piece_bytes(source)
    ahead = max(AHEAD, 2 * source.reads_at_once)  # in flight, packed and unpacked
    row_bytes = p * stage.datasets["train"].dtype.itemsize
    blocks = _block_bytes(reduction, grid.block_rows, p, row_bytes)
    waiting = sum(min(FAN_IN, grid.n_nodes(above)) for above in range(level, grid.depth))
    return {
        "process": process_bytes(resources),
        "pieces read ahead": resources.threads * (ahead + 2) * piece,
        "blocks and buffers": resources.threads * blocks,
        # Of each level the sum so far, and the leaf that is being filled.
        "statistics in a span": resources.threads * (2 + level) * stat,
        "statistics waiting for their siblings": (waiting + 2) * stat,
        "constants and states": constants,
    }


def process_bytes(resources: Resources) -> int:
    """What a process holds before any rows; workers keep what each of their threads frees."""
    return WORKER_BYTES + resources.threads * KEPT_BYTES if resources.on_cluster else PROCESS_BYTES


def steps_memory(
    learner: StepLearner,
    order: RowOrder,
    n_features: int,
    resources: Resources,
    source: PlannedRows,
    row_bytes: int,
    constants: int,
    state: int,
    keeps_leaves: bool,
) -> dict[str, int]:
    """Bytes of one worker while it takes steps over minibatches, all chains of them, by what holds them."""
    layout, chains = learner.layout(), order.n_chains
    stored = source.is_stored
    # A chain holds the runs of the buffer in use and of the next; without shuffling a few runs.
    runs = 2 * order.buffer_runs if order.shuffle else 2 + -(-order.chain_rows // order.run_rows)
    held = min(2 * order.n_rows, chains * runs * order.run_rows) if stored else 0
    slab = chains * max(SLAB_BYTES, order.chain_rows * row_bytes)
    threads = min(resources.threads, chains)
    # A thread merges as it goes. On a cluster a step's come from all sides, and none waits for its sibling.
    depth = chains.bit_length() + 1
    summed = min(chains, (depth if resources.workers == 1 else 2 * depth * resources.workers) * threads)
    return {
        "process": process_bytes(resources),
        "pieces read ahead": 4 * _piece_bytes(source),
        "rows of the buffers": held * (row_bytes + 12),
        "rows of the next steps": (SLABS_AHEAD + 2) * slab,
        "blocks and buffers": threads * _block_bytes(learner, order.chain_rows, n_features, row_bytes),
        "statistics of the chains": (summed + 3 + 2 * threads * keeps_leaves) * layout.nbytes,
        "records of their rows": 4 * 8 * order.batch_rows * layout.row_width,
        "constants and states": constants + (KEEP_REPLICAS + 2) * state,
    }


def _block_bytes(work: Reduction | StepLearner, rows: int, n_features: int, row_bytes: int) -> int:
    """Of a block and what is made of it."""
    if work.wants.scratch is not None:
        fixed, each = work.wants.scratch
        return fixed + rows * (row_bytes + each)
    width = min(max(1, work.layout().size // max(n_features, 1)), 2**14)
    return rows * (2 * n_features + width) * 8


def _piece_bytes(source: PlannedRows) -> int:
    """Bytes of the largest piece of rows that is read at once."""
    pieces = source.pieces(0, min(len(source), 10**6)) if source.is_stored else []
    return max((b - a for a, b in pieces), default=0) * (source.nbytes // len(source)) if pieces else 0


def check_fits(name: str, parts: Mapping[str, int], resources: Resources, remedy: str) -> int:
    """Peak bytes of a worker without its cache."""
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
    """Tasks, tree and statistic of a pass."""
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


def describe_steps(learner: StepLearner, order: RowOrder) -> dict[str, Any]:
    """Steps of an epoch and statistic of a chain."""
    return {
        "rows": order.n_rows,
        "batch_rows": order.batch_rows,
        "chains": order.n_chains,
        "steps_per_pass": order.n_steps,
        "buffer_rows": order.buffer_rows if order.shuffle else 0,
        "statistic_bytes": 8 * learner.layout().length(order.chain_rows),
    }


class Forecast:
    """What is planned of a fit so far: the stages in their order, bytes and seconds."""

    def __init__(
        self,
        kind: str,
        train: Any,
        held: Any,
        resources: Resources,
        options: Mapping[str, Any],
        *,
        measure: bool,
    ) -> None:
        self.kind, self.train, self.held, self.resources = kind, train, held, resources
        # Whether what is not known of this machine may be measured.
        self.options, self.measure = dict(options), measure
        self.out: dict[str, Any] = {"stages": {}, "resources": resources.to_dict()}
        self.seconds: dict[str, float] = {}
        self.least = self.most = 0.0
        self._grid = given_grid(options)
        self._asked = parse_cache(options.get("cache"))
        self._cache = 0

    # -- memory ----------------------------------------------------------------------------------------------

    def stage(self, name: str, work: Work, parts: Mapping[str, Any], held: int, remedy: str) -> Stage:
        """A stage of passes, ``held`` being the bytes of its constants and states."""
        stage = make_stage(f"{self.kind}_{name}", work, parts, "cpu", **self._grid)
        memory = stage_memory(stage, self.resources, self.train, held)
        self.fits(name, describe_stage(stage, self.resources), memory, remedy)
        self.caches(stage)
        return stage

    def fits(self, name: str, described: Mapping[str, Any], memory: dict[str, int], remedy: str) -> None:
        """Add a stage, if it fits."""
        peak = check_fits(f"{self.kind}_{name}", memory, self.resources, remedy)
        self.out["stages"][name] = {**described, "memory_bytes": memory, "peak_bytes": peak}

    def caches(self, stage: Stage | None, nbytes: int = 0) -> None:
        """Count what rows that are read again and again may take of a process's cache."""
        if stage is None:
            allowed = float(SMALL_BYTES) if self._asked is None else self._asked
        else:
            nbytes = sum(ds.nbytes for ds in stage.datasets.values() if ds.is_stored)
            allowed = choose_cache(self._asked if self.measure else self._asked or SMALL_BYTES, stage)
        kept = min(nbytes, limit_of(allowed, self.resources.memory))
        self._cache = max(self._cache, kept)

    # -- seconds ---------------------------------------------------------------------------------------------

    def rate(self, measured: Any, nominal: float) -> float:
        """Of the functions that measure, the value where anything may be measured, else ``nominal``."""
        return float(measured()) if self.measure else nominal

    def reading(self, dataset: PlannedRows) -> float:
        """Seconds of reading a row."""
        if not dataset.is_stored or not self.measure:
            return 0.0
        return read_seconds(dataset)

    def row_seconds(self, computing: float, reading: float, slots: int | None = None) -> float:
        """Seconds a row of threads that compute while others read ahead."""
        slots = slots or self.resources.slots
        cores = self.resources.cores or 2 * slots
        return max(computing / slots, reading / slots, (computing + reading) / min(2 * slots, max(cores, 1)))

    def a_pass(self, stage: Stage, computing: Mapping[str, float]) -> float:
        """Seconds of a pass, given those of a row of each part on one thread."""
        total = self.pass_overhead(len(spans_of(stage, self.resources.slots)))
        for part, dataset in stage.datasets.items():
            slots = min(self.resources.slots, stage.grids[part].n_leaves)
            rate = computing.get(part, seconds_per_row(stage.reductions[part]))
            total += len(dataset) * self.row_seconds(rate, self.reading(dataset), slots)
        return total

    def pass_overhead(self, tasks: int) -> float:
        """Seconds of a pass of so many tasks beside its rows."""
        if not self.resources.on_cluster:
            return PASS_SECONDS + TASK_SECONDS * tasks
        return CLUSTER_PASS_SECONDS + CLUSTER_TASK_SECONDS * tasks

    def add(self, name: str, seconds: float, least: float | None = None, most: float | None = None) -> None:
        """Add seconds of a stage, at the least and the most where its length is not settled."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.least += seconds if least is None else least
        self.most += seconds if most is None else most

    def labels(self, dataset: Any) -> None:
        """Add the pass over all labels that a fit begins with."""
        if self.measure and dataset is not None and dataset.classes is not None:
            self.add("looking at labels", label_seconds(dataset, dataset.classes))

    def gathering(self, row_bytes: float) -> float:
        """Seconds of a row that is picked out of others, twice."""
        return 2 * row_bytes / GATHER_RATE

    # -- the whole -------------------------------------------------------------------------------------------

    def told(self, disk: int, shorter: str, peak: int | None = None) -> dict[str, Any]:
        """The plan, once all stages are in."""
        if peak is None:
            peak = max(stage["peak_bytes"] for stage in self.out["stages"].values())
        self.out["cache_bytes"] = self._cache
        self.out["peak_bytes_per_worker"] = peak + self._cache
        self.out["disk_bytes"] = disk
        self.out["shorter"] = shorter
        self.out["seconds"] = self.seconds
        return totalled(self.out, self.least, self.most)


def totalled(out: dict[str, Any], least: float, most: float) -> dict[str, Any]:
    """A plan with the sum of its seconds, and all in a line."""
    expected = sum(out["seconds"].values())
    out["expected_seconds"] = expected
    out["expected_seconds_at_least"], out["expected_seconds_at_most"] = (
        min(least, expected),
        max(most, expected),
    )
    out["summary"] = summary_of(out)
    return out


def summary_of(out: Mapping[str, Any]) -> str:
    """Time, memory and disk of a plan as a line."""
    least, most = out["expected_seconds_at_least"], out["expected_seconds_at_most"]
    between = f" ({duration(least)} to {duration(most)})" if most > 1.25 * least + 2 else ""
    memory = f"{out['peak_bytes_per_worker'] / 2**20:,.0f} MiB a worker"
    disk = out["disk_bytes"]
    size = f"{disk / 1e9:,.1f} GB" if disk >= 1e9 else f"{disk / 1e6:,.0f} MB" if disk >= 1e6 else "no"
    return (
        f"about {duration(out['expected_seconds'])}{between}, {memory}, {size}{' of' * (size != 'no')} disk"
    )


def duration(seconds: float) -> str:
    """Seconds as text."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    if hours < 48:
        return f"{hours:.1f} h" if hours < 10 else f"{hours:.0f} h"
    return f"{hours / 24:.1f} days"


def long_fit(out: Mapping[str, Any]) -> str | None:
    """The warning about a fit that would take over an hour; else None."""
    if out["expected_seconds"] <= LONG_SECONDS:
        return None
    return f"this fit would take about {duration(out['expected_seconds'])}: to shorten it, {out['shorter']}"
