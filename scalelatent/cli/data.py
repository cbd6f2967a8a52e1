"""``scalelatent data``: look at datasets, and change them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .show import Json, emit, show_values, verb

app = typer.Typer(no_args_is_help=True, help="Import, make and look at datasets.")


@app.command("info")
@verb
def info(
    url: Annotated[str, typer.Argument(metavar="DATA", help="A dataset.")],
    json: Json = False,
) -> None:
    """Say what a dataset holds."""
    from scalelatent.data import open_dataset

    tell(open_dataset(url), json)


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
        "data_bytes": dataset.nbytes,
    }
    if dataset.is_sparse:
        values["nnz"] = dataset.nnz
        values["density"] = dataset.nnz / (dataset.n_rows * dataset.n_features)
        values["nnz_per_row"] = dataset.nnz / dataset.n_rows
    if dataset.y_kind not in (None, "labels"):
        values["y_kind"], values["n_targets"] = dataset.y_kind, dataset.n_targets
    pieces = dataset.pieces(0, dataset.n_rows)
    values["pieces"] = len(pieces)
    values["rows_per_piece"] = max((stop - start for start, stop in pieces), default=0)
    for key in ("format_version", "provenance", "fingerprint"):
        if dataset.attrs.get(key) is not None:
            values[key] = dataset.attrs[key]
    return values
