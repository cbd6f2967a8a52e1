"""``scalelatent data``: show and change datasets."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalelatent.errors import JobError

from .show import (
    Jobs,
    Json,
    Overwrite,
    VerbGroup,
    format_bytes,
    parse_image_size,
    parse_row_range,
    print_json,
    print_result,
    progress_bar,
)

if TYPE_CHECKING:
    import numpy as np

    from scalelatent.data.dataset import Dataset

_MAX_SHOWN = 12  # maximum number of classes or feature names that a command prints

app = VerbGroup(help="Import, generate, show and change datasets.")


Out = Annotated[str, typer.Argument(metavar="OUT", help="Dataset to write.")]
KeyOfRows = Annotated[str | None, typer.Option("--x", metavar="KEY", help="Name of the rows; x by default.")]
KeyOfLabels = Annotated[
    str | None,
    typer.Option("--y", metavar="KEY", help="Name of the labels; y by default, where it is there."),
]


@app.command("info")
def info(
    url: Annotated[str, typer.Argument(metavar="DATA", help="A dataset.")],
    json: Json = False,
) -> None:
    """Show rows, features, types, classes and storage of a dataset."""
    from scalelatent.data import open_dataset

    print_dataset(open_dataset(url), json)


@app.command("convert")
def convert(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="Dataset, or zarr array or group of another program.")
    ],
    out: Out,
    rows: Annotated[str | None, typer.Option(metavar="START:STOP", help="Use only these rows.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Type of the new rows, for example uint8.")] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Round values that the new type cannot represent.")
    ] = False,
    sparse: Annotated[
        bool | None, typer.Option("--sparse/--dense", help="Write sparse (CSR) rows, or dense rows.")
    ] = None,
    crop: Annotated[int, typer.Option(metavar="N", help="Remove N pixels on each side of images.")] = 0,
    resize: Annotated[
        str | None,
        typer.Option(metavar="H[xW]", help="New height and width of images; pixels are means over areas."),
    ] = None,
    x: Annotated[str | None, typer.Option(help="Name of the array of rows in a zarr group.")] = None,
    y: Annotated[str | None, typer.Option(help="Name of the array of labels in a zarr group.")] = None,
    chunk_rows: Annotated[str | None, typer.Option(help="Rows per chunk, or auto.")] = None,
    shard_rows: Annotated[str | None, typer.Option(help="Rows per shard (file), or auto.")] = None,
    codec: Annotated[str, typer.Option(help="Compression: keep, auto, lz4, zstd or none.")] = "keep",
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write a dataset with other chunks, shards, compression, type, rows or image size."""
    from scalelatent.data import convert_dataset
    from scalelatent.data.write.convert import open_source

    ds = open_source(source, x=x, y=y)
    run = None
    if rows is not None:
        given = parse_row_range(rows, "--rows")
        start, stop = given.start or 0, ds.n_rows if given.stop is None else given.stop
        run = (start + ds.n_rows * (start < 0), stop + ds.n_rows * (stop < 0))
    with progress_bar("converting") as progress:
        dataset = convert_dataset(
            ds, out, rows=run, dtype=_parse_dtype(dtype), lossy=lossy, sparse=sparse,
            crop=crop, resize=parse_image_size(resize, "--resize"),
            chunk_rows=_count(chunk_rows, "--chunk-rows"), shard_rows=_count(shard_rows, "--shard-rows"),
            compressor=None if codec == "none" else codec, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    print_dataset(dataset, json)


def _count(text: str | None, option: str) -> int | str | None:
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise JobError(f"{option} {text} is not a number of rows; give a whole number, or auto") from None


def _parse_dtype(name: str | None) -> np.dtype | None:
    import numpy as np

    try:
        return None if name is None else np.dtype(name)
    except TypeError:
        raise JobError(f"--dtype {name}: unknown type; give for example uint8, int32 or float32") from None


@app.command("append")
def append(
    url: Annotated[str, typer.Argument(metavar="DATA", help="Dataset to which rows are appended.")],
    source: Annotated[str, typer.Argument(metavar="MORE", help="Dataset of the rows to append.")],
    json: Json = False,
) -> None:
    """Append rows to a dataset."""
    from scalelatent.data import append_rows
    from scalelatent.storage.disk import locate
    from scalelatent.storage.write_checks import contains

    if contains(locate(url), locate(source)):
        raise JobError(
            f"{source} is appended to itself, {url}: name the rows to append; to have each row twice, append "
            f"a copy: scalelatent data convert {url} COPY"
        )
    with progress_bar("appending") as progress:
        dataset = append_rows(url, source, progress=progress)
    print_dataset(dataset, json)


@app.command("repair")
def repair(
    url: Annotated[str, typer.Argument(metavar="DATA", help="Dataset that `data make` has generated.")],
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Generate missing or damaged parts of a dataset of `data make` again."""
    from scalelatent.data import repair_dataset

    with progress_bar("generating missing rows") as progress:
        dataset = repair_dataset(url, n_jobs=jobs, progress=progress)
    print_dataset(dataset, json)


@app.command("check")
def check(
    url: Annotated[str, typer.Argument(metavar="DATA", help="A dataset.")],
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Read a whole dataset, and list the files that differ from what was written."""
    from scalelatent.data import check_dataset

    with progress_bar("checking") as progress:
        found = check_dataset(url, n_jobs=jobs, progress=progress)
    if json:
        print_json(asdict(found))
    else:
        typer.echo(
            f"{found.url}: {found.rows:,} rows in {found.shards:,} shards, {format_bytes(found.bytes)}, "
            f"checked in {found.seconds:.2f} s: "
            f"{'no damage' if not found.bad else f'{len(found.bad):,} damaged'}"
        )
        for bad in found.bad:
            typer.echo(f"  {bad.problem}")
        if not found.checksums:
            typer.echo(
                "  The dataset has no table of checksums, so that a fit cannot detect a shard of another "
                "dataset; `scalelatent data convert` writes a dataset with checksums"
            )
    if found.bad:
        raise typer.Exit(1)


@app.command("shuffle")
def shuffle(
    source: Annotated[str, typer.Argument(metavar="IN", help="Dataset to shuffle.")],
    out: Out,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random order.")],
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory for rows, for example 512MiB; by default 1GiB."),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write the rows of a dataset in random order, with limited memory."""
    from scalelatent.data import shuffle_dataset

    limit = None if memory is None else parse_size(memory, "--memory")
    with progress_bar("shuffling") as progress:
        dataset = shuffle_dataset(
            source, out, seed=seed, memory=limit, overwrite=overwrite, progress=progress
        )
    print_dataset(dataset, json)


def parse_size(text: str, option: str) -> int:
    """Parse a number of bytes such as 512MiB or 2GB."""
    from dask.utils import parse_bytes

    try:
        return int(parse_bytes(text))
    except (ValueError, TypeError):
        raise JobError(
            f"{option} {text} is not a size; give a number and a unit, for example 512MiB"
        ) from None


def print_dataset(dataset: Dataset, as_json: bool) -> None:
    values = describe_dataset(dataset)
    for key in () if as_json else ("feature_names", "classes"):
        if len(found := values[key] or ()) > _MAX_SHOWN:
            values[key] = [*found[:_MAX_SHOWN], f"… ({len(found):,} in all)"]
    print_result(values, as_json, title=str(dataset.url))


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """Return the values that `data info` prints."""
    classes = dataset.classes
    values: dict[str, Any] = {
        "url": dataset.url,
        "rows": dataset.n_rows,
        "features": dataset.n_features,
        "feature_shape": list(dataset.feature_shape),
        "feature_names": None if dataset.feature_names is None else dataset.feature_names.tolist(),
        "dtype": str(dataset.dtype),
        "labels": dataset.has_y,
        "classes": None
        if classes is None
        else [item.item() if hasattr(item, "item") else item for item in classes],
        "data_bytes": dataset.nbytes,
    }
    if (nnz := dataset.nnz) is not None:
        values["nnz"] = nnz
        values["density"] = nnz / (dataset.n_rows * dataset.n_features)
        values["nnz_per_row"] = nnz / dataset.n_rows
    if dataset.y_kind not in (None, "labels"):
        values["y_kind"], values["n_targets"] = dataset.y_kind, dataset.n_targets
    pieces = dataset.pieces(0, dataset.n_rows)
    values["pieces"] = len(pieces)
    values["rows_per_piece"] = max((stop - start for start, stop in pieces), default=0)
    for key in ("format_version", "provenance", "fingerprint"):
        if dataset.attrs.get(key) is not None:
            values[key] = dataset.attrs[key]
    return values
