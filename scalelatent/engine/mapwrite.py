"""Outputs as large as the data: rows -> rows, shard by shard, each shard with one writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .backend import make_backend
from .halving import apply_block
from .passes import BLOCK_BYTES, BLOCK_ROWS
from .reading import Meter, Reader, StopFlag, iter_blocks, naming
from .threads import resolve_jobs, single_threaded


@dataclass(frozen=True)
class MapTask:
    """One map over a dataset into another.

    Attributes
    ----------
    name : str
        Read by people on the dashboard: ``"capsule_project"``.
    dataset : Dataset
        Rows in.
    row_map : RowMap
    url : str
        The dataset being written, made by :func:`start_map`.
    device : str
    with_labels : bool
        Copy labels and weights too.
    classes : ndarray or None
        Of a map that gives labels itself (``gives_labels``): what its codes mean.
    """

    name: str
    dataset: Any
    row_map: Any
    url: str
    device: str
    with_labels: bool = True
    classes: np.ndarray | None = None

    @cached_property
    def writer(self) -> Any:
        """The writer of the output, attached in this process."""
        from scalelatent.data import DatasetWriter

        return DatasetWriter.attach(self.url)

    @property
    def rows(self) -> int:
        """Rows of the output."""
        return len(self.dataset)

    def missing(self) -> list[int]:
        """Shards that are not written yet."""
        return [i for i in range(self.writer.n_shards) if not self.writer.is_done(i)]

    def rows_done(self, missing: list[int]) -> int:
        """Rows of the shards that are written, given those that are not."""
        return self.rows - sum(b - a for a, b in map(self.writer.shard_bounds, missing))

    def write_shard(self, shard: int, backend: Any, stop_event: StopFlag) -> int:
        """Compute and write one shard; returns its rows. Running it twice writes the same file."""
        start, stop = self.writer.shard_bounds(shard)
        # No cache: these rows are read once, and keeping them would push out what is read again.
        reader = Reader(self.dataset, None, Meter(), csr=getattr(self.row_map, "accepts_csr", False))
        shape, dtype = self.row_map.output()
        out = np.empty((stop - start, *shape), dtype=dtype)
        prepared = self.row_map.prepare(backend)
        step = block_rows(self.dataset.n_features)
        blocks = [(a, min(a + step, stop)) for a in range(start, stop, step)]
        with naming(self.dataset):
            for block in iter_blocks(reader, blocks, stop_event):
                at = block.start - start
                rows = slice(at, at + len(block.x))
                out[rows] = apply_block(backend, self.name, self.row_map, prepared, block)
        if getattr(self.row_map, "gives_labels", False):
            assert self.classes is not None
            y = self.classes[self.row_map.labels(out)]
        else:
            y = self.dataset.read_y(start, stop) if self.with_labels and self.dataset.has_y else None
        weight = (
            self.dataset.read_weight(start, stop) if self.with_labels and self.dataset.has_weight else None
        )
        self.writer.write_shard(shard, out, y, weight)
        return stop - start

    def to_json(self) -> str:
        """Everything but the map itself, for a worker."""
        return json.dumps(
            {
                "name": self.name,
                "dataset": self.dataset.spec(),
                "url": self.url,
                "device": self.device,
                "with_labels": self.with_labels,
            }
        )


def block_rows(n_features: int) -> int:
    """Rows of a block of a map: as in a pass, and wide rows made dense below 32 MiB."""
    wanted = max(256, min(BLOCK_ROWS, BLOCK_BYTES // (4 * n_features)))
    return max(1, min(wanted, 2**25 // (4 * n_features)))


def start_map(
    name: str,
    dataset: Any,
    row_map: Any,
    url: str | Path,
    device: str,
    *,
    with_labels: bool = True,
    classes: np.ndarray | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> MapTask:
    """Make (or, with ``resume``, find) the output dataset.

    Raises
    ------
    DataError
        The output exists, or cannot be written.
    """
    from scalelatent.data import create_dataset

    shape, dtype = row_map.output()
    if getattr(row_map, "gives_labels", False):
        coded = classes is None or classes.dtype.kind == "U"
        y_options: dict[str, Any] = {
            "classes": classes,
            "y_dtype": None if coded else np.asarray(classes).dtype,
        }
    else:
        y_options = dataset.y_options() if with_labels else {}
    create_dataset(
        str(url),
        len(dataset),
        shape,
        dtype,
        **y_options,
        weighted=with_labels and dataset.has_weight,
        resume=resume,
        overwrite=overwrite,
        provenance={"made_by": name, "rows_of": dataset.fingerprint()},
    )
    return MapTask(name, dataset, row_map, str(url), device, with_labels, classes)


def map_rows(executor: Any, task: MapTask, on_rows: Callable[[int, int], None]) -> Any:
    """Write what is missing and finish the dataset.

    Returns
    -------
    Dataset
    """
    executor.run_map(task, on_rows)
    return task.writer.finalize()


def map_to_array(
    row_map: Any, dataset: Any, device: str, n_jobs: int | None, progress: Any = None
) -> np.ndarray:
    """A map over rows into one array in memory, by threads over runs of rows.

    Returns
    -------
    ndarray, shape (rows, *output)
    """
    from .inprocess import run_threads

    shape, dtype = row_map.output()
    out = np.empty((len(dataset), *shape), dtype=dtype)
    step = block_rows(dataset.n_features)
    run = 16 * step
    csr = getattr(row_map, "accepts_csr", False)
    done = 0

    def compute(slot: int, stop: StopFlag) -> Any:
        backend = make_backend(device)
        prepared = row_map.prepare(backend)

        def work(first: int) -> int:
            last = min(first + run, len(dataset))
            blocks = [(a, min(a + step, last)) for a in range(first, last, step)]
            with naming(dataset):
                for block in iter_blocks(Reader(dataset, None, Meter(), csr=csr), blocks, stop):
                    rows = slice(block.start, block.start + len(block.x))
                    out[rows] = apply_block(backend, "map", row_map, prepared, block)
            return last - first

        return work

    def finish(first: int, rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(done, len(dataset))

    with single_threaded():
        run_threads(range(0, len(dataset), run), resolve_jobs(n_jobs), compute, finish)
    return out
