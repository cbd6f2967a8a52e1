"""The command line, ``scalelatent``.

Verbs only read arguments and print; what they do lives in `scalelatent.jobs` and is there for Python too.
How they end, and with which exit code, is told in `exits`.
Nothing heavy is imported before a verb needs it: ``scalelatent --help`` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from scalelatent.errors import JobError

from . import cluster, data, imports, jobs, makes, run
from .exits import INTERRUPTED, ended_in_one_line, is_usage, tell_usage
from .show import (
    Json,
    Overwrite,
    Verbs,
    answer,
    arguments_of_process,
    emit,
    kernels_told,
    progress_bar,
    say,
    show_table,
    strip_debug,
)

__all__ = ["app", "main"]


class _KindsTold(TyperGroup):
    """Names the kinds of models, ours and those of other packages, where help is asked for."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from scalelatent.contract.kinds import known_kinds

        kinds = sorted(kind.name for kind in known_kinds().values() if not kind.python_only)
        self.epilog = f"Models: {', '.join(kinds)}. Start with: scalelatent demo"
        super().format_help(ctx, formatter)


app = Verbs(
    cls=_KindsTold,
    pretty_exceptions_enable=False,
    help="Fit latent-variable models to data sets of any size, out of core, on one machine or a cluster.",
)
model_app = Verbs(help="Look at fitted models.")
data.app.add_typer(imports.app, name="import")
data.app.add_typer(makes.app, name="make")
app.add_typer(data.app, name="data")
app.add_typer(cluster.app, name="cluster")
for _name in ("plan", "fit", "schema"):
    app.command(_name)(getattr(run, _name))
for _name in ("submit", "status", "logs", "attach", "cancel", "resume"):
    app.command(_name)(getattr(jobs, _name))

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="A run folder or a saved model: a path or an address.")
]
Data = Annotated[str, typer.Argument(metavar="DATA", help="A dataset.")]
OutData = Annotated[str, typer.Option("--out", metavar="OUT.zarr", help="The dataset to write.")]
RowsOption = Annotated[str | None, typer.Option("--rows", metavar="START:STOP", help="Only these rows.")]
Target = Annotated[str | None, typer.Option("--target", help="Dataset of the binary outputs, row by row.")]


def _version(wanted: bool) -> None:
    if wanted:
        from scalelatent import __version__

        typer.echo(f"scalelatent {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (anywhere).")
    ] = False,
) -> None:
    pass  # both are dealt with before: see _version and strip_debug


@app.command()
@kernels_told()
def predict(
    run: Run,
    data: Data,
    out: OutData,
    rows: RowsOption = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write the predicted class, or the binary outputs, of every row as a dataset."""
    _map_rows("predict", run, data, rows, out, overwrite, json)


@app.command()
@kernels_told()
def transform(
    run: Run,
    data: Data,
    out: OutData,
    rows: RowsOption = None,
    layer: Annotated[
        int | None,
        typer.Option("--layer", help="Of a bootstrap network: of which layer, from 1, or from the end (-1)."),
    ] = None,
    codes: Annotated[
        bool, typer.Option("--codes", help="Of a bootstrap network: codes, not their components.")
    ] = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write the latent variables of every row as a dataset."""
    _map_rows("codes" if codes else "transform", run, data, rows, out, overwrite, json, layer)


def _map_rows(
    method: str,
    run: str,
    data: str,
    rows: str | None,
    out: str,
    overwrite: bool,
    as_json: bool,
    layer: int | None = None,
) -> None:
    from scalelatent.jobs.datasets import open_rows
    from scalelatent.jobs.runs import load_run, write_rows

    estimator, _ = load_run(run)
    written = write_rows(estimator, method, open_rows(data, rows), out, layer=layer, overwrite=overwrite)
    answer({"written": out, "rows": written.n_rows}, as_json)


@app.command()
@kernels_told()
def score(
    run: Run,
    data: Data,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            help="Of a classifier accuracy, error, balanced_accuracy, f1_macro, log_loss, confusion; of "
            "binary outputs all, changed; of parts of images compression, score; of another model nmi, "
            "accuracy (of k-means clusters), retrieval; several with commas, or repeated.",
        ),
    ] = None,
    rows: RowsOption = None,
    target: Target = None,
    json: Json = False,
) -> None:
    """Score a run on a dataset with labels, or with binary outputs."""
    from scalelatent.evaluation.scoring import score_dataset
    from scalelatent.jobs.datasets import open_rows
    from scalelatent.jobs.runs import load_run

    dataset = open_rows(data, rows, target=target)
    estimator, _ = load_run(run)
    wanted = [name.strip() for text in metric or () for name in text.split(",")]
    with progress_bar("scoring") as progress:
        scores = score_dataset(estimator, dataset, wanted or None, progress=progress)
    answer({"rows": dataset.n_rows, **scores}, json, title=f"{run} on {data}")


@app.command()
@kernels_told()
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")],
    data: Annotated[
        str | None, typer.Argument(metavar="[DATA]", help="A dataset to show; that of the job by default.")
    ] = None,
    rows: RowsOption = None,
    target: Target = None,
    json: Json = False,
) -> None:
    """Write the report of a run again, on the rows of its job or on others."""
    from scalelatent.jobs.datasets import open_rows
    from scalelatent.jobs.runs import write_report

    if data is None and (rows is not None or target is not None):
        raise JobError("--rows and --target are of DATA: scalelatent report RUN DATA --rows START:STOP")
    shown = None if data is None else open_rows(data, rows, target=target)
    with progress_bar("report") as progress:
        path = write_report(run, data=shown, tell=say, progress=progress)
    answer({"report": path}, json, line=path)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Run folders, finished or not.")],
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FOLDER", help="Write a page with a figure there, too (index.html)."),
    ] = None,
    json: Json = False,
) -> None:
    """Put runs side by side: what their jobs have differently, errors, passes, seconds, rows."""
    from scalelatent.jobs.comparing import compare_runs

    compared = compare_runs(runs)
    if out is not None:
        from scalelatent.report import write_comparison

        compared["page"] = write_comparison(compared, out)
    if json:
        emit(compared)
        return
    from scalelatent.report import comparison_tables

    for caption, columns, rows in comparison_tables(compared):
        show_table(columns, rows, title=caption)
    for note in compared["notes"]:
        say(f"note: {note}")
    if out is not None:
        typer.echo(compared["page"])


@model_app.command("info")
def model_info(run: Run, json: Json = False) -> None:
    """Say what a fitted model is: its parameters, and what it learned."""
    from scalelatent.jobs.runs import load_run
    from scalelatent.jobs.runs import model_info as describe

    answer(describe(load_run(run)[0]), json, title=run)


app.add_typer(model_app, name="model")


app.command("doctor")(cluster.doctor)
app.command("warm")(cluster.warm)
app.command("demo")(run.demo)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    given = strip_debug(arguments_of_process() if arguments is None else arguments)
    sys.exit(_run(given))


def _run(given: list[str]) -> int:
    as_json = "--json" in given
    try:
        with ended_in_one_line(as_json):
            return app(given, prog_name="scalelatent", standalone_mode=False) or 0
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        if not is_usage(error):
            raise
        return tell_usage(error, as_json)
    return 0
