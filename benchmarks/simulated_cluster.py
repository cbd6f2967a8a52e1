"""Measure the cost of the loops of a fit for the scheduler, on a simulated cluster of up to 1,000 workers.

    python benchmarks/simulated_cluster.py [--loops batch paced online map] [--workers 10 100 1000]

The scheduler is a real one in a separate process. The workers are real Worker objects of Dask, many in each
of a few processes. They exchange the messages of 1,000 machines, but their spans (ranges of rows of one task)
have few rows. The results are the messages, and the CPU seconds of the scheduler and of the driver (the
process that runs the fit), for a pass, a step and a map. From the cost of a task follow the number of workers
that one job can keep busy, and the shortest useful duration of its spans.

batch   Passes of a batch learner whose spans only count their rows.
paced   Passes with --paced workers and spans of one second.
online  Steps of a minibatch learner for each number of workers: each of --chains chains (sequences of
        minibatches) on its own worker; or, with one chain, all steps of a segment on one worker.
map     An output of --shards shards for each worker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, write_part

# A span (range of rows of one task) has this number of rows, with this number of features.
LEAF_ROWS, FEATURES = 8, 4
# Options of Dask: services whose cost depends on the machine are turned off, and time limits are long.
DASK_OPTIONS = {
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.admin.system-monitor.interval": "1 hour",
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.comm.timeouts.connect": "120s",
    "distributed.comm.timeouts.tcp": "600s",  # All workers share two cores, so that answers may take minutes.
    "distributed.scheduler.worker-ttl": None,
}
# Number of workers that a process starts at the same time, and largest number of workers in a process.
WORKERS_AT_ONCE, PROCESS_WORKERS = 25, 250


def run_scheduler(pipe: Any) -> None:
    import dask
    from distributed import Scheduler

    async def serve() -> None:
        async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
            pipe.send(scheduler.address)
            await scheduler.finished()

    logging.getLogger("distributed").setLevel(logging.WARNING)
    with dask.config.set(DASK_OPTIONS):
        asyncio.run(serve())


def run_workers(address: str, names: range, threads: int, pipe: Any) -> None:
    import dask
    import idle_learner  # noqa: F401  Workers find the classes of online tasks in this module.
    import simulated_learner  # noqa: F401  Workers find the classes of passes and maps in this module.
    from distributed import Worker

    class WorkerWithoutServer(Worker):
        def start_http_server(self, *args: Any, **how: Any) -> None:
            """Start no server, because 1,000 web servers in one process measure nothing."""

    async def serve() -> None:
        pool = ThreadPoolExecutor(threads)
        common = {"nthreads": 1, "host": "127.0.0.1", "memory_limit": 0, "executor": pool}
        # Without this limit each worker keeps a connection to every other, a million in total.
        workers = [WorkerWithoutServer(address, name=name, connection_limit=4, **common) for name in names]
        for i in range(0, len(names), WORKERS_AT_ONCE):
            await asyncio.gather(*workers[i : i + WORKERS_AT_ONCE])
        pipe.send(len(names))
        await asyncio.gather(*(worker.finished() for worker in workers))

    logging.getLogger("distributed").setLevel(logging.WARNING)
    with dask.config.set(DASK_OPTIONS):
        asyncio.run(serve())


@contextmanager
def start_simulated_cluster(count: int, threads: int = 0) -> Any:
    """Yield a client of ``count`` simulated workers.

    All workers of a process share ``threads`` threads; 0 means one thread per worker.
    """
    import dask
    from distributed import Client

    context, begin = multiprocessing.get_context("spawn"), time.monotonic()
    mine, theirs = context.Pipe()
    processes = [context.Process(target=run_scheduler, args=(theirs,), daemon=True)]
    processes[0].start()
    try:
        address = receive(mine, 60)
        for i in range(0, count, PROCESS_WORKERS):
            names = range(i, min(count, i + PROCESS_WORKERS))
            processes.append(
                context.Process(
                    target=run_workers, args=(address, names, threads or len(names), theirs), daemon=True
                )
            )
            processes[-1].start()
        for _ in processes[1:]:
            receive(mine, 600)
        with dask.config.set(DASK_OPTIONS), Client(address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(count, timeout=120)
            print(f"{count} workers after {time.monotonic() - begin:.0f} s", flush=True)
            yield client
    finally:
        for process in reversed(processes):
            process.terminate()
            process.join(30)


def receive(pipe: Any, seconds: float) -> Any:
    if not pipe.poll(seconds):
        raise SystemExit(f"a process of the simulated cluster sent nothing within {seconds} s")
    return pipe.recv()


def retry(make: Callable[[], Any], times: int = 5) -> Any:
    """Return ``make()``; call it again, up to ``times`` times in all, if it raises RunError.

    ``make`` may exceed a time limit, because tasks on 1,000 workers in few processes start slowly.
    """
    from scalelatent.errors import RunError

    for _ in range(times - 1):
        with suppress(RunError):
            return make()
    return make()


def count_messages(dask_scheduler: Any) -> None:
    """Make the scheduler count its incoming and outgoing messages by operation."""
    import inspect

    received, sent = Counter(), Counter()
    dask_scheduler.simulated = {"in": received, "out": sent}

    def wrap_handler(name: str, handler: Any) -> Any:
        def count(*args: Any, **how: Any) -> Any:
            received[name] += 1
            return handler(*args, **how)

        async def count_and_wait(*args: Any, **how: Any) -> Any:
            received[name] += 1
            return await handler(*args, **how)

        return count_and_wait if inspect.iscoroutinefunction(handler) else count

    for name, handler in list(dask_scheduler.stream_handlers.items()):
        dask_scheduler.stream_handlers[name] = wrap_handler(name, handler)
    send = dask_scheduler.send_all

    def send_and_count(client_msgs: Any, worker_msgs: Any) -> Any:
        for messages in (*client_msgs.values(), *worker_msgs.values()):
            sent.update(message["op"] for message in messages)
        return send(client_msgs, worker_msgs)

    dask_scheduler.send_all = send_and_count


def read_meter(dask_scheduler: Any) -> dict[str, Any]:
    import time

    import psutil

    counts = {way: dict(counter) for way, counter in dask_scheduler.simulated.items()}
    return {
        "cpu": time.process_time(), "wall": time.monotonic(), "tasks": len(dask_scheduler.tasks),
        "transitions": dask_scheduler.transition_counter, "rss": psutil.Process().memory_info().rss, **counts,
    }  # fmt: skip


class MeterReadings:
    """Reader of the scheduler's counters after every pass, or after every report of some steps."""

    def __init__(self, client: Any) -> None:
        from scalelatent import Callback

        readings = self
        self.client, self.taken = client, []

        class ReadAfterPass(Callback):
            def on_pass_end(self, record: dict[str, Any]) -> None:
                readings.take_reading()

            def on_report(self, record: dict[str, Any]) -> None:
                readings.take_reading()

        self.callback = ReadAfterPass()

    def take_reading(self) -> None:
        self.taken.append(self.client.run_on_scheduler(read_meter) | {"driver": time.process_time()})


def measure(dataset: Any, count: int, passes: int, seconds: float, numbers: int) -> dict[str, Any]:
    from simulated_learner import CountLearner

    from scalelatent.engine.batch_loop import fit_batches
    from scalelatent.engine.callbacks import Callbacks
    from scalelatent.engine.checkpoints import EngineStore
    from scalelatent.engine.dask.executor import DaskExecutor
    from scalelatent.engine.passes import make_stage

    # Tasks that sleep need one thread each. Without sleep, two threads per process are enough for two cores.
    with (
        start_simulated_cluster(count, 0 if seconds else 2) as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        client.run_on_scheduler(count_messages)
        idle = measure_idle_share(client)
        learner = CountLearner(numbers, passes + 2, seconds)
        stage = make_stage(
            "simulated_estep", learner, {"train": dataset}, "cpu", block_rows=LEAF_ROWS, leaf_rows=LEAF_ROWS
        )
        store = EngineStore(folder)
        executor = retry(lambda: DaskExecutor(client, store, checkpoint_seconds=3600))
        spans = len(executor.list_spans(stage))
        readings = MeterReadings(client)
        fit_batches(executor, stage, learner.start(), callbacks=Callbacks(readings.callback), store=store)
    # Differences of readings exclude the first pass, which starts threads. The last pass is excluded here,
    # because no other pass starts during it.
    return {"workers": count, "spans": spans, "idle_scheduler_share": idle} | summarise(
        readings.taken[:-1], spans
    )


def measure_steps(
    dataset: Any, count: int, chains: list[int], steps: int, numbers: int
) -> Iterator[dict[str, Any]]:
    """Yield messages and CPU seconds of steps that compute nothing, for each number of chains."""
    from idle_learner import IdleLearner

    from scalelatent.engine.callbacks import Callbacks
    from scalelatent.engine.checkpoints import EngineStore
    from scalelatent.engine.dask.executor import DaskExecutor
    from scalelatent.engine.online_loop import fit_online
    from scalelatent.engine.order import RowOrder
    from scalelatent.engine.passes import make_stage

    with start_simulated_cluster(count, 2) as client:
        client.run_on_scheduler(count_messages)
        idle = measure_idle_share(client)
        for n in (n for n in chains if n <= count):
            # With one chain, one task runs many steps, so that a report covers more of them.
            batch, every = 2 * n, steps if n > 1 else 50 * steps
            rows = dataset[: batch * every * 4]
            stage = make_stage("simulated_step", IdleLearner(numbers), {"train": rows}, "cpu")
            with tempfile.TemporaryDirectory() as folder:
                store = EngineStore(folder)
                executor = retry(lambda store=store: DaskExecutor(client, store, checkpoint_seconds=3600))
                executor.spread = "all" if n > 1 else "one"
                readings = MeterReadings(client)
                fit_online(
                    executor, stage, IdleLearner(numbers).start(),
                    order=RowOrder(len(rows), 0, batch, n_chains=n), n_epochs=1,
                    callbacks=Callbacks(readings.callback), store=executor.store, report_steps=every,
                )  # fmt: skip
            found = {"workers": count, "chains": n, "steps": every, "idle_scheduler_share": idle}
            yield found | summarise(readings.taken[:4], every * n)


def measure_map(dataset: Any, count: int, shards: int) -> dict[str, Any]:
    """Return messages and CPU seconds of a map (it writes an output per row), several shards per worker.

    The second of two maps counts, because the first one starts threads and opens files.
    """
    from simulated_learner import EchoMap

    from scalelatent.engine.checkpoints import EngineStore
    from scalelatent.engine.dask.executor import DaskExecutor
    from scalelatent.engine.mapwrite import map_rows, start_map

    with start_simulated_cluster(count, 2) as client, tempfile.TemporaryDirectory() as folder:
        client.run_on_scheduler(count_messages)
        idle = measure_idle_share(client)
        rows = dataset[: shards * count * LEAF_ROWS]
        store = EngineStore(Path(folder) / "run")
        executor = retry(lambda: DaskExecutor(client, store))
        readings = MeterReadings(client)
        for turn in range(2):
            place = Path(folder) / f"out-{turn}"
            layout = {"shard_rows": LEAF_ROWS, "chunk_rows": LEAF_ROWS}
            task = start_map(f"simulated_map-{turn}", rows, EchoMap(FEATURES), place, "cpu", **layout)
            readings.take_reading()
            map_rows(executor, task, lambda done, total: None)
        readings.take_reading()
    found = {"workers": count, "shards": shards * count, "idle_scheduler_share": idle}
    return found | summarise(readings.taken[1:], shards * count)


def measure_idle_share(client: Any, seconds: float = 5.0) -> float:
    """Return the share of a core that the scheduler needs for heartbeats while nothing is computed."""
    time.sleep(2)
    before = client.run_on_scheduler(read_meter)
    time.sleep(seconds)
    after = client.run_on_scheduler(read_meter)
    return round((after["cpu"] - before["cpu"]) / (after["wall"] - before["wall"]), 4)


def summarise(taken: list[dict[str, Any]], spans: int) -> dict[str, Any]:
    pairs = list(itertools.pairwise(taken))

    def list_differences(name: str) -> list[float]:
        return [b[name] - a[name] for a, b in pairs]

    def count_per_pass(way: str) -> dict[str, int]:
        ops = {op for reading in taken for op in reading[way]}
        per_pass = {
            op: statistics.median(b[way].get(op, 0) - a[way].get(op, 0) for a, b in pairs) for op in ops
        }
        return {op: round(n) for op, n in sorted(per_pass.items(), key=lambda item: -item[1]) if n >= 1}

    shares = [c / w for c, w in zip(list_differences("cpu"), list_differences("wall"), strict=True)]
    tasks = count_per_pass("out").get("compute-task", spans)
    cpu, wall = min(list_differences("cpu")), min(list_differences("wall"))
    received, sent = count_per_pass("in"), count_per_pass("out")
    return {
        "tasks_per_pass": tasks,
        "seconds_per_pass": round(wall, 3),
        "scheduler_cpu_seconds_per_pass": round(cpu, 4),
        "scheduler_cpu_ms_per_task": round(1e3 * cpu / tasks, 4),
        "scheduler_share_of_a_core": round(statistics.median(shares), 3),
        "driver_cpu_ms_per_task": round(1e3 * min(list_differences("driver")) / tasks, 4),
        "messages_per_pass": sum(received.values()) + sum(sent.values()),
        "messages_in": received,
        "messages_out": sent,
        "transitions_per_task": round(statistics.median(list_differences("transitions")) / tasks, 1),
        "scheduler_mib": round(taken[-1]["rss"] / 2**20),
    }  # fmt: skip


def compute_bounds(found: dict[str, Any]) -> dict[str, Any]:
    """Return the number of workers that a scheduler keeps busy, by the seconds of a task, and other bounds.

    This number does not depend on the rows, because the engine makes 4 to 32 tasks per thread in a pass.
    """
    # Heartbeats during the pass are subtracted, because their number depends on this machine.
    beats = found["idle_scheduler_share"] * found["seconds_per_pass"]
    cost = 1e3 * (found["scheduler_cpu_seconds_per_pass"] - beats) / found["spans"]
    reported = {
        f"{seconds} s": {
            "workers_at_5_percent_of_a_core": int(0.05 * seconds / cost * 1e3),
            "workers_at_half_a_core": int(0.5 * seconds / cost * 1e3),
        }
        for seconds in (0.1, 1, 10, 60)
    }
    return {
        "scheduler_cpu_ms_per_span_merges_included": round(cost, 3),
        "spans_per_second_at_half_a_core": int(0.5e3 / cost),
        "by_seconds_of_a_span": reported,
        "shortest_span_seconds_at_half_a_core": round(found["workers"] * cost / 1e3 / 0.5, 2),
    }


def main() -> None:
    arguments = parser(__doc__, "simulated_cluster")
    arguments.add_argument("--loops", nargs="+", default=["batch", "paced", "online", "map"])
    arguments.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    arguments.add_argument("--passes", type=int, default=4, help="number of measured passes; two more run")
    arguments.add_argument("--paced", type=int, default=200, help="number of workers in the part paced")
    arguments.add_argument("--chains", type=int, nargs="+", default=[1, 8, 32, 100])
    arguments.add_argument("--steps", type=int, default=4, help="steps of each of four reports")
    arguments.add_argument("--shards", type=int, default=4, help="shards of a map for each worker")
    arguments.add_argument(
        "--numbers", type=int, default=1000, help="number of float64 values of the statistic and the state"
    )
    a = arguments.parse_args()
    import numpy as np

    from scalelatent import Dataset

    longest = max(max(4, a.shards) * LEAF_ROWS * max(*a.workers, a.paced), 8 * a.steps * max(50, *a.chains))
    x = np.zeros((longest, FEATURES), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        dataset = Dataset.from_arrays(x).save(Path(folder) / "rows", chunk_rows=LEAF_ROWS * 64)

        def measure_passes(count: int, number: int, seconds: float) -> dict[str, Any]:
            found = measure(dataset[: 4 * LEAF_ROWS * count], count, number, seconds, a.numbers)
            return found | {"bounds": compute_bounds(found)}

        def record(name: str, found: dict[str, Any]) -> None:
            print(found, flush=True)
            write_part(a.out, name, a.seed, found)

        if "paced" in a.loops:
            record("paced", measure_passes(a.paced, max(2, a.passes // 2), 1.0))
        for count in a.workers:
            if "batch" in a.loops:
                record(f"batch {count}", measure_passes(count, a.passes, 0.0))
            if "online" in a.loops:
                for found in measure_steps(dataset, count, a.chains, a.steps, a.numbers):
                    record(f"online {count} by {found['chains']}", found)
            if "map" in a.loops:
                record(f"map {count}", measure_map(dataset, count, a.shards))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
