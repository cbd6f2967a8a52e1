"""Find the rows that a dataset had before an append, so that a run from before the append can resume."""

from __future__ import annotations

from collections.abc import Iterator

from scalelatent.data.dataset import Dataset

from .segments import earlier_columns, earlier_states, restore_columns


def find_earlier_rows(ds: Dataset, fingerprint: str) -> Dataset | None:
    """Return the rows that `ds` had when it had this `fingerprint`; None if it never had this fingerprint."""
    if ds.fingerprint() == fingerprint:
        return ds
    return next((found for found in _iter_earlier_slices(ds) if found.fingerprint() == fingerprint), None)


def rows_at_same_time(ds: Dataset, other: Dataset) -> Dataset:
    """Return the rows of `ds` that existed in the earlier state `other` of its dataset, before an append.

    If `other` is not an earlier state of the dataset of `ds`, return `ds`.
    """
    then = earlier_columns(ds._columns, other._columns.fingerprint)
    start, stop = ds.extent
    if then is None or ds._columns.paired is not None or start >= then.x.shape[0]:
        return ds
    return Dataset(then, start, min(stop, then.x.shape[0]))


def _iter_earlier_slices(ds: Dataset) -> Iterator[Dataset]:
    """Yield, for each append to the dataset of `ds`, slices of the dataset as it was before the append.

    The first kind of slice has the same row numbers as `ds`. If the last row of `ds` is the last row of the
    dataset, two more kinds end at the last row before the append: one has the same first row as `ds` (as in
    `dataset[a:]`), the other the same number of rows (as in `dataset[-k:]`).
    """
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
            for other in _iter_earlier_slices(target):
                if len(other) == len(rows):
                    yield rows.with_target(other)
