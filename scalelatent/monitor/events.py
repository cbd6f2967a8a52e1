"""Callback that writes the files of a run folder: ``metrics.jsonl``, ``events.jsonl``, ``state.json``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scalelatent.engine.callbacks import Callback

from .messages import ERRORS

if TYPE_CHECKING:
    from scalelatent.jobs.runfolder import RunFolder

STATE_SECONDS = 0.5  # minimum time between two writes of ``state.json`` at the ends of passes
METRICS = "metrics.jsonl"


class RunLog(Callback):
    """Callback that logs one metrics record per pass and all events, and keeps ``state.json`` up to date.

    A resumed run repeats the passes after its checkpoint; the old records of these passes are dropped.
    ``state.json`` is synced to disk, so passes update it at most every half second.
    """

    keeps_run_folder = True

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._first = True
        self._written = float("-inf")
        self._last: Mapping[str, Any] = {}
        self._fit: dict[str, Any] = {}  # in a search: the number of the current fit, added to each record

    def on_fit_start(self, info: dict[str, Any]) -> None:
        self.folder.event("fit_started", **_scalars(info))

    def on_pass_end(self, record: dict[str, Any]) -> None:
        if self._first:
            self._first = False
            self._drop_repeated(record)
        self.folder.append(METRICS, {**record, **self._fit})
        now = time.monotonic()
        if now - self._written >= STATE_SECONDS:
            self._written = now
            self._write_state(record)
        self._last = record

    def on_stage(self, info: dict[str, Any]) -> None:
        self.folder.event("stage", **_scalars(info))
        self.folder.update_state(stage=info.get("stage"))

    def on_event(self, info: dict[str, Any]) -> None:
        """Log an event of the engine, for example a lost worker."""
        if info.get("event") == "resumed" and info.get("record"):
            self._first = False
            self._last = info["record"]
            self._drop_repeated(self._last)
            self.folder.append(METRICS, {**self._last, **self._fit})
        if info.get("event") in ("candidate", "candidate_scored"):
            self._fit = {"fit": info["fit"]} if info["event"] == "candidate" else {}
        self.folder.event(str(info.get("event", "note")), **_scalars(info))
        if info.get("event") == "shard_quarantined":
            state = self.folder.read_state()
            rows = int(state.get("quarantined_rows") or 0) + int(info["rows"])
            shards = int(state.get("quarantined_shards") or 0) + 1
            self.folder.update_state(quarantined_shards=shards, quarantined_rows=rows)

    def on_checkpoint(self, info: dict[str, Any]) -> None:
        self.folder.event("checkpoint", **_scalars(info))

    def on_fit_end(self, info: dict[str, Any]) -> None:
        """Log the end of the fit and write the numbers of the last pass to ``state.json``."""
        self.write_last_pass()
        self.folder.event("fit_ended", **_scalars(info))

    def write_last_pass(self) -> None:
        """Write the numbers of the last pass to ``state.json``, also after an interrupted fit."""
        if self._last:
            self._write_state(self._last)

    def _write_state(self, record: Mapping[str, Any]) -> None:
        changes = {"pass": record.get("pass"), "objective": record.get("objective")}
        for key in ("stage", *ERRORS):
            if record.get(key) is not None:
                changes[key] = record[key]
        self.folder.update_state(**changes)

    def _drop_repeated(self, record: Mapping[str, Any]) -> None:
        """Drop the records of this pass and later passes, which an earlier start of the run has written."""
        old = self.folder.records(METRICS)
        here = (record.get("stage"), record.get("pass"), self._fit.get("fit"))
        for index, earlier in enumerate(old):
            if (earlier.get("stage"), earlier.get("pass"), earlier.get("fit")) == here:
                self.folder.keep_records(METRICS, index)
                return


def _scalars(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scalar values for one line of a log, without the reserved keys ``time`` and ``event``."""
    simple = (str, int, float, bool, type(None))
    found = {}
    for key, value in info.items():
        value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
        if isinstance(value, simple) and key not in ("time", "event"):
            found[key] = value
    return found
