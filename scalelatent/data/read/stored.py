"""Open a stored dataset: read the attributes, then the arrays, and check that both agree."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from scalelatent.data.checksums import check_digests, use_crc_table
from scalelatent.data.csr_store import StoredCsr
from scalelatent.data.schema import DatasetAttrs
from scalelatent.errors import DataError
from scalelatent.storage.write_checks import describe_contents

from .chunks import StoredRows
from .segments import JoinedRows, RecodedRows
from .sources import StoredColumn

if TYPE_CHECKING:
    import zarr

    from scalelatent.storage.disk import Location

MARKER_FOLDER = "_shards"
"""Folder of the markers of written shards; the folder exists only until the dataset is finished."""


def read_attrs(location: Location) -> DatasetAttrs:
    """Return the attributes of the dataset at a location; the dataset may be unfinished."""
    raw = location.read("zarr.json")
    if raw is None:
        raise DataError(
            f"{location.url} {describe_contents(location, 'a dataset')}; create a dataset with `scalelatent "
            "data import` or `scalelatent data make`"
        )
    try:
        meta = json.loads(raw)
        attrs, kind = meta.get("attributes", {}), meta.get("node_type")
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"{location.name_of('zarr.json')} is damaged (it contains no JSON object: {error}); import the "
            "data again"
        ) from error
    if kind != "group":
        raise DataError(
            f"{location.url} is a single zarr array, not a dataset; pass it to Dataset.from_arrays, and save "
            "the result"
        )
    return DatasetAttrs.from_json(attrs, location.url)


def open_group(location: Location) -> zarr.Group:
    import zarr

    return zarr.open_group(location.zarr_store(read_only=True), mode="r", zarr_format=3)


def write_attrs(location: Location, attrs: DatasetAttrs) -> None:
    """Replace all attributes of a dataset in one write, unlike zarr's `attrs.update` (one per attribute)."""
    meta = json.loads(location.read("zarr.json") or b"{}")
    location.write("zarr.json", json.dumps({**meta, "attributes": attrs.to_json()}, indent=2).encode())


def _is_generated(attrs: DatasetAttrs) -> bool:
    """Return whether a generator made the rows; only generators record `base_fingerprint` or `features`."""
    return bool(attrs.provenance.keys() & {"base_fingerprint", "features"})


def _repair_hint(attrs: DatasetAttrs, url: str) -> str:
    """Return the last sentence of an error about a lost shard: the step that restores the shard."""
    if _is_generated(attrs):
        return f"`scalelatent data repair {url}` makes the lost shards again and keeps the others"
    if attrs.provenance.get("importer"):
        return "Restore that file from a copy, or import the data again with --overwrite"
    return "Restore that file from a copy, or write the dataset again"


def open_array(group: zarr.Group, name: str, url: str) -> zarr.Array:
    """Return an array of the zarr group of a dataset, or raise a `DataError`."""
    import zarr

    try:
        found = group[name]
    except Exception as error:  # missing, or unreadable metadata
        raise DataError(
            f"{url}: array '{name}' is missing or its zarr.json is damaged; import again"
        ) from error
    if not isinstance(found, zarr.Array):
        raise DataError(f"{url}: '{name}' is a group, but an array is needed; import the data again")
    return found


def open_columns(location: Location) -> dict[str, Any]:
    """Return the keyword arguments of `DatasetColumns` for a finished dataset."""
    attrs = read_attrs(location)
    if not attrs.complete:
        raise make_unfinished_error(location, attrs)
    columns: dict[str, Any] = {"place": location, "attrs": attrs, "shared": location.shared}
    group = open_group(location)
    own = own_columns(location, attrs, group)
    check_digests(location, attrs, own, group)
    columns |= own
    if attrs.segments is not None:
        return _join_segments(location, attrs, columns)
    return columns


def make_unfinished_error(location: Location, attrs: DatasetAttrs) -> DataError:
    """Return the error for a dataset whose writer did not finish."""
    done = len(location.keys(MARKER_FOLDER))
    generated = _is_generated(attrs)
    step = (
        f"complete it with `scalelatent data repair {location.url}`"
        if generated
        else "write it again with --overwrite"
    )
    return DataError(f"dataset {location.url} is incomplete: its writer finished only {done} shards; {step}")


def own_columns(
    location: Location, attrs: DatasetAttrs, group: zarr.Group | None = None
) -> dict[str, StoredColumn]:
    """Return the existing columns among `x`, `y` and `weight` in this folder, without appended segments."""
    group = open_group(location) if group is None else group
    columns: dict[str, StoredColumn] = {}
    hint = _repair_hint(attrs, location.url)
    x = columns["x"] = _open_column(location, group, "x", attrs.x_kind == "csr", hint)
    if tuple(x.shape[1:]) != attrs.feature_shape:
        raise DataError(
            f"{location.url}: rows of 'x' have shape {tuple(x.shape[1:])}, but attribute 'feature_shape' is "
            f"{attrs.feature_shape}; import the data again"
        )
    targets = () if attrs.y_kind == "labels" else (attrs.n_targets,)
    for name, rest in (("y", targets), ("weight", ())):
        if has_column(location, attrs, name):
            csr = name == "y" and attrs.y_kind == "multilabel"
            column = columns[name] = _open_column(location, group, name, csr, hint)
            if tuple(column.shape) != (x.shape[0], *rest):
                raise DataError(
                    f"{location.url}: '{name}' has shape {column.shape}, but 'x' has {x.shape[0]} rows"
                    f"{f' and y has {rest[0]} columns' if rest else ''}; import again"
                )
    use_crc_table(location, attrs, columns)
    return columns


def has_column(location: Location, attrs: DatasetAttrs, name: str) -> bool:
    """Return whether a dataset has a column; old versions list no columns, so look for the column's file."""
    if attrs.columns is not None:
        return name in attrs.columns
    found = location.has(f"{name}/zarr.json")
    if name == "y" and not found and (attrs.y_kind != "labels" or attrs.classes is not None):
        raise DataError(
            f"{location.url}: its attributes describe labels, but {location.name_of('y/zarr.json')} is "
            "missing; restore that file from a copy, or import the data again"
        )
    return found


def _open_column(location: Location, group: zarr.Group, name: str, csr: bool, hint: str) -> StoredColumn:
    if csr:
        return StoredCsr(location, group, name, hint)
    return StoredRows(location, open_array(group, name, location.url), hint)


def _join_segments(location: Location, attrs: DatasetAttrs, base: dict[str, Any]) -> dict[str, Any]:
    """Join the columns `base` of the first segment with the columns of all appended segments."""
    assert attrs.segments is not None
    parts = [base]
    for segment in attrs.segments[1:]:
        folder = location.at(segment["path"])
        try:
            columns = open_columns(folder)
        except DataError as error:
            raise DataError(
                f"dataset {location.url}: its appended rows in {segment['path']} cannot be opened: {error}"
            ) from error
        if columns["attrs"].fingerprint != segment["fingerprint"]:
            raise DataError(
                f"dataset {location.url}: {segment['path']} does not contain the rows that were appended; "
                "restore it from a copy"
            )
        parts.append(columns)
    joined = dict(base)
    for name in ("x", "y", "weight"):
        if name in base:
            sources = [columns[name] for columns in parts]
            if name == "y" and attrs.codes:
                old_classes = [segment["classes"] for segment in attrs.segments]
                sources = [
                    s if old == attrs.classes else RecodedRows(s, old or [], attrs.classes or [])
                    for s, old in zip(sources, old_classes, strict=True)
                ]
            joined[name] = JoinedRows(sources)
    return joined
