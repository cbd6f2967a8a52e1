"""The kernels of a bootstrap network in plain numpy and float64, with which tests compare the other kernels.

A clustering is a set of columns and k centroids, which are data rows. The code of a row is the index of its
nearest centroid on these columns. A larger score means a nearer centroid, and of equal scores the lowest
index wins. For integers, Euclidean scores are exact, so equal distances have equal scores. For floats, sums
are rounded to float64, so any of several centroids at equal distances may win.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelatent.kernels.sparse_rows import CsrRows

METRICS = ("euclidean", "cosine")


@dataclass(frozen=True)
class ScoredCentroids:
    """Centroids w that clusterings share; for a row x, centroid j has the score scale_j (w_j . x) + bias_j.

    The nearest centroid has the largest score.
    """

    w: np.ndarray  # float64 (k, columns): centroids
    # float64 (k,): 1 and -|w|^2 / 2 for the Euclidean distance; 1 / |w| and 0 for the cosine
    scale: np.ndarray
    bias: np.ndarray
    draws: np.ndarray  # bool (clusterings, k): True for the centroids of each clustering


def score_terms(squares: np.ndarray, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the factor and the constant in the score of each centroid, from their squared lengths."""
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r} is not one of {', '.join(METRICS)}")
    if metric == "euclidean":
        return np.ones(len(squares)), -0.5 * squares
    # Centroids of length 0 get the scale 0. Short documents often have no entry in a clustering's columns.
    return 1.0 / np.sqrt(np.where(squares > 0, squares, np.inf)), np.zeros(len(squares))


def squared_lengths(w: np.ndarray) -> np.ndarray:
    """Return the squared lengths of rows in float64, summed from left to right.

    With this order of the sum, dense rows, CSR rows and all backends give equal bits.
    """
    out = np.zeros(len(w))
    for first in range(0, len(w) if w.shape[1] else 0, 1024):
        part = np.square(w[first : first + 1024], dtype=np.float64)
        out[first : first + 1024] = np.add.accumulate(part, axis=1)[:, -1]
    return out


def make_bank(w: np.ndarray, metric: str, draws: np.ndarray | None = None) -> ScoredCentroids:
    """Prepare centroids ``w`` (k, columns) for :func:`nearest`.

    ``draws``, bool (clusterings, k), is true for the centroids of each clustering; if it is None, one
    clustering has all centroids.
    """
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
    """Prepare CSR centroids for :func:`nearest_sparse`; only their entries in ``columns`` count."""
    return make_bank(w.keep_columns(columns).to_dense(), metric, draws)


def nearest_sparse(x: CsrRows, centroids: ScoredCentroids) -> np.ndarray:
    """Return the code of each CSR row in each clustering, int32 (rows, clusterings)."""
    return nearest(x.to_dense(), np.arange(x.shape[1]), centroids)


@dataclass(frozen=True)
class UnitLists:
    """Centroids of some clusterings of an upper layer, as codes of the layer below.

    The layer below has V clusterings of "k below" centroids; a code of one of them is a one-hot unit.
    """

    # int (clusterings, k, V): codes of the k centroids of each clustering in the V clusterings below
    codes: np.ndarray
    # bool (clusterings, V, k below): True for the codes of the layer below that each clustering uses
    units: np.ndarray


def make_lists(codes: np.ndarray, units: np.ndarray) -> UnitLists:
    """Prepare the centroids of some clusterings of an upper layer for :func:`nearest_codes`."""
    return UnitLists(codes, units)


def nearest_codes(x: np.ndarray, lists: UnitLists) -> np.ndarray:
    """Return the centroid that shares most codes (one-hot units) with each row, in each clustering.

    The first of several such centroids is chosen. In upper layers, the paper chooses the centroid w with the
    largest product w.x (section 2.2). The product of two one-hot rows is the number of units that they share.
    If a clustering used all units, all rows would have the same length, so this centroid would be the
    nearest.
    """
    found = np.empty((len(x), len(lists.codes)), dtype=np.int32)
    for s, (codes, units) in enumerate(zip(lists.codes, lists.units, strict=True)):
        seen = units[np.arange(codes.shape[1]), codes]
        found[:, s] = ((x[:, None, :] == codes) & seen).sum(axis=2).argmax(axis=1)
    return found
