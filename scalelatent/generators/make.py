"""Write a dataset from a generator: several shards at a time, resumable, each shard in any process."""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from scalelatent.data.dataset import Dataset
from scalelatent.data.write.batches import Progress
from scalelatent.data.write.writer import DatasetWriter, create_dataset
from scalelatent.errors import DataError
from scalelatent.storage.disk import locate

from . import GENERATORS

if TYPE_CHECKING:
    from scalelatent.kernels.arrays import DenseOrCsr

RowsFunction = Callable[[int, int], "tuple[DenseOrCsr, DenseOrCsr | None]"]
"""Function of (start, stop) that returns these rows and their labels or None."""


class MakeOptions(TypedDict, total=False):
    """Keyword arguments of all functions that generate datasets; `make_digits` documents them."""

    n_jobs: int | None
    resume: bool
    overwrite: bool
    progress: Progress | None
    shard_rows: int | None


class Generator(Protocol):
    """Object that returns rows which depend only on its parameters and on the row numbers."""

    columns: dict[str, Any]
    """Arguments of `create_dataset` that describe a row: feature_shape, dtype, y_dtype, ..."""

    def rows(self, start: int, stop: int) -> tuple[DenseOrCsr, DenseOrCsr | None]:
        """Return the rows `start:stop`, and their labels or None."""


class ShiftedGenerator:
    """`Generator` whose row 0 is row `first` of an endless set."""

    def __init__(self, endless_rows: RowsFunction, first: int, columns: dict[str, Any]) -> None:
        self._endless_rows, self._first, self.columns = endless_rows, first, columns

    def rows(self, start: int, stop: int) -> tuple[DenseOrCsr, DenseOrCsr | None]:
        return self._endless_rows(self._first + start, self._first + stop)


def make_rows(
    url: str | os.PathLike[str],
    rows: int,
    parameters: dict[str, Any],
    *,
    nnz: int | None = None,
    n_jobs: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    shard_rows: int | None = None,
) -> Dataset:
    """Write the first rows of the generator with these parameters, which become the provenance.

    `nnz` is the expected number of entries of CSR rows; the other arguments are those of `make_digits`.
    """
    n_threads = _count_threads(n_jobs)
    # The generator is made before anything is written, so that wrong parameters leave nothing behind.
    generator = generator_of(parameters, locate(url).url)
    writer = create_dataset(
        url,
        rows,
        **generator.columns,
        provenance=parameters,
        nnz=nnz,
        resume=resume,
        overwrite=overwrite,
        shard_rows=shard_rows,
    )
    return _write_missing(writer, n_threads, progress)


def repair_dataset(
    url: str | os.PathLike[str], *, n_jobs: int | None = None, progress: Progress | None = None
) -> Dataset:
    """Make missing and damaged shards of a generated dataset again, and keep its intact shards.

    All parameters come from the provenance of the dataset. An interrupted dataset is completed.

    Parameters
    ----------
    url : str
        A complete or incomplete dataset of a generator.
    n_jobs : int, optional
        Threads, at least 1; all cores by default.
    progress : callable, optional
        Called with (rows done, total rows).

    Returns
    -------
    Dataset
        The whole dataset.

    Raises
    ------
    DataError
        A missing or an imported dataset (its rows cannot be made again), or one whose base has changed.

    Examples
    --------
    >>> from scalelatent.data import make_images, open_dataset
    >>> from scalelatent.storage.disk import locate
    >>> ds = make_images("memory://doc-repair", "bars", 3, overwrite=True)
    >>> locate("memory://doc-repair").delete("x/c/0/0/0")  # a lost file
    >>> repair_dataset("memory://doc-repair").fingerprint() == ds.fingerprint()
    True
    """
    n_threads, writer = _count_threads(n_jobs), DatasetWriter.attach(url)
    generator_of(writer.attrs.provenance, writer.url)
    return _write_missing(writer, n_threads, progress)


def _count_threads(n_jobs: int | None) -> int:
    if n_jobs is not None and n_jobs < 1:
        raise DataError(f"n_jobs is {n_jobs}, but it must be at least 1 thread; leave it out for all cores")

    from dask.system import cpu_count

    return cpu_count() if n_jobs is None else int(n_jobs)


def _write_missing(writer: DatasetWriter, n_threads: int, progress: Progress | None) -> Dataset:
    """Write all missing shards, several at a time, and complete the dataset."""
    done = 0
    with ThreadPoolExecutor(n_threads) as pool:
        shards = {pool.submit(_write_shard, writer, shard): shard for shard in range(writer.n_shards)}
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
    """Write one shard of a dataset that `make_rows` started, in any process."""
    _write_shard(DatasetWriter.attach(url), shard)


def _write_shard(writer: DatasetWriter, shard: int) -> None:
    if not writer.is_done(shard):
        generator = generator_of(writer.attrs.provenance, writer.url)
        writer.write_shard(shard, *generator.rows(*writer.shard_bounds(shard)))


def generator_of(provenance: dict[str, Any], url: str) -> Generator:
    """Return the generator of a dataset with this provenance; a process makes each generator once."""
    if provenance.get("importer") not in GENERATORS:
        raise DataError(
            f"{url} was not made by a generator (its provenance has the importer "
            f"{provenance.get('importer')!r}); the generators are {', '.join(GENERATORS)}"
        )
    parameters = {k: v for k, v in provenance.items() if k not in ("scalelatent", "appended")}
    return _make_generator(json.dumps(parameters), url)


@functools.lru_cache(maxsize=4)
def _make_generator(provenance: str, url: str) -> Generator:
    parameters = json.loads(provenance)
    module, function = GENERATORS[parameters["importer"]].split(":")
    generator: Generator = getattr(importlib.import_module(module), function)(parameters, url)
    return generator
