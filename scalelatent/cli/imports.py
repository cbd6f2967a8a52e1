"""``scalelatent data import``: bring rows in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .data import tell
from .show import Json, Overwrite, progress_bar, verb

app = typer.Typer(no_args_is_help=True, help="Import rows from files into a dataset, block by block.")

Out = Annotated[str, typer.Argument(metavar="OUT", help="The dataset to write, for example mnist.zarr.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The file to read.")]


@app.command("idx")
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
    tell(dataset, json)


@app.command("npz")
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
    tell(dataset, json)


@app.command("npy")
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
    tell(dataset, json)
