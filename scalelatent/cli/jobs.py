"""The verbs of jobs on a cluster: `submit`, `status`, `logs`, `attach`, `cancel`, `resume`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalelatent.errors import JobError

from .exits import FAILED, INTERRUPTED
from .run import JobFile, Out, _finish, _load, _run, _summary
from .show import (
    Json,
    Reach,
    Settings,
    answer,
    emit,
    say,
    show_values,
    stderr_console,
    text_of,
    with_scheduler,
)

if TYPE_CHECKING:
    from scalelatent.jobs.runfolder import RunFolder

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job id or a run folder.")]
Mismatch = Annotated[
    bool, typer.Option("--allow-mismatch", help="Run although versions differ from those of the cluster.")
]
Wait = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the first worker.")]


@with_scheduler
def submit(
    job: JobFile,
    settings: Settings = None,
    out: Out = None,
    allow_mismatch: Mismatch = False,
    wait: Wait = 10.0,
    reach: Reach = Reach(),  # noqa: B008  no state in it
    json: Json = False,
) -> None:
    """Hand a job to a Dask cluster, where it goes on without this machine."""
    from scalelatent.jobs.submit import submit_job

    extra = [*reach.settings(), *(["cluster.allow_mismatch=true"] if allow_mismatch else [])]
    submitted = submit_job(_load(job, [*(settings or []), *extra], out), wait=wait, tell=say)
    _say_submitted(submitted, json)


def _say_submitted(submitted: Any, json: bool) -> None:
    if json:
        emit(submitted.to_dict())
        return
    typer.echo(submitted.id)
    say(f"run folder {submitted.run}; watch it with: scalelatent attach {submitted.run}")


def _find(job: str, reach: Reach) -> RunFolder:
    from scalelatent.jobs.control import find_job

    return find_job(job, scheduler=reach.address, security=reach.security())


@with_scheduler
def status(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]", help="A job id or a run folder; all runs below this folder otherwise."
        ),
    ] = None,
    reach: Reach = Reach(),  # noqa: B008  no state in it
    json: Json = False,
) -> None:
    """Say how a job is getting on."""
    from scalelatent.jobs.control import list_jobs

    if job is not None:
        folder = _find(job, reach)
        state = folder.read_state()
        if state["state"] == "running":
            state["progress"] = folder.read_progress()
        if json:
            emit(state)
        else:
            told = {key: value for key, value in state.items() if value is not None}
            now = told.pop("progress", {})
            if now.get("rows_total"):
                told["rows of the stage"] = f"{now['rows_done'] or 0:,} of {now['rows_total']:,}"
            show_values(told, title=state["id"])
        return
    with reach.client() as client:
        states = list_jobs(client=client)
    if json:
        emit(states)
    elif not states:
        typer.echo(f"no run folder below {Path.cwd()}")
    for state in [] if json else states:
        objective = "" if state["objective"] is None else f"objective {state['objective']:.5f}"
        numbers = f"pass {text_of(state['pass']):<5}  {objective:<20}"
        typer.echo(f"{state['id']:<28}  {state['state'] or 'unseen':<9}  {numbers}  {state['run']}")


@with_scheduler
def logs(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    reach: Reach = Reach(),  # noqa: B008  no state in it
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Print the events of a job: states, stages, checkpoints, lost workers, errors."""
    import json as encoder

    from scalelatent.jobs.control import new_events

    for event in new_events(_find(job, reach), follow=follow):
        if json:
            typer.echo(encoder.dumps(event))
            continue
        rest = {key: value for key, value in event.items() if key not in ("time", "event", "traceback")}
        told = "  ".join(f"{key} {text_of(value, key)}" for key, value in rest.items() if value is not None)
        typer.echo(f"{event['time']}  {event['event']:<16}  {told}".rstrip())
        if event.get("traceback"):
            typer.echo(event["traceback"])


@with_scheduler
def attach(
    job: JobArgument,
    reach: Reach = Reach(),  # noqa: B008  no state in it
    json: Json = False,
) -> None:
    """Watch a job until it ends."""
    from scalelatent.jobs.control import follow
    from scalelatent.monitor.progress import ProgressDisplay

    folder = _find(job, reach)
    try:
        with ProgressDisplay(stderr_console()) as progress:
            state = follow(folder, [progress], security=reach.security(), tell=say)
    except KeyboardInterrupt:
        told = f"stopped watching; the job goes on. Watch it again with: scalelatent attach {folder.url}"
        raise KeyboardInterrupt(told) from None
    if state.get("error"):
        say(f"{state['state']}: {state['error']}")
    _finish(_summary(folder) | {"state": state["state"]}, json)
    if state["state"] != "done":
        raise typer.Exit(FAILED if state["state"] == "failed" else INTERRUPTED)


@with_scheduler
def cancel(
    job: JobArgument,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for it to stop.")] = 30.0,
    reach: Reach = Reach(),  # noqa: B008  no state in it
    json: Json = False,
) -> None:
    """Stop a job at the next place where nothing is lost; `scalelatent resume` goes on from there."""
    from scalelatent.jobs.control import cancel_job

    folder = _find(job, reach)
    state = cancel_job(folder, wait=wait)
    if state["state"] in ("queued", "running"):
        say(f"asked to stop; the driver has not in {wait:g} s, but will: scalelatent status {folder.url}")
    answer(state, json, line=f"{state['id']}  {state['state']}")


@with_scheduler
def resume(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run folder (or job id) of a broken-off run.")
    ],
    settings: Settings = None,
    job_file: Annotated[
        Path | None,
        typer.Option("--job", metavar="JOB", help="The job file that began it, where job.json is damaged."),
    ] = None,
    here: Annotated[
        bool, typer.Option("--here", help="Drive a submitted run in this process, not on its cluster.")
    ] = False,
    allow_mismatch: Mismatch = False,
    wait: Wait = 10.0,
    reach: Reach = Reach(),  # noqa: B008  no state in it
    json: Json = False,
) -> None:
    """Go on with a run that was stopped, killed or failed."""
    from scalelatent.jobs.control import write_job_again
    from scalelatent.jobs.recorder import check_resumable
    from scalelatent.jobs.resolve import override
    from scalelatent.jobs.submit import resubmit

    folder = _find(run, reach)
    if job_file is not None:
        write_job_again(folder, job_file)
    state = folder.read_state()
    if state["state"] == "done":
        if settings:
            raise JobError(
                f"run {folder.url} is done, and --set {', '.join(settings)} cannot change it any more; for "
                "another fit choose another folder: scalelatent fit JOB --set … --out FOLDER"
            )
        say(f"run {folder.url} is done; there is nothing to resume")
        _finish(_summary(folder), json)
        return
    check_resumable(folder)
    extra = [*reach.settings(), *(["cluster.allow_mismatch=true"] if allow_mismatch else [])]
    if here and reach.address is None:  # that of the job may be gone
        extra += ["cluster.scheduler=none"]
    job = override(folder.read_job(), [*(settings or []), *extra])
    if not here and (reach.address is not None or (state.get("submitted") and job.cluster.scheduler)):
        _say_submitted(resubmit(job, folder, wait=wait, tell=say), json)
        return
    say(f"run {folder.id} in {folder.url}")
    _run(job, folder, json)
