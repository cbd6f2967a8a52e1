"""The engine's folder of a run: what a resume, and every worker, needs to find."""

from __future__ import annotations

import json
import re
import uuid
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from scalelatent.errors import RunError
from scalelatent.storage.disk import Location, locate
from scalelatent.storage.linelog import LineLog
from scalelatent.storage.record import read_record, write_record

from .passes import Span, Stage
from .resume_identity import differences

KEEP_STATES = 3
_STATE = re.compile(r"state-(?P<stage>.+)-(?P<iteration>\d{6,})\.rec")
_DURABLE = re.compile(r"durable-(?P<stage>.+)-(?P<iteration>\d{6,})")
_NODE = re.compile(
    r"node-(?P<stage>.+)-(?P<iteration>\d{6,})-(?P<part>.+)-(?P<level>\d+)-(?P<index>\d+)\.rec"
)


class EngineStore:
    """Records of one run in one folder."""

    def __init__(self, folder: str | Path | Location, run: str | None = None) -> None:
        self.place = locate(folder)
        self._run = run
        self._histories: dict[str, LineLog] = {}
        if run is not None:
            return
        try:
            self.place.make()
        except OSError as error:
            raise RunError(
                f"cannot make the run folder {self.place.url}: {error}; choose another `run_dir`"
            ) from error

    @cached_property
    def ref(self) -> tuple[str, str]:
        """(url of the folder, id of this run): what a task needs to find the records."""
        kept = self.place.read("run-id")
        if kept is None:
            kept = uuid.uuid4().hex[:12].encode()
            self.write_bytes("run-id", kept)
        return self.place.url, kept.decode()

    @property
    def folder(self) -> Path:
        """Path of a folder on a disk."""
        path = self.place.local_path("")
        if path is None:
            raise RunError(f"{self.place.url} is not a folder on a disk")
        return Path(path)

    @property
    def scratch(self) -> Location:
        """Place of temporary datasets."""
        return self.place.at("scratch")

    # -- records ---------------------------------------------------------------------------------------------

    def write(self, name: str, tree: object, *, durable: bool = True) -> int:
        self._check_run(name)
        return write_record(self.place, name, tree, durable=durable)

    def read(self, name: str) -> Any:
        return read_record(self.place, name)

    def names(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        """What lies here under names that fit wholly, in order."""
        return [m for name in self.place.keys("") if (m := pattern.fullmatch(name))]

    def remove(self, name: str) -> None:
        """Remove a record; none there is no error."""
        self.place.delete(name)

    # -- identity: a folder belongs to one fit ---------------------------------------------------------------

    def claim(self, identity: dict[str, Any], resume: bool) -> None:
        """Bind the folder to a fit, or check that it is bound to this one."""
        kept = self.identity()
        if kept is not None:
            if not resume:
                raise RunError(
                    f"{self.place.url} already holds a fit: go on with it by resume=True (`scalelatent "
                    "resume`), or choose another run_dir"
                )
            changed = differences(kept, identity)
            if changed:
                raise RunError(
                    f"{self.place.url} holds another fit ({'; '.join(changed)}): resume with the same job "
                    "and data, or choose another run_dir"
                )
            return
        self.write_bytes("identity.json", json.dumps(identity, indent=1, sort_keys=True).encode())

    def identity(self) -> dict[str, Any] | None:
        """What :meth:`claim` bound the folder to, or None."""
        text = self.place.read("identity.json")
        try:
            return None if text is None else dict(json.loads(text))
        except (ValueError, TypeError):
            raise RunError(
                f"{self.place.name_of('identity.json')} is damaged, so it is not known which rows and "
                "parameters the checkpoints beside it belong to: put it back, or choose another run_dir"
            ) from None

    # -- stages and results ----------------------------------------------------------------------------------

    def save_stage(self, stage: Stage) -> None:
        """Constants of a stage, for the workers; datasets by reference."""
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
        """The stage as :meth:`save_stage` wrote it."""
        from scalelatent.data import Dataset

        tree = self.read(f"stage-{name}.rec")
        datasets = {part: Dataset.from_spec(json.loads(text)) for part, text in tree["datasets"].items()}
        skipped = {part: tuple(map(tuple, rows)) for part, rows in json.loads(tree["skipped"]).items()}
        how = tree["device"], tree["classes"], skipped, tree.get("cache")
        return Stage(tree["name"], tree["work"], datasets, tree["grids"], *how)

    def save_result(self, name: str, tree: object) -> None:
        """The result of a finished stage; its presence marks the stage as done."""
        self.write(f"result-{name}.rec", tree)

    def load_result(self, name: str) -> Any | None:
        """The result, or None where the stage is not done; a torn record counts as not done."""
        try:
            return self.read(f"result-{name}.rec")
        except RunError:
            return None

    def drop_result(self, name: str) -> None:
        self.remove(f"result-{name}.rec")

    # -- states ----------------------------------------------------------------------------------------------

    def state_path(self, stage: str, iteration: int) -> str:
        """Path or address of a state's record."""
        return self.place.name_of(_state_name(stage, iteration))

    def save_state(self, stage: str, iteration: int, state: object, durable: bool) -> None:
        """Write a state, and drop all but the newest few and the newest durable one."""
        # A durable state is replaced by a durable one only.
        states, marks = self._states(stage)
        durable = durable or iteration in marks
        self.write(_state_name(stage, iteration), state, durable=durable)
        if durable:
            self._mark_durable(stage, iteration, marks)
            marks = [iteration]
        kept = {*sorted({*states, iteration})[-KEEP_STATES:], *marks[-1:]}
        for old in states:
            if old not in kept:
                self.remove(_state_name(stage, old))

    def make_durable(self, stage: str, iteration: int) -> bool:
        """Make a state outlive a power failure where it lies; False where there is none."""
        name = _state_name(stage, iteration)
        self._check_run(name)
        try:
            self.place.sync(name)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._unwritable(name, error) from error
        self._mark_durable(stage, iteration, self._states(stage)[1])
        return True

    def _mark_durable(self, stage: str, iteration: int, before: list[int]) -> None:
        """Note that a state is durable; marks of others go, and with them what kept those states."""
        if iteration not in before:
            self.write_bytes(_durable_name(stage, iteration), b"durable\n", durable=True)
        for old in before:
            if old != iteration:
                self.remove(_durable_name(stage, old))

    def _states(self, stage: str) -> tuple[list[int], list[int]]:
        """(iterations of all states, of durable ones), in order, from one listing of the folder."""
        names = self.place.keys("")
        found = [[m for name in names if (m := pattern.fullmatch(name))] for pattern in (_STATE, _DURABLE)]
        states, marks = (sorted(int(m["iteration"]) for m in ms if m["stage"] == stage) for ms in found)
        return states, marks

    def load_state(self, stage: str, iteration: int) -> Any:
        return self.read(_state_name(stage, iteration))

    def latest_state(self, stage: str) -> tuple[int, Any, list[str]] | None:
        """(iteration, state, messages about unreadable newer ones), or None where there is none."""
        messages: list[str] = []
        for iteration in reversed(self.iterations(stage)):
            try:
                return iteration, self.load_state(stage, iteration), messages
            except RunError as error:
                messages.append(f"{error}; falling back to the checkpoint before it")
        return None

    def iterations(self, stage: str) -> list[int]:
        """Passes after which a state was kept, in order."""
        return self._states(stage)[0]

    def drop_stage(self, stage: str) -> None:
        """Forget constants and states of a stage that is done; its history stays."""
        states, marks = self._states(stage)
        for iteration in states:
            self.remove(_state_name(stage, iteration))
        for iteration in marks:
            self.remove(_durable_name(stage, iteration))
        self.remove(f"stage-{stage}.rec")

    # -- finished spans of the pass in progress --------------------------------------------------------------

    def save_node(self, stage: str, iteration: int, span: Span, vector: np.ndarray) -> None:
        """Keep the vector of a finished span until its pass is done."""
        self.write(_node_name(stage, iteration, span), vector, durable=False)

    def nodes(self, stage: str, iteration: int) -> list[Span]:
        """Spans of the pass that are done."""
        return [
            Span(m["part"], int(m["level"]), int(m["index"]))
            for m in self.names(_NODE)
            if m["stage"] == stage and int(m["iteration"]) == iteration
        ]

    def load_node(self, stage: str, iteration: int, span: Span, length: int) -> np.ndarray | None:
        try:
            vector = self.read(_node_name(stage, iteration, span))
        except RunError:
            return None
        return vector if np.shape(vector) == (length,) else None

    def drop_nodes(self, upto: int | None = None) -> None:
        """Forget finished spans: their pass is done. The next one (``iteration > upto``) may have begun."""
        for match in self.names(_NODE):
            if upto is None or int(match["iteration"]) <= upto:
                self.remove(match[0])

    # -- history ---------------------------------------------------------------------------------------------

    def append_history(self, stage: str, record: dict[str, Any]) -> None:
        """One line a pass."""
        name = f"history-{stage}.jsonl"
        self._check_run(name)
        try:
            self._history(name).append(json.dumps(record).encode())
        except OSError as error:
            raise self._unwritable(name, error) from error

    def load_history(self, stage: str, upto: int, key: str = "pass") -> list[dict[str, Any]]:
        """Records of passes 1 .."""
        name = f"history-{stage}.jsonl"
        log, kept = self._history(name), {}
        for line in log.lines():
            try:
                record = json.loads(line)
                number = record[key]
                if number <= upto:
                    kept[number] = record
            except (ValueError, TypeError, KeyError):  # a damaged line
                continue
        records = [kept[k] for k in sorted(kept)]
        try:
            log.rewrite([json.dumps(record).encode() for record in records])
        except OSError as error:
            raise self._unwritable(name, error) from error
        return records

    def _history(self, name: str) -> LineLog:
        return self._histories.setdefault(name, LineLog(self.place, name))

    def write_bytes(self, name: str, data: bytes, durable: bool = False) -> None:
        """Write what is not a record: it has a form of its own."""
        self._check_run(name)
        try:
            self.place.write(name, data, durable=durable)
        except OSError as error:
            raise self._unwritable(name, error) from error

    def _check_run(self, name: str) -> None:
        """Before a task writes: a task may outlive its run, and the folder belong to another by then."""
        if self._run is None:
            return
        try:
            there = self.place.read("run-id")
        except OSError as error:
            raise self._unwritable(name, error) from error
        if there != self._run.encode():
            state = "was removed" if there is None else f"belongs to run {there.decode()} now"
            raise RunError(
                f"{self.place.url} {state}, and this is a task of run {self._run}: {name} was not written. "
                "If that run is still wanted, start it again in a folder of its own"
            )

    def _unwritable(self, name: str, error: OSError) -> RunError:
        return RunError(
            f"cannot write {self.place.name_of(name)}: {error}. Free space or put the place right, then "
            "resume the run; checkpoints are kept"
        )


def _state_name(stage: str, iteration: int) -> str:
    return f"state-{stage}-{iteration:06d}.rec"


def _durable_name(stage: str, iteration: int) -> str:
    return f"durable-{stage}-{iteration:06d}"


def _node_name(stage: str, iteration: int, span: Span) -> str:
    return f"node-{stage}-{iteration:06d}-{span.part}-{span.level}-{span.index}.rec"
