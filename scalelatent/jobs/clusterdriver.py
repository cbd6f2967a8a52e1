"""Two tasks that `scalelatent submit` sends to a cluster: one plans a job, the other (the driver) runs it.

The driver task secedes from its worker's thread pool, so that the task occupies no thread. The driver locks
the run folder and runs the job like `scalelatent fit`, with its own client. If the worker dies, Dask runs
the task again on another worker, and the run resumes from the last checkpoint.

The scheduler also imports this module, so the module must import quickly.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from scalelatent.engine.dask.timed_calls import ask_scheduler
from scalelatent.errors import ScalelatentError

if TYPE_CHECKING:
    from distributed import Security

DRIVER_PREFIX = "scalelatent-job-"
CLIENT_SECONDS = 30.0  # time limit for the driver to connect to the scheduler
# Seconds to wait for the lock of the run folder, because an earlier driver may still run on a worker that the
# scheduler lost. The lock of a dead driver expires after 90 s.
LOCK_SECONDS = 300.0

logger = logging.getLogger("distributed.scalelatent")


def driver_key(identity: str, start: int) -> str:
    return f"{DRIVER_PREFIX}{identity}-{start}"


def plan_on_worker(
    stored: dict[str, Any], workers: dict[str, Any]
) -> tuple[tuple[str, str] | None, list[str]]:
    """Plan the job ``stored`` for ``workers``; return an error (class name, text) or None, and the plan."""
    from .planning import PlannedCluster, plan_job, plan_lines
    from .spec import Job

    try:
        needs = plan_job(Job.from_dict(stored), client=PlannedCluster(workers))  # type: ignore[arg-type]
    except ScalelatentError as error:
        return (type(error).__name__, str(error)), []
    return None, plan_lines(needs)


def drive(run: str, start: int) -> str:
    """Run a submitted job to its end; return its last state. ``start`` counts starts and resumes from 1."""
    from distributed import get_worker, secede

    from scalelatent.engine.dask.hooks import scheduler_of
    from scalelatent.engine.dask.pass_tasks import configure_worker_process

    worker = get_worker()
    secede()
    # The fit limits the thread pools of its process and later restores the sizes that this call sets.
    configure_worker_process()
    last_state: Future[str] = Future()
    scheduler, security = scheduler_of(worker)

    def run_job() -> None:
        try:
            last_state.set_result(_drive(scheduler, security, worker.address, run, start))
        except BaseException as error:  # noqa: BLE001  the task raises the error
            last_state.set_exception(error)

    # Tasks that a task submits inherit its priority, so that the oldest job would occupy the cluster. The
    # driver submits from a separate thread instead, so that jobs take turns.
    threading.Thread(target=run_job, name=f"scalelatent-driver-{start}", daemon=True).start()
    return last_state.result()


def _drive(scheduler: str, security: Security | None, worker: str, run: str, start: int) -> str:
    from distributed import Client

    from scalelatent.engine.dask.hooks import reset_suspicion

    from .runfolder import RunFolder
    from .runner import run_locked_job

    folder = RunFolder.open(run)
    with Client(
        scheduler, timeout=CLIENT_SECONDS, security=security, set_as_default=False, name="scalelatent-driver"
    ) as client:
        # Reset the scheduler's count of workers that died during this task, so that the task does not fail.
        ask_scheduler(client, reset_suspicion, driver_key(folder.id, start))
        with folder.lock(patience=LOCK_SECONDS, waiting=lambda line: logger.info("%s: %s", run, line)):
            state = folder.read_state()
            if state.get("starts") != start or state["state"] not in ("queued", "running"):
                return f"{state['state']} (another start)"
            try:
                run_locked_job(
                    folder.read_job(), folder, client=client, resume=folder.fit_began, driver=worker
                )
            except KeyboardInterrupt:
                logger.info("%s: cancelled", run)
            except ScalelatentError as error:
                logger.warning("%s: %s", run, error)  # the run folder records the error too
    return str(folder.read_state()["state"])
