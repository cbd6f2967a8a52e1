"""Record a fit that Python code calls with ``run_dir`` in a run folder, like the run folder of a job.

The folder is locked before the first write, and a refused fit leaves no files.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelatent.contract.kinds import find_kind
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.engine.resume_identity import named_values
from scalelatent.errors import JobError, RunError
from scalelatent.storage.write_checks import describe_contents

from .interrupt import StopRequest, stop_on_cancel
from .run_record import RunRecord, add_dashboard_page
from .runfolder import RunFolder, is_run_folder, to_json_value
from .runner import validation_scores
from .searching import SearchProgress, write_search_results
from .spec import IN_MEMORY, DataSection, EngineSection, Job, JobSection

if TYPE_CHECKING:
    from scalelatent.data import Dataset
    from scalelatent.estimators.fit_services import FitCall

# Texts in job.json about the origin of a value: Python code, Python code with a value that JSON cannot store,
# and a search that Python code called.
PYTHON, NOT_JSON, SEARCH = "Python", "Python, not JSON", "Python, a search"
_KEY_OF_ROLE = {
    "train": "train",
    "validation": "validation",
    "rows": "train",
    "validation rows": "validation",
}


@contextmanager
def record_fit(call: FitCall) -> Iterator[Callback]:
    """Yield a callback that records a fit in its run folder, and record how the fit ends."""
    record = _Record(call)
    with record.exit:
        record.hold_folder()
        try:
            yield record
            record.done()
        except BaseException as error:
            raised = record.record_error(error)
            if raised is error:
                raise
            raise raised from error


class _Record(Callbacks):
    """Callback that creates the run folder when the fit starts, and then calls the writers of its files."""

    keeps_run_folder = True

    def __init__(self, call: FitCall) -> None:
        super().__init__()
        self.exit = ExitStack()
        self._call = call
        assert call.run_dir is not None, "else nothing is recorded"
        self._held = RunFolder(call.run_dir)
        self._folder: RunFolder | None = None  # the same folder as `_held`, set when the fit starts
        self._began = time.monotonic()

    def hold_folder(self) -> None:
        """Lock the run folder, so that a second fit at the same time is refused before it writes."""
        location = self._held.location
        if location.has("zarr.json"):
            raise RunError(
                f"{location.url} {describe_contents(location, 'a run folder')}; choose another `run_dir`"
            )
        path = location.local_path("")
        created = (
            [] if path is None else [one for one in (Path(path), *Path(path).parents) if not one.exists()]
        )
        try:
            location.make()
        except OSError as error:
            raise RunError(
                f"cannot create the run folder {location.url}: {error}; choose another `run_dir`"
            ) from error
        self.exit.enter_context(self._held.lock())
        if location.keys("") in ([], ["lock"]):
            self.exit.callback(self._remove_unless_started, created)

    def _remove_unless_started(self, created: list[Path]) -> None:
        """Remove the created folders if the fit has not started; keep an empty folder that existed before."""
        if self._folder is None:
            self._held.remove()
            if not created:
                self._held.location.make()
            with suppress(OSError):
                for folder in created[1:]:
                    folder.rmdir()

    def on_fit_start(self, info: dict[str, Any]) -> None:
        """Create or open the folder at the first call; a search calls this again for its refit."""
        if self._folder is None:
            self._folder = self._open(info)
        super().on_fit_start(info)

    def _open(self, info: Mapping[str, Any]) -> RunFolder:
        folder = self._held
        earlier = folder.read_job() if is_run_folder(folder.url) else None
        job = job_of(self._call, folder.url, info.get("seed"), earlier)
        folder.write_or_create(job)
        self._record = RunRecord(folder, job)
        folder.begin("running")
        self._record.begin(f"{socket.gethostname()}:{os.getpid()}", self._call.resume)
        request = StopRequest()
        self.exit.enter_context(stop_on_cancel(request, folder))
        if not Callbacks(self._call.callbacks).tells_cluster:
            self._record.client = self._call.client
            add_dashboard_page(self._call.client)
        self.callbacks = [*self._record.callbacks(), SearchProgress(folder), request]
        return folder

    def done(self) -> None:
        folder = self._folder
        if folder is None:
            return
        if hasattr(self._call.model, "cv_results_"):
            write_search_results(folder, self._call.model)
        model = getattr(self._call.model, "best_estimator_", self._call.model)
        if hasattr(model, "save"):  # a search without refit has no model
            self.on_stage({"stage": "saving"})
            model.save(folder.model_url, overwrite=True)
            folder.event("model_saved", path=folder.model_url)
        ended = {"seconds": round(time.monotonic() - self._began, 3)}
        self._record.done(validation_scores(model), ended)

    def record_error(self, error: BaseException) -> BaseException:
        """Record why the fit ended without a model; return the error to raise."""
        if self._folder is None:
            return error
        return self._record.record_error(error, resume_instruction(self._folder))


def job_of(call: FitCall, url: str, seed: int | None, earlier: Job | None) -> Job:
    """Return the job equivalent to a call of ``fit``, or the `earlier` job with the call's changed values."""
    model = getattr(call.model, "estimator", call.model)
    kind, given = model._kind, model.get_params(deep=False)
    drawn = not isinstance(given.get("random_state"), int)
    params = {key: to_json_value(value) for key, value in given.items()}
    origins = dict.fromkeys((f"model.{key}" for key in params), PYTHON)
    origins |= {f"model.{key}": NOT_JSON for key, value in given.items() if not _is_json(value)}
    if drawn:
        params["random_state"], origins["model.random_state"] = None, "default"
    origins["model.kind"] = PYTHON if model is call.model else SEARCH
    data = _data_section(call.rows)
    engine = dict(call.engine)
    scratch = engine.pop("scratch", None)
    if earlier is None:
        head = JobSection(out=url, seed=seed if drawn else None, scratch=scratch and os.fspath(scratch))
        rows, settings = DataSection(**data), EngineSection(**engine)
        return Job(head, rows, kind, params, settings, origins=origins)
    if earlier.kind != kind:
        raise JobError(
            f"run folder {url} contains a run of kind {earlier.kind!r}, not {kind!r}; choose another run_dir"
        )
    if earlier.job.seed is not None:
        params["random_state"] = earlier.params.get("random_state")
    changed = {key: value for key, value in params.items() if value != earlier.params.get(key)}
    merged = earlier.origins | {f"model.{key}": origins[f"model.{key}"] for key in changed}
    return replace(earlier, params=params, data=earlier.data.model_copy(update=data), origins=merged)


def _is_json(value: object) -> bool:
    """Return whether a parameter has the same value for a fit after a JSON round trip."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    return named_values({"": value}) == named_values({"": to_json_value(value)})


def _data_section(rows: Mapping[str, Dataset]) -> dict[str, Any]:
    """Return the ``[data]`` section of a job file that reads these datasets, which are named by their role.

    A dataset that a job file cannot describe, such as an array in memory, gets the value `IN_MEMORY`.
    """
    found: dict[str, Any] = {}
    for name, dataset in rows.items():
        key = _KEY_OF_ROLE.get(name)
        if key is None:
            continue
        spec = dataset.spec() if dataset.is_stored and not dataset.accesses else None
        bare = spec is not None and "without_labels" in spec
        if key == "train" and bare:
            found["labels"] = False
        target = None if spec is None else spec.get("target")
        paired = target is None or (target["start"], target["stop"]) == (spec["start"], spec["stop"])  # type: ignore[index]
        # A job file can leave out the labels of the training rows, but not of validation or test rows.
        if spec is None or not paired or (bare and key != "train"):
            found[key] = IN_MEMORY
            continue
        found |= {key: spec["url"], f"{key}_rows": f"{spec['start']}:{spec['stop']}"}
        if target is not None:
            found["target" if key == "train" else f"{key}_target"] = target["url"]
    return found


def why_python_only(job: Job) -> str:
    """Return why the command line cannot resume a run; return an empty text if it can."""
    if job.keys_in_memory:
        return (
            f"its rows ({', '.join(job.keys_in_memory)}) were given in Python: they were in memory, or were "
            "opened with storage options"
        )
    if job.origins.get("model.kind") == SEARCH:
        return "it is a search that Python code called"
    if find_kind(job.kind).python_only:
        return f"only Python code can fit models of kind {job.kind!r}"
    strange = [key.removeprefix("model.") for key, origin in job.origins.items() if origin == NOT_JSON]
    return f"job.json cannot store the value that Python gave for {', '.join(strange)}" if strange else ""


def resume_instruction(folder: RunFolder) -> str:
    """Return the instruction that resumes a run, for messages."""
    in_python = f"in Python with the same fit(..., run_dir={folder.url!r}, resume=True)"
    if why_python_only(folder.read_job()):
        return f"resume {in_python}"
    return f"resume with: scalelatent resume {folder.url}"


def check_resumable(folder: RunFolder) -> None:
    """Raise a `JobError` if only Python code can resume the run."""
    why = why_python_only(folder.read_job())
    if why:
        raise JobError(
            f"the command line cannot resume run {folder.url}: {why}; {resume_instruction(folder)}"
        )
