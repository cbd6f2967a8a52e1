"""Read a whole dataset and find the files that have changed since they were written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.errors import DataError, ShardError
from scalelatent.storage.disk import Location, locate

from .checksums import check_digests, read_digests, shard_digest
from .read.stored import make_unfinished_error, open_group, own_columns, read_attrs
from .schema import DatasetAttrs
from .write.batches import MAX_THREADS, map_in_order

if TYPE_CHECKING:
    from scalelatent.kernels.arrays import DenseOrCsr

    from .read.sources import StoredColumn


@dataclass(frozen=True)
class BadFile:
    """File or table of a dataset that is missing, damaged, or changed since it was written."""

    file: str
    """Path or address of the file."""
    start: int
    stop: int
    """Rows `start:stop` of the dataset that the file stores; a table of checksums belongs to all rows."""
    problem: str
    """Description of the problem."""


@dataclass(frozen=True)
class DatasetCheck:
    """Result of `check_dataset`."""

    url: str
    rows: int
    shards: int
    bytes: int
    """Number of bytes that the rows, labels and weights need in memory."""
    seconds: float
    bad: tuple[BadFile, ...]
    """Bad files in the order of their rows; empty if the dataset is intact."""
    checksums: bool
    """True if the dataset has a table of checksums, with which a fit detects a shard of another dataset."""


class _CheckedPart:
    """Dataset, or one segment (the rows of one append) of a dataset, whose files are checked."""

    def __init__(self, location: Location, first: int) -> None:
        self.location, self.first = location, first
        attrs, group = read_attrs(location), open_group(location)
        self.bad: list[BadFile] = []
        plain = replace(attrs, crc=None)
        self.columns: dict[str, StoredColumn] = own_columns(location, plain, group)
        x = self.columns["x"]
        self.n_rows, self.n_tiles = int(x.shape[0]), x.n_tiles
        self.shard_rows = x.shard_rows
        if attrs.crc is not None:
            self.shard_rows = int(attrs.crc.get("shard_rows", self.shard_rows))
            try:
                self.columns = own_columns(location, attrs, group)
            except DataError as error:
                self._report_bad_table("crc", error)
        self.digests: np.ndarray | None = None
        try:
            check_digests(location, attrs, self.columns, group)
            digests = read_digests(group, location.url)
            self.digests = digests if len(digests) == self.n_shards else None
        except DataError as error:
            self._report_bad_table("digest", error)

    @property
    def n_shards(self) -> int:
        return -(-self.n_rows // self.shard_rows) * self.n_tiles

    def _report_bad_table(self, name: str, error: DataError) -> None:
        rows = self.first, self.first + self.n_rows
        self.bad.append(BadFile(self.location.name_of(name), *rows, str(error)))

    def check(self, shard: int) -> tuple[int, list[BadFile]]:
        """Check the files of shard number `shard`; return (bytes of its rows in memory, bad files)."""
        row, tile = divmod(shard, self.n_tiles)
        a, b = row * self.shard_rows, min((row + 1) * self.shard_rows, self.n_rows)
        parts: list[DenseOrCsr] = []
        bad = []
        for column in self.columns.values():
            try:
                parts.append(column.read_tile(a, b, tile))
            except ShardError as error:
                bad.append(self._make_bad_file(error.file, error.start, error.stop, str(error)))
            except DataError as error:
                bad.append(self._make_bad_file(column.shards(a, b)[0][0], a, b, str(error)))
        size = sum(part.data.nbytes for part in parts)
        if not bad and self.digests is not None and shard_digest(*parts) != self.digests[shard].tobytes():
            files = ", ".join(file for column in self.columns.values() for file, _, _ in column.shards(a, b))
            problem = (
                f"the rows {self.first + a}:{self.first + b} differ from the rows that were written ({files})"
            )
            bad.append(self._make_bad_file(self.columns["x"].shards(a, b)[0][0], a, b, problem))
        return size, bad

    def _make_bad_file(self, file: str, a: int, b: int, problem: str) -> BadFile:
        return BadFile(file, self.first + a, self.first + b, problem)


def check_dataset(
    url: str | os.PathLike[str],
    *,
    n_jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DatasetCheck:
    """Read every shard of a dataset and compare it with the stored checksums and digests.

    Each chunk is compared with the checksum in its file and with the dataset's table of checksums. The
    SHA-256 of each shard's rows, labels and weights is compared with the stored digest, and all digests with
    the dataset's fingerprint.

    Parameters
    ----------
    url : str
        Path or address of a finished dataset; see `locate`.
    n_jobs : int, optional
        Number of threads, each with one shard in memory; by default one per core, at most 4.
    progress : callable, optional
        Function that is called with (rows done, total rows).

    Returns
    -------
    DatasetCheck
        Number of rows, shards and bytes, duration in seconds, and all bad files.

    Raises
    ------
    DataError
        If there is no dataset, the dataset is unfinished, or its metadata cannot be read.

    Examples
    --------
    >>> from scalelatent.data import Dataset
    >>> rows = Dataset.from_arrays(np.zeros((4, 3), "u1"), [0, 1, 0, 1])
    >>> found = check_dataset(rows.save("memory://doc-check", overwrite=True).url)
    >>> found.rows, found.shards, found.bad
    (4, 1, ())
    """
    from dask.system import cpu_count

    begin = time.perf_counter()
    location = locate(url)
    parts, attrs = _open_parts(location)
    total = sum(part.n_rows for part in parts)
    bad = [table for part in parts for table in part.bad]
    size = done = 0
    threads = n_jobs or min(cpu_count(), MAX_THREADS)
    shards = ((part, shard) for part in parts for shard in range(part.n_shards))

    def check(_: int, at: tuple[_CheckedPart, int]) -> tuple[_CheckedPart, int, tuple[int, list[BadFile]]]:
        return *at, at[0].check(at[1])

    with closing(map_in_order(shards, check, threads, "scalelatent-check", ahead=threads)) as checked:
        for part, shard, (nbytes, found) in checked:
            size += nbytes
            bad += found
            if shard % part.n_tiles == part.n_tiles - 1:
                done += min(part.shard_rows, part.n_rows - shard // part.n_tiles * part.shard_rows)
                if progress is not None:
                    progress(done, total)
    return DatasetCheck(
        location.url,
        total,
        sum(part.n_shards for part in parts),
        size,
        time.perf_counter() - begin,
        tuple(bad),
        attrs.crc is not None,
    )


def _open_parts(location: Location) -> tuple[list[_CheckedPart], DatasetAttrs]:
    attrs = read_attrs(location)
    if not attrs.complete:
        raise make_unfinished_error(location, attrs)
    parts = [_CheckedPart(location, 0)]
    for segment in (attrs.segments or [])[1:]:
        folder = location.at(segment["path"])
        parts.append(_CheckedPart(folder, parts[-1].first + parts[-1].n_rows))
        if (found := read_attrs(folder).fingerprint) != segment["fingerprint"]:
            then, now = str(segment["fingerprint"])[:12], str(found)[:12]
            words = f"its fingerprint is {now}, but the rows that were appended had {then}"
            parts[-1]._report_bad_table("zarr.json", DataError(words))
    return parts, attrs
