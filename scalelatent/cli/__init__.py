"""The command line, ``scalelatent``.

Verbs read arguments and print results; `scalelatent.jobs` does the work, also for Python code. `exits`
defines the exit codes. Verbs import heavy packages only when they need them, so that ``scalelatent --help``
answers at once.
"""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from scalelatent.errors import JobError

from . import cluster, data, imports, jobs, makes, run
from .exits import INTERRUPTED, exits_with_one_line, is_usage, print_usage_error
from .show import (
    Json,
    Overwrite,
    VerbGroup,
    announces_compilation,
    print_line,
    print_result,
    progress_bar,
    strip_debug,
)

__all__ = ["app", "main"]


class _GroupWithKinds(TyperGroup):
    """Group of commands whose help lists the kinds of models, including those of other packages."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from scalelatent.contract.kinds import load_all_kinds

        kinds = sorted(kind.name for kind in load_all_kinds().values() if not kind.python_only)
        self.epilog = f"Models: {', '.join(kinds)}. Start with: scalelatent demo"
        super().format_help(ctx, formatter)


app = VerbGroup(
    cls=_GroupWithKinds,
    pretty_exceptions_enable=False,
    help="Fit latent-variable models to datasets larger than memory, on one machine or a Dask cluster.",
)
model_app = VerbGroup(help="Show fitted models.")
data.app.add_typer(imports.app, name="import")
data.app.add_typer(makes.app, name="make")
app.add_typer(data.app, name="data")
app.add_typer(cluster.app, name="cluster")
for _name in ("plan", "fit"):
    app.command(_name)(getattr(run, _name))
for _name in ("submit", "status", "logs", "attach", "cancel", "resume"):
    app.command(_name)(getattr(jobs, _name))

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="Path or address of a run folder or of a saved model.")
]
Data = Annotated[str, typer.Argument(metavar="DATA", help="Path or address of a dataset.")]
OutData = Annotated[str, typer.Option("--out", metavar="OUT.zarr", help="Dataset to write.")]
RowsOption = Annotated[str | None, typer.Option("--rows", metavar="START:STOP", help="Use only these rows.")]
Target = Annotated[
    str | None, typer.Option("--target", help="Dataset with the binary outputs of DATA, row by row.")
]


def _version(given: bool) -> None:
    if given:
        from scalelatent import __version__

        typer.echo(f"scalelatent {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may also follow the verb.")
    ] = False,
) -> None:
    pass  # `_version` prints the version; `main` removes --debug from the arguments before typer reads them


@app.command()
@announces_compilation()
def predict(
    run: Run,
    data: Data,
    out: OutData,
    rows: RowsOption = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Predict the class, or the binary outputs, of each row, and write them as a dataset."""
    _map_rows("predict", run, data, rows, out, overwrite, json)


@app.command()
@announces_compilation()
def transform(
    run: Run,
    data: Data,
    out: OutData,
    rows: RowsOption = None,
    layer: Annotated[
        int | None,
        typer.Option("--layer", help="Layer of a bootstrap network: from 1, or from the end (-1)."),
    ] = None,
    codes: Annotated[
        bool, typer.Option("--codes", help="Write the cluster codes of a bootstrap network, not components.")
    ] = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Compute the latent variables of each row, and write them as a dataset."""
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
    print_result({"written": out, "rows": written.n_rows}, as_json)


@app.command()
@announces_compilation()
def score(
    run: Run,
    data: Data,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            help="Metric; repeat, or separate several by commas. Classifiers: accuracy, error, "
            "balanced_accuracy, f1_macro, log_loss, confusion. Binary outputs: all, changed. Compositional "
            "networks: compression, score. Other models: nmi, accuracy (of k-means clusters), retrieval.",
        ),
    ] = None,
    rows: RowsOption = None,
    target: Target = None,
    json: Json = False,
) -> None:
    """Score a model on a dataset with labels or binary outputs."""
    from scalelatent.evaluation.scoring import score_dataset
    from scalelatent.jobs.datasets import open_rows
    from scalelatent.jobs.runs import load_run

    dataset = open_rows(data, rows, target=target)
    estimator, _ = load_run(run)
    metrics = [name.strip() for text in metric or () for name in text.split(",")]
    with progress_bar("scoring") as progress:
        scores = score_dataset(estimator, dataset, metrics or None, progress=progress)
    print_result({"rows": dataset.n_rows, **scores}, json, title=f"{run} on {data}")


@app.command()
@announces_compilation()
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")],
    data: Annotated[
        str | None, typer.Argument(metavar="DATA", help="Dataset for the figures; by default of the job.")
    ] = None,
    rows: RowsOption = None,
    target: Target = None,
    json: Json = False,
) -> None:
    """Write the report of a run again, with the rows of its job or with other rows."""
    from scalelatent.jobs.datasets import open_rows
    from scalelatent.jobs.runs import write_report

    if data is None and (rows is not None or target is not None):
        raise JobError("--rows and --target need DATA: scalelatent report RUN DATA --rows START:STOP")
    shown = None if data is None else open_rows(data, rows, target=target)
    with progress_bar("report") as progress:
        path = write_report(run, data=shown, print_line=print_line, progress=progress)
    print_result({"report": path}, json, line=path)


@model_app.command("info")
def model_info(run: Run, json: Json = False) -> None:
    """Show the parameters and the learned values of a fitted model."""
    from scalelatent.jobs.runs import load_run
    from scalelatent.jobs.runs import model_info as describe

    print_result(describe(load_run(run)[0]), json, title=run)


app.add_typer(model_app, name="model")


app.command("doctor")(cluster.doctor)
app.command("warm")(cluster.warm)
app.command("demo")(run.demo)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    given = strip_debug(sys.argv[1:] if arguments is None else arguments)
    warnings.formatwarning = _format_warning
    try:
        sys.exit(_run(given))
    finally:
        warnings.formatwarning = _python_format


_python_format = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return the line for a warning; warnings to users do not name a position in the code."""
    if issubclass(category, UserWarning):
        return f"warning: {message}\n"
    return _python_format(message, category, filename, lineno, line)


def _run(given: list[str]) -> int:
    as_json = "--json" in given
    try:
        with exits_with_one_line(as_json):
            return app(given, prog_name="scalelatent", standalone_mode=False) or 0
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        if not is_usage(error):
            raise
        return print_usage_error(error, as_json)
    return 0
