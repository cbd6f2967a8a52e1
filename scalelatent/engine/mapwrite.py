"""Write the output of row maps as datasets; one task computes and writes each shard."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from scalelatent.contract.learners import Backend, Block, ColumnMap, ColumnStage, LabelMap, Prepared, RowMap

from .backend import CupyBackend, computes_on_gpu, make_backend
from .cache import shared_cache
from .halving import apply_block, fill_block
from .passes import BLOCK_BYTES, BLOCK_ROWS, choose_gpu_block_rows
from .quarantine import Ranges
from .reading import (
    Meter,
    Reader,
    StopEvent,
    Stopped,
    iter_blocks,
    iter_gpu_blocks,
    name_dataset_in_errors,
)
from .threads import resolve_jobs, single_threaded

if TYPE_CHECKING:
    from typing import Unpack

    from scalelatent.data.dataset import Dataset
    from scalelatent.data.schema import DatasetSpec, LayoutOptions, OutputOptions
    from scalelatent.data.write.writer import DatasetWriter
    from scalelatent.kernels.arrays import DenseOrCsr

    from .executor import Executor, OnRows

# Upper bounds of a block of a map that is computed column by column: bytes of its input and output, and rows.
COLUMN_BLOCK_BYTES, COLUMN_BLOCK_ROWS = 2**26, 2**17
# Least rows of an output shard of a map that is computed column by column, and the largest number of shards
# for which this minimum holds.
MIN_COLUMN_SHARD_ROWS, MAX_COLUMN_SHARDS = 4096, 64


@dataclass(frozen=True, kw_only=True)
class OutputTask:
    """Base class of the tasks that write a dataset: :class:`MapTask`, and sets of selected rows."""

    name: str
    dataset: Dataset
    url: str
    device: str = "cpu"
    skipped: Ranges = ()
    cache: float | None = None

    @cached_property
    def writer(self) -> DatasetWriter:
        """Writer of the output dataset in this process."""
        from scalelatent.data import DatasetWriter

        return DatasetWriter.attach(self.url)

    @property
    def rows(self) -> int:
        """Number of rows of all output shards; if shards also split columns, a row counts several times."""
        return int(self.writer.n_rows * self.writer.n_tiles)

    def rows_done(self, missing: list[int]) -> int:
        """Return the number of rows of all shards that are not in ``missing``."""
        return self.rows - sum(b - a for a, b in map(self.writer.shard_bounds, missing))

    def source_rows(self, shard: int) -> tuple[int, int]:
        """Return the range of input rows from which a shard is computed."""
        raise NotImplementedError

    def write_shard(self, shard: int, backend: Backend, stop_event: StopEvent, meter: Meter) -> int:
        """Compute and write one shard, and return its rows; a repeated call writes the same file."""
        raise NotImplementedError

    def to_tree(self) -> dict[str, Any]:
        """Return the task as a dict that a record in the run folder can store, for the workers."""
        fields = {
            "name": self.name,
            "dataset": self.dataset.spec(),
            "url": self.url,
            "device": self.device,
            "skipped": self.skipped,
            "cache": self.cache,
        }
        return {"task": json.dumps(fields)}


def read_task_fields(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an `OutputTask` from the tree that its `to_tree` returned."""
    fields: dict[str, Any] = json.loads(tree["task"])
    fields["dataset"] = open_spec(fields["dataset"])
    fields["skipped"] = tuple(map(tuple, fields["skipped"]))
    return fields


def open_spec(spec: DatasetSpec) -> Dataset:
    from scalelatent.data import Dataset

    return Dataset.from_spec(spec)


@dataclass(frozen=True, kw_only=True)
class MapTask(OutputTask):
    """Task that applies a map to a dataset and writes the output dataset; :func:`start_map` makes it."""

    row_map: RowMap
    with_labels: bool = True
    classes: np.ndarray | None = None

    def write_shard(self, shard: int, backend: Backend, stop_event: StopEvent, meter: Meter) -> int:
        start, stop = self.writer.shard_bounds(shard)
        is_tiled = self.writer.n_tiles > 1
        # Rows are cached only if several tasks read them, each for another group of output columns (tile).
        cache = shared_cache(self.cache) if is_tiled else None
        reader = Reader(
            self.dataset, cache, meter, skipped=self.skipped, requirements=self.row_map.requirements
        )
        row_map = self.row_map
        if is_tiled:
            row_map = cast(ColumnStage, row_map).select_columns(*self.writer.shard_columns(shard))
        shape, dtype = row_map.output()
        out = np.empty((stop - start, *shape), dtype=dtype)
        prepared = row_map.prepare(backend)
        step = (
            stop - start
            if isinstance(row_map, ColumnMap)
            else choose_map_block_rows(row_map, self.dataset, bool(backend.gpu_errors))
        )
        blocks = [(a, min(a + step, stop)) for a in range(start, stop, step)]
        with name_dataset_in_errors(self.dataset):
            for block in read_map_blocks(reader, row_map, blocks, stop_event, backend):
                at = block.start - start
                rows = slice(at, at + len(block.x))
                fill_rows(backend, self.name, row_map, prepared, block, out[rows], stop_event)
            y, weight = self._make_labels_and_weights(start, stop, out)
        self.writer.write_shard(shard, out, y, weight)
        return stop - start

    def source_rows(self, shard: int) -> tuple[int, int]:
        """Return the rows of the shard, since each output row depends on the input row of the same index."""
        start, stop = self.writer.shard_bounds(shard)
        return int(start), int(stop)

    def _make_labels_and_weights(
        self, start: int, stop: int, out: np.ndarray
    ) -> tuple[DenseOrCsr | None, np.ndarray | None]:
        """Return the labels and the weights (or None) of the output rows ``start:stop``."""
        weight = (
            self.dataset.read_weight(start, stop) if self.with_labels and self.dataset.has_weight else None
        )
        if self.row_map.requirements.labels:
            assert self.classes is not None
            return self.classes[cast(LabelMap, self.row_map).labels(out)], weight
        return self.dataset.read_y(start, stop) if self.with_labels and self.dataset.has_y else None, weight

    def to_tree(self) -> dict[str, Any]:
        own = {"row_map": self.row_map, "classes": self.classes, "with_labels": self.with_labels}
        return {**super().to_tree(), **own}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> MapTask:
        own = {name: tree[name] for name in ("row_map", "classes", "with_labels")}
        return cls(**read_task_fields(tree), **own)


def fill_rows(
    backend: Backend,
    name: str,
    row_map: RowMap[Prepared],
    prepared: Prepared,
    block: Block,
    out: np.ndarray,
    stop_event: StopEvent,
) -> None:
    """Write the output rows of a row map for one block to ``out``."""
    on_gpu = backend.gpu_errors
    if not isinstance(row_map, ColumnMap):
        apply = partial(apply_block, backend, name, row_map) if on_gpu else row_map.apply
        out[...] = apply(prepared, block)
        return
    fill = partial(fill_block, backend, name, row_map) if on_gpu else row_map.fill
    for _ in fill(prepared, block, out):
        if stop_event.is_set():
            raise Stopped
        stop_event.moved()


def read_map_blocks(
    reader: Reader,
    row_map: RowMap,
    blocks: list[tuple[int, int]],
    stop_event: StopEvent,
    backend: Backend,
) -> Generator[Block, None, None]:
    """Yield the blocks of a map; the rows of the next block are copied to a GPU while the GPU computes."""
    copies = row_map.requirements.reads_on_gpu and len(blocks) > 1
    if copies and isinstance(backend, CupyBackend):
        return iter_gpu_blocks(reader, blocks, stop_event, backend, keeps_rows=False)
    return iter_blocks(reader, blocks, stop_event)


def choose_map_block_rows(row_map: RowMap, dataset: Dataset, on_gpu: bool) -> int:
    """Return the number of rows of a block of a map: the number that the map requires, or a default."""
    return row_map.requirements.block_rows or block_rows(dataset.n_features, on_gpu)


def block_rows(n_features: int, on_gpu: bool = False) -> int:
    """Return the default number of rows of a block of a map: at most 32 MiB of float32 (GPU: 256 MiB)."""
    cpu_rows = max(256, min(BLOCK_ROWS, BLOCK_BYTES // (4 * n_features)))
    rows, max_bytes = (choose_gpu_block_rows(n_features), 2**28) if on_gpu else (cpu_rows, 2**25)
    return max(1, min(rows, max_bytes // (4 * n_features)))


def choose_column_block_rows(row_bytes: int, row_map: ColumnMap) -> int:
    """Return the rows of a block of a ``ColumnMap``; ``row_bytes`` is the bytes of one input row."""
    return max(1, min(COLUMN_BLOCK_ROWS, COLUMN_BLOCK_BYTES // (row_bytes + row_map.row_bytes())))


def choose_map_layout(dataset: Dataset, row_map: RowMap) -> LayoutOptions:
    """Return the layout options for the output of a map; only a ``ColumnMap`` needs any."""
    if not isinstance(row_map, ColumnMap):
        return {}
    n = len(dataset)
    shards = max(
        -(-n // choose_column_block_rows(dataset.nbytes // n, row_map)),
        min(n // MIN_COLUMN_SHARD_ROWS, MAX_COLUMN_SHARDS),
        1,
    )
    return {"shard_rows": -(-n // shards), "chunk_rows": -(-n // shards)}


def start_map(
    name: str,
    dataset: Dataset,
    row_map: RowMap,
    url: str | Path,
    device: str,
    *,
    with_labels: bool = True,
    classes: np.ndarray | None = None,
    resume: bool = False,
    overwrite: bool = False,
    **layout: Unpack[LayoutOptions],
) -> MapTask:
    """Create the output dataset (or find it, with ``resume``) and return the task that writes it.

    ``layout`` is passed to ``create_dataset``.
    """
    from scalelatent.data import create_dataset

    shape, dtype = row_map.output()
    if row_map.requirements.labels:
        coded = classes is None or classes.dtype.kind == "U"
        y_options: OutputOptions = {
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
        **layout,
        provenance={"made_by": name, "rows_of": dataset.fingerprint()},
    )
    return MapTask(
        name=name,
        dataset=dataset,
        url=str(url),
        device=device,
        row_map=row_map,
        with_labels=with_labels,
        classes=classes,
    )


def map_rows(executor: Executor, task: OutputTask, on_rows: OnRows) -> Dataset:
    """Write the missing shards of a map's output, and return the finished dataset."""
    tiles = task.writer.n_tiles
    executor.run_map(task, lambda done, total: on_rows(done // tiles, total // tiles))
    return task.writer.finalize()


def map_to_array(
    row_map: RowMap,
    dataset: Dataset,
    device: str,
    n_jobs: int | None,
    progress: OnRows | None = None,
    first_row: int = 0,
) -> np.ndarray:
    """Return the output of a map as one array, computed by threads over ranges of rows.

    ``first_row`` is the number of the first row, if the rows continue the rows of earlier calls.
    """
    from .inprocess import run_threads

    shape, dtype = row_map.output()
    out = np.empty((len(dataset), *shape), dtype=dtype)
    if isinstance(row_map, ColumnMap):
        _map_by_columns(row_map, dataset, out, device, n_jobs, progress)
        return out
    step, jobs = choose_map_block_rows(row_map, dataset, computes_on_gpu(device)), resolve_jobs(n_jobs)
    range_rows = step * max(1, min(16, len(dataset) // (4 * jobs * step)))
    done = 0

    def compute(slot: int, stop: StopEvent) -> Callable[[int], int]:
        backend = make_backend(device, slot)
        prepared = row_map.prepare(backend)

        def work(first: int) -> int:
            last = min(first + range_rows, len(dataset))
            blocks = [(a, min(a + step, last)) for a in range(first, last, step)]
            with name_dataset_in_errors(dataset):
                reader = Reader(dataset, None, Meter(), requirements=row_map.requirements)
                for block in read_map_blocks(reader, row_map, blocks, stop, backend):
                    rows = slice(block.start, block.start + len(block.x))
                    if first_row:
                        numbers = np.arange(first_row + rows.start, first_row + rows.stop)
                        block = replace(block, rows=numbers)
                    fill_rows(backend, "map", row_map, prepared, block, out[rows], stop)
            return last - first

        return work

    def finish(first: int, rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(done, len(dataset))

    with single_threaded():
        run_threads(range(0, len(dataset), range_rows), jobs, compute, finish)
    return out


def _map_by_columns(
    row_map: ColumnMap,
    dataset: Dataset,
    out: np.ndarray,
    device: str,
    n_jobs: int | None,
    progress: OnRows | None,
) -> None:
    """Write the output of a ``ColumnMap`` to ``out``, computed by threads over its columns."""
    from .inprocess import run_threads

    rows, threads = choose_column_block_rows(dataset.nbytes // len(dataset), row_map), resolve_jobs(n_jobs)
    stop = StopEvent()
    reader = Reader(dataset, None, Meter(), requirements=row_map.requirements)
    blocks = [(a, min(a + rows, len(dataset))) for a in range(0, len(dataset), rows)]
    with single_threaded(), name_dataset_in_errors(dataset):
        for block in iter_blocks(reader, blocks, stop):
            start = block.start
            for part in row_map.stages():
                (width,), dtype = part.output()
                found = np.empty((len(block.x), width), dtype=dtype)
                groups = -(-width // part.column_group)
                edges = np.linspace(0, groups, min(groups, 4 * threads) + 1).astype(int) * part.column_group
                edges[-1] = width
                cuts = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
                compute = partial(_make_column_worker, part, block, found, device)
                run_threads(cuts, threads, compute, lambda cut, _: None)
                block = Block(found, None, None, start)
            last = row_map.last
            if last is None:
                out[start : start + len(found)] = found
            else:
                backend = make_backend(device)
                rows_out = out[start : start + len(found)]
                fill_rows(backend, "map", last, last.prepare(backend), block, rows_out, stop)
            if progress is not None:
                progress(start + len(found), len(dataset))


def _make_column_worker(
    part: ColumnStage, block: Block, found: np.ndarray, device: str, slot: int, stop: StopEvent
) -> Callable[[tuple[int, int]], None]:
    backend = make_backend(device, slot)

    def work(cut: tuple[int, int]) -> None:
        own = part.select_columns(*cut)
        fill_rows(backend, "map", own, own.prepare(backend), block, found[:, slice(*cut)], stop)

    return work
