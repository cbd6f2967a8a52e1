"""``scalelatent data``: look at datasets, and change them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from scalelatent.errors import JobError

from .show import Json, Overwrite, emit, progress_bar, show_values, verb

app = typer.Typer(no_args_is_help=True, help="Import, make and look at datasets.")


Out = Annotated[str, typer.Argument(metavar="OUT", help="The dataset to write.")]


@app.command("info")
@verb
def info(
    url: Annotated[str, typer.Argument(metavar="DATA", help="A dataset.")],
    json: Json = False,
) -> None:
    """Say what a dataset holds."""
    from scalelatent.data import open_dataset

    tell(open_dataset(url), json)


@app.command("append")
@verb
def append(
    url: Annotated[str, typer.Argument(metavar="DATA", help="The dataset that grows.")],
    source: Annotated[
        str, typer.Argument(metavar="FILE|DATASET", help="What is appended: a dataset, .npz or .npy.")
    ],
    json: Json = False,
) -> None:
    """Append rows to a dataset.

    Whatever goes wrong on the way, the dataset stays as it was.
    """
    from scalelatent.data import append_rows

    with progress_bar("appending") as progress:
        dataset = append_rows(url, source, progress=progress)
    tell(dataset, json)


@app.command("shuffle")
@verb
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
    """Write the rows in random order, in bounded memory.

    Rows that do not fit into --memory pass through temporary buckets beside OUT.
    """
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


def tell(dataset: Any, as_json: bool) -> None:
    """Print what a dataset holds."""
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
