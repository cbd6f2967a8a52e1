"""Session of one fit: executor, checkpoints, temporary files, and the execution of the fit's steps."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from scalelatent.contract.idle_threads import allow_threads
from scalelatent.contract.learners import ColumnStage, Reduction, RowMap, Work
from scalelatent.contract.stats import Layout, Stats
from scalelatent.data import Dataset
from scalelatent.data.read.earlier import find_earlier_rows
from scalelatent.deploy.clusters import current_job_id, use_client
from scalelatent.engine.backend import computes_on_gpu
from scalelatent.engine.batch_loop import LoopResult, Progress, fit_batches
from scalelatent.engine.cache import parse_cache
from scalelatent.engine.callbacks import Callback, Callbacks, report_compilations
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.incremental import DropLeaves, keep_leaves
from scalelatent.engine.mapwrite import choose_column_block_rows, map_rows, map_to_array, open_spec, start_map
from scalelatent.engine.online_loop import fit_online
from scalelatent.engine.order import warn_if_sorted
from scalelatent.engine.passes import Stage, choose_block_rows, make_stage, select_grid_options
from scalelatent.engine.plan import MAX_TASKS
from scalelatent.engine.quarantine import Quarantine, check_choice
from scalelatent.engine.reading import as_rows, name_dataset_in_errors
from scalelatent.engine.resume_identity import named_values
from scalelatent.engine.rowsets import DrawnSets, StoredSets, find_places, start_sets
from scalelatent.engine.threads import resolve_jobs, single_threaded
from scalelatent.errors import DataError, RunError
from scalelatent.kernels.streams import resolve_seed
from scalelatent.storage.disk import Location, locate

from .steps import (
    AddRowMap,
    ComputeValue,
    EncodeRows,
    MappedRows,
    StartFit,
    Step,
    StoreArrays,
    StoreRowSets,
    SumStatistic,
    TrainBatch,
    TrainOnline,
)

ENGINE_OPTIONS = (
    "block_rows",
    "leaf_rows",
    "checkpoint_seconds",
    "checkpoint_passes",
    "checkpoint_steps",
    "report_steps",
    "validate_steps",
    "run_rows",
    "buffer_runs",
    "scratch",
    "keep_scratch",
    "on_bad_shard",
    "cache",
)

# A task computes a tile (some rows and columns) of the output of a layer: at most MAX_TASK_FLOPS operations,
# about three seconds of one core. A layer with less work gets about TARGET_TASKS tasks, but a task has at
# least MIN_TASK_FLOPS, because each tile is a file.
MAX_TASK_FLOPS, TARGET_TASKS, MIN_TASK_FLOPS = 2e11, 16, 5e9

# Engine options that affect the result of an online fit (one update per minibatch).
ONLINE_GRID_OPTIONS = ("run_rows", "buffer_runs", "validate_steps")


if TYPE_CHECKING:
    from distributed import Client

    from scalelatent.data.schema import DatasetSpec
    from scalelatent.engine.dask.executor import DaskExecutor
    from scalelatent.engine.executor import Executor
    from scalelatent.typing import ClientLike, RandomState

CallbackList = Callback | Sequence[Callback]
LocationLike = str | Path | Location
Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)


def restore_row_ranges(datasets: Mapping[str, Dataset], run_dir: LocationLike | None) -> dict[str, Dataset]:
    """Return the rows that the fit of a run folder began with, without rows that were appended since."""
    out = dict(datasets)
    if run_dir is None:
        return out
    stored = EngineStore(locate(run_dir).at("engine"), run="").identity() or {}
    for name, ds in datasets.items():
        wanted = stored.get(f"{name} data")
        found = find_earlier_rows(ds, wanted) if ds.attrs and isinstance(wanted, str) else None
        if found is not None and found is not ds:
            a, b = found.extent
            _log.warning(
                "%s rows: %s has grown since the fit started; the fit continues with rows %d:%d (a fit of "
                "all rows needs another run_dir)",
                name,
                ds.url,
                a,
                b,
            )
            out[name] = found
    return out


class FitSession:
    """Context manager that holds the resources of one fit.

    It executes each step that the model's generator yields, and sends back the result.
    """

    def __init__(
        self,
        kind: str,
        *,
        device: str,
        n_jobs: int | None,
        client: ClientLike | None = None,
        in_process: bool = False,
        run_dir: LocationLike | None = None,
        resume: bool = False,
        callbacks: CallbackList = (),
        engine: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        # Default values of parameters that run folders of other versions do not contain.
        self._defaults = defaults
        self.kind, self.device, self.n_jobs = kind, device, n_jobs
        self.callbacks = Callbacks(callbacks)
        self.options = dict(engine or {})
        unknown = sorted(set(self.options) - set(ENGINE_OPTIONS))
        if unknown:
            raise ValueError(
                f"engine: unknown option(s) {', '.join(unknown)}; there are {', '.join(ENGINE_OPTIONS)}"
            )
        self.on_bad_shard = check_choice(self.options.get("on_bad_shard", "stop"))
        self._cache = parse_cache(self.options.get("cache"))
        self._connection = nullcontext() if client is None and in_process else use_client(client)
        self.client: Client | None = None
        self._cluster: DaskExecutor | None = None
        self.run_dir, self.resume = run_dir, resume
        self.store: EngineStore | None = None
        self._exit = ExitStack()
        self._leftovers: list[Location] = []
        self._mapped: dict[tuple[int | str, ...], Dataset] = {}
        self._has_gpu_blocks = False  # whether blocks have the large size that suits GPUs

    def __enter__(self) -> FitSession:
        self.client = self._exit.enter_context(self._connection)
        self._exit.enter_context(single_threaded())
        if self.client is None:  # on a cluster, the workers report compilations themselves
            self._exit.enter_context(report_compilations(self.callbacks))
        if self.run_dir is not None:
            self.store = EngineStore(locate(self.run_dir).at("engine"))
        elif self.client is not None:
            self.store = EngineStore(self._make_temporary_folder())
        if self.client is not None and self.store is not None:
            self._publish_on_dashboard(self.client, self.store.location.url)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A fit without a run folder cannot be resumed, so its files are removed even after an error.
        if self.run_dir is None:
            self.remove_leftovers()
        self._exit.__exit__(kind, error, trace)

    def _publish_on_dashboard(self, client: Client, folder: str) -> None:
        """Show a fit without a run folder on the dashboard page of the cluster."""
        if self.callbacks.keeps_run_folder or self.callbacks.tells_cluster:
            return
        from scalelatent.engine.dask.worker_side import find_run_folder
        from scalelatent.monitor import ClusterLog, install

        install(client)
        job, name = f"{self.kind}-{uuid.uuid4().hex[:8]}", f"{self.kind} without a run folder"
        log = ClusterLog(client, find_run_folder(folder), job=job, model=self.kind, name=name)
        self.callbacks = Callbacks([*self.callbacks.callbacks, self._exit.enter_context(log)])

    def _make_temporary_folder(self) -> str:
        folder = tempfile.mkdtemp(prefix="scalelatent-")
        self._exit.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    # -- start -----------------------------------------------------------------------------------------------

    def begin(
        self, random_state: RandomState, params: Mapping[str, Any], datasets: Mapping[str, Dataset]
    ) -> int:
        """Start the executor; store the fit's description, or compare it with the stored; return the seed."""
        from scalelatent.engine.inprocess import InProcessExecutor

        # Check the block options before anything is written; the number of columns does not matter here.
        choose_block_rows(1, **select_grid_options(self.options))
        seconds = self.options.get("checkpoint_seconds", 30.0)
        if self.store is None:
            quarantine = Quarantine(self.on_bad_shard)
            self._has_gpu_blocks = self._uses_only_gpus()
            self.executor: Executor = InProcessExecutor(
                self.n_jobs, cache=self._cache, callbacks=self.callbacks, quarantine=quarantine
            )
            return resolve_seed(random_state)
        fixed = isinstance(random_state, (int, np.integer))
        stored = (self.store.identity() if self.resume else None) or {}
        seed = resolve_seed(random_state) if fixed or not stored else int(stored["seed"])
        grid = {k: self.options.get(k) for k in ("block_rows", "leaf_rows")}
        # Include only options that are given, so that the stored description of other fits does not change.
        grid |= {k: self.options[k] for k in ONLINE_GRID_OPTIONS if self.options.get(k)}
        # A resumed run keeps its block size on any hardware, because stored sums may depend on this size.
        # "card_blocks" is the name of the option in run folders.
        self._has_gpu_blocks = bool(stored.get("card_blocks")) if stored else self._uses_only_gpus()
        grid |= {"card_blocks": True} if self._has_gpu_blocks else {}
        identity = {"kind": self.kind, "seed": seed, **grid}
        identity["params"] = named_values(params)
        identity |= {f"{name} data": ds.fingerprint() for name, ds in datasets.items()}
        self.store.claim(identity, self.resume, self._defaults)
        how: dict[str, Any] = {
            "cache": self._cache,
            "callbacks": self.callbacks,
            "quarantine": Quarantine(self.on_bad_shard, self.store),
        }
        if self.client is None:
            self.executor = InProcessExecutor(self.n_jobs, self.store, seconds, **how)
        else:
            from scalelatent.engine.dask.executor import DaskExecutor

            self._cluster = DaskExecutor(self.client, self.store, seconds, job=current_job_id(), **how)
            self._exit.callback(self._cluster.close)
            self._cluster.compute_on(self.device)
            self.executor = self._cluster
        return seed

    def _uses_only_gpus(self) -> bool:
        """Return whether the fit computes on GPUs only, judged by the workers that are known now."""
        if self.client is None:
            return computes_on_gpu(self.device)
        from scalelatent.engine.dask.pools import all_use_gpu

        return self.device == "gpu" or (self.device == "auto" and all_use_gpu(self.client))

    def start_fit(
        self,
        starts: Sequence[StartFit],
        random_state: RandomState,
        params: Mapping[str, Any],
        datasets: Mapping[str, Dataset],
        **more: object,
    ) -> tuple[int, dict[str, Dataset]]:
        """Start a fit, or a search of several fits; return the seed, and datasets that every worker can open.

        ``more`` is additional information for ``on_fit_start`` of the callbacks.
        """
        for start in starts:
            if start.all_rows and self.on_bad_shard == "skip":
                raise ValueError(
                    f"on_bad_shard = 'skip' is for fits by passes: {start.all_rows}; or leave on_bad_shard "
                    "out"
                )
        if self.store is None and any(start.keeps_records for start in starts):
            self.store = EngineStore(self._make_temporary_folder())
        seed = self.begin(random_state, params, datasets)
        self.notify_start(datasets["train"], **starts[0].info, **more, seed=seed)
        return seed, {name: self.make_visible(name, ds) for name, ds in datasets.items()}

    def notify_start(self, train: Dataset, **more: object) -> None:
        """Notify the callbacks that a fit begins, with its numbers of rows and features."""
        info = {
            "rows": len(train),
            "features": train.n_features,
            "classes": 0 if train.classes is None else len(train.classes),
        }
        self.callbacks.on_fit_start({**info, "resumed_pass": None, **more})

    def make_visible(self, name: str, dataset: Dataset) -> Dataset:
        """Return a dataset that every worker can open: the given one, or a temporary copy in scratch."""
        if self._cluster is None:
            return dataset
        if dataset.is_stored:
            self._cluster.send_access(dataset)
            return dataset
        location = self.scratch().at(f"{name}.zarr")
        self._leftovers.append(location)
        if not location.is_empty():
            from scalelatent.data import open_dataset

            try:
                return open_dataset(location.url)
            except DataError:  # the copy is incomplete
                location.clear()
        self.callbacks.on_stage({"stage": f"writing the {name} rows for the workers", "rows": len(dataset)})
        if dataset.lazy(0, 1) is not None:
            return self._cluster.save_lazy(dataset, location.url, Progress(self.callbacks, name, 0))
        return dataset.save(location.url)

    def remove_at_end(self, location: Location) -> None:
        """Let the files at ``location`` be removed when the fit ends, unless ``keep_scratch`` is set."""
        if not self.options.get("keep_scratch", False):
            self._leftovers.append(location)

    def scratch(self) -> Location:
        """Make the folder of temporary datasets if it is missing; return its location."""
        if "scratch" in self.options:
            name = f"scalelatent-{uuid.uuid4().hex[:12] if self.store is None else self.store.ref[1]}"
            root = locate(self.options["scratch"]).at(name)
        else:
            root = self.store.scratch if self.store is not None else locate(self._make_temporary_folder())
        root.make()
        return root

    # -- steps ----------------------------------------------------------------------------------------------

    def run_steps(self, steps: Generator[Step, Any, Answer], answer: object = None) -> Answer:
        """Run each step that a generator yields and send it the result; return what the generator returns."""
        try:
            while True:
                answer = self._run_step(steps.send(answer))
        except StopIteration as end:
            return end.value

    def _run_step(self, step: Step) -> Any:
        if isinstance(step, ComputeValue):
            with allow_threads(resolve_jobs(self.n_jobs) if self.client is None else 1):
                return step.value()
        if isinstance(step, AddRowMap):
            return self.add_map(step.name, step)
        if isinstance(step, SumStatistic):
            return self.collect(step.name, step.reduction, step.rows, step.classes)
        if isinstance(step, StoreArrays):
            return self.restore_arrays(step)
        if isinstance(step, StoreRowSets):
            return self._gather_in_memory(step) if self.store is None else self.store_row_sets(step)
        if isinstance(step, EncodeRows):
            return self._encode_in_memory(step) if self.store is None else self.write_encoded(step)
        if isinstance(step, TrainOnline):
            return self.learn_online(step.name, step)
        assert isinstance(step, TrainBatch)
        return self._load_finished(step) or self.fit_batches(
            self.stage(
                step.name,
                step.learner,
                {part: self.apply_maps(rows) for part, rows in step.rows.items()},
                step.classes,
            ),
            step.state,
        )

    def restore_arrays(self, step: StoreArrays) -> Mapping[str, np.ndarray]:
        """Return the arrays from which the fit starts: stored by an interrupted run, else of ``step``."""
        name = f"{self.kind}_{step.name}"
        stored = self.store.load_result(name) if self.store else None
        if stored is None:
            if step.about:
                self.callbacks.on_stage({"stage": name, **step.about})
            stored = {"arrays": dict(step.value())}
            if self.store:
                self.store.save_result(name, stored)
        return stored["arrays"]

    def add_map(self, name: str, step: AddRowMap) -> MappedRows:
        """Return the rows with one more map; the map is applied when a pass first reads these rows."""
        if self.store is not None:
            # An interrupted run may have written these rows. Remove them even if this run does not need them.
            self.remove_at_end(self.scratch().at(f"{name}.zarr"))
        return replace(step.rows, maps=(*step.rows.maps, (name, step.row_map)))

    def _load_finished(self, step: TrainBatch) -> LoopResult | None:
        """Return the stored result of a learner that ended before the interruption, or None."""
        name = f"{self.kind}_{step.name}"
        found = self.store.latest_state(name) if self.store else None
        if found is None or not step.learner.is_done(found[1]):
            return None
        assert self.store is not None
        history = self.store.load_history(name, found[0])
        if not history or history[-1]["pass"] < found[0]:  # the last record is lost; the fit writes it again
            return None
        record = {"record": history[-1], "history": history}
        self.callbacks.on_event({"event": "resumed", "stage": name, "pass": found[0], **record})
        return LoopResult(found[1], history)

    def apply_maps(self, rows: MappedRows | Dataset) -> Dataset:
        """Return the output of all row maps of ``rows``; each map runs only once. The mask is not applied."""
        if isinstance(rows, Dataset):
            return rows
        dataset = rows.dataset
        key: tuple[int | str, ...] = (id(dataset),)
        for name, row_map in rows.maps:
            key = (*key, name)
            if key not in self._mapped:
                self._mapped[key] = self._write_mapped(name, row_map, dataset)
            dataset = self._mapped[key]
        return dataset

    # -- passes ----------------------------------------------------------------------------------------------

    def stage(
        self, name: str, work: Work, datasets: Mapping[str, Dataset], classes: np.ndarray | None = None
    ) -> Stage:
        """Return a stage (work over datasets) with the block sizes and the device of this fit."""
        return make_stage(f"{self.kind}_{name}", work, datasets, self.device, classes, **self.grid)

    @property
    def grid(self) -> dict[str, Any]:
        """Arguments of ``make_stage`` that set the sizes of blocks and leaves (fixed ranges of rows)."""
        return {**select_grid_options(self.options), "gpu_blocks": self._has_gpu_blocks}

    def collect(
        self, name: str, reduction: Reduction, rows: MappedRows | Dataset, classes: np.ndarray | None = None
    ) -> Stats:
        """Run one pass that sums a reduction's statistic; return the statistic and store it for a resume."""
        layout: Layout = reduction.layout()
        stored = self.store.load_result(f"{self.kind}_{name}") if self.store else None
        if stored is not None:
            return Stats(layout, stored["vector"])
        stage = self.stage(name, {"train": reduction}, {"train": self.apply_maps(rows)}, classes)
        self.callbacks.on_stage({"stage": stage.name, "rows": stage.rows})
        stats = self.executor.collect(stage, Progress(self.callbacks, stage.name, 0))["train"]
        if self.store:
            self.store.save_result(f"{self.kind}_{name}", {"vector": np.array(stats.vector)})
        return stats

    def _write_mapped(self, name: str, row_map: RowMap, dataset: Dataset) -> Dataset:
        """Apply a map to rows; return a dataset in scratch, or in memory if the rows are in memory."""
        stage = f"{self.kind}_{name}"
        self.callbacks.on_stage({"stage": stage, "rows": len(dataset)})
        progress = Progress(self.callbacks, stage, 0)
        if self.client is None and not dataset.is_stored:
            return self._map_in_memory(row_map, dataset, progress)
        location = self.scratch().at(f"{name}.zarr")
        self.remove_at_end(location)
        task = start_map(stage, dataset, row_map, location.url, self.device, resume=True)
        out = map_rows(self.executor, task, progress)
        self.executor.quarantine.exclude_mapped(dataset, out)
        return out

    def _map_in_memory(self, row_map: RowMap, dataset: Dataset, progress: Progress) -> Dataset:
        out = map_to_array(row_map, dataset, self.device, self.n_jobs, progress)
        y = dataset.read_y(0, len(dataset)) if dataset.has_y else None
        weight = dataset.read_weight(0, len(dataset)) if dataset.has_weight else None
        return Dataset.from_arrays(out, y, sample_weight=weight)

    def fit_batches(self, stage: Stage, state: object) -> LoopResult:
        """Run a batch learner until it is done; return its result."""
        self.callbacks.on_stage({"stage": stage.name, "rows": stage.rows})
        return fit_batches(
            self.executor,
            stage,
            state,
            callbacks=self.callbacks,
            store=self.store,
            checkpoint_seconds=self.options.get("checkpoint_seconds", 30.0),
            checkpoint_passes=self.options.get("checkpoint_passes"),
        )

    # -- online learners -------------------------------------------------------------------------------------

    def learn_online(self, name: str, step: TrainOnline) -> LoopResult:
        """Run an online learner until it is done; return its result."""
        order, work, options = step.order(self.options), step.learner, self.options
        callbacks, every = list(self.callbacks.callbacks), options.get("checkpoint_steps")
        datasets = {part: self._zero_masked_weights(rows) for part, rows in step.rows.items()}
        cleaner = None
        if step.keeps_leaves:
            assert self.store is not None, "StartFit.keeps_records asks for a store"
            folder, run = self.store.ref
            work = keep_leaves(step.learner, folder, f"{self.kind}_{name}", run)
            cleaner = DropLeaves(work)
            callbacks, every = [*callbacks, cleaner], every or order.n_steps
        elif order.buffer_rows < order.locate_chain(0)[1]:
            # With a small buffer, sorted labels harm a fit, unless the learner stores data for each leaf.
            warn_if_sorted(datasets["train"], order)
        stage = self.stage(name, work, datasets, step.classes)
        self.callbacks.on_stage({"stage": stage.name, "rows": order.n_rows})
        result = fit_online(
            self.executor,
            stage,
            step.state,
            order=order,
            n_epochs=step.n_epochs,
            callbacks=Callbacks(callbacks),
            store=self.store,
            checkpoint_seconds=options.get("checkpoint_seconds", 30.0),
            checkpoint_steps=every,
            report_steps=options.get("report_steps") or _report_steps(step.reports, order.n_steps),
            validate_steps=options.get("validate_steps"),
        )
        through = bool(result.history) and result.history[-1]["steps"] >= step.n_epochs * order.n_steps
        if cleaner is not None and (through or step.learner.is_done(result.state)):
            cleaner.drop()
        return result

    def _zero_masked_weights(self, rows: MappedRows) -> Dataset:
        """Return the rows, with weight 0 for the rows that a mask excludes."""
        dataset, mask = self.apply_maps(rows), rows.mask
        if mask is None:
            return dataset
        weight = dataset.read_weight(0, len(dataset)) if dataset.has_weight else None
        weight = np.ones(len(dataset)) if weight is None else weight.copy()
        weight[mask.start : mask.stop] = 0
        name = "-".join([*(name for name, _ in rows.maps), f"without-{mask.start}-{mask.stop}"])
        return self.make_visible(name, dataset.with_weight(weight))

    # -- steps that write rows -------------------------------------------------------------------------------
    # After `StoreRowSets` or `EncodeRows` has written rows, the session stores a record that describes them.
    # A resumed fit reads the record, and does not repeat the step. It does not need rows that the session
    # removed after a later step had used them. A fit without a store keeps the rows in memory.

    @property
    def _records(self) -> EngineStore:
        """Store of the fit (its files in the run folder), for steps that need a store."""
        assert self.store is not None, "StartFit.keeps_records asks for a store"
        return self.store

    def _gather_in_memory(self, step: StoreRowSets) -> DrawnSets:
        """Return sets of rows that are not copied: each set is taken from the dataset whenever it is read."""
        assert step.rows is not None
        dataset = self.apply_maps(step.rows)
        self._announce_step(step, step.sets.n_sets * step.sets.rows_per_set)
        with name_dataset_in_errors(dataset):
            # Copy the rows, because the caller may change the array after the fit.
            x = copy.deepcopy(as_rows(dataset.read_x(0, len(dataset))))
            if not dataset.known_finite:
                step.sets.check(x, 0)
        return DrawnSets(step.sets, x)

    def _encode_in_memory(self, step: EncodeRows) -> MappedRows:
        """Apply the map of ``step`` to its rows; return the output rows, which stay in memory."""
        assert step.rows is not None
        begin, dataset = time.perf_counter(), self.apply_maps(step.rows)
        stage = self._announce_step(step, len(dataset))
        progress = Progress(self.callbacks, stage, 0, **step.about)
        found = Dataset.from_arrays(map_to_array(step.row_map, dataset, self.device, self.n_jobs, progress))
        self._report_written(step, found, begin)
        return MappedRows(found)

    def _announce_step(self, step: StoreRowSets | EncodeRows, rows: int) -> str:
        """Notify the callbacks that a step of the fit begins; return the name of its stage."""
        stage = f"{self.kind}_{step.name}"
        self.callbacks.on_stage({"stage": stage, "rows": rows, **step.about})
        return stage

    def store_row_sets(self, step: StoreRowSets) -> StoredSets:
        """Return sets of rows; write them to the run folder, unless an interrupted run has written them."""
        stage = f"{self.kind}_{step.name}"
        stored = self._records.load_result(stage)
        location = self._records.location.at("sets").at(f"{step.name}.zarr")
        if not step.kept:
            self.remove_at_end(location)
        if stored is None or (not step.kept and location.is_empty()):
            begin = time.perf_counter()
            dataset = self._require_rows(step.rows, stage)
            self._announce_step(step, step.sets.n_sets * step.sets.rows_per_set)
            task = start_sets(stage, dataset, step.sets, location.url, self.device)
            written = map_rows(self.executor, task, Progress(self.callbacks, stage, 0, **step.about))
            missing = find_places(step.sets, self.executor.quarantine.excluded_rows(dataset))
            stored = self._store_result(step, stage, written, begin, missing=list(missing))
        missing = tuple(int(i) for i in stored.get("missing", ()))
        return StoredSets(json.dumps(_locate_spec(stored, location)), step.sets.rows_per_set, missing)

    def write_encoded(self, step: EncodeRows) -> MappedRows | None:
        """Apply a map; tasks write tiles (some rows and columns) of the output. Return the output.

        Return None if an interrupted run has written this output, used it, and removed it.
        """
        stage = f"{self.kind}_{step.name}"
        stored = self._records.load_result(stage)
        location = self._location_of(step.name, step.kept)
        if not step.kept:
            self.remove_at_end(location)
        if stored is None:
            begin = time.perf_counter()
            dataset = self._require_rows(step.rows, stage)
            self._announce_step(step, len(dataset))
            task = start_map(
                stage,
                dataset,
                step.row_map,
                location.url,
                self.device,
                with_labels=False,
                resume=True,
                compressor=None,
                **tile_layout(len(dataset), dataset.nbytes // len(dataset), step.row_map),
            )
            written = map_rows(self.executor, task, Progress(self.callbacks, stage, 0, **step.about))
            stored = self._store_result(step, stage, written, begin)
        for name in step.removes:
            gone = self._location_of(name, False)
            if not gone.is_empty():
                gone.clear()
        return None if location.is_empty() else MappedRows(open_spec(_locate_spec(stored, location)))

    def _require_rows(self, rows: MappedRows | None, stage: str) -> Dataset:
        if rows is None:
            raise RunError(
                f"{self._records.location.url}: the record of {stage} cannot be read, and the rows that it "
                "was made of are gone: start again in another run_dir"
            )
        return self.apply_maps(rows)

    def _location_of(self, name: str, is_kept: bool) -> Location:
        # Output that stays after the fit is in the run folder, even if the scratch folder is elsewhere.
        return codes_location(self._records.location, name) if is_kept else self.scratch().at(f"{name}.zarr")

    def _store_result(
        self, step: StoreRowSets | EncodeRows, stage: str, written: Dataset, begin: float, **more: object
    ) -> dict[str, Any]:
        stored = {"spec": json.dumps(written.spec()), **more}
        self._records.save_result(stage, stored)
        self._report_written(step, written, begin)
        return stored

    def _report_written(self, step: StoreRowSets | EncodeRows, written: Dataset, begin: float) -> None:
        stage, seconds = f"{self.kind}_{step.name}", round(time.perf_counter() - begin, 6)
        self.callbacks.on_event(
            {"event": "layer_written", "stage": stage, "rows": len(written), "seconds": seconds, **step.about}
        )

    # -- end -------------------------------------------------------------------------------------------------

    def remove_leftovers(self) -> None:
        """Remove temporary datasets after the fit; the records of its steps stay in the run folder."""
        for location in self._leftovers:
            with suppress(OSError):
                location.clear()
                location.remove_folders()


def _report_steps(wanted: int, n_steps: int) -> int | None:
    """Return the steps between reports for ``wanted`` reports per epoch, or None if the epoch is short."""
    return n_steps // wanted if wanted and n_steps >= 20 * wanted else None


def codes_location(records: Location, name: str) -> Location:
    """Return the location, in the records of a fit, of the output rows (codes) of the map ``name``."""
    return records.at("codes").at(f"{name}.zarr")


def tile_layout(n: int, row_bytes: int, row_map: ColumnStage) -> dict[str, Any]:
    """Return the rows and columns of the output tiles of a map, which depend on the rows and the map only.

    A tile is small, so that its task is short, but not too small: there are at most MAX_TASKS tiles.
    """
    (width,) = row_map.output()[0]
    strips = -(-n // max(choose_column_block_rows(row_bytes, row_map), -(-n // MAX_TASKS)))
    rows = -(-n // strips)
    work = rows * row_map.flops_per_row() + row_map.column_flops()
    wanted = min(MAX_TASK_FLOPS, max(MIN_TASK_FLOPS, strips * width * work / TARGET_TASKS))
    columns = max(1, min(round(wanted / work), width), -(-width // (MAX_TASKS // strips)))
    group = row_map.column_group
    return {"shard_rows": rows, "tile_columns": min(width, -(-columns // group) * group)}


def _locate_spec(stored: dict[str, Any], location: Location) -> DatasetSpec:
    """Return the spec of a dataset that a step wrote, with its present URL: the run folder may have moved."""
    spec: DatasetSpec = json.loads(stored["spec"])
    return {**spec, "url": location.url}
