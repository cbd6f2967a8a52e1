"""Exclude the rows of bad shards from a fit: shards that cannot be read, or that kill the workers."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from scalelatent.errors import RunError, ShardError

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset
    from scalelatent.storage.location import Location

    from .callbacks import Callback
    from .checkpoints import EngineStore
    from .passes import Stage

CHOICES = ("stop", "skip")
FILE = "quarantine.json"
# Largest share of the rows of a dataset that a fit excludes. More bad rows mean a missing disk or too little
# memory.
MOST_EXCLUDED = 0.25

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class BadShard:
    """A bad shard of a dataset; a fit excludes its rows."""

    url: str
    file: str
    start: int  # first row of the shard, in the numbers of the rows stored at the URL
    stop: int
    deaths: int  # number of workers that died while they read the shard; 0 if the shard cannot be read
    why: str


def whole_shards(dataset: Dataset, start: int, stop: int) -> tuple[int, int]:
    """Extend rows to whole shards; return (start, stop) in the numbers of the rows stored at the URL."""
    first = dataset.extent[0]
    head, tail = dataset.shards(start, start + 1), dataset.shards(stop - 1, stop)
    return (head[0][1] if head else first + start), (tail[-1][2] if tail else first + stop)


def check_choice(value: str) -> str:
    """Return the value of ``on_bad_shard``, or raise a ValueError if it is not a choice."""
    if value in CHOICES:
        return value
    near = difflib.get_close_matches(str(value).lower(), CHOICES, n=1)
    hint = f": did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"on_bad_shard must be {' or '.join(map(repr, CHOICES))}, not {value!r}{hint}")


class Quarantine:
    """List of the bad shards of a run; the run folder stores the list, which a resume reads again.

    The rows of a bad shard have weight 0 from the start of the pass in which the shard was found.
    """

    def __init__(self, choice: str = "stop", store: EngineStore | None = None) -> None:
        self.skips = check_choice(choice) == "skip"
        self._store = store
        self._places: dict[str, Location] = {}
        stored = None if store is None else store.location.read(FILE)
        try:
            self.shards = [] if stored is None else [BadShard(**entry) for entry in json.loads(stored)]
        except (ValueError, TypeError):
            raise RunError(
                f"{store.location.name_of(FILE) if store else FILE} is damaged, so the list of excluded rows "
                "is unknown: restore the file, or start again in another folder"
            ) from None

    def excluded_rows(self, dataset: Dataset) -> Ranges:
        """Return the excluded rows of a dataset, as disjoint ranges in order."""
        if dataset.place is not None:
            self._places[dataset.place.url] = dataset.place
        if dataset.url is None or not self.shards:
            return ()
        first, last = dataset.extent
        ranges: list[tuple[int, int]] = []
        for start, stop in sorted((s.start, s.stop) for s in self.shards if s.url == dataset.url):
            a, b = max(start, first) - first, min(stop, last) - first
            if ranges and a < b and a <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(b, ranges[-1][1]))
            elif a < b:
                ranges.append((a, b))
        return tuple(ranges)

    def excluded_parts(self, stage: Stage) -> dict[str, Ranges]:
        """Return the excluded rows of a stage's datasets ("train", "validation"), if a dataset has any."""
        found = {part: self.excluded_rows(dataset) for part, dataset in stage.datasets.items()}
        return {part: rows for part, rows in found.items() if rows}

    def exclude_unreadable(self, error: ShardError, callbacks: Callback, **where: object) -> bool:
        """Exclude the shard that an error names; return False if the caller must raise the error instead."""
        if not self.skips or error.url is None or error.stop <= error.start:
            return False
        bad = BadShard(error.url, error.file, error.start, error.stop, 0, str(error))
        return self.exclude_shards([bad], callbacks, **where)

    def exclude_shards(self, shards: Iterable[BadShard], callbacks: Callback, **where: object) -> bool:
        """Exclude shards and notify the callbacks; return False if all of them were excluded before."""
        new = [bad for bad in shards if not self._contains(bad)]
        for bad in new:
            self._check_share(bad)
            self.shards.append(bad)
        if new:
            self._write()
        for bad in new:
            callbacks.on_event(
                {
                    "event": "shard_quarantined",
                    "dataset": bad.url,
                    "shard": bad.file,
                    "first_row": bad.start,
                    "stop_row": bad.stop,
                    "rows": bad.stop - bad.start,
                    "deaths": bad.deaths,
                    "why": bad.why,
                    **where,
                }
            )
        return bool(new)

    def exclude_mapped(self, source: Dataset, mapped: Dataset) -> None:
        """Exclude the rows of the map output ``mapped`` whose input rows in ``source`` are excluded."""
        assert mapped.url is not None, "maps of stored rows are stored"
        new = [
            BadShard(mapped.url, bad.file, a, b, bad.deaths, bad.why)
            for a, b in self.excluded_rows(source)
            for bad in self.shards
            if bad.url == source.url and bad.start - source.extent[0] < b and bad.stop - source.extent[0] > a
        ]
        new = [bad for bad in dict.fromkeys(new) if not self._contains(bad)]
        if new:
            self.shards += new
            self._write()

    def _contains(self, bad: BadShard) -> bool:
        return any((s.url, s.start, s.stop) == (bad.url, bad.start, bad.stop) for s in self.shards)

    def _check_share(self, bad: BadShard) -> None:
        """Raise a RunError if more than the share MOST_EXCLUDED of a dataset's rows would be excluded."""
        from scalelatent.data import open_dataset

        excluded = sum(s.stop - s.start for s in self.shards if s.url == bad.url) + bad.stop - bad.start
        rows = len(open_dataset(self._places.get(bad.url, bad.url)))
        if excluded > MOST_EXCLUDED * rows:
            raise RunError(
                f"shard {bad.file} (rows {bad.start}:{bad.stop}) is bad ({bad.why}). Without it {excluded} "
                f"of the {rows} rows of {bad.url} would be excluded, more than the limit of "
                f"{MOST_EXCLUDED:.0%}. Check that the dataset is complete (`scalelatent data check DATA`) "
                "and that workers have enough memory, then resume the run; finished work is kept"
            )

    def _write(self) -> None:
        if self._store is not None:
            text = json.dumps([asdict(bad) for bad in self.shards], indent=1)
            self._store.write_bytes(FILE, text.encode(), durable=True)
