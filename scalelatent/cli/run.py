"""The commands `plan`, `fit` and `demo`, and their summary of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .show import (
    Json,
    Overwrite,
    Settings,
    announces_compilation,
    format_value,
    print_json,
    print_line,
    print_result,
    show_values,
    stderr_console,
)

if TYPE_CHECKING:
    from scalelatent.jobs.runfolder import RunFolder
    from scalelatent.jobs.spec import Job

Measure = Annotated[bool, typer.Option("--measure", help="Measure the rates of this machine again.")]
JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file (TOML).")]
Out = Annotated[str | None, typer.Option("--out", help="Run folder; overrides the key out of the job file.")]


def _load(job: Path, settings: list[str] | None, out: str | None) -> Job:
    from scalelatent.jobs.resolve import load_job

    extra = [] if out is None else [f"job.out={out}"]
    return load_job(job, settings=[*(settings or []), *extra])


@announces_compilation()
def plan(
    job: JobFile,
    settings: Settings = None,
    out: Out = None,
    measure: Measure = False,
    details: Annotated[
        bool, typer.Option("--details", help="Also print default values, and estimates of each stage.")
    ] = False,
    json: Json = False,
) -> None:
    """Estimate the time, memory and disk space of a job; refuse a job that cannot fit."""
    from scalelatent.engine.rates import rates
    from scalelatent.jobs.planning import outline_plan, plan_job, plan_lines

    resolved = _load(job, settings, out)
    if measure:
        rates.measure_again()
    needs = plan_job(resolved, print_line=print_line)
    if json:
        print_json({"job": resolved.to_dict(), "plan": needs})
        return
    for line in plan_lines(needs):
        typer.echo(line)
    details = details or needs.pop("summary", None) is None  # a model of another package has no summary
    show_values(needs if details else outline_plan(needs), title="plan")
    show_job(resolved, details)
    if not details:
        typer.echo(f"default values, and estimates of each stage: scalelatent plan {job} --details")


def show_job(job: Job, details: bool) -> None:
    """Print the values of a job and their origins, with or without default values."""
    origins = {name: job.origins.get(name, "default") for name in job.values()}
    values = {name: value for name, value in job.values().items() if details or origins[name] != "default"}
    width = max(map(len, values))
    texts = {name: "none" if value is None else str(value) for name, value in values.items()}
    column = min(44, max(map(len, texts.values())))
    typer.echo(typer.style("job", bold=True))
    for name, text in texts.items():
        origin = origins[name]
        if text != "none" or origin != "default":
            typer.echo(f"  {name:<{width}}  {text:<{column}}  {origin}")


def fit(job: JobFile, settings: Settings = None, out: Out = None, json: Json = False) -> None:
    """Run a job: fit, score and save the model, and write the report."""
    _run(_load(job, settings, out), None, json)


def demo(
    rows: Annotated[
        int, typer.Option(min=1000, envvar="SCALELATENT_DEMO_ROWS", help="Training images to generate.")
    ] = 1_000_000,
    out: Annotated[
        str, typer.Option("--out", envvar="SCALELATENT_DEMO_OUT", help="Folder to write.")
    ] = "scalelatent-demo",
    workers: Annotated[int, typer.Option(min=1, help="Dask workers to start.")] = 2,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Run an example: fit a model to a million generated images of digits."""
    from scalelatent.jobs.demo import prepare

    from .show import progress_bar

    with announces_compilation() as unprinted, progress_bar("generating digits") as progress:
        resolved = prepare(
            out, rows=rows, workers=workers, overwrite=overwrite, progress=progress, print_line=print_line
        )
    data = resolved.data
    also = {"job": str(Path(out, "job.toml")), "train": data.train, "test": data.test}
    _run(resolved, None, json, also, announced=not unprinted)
    print_line(
        "the test error exceeds the validation error because other people wrote the test digits; other "
        "classifiers err more on these digits, too"
    )


def _run(
    job: Job,
    folder: RunFolder | None,
    json: bool,
    also: dict[str, Any] | None = None,
    announced: bool = False,
) -> None:
    """Run a new job, or resume the job of a run folder, with live progress; print a summary."""
    from scalelatent.jobs.planning import plan_job, plan_lines
    from scalelatent.jobs.runfolder import RunFolder
    from scalelatent.jobs.runner import run_job, run_new_job
    from scalelatent.monitor.progress import ProgressDisplay

    where = job.job.out if folder is None else folder.url
    if folder is None:
        RunFolder.unused(where)
        # Announce the kernels that the plan compiles; `ProgressDisplay` announces those of the fit.
        with announces_compilation(announced) as unprinted:
            needs = plan_job(job, print_line=print_line)
        announced = not unprinted
        for line in plan_lines(needs):
            print_line(line)
    try:
        with ProgressDisplay(stderr_console(), announced=announced) as progress:
            if folder is None:
                result = run_new_job(job, callbacks=[progress], print_line=print_line)
            else:
                result = run_job(job, folder, callbacks=[progress], resume=True, print_line=print_line)
    except KeyboardInterrupt:
        text = f"stopped; resume from the last checkpoint with: scalelatent resume {where}"
        raise KeyboardInterrupt(text) from None
    for warning in result.warnings:
        print_line(f"warning: {warning}")
    _finish(_summary(result.folder) | (also or {}), json)


def _summary(folder: RunFolder) -> dict[str, Any]:
    state = folder.read_state()
    keys = ["id", "state", "pass", "objective", "train_error", "validation_error", "best_validation_error"]
    if state["state"] == "done" and state.get("best_validation_error") is not None:
        # The saved model has the weights of the best pass, so the errors of the last pass are not its errors.
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
    values["run"] = folder.url
    if folder.has_model:
        values["model"] = folder.model_url
    if folder.has_report:
        values["report"] = folder.report_url
    return values


def _finish(values: dict[str, Any], json: bool) -> None:
    print_result(values, json, title=format_value(values["state"]))
