"""Additive statistics: float64 vectors with named fields, which the engine sums for every model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np


def merge_vectors(vectors: Sequence[np.ndarray], size: int | None = None) -> np.ndarray:
    """Return the sum of the first ``size`` numbers of the vectors, then the concatenation of the rest."""
    if len(vectors) == 1:
        return vectors[0]
    size = len(vectors[0]) if size is None else size
    total = np.empty(size + sum(len(vector) - size for vector in vectors))
    summed = total[:size]
    np.add(vectors[0][:size], vectors[1][:size], out=summed)
    for vector in vectors[2:]:
        summed += vector[:size]
    if len(total) > size:
        np.concatenate([vector[size:] for vector in vectors], out=total[size:])
    return total


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the fields of a statistic, in their order in its float64 vector."""

    fields: tuple[tuple[str, tuple[int, ...]], ...]
    # (name, width) of the fields of a row record: the numbers that an `OnlineLearner` returns for each row.
    row_fields: tuple[tuple[str, int], ...] = ()

    @cached_property
    def slices(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Map from the name of each field to (its slice of the statistic's vector, its shape)."""
        out, start = {}, 0
        for name, shape in self.fields:
            stop = start + prod(shape)
            out[name] = (slice(start, stop), shape)
            start = stop
        return out

    @cached_property
    def columns(self) -> dict[str, slice]:
        """Map from the name of each row field to its columns in the array of all records of rows."""
        out, start = {}, 0
        for name, width in self.row_fields:
            out[name] = slice(start, start + width)
            start += width
        return out

    @cached_property
    def size(self) -> int:
        """Number of float64 numbers in the summed fields, without the records (some numbers per row)."""
        return sum(prod(shape) for _, shape in self.fields)

    @property
    def row_width(self) -> int:
        """Number of float64 numbers that a learner returns for each row (the record of the row)."""
        return sum(width for _, width in self.row_fields)

    def length(self, n_rows: int = 0) -> int:
        """Return the length of a statistic's vector with the records (numbers per row) of ``n_rows`` rows."""
        return self.size + n_rows * self.row_width

    @property
    def nbytes(self) -> int:
        """Bytes of the summed fields of one statistic, without the records (some numbers per row)."""
        return 8 * self.size


class Stats:
    """A statistic that is summed over rows: a float64 vector whose named fields are views of the vector."""

    __slots__ = ("layout", "vector")

    def __init__(self, layout: Layout, vector: np.ndarray) -> None:
        excess = vector.size - layout.size
        fits = excess >= 0 and not excess % layout.row_width if layout.row_width else excess == 0
        if vector.ndim != 1 or not fits or vector.dtype != np.float64:
            raise ValueError(
                f"a statistic of this layout is a float64 vector of {layout.size} numbers"
                f"{f' and {layout.row_width} for each row' if layout.row_width else ''}, not "
                f"{vector.dtype} {vector.shape}"
            )
        self.layout = layout
        self.vector = np.require(vector, requirements="A")

    @classmethod
    def zeros(cls, layout: Layout, n_rows: int = 0) -> Stats:
        """Return a statistic of zeros, with space for the records (numbers per row) of ``n_rows`` rows."""
        return cls(layout, np.zeros(layout.length(n_rows)))

    def __getitem__(self, name: str) -> np.ndarray:
        """Return a view of a field in its shape; a field of row records has shape (rows, width)."""
        columns = self.layout.columns.get(name)
        if columns is not None:
            return self.vector[self.layout.size :].reshape(-1, self.layout.row_width)[:, columns]
        place, shape = self.layout.slices[name]
        return self.vector[place].reshape(shape)

    def merge(self, other: Stats) -> Stats:
        """Return the sum of both statistics, then the row records of this one and those of ``other``."""
        return Stats(self.layout, merge_vectors([self.vector, other.vector], self.layout.size))

    def scale(self, factor: float) -> Stats:
        """Return a statistic whose summed fields are multiplied by ``factor``, without records of rows."""
        return Stats(self.layout, self.vector[: self.layout.size] * factor)

    def __reduce__(self) -> tuple[object, ...]:
        return Stats, (self.layout, self.vector)
