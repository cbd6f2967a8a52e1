"""Run one job: open the data, fit, score, save and report, and record every step in the run folder."""

from __future__ import annotations

import inspect
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scalelatent.contract.kinds import find_kind
from scalelatent.deploy.checks import check_versions
from scalelatent.deploy.clusters import use_job_id
from scalelatent.engine.batch_loop import Progress
from scalelatent.engine.callbacks import Callback, Callbacks, Unfailing, report_compilations
from scalelatent.errors import JobError, LongFitWarning, ScalelatentError
from scalelatent.storage.disk import is_local

from .datasets import JobData, data_at_start, open_job_data
from .interrupt import StopRequest, stop_on_cancel, stop_on_signals
from .job_callbacks import make_callbacks
from .job_cluster import connect, read_peak_bytes
from .run_record import DeviceRecorder, RunRecord, add_dashboard_page, report_warnings
from .runfolder import RunFolder
from .searching import SearchProgress, make_search, write_search_results
from .spec import Job

if TYPE_CHECKING:
    from distributed import Client

    from scalelatent.data import Dataset
    from scalelatent.estimators.base import StreamedEstimator


@dataclass
class RunResult:
    """Result of a finished run: fitted model, scores, report, time, memory, warnings."""

    folder: RunFolder
    estimator: StreamedEstimator
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
    print_line: Callable[[str], None] = lambda line: None,
) -> RunResult:
    """Lock the run folder; fit, score, save and report one job."""
    with folder.lock():
        if resume:
            changed = check_changes(job, folder)
        folder.begin("running")
        if resume and changed:  # a later resume then compares its parameters with these
            folder.write_job(job)
        here = f"{socket.gethostname()}:{os.getpid()}"
        return run_locked_job(
            job, folder, callbacks=callbacks, client=client, resume=resume, print_line=print_line, driver=here
        )


def run_locked_job(
    job: Job,
    folder: RunFolder,
    *,
    callbacks: Sequence[Callback] = (),
    client: Client | None = None,
    resume: bool = False,
    print_line: Callable[[str], None] = lambda line: None,
    driver: str = "",
) -> RunResult:
    """Run a job like `run_job`, in a folder whose lock the caller holds."""
    began = time.monotonic()
    request = StopRequest()
    record = RunRecord(folder, job, client)
    own = Unfailing()
    with ExitStack() as stack:
        record.begin(driver, resume)
        try:
            warning_lines = report_warnings(folder, print_line)
            with stop_on_signals(request, print_line), stop_on_cancel(request, folder), warning_lines:
                own = make_callbacks(job.callbacks)
                found = record.client = stack.enter_context(connect(job, client, print_line))
                if client is None and found is not None and job.cluster.scheduler is not None:
                    check_versions(found, job.cluster.allow_mismatch, print_line)
                if client is None:
                    add_dashboard_page(found)
                log, *reporters = record.callbacks()
                devices = DeviceRecorder(print_line)
                everyone = [log, devices, *callbacks, *reporters, own, request]
                own.on_run_start(_start_info(job, folder, resume))
                result = _fit_score_save(job, folder, Callbacks(everyone), found, resume, request)
        except BaseException as error:
            lost = record.client is not None and record.client.status != "running"
            raised = record.record_error(
                error,
                f"resume with: scalelatent resume {folder.url}",
                by=request.by or "SIGINT",
                lost=(job.cluster.scheduler or "of this run") if lost else None,
            )
            with report_warnings(folder, print_line):
                own.on_run_end(_end_info(folder))
            if raised is error:
                raise
            raise raised from error
        result.seconds = time.monotonic() - began
        ended = {"seconds": round(result.seconds, 3), "peak_worker_bytes": result.peak_worker_bytes}
        ended |= devices.found
        record.done(result.scores, ended, result.report, warnings=result.warnings)
        with report_warnings(folder, print_line):
            own.on_run_end(_end_info(folder, result.scores))
    return result


def _start_info(job: Job, folder: RunFolder, resumed: bool) -> dict[str, Any]:
    """Return the values that the callbacks of a job receive when the job starts."""
    info = {"run": folder.url, "id": folder.id, "name": job.job.name or folder.id, "kind": job.kind}
    return info | {"values": job.values(), "resumed": resumed}


def _end_info(folder: RunFolder, scores: dict[str, float] | None = None) -> dict[str, Any]:
    """Return the values that the callbacks of a job receive when the job ends."""
    state = folder.read_state()
    info = {"run": folder.url, "state": state["state"], "error": state.get("error"), "scores": scores or {}}
    done = state["state"] == "done"
    info["model"] = folder.model_url if done else None
    info["report"] = folder.location.name_of("report") if done and folder.has_report else None
    return info


def run_new_job(
    job: Job, *, callbacks: Sequence[Callback] = (), print_line: Callable[[str], None] = lambda line: None
) -> RunResult:
    """Create the run folder of a job and run the job."""
    job = job.with_seed()
    existed = is_local(job.job.out) and os.path.isdir(job.job.out)
    folder = RunFolder.create(job.job.out, job)
    print_line(f"run {folder.id} in {folder.url}")
    try:
        return run_job(job, folder, callbacks=callbacks, print_line=print_line)
    except ScalelatentError:
        folder.remove_if_unused(existed)
        raise


@contextmanager
def as_job_error(unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turn a TypeError or ValueError into a `JobError` about the section ``[model]`` of the job file."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, ScalelatentError) or unless():
            raise
        raise JobError(f"[model] {error}") from error


def build_estimator(job: Job) -> StreamedEstimator:
    with as_job_error():
        return find_kind(job.kind).estimator_class()(**job.estimator_params())


def check_changes(job: Job, folder: RunFolder) -> bool:
    """Return whether a resume changes model parameters; raise a `JobError` for invalid parameters."""
    if job.params == folder.read_job().params:
        return False
    with as_job_error():
        build_estimator(job)._check_params()
    return True


def _fit_score_save(
    job: Job,
    folder: RunFolder,
    callbacks: Callbacks,
    client: Client | None,
    resume: bool,
    request: StopRequest,
) -> RunResult:
    data = open_job_data(job)
    if resume:
        data = data_at_start(data, folder.url)
    estimator = build_estimator(job)
    options = engine_options(job, estimator)
    fitted = estimator if job.search is None else make_search(job, estimator)
    if job.search is not None:
        callbacks = Callbacks([*callbacks.callbacks, SearchProgress(folder)])
    request.check()
    with as_job_error(unless=lambda: folder.fit_began), use_job_id(folder.id), warnings.catch_warnings():
        warnings.simplefilter("ignore", LongFitWarning)  # the plan has already warned
        fitted.fit(
            data.train,
            validation=data.validation,
            client=client,
            run_dir=folder.url,
            resume=resume,
            callbacks=callbacks.callbacks,
            **options,
        )
    if job.search is not None:
        write_search_results(folder, fitted)
        estimator = fitted.best_estimator_
    peak = None
    if client is not None:
        peak = read_peak_bytes(client)
    result = RunResult(folder, estimator, peak_worker_bytes=peak)
    result.scores |= validation_scores(estimator)
    left_out = folder.read_state()
    if left_out.get("quarantined_rows"):
        result.warnings.append(
            f"{left_out['quarantined_rows']:,} rows of {left_out['quarantined_shards']:,} bad shard(s) were "
            f"excluded; scalelatent logs {folder.url} lists the shards (shard_quarantined)"
        )
    callbacks.on_stage({"stage": "saving"})
    estimator.save(folder.model_url, overwrite=True)
    folder.event("model_saved", path=folder.model_url)
    request.check()
    with report_compilations(callbacks):  # the fit reports its own compilations
        if data.test is not None:
            from scalelatent.evaluation.scoring import make_scorer  # loads kernels that few jobs need

            progress = _begin_stage(callbacks, "scoring", data.test)
            scorer = make_scorer(estimator)
            scores = scorer.test_scores(estimator, data.test, progress)
            result.scores |= {f"test_{name}": scores[name] for name in scorer.headline if name in scores}
            found = {f"test_{name}": value for name, value in scores.items()}
            folder.event("scored", test_rows=len(data.test), **{**result.scores, **found})
        _report(result, data, _begin_stage(callbacks, "report", data.shown))
    request.check()
    return result


def validation_scores(estimator: StreamedEstimator) -> dict[str, float]:
    """Return the validation errors of a fitted model by name; empty if it has none."""
    names = ("best_validation_error", "mean_member_validation_error")
    found = {name: getattr(estimator, f"{name}_", None) for name in names}
    return {name: float(error) for name, error in found.items() if error is not None}


def _begin_stage(callbacks: Callbacks, stage: str, rows: Dataset) -> Progress:
    """Report the start of a stage after the fit; return the progress reporter of the stage."""
    callbacks.on_stage({"stage": stage, "rows": len(rows)})
    return Progress(callbacks, stage, 0)


def engine_options(job: Job, estimator: StreamedEstimator) -> dict[str, Any]:
    """Return the job's ``[engine]`` keys and ``[job] scratch`` as keyword arguments of ``fit``."""
    given = {key: value for key, value in job.engine.model_dump().items() if value is not None}
    if job.job.scratch is not None:
        given["scratch"] = job.job.scratch
    if not given:
        return {}
    if "engine" not in inspect.signature(estimator.fit).parameters:
        raise JobError(
            f"[engine] {', '.join(given)}: models of kind {job.kind!r} have no engine settings; remove the "
            "keys"
        )
    return {"engine": given}


def _report(result: RunResult, data: JobData, progress: Progress) -> None:
    """Write the report; turn an error into a warning, because the model has been saved before."""
    try:
        from scalelatent.report.build import build_report

        result.report = build_report(
            result.folder.url, model=result.estimator, data=data.shown, progress=progress
        )
    except Exception as error:  # noqa: BLE001  a figure library may raise anything
        result.warnings.append(
            f"the report failed ({type(error).__name__}: {error}); retry with: "
            f"scalelatent report {result.folder.url}"
        )
        result.folder.event("report_failed", error=f"{type(error).__name__}: {error}")
