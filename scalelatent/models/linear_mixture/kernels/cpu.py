"""Mixtures of linear models in numba: register tiles multiply strips of rows in the cache.

Sums run over rows in their order. Sums over features run in order, or in sixteen lanes that are added as a
tree on every machine, so that results do not depend on the thread or on the width of the vectors.

- A *strip* is a range of rows. It is copied into the cache, after the centre or the mean is subtracted.
- A *group* is a range of components of one class. Their columns (the vectors b and W of their scores) are
  multiplied with a strip at once.
- A *panel* is the operand of a register tile: some columns, stored feature by feature (`kernels/tiles.py`).
- A *piece* is a range of features. Rows that are too wide for the cache are multiplied piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from llvmlite import ir
from numba import types

from scalelatent.kernels.arrays import check_same_width
from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.memory import empty, zeros
from scalelatent.kernels.tiles import PANEL, add_moment, compute_latents, pack, padded
from scalelatent.kernels.vectors import BYTES, F32, I64, LANES, Vectors, vector_intrinsic
from scalelatent.models.linear_mixture.kernels.reference import (
    GAMMA,
    PIVOT,
    Groups,
    Scores,
    TangentSpec,
    smoothing_taps,
    velocity,
)
from scalelatent.models.linear_mixture.kernels.reference import close_sums as close_sums
from scalelatent.models.linear_mixture.kernels.reference import open_sums as open_sums

# Number of rows that are added to the scatter at a time (a strip). A strip, the basis of a component and the
# products of both fit the second-level cache.
STRIP_ROWS = 128
# Number of rows whose scores are computed at a time (a strip). With a larger strip, the vectors b and W of
# the components are read less often.
SCAN_ROWS = 256
# Upper bound, in bytes, of the columns (vectors b and W) of a group of components.
_COLUMN_BYTES = 600_000
# Upper bound of the number of columns (vectors b and W) of a group of components.
_MOST_COLUMNS = 384
# Rows with more features than this number are multiplied in pieces (ranges of features), so that the operands
# stay in the cache.
_MOST_WHOLE = 1024
# Largest number of features of a piece (a range of features of a row that is too wide for the cache).
_MOST_PIECE = 768
# Number of partial sums (lanes) of a sum over features. The number is equal on all machines, so that results
# have equal bits.
_SUM_LANES = 16


@vector_intrinsic(_SUM_LANES)
def _subtract_centre(
    v: Vectors, x: ir.Value, centre: ir.Value, out: ir.Value, n: ir.Value, square: ir.Value
) -> None:
    """Write x - centre (n numbers) to ``out`` and its squared length, from 16 partial sums, to ``square``."""
    b = v.b
    whole = b.mul(b.sdiv(n, I64(_SUM_LANES)), I64(BYTES * _SUM_LANES))

    def body(k: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        z = b.fsub(v.load(x, k), v.load(centre, k))
        v.store(z, out, k)
        return [v.fma(z, z, sums[0])]

    total = v.loop(I64(0), whole, I64(BYTES * _SUM_LANES), [v.constant(0.0)], body, True)[0]
    mask = v.first(b.srem(n, I64(_SUM_LANES)))
    z = b.fsub(v.load(x, whole, mask=mask), v.load(centre, whole, mask=mask))
    v.store(z, out, whole, mask)
    v.store(v.fold(v.fma(z, z, total), b.fadd), square)


@vector_intrinsic(_SUM_LANES)
def _dot(v: Vectors, x: ir.Value, y: ir.Value, n: ir.Value, out: ir.Value) -> None:
    """Write the inner product of two vectors of n numbers, from 16 partial sums, to ``out``."""
    b = v.b
    whole = b.mul(b.sdiv(n, I64(_SUM_LANES)), I64(BYTES * _SUM_LANES))

    def body(k: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        return [v.fma(v.load(x, k), v.load(y, k), sums[0])]

    total = v.loop(I64(0), whole, I64(BYTES * _SUM_LANES), [v.constant(0.0)], body, True)[0]
    mask = v.first(b.srem(n, I64(_SUM_LANES)))
    last = v.fma(v.load(x, whole, mask=mask), v.load(y, whole, mask=mask), total)
    v.store(v.fold(last, b.fadd), out)


@dataclass(frozen=True)
class Scorer:
    """Parameters of the scores d |z|² + z·b + c - |W'z|² of centred rows z, packed for products with rows.

    A group is a range of components of one class, a piece a range of features, and a panel some columns.
    """

    packed: np.ndarray  # float32 panels of the columns (b and W) of all groups
    packed_d: np.ndarray  # float32 panels of d; empty if a component has one d for all features
    # int64 (groups, 4): first component, number of components, offset in ``packed``, offset in ``packed_d``
    groups: np.ndarray
    class_groups: np.ndarray  # int64 (classes + 1,): first group of each class, and the number of groups
    starts: np.ndarray  # int64 (classes + 1,): first component of each class, and the number of components
    d: np.ndarray  # float32 (K,): factor of the squared length of a row
    c: np.ndarray  # float32 (K,): constant of the score
    centre: np.ndarray  # float32 (p,): subtracted from each row
    width: int  # columns of a component: b and the h columns of W
    # Features of a piece; ``packed`` has all panels of the first piece of a group, then of the second piece.
    piece: int


def piece_size(p: int) -> int:
    """Return the number of features in each piece (range of features) of rows with p features."""
    return p if p <= _MOST_WHOLE else -(-p // (-(-p // _MOST_PIECE) * _SUM_LANES)) * _SUM_LANES


def group_size(width: int, p: int) -> int:
    """Return the number of components per group that leaves the fewest lanes of vectors unused.

    The components of a group are multiplied with rows at once. Each has ``width`` columns of p features.
    """
    most = max(min(_MOST_COLUMNS, _COLUMN_BYTES // (BYTES * piece_size(p))) // width, 1)
    waste = [
        (-(-g * width // _SUM_LANES) * _SUM_LANES / (g * width), -g)
        for g in range(max(most // 2, 1), most + 1)
    ]
    return -min(waste)[1]


def make_scorer(scores: Scores, starts: np.ndarray) -> Scorer:
    """Pack ``scores``, the parameters of all components, for the kernels that compute scores of rows."""
    k, p, h = scores.w.shape
    columns = np.empty((k, h + 1, p), dtype=np.float32)
    columns[:, 0] = scores.b
    columns[:, 1:] = np.swapaxes(scores.w, 1, 2)
    own = scores.d.ndim == 2
    size, groups, class_groups, at, at_d = group_size(h + 1, p), [], [0], 0, 0
    for start, stop in pairwise(starts):
        for first in range(start, stop, size):
            count = min(size, stop - first)
            groups.append((first, count, at, at_d))
            at += p * -(-count * (h + 1) // LANES) * LANES
            at_d += p * -(-count // LANES) * LANES if own else 0
        class_groups.append(len(groups))
    table = np.array(groups, dtype=np.int64).reshape(-1, 4)
    packed, packed_d = np.empty(at, dtype=np.float32), np.empty(at_d, dtype=np.float32)
    d, piece = scores.d.astype(np.float32), piece_size(p)
    wide_d = d if own else np.zeros((0, p), "f4")
    _pack_groups(columns.reshape(-1, p), table, h + 1, piece, wide_d, packed, packed_d)
    return Scorer(
        packed,
        packed_d,
        table,
        np.array(class_groups),
        np.asarray(starts, dtype=np.int64),
        np.zeros(k, dtype=np.float32) if own else d,
        scores.c.astype(np.float32),
        scores.centre.astype(np.float32),
        h + 1,
        piece,
    )


@entry(
    in_array("f4", 2),
    in_array("i8", 2),
    types.int64,
    types.int64,
    in_array("f4", 2),
    out_array("f4", 1),
    out_array("f4", 1),
)
def _pack_groups(
    columns: np.ndarray, groups: np.ndarray, width: int, piece: int, d: np.ndarray, packed: np.ndarray,
    packed_d: np.ndarray,
) -> None:  # fmt: skip
    for g in range(len(groups)):
        first, count, at, at_d = groups[g]
        _pack_pieces(columns[first * width : (first + count) * width], piece, packed[at:])
        if len(d):
            _pack_pieces(d[first : first + count], piece, packed_d[at_d:])


@subkernel
def _pack_pieces(rows: np.ndarray, piece: int, to: np.ndarray) -> None:
    """Write the panels (operands of register tiles) of ``rows`` to ``to``, range by range of features."""
    n, p = rows.shape
    at = 0
    for begin in range(0, p, piece):
        some = empty((n, min(piece, p - begin)), np.float32)
        for i in range(n):
            for f in range(some.shape[1]):
                some[i, f] = rows[i, begin + f]
        panels = pack(some)
        for i in range(len(panels)):
            to[at + i] = panels[i]
        at += len(panels)


@subkernel
def _multiply_strip(
    panels: np.ndarray, strip: np.ndarray, rows: int, p: int, piece: int, part: np.ndarray, out: np.ndarray
) -> None:
    """Write the products (columns, rows) of the columns in ``panels`` and a strip of rows to ``out``.

    The strip is stored in pieces (ranges of ``piece`` features), one after the other; ``part`` is scratch
    memory for the products of one piece.
    """
    columns = len(out)
    for begin in range(0, p, piece):
        size = min(piece, p - begin)
        own = panels[begin * columns : (begin + size) * columns]
        some = strip[begin * SCAN_ROWS : begin * SCAN_ROWS + rows * size].reshape(rows, size)
        if begin == 0:
            compute_latents(own, some, out)
        else:
            compute_latents(own, some, part[:columns])
            for j in range(columns):
                to, more = out[j], part[j]
                for i in range(SCAN_ROWS):
                    to[i] += more[i]


@subkernel
def _subtract_squares(h: np.ndarray, col: int, width: int, start: np.ndarray, e: np.ndarray) -> None:
    """Write to ``e`` the scores of a strip of rows under one component: start + h[col] - h[col + 1]² - ….

    h[col] to h[col + width - 1] are the products of the columns b and W of the component with all rows.
    """
    first = h[col]
    for i in range(SCAN_ROWS):
        e[i] = start[i] + first[i]
    k = 1
    while width - k >= 4:
        r0, r1, r2, r3 = h[col + k], h[col + k + 1], h[col + k + 2], h[col + k + 3]
        for i in range(SCAN_ROWS):
            e[i] = (((e[i] - r0[i] * r0[i]) - r1[i] * r1[i]) - r2[i] * r2[i]) - r3[i] * r3[i]
        k += 4
    while k < width:
        row = h[col + k]
        for i in range(SCAN_ROWS):
            e[i] -= row[i] * row[i]
        k += 1


@entry(
    in_array("f4", 2),
    in_array("f4", 1),
    in_array("f4", 1),
    in_array("i8", 2),
    in_array("i8", 1),
    in_array("f4", 1),
    in_array("f4", 1),
    in_array("f4", 1),
    types.int64,
    types.int64,
    in_array("i8", 1),
    in_array("i8", 2),
    out_array("f4", 2),
    out_array("i4", 2),
    out_array("f4", 2),
)
def _score_rows(
    x: np.ndarray, packed: np.ndarray, packed_d: np.ndarray, groups: np.ndarray, class_groups: np.ndarray,
    d: np.ndarray, c: np.ndarray, centre: np.ndarray, width: int, piece: int, rows_of: np.ndarray,
    parts: np.ndarray, best: np.ndarray, index: np.ndarray, scores: np.ndarray,
) -> None:  # fmt: skip
    """Write the best score of each row in each class and its component, or the scores of all components.

    The best scores go to ``best`` and ``index``, all scores to ``scores``; arrays without columns are not
    written. The columns of ``parts`` (n, 4) are a, b, first and stop: the rows a to b - 1 of the list
    ``rows_of`` are scored under the classes first to stop - 1.
    """
    p = x.shape[1]
    most, wide = 0, 0
    for g in range(len(groups)):
        most, wide = max(most, groups[g, 1] * width), max(wide, groups[g, 1])
    strip = empty(SCAN_ROWS * p, np.float32)
    squares = empty(len(strip) if len(packed_d) else 0, np.float32)
    products = zeros((padded(most), SCAN_ROWS), np.float32)
    pieces = zeros((padded(max(most, wide)) if piece < p else 0, SCAN_ROWS), np.float32)
    some = zeros(SCAN_ROWS, np.float32)
    own = zeros((padded(wide) if len(packed_d) else 0, SCAN_ROWS), np.float32)
    lengths, e = zeros(SCAN_ROWS, np.float32), empty(SCAN_ROWS, np.float32)
    start, top = empty(SCAN_ROWS, np.float32), empty(SCAN_ROWS, np.float32)
    which = empty(SCAN_ROWS, np.int32)
    for number in range(len(parts)):
        start_row, stop_row, first_class, stop_class = parts[number]
        first_group, stop_group = class_groups[first_class], class_groups[stop_class]
        begin = groups[first_group, 0] if stop_group > first_group else 0
        for a in range(start_row, stop_row, SCAN_ROWS):
            own_rows = rows_of[a : min(a + SCAN_ROWS, stop_row)]
            rows = len(own_rows)
            for i in range(SCAN_ROWS):
                lengths[i] = np.float32(0.0)
            for at in range(0, p, piece):
                size = min(piece, p - at)
                for i in range(rows):
                    _subtract_centre(
                        x.ctypes.data + (own_rows[i] * p + at) * BYTES,
                        centre.ctypes.data + at * BYTES,
                        strip.ctypes.data + (at * SCAN_ROWS + i * size) * BYTES,
                        size,
                        some.ctypes.data + i * BYTES,
                    )
                for i in range(SCAN_ROWS):
                    lengths[i] += some[i]
            for i in range(len(squares)):
                squares[i] = strip[i] * strip[i]
            for s in range(first_class, stop_class):
                for i in range(SCAN_ROWS):
                    top[i] = np.float32(np.inf)
                    which[i] = -1
                for g in range(class_groups[s], class_groups[s + 1]):
                    first, count = groups[g, 0], groups[g, 1]
                    columns = padded(count * width)
                    panels = packed[groups[g, 2] : groups[g, 2] + columns * p]
                    _multiply_strip(panels, strip, rows, p, piece, pieces, products[:columns])
                    if len(packed_d):
                        columns = padded(count)
                        panels = packed_d[groups[g, 3] : groups[g, 3] + columns * p]
                        _multiply_strip(panels, squares, rows, p, piece, pieces, own[:columns])
                    for j in range(count):
                        q = first + j
                        if len(packed_d):
                            row = own[j]
                            for i in range(SCAN_ROWS):
                                start[i] = row[i] + c[q]
                        else:
                            for i in range(SCAN_ROWS):
                                start[i] = lengths[i] * d[q] + c[q]
                        _subtract_squares(products, j * width, width, start, e)
                        if scores.shape[1]:
                            for i in range(rows):
                                scores[own_rows[i], q - begin] = e[i]
                        else:
                            name = np.int32(q)
                            for i in range(SCAN_ROWS):
                                wins = e[i] < top[i]
                                top[i] = e[i] if wins else top[i]
                                which[i] = name if wins else which[i]
                if best.shape[1]:
                    for i in range(rows):
                        best[own_rows[i], s - first_class] = top[i]
                        index[own_rows[i], s - first_class] = which[i]


def _run_scores(
    scorer: Scorer, x: np.ndarray, rows: np.ndarray, parts: np.ndarray, columns: int, all_: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    check_same_width(x.shape[1], scorer.centre.size)
    n = len(x)
    best, index = np.empty((n, columns), dtype=np.float32), np.empty((n, columns), dtype=np.int32)
    scores = np.empty((n, all_), dtype=np.float32)
    s = scorer
    _score_rows(
        np.ascontiguousarray(x, dtype=np.float32),
        s.packed,
        s.packed_d,
        s.groups,
        s.class_groups,
        s.d,
        s.c,
        s.centre,
        s.width,
        s.piece,
        rows,
        parts,
        best,
        index,
        scores,
    )
    return best, index, scores


def _select_all_rows(x: np.ndarray, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(len(x)), np.array([[0, len(x), first, stop]])


def all_scores(scorer: Scorer, x: np.ndarray, first: int, stop: int) -> np.ndarray:
    """Return the scores of rows under all components of the classes first to stop - 1, in float32."""
    return _run_scores(
        scorer, x, *_select_all_rows(x, first, stop), 0, int(scorer.starts[stop] - scorer.starts[first])
    )[2]


def nearest(scorer: Scorer, x: np.ndarray, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest score of each row in each class first to stop - 1, and the component of the score.

    The scores of the other components are not stored.
    """
    best, index, _ = _run_scores(scorer, x, *_select_all_rows(x, first, stop), stop - first, 0)
    # The index is -1 if a class has no components, or if all of them were dropped.
    return best, np.where(index < 0, scorer.starts[first:stop].astype(np.int32), index)


def nearest_own(
    scorer: Scorer, x: np.ndarray, rows: np.ndarray, edges: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest score of each row under its own class, and the component; float32, int32."""
    classes = np.arange(len(edges) - 1)
    parts = np.stack([edges[:-1], edges[1:], classes, classes + 1], axis=1)
    best, index, _ = _run_scores(scorer, x, rows, parts, 1, 0)
    best, index = best[:, 0], index[:, 0]
    is_lost = index < 0
    if is_lost.any():
        first = np.empty(len(x), dtype=np.int32)
        first[rows] = np.repeat(scorer.starts[:-1], np.diff(edges))
        index[is_lost] = first[is_lost]
    return best, index


def select_best(scores: np.ndarray, n_best: int) -> np.ndarray:
    """Return the columns of the smallest scores of each row, ascending, int32 (n, n_best)."""
    out = np.empty((len(scores), min(n_best, scores.shape[1])), dtype=np.int32)
    if out.size:
        _select_best(scores, out)
    return out


@entry(in_array("f4", 2), out_array("i4", 2))
def _select_best(scores: np.ndarray, out: np.ndarray) -> None:
    few = out.shape[1]
    for i in range(len(scores)):
        row, best = scores[i], out[i]
        for q in range(len(row)):
            k = min(q, few)
            if k == few and not row[q] < row[best[few - 1]]:
                continue
            k = min(k, few - 1)
            while k > 0 and row[q] < row[best[k - 1]]:
                best[k] = best[k - 1]
                k -= 1
            best[k] = q


@dataclass(frozen=True)
class PackedBases:
    """Means and bases in float32, and the panels into which the columns of each basis are packed."""

    means: np.ndarray
    panels: np.ndarray
    width: int
    per_feature: bool


def pack_bases(means: np.ndarray, bases: np.ndarray, per_feature: bool) -> PackedBases:
    """Return means and bases, packed for the sums :func:`add_scatter` and :func:`add_tangent_scatter`."""
    return PackedBases(means.astype(np.float32), _pack_columns(bases), bases.shape[2], per_feature)


def _pack_columns(columns: np.ndarray) -> np.ndarray:
    """Return the columns of each matrix (K, p, q), packed into panels (columns stored feature by feature)."""
    k, p, q = columns.shape
    out = np.zeros((k, p * (-(-q // LANES) * LANES)), dtype=np.float32)
    rows = np.ascontiguousarray(np.swapaxes(columns, 1, 2), dtype=np.float32)
    if q:
        _pack_each(rows, out)
    return out


@entry(in_array("f4", 3), out_array("f4", 2))
def _pack_each(columns: np.ndarray, out: np.ndarray) -> None:
    for k in range(len(columns)):
        panels, to = pack(columns[k]), out[k]
        for i in range(len(panels)):
            to[i] = panels[i]


def _make_contiguous(groups: Groups) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.ascontiguousarray(groups.rows, dtype=np.int64),
        np.ascontiguousarray(groups.starts, dtype=np.int64),
        np.ascontiguousarray(groups.weights, dtype=np.float64),
    )


_GROUP_TYPES = (in_array("i8", 1), in_array("i8", 1), in_array("f8", 1))


def add_scatter(
    bases: PackedBases, x: np.ndarray, groups: Groups, total: np.ndarray, square: np.ndarray,
    scatter: np.ndarray, gram: np.ndarray,
) -> None:  # fmt: skip
    """Add sums over residuals (rows minus the mean) of each component to the arrays ``total`` to ``gram``.

    The sums of one block are float32, and the sums over blocks are float64.
    """
    x = np.ascontiguousarray(x, dtype=np.float32)
    wide = square if bases.per_feature else square[:, None]
    _add_scatter(
        x, *_make_contiguous(groups), bases.means, bases.panels, bases.width, total, wide, scatter, gram
    )


@entry(
    in_array("f4", 2),
    *_GROUP_TYPES,
    in_array("f4", 2),
    in_array("f4", 2),
    types.int64,
    out_array("f8", 2),
    out_array("f8", 2),
    out_array("f8", 3),
    out_array("f8", 3),
)
def _add_scatter(
    x: np.ndarray, rows: np.ndarray, starts: np.ndarray, weights: np.ndarray, means: np.ndarray,
    packed: np.ndarray, q: int, total: np.ndarray, square: np.ndarray, scatter: np.ndarray, gram: np.ndarray,
) -> None:  # fmt: skip
    p = x.shape[1]
    strip, sums = empty((STRIP_ROWS, p), np.float32), empty((q + 1, p), np.float32)
    codes, length = zeros((padded(q) + 1, STRIP_ROWS), np.float32), empty(1, np.float32)
    per_feature = square.shape[1] == p and p > 1
    squares = zeros(p if per_feature else 0, np.float32)
    for k in range(len(starts) - 1):
        if starts[k] == starts[k + 1]:
            continue
        sums[:] = np.float32(0.0)
        squares[:] = np.float32(0.0)
        for a in range(starts[k], starts[k + 1], STRIP_ROWS):
            n = min(STRIP_ROWS, starts[k + 1] - a)
            for i in range(n):
                _subtract_centre(
                    x.ctypes.data + rows[a + i] * p * BYTES,
                    means.ctypes.data + k * p * BYTES,
                    strip.ctypes.data + i * p * BYTES,
                    p,
                    length.ctypes.data,
                )
                if per_feature:
                    z, r = strip[i], np.float32(weights[a + i])
                    for f in range(p):
                        squares[f] += r * (z[f] * z[f])
                else:
                    square[k, 0] += weights[a + i] * length[0]
            compute_latents(packed[k], strip[:n], codes[: padded(q)])
            if len(gram):
                for j in range(q):
                    for m in range(q):
                        one = 0.0
                        for i in range(n):
                            one += weights[a + i] * np.float64(codes[j, i]) * np.float64(codes[m, i])
                        gram[k, j, m] += one
            for j in range(q):
                code = codes[j]
                for i in range(n):
                    code[i] *= np.float32(weights[a + i])
            ones = codes[q]
            for i in range(n):
                ones[i] = np.float32(weights[a + i])
            add_moment(codes[: q + 1], n, strip[:n], sums)
        for j in range(q):
            to, add = scatter[k, j], sums[j]
            for f in range(p):
                to[f] += add[f]
        to, add = total[k], sums[q]
        for f in range(p):
            to[f] += add[f]
        if per_feature:
            to = square[k]
            for f in range(p):
                to[f] += squares[f]


# -- tangents ----------------------------------------------------------------------------------------------

# Columns of a basis are multiplied by a field (1, or a coordinate of each pixel) eight at a time. The columns
# of each field are padded to a multiple of eight, so that eight columns are never in two panels.
_FIELD_COLUMNS = 8


@dataclass(frozen=True)
class _Derivatives:
    """Factors that compute the tangents of an image from its derivatives gx and gy.

    gx is the derivative along a line and gy that along a column. Each linear tangent is a sum of products of
    a derivative, a field and a sign. The fields are 1, u and v: u and v are the horizontal and the vertical
    coordinate of each pixel, in the order in which `reference.velocity` returns them for "scaling".
    """

    across: np.ndarray  # float32 (taps, p): weights of smoothing along lines, 0 for pixels of another line
    down: np.ndarray  # float32 (taps,): weights of smoothing along columns
    sides: np.ndarray  # float32 (2, p): weights of the right and left neighbour in the derivative along lines
    width: int  # pixels of a line
    fields: np.ndarray  # float32 (fields, p): the fields among 1, u and v that the tangents use
    parts: np.ndarray  # float32 (tangents, fields, 2): sign of a field times gx and gy, or 0
    thickness: int  # position of the (nonlinear) thickness among the tangents, or -1

    def velocities(self) -> np.ndarray:
        """Return the factors of gx and gy at each pixel in each tangent, (tangents, 2, p)."""
        return np.einsum("tsd,sp->tdp", self.parts, self.fields).astype(np.float32)

    def lengths(self) -> np.ndarray:
        """Return the weights of gx², gy² and gx gy in the squares of each tangent, (tangents, 3, p)."""
        x, y = self.velocities().swapaxes(0, 1)
        out = np.stack([x * x, y * y, 2 * x * y], axis=1)
        if self.thickness >= 0:
            out[self.thickness, :2] = 1.0
        return out


def _make_derivatives(names: Sequence[str], shape: tuple[int, int], smoothing: float) -> _Derivatives:
    height, width = shape
    taps = smoothing_taps(smoothing)
    reach = np.arange(len(taps)) - len(taps) // 2
    column = np.tile(np.arange(width), height)
    inside = (column + reach[:, None] >= 0) & (column + reach[:, None] < width)
    fields = np.stack([np.ones(height * width), *velocity("scaling", shape)])
    parts = np.zeros((len(names), 3, 2))
    for i, name in enumerate(names):
        if name != "thickness":
            # The factor of each derivative is one of the fields 1, u and v, its negative, or 0.
            for along, field in enumerate(velocity(name, shape)):
                for s in range(3):
                    if not parts[i, :, along].any() and field.any():
                        same, turned = np.array_equal(field, fields[s]), np.array_equal(field, -fields[s])
                        parts[i, s, along] = float(same) - float(turned)
    used = parts.any(axis=(0, 2))
    return _Derivatives(
        (taps[:, None] * inside).astype(np.float32),
        taps.astype(np.float32),
        0.5 * np.stack([column < width - 1, column > 0]).astype(np.float32),
        width,
        fields[used].astype(np.float32),
        np.ascontiguousarray(parts[:, used], dtype=np.float32),
        names.index("thickness") if "thickness" in names else -1,
    )


_DERIVATIVE_TYPES = (in_array("f4", 2), in_array("f4", 1), in_array("f4", 2), types.int64)


@subkernel
def _derivative_scratch(p: int, taps: int, width: int) -> np.ndarray:
    """Return zeros for three padded images: a row, smoothed along lines, and smoothed along both axes."""
    return zeros((3, p + 2 * (taps // 2 + 1) * (width + 1)), np.float32)


@subkernel
def _differentiate(
    row: np.ndarray, across: np.ndarray, down: np.ndarray, sides: np.ndarray, width: int, scratch: np.ndarray,
    gx: np.ndarray, gy: np.ndarray,
) -> None:  # fmt: skip
    """Write the derivatives of the smoothed image ``row``: along lines to ``gx`` and along columns to ``gy``.

    Pixels beyond the border are 0.
    """
    p, taps = len(row), len(down)
    radius, half = taps // 2, np.float32(0.5)
    edge = (radius + 1) * (width + 1)
    image, once, smooth = scratch[0], scratch[1], scratch[2]
    inner, lines, whole = image[edge : edge + p], once[edge : edge + p], smooth[edge : edge + p]
    for f in range(p):
        inner[f] = row[f]
    first, tap, shifted = across[0], down[0], image[edge - radius :]
    for f in range(p):
        lines[f] = first[f] * shifted[f]
    for k in range(1, taps):
        weights, shifted = across[k], image[edge + k - radius :]
        for f in range(p):
            lines[f] += weights[f] * shifted[f]
    shifted = once[edge - radius * width :]
    for f in range(p):
        whole[f] = tap * shifted[f]
    for k in range(1, taps):
        tap, shifted = down[k], once[edge + (k - radius) * width :]
        for f in range(p):
            whole[f] += tap * shifted[f]
    above, below = smooth[edge - width :], smooth[edge + width :]
    left, right, by_right, by_left = smooth[edge - 1 :], smooth[edge + 1 :], sides[0], sides[1]
    for f in range(p):
        gy[f] = half * (below[f] - above[f])
        gx[f] = by_right[f] * right[f] - by_left[f] * left[f]


def tangent_rows(x: np.ndarray, shape: tuple[int, int], names: Sequence[str], smoothing: float) -> np.ndarray:
    """Return the tangents (derivatives under small transformations) of images (n, p), (n, tangents, p)."""
    out = np.empty((len(x), len(names), x.shape[1]), dtype=np.float32)
    derivatives = _make_derivatives(names, shape, smoothing)
    x = np.ascontiguousarray(x, dtype=np.float32)
    by = derivatives.velocities()
    _tangent_rows(
        x,
        derivatives.across,
        derivatives.down,
        derivatives.sides,
        derivatives.width,
        by,
        derivatives.thickness,
        out,
    )
    return out


@entry(in_array("f4", 2), *_DERIVATIVE_TYPES, in_array("f4", 3), types.int64, out_array("f4", 3))
def _tangent_rows(
    x: np.ndarray, across: np.ndarray, down: np.ndarray, sides: np.ndarray, width: int, by: np.ndarray,
    thickness: int, out: np.ndarray,
) -> None:  # fmt: skip
    p = x.shape[1]
    scratch, both = _derivative_scratch(p, len(down), width), empty((2, p), np.float32)
    gx, gy = both[0], both[1]
    for i in range(len(x)):
        _differentiate(x[i], across, down, sides, width, scratch, gx, gy)
        for t in range(len(by)):
            to, by_x, by_y = out[i, t], by[t, 0], by[t, 1]
            if t == thickness:
                for f in range(p):
                    to[f] = np.sqrt(gx[f] * gx[f] + gy[f] * gy[f])
            else:
                for f in range(p):
                    to[f] = by_x[f] * gx[f] + by_y[f] * gy[f]


def add_tangent_scatter(
    bases: PackedBases, x: np.ndarray, groups: Groups, spec: TangentSpec, factors: np.ndarray,
    scatter: np.ndarray, trace: np.ndarray,
) -> None:  # fmt: skip
    """Add the scatter of tangents of the rows to ``scatter`` and ``trace``, without computing the tangents.

    A linear tangent is a sum of products of a derivative of the image, a field and a sign. The fields are 1
    and the coordinates u (horizontal) and v (vertical) of each pixel. A field may multiply the basis B
    instead of the derivative. Therefore products of two derivatives with B, u B and v B replace the products
    of six tangents with B.
    """
    if not spec.names:
        return
    derivatives = _make_derivatives(spec.names, spec.shape, spec.smoothing)
    _add_tangents(
        np.ascontiguousarray(x, dtype=np.float32),
        *_make_contiguous(groups),
        derivatives.across,
        derivatives.down,
        derivatives.sides,
        derivatives.width,
        derivatives.fields,
        derivatives.parts,
        derivatives.lengths(),
        derivatives.thickness,
        bases.panels,
        bases.width,
        np.ascontiguousarray(factors, dtype=np.float64),
        scatter,
        trace,
    )


@vector_intrinsic(_FIELD_COLUMNS)
def _times_field(
    v: Vectors, of: ir.Value, of_step: ir.Value, field: ir.Value, to: ir.Value, to_step: ir.Value, n: ir.Value
) -> None:
    """Write to ``to`` eight columns of a basis (n pixels), each multiplied by ``field``, pixel by pixel."""

    def body(_: ir.Value, places: list[ir.Value]) -> list[ir.Value]:
        a, b, c = places
        v.store(v.b.fmul(v.load(a), v.spread(v.load(b, kind=F32))), c)
        return [v.b.add(a, of_step), v.b.add(b, I64(BYTES)), v.b.add(c, to_step)]

    v.loop(I64(0), n, I64(1), [of, field, to], body)


@subkernel
def _spread_panels(packed: np.ndarray, q: int, fields: np.ndarray, out: np.ndarray) -> None:
    """Write a basis times each field (1, u or v at each pixel) in packed form, one field after the other."""
    sets, p = fields.shape
    each = -(-q // _FIELD_COLUMNS) * _FIELD_COLUMNS
    columns, dims = padded(q), padded(sets * each)
    for first in range(0, q, _FIELD_COLUMNS):
        start = first // PANEL * PANEL
        of, wide = packed[start * p + first - start :], min(PANEL, columns - start)
        for s in range(sets):
            begin = (s * each + first) // PANEL * PANEL
            to, width = out[begin * p + s * each + first - begin :], min(PANEL, dims - begin)
            target = to.ctypes.data
            field = fields[s]
            _times_field(of.ctypes.data, BYTES * wide, field.ctypes.data, target, BYTES * width, p)


@subkernel
def _combine_products(
    codes: np.ndarray, sets: int, each: int, q: int, n: int, weights: np.ndarray, mixing: np.ndarray,
    out: np.ndarray,
) -> None:  # fmt: skip
    """Write to ``out`` the codes of each image, combined by ``mixing`` and multiplied by the image's weight.

    ``codes`` are the products of the derivatives gx and gy with the basis times each field (1, u or v). The
    matrix ``mixing`` (2 fields, 2 fields) sums the products of all tangents.
    """
    for s in range(sets):
        for j in range(q):
            for d in range(2):
                to = out[s * each + j, d * n : (d + 1) * n]
                for i in range(n):
                    to[i] = np.float32(0.0)
                for r in range(sets):
                    for e in range(2):
                        by = mixing[2 * s + d, 2 * r + e]
                        if by != np.float32(0.0):
                            of = codes[r * each + j, e * n : (e + 1) * n]
                            for i in range(n):
                                to[i] += by * of[i]
                for i in range(n):
                    to[i] *= weights[i]


@entry(
    in_array("f4", 2),
    *_GROUP_TYPES,
    *_DERIVATIVE_TYPES,
    in_array("f4", 2),
    in_array("f4", 3),
    in_array("f4", 3),
    types.int64,
    in_array("f4", 2),
    types.int64,
    in_array("f8", 2),
    out_array("f8", 3),
    out_array("f8", 2),
)
def _add_tangents(
    x: np.ndarray, rows: np.ndarray, starts: np.ndarray, weights: np.ndarray, across: np.ndarray,
    down: np.ndarray, sides: np.ndarray, width: int, fields: np.ndarray, parts: np.ndarray,
    lengths: np.ndarray, thickness: int, packed: np.ndarray, q: int, factors: np.ndarray, scatter: np.ndarray,
    trace: np.ndarray,
) -> None:  # fmt: skip
    p, sets, kinds = x.shape[1], len(fields), len(parts)
    each, some = -(-q // _FIELD_COLUMNS) * _FIELD_COLUMNS, STRIP_ROWS // 2
    dims = sets * each
    scratch = _derivative_scratch(p, len(down), width)
    strip, thick = empty((STRIP_ROWS, p), np.float32), empty((some, p), np.float32)
    panels = zeros(padded(dims) * p, np.float32)
    codes = zeros((padded(dims), STRIP_ROWS), np.float32)
    mixed = zeros((dims, STRIP_ROWS), np.float32)
    own = zeros((padded(q), some), np.float32)
    sums, more = empty((dims, p), np.float32), empty((q, p), np.float32)
    squares, w = empty((3, p), np.float32), empty(some, np.float32)
    mixing, one = empty((2 * sets, 2 * sets), np.float32), empty(1, np.float32)
    xx, yy, xy = squares[0], squares[1], squares[2]
    for k in range(len(starts) - 1):
        if starts[k] == starts[k + 1]:
            continue
        counted = False
        mixing[:] = np.float32(0.0)
        for t in range(kinds):
            by = np.float32(factors[k, t])
            if t != thickness and by > 0:
                counted = True
            for a in range(2 * sets):
                for b in range(2 * sets):
                    mixing[a, b] += by * (parts[t, a // 2, a % 2] * parts[t, b // 2, b % 2])
        thick_counted = thickness >= 0 and factors[k, max(thickness, 0)] > 0
        if counted:
            _spread_panels(packed[k], q, fields, panels)
        sums[:] = np.float32(0.0)
        more[:] = np.float32(0.0)
        for a in range(starts[k], starts[k + 1], some):
            n = min(some, starts[k + 1] - a)
            squares[:] = np.float32(0.0)
            for i in range(n):
                gx, gy = strip[i], strip[n + i]
                _differentiate(x[rows[a + i]], across, down, sides, width, scratch, gx, gy)
                r = np.float32(weights[a + i])
                w[i] = r
                for f in range(p):
                    xx[f] += r * (gx[f] * gx[f])
                    yy[f] += r * (gy[f] * gy[f])
                    xy[f] += r * (gx[f] * gy[f])
                if thickness >= 0:
                    to = thick[i]
                    for f in range(p):
                        to[f] = np.sqrt(gx[f] * gx[f] + gy[f] * gy[f])
            for t in range(kinds):
                for m in range(3):
                    _dot(lengths[t, m].ctypes.data, squares[m].ctypes.data, p, one.ctypes.data)
                    trace[k, t] += one[0]
            if counted:
                compute_latents(panels, strip[: 2 * n], codes)
                _combine_products(codes, sets, each, q, n, w, mixing, mixed)
                add_moment(mixed, 2 * n, strip[: 2 * n], sums)
            if thick_counted:
                compute_latents(packed[k], thick[:n], own)
                by = np.float32(factors[k, thickness])
                for j in range(q):
                    code = own[j]
                    for i in range(n):
                        code[i] *= by * w[i]
                add_moment(own[:q], n, thick[:n], more)
        for j in range(q if counted or thick_counted else 0):
            to, add = scatter[k, j], more[j]
            for s in range(sets if counted else 0):
                field, of = fields[s], sums[s * each + j]
                for f in range(p):
                    add[f] += field[f] * of[f]
            for f in range(p):
                to[f] += add[f]


# -- tangent distance --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedTangentScores:
    """Parameters of the scores of all components for tangent distance; ``packed`` has the columns W and b."""

    packed: np.ndarray
    width: int
    d: np.ndarray
    c: np.ndarray
    centre: np.ndarray


def pack_tangent_scores(scores: Scores) -> PackedTangentScores:
    """Pack ``scores``, the parameters of all components, for :func:`tangent_distance`."""
    columns = np.concatenate([scores.w, scores.b[:, :, None]], axis=2)
    d = scores.d if scores.d.ndim == 2 else scores.d[:, None]
    return PackedTangentScores(
        _pack_columns(columns),
        columns.shape[2],
        np.ascontiguousarray(d, dtype=np.float32),
        scores.c.astype(np.float32),
        scores.centre.astype(np.float32),
    )


def tangent_distance(
    scores: PackedTangentScores,
    x: np.ndarray,
    tangents: np.ndarray,
    candidates: np.ndarray,
    gamma: float = GAMMA,
) -> np.ndarray:
    """Return the scores (n, candidates) of rows that may move along their tangents, in float32."""
    out = np.empty(candidates.shape, dtype=np.float32)
    _score_with_tangents(
        np.ascontiguousarray(x, dtype=np.float32),
        np.ascontiguousarray(tangents, dtype=np.float32),
        np.ascontiguousarray(candidates, dtype=np.int32),
        scores.packed,
        scores.width,
        scores.d,
        scores.c,
        scores.centre,
        gamma,
        out,
    )
    return out


@subkernel
def _solve_pivoted(g: np.ndarray, b: np.ndarray, t: int) -> float:
    """Return b' G^-1 b with the symmetric matrix G = ``g`` (t, t), for t tangents.

    The Cholesky factor overwrites ``g``, and the solution of its triangular system overwrites ``b``. Tangents
    whose pivot is as small as rounding errors are skipped.
    """
    total, top = 0.0, 0.0
    for i in range(t):
        top = max(top, g[i, i])
    floor = PIVOT * max(top, 1e-300)
    for i in range(t):
        pivot, y = g[i, i], b[i]
        for k in range(i):
            pivot -= g[i, k] * g[i, k]
            y -= g[i, k] * b[k]
        if pivot <= floor:
            for j in range(i, t):
                g[j, i] = 0.0
            b[i] = 0.0
            continue
        root = np.sqrt(pivot)
        for j in range(i + 1, t):
            s = g[j, i]
            for k in range(i):
                s -= g[j, k] * g[i, k]
            g[j, i] = s / root
        b[i] = y / root
        total += b[i] * b[i]
    return total


@entry(
    in_array("f4", 2),
    in_array("f4", 3),
    in_array("i4", 2),
    in_array("f4", 2),
    types.int64,
    in_array("f4", 2),
    in_array("f4", 1),
    in_array("f4", 1),
    types.float64,
    out_array("f4", 2),
)
def _score_with_tangents(
    x: np.ndarray, tangents: np.ndarray, candidates: np.ndarray, packed: np.ndarray, width: int,
    d: np.ndarray, c: np.ndarray, centre: np.ndarray, gamma: float, out: np.ndarray,
) -> None:  # fmt: skip
    p, t, h = x.shape[1], tangents.shape[1], width - 1
    own = d.shape[1] > 1
    rows = empty((t + 1, p), np.float32)  # the tangents, and the row itself
    scaled = empty((t + 1 if own else 0, p), np.float32)
    codes = zeros((padded(width), (t + 8) // 8 * 8), np.float32)
    dots, one = empty((t + 1, t + 1), np.float64), empty(1, np.float32)
    g, b = empty((t, t), np.float64), empty(t, np.float64)
    line = p * BYTES
    for i in range(len(x)):
        z = rows[t]
        for j in range(t):
            to, of = rows[j], tangents[i, j]
            for f in range(p):
                to[f] = of[f]
        _subtract_centre(x.ctypes.data + i * line, centre.ctypes.data, z.ctypes.data, p, one.ctypes.data)
        if not own:
            for j in range(t + 1):
                for k in range(j + 1):
                    _dot(rows.ctypes.data + j * line, rows.ctypes.data + k * line, p, one.ctypes.data)
                    dots[j, k] = one[0]
        for n in range(candidates.shape[1]):
            q = candidates[i, n]
            scale = 1.0 if own else np.float64(d[q, 0])
            if own:
                weight = d[q]
                for j in range(t + 1):
                    to, of = scaled[j], rows[j]
                    for f in range(p):
                        to[f] = of[f] * weight[f]
                    for k in range(j + 1):
                        _dot(scaled.ctypes.data + j * line, rows.ctypes.data + k * line, p, one.ctypes.data)
                        dots[j, k] = one[0]
            compute_latents(packed[q], rows, codes)
            score = scale * dots[t, t] + np.float64(codes[h, t]) + np.float64(c[q])
            for m in range(h):
                score -= np.float64(codes[m, t]) * np.float64(codes[m, t])
            for j in range(t):
                for k in range(j + 1):
                    s = scale * dots[j, k]
                    for m in range(h):
                        s -= np.float64(codes[m, j]) * np.float64(codes[m, k])
                    g[j, k] = s
                g[j, j] += gamma * scale * dots[j, j]
                s = scale * dots[t, j] + 0.5 * np.float64(codes[h, j])
                for m in range(h):
                    s -= np.float64(codes[m, j]) * np.float64(codes[m, t])
                b[j] = s
            out[i, n] = score - _solve_pivoted(g, b, t)
