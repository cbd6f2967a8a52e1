"""Read and write the engine's files in a run folder: everything that a resume or a worker reads."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from scalelatent.errors import RunError
from scalelatent.storage.disk import Location, locate
from scalelatent.storage.linelog import LineLog
from scalelatent.storage.record import read_record, write_record

from .passes import Span, Stage
from .resume_identity import differences

KEEP_STATES = 3  # number of the newest states of a stage that stay in the run folder
_STATE = re.compile(r"state-(?P<stage>.+)-(?P<iteration>\d{6,})\.rec")
_DURABLE = re.compile(r"durable-(?P<stage>.+)-(?P<iteration>\d{6,})")
_NODE = re.compile(
    r"node-(?P<stage>.+)-(?P<iteration>\d{6,})-(?P<part>.+)-(?P<level>\d+)-(?P<index>\d+)\.rec"
)


class EngineStore:
    """Files of a run in its run folder; with ``run`` (an id), writing fails if the folder has another id."""

    def __init__(self, folder: str | Path | Location, run: str | None = None) -> None:
        self.location = locate(folder)
        self._run = run
        self._histories: dict[str, LineLog] = {}
        if run is not None:
            return
        try:
            self.location.make()
        except OSError as error:
            raise RunError(
                f"cannot create the run folder {self.location.url}: {error}; choose another `run_dir`"
            ) from error

    @cached_property
    def ref(self) -> tuple[str, str]:
        """(URL of the folder, id of this run), with which a task opens this store."""
        run_id = self.location.read("run-id")
        if run_id is None:
            run_id = uuid.uuid4().hex[:12].encode()
            self.write_bytes("run-id", run_id)
        return self.location.url, run_id.decode()

    @property
    def folder(self) -> Path:
        """Path of the run folder, which must be on a disk."""
        path = self.location.local_path("")
        if path is None:
            raise RunError(f"{self.location.url} is not a folder on a disk")
        return Path(path)

    @property
    def scratch(self) -> Location:
        """Folder within the run folder in which a fit stores temporary datasets."""
        return self.location.at("scratch")

    # -- records ---------------------------------------------------------------------------------------------

    def write(self, name: str, tree: object, *, durable: bool = True) -> int:
        with self._writing(name):
            return write_record(self.location, name, tree, durable=durable)

    def read(self, name: str) -> Any:
        return read_record(self.location, name)

    def match_names(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        """Return the matches of all file names that match the whole pattern, in order."""
        return [m for name in self.location.keys("") if (m := pattern.fullmatch(name))]

    def remove(self, name: str) -> None:
        """Remove the file ``name`` from the run folder if it exists."""
        self.location.delete(name)

    # -- identity of the fit to which the folder belongs -----------------------------------------------------

    def claim(
        self, identity: dict[str, Any], resume: bool, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Store the description of a new fit; raise a RunError if the folder belongs to another fit.

        ``defaults`` are the values of parameters that one of the two descriptions may lack.
        """
        stored = self.identity()
        if stored is not None:
            if not resume:
                raise RunError(
                    f"{self.location.url} already holds a fit: resume it with resume=True (`scalelatent "
                    "resume`), or choose another run_dir"
                )
            changed = differences(stored, identity, defaults)
            if changed:
                raise RunError(
                    f"{self.location.url} holds another fit ({'; '.join(changed)}): resume with the same job "
                    "and data, or choose another run_dir"
                )
            return
        self.write_bytes("identity.json", json.dumps(identity, indent=1, sort_keys=True).encode())

    def identity(self) -> dict[str, Any] | None:
        """Return the description of the fit to which the folder belongs, which `claim` stored, or None."""
        text = self.location.read("identity.json")
        try:
            return None if text is None else dict(json.loads(text))
        except (ValueError, TypeError):
            raise RunError(
                f"{self.location.name_of('identity.json')} is damaged, so the rows and parameters of the "
                "checkpoints in this folder are unknown: restore the file, or choose another run_dir"
            ) from None

    # -- stages and results ----------------------------------------------------------------------------------

    def save_stage(self, stage: Stage) -> None:
        """Write a stage (learner and references to its datasets) to the run folder, for the workers."""
        tree = {
            "name": stage.name,
            "work": stage.work,
            "datasets": {part: json.dumps(ds.spec()) for part, ds in stage.datasets.items()},
            "grids": dict(stage.grids),
            "device": stage.device,
            "classes": stage.classes,
            "skipped": json.dumps(stage.skipped),
            "cache": stage.cache,
        }
        self.write(f"stage-{stage.name}.rec", tree, durable=False)

    def load_stage(self, name: str) -> Stage:
        """Return the stage (learner and datasets) that `save_stage` wrote."""
        from scalelatent.data import Dataset

        tree = self.read(f"stage-{name}.rec")
        datasets = {part: Dataset.from_spec(json.loads(text)) for part, text in tree["datasets"].items()}
        skipped = {part: tuple(map(tuple, rows)) for part, rows in json.loads(tree["skipped"]).items()}
        options = tree["device"], tree["classes"], skipped, tree.get("cache")
        return Stage(tree["name"], tree["work"], datasets, tree["grids"], *options)

    def save_result(self, name: str, tree: object) -> None:
        """Write the result of a stage, which also marks the stage as finished."""
        self.write(f"result-{name}.rec", tree)

    def load_result(self, name: str) -> Any | None:
        """Return the result of a stage; None if the stage is unfinished or the result's file is damaged."""
        try:
            return self.read(f"result-{name}.rec")
        except RunError:
            return None

    def drop_result(self, name: str) -> None:
        self.remove(f"result-{name}.rec")

    # -- states ----------------------------------------------------------------------------------------------

    def state_path(self, stage: str, iteration: int) -> str:
        """Return the path or URL of the file that stores the state of a stage after pass ``iteration``."""
        return self.location.name_of(_state_name(stage, iteration))

    def save_state(self, stage: str, iteration: int, state: object, durable: bool) -> None:
        """Write a state; remove all except the newest ``KEEP_STATES`` states and the newest durable state."""
        states, marks = self._list_states(stage)
        durable = durable or iteration in marks  # only a durable state may replace a durable state
        self.write(_state_name(stage, iteration), state, durable=durable)
        if durable:
            self._mark_durable(stage, iteration, marks)
            marks = [iteration]
        newest = {*sorted({*states, iteration})[-KEEP_STATES:], *marks[-1:]}
        for old in states:
            if old not in newest:
                self.remove(_state_name(stage, old))

    def make_durable(self, stage: str, iteration: int) -> bool:
        """Flush a state's file to survive a power failure; return False if there is no such file."""
        name = _state_name(stage, iteration)
        with self._writing(name):
            try:
                self.location.sync(name)
            except FileNotFoundError:
                return False
        self._mark_durable(stage, iteration, self._list_states(stage)[1])
        return True

    def _mark_durable(self, stage: str, iteration: int, before: list[int]) -> None:
        """Mark a state as durable (it survives a power failure); older durable states may then be removed."""
        if iteration not in before:
            self.write_bytes(_durable_name(stage, iteration), b"durable\n", durable=True)
        for old in before:
            if old != iteration:
                self.remove(_durable_name(stage, old))

    def _list_states(self, stage: str) -> tuple[list[int], list[int]]:
        """Return the sorted pass numbers of (all stored states, the states that are marked as durable)."""
        names = self.location.keys("")
        found = [[m for name in names if (m := pattern.fullmatch(name))] for pattern in (_STATE, _DURABLE)]
        states, marks = (sorted(int(m["iteration"]) for m in ms if m["stage"] == stage) for ms in found)
        return states, marks

    def load_state(self, stage: str, iteration: int) -> Any:
        return self.read(_state_name(stage, iteration))

    def latest_state(self, stage: str) -> tuple[int, Any, list[str]] | None:
        """Return the newest readable state as (pass, state, messages about newer damaged states), or None."""
        messages: list[str] = []
        for iteration in reversed(self.iterations(stage)):
            try:
                return iteration, self.load_state(stage, iteration), messages
            except RunError as error:
                messages.append(f"{error}; falling back to the previous checkpoint")
        return None

    def iterations(self, stage: str) -> list[int]:
        """Return the numbers of the passes after which the states of a stage are stored, in order."""
        return self._list_states(stage)[0]

    def drop_stage(self, stage: str) -> None:
        """Remove the files of a finished stage (its datasets' references and states), but not its history."""
        states, marks = self._list_states(stage)
        for iteration in states:
            self.remove(_state_name(stage, iteration))
        for iteration in marks:
            self.remove(_durable_name(stage, iteration))
        self.remove(f"stage-{stage}.rec")

    # -- finished spans of the pass in progress --------------------------------------------------------------

    def save_node(self, stage: str, iteration: int, span: Span, vector: np.ndarray) -> None:
        """Write the statistic of a finished span (the rows of one task), for a resume in the same pass."""
        self.write(_node_name(stage, iteration, span), vector, durable=False)

    def nodes(self, stage: str, iteration: int) -> list[Span]:
        """Return the spans (ranges of rows, one per task) of a pass whose statistics are saved."""
        return [
            Span(m["part"], int(m["level"]), int(m["index"]))
            for m in self.match_names(_NODE)
            if m["stage"] == stage and int(m["iteration"]) == iteration
        ]

    def load_node(self, stage: str, iteration: int, span: Span, length: int) -> np.ndarray | None:
        try:
            vector = self.read(_node_name(stage, iteration, span))
        except RunError:
            return None
        return vector if np.shape(vector) == (length,) else None

    def drop_nodes(self, upto: int | None = None) -> None:
        """Remove the saved statistics of spans (ranges of rows) of all passes, or of those up to ``upto``."""
        for match in self.match_names(_NODE):
            if upto is None or int(match["iteration"]) <= upto:
                self.remove(match[0])

    # -- history ---------------------------------------------------------------------------------------------

    def append_history(self, stage: str, record: dict[str, Any]) -> None:
        """Append the record of a pass to the history of a stage."""
        name = f"history-{stage}.jsonl"
        with self._writing(name):
            self._history(name).append(json.dumps(record).encode())

    def load_history(self, stage: str, upto: int, key: str = "pass") -> list[dict[str, Any]]:
        """Return the history records whose ``key`` is at most ``upto``, in order; delete later records."""
        name = f"history-{stage}.jsonl"
        log, by_key = self._history(name), {}
        for line in log.lines():
            try:
                record = json.loads(line)
                if record[key] <= upto:
                    by_key[record[key]] = record
            except (ValueError, TypeError, KeyError):  # the line is damaged
                continue
        records = [by_key[k] for k in sorted(by_key)]
        with self._writing(name):
            log.rewrite([json.dumps(record).encode() for record in records])
        return records

    def _history(self, name: str) -> LineLog:
        return self._histories.setdefault(name, LineLog(self.location, name))

    def write_bytes(self, name: str, data: bytes, durable: bool = False) -> None:
        """Write a file that is not a record, such as JSON text."""
        with self._writing(name):
            self.location.write(name, data, durable=durable)

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Raise a RunError if the ``with`` statement cannot write the file ``name``.

        A task also gets this error if its run folder was removed, or belongs to another run now.
        """
        try:
            run_id = None if self._run is None else self.location.read("run-id")
            if self._run is not None and run_id != self._run.encode():
                state = "was removed" if run_id is None else f"belongs to run {run_id.decode()} now"
                raise RunError(
                    f"{self.location.url} {state}, and this is a task of run {self._run}: {name} was not "
                    "written. To repeat that run, start it again in its own folder"
                )
            yield
        except OSError as error:
            raise RunError(
                f"cannot write {self.location.name_of(name)}: {error}. Free some space or repair the "
                "storage, then resume the run; its checkpoints are safe"
            ) from error


def _state_name(stage: str, iteration: int) -> str:
    return f"state-{stage}-{iteration:06d}.rec"


def _durable_name(stage: str, iteration: int) -> str:
    return f"durable-{stage}-{iteration:06d}"


def _node_name(stage: str, iteration: int, span: Span) -> str:
    return f"node-{stage}-{iteration:06d}-{span.part}-{span.level}-{span.index}.rec"
