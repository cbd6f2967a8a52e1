"""Write a run's report again, from its folder alone."""

from __future__ import annotations

import os

from scalelatent.errors import JobError, ScalelatentError

from .datasets import open_job_data
from .runs import load_run

__all__ = ["write_report"]


def write_report(run: str | os.PathLike[str]) -> str:
    """Build the report of a finished run.

    Parameters
    ----------
    run : path or str
        A run folder with a model.

    Returns
    -------
    str
        Path or address of the page, ``report/index.html``.

    Raises
    ------
    JobError
        If ``run`` is a saved model rather than a run folder, or has no model yet.
    """
    from scalelatent.report import build_report

    estimator, folder = load_run(run)
    if folder is None:
        raise JobError(f"{run} is a saved model; a report needs the run folder it came from")
    try:
        opened = open_job_data(folder.read_job())
        data = opened.test or opened.validation or opened.train
    except ScalelatentError:
        data = None  # the datasets have moved on; the report shows what the folder and the model know
    return build_report(folder.url, model=estimator, data=data)
