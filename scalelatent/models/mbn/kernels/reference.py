"""The kernels of a multilayer bootstrap network in plain numpy and float64: the oracle.

A clustering is a set of columns and k centroids, which are data rows; a row's code is the index of the
centroid that is nearest on these columns, and of equal scores the lowest index. Scores are float64: on
integers (uint8 and the like) Euclidean ones are exact, so equal distances are equal scores; sums of floats
round, and of centroids that are equally far any may come out ahead in the last digit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelatent.kernels.sparse_rows import CsrRows

METRICS = ("euclidean", "cosine")


@dataclass(frozen=True)
class CentroidBank:
    """Centroids of one clustering as nearest-centroid scores: score_j = scale_j (w_j . x) + bias_j."""

    # float64 (k, columns)
    w: np.ndarray
    # scale, bias: float64 (k,): 1 and -|w|^2 / 2 for Euclidean distance; 1 / |w| and 0 for
    # the cosine
    scale: np.ndarray
    bias: np.ndarray


def score_terms(squares: np.ndarray, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Scale and bias of the scores of centroids, see :class:`CentroidBank`."""
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r} is not one of {', '.join(METRICS)}")
    if metric == "euclidean":
        return np.ones(len(squares)), -0.5 * squares
    # A short document is often empty on the columns of a clustering.
    return 1.0 / np.sqrt(np.where(squares > 0, squares, np.inf)), np.zeros(len(squares))


def squared_lengths(w: np.ndarray) -> np.ndarray:
    """Squared lengths of rows, summed from left to right: the same bits for CSR rows of the same data, and in
    every body.
    """
    out = np.zeros(len(w))
    for first in range(0, len(w) if w.shape[1] else 0, 1024):
        part = np.square(w[first : first + 1024], dtype=np.float64)
        out[first : first + 1024] = np.add.accumulate(part, axis=1)[:, -1]
    return out


def make_bank(w: np.ndarray, metric: str) -> CentroidBank:
    """Centroids made ready for :func:`nearest`."""
    w = np.asarray(w, dtype=np.float64)
    return CentroidBank(w, *score_terms(squared_lengths(w), metric))


def nearest(x: np.ndarray, columns: np.ndarray, bank: CentroidBank) -> np.ndarray:
    """Index of each row's nearest centroid; the lowest of equals."""
    scores = x[:, columns].astype(np.float64) @ bank.w.T * bank.scale + bank.bias
    return scores.argmax(axis=1).astype(np.int32)


def make_sparse_bank(w: CsrRows, columns: np.ndarray, metric: str) -> CentroidBank:
    """Centroids among CSR rows made ready for :func:`nearest_sparse`."""
    dense = w.to_dense().astype(np.float64)
    inside = np.zeros(w.shape[1], dtype=bool)
    inside[columns] = True
    dense[:, ~inside] = 0.0
    return CentroidBank(dense, *score_terms(squared_lengths(dense), metric))


def nearest_sparse(x: CsrRows, bank: CentroidBank) -> np.ndarray:
    """Index of each CSR row's nearest centroid; the lowest of equals."""
    return nearest(x.to_dense(), np.arange(x.shape[1]), bank)


@dataclass(frozen=True)
class UnitLists:
    """Centroids of some upper clusterings, as codes of the layer below."""

    # int (sets, k, V): codes of the centroids of each clustering
    codes: np.ndarray
    # bool (sets, V, k below): which one-hot units each clustering looks at
    units: np.ndarray


def make_lists(codes: np.ndarray, units: np.ndarray) -> UnitLists:
    """Centroids made ready for :func:`nearest_codes`."""
    return UnitLists(codes, units)


def nearest_codes(x: np.ndarray, lists: UnitLists) -> np.ndarray:
    """Of each clustering the index of the centroid that shares most units with each row of codes; the lowest
    of equals.

    The paper's rule above the first layer is arg max w.x (section 2.2), and the product of one-hot rows
    counts the units they share. On all units this is the nearest centroid too, as all have equal lengths
    there; on a part of them lengths differ, and the centroid of least distance may be another.
    """
    found = np.empty((len(x), len(lists.codes)), dtype=np.int32)
    for s, (codes, units) in enumerate(zip(lists.codes, lists.units, strict=True)):
        seen = units[np.arange(codes.shape[1]), codes]
        found[:, s] = ((x[:, None, :] == codes) & seen).sum(axis=2).argmax(axis=1)
    return found
