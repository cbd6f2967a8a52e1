"""Find the rows of a dataset before an append, so that a run that started before can resume with them."""

from __future__ import annotations

from collections.abc import Iterator

from scalelatent.data.dataset import Dataset

from .segments import earlier_columns, earlier_states, restore_columns


def find_earlier_rows(ds: Dataset, fingerprint: str) -> Dataset | None:
    """Return the rows that a dataset or slice had when its fingerprint was `fingerprint`, or None."""
    if ds.fingerprint() == fingerprint:
        return ds
    return next((found for found in _candidates(ds) if found.fingerprint() == fingerprint), None)


def rows_at_same_time(ds: Dataset, other: Dataset) -> Dataset:
    """Return the rows that `ds` had when its dataset was in the state that `other` shows.

    `other` holds rows of the same stored dataset before an append. Without such an append `ds` is returned.
    """
    then = earlier_columns(ds._columns, other._columns.fingerprint)
    start, stop = ds.extent
    if then is None or ds._columns.paired is not None or start >= then.x.shape[0]:
        return ds
    return Dataset(then, start, min(stop, then.x.shape[0]))


def _candidates(ds: Dataset) -> Iterator[Dataset]:
    """Yield what a slice may have been before appends: the same rows, or rows up to the former end."""
    columns, (start, stop) = ds._columns, ds.extent
    if columns.attrs is None:
        return
    whole = columns.x.shape[0]
    for state in earlier_states(columns.attrs):
        ranges = {(start, stop), (start, state.rows), (state.rows - (whole - start), state.rows)}
        for a, b in sorted(ranges):
            if not 0 <= a < b <= state.rows or (b != stop and stop != whole):
                continue
            rows = Dataset(restore_columns(columns, state), a, b)
            if columns.paired is None:
                yield rows
                continue
            target = columns.paired.slice_rows(start, stop)
            for other in _candidates(target):
                if len(other) == len(rows):
                    yield rows.with_target(other)
