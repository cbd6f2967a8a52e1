"""Nearest centroids of dense rows: a matrix product whose scores stay in the nearest cache.

A row and a centroid have a score, which is larger for nearer centroids. Each row has a list of its best
scores so far (see :mod:`.candidates`). The scores of a tile, which has 6 rows and 16 centroids (12 and 32 on
AVX-512), are summed in registers. A score above the last score in the list of its row is inserted into the
list, and other scores are dropped. So the scores of a row with all k centroids are never stored.

The steps for a strip of rows:

1. Copy the columns of the clustering as float32, and bound the rounding errors of the scores of each row.
2. Compute the scores with all centroids in float32, one panel (a group of centroids) after the other.
3. Compute scores in the list of a row again in float64 if float32 cannot order them. The sorted list gives
   the codes of the row: the number of its nearest centroid in each clustering.

So the codes do not depend on the width of vectors, the order of float32 sums or the device. For rows of
integers, Euclidean scores in float64 are exact, and the lowest index wins a tie. For other rows, and for the
cosine, float64 scores are rounded: of centroids at nearly equal distances any may win, but it is the same one
on all machines.

If rows and centroids are bytes and the machine has VNNI instructions, the sums are exact integers, and one
instruction adds four products to each sum. Centroids are stored as signed bytes c = w - 128. The sum for a
row x starts at 128 (x_1 + x_2 + ...), so that the result is x . (c + 128) = x . w.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba import types

from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.memory import empty, zeros
from scalelatent.kernels.tiles import Sums, add, make_tile
from scalelatent.kernels.vectors import BYTES, DOTS, F32, I32, I64, LANES, Vectors
from scalelatent.models.mbn.kernels.reference import score_terms, squared_lengths

from .candidates import (
    assign_best_codes,
    assign_codes,
    insert_score,
    is_close,
    list_length,
    merge_equal,
    number_centroids,
    sort_list,
)

# Size of a tile, whose scores are summed in registers: rows, and vectors of centroids. The sums fill three
# quarters of the registers. For this size the arithmetic, not the loads, limits the speed.
ROWS, VECS = (12 if LANES == 16 else 6), 2
PANEL = VECS * LANES
# Upper bound of the bytes of a panel (PANEL centroids), so that it stays in the first-level cache while
# STRIP rows use it. If a panel is larger, its columns are processed in several parts.
_PANEL_BYTES = 26_000
# Number of rows that are processed together (a strip). With 392 columns, a strip takes 190 kB of the
# second-level cache.
STRIP = 120
# Number that is subtracted from bytes of centroids, so that they fit signed bytes; largest number of columns
# of bytes for which sums of products fit 32 bits.
_SHIFT, _MAX_BYTES = 128, (2**31 - 1) // 255**2


@dataclass(frozen=True)
class PackedCentroids:
    """Distinct centroids that several clusterings share, in the memory layout that the kernel reads."""

    # Panels (groups of PANEL centroids) one after the other: float32 (columns, PANEL), or int8 (columns / 4,
    # PANEL, 4), which are bytes minus 128. Zeros fill the last panel and the last four columns.
    packed: np.ndarray
    # float32 (k rounded up to whole panels,): a row x and a centroid w have the score scale (w . x) + bias;
    # the bias of the padding is -inf
    scale: np.ndarray
    bias: np.ndarray
    exact: np.ndarray  # float64 (2, k): scale and bias, with which scores are computed in float64
    # int32 (k, clusterings): number of each centroid within each clustering, counted from 0;
    # ``candidates.NONE`` if the centroid does not belong to the clustering
    codes: np.ndarray
    length: int  # number of candidates for the nearest centroid that the list of a row holds
    # Largest Euclidean norm of a row of whole numbers whose scores are exact in float32; -1 if there is none.
    exact_length: float
    # The score of a row x in float32 is wrong by less than ``error[0] * |x| + error[1]``, where |x| is the
    # Euclidean norm of the row.
    error: tuple[float, float]

    def floats(self, columns: int) -> np.ndarray:
        """Return ``packed`` as panels of float32, from floats or bytes."""
        if self.packed.dtype == np.float32:
            return self.packed
        panels = self.packed.reshape(-1, -(-columns // 4), PANEL, 4).swapaxes(2, 3).astype(np.float32)
        return (panels + _SHIFT).reshape(len(panels), -1, PANEL)[:, :columns].reshape(-1)


def make_bank(w: np.ndarray, metric: str, draws: np.ndarray | None = None) -> PackedCentroids:
    """Pack centroids ``w`` (k, columns) for :func:`nearest`.

    ``draws``, bool (clusterings, k), is true for the centroids of each clustering; if it is None, one
    clustering has all centroids.
    """
    w = np.ascontiguousarray(w, dtype=np.uint8 if w.dtype == np.uint8 else np.float32)
    w, codes = merge_rows(w, draws)
    return pack(w, codes, squared_lengths(w), metric)


def merge_rows(w: np.ndarray, draws: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return centroids without duplicates, and the number of each within each clustering, int32 (k, sets).

    Of equal centroids, the one with the lowest number must win. Rounding could break this rule, so duplicates
    are merged. Whole numbers have exact scores, so all centroids of whole numbers are returned.
    """
    codes = number_centroids(draws, len(w))
    if is_whole(w):
        return w, codes
    kept, codes = merge_equal((row.tobytes() for row in w), codes)
    return w[kept], codes


def pack(w: np.ndarray, codes: np.ndarray, squares: np.ndarray, metric: str) -> PackedCentroids:
    """Return the centroids ``w`` (k, columns) in panels (groups of centroids), as the kernel reads them.

    The result also has the codes of the centroids, and the scale and the bias that turn a product of a row
    and a centroid into a score. ``squares`` are the squared lengths of the centroids.
    """
    k, columns = w.shape
    full = -(-k // PANEL) * PANEL
    with_bytes = DOTS and fits_integers(w)
    group = 4 if with_bytes else 1
    rows = np.zeros((full, -(-columns // group) * group), np.int8 if with_bytes else np.float32)
    rows[:k, :columns] = w.astype(np.int16) - _SHIFT if with_bytes else w
    packed = np.ascontiguousarray(rows.reshape(full // PANEL, PANEL, -1, group).swapaxes(1, 2))
    exact = np.stack(score_terms(squares, metric))
    scale, bias = np.zeros(full, dtype=np.float32), np.full(full, -np.inf, dtype=np.float32)
    scale[:k], bias[:k] = exact
    bounds = bound_rounding(w, squares, exact, metric)
    return PackedCentroids(packed.reshape(-1), scale, bias, exact, codes, list_length(codes), *bounds)


def fits_integers(w: np.ndarray) -> bool:
    """Return True if centroids are bytes and the sums of their products with rows of bytes fit int32."""
    return w.dtype == np.uint8 and w.shape[1] <= _MAX_BYTES


def is_whole(w: np.ndarray) -> bool:
    """Return True if all values are whole numbers."""
    return bool((np.floor(w) == w).all())


def bound_rounding(
    w: np.ndarray, squares: np.ndarray, exact: np.ndarray, metric: str
) -> tuple[float, tuple[float, float]]:
    """Return bounds of rounding: the fields ``exact_length`` and ``error`` of :class:`PackedCentroids`.

    ``squares`` are the squared lengths of the centroids ``w``; ``exact`` is scale and bias of their scores.
    """
    # The sum of the products, scale, bias and their sum are each rounded by at most 2^-24 of their terms
    # (Higham, Accuracy and Stability of Numerical Algorithms, 3.1).
    rounding = (w.shape[1] + 4) * 2.0**-24
    lengths, largest = np.sqrt(squares), float(np.abs(exact[1]).max())
    error = (rounding * float((lengths * exact[0]).max()), 4 * 2.0**-24 * largest)
    if metric == "cosine" or not is_whole(w):
        return -1.0, error
    # Sums of products of whole numbers are at most |x| |w|, and the bias is a multiple of a half. Float32
    # represents multiples of a half up to 2^23.
    return (2.0**23 - largest) / max(float(lengths.max()), 1e-30), error


def nearest(x: np.ndarray, columns: np.ndarray, centroids: PackedCentroids) -> np.ndarray:
    """Return the number of each row's nearest centroid in each clustering, int32 (rows, clusterings)."""
    out = np.empty((len(x), centroids.codes.shape[1]), dtype=np.int32)
    columns = np.ascontiguousarray(columns, dtype=np.int32)
    panels = centroids.packed
    if x.dtype == np.uint8 and panels.dtype == np.int8:
        body = _nearest_bytes
    else:
        body, panels = _nearest_floats, centroids.floats(len(columns))
        if x.dtype == np.uint8:
            body = _nearest_converted
        else:
            x = np.ascontiguousarray(x, dtype=np.float32)
    terms = (
        panels,
        centroids.scale,
        centroids.bias,
        centroids.exact,
        centroids.codes,
        centroids.length,
    )
    body(x, columns, *terms, centroids.exact_length, *centroids.error, out)
    return out


def _store_scores(
    v: Vectors,
    sums: Sums,
    partial: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    least: ir.Value,
    step: ir.Value,
    scores: ir.Value,
    hits: ir.Value,
) -> None:
    """Store the scores of some rows and centroids, and a bit for each score among the best of its row so far.

    Each row has a list of its best scores so far. ``least`` is the address of the last score in the list of
    the first row, and ``step`` is the number of bytes between the lists of two rows. ``partial`` is the
    address of the sums over earlier columns.
    """
    b = v.b
    scales, biases = ([v.load(a, v.wide * k) for k in range(VECS)] for a in (scale, bias))
    whole = v.sums == v.ints
    for r, row in enumerate(sums):
        bound, found = v.spread(v.load(least, b.mul(step, I64(r)), F32)), I32(0)
        for k, value in enumerate(row):
            place = v.wide * (VECS * r + k)
            total = v.plus(v.load(partial, place, v.sums), value)
            total = b.sitofp(total, v.vec) if whole else total
            score = b.fadd(b.fmul(total, scales[k]), biases[k])
            v.store(score, scores, place)
            bits = b.bitcast(b.fcmp_ordered(">", score, bound), ir.IntType(LANES))
            found = b.or_(found, b.shl(b.zext(bits, I32), I32(LANES * k)))
        v.store(found, hits, BYTES * r)


_float_sums, _float_scores = (make_tile(ROWS, VECS, finish) for finish in (add, _store_scores))
_byte_sums, _byte_scores = (make_tile(ROWS, VECS, finish, dots=True) for finish in (add, _store_scores))


@subkernel
def _gather_floats(
    x: np.ndarray, first: int, rows: int, columns: np.ndarray, exact_length: float,
    error: tuple[float, float], strip: np.ndarray, starts: np.ndarray, gaps: np.ndarray,
) -> None:  # fmt: skip
    """Write ``columns`` of rows as float32 to ``strip``; add rows of zeros up to a multiple of ROWS.

    ``gaps`` receives one number per row: rounding in float32 cannot exchange two scores of the row that
    differ by this number or more. It is 0 if the scores of the row are exact. ``starts`` receives the number
    at which the sums of each row start, which is 0 here.
    """
    for i in range(rows):
        row, out, whole = x[first + i], strip[i], True
        for c in range(len(columns)):
            value = np.float32(row[columns[c]])
            out[c] = value
            whole &= np.floor(value) == value
        length = bound_length(_sum_squares(out), len(columns))
        exact = whole and length <= exact_length
        gaps[i] = 0.0 if exact else 2.0 * (error[0] * length + error[1])
    strip[rows : -(-rows // ROWS) * ROWS] = 0.0
    starts[:] = 0.0


@subkernel
def _gather_bytes(
    x: np.ndarray, first: int, rows: int, columns: np.ndarray, exact_length: float,
    error: tuple[float, float], strip: np.ndarray, starts: np.ndarray, gaps: np.ndarray,
) -> None:  # fmt: skip
    """Write ``columns`` of rows of bytes to ``strip``, and one number per row to ``gaps`` and ``starts``.

    Scores of the row that differ by its number in ``gaps`` or more have the right order. The sums of the row
    start at ``starts``: 128 times the sum of its values, because 128 is subtracted from centroids.
    """
    for i in range(rows):
        row, out, total, square = x[first + i], strip[i], np.int64(0), np.int64(0)
        for c in range(len(columns)):
            value = np.int64(row[columns[c]])
            out[c] = value
            total += value
            square += value * value
        length = np.sqrt(np.float64(square))
        gaps[i] = 0.0 if length <= exact_length else 2.0 * (error[0] * length + error[1])
        starts[i] = _SHIFT * total


@subkernel
def bound_length(square: np.float32, n: int) -> float:
    """Return an upper bound of the norm of n float32 numbers, from the sum of their squares in float32.

    The bound includes the squares of numbers below 1e-23, which underflow to 0 in the sum.
    """
    return np.sqrt(np.float64(square) + n * 2.0**-140) * (1.0 + 2.0**-20 * n)


@subkernel
def _sum_squares(x: np.ndarray) -> np.float32:
    """Return the sum of squares of a vector.

    There are four partial sums, because each addition to a single sum would wait for the previous one.
    """
    a, b, c, d = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    whole = len(x) // 4 * 4
    for i in range(0, whole, 4):
        a += x[i] * x[i]
        b += x[i + 1] * x[i + 1]
        c += x[i + 2] * x[i + 2]
        d += x[i + 3] * x[i + 3]
    for i in range(whole, len(x)):
        a += x[i] * x[i]
    return (a + b) + (c + d)


@subkernel
def _float_value(packed: np.ndarray, columns: int, first: int, j: int, c: int) -> float:
    """Return column c of centroid first + j in float64; a panel (group of centroids) starts at ``first``."""
    return np.float64(packed[first * columns + c * PANEL + j])


@subkernel
def _byte_value(packed: np.ndarray, columns: int, first: int, j: int, c: int) -> float:
    """Return column c of centroid first + j in float64, from bytes; the panel (group) starts at ``first``."""
    return np.float64(packed[first * columns + (c // 4 * PANEL + j) * 4 + c % 4]) + _SHIFT


def _make_search(
    gather: Callable[..., None], add_sums: Callable[..., None], store_scores: Callable[..., None],
    value: Callable[..., float],
) -> Callable[..., None]:  # fmt: skip
    """Return a compiled function that finds the nearest centroids of rows, whose values are floats or bytes.

    ``gather`` copies columns of rows, ``add_sums`` sums products, ``store_scores`` stores scores and marks
    the best ones, and ``value`` reads one value of a centroid.
    """

    @subkernel
    def find_best_scores(
        strip: np.ndarray, starts: np.ndarray, n: int, packed: np.ndarray, scale: np.ndarray,
        bias: np.ndarray, partial: np.ndarray, scores: np.ndarray, hits: np.ndarray, best: np.ndarray,
        index: np.ndarray,
    ) -> None:  # fmt: skip
        """Write the best scores of each row in ``strip`` to ``best``, and their centroids to ``index``.

        ``partial`` is scratch space for sums. In the code, ``q`` is the number of columns of floats, or of
        groups of four columns of bytes, which take as many bytes as a float.
        """
        q, length = strip.shape[1] * strip.itemsize // BYTES, best.shape[1]
        row, wide, step = BYTES * q, BYTES * PANEL, BYTES * best.shape[1]
        width = -(-q // -(-q * wide // _PANEL_BYTES))
        last = (q - 1) // width * width  # first column of the last part of the columns
        for first in range(0, len(scale), PANEL):
            panel = packed.ctypes.data + first * row
            if last or first == 0:
                for i in range(n):
                    for j in range(PANEL):
                        partial[i, j] = starts[i]
            for c in range(0, last, width):
                for i in range(0, n, ROWS):
                    add_sums(
                        strip.ctypes.data + i * row + BYTES * c,
                        row,
                        BYTES,
                        panel + c * wide,
                        wide,
                        width,
                        partial.ctypes.data + i * wide,
                        wide,
                    )
            for i in range(0, n, ROWS):
                store_scores(
                    strip.ctypes.data + i * row + BYTES * last,
                    row,
                    BYTES,
                    panel + last * wide,
                    wide,
                    q - last,
                    partial.ctypes.data + i * wide,
                    scale.ctypes.data + BYTES * first,
                    bias.ctypes.data + BYTES * first,
                    best.ctypes.data + i * step + BYTES * (length - 1),
                    step,
                    scores.ctypes.data,
                    hits.ctypes.data,
                )
                for r in range(ROWS):
                    bits, j = hits[r], 0
                    while bits:
                        if bits & 1 and scores[r, j] > best[i + r, length - 1]:
                            insert_score(best[i + r], index[i + r], scores[r, j], first + j)
                        bits, j = bits >> 1, j + 1

    @subkernel
    def exact_score(row: np.ndarray, packed: np.ndarray, exact: np.ndarray, j: int) -> float:
        """Return the score of a row and a centroid in float64, summed over the columns in order."""
        total = 0.0
        for c in range(len(row)):
            # Use np.float64, because numba does not convert float32 to float64 for float().
            total += np.float64(row[c]) * value(packed, len(row), j // PANEL * PANEL, j % PANEL, c)
        return total * exact[0, j] + exact[1, j]

    @subkernel
    def exact_scores(row: np.ndarray, packed: np.ndarray, exact: np.ndarray, out: np.ndarray) -> None:
        """Write the scores of a row and all centroids in float64, summed over the columns in order."""
        k = exact.shape[1]
        for j in range(len(out)):
            out[j] = 0.0
        for first in range(0, len(out), PANEL):
            sums = out[first : first + PANEL]
            for c in range(len(row)):
                factor = np.float64(row[c])
                for j in range(PANEL):
                    sums[j] += factor * value(packed, len(row), first, j, c)
        for j in range(k):
            out[j] = out[j] * exact[0, j] + exact[1, j]

    @subkernel
    def search(
        x: np.ndarray, columns: np.ndarray, packed: np.ndarray, scale: np.ndarray, bias: np.ndarray,
        exact: np.ndarray, codes: np.ndarray, length: int, exact_length: float, error_slope: float,
        error_offset: float, out: np.ndarray, strip: np.ndarray, partial: np.ndarray,
    ) -> None:  # fmt: skip
        """Write the number of each row's nearest centroid in each clustering to ``out``, (rows, clusterings).

        ``strip`` and ``partial`` are scratch space for columns of rows and for sums.
        """
        n = len(x)
        starts, gaps = zeros(STRIP, partial.dtype), empty(STRIP, np.float64)
        scores, hits = empty((ROWS, PANEL), np.float32), empty(ROWS, np.uint32)
        best, index = empty((STRIP, length), np.float32), empty((STRIP, length), np.int32)
        keys, wide = empty(length, np.float64), empty(len(scale), np.float64)
        before, tops = empty(out.shape[1], np.int32), empty(out.shape[1], np.float64)
        for first in range(0, n, STRIP):
            rows = min(STRIP, n - first)
            gather(x, first, rows, columns, exact_length, (error_slope, error_offset), strip, starts, gaps)
            padded = -(-rows // ROWS) * ROWS
            for i in range(padded):
                for t in range(length):
                    # Infinite scores in the lists of padding rows prevent insertions.
                    best[i, t] = -np.inf if i < rows else np.inf
            find_best_scores(strip, starts, padded, packed, scale, bias, partial, scores, hits, best, index)
            for i in range(rows):
                for t in range(length):
                    close = is_close(best[i], t, gaps[i])
                    keys[t] = exact_score(strip[i], packed, exact, index[i, t]) if close else best[i, t]
                # Upper bound of the scores of the centroids outside the list.
                least = np.float64(best[i, length - 1]) + gaps[i]
                if length == len(codes):
                    least = -np.inf
                sort_list(keys, index[i])
                if not assign_codes(keys, index[i], least, codes, before, out[first + i]):
                    exact_scores(strip[i], packed, exact, wide)
                    assign_best_codes(wide, codes, tops, out[first + i])

    return search


_code_floats = _make_search(_gather_floats, _float_sums, _float_scores, _float_value)
_code_bytes = _make_search(_gather_bytes, _byte_sums, _byte_scores, _byte_value)


def _arguments(rows: str, packed: str) -> tuple[types.Type, ...]:
    """Return the types of the arguments of a kernel, from the types of rows and packed centroids."""
    return (
        in_array(rows, 2),
        in_array("i4", 1),
        in_array(packed, 1),
        in_array("f4", 1),
        in_array("f4", 1),
        in_array("f8", 2),
        in_array("i4", 2),
        types.int64,
        types.float64,
        types.float64,
        types.float64,
        out_array("i4", 2),
    )


def _compute_codes(
    x: np.ndarray, columns: np.ndarray, packed: np.ndarray, scale: np.ndarray, bias: np.ndarray,
    exact: np.ndarray, codes: np.ndarray, length: int, exact_length: float, error_slope: float,
    error_offset: float, out: np.ndarray,
) -> None:  # fmt: skip
    _code_floats(
        x, columns, packed, scale, bias, exact, codes, length, exact_length, error_slope, error_offset, out,
        empty((STRIP, len(columns)), np.float32), empty((STRIP, PANEL), np.float32),
    )  # fmt: skip


def _compute_byte_codes(
    x: np.ndarray, columns: np.ndarray, packed: np.ndarray, scale: np.ndarray, bias: np.ndarray,
    exact: np.ndarray, codes: np.ndarray, length: int, exact_length: float, error_slope: float,
    error_offset: float, out: np.ndarray,
) -> None:  # fmt: skip
    groups = (len(columns) + 3) // 4
    _code_bytes(
        x, columns, packed, scale, bias, exact, codes, length, exact_length, error_slope, error_offset, out,
        zeros((STRIP, 4 * groups), np.uint8), empty((STRIP, PANEL), np.int32),
    )  # fmt: skip


# Kernels for rows of floats, and for rows of bytes that are converted to float32 strip by strip, because the
# centroids are floats or the machine has no VNNI instructions.
_nearest_floats, _nearest_converted = (
    entry(*_arguments(rows, "f4"))(_compute_codes) for rows in ("f4", "u1")
)
# Kernel for rows and centroids of bytes. It is not compiled on machines without VNNI instructions, because
# LLVM would end the process.
_nearest_bytes = entry(*_arguments("u1", "i1"))(_compute_byte_codes) if DOTS else _nearest_converted
