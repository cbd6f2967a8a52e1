"""``scalelatent data``: bring rows in, make rows, look at rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_show import Json, Overwrite, emit, progress_bar, show_values, verb

app = typer.Typer(no_args_is_help=True, help="Import, make and look at datasets.")
imports = typer.Typer(no_args_is_help=True, help="Import a file of images into a dataset, block by block.")
makes = typer.Typer(no_args_is_help=True, help="Make datasets of any size.")
app.add_typer(imports, name="import")
app.add_typer(makes, name="make")

Out = Annotated[str, typer.Argument(metavar="OUT", help="The dataset to write, for example mnist.zarr.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The file to read.")]


@imports.command("idx")
@verb
def import_idx(
    images: Annotated[Path, typer.Argument(metavar="IMAGES", help="IDX file of images, .gz or plain.")],
    labels: Annotated[Path, typer.Argument(metavar="LABELS", help="IDX file of labels, .gz or plain.")],
    out: Out,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import a pair of IDX files, the format of MNIST."""
    from scalelatent.data import import_idx as run

    with progress_bar(f"importing {images.name}") as progress:
        dataset = run(images, labels, out, progress=progress, overwrite=overwrite)
    _tell(dataset, json)


@imports.command("npz")
@verb
def import_npz(
    file: File,
    out: Out,
    x: Annotated[str | None, typer.Option(help="Key of the rows; found by itself if named x or X.")] = None,
    y: Annotated[str | None, typer.Option(help="Key of the labels; found by itself if named y or Y.")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import arrays of a NumPy .npz file."""
    from scalelatent.data import import_npz as run

    with progress_bar(f"importing {file.name}") as progress:
        dataset = run(file, out, x=x, y=y, progress=progress, overwrite=overwrite)
    _tell(dataset, json)


@imports.command("npy")
@verb
def import_npy(
    file: File,
    out: Out,
    y: Annotated[Path | None, typer.Option("--y", metavar="FILE", help="A .npy file of labels.")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import a NumPy .npy file of rows, and perhaps one of labels."""
    from scalelatent.data import import_npy as run

    with progress_bar(f"importing {file.name}") as progress:
        dataset = run(file, out, y=y, progress=progress, overwrite=overwrite)
    _tell(dataset, json)


@makes.command("digits")
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
    _tell(dataset, json)


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


@app.command("info")
@verb
def info(
    url: Annotated[str, typer.Argument(metavar="DATA", help="A dataset.")],
    json: Json = False,
) -> None:
    """Say what a dataset holds."""
    from scalelatent.data import open_dataset

    _tell(open_dataset(url), json)


def _tell(dataset: Any, as_json: bool) -> None:
    values = describe(dataset)
    if as_json:
        emit(values)
    else:
        show_values(values, title=str(values["url"]))


def describe(dataset: Any) -> dict[str, Any]:
    """Return what `data info` prints."""
    classes = dataset.classes
    values: dict[str, Any] = {
        "url": dataset.url,
        "rows": dataset.n_rows,
        "features": dataset.n_features,
        "feature_shape": list(dataset.feature_shape),
        "dtype": str(dataset.dtype),
        "labels": dataset.has_y,
        "classes": None
        if classes is None
        else [item.item() if hasattr(item, "item") else item for item in classes],
        "data_bytes": dataset.n_rows * dataset.n_features * dataset.dtype.itemsize,
    }
    pieces = dataset.pieces(0, dataset.n_rows)
    values["pieces"] = len(pieces)
    values["rows_per_piece"] = max((stop - start for start, stop in pieces), default=0)
    for key in ("format_version", "provenance", "fingerprint"):
        if dataset.attrs.get(key) is not None:
            values[key] = dataset.attrs[key]
    return values
