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
class Bank:
    """Centroids of one clustering as nearest-centroid scores: score_j = scale_j (w_j . x) + bias_j.

    Attributes
    ----------
    w : ndarray of float64, shape (k, columns)
    scale, bias : ndarray of float64, shape (k,)
        1 and -|w|^2 / 2 for Euclidean distance; 1 / |w| and 0 for the cosine.
    """

    w: np.ndarray
    scale: np.ndarray
    bias: np.ndarray


def score_terms(squares: np.ndarray, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Scale and bias of the scores of centroids, see :class:`Bank`.

    Parameters
    ----------
    squares : ndarray of float64, shape (k,)
        Squared lengths of the centroids on the columns of the clustering.
    metric : {"euclidean", "cosine"}

    Returns
    -------
    scale, bias : ndarray of float64, shape (k,)

        Under the cosine a centroid of zeros has scale 0: its score is 0 with every row.

    Raises
    ------
    ValueError
        An unknown metric.

    Examples
    --------
    >>> [part.tolist() for part in score_terms(np.array([25.0]), "euclidean")]
    [[1.0], [-12.5]]
    >>> [part.tolist() for part in score_terms(np.array([25.0]), "cosine")]
    [[0.2], [0.0]]
    """
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r} is not one of {', '.join(METRICS)}")
    if metric == "euclidean":
        return np.ones(len(squares)), -0.5 * squares
    # A short document is often empty on the columns of a clustering.
    return 1.0 / np.sqrt(np.where(squares > 0, squares, np.inf)), np.zeros(len(squares))


def squared_lengths(w: np.ndarray) -> np.ndarray:
    """Squared lengths of rows, summed from left to right: the same bits for CSR rows of the same data, and in
    every body.

    Parameters
    ----------
    w : ndarray, shape (k, columns)

    Returns
    -------
    ndarray of float64, shape (k,)

    Examples
    --------
    >>> squared_lengths(np.array([[3, 4], [0, 1]], dtype=np.uint8)).tolist()
    [25.0, 1.0]
    """
    out = np.zeros(len(w))
    for first in range(0, len(w) if w.shape[1] else 0, 1024):
        part = np.square(w[first : first + 1024], dtype=np.float64)
        out[first : first + 1024] = np.add.accumulate(part, axis=1)[:, -1]
    return out


def make_bank(w: np.ndarray, metric: str) -> Bank:
    """Centroids made ready for :func:`nearest`.

    Parameters
    ----------
    w : ndarray, shape (k, columns)
        Rows of the data on the columns of the clustering.
    metric : {"euclidean", "cosine"}

    Returns
    -------
    Bank

    Raises
    ------
    ValueError
        As :func:`score_terms`.

    Examples
    --------
    >>> make_bank(np.array([[3, 4]], dtype=np.uint8), "cosine").scale.tolist()
    [0.2]
    """
    w = np.asarray(w, dtype=np.float64)
    return Bank(w, *score_terms(squared_lengths(w), metric))


def nearest(x: np.ndarray, columns: np.ndarray, bank: Bank) -> np.ndarray:
    """Index of each row's nearest centroid; the lowest of equals.

    Parameters
    ----------
    x : ndarray, shape (rows, p)
        All finite.
    columns : ndarray of int, shape (columns,)
        The columns of the clustering.
    bank : Bank

    Returns
    -------
    ndarray of int32, shape (rows,)

    Examples
    --------
    >>> bank = make_bank(np.array([[0.0, 0.0], [1.0, 1.0]]), "euclidean")
    >>> nearest(np.array([[9.0, 0.2, 0.1], [9.0, 1.2, 0.9]]), np.array([1, 2]), bank).tolist()
    [0, 1]
    """
    scores = x[:, columns].astype(np.float64) @ bank.w.T * bank.scale + bank.bias
    return scores.argmax(axis=1).astype(np.int32)


def make_sparse_bank(w: CsrRows, columns: np.ndarray, metric: str) -> Bank:
    """Centroids among CSR rows made ready for :func:`nearest_sparse`.

    Parameters
    ----------
    w : CsrRows, shape (k, p)
    columns : ndarray of int, shape (columns,)
        The columns of the clustering; entries elsewhere do not count.
    metric : {"euclidean", "cosine"}

    Returns
    -------
    Bank
        With all p columns; zero outside those of the clustering.

    Raises
    ------
    ValueError
        As :func:`score_terms`.

    Examples
    --------
    >>> rows = CsrRows(np.array([3.0, 4.0, 7.0]), np.array([0, 1, 2]), np.array([0, 3]), (1, 3))
    >>> make_sparse_bank(rows, np.array([0, 1]), "euclidean").bias.tolist()
    [-12.5]
    """
    dense = w.to_dense().astype(np.float64)
    inside = np.zeros(w.shape[1], dtype=bool)
    inside[columns] = True
    dense[:, ~inside] = 0.0
    return Bank(dense, *score_terms(squared_lengths(dense), metric))


def nearest_sparse(x: CsrRows, bank: Bank) -> np.ndarray:
    """Index of each CSR row's nearest centroid; the lowest of equals.

    Parameters
    ----------
    x : CsrRows, shape (rows, p)
    bank : Bank
        As :func:`make_sparse_bank` gives it.

    Returns
    -------
    ndarray of int32, shape (rows,)

    Examples
    --------
    >>> rows = CsrRows(np.array([1.0, 2.0]), np.array([0, 2]), np.array([0, 1, 2]), (2, 3))
    >>> nearest_sparse(rows, make_sparse_bank(rows, np.array([0, 2]), "cosine")).tolist()
    [0, 1]
    """
    return nearest(x.to_dense(), np.arange(x.shape[1]), bank)


@dataclass(frozen=True)
class Lists:
    """Centroids of some upper clusterings, as codes of the layer below.

    Attributes
    ----------
    codes : ndarray of int, shape (sets, k, V)
        Codes of the centroids of each clustering.
    units : ndarray of bool, shape (sets, V, k below)
        Which one-hot units each clustering looks at.
    """

    codes: np.ndarray
    units: np.ndarray


def make_lists(codes: np.ndarray, units: np.ndarray) -> Lists:
    """Centroids made ready for :func:`nearest_codes`.

    Parameters
    ----------
    codes : ndarray of uint16 or uint32, shape (sets, k, V)
        Codes of the centroids in the layer below, of each of some clusterings.
    units : ndarray of bool, shape (sets, V, k below)
        The one-hot units (clustering, code) that each of them looks at.

    Returns
    -------
    Lists

    Examples
    --------
    >>> make_lists(np.array([[[0, 1]]]), np.ones((1, 2, 2), dtype=bool)).codes.tolist()
    [[[0, 1]]]
    """
    return Lists(codes, units)


def nearest_codes(x: np.ndarray, lists: Lists) -> np.ndarray:
    """Of each clustering the index of the centroid that shares most units with each row of codes; the lowest
    of equals.

    The paper's rule above the first layer is arg max w.x (section 2.2), and the product of one-hot rows
    counts the units they share. On all units this is the nearest centroid too, as all have equal lengths
    there; on a part of them lengths differ, and the centroid of least distance may be another.

    Parameters
    ----------
    x : ndarray of uint16 or uint32, shape (rows, V)
    lists : Lists

    Returns
    -------
    ndarray of int32, shape (rows, sets)

    Examples
    --------
    >>> lists = make_lists(np.array([[[0, 1], [1, 1]]]), np.ones((1, 2, 2), dtype=bool))
    >>> nearest_codes(np.array([[1, 1], [0, 0], [1, 0]]), lists).tolist()
    [[1], [0], [1]]
    """
    found = np.empty((len(x), len(lists.codes)), dtype=np.int32)
    for s, (codes, units) in enumerate(zip(lists.codes, lists.units, strict=True)):
        seen = units[np.arange(codes.shape[1]), codes]
        found[:, s] = ((x[:, None, :] == codes) & seen).sum(axis=2).argmax(axis=1)
    return found
