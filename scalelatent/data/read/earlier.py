"""The rows that a dataset had before more were appended to it.

An append leaves the old rows as they are, and notes in the provenance how many there were, and what their
fingerprint was. Whoever began with those rows can go on with them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from scalelatent.data.columns import Columns

from .joined import RecodedRows

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset
    from scalelatent.data.schema import DatasetAttrs

    from .sources import RowSource

__all__ = [
    "State",
    "earlier_columns",
    "earlier_rows",
    "earlier_states",
    "joined_fingerprint",
    "rows_at_same_time",
]


@dataclass(frozen=True)
class State:
    """What a dataset was before an append."""

    rows: int
    fingerprint: str
    classes: list[Any] | None


class FirstRows:
    """The first rows of a source, a row source (see sources.py)."""

    def __init__(self, source: RowSource, n_rows: int) -> None:
        self._source: Any = source
        self.shape: tuple[int, ...] = (n_rows, *source.shape[1:])
        self.dtype = source.dtype

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    @property
    def nnz(self) -> int:
        """Stored entries."""
        return int(self._source.entries(0, self.shape[0]))

    def read(self, start: int, stop: int) -> Any:
        """Rows `start:stop`."""
        return self._source.read(start, stop)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows `start:stop` cut where reading is cheapest."""
        return self._source.pieces(start, stop)  # type: ignore[no-any-return]


def joined_fingerprint(segments: list[dict[str, Any]], classes: list[Any] | None) -> str:
    """The fingerprint of a dataset of several segments."""
    parts = [[segment["rows"], segment["fingerprint"]] for segment in segments]
    return hashlib.sha256(json.dumps([parts, classes]).encode()).hexdigest()


def earlier_states(attrs: DatasetAttrs) -> list[State]:
    """What a dataset was before each append, as far as that is known."""
    classes, found = attrs.classes, []
    for record in reversed(attrs.provenance.get("appended", [])):
        before = record.get("before")
        if before is None:  # noted by no version before this one
            break
        classes = before.get("classes", classes)
        found.append(State(before["rows"], before["fingerprint"], classes))
    segments = attrs.segments or []
    for k in range(1, len(segments)):
        some, rows = segments[:k], sum(segment["rows"] for segment in segments[:k])
        kept = some[0]["classes"] if k == 1 and some[0]["classes"] is not None else attrs.classes
        fingerprint = some[0]["fingerprint"] if k == 1 else joined_fingerprint(some, attrs.classes)
        found.append(State(rows, fingerprint, kept))
    return found


def earlier_columns(columns: Columns, fingerprint: str) -> Columns | None:
    """The columns of a stored dataset as they were when it had this fingerprint, or None."""
    if columns.attrs is None:
        return None
    state = next((s for s in earlier_states(columns.attrs) if s.fingerprint == fingerprint), None)
    return None if state is None else _at(columns, state)


def _at(columns: Columns, state: State) -> Columns:
    attrs = columns.attrs
    assert attrs is not None

    def first(source: RowSource | None) -> RowSource | None:
        return None if source is None else FirstRows(source, state.rows)

    y = None if columns.paired is not None else columns.y
    if y is not None and attrs.codes and state.classes != attrs.classes:
        y = RecodedRows(y, attrs.classes or [], state.classes or [])
    x = first(columns.x)
    assert x is not None
    then = replace(attrs, fingerprint=state.fingerprint, classes=state.classes)
    weight = None if columns.weight_is_own else columns.weight
    out = Columns(x, first(y), first(weight), url=columns.url, attrs=then, shared=columns.shared)
    if columns.weight_is_own:
        assert columns.weight is not None
        out = out.reweighted(columns.weight)
    return out


def earlier_rows(ds: Dataset, fingerprint: str) -> Dataset | None:
    """The rows that a dataset, or a slice of one, had when its fingerprint was this one.

    Parameters
    ----------
    ds : Dataset
        Opened since; rows may have been appended, to it and to the dataset of its outputs.
    fingerprint : str
        What `ds.fingerprint()` was.

    Returns
    -------
    Dataset or None
        `ds` itself where nothing has changed; None where nobody knows which rows those were.

    Examples
    --------
    >>> import numpy as np
    >>> from scalelatent.data import Dataset, append_rows
    >>> old = Dataset.from_arrays(np.zeros((3, 2)), [0, 1, 1]).save("memory://doc-earlier", overwrite=True)
    >>> new = append_rows("memory://doc-earlier", Dataset.from_arrays(np.ones((2, 2)), [2, 0]))
    >>> then = earlier_rows(new, old.fingerprint())
    >>> len(new), len(then), then.classes.tolist()
    (5, 3, [0, 1])
    """
    if ds.fingerprint() == fingerprint:
        return ds
    return next((found for found in _candidates(ds) if found.fingerprint() == fingerprint), None)


def rows_at_same_time(ds: Dataset, other: Dataset) -> Dataset:
    """The rows of a dataset when it was what another slice of it is of; `ds` itself where it is so now."""
    from scalelatent.data.dataset import Dataset

    then = earlier_columns(ds._columns, other._columns.fingerprint)
    start, stop = ds.extent
    if then is None or ds._columns.paired is not None or start >= then.x.shape[0]:
        return ds
    return Dataset(then, start, min(stop, then.x.shape[0]))


def _candidates(ds: Dataset) -> Iterator[Dataset]:
    """What a run of rows may have been before appends: the same rows, or up to the end that was then."""
    from scalelatent.data.dataset import Dataset

    columns, (start, stop) = ds._columns, ds.extent
    if columns.attrs is None:
        return
    whole = columns.x.shape[0]
    for state in earlier_states(columns.attrs):
        ranges = {(start, stop), (start, state.rows), (state.rows - (whole - start), state.rows)}
        for a, b in sorted(ranges):
            if not 0 <= a < b <= state.rows or (b != stop and stop != whole):
                continue
            rows = Dataset(_at(columns, state), a, b)
            if columns.paired is None:
                yield rows
                continue
            target = columns.paired.part(start, stop)
            for other in _candidates(target):
                if len(other) == len(rows):
                    yield rows.with_target(other)
