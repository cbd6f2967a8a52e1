"""Nearest centroids of dense rows: a matrix product whose scores stay in registers.

A tile of 6 rows x 16 centroids (12 x 32 on AVX-512) is summed in registers as in
:mod:`scalelatent.kernels.tiles`. Then its scores are compared with the best scores so far: each row and lane
keeps the best score, its index and the second best score. So the scores, k per row, are never stored.

The steps for a strip of rows:

1. Gather the columns of the clustering as float32, with an upper bound of each row's length.
2. Scan all panels of centroids in float32.
3. Accept the winner of a row if it leads by more than the bound of the rounding.
4. Scan the other rows again, about one in a hundred, and compare the centroids within the bound in float64,
   whose sums go over the columns in order. The first of equal scores wins.

So the codes do not depend on the width of vectors, the order of float32 sums or the device. On rows of
integers Euclidean scores in float64 are exact: ties go to the lowest index. On floats, and under the cosine,
float64 rounds: of centroids at equal distances up to the last digit any may win, the same one everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba import types

from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.memory import empty, same_bytes, zeros
from scalelatent.kernels.tiles import Sums, add, make_tile
from scalelatent.kernels.vectors import BYTES, LANES, Vectors
from scalelatent.models.mbn.kernels.reference import score_terms, squared_lengths

# Rows and vectors of a tile. Its sums fill three quarters of the registers, and arithmetic takes longer than
# loads.
ROWS, VECS = (12 if LANES == 16 else 6), 2
PANEL = VECS * LANES
# Bytes of a panel that stay in the first-level cache during a strip; wider panels are processed in parts of
# the columns.
_PANEL_BYTES = 26_000
# Number of rows of a strip; with 392 columns they take 190 kB of the second-level cache.
STRIP = 120
_BEST, _SECOND, _INDEX, _FIELDS = 0, 1, 2, 3


@dataclass(frozen=True)
class PackedBank:
    """Centroids of one clustering, packed."""

    # Panels of PANEL centroids, (columns, PANEL) each; the last is padded with zeros
    packed: np.ndarray
    # float32 (k rounded up to whole panels,): scale and bias of the scores, see
    # :class:`..reference.CentroidBank`; the bias of the padding is -inf
    scale: np.ndarray
    bias: np.ndarray
    # float64 (2, k): scale and bias
    exact: np.ndarray
    # A score in float32 is wrong by less than ``error[0] * |x| + error[1]``
    error: tuple[float, float]


def make_bank(w: np.ndarray, metric: str) -> PackedBank:
    """Pack centroids for :func:`nearest`, see :func:`..reference.make_bank`."""
    w = np.ascontiguousarray(w, dtype=np.float32)
    k, columns = w.shape
    full = -(-k // PANEL) * PANEL
    rows = np.zeros((full, columns), dtype=np.float32)
    rows[:k] = w
    packed = np.ascontiguousarray(rows.reshape(-1, PANEL, columns).swapaxes(1, 2))
    squares = squared_lengths(w)
    exact = np.stack(score_terms(squares, metric))
    scale, bias = np.zeros(full, dtype=np.float32), np.full(full, -np.inf, dtype=np.float32)
    scale[:k], bias[:k] = exact
    # The sum of the products, scale, bias and their sum are each rounded by at most 2^-24 of their terms
    # (Higham, Accuracy and Stability of Numerical Algorithms, 3.1).
    rounding = (columns + 4) * 2.0**-24
    lengths = np.sqrt(squares) * exact[0]
    error = (rounding * float(lengths.max()), 4 * 2.0**-24 * float(np.abs(exact[1]).max()))
    return PackedBank(packed.reshape(-1), scale, bias, exact, error)


def nearest(x: np.ndarray, columns: np.ndarray, bank: PackedBank) -> np.ndarray:
    """See :func:`..reference.nearest`; uint8 and float32 rows need no conversion."""
    out = np.empty(len(x), dtype=np.int32)
    body = _nearest_bytes if x.dtype == np.uint8 else _nearest_floats
    if x.dtype != np.uint8:
        x = np.ascontiguousarray(x, dtype=np.float32)
    columns = np.ascontiguousarray(columns, dtype=np.int32)
    body(x, columns, bank.packed, bank.scale, bank.bias, bank.exact, *bank.error, out)
    return out


def _update_best(
    v: Vectors,
    sums: Sums,
    partial: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    base: ir.Value,
    state: ir.Value,
) -> None:
    """Compare the scores of a tile with the best of their lanes; ``partial`` has sums of earlier columns."""
    scales, biases = ([v.load(a, v.wide * k) for k in range(VECS)] for a in (scale, bias))
    indices = [v.counted(base, LANES * k) for k in range(VECS)]
    for r, row in enumerate(sums):
        places = [v.wide * (_FIELDS * r + field) for field in (_BEST, _SECOND, _INDEX)]
        kinds = v.vec, v.vec, v.ints
        best = [v.load(state, place, kind) for place, kind in zip(places, kinds, strict=True)]
        for k, value in enumerate(row):
            total = v.b.fadd(v.load(partial, v.wide * (VECS * r + k)), value)
            score = v.b.fadd(v.b.fmul(total, scales[k]), biases[k])
            best = v.update_best(score, indices[k], best)
        for value, place in zip(best, places, strict=True):
            v.store(value, state, place)


_sums, _scores = make_tile(ROWS, VECS, add), make_tile(ROWS, VECS, _update_best)


@subkernel
def _gather(x: np.ndarray, rows: np.ndarray, columns: np.ndarray, strip: np.ndarray) -> np.ndarray:
    """Write columns of rows as float32 to ``strip``, padded with zero rows to whole tiles; return lengths."""
    lengths = empty(len(rows), np.float64)
    for i in range(len(rows)):
        row, out = x[rows[i]], strip[i]
        for c in range(len(columns)):
            out[c] = np.float32(row[columns[c]])
        lengths[i] = bound_length(_square(out), len(columns))
    strip[len(rows) : -(-len(rows) // ROWS) * ROWS] = 0.0
    return lengths


@subkernel
def bound_length(square: np.float32, n: int) -> float:
    """Return an upper bound of the length of n float32 numbers, from the sum of their squares in float32.

    Squares of numbers below 1e-23 underflow in that sum.
    """
    return np.sqrt(np.float64(square) + n * 2.0**-140) * (1.0 + 2.0**-20 * n)


@subkernel
def _square(x: np.ndarray) -> np.float32:
    """Return the sum of squares in four partial sums, because one sum would wait for each addition."""
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
def _scan(
    strip: np.ndarray, n: int, packed: np.ndarray, scale: np.ndarray, bias: np.ndarray, partial: np.ndarray,
    state: np.ndarray,
) -> None:  # fmt: skip
    """Find best, second best and index of each row and lane; ``partial`` is zeroed scratch space for sums."""
    q = strip.shape[1]
    row, wide = BYTES * q, BYTES * PANEL
    words = same_bytes(state, np.int32)
    for i in range(n):
        state[i, _BEST] = -np.inf
        state[i, _SECOND] = -np.inf
        words[i, _INDEX] = 0
    width = -(-q // -(-q * wide // _PANEL_BYTES))
    last = (q - 1) // width * width  # start of the last part, which is not empty
    for first in range(0, len(scale), PANEL):
        panel = packed.ctypes.data + first * row
        if last:
            partial[:] = 0.0
        for c in range(0, last, width):
            for i in range(0, n, ROWS):
                _sums(
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
            _scores(
                strip.ctypes.data + i * row + BYTES * last,
                row,
                BYTES,
                panel + last * wide,
                wide,
                q - last,
                partial.ctypes.data + i * wide,
                scale.ctypes.data + BYTES * first,
                bias.ctypes.data + BYTES * first,
                first,
                state.ctypes.data + i * BYTES * LANES * _FIELDS,
            )


@subkernel
def _find_winner(state: np.ndarray, words: np.ndarray) -> tuple[int, float, float]:
    """Return (index, score) of a row's best centroid, and the second best score."""
    score, index, lane = state[_BEST, 0], words[_INDEX, 0], 0
    for v in range(1, LANES):
        s = state[_BEST, v]
        if s > score or (s == score and words[_INDEX, v] < index):
            score, index, lane = s, words[_INDEX, v], v
    following = state[_SECOND, lane]
    for v in range(LANES):
        if v != lane:
            following = max(following, state[_BEST, v])
    return index, score, following


@subkernel
def _decide(
    strip: np.ndarray, n: int, floor: np.ndarray, packed: np.ndarray, scale: np.ndarray, bias: np.ndarray,
    exact: np.ndarray, codes: np.ndarray,
) -> None:  # fmt: skip
    """Decide the codes of rows with several centroids at or above ``floor`` by scores in float64."""
    q, k = strip.shape[1], exact.shape[1]
    row = BYTES * q
    sums = empty((ROWS, PANEL), np.float32)
    best = empty(n, np.float64)
    for i in range(n):
        best[i], codes[i] = -np.inf, 0
    for first in range(0, len(scale), PANEL):
        panel = packed[first * q : (first + PANEL) * q]
        for i in range(0, n, ROWS):
            sums[:] = 0.0
            _sums(
                strip.ctypes.data + i * row,
                row,
                BYTES,
                panel.ctypes.data,
                BYTES * PANEL,
                q,
                sums.ctypes.data,
                BYTES * PANEL,
            )
            for r in range(i, min(i + ROWS, n)):
                for j in range(first, min(first + PANEL, k)):
                    if sums[r - i, j - first] * scale[j] + bias[j] >= floor[r]:
                        total = 0.0
                        for c in range(q):
                            # np.float64, because float() does not convert a float32 here.
                            total += np.float64(strip[r, c]) * np.float64(panel[c * PANEL + j - first])
                        score = total * exact[0, j] + exact[1, j]
                        if score > best[r]:
                            best[r], codes[r] = score, j


def _nearest(
    x: np.ndarray, columns: np.ndarray, packed: np.ndarray, scale: np.ndarray, bias: np.ndarray,
    exact: np.ndarray, slope: float, floor: float, out: np.ndarray,
) -> None:  # fmt: skip
    n, q = len(x), len(columns)
    strip = empty((STRIP, q), np.float32)
    partial, state = (
        zeros((STRIP, PANEL), np.float32),
        empty((STRIP, _FIELDS, LANES), np.float32),
    )
    words = same_bytes(state, np.int32)
    numbers, doubtful = empty(STRIP, np.int64), empty(n, np.int64)
    floors, doubts = empty(n, np.float32), 0
    for first in range(0, n, STRIP):
        rows = numbers[: min(STRIP, n - first)]
        for i in range(len(rows)):
            rows[i] = first + i
        lengths = _gather(x, rows, columns, strip)
        _scan(strip, -(-len(rows) // ROWS) * ROWS, packed, scale, bias, partial, state)
        for i in range(len(rows)):
            index, score, following = _find_winner(state[i], words[i])
            out[rows[i]] = index
            least = score - 2.0 * (slope * lengths[i] + floor)
            if following >= least:
                doubtful[doubts] = rows[i]
                # Round the floor down, because float32 scores are compared with it.
                floors[doubts] = least - 1e-7 * abs(least)
                doubts += 1
    codes = empty(STRIP, np.int32)
    for first in range(0, doubts, STRIP):
        again = doubtful[first : min(first + STRIP, doubts)]
        _gather(x, again, columns, strip)
        _decide(strip, len(again), floors[first:], packed, scale, bias, exact, codes)
        for i in range(len(again)):
            out[again[i]] = codes[i]


_ARGUMENTS = (
    in_array("i4", 1),
    in_array("f4", 1),
    in_array("f4", 1),
    in_array("f4", 1),
    in_array("f8", 2),
    types.float64,
    types.float64,
    out_array("i4", 1),
)


_nearest_bytes, _nearest_floats = (entry(in_array(rows, 2), *_ARGUMENTS)(_nearest) for rows in ("u1", "f4"))
