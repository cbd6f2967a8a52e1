"""Find the rows that a dataset had before an append, so that a run from before the append can resume."""

from __future__ import annotations

from collections.abc import Iterator

from scalelatent.data.dataset import Dataset

from .segments import earlier_columns, earlier_states, restore_columns


def find_earlier_rows(ds: Dataset, fingerprint: str) -> Dataset | None:
    """Return the earlier rows of a dataset or slice whose fingerprint is `fingerprint`; None without such."""
    if ds.fingerprint() == fingerprint:
        return ds
    return next((found for found in _iter_earlier_slices(ds) if found.fingerprint() == fingerprint), None)


def rows_at_same_time(ds: Dataset, other: Dataset) -> Dataset:
    """Return the rows that `ds` had before the same append as `other`.

    `other` holds rows of the same stored dataset before an append; if it does not, `ds` is returned.
    """
    then = earlier_columns(ds._columns, other._columns.fingerprint)
    start, stop = ds.extent
    if then is None or ds._columns.paired is not None or start >= then.x.shape[0]:
        return ds
    return Dataset(then, start, min(stop, then.x.shape[0]))


def _iter_earlier_slices(ds: Dataset) -> Iterator[Dataset]:
    """Yield slices of the dataset before its appends that an earlier run may have used instead of `ds`.

    Such a slice has the rows of `ds`. If `ds` ends with the dataset, the slice may also end at a former end,
    with the same start as `ds` (as in `dataset[a:]`) or the same number of rows (as in `dataset[-k:]`).
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
