"""``scalelatent data``: look at datasets, and change them."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalelatent.errors import JobError

from .show import Jobs, Json, Overwrite, Verbs, answer, emit, pixels_of, progress_bar, run_of, size

if TYPE_CHECKING:
    import numpy as np

    from scalelatent.data.dataset import Dataset

app = Verbs(help="Import, make and look at datasets.")


Out = Annotated[str, typer.Argument(metavar="OUT", help="The dataset to write.")]
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
    """Say what a dataset holds."""
    from scalelatent.data import open_dataset

    tell(open_dataset(url), json)


@app.command("convert")
def convert(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="A dataset; or a zarr array or group made elsewhere.")
    ],
    out: Out,
    rows: Annotated[str | None, typer.Option(metavar="START:STOP", help="Only these rows.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Type of the new rows, for example uint8.")] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Take the nearest value where the type has not the same.")
    ] = False,
    sparse: Annotated[
        bool | None, typer.Option("--sparse/--dense", help="Write CSR rows, or dense ones.")
    ] = None,
    crop: Annotated[int, typer.Option(metavar="N", help="Leave out N pixels on each side of images.")] = 0,
    resize: Annotated[
        str | None, typer.Option(metavar="H[xW]", help="Height and width of images, by means over areas.")
    ] = None,
    x: Annotated[str | None, typer.Option(help="Array of the rows in a zarr group.")] = None,
    y: Annotated[str | None, typer.Option(help="Array of the labels in a zarr group.")] = None,
    chunk_rows: Annotated[str | None, typer.Option(help="Rows of a chunk, or auto.")] = None,
    shard_rows: Annotated[str | None, typer.Option(help="Rows of a shard (a file), or auto.")] = None,
    codec: Annotated[str, typer.Option(help="keep, auto, lz4, zstd or none.")] = "keep",
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write rows in another form: chunks, shards, codec, dtype, fewer rows; images of another size."""
    from scalelatent.data import convert_dataset
    from scalelatent.data.write.convert import open_source

    ds = open_source(source, x=x, y=y)
    run = None
    if rows is not None:
        wanted = run_of(rows, "--rows")
        start, stop = wanted.start or 0, ds.n_rows if wanted.stop is None else wanted.stop
        run = (start + ds.n_rows * (start < 0), stop + ds.n_rows * (stop < 0))
    with progress_bar("converting") as progress:
        dataset = convert_dataset(
            ds, out, rows=run, dtype=_dtype(dtype), lossy=lossy, sparse=sparse,
            crop=crop, resize=pixels_of(resize, "--resize"),
            chunk_rows=_count(chunk_rows, "--chunk-rows"), shard_rows=_count(shard_rows, "--shard-rows"),
            compressor=None if codec == "none" else codec, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    tell(dataset, json)


def _count(text: str | None, option: str) -> int | str | None:
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise JobError(f"{option} {text}: give a number of rows, or auto") from None


def _dtype(name: str | None) -> np.dtype | None:
    import numpy as np

    try:
        return None if name is None else np.dtype(name)
    except TypeError:
        raise JobError(f"--dtype {name}: no such type; for example uint8, int32, float32, float64") from None


@app.command("append")
def append(
    url: Annotated[str, typer.Argument(metavar="DATA", help="The dataset that grows.")],
    source: Annotated[
        str, typer.Argument(metavar="FILE|DATASET", help="What is appended: a dataset, .npz or .npy.")
    ],
    x: KeyOfRows = None,
    y: KeyOfLabels = None,
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
        dataset = append_rows(url, source, x=x, y=y, progress=progress)
    tell(dataset, json)


@app.command("repair")
def repair(
    url: Annotated[str, typer.Argument(metavar="DATA", help="A dataset of `data make`.")],
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Make lost or damaged parts of a made dataset again, or finish one that was broken off."""
    from scalelatent.data import repair_dataset

    with progress_bar("making what is missing") as progress:
        dataset = repair_dataset(url, n_jobs=jobs, progress=progress)
    tell(dataset, json)


@app.command("head")
def head(
    url: Annotated[str, typer.Argument(metavar="DATA", help="A dataset.")],
    rows: Annotated[int, typer.Option("--rows", "-n", metavar="N", min=1, help="So many rows.")] = 5,
    json: Json = False,
) -> None:
    """Show the first rows: labels, some numbers, and images as text."""
    from scalelatent.data import open_dataset
    from scalelatent.data.preview import first_rows

    dataset = open_dataset(url)
    found = first_rows(dataset, rows)
    if json:
        emit({"url": dataset.url, "n_rows": dataset.n_rows, "rows": found})
        return
    typer.echo(repr(dataset))
    for line in _row_lines(found, dataset.n_features):
        typer.echo(line)


def _row_lines(found: list[dict[str, Any]], n_features: int) -> list[str]:
    """Rows one below the other; of images as many side by side as the terminal is wide."""
    names = [_row_name(record) for record in found]
    if "image" not in found[0]:
        width = max(map(len, names))
        return [
            f"{name:<{width}}  {_row_numbers(record, n_features)}"
            for name, record in zip(names, found, strict=True)
        ]
    width = max(len(found[0]["image"][0]), *map(len, names)) + 2
    across = max(1, shutil.get_terminal_size().columns // width)
    lines = []
    for first in range(0, len(found), across):
        some = slice(first, first + across)
        columns = [
            [name, *record["image"], ""] for name, record in zip(names[some], found[some], strict=True)
        ]
        lines += [
            "".join(f"{text:<{width}}" for text in line).rstrip() for line in zip(*columns, strict=True)
        ]
    return lines


def _row_name(record: dict[str, Any]) -> str:
    y = record.get("label", record.get("targets"))
    weight = f" (weight {record['weight']:g})" if "weight" in record else ""
    return f"{record['row']}" + ("" if y is None else f": {y}") + weight


def _row_numbers(record: dict[str, Any], n_features: int) -> str:
    values = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in record["values"]]
    if "columns" in record:
        values = [f"{column}:{value}" for column, value in zip(record["columns"], values, strict=True)]
        n_features = record["entries"]
    return " ".join(values) + (f" … {n_features:,} in all" if n_features > len(values) else "")


@app.command("check")
def check(
    url: Annotated[str, typer.Argument(metavar="DATA", help="A dataset.")],
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Read all of a dataset and name the files that are not what was written."""
    from scalelatent.data import check_dataset

    with progress_bar("checking") as progress:
        found = check_dataset(url, n_jobs=jobs, progress=progress)
    if json:
        emit(asdict(found))
    else:
        typer.echo(
            f"{found.url}: {found.rows:,} rows in {found.shards:,} shards, {size(found.bytes)}, checked in "
            f"{found.seconds:.2f} s: {'all as written' if not found.bad else f'{len(found.bad)} bad'}"
        )
        for bad in found.bad:
            typer.echo(f"  {bad.problem}")
        if not found.checksums:
            typer.echo(
                "  It was written without a table of checksums, so that a fit does not notice a shard of "
                "another dataset; `scalelatent data convert` writes one that has it"
            )
    if found.bad:
        raise typer.Exit(1)


@app.command("shuffle")
def shuffle(
    source: Annotated[str, typer.Argument(metavar="IN", help="The dataset to shuffle.")],
    out: Out,
    seed: Annotated[int, typer.Option(min=0, help="Of the order: the same seed, the same order.")],
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Rows held at a time, such as 512MiB; 1GiB by default."),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write the rows in random order, in bounded memory."""
    from scalelatent.data import shuffle_dataset

    limit = None if memory is None else bytes_of(memory, "--memory")
    with progress_bar("shuffling") as progress:
        dataset = shuffle_dataset(
            source, out, seed=seed, memory=limit, overwrite=overwrite, progress=progress
        )
    tell(dataset, json)


def bytes_of(text: str, option: str) -> int:
    """Read a size such as 512MiB or 2GB."""
    from dask.utils import parse_bytes

    try:
        return int(parse_bytes(text))
    except (ValueError, TypeError):
        raise JobError(f"{option} {text}: a size is a number and a unit, for example 512MiB") from None


def tell(dataset: Dataset, as_json: bool) -> None:
    """Print what a dataset holds."""
    values = describe(dataset)
    provenance = values.get("provenance") or {}
    if not as_json and (names := provenance.get("feature_names")):
        shown = f"{names[0]}, …, {names[-1]}" if len(names) > 1 else names[0]
        values["provenance"] = {**provenance, "feature_names": shown}
    answer(values, as_json, title=str(dataset.url))


def describe(dataset: Dataset) -> dict[str, Any]:
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
