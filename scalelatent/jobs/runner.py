"""The driver: one job from opened datasets to model, scores and report, every step told in the run folder."""

from __future__ import annotations

import errno
import inspect
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scalelatent.data.store import is_local
from scalelatent.errors import JobError, RunError, ScalelatentError

from .datasets import JobData, open_job_data
from .interrupt import StopRequest, stop_on_signals
from .refusals import as_job_error
from .runfolder import RunFolder
from .spec import Job

if TYPE_CHECKING:
    from distributed import Client

    from scalelatent.engine.callbacks import Callback

__all__ = ["RunResult", "build_estimator", "connect", "engine_options", "run_job", "run_new_job"]

SCHEDULER_SECONDS = 30


@dataclass
class RunResult:
    """What a finished run gives.

    Attributes
    ----------
    folder : RunFolder
    estimator : fitted estimator
    scores : dict
        ``best_validation_error`` where the model has one; ``test_error`` and ``test_accuracy`` if the job
        names a test dataset.
    report : str or None
        Path or address of the report's page; None if it could not be made (``warnings`` says why).
    seconds : float
        Wall time of this execution.
    peak_worker_bytes : int or None
        Largest resident memory of any worker still there at the end; None without a cluster.
    warnings : list of str
    """

    folder: RunFolder
    estimator: Any
    scores: dict[str, float] = field(default_factory=dict)
    report: str | None = None
    seconds: float = 0.0
    peak_worker_bytes: int | None = None
    warnings: list[str] = field(default_factory=list)


def run_job(
    job: Job,
    folder: RunFolder,
    *,
    callbacks: Sequence[Callback] = (),
    client: Client | None = None,
    resume: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> RunResult:
    """Fit, score, save and report one job.

    Parameters
    ----------
    job : Job
        As written to the folder.
    folder : RunFolder
    callbacks : sequence of Callback
        Told of the fit besides the run folder's own logs.
    client : distributed.Client, optional
        A cluster to use instead of what ``[cluster]`` names.
    resume : bool
        Go on from the checkpoints in the folder; the result has the bits of an undisturbed run.
    tell : callable
        Called with one line for the user (the dashboard's address, a stop that was asked for).

    Returns
    -------
    RunResult

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C or SIGTERM, once what is complete lies in the folder (state ``cancelled``).
    ScalelatentError
        What went wrong, also written to ``state.json`` (state ``failed``).
    """
    from scalelatent.monitor.events import RunLog

    began = time.monotonic()
    request = StopRequest()
    with folder.lock():
        folder.update_state(state="running", error=None)
        folder.event("state", state="running", resume=resume, pid=os.getpid(), host=socket.gethostname())
        try:
            with stop_on_signals(request, tell):
                everyone = [RunLog(folder), *callbacks, request]
                result = _steps(job, folder, everyone, client, resume, tell)
        except KeyboardInterrupt:
            by = signal.Signals(request.signal).name if request.signal else "SIGINT"
            _settle(folder, "cancelled", f"stopped by {by}; go on with: scalelatent resume {folder.url}")
            raise
        except OSError as error:
            told = _tell_os_error(error, folder)
            _settle(folder, "failed", str(told))
            if told is error:
                raise
            raise told from error
        except BaseException as error:
            text = str(error) if isinstance(error, ScalelatentError) else f"{type(error).__name__}: {error}"
            _settle(folder, "failed", text)
            raise
        result.seconds = time.monotonic() - began
        ended = {"seconds": round(result.seconds, 3), "peak_worker_bytes": result.peak_worker_bytes}
        folder.update_state(state="done", error=None, **result.scores, **ended)
        folder.event("state", state="done", warnings=result.warnings, **ended)
    return result


def run_new_job(
    job: Job, *, callbacks: Sequence[Callback] = (), tell: Callable[[str], None] = lambda line: None
) -> RunResult:
    """Make the run folder of a job and run it; a job that is refused before its fit began leaves no folder.

    Parameters
    ----------
    job : Job
        A seed is drawn and recorded if it has none.
    callbacks, tell
        As in `run_job`.

    Returns
    -------
    RunResult

    Raises
    ------
    JobError
        If the run folder exists and is not empty, and whatever `run_job` raises.
    """
    job = job.with_seed()
    existed = is_local(job.job.out) and os.path.isdir(job.job.out)
    folder = RunFolder.create(job.job.out, job)
    tell(f"run {folder.id} in {folder.url}")
    try:
        return run_job(job, folder, callbacks=callbacks, tell=tell)
    except ScalelatentError:
        _take_back(folder, existed)
        raise


def _take_back(folder: RunFolder, existed: bool) -> None:
    """Remove a run folder whose fit never began: what is in it was written just now, for nothing.

    Unless another driver has it, or its place does not answer: what was refused is told all the same.
    """
    with suppress(RunError, OSError), folder.lock():
        if not folder.fit_began:
            folder.remove()
            if existed:
                folder.place.make()


def build_estimator(job: Job) -> Any:
    """Make the unfitted estimator of a job.

    Raises
    ------
    JobError
        If a parameter's value is refused.
    """
    from scalelatent.estimators.registry import get_estimator

    with as_job_error():
        return get_estimator(job.kind)(**job.estimator_params())


@contextmanager
def connect(
    job: Job, client: Client | None = None, tell: Callable[[str], None] = lambda line: None
) -> Iterator[Client | None]:
    """Give the Dask client a job asks for: the one given, its scheduler's, a local cluster's, or None.

    Raises
    ------
    JobError
        If the scheduler does not answer within 30 seconds.
    """
    wanted = job.cluster
    if client is not None:
        yield client
    elif wanted.scheduler is not None:
        from distributed import Client

        try:
            found = Client(wanted.scheduler, timeout=SCHEDULER_SECONDS, set_as_default=False)
        except (OSError, TimeoutError, ValueError) as error:
            raise JobError(
                f"[cluster] scheduler = {wanted.scheduler!r} does not answer ({error}); check the address, "
                "or give [cluster] workers to start a local cluster"
            ) from error
        with found:
            tell(f"dashboard: {found.dashboard_link}")
            yield found
    elif wanted.workers is not None:
        from scalelatent.engine.cluster import cluster

        options = {"threads": wanted.threads, "memory_limit": wanted.memory_limit}
        given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
        with cluster("local", workers=wanted.workers, **given) as started:
            tell(f"dashboard: {started.dashboard_link}")
            yield started
    else:
        yield None


def _steps(
    job: Job,
    folder: RunFolder,
    callbacks: list[Callback],
    client: Client | None,
    resume: bool,
    tell: Callable[[str], None],
) -> RunResult:
    data = open_job_data(job)
    estimator = build_estimator(job)
    with ExitStack() as stack:
        found = stack.enter_context(connect(job, client, tell))
        options = engine_options(job, estimator)
        with as_job_error(unless=lambda: folder.fit_began):
            estimator.fit(
                data.train,
                validation=data.validation,
                client=found,
                run_dir=folder.url,
                resume=resume,
                callbacks=callbacks,
                **options,
            )
        peak = None
        if found is not None:
            from .workers import peak_of_workers

            peak = peak_of_workers(found)
    result = RunResult(folder, estimator, peak_worker_bytes=peak)
    best = getattr(estimator, "best_validation_error_", None)
    if best is not None:
        result.scores["best_validation_error"] = float(best)
    estimator.save(folder.model_url, overwrite=True)
    folder.event("model_saved", path=folder.model_url)
    if data.test is not None:
        accuracy = float(estimator.score(data.test))
        result.scores |= {"test_accuracy": accuracy, "test_error": 1.0 - accuracy}
        folder.event("scored", **result.scores)
    _report(result, data)
    return result


def engine_options(job: Job, estimator: Any) -> dict[str, Any]:
    """Return the ``[engine]`` keys a job gives, and ``[job] scratch``, as the estimator's ``fit`` takes them.

    Raises
    ------
    JobError
        If some are given and this kind of model takes none.
    """
    given = {key: value for key, value in job.engine.model_dump().items() if value is not None}
    if job.job.scratch is not None:
        given["scratch"] = job.job.scratch
    if not given:
        return {}
    if "engine" not in inspect.signature(estimator.fit).parameters:
        raise JobError(f"[engine] {', '.join(given)}: models of kind {job.kind!r} take no engine settings")
    return {"engine": given}


def _report(result: RunResult, data: JobData) -> None:
    """Write the report. The model is safe by now, so a failing figure is a warning, not a failed run."""
    try:
        from scalelatent.report import build_report

        rows = data.test or data.validation or data.train
        result.report = build_report(result.folder.url, model=result.estimator, data=rows)
    except Exception as error:  # noqa: BLE001  whatever a figure library raises, the fit is done
        result.warnings.append(
            f"the report could not be made ({type(error).__name__}: {error}); try again with: "
            f"scalelatent report {result.folder.url}"
        )
        result.folder.event("report_failed", error=f"{type(error).__name__}: {error}")


def _tell_os_error(error: OSError, folder: RunFolder) -> Exception:
    """Say a full disk in words; other errors of the system stay what they are."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    free = folder.place.free_bytes() or 0
    return RunError(
        f"no space left while writing {error.filename or folder.url} ({free / 2**20:,.0f} MiB free); make "
        f"room, then go on from the last checkpoint with: scalelatent resume {folder.url}"
    )


def _settle(folder: RunFolder, state: str, error: str) -> None:
    """Write how a run ended; on a full disk, or where another driver has taken over, even that fails, and
    must not hide the true error.
    """
    with suppress(OSError, RunError):
        folder.update_state(state=state, error=error)
        folder.event("state", state=state, error=error)
