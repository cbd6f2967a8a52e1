"""Bad shards, whose rows a fit leaves out: workers die of them, or they cannot be read."""

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
# More than this of a dataset is not a bad shard but a disk that is away, or workers with too little memory.
MOST = 0.25

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class BadShard:
    """Rows that are left out."""

    url: str
    file: str
    start: int  # its rows, counted from the first one at the url
    stop: int
    deaths: int  # of workers; 0 where reading it was refused
    why: str


def whole_shards(dataset: Dataset, start: int, stop: int) -> tuple[int, int]:
    """Rows of a dataset and whatever lies in one shard with them, counted from the first row at its url."""
    first = dataset.extent[0]
    # Of the many shards of a long span only the outermost ones.
    head, tail = dataset.shards(start, start + 1), dataset.shards(stop - 1, stop)
    return (head[0][1] if head else first + start), (tail[-1][2] if tail else first + stop)


def check_choice(value: str) -> str:
    """The value of ``on_bad_shard``, where it is one."""
    if value in CHOICES:
        return value
    near = difflib.get_close_matches(str(value).lower(), CHOICES, n=1)
    meant = f": did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"on_bad_shard is {' or '.join(map(repr, CHOICES))}, not {value!r}{meant}")


class Quarantine:
    """The bad shards of a run."""

    # From the pass in which a shard was found, the fit is that of the same rows with weight 0 for those of
    # the shard. The list lies in the run folder, so a resumed run leaves them out too.

    def __init__(self, choice: str = "stop", store: EngineStore | None = None) -> None:
        self.skips = check_choice(choice) == "skip"
        self._store = store
        self._places: dict[str, Location] = {}
        kept = None if store is None else store.place.read(FILE)
        try:
            self.shards = [] if kept is None else [BadShard(**entry) for entry in json.loads(kept)]
        except (ValueError, TypeError):
            raise RunError(
                f"{store.place.name_of(FILE) if store else FILE} is damaged, so it is not known which "
                "rows were left out: put it back, or start again in another folder"
            ) from None

    def rows_of(self, dataset: Dataset) -> Ranges:
        """Rows of a dataset that are left out, as disjoint runs in order."""
        if dataset.place is not None:
            self._places[dataset.place.url] = dataset.place
        if dataset.url is None or not self.shards:
            return ()
        first, last = dataset.extent
        runs: list[tuple[int, int]] = []
        for start, stop in sorted((s.start, s.stop) for s in self.shards if s.url == dataset.url):
            a, b = max(start, first) - first, min(stop, last) - first
            if runs and a < b and a <= runs[-1][1]:
                runs[-1] = (runs[-1][0], max(b, runs[-1][1]))
            elif a < b:
                runs.append((a, b))
        return tuple(runs)

    def of(self, stage: Stage) -> dict[str, Ranges]:
        """Part -> rows that are left out, of the parts that have some."""
        found = {part: self.rows_of(dataset) for part, dataset in stage.datasets.items()}
        return {part: rows for part, rows in found.items() if rows}

    def take(self, error: ShardError, callbacks: Callback, **where: object) -> bool:
        """Leave out the shard that an error names; False where it is not to be, and the error stands."""
        if not self.skips or error.url is None or error.stop <= error.start:
            return False
        bad = BadShard(error.url, error.file, error.start, error.stop, 0, str(error))
        return self.add([bad], callbacks, **where)

    def add(self, shards: Iterable[BadShard], callbacks: Callback, **where: object) -> bool:
        """Leave out shards from now on, and tell of it; False where all of them were already."""
        new = [bad for bad in shards if not self._has(bad)]
        for bad in new:
            self._refuse_most(bad)
            self.shards.append(bad)
        if new:
            self._write()
        for bad in new:
            about = {"dataset": bad.url, "shard": bad.file, "first_row": bad.start, "stop_row": bad.stop}
            callbacks.on_event(
                {
                    "event": "shard_quarantined",
                    **about,
                    "rows": bad.stop - bad.start,
                    "deaths": bad.deaths,
                    "why": bad.why,
                    **where,
                }
            )
        return bool(new)

    def follow(self, source: Dataset, mapped: Dataset) -> None:
        """Leave out of the output of a map the rows that were left out of what it read."""
        assert mapped.url is not None, "maps of stored rows are stored"
        new = [
            BadShard(mapped.url, bad.file, a, b, bad.deaths, bad.why)
            for a, b in self.rows_of(source)
            for bad in self.shards
            if bad.url == source.url and bad.start - source.extent[0] < b and bad.stop - source.extent[0] > a
        ]
        new = [bad for bad in dict.fromkeys(new) if not self._has(bad)]
        if new:
            self.shards += new
            self._write()

    def _has(self, bad: BadShard) -> bool:
        return any((s.url, s.start, s.stop) == (bad.url, bad.start, bad.stop) for s in self.shards)

    def _refuse_most(self, bad: BadShard) -> None:
        from scalelatent.data import open_dataset

        out = sum(s.stop - s.start for s in self.shards if s.url == bad.url) + bad.stop - bad.start
        rows = len(open_dataset(self._places.get(bad.url, bad.url)))
        if out > MOST * rows:
            raise RunError(
                f"shard {bad.file} (rows {bad.start}:{bad.stop}) is bad ({bad.why}), and with it {out} of "
                f"the {rows} rows of {bad.url} would be left out, more than {MOST:.0%}: that is not a bad "
                "shard. See whether the dataset is all there (`scalelatent data info --verify`) and whether "
                "workers have enough memory, then resume the run; what was done is kept"
            )

    def _write(self) -> None:
        if self._store is not None:
            text = json.dumps([asdict(bad) for bad in self.shards], indent=1)
            self._store.write_bytes(FILE, text.encode(), durable=True)
