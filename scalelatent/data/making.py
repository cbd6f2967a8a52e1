"""What all makers of rows without end share: shards by threads, resumed; bases named in the provenance.

A maker is a function of (parameters, row). Its parameters, with the place and the fingerprint of its base,
are the provenance of the dataset, so any process can make any shard of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

from scalelatent.errors import DataError

if TYPE_CHECKING:
    from .dataset import Dataset
    from .writer import DatasetWriter

__all__ = [
    "absolute",
    "check_base_rows",
    "check_unchanged",
    "fill_shards",
    "parameters_key",
    "relative",
    "write_missing",
]

Rows = Callable[[int, int], tuple[Any, Any]]
"""(rows, labels) of the indices start:stop."""


def write_missing(writer: DatasetWriter, shard: int, rows: Rows) -> None:
    """Make and write one shard, unless it is written already."""
    if writer.is_done(shard):
        return
    first = writer.attrs.provenance["start"]
    a, b = writer.shard_bounds(shard)
    writer.write_shard(shard, *rows(first + a, first + b))


def fill_shards(
    writer: DatasetWriter, rows: Rows, n_jobs: int | None, progress: Callable[[int, int], None] | None
) -> Dataset:
    """Make all shards that are not written yet, each by one thread, and finish the dataset."""
    done = 0
    with ThreadPoolExecutor(n_jobs or os.cpu_count() or 1) as pool:
        shards = {pool.submit(write_missing, writer, i, rows): i for i in range(writer.n_shards)}
        try:
            for future in as_completed(shards):
                future.result()
                a, b = writer.shard_bounds(shards[future])
                done += b - a
                if progress is not None:
                    progress(done, writer.n_rows)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return writer.finalize()


def check_base_rows(base_rows: tuple[int, int] | None, n: int) -> tuple[int, int]:
    """The rows A:B of a base of n rows that are used.

    Raises
    ------
    DataError
        They do not lie in the base.
    """
    a, b = (0, n) if base_rows is None else (int(base_rows[0]), int(base_rows[1]))
    if not 0 <= a < b <= n:
        raise DataError(
            f"base rows {a}:{b} do not lie in 0:{n}, the rows of the base set; give --base-rows A:B within"
        )
    return a, b


def parameters_key(provenance: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The parameters of a dataset, hashable; the version of the software is none."""
    items = ((k, tuple(v) if isinstance(v, list) else v) for k, v in provenance.items() if k != "scalelatent")
    return tuple(sorted(items))


def check_unchanged(url: str, parameters: dict[str, Any], fingerprint: str) -> None:
    """Refuse to go on with a base that is no longer what it was.

    Raises
    ------
    DataError
        Naming both fingerprints.
    """
    if fingerprint != parameters["base_fingerprint"]:
        raise DataError(
            f"{url}: its base {parameters['base']} has changed since the first shard was made (fingerprint "
            f"{fingerprint[:12]}, was {parameters['base_fingerprint'][:12]}); restore the base, or begin "
            "anew with --overwrite"
        )


def relative(path: str | os.PathLike[str], url: str) -> str:
    """A path as provenance keeps it: relative to the dataset, so that both may move together."""
    return os.path.abspath(path) if "://" in url else os.path.relpath(path, url)


def absolute(path: str, url: str) -> str:
    """The path that `relative` kept."""
    return path if "://" in url else os.path.normpath(os.path.join(url, path))
