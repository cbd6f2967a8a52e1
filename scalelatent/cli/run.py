"""The verbs that fit: `plan`, `fit`, `demo`, and what they print at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .exits import in_run
from .show import (
    Json,
    Overwrite,
    Settings,
    answer,
    emit,
    kernels_told,
    say,
    show_values,
    stderr_console,
    text_of,
)

if TYPE_CHECKING:
    from scalelatent.jobs.runfolder import RunFolder
    from scalelatent.jobs.spec import Job

# What of a plan is said in lines of its own.
LINES = ("summary", "shorter")

Measure = Annotated[bool, typer.Option("--measure", help="Measure the rates of this machine again.")]
JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="A job file (TOML).")]
Out = Annotated[str | None, typer.Option("--out", help="The run folder, whatever the job file says.")]


def _load(job: Path, settings: list[str] | None, out: str | None) -> Job:
    from scalelatent.jobs.resolve import load_job

    extra = [] if out is None else [f"job.out={out}"]
    return load_job(job, settings=[*(settings or []), *extra])


def schema(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it there; print it by default.")
    ] = None,
    json: Json = False,
) -> None:
    """The JSON schema of job files, by which an editor completes and checks their keys."""
    from json import dumps

    from scalelatent.jobs.job_schema import job_schema

    found = job_schema()
    if out is None:
        emit(found) if json else typer.echo(dumps(found, indent=2))
        return
    out.write_text(dumps(found, indent=2) + "\n", encoding="utf-8")
    answer({"out": str(out)}, json, line=f"wrote {out}; begin a job file with `#:schema {out}`")


@kernels_told()
def plan(
    job: JobFile, settings: Settings = None, out: Out = None, measure: Measure = False, json: Json = False
) -> None:
    """Say what a job will need: time, memory, disk; refuse what cannot fit, as `fit` and `submit` do."""
    from scalelatent.engine.rates import rates
    from scalelatent.jobs.planning import plan_job, plan_lines

    resolved = _load(job, settings, out)
    if not json:
        show_job(resolved)
    if measure:
        rates.measure_again()
    needs = plan_job(resolved, tell=say)
    if json:
        emit({"job": resolved.to_dict(), "plan": needs})
        return
    show_values({name: value for name, value in needs.items() if name not in LINES}, title="plan")
    for line in plan_lines(needs):
        typer.echo(line)


def show_job(job: Job) -> None:
    """Print every value of a job and its origin."""
    values = job.values()
    width = max(map(len, values))
    texts = {name: "none" if value is None else str(value) for name, value in values.items()}
    column = min(44, max(map(len, texts.values())))
    typer.echo(typer.style("job", bold=True))
    for name, text in texts.items():
        origin = job.origins.get(name, "default")
        if text != "none" or origin != "default":
            typer.echo(f"  {name:<{width}}  {text:<{column}}  {origin}")


def fit(job: JobFile, settings: Settings = None, out: Out = None, json: Json = False) -> None:
    """Run a job: fit, score, save, report."""
    _run(_load(job, settings, out), None, json)


def demo(
    rows: Annotated[
        int, typer.Option(min=1000, envvar="SCALELATENT_DEMO_ROWS", help="Training images to make.")
    ] = 1_000_000,
    out: Annotated[
        str, typer.Option("--out", envvar="SCALELATENT_DEMO_OUT", help="The folder to write.")
    ] = "scalelatent-demo",
    workers: Annotated[int, typer.Option(min=1, help="Dask workers to start.")] = 2,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Fit a million digits out of core: a first look."""
    from scalelatent.jobs.demo import prepare

    from .show import progress_bar

    with kernels_told(), progress_bar("making digits") as progress:
        resolved = prepare(out, rows=rows, workers=workers, overwrite=overwrite, progress=progress, tell=say)
    data = resolved.data
    _run(resolved, None, json, {"job": str(Path(out, "job.toml")), "train": data.train, "test": data.test})


def _run(job: Job, folder: RunFolder | None, json: bool, also: dict[str, Any] | None = None) -> None:
    """Run a new job, or resume one in its folder, with live progress; print what came of it."""
    from scalelatent.jobs.planning import plan_job, plan_lines
    from scalelatent.jobs.runner import run_job, run_new_job
    from scalelatent.monitor.progress import ProgressDisplay

    where = job.job.out if folder is None else folder.url
    if folder is None:
        with kernels_told():  # of those that the fit needs its own progress tells
            needs = plan_job(job, tell=say)
        for line in plan_lines(needs):
            say(line)
    try:
        with in_run(where), ProgressDisplay(stderr_console()) as progress:
            if folder is None:
                result = run_new_job(job, callbacks=[progress], tell=say)
            else:
                result = run_job(job, folder, callbacks=[progress], resume=True, tell=say)
    except KeyboardInterrupt:
        told = f"stopped; nothing that was checkpointed is lost. Go on with: scalelatent resume {where}"
        raise KeyboardInterrupt(told) from None
    for warning in result.warnings:
        say(f"warning: {warning}")
    _finish(_summary(result.folder) | (also or {}), json)


def _summary(folder: RunFolder) -> dict[str, Any]:
    state = folder.read_state()
    keys = ["id", "state", "pass", "objective", "train_error", "validation_error", "best_validation_error"]
    if state["state"] == "done" and state.get("best_validation_error") is not None:
        # Of the model that was saved; those of the last pass are of weights that were not kept.
        keys = [key for key in keys if key not in ("train_error", "validation_error")]
    keys += [
        "mean_member_validation_error",
        *(key for key in state if key.startswith("test_") and key != "test_accuracy"),
        "seconds",
        "peak_worker_bytes",
        "quarantined_shards",
        "quarantined_rows",
    ]
    values = {key: state[key] for key in keys if state.get(key) is not None}
    if "search" in state:
        values["search"] = state["search"]
    values |= {"run": folder.url, "model": folder.model_url}
    if folder.has_report:
        values["report"] = folder.report_url
    return values


def _finish(values: dict[str, Any], json: bool) -> None:
    answer(values, json, title=text_of(values["state"]))
