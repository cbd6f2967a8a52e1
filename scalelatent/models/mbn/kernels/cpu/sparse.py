"""Nearest centroids of CSR rows, such as word counts of documents.

The score of a row and a centroid needs their product, a sum over the columns in which the row has entries.
Few columns have most entries of the data (Zipf's law), so there are two sorts of columns:

- A column in which at least 1/16 of the centroids have an entry is stored dense. For each entry of a row, its
  product with the column is added to the sums of 64 centroids at a time (a panel), in eight vectors.
- The entries of the centroids in other columns (postings) are added one by one.

The scores are computed in float32, and the best ones are kept (see :mod:`.candidates`). Scores that rounding
can have exchanged are computed again in float64, in the order of the columns. So the nearest centroids are
the same as those of dense rows.

If all values are counts, they are added in int16 without rounding, 128 centroids at a time. Then 1/32 of the
centroids suffices for a dense column. Rows whose sums may exceed int16 are computed in float64. Centroids are
rows of the same data, so their values show whether rows are counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scalelatent.kernels.arrays import aligned_empty
from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.memory import empty
from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.kernels.tiles import sum_products
from scalelatent.kernels.vectors import BYTES, F32, I16, I64, Vectors
from scalelatent.models.mbn.kernels.reference import score_terms

from .candidates import (
    assign_best_codes,
    assign_codes,
    insert_score,
    is_close,
    list_length,
    merge_equal,
    number_centroids,
    sort_list,
)  # fmt: skip
from .dense import bound_length, is_whole

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.typing.templates import Signature

# Number of float32 in a vector; number of vectors (registers) with the sums of a row and a panel (a group of
# centroids). Loads limit the speed, so wider vectors are not faster.
_LANES, _SUM_VECTORS = 8, 8
# Bytes of one column of a panel, which has 64 centroids with float32 values, or 128 with int16 values.
_PANEL_BYTES = _SUM_VECTORS * _LANES * BYTES
# A column is dense if more than 1/16 (float32) or 1/32 (int16) of the centroids have an entry in it. An
# entry of a row in a dense column takes about k / 10 steps for k centroids (k / 30 for counts). In another
# column, it takes about two steps per centroid with an entry in the column.
_DENSE_SHARE = {"float32": 16, "int16": 32}
# Upper bound of the bytes of the sums of the rows that are processed together, so that they stay in the
# nearest caches, with the values of 64 or 128 centroids.
_SUM_BYTES = 2**19
# Value of ``slot`` for a column in which no centroid has an entry; largest count that int16 represents.
_ABSENT, _COUNT_MAX = -1, 2**15 - 1
# Counts are stored as int16 if, for at most 1/64 of the centroids, the score with some row may exceed int16.
# A row whose sums may exceed int16 takes about seven times as long as another row.
_OVERFLOW_SHARE = 64


@dataclass(frozen=True)
class PackedSparseCentroids:
    """CSR centroids that clusterings share, sorted by columns; some columns are stored dense.

    A dense column has a value for each centroid. In the other (thin) columns, only entries are stored.
    """

    # int32 (columns,): i for dense column number i; -2 - i for thin column number i; -1 for a column in which
    # no centroid has an entry
    slot: np.ndarray
    # float32 or int16, flat: (panels, dense columns, centroids of a panel). A panel has 64 centroids, or 128
    # for int16; zeros fill the last panel.
    panels: np.ndarray
    start: np.ndarray  # int64 (thin columns + 1,): index of the first entry of each thin column
    centroid: np.ndarray  # int32 (entries in thin columns,): number of the centroid of each entry
    value: np.ndarray  # float32 or int16 (entries in thin columns,): value of each entry
    column_maxima: np.ndarray  # int32 (columns,): largest absolute values for int16; empty for float32
    # float32, k rounded up to whole panels: a row x and a centroid w have the score scale (w . x) + bias; the
    # bias of the additional centroids is -inf
    scale: np.ndarray
    bias: np.ndarray
    exact: np.ndarray  # float64 (2, k): scale and bias, with which scores are computed in float64
    codes: np.ndarray  # int32 (k, clusterings): number of each centroid in each clustering; NONE outside
    length: int  # number of best scores that are kept for a row
    # The centroids as CSR rows with the columns of the clusterings: values, column numbers and row pointers
    rows: tuple[np.ndarray, np.ndarray, np.ndarray]
    # The score of a row x with e entries is wrong by less than (e + 4) 2^-24 error[0] |x| + error[1], where
    # |x| is the Euclidean norm. If all values are counts, 4 replaces e + 4.
    error: tuple[float, float]


def make_sparse_bank(
    w: CsrRows, columns: np.ndarray, metric: str, draws: np.ndarray | None = None
) -> PackedSparseCentroids:
    """Sort CSR centroids ``w`` by columns for :func:`nearest_sparse`; only entries in ``columns`` count.

    ``draws``, bool (clusterings, k), is true for the centroids of each clustering; if it is None, one
    clustering has all centroids.
    """
    codes = number_centroids(draws, len(w))
    if not is_whole(w.data):
        rows = (w[j : j + 1] for j in range(len(w)))
        kept, codes = merge_equal(((row.data.tobytes(), row.indices.tobytes()) for row in rows), codes)
        w = w.take(kept)
    k, p = w.shape
    w = w.keep_columns(columns)
    column, value = w.indices.astype(np.int32), w.data.astype(np.float32)
    centroid = np.repeat(np.arange(k, dtype=np.int32), np.diff(w.indptr))
    squares = np.bincount(centroid, weights=value.astype(np.float64) ** 2, minlength=k)
    exact = np.stack(score_terms(squares, metric))
    column_maxima = _largest_counts(column, value, centroid, k, p)
    dtype = np.dtype(np.int16 if len(column_maxima) else np.float32)
    width = _PANEL_BYTES // dtype.itemsize
    full = -(-k // width) * width
    scale, bias = np.zeros(full, dtype=np.float32), np.full(full, -np.inf, dtype=np.float32)
    scale[:k], bias[:k] = exact
    counts = np.bincount(column, minlength=p)
    many = counts * _DENSE_SHARE[dtype.name] > k
    dense, thin = np.flatnonzero(many), np.flatnonzero((counts > 0) & ~many)
    slot = np.full(p, _ABSENT, dtype=np.int32)
    slot[dense], slot[thin] = np.arange(len(dense)), -2 - np.arange(len(thin))
    place, typed = slot[column], value.astype(dtype)
    panels = aligned_empty((full // width, len(dense), width), dtype)
    panels[:] = 0
    here = place >= 0
    panels[centroid[here] // width, place[here], centroid[here] % width] = typed[here]
    order = np.flatnonzero(~here)
    order = order[np.argsort(column[order], kind="stable")]
    start = np.concatenate([[0], np.cumsum(counts[thin])]).astype(np.int64)
    slope, largest = float((np.sqrt(squares) * exact[0]).max()), float(np.abs(exact[1]).max())
    # Sums of counts are computed exactly in int16. A Euclidean score of counts is a multiple of a half, which
    # float32 represents exactly up to 2^23. So scores are rounded only for other values than counts, for the
    # cosine, and if the largest |bias| is near 2^23 or above.
    rounds = not len(column_maxima) or metric == "cosine" or largest > 2**23 - 2**16
    error = (slope, 4 * 2.0**-24 * largest) if rounds else (0.0, 0.0)
    postings = (start, centroid[order], typed[order])
    return PackedSparseCentroids(
        slot, panels.reshape(-1), *postings, column_maxima, scale, bias, exact, codes, list_length(codes),
        (value, column, w.indptr), error,
    )  # fmt: skip


def _largest_counts(
    column: np.ndarray, value: np.ndarray, centroid: np.ndarray, k: int, p: int
) -> np.ndarray:
    """Return the largest absolute value of each column, int32 (p,), if sums can be computed in int16.

    Return an empty array if some values are not whole numbers, or if too many sums may exceed int16. The
    entries of k centroids in p columns are given by their ``column``, ``value`` and ``centroid``.
    """
    none = np.empty(0, dtype=np.int32)
    sizes = np.abs(value)
    if len(value) and (sizes.max() > _COUNT_MAX or (value != np.rint(value)).any()):
        return none
    column_maxima = np.zeros(p, dtype=np.int32)
    np.maximum.at(column_maxima, column, sizes.astype(np.int32))
    # The rows are not known here, so this estimate takes the centroids, which are a sample of the rows.
    sums = np.bincount(centroid, weights=sizes.astype(np.float64) * column_maxima[column], minlength=k)
    return column_maxima if np.count_nonzero(sums > _COUNT_MAX) * _OVERFLOW_SHARE <= k else none


def nearest_sparse(x: CsrRows, centroids: PackedSparseCentroids) -> np.ndarray:
    """Return the number of each CSR row's nearest centroid in each clustering, int32 (rows, clusterings)."""
    out = np.empty((len(x), centroids.codes.shape[1]), dtype=np.int32)
    data = np.ascontiguousarray(x.data, dtype=np.float32)
    indices = np.ascontiguousarray(x.indices, dtype=np.int32)
    indptr = np.ascontiguousarray(x.indptr, dtype=np.int64)
    postings = (centroids.start, centroids.centroid, centroids.value)
    terms = (centroids.scale, centroids.bias, centroids.exact, centroids.codes, centroids.length)
    nearest = _nearest_counts if len(centroids.column_maxima) else _nearest_floats
    nearest(
        *(data, indices, indptr, centroids.slot, centroids.panels, *postings, centroids.column_maxima),
        *(*terms, *centroids.rows, *centroids.error, out),
    )
    return out


@subkernel
def _split_entries(
    data: np.ndarray, indices: np.ndarray, slot: np.ndarray, column_maxima: np.ndarray, size: int,
    i: np.uint64, places: np.ndarray, values: np.ndarray, thin: np.ndarray, weights: np.ndarray,
) -> tuple[np.uint64, np.uint64, float]:  # fmt: skip
    """Split the entries of row i into entries in dense columns and entries in columns with few centroids.

    Return the number of entries of the first and of the second sort, and an upper bound of the Euclidean norm
    of all these entries. The norm is -1 if sums are computed in int16, but an entry is not a whole number or
    a sum may exceed int16.
    """
    dense, posted, total = np.uint64(0), np.uint64(0), np.float32(0.0)
    one, sign, beyond = np.uint64(1), np.uint64(63), np.float32(_COUNT_MAX + 1)
    bound, fractions = np.int64(0), False
    for e in range(np.uint64(len(data))):
        value, column = data[e], np.uint64(indices[e])
        place = np.int64(slot[column])
        # Take sign bits as 0 or 1, because comparisons would become branches that are often mispredicted.
        seen = one - (np.uint64(place) >> sign)
        low = np.uint64(place - _ABSENT) >> sign
        if len(column_maxima):
            count = np.int32(min(max(value, -beyond), beyond))
            # Ignore fractions in columns in which no centroid has an entry, because they do not change sums.
            fractions |= ((seen | low) != 0) & (np.float32(count) != value)
            bound += abs(np.int64(count)) * column_maxima[column]
            values[i, dense], weights[posted] = count, count
        else:
            values[i, dense], weights[posted] = value, value
        places[i, dense], thin[posted] = place * size, -2 - place
        total += value * value if seen | low else np.float32(0.0)
        dense += seen
        posted += low
    length = bound_length(total, len(data)) if dense + posted else 0.0
    return dense, posted, -1.0 if fractions or bound > _COUNT_MAX else length


@intrinsic
def _add_dense_products(typingctx, places, values, count, panel, sums, scale, bias, least, hits, kind):  # type: ignore[no-untyped-def]
    """Add the products of a row and 64 or 128 centroids in dense columns to ``sums``; mark good scores.

    The arguments are addresses, except ``count``, the number of the row's entries in dense columns.
    ``values`` are these entries, and ``places`` are the byte offsets of their columns in ``panel``, which has
    the values of the centroids. ``sums`` already contains the products in other columns. ``hits`` receives a
    bit for each centroid whose score is above ``least``, in words of 64 bits. ``kind`` is not read: the type
    of this array, float32 or int16, selects the instructions.
    """
    whole = isinstance(kind.dtype, types.Integer)

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        places, values, count, panel, sums, scale, bias, least, hits, _ = args
        v = Vectors(builder, _LANES)
        scalar, size = (I16, 2) if whole else (F32, BYTES)
        vector = ir.VectorType(scalar, v.wide // size)

        def load_operands(e: ir.Value, _: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value], tuple[()]]:
            column = builder.add(panel, v.load(places, builder.mul(e, I64(8)), I64))
            value = v.load(values, builder.mul(e, I64(size)), scalar)
            parts = [v.load(column, v.wide * k, vector) for k in range(_SUM_VECTORS)]
            return [v.spread(value, vector.count)], parts, ()

        begun = [v.load(sums, v.wide * k, vector) for k in range(_SUM_VECTORS)]
        (totals,) = sum_products(v, [begun], count, load_operands, may_be_empty=True)
        for k, total in enumerate(totals):
            v.store(total, sums, v.wide * k)
        if whole:
            totals = [part for total in totals for part in _convert_to_floats(v, total)]
        bound, word = v.spread(v.load(least, 0, F32)), 64 // _LANES
        for first in range(0, len(totals), word):
            found = I64(0)
            for k in range(first, first + word):
                score = builder.fmul(totals[k], v.load(scale, v.wide * k))
                score = builder.fadd(score, v.load(bias, v.wide * k))
                bits = builder.bitcast(builder.fcmp_ordered(">", score, bound), ir.IntType(_LANES))
                found = builder.or_(found, builder.shl(builder.zext(bits, I64), I64(_LANES * (k - first))))
            v.store(found, hits, first // word * 8)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9, kind), generate


def _convert_to_floats(v: Vectors, total: ir.Value) -> list[ir.Value]:
    """Convert a vector of int16 to two vectors of float32, one for each half."""
    parts = (v.shuffle(total, total, range(n, n + _LANES)) for n in (0, _LANES))
    return [v.b.sitofp(v.b.sext(part, v.ints), v.vec) for part in parts]


@subkernel
def _find_best_scores(
    rows: int, places: np.ndarray, values: np.ndarray, dense: np.ndarray, panels: np.ndarray,
    sums: np.ndarray, scale: np.ndarray, bias: np.ndarray, hits: np.ndarray, best: np.ndarray,
    index: np.ndarray,
) -> None:  # fmt: skip
    """Write the best scores of ``rows`` rows and all centroids to ``best``, and the centroids to ``index``.

    ``sums`` contains the products in sparse columns; ``hits`` is scratch space. The other arguments are the
    rows' entries in ``dense`` columns and fields of :class:`PackedSparseCentroids`.
    """
    full, last = len(scale), best.shape[1] - 1
    width = np.int64(_PANEL_BYTES // sums.itemsize)
    panel_bytes = panels.itemsize * len(panels) // (full // width)
    for first in range(0, full, width):
        panel = panels.ctypes.data + first // width * panel_bytes
        for i in range(rows):
            _add_dense_products(  # type: ignore[call-arg]
                places.ctypes.data + i * places.strides[0],
                values.ctypes.data + i * values.strides[0],
                dense[i],
                panel,
                sums.ctypes.data + i * sums.strides[0] + sums.itemsize * first,
                scale.ctypes.data + BYTES * first,
                bias.ctypes.data + BYTES * first,
                best.ctypes.data + i * best.strides[0] + BYTES * last,
                hits.ctypes.data,
                sums,
            )
            for word in range(width // 64):
                bits, j = hits[word], first + 64 * word
                while bits:
                    if bits & np.uint64(1):
                        score = np.float32(sums[i, j]) * scale[j] + bias[j]
                        if score > best[i, last]:
                            insert_score(best[i], index[i], score, j)
                    bits, j = bits >> np.uint64(1), j + 1


@subkernel
def _add_postings(
    thin: np.ndarray, weights: np.ndarray, count: np.uint64, start: np.ndarray, centroid: np.ndarray,
    value: np.ndarray, i: np.uint64, sums: np.ndarray,
) -> None:  # fmt: skip
    """Add the products of row i and the centroids in sparse columns to ``sums`` of the row.

    The row has ``count`` entries in such columns: numbers ``thin`` of the columns and values ``weights``.
    """
    for c in range(np.uint64(count)):
        weight, place = weights[c], np.uint64(thin[c])
        for e in range(np.uint64(start[place]), np.uint64(start[place + np.uint64(1)])):
            sums[i, np.uint64(centroid[e])] += weight * value[e]


@subkernel
def _multiply_rows(data: np.ndarray, indices: np.ndarray, values: np.ndarray, columns: np.ndarray) -> float:
    """Return the product of two sparse rows in float64, summed from left to right."""
    total, a, b = 0.0, 0, 0
    while a < len(indices) and b < len(columns):
        if indices[a] == columns[b]:
            total += np.float64(data[a]) * np.float64(values[b])
        left, right = indices[a], columns[b]
        a += left <= right
        b += right <= left
    return total


@subkernel
def _exact_score(
    data: np.ndarray, indices: np.ndarray, exact: np.ndarray, values: np.ndarray, columns: np.ndarray,
    pointers: np.ndarray, j: int,
) -> float:  # fmt: skip
    """Return the score of a CSR row and the CSR centroid j; ``exact`` (2, k) has all scales and biases."""
    a, b = pointers[j], pointers[j + 1]
    return _multiply_rows(data, indices, values[a:b], columns[a:b]) * exact[0, j] + exact[1, j]


@subkernel
def _exact_scores(
    data: np.ndarray, indices: np.ndarray, slot: np.ndarray, panels: np.ndarray, start: np.ndarray,
    centroid: np.ndarray, value: np.ndarray, exact: np.ndarray, sums: np.ndarray,
) -> None:  # fmt: skip
    """Write the scores of a row and all centroids in float64 to ``sums``.

    Products are added in the order of the columns, as in _exact_score, so both functions give equal bits.
    """
    full, k = len(sums), exact.shape[1]
    width = _PANEL_BYTES // panels.itemsize
    step = len(panels) // (full // width)
    sums[:] = 0.0
    for e in range(len(data)):
        weight, place = np.float64(data[e]), np.int64(slot[indices[e]])
        if place >= 0:
            for j in range(0, full, width):
                begin = j // width * step + place * width
                part, column = sums[j : j + width], panels[begin : begin + width]
                for c in range(len(part)):
                    part[c] += weight * np.float64(column[c])
        elif place != _ABSENT:
            for at in range(start[-2 - place], start[-1 - place]):
                sums[centroid[at]] += weight * np.float64(value[at])
    for j in range(k):
        sums[j] = sums[j] * exact[0, j] + exact[1, j]


def _nearest(
    data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, slot: np.ndarray, panels: np.ndarray,
    start: np.ndarray, centroid: np.ndarray, value: np.ndarray, column_maxima: np.ndarray, scale: np.ndarray,
    bias: np.ndarray, exact: np.ndarray, codes: np.ndarray, length: int, values_w: np.ndarray,
    columns_w: np.ndarray, pointers_w: np.ndarray, slope: float, floor: float, out: np.ndarray,
) -> None:  # fmt: skip
    n, full = len(out), len(scale)
    strip = max(8, min(128, _SUM_BYTES // (panels.itemsize * full)))
    widest = 0
    for i in range(n):
        widest = max(widest, indptr[i + 1] - indptr[i])
    sums, hits = empty((strip, full), panels.dtype), empty(2, np.uint64)
    best, index = empty((strip, length), np.float32), empty((strip, length), np.int32)
    places, values = empty((strip, widest + 1), np.int64), empty((strip, widest + 1), panels.dtype)
    thin, weights = empty(widest + 1, np.int64), empty(widest + 1, panels.dtype)
    wide, keys = empty(full, np.float64), empty(length, np.float64)
    before, tops = empty(out.shape[1], np.int32), empty(out.shape[1], np.float64)
    dense, gaps = empty(strip, np.int64), empty(strip, np.float64)
    for first in range(0, n, strip):
        rows = min(strip, n - first)
        sums[:rows], best[:] = 0, -np.inf
        for i in range(rows):
            a, b = indptr[first + i], indptr[first + i + 1]
            at = np.uint64(i)
            count, posted, norm = _split_entries(
                data[a:b], indices[a:b], slot, column_maxima, _PANEL_BYTES, at, places, values, thin, weights
            )
            dense[i], gaps[i] = count, -1.0
            if norm >= 0.0:
                roundings = 4 if len(column_maxima) else b - a + 4
                gaps[i] = 2.0 * (roundings * 2.0**-24 * slope * norm + floor)
                _add_postings(thin, weights, posted, start, centroid, value, at, sums)
        _find_best_scores(rows, places, values, dense, panels, sums, scale, bias, hits, best, index)
        for i in range(rows):
            a, b = indptr[first + i], indptr[first + i + 1]
            done = gaps[i] >= 0.0
            if done:
                for t in range(length):
                    keys[t] = best[i, t]
                    if is_close(best[i], t, gaps[i]):
                        rest = (exact, values_w, columns_w, pointers_w, index[i, t])
                        keys[t] = _exact_score(data[a:b], indices[a:b], *rest)
                # Upper bound of the scores of the centroids that are not in ``best``.
                least = best[i, length - 1] + gaps[i] if length < len(codes) else -np.inf
                sort_list(keys, index[i])
                done = assign_codes(keys, index[i], least, codes, before, out[first + i])
            if not done:
                columns = (slot, panels, start, centroid, value)
                _exact_scores(data[a:b], indices[a:b], *columns, exact, wide)
                assign_best_codes(wide, codes, tops, out[first + i])


def _argument_types(values: str) -> list[types.Type]:
    """Return the types of the arguments of :func:`_nearest`, for centroids of type float32 or int16."""
    vectors = ("f4", "i4", "i8", "i4", values, "i8", "i4", values, "i4", "f4", "f4")
    rows = (in_array("f4", 1), in_array("i4", 1), in_array("i8", 1))
    return [
        *(in_array(dtype, 1) for dtype in vectors),
        *(in_array("f8", 2), in_array("i4", 2), types.int64, *rows),
        *(types.float64, types.float64, out_array("i4", 2)),
    ]


_nearest_floats = entry(*_argument_types("f4"))(_nearest)
_nearest_counts = entry(*_argument_types("i2"))(_nearest)
