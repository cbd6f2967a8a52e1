"""Nearest centroids of rows in plain numpy and float64; tests compare the fast implementations with these.

A clustering has k centroids, which are data rows, and uses some columns of the data. The code of a row is the
number of its nearest centroid. A larger score means a nearer centroid; of equal scores the lowest number
wins. For integers, Euclidean scores are exact, so equal distances have equal scores. For floats, sums are
rounded to float64, so any of several centroids at equal distances may win.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelatent.kernels.sparse_rows import CsrRows

METRICS = ("euclidean", "cosine")


@dataclass(frozen=True)
class ScoredCentroids:
    """Centroids w that clusterings share, with the terms of the score scale (w . x) + bias of a row x.

    The nearest centroid has the largest score.
    """

    w: np.ndarray  # float64 (k, columns): centroids
    scale: np.ndarray  # float64 (k,): 1 for the Euclidean distance, 1 / |w| for the cosine
    bias: np.ndarray  # float64 (k,): -|w|^2 / 2 for the Euclidean distance, 0 for the cosine
    draws: np.ndarray  # bool (clusterings, k): True for the centroids of each clustering


def score_terms(squares: np.ndarray, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return scale and bias of each centroid from its squared length; a score is scale (w . x) + bias."""
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r} is not one of {', '.join(METRICS)}")
    if metric == "euclidean":
        return np.ones(len(squares)), -0.5 * squares
    # Centroids of length 0 get the scale 0; they occur, because a clustering uses only some of the columns.
    return 1.0 / np.sqrt(np.where(squares > 0, squares, np.inf)), np.zeros(len(squares))


def squared_lengths(w: np.ndarray) -> np.ndarray:
    """Return the squared Euclidean lengths of the rows ``w`` in float64.

    The sum is from left to right, so that dense rows, CSR rows and all backends give equal bits.
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
    """Return the number of each row's nearest centroid in each clustering, int32 (rows, clusterings).

    A clustering numbers its own centroids from 0; of equally near centroids the lowest number wins.
    """
    scores = x[:, columns].astype(np.float64) @ centroids.w.T * centroids.scale + centroids.bias
    return np.stack([scores[:, own].argmax(axis=1) for own in centroids.draws], axis=1).astype(np.int32)


def make_sparse_bank(
    w: CsrRows, columns: np.ndarray, metric: str, draws: np.ndarray | None = None
) -> ScoredCentroids:
    """Prepare CSR centroids for :func:`nearest_sparse`; only their entries in ``columns`` count."""
    return make_bank(w.keep_columns(columns).to_dense(), metric, draws)


def nearest_sparse(x: CsrRows, centroids: ScoredCentroids) -> np.ndarray:
    """Return the number of each CSR row's nearest centroid in each clustering, int32 (rows, clusterings)."""
    return nearest(x.to_dense(), np.arange(x.shape[1]), centroids)


@dataclass(frozen=True)
class UnitLists:
    """Centroids of clusterings of an upper layer, whose columns are the V clusterings of the layer below.

    The value of a centroid in such a column is a code: the number of a nearest centroid in the layer below.
    """

    codes: np.ndarray  # int (clusterings, k, V): values of the k centroids of each clustering
    # bool (clusterings, V, centroids of a clustering below): True for the codes that each clustering uses
    units: np.ndarray


def make_lists(codes: np.ndarray, units: np.ndarray) -> UnitLists:
    """Prepare the centroids of clusterings of an upper layer; the arguments are the fields of `UnitLists`."""
    return UnitLists(codes, units)


def nearest_codes(x: np.ndarray, lists: UnitLists) -> np.ndarray:
    """Return the centroid that shares most codes with each row ``x``, int32 (rows, clusterings).

    A code of a row is the number of its nearest centroid in one clustering below. Of several centroids with
    the same number of shared codes, the first is chosen. In the paper (section 2.2), it is the centroid with
    the largest product with the one-hot row; this product is the number of shared codes.
    """
    found = np.empty((len(x), len(lists.codes)), dtype=np.int32)
    for s, (codes, units) in enumerate(zip(lists.codes, lists.units, strict=True)):
        seen = units[np.arange(codes.shape[1]), codes]
        found[:, s] = ((x[:, None, :] == codes) & seen).sum(axis=2).argmax(axis=1)
    return found
