"""Append rows to a stored dataset; the old rows stay unchanged, also after a failure."""

from __future__ import annotations

import itertools
import os
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data import schema
from scalelatent.data.dataset import Dataset, open_dataset
from scalelatent.data.read.segments import joined_fingerprint
from scalelatent.data.read.stored import read_attrs, write_attrs
from scalelatent.errors import DataError
from scalelatent.storage.disk import Location, locate
from scalelatent.storage.locks import hold_lock
from scalelatent.storage.write_checks import clear_after, explain_os_errors

from .batches import Progress, RowBatch, write_shards
from .create import create_like, derive_provenance

if TYPE_CHECKING:
    from typing import Unpack

    from scalelatent.data.schema import DatasetAttrs, LayoutOptions, Segment

SEGMENT_PREFIX = "append-"
"""Start of the name of each folder of appended rows."""
_LOCK = "_append.lock"


def append_rows(
    url: str | os.PathLike[str],
    source: Dataset | str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Append rows to a stored dataset.

    The rows go to a new segment inside the dataset's folder. The list of segments is written last, and only
    then readers see the rows. If an append is interrupted, the dataset stays as it was, and the next append
    removes the incomplete segment. A segment that is not larger than the new rows is rewritten together with
    them, so n appends make about log2(n) segments; `convert_dataset` makes one of all. A dataset that is
    already open keeps its rows until the second append after it was opened. Only one append runs at a time: a
    second one raises `DataError`.

    Parameters
    ----------
    url : str
        The dataset that grows.
    source : Dataset or url
        Rows to append. They need the feature shape and dtype of the dataset, and its kind of labels; new
        labels become new classes. Either both have weights or none.
    progress : callable, optional
        Called with (rows done, total rows).
    **layout
        `chunk_rows`, `shard_rows`, `compressor` of `create_dataset`, for the new rows.

    Returns
    -------
    Dataset
        The dataset with all its rows and a new fingerprint.

    Raises
    ------
    DataError
        Rows or labels of another kind, a damaged source, a full disk, or another append at the same time. The
        dataset stays as it was.

    Examples
    --------
    >>> import numpy as np
    >>> from scalelatent.data import Dataset
    >>> place = "memory://doc-append"
    >>> _ = Dataset.from_arrays(np.zeros((3, 2)), ["a", "c", "c"]).save(place, overwrite=True)
    >>> append_rows(place, Dataset.from_arrays(np.ones((2, 2)), ["b", "a"])).read_y(0, 5).tolist()
    ['a', 'c', 'c', 'b', 'a']
    """
    location = locate(url)
    read_attrs(location)  # if there is no dataset, raise an error before a lock file is created
    with hold_lock(location, _LOCK, "being appended to"):
        _append(location, source if isinstance(source, Dataset) else open_dataset(source), progress, layout)
    return open_dataset(url)


def _append(location: Location, rows: Dataset, progress: Progress | None, layout: LayoutOptions) -> None:
    target, attrs = open_dataset(location.url), read_attrs(location)
    _remove_unlisted(location, attrs)
    classes = _common_classes(target, rows)
    segments = attrs.segments or [_segment_entry("", attrs, target.n_rows)]
    segments = _segments_to_keep(segments, rows.n_rows)
    first = sum(segment["rows"] for segment in segments)
    parts = [rows] if first == target.n_rows else [target[first:], rows]
    folder = location.at(f"{SEGMENT_PREFIX}{uuid.uuid4().hex[:8]}")
    try:
        segment = _write_segment(parts, target, classes, folder, progress, layout)
        before = _state_before(attrs, classes, target.n_rows)
        record = {"rows": rows.n_rows, **derive_provenance(rows, "append"), "before": before}
        _commit(location, attrs, [*segments, segment], classes, record)
    except BaseException as error:
        # Do not delete a segment that the dataset lists: an interrupt may come after the commit.
        if not _is_listed(location, folder):
            clear_after(error, folder)
        if isinstance(error, DataError) and isinstance(error.__cause__, OSError):
            raise DataError(
                f"{location.url}: appending failed: {error.__cause__}; the dataset is unchanged. "
                "Correct this problem, then append again"
            ) from error
        raise


def _remove_unlisted(location: Location, attrs: DatasetAttrs) -> None:
    """Remove segments of failed appends, and segments that the last append merged."""
    listed = {segment["path"] for segment in attrs.segments or []}
    for name in location.keys(""):
        if name.startswith(SEGMENT_PREFIX) and name not in listed:
            location.at(name).clear()


def _describe_columns(ds: Dataset) -> dict[str, object]:
    """Return the properties that must be equal in two datasets, so that their rows can be joined."""
    labels = None if ds.y_kind is None else str(ds.y_kind)
    if ds.y_kind == "labels":
        labels = "strings" if ds.read_y(0, 1).dtype.kind == "U" else "numbers"
    elif ds.y_kind is not None:
        labels = f"{ds.n_targets} {ds.y_kind} columns of {ds.read_y(0, 1).dtype}"
    return {
        "feature_shape": ds.feature_shape,
        "dtype": str(ds.dtype),
        "rows": "CSR" if ds.is_sparse else "dense",
        "labels": labels,
        "weights": "yes" if ds.has_weight else "no",
    }


def _common_classes(target: Dataset, rows: Dataset) -> np.ndarray | None:
    """Return the classes of both datasets together, or None; refuse rows that do not fit the target."""
    old_kind, new_kind = _describe_columns(target), _describe_columns(rows)
    differing = [
        f"{name} {new_kind[name]} instead of {old_kind[name]}"
        for name in old_kind
        if old_kind[name] != new_kind[name]
    ]
    if differing:
        raise DataError(
            f"the rows to append to {target.url} have {'; '.join(differing)}. Nothing was appended; "
            "convert them first, for example with `scalelatent data convert --dtype`"
        )
    _check_names(target, rows)
    if old_kind["labels"] == "strings" and rows.classes is None:
        raise schema.too_many_strings("the rows to append (nothing was appended)")
    if not target.has_y or target.classes is None or rows.classes is None:
        return None
    if old_kind["labels"] == "numbers":
        stored = target.read_y(0, 1).dtype
        bad = rows.classes[rows.classes.astype(stored) != rows.classes]
        if bad.size:
            raise DataError(
                f"the rows to append to {target.url} have the label {bad[0].item()!r}, which does not "
                f"fit into its labels, {stored}. Nothing was appended; convert the labels first"
            )
    classes = np.union1d(target.classes, rows.classes)
    return schema.as_classes(classes, f"{target.url} with the rows to append (nothing was appended)")


def _check_names(target: Dataset, rows: Dataset) -> None:
    """Refuse rows with other feature names than the target, if both have names."""
    names, new = target.feature_names, rows.feature_names
    if names is not None and new is not None and (bad := np.flatnonzero(names != new)).size:
        raise DataError(
            f"the rows to append to {target.url} have other feature names, or the same names in another "
            f"order: feature {bad[0]} is {new[bad[0]]!r} instead of {names[bad[0]]!r}. Nothing was appended; "
            "give the features of the dataset in their order"
        )


def _segment_entry(path: str, attrs: DatasetAttrs, n_rows: int) -> Segment:
    """Return the entry of a segment for the list of segments in the attributes."""
    # A segment with label codes needs its classes to decode the codes. The first segment always needs its
    # classes, for its fingerprint: after an append, the attributes in its folder have the new classes.
    classes = attrs.classes if attrs.codes or not path else None
    assert attrs.fingerprint is not None, "only a finished dataset becomes a segment"
    return {"path": path, "rows": n_rows, "fingerprint": attrs.fingerprint, "classes": classes}


def _state_before(attrs: DatasetAttrs, classes: np.ndarray | None, n_rows: int) -> dict[str, Any]:
    """Return number of rows and fingerprint before an append, and the old classes if the append adds some."""
    changed = attrs.classes != (None if classes is None else classes.tolist())
    state = {"rows": n_rows, "fingerprint": attrs.fingerprint}
    return {**state, "classes": attrs.classes} if changed else state


def _segments_to_keep(segments: list[Segment], new_rows: int) -> list[Segment]:
    """Return the segments to keep: the first, and each segment with more rows than all later rows."""
    remaining = list(segments)
    while len(remaining) > 1 and remaining[-1]["rows"] <= new_rows:
        new_rows += remaining.pop()["rows"]
    return remaining


def _write_segment(
    parts: list[Dataset],
    target: Dataset,
    classes: np.ndarray | None,
    location: Location,
    progress: Progress | None,
    layout: LayoutOptions,
) -> Segment:
    """Write the rows of one or two datasets, in order, to a new segment; return its description."""
    n_rows = sum(part.n_rows for part in parts)
    nnz = None if target.nnz is None else sum(part.nnz or 0 for part in parts)
    named: dict[str, Any] = {"classes": classes} if target.y_kind == "labels" else {}
    named["feature_names"] = None  # only the first segment stores the names
    writer = create_like(
        target, location.url, n_rows=n_rows, nnz=nnz, provenance={"importer": "append"}, **layout, **named
    )
    edge = parts[0].n_rows

    def batch(a: int, b: int) -> RowBatch:
        ranges = [(parts[0], a, min(b, edge)), (parts[-1], max(a, edge) - edge, b - edge)]
        return RowBatch.concatenate([RowBatch.read(part, u, v) for part, u, v in ranges if v > u])

    bounds = map(writer.shard_bounds, range(writer.n_shards))
    write_shards(writer, itertools.starmap(batch, bounds), progress)
    writer.finish()
    return _segment_entry(location.url.rsplit("/", 1)[-1], read_attrs(location), writer.n_rows)


def _commit(
    location: Location,
    attrs: DatasetAttrs,
    segments: list[Segment],
    classes: np.ndarray | None,
    record: dict[str, Any],
) -> None:
    """Replace the list of segments in the attributes of the dataset, in one write."""
    if read_attrs(location).fingerprint != attrs.fingerprint:
        raise DataError(
            f"{location.url} was changed by another process while rows to append were written. "
            "Nothing was appended; append again"
        )
    names = None if classes is None else classes.tolist()
    done = replace(
        attrs,
        segments=segments,
        classes=names,
        fingerprint=joined_fingerprint(segments, names),
        provenance={**attrs.provenance, "appended": [*attrs.provenance.get("appended", []), record]},
    )
    with explain_os_errors(location, "adding the new rows to the attributes", "append again"):
        write_attrs(location, done)


def _is_listed(location: Location, folder: Location) -> bool:
    """Return whether a dataset lists the segment `folder`, or has attributes that cannot be read."""
    try:
        segments = read_attrs(location).segments or []
    except DataError:  # keep the segment; the next append removes it if it is not listed
        return True
    return any(segment["path"] == folder.url.rsplit("/", 1)[-1] for segment in segments)
