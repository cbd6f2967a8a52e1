"""Estimate the tasks, bytes and seconds of a fit before it runs, and refuse a fit that cannot run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.learners import Block, Reduction, RowMap, StepLearner, Work
from scalelatent.contract.stats import Stats
from scalelatent.data.layout import choose_layout
from scalelatent.errors import PlanError

from .backend import make_backend
from .cache import DEFAULT_SHARE, SMALL_BYTES, compute_limit, memory_limit, parse_cache
from .checkpoints import KEEP_STATES
from .executor import KEEP_REPLICAS
from .feeding import AHEAD as SLABS_AHEAD
from .feeding import SLAB_BYTES
from .grid import FAN_IN, RowGrid
from .mapwrite import block_rows
from .order import RowOrder
from .passes import (
    FLOP_RATE,
    Stage,
    choose_level,
    list_spans,
    make_stage,
    seconds_per_row,
    select_grid_options,
)
from .rates import (
    EIGEN_SIZE,
    GATHER_RATE,
    READ_SHARE,
    RowShape,
    choose_cache,
    cpu_seconds,
    label_seconds,
    make_noise,
    rates,
    read_seconds,
    reading_share,
    scratch_rates,
)
from .reading import AHEAD
from .threads import resolve_jobs, usable_cores

if TYPE_CHECKING:
    from distributed import Client

    from scalelatent.data.dataset import Dataset

    from .rates import AnyRows

# Resident bytes, without rows, of a process that has imported all packages (pandas and pyarrow take 60 MiB)
# and compiled its kernels (70 MiB), and of a Dask worker (measured: tests/estimators/test_plan_check.py).
PROCESS_BYTES, WORKER_BYTES = 448 * 2**20, 240 * 2**20
KEPT_BYTES = 2**25  # freed bytes that the allocator of a worker keeps per thread (dask/worker_side.py)
ALLOWED_SHARE = 0.6  # a fit without its row cache may use at most this share of the memory of a worker
MAX_TASKS = 10_000  # a fit with more tasks per pass is refused
# Overhead in seconds of a pass and of a task, in addition to the computation: in this process, on a cluster.
PASS_SECONDS, TASK_SECONDS = 1e-3, 2e-4
CLUSTER_PASS_SECONDS, CLUSTER_TASK_SECONDS = 0.02, 2e-3
# Seconds per minibatch step in addition to its rows; also the estimate for the update of the parameters.
STEP_SECONDS = 1.5e-4
LONG_SECONDS = 3600.0  # a fit that would take more seconds gives a warning before it starts


@dataclass(frozen=True)
class Resources:
    """Workers, threads and memory with which a fit would run."""

    workers: int
    threads: int  # threads per worker
    memory: int  # bytes that each worker may use
    cores: int = 0  # cores of all workers together; 0 means two cores per thread
    on_cluster: bool = False
    gpu_rows: tuple[int, ...] = ()  # bytes of rows that each GPU may keep between passes

    @property
    def slots(self) -> int:
        """Number of threads that compute at the same time."""
        return self.workers * self.threads

    def to_dict(self) -> dict[str, int]:
        """Return the workers, threads and memory (bytes) as entries of a plan."""
        return {"workers": self.workers, "threads": self.threads, "memory": self.memory}


def find_resources(client: Client | None, n_jobs: int | None, limit: str | int | float | None) -> Resources:
    """Return the resources of a cluster, or of this process if ``client`` is None."""
    from dask.utils import parse_bytes

    user_limit = None if limit in (None, "auto", 0) else int(parse_bytes(limit))
    if client is None:
        return Resources(1, resolve_jobs(n_jobs), user_limit or memory_limit(), usable_cores())
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    # Workers on other machines are assumed to have one core per thread.
    is_local = all(str(w.get("host", "127.0.0.1")).startswith("127.") for w in workers)
    cores = usable_cores() if is_local else sum(int(w["nthreads"]) for w in workers)
    limits = [int(w["memory_limit"]) for w in workers if w["memory_limit"]]
    threads = max([int(w["nthreads"]) for w in workers], default=1)
    memory = user_limit or min(limits, default=memory_limit())
    return Resources(max(len(workers), 1), threads, memory, cores, True)


def stage_memory(stage: Stage, resources: Resources, source: AnyRows, constants: int) -> dict[str, int]:
    """Return the memory, in bytes, of one worker while it runs a stage, by purpose."""
    grid, reduction, rows = _get_first_part(stage)
    stat, p = reduction.layout().nbytes, rows.n_features
    level = choose_level(grid, reduction, resources.workers * resources.threads)
    piece = _piece_bytes(source)
    ahead = max(AHEAD, 2 * source.reads_at_once)  # a concurrent read holds compressed and decoded bytes
    row_bytes = p * rows.dtype.itemsize
    blocks = _block_bytes(reduction, grid.block_rows, p, row_bytes)
    waiting = sum(min(FAN_IN, grid.n_nodes(above)) for above in range(level, grid.depth))
    return {
        "process": process_bytes(resources),
        "pieces read ahead": resources.threads * (ahead + 2) * piece,
        "blocks and buffers": resources.threads * blocks,
        # One partial sum per level of the tree, and the sum of the rows that are being computed.
        "statistics in a span": resources.threads * (2 + level) * stat,
        "statistics waiting for their siblings": (waiting + 2) * stat,
        "constants and states": constants,
    }


def _get_first_part(stage: Stage) -> tuple[RowGrid, Reduction, AnyRows]:
    """Return (grid, reduction, dataset) of the training rows, or of the first rows of a stage."""
    part = next(iter(stage.grids))
    return stage.grids[part], stage.reductions[part], stage.datasets[part]


def process_bytes(resources: Resources) -> int:
    """Return the bytes of a process before it reads any rows."""
    return WORKER_BYTES + resources.threads * KEPT_BYTES if resources.on_cluster else PROCESS_BYTES


def _block_bytes(work: Reduction | StepLearner, rows: int, n_features: int, row_bytes: int) -> int:
    """Return the bytes of a block and of the buffers that its computation needs."""
    if work.requirements.scratch is not None:
        fixed, each = work.requirements.scratch
        return fixed + rows * (row_bytes + each)
    width = min(max(1, work.layout().size // max(n_features, 1)), 2**14)
    return rows * (2 * n_features + width) * 8


def _piece_bytes(source: AnyRows) -> int:
    """Return the maximum bytes of the rows that one call reads; 0 for rows in memory."""
    if isinstance(source, RowShape) or not source.is_stored:
        return 0
    pieces = source.pieces(0, min(len(source), 10**6))
    return max((b - a for a, b in pieces), default=0) * (source.nbytes // len(source))


def check_fits(name: str, parts: Mapping[str, int], resources: Resources, remedy: str) -> int:
    """Return the peak bytes of a worker without its cache; raise a PlanError if they exceed the limit."""
    peak, allowed = sum(parts.values()), int(ALLOWED_SHARE * resources.memory)
    if peak > allowed:
        if peak - parts["process"] < parts["process"] // 4:
            remedy = "a worker process itself takes most of it"
        largest = max((k for k in parts if k != "process"), key=lambda k: parts[k])
        raise PlanError(
            f"{name} would need {peak / 2**20:,.0f} MiB a worker ({largest}: {parts[largest] / 2**20:,.0f} "
            f"MiB), above the {ALLOWED_SHARE:.0%} of {resources.memory / 2**20:,.0f} MiB for a fit: "
            f"{remedy}, or give each worker {peak / ALLOWED_SHARE / 2**30:,.1f} GiB ([cluster] memory_limit)"
        )
    return peak


def describe_stage(stage: Stage, resources: Resources) -> dict[str, Any]:
    """Return the entries of a plan about the tasks, the tree and the statistic of a pass."""
    grid, reduction, _ = _get_first_part(stage)
    tasks = len(list_spans(stage, resources.workers * resources.threads))
    if tasks > MAX_TASKS:
        leaf_rows = grid.leaf_rows * -(-tasks // MAX_TASKS)
        raise PlanError(
            f"{stage.name} would make {tasks} tasks a pass, above {MAX_TASKS}: set [engine] "
            f"leaf_rows to {leaf_rows} or more"
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


class Forecast:
    """Plan of a fit: a model adds its stages in order, and this class sums their bytes and seconds."""

    def __init__(
        self,
        kind: str,
        train: Dataset,
        validation: Dataset | None,
        resources: Resources,
        options: Mapping[str, Any],
        *,
        measure: bool,
    ) -> None:
        self.kind, self.train, self.validation, self.resources = kind, train, validation, resources
        self.options, self.measure = dict(options), measure  # measure: True if speeds may be measured now
        self.codes = 0  # number of classes of the random rows that the measurements of speed use
        # Input rows of the next stages, "train" and "validation": datasets, or shapes of rows to be made.
        self.rows: dict[str, Any] = {"train": train}
        if validation is not None:
            self.rows["validation"] = validation
        self.out: dict[str, Any] = {"stages": {}, "resources": resources.to_dict()}
        self.seconds: dict[str, float] = {}
        self.least = self.most = 0.0
        self.scratch = 0
        self._grid = select_grid_options(options)
        self._user_cache = parse_cache(options.get("cache"))
        self._cache = self._peak = 0

    # -- stages ----------------------------------------------------------------------------------------------

    def add_stage(self, name: str, work: Work, constants: int, remedy: str) -> Stage:
        """Add a stage of passes and return it; ``constants`` is the bytes of its constants and states."""
        stage = make_stage(f"{self.kind}_{name}", work, self.rows, "cpu", **self._grid)
        memory = stage_memory(stage, self.resources, self.train, constants)
        self._record_stage(name, describe_stage(stage, self.resources), memory, remedy)
        if self.resources.gpu_rows:
            self._add_gpu_rows(stage)
        nbytes = sum(ds.nbytes for ds in stage.datasets.values() if ds.is_stored)
        allowed = self._choose_cache(stage)
        self.add_cache(nbytes, allowed)
        if self.measure and self._user_cache is None and allowed == SMALL_BYTES:
            self._suggest_cache(stage, nbytes)
        return stage

    def _add_gpu_rows(self, stage: Stage) -> None:
        """Add to the plan how many rows GPUs keep between the passes of a stage, if its learner allows it."""
        parts = [part for part, reduction in stage.reductions.items() if reduction.requirements.reads_on_gpu]
        needed = sum(_gpu_row_bytes(stage.datasets[part]) for part in parts)
        room, gpus = sum(self.resources.gpu_rows), len(self.resources.gpu_rows)
        if needed:
            self.out["gpu_rows"] = {
                "gpus": gpus,
                "room_bytes": room,
                "row_bytes": needed,
                "kept_share": min(1.0, room / needed),
                "summary": _describe_gpu_rows(needed, room, gpus),
            }

    def _suggest_cache(self, stage: Stage, nbytes: int) -> None:
        """Suggest a larger row cache if reading takes much of the time and all rows would fit into memory."""
        share = reading_share(stage)
        if share > READ_SHARE and nbytes <= DEFAULT_SHARE * self.resources.memory * self.resources.workers:
            self.out["keeping_rows"] = (
                f"a thread reads for {100 * share:.0f} % of the time that it computes, in each pass; cache = "
                f"{DEFAULT_SHARE} keeps all rows from pass to pass ({nbytes / 2**30:.1f} GiB of memory)"
            )

    def _choose_cache(self, stage: Stage, once: bool = False) -> float:
        return choose_cache(
            self._user_cache if self.measure else self._user_cache or SMALL_BYTES, stage, once=once
        )

    def add_single_pass(self, name: str, reduction: Reduction, constants: int, remedy: str) -> None:
        """Add a stage of a single pass over the training rows."""
        stage = self.add_stage(name, {"train": reduction}, constants, remedy)
        self.add_seconds(name, self.pass_seconds(stage, self.measure_rates(stage)))

    def add_steps(
        self,
        name: str,
        learner: StepLearner,
        order: RowOrder,
        constants: int,
        state: int,
        remedy: str,
        *,
        n_epochs: int,
        extra_bytes: int = 0,
        keeps_leaves: bool = False,
    ) -> None:
        """Add a stage of steps over minibatches; ``extra_bytes`` is bytes per row in addition to features."""
        rows, layout, resources = self.rows["train"], learner.layout(), self.resources
        row_bytes, chains = rows.nbytes // len(rows) + extra_bytes, order.n_chains
        # A chain (part of a minibatch) has the runs (ranges of rows) of two shuffle buffers in memory, or a
        # few runs without shuffling.
        runs = 2 * order.buffer_runs if order.shuffle else 2 + -(-order.chain_rows // order.run_rows)
        buffered = min(2 * order.n_rows, chains * runs * order.run_rows) if rows.is_stored else 0
        slab = chains * max(SLAB_BYTES, order.chain_rows * row_bytes)
        threads = min(resources.threads, chains)
        # A thread has at most `depth` statistics, because it merges them in a tree. On a cluster, each worker
        # receives the statistics of all workers.
        depth = chains.bit_length() + 1
        summed = min(chains, (depth if resources.workers == 1 else 2 * depth * resources.workers) * threads)
        memory = {
            "process": process_bytes(resources),
            "pieces read ahead": 4 * _piece_bytes(self.train),
            "rows of the buffers": buffered * (row_bytes + 12),
            "rows of the next steps": (SLABS_AHEAD + 2) * slab,
            "blocks and buffers": threads
            * _block_bytes(learner, order.chain_rows, rows.n_features, row_bytes),
            "statistics of the chains": (summed + 3 + 2 * threads * keeps_leaves) * layout.nbytes,
            "records of their rows": 4 * 8 * order.batch_rows * layout.row_width,
            "constants and states": constants + (KEEP_REPLICAS + 2) * state,
        }
        described = {
            "rows": order.n_rows,
            "batch_rows": order.batch_rows,
            "chains": chains,
            "steps_per_pass": order.n_steps,
            "buffer_rows": order.buffer_rows if order.shuffle else 0,
            "statistic_bytes": 8 * layout.length(order.chain_rows),
        }
        self._record_stage(name, described, memory, remedy)
        stage = make_stage(f"{self.kind}_{name}", learner, self.rows, "cpu", **self._grid)
        self.add_cache(
            len(rows) * row_bytes if rows.is_stored else 0, self._choose_cache(stage, n_epochs == 1)
        )

    def add_map(self, name: str, row_map: RowMap) -> None:
        """Add a map of all rows, whose output the next stages read; the output is stored if its input is."""
        (width,) = row_map.output()[0]
        for part, rows in self.rows.items():
            p, size = rows.n_features, min(block_rows(rows.n_features), len(rows))
            work_name = f"{self.kind}_{name} {size}x{p} {rows.dtype} {row_map.output()}"
            make_call = partial(_make_map_probe, row_map, partial(self.make_block, size, rows))
            row = self.probe(work_name, make_call, 2.0 * p * width / FLOP_RATE, rows=size)
            slots, new = self.resources.slots, RowShape(len(rows), width, rows.is_stored)
            if rows.is_stored:
                slots = min(slots, choose_layout(len(rows), (width,), new.dtype).n_shards(len(rows)))
                row += self.scratch_rates()[0] * 4 * width
                self.scratch += new.nbytes
            self.add_seconds(
                f"{name}-{part}", len(rows) * self.row_seconds(row, self.reading_seconds(rows), slots)
            )
            self.rows[part] = new

    def check_memory(self, name: str, memory: dict[str, int], remedy: str) -> int:
        """Return the peak bytes of a worker in a stage; raise a PlanError if they exceed the limit."""
        peak = check_fits(name, memory, self.resources, remedy)
        self._peak = max(self._peak, peak)
        return peak

    def _record_stage(
        self, name: str, described: Mapping[str, Any], memory: dict[str, int], remedy: str
    ) -> None:
        peak = self.check_memory(f"{self.kind}_{name}", memory, remedy)
        self.out["stages"][name] = {**described, "memory_bytes": memory, "peak_bytes": peak}

    def add_cache(self, nbytes: int, allowed: float | None = None) -> None:
        """Add the cache of a stage whose rows have ``nbytes``; a plan has the largest cache of its stages."""
        if allowed is None:
            allowed = float(SMALL_BYTES) if self._user_cache is None else self._user_cache
        self._cache = max(self._cache, min(nbytes, compute_limit(allowed, self.resources.memory)))

    # -- measurements ----------------------------------------------------------------------------------------

    def probe(
        self,
        work_name: str,
        make_call: Callable[[], Callable[[], object]],
        nominal: float,
        *,
        rows: int = 1,
        threads: int | None = None,
    ) -> float:
        """Return the seconds per row of a call on several threads, or ``nominal`` if speed is not measured.

        ``make_call`` returns the call for one thread, and ``work_name`` is the key of the stored result.
        """
        if not self.measure:
            return nominal
        threads = threads or self.resources.slots
        return rates.get(f"{work_name} t{threads}", lambda: cpu_seconds(make_call, threads) / rows)

    def measure_rates(
        self, stage: Stage, state: object = None, block: Callable[[], Block] | None = None, about: str = ""
    ) -> dict[str, float]:
        """Return the seconds per row on one thread ("train", "validation"), for random rows or ``block``."""
        found = {}
        for part, reduction in stage.reductions.items():
            size, rows, layout = stage.grids[part].block_rows, stage.datasets[part], reduction.layout()
            shape = f"{size}x{rows.n_features} {rows.dtype} {layout.size} {reduction.flops_per_row():.0f}"
            make_call = partial(
                _make_pass_probe, reduction, state, block or partial(self.make_block, size, rows)
            )
            work_name = f"{stage.name}{about} {shape} {self.codes}"
            found[part] = self.probe(work_name, make_call, seconds_per_row(reduction), rows=size)
        return found

    def make_block(self, size: int, rows: AnyRows) -> Block:
        """Return a block of random rows with the shape and the number of classes of ``rows``."""
        return make_noise(size, rows.n_features, rows.dtype, self.codes)

    def measure_chain(
        self,
        work_name: str,
        learner: Any,
        begin: Callable[[], tuple[object, Block]],
        order: RowOrder,
        *,
        rows: int,
    ) -> tuple[float, float]:
        """Return (seconds per row of a minibatch, seconds of an update); ``begin`` returns (state, block)."""
        slots = self.count_slots(order)

        def make_call(stepping: bool) -> Callable[[], object]:
            (state, block), backend, stats = begin(), make_backend("cpu"), Stats.zeros(learner.layout(), rows)
            prepared = learner.prepare(state, backend)

            def chain() -> None:
                learner.run_chain(prepared, block, stats)

            def step() -> None:
                learner.step(state, stats, order.batch_rows)
                for _ in range(slots):
                    learner.prepare(state, backend)

            chain()
            return step if stepping else chain

        row = self.probe(
            work_name, partial(make_call, False), seconds_per_row(learner), rows=rows, threads=slots
        )
        work_name = f"{work_name} {order.batch_rows} step {slots}"
        return row, self.probe(work_name, partial(make_call, True), STEP_SECONDS, threads=1)

    def count_slots(self, order: RowOrder) -> int:
        """Return the number of threads that compute a minibatch step at the same time."""
        return min(self.resources.slots, order.n_chains)

    def scratch_rates(self) -> tuple[float, float]:
        """Return the seconds per byte of (writing, reading) rows; (0, 0) if speed is not measured."""
        return scratch_rates() if self.measure else (0.0, 0.0)

    def add_eigenvectors(self, name: str, p: int, matrices: int = 1) -> None:
        """Add the seconds for the eigenvectors of symmetric matrices with ``p`` columns."""

        def make_call() -> Callable[[], object]:
            x = np.random.default_rng(0).standard_normal((EIGEN_SIZE, EIGEN_SIZE))
            return lambda: np.linalg.eigh(x + x.T)

        one = self.probe("eigenvectors", make_call, 0.0, rows=EIGEN_SIZE**3, threads=1)
        self.add_seconds(name, matrices * one * p**3)

    def add_label_reading(self) -> None:
        """Add the seconds of reading all labels, with which a fit starts."""
        for rows in self.rows.values():
            if self.measure and rows.classes is not None:
                self.add_seconds("looking at labels", label_seconds(rows, rows.classes))

    # -- seconds ---------------------------------------------------------------------------------------------

    def reading_seconds(self, dataset: AnyRows) -> float:
        """Return the seconds of reading one row; 0 for rows in memory, or if speed is not measured."""
        if not dataset.is_stored or not self.measure:
            return 0.0
        return read_seconds(dataset)

    def row_seconds(self, computing: float, reading: float, slots: int | None = None) -> float:
        """Return the seconds per row if ``slots`` threads compute while others read ahead."""
        slots = slots or self.resources.slots
        cores = self.resources.cores or 2 * slots
        return max(computing / slots, reading / slots, (computing + reading) / min(2 * slots, max(cores, 1)))

    def pass_seconds(self, stage: Stage, computing: Mapping[str, float]) -> float:
        """Return the seconds of a pass from ``computing``, the seconds per row and thread."""
        total = self.pass_overhead(len(list_spans(stage, self.resources.slots)))
        for part, dataset in stage.datasets.items():
            slots = min(self.resources.slots, stage.grids[part].n_leaves)
            total += len(dataset) * self.row_seconds(computing[part], self.reading_seconds(dataset), slots)
        return total

    def epoch_seconds(self, order: RowOrder, row: float, step: float, extra_bytes: int = 0) -> float:
        """Return the seconds of an epoch from the seconds per row and per step."""
        rows = self.rows["train"]
        # Each row is copied twice: from its shard to an array of the rows of several steps, then to a
        # minibatch.
        reading = self.reading_seconds(rows) + 2 * (rows.nbytes / len(rows) + extra_bytes) / GATHER_RATE
        steps = order.n_steps * (step + STEP_SECONDS)
        return order.n_rows * self.row_seconds(row, reading, self.count_slots(order)) + steps

    def pass_overhead(self, tasks: int) -> float:
        """Return the overhead in seconds of a pass with ``tasks`` tasks."""
        if not self.resources.on_cluster:
            return PASS_SECONDS + TASK_SECONDS * tasks
        return CLUSTER_PASS_SECONDS + CLUSTER_TASK_SECONDS * tasks

    def add_seconds(
        self, name: str, seconds: float, least: float | None = None, most: float | None = None
    ) -> None:
        """Add the expected seconds of a stage, and the lower and upper bounds if these differ."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.least += seconds if least is None else least
        self.most += seconds if most is None else most

    def add_passes(
        self, name: str, a_pass: float, passes: Mapping[str, int], slowest: float | None = None
    ) -> None:
        """Add the passes of a stage, of ``a_pass`` seconds each (in the upper bound: ``slowest`` seconds)."""
        least, most = passes["at_least"], passes["at_most"]
        usual = passes.get("expected", most)
        self.add_seconds(name, a_pass * usual, a_pass * least, (slowest or a_pass) * most)
        self.set_passes(a_pass, least, most, usual)

    def set_passes(self, a_pass: float, least: int, most: int, usual: int | None = None) -> None:
        """Set the plan's entries for the number of passes and the seconds per pass."""
        usual = most if usual is None else usual
        self.out["passes"] = {"at_least": least, "expected": usual, "at_most": most}
        self.out["seconds_per_pass"] = a_pass

    # -- result ----------------------------------------------------------------------------------------------

    def finish_plan(
        self,
        shorter: str,
        *,
        checkpoint: int = 0,
        model: int = 0,
        kept: int = 0,
        kept_at_most: bool = False,
        predicting: float | None = None,
    ) -> dict[str, Any]:
        """Return the plan of the fit as a dict, after all stages were added.

        ``checkpoint``, ``model`` and ``kept`` are bytes on disk: of a checkpoint, of the saved model, and of
        everything else. ``kept_at_most`` marks ``kept`` as an upper bound, ``predicting`` is the computing
        seconds to predict one row, and ``shorter`` is the advice for a shorter fit.
        """
        out = self.out
        out["cache_bytes"], out["peak_bytes_per_worker"] = self._cache, self._peak + self._cache
        out["checkpoint_bytes"], out["scratch_bytes"] = checkpoint, self.scratch
        out["disk_bytes"] = self.scratch + kept + KEEP_STATES * checkpoint + 2 * model
        if kept_at_most:
            out["disk_bytes_are"] = "at most"
        if predicting is not None:
            out["predicting_seconds_per_row"] = self.row_seconds(predicting, self.reading_seconds(self.train))
        out["shorter"], out["seconds"] = shorter, self.seconds
        return add_totals(out, self.least, self.most)


def _gpu_row_bytes(rows: AnyRows) -> int:
    """Return the bytes that all rows take on GPUs: dense features as stored, class codes and weights."""
    labels = 0 if isinstance(rows, RowShape) else 4 * rows.has_y + 8 * rows.has_weight
    return len(rows) * (rows.n_features * rows.dtype.itemsize + labels)


def _describe_gpu_rows(needed: int, room: int, gpus: int) -> str:
    """Return the rows that stay on GPUs as one line of text."""
    where = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    if needed <= room:
        return (
            f"all rows ({needed / 2**30:.2f} GiB) fit the {room / 2**30:.2f} GiB for rows on {where}: no row "
            "is copied to a GPU from pass 2 on"
        )
    return (
        f"{room / 2**30:.2f} of {needed / 2**30:.2f} GiB of rows ({room / needed:.0%}) stay on {where}; the "
        "others are copied to a GPU in each pass"
    )


def _make_map_probe(row_map: RowMap, make_block: Callable[[], Block]) -> Callable[[], object]:
    prepared, block = row_map.prepare(make_backend("cpu")), make_block()
    return lambda: row_map.apply(prepared, block)


def _make_pass_probe(
    reduction: Reduction, state: object, make_block: Callable[[], Block]
) -> Callable[[], object]:
    prepared, block = reduction.prepare(state, make_backend("cpu")), make_block()
    stats = Stats.zeros(reduction.layout())
    return lambda: reduction.accumulate(prepared, block, stats)


def add_totals(out: dict[str, Any], least: float, most: float) -> dict[str, Any]:
    """Add the total seconds and the summary to a plan, and return the plan."""
    expected = sum(out["seconds"].values())
    out["expected_seconds"] = expected
    out["expected_seconds_at_least"] = min(least, expected)
    out["expected_seconds_at_most"] = max(most, expected)
    out["summary"] = make_summary(out)
    return out


def make_summary(out: Mapping[str, Any]) -> str:
    """Return the time, memory and disk space of a plan as one line of text."""
    least, most = out["expected_seconds_at_least"], out["expected_seconds_at_most"]
    between = f" ({duration(least)} to {duration(most)})" if most > 1.25 * least + 2 else ""
    memory = f"{out['peak_bytes_per_worker'] / 2**20:,.0f} MiB a worker"
    disk = out["disk_bytes"]
    size = f"{disk / 1e9:,.1f} GB" if disk >= 1e9 else f"{disk / 1e6:,.0f} MB" if disk >= 1e6 else "no"
    size = f"{out['disk_bytes_are']} {size}" if "disk_bytes_are" in out and disk >= 1e6 else size
    return (
        f"about {duration(out['expected_seconds'])}{between}, {memory}, {size}{' of' * (size != 'no')} disk"
    )


def duration(seconds: float) -> str:
    """Return a duration in seconds as text in seconds, minutes, hours or days."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    if hours < 48:
        return f"{hours:.1f} h" if hours < 10 else f"{hours:.0f} h"
    return f"{hours / 24:.1f} days"


def long_fit(out: Mapping[str, Any]) -> str | None:
    """Return a warning if a fit would take longer than ``LONG_SECONDS``, otherwise None."""
    if out["expected_seconds"] <= LONG_SECONDS:
        return None
    return f"this fit would take about {duration(out['expected_seconds'])}: to shorten it, {out['shorter']}"
