"""Measure the cost of running a job on a cluster: time to the first task, CPU of driver and scheduler.

    python benchmarks/submit.py

A span is the range of rows of one task. The driver is the task that runs the loop of a fit. Scheduler and
workers are separate processes on loopback. After two first jobs, which compile and load code, each round
submits one job from the command line (a new process) and one from this process. The CPU shares of driver and
scheduler are measured in a fit whose spans take about one second. The result also has the bytes of each kind
of task.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
from distributed import Client, SchedulerPlugin

from scalelatent.data import make_digits
from scalelatent.jobs.control import follow
from scalelatent.jobs.resolve import resolve
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.submit import submit_job

# Number of rows of a span (task) in the fit whose CPU shares are measured: about one second of work.
LEAF_ROWS = 2**19
# The scheduler plugin logs Dask events under this topic, and this process reads them.
TOPIC = "benchmark"


class FirstSpanRecorder(SchedulerPlugin):
    """Scheduler plugin that logs when the first task of a fit starts and ends, and the bytes of tasks."""

    name = "first-spans"

    def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.seen: set[tuple[str, str]] = set()
        self.sizes: dict[str, int] = {}

    def transition(self, key: Any, start: str, finish: str, *args: Any, **more: Any) -> None:
        from distributed.protocol.pickle import dumps

        name = str(key)
        if finish == "processing":
            prefix = "driver" if name.startswith("scalelatent-job") else name.split("-")[0]
            size = len(dumps(self.scheduler.tasks[key].run_spec))
            if size > self.sizes.get(prefix, 0):
                self.sizes[prefix] = size
                self.scheduler.log_event(f"{TOPIC}-sizes", dict(self.sizes))
        if name.startswith("capsule_moments") and finish in ("processing", "memory"):
            fit = name.rsplit("-", 1)[1]
            if (fit, finish) not in self.seen:
                self.seen.add((fit, finish))
                self.scheduler.log_event(TOPIC, {"what": finish, "time": time.time()})


def make_job(
    folder: Path, name: str, rows: str, scheduler: str, leaf_rows: int | None = None, **model: Any
) -> Any:
    return resolve(
        {
            "job": {"out": str(folder / name), "seed": 0},
            "data": {"train": str(folder / rows)},
            "model": {"kind": "capsule", "nu_schedule": "none", **model},
            "cluster": {"scheduler": scheduler},
            **({"engine": {"leaf_rows": leaf_rows}} if leaf_rows else {}),
        },
        environ={},
    )


def write_job_file(folder: Path, name: str, rows: str, **model: Any) -> Path:
    path = folder / f"{name}.toml"
    lines = [f"{key} = {value!r}" for key, value in model.items()]
    path.write_text(
        f'[job]\nout = "{folder / name}"\nseed = 0\n[data]\ntrain = "{folder / rows}"\n'
        + '[model]\nkind = "capsule"\nnu_schedule = "none"\n'
        + "\n".join(lines)
        + "\n"
    )
    return path


def start_cluster(folder: Path, workers: int) -> tuple[str, list[subprocess.Popen[bytes]]]:
    log = open(folder / "dask.log", "ab")  # noqa: SIM115  The processes write to it until they end.
    file = folder / "scheduler.json"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}

    def run(*words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", *words], stdout=log, stderr=log, env=environ)

    processes = [
        run(
            "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0",
            "--scheduler-file", str(file), "--dashboard-address", "127.0.0.1:0",
        )
    ]  # fmt: skip
    deadline = time.monotonic() + 60
    while not (file.exists() and file.stat().st_size):
        if time.monotonic() > deadline:
            raise SystemExit(f"the scheduler did not start; see {folder / 'dask.log'}")
        time.sleep(0.05)
    address = json.loads(file.read_text())["address"]
    processes += [
        run(
            "distributed.cli.dask_worker", address, "--nthreads", "1", "--no-dashboard",
            "--memory-limit", "0", "--local-directory", str(folder),
        )
        for _ in range(workers)
    ]  # fmt: skip
    return address, processes


def measure_first_spans(client: Client, folder: Path, address: str, rounds: int) -> dict[str, Any]:
    """Return seconds from the start of a command or call to its end, and to the job's first task (span)."""
    found: dict[str, list[dict[str, float]]] = {"command line": [], "submit_job": []}
    for i in range(rounds):
        for way in found:
            name = f"{way.split()[0]}-{i}"
            before = len(client.get_events(TOPIC))
            begin = time.time()
            if way == "command line":
                file = write_job_file(folder, name, "small.zarr", capsule_dim=4, max_iter=3)
                words = ["-m", "scalelatent", "submit", str(file), "--scheduler", address]
                subprocess.run([sys.executable, *words], check=True, capture_output=True, timeout=120)
            else:
                submit_job(
                    make_job(folder, name, "small.zarr", address, capsule_dim=4, max_iter=3), client=client
                )
            returned = time.time()
            follow(RunFolder.open(folder / name), poll=0.1)
            events = [event for _, event in client.get_events(TOPIC)[before:]]
            times = {event["what"]: event["time"] - begin for event in events}
            found[way].append(
                {"id_seconds": returned - begin, "begins": times["processing"], "ends": times["memory"]}
            )
            print(name, {key: round(value, 2) for key, value in found[way][-1].items()}, flush=True)
    return {
        way: {f"{key} (fastest)": min(r[key] for r in rows) for key in rows[0]}
        | {f"{key} (slowest)": max(r[key] for r in rows) for key in rows[0]}
        for way, rows in found.items()
    }


def measure_driver_threads(dask_worker: Any = None) -> dict[str, float]:
    """Return the CPU seconds of the threads with which a worker runs the driver of a job, by thread name."""
    import threading

    import psutil

    times = {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}
    found = {}
    main = threading.main_thread().native_id
    for thread in threading.enumerate():
        ours = thread.name.startswith(("scalelatent-", "run-folder-"))
        if ours or (thread.name.startswith("IO loop") and thread.native_id != main):
            found[f"{thread.name} {thread.native_id}"] = times.get(thread.native_id, 0.0)
    return found


def measure_shares(
    client: Client, folder: Path, address: str, scheduler: int, rows: int, seconds: float
) -> Any:
    """Return the CPU seconds per second of driver and scheduler while a fit runs for ``seconds`` seconds."""
    import psutil

    process = psutil.Process(scheduler)
    how = {"leaf_rows": LEAF_ROWS, "capsule_dim": 32, "max_iter": 10_000}
    submitted = submit_job(make_job(folder, "large", "large.zarr", address, **how), client=client)
    run = RunFolder.open(submitted.run)
    while len(run.records("metrics.jsonl")) < 2:
        time.sleep(0.2)
    worker = run.read_state()["driver"]

    def take_sample() -> tuple[float, float, float, int]:
        threads = client.run(measure_driver_threads, workers=[worker])[worker]
        cpu = process.cpu_times()
        return (
            time.monotonic(),
            sum(threads.values()),
            cpu.user + cpu.system,
            len(run.records("metrics.jsonl")),
        )

    first = take_sample()
    time.sleep(seconds)
    last = take_sample()
    spans = client.run_on_scheduler(
        lambda dask_scheduler: dask_scheduler.task_prefixes["capsule_estep"].duration_average
    )
    subprocess.run(
        [sys.executable, "-m", "scalelatent", "cancel", submitted.run],
        check=True,
        capture_output=True,
        timeout=60,
    )
    wall = last[0] - first[0]
    return {
        "rows": rows,
        "seconds": wall,
        "passes": last[3] - first[3],
        "span_seconds": spans,
        "driver_share_of_a_core": (last[1] - first[1]) / wall,
        "scheduler_share_of_a_core": (last[2] - first[2]) / wall,
    }


def main() -> None:
    arguments = common.parser(__doc__, "submit")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument(
        "--rows", type=int, default=2_000_000, help="number of rows of the fit whose shares are measured"
    )
    arguments.add_argument(
        "--seconds", type=float, default=20.0, help="seconds during which the shares are measured"
    )
    given = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="benchmark-submit-"))
    make_digits(str(folder / "small.zarr"), 20_000, base_rows=(0, 1500))
    make_digits(str(folder / "large.zarr"), given.rows, base_rows=(0, 1500))
    address, processes = start_cluster(folder, given.workers)
    try:
        with Client(address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(given.workers, timeout=60)
            client.register_plugin(FirstSpanRecorder())
            for i in range(2):  # These jobs compile and load code on every worker.
                submit_job(
                    make_job(folder, f"warm-{i}", "small.zarr", address, capsule_dim=4, max_iter=3),
                    client=client,
                )
                follow(RunFolder.open(folder / f"warm-{i}"))
            results = {
                "workers": given.workers,
                "submit_to_first_span_seconds": measure_first_spans(client, folder, address, given.rounds),
                "fit": measure_shares(client, folder, address, processes[0].pid, given.rows, given.seconds),
                "task_bytes": client.get_events(f"{TOPIC}-sizes")[-1][1],
            }
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(results, indent=1))
    common.write(given.out, given.seed, results)


if __name__ == "__main__":
    main()
