"""Measure how long a minibatch step takes beyond its computation.

    python benchmarks/minibatch_steps.py [--parts in_process dask auto]

A step runs one or more chains (sequences of minibatches, each on one worker) and then updates the parameters.

in_process  Milliseconds of a step of a learner that computes nothing, with rows in memory and on disk.
dask        The same times on a LocalCluster of two workers, for 1, 2 and 4 chains and parameters of 16 kB to
            1 MB. All steps run on one worker ("one"), or the chains are spread over both workers ("all").
            "beyond_computing" is the time of a step that computes for 20 ms per chain, minus the computing
            time of the busier worker. "transfer" is the time of a pair of plain Dask tasks that exchange the
            same bytes.
auto        Milliseconds of steps that compute for 0.2, 5 and 40 ms per chain: on one worker, on both, and as
            the engine chooses.

A fit reports several times; each time is the smallest of its reports.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import idle_learner
import numpy as np
from common import parser, write
from idle_learner import IdleLearner

import scalelatent as sl
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.dask.executor import DaskExecutor
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.online_loop import fit_online
from scalelatent.engine.order import RowOrder
from scalelatent.engine.passes import make_stage
from scalelatent.engine.threads import single_threaded

# Number of features, and number of rows in a minibatch.
FEATURES, BATCH_ROWS = 196, 256


class ReportSeconds(Callback):
    """Callback that records the seconds per step of each report of a fit; a report covers ``every`` steps."""

    def __init__(self, every: int) -> None:
        self.every, self.seconds = every, list[float]()

    def on_report(self, record: dict[str, Any]) -> None:
        self.seconds.append(record["seconds"] / self.every)


def measure_step_seconds(
    make: Callable[[], Any], learner: IdleLearner, rows: sl.Dataset, chains: int, steps: int
) -> float:
    """Return the smallest seconds per step over the reports of a fit.

    The first report does not count, because it starts threads. ``make`` returns an executor of the engine.
    """
    executor, parts = make(), ReportSeconds(steps)
    rows = rows[: BATCH_ROWS * (7 * steps + 1)]
    stage = make_stage("idle_step", learner, {"train": rows}, "cpu", rows.classes)
    order = RowOrder(len(rows), 0, BATCH_ROWS, n_chains=chains)
    store = getattr(executor, "store", None)
    fit_online(
        executor, stage, learner.start(), order=order, n_epochs=1, callbacks=Callbacks(parts),
        store=store, report_steps=steps,
    )  # fmt: skip
    return min(parts.seconds[1:])


def time_in_process(stored: sl.Dataset, memory: sl.Dataset) -> list[dict[str, Any]]:
    out = []
    for chains in (1, 2, 4):
        for kib in (16, 128, 1024):
            learner = IdleLearner(kib * 128)
            ms = {
                f"{name}_{jobs}_threads": 1e3
                * measure_step_seconds(lambda jobs=jobs: InProcessExecutor(jobs), learner, rows, chains, 100)
                for name, rows in (("memory", memory), ("stored", stored))
                for jobs in (1, 2)
                if jobs <= chains
            }
            out.append({"chains": chains, "state_kib": kib, **{k: round(v, 3) for k, v in ms.items()}})
            print(out[-1], flush=True)
    return out


def exchange_results(numbers: int, *others: Any) -> np.ndarray:
    return np.zeros(numbers)


def time_bare_pairs(client: Any, numbers: int, steps: int, tag: str) -> float:
    """Return mean seconds of a step: a Dask task per worker, which uses all results of the step before."""
    names = sorted(client.nthreads())
    begin, futures = time.perf_counter(), list[Any]()
    for step in range(steps):
        futures = [
            client.submit(
                exchange_results,
                numbers,
                *futures,
                key=f"bare-{tag}-{step}-{name}",
                workers=[name],
                pure=False,
            )
            for name in names
        ]
    for future in futures:
        future.result(timeout=60)
    return (time.perf_counter() - begin) / steps


def make_executor_factory(folder: Path, client: Any, spread: str) -> Callable[[], DaskExecutor]:
    """Return a function that makes a Dask executor with a new run folder.

    ``spread`` is "one" (all chains on one worker), "all" (on all workers) or "auto" (as the engine chooses).
    """

    def make() -> DaskExecutor:
        executor = DaskExecutor(client, EngineStore(tempfile.mkdtemp(dir=folder)))
        executor.spread = spread
        return executor

    return make


def time_on_dask(folder: Path, client: Any, rows: sl.Dataset) -> list[dict[str, Any]]:
    """Return the milliseconds of steps on two workers, by number of chains and size of the state."""
    out, busy, steps = [], 0.02, 48
    for chains in (1, 2, 4):
        for kib in (16, 128, 1024):
            figures: dict[str, float] = {}
            for spread in ("one", "all") if chains > 1 else ("one",):
                executor = make_executor_factory(folder, client, spread)
                share = -(-chains // 2) if spread == "all" else chains
                idle = measure_step_seconds(executor, IdleLearner(kib * 128), rows, chains, steps)
                taken = measure_step_seconds(executor, IdleLearner(kib * 128, busy), rows, chains, 12)
                figures[f"{spread}_ms"] = 1e3 * idle
                figures[f"{spread}_beyond_computing_ms"] = 1e3 * (taken - share * busy)
            if chains > 1:
                tags = [f"{chains}-{kib}-{i}" for i in range(3)]
                numbers = chains // 2 * kib * 128
                figures["transfer_ms"] = 1e3 * min(
                    time_bare_pairs(client, numbers, steps, tag) for tag in tags
                )
            out.append({"chains": chains, "state_kib": kib, **{k: round(v, 2) for k, v in figures.items()}})
            print(out[-1], flush=True)
    return out


def time_automatic_choice(folder: Path, client: Any, rows: sl.Dataset) -> list[dict[str, Any]]:
    """Return the milliseconds of steps on one worker, on two, and with the executor's choice."""
    out, chains = [], 4
    for seconds in (2e-4, 5e-3, 4e-2):
        figures: dict[str, Any] = {"chain_ms": 1e3 * seconds}
        steps = int(np.clip(0.3 / (seconds * chains), 8, 100))
        for spread in ("one", "all", "auto"):
            executor = make_executor_factory(folder, client, spread)
            ms = 1e3 * measure_step_seconds(executor, IdleLearner(2048, seconds), rows, chains, steps)
            figures[f"{spread}_ms"] = round(ms, 2)
        out.append(figures)
        print(out[-1], flush=True)
    return out


def make_and_store_rows(folder: Path, n: int, seed: int) -> tuple[sl.Dataset, sl.Dataset]:
    """Return random rows as a dataset in memory, and the same rows as a dataset on disk."""
    rng = np.random.Generator(np.random.Philox(seed))
    x = rng.standard_normal((n, FEATURES), dtype=np.float32)
    memory = sl.Dataset.from_arrays(x, rng.integers(0, 10, n))
    return memory, memory.save(folder / "rows.zarr")


def main() -> None:
    args = parser(__doc__, "minibatch_steps")
    args.add_argument("--parts", nargs="+", choices=("in_process", "dask", "auto"), default=None)
    a = args.parse_args()
    parts = a.parts or ["in_process", "dask", "auto"]
    results: dict[str, Any] = {"features": FEATURES, "batch_rows": BATCH_ROWS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        memory, stored = make_and_store_rows(folder, BATCH_ROWS * 1000, a.seed)
        if "in_process" in parts:
            with single_threaded():
                results["in_process_ms"] = time_in_process(stored, memory)
        if {"dask", "auto"} & set(parts):
            with sl.cluster("local", workers=2, memory_limit="4GB", dashboard_address=None) as client:
                client.upload_file(idle_learner.__file__)
                if "dask" in parts:
                    results["dask_2_workers"] = time_on_dask(folder, client, stored)
                if "auto" in parts:
                    results["auto_2_workers"] = time_automatic_choice(folder, client, stored)
    write(a.out, a.seed, results)


if __name__ == "__main__":
    main()
