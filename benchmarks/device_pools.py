"""Measure a pass on workers of different speed: its time, and the idle time of workers at its end.

    python benchmarks/device_pools.py [--speeds 1 1 1 20] [--seconds 0.5 2 8]

A pass processes all rows of a dataset once. The cluster has real worker processes on this machine, which only
sleep, for a time that depends on the worker's speed (by default three workers of speed 1 and one of speed
20), so that the number of cores does not matter. In an ideal pass, each worker gets rows in proportion to its
speed, and nothing else takes time. Two ways to distribute the rows are compared with the ideal pass: in
proportion to threads, after which Dask moves tasks to idle workers ("equal_shares"), and in proportion to the
measured speed of workers ("measured_shares", scalelatent/engine/dask/window.py). A simulation without a
cluster covers larger pools.
"""

from __future__ import annotations

import contextlib
import heapq
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, write

# Number of rows in a block (one call of a worker's kernel) and in a leaf (smallest range of rows in a task).
LEAF_ROWS = 8
# Simulated sets of workers: the number of workers of each speed.
SIMULATED_POOLS = {
    "3 of 1, 1 of 20": {1.0: 3, 20.0: 1},
    "90 of 1, 10 of 20": {1.0: 90, 20.0: 10},
    "900 of 1, 100 of 20": {1.0: 900, 20.0: 100},
}


@contextlib.contextmanager
def start_pool(count: int) -> Iterator[Any]:
    """Yield the client of a local cluster of ``count`` workers with one thread each."""
    import paced_learner
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=count, threads_per_worker=1, processes=True, host="127.0.0.1",
            dashboard_address="127.0.0.1:0", memory_limit=0, silence_logs=50,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):  # fmt: skip
        client.wait_for_workers(count, timeout=120)
        client.upload_file(paced_learner.__file__)
        yield client


def measure_passes(client: Any, dataset: Any, speeds: tuple[float, ...], seconds: float, passes: int) -> Any:
    """Return ``measure_pass`` of each of ``passes`` passes, after two that measure the workers' speeds."""
    from paced_learner import PacedLearner, list_computed_blocks

    from scalelatent.engine.batch_loop import fit_batches
    from scalelatent.engine.callbacks import Callbacks
    from scalelatent.engine.checkpoints import EngineStore
    from scalelatent.engine.dask.executor import DaskExecutor
    from scalelatent.engine.passes import make_stage

    row_seconds = seconds * sum(speeds) / len(dataset)
    learner = PacedLearner(row_seconds, speeds, passes + 2)
    stage = make_stage(
        "paced_estep", learner, {"train": dataset}, "cpu", block_rows=LEAF_ROWS, leaf_rows=LEAF_ROWS
    )
    with tempfile.TemporaryDirectory() as folder:
        store = EngineStore(folder)
        executor = DaskExecutor(client, store, checkpoint_seconds=3600)
        began = time.time()
        fit_batches(executor, stage, learner.start(), callbacks=Callbacks(), store=store)
    found = client.run(list_computed_blocks).values()
    blocks = [[block for block in blocks if block[2] >= began] for blocks in found]
    return [measure_pass(blocks, number, seconds) for number in range(2, passes + 2)]


def measure_pass(blocks: list[Any], number: int, ideal: float) -> dict[str, Any]:
    """Return the seconds of pass ``number`` divided by those of the ideal pass (``ideal``), and shares.

    The shares are the mean idle share of workers at the end, and the largest share of rows that one worker
    computed. ``blocks`` has a list for each worker, with (pass, rows, begin, end) of each block of rows.
    """
    blocks_of_pass = [[block[1:] for block in own if block[0] == number] for own in blocks]
    begin = min(b for own in blocks_of_pass for _, b, _ in own)
    end = max(e for own in blocks_of_pass for _, _, e in own)
    idle = [end - max((e for _, _, e in own), default=begin) for own in blocks_of_pass]
    rows = [sum(n for n, _, _ in own) for own in blocks_of_pass]
    return {
        "of_ideal": (end - begin) / ideal,
        "mean_end_idle_share": statistics.mean(idle) / (end - begin),
        "fastest_share_of_rows": max(rows) / sum(rows),
    }


def summarise(passes: list[dict[str, Any]]) -> dict[str, float]:
    """Return medians over passes, and the best time, because other work on the machine slows some passes."""
    ratios = [p["of_ideal"] for p in passes]
    idle = statistics.median(p["mean_end_idle_share"] for p in passes)
    return {
        "best_of_ideal": round(min(ratios), 3),
        "median_of_ideal": round(statistics.median(ratios), 3),
        "median_end_idle_share": round(idle, 3),
        "fastest_share_of_rows": round(statistics.median(p["fastest_share_of_rows"] for p in passes), 3),
    }


def simulate(counts: dict[float, int], leaves: int, seconds: float, latency: float = 0.03) -> dict[str, Any]:
    """Simulate a pass, event by event, with the tasks that the engine's `Window` assigns to workers.

    ``counts`` is the number of workers of each speed; ``leaves`` is the number of equal ranges of rows;
    ``seconds`` is the time of the ideal pass; the driver receives results after ``latency`` seconds.
    """
    from scalelatent.engine.dask.pools import split_span
    from scalelatent.engine.dask.window import Costs, Window
    from scalelatent.engine.grid import RowGrid
    from scalelatent.engine.passes import MIN_TASK_SECONDS, Span

    grid = RowGrid(leaves, 1, 1)
    speeds = {f"w{i}": s for i, s in enumerate(s for s, n in counts.items() for _ in range(n))}
    leaf_seconds = seconds * sum(speeds.values()) / leaves
    free_at, arrivals, tasks, messages, end, now = dict.fromkeys(speeds, 0.0), list[Any](), 0, 0, 0.0, 0.0

    def compute_seconds(span: Span) -> float:
        a, b = grid.node_rows(span.level, span.index)
        return (b - a) * leaf_seconds

    def send(batch: Any, is_last: bool) -> dict[Span, Any]:
        nonlocal tasks, messages, end
        tasks, messages = tasks + len(batch), messages + 1
        futures = {}
        for span, worker in batch:
            free_at[worker] = max(free_at[worker], now) + compute_seconds(span) / speeds[worker]
            end = max(end, free_at[worker])
            futures[span] = SimpleNamespace(status="pending")
            heapq.heappush(arrivals, (free_at[worker], span.level, span.index, futures[span]))
        return futures

    begin = time.perf_counter()
    costs = Costs(
        compute_seconds,
        True,
        speeds=lambda _: speeds,
        cut=lambda s: split_span(s, grid),
        shortest=MIN_TASK_SECONDS,
    )
    window = Window(dict.fromkeys(speeds, 1), [Span("train", grid.depth, 0)], send, costs)
    window.open()
    while arrivals:
        now = max(now + latency, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            heapq.heappop(arrivals)[-1].status = "finished"
        window.poll()
    best = find_shortest_pass(leaves, speeds, leaf_seconds)
    return {
        "leaves": leaves,
        "seconds": seconds,
        "of_ideal": round(end / seconds, 3),
        "of_best_by_whole_leaves": round(end / best, 3),
        "tasks": tasks,
        "messages": messages,
        "driver_ms_per_task": round(1e3 * (time.perf_counter() - begin) / tasks, 4),
    }


def find_shortest_pass(leaves: int, speeds: dict[str, float], leaf_seconds: float) -> float:
    """Return the shortest seconds of ``leaves`` tasks, which take ``leaf_seconds`` on a worker of speed 1."""
    done = heapq.nsmallest(
        leaves, ((k + 1) * leaf_seconds / s for s in speeds.values() for k in range(leaves))
    )
    return done[-1]


def main() -> None:
    arguments = parser(__doc__, "device_pools")
    arguments.add_argument("--speeds", type=float, nargs="+", default=[1.0, 1.0, 1.0, 20.0])
    arguments.add_argument(
        "--seconds", type=float, nargs="+", default=[0.5, 2.0, 8.0], help="seconds of the ideal pass"
    )
    arguments.add_argument("--leaves", type=int, default=1000)
    arguments.add_argument("--passes", type=int, default=5)
    a = arguments.parse_args()
    import numpy as np

    from scalelatent import Dataset
    from scalelatent.engine.dask import pools

    reported: dict[str, Any] = {"speeds": a.speeds, "leaves": a.leaves, "cluster": [], "simulated": []}
    for name, counts in SIMULATED_POOLS.items():
        for seconds in (0.5, 5.0, 60.0):
            reported["simulated"].append({"pool": name, **simulate(counts, a.leaves, seconds)})
            print(reported["simulated"][-1], flush=True)
    rng = np.random.default_rng(a.seed)
    with start_pool(len(a.speeds)) as client, tempfile.TemporaryDirectory() as folder:
        x = rng.normal(size=(LEAF_ROWS * a.leaves, 8)).astype("f4")
        dataset = Dataset.from_arrays(x).save(Path(folder) / "rows", chunk_rows=LEAF_ROWS * 16)
        for seconds in a.seconds:
            found = {"ideal_seconds_per_pass": seconds}
            for name, unequal in (("equal_shares", float("inf")), ("measured_shares", pools.UNEQUAL)):
                before, pools.UNEQUAL = pools.UNEQUAL, unequal
                try:
                    found[name] = summarise(
                        measure_passes(client, dataset, tuple(a.speeds), seconds, a.passes)
                    )
                finally:
                    pools.UNEQUAL = before
            reported["cluster"].append(found)
            print(found, flush=True)
    write(a.out, a.seed, reported)


if __name__ == "__main__":
    main()
