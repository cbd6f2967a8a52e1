"""What every dataset that is made of another one has in common: shards, each with one writer.

A task of this kind reaches the workers by a record in the run folder; each of its shards can be computed
anywhere, and twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .quarantine import Ranges
from .reading import StopEvent


@dataclass(frozen=True, kw_only=True)
class OutputTask:
    """Base of a map and of sets of rows.

    Attributes
    ----------
    name : str
        Read by people on the dashboard: ``"capsule_project"``.
    dataset : Dataset
        Rows in.
    url : str
        The dataset being written.
    device : str
    skipped : tuple of (start, stop)
        Rows in that are not to be read (see :mod:`.quarantine`): zeros take their place.
    cache : float or None
        What rows that are read more than once may take of a process's cache.
    """

    name: str
    dataset: Any
    url: str
    device: str = "cpu"
    skipped: Ranges = ()
    cache: float | None = None

    @cached_property
    def writer(self) -> Any:
        """The writer of the output, attached in this process."""
        from scalelatent.data import DatasetWriter

        return DatasetWriter.attach(self.url)

    @property
    def rows(self) -> int:
        """Rows of the output's shards, together: those of tiles side by side count each."""
        return int(self.writer.n_rows * self.writer.n_tiles)

    def rows_done(self, missing: list[int]) -> int:
        """Rows of the shards that are written, given those that are not."""
        return self.rows - sum(b - a for a, b in map(self.writer.shard_bounds, missing))

    def source_rows(self, shard: int) -> tuple[int, int]:
        """The rows in that a shard may be made of."""
        raise NotImplementedError

    def write_shard(self, shard: int, backend: Any, stop_event: StopEvent) -> int:
        """Compute and write one shard; returns its rows. Running it twice writes the same file."""
        raise NotImplementedError

    def to_tree(self) -> dict[str, Any]:
        """What a record holds of it, for the workers."""
        fields = {
            "name": self.name,
            "dataset": self.dataset.spec(),
            "url": self.url,
            "device": self.device,
            "skipped": self.skipped,
            "cache": self.cache,
        }
        return {"task": json.dumps(fields)}


def common_fields(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of :class:`OutputTask` out of its record."""
    fields: dict[str, Any] = json.loads(tree["task"])
    fields["dataset"] = open_spec(fields["dataset"])
    fields["skipped"] = tuple(map(tuple, fields["skipped"]))
    return fields


def load_task(tree: Mapping[str, Any]) -> OutputTask:
    """A task from its record."""
    from .mapwrite import MapTask
    from .rowsets import SetsTask

    return MapTask.from_tree(tree) if "row_map" in tree else SetsTask.from_tree(tree)


def open_spec(spec: dict[str, Any]) -> Any:
    """The dataset of a spec."""
    from scalelatent.data import Dataset

    return Dataset.from_spec(spec)
