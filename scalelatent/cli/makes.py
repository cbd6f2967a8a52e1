"""``scalelatent data make``: rows without end."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .data import tell
from .show import Json, Overwrite, progress_bar, verb

app = typer.Typer(no_args_is_help=True, help="Make datasets of any size.")

Out = Annotated[str, typer.Argument(metavar="OUT", help="The dataset to write, for example digits.zarr.")]


@app.command("digits")
@verb
def make_digits(
    out: Out,
    rows: Annotated[int, typer.Option(min=1, help="How many images.")],
    base: Annotated[
        str, typer.Option(help="A dataset to vary, such as MNIST; or scikit-learn's digits.")
    ] = "digits",
    base_rows: Annotated[
        str | None,
        typer.Option(metavar="START:STOP", help="The rows of the base that are used; all by default."),
    ] = None,
    start: Annotated[
        int | None, typer.Option(min=0, help="Index of the first image; by default the originals come first.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the deformations.")] = 0,
    alpha: Annotated[float, typer.Option(help="Strength of the deformation.")] = 1.0,
    beta: Annotated[float, typer.Option(help="Strength of the thickening.")] = 0.0,
    shift: Annotated[bool, typer.Option("--shift", help="Also shift by up to one pixel.")] = False,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Threads; all cores by default.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where a broken-off command stopped.")
    ] = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Make digits without end.

    Every image is an image of the base, bent a little, in a way that its index alone decides.
    """
    from scalelatent.data import make_digits as run

    how: dict[str, Any] = {"seed": seed, "alpha": alpha, "beta": beta, "shift": shift}
    used = _pair(base_rows)
    with progress_bar("making digits") as progress:
        dataset = run(
            out, rows, base=base, base_rows=used, start=start, **how,
            n_jobs=jobs, resume=resume, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    tell(dataset, json)


@app.command("documents")
@verb
def make_documents(
    out: Out,
    rows: Annotated[int, typer.Option(min=1, help="How many documents.")],
    base: Annotated[str, typer.Option(help="A dataset of sparse word counts to draw from.")],
    base_rows: Annotated[
        str | None,
        typer.Option(metavar="START:STOP", help="The rows of the base that are used; all by default."),
    ] = None,
    start: Annotated[int, typer.Option(min=0, help="Index of the first document.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Threads; all cores by default.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where a broken-off command stopped.")
    ] = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Make documents without end.

    Every document is as long as a document of the base and has words drawn from it, in a way that its index
    alone decides; labels are those of the base.
    """
    from scalelatent.data import make_documents as run

    used = _pair(base_rows)
    with progress_bar("making documents") as progress:
        dataset = run(
            out, rows, base=base, base_rows=used, start=start, seed=seed,
            n_jobs=jobs, resume=resume, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    tell(dataset, json)


def _pair(rows: str | None) -> tuple[int, int] | None:
    from scalelatent.errors import JobError
    from scalelatent.jobs.spec import parse_rows

    if rows is None:
        return None
    try:
        run = parse_rows(rows)
    except ValueError as error:
        raise JobError(f"--base-rows: {error}") from None
    if run.stop is None or run.stop < 0 or (run.start or 0) < 0:
        raise JobError(f'--base-rows {rows}: both ends count from the first row; write for example "0:50000"')
    return run.start or 0, run.stop
