"""The nearest training row, by Euclidean and by tangent distance: a rival that keeps all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from scalelatent.data import Dataset
from scalelatent.errors import DataError

from .clustering import Progress

Tangents = Callable[[np.ndarray], np.ndarray]
# Rows asked about at a time, and bytes of their distances to a block.
ASKED_ROWS, BLOCK_ROWS = 256, 4096
# Lengths below this share of a row's longest are none.
_FLAT = 1e-4


@dataclass(frozen=True)
class Neighbours:
    """The nearest training row of each row."""

    rows: np.ndarray  # int64 (n,)
    labels: np.ndarray
    distances: np.ndarray  # squared, float64 (n,)


def nearest_neighbours(
    train: Dataset,
    x: np.ndarray,
    *,
    tangents: Tangents | None = None,
    sides: int = 0,
    n_candidates: int = 40,
    damping: float = 1e-3,
    progress: Progress | None = None,
) -> Neighbours:
    """Find the nearest training row of each row; the training rows are streamed.

    Parameters
    ----------
    train : Dataset
        Dense rows with labels.
    x : ndarray, shape (n, features)
    tangents : callable, optional
        Rows (n, features) -> tangents (n, kinds, features), for ``sides`` above 0.
    sides : {0, 1, 2}
        Euclidean distance; from a training row to the plane of a row's tangents; between the planes of both
        (P. Simard, Y. LeCun, J. Denker, 1993).
    n_candidates : int
        Nearest ones by one side, of which the nearest by both is taken.
    damping : float
        Of two sides: penalty on steps along unit tangents, so that planes that nearly cross stay apart.
    progress : callable, optional
        Called with training rows done and training rows in all.

    Returns
    -------
    Neighbours

    Raises
    ------
    ValueError
        Tangents are missing, or ``sides`` is another number.
    DataError
        Training rows without labels, of another width, or CSR.

    Examples
    --------
    >>> train = Dataset.from_arrays(np.array([[0.0, 0.0], [3.0, 3.0]]), np.array(["a", "b"]))
    >>> nearest_neighbours(train, np.array([[2.0, 2.0]])).labels.tolist()
    ['b']
    >>> along_x = lambda rows: np.tile([[[1.0, 0.0]]], (len(rows), 1, 1))
    >>> nearest_neighbours(train, np.array([[5.0, 1.0]]), tangents=along_x, sides=1).labels.tolist()
    ['a']
    """
    if sides not in (0, 1, 2):
        raise ValueError(f"sides={sides!r}: give 0 (Euclidean), 1 or 2")
    if sides and tangents is None:
        raise ValueError(f"sides={sides}: give tangents, a function of rows")
    where = train.url or "the training rows"
    if not train.has_y:
        raise DataError(f"{where}: there are no labels, which the nearest row would give")
    if train.is_sparse or train.n_features != x.shape[1]:
        form = "CSR rows" if train.is_sparse else f"rows of {train.n_features} features"
        raise DataError(f"{where}: {form}; give dense ones of {x.shape[1]}")
    x = np.asarray(x, dtype=np.float64)
    planes = _planes(x, tangents) if sides and tangents is not None else np.zeros((len(x), 0, x.shape[1]))
    keep = min(n_candidates if sides == 2 else 1, len(train))
    best = np.full((len(x), keep), np.inf)
    found = np.zeros((len(x), keep), dtype=np.int64)
    for first, rows in _blocks(train):
        square = (rows * rows).sum(axis=1)
        for a in range(0, len(x), ASKED_ROWS):
            part = slice(a, a + ASKED_ROWS)
            distances = _one_sided(x[part], planes[part], rows, square)
            few = min(keep, len(rows))
            near = np.argpartition(distances, few - 1, axis=1)[:, :few]
            all_best = np.concatenate([best[part], np.take_along_axis(distances, near, axis=1)], axis=1)
            all_found = np.concatenate([found[part], near + first], axis=1)
            # Of equals the first row.
            order = np.lexsort((all_found, all_best), axis=1)[:, :keep]
            best[part] = np.take_along_axis(all_best, order, axis=1)
            found[part] = np.take_along_axis(all_found, order, axis=1)
        if progress is not None:
            progress(first + len(rows), len(train))
    if sides == 2 and tangents is not None:
        best = _two_sided(train, x, planes, found, tangents, damping)
    nearest = best.argmin(axis=1)[:, None]
    numbers = np.take_along_axis(found, nearest, axis=1)[:, 0]
    labels = train.read_y(0, len(train))[numbers]
    return Neighbours(numbers, labels, np.maximum(np.take_along_axis(best, nearest, axis=1)[:, 0], 0.0))


def _blocks(train: Dataset) -> Iterator[tuple[int, np.ndarray]]:
    for first in range(0, len(train), BLOCK_ROWS):
        yield first, np.asarray(train.read_x(first, min(first + BLOCK_ROWS, len(train))), dtype=np.float64)


def _planes(x: np.ndarray, tangents: Tangents) -> np.ndarray:
    """Orthonormal tangents (n, kinds, p); those of no length are 0."""
    _, length, ways = np.linalg.svd(np.asarray(tangents(x), dtype=np.float64), full_matrices=False)
    return np.asarray(ways * (length > _FLAT * np.maximum(length[:, :1], np.finfo(float).tiny))[:, :, None])


def _one_sided(x: np.ndarray, planes: np.ndarray, rows: np.ndarray, square: np.ndarray) -> np.ndarray:
    """Squared distances (n, rows) from planes; of planes without directions, from the rows themselves."""
    found = (x * x).sum(axis=1)[:, None] - 2.0 * x @ rows.T + square
    for t in range(planes.shape[1]):
        ways = planes[:, t]
        found -= ((ways * x).sum(axis=1)[:, None] - ways @ rows.T) ** 2
    return found


def _two_sided(
    train: Dataset,
    x: np.ndarray,
    planes: np.ndarray,
    found: np.ndarray,
    tangents: Tangents,
    damping: float,
) -> np.ndarray:
    """Squared distances (n, candidates) between planes; each block of training rows is read once."""
    out = np.full(found.shape, np.inf)
    for first, rows in _blocks(train):
        asked, places = np.nonzero((found >= first) & (found < first + len(rows)))
        for a in range(0, len(asked), ASKED_ROWS):
            i, j = asked[a : a + ASKED_ROWS], places[a : a + ASKED_ROWS]
            other = rows[found[i, j] - first]
            both = np.concatenate([planes[i], _planes(other, tangents)], axis=1)
            gap = x[i] - other
            gram = both @ np.swapaxes(both, 1, 2)
            gram += damping * np.eye(both.shape[1])
            right = np.einsum("ntp,np->nt", both, gap)
            step = np.linalg.solve(gram + 1e-12 * np.eye(both.shape[1]), right[:, :, None])[:, :, 0]
            out[i, j] = (gap * gap).sum(axis=1) - (step * right).sum(axis=1)
    return out
