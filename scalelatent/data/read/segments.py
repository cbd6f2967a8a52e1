"""Read a stored dataset with appended segments, in its present state or its state before each append.

`append_rows` never changes existing rows. It writes the new rows to a new dataset (a segment) inside the
folder of the old dataset and adds the segment to the list of segments. The list is an attribute of the group,
which one write replaces. The provenance records the number of rows and the fingerprint before the append.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data import csr
from scalelatent.data.columns import DatasetColumns
from scalelatent.errors import ShardError

from .sources import RowSource, WrappedRows

if TYPE_CHECKING:
    from scalelatent.data.layout import ChunkLayout
    from scalelatent.data.schema import DatasetAttrs, Label, Segment
    from scalelatent.kernels.arrays import DenseOrCsr


class JoinedRows(RowSource):
    """Rows of several row sources, one source after the other."""

    def __init__(self, sources: list[RowSource]) -> None:
        self._sources = sources
        self._edges = [0, *itertools.accumulate(s.shape[0] for s in sources)]
        self.shape = (self._edges[-1], *sources[0].shape[1:])
        self.dtype = np.result_type(*(s.dtype for s in sources))
        self.sparse = sources[0].sparse
        self.reads_at_once = max(s.reads_at_once for s in sources)

    @property
    def layout(self) -> ChunkLayout | None:
        """Chunk and shard sizes and codec of the first source."""
        return self._sources[0].layout

    @property
    def nnz(self) -> int:
        return sum(source.nnz for source in self._sources)

    def count_entries(self, start: int, stop: int) -> int:
        return sum(source.count_entries(a, b) for source, a, b, _ in self._parts(start, stop))

    def read(self, start: int, stop: int) -> DenseOrCsr:
        parts = [_read_source(*part) for part in self._parts(start, stop)]
        return csr.concatenate(parts)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        parts = self._parts(start, stop) if stop > start else []
        return [(u + first, v + first) for source, a, b, first in parts for u, v in source.pieces(a, b)]

    def shards(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        parts = self._parts(start, stop) if stop > start else []
        return [(f, u + first, v + first) for source, a, b, first in parts for f, u, v in source.shards(a, b)]

    def _parts(self, start: int, stop: int) -> list[tuple[RowSource, int, int, int]]:
        """Return (source, start, stop, first row of the source) for each source of the rows `start:stop`."""
        parts = []
        i = min(bisect.bisect_right(self._edges, start) - 1, len(self._sources) - 1)
        while True:
            first, last = self._edges[i], self._edges[i + 1]
            parts.append((self._sources[i], start - first, min(stop, last) - first, first))
            if stop <= last:
                return parts
            start, i = last, i + 1


def _read_source(source: RowSource, start: int, stop: int, first: int) -> DenseOrCsr:
    try:
        return source.read(start, stop)
    except ShardError as error:
        raise error.moved(first) from error.__cause__


class RecodedRows(WrappedRows):
    """Label codes of a segment, converted from the classes `old` to the classes `new`."""

    def __init__(self, source: RowSource, old: list[Label], new: list[Label]) -> None:
        super().__init__(source, dtype=np.dtype(np.int32))
        self._table = np.searchsorted(np.asarray(new), np.asarray(old)).astype(np.int32)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the codes of the rows `start:stop` in the classes of the whole dataset; -1 if invalid."""
        codes = self._source.read(start, stop).astype(np.int64)
        known = (codes >= 0) & (codes < len(self._table))
        return np.where(known, self._table[np.where(known, codes, 0)], -1).astype(np.int32)


@dataclass(frozen=True)
class EarlierState:
    """Number of rows, fingerprint and classes of a dataset before an append."""

    rows: int
    fingerprint: str
    classes: list[Label] | None


def joined_fingerprint(segments: list[Segment], classes: list[Label] | None) -> str:
    """Return the fingerprint of a dataset with several segments."""
    parts = [[segment["rows"], segment["fingerprint"]] for segment in segments]
    return hashlib.sha256(json.dumps([parts, classes]).encode()).hexdigest()


def earlier_states(attrs: DatasetAttrs) -> list[EarlierState]:
    """Return the state of a dataset before each of its appends; the state before the last append is first."""
    classes, states = attrs.classes, []
    for record in reversed(attrs.provenance.get("appended", [])):
        before = record["before"]
        classes = before.get("classes", classes)
        states.append(EarlierState(before["rows"], before["fingerprint"], classes))
    return states


def earlier_columns(columns: DatasetColumns, fingerprint: str) -> DatasetColumns | None:
    """Return the columns that a stored dataset had with this fingerprint; None if it never had it."""
    states = [] if columns.attrs is None else earlier_states(columns.attrs)
    return next((restore_columns(columns, s) for s in states if s.fingerprint == fingerprint), None)


def restore_columns(columns: DatasetColumns, state: EarlierState) -> DatasetColumns:
    """Return the columns that a stored dataset had in `state`, before an append."""
    attrs = columns.attrs
    assert attrs is not None

    def keep_first_rows(source: RowSource | None) -> RowSource | None:
        return None if source is None else WrappedRows(source, (state.rows, *source.shape[1:]))

    y = None if columns.paired is not None else columns.y
    if y is not None and attrs.codes and state.classes != attrs.classes:
        y = RecodedRows(y, attrs.classes or [], state.classes or [])
    x = keep_first_rows(columns.x)
    assert x is not None
    then = replace(attrs, fingerprint=state.fingerprint, classes=state.classes)
    weight = None if columns.weight_is_own else columns.weight
    out = DatasetColumns(
        x, keep_first_rows(y), keep_first_rows(weight), place=columns.place, attrs=then, shared=columns.shared
    )
    out.y_is_dropped = columns.y_is_dropped
    if columns.weight_is_own:
        assert columns.weight is not None
        out = out.with_weight(columns.weight)
    return out
