"""The kernels of a bootstrap network in plain numpy and float64; tests compare the other bodies with it.

A clustering is a set of columns and k centroids, which are data rows. The code of a row is the index of the
nearest centroid on these columns; of equal scores the lowest index. Scores are float64. On integers Euclidean
scores are exact, so equal distances have equal scores. On floats sums are rounded, and of centroids at equal
distances any may win in the last digit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelatent.kernels.sparse_rows import CsrRows

METRICS = ("euclidean", "cosine")


@dataclass(frozen=True)
class ScoredCentroids:
    """Centroids that clusterings share; the nearest has the largest score_j = scale_j (w_j . x) + bias_j."""

    # float64 (k, columns)
    w: np.ndarray
    # float64 (k,): 1 and -|w|^2 / 2 for the Euclidean distance; 1 / |w| and 0 for the cosine
    scale: np.ndarray
    bias: np.ndarray
    # bool (clusterings, k): True for the centroids of each clustering
    draws: np.ndarray


def score_terms(squares: np.ndarray, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (scale, bias) of scores of centroids with these squared lengths (:class:`ScoredCentroids`)."""
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r} is not one of {', '.join(METRICS)}")
    if metric == "euclidean":
        return np.ones(len(squares)), -0.5 * squares
    # A short document often has no entry in the columns of a clustering.
    return 1.0 / np.sqrt(np.where(squares > 0, squares, np.inf)), np.zeros(len(squares))


def squared_lengths(w: np.ndarray) -> np.ndarray:
    """Return the squared lengths of rows, summed from left to right.

    With this order dense rows, CSR rows and all backends give equal bits.
    """
    out = np.zeros(len(w))
    for first in range(0, len(w) if w.shape[1] else 0, 1024):
        part = np.square(w[first : first + 1024], dtype=np.float64)
        out[first : first + 1024] = np.add.accumulate(part, axis=1)[:, -1]
    return out


def make_bank(w: np.ndarray, metric: str, draws: np.ndarray | None = None) -> ScoredCentroids:
    """Prepare centroids for :func:`nearest`; without ``draws`` a single clustering has all centroids."""
    draws = np.ones((1, len(w)), dtype=bool) if draws is None else draws
    w = np.asarray(w, dtype=np.float64)
    return ScoredCentroids(w, *score_terms(squared_lengths(w), metric), draws)


def nearest(x: np.ndarray, columns: np.ndarray, centroids: ScoredCentroids) -> np.ndarray:
    """Return the code of each row in each clustering, int32 (rows, clusterings).

    The code is the number of the nearest centroid among those of the clustering; of equally near centroids
    the lowest number.
    """
    scores = x[:, columns].astype(np.float64) @ centroids.w.T * centroids.scale + centroids.bias
    return np.stack([scores[:, own].argmax(axis=1) for own in centroids.draws], axis=1).astype(np.int32)


def make_sparse_bank(
    w: CsrRows, columns: np.ndarray, metric: str, draws: np.ndarray | None = None
) -> ScoredCentroids:
    """Prepare CSR centroids for :func:`nearest_sparse`."""
    dense = w.to_dense().astype(np.float64)
    inside = np.zeros(w.shape[1], dtype=bool)
    inside[columns] = True
    dense[:, ~inside] = 0.0
    return make_bank(dense, metric, draws)


def nearest_sparse(x: CsrRows, centroids: ScoredCentroids) -> np.ndarray:
    """Return the codes of CSR rows as :func:`nearest` does."""
    return nearest(x.to_dense(), np.arange(x.shape[1]), centroids)


@dataclass(frozen=True)
class UnitLists:
    """Centroids of some clusterings of an upper layer, as codes of the layer below."""

    # int (sets, k, V): codes of the centroids of each clustering
    codes: np.ndarray
    # bool (sets, V, k below): one-hot units that each clustering uses
    units: np.ndarray


def make_lists(codes: np.ndarray, units: np.ndarray) -> UnitLists:
    """Prepare the centroids of some clusterings of an upper layer for :func:`nearest_codes`."""
    return UnitLists(codes, units)


def nearest_codes(x: np.ndarray, lists: UnitLists) -> np.ndarray:
    """Return by row and clustering the centroid that shares most units with the row, the first of equals.

    In upper layers the rule of the paper is arg max w.x (section 2.2), and the product of one-hot rows counts
    their shared units. On all units this is the nearest centroid, because all lengths are equal. On a part of
    the units lengths differ, and another centroid may be nearer.
    """
    found = np.empty((len(x), len(lists.codes)), dtype=np.int32)
    for s, (codes, units) in enumerate(zip(lists.codes, lists.units, strict=True)):
        seen = units[np.arange(codes.shape[1]), codes]
        found[:, s] = ((x[:, None, :] == codes) & seen).sum(axis=2).argmax(axis=1)
    return found
