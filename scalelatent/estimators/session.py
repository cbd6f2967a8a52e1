"""One fit: where it runs, where it keeps its checkpoints, and how its steps are served."""

from __future__ import annotations

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
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from scalelatent.contract.idle_threads import allow_threads
from scalelatent.contract.learners import CostedColumnMap, Reduction, RowMap, Work
from scalelatent.contract.stats import Layout, Stats
from scalelatent.data import Dataset
from scalelatent.data.read.earlier import earlier_rows
from scalelatent.deploy.clusters import client_of, current_job
from scalelatent.engine.backend import computes_on_gpu
from scalelatent.engine.batch_loop import LoopResult, Progress, fit_batches
from scalelatent.engine.cache import parse_cache
from scalelatent.engine.callbacks import Callback, Callbacks, report_compilations
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.incremental import DropLeaves, KeptLeaves
from scalelatent.engine.mapwrite import choose_column_block_rows, map_rows, map_to_array, open_spec, start_map
from scalelatent.engine.online_loop import fit_online
from scalelatent.engine.order import warn_if_sorted
from scalelatent.engine.passes import Stage, choose_block_rows, make_stage, select_grid_options
from scalelatent.engine.plan import MAX_TASKS
from scalelatent.engine.quarantine import Quarantine, check_choice
from scalelatent.engine.resume_identity import same_form
from scalelatent.engine.rowsets import StoredSets, find_places, start_sets
from scalelatent.engine.threads import resolve_jobs, single_threaded
from scalelatent.errors import DataError, RunError
from scalelatent.kernels.streams import resolve_seed
from scalelatent.storage.disk import Location, locate

from .steps import Collect, Derive, Encode, Gather, Learn, LearnOnline, Map, Remember, Rows, Step

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

# Of a task of a layer: about three seconds of a core. Where there is less to do than this for each of so many
# tasks, tasks are shorter, down to the least that is worth a file.
TASK_FLOPS, TASKS, LEAST_FLOPS = 2e11, 16, 5e9

# Engine options that decide the result of an online fit.
ONLINE_GRID = ("run_rows", "buffer_runs", "validate_steps")


if TYPE_CHECKING:
    from distributed import Client

    from scalelatent.data.schema import DatasetSpec
    from scalelatent.engine.dask.executor import DaskExecutor
    from scalelatent.engine.executor import Executor
    from scalelatent.typing import ClientLike, RandomState

CallbackList = Callback | Sequence[Callback]
Place = str | Path | Location
Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)


def rows_as_begun(datasets: Mapping[str, Dataset], run_dir: Place | None) -> dict[str, Dataset]:
    """The rows that the fit of a run folder began with, where more were appended since."""
    out = dict(datasets)
    if run_dir is None:
        return out
    try:
        kept = EngineStore(locate(run_dir).at("engine"), run="").identity() or {}
    except ValueError:  # torn: claiming the folder says so
        kept = {}
    for name, ds in datasets.items():
        wanted = kept.get(f"{name} data")
        found = earlier_rows(ds, wanted) if ds.attrs and isinstance(wanted, str) else None
        if found is not None and found is not ds:
            a, b = found.extent
            _log.warning(
                "%s rows: %s has grown since the fit began; it goes on with the rows %d:%d of then (a fit "
                "of all rows needs another run_dir)",
                name,
                ds.url,
                a,
                b,
            )
            out[name] = found
    return out


class FitSession:
    """Context of one fit."""

    def __init__(
        self,
        kind: str,
        *,
        device: str,
        n_jobs: int | None,
        client: ClientLike | None = None,
        in_process: bool = False,
        run_dir: Place | None = None,
        resume: bool = False,
        callbacks: CallbackList = (),
        engine: Mapping[str, Any] | None = None,
    ) -> None:
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
        self._connection = nullcontext() if client is None and in_process else client_of(client)
        self.client: Client | None = None
        self._cluster: DaskExecutor | None = None
        self.run_dir, self.resume = run_dir, resume
        self.store: EngineStore | None = None
        self._exit = ExitStack()
        self._leftovers: list[Location] = []
        self._mapped: dict[tuple[int | str, ...], Dataset] = {}
        self._card_blocks = False  # whether blocks are as large as a card wants them

    def __enter__(self) -> FitSession:
        self.client = self._exit.enter_context(self._connection)
        self._exit.enter_context(single_threaded())
        if self.client is None:  # workers tell of theirs
            self._exit.enter_context(report_compilations(self.callbacks))
        if self.run_dir is not None:
            self.store = EngineStore(locate(self.run_dir).at("engine"))
        elif self.client is not None:
            self.store = EngineStore(self._temporary())
        if self.client is not None and self.store is not None:
            self._show(self.client, self.store.place.url)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.run_dir is None:  # it cannot be resumed: what a failed fit left goes too
            self.finish()
        self._exit.__exit__(kind, error, trace)

    def _show(self, client: Client, folder: str) -> None:
        """Show a fit that has no recorder on the page of the cluster's dashboard."""
        if self.callbacks.keeps_run_folder or self.callbacks.tells_cluster:
            return
        from scalelatent.engine.dask.worker_side import run_of
        from scalelatent.monitor import ClusterLog, install

        install(client)
        job, name = f"{self.kind}-{uuid.uuid4().hex[:8]}", f"{self.kind} without a run folder"
        log = ClusterLog(client, run_of(folder), job=job, model=self.kind, name=name)
        self.callbacks = Callbacks([*self.callbacks.callbacks, self._exit.enter_context(log)])

    def _temporary(self) -> str:
        folder = tempfile.mkdtemp(prefix="scalelatent-")
        self._exit.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    # -- start -----------------------------------------------------------------------------------------------

    def begin(
        self, random_state: RandomState, params: Mapping[str, Any], datasets: Mapping[str, Dataset]
    ) -> int:
        """Bind the run folder to this fit, start the executor; returns the seed."""
        from scalelatent.engine.inprocess import InProcessExecutor

        # Refused before anything is written, for whatever number of columns a stage will have.
        choose_block_rows(1, **select_grid_options(self.options))
        seconds = self.options.get("checkpoint_seconds", 30.0)
        if self.store is None:
            quarantine = Quarantine(self.on_bad_shard)
            self._card_blocks = self._all_cards()
            self.executor: Executor = InProcessExecutor(
                self.n_jobs, cache=self._cache, callbacks=self.callbacks, quarantine=quarantine
            )
            return resolve_seed(random_state)
        fixed = isinstance(random_state, (int, np.integer))
        kept = (self.store.identity() if self.resume else None) or {}
        seed = resolve_seed(random_state) if fixed or not kept else int(kept["seed"])
        grid = {k: self.options.get(k) for k in ("block_rows", "leaf_rows")}
        # Left out where they are not given: folders of batch fits keep the identity they had.
        grid |= {k: self.options[k] for k in ONLINE_GRID if self.options.get(k)}
        # A resumed run keeps its blocks, on whatever it is resumed: half a pass may be stored by them.
        self._card_blocks = bool(kept.get("card_blocks")) if kept else self._all_cards()
        grid |= {"card_blocks": True} if self._card_blocks else {}
        identity = {"kind": self.kind, "seed": seed, **grid}
        identity["params"] = same_form(params, kept.get("params"))
        identity |= {f"{name} data": ds.fingerprint() for name, ds in datasets.items()}
        self.store.claim(identity, self.resume)
        how: dict[str, Any] = {
            "cache": self._cache,
            "callbacks": self.callbacks,
            "quarantine": Quarantine(self.on_bad_shard, self.store),
        }
        if self.client is None:
            self.executor = InProcessExecutor(self.n_jobs, self.store, seconds, **how)
        else:
            from scalelatent.engine.dask.executor import DaskExecutor

            self._cluster = DaskExecutor(self.client, self.store, seconds, job=current_job(), **how)
            self._exit.callback(self._cluster.close)
            self._cluster.compute_on(self.device)
            self.executor = self._cluster
        return seed

    def _all_cards(self) -> bool:
        """Whether the fit computes on cards alone, as far as its workers are known now."""
        if self.client is None:
            return computes_on_gpu(self.device)
        from scalelatent.engine.dask.pools import all_offer_gpu

        return self.device == "gpu" or (self.device == "auto" and all_offer_gpu(self.client))

    def check_skipping(self, all_rows: str) -> None:
        """Before :meth:`begin`: refuse to leave rows out where none may be."""
        if all_rows and self.on_bad_shard == "skip":
            raise ValueError(
                f"on_bad_shard = 'skip' is for fits by passes: {all_rows}; or leave on_bad_shard out"
            )

    def announce(self, train: Dataset, **more: object) -> None:
        """Tell the callbacks that a fit begins."""
        info = {
            "rows": len(train),
            "features": train.n_features,
            "classes": 0 if train.classes is None else len(train.classes),
        }
        self.callbacks.on_fit_start({**info, "resumed_pass": None, **more})

    def visible(self, name: str, dataset: Dataset) -> Dataset:
        """The dataset where every worker can open it: itself, or a temporary copy beside the records."""
        if self._cluster is None:
            return dataset
        if dataset.is_stored:
            self._cluster.lend_access(dataset)
            return dataset
        place = self.scratch().at(f"{name}.zarr")
        self._leftovers.append(place)
        if not place.is_empty():
            from scalelatent.data import open_dataset

            try:
                return open_dataset(place.url)
            except DataError:  # a copy that was cut short
                place.clear()
        self.callbacks.on_stage({"stage": f"writing the {name} rows for the workers", "rows": len(dataset)})
        if dataset.lazy(0, 1) is not None:
            return self._cluster.save_lazy(dataset, place.url, Progress(self.callbacks, name, 0))
        return dataset.save(place.url)

    def leaves(self, place: Location) -> None:
        """Have what lies at a place removed when the fit is done, unless scratch is to be kept."""
        if not self.options.get("keep_scratch", False):
            self._leftovers.append(place)

    def scratch(self) -> Location:
        """The folder of temporary datasets."""
        if "scratch" in self.options:
            name = f"scalelatent-{uuid.uuid4().hex[:12] if self.store is None else self.store.ref[1]}"
            root = locate(self.options["scratch"]).at(name)
        else:
            root = self.store.scratch if self.store is not None else locate(self._temporary())
        root.make()
        return root

    # -- steps ----------------------------------------------------------------------------------------------

    def answer(self, steps: Generator[Step, Any, Answer], answer: object = None) -> Answer:
        """Serve steps to their end; returns what they return."""
        try:
            while True:
                answer = self._serve(steps.send(answer))
        except StopIteration as end:
            return end.value

    def _serve(self, step: Step) -> Any:
        if isinstance(step, Derive):
            with allow_threads(resolve_jobs(self.n_jobs) if self.client is None else 1):
                return step.value()
        if isinstance(step, Map):
            return self.mapped(step.name, step)
        if isinstance(step, Collect):
            return self.collect(step.name, step.reduction, step.rows, step.classes)
        if isinstance(step, Remember):
            return self.remembered(step)
        if isinstance(step, Gather):
            return self.gather(step)
        if isinstance(step, Encode):
            return self.encode(step)
        if isinstance(step, LearnOnline):
            return self.learn_online(step.name, step)
        assert isinstance(step, Learn)
        return self._learned(step) or self.fit_batches(
            self.stage(
                step.name,
                step.learner,
                {part: self.rows(rows) for part, rows in step.rows.items()},
                step.classes,
            ),
            step.state,
        )

    def remembered(self, step: Remember) -> Mapping[str, np.ndarray]:
        """The arrays that the run began with: the given ones, unless it began before."""
        name = f"{self.kind}_{step.name}"
        kept = self.store.load_result(name) if self.store else None
        if kept is None:
            if step.about:
                self.callbacks.on_stage({"stage": name, **step.about})
            kept = {"arrays": dict(step.value())}
            if self.store:
                self.store.save_result(name, kept)
        return kept["arrays"]

    def mapped(self, name: str, step: Map) -> Rows:
        """The rows behind one more map, which is done when a pass first needs them."""
        if self.store is not None:
            # Where an interrupted run has done it and nothing is left that wants them, they go all the same.
            self.leaves(self.scratch().at(f"{name}.zarr"))
        return replace(step.rows, maps=(*step.rows.maps, (name, step.row_map)))

    def _learned(self, step: Learn) -> LoopResult | None:
        """What a fit that was done before left: its rows need not be mapped again."""
        name = f"{self.kind}_{step.name}"
        found = self.store.latest_state(name) if self.store else None
        if found is None or not step.learner.is_done(found[1]):
            return None
        assert self.store is not None
        history = self.store.load_history(name, found[0])
        if not history or history[-1]["pass"] < found[0]:  # the loop knows how to make up for a lost line
            return None
        record = {"record": history[-1], "history": history}
        self.callbacks.on_event({"event": "resumed", "stage": name, "pass": found[0], **record})
        return LoopResult(found[1], history)

    def rows(self, rows: Rows | Dataset) -> Dataset:
        """The rows behind all their maps, written when they are first needed; masks are the caller's."""
        if isinstance(rows, Dataset):
            return rows
        dataset = rows.dataset
        key: tuple[int | str, ...] = (id(dataset),)
        for name, row_map in rows.maps:
            key = (*key, name)
            if key not in self._mapped:
                self._mapped[key] = self.map(name, row_map, dataset)
            dataset = self._mapped[key]
        return dataset

    # -- verbs -----------------------------------------------------------------------------------------------

    def stage(
        self, name: str, work: Work, datasets: Mapping[str, Dataset], classes: np.ndarray | None = None
    ) -> Stage:
        """A stage with the fit's grids and device."""
        return make_stage(f"{self.kind}_{name}", work, datasets, self.device, classes, **self.grid)

    @property
    def grid(self) -> dict[str, Any]:
        """The arguments of ``make_stage`` about blocks and leaves."""
        return {**select_grid_options(self.options), "card_blocks": self._card_blocks}

    def collect(
        self, name: str, reduction: Reduction, rows: Rows | Dataset, classes: np.ndarray | None = None
    ) -> Stats:
        """One pass of one reduction; remembered."""
        layout: Layout = reduction.layout()
        kept = self.store.load_result(f"{self.kind}_{name}") if self.store else None
        if kept is not None:
            return Stats(layout, kept["vector"])
        stage = self.stage(name, {"train": reduction}, {"train": self.rows(rows)}, classes)
        self.callbacks.on_stage({"stage": stage.name, "rows": stage.rows})
        stats = self.executor.collect(stage, Progress(self.callbacks, stage.name, 0))["train"]
        if self.store:
            self.store.save_result(f"{self.kind}_{name}", {"vector": np.array(stats.vector)})
        return stats

    def map(self, name: str, row_map: RowMap, dataset: Dataset) -> Dataset:
        """Rows through a map, written once to scratch (in memory where the rows are in memory)."""
        stage = f"{self.kind}_{name}"
        self.callbacks.on_stage({"stage": stage, "rows": len(dataset)})
        progress = Progress(self.callbacks, stage, 0)
        if self.client is None and not dataset.is_stored:
            return self._map_in_memory(row_map, dataset, progress)
        place = self.scratch().at(f"{name}.zarr")
        self.leaves(place)
        task = start_map(stage, dataset, row_map, place.url, self.device, resume=True)
        out = map_rows(self.executor, task, progress)
        self.executor.quarantine.exclude_mapped(dataset, out)
        return out

    def _map_in_memory(self, row_map: RowMap, dataset: Dataset, progress: Progress) -> Dataset:
        out = map_to_array(row_map, dataset, self.device, self.n_jobs, progress)
        y = dataset.read_y(0, len(dataset)) if dataset.has_y else None
        weight = dataset.read_weight(0, len(dataset)) if dataset.has_weight else None
        return Dataset.from_arrays(out, y, sample_weight=weight)

    def fit_batches(self, stage: Stage, state: object) -> LoopResult:
        """Run a batch learner to its end."""
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

    # -- learning by steps -----------------------------------------------------------------------------------

    def learn_online(self, name: str, step: LearnOnline) -> LoopResult:
        """Run an online learner to its end."""
        order, work, options = step.order(self.options), step.learner, self.options
        callbacks, every = list(self.callbacks.callbacks), options.get("checkpoint_steps")
        datasets = {part: self._weighed(rows) for part, rows in step.rows.items()}
        cleaner = None
        if step.keeps_leaves:
            assert self.store is not None, "Begin asks for records"
            folder, run = self.store.ref
            work = KeptLeaves(step.learner, folder, f"{self.kind}_{name}", run)
            cleaner = DropLeaves(work)
            callbacks, every = [*callbacks, cleaner], every or order.n_steps
        elif order.buffer_rows < order.segment(0)[1]:
            # Not for leaves, whose totals are over all rows: their order does not matter.
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

    def _weighed(self, rows: Rows) -> Dataset:
        """The rows; those that a mask leaves out weigh 0."""
        dataset, mask = self.rows(rows), rows.mask
        if mask is None:
            return dataset
        weight = dataset.read_weight(0, len(dataset)) if dataset.has_weight else None
        weight = np.ones(len(dataset)) if weight is None else weight.copy()
        weight[mask.start : mask.stop] = 0
        name = "-".join([*(name for name, _ in rows.maps), f"without-{mask.start}-{mask.stop}"])
        return self.visible(name, dataset.with_weight(weight))

    # -- layers ----------------------------------------------------------------------------------------------
    # A finished step leaves a record, so that a resumed fit neither looks at what it wrote nor misses what
    # has gone since.

    @property
    def _records(self) -> EngineStore:
        assert self.store is not None, "Begin asks for records"
        return self.store

    def gather(self, step: Gather) -> StoredSets:
        """Sets of rows, in the run folder's ``sets``."""
        stage = f"{self.kind}_{step.name}"
        kept = self._records.load_result(stage)
        place = self._records.place.at("sets").at(f"{step.name}.zarr")
        if not step.kept:
            self.leaves(place)
        if kept is None or (not step.kept and place.is_empty()):
            begin = time.perf_counter()
            dataset = self._rows(step.rows, stage)
            rows = step.sets.n_sets * step.sets.set_rows
            self.callbacks.on_stage({"stage": stage, "rows": rows, **step.about})
            task = start_sets(stage, dataset, step.sets, place.url, self.device)
            written = map_rows(self.executor, task, Progress(self.callbacks, stage, 0, **step.about))
            missing = find_places(step.sets, self.executor.quarantine.excluded_rows(dataset))
            kept = self._done(step, stage, written, begin, missing=list(missing))
        missing = tuple(int(i) for i in kept.get("missing", ()))
        return StoredSets(json.dumps(_spec(kept, place)), step.sets.set_rows, missing)

    def encode(self, step: Encode) -> Rows | None:
        """Rows through a map, tile by tile; None where a resumed fit needs them no more."""
        stage = f"{self.kind}_{step.name}"
        kept = self._records.load_result(stage)
        place = self._place(step.name, step.kept)
        if not step.kept:
            self.leaves(place)
        if kept is None:
            begin = time.perf_counter()
            dataset = self._rows(step.rows, stage)
            self.callbacks.on_stage({"stage": stage, "rows": len(dataset), **step.about})
            task = start_map(
                stage,
                dataset,
                step.row_map,
                place.url,
                self.device,
                with_labels=False,
                resume=True,
                compressor=None,
                **tile_layout(len(dataset), dataset.nbytes // len(dataset), step.row_map),
            )
            written = map_rows(self.executor, task, Progress(self.callbacks, stage, 0, **step.about))
            kept = self._done(step, stage, written, begin)
        for name in step.over:
            gone = self._place(name, False)
            if not gone.is_empty():
                gone.clear()
        return None if place.is_empty() else Rows(open_spec(_spec(kept, place)))

    def _rows(self, rows: Rows | None, stage: str) -> Dataset:
        if rows is None:
            raise RunError(
                f"{self._records.place.url}: the record of {stage} cannot be read, and the rows that it was "
                "made of are gone: start again in another run_dir"
            )
        return self.rows(rows)

    def _place(self, name: str, kept: bool) -> Location:
        # What stays lies with the run even where scratch is elsewhere.
        return codes_place(self._records.place, name) if kept else self.scratch().at(f"{name}.zarr")

    def _done(
        self, step: Gather | Encode, stage: str, written: Dataset, begin: float, **more: object
    ) -> dict[str, Any]:
        kept = {"spec": json.dumps(written.spec()), **more}
        self._records.save_result(stage, kept)
        seconds = round(time.perf_counter() - begin, 6)
        self.callbacks.on_event(
            {"event": "layer_written", "stage": stage, "rows": len(written), "seconds": seconds, **step.about}
        )
        return kept

    # -- end -------------------------------------------------------------------------------------------------

    def keep_records(self) -> None:
        """Before :meth:`begin`: have a folder for records (a temporary one) even where none was asked for."""
        if self.store is None:
            self.store = EngineStore(self._temporary())

    def finish(self) -> None:
        """The fit is done: temporary datasets go; records stay with the run."""
        for place in self._leftovers:
            with suppress(OSError):
                place.clear()
                place.remove_folders()


def _report_steps(wanted: int, n_steps: int) -> int | None:
    """Steps between so many records of an epoch; None where it is a short one."""
    return n_steps // wanted if wanted and n_steps >= 20 * wanted else None


def codes_place(records: Location, name: str) -> Location:
    """Where codes that stay lie among a fit's records."""
    return records.at("codes").at(f"{name}.zarr")


def tile_layout(n: int, row_bytes: int, row_map: CostedColumnMap) -> dict[str, Any]:
    """Rows and columns of the tiles of a map's output: a function of the rows and the map alone.

    Where there would be more than MAX_TASKS, tiles are wider; then higher.
    """
    (width,) = row_map.output()[0]
    strips = -(-n // max(choose_column_block_rows(row_bytes, row_map), -(-n // MAX_TASKS)))
    rows = -(-n // strips)
    work = rows * row_map.flops_per_row() + row_map.column_flops()
    wanted = min(TASK_FLOPS, max(LEAST_FLOPS, strips * width * work / TASKS))
    columns = max(1, min(round(wanted / work), width), -(-width // (MAX_TASKS // strips)))
    return {"shard_rows": rows, "tile_columns": columns}


def _spec(kept: dict[str, Any], place: Location) -> DatasetSpec:
    """Of a dataset that a step wrote: it lies in the run folder, which may have been moved since."""
    spec: DatasetSpec = json.loads(kept["spec"])
    return {**spec, "url": place.url}
