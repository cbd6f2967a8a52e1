"""Copy sets of selected rows out of a dataset in one pass, such as the centroids of clusterings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.finite import find_nonfinite
from scalelatent.contract.learners import Backend, Block, RowSets
from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.storage.disk import Location

from .cache import shared_cache
from .mapwrite import OutputTask, open_spec, read_task_fields
from .quarantine import Ranges
from .reading import Meter, Reader, StopEvent, Stopped, as_rows, join_rows, name_dataset_in_errors

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset
    from scalelatent.kernels.arrays import DenseOrCsr, HostRows


# Upper bound on the bytes of a shard of sets (a task keeps its shard in memory while it reads the dataset);
# bytes that every shard should have at least; and the preferred number of shards.
SHARD_BYTES, SMALL_BYTES, SHARDS = 2**26, 2**22, 16


@dataclass(frozen=True)
class ChosenRows:
    """A sample of rows as a single set of dense float32 rows, given by ascending row indices."""

    numbers: np.ndarray
    n_features: int
    n_sets: int = 1

    @property
    def requirements(self) -> BlockRequirements:
        return BlockRequirements()

    @property
    def rows_per_set(self) -> int:
        return len(self.numbers)

    def output(self) -> tuple[tuple[int, ...], str]:
        return (self.n_features,), "float32"

    def rows(self, which: int) -> np.ndarray:
        return self.numbers

    def take(self, which: int, x: HostRows, rows: np.ndarray) -> np.ndarray:
        """Return the rows ``rows`` of ``x`` as dense float32 rows."""
        some = x.take(rows).to_dense() if isinstance(x, CsrRows) else x[rows]
        return np.asarray(some, dtype=np.float32)

    def check(self, x: HostRows, start: int) -> None:
        """Raise a ValueError that names the row if a value is not finite."""
        if place := find_nonfinite(Block(x, None, None, start)):
            raise ValueError(place)


@dataclass(frozen=True)
class StoredSets:
    """Sets of rows that a `SetsTask` has written to a dataset; they are read on demand."""

    spec: str  # specification of the dataset that contains all sets
    rows: int  # number of rows of a set
    # Positions in the concatenated sets of rows from bad shards; these rows are zeros.
    missing: tuple[int, ...] = ()

    @classmethod
    def make(cls, dataset: Dataset, rows: int) -> StoredSets:
        """Return the sets of ``rows`` rows each that a dataset contains."""
        return cls(json.dumps(dataset.spec()), rows)

    @property
    def dataset(self) -> Dataset:
        """Dataset that contains the rows of all sets, one set after the other."""
        return open_spec(json.loads(self.spec))

    def read(self, which: int, count: int = 1) -> HostRows:
        """Return the rows of ``count`` sets from the set ``which`` on, as ndarray or `CsrRows`."""
        return as_rows(self.dataset.read_x(which * self.rows, (which + count) * self.rows))

    def source_rows(self) -> None:
        """Return None: the dataset from which the rows were copied is not needed any more."""


@dataclass(frozen=True)
class DrawnSets:
    """Sets of rows that are not stored: each read takes the rows of a set from a dataset in memory."""

    sets: RowSets
    x: HostRows

    def source_rows(self) -> HostRows:
        """Return the rows of the dataset."""
        return self.x

    def read(self, which: int, count: int = 1) -> HostRows:
        """Return the rows of ``count`` sets, from the set ``which`` on, one set after the other."""
        return join_rows([self.sets.take(i, self.x, self.sets.rows(i)) for i in range(which, which + count)])


@dataclass(frozen=True)
class UncopiedSets:
    """Sets of rows that stay in a stored dataset, because the dataset is smaller than a copy of all sets."""

    sets: RowSets
    spec: str  # specification of the dataset

    @classmethod
    def make(cls, sets: RowSets, dataset: Dataset) -> UncopiedSets:
        """Return the sets that are drawn from the rows of a dataset."""
        return cls(sets, json.dumps(dataset.spec()))

    @property
    def dataset(self) -> Dataset:
        """Dataset from which the rows of the sets are drawn."""
        return open_spec(json.loads(self.spec))

    def source_rows(self) -> HostRows:
        """Return all rows of the dataset, read-only. A process keeps those of the last dataset in memory."""
        with _READING:  # so that threads that start together read the rows once
            return _read_all(self.spec)

    def read(self, which: int, count: int = 1) -> HostRows:
        """Return the rows of ``count`` sets, from the set ``which`` on, one set after the other."""
        return DrawnSets(self.sets, self.source_rows()).read(which, count)


_READING = Lock()


@lru_cache(maxsize=1)
def _read_all(spec: str) -> HostRows:
    dataset = open_spec(json.loads(spec))
    rows = as_rows(dataset.read_x(0, len(dataset)))
    if isinstance(rows, np.ndarray):
        rows.flags.writeable = False  # all threads share the rows
    return rows


@dataclass(frozen=True)
class SomeOfSet:
    """Some rows of a stored set of rows, for a candidate of a search that shares the set with others."""

    whole: StoredSets
    places: np.ndarray

    def read(self, which: int) -> np.ndarray:
        return np.asarray(self.whole.read(which))[self.places]

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(np.isin(self.places, self.whole.missing)).tolist())


def find_places(sets: RowSets, ranges: Ranges) -> tuple[int, ...]:
    """Return the positions, in the concatenated sets, of rows whose dataset indices are in ``ranges``."""
    if not ranges:
        return ()
    numbers = np.concatenate([sets.rows(which) for which in range(sets.n_sets)])
    inside = np.zeros(len(numbers), dtype=bool)
    for start, stop in ranges:
        inside |= (numbers >= start) & (numbers < stop)
    return tuple(np.flatnonzero(inside).tolist())


@dataclass(frozen=True, kw_only=True)
class SetsTask(OutputTask):
    """Task that writes sets of rows in one pass over a dataset; :func:`start_sets` makes it."""

    sets: RowSets

    def source_rows(self, shard: int) -> tuple[int, int]:
        return 0, len(self.dataset)

    def write_shard(self, shard: int, backend: Backend, stop_event: StopEvent, meter: Meter) -> int:
        start, stop = self.writer.shard_bounds(shard)
        numbers = range(start // self.sets.rows_per_set, stop // self.sets.rows_per_set)
        blocks: list[list[HostRows]] = [[] for _ in numbers]
        selected = [self.sets.rows(which) for which in numbers]
        with name_dataset_in_errors(self.dataset):
            for first, x, places in self._read_pieces(selected, stop_event, meter):
                for i, which in enumerate(numbers):
                    rows = selected[i][places[i]]
                    if len(rows):
                        blocks[i].append(self.sets.take(which, x, rows - first))
        self.writer.write_shard(shard, _concatenate([part for parts in blocks for part in parts]))
        return int(stop - start)

    def _read_pieces(
        self, selected: list[np.ndarray], stop_event: StopEvent, meter: Meter
    ) -> Iterator[tuple[int, HostRows, list[slice]]]:
        """Yield (first row, rows, for each set the slice of its indices) for each read with selected rows."""
        cache = shared_cache(self.cache)  # the tasks of other shards read the same rows
        reader = Reader(self.dataset, cache, meter, requirements=self.sets.requirements, skipped=self.skipped)
        for first, last in self.dataset.pieces():
            places = [slice(*(int(i) for i in np.searchsorted(rows, [first, last]))) for rows in selected]
            if all(place.start == place.stop for place in places):
                continue
            if stop_event.is_set():
                raise Stopped
            stop_event.moved()
            stop_event.note("reading", first, last)
            x = reader.read(first, last)[0]
            if not self.dataset.known_finite:
                self.sets.check(x, first)
            yield first, x, places

    def to_tree(self) -> dict[str, Any]:
        return {**super().to_tree(), "sets": self.sets}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> SetsTask:
        return cls(**read_task_fields(tree), sets=tree["sets"])


def _concatenate(parts: list[HostRows]) -> DenseOrCsr:
    rows = join_rows(parts)
    if not isinstance(rows, CsrRows):
        return rows
    from scipy.sparse import csr_array

    return csr_array((rows.data, rows.indices, rows.indptr), shape=rows.shape)


def start_sets(name: str, dataset: Dataset, sets: RowSets, url: str | Path, device: str = "cpu") -> SetsTask:
    """Create the output dataset, or open that of an interrupted run; return the task that writes the sets."""
    from scalelatent.data import create_dataset

    shape, dtype = sets.output()
    k, n_rows = sets.rows_per_set, sets.n_sets * sets.rows_per_set
    row_bytes = max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize)
    nnz = None
    if sets.requirements.csr:
        assert dataset.nnz is not None
        nnz = -(-dataset.nnz * n_rows // len(dataset))
        row_bytes = max(1, dataset.nbytes // len(dataset))
    create_dataset(
        str(url),
        n_rows,
        shape,
        dtype,
        nnz=nnz,
        chunk_rows=None if sets.requirements.csr else k,
        shard_rows=_choose_shard_sets(sets, row_bytes) * k,
        resume=True,
        provenance={"made_by": name, "rows_of": dataset.fingerprint()},
    )
    return SetsTask(name=name, dataset=dataset, url=str(url), device=device, sets=sets)


def write_sets(source: Any, sets: RowSets, place: Location) -> str:
    """Write sets to ``place``, or link their files if they are stored; return the dataset's fingerprint."""
    from scalelatent.data import create_dataset
    from scalelatent.data.write.create import link_dataset

    if isinstance(source, StoredSets):
        return link_dataset(source.dataset, place)
    shape, dtype = sets.output()
    first = source.read(0)
    is_csr = isinstance(first, CsrRows)
    writer = create_dataset(
        place.url,
        sets.n_sets * sets.rows_per_set,
        shape,
        dtype,
        nnz=sum(len(source.read(which).data) for which in range(sets.n_sets)) if is_csr else None,
        chunk_rows=None if is_csr else sets.rows_per_set,
        shard_rows=_choose_shard_sets(sets, max(1, first.nbytes // sets.rows_per_set)) * sets.rows_per_set,
        provenance={"made_by": "save"},
    )
    for shard in range(writer.n_shards):
        start, stop = writer.shard_bounds(shard)
        numbers = range(start // sets.rows_per_set, stop // sets.rows_per_set)
        writer.write_shard(shard, _concatenate([source.read(which) for which in numbers]))
    return str(writer.finalize().fingerprint())


def _choose_shard_sets(sets: RowSets, row_bytes: int) -> int:
    """Return the number of sets of rows that one shard of the output contains."""
    each = sets.rows_per_set * row_bytes
    return max(1, min(SHARD_BYTES // each, max(-(-sets.n_sets // SHARDS), SMALL_BYTES // each), sets.n_sets))
