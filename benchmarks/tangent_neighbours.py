"""Find nearest training rows by Euclidean or by tangent distance, as a baseline for classifiers.

Tangents are derivatives of an image by small shifts, rotations and scalings; they span a plane at the image.
Tangent distance is the distance of an image from such a plane, or of two planes from each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from scalelatent.data import Dataset
from scalelatent.errors import DataError

# Function that returns the tangents (rows, kinds of tangents, features) of rows (rows, features).
Tangents = Callable[[np.ndarray], np.ndarray]
# Distances of this number of rows to this number of training rows are computed at a time, to limit memory.
QUERY_ROWS, BLOCK_ROWS = 256, 4096
# Tangents whose singular value is below this share of the row's largest one are dropped as dependent.
_TOL = 1e-4


@dataclass(frozen=True)
class NearestRows:
    """Nearest training row of each of n rows."""

    rows: np.ndarray  # row numbers, int64 (n,)
    labels: np.ndarray  # labels of these rows, (n,)
    distances: np.ndarray  # squared distances, float64 (n,)


def nearest_neighbours(
    train: Dataset,
    x: np.ndarray,
    *,
    tangents: Tangents | None = None,
    sides: int = 0,
    n_candidates: int = 40,
    damping: float = 1e-3,
) -> NearestRows:
    """Find the nearest training row of each row of x; the training rows are read block by block.

    ``sides`` is 0 (Euclidean distance), 1 (of a training row from the tangent plane of a row of x) or
    2 (distance between the planes of both rows; P. Simard, Y. LeCun, J. Denker, 1993). The distance with 2 is
    computed only for the ``n_candidates`` rows that are nearest with 1. ``damping`` penalises steps along
    unit tangents, so that planes that nearly cross far from both rows do not have distance 0.
    """
    if sides not in (0, 1, 2):
        raise ValueError(f"sides={sides!r}: give 0 (Euclidean), 1 or 2")
    if sides and tangents is None:
        raise ValueError(f"sides={sides}: give tangents, a function of rows")
    where = train.url or "the training rows"
    if not train.has_y:
        raise DataError(f"{where}: there are no labels, which the neighbours need; import them with the rows")
    if train.is_sparse or train.n_features != x.shape[1]:
        form = "CSR rows" if train.is_sparse else f"rows of {train.n_features} features"
        raise DataError(f"{where}: {form}; give dense rows of {x.shape[1]} features")
    x = np.asarray(x, dtype=np.float64)
    planes = (
        _make_planes(x, tangents) if sides and tangents is not None else np.zeros((len(x), 0, x.shape[1]))
    )
    keep = min(n_candidates if sides == 2 else 1, len(train))
    best = np.full((len(x), keep), np.inf)
    found = np.zeros((len(x), keep), dtype=np.int64)
    for first, rows in iterate_blocks(train):
        square = (rows * rows).sum(axis=1)
        for a in range(0, len(x), QUERY_ROWS):
            part = slice(a, a + QUERY_ROWS)
            distances = _one_sided_distances(x[part], planes[part], rows, square)
            few = min(keep, len(rows))
            near = np.argpartition(distances, few - 1, axis=1)[:, :few]
            all_best = np.concatenate([best[part], np.take_along_axis(distances, near, axis=1)], axis=1)
            all_found = np.concatenate([found[part], near + first], axis=1)
            # If several training rows are equally near, the first of them is the neighbour.
            order = np.lexsort((all_found, all_best), axis=1)[:, :keep]
            best[part] = np.take_along_axis(all_best, order, axis=1)
            found[part] = np.take_along_axis(all_found, order, axis=1)
    if sides == 2 and tangents is not None:
        best = _two_sided_distances(train, x, planes, found, tangents, damping)
    nearest = best.argmin(axis=1)[:, None]
    numbers = np.take_along_axis(found, nearest, axis=1)[:, 0]
    labels = train.read_y(0, len(train))[numbers]
    return NearestRows(numbers, labels, np.maximum(np.take_along_axis(best, nearest, axis=1)[:, 0], 0.0))


def iterate_blocks(train: Dataset) -> Iterator[tuple[int, np.ndarray]]:
    for first in range(0, len(train), BLOCK_ROWS):
        yield first, np.asarray(train.read_x(first, min(first + BLOCK_ROWS, len(train))), dtype=np.float64)


def _make_planes(x: np.ndarray, tangents: Tangents) -> np.ndarray:
    """Return orthonormal tangents (rows, kinds, features) of rows; linearly dependent tangents become 0."""
    _, length, ways = np.linalg.svd(np.asarray(tangents(x), dtype=np.float64), full_matrices=False)
    return np.asarray(ways * (length > _TOL * np.maximum(length[:, :1], np.finfo(float).tiny))[:, :, None])


def _one_sided_distances(
    x: np.ndarray, planes: np.ndarray, rows: np.ndarray, square: np.ndarray
) -> np.ndarray:
    """Return squared distances (rows x, training rows) of training ``rows`` from the planes of rows x.

    Planes without directions give squared Euclidean distances. ``square`` has the squared norms of ``rows``.
    """
    found = (x * x).sum(axis=1)[:, None] - 2.0 * x @ rows.T + square
    for t in range(planes.shape[1]):
        ways = planes[:, t]
        found -= ((ways * x).sum(axis=1)[:, None] - ways @ rows.T) ** 2
    return found


def _two_sided_distances(
    train: Dataset,
    x: np.ndarray,
    planes: np.ndarray,
    found: np.ndarray,
    tangents: Tangents,
    damping: float,
) -> np.ndarray:
    """Return squared distances (rows x, candidates) between the planes of rows x and of their candidates.

    ``found`` has the row numbers of the candidates (rows x, candidates).
    """
    out = np.full(found.shape, np.inf)
    for first, rows in iterate_blocks(train):
        queries, places = np.nonzero((found >= first) & (found < first + len(rows)))
        for a in range(0, len(queries), QUERY_ROWS):
            i, j = queries[a : a + QUERY_ROWS], places[a : a + QUERY_ROWS]
            other = rows[found[i, j] - first]
            both = np.concatenate([planes[i], _make_planes(other, tangents)], axis=1)
            gap = x[i] - other
            gram = both @ np.swapaxes(both, 1, 2)
            gram += damping * np.eye(both.shape[1])
            right = np.einsum("ntp,np->nt", both, gap)
            step = np.linalg.solve(gram + 1e-12 * np.eye(both.shape[1]), right[:, :, None])[:, :, 0]
            out[i, j] = (gap * gap).sum(axis=1) - (step * right).sum(axis=1)
    return out
