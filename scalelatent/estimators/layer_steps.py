"""How a session serves the steps of models that learn layer by layer: sets of rows, and codes."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from scalelatent.data import Dataset
from scalelatent.engine.batch_loop import Progress
from scalelatent.engine.mapwrite import map_rows, open_spec, parted_rows, start_map
from scalelatent.engine.rowsets import StoredSets, start_sets
from scalelatent.errors import RunError
from scalelatent.storage.disk import Location

from .steps import Encode, Gather, Rows

if TYPE_CHECKING:
    from .session import FitSession

# Of a task of a layer: about three seconds of a core. Where there is less to do than this for each of so many
# tasks, tasks are shorter, down to the least that is worth a file.
TASK_FLOPS, TASKS, LEAST_FLOPS = 2e11, 16, 5e9


class LayerSteps:
    """Serves :class:`.steps.Gather` and :class:`.steps.Encode`.

    A finished step leaves a record, so that a resumed fit neither looks at what it wrote nor misses what has
    gone since.

    Parameters
    ----------
    session : FitSession
        With a run folder.
    """

    def __init__(self, session: FitSession) -> None:
        self._session = session
        assert session.store is not None, "Begin asks for records"
        self._store = session.store

    def gather(self, step: Gather) -> StoredSets:
        """Sets of rows, in the run folder's ``sets``."""
        session, stage = self._session, f"{self._session.kind}_{step.name}"
        kept = self._store.load_result(stage)
        place = self._store.place.at("sets").at(f"{step.name}.zarr")
        if kept is None:
            begin = time.perf_counter()
            dataset = self._rows(step.rows, stage)
            rows = step.sets.n_sets * step.sets.set_rows
            session.callbacks.on_stage({"stage": stage, "rows": rows, **step.about})
            task = start_sets(stage, dataset, step.sets, place.url, session.device)
            written = map_rows(session.executor, task, Progress(session.callbacks, stage, 0, **step.about))
            kept = self._done(step, stage, written, begin)
        return StoredSets(json.dumps(_spec(kept, place)), step.sets.set_rows)

    def encode(self, step: Encode) -> Rows | None:
        """Rows through a map, tile by tile; None where a resumed fit has done it, and nobody wants them."""
        session, stage = self._session, f"{self._session.kind}_{step.name}"
        kept = self._store.load_result(stage)
        place = self._place(step.name, step.kept)
        if not step.kept:
            session.leaves(place)
        if kept is None:
            begin = time.perf_counter()
            dataset = self._rows(step.rows, stage)
            session.callbacks.on_stage({"stage": stage, "rows": len(dataset), **step.about})
            task = start_map(
                stage,
                dataset,
                step.row_map,
                place.url,
                session.device,
                with_labels=False,
                resume=True,
                compressor=None,
                **tile_layout(len(dataset), dataset.nbytes // len(dataset), step.row_map),
            )
            written = map_rows(session.executor, task, Progress(session.callbacks, stage, 0, **step.about))
            kept = self._done(step, stage, written, begin)
        for name in step.over:
            gone = self._place(name, False)
            if not gone.is_empty():
                gone.clear()
        return None if place.is_empty() else Rows(open_spec(_spec(kept, place)))

    def _rows(self, rows: Rows | None, stage: str) -> Dataset:
        if rows is None:
            raise RunError(
                f"{self._store.place.url}: the record of {stage} cannot be read, and the rows that it was "
                "made of are gone: start anew in another run_dir"
            )
        return self._session.rows(rows)

    def _place(self, name: str, kept: bool) -> Location:
        # What stays lies with the run even where scratch is elsewhere.
        return codes_place(self._store.place, name) if kept else self._session.scratch().at(f"{name}.zarr")

    def _done(self, step: Gather | Encode, stage: str, written: Dataset, begin: float) -> dict[str, Any]:
        kept = {"spec": json.dumps(written.spec())}
        self._store.save_result(stage, kept)
        seconds = round(time.perf_counter() - begin, 6)
        self._session.callbacks.on_event(
            {"event": "layer_written", "stage": stage, "rows": len(written), "seconds": seconds, **step.about}
        )
        return kept


def codes_place(records: Location, name: str) -> Location:
    """Where codes that stay lie among a fit's records."""
    return records.at("codes").at(f"{name}.zarr")


def tile_layout(n: int, row_bytes: int, row_map: Any) -> dict[str, Any]:
    """Rows and columns of the tiles of a map's output: a function of the rows and the map alone.

    Rows as many as memory holds, so that columns are prepared seldom; columns such that a task takes a few
    seconds, or less where there is little to do.
    """
    (width,) = row_map.output()[0]
    strips = -(-n // parted_rows(row_bytes, row_map))
    rows = -(-n // strips)
    work = rows * row_map.flops_per_row() + row_map.column_flops()
    wanted = min(TASK_FLOPS, max(LEAST_FLOPS, strips * width * work / TASKS))
    columns = max(1, min(round(wanted / work), width))
    return {"shard_rows": rows, "tile_columns": columns}


def _spec(kept: dict[str, Any], place: Location) -> dict[str, Any]:
    """Of a dataset that a step wrote: it lies in the run folder, which may have been moved since."""
    return {**json.loads(kept["spec"]), "url": place.url}
