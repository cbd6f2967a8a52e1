"""Opening a stored dataset: attributes first, then arrays, each checked against the other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from scalelatent.data.csr_store import StoredCsr
from scalelatent.data.schema import DatasetAttrs
from scalelatent.data.seals import check_digests, seal_columns
from scalelatent.data.write.markers import MARKERS
from scalelatent.errors import DataError
from scalelatent.generators import GENERATORS

from .chunks import StoredRows

if TYPE_CHECKING:
    import zarr

    from scalelatent.storage.disk import Location

__all__ = [
    "has_column",
    "open_columns",
    "open_group",
    "own_columns",
    "read_attrs",
    "repair_hint",
    "unfinished",
    "write_attrs",
]


def read_attrs(location: Location) -> DatasetAttrs:
    """Attributes of the dataset at a place; it may be unfinished."""
    raw = location.read("zarr.json")
    if raw is None:
        what = (
            "does not exist" if location.is_empty() else "is not a scalelatent dataset: it has no zarr.json"
        )
        raise DataError(
            f"{location.url} {what}; make a dataset with `scalelatent data import` or `scalelatent data make`"
        )
    try:
        meta = json.loads(raw)
        attrs, kind = meta.get("attributes", {}), meta.get("node_type")
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"{location.name_of('zarr.json')} is damaged (no JSON object: {error}); import the data again"
        ) from error
    if kind != "group":
        raise DataError(
            f"{location.url} is a single zarr array, not a dataset; pass it to Dataset.from_arrays and save "
            "that"
        )
    return DatasetAttrs.from_json(attrs, location.url)


def open_group(location: Location) -> zarr.Group:
    """The zarr group of a dataset, to read."""
    import zarr

    return zarr.open_group(location.zarr_store(read_only=True), mode="r", zarr_format=3)


def write_attrs(location: Location, attrs: DatasetAttrs) -> None:
    """Replace a dataset's attributes by one write (zarr's `attrs.update` makes one of each attribute)."""
    meta = json.loads(location.read("zarr.json") or b"{}")
    location.write("zarr.json", json.dumps({**meta, "attributes": attrs.to_json()}, indent=2).encode())


def repair_hint(attrs: DatasetAttrs, url: str) -> str:
    """The next step when a shard of a dataset is lost."""
    if attrs.provenance.get("importer") in GENERATORS:
        return f"`scalelatent data repair {url}` makes the lost shards again and leaves the others"
    if attrs.provenance.get("importer"):
        return "Restore that file from a copy, or import the data again with --overwrite"
    return "Restore that file from a copy, or write the dataset again"


def array(group: zarr.Group, name: str, url: str) -> Any:
    """An array of a dataset's group."""
    import zarr

    try:
        found = group[name]
    except Exception as error:  # absent, or metadata that zarr cannot read
        raise DataError(
            f"{url}: array '{name}' is missing or its zarr.json is damaged; import again"
        ) from error
    if not isinstance(found, zarr.Array):
        raise DataError(f"{url}: '{name}' is a group, but an array is needed; import the data again")
    return found


def open_columns(location: Location) -> dict[str, Any]:
    """The parts of a finished dataset.

    Raises
    ------
    DataError
        See `open_dataset`.
    """
    attrs = read_attrs(location)
    if not attrs.complete:
        raise unfinished(location, attrs)
    columns: dict[str, Any] = {"url": location.url, "attrs": attrs, "shared": location.shared}
    group = open_group(location)
    own = own_columns(location, attrs, group)
    check_digests(location, attrs, own, group)
    columns |= own
    if attrs.segments is not None:
        from .joined import join_segments

        return join_segments(location, attrs, columns)
    return columns


def unfinished(location: Location, attrs: DatasetAttrs) -> DataError:
    """The refusal of a dataset that its writer did not finish."""
    done = len(location.keys(MARKERS))
    generated = attrs.provenance.get("importer") in GENERATORS
    repair = f"go on with `scalelatent data repair {location.url}`"
    step = repair if generated else "write it again with --overwrite"
    return DataError(
        f"dataset {location.url} is incomplete: its writer finished {done} shards, not all; {step}"
    )


def own_columns(
    location: Location, attrs: DatasetAttrs, group: zarr.Group | None = None
) -> dict[str, StoredRows | StoredCsr]:
    """The columns `x`, `y` and `weight`, as far as there are, of the rows that lie right here.

    Of a dataset that grew they are those of its first segment, codes as they are stored.

    Raises
    ------
    DataError
        A column is missing, damaged, or of another shape than it should be.
    """
    group = open_group(location) if group is None else group
    columns: dict[str, StoredRows | StoredCsr] = {}
    hint = repair_hint(attrs, location.url)
    x = columns["x"] = _rows(location, group, "x", attrs.x_kind == "csr", hint)
    if tuple(x.shape[1:]) != attrs.feature_shape:
        raise DataError(
            f"{location.url}: rows of 'x' have shape {tuple(x.shape[1:])}, but attribute 'feature_shape' is "
            f"{attrs.feature_shape}; import the data again"
        )
    targets = () if attrs.y_kind == "labels" else (attrs.n_targets,)
    for name, rest in (("y", targets), ("weight", ())):
        if has_column(location, attrs, name):
            csr = name == "y" and attrs.y_kind == "multilabel"
            column = columns[name] = _rows(location, group, name, csr, hint)
            if tuple(column.shape) != (x.shape[0], *rest):
                raise DataError(
                    f"{location.url}: '{name}' has shape {column.shape}, but 'x' has {x.shape[0]} rows"
                    f"{f' and y has {rest[0]} columns' if rest else ''}; import again"
                )
    seal_columns(location, attrs, columns)
    return columns


def has_column(location: Location, attrs: DatasetAttrs, name: str) -> bool:
    """Whether a dataset has a column, by its attributes; what they do not say, by its metadata.

    Raises
    ------
    DataError
        The attributes say that it has labels, and there are none.
    """
    if attrs.columns is not None:
        return name in attrs.columns
    found = location.has(f"{name}/zarr.json")
    if name == "y" and not found and (attrs.y_kind != "labels" or attrs.classes is not None):
        raise DataError(
            f"{location.url}: its attributes tell of labels, but {location.name_of('y/zarr.json')} is "
            "missing; restore that file from a copy, or import the data again"
        )
    return found


def _rows(location: Location, group: zarr.Group, name: str, csr: bool, hint: str) -> StoredRows | StoredCsr:
    if csr:
        return StoredCsr(location, group, name, hint)
    return StoredRows(location, array(group, name, location.url), hint)
