"""Workers of different speeds in one pass: choose the workers, measure their speeds, and estimate durations.

Dask estimates one duration for all tasks with a common prefix of their names, whatever worker runs them.
Therefore the speed of each worker is measured here (`benchmarks/device_pools.py`). A worker computes on a GPU
if it offers the Dask resource GPU, or if dask-cuda has started it.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scalelatent.engine.backend import read_gpu_memory
from scalelatent.engine.grid import FAN_IN, RowGrid
from scalelatent.engine.passes import Span, Stage, cluster_task_seconds, seconds_per_row
from scalelatent.errors import RunError, ScalelatentError

from . import hooks
from .link import find_gpus
from .timed_calls import ask_scheduler, ask_workers
from .window import WINDOW, Costs

if TYPE_CHECKING:
    from distributed import Client

    from scalelatent.contract.learners import Reduction
    from scalelatent.engine.callbacks import Callback

    from .executor import DaskExecutor
    from .link import Gpu, Link

_log = logging.getLogger(__name__)

TOLERANCE = 1e-5
"""Largest difference of a statistic between CPU and GPU, relative to the largest entry of each field."""

MIXED = (
    f"CPUs and GPUs compute this fit together: its sums depend, within {TOLERANCE:g} of their largest "
    "entries, on which device computed which rows; with device='cpu', or 'gpu' on equal GPUs, every run has "
    "the same bits"
)
# Word in the names of the tasks that Dask's work stealing must not move to another worker.
POOLED = "pool"

# Maximum bytes of the statistics that the tasks of one thread have computed and that are not merged yet.
ROOM_BYTES = 2**26
# Workers whose speeds differ by less than this factor count as equally fast and get equal numbers of rows. On
# the slow and fast workers of device_pools.py ("equal_shares"), equal numbers of rows make passes 1.4 to 2.6
# times as long.
UNEQUAL = 2.0
# In passes of fewer seconds, all workers get equal numbers of rows. Measured speeds would not make them
# shorter: the overhead of a pass is 0.2 to 0.3 s (device_pools.py), and short measurements are noisy.
WORTH_SECONDS = 0.25
# Assumed speed of a GPU relative to a CPU in the first pass; later passes use measured speeds.
GPU_GUESS = 8.0
# A slow worker may get no rows, and then its speed is not measured any more. Its assumed speed therefore
# grows by the factor SPEEDUP_PER_PASS with each pass, in total by at most MAX_SPEEDUP, until it gets rows
# again (test_pools.py).
SPEEDUP_PER_PASS, MAX_SPEEDUP = 1.01, 8.0


@dataclass(frozen=True)
class Speeds:
    """Speeds of workers by address, relative to a worker of speed 1, and the seconds per row of that worker.

    ``row_seconds`` has one number for the "train" rows and, if there are any, one for the "validation" rows.
    """

    row_seconds: Mapping[str, float]
    speeds: Mapping[str, float]

    @property
    def are_equal(self) -> bool:
        """True if the speeds of all workers differ by less than the factor ``UNEQUAL``."""
        return max(self.speeds.values()) < UNEQUAL * min(self.speeds.values())

    def pass_seconds(self, stage: Stage, threads: Mapping[str, int]) -> float:
        """Return the seconds of a pass on these workers, if all of them end at the same time."""
        work = sum(grid.n_rows * self.row_seconds[part] for part, grid in stage.grids.items())
        return work / sum(count * self.speeds[name] for name, count in threads.items())


class Pace:
    """Measured seconds per row of each worker, from the reports of the workers."""

    def __init__(self) -> None:
        self._reported: dict[tuple[str, str], dict[str, float]] = {}
        self._assumed_speedup: dict[str, float] = {}
        self.devices: dict[str, str] = {}

    def receive(self, message: Mapping[str, Any]) -> None:
        """Store a worker's report of its seconds per row; this method runs in the client's thread."""
        part, worker = (message["stage"], message["part"]), str(message["worker"])
        self._reported[part] = {**self._reported.get(part, {}), worker: float(message["pace"])}
        self.devices = {**self.devices, worker: "gpu" if message["device"] == "cupy" else "cpu"}

    def record_pass(self, workers: set[str], all_workers: Mapping[str, int]) -> None:
        """Record that only ``workers`` got rows in the last pass; assume that other workers became faster."""
        self._assumed_speedup = {
            name: min(MAX_SPEEDUP, self._assumed_speedup.get(name, 1.0) * SPEEDUP_PER_PASS)
            for name in all_workers
            if name not in workers
        }

    def speeds(
        self,
        stage: Stage,
        threads: Mapping[str, int],
        gpus: frozenset[str],
        row_seconds: Mapping[str, float] | None = None,
    ) -> Speeds:
        """Return the speeds of workers relative to a worker that needs ``row_seconds`` (default: the median).

        The speed of a worker without reports is guessed.
        """
        rows = {part: grid.n_rows for part, grid in stage.grids.items()}
        reported = {part: self._reported.get((stage.name, part), {}) for part in rows}
        if row_seconds is None:
            row_seconds = {
                part: _median_seconds(reported[part], threads, stage.reductions[part]) for part in rows
            }
        found: dict[str, float] = {}
        for worker in threads:
            parts = [part for part in rows if worker in reported[part]]
            if parts:
                usual = sum(rows[part] * row_seconds[part] for part in parts)
                took = sum(rows[part] * reported[part][worker] for part in parts)
                found[worker] = self._assumed_speedup.get(worker, 1.0) * usual / max(took, 1e-12)
        return Speeds(row_seconds, {**_guess_speeds(found, threads, gpus), **found})


def _median_seconds(reported: Mapping[str, float], threads: Mapping[str, int], reduction: Reduction) -> float:
    """Return the median of the reported seconds per row, or an estimate if no worker has reported."""
    known = [pace for worker, pace in reported.items() if worker in threads]
    return statistics.median(known) if known else seconds_per_row(reduction)


def _guess_speeds(
    found: Mapping[str, float], threads: Mapping[str, int], gpus: frozenset[str]
) -> dict[str, float]:
    """Return a speed for each worker without reports: the median of workers on its device (CPU or GPU)."""
    on_cpu = [speed for name, speed in found.items() if name not in gpus]
    on_gpu = [speed for name, speed in found.items() if name in gpus]
    slow = statistics.median(on_cpu) if on_cpu else 1.0
    fast = statistics.median(on_gpu) if on_gpu else slow * GPU_GUESS
    slow = slow if on_cpu else fast / GPU_GUESS
    return {name: fast if name in gpus else slow for name in threads if name not in found}


def all_use_gpu(client: Client) -> bool:
    """Return True if a cluster has workers and each of them computes on a GPU."""
    gpus = find_gpus(client)
    return bool(gpus) and all(gpu == "used" for gpu in gpus.values())


def find_gpu_row_limits(client: Client) -> tuple[int, ...]:
    """Return, per GPU worker that answers, the bytes of rows that its GPU may keep between passes."""
    gpus = [address for address, gpu in find_gpus(client).items() if gpu == "used"]
    answers = ask_workers(client, _read_row_limit, workers=gpus) if gpus else {}
    return tuple(answer for answer in answers.values() if isinstance(answer, int))


async def _read_row_limit() -> int:
    # Call it in a thread, because importing CuPy in the event loop would block the worker.
    return await asyncio.to_thread(lambda: read_gpu_memory().row_limit)


class Pools:
    """Workers of one fit, grouped by device (CPU or GPU), and their measured speeds."""

    def __init__(self, link: Link) -> None:
        self._link, self.device, self.bound, self.pace = link, "auto", False, Pace()
        self._has_gpu: dict[str, bool] = {}
        self._without_stealing: set[str] = set()
        self._reported_counts: dict[str, int] = {}

    @property
    def gpus(self) -> frozenset[str]:
        """Addresses of the workers that compute on a GPU."""
        if self.device not in ("auto", "gpu"):
            return frozenset()
        return frozenset(name for name, has_gpu in self._has_gpu.items() if has_gpu)

    def compute_on(self, device: str, threads: Mapping[str, int]) -> None:
        """Set the device of the fit; raise `RunError` if no worker offers the device."""
        self.device = device
        if not self.chosen(threads):
            address = self._link.address
            raise RunError(
                f"device='gpu', but none of the {len(threads)} workers of {address} offers the resource GPU: "
                "start one on a machine with a GPU (`dask worker "
                f'{address} --nthreads 1 --resources "GPU=1"`, '
                f"`dask cuda worker {address}`, or `scalelatent cluster up --gpus 1`), or use device='auto' "
                "or 'cpu'"
            )

    def _warn_of_unused_gpus(self, gpus: Mapping[str, Gpu]) -> None:
        """Warn of workers that compute on their CPU although they see a GPU."""
        unused = [address for address, gpu in gpus.items() if gpu == "unused"]
        if self.device == "auto" and unused:
            _log.warning(
                "%d of %d workers of %s see a GPU, but do not offer the resource GPU, so that they compute "
                "on their CPU (%s): start them with --nthreads 1 --resources GPU=1 or with dask-cuda, or set "
                "CUDA_VISIBLE_DEVICES=-1 for workers that must not use a GPU",
                len(unused), len(gpus), self._link.address, unused[0],
            )  # fmt: skip

    def chosen(self, threads: Mapping[str, int]) -> dict[str, int]:
        """Return the number of threads, by address, of the workers that a fit on its device uses."""
        if self.device not in ("auto", "gpu") or not threads:
            return dict(threads)
        if not self._has_gpu.keys() >= threads.keys():
            gpus = self._link.find_gpus()
            self._warn_of_unused_gpus(gpus)
            # A worker never changes its resources. If a worker joins just now, the next call queries it.
            self._has_gpu = {name: gpu == "used" for name, gpu in gpus.items()}
        if self.device == "auto":
            return dict(threads)
        self.bound = not all(self._has_gpu.get(name, False) for name in threads)
        return {name: count for name, count in threads.items() if self._has_gpu.get(name, False)}

    def speeds(
        self, stage: Stage, threads: Mapping[str, int], row_seconds: Mapping[str, float] | None = None
    ) -> Speeds:
        """Return the measured or guessed speeds of these workers for the work of a stage."""
        return self.pace.speeds(stage, threads, self.gpus, row_seconds)

    def disable_stealing(self, client: Client, name: str) -> None:
        """Exclude tasks whose names start with ``name`` from Dask's work stealing."""
        if name not in self._without_stealing:
            self._without_stealing.add(name)
            try:
                ask_scheduler(client, hooks.disable_stealing, name)
            except ScalelatentError:
                raise
            except Exception as error:  # noqa: BLE001  a scheduler without scalelatent; passes are slower
                hooks.log_once("disable_stealing", "exclusion of tasks from work stealing", error)

    def offers(self, threads: Mapping[str, int]) -> dict[str, int]:
        """Return the number of workers by device ("cpu", "gpu"); a device that no worker uses is absent."""
        on_gpu = len(self.gpus.intersection(threads))
        counts = {"cpu": len(threads) - on_gpu, "gpu": on_gpu}
        return {kind: count for kind, count in counts.items() if count}

    def report_devices(
        self, counts: Mapping[str, int], callbacks: Callback, present: Mapping[str, int] | None = None
    ) -> None:
        """Send the callbacks an event with the number of workers per device, if a number has changed."""
        if counts and dict(counts) != self._reported_counts:
            self._reported_counts = dict(counts)
            callbacks.on_event(devices_event(counts, present))

    def count_computing_workers(self) -> dict[str, int]:
        """Return the number of workers by device, counting only workers that have computed rows."""
        kinds = list(self.pace.devices.values())
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def devices_event(counts: Mapping[str, int], present: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the event with the devices of a fit; CPUs and GPUs together add a message about equal bits."""
    found, present = [], present or {}
    for kind, n in sorted(counts.items()):
        if present.get(kind, 0) > n:
            found.append(f"{kind} {n} of {present[kind]} workers (the others had no work)")
        else:
            found.append(f"{kind} {n} worker{'s' if n > 1 else ''}")
    message = {"message": MIXED} if len(counts) > 1 else {}
    return {"event": "devices", **counts, "devices": ", ".join(found), **message}


def estimate_costs(executor: DaskExecutor, stage: Stage, finished: frozenset[Span]) -> Costs[Span]:
    """Return the estimated seconds of the spans (ranges of rows) of a pass, and the speeds of the workers."""
    pools, threads, seconds = executor.pools, executor.threads, executor.span_seconds(stage.name)
    most = max(
        WINDOW, ROOM_BYTES // max(reduction.layout().nbytes for reduction in stage.reductions.values())
    )
    found = pools.speeds(stage, threads)
    if len(threads) < 2 or found.are_equal or found.pass_seconds(stage, threads) < WORTH_SECONDS:
        return Costs(lambda span: seconds or 1.0, seconds is not None, most)
    pools.disable_stealing(executor.client, f"{stage.name}_{POOLED}")
    row_seconds, grids = found.row_seconds, stage.grids

    def work(span: Span) -> float:
        a, b = grids[span.part].node_rows(span.level, span.index)
        return 1e-6 if span in finished else (b - a) * row_seconds[span.part]

    def cut(span: Span) -> list[Span]:
        return [] if span in finished else split_span(span, grids[span.part])

    def speeds(threads: Mapping[str, int]) -> Mapping[str, float]:
        return pools.speeds(stage, threads, row_seconds).speeds

    return Costs(work, True, most, speeds, cut, cluster_task_seconds(sum(threads.values())))


def split_span(span: Span, grid: RowGrid) -> list[Span]:
    """Split a span (range of rows) into its up to eight smaller spans; return [] for a smallest span."""
    first = span.index * FAN_IN
    stop = min(first + FAN_IN, grid.n_nodes(span.level - 1)) if span.level else first
    return [Span(span.part, span.level - 1, i) for i in range(first, stop)]
