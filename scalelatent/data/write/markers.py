"""Markers of written shards: a small file each, there only while a writer is at work."""

from __future__ import annotations

import json
from typing import Any

from scalelatent.storage.location import Location

__all__ = ["MARKERS", "Markers"]

MARKERS = "_shards"
"""Their folder."""
_WINDOW = 512


class Markers:
    """Those of one dataset.

    Examples
    --------
    >>> from scalelatent.storage.disk import locate
    >>> markers = Markers(locate("memory://doc-markers"))
    >>> markers.write(1, {"digest": "00"})
    >>> markers.read_all(3)
    [None, {'digest': '00'}, None]
    """

    def __init__(self, location: Location) -> None:
        self._location = location

    def read(self, shard: int) -> dict[str, Any] | None:
        """What is known of a written shard; None of one that is not, or whose marker is torn."""
        raw = self._location.read(_key(shard))
        return None if raw is None else _parsed(raw)

    def read_all(self, n_shards: int) -> list[dict[str, Any] | None]:
        """The markers of all shards, many at a time: over a network each alone is a round trip."""
        names = set(self._location.keys(MARKERS))
        found = [i for i in range(n_shards) if _name(i) in names]
        markers: list[dict[str, Any] | None] = [None] * n_shards
        for first in range(0, len(found), _WINDOW):
            some = found[first : first + _WINDOW]
            for i, raw in zip(some, self._location.read_ranges([_key(i) for i in some]), strict=True):
                markers[i] = _parsed(raw)
        return markers

    def write(self, shard: int, marker: dict[str, Any]) -> None:
        """Say that a shard is written, after its last file."""
        self._location.write(_key(shard), json.dumps(marker).encode())

    def delete(self, shard: int) -> None:
        """Say that a shard is not written."""
        self._location.delete(_key(shard))

    def clear(self) -> None:
        """Remove them all."""
        self._location.delete_tree(MARKERS)


def _name(shard: int) -> str:
    return f"{shard:06d}.json"


def _key(shard: int) -> str:
    return f"{MARKERS}/{_name(shard)}"


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        return dict(json.loads(raw))
    except ValueError:
        return None
