"""Nearest centroids of CSR rows: the entries of the centroids lie by columns, and only those that a row's own
entries meet are touched.

Sums are float64 and go over a row's entries from left to right, as over dense rows: a dataset has the same
codes in either form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelatent._numba import entry, filled, given, kernel
from scalelatent.models.base import CsrRows
from scalelatent.models.mbn.reference import score_terms


@dataclass(frozen=True)
class Postings:
    """Centroids of one clustering by columns.

    Attributes
    ----------
    start : ndarray of int64, shape (p + 1,)
        Where the entries of each column begin.
    centroid : ndarray of int32, shape (entries,)
    value : ndarray of float32, shape (entries,)
    terms : ndarray of float64, shape (2, k)
        Scale and bias of the scores, see :class:`..reference.Bank`.
    """

    start: np.ndarray
    centroid: np.ndarray
    value: np.ndarray
    terms: np.ndarray


def make_sparse_bank(w: CsrRows, columns: np.ndarray, metric: str) -> Postings:
    """Postings for :func:`nearest_sparse`, see :func:`..reference.make_sparse_bank`.

    Examples
    --------
    >>> rows = CsrRows(np.array([3.0, 4.0, 7.0]), np.array([0, 1, 2]), np.array([0, 3]), (1, 3))
    >>> make_sparse_bank(rows, np.array([0, 2]), "euclidean").start.tolist()
    [0, 1, 1, 2]
    """
    k, p = w.shape
    inside = np.zeros(p, dtype=bool)
    inside[columns] = True
    kept = np.flatnonzero(inside[w.indices])
    column, value = np.asarray(w.indices)[kept], np.asarray(w.data, dtype=np.float32)[kept]
    centroid = (np.searchsorted(w.indptr, kept, side="right") - 1).astype(np.int32)
    squares = np.bincount(centroid, weights=value.astype(np.float64) ** 2, minlength=k)
    terms = np.stack(score_terms(squares, metric))
    order = np.argsort(column, kind="stable")
    start = np.zeros(p + 1, dtype=np.int64)
    np.cumsum(np.bincount(column, minlength=p), out=start[1:])
    return Postings(start, centroid[order], value[order], terms)


def nearest_sparse(x: CsrRows, bank: Postings) -> np.ndarray:
    """Index of each CSR row's nearest centroid, see :func:`..reference.nearest_sparse`.

    Examples
    --------
    >>> rows = CsrRows(np.array([1.0, 2.0]), np.array([0, 2]), np.array([0, 1, 2]), (2, 3))
    >>> nearest_sparse(rows, make_sparse_bank(rows, np.array([0, 2]), "cosine")).tolist()
    [0, 1]
    """
    out = np.empty(len(x), dtype=np.int32)
    data = np.ascontiguousarray(x.data, dtype=np.float32)
    indices = np.ascontiguousarray(x.indices, dtype=np.int64)
    indptr = np.ascontiguousarray(x.indptr, dtype=np.int64)
    _nearest_sparse(data, indices, indptr, bank.start, bank.centroid, bank.value, bank.terms, out)
    return out


@kernel
def _add_products(value, ids, entries, sums):  # type: ignore[no-untyped-def]
    for e in range(len(ids)):
        sums[ids[e]] += value * np.float64(entries[e])


@entry(
    given("f4", 1),
    given("i8", 1),
    given("i8", 1),
    given("i8", 1),
    given("i4", 1),
    given("f4", 1),
    given("f8", 2),
    filled("i4", 1),
)
def _nearest_sparse(data, indices, indptr, start, centroid, value, terms, out):  # type: ignore[no-untyped-def]
    k = terms.shape[1]
    sums, scale, bias = np.empty(k), terms[0], terms[1]
    for i in range(len(out)):
        sums[:] = 0.0
        for e in range(indptr[i], indptr[i + 1]):
            a, b = start[indices[e]], start[indices[e] + 1]
            _add_products(np.float64(data[e]), centroid[a:b], value[a:b], sums)
        best, code = -np.inf, 0
        for j in range(k):
            score = sums[j] * scale[j] + bias[j]
            if score > best:
                best, code = score, j
        out[i] = code
