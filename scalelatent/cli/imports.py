"""``scalelatent data import``: bring rows in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from scalelatent import data
from scalelatent.errors import DataError, JobError
from scalelatent.storage.disk import file_name

from .data import KeyOfLabels, KeyOfRows, tell
from .show import Json, Overwrite, Verbs, kernels_told, pixels_of, progress_bar, say, with_options

if TYPE_CHECKING:
    from scalelatent.data import Dataset

app = Verbs(help="Import rows from files into a dataset, block by block.")

Out = Annotated[str, typer.Argument(metavar="OUT", help="The dataset to write, for example mnist.zarr.")]
File = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="The file to read: a path, s3://bucket/key, gs://bucket/key, https://…#sha256=…"
    ),
]
Table = Annotated[
    str,
    typer.Argument(
        metavar="FILE|FOLDER|GLOB",
        help="A file, a folder of them or a pattern with *; also s3://…, gs://…",
    ),
]


class Taking(NamedTuple):
    """How rows are written, wherever they come from."""

    shuffle: Annotated[
        int | None,
        typer.Option(
            "--shuffle", metavar="SEED", min=0, help="Shuffle all rows; the seed decides the order."
        ),
    ] = None
    overwrite: Overwrite = False
    json: Json = False


class Columns(NamedTuple):
    """Columns of a table."""

    label: Annotated[str | None, typer.Option("--label", metavar="COL", help="Column of labels.")] = None
    weight: Annotated[str | None, typer.Option("--weight", metavar="COL", help="Column of row weights.")] = (
        None
    )
    features: Annotated[
        str | None,
        typer.Option("--features", metavar="A,B,…", help="Columns of a row; by default all others."),
    ] = None

    def options(self) -> dict[str, Any]:
        """Of functions that import tables."""
        names = self.features and [name.strip() for name in self.features.split(",")]
        return {"label": self.label, "weight": self.weight, "features": names}


class Look(NamedTuple):
    """Size and colours of images."""

    size: Annotated[
        str | None, typer.Option("--size", metavar="HxW", help="Resize all to this height and width.")
    ] = None
    crop: Annotated[
        bool, typer.Option("--crop", help="With --size: cut the middle out instead of stretching.")
    ] = False
    gray: Annotated[bool, typer.Option("--gray", help="Make all gray.")] = False
    rgb: Annotated[bool, typer.Option("--rgb", help="Make all coloured.")] = False

    def options(self) -> dict[str, Any]:
        """Of functions that import images."""
        if self.gray and self.rgb:
            raise JobError("--gray and --rgb exclude each other; give one of them")
        color = "gray" if self.gray else "rgb" if self.rgb else None
        return {"size": pixels_of(self.size, "--size"), "crop": self.crop, "color": color}


class Source(NamedTuple):
    """Where a dataset with a name comes from."""

    part: Annotated[str, typer.Option("--part", metavar="train|test|all", help="Which of its rows.")] = (
        "train"
    )
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            metavar="FOLDER",
            envvar="SCALELATENT_CACHE",
            help="Where downloads are kept; the user's cache by default.",
        ),
    ] = None
    mirror: Annotated[
        str | None, typer.Option("--mirror", metavar="URL", help="A folder on a server that has the files.")
    ] = None


taking_rows = with_options("taking", Taking)
with_columns = with_options("columns", Columns)
with_look = with_options("look", Look)
with_source = with_options("source", Source)


def _take(
    run: Callable[..., Dataset], title: str, *files: object, taking: Taking, unit: str = "rows", **how: Any
) -> Dataset:
    with progress_bar(f"importing {title}", unit) as progress:
        return run(*files, **how, progress=progress, shuffle=taking.shuffle, overwrite=taking.overwrite)


@app.command("idx")
@taking_rows
def import_idx(
    images: Annotated[str, typer.Argument(metavar="IMAGES", help="IDX file of images, .gz or plain.")],
    labels: Annotated[str, typer.Argument(metavar="LABELS", help="IDX file of labels, .gz or plain.")],
    out: Out,
    *,
    taking: Taking,
) -> None:
    """Import a pair of IDX files, the format of MNIST."""
    tell(_take(data.import_idx, file_name(images), images, labels, out, taking=taking), taking.json)


@app.command("npz")
@taking_rows
def import_npz(file: File, out: Out, x: KeyOfRows = None, y: KeyOfLabels = None, *, taking: Taking) -> None:
    """Import arrays of a NumPy .npz file."""
    tell(_take(data.import_npz, file_name(file), file, out, x=x, y=y, taking=taking), taking.json)


@app.command("csr")
@taking_rows
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
    *,
    taking: Taking,
) -> None:
    """Import sparse (CSR) rows of a .npz file, scipy's own or with arrays of any prefix."""
    how: dict[str, Any] = {"csr_prefix": csr_prefix, "values": values, "y": y}
    tell(_take(data.import_csr, file_name(file), file, out, **how, taking=taking), taking.json)


@app.command("svmlight")
@taking_rows
@kernels_told()
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
    *,
    taking: Taking,
) -> None:
    """Import svmlight (libsvm) text, plain or gzip, as sparse rows."""
    based: bool | str = "auto" if zero_based is None else zero_based
    how: dict[str, Any] = {"zero_based": based, "n_features": features, "multilabel": multilabel}
    dataset = _take(data.import_svmlight, file_name(file), file, out, **how, dtype=dtype, taking=taking)
    tell(dataset, taking.json)


@app.command("npy")
@taking_rows
def import_npy(
    file: File,
    out: Out,
    y: Annotated[str | None, typer.Option("--y", metavar="FILE", help="A .npy file of labels.")] = None,
    *,
    taking: Taking,
) -> None:
    """Import a NumPy .npy file of rows, and perhaps one of labels."""
    tell(_take(data.import_npy, file_name(file), file, out, y=y, taking=taking), taking.json)


@app.command("hdf5")
@taking_rows
def import_hdf5(
    file: File,
    out: Out,
    x: KeyOfRows = None,
    y: KeyOfLabels = None,
    allow_external: Annotated[
        bool,
        typer.Option(
            "--allow-external", help="Read arrays that lie in other files, too: any that are named."
        ),
    ] = False,
    *,
    taking: Taking,
) -> None:
    """Import arrays of an HDF5 file.

    Keys are paths where there are groups: --x train/data --y train/target.
    """
    how: dict[str, Any] = {"x": x, "y": y, "allow_external": allow_external}
    tell(_take(data.import_hdf5, file_name(file), file, out, **how, taking=taking), taking.json)


@app.command("h5ad")
@taking_rows
def import_h5ad(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="An .h5ad file, or a folder that AnnData.write_zarr wrote.")
    ],
    out: Out,
    layer: Annotated[
        str | None, typer.Option(metavar="L", help="Layer that holds the rows; X by default.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of obs that holds the labels.")
    ] = None,
    *,
    taking: Taking,
) -> None:
    """Import an AnnData file, with sparse (CSR) or dense rows."""
    how: dict[str, Any] = {"layer": layer, "label": label}
    tell(_take(data.import_h5ad, file_name(file), file, out, **how, taking=taking), taking.json)


@app.command("mat")
@taking_rows
def import_mat(
    file: File,
    out: Out,
    x: KeyOfRows = None,
    y: KeyOfLabels = None,
    rows_last: Annotated[
        bool, typer.Option("--rows-last", help="Rows lie along the last axis, as in images h x w x n.")
    ] = False,
    *,
    taking: Taking,
) -> None:
    """Import variables of a MATLAB file.

    Files of version 7.3 are streamed; older ones are read whole, a variable at a time.
    """
    how: dict[str, Any] = {"x": x, "y": y, "rows_last": rows_last}
    tell(_take(data.import_mat, file_name(file), file, out, **how, taking=taking), taking.json)


@app.command("parquet")
@with_columns
@taking_rows
def import_parquet(file: Table, out: Out, *, columns: Columns, taking: Taking) -> None:
    """Import columns of Parquet files."""
    how = columns.options()
    tell(_take(data.import_parquet, file_name(file), file, out, **how, taking=taking), taking.json)


@app.command("csv")
@with_columns
@taking_rows
def import_csv(file: Table, out: Out, *, columns: Columns, taking: Taking) -> None:
    """Import columns of CSV files with a line of names, plain or compressed.

    Features are read as float64.
    """
    how = columns.options()
    tell(_take(data.import_csv, file_name(file), file, out, **how, taking=taking), taking.json)


@app.command("arrow")
@with_columns
@taking_rows
def import_arrow(file: Table, out: Out, *, columns: Columns, taking: Taking) -> None:
    """Import columns of Arrow (Feather) files."""
    how = columns.options()
    tell(_take(data.import_arrow, file_name(file), file, out, **how, taking=taking), taking.json)


@app.command("hf")
@with_columns
@with_look
@taking_rows
def import_hf(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="What save_to_disk wrote.")],
    out: Out,
    split: Annotated[str | None, typer.Option(metavar="NAME", help="Which split, for example train.")] = None,
    *,
    columns: Columns,
    look: Look,
    taking: Taking,
) -> None:
    """Import a Hugging Face dataset on disk: columns of numbers, or of images."""
    how = {"split": split, **columns.options(), **look.options()}
    tell(_take(data.import_hf, file_name(folder), folder, out, **how, taking=taking), taking.json)


@app.command("zarr")
@taking_rows
def import_zarr(
    file: Annotated[
        str,
        typer.Argument(
            metavar="ZARR|REFS", help="A zarr array or group, or references to parts of files (.json, .parq)."
        ),
    ],
    out: Out,
    x: KeyOfRows = None,
    y: KeyOfLabels = None,
    *,
    taking: Taking,
) -> None:
    """Import zarr arrays made elsewhere, also virtual ones (kerchunk)."""
    tell(_take(data.import_zarr, file_name(file), file, out, x=x, y=y, taking=taking), taking.json)


@app.command("images")
@with_look
@taking_rows
def import_images(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder of image files, or of one folder per class.")
    ],
    out: Out,
    *,
    look: Look,
    no_labels: Annotated[
        bool, typer.Option("--no-labels", help="The names of folders are not classes.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out and count what is unreadable or of another size.")
    ] = False,
    taking: Taking,
) -> None:
    """Import a folder of images, labelled by the folders they lie in."""
    how = {**look.options(), "labels": not no_labels, "skip_bad": skip_bad}
    dataset = _take(data.import_images, folder.name, folder, out, **how, taking=taking, unit="images")
    skipped = _noted(dataset, "skipped")
    if skipped and skipped["first"]:
        say(
            f"skipped {skipped['unreadable']} unreadable images and {skipped['unlike_first']} of another "
            f"size or kind; the first: {', '.join(skipped['first'])}"
        )
    tell(dataset, taking.json)


@app.command("digits")
@taking_rows
def import_digits(out: Out, *, taking: Taking) -> None:
    """Import scikit-learn's digits: 1,797 images 8 x 8; nothing is downloaded."""
    tell(_take(data.import_named, "digits", "digits", out, taking=taking), taking.json)


@app.command("mnist")
@with_source
@taking_rows
def import_mnist(out: Out, *, source: Source, taking: Taking) -> None:
    """Import MNIST: downloaded once, checked, kept in a cache."""
    _import_named("mnist", out, source, taking)


@app.command("fashion-mnist")
@with_source
@taking_rows
def import_fashion_mnist(out: Out, *, source: Source, taking: Taking) -> None:
    """Import Fashion-MNIST: downloaded once, checked, kept in a cache."""
    _import_named("fashion-mnist", out, source, taking)


@app.command("rcv1")
@with_source
@taking_rows
@kernels_told()
def import_rcv1(
    out: Out,
    *,
    source: Source,
    tokens: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A token file, lyrl2004_tokens_*.dat[.gz]; repeatable, rows in this order."
        ),
    ] = None,
    topics: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The topics, rcv1-v2.topics.qrels[.gz], of --tokens.")
    ] = None,
    stems: Annotated[int, typer.Option(min=1, help="With --tokens: so many of the commonest stems.")] = 2000,
    leaf_topics: Annotated[
        bool, typer.Option("--leaf-topics", help="With --tokens: only topics that have none below them.")
    ] = False,
    drop_empty: Annotated[
        bool,
        typer.Option(
            "--drop-empty", help="With --tokens: leave out documents without any of the stems (for cosines)."
        ),
    ] = False,
    taking: Taking,
) -> None:
    """Import RCV1-v2, news stories with topics, as sparse rows."""
    if not tokens:
        if topics is not None or leaf_topics or drop_empty:
            raise DataError(
                "--topics, --leaf-topics and --drop-empty go with --tokens FILE: name the token files"
            )
        _import_named("rcv1", out, source, taking)
        return
    if topics is None:
        raise DataError("--tokens needs --topics FILE, the topics of its documents (rcv1-v2.topics.qrels)")
    how: dict[str, Any] = {"stems": stems, "leaves": leaf_topics, "drop_empty": drop_empty}
    dataset = _take(data.import_tokens, "rcv1", tokens, topics, out, **how, taking=taking)
    left_out = _noted(dataset, "left_out")
    if left_out:
        say(f"left out {left_out:,} documents without any of the {stems:,} stems")
    tell(dataset, taking.json)


def _noted(dataset: Dataset, what: str) -> Any:
    """What the importer noted in the provenance, of shuffled rows in that of the rows before; or None."""
    told = dataset.attrs["provenance"]
    return told.get(what, told.get("of", {}).get(what))


def _import_named(name: str, out: str, source: Source, taking: Taking) -> None:
    origin = source._asdict()
    with progress_bar(f"downloading {name}", "bytes") as progress:
        data.fetch_named(name, **origin, progress=progress)
    tell(_take(data.import_named, name, name, out, **origin, taking=taking), taking.json)
