"""Compare the models with other methods on held-out rows.

    python benchmarks/rivals.py                                        measure what results/rivals.json lacks
    python benchmarks/rivals.py --task clustering --method MultilayerBootstrapNetwork --again
    python benchmarks/rivals.py --task classification --set 'digits;USPS' --seeds 1

The six tasks are classification, density with added outliers, clustering, denoising and completion, several
labels, and parts of images. rivals_tasks.py defines their data sets, methods and scores. A unit is one
combination of task, data set, method and seed; it runs in a new process on one thread. Its record is stored
when it ends, so that an interrupted command can be repeated. Seconds are CPU seconds of the choice of
parameters, the fit and the answer for held-out rows. A small fit runs first, so that compilation is not
measured. If a unit exceeds --limit CPU seconds, its record says so, and its other seeds do not run.

Methods from other packages need the extra "bench" (LightGBM, umap-learn, PyTorch). Sets of real data need
the folder SCALELATENT_DATA. Units whose package or data are missing are skipped.
"""

from __future__ import annotations

import os

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
os.environ |= dict.fromkeys(THREADS, "1")

import argparse
import datetime
import json
import logging
import multiprocessing
import resource
import signal
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import parser, write_part
from rivals_tasks import NEEDS, TASKS

# One measurement of the benchmark: (task, data set, method, seed).
Unit = tuple[str, str, str, int]


def measure(unit: Unit, limit: int) -> dict[str, Any]:
    """Return scores and CPU seconds of a unit; the system kills the process after ``limit`` CPU seconds."""
    name, set_name, method, seed = unit
    task = TASKS[name]
    rows = task.sets[set_name](seed)
    run = task.methods[method]
    run(task.first(rows, method), seed)
    begin = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(begin) + limit, hard))
    answer = run(rows, seed)
    seconds = round(time.process_time() - begin, 3)
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    return {**task.score(rows, answer), "cpu_seconds": seconds}


def send_record(sender: Connection, unit: Unit, limit: int) -> None:
    """Measure a unit and send its record to the parent process."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sender.send(measure(unit, limit))


def run_unit(unit: Unit, limit: int) -> dict[str, Any] | None:
    """Return the record of a unit that runs in another process, or None if it failed."""
    fork = multiprocessing.get_context("fork")  # Forking is fast: the modules are not imported again.
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=send_record, args=(sender, unit, limit))
    process.start()
    sender.close()
    try:
        record = receiver.recv()
    except EOFError:
        record = None
    process.join()
    if process.exitcode == -signal.SIGXCPU:
        record = {"over_seconds": limit}
    return record and {**record, "date": datetime.date.today().isoformat()}


def plan_units(args: argparse.Namespace) -> Iterator[Unit]:
    """Yield the units of a command: large sets last, and all units of a seed before the next seed."""
    absent = tuple(name for name, package in NEEDS.items() if find_spec(package) is None)
    for large in (False, True):
        for seed in range(args.seed, args.seed + args.seeds):
            for name, task in TASKS.items():
                for set_name, method in task.list_pairs():
                    wanted = (
                        (not args.task or name in args.task)
                        and (not args.set or set_name in args.set)
                        and (not args.method or method in args.method)
                    )
                    is_now = (set_name in task.large) == large
                    if wanted and is_now and not (absent and method.startswith(absent)):
                        yield name, set_name, method, seed


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Return the records of a file, by "task/set/method" and seed."""
    if not path.exists():
        return {}
    return {part: found["result"] for part, found in json.loads(path.read_text())["parts"].items()}


def is_measured(found: dict[str, Any], seed: int, limit: int) -> bool:
    """Return True if a method has a record of this seed, or has exceeded this limit with any seed."""
    longest = max((record.get("over_seconds", 0) for record in found.values()), default=0)
    return longest >= limit or "cpu_seconds" in found.get(str(seed), {})


def split_names(text: str) -> list[str]:
    """Return the names in a list that is separated by semicolons, because names contain commas."""
    return [name.strip() for name in text.split(";")]


def main() -> None:
    arguments = parser(__doc__, "rivals")
    arguments.add_argument("--task", type=split_names, help="tasks, separated by semicolons")
    arguments.add_argument("--set", type=split_names, help="sets, separated by semicolons")
    arguments.add_argument("--method", type=split_names, help="methods, separated by semicolons")
    arguments.add_argument("--seeds", type=int, default=3, help="number of seeds, from --seed on")
    arguments.add_argument("--limit", type=int, default=300, help="largest CPU seconds of a unit")
    arguments.add_argument("--again", action="store_true", help="repeat units that the file has")
    args = arguments.parse_args()
    for unit in plan_units(args):
        part, seed = "/".join(unit[:3]), unit[3]
        found = read_records(args.out).get(part, {})
        if not args.again and is_measured(found, seed, args.limit):
            continue
        print(f"{part}/{seed}", flush=True)
        record = run_unit(unit, args.limit)
        if record is not None:
            print(record, flush=True)
            write_part(args.out, part, args.seed, found | {str(seed): record})


if __name__ == "__main__":
    main()
