"""Write a run's report again, from its folder alone or on rows that are given."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from scalelatent.errors import JobError, ScalelatentError
from scalelatent.storage.disk import locate

from .datasets import data_as_begun, open_job_data
from .runfolder import RunFolder, is_run_folder
from .runs import load_run

if TYPE_CHECKING:
    from scalelatent.data import Dataset

__all__ = ["report_model", "write_report"]


def write_report(
    run: str | os.PathLike[str],
    *,
    data: Dataset | None = None,
    tell: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Build the report of a finished run, on the rows of its job or on those given."""
    from scalelatent.report import build_report
    from scalelatent.report.sampled import check_width

    estimator, folder = load_run(run)
    if folder is None:
        raise JobError(f"{run} is a saved model; a report needs the run folder it came from")
    if data is not None:
        check_width(data, estimator.n_features_in_)
        return build_report(folder.url, model=estimator, data=data, role="given", progress=progress)
    return build_report(folder.url, model=estimator, data=_job_rows(folder, tell), progress=progress)


def report_model(model: Any, folder: str | os.PathLike[str], data: Any = None) -> str:
    """Write the report of a fitted model into a folder; see :meth:`.StreamedEstimator.report`."""
    from scalelatent.data import Dataset
    from scalelatent.report import build_report

    place, role = locate(folder), None
    if data is not None:
        role = "given"
        if not isinstance(data, Dataset):
            data = Dataset.from_arrays(*data) if isinstance(data, tuple) else Dataset.from_arrays(data)
    elif is_run_folder(place.url):
        data = _job_rows(RunFolder(place.url), lambda line: None)
    else:
        specs = getattr(model, "_fitted_rows", {})
        name = next((name for name in ("validation", "train") if name in specs), None)
        if name is not None:
            role = "training" if name == "train" else name
            with suppress(ScalelatentError):  # the rows have moved on
                data = Dataset.from_spec(specs[name])
    place.make()
    return build_report(place.url, model=model, data=data, role=role)


def _job_rows(folder: RunFolder, tell: Callable[[str], None]) -> Dataset | None:
    """The rows that a run's report shows; None where they have moved on, or lived in memory."""
    try:
        job = folder.read_job()
        if job.in_memory:
            tell(
                f"the rows of {folder.url} lived in memory, or were opened in Python with storage options or "
                "a store object, so the report shows none; in Python: "
                f"scalelatent.load_model({folder.url!r}).report({folder.url!r}, data=(X, y))"
            )
            return None
        return data_as_begun(open_job_data(job), folder.url).shown
    except ScalelatentError as error:
        tell(f"the report shows no rows: {error}")
        return None
