"""The run folder: everything one execution of a job leaves behind, and what `status` and `resume` read.

::

    run/job.json        the resolved job
        state.json      {"id", "state", "pass", "objective", "error", "run", ...}
        metrics.jsonl   one record a pass
        events.jsonl    what happened and when
        lock            who drives this run now
        engine/         checkpoints and partial passes; private to the engine
        model.zarr      the fitted model
        report/         index.html and figures

JSON files are written aside, synced and renamed: a reader, or a power cut, finds the old or the new one,
never half of one. A torn last line of a ``.jsonl`` file (a killed writer) is dropped when it is read and
cut off when it is next appended to.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scalelatent.errors import JobError, RunError

from .lock import FolderLock
from .spec import Job

__all__ = ["STATES", "RunFolder", "is_run_folder"]

STATES = ("queued", "running", "done", "failed", "cancelled")


def is_run_folder(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is a run folder (and not, say, a saved model).

    Examples
    --------
    >>> from scalelatent.jobs.runfolder import is_run_folder
    >>> is_run_folder("/no/such/folder")
    False
    """
    return Path(path, "state.json").is_file() and Path(path, "job.json").is_file()


class RunFolder:
    """One run folder; make it with `create` or `open`.

    Attributes
    ----------
    path : pathlib.Path
        The folder, absolute.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from scalelatent.jobs.runfolder import RunFolder
    >>> from scalelatent.jobs.spec import DataSection, Job, JobSection
    >>> job = Job(JobSection(name="first", out="run"), DataSection(train="a.zarr"), "capsule", {})
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     folder = RunFolder.create(pathlib.Path(parent, "run"), job)
    ...     _ = folder.update_state(objective=0.5)
    ...     folder.read_state()["state"], folder.read_state()["objective"]
    ('queued', 0.5)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def create(cls, path: str | os.PathLike[str], job: Job) -> RunFolder:
        """Make a new run folder and write the job into it.

        Parameters
        ----------
        path : path
            Must not exist, or be an empty folder.
        job : Job

        Returns
        -------
        RunFolder

        Raises
        ------
        JobError
            If the folder holds anything, or cannot be made or written to.
        """
        folder = cls(path)
        where = folder.path
        if "://" in os.fspath(path):
            raise JobError(f"[job] out = {os.fspath(path)!r}: a run folder must be a local or mounted folder")
        if where.exists() and not where.is_dir():
            raise JobError(f"output {where} exists and is a file; choose another folder with --out")
        if where.is_dir() and any(where.iterdir()):
            raise JobError(folder._occupied())
        name = job.job.name or where.name
        try:
            where.mkdir(parents=True, exist_ok=True)
            folder.write_job(job)
            folder._write_json("state.json", {
                "id": f"{_slug(name)}-{secrets.token_hex(4)}",
                "state": "queued",
                "pass": 0,
                "objective": None,
                "error": None,
                "run": str(where),
                "kind": job.kind,
                "created": _now(),
                "updated": _now(),
            })  # fmt: skip
        except OSError as error:
            raise JobError(
                f"output folder {where} cannot be written: {error.strerror or error}; "
                "choose another folder with --out"
            ) from error
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Open an existing run folder.

        Raises
        ------
        JobError
            If there is none at ``path``.
        """
        folder = cls(path)
        if not folder.path.is_dir():
            raise JobError(f"run folder {folder.path} does not exist")
        if not is_run_folder(folder.path):
            raise JobError(
                f"{folder.path} is no run folder (it has no job.json and state.json); a run folder is what "
                "[job] out of a job file names"
            )
        return folder

    @property
    def model_path(self) -> Path:
        """Where the fitted model is saved."""
        return self.path / "model.zarr"

    @property
    def report_path(self) -> Path:
        """Where the report is written."""
        return self.path / "report" / "index.html"

    @property
    def fit_began(self) -> bool:
        """Whether the fit of this run ever began, so that there is something to lose."""
        return any(record.get("event") == "fit_started" for record in self.records("events.jsonl"))

    @property
    def id(self) -> str:
        """The job id."""
        return str(self.read_state()["id"])

    def read_job(self) -> Job:
        """Return the resolved job of this run."""
        return Job.from_dict(self._read_json("job.json"), where=str(self.path / "job.json"))

    def write_job(self, job: Job) -> None:
        """Write the resolved job; done once, before work starts, and again when a resume changes it."""
        self._write_json("job.json", job.to_dict())

    def read_state(self) -> dict[str, Any]:
        """Return ``state.json``; a run whose driver is gone is told as failed.

        Returns
        -------
        dict
            At least ``id``, ``state`` (one of `STATES`), ``pass``, ``objective``, ``error``, ``run``.
        """
        state = self._read_json("state.json")
        state["run"] = str(self.path)  # the folder may have moved since
        if state.get("state") == "running":
            holder = FolderLock(self.path).holder()
            if holder is None:
                state["state"] = "failed"
                state["error"] = (
                    f"the driver ended without a word (killed?); nothing that was checkpointed is lost: "
                    f"scalelatent resume {self.path}"
                )
        return state

    def update_state(self, **changes: Any) -> dict[str, Any]:
        """Change some keys of ``state.json`` at once and return all of them.

        Raises
        ------
        ValueError
            If ``state`` is none of `STATES`.
        """
        if "state" in changes and changes["state"] not in STATES:
            raise ValueError(f"state {changes['state']!r} is none of {', '.join(STATES)}")
        state = self._read_json("state.json") | changes | {"run": str(self.path), "updated": _now()}
        self._write_json("state.json", state)
        return state

    def event(self, event: str, **values: Any) -> None:
        """Append one event to ``events.jsonl``; the time is added."""
        self.append("events.jsonl", {"time": _now(), "event": event, **values})

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append one record as a line to a ``.jsonl`` file of this folder."""
        line = json.dumps(_plain(record)).encode() + b"\n"
        with open(self.path / name, "a+b") as file:
            end = file.seek(0, os.SEEK_END)
            if end and _byte_before(file, end) != b"\n":
                file.truncate(_last_line_end(file, end))
            file.write(line)

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a ``.jsonl`` file of this folder; a torn last line is left out."""
        try:
            lines = (self.path / name).read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines[:-1] if line]

    def keep_records(self, name: str, count: int) -> None:
        """Keep only the first ``count`` records of a ``.jsonl`` file (a resume repeats the others)."""
        kept = self.records(name)[:count]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        self._write_bytes(name, text.encode())

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run folder: two drivers on one folder would overwrite each other.

        Raises
        ------
        RunError
            If another process drives this run.
        """
        guard = FolderLock(self.path)
        try:
            guard.acquire()
        except BlockingIOError:
            who = guard.holder() or {}
            raise RunError(
                f"run folder {self.path} is driven by process {who.get('pid', '?')} on host "
                f"{who.get('host', '?')}; wait for it to end, or stop it with Ctrl-C, before another one"
            ) from None
        try:
            yield
        finally:
            guard.release()

    def _occupied(self) -> str:
        if not is_run_folder(self.path):
            return f"output folder {self.path} exists and is not empty; choose another folder with --out"
        state = self.read_state()["state"]
        go_on = "read its results with" if state == "done" else "continue it with"
        verb = "status" if state == "done" else "resume"
        return (
            f"output folder {self.path} already holds a run (state: {state}); {go_on}: "
            f"scalelatent {verb} {self.path}, or choose another folder with --out"
        )

    def _read_json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        try:
            stored = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise JobError(f"run folder {self.path} has no {name}") from None
        except ValueError as error:
            raise JobError(f"{file} is damaged: {error}") from None
        return dict(stored)

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self._write_bytes(name, (json.dumps(_plain(value), indent=2) + "\n").encode())

    def _write_bytes(self, name: str, content: bytes) -> None:
        aside = self.path / f".{name}.{os.getpid()}.tmp"
        try:
            with open(aside, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, self.path / name)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        _sync_folder(self.path)


def _sync_folder(path: Path) -> None:
    """Make a rename durable; file systems that cannot sync a folder keep their own order."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _byte_before(file: Any, position: int) -> bytes:
    file.seek(position - 1)
    return bytes(file.read(1))


def _last_line_end(file: Any, end: int) -> int:
    """Offset behind the last newline; lines are short, so the last MiB surely holds one."""
    start = max(0, end - (1 << 20))
    file.seek(start)
    return start + file.read(end - start).rfind(b"\n") + 1


def _plain(value: Any) -> Any:
    """Turn numpy values and paths into what JSON knows, and NaN and infinity, which it lacks, into None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "job"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
