"""The run folder: all files that a job writes, which `status` and `resume` read.

::

    run/job.json        the resolved job
        state.json      {"id", "state", "pass", "objective", "error", "run", ...}
        metrics.jsonl   one record per pass
        events.jsonl    events with their times
        progress.json   progress of the current pass; not synced, and written at most once per second
        lock            the process that drives this run
        cancel          request to stop the run; the driver removes the file
        engine/         checkpoints and partial passes; private to the engine
        model.zarr      the fitted model
        report/         index.html and figures

The run folder is on a disk or in an object store. JSON files are replaced atomically, so that a reader finds
the old or the new file, also after a power cut. A killed writer may leave an incomplete last line in a
``.jsonl`` file: readers ignore the line, and the next append removes it. In an object store a long ``.jsonl``
file is split into several objects (see `scalelatent.storage.linelog`).

Times are ISO 8601 in UTC. ``seconds`` is the wall-clock time of the subject of a record: a pass in
metrics.jsonl, a checkpoint or a layer in its event, and the last execution of the job, with its scores and
its report, in state.json and the event ``state``. ``pass_seconds`` is the sum over passes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from scalelatent.errors import JobError, RunError
from scalelatent.monitor.messages import ERRORS
from scalelatent.monitor.times import time_text
from scalelatent.storage.disk import locate
from scalelatent.storage.linelog import LineLog
from scalelatent.storage.locks import Lock, find_lock
from scalelatent.storage.write_checks import describe_contents

from .spec import FORMAT, Job


def encode_json(value: Mapping[str, Any]) -> bytes:
    """Return a mapping as indented JSON text, encoded as UTF-8."""
    return (json.dumps(to_json_value(value), indent=2) + "\n").encode()


def to_json_value(value: Any) -> Any:
    """Convert numpy values and paths to JSON types; convert NaN and infinity, which JSON lacks, to None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


MAX_LOOKED = 100  # an error about a wrong folder looks for run folders in at most this many of its subfolders
STATES = ("queued", "running", "done", "failed", "cancelled")


def is_run_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path or address is a run folder, which contains the job of a run."""
    location = locate(path)
    if not location.has("job.json") or location.has("state.json"):
        return location.has("job.json")
    try:  # a driver may be killed before it writes the state
        return bool(json.loads(location.read("job.json") or b"{}")["format"] == FORMAT)
    except (ValueError, TypeError, KeyError):
        return False


class RunFolder:
    """One run folder; use `create` or `open` to get an instance."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.location = locate(path)
        self.url = self.location.url
        self._logs: dict[str, LineLog] = {}
        self._held: Lock | None = None

    def __repr__(self) -> str:
        return f"RunFolder({self.url!r})"

    @classmethod
    def create(cls, path: str | os.PathLike[str], job: Job) -> RunFolder:
        """Create a new run folder and write the job into it."""
        folder = cls.unused(path)
        folder._create_files(job)
        return folder

    @classmethod
    def unused(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Return a run folder that can be created; raise a `JobError` if its location contains files."""
        folder = cls(path)
        local = folder.location.local_path("")
        if local is not None and os.path.exists(local) and not os.path.isdir(local):
            raise JobError(f"output {folder.url} exists and is a file; choose another folder with --out")
        if not folder.location.is_empty():
            raise JobError(folder._describe_why_occupied())
        return folder

    def write_or_create(self, job: Job) -> None:
        """Write the job into an existing run folder, or create the run folder first."""
        if is_run_folder(self.url):
            self.write_job(job)
        else:
            self._create_files(job)

    def _create_files(self, job: Job) -> None:
        """Write job.json and state.json; raise a `JobError` if another process has written job.json."""
        location = self.location
        name = job.job.name or self.url.rstrip("/").rsplit("/", 1)[-1]
        # The first process that creates job.json owns the folder; a concurrent second process is refused.
        identity = f"{_slug(name)}-{secrets.token_hex(4)}"
        try:
            location.make()
            if not location.create("job.json", encode_json(job.to_dict() | {"id": identity})):
                raise JobError(self._describe_why_occupied())
            self._write_json("state.json", {
                "id": identity,
                "state": "queued",
                "starts": 0,
                "pass": 0,
                "objective": None,
                "error": None,
                "run": self.url,
                "kind": job.kind,
                "created": time_text(),
                "updated": time_text(),
            })  # fmt: skip
        except OSError as error:
            with suppress(OSError):  # later runs refuse a folder that contains job.json
                location.delete("job.json")
            raise JobError(
                f"output folder {self.url} cannot be written: {error.strerror or error}; "
                "choose another folder with --out"
            ) from error

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        folder = cls(path)
        if not is_run_folder(folder.url):
            parent, mark, _ = folder.url.rstrip("/").rpartition("/")
            inside = [f"{folder.url.rstrip('/')}/{name}" for name in folder.location.keys("")[:MAX_LOOKED]]
            near = next((url for url in (parent + mark, *inside) if url and is_run_folder(url)), None)
            raise JobError(
                f"{folder.url} {describe_contents(folder.location, 'a run folder')}; give "
                + (near or "the folder that [job] out of a job file, or run_dir in Python, names")
            )
        return folder

    @property
    def path(self) -> Path:
        """Local path of a run folder on a disk; a `JobError` for an object store."""
        path = self.location.local_path("")
        if path is None:
            raise JobError(
                f"run folder {self.url} is in an object store; this operation needs a folder on a disk"
            )
        return Path(path)

    @property
    def model_url(self) -> str:
        return self.location.name_of("model.zarr")

    @property
    def has_model(self) -> bool:
        return self.location.has("model.zarr/zarr.json")

    @property
    def report_url(self) -> str:
        return self.location.name_of("report/index.html")

    @property
    def has_report(self) -> bool:
        return self.location.has("report/index.html")

    @property
    def fit_began(self) -> bool:
        """True if the fit of this run has started, so that the folder may hold results."""
        return any(record.get("event") == "fit_started" for record in self.records("events.jsonl"))

    @property
    def id(self) -> str:
        return str(self.read_state()["id"])

    def read_job(self) -> Job:
        """Return the resolved job of this run."""
        name = self.location.name_of("job.json")
        damaged = (
            f"{name} is damaged, but the results of the run are intact; resume with the job file that "
            f"started it: scalelatent resume {self.url} --job JOB.toml"
        )
        try:
            stored = self._read_json("job.json")
        except JobError:
            if not self.location.has("job.json"):
                raise
            raise JobError(damaged) from None
        try:
            return Job.from_dict(stored, where=name)
        except JobError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise JobError(damaged) from error

    def write_job(self, job: Job) -> None:
        """Write the resolved job, once before the fit starts and again when a resume changes the job."""
        self._write_json("job.json", job.to_dict())

    def read_state(self) -> dict[str, Any]:
        """Return ``state.json``; report a running job whose process (driver) has ended as failed."""
        state = self._read_state()
        state["run"] = self.url  # the folder may have been moved
        if state.get("state") == "running":
            holder = find_lock(self.location, "lock").holder()
            if holder is None:
                host = f" on {state['driver']}" if state.get("driver") else ""
                state |= {"state": "failed", "driver_lost": True}
                for record in self.records("metrics.jsonl")[-1:]:  # it may be newer than state.json
                    keys = ("pass", "objective", *ERRORS)
                    state |= {key: record[key] for key in keys if record.get(key) is not None}
                state["error"] = state.get("error") or (
                    f"the driver{host} ended without a message (killed?); resume from the last checkpoint "
                    f"with: scalelatent resume {self.url}"
                )
        return state

    def begin(self, state: str, **values: object) -> int:
        """Record a start of the run with this state; return the number of the start."""
        start = int(self._read_state().get("starts", 0)) + 1
        self.update_state(state=state, starts=start, error=None, **values)
        return start

    def update_state(self, **changes: Any) -> dict[str, Any]:
        """Change some keys of ``state.json`` in one write; return the whole state."""
        if "state" in changes and changes["state"] not in STATES:
            raise ValueError(f"state {changes['state']!r} is not one of {', '.join(STATES)}")
        state = self._read_state() | changes | {"run": self.url, "updated": time_text()}
        self._write_json("state.json", state)
        return state

    def event(self, event: str, **values: object) -> None:
        """Append one event, with the current time, to ``events.jsonl``."""
        self.append("events.jsonl", {"time": time_text(), "event": event, **values})

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append one record as a line to a ``.jsonl`` file of this folder."""
        self._check_lock_is_held()
        self._log(name).append(json.dumps(to_json_value(record)).encode())

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a ``.jsonl`` file of this folder; skip damaged lines."""
        return [record for _, record in self._valid_lines(name)]

    def write_progress(self, values: Mapping[str, Any]) -> None:
        """Write the progress of the pass and the current time to ``progress.json``."""
        self.location.write("progress.json", encode_json({**values, "time": time_text()}))

    def read_progress(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self.location.read("progress.json") or b"{}"))
        except (ValueError, TypeError):
            return {}

    def keep_records(self, name: str, count: int) -> None:
        """Keep only the first ``count`` records of a ``.jsonl`` file; a resume repeats the others."""
        self._log(name).rewrite([line for line, _ in self._valid_lines(name)[:count]])

    def remove(self) -> None:
        with suppress(OSError):
            self.location.clear()

    def remove_if_unused(self, existed: bool) -> None:
        """Remove the run folder if its fit has not started; recreate it empty if it existed before."""
        with suppress(RunError, OSError), self.lock():
            if not self.fit_began:
                self.remove()
                if existed:
                    self.location.make()

    @contextmanager
    def lock(self, patience: float = 0.0, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
        """Lock the run folder, because two drivers of one folder would overwrite each other's files."""
        guard = find_lock(self.location, "lock", thread=threading.current_thread().name)
        deadline = time.monotonic() + patience
        while True:
            try:
                guard.acquire()
                break
            except OSError as error:
                if not isinstance(error, BlockingIOError):
                    name = self.location.name_of("lock")
                    raise JobError(
                        f"run folder {self.url} cannot be locked: {name}: {error.strerror or error}; make "
                        "this file writable for this user, or remove it"
                    ) from error
                if time.monotonic() < deadline:
                    if waiting is not None:
                        waiting(f"waiting up to {patience:.0f} s for {_describe_holder(guard)} to end")
                        waiting = None
                    time.sleep(0.5)
                    continue
            raise RunError(
                f"run folder {self.url} is driven by {_describe_holder(guard)}; wait for it to end, choose "
                f"another folder, or stop it first: scalelatent cancel {self.url}"
            ) from None
        self._held = guard
        try:
            yield
        finally:
            self._held = None
            guard.release()

    def _check_lock_is_held(self) -> None:
        if self._held is not None and self._held.lost:
            raise RunError(
                f"run folder {self.url} was taken over by another driver, because this driver did not renew "
                "its lock in time; this driver stops, and the other one resumes from the checkpoints"
            )

    def _valid_lines(self, name: str) -> list[tuple[bytes, dict[str, Any]]]:
        """Return the valid lines of a log, each with its record."""
        found = []
        for line in self._log(name).lines():
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    found.append((line, record))
        return found

    def _read_state(self) -> dict[str, Any]:
        """Return ``state.json``, or, if the file is damaged, a state rebuilt from the logs."""
        with suppress(JobError):
            state = self._read_json("state.json")
            if isinstance(state.get("id"), str) and state.get("state") in STATES:
                return state
        events = self.records("events.jsonl")
        changes = [
            event for event in events if event.get("event") == "state" and event.get("state") in STATES
        ]
        last = changes[-1] if changes else {}
        passes = self.records("metrics.jsonl")
        try:
            job = self.read_job()
            name, kind = job.job.name, job.kind
        except JobError:
            name, kind = None, None
        folder_name = self.url.rstrip("/").rsplit("/", 1)[-1]
        mark = hashlib.blake2b(self.location.read("job.json") or b"", digest_size=4).hexdigest()
        return {
            "id": f"{_slug(name or folder_name)}-{mark}",
            "state": last.get("state", "failed"),
            "starts": sum(event["state"] == "running" for event in changes),
            "pass": passes[-1].get("pass", 0) if passes else 0,
            "objective": passes[-1].get("objective") if passes else None,
            "error": last.get("error")
            if last.get("state") in ("done", "cancelled")
            else "state.json was lost or damaged, and was rebuilt from the logs; resume from the last "
            f"checkpoint with: scalelatent resume {self.url}",
            "run": self.url,
            "kind": kind,
            "created": events[0].get("time") if events else None,
            "updated": events[-1].get("time") if events else None,
        }

    def _log(self, name: str) -> LineLog:
        return self._logs.setdefault(name, LineLog(self.location, name))

    def _describe_why_occupied(self) -> str:
        if not is_run_folder(self.url):
            return f"output folder {self.url} exists and is not empty; choose another folder with --out"
        state = self.read_state()["state"]
        step = (
            "show its results with: scalelatent status"
            if state == "done"
            else "resume it with: scalelatent resume"
        )
        return (
            f"output folder {self.url} already contains a run (state: {state}); {step} {self.url}, or choose "
            "another folder with --out"
        )

    def _read_json(self, name: str) -> dict[str, Any]:
        content = self.location.read(name)
        if content is None:
            raise JobError(f"run folder {self.url} has no {name}")
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise JobError(f"{self.location.name_of(name)} is damaged: {error}") from None
        if not isinstance(value, dict):
            raise JobError(f"{self.location.name_of(name)} is damaged: it contains no JSON object")
        return value

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self._check_lock_is_held()
        self.location.write(name, encode_json(value), durable=True)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "job"


def _describe_holder(lock: Lock) -> str:
    holder = lock.holder() or {}
    left = holder.get("seconds_left")
    lease = "" if left is None else f" (if this process is gone, its lock expires in {left} s)"
    pid, host = holder.get("pid", "?"), holder.get("host", "?")
    thread = ""
    if (pid, host) == (os.getpid(), socket.gethostname()):
        thread = f" (this process, in its thread {holder.get('thread', '?')!r})"
    return f"process {pid} on host {host}{thread}{lease}"
