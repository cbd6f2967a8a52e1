"""Rows that a report looks at: some of all, from everywhere."""

from __future__ import annotations

from scalelatent.data import Dataset
from scalelatent.errors import DataError


def check_width(data: Dataset, wanted: int) -> None:
    """Refuse rows of another kind than the model was fitted to."""
    if data.n_features != wanted:
        raise DataError(
            f"{data.url or 'the data'} has {data.n_features} features a row, but the model was fitted to "
            f"{wanted}: report on rows of the kind it was fitted to"
        )
