"""Find runs, load run folders and saved models, apply models to rows, and write reports."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelatent.errors import DataError, JobError, ScalelatentError, StoreError
from scalelatent.storage.disk import is_local, locate
from scalelatent.storage.write_checks import describe_contents

from .datasets import data_at_start, open_job_data
from .runfolder import RunFolder, is_run_folder

if TYPE_CHECKING:
    from scalelatent.data import Dataset
    from scalelatent.estimators.base import StreamedEstimator
    from scalelatent.typing import RowsLike, ValidationLike


def load_run(path: str | os.PathLike[str]) -> tuple[StreamedEstimator, RunFolder | None]:
    """Load a fitted model from a run folder or a saved model; return the model and the run folder, if any."""
    from scalelatent.engine.saved_models import load_model

    location = locate(path)
    if is_local(location.url) and not os.path.exists(location.url):
        raise JobError(f"{path} does not exist (looked in {Path.cwd()}); give a run folder or a saved model")
    if not is_run_folder(location.url):
        return load_model(location.url), None
    folder = RunFolder.open(location.url)
    if not folder.has_model:
        state = folder.read_state()["state"]
        todo = (
            "wait for it to end" if state == "running" else f"finish it with: scalelatent resume {folder.url}"
        )
        raise JobError(f"run {folder.url} has no model yet (state: {state}); {todo}")
    return load_model(folder.url), folder


def find_runs(below: str | os.PathLike[str] = ".", *, depth: int = 3) -> list[RunFolder]:
    """Return the run folders at most `depth` levels below a folder, sorted by path."""
    try:
        if is_run_folder(below):
            return [RunFolder(below)]
    except StoreError:  # this user may not read the folder
        return []
    if not is_local(below):
        names = locate(below).keys("") if depth else []
        inner = [f"{os.fspath(below).rstrip('/')}/{name}" for name in names]
        return [folder for url in inner for folder in find_runs(url, depth=0)]
    found: list[RunFolder] = []
    if depth == 0:
        return found
    try:
        inner = sorted(entry.path for entry in os.scandir(below) if not entry.name.startswith("."))
    except OSError:
        return found
    for path in filter(os.path.isdir, inner):  # `isdir` is False for a link that leads in a circle
        # Do not look into datasets, which may hold a million files.
        if not os.path.exists(os.path.join(path, "zarr.json")):
            found.extend(find_runs(path, depth=depth - 1))
    return found


def model_info(estimator: StreamedEstimator) -> dict[str, Any]:
    """Return class, parameters and learned values of a fitted model, as JSON-able values."""
    from scalelatent.estimators.fitted_attributes import list_fitted, shorten_value

    parameters = {key: shorten_value(value) for key, value in estimator.get_params(deep=False).items()}
    return {
        "model": type(estimator).__name__,
        "parameters": parameters,
        "learned": list_fitted(estimator),
    }


def write_rows(
    estimator: StreamedEstimator,
    method: str,
    dataset: Dataset,
    out: str,
    *,
    layer: int | None = None,
    overwrite: bool = False,
) -> Dataset:
    """Apply a method of a fitted estimator to all rows, block by block; return the output dataset."""
    from scalelatent.data import open_dataset

    kind = type(estimator).__name__
    if not hasattr(estimator, method):
        other = {"predict": "transform", "transform": "predict", "codes": "transform"}[method]
        raise JobError(
            f"a {kind} has no {method}; use `scalelatent {other} RUN DATA --out OUT`, which writes the "
            "output of each row"
        )
    write = getattr(estimator, method)
    if layer is not None and "layer" not in inspect.signature(write).parameters:
        raise JobError(f"a {kind} has no layers; remove --layer")
    write(dataset, out=out, overwrite=overwrite, **({} if layer is None else {"layer": layer}))
    return open_dataset(out)


def write_report(
    run: str | os.PathLike[str],
    *,
    data: Dataset | None = None,
    print_line: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Build the report of a finished run from `data`, or from the rows of its job."""
    from scalelatent.report.build import build_report

    folder = RunFolder.open(run)
    estimator, _ = load_run(run)
    if data is not None:
        return build_report(folder.url, model=estimator, data=data, role="evaluation", progress=progress)
    return build_report(folder.url, model=estimator, data=_job_rows(folder, print_line), progress=progress)


def report_model(
    model: StreamedEstimator,
    folder: str | os.PathLike[str],
    data: ValidationLike | RowsLike | None = None,
) -> str:
    """Write the report of a fitted model into a folder; see :meth:`.StreamedEstimator.report`."""
    from scalelatent.data import Dataset
    from scalelatent.report.build import build_report

    location, role = locate(folder), None
    if location.has("zarr.json") or os.path.isfile(location.url):
        raise DataError(f"{location.url} {describe_contents(location, 'a run folder')}; give another folder")
    if data is not None:
        role = "evaluation"
        if not isinstance(data, Dataset):
            data = Dataset.from_arrays(*(data if isinstance(data, tuple) else (data,)))
    elif is_run_folder(location.url):
        data = _job_rows(RunFolder(location.url), lambda line: None)
    else:
        specs = getattr(model, "_fitted_rows", {})
        name = next((name for name in ("validation", "train") if name in specs), None)
        if name is not None:
            role = "training" if name == "train" else name
            with suppress(ScalelatentError):  # the rows have changed or moved
                data = Dataset.from_spec(specs[name])
    return build_report(location.url, model=model, data=data, role=role)


def _job_rows(folder: RunFolder, print_line: Callable[[str], None]) -> Dataset | None:
    """Return the rows for the report of a run; None if the rows have changed, or were in memory."""
    try:
        job = folder.read_job()
        if job.keys_in_memory:
            print_line(
                f"the report shows no rows, because the rows of {folder.url} were in memory, or were opened "
                "in Python with storage options; to show rows, run in Python: "
                f"scalelatent.load_model({folder.url!r}).report({folder.url!r}, data=(X, y))"
            )
            return None
        return data_at_start(open_job_data(job), folder.url).shown
    except ScalelatentError as error:
        print_line(f"the report shows no rows: {error}")
        return None
