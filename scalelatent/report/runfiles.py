"""Files of a run folder that a report reads. Missing and damaged files become notes on the page."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from scalelatent.data.feature_names import check_names
from scalelatent.errors import DataError, ScalelatentError
from scalelatent.storage.disk import Location, locate
from scalelatent.storage.linelog import LineLog

if TYPE_CHECKING:
    from scalelatent.data import Dataset

Found = TypeVar("Found")

_LINKED_FILES = (
    ("job.json", "the job with all values"),
    ("state.json", "state of the run"),
    ("search.json", "scores of all candidates"),
    ("metrics.jsonl", "one record per pass"),
    ("events.jsonl", "events with their times"),
    ("model.zarr", "the fitted model"),
)


@dataclass
class RunFiles:
    """Content of the files of a run folder; empty for missing files."""

    place: Location
    job: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)  # one record per pass
    events: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # one sentence per missing or damaged file
    search: dict[str, Any] = field(default_factory=dict)  # results of a search; empty for other runs

    def event(self, name: str) -> dict[str, Any]:
        """Return the last event with this name, or an empty dict."""
        return next((e for e in reversed(self.events) if e.get("event") == name), {})

    def collect(
        self, data: Dataset | None, left_out: str, collect: Callable[[Dataset], Found], what: str = "rows"
    ) -> Found | None:
        """Return ``collect(data)``; without rows, or after a read error, add a note to the page instead."""
        if data is None:
            self.notes.append(f"The report was made without {what}: {left_out}.")
            return None
        try:
            return collect(data)
        except ScalelatentError as error:
            # The page still shows the history if the rows are damaged or moved.
            self.notes.append(f"The {what} could not be read, so the page has no figures of them: {error}")
            return None

    def links(self) -> list[tuple[str, str]]:
        """Return (path relative to the report folder, description) of the existing files."""
        there = self.place.keys("")
        return [(f"../{name}", text) for name, text in _LINKED_FILES if name in there]

    def settings(self) -> list[tuple[str, list[tuple[str, str, str]]]]:
        """Return (section, [(key, value, origin)]) of ``job.json``; the origin says what set the value."""
        origins = self.job.get("origins", {})
        found = []
        for section, values in self.job.items():
            if isinstance(values, Mapping) and section != "origins":
                rows = [
                    (k, _format_value(v), str(origins.get(f"{section}.{k}", "default")))
                    for k, v in values.items()
                ]
                found.append((section, rows))
        return found


def read_run(folder: str | os.PathLike[str]) -> RunFiles:
    """Read the files of a run folder that a report is made from."""
    run = RunFiles(locate(folder))
    run.job = _read_json(run, "job.json", "the settings of the job are unknown")
    run.state = _read_json(run, "state.json", None)
    run.search = _read_json(run, "search.json", None)
    run.history = _read_lines(run, "metrics.jsonl", "there are no curves of the passes")
    run.history = [record for record in run.history if record.get("pass") is not None]
    if not run.history and run.place.has("metrics.jsonl"):
        run.notes.append("metrics.jsonl contains no pass: there are no curves of the passes.")
    run.events = _read_lines(run, "events.jsonl", None)
    return run


def _read_json(run: RunFiles, name: str, loss: str | None) -> dict[str, Any]:
    try:
        content = run.place.read(name)
        if content is not None:
            return dict(json.loads(content))
        if loss:
            run.notes.append(f"{name} is missing: {loss}.")
    except (OSError, ValueError, TypeError) as error:
        run.notes.append(f"{name} cannot be read ({error})" + (f": {loss}." if loss else "."))
    return {}


def _read_lines(run: RunFiles, name: str, loss: str | None) -> list[dict[str, Any]]:
    log = LineLog(run.place, name)
    lines = log.lines()
    if not lines and loss and not log.exists():
        run.notes.append(f"{name} is missing: {loss}.")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                found.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            run.notes.append(f"{name}: line {number} is damaged and was skipped.")
    return found


def _format_value(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def check_features(data: Dataset, model: Any) -> None:
    """Raise an error if the rows do not have the number of features, or the names, of the fit of a model."""
    n_features = model.n_features_in_
    if data.n_features != n_features:
        raise DataError(
            f"{data.url or 'the data'} has {data.n_features} features per row, but the model was fitted to "
            f"rows of {n_features} features; give rows with {n_features} features"
        )
    check_names(model, data.feature_names)
