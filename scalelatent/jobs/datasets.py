"""Open the datasets a job names, at the rows it names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalelatent.errors import JobError

from .spec import Job, parse_rows

if TYPE_CHECKING:
    from scalelatent.data import Dataset

__all__ = ["JobData", "open_job_data", "open_rows"]


@dataclass(frozen=True)
class JobData:
    """The datasets of a job; None where it names none."""

    train: Dataset
    validation: Dataset | None = None
    test: Dataset | None = None


def open_job_data(job: Job) -> JobData:
    """Open what ``[data]`` names and check that it fits together.

    Parameters
    ----------
    job : Job

    Returns
    -------
    JobData

    Raises
    ------
    JobError
        If rows are asked for that a dataset does not have, or the datasets differ in their features.
    DataError
        If a dataset is missing or damaged.
    """
    data = job.data
    if data.target is not None:
        raise JobError(
            f"[data] target = {data.target!r}: a model of kind {job.kind!r} takes labels, no target dataset"
        )
    train = open_rows(data.train, data.train_rows, key="train")
    others = {}
    for name in ("validation", "test"):
        url = getattr(data, name)
        if url is None:
            continue
        others[name] = open_rows(url, getattr(data, f"{name}_rows"), key=name)
        if others[name].n_features != train.n_features:
            raise JobError(
                f"[data] {name} = {url!r} has {others[name].n_features} features a row, train has "
                f"{train.n_features}; both must come from images of one shape"
            )
    return JobData(train, **others)


def open_rows(url: str, rows: str | None = None, *, key: str = "data") -> Dataset:
    """Open a dataset, or a run of its rows.

    Parameters
    ----------
    url : str
        Path or URL of a dataset.
    rows : str, optional
        Such as ``"0:50000"``. Unlike a Python slice, rows that are not there are an error.
    key : str
        What messages call it.

    Returns
    -------
    Dataset

    Raises
    ------
    JobError
        If the dataset has fewer rows than asked for.
    """
    from scalelatent.data import open_dataset

    dataset = open_dataset(url)
    if rows is None:
        return dataset
    n_rows = dataset.n_rows
    try:
        run = parse_rows(rows)
    except ValueError as error:
        raise JobError(f"{key} rows: {error}") from None
    for end in (run.start, run.stop):
        if end is not None and not -n_rows <= end <= n_rows:
            raise JobError(f'{key} rows "{rows}" reach beyond {url}, which has {n_rows:,} rows')
    start, stop, _ = run.indices(n_rows)
    if stop <= start:
        raise JobError(f'{key} rows "{rows}" hold none of the {n_rows:,} rows of {url}')
    return dataset[start:stop]
