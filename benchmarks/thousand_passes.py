"""Measure the growth of memory, tasks and files over thousands of passes on a cluster.

    python benchmarks/thousand_passes.py [--passes 3000]

Scheduler, two workers and the driver are separate processes on loopback. Every 20 passes the script reads
the resident memory of each process. Dask keeps its last 1,000 events and task transitions, so all processes
grow slightly during the first thousand passes. The results are the growth over the last half of the passes,
in bytes per pass, and the largest numbers of tasks, futures and files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
import psutil
from distributed import Client

import scalelatent as sl
from scalelatent.deploy.clusters import close_cluster, start_cluster

# Number of passes between two readings of the memory.
PASSES_BETWEEN_READINGS = 20


def read_resident_size(pid: int | None = None) -> int:
    """Return the bytes of resident memory of a process; None means this process."""
    return int(psutil.Process(pid).memory_info().rss)


def serve(ready: Any, ended: Any) -> None:
    """Run the scheduler and the workers in this process until ``ended`` is set."""
    cluster = start_cluster(workers=2, threads=1, dashboard_address=None)
    ready.put((cluster.scheduler_address, os.getpid()))
    ended.wait()
    close_cluster(cluster)


class MemorySizes(sl.Callback):
    """Callback that records the memory of all processes, and the numbers of tasks and files."""

    def __init__(self, client: Client, scheduler: int, run: Path) -> None:
        self.client, self.scheduler, self.run = client, scheduler, run
        self.seen: list[dict[str, float]] = []

    def on_pass_end(self, record: dict[str, Any]) -> None:
        if record["pass"] % PASSES_BETWEEN_READINGS:
            return
        workers = self.client.run(read_resident_size).values()
        tasks = self.client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))
        self.seen.append(
            {
                "pass": record["pass"],
                "driver": read_resident_size(),
                "scheduler": read_resident_size(self.scheduler),
                "worker": max(workers),
                "tasks": tasks,
                "futures": len(self.client.futures),
                "files": sum(1 for _ in (self.run / "engine").iterdir()),
            }
        )


def compute_growth(seen: list[dict[str, float]], process: str) -> dict[str, Any]:
    """Return MiB of ``process`` after each fifth of the fit, and growth in bytes per pass (last half)."""
    fifths = [seen[len(seen) * k // 5 - 1] for k in range(1, 6)]
    half = seen[len(seen) // 2 :]
    slope = np.polyfit([row["pass"] for row in half], [row[process] for row in half], 1)[0]
    return {
        "mib": {str(row["pass"]): round(row[process] / 2**20, 1) for row in fifths},
        "bytes_a_pass": round(float(slope)),
    }


def measure(passes: int, rows: int, seed: int) -> dict[str, Any]:
    """Return the memory growth of each process in a fit, and the largest numbers of tasks and files."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    ready, ended = context.SimpleQueue(), context.Event()
    server = context.Process(target=serve, args=(ready, ended))
    server.start()
    folder = Path(tempfile.mkdtemp(prefix="scalelatent-thousand-"))
    try:
        address, scheduler = ready.get()
        rng = np.random.Generator(np.random.Philox(seed))
        x, y = rng.normal(size=(rows, 16)).astype("f4"), rng.integers(0, 4, rows)
        train = sl.Dataset.from_arrays(x, y).save(folder / "train.zarr")
        with Client(address, timeout=30, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            sizes, begin = MemorySizes(client, scheduler, folder / "run"), time.perf_counter()
            model = sl.CapsuleRegression(
                architecture="multiclass",
                capsule_dim=2,
                max_iter=passes,
                nu_schedule=None,
                tol=None,
                projection=None,
                random_state=seed,
            ).fit(train, client=client, run_dir=folder / "run", callbacks=[sizes])
            seconds = time.perf_counter() - begin
        most = {what: max(row[what] for row in sizes.seen) for what in ("tasks", "futures", "files")}
        return {
            "passes": model.n_iter_,
            "rows": rows,
            "seconds": round(seconds, 1),
            **{what: compute_growth(sizes.seen, what) for what in ("scheduler", "driver", "worker")},
            **{f"most_{what}": value for what, value in most.items()},
        }
    finally:
        ended.set()
        server.join(60)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    arguments = common.parser(__doc__, "thousand_passes")
    arguments.add_argument("--passes", type=int, default=3000)
    arguments.add_argument("--rows", type=int, default=2_000)
    given = arguments.parse_args()
    results = measure(given.passes, given.rows, given.seed)
    for key, value in results.items():
        print(key, value)
    common.write(given.out, given.seed, results)


if __name__ == "__main__":
    main()
