"""Open the datasets and row ranges that a job names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scalelatent.contract.kinds import find_kind
from scalelatent.errors import DataError, JobError
from scalelatent.storage.disk import is_local

from .spec import Job, parse_rows

if TYPE_CHECKING:
    from scalelatent.data import Dataset


@dataclass(frozen=True)
class JobData:
    """Open datasets of a job; None for a dataset that the job does not name."""

    train: Dataset
    validation: Dataset | None = None
    test: Dataset | None = None

    @property
    def shown(self) -> Dataset:
        """Rows that the report shows: test, else validation, else training rows."""
        return self.test or self.validation or self.train


def open_job_data(job: Job) -> JobData:
    """Open the datasets that ``[data]`` names, and check that their rows fit together."""
    from scalelatent.data.feature_names import check_same_names

    data = job.data
    _check_targets(job)
    how = {"storage_options": data.storage_options}
    train = open_rows(data.train, data.train_rows, key="train", target=data.target, **how)
    if not data.labels:
        train = train.without_labels()
    others = {}
    for name in ("validation", "test"):
        url = getattr(data, name)
        if url is None:
            continue
        target = getattr(data, f"{name}_target") or (data.target if url == data.train else None)
        others[name] = open_rows(url, getattr(data, f"{name}_rows"), key=name, target=target, **how)
        if others[name].n_features != train.n_features:
            raise JobError(
                f"[data] {name} = {url!r} has {others[name].n_features} features per row, train has "
                f"{train.n_features}; give datasets with the same features"
            )
        if (names := train.feature_names) is not None and (new := others[name].feature_names) is not None:
            try:
                check_same_names(names, new)
            except DataError as error:
                raise JobError(f"[data] {name} = {url!r}: {error}") from None
        if train.has_targets and others[name].has_targets and others[name].n_targets != train.n_targets:
            raise JobError(
                f"[data] {name} = {url!r} has {others[name].n_targets} outputs per row, train has "
                f"{train.n_targets}; give [data] {name}_target with {train.n_targets} outputs per row"
            )
    return JobData(train, **others)


def data_at_start(data: JobData, run_dir: str) -> JobData:
    """Return the rows with which a run started, without the rows that were appended later."""
    from scalelatent.data.read.earlier import rows_at_same_time
    from scalelatent.estimators.session import restore_row_ranges

    given = {"train": data.train, "validation": data.validation}
    found = restore_row_ranges({name: ds for name, ds in given.items() if ds is not None}, run_dir)
    test = data.test
    if test is not None and test.url == data.train.url:
        test = rows_at_same_time(test, found["train"])
    return JobData(found["train"], found.get("validation"), test)


def _check_targets(job: Job) -> None:
    """Refuse outputs for a model without outputs, and missing outputs for a model that needs outputs."""
    if not job.data.labels and find_kind(job.kind).supervised:
        raise JobError(
            f"[data] labels = false: a model of kind {job.kind!r} learns from labels or outputs; remove the "
            "key"
        )
    given = {key: getattr(job.data, key) for key in ("target", "validation_target", "test_target")}
    given = {key: url for key, url in given.items() if url is not None}
    if not given:
        return
    if not find_kind(job.kind).takes_targets:
        key, url = next(iter(given.items()))
        raise JobError(
            f"[data] {key} = {url!r}: a model of kind {job.kind!r} learns no outputs; remove the key"
        )


def open_rows(
    url: str,
    rows: str | None = None,
    *,
    key: str = "data",
    target: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Dataset:
    """Open a dataset or a range of its rows; storage options apply to addresses, not to local paths."""
    from scalelatent.data import open_dataset

    def opened(url: str) -> Dataset:
        return open_dataset(url, storage_options=None if is_local(url) else storage_options)

    dataset = opened(url)
    if target is not None:  # join the outputs first, so that the range below selects rows and their outputs
        dataset = dataset.with_target(opened(target))
    if rows is None:
        return dataset
    n_rows = dataset.n_rows
    try:
        run = parse_rows(rows)
    except ValueError as error:
        raise JobError(f"{key} rows: {error}") from None
    for end in (run.start, run.stop):
        if end is not None and not -n_rows <= end <= n_rows:
            raise JobError(f'{key} rows "{rows}" exceed {url}, which has {n_rows:,} rows')
    start, stop, _ = run.indices(n_rows)
    if stop <= start:
        raise JobError(f'{key} rows "{rows}" contain none of the {n_rows:,} rows of {url}')
    return dataset[start:stop]
