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
class CentroidBank:
    """Centroids that clusterings share; the nearest has the largest score_j = scale_j (w_j . x) + bias_j."""

    # float64 (k, columns)
    w: np.ndarray
    # float64 (k,): 1 and -|w|^2 / 2 for the Euclidean distance; 1 / |w| and 0 for the cosine
    scale: np.ndarray
    bias: np.ndarray
    # bool (clusterings, k): centroids that each clustering may take
    draws: np.ndarray


def score_terms(squares: np.ndarray, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return scale and bias of the scores of centroids, see :class:`CentroidBank`."""
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r} is not one of {', '.join(METRICS)}")
    if metric == "euclidean":
        return np.ones(len(squares)), -0.5 * squares
    # A short document often has no entry in the columns of a clustering.
    return 1.0 / np.sqrt(np.where(squares > 0, squares, np.inf)), np.zeros(len(squares))


def squared_lengths(w: np.ndarray) -> np.ndarray:
    """Return the squared lengths of rows, summed from left to right.

    The order makes the bits those of CSR rows with the same data, and those of every body.
    """
    out = np.zeros(len(w))
    for first in range(0, len(w) if w.shape[1] else 0, 1024):
        part = np.square(w[first : first + 1024], dtype=np.float64)
        out[first : first + 1024] = np.add.accumulate(part, axis=1)[:, -1]
    return out


def make_bank(w: np.ndarray, metric: str, draws: np.ndarray | None = None) -> CentroidBank:
    """Prepare centroids for :func:`nearest`; without ``draws`` one clustering takes all centroids."""
    draws = np.ones((1, len(w)), dtype=bool) if draws is None else draws
    w = np.asarray(w, dtype=np.float64)
    return CentroidBank(w, *score_terms(squared_lengths(w), metric), draws)


def nearest(x: np.ndarray, columns: np.ndarray, bank: CentroidBank) -> np.ndarray:
    """Return the code of each row in each clustering, int32 (rows, clusterings).

    The code is the number of the nearest centroid, the lowest of equals, among those of the clustering.
    """
    scores = x[:, columns].astype(np.float64) @ bank.w.T * bank.scale + bank.bias
    return np.stack([scores[:, own].argmax(axis=1) for own in bank.draws], axis=1).astype(np.int32)


def make_sparse_bank(
    w: CsrRows, columns: np.ndarray, metric: str, draws: np.ndarray | None = None
) -> CentroidBank:
    """Prepare CSR centroids for :func:`nearest_sparse`."""
    dense = w.to_dense().astype(np.float64)
    inside = np.zeros(w.shape[1], dtype=bool)
    inside[columns] = True
    dense[:, ~inside] = 0.0
    return make_bank(dense, metric, draws)


def nearest_sparse(x: CsrRows, bank: CentroidBank) -> np.ndarray:
    """Return the codes of CSR rows as :func:`nearest` does."""
    return nearest(x.to_dense(), np.arange(x.shape[1]), bank)


@dataclass(frozen=True)
class UnitLists:
    """Centroids of some clusterings of an upper layer, as codes of the layer below."""

    # int (sets, k, V): codes of the centroids of each clustering
    codes: np.ndarray
    # bool (sets, V, k below): one-hot units that each clustering uses
    units: np.ndarray


def make_lists(codes: np.ndarray, units: np.ndarray) -> UnitLists:
    """Prepare centroids for :func:`nearest_codes`."""
    return UnitLists(codes, units)


def nearest_codes(x: np.ndarray, lists: UnitLists) -> np.ndarray:
    """Return the centroid that shares most units with each row, the lowest of equals, for each clustering.

    In upper layers the rule of the paper is arg max w.x (section 2.2), and the product of one-hot rows counts
    their shared units. On all units this is the nearest centroid, because all lengths are equal. On a part of
    the units lengths differ, and another centroid may be nearer.
    """
    found = np.empty((len(x), len(lists.codes)), dtype=np.int32)
    for s, (codes, units) in enumerate(zip(lists.codes, lists.units, strict=True)):
        seen = units[np.arange(codes.shape[1]), codes]
        found[:, s] = ((x[:, None, :] == codes) & seen).sum(axis=2).argmax(axis=1)
    return found
