"""A stored dataset that grew: the rows of its segments, one after another.

`append_rows` never touches what is there. It writes the new rows to a dataset of their own inside the old
one's folder and then enters it into the list of segments, an attribute of the group: one write, which readers
see whole or not at all.
"""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data import csr
from scalelatent.errors import DataError, ShardError
from scalelatent.storage.disk import Location, locate

from .sources import is_csr

if TYPE_CHECKING:
    from scalelatent.data.schema import DatasetAttrs

    from .sources import RowSource

__all__ = ["JoinedRows", "join_segments", "segment_location"]


class JoinedRows:
    """Several row sources one after another, a row source (see sources.py)."""

    def __init__(self, sources: list[RowSource]) -> None:
        self._sources = sources
        self._edges = [0, *itertools.accumulate(s.shape[0] for s in sources)]
        self.shape: tuple[int, ...] = (self._edges[-1], *sources[0].shape[1:])
        self.dtype: np.dtype[Any] = np.result_type(*(s.dtype for s in sources))

    @property
    def reads_at_once(self) -> int:
        """Reads that are worth having in flight."""
        return max(getattr(source, "reads_at_once", 1) for source in self._sources)

    @property
    def layout(self) -> Any:
        """Chunks, shards and codec of the first segment."""
        return self._sources[0].layout  # type: ignore[attr-defined]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows `start:stop`; a copy where they lie in several segments."""
        parts = [_read(*part) for part in self._parts(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows `start:stop` cut where segments, and their chunks, end."""
        parts = self._parts(start, stop) if stop > start else []
        return [(u + first, v + first) for source, a, b, first in parts for u, v in source.pieces(a, b)]

    def shards(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        """(file, first row, one past its last row) of the shards that hold the rows `start:stop`."""
        parts: list[Any] = self._parts(start, stop) if stop > start else []
        return [(f, u + first, v + first) for source, a, b, first in parts for f, u, v in source.shards(a, b)]

    def _parts(self, start: int, stop: int) -> list[tuple[RowSource, int, int, int]]:
        """Each source in the rows, the rows in it, and the number of its first row."""
        parts = []
        i = min(bisect.bisect_right(self._edges, start) - 1, len(self._sources) - 1)
        while True:
            first, last = self._edges[i], self._edges[i + 1]
            parts.append((self._sources[i], start - first, min(stop, last) - first, first))
            if stop <= last:
                return parts
            start, i = last, i + 1


def _read(source: RowSource, start: int, stop: int, first: int) -> Any:
    try:
        return source.read(start, stop)
    except ShardError as error:
        raise error.moved(first) from error.__cause__


class JoinedCsr(JoinedRows):
    """The same of CSR rows."""

    sparse = True
    knows_entries = True
    _sources: list[Any]  # each with `nnz` and `entries`

    @property
    def nnz(self) -> int:
        """Stored entries."""
        return sum(source.nnz for source in self._sources)

    def entries(self, start: int, stop: int) -> int:
        """Stored entries of the rows `start:stop`."""
        parts: list[Any] = self._parts(start, stop)
        return sum(source.entries(a, b) for source, a, b, _ in parts)

    def read(self, start: int, stop: int) -> Any:
        """Rows `start:stop`."""
        return csr.stack([_read(*part) for part in self._parts(start, stop)])


class RecodedRows:
    """Label codes of a segment as codes of the classes of the whole dataset, a row source."""

    def __init__(self, source: RowSource, old: list[Any], new: list[Any]) -> None:
        self._source = source
        self._table = np.searchsorted(np.asarray(new), np.asarray(old)).astype(np.int32)
        self.shape: tuple[int, ...] = source.shape
        self.dtype: np.dtype[Any] = self._table.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        """Codes of the rows `start:stop`; one that is no code stays none."""
        codes = self._source.read(start, stop).astype(np.int64)
        known = (codes >= 0) & (codes < len(self._table))
        return np.where(known, self._table[np.where(known, codes, 0)], -1).astype(np.int32)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows `start:stop` cut where reading is cheapest."""
        return self._source.pieces(start, stop)


def segment_location(location: Location, path: str) -> Location:
    """Where a segment of the dataset at a place lies."""
    return locate(f"{location.url}/{path}")


def join_segments(location: Location, attrs: DatasetAttrs, base: dict[str, Any]) -> dict[str, Any]:
    """The columns of a dataset that grew, from those of its first segment.

    Raises
    ------
    DataError
        A segment is gone or is not the one that was appended.
    """
    from .stored import open_columns

    assert attrs.segments is not None
    opened = [base]
    for segment in attrs.segments[1:]:
        place = segment_location(location, segment["path"])
        try:
            columns = open_columns(place)
        except DataError as error:
            raise DataError(
                f"dataset {location.url}: its appended rows in {segment['path']} cannot be opened: {error}"
            ) from error
        if columns["attrs"].fingerprint != segment["fingerprint"]:
            raise DataError(
                f"dataset {location.url}: {segment['path']} does not hold the rows that were appended; "
                "restore it from a copy"
            )
        opened.append(columns)
    joined = dict(base)
    for name in ("x", "y", "weight"):
        if name in base:
            sources = [columns[name] for columns in opened]
            if name == "y" and attrs.codes:
                owned = [segment["classes"] for segment in attrs.segments]
                sources = [
                    s if old == attrs.classes else RecodedRows(s, old, attrs.classes or [])
                    for s, old in zip(sources, owned, strict=True)
                ]
            joined[name] = (JoinedCsr if is_csr(sources[0]) else JoinedRows)(sources)
    return joined
