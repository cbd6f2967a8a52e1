"""Estimate the time, memory and disk space of a job before it runs, and refuse a job that cannot fit."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from scalelatent.contract.kinds import find_kind
from scalelatent.deploy.worker_processes import check_numbers, divide_memory
from scalelatent.engine.plan import add_totals, long_fit

from .datasets import JobData, open_job_data
from .job_cluster import check_certificates, connect
from .runner import as_job_error, build_estimator, engine_options
from .searching import plan_candidates
from .spec import ClusterSection, Job

if TYPE_CHECKING:
    from distributed import Client

    from scalelatent.estimators.base import StreamedEstimator

# Seconds outside the fit: start Python and load kernels, start all workers, start each worker, save a model.
START_SECONDS, WORKERS_SECONDS, WORKER_SECONDS, SAVE_SECONDS = 3.0, 2.5, 0.5, 0.2
# Bytes per second for copying results from the run folder into the saved model; bytes of a report on disk;
# bytes of memory for its figures.
COPY_RATE, REPORT_BYTES, FIGURE_BYTES = 5e8, 2 * 10**6, 75 * 2**20

logger = logging.getLogger("scalelatent")


class PlannedCluster:
    """Substitute for a Dask client that only lists workers: planned workers, or workers of another client."""

    def __init__(self, workers: Mapping[str, Mapping[str, Any]]) -> None:
        self._workers = workers

    @classmethod
    def from_section(cls, cluster: ClusterSection) -> PlannedCluster:
        """Return a substitute client with the workers that a job will start."""
        worker = {"nthreads": cluster.threads or 1, "memory_limit": worker_bytes(cluster)}
        return cls({f"worker-{number}": worker for number in range(cluster.workers or 1)})

    def scheduler_info(self, n_workers: int = -1) -> dict[str, Any]:
        return {"workers": {address: dict(worker) for address, worker in self._workers.items()}}


def worker_bytes(cluster: ClusterSection) -> int:
    """Return the memory limit, in bytes, of each worker that a job starts; 0 for no limit."""
    from distributed.worker_memory import parse_memory_limit

    limit = "auto" if cluster.memory_limit is None else cluster.memory_limit
    bytes_or_text = divide_memory(limit, cluster.workers or 1)
    return parse_memory_limit(bytes_or_text, cluster.threads or 1, logger=logger) or 0


def plan_job(
    job: Job, *, client: Client | None = None, print_line: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Return the estimated time, memory and disk space of a job."""
    check_certificates(job.cluster)
    check_numbers(job.cluster.workers or 1, job.cluster.threads or 1, 0, 0)
    data = open_job_data(job)
    estimator = build_estimator(job)
    options: dict[str, Any] = {"validation": data.validation}
    if "engine" in inspect.signature(estimator.plan).parameters:
        options |= engine_options(job, estimator)
    cluster = job.cluster
    with as_job_error(), ExitStack() as stack:
        found = None
        if client is None and cluster.scheduler is None:
            options["client"] = None if cluster.workers is None else PlannedCluster.from_section(cluster)
            options["memory_limit"] = None if cluster.memory_limit is None else worker_bytes(cluster)
        else:
            found = options["client"] = stack.enter_context(connect(job, client, print_line))

        def plan_fit(model: StreamedEstimator) -> Mapping[str, Any]:
            return model.plan(data.train, **options)

        search = job.search is not None
        needs = plan_candidates(job, estimator, plan_fit) if search else dict(plan_fit(estimator))
        needs = _whole_job(job, data, needs)
        return needs if found is None else needs | _describe_devices(job, found)


def _whole_job(job: Job, data: JobData, needs: dict[str, Any]) -> dict[str, Any]:
    """Add the time, memory and disk space of a job before and after the fit to the plan of the fit."""
    if "seconds" not in needs:  # a model of another package need not estimate its time
        return needs
    cluster = job.cluster.workers is not None or job.cluster.scheduler is not None
    before = {"starting": START_SECONDS}
    if job.cluster.workers is not None:
        before["starting workers"] = WORKERS_SECONDS + WORKER_SECONDS * job.cluster.workers
    run_bytes = needs.get("run_bytes", 0)
    after = {"saving": SAVE_SECONDS + 2 * run_bytes / COPY_RATE}
    kind, shown = find_kind(job.kind), data.test or data.validation or data.train
    once, of_a_row = (needs.get(f"predicting_seconds{suffix}", 0.0) for suffix in ("", "_per_row"))
    if data.test is not None:
        after["scoring"] = once + len(data.test) * (of_a_row + kind.scoring_seconds)
    rows = len(shown) if kind.report_rows is None else min(len(shown), kind.report_rows)
    after["report"] = kind.report_seconds + once + rows * of_a_row
    beside = sum(before.values()) + sum(after.values())
    least, most = (needs[f"expected_seconds_at_{end}"] + beside for end in ("least", "most"))
    needs["seconds"] = {**before, **needs["seconds"], **after}
    needs["disk_bytes"] += REPORT_BYTES + 2 * run_bytes
    if not cluster:
        needs["peak_bytes_per_worker"] += FIGURE_BYTES
    return add_totals(needs, least, most)


def _describe_devices(job: Job, client: Client) -> dict[str, Any]:
    """Return which CPUs or GPUs of a cluster would run the job; add a message if both kinds would.

    CPUs and GPUs together give slightly other results than one kind of device.
    """
    from scalelatent.engine.dask.link import find_gpus
    from scalelatent.engine.dask.pools import devices_event

    workers = find_gpus(client)
    cards = list(workers.values()).count("used")
    device = job.estimator_params().get("device", "auto")
    counts = {"gpu": cards, "cpu": len(workers) - cards}
    if device != "auto":
        counts = {"gpu": cards} if device == "gpu" else {"cpu": len(workers)}
    event = devices_event({kind: count for kind, count in counts.items() if count})
    return {key: event[key] for key in ("devices", "message") if key in event}


def outline_plan(needs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the main estimates of a plan as text: memory, disk, passes, seconds of each activity, advice."""
    limit = needs["resources"]["memory"] / 2**20
    outline: dict[str, Any] = {
        "memory per worker": f"{needs['peak_bytes_per_worker'] / 2**20:,.0f} MiB of {limit:,.0f} MiB",
        "disk bytes": needs["disk_bytes"],
    }
    if "gpu_rows" in needs:
        outline["GPU memory"] = needs["gpu_rows"]["summary"]
    if "passes" in needs:
        outline["passes"] = "{expected:,} expected, from {at_least:,} to {at_most:,}".format(
            **needs["passes"]
        )
        outline["time per pass"] = f"{needs['seconds_per_pass']:.3g} s"
    large = {name: seconds for name, seconds in needs["seconds"].items() if seconds >= 0.1}
    outline["time"] = {name.replace("_", " "): f"{seconds:,.1f} s" for name, seconds in large.items()}
    return outline | {"for a shorter fit": needs["shorter"]}


def plan_lines(needs: Mapping[str, Any]) -> list[str]:
    """Return a plan as one line, plus lines of advice that would shorten the fit."""
    if "summary" not in needs:
        return []
    lines = [f"plan: {needs['summary']}"]
    if text := long_fit(needs):
        lines.append(f"warning: {text}")
    if "gpu_rows" in needs:
        lines.append(f"GPU memory: {needs['gpu_rows']['summary']}")
    if "keeping_rows" in needs:
        lines.append(f"[engine] {needs['keeping_rows']}")
    return lines
