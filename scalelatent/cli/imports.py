"""``scalelatent data import``: bring rows in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from scalelatent.errors import DataError, JobError
from scalelatent.storage.addresses import file_name

from .data import KeyOfLabels, KeyOfRows, tell
from .show import Json, Overwrite, kernels_told, pixels_of, progress_bar, say, verb

app = typer.Typer(no_args_is_help=True, help="Import rows from files into a dataset, block by block.")

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
Label = Annotated[str | None, typer.Option("--label", metavar="COL", help="Column of labels.")]
Weight = Annotated[str | None, typer.Option("--weight", metavar="COL", help="Column of row weights.")]
Features = Annotated[
    str | None,
    typer.Option("--features", metavar="A,B,…", help="Columns of a row; by default all others."),
]
Size = Annotated[
    str | None, typer.Option("--size", metavar="HxW", help="Resize all to this height and width.")
]
Crop = Annotated[bool, typer.Option("--crop", help="With --size: cut the middle out instead of stretching.")]
Gray = Annotated[bool, typer.Option("--gray", help="Make all gray.")]
Rgb = Annotated[bool, typer.Option("--rgb", help="Make all coloured.")]
Shuffle = Annotated[
    int | None,
    typer.Option("--shuffle", metavar="SEED", min=0, help="Shuffle all rows; the seed decides the order."),
]
Part = Annotated[str, typer.Option("--part", metavar="train|test|all", help="Which of its rows.")]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="FOLDER",
        envvar="SCALELATENT_CACHE",
        help="Where downloads are kept; the user's cache by default.",
    ),
]
Mirror = Annotated[
    str | None, typer.Option("--mirror", metavar="URL", help="A folder on a server that has the files.")
]


@app.command("idx")
@verb
def import_idx(
    images: Annotated[str, typer.Argument(metavar="IMAGES", help="IDX file of images, .gz or plain.")],
    labels: Annotated[str, typer.Argument(metavar="LABELS", help="IDX file of labels, .gz or plain.")],
    out: Out,
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import a pair of IDX files, the format of MNIST."""
    from scalelatent.data import import_idx as run

    with progress_bar(f"importing {file_name(images)}") as progress:
        dataset = run(images, labels, out, progress=progress, shuffle=shuffle, overwrite=overwrite)
    tell(dataset, json)


@app.command("npz")
@verb
def import_npz(
    file: File,
    out: Out,
    x: KeyOfRows = None,
    y: KeyOfLabels = None,
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import arrays of a NumPy .npz file."""
    from scalelatent.data import import_npz as run

    with progress_bar(f"importing {file_name(file)}") as progress:
        dataset = run(file, out, x=x, y=y, progress=progress, shuffle=shuffle, overwrite=overwrite)
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
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import sparse (CSR) rows of a .npz file, scipy's own or with arrays of any prefix."""
    from scalelatent.data import import_csr as run

    how: dict[str, Any] = {"csr_prefix": csr_prefix, "values": values, "y": y}
    with progress_bar(f"importing {file_name(file)}") as progress:
        dataset = run(file, out, **how, progress=progress, shuffle=shuffle, overwrite=overwrite)
    tell(dataset, json)


@app.command("svmlight")
@verb
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
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import svmlight (libsvm) text, plain or gzip, as sparse rows."""
    from scalelatent.data import import_svmlight as run

    based: bool | str = "auto" if zero_based is None else zero_based
    with progress_bar(f"importing {file_name(file)}") as progress:
        dataset = run(
            file, out, zero_based=based, n_features=features, multilabel=multilabel, dtype=dtype,
            progress=progress, shuffle=shuffle, overwrite=overwrite,
        )  # fmt: skip
    tell(dataset, json)


@app.command("npy")
@verb
def import_npy(
    file: File,
    out: Out,
    y: Annotated[str | None, typer.Option("--y", metavar="FILE", help="A .npy file of labels.")] = None,
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import a NumPy .npy file of rows, and perhaps one of labels."""
    from scalelatent.data import import_npy as run

    with progress_bar(f"importing {file_name(file)}") as progress:
        dataset = run(file, out, y=y, progress=progress, shuffle=shuffle, overwrite=overwrite)
    tell(dataset, json)


@app.command("hdf5")
@verb
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
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import arrays of an HDF5 file.

    Keys are paths where there are groups: --x train/data --y train/target.
    """
    from scalelatent.data import import_hdf5 as run

    how: dict[str, Any] = {"allow_external": allow_external, "shuffle": shuffle, "overwrite": overwrite}
    with progress_bar(f"importing {file_name(file)}") as progress:
        dataset = run(file, out, x=x, y=y, progress=progress, **how)
    tell(dataset, json)


@app.command("mat")
@verb
def import_mat(
    file: File,
    out: Out,
    x: KeyOfRows = None,
    y: KeyOfLabels = None,
    rows_last: Annotated[
        bool, typer.Option("--rows-last", help="Rows lie along the last axis, as in images h x w x n.")
    ] = False,
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import variables of a MATLAB file.

    Files of version 7.3 are streamed; older ones are read whole, a variable at a time.
    """
    from scalelatent.data import import_mat as run

    how: dict[str, Any] = {"rows_last": rows_last, "shuffle": shuffle, "overwrite": overwrite}
    with progress_bar(f"importing {file_name(file)}") as progress:
        dataset = run(file, out, x=x, y=y, progress=progress, **how)
    tell(dataset, json)


@app.command("parquet")
@verb
def import_parquet(
    file: Table,
    out: Out,
    label: Label = None,
    weight: Weight = None,
    features: Features = None,
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import columns of Parquet files."""
    _import_table("parquet", file, out, label, weight, features, shuffle, overwrite, json)


@app.command("csv")
@verb
def import_csv(
    file: Table,
    out: Out,
    label: Label = None,
    weight: Weight = None,
    features: Features = None,
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import columns of CSV files with a line of names, plain or compressed.

    Features are read as float64.
    """
    _import_table("csv", file, out, label, weight, features, shuffle, overwrite, json)


@app.command("arrow")
@verb
def import_arrow(
    file: Table,
    out: Out,
    label: Label = None,
    weight: Weight = None,
    features: Features = None,
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import columns of Arrow (Feather) files."""
    _import_table("arrow", file, out, label, weight, features, shuffle, overwrite, json)


@app.command("hf")
@verb
def import_hf(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="What save_to_disk wrote.")],
    out: Out,
    split: Annotated[str | None, typer.Option(metavar="NAME", help="Which split, for example train.")] = None,
    label: Label = None,
    weight: Weight = None,
    features: Features = None,
    size: Size = None,
    crop: Crop = False,
    gray: Gray = False,
    rgb: Rgb = False,
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import a Hugging Face dataset on disk: columns of numbers, or of images."""
    from scalelatent.data import import_hf as run

    how: dict[str, Any] = {"split": split, "label": label, "weight": weight, "features": _names(features)}
    how |= {"size": pixels_of(size, "--size"), "crop": crop, "color": _color(gray, rgb)}
    with progress_bar(f"importing {file_name(folder)}") as progress:
        dataset = run(folder, out, **how, progress=progress, shuffle=shuffle, overwrite=overwrite)
    tell(dataset, json)


@app.command("zarr")
@verb
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
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import zarr arrays made elsewhere, also virtual ones (kerchunk)."""
    from scalelatent.data import import_zarr as run

    with progress_bar(f"importing {file_name(file)}") as progress:
        dataset = run(file, out, x=x, y=y, progress=progress, shuffle=shuffle, overwrite=overwrite)
    tell(dataset, json)


@app.command("images")
@verb
def import_images(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder of image files, or of one folder per class.")
    ],
    out: Out,
    size: Size = None,
    crop: Crop = False,
    gray: Gray = False,
    rgb: Rgb = False,
    no_labels: Annotated[
        bool, typer.Option("--no-labels", help="The names of folders are not classes.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out and count what is unreadable or of another size.")
    ] = False,
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import a folder of images, labelled by the folders they lie in."""
    from scalelatent.data import import_images as run

    how: dict[str, Any] = {
        "size": pixels_of(size, "--size"),
        "crop": crop,
        "labels": not no_labels,
        "skip_bad": skip_bad,
    }
    how["color"] = _color(gray, rgb)
    with progress_bar(f"importing {folder.name}", "images") as progress:
        dataset = run(folder, out, **how, progress=progress, shuffle=shuffle, overwrite=overwrite)
    skipped = _noted(dataset, "skipped")
    if skipped and skipped["first"]:
        say(
            f"skipped {skipped['unreadable']} unreadable images and {skipped['unlike_first']} of another "
            f"size or kind; the first: {', '.join(skipped['first'])}"
        )
    tell(dataset, json)


@app.command("digits")
@verb
def import_digits(
    out: Out, shuffle: Shuffle = None, overwrite: Overwrite = False, json: Json = False
) -> None:
    """Import scikit-learn's digits: 1,797 images 8 x 8; nothing is downloaded."""
    _import_named("digits", out, shuffle, overwrite, json)


@app.command("mnist")
@verb
def import_mnist(
    out: Out,
    part: Part = "train",
    cache: Cache = None,
    mirror: Mirror = None,
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import MNIST: downloaded once, checked, kept in a cache."""
    _import_named("mnist", out, shuffle, overwrite, json, part=part, cache=cache, mirror=mirror)


@app.command("fashion-mnist")
@verb
def import_fashion_mnist(
    out: Out,
    part: Part = "train",
    cache: Cache = None,
    mirror: Mirror = None,
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import Fashion-MNIST: downloaded once, checked, kept in a cache."""
    _import_named("fashion-mnist", out, shuffle, overwrite, json, part=part, cache=cache, mirror=mirror)


@app.command("rcv1")
@verb
@kernels_told()
def import_rcv1(
    out: Out,
    part: Part = "train",
    cache: Cache = None,
    mirror: Mirror = None,
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
    shuffle: Shuffle = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Import RCV1-v2, news stories with topics, as sparse rows."""
    if tokens:
        if topics is None:
            raise DataError(
                "--tokens needs --topics FILE, the topics of its documents (rcv1-v2.topics.qrels)"
            )
        from scalelatent.data import import_tokens as run

        with progress_bar("importing rcv1") as progress:
            dataset = run(
                tokens, topics, out, stems=stems, leaves=leaf_topics, drop_empty=drop_empty,
                progress=progress, shuffle=shuffle, overwrite=overwrite,
            )  # fmt: skip
        left_out = _noted(dataset, "left_out")
        if left_out:
            say(f"left out {left_out:,} documents without any of the {stems:,} stems")
        tell(dataset, json)
        return
    if topics is not None or leaf_topics or drop_empty:
        raise DataError(
            "--topics, --leaf-topics and --drop-empty go with --tokens FILE: name the token files"
        )
    _import_named("rcv1", out, shuffle, overwrite, json, part=part, cache=cache, mirror=mirror)


def _color(gray: bool, rgb: bool) -> str | None:
    if gray and rgb:
        raise JobError("--gray and --rgb exclude each other; give one of them")
    return "gray" if gray else "rgb" if rgb else None


def _noted(dataset: Any, what: str) -> Any:
    """What the importer noted in the provenance, of shuffled rows in that of the rows before; or None."""
    told = dataset.attrs["provenance"]
    return told.get(what, told.get("of", {}).get(what))


def _names(features: str | None) -> list[str] | None:
    return None if features is None else [name.strip() for name in features.split(",")]


def _import_table(
    kind: str,
    file: str,
    out: str,
    label: str | None,
    weight: str | None,
    features: str | None,
    shuffle: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    import scalelatent.data as data

    run = {"parquet": data.import_parquet, "csv": data.import_csv, "arrow": data.import_arrow}[kind]
    with progress_bar(f"importing {file_name(file)}") as progress:
        dataset = run(
            file, out, label=label, weight=weight, features=_names(features),
            progress=progress, shuffle=shuffle, overwrite=overwrite,
        )  # fmt: skip
    tell(dataset, as_json)


def _import_named(
    name: str, out: str, shuffle: int | None, overwrite: bool, as_json: bool, **origin: Any
) -> None:
    from scalelatent.data import fetch_named
    from scalelatent.data import import_named as run

    if origin:
        with progress_bar(f"downloading {name}", "bytes") as progress:
            fetch_named(name, **origin, progress=progress)
    with progress_bar(f"importing {name}") as progress:
        dataset = run(name, out, **origin, progress=progress, shuffle=shuffle, overwrite=overwrite)
    tell(dataset, as_json)
