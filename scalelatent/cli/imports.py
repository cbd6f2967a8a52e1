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


@app.command("csr")
@verb
def import_csr(
    file: File,
    out: Out,
    csr_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="P", help="The rows are P_data, P_indices, P_indptr; found by itself if x or X."
        ),
    ] = None,
    values: Annotated[
        str | None, typer.Option(metavar="V", help="Take the values P_V instead of P_data.")
    ] = None,
    y: Annotated[
        str | None,
        typer.Option(help="Labels: a key, a CSR prefix (multi-labels) or a file; found by itself if y or Y."),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import sparse (CSR) rows of a .npz file, scipy's own or with arrays of any prefix."""
    from scalelatent.data import import_csr as run

    with progress_bar(f"importing {file.name}") as progress:
        dataset = run(
            file, out, csr_prefix=csr_prefix, values=values, y=y, progress=progress, overwrite=overwrite
        )
    tell(dataset, json)


@app.command("svmlight")
@verb
def import_svmlight(
    file: File,
    out: Out,
    zero_based: Annotated[
        bool | None,
        typer.Option("--zero-based/--one-based", help="How columns count; found by itself by default."),
    ] = None,
    features: Annotated[
        int | None, typer.Option(min=1, help="Number of columns; by default up to the highest there is.")
    ] = None,
    multilabel: Annotated[
        bool | None,
        typer.Option("--multilabel/--single-label", help="Whether rows have several labels, as in 3,17."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float64, or float32 for half the room.")] = "float64",
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import svmlight (libsvm) text, plain or gzip, as sparse rows."""
    from scalelatent.data import import_svmlight as run

    based: bool | str = "auto" if zero_based is None else zero_based
    with progress_bar(f"importing {file.name}") as progress:
        dataset = run(
            file, out, zero_based=based, n_features=features, multilabel=multilabel, dtype=dtype,
            progress=progress, overwrite=overwrite,
        )  # fmt: skip
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
