"""Additive statistics: one float64 vector with named views, so that the engine merges any model's alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np


def merge_vectors(vectors: Sequence[np.ndarray], size: int | None = None) -> np.ndarray:
    """Sum of vectors, in their order; what follows the first ``size`` numbers is concatenated."""
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
    """Names and shapes of the fields of a statistic, in the order in which they lie in the vector."""

    fields: tuple[tuple[str, tuple[int, ...]], ...]
    # (name, width) of records of rows, of chains of an `OnlineLearner` alone
    row_fields: tuple[tuple[str, int], ...] = ()

    @cached_property
    def slices(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Name -> (place in the vector, shape)."""
        out, start = {}, 0
        for name, shape in self.fields:
            stop = start + prod(shape)
            out[name] = (slice(start, stop), shape)
            start = stop
        return out

    @cached_property
    def columns(self) -> dict[str, slice]:
        """Name -> columns in the records of rows."""
        out, start = {}, 0
        for name, width in self.row_fields:
            out[name] = slice(start, start + width)
            start += width
        return out

    @cached_property
    def size(self) -> int:
        """Length of what is summed, in float64 numbers."""
        return sum(prod(shape) for _, shape in self.fields)

    @property
    def row_width(self) -> int:
        """Numbers in the record of a row."""
        return sum(width for _, width in self.row_fields)

    def length(self, n_rows: int = 0) -> int:
        """Length of the vector with the records of so many rows."""
        return self.size + n_rows * self.row_width

    @property
    def nbytes(self) -> int:
        """Bytes of one statistic, without records of rows."""
        return 8 * self.size


class Stats:
    """An additive statistic: a float64 vector with named views."""

    __slots__ = ("layout", "vector")

    def __init__(self, layout: Layout, vector: np.ndarray) -> None:
        more = vector.size - layout.size
        fits = more >= 0 and not more % layout.row_width if layout.row_width else more == 0
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
        """The identity of :meth:`merge`; ``n_rows`` of a chain that says something of each."""
        return cls(layout, np.zeros(layout.length(n_rows)))

    def __getitem__(self, name: str) -> np.ndarray:
        """A view of one field, in its shape; of a field of rows, shape (rows, width)."""
        columns = self.layout.columns.get(name)
        if columns is not None:
            return self.vector[self.layout.size :].reshape(-1, self.layout.row_width)[:, columns]
        place, shape = self.layout.slices[name]
        return self.vector[place].reshape(shape)

    def merge(self, other: Stats) -> Stats:
        """Sum of two statistics, and the records of rows of both; neither is changed."""
        return Stats(self.layout, merge_vectors([self.vector, other.vector], self.layout.size))

    def scale(self, factor: float) -> Stats:
        """The statistic times a number (forgetting), without records of rows; the original is not changed."""
        return Stats(self.layout, self.vector[: self.layout.size] * factor)

    def __reduce__(self) -> tuple[object, ...]:
        return Stats, (self.layout, self.vector)
