"""Measure passes out of core and on Dask, compared with passes in one process and in memory.

    python benchmarks/streamed_pass.py FOLDER [--parts overlap dask kept memory pairs]

D is the total dimension of ten capsules, which sets how much a pass computes per row.

overlap  Seconds of three passes over stored float32 rows: one that only reads, one that only computes (all
         rows cached), and one that does both. The last one should take hardly longer than the slower of the
         others. A fourth pass reads the rows into new memory.
dask     Seconds per pass over 1,000,000 rows of 196 features, all cached after the first pass: in one
         process with 2 threads, and on a LocalCluster of 2 workers with 1 thread. The allowed difference is
         20 ms + 2 ms per span (range of rows of one task).
kept     Seconds per pass over the same rows with two threads in one process: with all rows cached between
         passes, with none, and with the default of the fit.
memory   Largest resident size of a worker with 100,000 and with 1,000,000 rows; the caches are so small that
         both numbers of rows fill them.
pairs    Bytes that a fit of all 45 pairs of classes (all_vs_all) reads per pass without a cache, compared
         with the bytes of the rows.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from common import measure_medians, parser, stored_rows, write_part

import scalelatent as sl
from scalelatent.data.read.chunks import RecyclingAllocator
from scalelatent.deploy.probes import peak_bytes
from scalelatent.engine.backend import make_backend
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.passes import PassContext, Span, list_spans, make_stage, seconds_per_row
from scalelatent.engine.rates import read_seconds
from scalelatent.engine.reading import Meter, Reader, StopEvent, iter_blocks
from scalelatent.engine.threads import single_threaded
from scalelatent.models.capsule.model.em import CapsuleEM, initial_state
from scalelatent.models.capsule.model.members import build_members

FEATURES = 196
# Engine options of fits whose workers cache all rows; the cache may use 0.3 of a worker's memory limit.
CACHE_OPTIONS = {"cache": 0.3}


def make_learner(d: int, seed: int, architecture: str = "multiclass") -> tuple[CapsuleEM, Any]:
    """Return a learner of ten capsules of d dimensions, and its first state; no rows are read."""
    members = build_members(architecture, 10, d)
    moment = np.stack([np.eye(FEATURES)] * 10)
    em = CapsuleEM(members, moment, np.zeros(1), np.array([10**9]), 1, 0.0, 0.0, 0.0, 10**9, None, 0)
    w = np.random.default_rng(seed).normal(size=(members.total_dim, FEATURES)) * 0.05
    return em, initial_state(w, members.n_members)


def read_all(dataset: sl.Dataset, blocks: list[tuple[int, int]]) -> None:
    """Read all rows, block by block, with one thread, and compute nothing."""
    for _ in iter_blocks(Reader(dataset, None, Meter()), blocks, StopEvent()):
        pass


def run_with_fresh_pages(call: Callable[[], Any]) -> None:
    """Run a pass that allocates new memory for each block of rows; other passes use the same memory again."""
    with patch.object(RecyclingAllocator, "empty", lambda self, shape, dtype: np.empty(shape, dtype)):
        call()


def time_pass(context: PassContext) -> tuple[float, float]:
    """Run a pass; return the CPU seconds of the computing thread and the seconds that it waits for rows."""
    (grid,) = context.stage.grids.values()
    begin = time.thread_time()
    context.run_span(Span("train", grid.depth, 0), StopEvent())
    return time.thread_time() - begin, context.meter.wait_seconds


def measure_overlap(folder: Path, rows: int, seed: int) -> list[dict[str, float]]:
    """Return the seconds of passes that only read, only compute, or do both, with one computing thread."""
    dataset, out = stored_rows(folder, rows, seed), []
    for d in (2, 8, 32):
        em, state = make_learner(d, seed)
        stage = make_stage("capsule_estep", em, {"train": dataset}, "cpu", dataset.classes)
        grid = stage.grids["train"]
        cold = InProcessExecutor(1, cache=PieceCache(0))
        warm = InProcessExecutor(1, cache=PieceCache(2**34))

        def run_step(executor: InProcessExecutor, stage: Any = stage, state: Any = state) -> None:
            executor.step(stage, 0, state, lambda done, total: None)

        with single_threaded():
            works = {
                "read_only_s": partial(read_all, dataset, grid.blocks(0, grid.n_rows)),
                "compute_only_s": partial(run_step, warm),
                "pass_s": partial(run_step, cold),
                "pass_fresh_pages_s": partial(run_with_fresh_pages, partial(run_step, cold)),
            }
            record = {"D": 10 * d} | measure_medians(works, 15 if d == 2 else 5)
            # A pass may take longer than reading or computing alone because it waits for rows, or because it
            # computes more slowly while the other core reads. These two numbers distinguish both causes.
            alone = [
                time_pass(PassContext(stage, state, make_backend("cpu"), PieceCache(0))) for _ in range(5)
            ]
            names = "computing_thread_cpu_s", "waited_for_rows_s"
            record |= dict(zip(names, np.median(alone, axis=0).tolist(), strict=True))
        record["ratio"] = record["pass_s"] / max(record["read_only_s"], record["compute_only_s"])
        out.append({k: round(v, 4) for k, v in record.items()})
        print(out[-1], flush=True)
    return out


class PassSeconds(sl.Callback):
    """Callback that records seconds and bytes of each pass, and the CPU time of this process after it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        self.cpu: list[float] = []

    def on_pass_end(self, record: dict[str, Any]) -> None:
        self.seconds.append(record["seconds"])
        self.bytes.append(record["bytes_read"])
        self.cpu.append(time.process_time())


def time_fit(
    dataset: sl.Dataset, passes: int, d: int, architecture: str = "multiclass", **where: Any
) -> PassSeconds:
    """Fit capsules by plain EM; return the recorder of the seconds of each pass."""
    seconds = PassSeconds()
    model = sl.CapsuleRegression(
        capsule_dim=d,
        architecture=architecture,
        nu_schedule=None,
        momentum=0,
        max_iter=passes,
        random_state=0,
        n_jobs=2,
    )
    model.fit(dataset, callbacks=[seconds], **where)
    return seconds


def time_fit_on_cluster(
    dataset: sl.Dataset, d: int, client: Any
) -> tuple[list[float], list[float], list[float]]:
    """Fit on a cluster; return seconds, idle seconds of the busiest worker, and CPU seconds of each pass.

    The CPU seconds are those of this process, which runs the driver and the scheduler.
    """
    from distributed import get_task_stream

    with get_task_stream(client=client) as stream:
        reported = time_fit(dataset, 12, d, client=client, engine=CACHE_OPTIONS)
    seconds = reported.seconds
    busy: dict[tuple[int, str], float] = {}
    for task in stream.data:
        name = task["key"].split("-")
        if name[0] == "capsule_estep":
            for part in task["startstops"]:
                if part["action"] == "compute":
                    key = (int(name[1][2:]), task["worker"])
                    busy[key] = busy.get(key, 0.0) + part["stop"] - part["start"]
    most = {i: max(v for (j, _), v in busy.items() if j == i) for i, _ in busy}
    # Some tasks of a pass after the last one may have run before they were cancelled; skip that pass.
    idle = [seconds[i - 1] - most[i] for i in sorted(most)[2:] if i <= len(seconds)]
    return seconds[2:], idle, np.diff(reported.cpu)[1:].tolist()


def measure_dask_overhead(folder: Path, rows: int, seed: int) -> list[dict[str, float]]:
    """Return the seconds of passes in one process and on a cluster; fits of both kinds alternate."""
    dataset, out = stored_rows(folder, rows, seed), []
    with sl.cluster("local", workers=2, memory_limit="6GB", dashboard_address=None) as client:
        for d in (2, 8):
            em, _ = make_learner(d, seed)
            spans = len(
                list_spans(make_stage("capsule_estep", em, {"train": dataset}, "cpu", dataset.classes), 2)
            )
            here, there, idle, driver = [], [], [], []
            for _ in range(3):
                seconds, not_computing, cpu = time_fit_on_cluster(dataset, d, client)
                there, idle, driver = there + seconds, idle + not_computing, driver + cpu
                with without_current_client():
                    here += time_fit(dataset, 12, d, engine=CACHE_OPTIONS).seconds[2:]
            record = {
                "D": 10 * d,
                "spans": spans,
                "in_process_s": float(np.median(here)),
                "cluster_s": float(np.median(there)),
                "in_process_fastest_s": min(here),
                "cluster_fastest_s": min(there),
                "allowed_difference_s": 0.020 + 0.002 * spans,
            }
            # Idle seconds of the busiest worker: scheduling, parameters, merging, M-step and driver.
            record["not_computing_s"] = float(np.median(idle))
            record["driver_cpu_s"] = float(np.median(driver))
            record["difference_s"] = record["cluster_s"] - record["in_process_s"]
            # Workers, scheduler and driver share two cores, so that seconds on the cluster vary; therefore
            # the fastest passes are compared as well.
            record["fastest_difference_s"] = record["cluster_fastest_s"] - record["in_process_fastest_s"]
            out.append({k: round(v, 4) for k, v in record.items()})
            print(out[-1], flush=True)
    return out


def without_current_client() -> Any:
    from contextlib import contextmanager

    from scalelatent.deploy import clusters as cluster

    @contextmanager
    def inner() -> Any:
        token = cluster._current.set(None)
        try:
            yield
        finally:
            cluster._current.reset(token)

    return inner()


def measure_memory(folder: Path, rows: int, seed: int) -> dict[str, float]:
    """Return the peak memory of a worker with a tenth of the rows and with all rows."""
    # With a tenth of the rows, each of two workers reads 37 MiB. A cache of 24 MiB is full even then.
    os.environ["SCALELATENT_CACHE_BYTES"] = str(24 * 2**20)
    out = {}
    for n in (rows // 10, rows):
        dataset = stored_rows(folder, n, seed)
        with sl.cluster("local", workers=2, memory_limit="3GB", dashboard_address=None) as client:
            time_fit(dataset, 5, 8, client=client)
            out[f"peak_mib_{n}"] = max(client.run(peak_bytes).values()) / 2**20
    os.environ.pop("SCALELATENT_CACHE_BYTES")
    out["growth"] = out[f"peak_mib_{rows}"] / out[f"peak_mib_{rows // 10}"] - 1
    print(out, flush=True)
    return {k: round(v, 3) for k, v in out.items()}


def measure_pairs(folder: Path, rows: int, seed: int) -> dict[str, float]:
    """Return the bytes that one pass of all_vs_all reads, and the bytes of the rows."""
    os.environ["SCALELATENT_CACHE_BYTES"] = "0"
    dataset = stored_rows(folder, rows // 10, seed)
    with sl.cluster("local", workers=2, memory_limit="3GB", dashboard_address=None) as client:
        seen = time_fit(dataset, 3, 4, "all_vs_all", client=client).bytes
    os.environ.pop("SCALELATENT_CACHE_BYTES")
    once = len(dataset) * (FEATURES * 4 + 4)
    out = {
        "members": 45,
        "bytes_read_per_pass": seen[-1],
        "bytes_of_rows_and_codes": once,
        "times_read": seen[-1] / once,
    }
    print(out, flush=True)
    return out


def measure_row_cache(folder: Path, rows: int, seed: int) -> list[dict[str, float]]:
    """Return the seconds of passes with a row cache, without one, and by default, while all cores compute."""
    dataset, out = stored_rows(folder, rows, seed), []
    for d in (2, 8, 32):
        stage = make_stage(
            "capsule_estep", make_learner(d, seed)[0], {"train": dataset}, "cpu", dataset.classes
        )
        computing = seconds_per_row(stage.reductions["train"])
        record = {"D": 10.0 * d, "reading_over_computing": read_seconds(dataset) / computing}
        for _ in range(3):
            for name, cache in (("kept_s", 0.3), ("read_again_s", 0), ("default_s", "auto")):
                seconds = time_fit(dataset, 8, d, engine={"cache": cache}).seconds[2:]
                record[name] = min(record.get(name, np.inf), float(np.median(seconds)))
        record["read_again / kept"] = record["read_again_s"] / record["kept_s"]
        out.append({k: round(v, 4) for k, v in record.items()})
        print(out[-1], flush=True)
    return out


PART_FUNCTIONS = {
    "overlap": measure_overlap,
    "dask": measure_dask_overhead,
    "kept": measure_row_cache,
    "memory": measure_memory,
    "pairs": measure_pairs,
}


def main() -> None:
    args = parser(__doc__, "streamed_pass")
    args.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=None,
        help="folder of the rows; a temporary folder by default",
    )
    args.add_argument("--rows", type=int, default=1_000_000)
    args.add_argument("--parts", nargs="+", choices=PART_FUNCTIONS, default=list(PART_FUNCTIONS))
    a = args.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = a.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in a.parts:
            write_part(a.out, name, a.seed, PART_FUNCTIONS[name](folder, a.rows, a.seed))


if __name__ == "__main__":
    main()
