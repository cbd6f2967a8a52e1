"""The sample of training rows from which a fit starts: choice of rows, checks, start components."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from scalelatent.contract.idle_threads import run_parts
from scalelatent.engine.rowsets import SomeOfSet, StoredSets
from scalelatent.errors import DataError
from scalelatent.estimators.steps import MappedRows
from scalelatent.kernels.streams import stream
from scalelatent.models.linear_mixture.model.components import Components
from scalelatent.models.linear_mixture.model.start import (
    LEAST_ROWS,
    SAMPLE_ROWS,
    seed_centres,
    start_components,
)
from scalelatent.reductions.moments import OUTLIER_SHARE

# Number of rows whose classes are read at a time.
CODE_BLOCK_ROWS = 2**20


def _iterate_codes(rows: MappedRows, classes: np.ndarray | None) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (index of the first row, class index of each row) for consecutive ranges of rows.

    Rows of weight 0 and masked rows have the class -1.
    """
    dataset, mask = rows.dataset, rows.mask
    for first in range(0, len(dataset), CODE_BLOCK_ROWS):
        stop = min(first + CODE_BLOCK_ROWS, len(dataset))
        if classes is None:
            codes = np.zeros(stop - first, dtype=np.int32)
        else:
            codes = np.array(dataset.read_codes(first, stop, classes))
        if (weight := dataset.read_weight(first, stop)) is not None:
            codes[weight <= 0] = -1
        if mask is not None:
            number = np.arange(first, stop)
            inside = (number >= mask.start) & (number < mask.stop)
            codes[inside != mask.inside] = -1
        yield first, codes


def count_class_rows(rows: MappedRows, classes: np.ndarray | None) -> np.ndarray:
    """Return the number of rows of each class; rows of weight 0 do not count."""
    n = 1 if classes is None else len(classes)
    parts = (np.bincount(codes[codes >= 0], minlength=n) for _, codes in _iterate_codes(rows, classes))
    return sum(parts, np.zeros(n, int))


def check_class_counts(
    rows: MappedRows, counts: np.ndarray, sizes: np.ndarray, classes: np.ndarray | None
) -> None:
    """Raise a DataError that names a class with fewer rows (``counts``) than components (``sizes``)."""
    where = rows.url or "the training rows"
    counted = "rows of non-zero weight" if rows.dataset.has_weight else "rows"
    for i, (n, k) in enumerate(zip(counts, sizes, strict=True)):
        if n >= k:
            continue
        if classes is None:
            raise DataError(f"{where}: n_components={k} needs at least {k} {counted}, and there are {n}")
        raise DataError(
            f"{where}: class {classes[i]} has {n} {counted}, fewer than its {k} components: lower "
            "n_components, give one number for each class, or add rows"
        )


def choose_sample(
    rows: MappedRows, classes: np.ndarray | None, counts: np.ndarray, sizes: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Choose rows of each class at random; return their indices, ascending, and their classes."""
    chosen = []
    for c, (n, k) in enumerate(zip(counts, sizes, strict=True)):
        size = min(int(n), max(SAMPLE_ROWS * int(k), LEAST_ROWS // len(counts)))
        chosen.append(np.sort(stream(seed, "linear-mixture-sample", c).choice(int(n), size, replace=False)))
    seen, numbers, codes_of = np.zeros(len(counts), int), [], []
    for first, codes in _iterate_codes(rows, classes):
        for c in range(len(counts)):
            own = np.flatnonzero(codes == c)
            a, b = np.searchsorted(chosen[c], [seen[c], seen[c] + len(own)])
            numbers.append(first + own[chosen[c][a:b] - seen[c]])
            codes_of.append(np.full(b - a, c))
            seen[c] += len(own)
    number, code = np.concatenate(numbers), np.concatenate(codes_of)
    order = np.argsort(number, kind="stable")
    return number[order], code[order]


def read_sample(sets: StoredSets | SomeOfSet, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the sample and their classes, without rows in files that could not be read."""
    x = np.asarray(sets.read(0))
    is_there = np.ones(len(x), dtype=bool)
    is_there[list(sets.missing)] = False
    return (x, codes) if is_there.all() else (x[is_there], codes[is_there])


def find_outlier(sets: StoredSets | SomeOfSet) -> int | None:
    """Return the position of a row whose square about the mean outweighs all other rows, or None."""
    x = np.asarray(sets.read(0), dtype=np.float64)
    squares = ((x - x.mean(axis=0)) ** 2).sum(axis=1)
    largest = int(squares.argmax())
    return largest if squares[largest] > OUTLIER_SHARE * squares.sum() > 0 else None


def initialise(
    x: np.ndarray, codes: np.ndarray, sizes: np.ndarray, width: int, seed: int
) -> tuple[Components, float]:
    """Return start components for EM, and the mean variance of a feature, from the rows of a sample."""
    variance = float(x.var(axis=0, dtype=np.float64).mean())

    def seed_class(c: int) -> np.ndarray:
        return seed_centres(x[codes == c], int(sizes[c]), stream(seed, "linear-mixture-start", c))

    centres = run_parts(seed_class, range(len(sizes)))
    return start_components(np.concatenate(centres), width, seed), variance
