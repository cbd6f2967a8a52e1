"""Workers of several kinds in one pass: who may take part, how fast each is, and what its spans take.

`benchmarks/device_pools.py` needs the speeds: Dask knows one duration for all tasks of a name. That a worker
has a card says Dask's resource GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scalelatent.engine.grid import FAN_IN, RowGrid
from scalelatent.engine.passes import Span, Stage, cluster_task_seconds, seconds_per_row
from scalelatent.errors import RunError, ScalelatentError

from . import hooks
from .asking import ask_scheduler
from .window import WINDOW, Costs, Window

if TYPE_CHECKING:
    from distributed import Client

    from scalelatent.contract.learners import Reduction
    from scalelatent.engine.callbacks import Callback

    from .executor import DaskExecutor
    from .link import Link

TOLERANCE = 1e-5
"""Between a processor and a card: of the largest entry of each field of a pass's sums."""

MIXED = (
    f"processors and cards compute this fit together: its sums depend, within {TOLERANCE:g} of their largest "
    "entries, on who computed which rows; with device='cpu', or 'gpu' on equal cards, every run has the same "
    "bits"
)
POOLED = "pool"  # the last word of names of tasks that Dask is to leave where they are

# Statistics that a thread's spans leave until they are merged take this at most: a bound.
ROOM_BYTES = 2**26
# Speeds within this factor are alike, as those of cores that share a machine. device_pools.py sets it to
# infinity for its "equal_shares": 2.2, 2.6 and 1.4 times the time of passes of 0.5, 2 and 8 s.
UNEQUAL = 2.0
# A bound: of shorter passes nothing is gained, since what a pass takes beside its rows is as long
# (device_pools.py: 0.2 to 0.3 s), and short spans measure the machine's other work.
WORTH_SECONDS = 0.25
# Of a card in its first pass, against the processors beside it: a bound, from then on it is measured.
GPU_GUESS = 8.0
# One that had no span in a pass is believed a little faster with each, so that it is measured again some day:
# bounds (test_pools.py: at a tenth of the speed after a hundred passes).
HOPE, MOST_HOPE = 1.01, 8.0
_CARDS = {"cupy": "gpu", "gpu": "gpu"}


@dataclass(frozen=True)
class Speeds:
    """How fast workers are on a stage."""

    row_seconds: Mapping[str, float]
    speeds: Mapping[str, float]

    @property
    def alike(self) -> bool:
        """Whether it does not matter who gets which span."""
        return max(self.speeds.values()) < UNEQUAL * min(self.speeds.values())

    def pass_seconds(self, stage: Stage, threads: Mapping[str, int]) -> float:
        """Of a pass on these workers, shared out evenly."""
        work = sum(grid.n_rows * self.row_seconds[part] for part, grid in stage.grids.items())
        return work / sum(count * self.speeds[name] for name, count in threads.items())


class Pace:
    """Seconds a row of each worker, as they tell them."""

    def __init__(self) -> None:
        self._heard: dict[tuple[str, str], dict[str, float]] = {}
        self._hope: dict[str, float] = {}
        self.devices: dict[str, str] = {}

    def hear(self, message: Mapping[str, Any]) -> None:
        """What a worker tells; in the client's thread."""
        part, worker = (message["stage"], message["part"]), str(message["worker"])
        self._heard[part] = {**self._heard.get(part, {}), worker: float(message["pace"])}
        self.devices = {**self.devices, worker: _CARDS.get(message["device"], "cpu")}

    def took_part(self, workers: set[str], all_workers: Mapping[str, int]) -> None:
        """A pass is through in which these workers had spans."""
        self._hope = {
            name: min(MOST_HOPE, self._hope.get(name, 1.0) * HOPE)
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
        """Speeds of workers on a stage, against given seconds a row; guesses where nothing was heard."""
        rows = {part: grid.n_rows for part, grid in stage.grids.items()}
        heard = {part: self._heard.get((stage.name, part), {}) for part in rows}
        if row_seconds is None:
            row_seconds = {part: _usual(heard[part], threads, stage.reductions[part]) for part in rows}
        found: dict[str, float] = {}
        for worker in threads:
            parts = [part for part in rows if worker in heard[part]]
            if parts:
                usual = sum(rows[part] * row_seconds[part] for part in parts)
                took = sum(rows[part] * heard[part][worker] for part in parts)
                found[worker] = self._hope.get(worker, 1.0) * usual / max(took, 1e-12)
        return Speeds(row_seconds, {**_guessed(found, threads, gpus), **found})


def _usual(heard: Mapping[str, float], threads: Mapping[str, int], reduction: Reduction) -> float:
    known = [pace for worker, pace in heard.items() if worker in threads]
    return statistics.median(known) if known else seconds_per_row(reduction)


def _guessed(
    found: Mapping[str, float], threads: Mapping[str, int], gpus: frozenset[str]
) -> dict[str, float]:
    """Speeds of those that were not measured: as their like, and cards a guess above processors."""
    kinds = {
        card: [speed for name, speed in found.items() if (name in gpus) == card] for card in (False, True)
    }
    slow = statistics.median(kinds[False]) if kinds[False] else None
    fast = statistics.median(kinds[True]) if kinds[True] else None
    if slow is None:
        slow = 1.0 if fast is None else fast / GPU_GUESS
    if fast is None:
        fast = slow * GPU_GUESS
    return {name: fast if name in gpus else slow for name in threads if name not in found}


def all_offer_gpu(client: Client) -> bool:
    """Whether a cluster has workers, and each of them offers the resource GPU."""
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    return bool(workers) and all(worker.get("resources", {}).get("GPU") for worker in workers)


class Pools:
    """The workers of one executor by what they are."""

    def __init__(self, link: Link) -> None:
        self._link, self.device, self.bound, self.pace = link, "auto", False, Pace()
        self._cards: dict[str, bool] = {}
        self._kept_still: set[str] = set()
        self._told: dict[str, int] = {}

    @property
    def gpus(self) -> frozenset[str]:
        """Workers that compute on a card."""
        if self.device not in ("auto", "gpu"):
            return frozenset()
        return frozenset(name for name, card in self._cards.items() if card)

    def compute_on(self, device: str, threads: Mapping[str, int]) -> None:
        """What the fit asks for."""
        self.device = device
        if not self.chosen(threads):
            address = self._link.address
            raise RunError(
                f"device='gpu', but none of the {len(threads)} workers of {address} offers the resource GPU: "
                f'start one where there is a card (`dask worker {address} --nthreads 1 --resources "GPU=1"`, '
                "or `scalelatent cluster up --gpus 1`), or use device='auto' or 'cpu'"
            )

    def chosen(self, threads: Mapping[str, int]) -> dict[str, int]:
        """Of these workers those that take part."""
        if self.device not in ("auto", "gpu") or not threads:
            return dict(threads)
        if not self._cards.keys() >= threads.keys():
            members = self._link.members()
            # A worker never changes what it offers; one that joins this moment is looked at next time.
            self._cards = {name: bool(member.gpus) for name, member in members.items()}
        if self.device == "auto":
            return dict(threads)
        self.bound = not all(self._cards.get(name, False) for name in threads)
        return {name: count for name, count in threads.items() if self._cards.get(name, False)}

    def speeds(
        self, stage: Stage, threads: Mapping[str, int], row_seconds: Mapping[str, float] | None = None
    ) -> Speeds:
        """How fast these workers are on a stage, as far as it is known."""
        return self.pace.speeds(stage, threads, self.gpus, row_seconds)

    def keep_still(self, client: Client, name: str) -> None:
        """Keep Dask from moving tasks whose names begin so."""
        if name not in self._kept_still:
            self._kept_still.add(name)
            try:
                ask_scheduler(client, hooks.keep_still, name)
            except ScalelatentError:
                raise
            except Exception as error:  # noqa: BLE001  a scheduler without scalelatent; slower, no worse
                hooks.say_once("keep_still", "slow workers that take no spans from fast ones", error)

    def offers(self, threads: Mapping[str, int]) -> dict[str, int]:
        """How many of these workers compute on what."""
        cards = len(self.gpus.intersection(threads))
        counts = {"cpu": len(threads) - cards, "gpu": cards}
        return {kind: count for kind, count in counts.items() if count}

    def passed(self, window: Window[Span], threads: Mapping[str, int]) -> None:
        """A pass is through."""
        if window.unequal:
            self.pace.took_part(window.took_part, threads)

    def tell(self, counts: Mapping[str, int], callbacks: Callback) -> None:
        """Tell which devices compute, where that is news."""
        if counts and dict(counts) != self._told:
            self._told = dict(counts)
            callbacks.on_event(devices_event(counts))

    def computed(self) -> dict[str, int]:
        """How many workers have computed on what, as far as they told."""
        kinds = list(self.pace.devices.values())
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def devices_event(counts: Mapping[str, int]) -> dict[str, Any]:
    """The event that tells which devices compute, and what that means for the result."""
    out = {"event": "devices", **counts, "devices": describe(counts)}
    if len(counts) > 1:
        out["message"] = MIXED
    return out


def describe(counts: Mapping[str, int]) -> str:
    """Devices in words."""
    return ", ".join(f"{kind} {n} worker{'s' if n > 1 else ''}" for kind, n in sorted(counts.items()))


def costs(executor: DaskExecutor, stage: Stage, kept: frozenset[Span]) -> Costs[Span]:
    """What the spans of a pass take, on workers that are alike or not."""
    pools, threads, seconds = executor.pools, executor.threads, executor.span_seconds(stage.name)
    most = max(
        WINDOW, ROOM_BYTES // max(reduction.layout().nbytes for reduction in stage.reductions.values())
    )
    found = pools.speeds(stage, threads)
    if len(threads) < 2 or found.alike or found.pass_seconds(stage, threads) < WORTH_SECONDS:
        return Costs(lambda span: seconds or 1.0, seconds is not None, most)
    pools.keep_still(executor.client, f"{stage.name}_{POOLED}")
    row_seconds, grids = found.row_seconds, stage.grids

    def work(span: Span) -> float:
        a, b = grids[span.part].node_rows(span.level, span.index)
        return 1e-6 if span in kept else (b - a) * row_seconds[span.part]

    def cut(span: Span) -> list[Span]:
        return [] if span in kept else children(span, grids[span.part])

    def speeds(threads: Mapping[str, int]) -> Mapping[str, float]:
        return pools.speeds(stage, threads, row_seconds).speeds

    return Costs(work, True, most, speeds, cut, cluster_task_seconds(sum(threads.values())))


def children(span: Span, grid: RowGrid) -> list[Span]:
    """The nodes below a span in its part's tree; none of a leaf."""
    first = span.index * FAN_IN
    stop = min(first + FAN_IN, grid.n_nodes(span.level - 1)) if span.level else first
    return [Span(span.part, span.level - 1, i) for i in range(first, stop)]
