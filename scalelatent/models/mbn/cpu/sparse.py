"""Nearest centroids of CSR rows: only what a row's own entries meet is multiplied.

Few columns hold most entries (Zipf). A column in which more than one of 16 centroids has an entry lies dense:
an entry of a row adds a multiple of it to the scores of 64 centroids at a time, eight sums in registers. The
other columns are postings, added to the scores one by one. The scan is float32, and the few rows whose winner
leads by less than rounding can do are decided in float64, as over dense rows: sums there go over a row's
entries from left to right, so a dataset has the same codes in either form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from scalelatent._numba import entry, filled, given, kernel
from scalelatent.models.csr import CsrRows
from scalelatent.models.mbn.reference import score_terms
from scalelatent.models.vectors import BYTES, at, spread

# Wider vectors gain nothing: loads are the limit.
LANES = 8
_VECS = 8
PANEL = _VECS * LANES
# A dense column costs a row some k / 10 steps, postings about two each.
_DENSE_SHARE = 16
# Bytes of the scores of a strip: rows enough that a panel is read from the first- and second-level caches.
_SCORE_BYTES = 2**19
_ABSENT = -1
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VEC = ir.VectorType(_F32, LANES)


@dataclass(frozen=True)
class SparseBank:
    """Centroids of one clustering by columns.

    Attributes
    ----------
    slot : ndarray of int32, shape (p,)
        Of a dense column its place; -2 - place of one with postings; -1 where no centroid has an entry or the
        clustering does not look.
    panels : ndarray of float32, shape (k rounded up to 64, dense columns, 64)
        Flat: panels of 64 centroids, the last filled up with zeros.
    start : ndarray of int64, shape (columns with postings + 1,)
    centroid : ndarray of int32, shape (postings,)
    value : ndarray of float32, shape (postings,)
    scale, bias : ndarray of float32, shape (k rounded up to 64,)
        Of the scores, see :class:`..reference.Bank`; -inf for centroids that only fill up.
    exact : ndarray of float64, shape (2, k)
        Scale and bias once more.
    rows : (ndarray of float32, ndarray of int32, ndarray of int64)
        Values, columns and row pointers of the centroids, on the columns of the clustering alone.
    error : (float, float)
        A score of float32 from e entries is off by less than ``(e + 4) 2^-24 error[0] |x| + error[1]``.
    """

    slot: np.ndarray
    panels: np.ndarray
    start: np.ndarray
    centroid: np.ndarray
    value: np.ndarray
    scale: np.ndarray
    bias: np.ndarray
    exact: np.ndarray
    rows: tuple[np.ndarray, np.ndarray, np.ndarray]
    error: tuple[float, float]


def make_sparse_bank(w: CsrRows, columns: np.ndarray, metric: str) -> SparseBank:
    """Columns of centroids for :func:`nearest_sparse`, see :func:`..reference.make_sparse_bank`.

    Examples
    --------
    >>> rows = CsrRows(np.array([3.0, 4.0, 7.0]), np.array([0, 1, 2]), np.array([0, 3]), (1, 3))
    >>> make_sparse_bank(rows, np.array([0, 2]), "euclidean").slot.tolist()
    [0, -1, 1]
    """
    k, p = w.shape
    inside = np.zeros(p, dtype=bool)
    inside[columns] = True
    kept = np.flatnonzero(inside[w.indices])
    column, value = np.asarray(w.indices)[kept].astype(np.int32), np.asarray(w.data, dtype=np.float32)[kept]
    centroid = (np.searchsorted(w.indptr, kept, side="right") - 1).astype(np.int32)
    squares = np.bincount(centroid, weights=value.astype(np.float64) ** 2, minlength=k)
    exact = np.stack(score_terms(squares, metric))
    full = -(-k // PANEL) * PANEL
    scale, bias = np.zeros(full, dtype=np.float32), np.full(full, -np.inf, dtype=np.float32)
    scale[:k], bias[:k] = exact
    counts = np.bincount(column, minlength=p)
    dense, thin = (np.flatnonzero(which) for which in (counts * _DENSE_SHARE > k, counts > 0))
    thin = np.setdiff1d(thin, dense, assume_unique=True)
    slot = np.full(p, _ABSENT, dtype=np.int32)
    slot[dense], slot[thin] = np.arange(len(dense)), -2 - np.arange(len(thin))
    place = slot[column]
    panels = np.zeros((full // PANEL, len(dense), PANEL), dtype=np.float32)
    here = place >= 0
    panels[centroid[here] // PANEL, place[here], centroid[here] % PANEL] = value[here]
    order = np.flatnonzero(~here)
    order = order[np.argsort(column[order], kind="stable")]
    start = np.concatenate([[0], np.cumsum(counts[thin])]).astype(np.int64)
    pointers = np.searchsorted(centroid, np.arange(k + 1)).astype(np.int64)
    lengths = np.sqrt(squares) * exact[0]
    error = (float(lengths.max()), 4 * 2.0**-24 * float(np.abs(exact[1]).max()))
    postings = (start, centroid[order], value[order])
    return SparseBank(
        slot, panels.reshape(-1), *postings, scale, bias, exact, (value, column, pointers), error
    )


def nearest_sparse(x: CsrRows, bank: SparseBank) -> np.ndarray:
    """Index of each CSR row's nearest centroid, see :func:`..reference.nearest_sparse`; float32 values and
    int32 columns are taken as they are.

    Examples
    --------
    >>> rows = CsrRows(np.array([1.0, 2.0]), np.array([0, 2]), np.array([0, 1, 2]), (2, 3))
    >>> nearest_sparse(rows, make_sparse_bank(rows, np.array([0, 2]), "cosine")).tolist()
    [0, 1]
    """
    out = np.empty(len(x), dtype=np.int32)
    data = np.ascontiguousarray(x.data, dtype=np.float32)
    indices = np.ascontiguousarray(x.indices, dtype=np.int32)
    indptr = np.ascontiguousarray(x.indptr, dtype=np.int64)
    postings = (bank.start, bank.centroid, bank.value)
    terms = (bank.scale, bank.bias, bank.exact)
    _nearest_sparse(
        data, indices, indptr, bank.slot, bank.panels, *postings, *terms, *bank.rows, *bank.error, out
    )
    return out


@intrinsic
def _score(typingctx, places, values, count, panel, scores, scale, bias, lanes, j):  # type: ignore[no-untyped-def]
    """Scores of a row with the 64 centroids of a panel, the first of which is ``j``; addresses, all int64.

    ``scores`` holds what the postings gave, and then the scores; ``places`` are the byte offsets of the
    columns of ``count`` entries in the panel; ``lanes`` holds of each lane the best score so far, the second
    best, and where the best is.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places, values, count, panel, scores, scale, bias, lanes, j = args
        words = ir.VectorType(_I32, LANES)
        vector = ir.FunctionType(_VEC, [_VEC] * 3)
        fma = cgutils.get_or_insert_function(builder.module, vector, f"llvm.fma.v{LANES}f32")
        wide = BYTES * LANES
        load = lambda base, v: builder.load(at(builder, base, _I64(wide * v), _VEC), align=BYTES)  # noqa: E731
        begun = [load(scores, v) for v in range(_VECS)]
        entry = builder.block
        loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", count, _I64(0)), loop, done)
        builder.position_at_end(loop)
        e, sums = builder.phi(_I64), [builder.phi(_VEC) for _ in range(_VECS)]
        place = builder.load(at(builder, places, builder.mul(e, _I64(8)), _I64), align=8)
        value = builder.load(at(builder, values, builder.mul(e, _I64(BYTES)), _F32), align=BYTES)
        every = spread(builder, value, LANES)
        column = builder.add(panel, place)
        more = [builder.call(fma, [every, load(column, v), sums[v]]) for v in range(_VECS)]
        following = builder.add(e, _I64(1))
        for phi, old, new in zip((e, *sums), (_I64(0), *begun), (following, *more), strict=True):
            phi.add_incoming(old, entry)
            phi.add_incoming(new, loop)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
        builder.position_at_end(done)
        totals = [builder.phi(_VEC) for _ in range(_VECS)]
        for v, total in enumerate(totals):
            total.add_incoming(begun[v], entry)
            total.add_incoming(more[v], loop)
        top, second = load(lanes, 0), load(lanes, 1)
        where = builder.load(at(builder, lanes, _I64(2 * wide), words), align=BYTES)
        index = builder.add(
            spread(builder, builder.trunc(j, _I32), LANES), ir.Constant(words, list(range(LANES)))
        )
        for v, total in enumerate(totals):
            score = builder.fadd(builder.fmul(total, load(scale, v)), load(bias, v))
            builder.store(score, at(builder, scores, _I64(wide * v), _VEC), align=BYTES)
            better = builder.fcmp_ordered(">", score, top)
            loser = builder.select(better, top, score)
            second = builder.select(builder.fcmp_ordered(">", loser, second), loser, second)
            top = builder.select(better, score, top)
            where = builder.select(better, builder.add(index, ir.Constant(words, [LANES * v] * LANES)), where)
        for place, what in enumerate((top, second, where)):
            builder.store(what, at(builder, lanes, _I64(wide * place), what.type), align=BYTES)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), codegen


@kernel
def _sort_out(data, indices, a, b, slot, size, i, places, values, thin, weights):  # type: ignore[no-untyped-def]
    """Entries a to b of row i: those of dense columns and those with postings; returns how many of each, and
    the length of the row on both.
    """
    dense, posted, total = np.uint64(0), np.uint64(0), np.float32(0.0)
    one, sign = np.uint64(1), np.uint64(63)
    for e in range(np.uint64(a), np.uint64(b)):
        value, place = data[e], np.int64(slot[np.uint64(indices[e])])
        places[i, dense], values[i, dense] = place * size, value
        thin[posted], weights[posted] = -2 - place, value
        # Sign bits: of a comparison the compiler makes a branch, which goes either way.
        dense += one - (np.uint64(place) >> sign)
        posted += np.uint64(place - _ABSENT) >> sign
    for e in range(dense):
        total += values[i, e] * values[i, e]
    for e in range(posted):
        total += weights[e] * weights[e]
    return dense, posted, np.sqrt(np.float64(total)) * (1.0 + 2.0**-20 * (b - a))


@kernel
def _add_postings(thin, weights, count, start, centroid, value, i, scores):  # type: ignore[no-untyped-def]
    for c in range(np.uint64(count)):
        weight, place = weights[c], np.uint64(thin[c])
        for e in range(np.uint64(start[place]), np.uint64(start[place + np.uint64(1)])):
            scores[i, np.uint64(centroid[e])] += weight * value[e]


@kernel
def _product(data, indices, values, columns):  # type: ignore[no-untyped-def]
    """Of two sparse rows, in float64, from left to right."""
    total, a, b = 0.0, 0, 0
    while a < len(indices) and b < len(columns):
        if indices[a] == columns[b]:
            total += np.float64(data[a]) * np.float64(values[b])
        left, right = indices[a], columns[b]
        a += left <= right
        b += right <= left
    return total


@kernel
def _decide(data, indices, scores, floor, exact, values, columns, pointers):  # type: ignore[no-untyped-def]
    """The centroid of the largest score in float64 among those at or above ``floor``."""
    best, code = -np.inf, 0
    for j in range(exact.shape[1]):
        if scores[j] >= floor:
            a, b = pointers[j], pointers[j + 1]
            total = _product(data, indices, values[a:b], columns[a:b])
            score = total * exact[0, j] + exact[1, j]
            if score > best:
                best, code = score, j
    return code


@entry(
    given("f4", 1),
    given("i4", 1),
    given("i8", 1),
    given("i4", 1),
    given("f4", 1),
    given("i8", 1),
    given("i4", 1),
    given("f4", 1),
    given("f4", 1),
    given("f4", 1),
    given("f8", 2),
    given("f4", 1),
    given("i4", 1),
    given("i8", 1),
    types.float64,
    types.float64,
    filled("i4", 1),
)
def _nearest_sparse(  # type: ignore[no-untyped-def]
    data,
    indices,
    indptr,
    slot,
    panels,
    start,
    centroid,
    value,
    scale,
    bias,
    exact,
    values_w,
    columns_w,
    pointers_w,
    slope,
    floor,
    out,
):
    n, full = len(out), len(scale)
    strip = max(8, min(128, _SCORE_BYTES // (BYTES * full)))
    widest = 0
    for i in range(n):
        widest = max(widest, indptr[i + 1] - indptr[i])
    scores = np.empty((strip, full), dtype=np.float32)
    # Of each lane the best score, the second best, and where the best is: an integer, written by _score.
    lanes = np.empty((strip, 3 * LANES), dtype=np.float32)
    best, second, where = lanes[:, :LANES], lanes[:, LANES : 2 * LANES], lanes.view(np.int32)[:, 2 * LANES :]
    places, values = np.empty((strip, widest + 1), np.int64), np.empty((strip, widest + 1), np.float32)
    thin, weights = np.empty(widest + 1, np.int64), np.empty(widest + 1, np.float32)
    dense, slack = np.empty(strip, np.int64), np.empty(strip)
    panel_bytes = BYTES * len(panels) // (full // PANEL)
    for first in range(0, n, strip):
        rows = min(strip, n - first)
        scores[:rows], lanes[:] = 0.0, -np.inf
        for i in range(rows):
            a, b = indptr[first + i], indptr[first + i + 1]
            count, posted, length = _sort_out(
                data, indices, a, b, slot, BYTES * PANEL, np.uint64(i), places, values, thin, weights
            )
            dense[i], slack[i] = count, 2.0 * ((b - a + 4) * 2.0**-24 * slope * length + floor)
            _add_postings(thin, weights, posted, start, centroid, value, np.uint64(i), scores)
        for j in range(0, full, PANEL):
            panel, at_j = panels.ctypes.data + j // PANEL * panel_bytes, BYTES * j
            for i in range(rows):
                _score(  # type: ignore[call-arg]
                    places.ctypes.data + i * places.strides[0],
                    values.ctypes.data + i * values.strides[0],
                    dense[i],
                    panel,
                    scores.ctypes.data + i * scores.strides[0] + at_j,
                    scale.ctypes.data + at_j,
                    bias.ctypes.data + at_j,
                    lanes.ctypes.data + i * lanes.strides[0],
                    j,
                )
        for i in range(rows):
            top = best[i, 0]
            for lane in range(1, LANES):
                top = max(top, best[i, lane])
            least = top - slack[i]
            # Rounded down: it is compared with float32 scores.
            least = np.float32(least - 1e-7 * abs(least))
            count, code = 0, 0
            for lane in range(LANES):
                leads = best[i, lane] >= least
                count += leads + (second[i, lane] >= least)
                code += leads * where[i, lane]
            if count > 1:
                a, b = indptr[first + i], indptr[first + i + 1]
                code = _decide(
                    data[a:b], indices[a:b], scores[i], least, exact, values_w, columns_w, pointers_w
                )
            out[first + i] = code
