"""The rows that a dataset had before more were appended: a run that began with those goes on with them."""

from __future__ import annotations

from collections.abc import Iterator

from scalelatent.data.dataset import Dataset

from .segments import columns_then, earlier_columns, earlier_states


def earlier_rows(ds: Dataset, fingerprint: str) -> Dataset | None:
    """The rows that a dataset, or a slice of one, had when its fingerprint was this one."""
    if ds.fingerprint() == fingerprint:
        return ds
    return next((found for found in _candidates(ds) if found.fingerprint() == fingerprint), None)


def rows_at_same_time(ds: Dataset, other: Dataset) -> Dataset:
    """The rows of a dataset when it was what another slice of it is of; `ds` itself where it is so now."""
    then = earlier_columns(ds._columns, other._columns.fingerprint)
    start, stop = ds.extent
    if then is None or ds._columns.paired is not None or start >= then.x.shape[0]:
        return ds
    return Dataset(then, start, min(stop, then.x.shape[0]))


def _candidates(ds: Dataset) -> Iterator[Dataset]:
    """What a run of rows may have been before appends: the same rows, or up to the end that was then."""
    columns, (start, stop) = ds._columns, ds.extent
    if columns.attrs is None:
        return
    whole = columns.x.shape[0]
    for state in earlier_states(columns.attrs):
        ranges = {(start, stop), (start, state.rows), (state.rows - (whole - start), state.rows)}
        for a, b in sorted(ranges):
            if not 0 <= a < b <= state.rows or (b != stop and stop != whole):
                continue
            rows = Dataset(columns_then(columns, state), a, b)
            if columns.paired is None:
                yield rows
                continue
            target = columns.paired.part(start, stop)
            for other in _candidates(target):
                if len(other) == len(rows):
                    yield rows.with_target(other)
