"""The engine's folder of a run: what a resume, and every worker, needs to find.

``stage-*`` constants of a stage; ``state-*`` states between passes; ``node-*`` finished spans of the pass in
progress; ``result-*`` what a finished stage left; ``history-*`` one line a pass. Everything is a checksummed
record written aside and renamed, and may be written twice; the newest readable state wins.
"""

from __future__ import annotations

import json
import os
import re
import threading
import uuid
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from scalelatent.errors import RunError

from .passes import Span, Stage
from .record import read_record, write_record

KEEP_STATES = 3
_STATE = re.compile(r"state-(?P<stage>.+)-(?P<iteration>\d{6,})\.rec")
_NODE = re.compile(
    r"node-(?P<stage>.+)-(?P<iteration>\d{6,})-(?P<part>.+)-(?P<level>\d+)-(?P<index>\d+)\.rec"
)


class EngineStore:
    """Records of one run in one folder.

    Parameters
    ----------
    folder : path
        Made where it is missing.

    Raises
    ------
    RunError
        The folder cannot be made.

    Examples
    --------
    >>> import tempfile
    >>> store = EngineStore(tempfile.mkdtemp())
    >>> store.save_result("answer", {"value": 42})
    >>> store.load_result("answer")["value"]
    42
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"cannot make the run folder {self.folder}: {error}; choose another `run_dir`"
            ) from error

    @cached_property
    def ref(self) -> tuple[str, str]:
        """(folder, id of this run): what a task needs to find the records."""
        path = self.folder / "run-id"
        if not path.exists():
            path.write_text(uuid.uuid4().hex[:12])
        return str(self.folder), path.read_text()

    @property
    def scratch(self) -> Path:
        """Folder of temporary datasets."""
        return self.folder / "scratch"

    # -- identity: a folder belongs to one fit ---------------------------------------------------------------

    def claim(self, identity: dict[str, Any], resume: bool) -> None:
        """Bind the folder to a fit, or check that it is bound to this one.

        Raises
        ------
        RunError
            The folder holds another fit, or holds this one and ``resume`` is False.
        """
        path = self.folder / "identity.json"
        if path.exists():
            kept = json.loads(path.read_text())
            if not resume:
                raise RunError(
                    f"{self.folder} already holds a fit: go on with it by resume=True (`scalelatent "
                    "resume`), or choose another run_dir"
                )
            changed = sorted(k for k in {*kept, *identity} if kept.get(k) != identity.get(k))
            if changed:
                raise RunError(
                    f"{self.folder} holds another fit: {', '.join(changed)} changed (was "
                    f"{[kept.get(k) for k in changed]}, is {[identity.get(k) for k in changed]}); resume "
                    "with the same job and data, or choose another run_dir"
                )
            return
        self._replace(path, json.dumps(identity, indent=1, sort_keys=True))

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
        }
        write_record(self.folder / f"stage-{stage.name}.rec", tree, durable=False)

    def load_stage(self, name: str) -> Stage:
        """The stage as :meth:`save_stage` wrote it."""
        from scalelatent.data import Dataset

        tree = read_record(self.folder / f"stage-{name}.rec")
        datasets = {part: Dataset.from_spec(json.loads(text)) for part, text in tree["datasets"].items()}
        return Stage(tree["name"], tree["work"], datasets, tree["grids"], tree["device"], tree["classes"])

    def save_result(self, name: str, tree: Any) -> None:
        """What a finished stage leaves: its presence says that the stage is done."""
        write_record(self.folder / f"result-{name}.rec", tree)

    def load_result(self, name: str) -> Any | None:
        """The result, or None where the stage is not done; a torn record counts as not done."""
        try:
            return read_record(self.folder / f"result-{name}.rec")
        except RunError:
            return None

    def drop_result(self, name: str) -> None:
        """Forget a result."""
        (self.folder / f"result-{name}.rec").unlink(missing_ok=True)

    # -- states ----------------------------------------------------------------------------------------------

    def state_path(self, stage: str, iteration: int) -> Path:
        """File of a state."""
        return self.folder / f"state-{stage}-{iteration:06d}.rec"

    def save_state(self, stage: str, iteration: int, state: Any, durable: bool) -> None:
        """Write a state and drop all but the newest few."""
        write_record(self.state_path(stage, iteration), state, durable=durable)
        for old in self._iterations(stage)[:-KEEP_STATES]:
            self.state_path(stage, old).unlink(missing_ok=True)

    def load_state(self, stage: str, iteration: int) -> Any:
        """One state.

        Raises
        ------
        RunError
            Missing, torn or changed.
        """
        return read_record(self.state_path(stage, iteration))

    def latest_state(self, stage: str) -> tuple[int, Any, list[str]] | None:
        """(iteration, state, messages about unreadable newer ones), or None where there is none."""
        messages: list[str] = []
        for iteration in reversed(self._iterations(stage)):
            try:
                return iteration, self.load_state(stage, iteration), messages
            except RunError as error:
                messages.append(f"{error}; falling back to the checkpoint before it")
        return None

    def _iterations(self, stage: str) -> list[int]:
        found = (_STATE.fullmatch(path.name) for path in self.folder.glob("state-*.rec"))
        return sorted(int(m["iteration"]) for m in found if m and m["stage"] == stage)

    # -- finished spans of the pass in progress --------------------------------------------------------------

    def save_node(self, stage: str, iteration: int, span: Span, vector: np.ndarray) -> None:
        """Keep the vector of a finished span until its pass is done."""
        name = f"node-{stage}-{iteration:06d}-{span.part}-{span.level}-{span.index}.rec"
        write_record(self.folder / name, vector, durable=False)

    def nodes(self, stage: str, iteration: int) -> list[Span]:
        """Spans of the pass that are done."""
        found = (_NODE.fullmatch(path.name) for path in self.folder.glob("node-*.rec"))
        return [
            Span(m["part"], int(m["level"]), int(m["index"]))
            for m in found
            if m and m["stage"] == stage and int(m["iteration"]) == iteration
        ]

    def load_node(self, stage: str, iteration: int, span: Span) -> np.ndarray | None:
        """Vector of a finished span; None where it cannot be read (it is then computed again)."""
        try:
            return read_record(
                self.folder / f"node-{stage}-{iteration:06d}-{span.part}-{span.level}-{span.index}.rec"
            )
        except RunError:
            return None

    def drop_nodes(self) -> None:
        """Forget all finished spans: their pass is done."""
        for path in self.folder.glob("node-*.rec"):
            path.unlink(missing_ok=True)

    # -- history ---------------------------------------------------------------------------------------------

    def append_history(self, stage: str, record: dict[str, Any]) -> None:
        """One line a pass."""
        path = self.folder / f"history-{stage}.jsonl"
        try:
            with open(path, "a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise _unwritable(path, error) from error

    def load_history(self, stage: str, upto: int, key: str = "pass") -> list[dict[str, Any]]:
        """Records of passes 1 .. ``upto``; later lines (of passes that will be done again) are dropped from
        the file. Online fits count by ``key="steps"``.
        """
        path, kept = self.folder / f"history-{stage}.jsonl", {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except ValueError:  # the last line of a killed run
                    continue
                if record[key] <= upto:
                    kept[record[key]] = record
        records = [kept[k] for k in sorted(kept)]
        self._replace(path, "".join(json.dumps(r) + "\n" for r in records))
        return records

    def _replace(self, path: Path, text: str) -> None:
        aside = path.with_name(f".{path.name}.new")
        try:
            aside.write_text(text)
            os.replace(aside, path)
        except OSError as error:
            raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"cannot write {path}: {error}. Free space or fix the folder, then resume the run; "
        "checkpoints are kept"
    )


class RecentObjects:
    """The last few loaded stages and states of a process, so that its tasks read each file once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, load: Any) -> Any:
        """The object of a key, loaded by ``load()`` where it is not at hand."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        value = load()
        self.put(key, value)
        return value

    def put(self, key: Any, value: Any) -> None:
        """Keep an object."""
        with self._lock:
            self._kept[key] = value
            self._kept.move_to_end(key)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
