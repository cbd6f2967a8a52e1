"""The commands for jobs on a cluster: `submit`, `status`, `logs`, `attach`, `cancel`, `resume`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalelatent.errors import JobError

from .exits import FAILED, INTERRUPTED
from .run import JobFile, Out, _finish, _load, _run, _summary
from .show import (
    Json,
    SchedulerOptions,
    Settings,
    format_value,
    print_json,
    print_line,
    print_result,
    show_values,
    stderr_console,
    with_scheduler,
)

if TYPE_CHECKING:
    from scalelatent.jobs.runfolder import RunFolder

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Job id or run folder.")]
Mismatch = Annotated[
    bool, typer.Option("--allow-mismatch", help="Run although package versions of the cluster differ.")
]
Wait = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the first worker.")]


@with_scheduler
def submit(
    job: JobFile,
    settings: Settings = None,
    out: Out = None,
    allow_mismatch: Mismatch = False,
    wait: Wait = 10.0,
    scheduler_options: SchedulerOptions = SchedulerOptions(),  # noqa: B008  the tuple is immutable
    json: Json = False,
) -> None:
    """Submit a job to a Dask cluster, where the job runs without this machine."""
    from scalelatent.jobs.submit import submit_job

    extra = [*scheduler_options.settings(), *(["cluster.allow_mismatch=true"] if allow_mismatch else [])]
    submitted = submit_job(_load(job, [*(settings or []), *extra], out), wait=wait, print_line=print_line)
    _print_submitted(submitted, json)


def _print_submitted(submitted: Any, json: bool) -> None:
    if json:
        print_json(submitted.to_dict())
        return
    typer.echo(submitted.id)
    print_line(f"run folder {submitted.run}; watch it with: scalelatent attach {submitted.run}")


def _find(job: str, scheduler_options: SchedulerOptions) -> RunFolder:
    from scalelatent.jobs.control import find_job

    return find_job(job, scheduler=scheduler_options.address, security=scheduler_options.security())


@with_scheduler
def status(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB", help="Job id or run folder; by default all runs below the current folder."
        ),
    ] = None,
    scheduler_options: SchedulerOptions = SchedulerOptions(),  # noqa: B008  the tuple is immutable
    json: Json = False,
) -> None:
    """Show the state of a job, or of all jobs."""
    from scalelatent.jobs.control import list_jobs

    if job is not None:
        folder = _find(job, scheduler_options)
        state = folder.read_state()
        if state["state"] == "running":
            state["progress"] = folder.read_progress()
        if json:
            print_json(state)
        else:
            values = {key: value for key, value in state.items() if value is not None}
            now = values.pop("progress", {})
            if now.get("rows_total"):
                values["rows of the stage"] = f"{now['rows_done'] or 0:,} of {now['rows_total']:,}"
            show_values(values, title=state["id"])
        return
    with scheduler_options.client() as client:
        states = list_jobs(client=client)
    if json:
        print_json(states)
    elif not states:
        typer.echo(f"no run folder below {Path.cwd()}")
    for state in [] if json else states:
        objective = "" if state["objective"] is None else f"objective {state['objective']:.5f}"
        numbers = f"pass {format_value(state['pass']):<5}  {objective:<20}"
        typer.echo(f"{state['id']:<28}  {state['state'] or 'unseen':<9}  {numbers}  {state['run']}")


@with_scheduler
def logs(
    job: JobArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new events until the job ends.")
    ] = False,
    scheduler_options: SchedulerOptions = SchedulerOptions(),  # noqa: B008  the tuple is immutable
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Print the events of a job: states, stages, checkpoints, lost workers, errors."""
    import json as encoder

    from scalelatent.jobs.control import new_events

    for event in new_events(_find(job, scheduler_options), follow=follow):
        if json:
            typer.echo(encoder.dumps(event))
            continue
        rest = {key: value for key, value in event.items() if key not in ("time", "event", "traceback")}
        text = "  ".join(
            f"{key} {format_value(value, key)}" for key, value in rest.items() if value is not None
        )
        typer.echo(f"{event['time']}  {event['event']:<16}  {text}".rstrip())
        if event.get("traceback"):
            typer.echo(event["traceback"])


@with_scheduler
def attach(
    job: JobArgument,
    scheduler_options: SchedulerOptions = SchedulerOptions(),  # noqa: B008  the tuple is immutable
    json: Json = False,
) -> None:
    """Show the progress of a job until it ends."""
    from scalelatent.jobs.control import follow
    from scalelatent.monitor.progress import ProgressDisplay

    folder = _find(job, scheduler_options)
    try:
        with ProgressDisplay(stderr_console()) as progress:
            state = follow(folder, [progress], security=scheduler_options.security(), print_line=print_line)
    except KeyboardInterrupt:
        text = f"stopped watching; the job still runs. Watch it again with: scalelatent attach {folder.url}"
        raise KeyboardInterrupt(text) from None
    if state.get("error"):
        print_line(f"{state['state']}: {state['error']}")
    _finish(_summary(folder) | {"state": state["state"]}, json)
    if state["state"] != "done":
        raise typer.Exit(FAILED if state["state"] == "failed" else INTERRUPTED)


@with_scheduler
def cancel(
    job: JobArgument,
    wait: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait until the job has stopped.")
    ] = 30.0,
    scheduler_options: SchedulerOptions = SchedulerOptions(),  # noqa: B008  the tuple is immutable
    json: Json = False,
) -> None:
    """Stop a job at the next checkpoint; `scalelatent resume` continues the job."""
    from scalelatent.jobs.control import cancel_job

    folder = _find(job, scheduler_options)
    state = cancel_job(folder, wait=wait)
    if state["state"] in ("queued", "running"):
        print_line(
            f"the job has not stopped within {wait:g} s; it stops at its next checkpoint. Watch it with: "
            f"scalelatent status {folder.url}"
        )
    print_result(state, json, line=f"{state['id']}  {state['state']}")


@with_scheduler
def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder or job id of an interrupted run.")],
    settings: Settings = None,
    job_file: Annotated[
        Path | None,
        typer.Option("--job", metavar="JOB", help="Job file of the run, if its job.json is damaged."),
    ] = None,
    here: Annotated[
        bool, typer.Option("--here", help="Run a submitted job in this process, not on its cluster.")
    ] = False,
    allow_mismatch: Mismatch = False,
    wait: Wait = 10.0,
    scheduler_options: SchedulerOptions = SchedulerOptions(),  # noqa: B008  the tuple is immutable
    json: Json = False,
) -> None:
    """Resume a run that was stopped, was killed or has failed."""
    from scalelatent.jobs.control import restore_job
    from scalelatent.jobs.recorder import check_resumable
    from scalelatent.jobs.resolve import override
    from scalelatent.jobs.submit import resubmit

    folder = _find(run, scheduler_options)
    if job_file is not None:
        restore_job(folder, job_file)
    state = folder.read_state()
    if state["state"] == "done":
        if settings:
            raise JobError(
                f"run {folder.url} is done, so --set {', '.join(settings)} cannot change it; start a new "
                "run: scalelatent fit JOB --set … --out FOLDER"
            )
        print_line(f"run {folder.url} is done; there is nothing to resume")
        _finish(_summary(folder), json)
        return
    check_resumable(folder)
    extra = [*scheduler_options.settings(), *(["cluster.allow_mismatch=true"] if allow_mismatch else [])]
    if here and scheduler_options.address is None:  # the scheduler of the job may have ended
        extra += ["cluster.scheduler=none"]
    job = override(folder.read_job(), [*(settings or []), *extra])
    if not here and (
        scheduler_options.address is not None or (state.get("submitted") and job.cluster.scheduler)
    ):
        _print_submitted(resubmit(job, folder, wait=wait, print_line=print_line), json)
        return
    print_line(f"run {folder.id} in {folder.url}")
    _run(job, folder, json)
