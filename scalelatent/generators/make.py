"""Making a dataset from a generator: several shards at a time, resumable, any shard in any process."""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, Protocol

from scalelatent.data.dataset import Dataset
from scalelatent.data.write.batches import Progress as Progress
from scalelatent.data.write.writer import DatasetWriter, create_dataset
from scalelatent.errors import DataError
from scalelatent.storage.disk import locate

from . import GENERATORS

if TYPE_CHECKING:
    from scalelatent.kernels.arrays import DenseOrCsr


class Generator(Protocol):
    """Rows that are a pure function of parameters and row number."""

    columns: dict[str, Any]
    """Arguments of `create_dataset` that describe a row: feature_shape, dtype, y_dtype, ..."""

    def rows(self, start: int, stop: int) -> tuple[DenseOrCsr, DenseOrCsr | None]:
        """Rows `start:stop`, and their labels or None."""


class RowsFrom:
    """Rows of a set without end from an index on, as rows of a dataset from 0 on; a `Generator`."""

    def __init__(
        self,
        endless: Callable[[int, int], tuple[DenseOrCsr, DenseOrCsr | None]],
        first: int,
        columns: dict[str, Any],
    ) -> None:
        self._endless, self._first, self.columns = endless, first, columns

    def rows(self, start: int, stop: int) -> tuple[DenseOrCsr, DenseOrCsr | None]:
        return self._endless(self._first + start, self._first + stop)


def make_rows(
    url: str | os.PathLike[str],
    rows: int,
    parameters: dict[str, Any],
    *,
    n_jobs: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    **layout: Any,
) -> Dataset:
    """Write the first rows of a generator to a dataset."""

    threads = _threads(n_jobs)
    # Made before anything is written: wrong parameters leave nothing behind, and threads find it ready.
    generator = generator_of(parameters, locate(url).url)
    writer = create_dataset(
        url,
        rows,
        **generator.columns,
        provenance=parameters,
        resume=resume,
        overwrite=overwrite,
        **layout,
    )
    return _fill(writer, threads, progress)


def repair_dataset(
    url: str | os.PathLike[str], *, n_jobs: int | None = None, progress: Progress | None = None
) -> Dataset:
    """Make those shards of a generated dataset that are missing or damaged, and leave the others.

    All parameters come from the dataset's provenance, so that nothing has to be said again. A dataset that
    was broken off is finished.

    Parameters
    ----------
    url : str
        A dataset that a generator made or began.
    n_jobs : int, optional
        Threads, at least 1; all cores by default.
    progress : callable, optional
        Called with (rows done, rows in all).

    Returns
    -------
    Dataset
        The whole dataset.

    Raises
    ------
    DataError
        No dataset, one that was imported (its rows cannot be made again), or one whose base has changed.

    Examples
    --------
    >>> from scalelatent.data import make_images, open_dataset
    >>> from scalelatent.storage.disk import locate
    >>> ds = make_images("memory://doc-repair", "bars", 3, overwrite=True)
    >>> locate("memory://doc-repair").delete("x/c/0/0/0")  # a lost file
    >>> repair_dataset("memory://doc-repair").fingerprint() == ds.fingerprint()
    True
    """

    threads, writer = _threads(n_jobs), DatasetWriter.attach(url)
    generator_of(writer.attrs.provenance, writer.url)
    return _fill(writer, threads, progress)


def _threads(n_jobs: int | None) -> int:
    if n_jobs is not None and n_jobs < 1:
        raise DataError(f"n_jobs is {n_jobs}, but it has to be at least 1 thread; leave it out for all cores")

    from dask.system import cpu_count

    return cpu_count() if n_jobs is None else int(n_jobs)


def _fill(writer: DatasetWriter, threads: int, progress: Progress | None) -> Dataset:
    """Make all shards that are not there, several at a time, and finish the dataset."""
    done = 0
    with ThreadPoolExecutor(threads) as pool:
        shards = {pool.submit(_write_shard, writer, i): i for i in range(writer.n_shards)}
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


def make_shard(url: str | os.PathLike[str], shard: int) -> None:
    """Make one shard of a dataset that `make_rows` began; for tasks on other machines."""

    _write_shard(DatasetWriter.attach(url), shard)


def _write_shard(writer: DatasetWriter, shard: int) -> None:
    if not writer.is_done(shard):
        generator = generator_of(writer.attrs.provenance, writer.url)
        writer.write_shard(shard, *generator.rows(*writer.shard_bounds(shard)))


def generator_of(provenance: dict[str, Any], url: str) -> Generator:
    """The generator of a dataset with this provenance, made once per process."""
    if provenance.get("importer") not in GENERATORS:
        raise DataError(
            f"{url} was not made by a generator (its provenance says {provenance.get('importer')!r}); there "
            f"are {', '.join(GENERATORS)}"
        )
    known = {k: v for k, v in provenance.items() if k not in ("scalelatent", "appended")}
    return _generator(json.dumps(known), url)


@functools.lru_cache(maxsize=4)
def _generator(provenance: str, url: str) -> Generator:
    parameters = json.loads(provenance)
    module, function = GENERATORS[parameters["importer"]].split(":")
    made: Generator = getattr(importlib.import_module(module), function)(parameters, url)
    return made
