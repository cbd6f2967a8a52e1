"""Mixtures of linear models in numba: products by register tiles of a strip of rows, folded while they lie in
the cache.

Sums run over rows in their order, and over features in order or in sixteen lanes that are added as a tree on
every machine: a block gives the same bits on any thread, whatever the width of the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from scalelatent.kernels.jit import entry, filled, given, part
from scalelatent.kernels.tiles import PANEL, TALL, accumulate, add_moment, latents, pack, padded
from scalelatent.kernels.vectors import BYTES, F64, I64, LANES, Vectors, instructions
from scalelatent.models.linear_mixture.kernels.reference import (
    GAMMA,
    PIVOT,
    Frame,
    Groups,
    Scores,
    smoothing_taps,
    velocity,
)

# Rows of a strip; with the columns of a group and their products it stays in the second-level cache.
STRIP = 128
# Those of a scan: the more, the fewer times are the columns read.
SCAN_ROWS = 256
_COLUMN_BYTES, _MOST_COLUMNS = 600_000, 384
# Lanes of a sum over features, on every machine.
_SIDE = 16


@instructions(_SIDE)
def _centre(v: Vectors, x: Any, centre: Any, out: Any, n: Any, square: Any) -> None:
    """out = x - centre, n numbers, and its squared length: sixteen sums side by side, added as a tree."""
    b = v.b
    whole = b.mul(b.sdiv(n, I64(_SIDE)), I64(BYTES * _SIDE))

    def body(k: Any, sums: Any) -> list[Any]:
        z = b.fsub(v.load(x, k), v.load(centre, k))
        v.store(z, out, k)
        return [v.fma(z, z, sums[0])]

    total = v.loop(I64(0), whole, I64(BYTES * _SIDE), [v.constant(0.0)], body, True)[0]
    mask = v.first(b.srem(n, I64(_SIDE)))
    z = b.fsub(v.load(x, whole, mask=mask), v.load(centre, whole, mask=mask))
    v.store(z, out, whole, mask)
    v.store(v.fold(v.fma(z, z, total), b.fadd), square)


@instructions(_SIDE)
def _dot(v: Vectors, x: Any, y: Any, n: Any, out: Any) -> None:
    """The product of two vectors of n numbers, summed as in `_centre`."""
    b = v.b
    whole = b.mul(b.sdiv(n, I64(_SIDE)), I64(BYTES * _SIDE))

    def body(k: Any, sums: Any) -> list[Any]:
        return [v.fma(v.load(x, k), v.load(y, k), sums[0])]

    total = v.loop(I64(0), whole, I64(BYTES * _SIDE), [v.constant(0.0)], body, True)[0]
    mask = v.first(b.srem(n, I64(_SIDE)))
    last = v.fma(v.load(x, whole, mask=mask), v.load(y, whole, mask=mask), total)
    v.store(v.fold(last, b.fadd), out)


@dataclass(frozen=True)
class Scorer:
    """Scores, packed: groups of sub-classes whose columns b, W are multiplied at once.

    Attributes
    ----------
    packed, packed_d : ndarray of float32
        Panels of the groups' columns; of d where each feature has its own.
    groups : ndarray of int64, shape (groups, 4)
        First sub-class, how many, and where their panels begin in ``packed`` and ``packed_d``.
    runs, starts : ndarray of int64
        First group and first sub-class of each run, and their numbers.
    d, c : ndarray of float32, shape (K,)
    centre : ndarray of float32, shape (p,)
    width : int
        Columns of a sub-class.
    """

    packed: np.ndarray
    packed_d: np.ndarray
    groups: np.ndarray
    runs: np.ndarray
    starts: np.ndarray
    d: np.ndarray
    c: np.ndarray
    centre: np.ndarray
    width: int


def group_size(width: int, p: int) -> int:
    """Sub-classes of so many columns each in a group: few columns are filled up to whole vectors."""
    most = max(min(_MOST_COLUMNS, _COLUMN_BYTES // (BYTES * p)) // width, 1)
    waste = [(-(-g * width // _SIDE) * _SIDE / (g * width), -g) for g in range(max(most // 2, 1), most + 1)]
    return -min(waste)[1]


def make_scorer(scores: Scores, starts: np.ndarray) -> Scorer:
    """See :func:`..reference.make_scorer`."""
    k, p, h = scores.w.shape
    columns = np.empty((k, h + 1, p), dtype=np.float32)
    columns[:, 0] = scores.b
    columns[:, 1:] = np.swapaxes(scores.w, 1, 2)
    own = scores.d.ndim == 2
    size, groups, runs, at, at_d = group_size(h + 1, p), [], [0], 0, 0
    for run in range(len(starts) - 1):
        for first in range(starts[run], starts[run + 1], size):
            count = min(size, starts[run + 1] - first)
            groups.append((first, count, at, at_d))
            at += p * -(-count * (h + 1) // LANES) * LANES
            at_d += p * -(-count // LANES) * LANES if own else 0
        runs.append(len(groups))
    table = np.array(groups, dtype=np.int64).reshape(-1, 4)
    packed, packed_d = np.empty(at, dtype=np.float32), np.empty(at_d, dtype=np.float32)
    d = scores.d.astype(np.float32)
    _pack_groups(columns.reshape(-1, p), table, h + 1, d if own else np.zeros((0, p), "f4"), packed, packed_d)
    return Scorer(
        packed,
        packed_d,
        table,
        np.array(runs),
        np.asarray(starts, dtype=np.int64),
        np.zeros(k, dtype=np.float32) if own else d,
        scores.c.astype(np.float32),
        scores.centre.astype(np.float32),
        h + 1,
    )


@entry(given("f4", 2), given("i8", 2), types.int64, given("f4", 2), filled("f4", 1), filled("f4", 1))
def _pack_groups(columns, groups, width, d, packed, packed_d):  # type: ignore[no-untyped-def]
    for g in range(len(groups)):
        first, count, at, at_d = groups[g]
        panels = pack(columns[first * width : (first + count) * width])
        packed[at : at + len(panels)] = panels
        if len(d):
            panels = pack(d[first : first + count])
            packed_d[at_d : at_d + len(panels)] = panels


@part
def _fold(h, col, width, start, e):  # type: ignore[no-untyped-def]
    """e = start + h[col] - h[col + 1]² - h[col + 2]² - …, lane by lane and in this order."""
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
    given("f4", 2),
    given("f4", 1),
    given("f4", 1),
    given("i8", 2),
    given("i8", 1),
    given("f4", 1),
    given("f4", 1),
    given("f4", 1),
    types.int64,
    types.int64,
    types.int64,
    filled("f4", 2),
    filled("i4", 2),
    filled("f4", 2),
)
def _scan(x, packed, packed_d, groups, runs, d, c, centre, width, run, stop, best, index, scores):  # type: ignore[no-untyped-def]
    """The best of each run into ``best`` and ``index``, or all into ``scores``, whichever has columns."""
    n, p = x.shape
    most, wide = 0, 0
    for g in range(runs[run], runs[stop]):
        most, wide = max(most, groups[g, 1] * width), max(wide, groups[g, 1])
    strip = np.empty((SCAN_ROWS, p), dtype=np.float32)
    squares = np.empty((SCAN_ROWS if len(packed_d) else 0, p), dtype=np.float32)
    products = np.zeros((padded(most), SCAN_ROWS), dtype=np.float32)
    own = np.zeros((padded(wide) if len(packed_d) else 0, SCAN_ROWS), dtype=np.float32)
    lengths, e = np.zeros(SCAN_ROWS, dtype=np.float32), np.empty(SCAN_ROWS, dtype=np.float32)
    start, top = np.empty(SCAN_ROWS, dtype=np.float32), np.empty(SCAN_ROWS, dtype=np.float32)
    which = np.empty(SCAN_ROWS, dtype=np.int32)
    begin = groups[runs[run], 0] if runs[stop] > runs[run] else 0
    for a in range(0, n, SCAN_ROWS):
        rows = min(SCAN_ROWS, n - a)
        for i in range(rows):
            _centre(
                x.ctypes.data + (a + i) * p * BYTES,
                centre.ctypes.data,
                strip.ctypes.data + i * p * BYTES,
                p,
                lengths.ctypes.data + i * BYTES,
            )
        for i in range(rows if len(packed_d) else 0):
            z, zz = strip[i], squares[i]
            for f in range(p):
                zz[f] = z[f] * z[f]
        for s in range(run, stop):
            for i in range(SCAN_ROWS):
                top[i] = np.float32(np.inf)
                which[i] = -1
            for g in range(runs[s], runs[s + 1]):
                first, count = groups[g, 0], groups[g, 1]
                columns = padded(count * width)
                panels = packed[groups[g, 2] : groups[g, 2] + columns * p]
                latents(panels, strip[:rows], products[:columns])
                if len(packed_d):
                    columns = padded(count)
                    panels = packed_d[groups[g, 3] : groups[g, 3] + columns * p]
                    latents(panels, squares[:rows], own[:columns])
                for j in range(count):
                    q = first + j
                    if len(packed_d):
                        row = own[j]
                        for i in range(SCAN_ROWS):
                            start[i] = row[i] + c[q]
                    else:
                        for i in range(SCAN_ROWS):
                            start[i] = lengths[i] * d[q] + c[q]
                    _fold(products, j * width, width, start, e)
                    if scores.shape[1]:
                        for i in range(rows):
                            scores[a + i, q - begin] = e[i]
                    else:
                        number = np.int32(q)
                        for i in range(SCAN_ROWS):
                            wins = e[i] < top[i]
                            top[i] = e[i] if wins else top[i]
                            which[i] = number if wins else which[i]
            if best.shape[1]:
                for i in range(rows):
                    best[a + i, s - run] = top[i]
                    index[a + i, s - run] = which[i]


def _run_scan(scorer: Scorer, x: np.ndarray, run: int, stop: int, columns: int, all_: int) -> Any:
    n = len(x)
    best, index = np.empty((n, columns), dtype=np.float32), np.empty((n, columns), dtype=np.int32)
    scores = np.empty((n, all_), dtype=np.float32)
    s = scorer
    _scan(
        np.ascontiguousarray(x, dtype=np.float32),
        s.packed,
        s.packed_d,
        s.groups,
        s.runs,
        s.d,
        s.c,
        s.centre,
        s.width,
        run,
        stop,
        best,
        index,
        scores,
    )
    return best, index, scores


def all_scores(scorer: Scorer, x: np.ndarray, run: int, stop: int) -> np.ndarray:
    """See :func:`..reference.all_scores`; float32."""
    return _run_scan(scorer, x, run, stop, 0, int(scorer.starts[stop] - scorer.starts[run]))[2]


def nearest(scorer: Scorer, x: np.ndarray, run: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """See :func:`..reference.nearest`; float32. No score is stored."""
    best, index, _ = _run_scan(scorer, x, run, stop, stop - run, 0)
    # Where no score is below infinity: all were dropped, or there are none.
    return best, np.where(index < 0, scorer.starts[run:stop].astype(np.int32), index)


@dataclass(frozen=True)
class Bank:
    """Means and bases in float32, each basis packed."""

    means: np.ndarray
    packed: np.ndarray
    width: int
    per_feature: bool


def make_bank(means: np.ndarray, bases: np.ndarray, per_feature: bool) -> Bank:
    """See :func:`..reference.make_bank`."""
    return Bank(means.astype(np.float32), _packed(bases), bases.shape[2], per_feature)


def _packed(columns: np.ndarray) -> np.ndarray:
    """Each matrix (K, p, q) in panels."""
    k, p, q = columns.shape
    out = np.zeros((k, p * (-(-q // LANES) * LANES)), dtype=np.float32)
    rows = np.ascontiguousarray(np.swapaxes(columns, 1, 2), dtype=np.float32)
    if q:
        _pack_each(rows, out)
    return out


@entry(given("f4", 3), filled("f4", 2))
def _pack_each(columns, out):  # type: ignore[no-untyped-def]
    for k in range(len(columns)):
        panels, to = pack(columns[k]), out[k]
        for i in range(len(panels)):
            to[i] = panels[i]


def _lists(groups: Groups) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    return (
        np.ascontiguousarray(groups.rows, dtype=np.int64),
        np.ascontiguousarray(groups.starts, dtype=np.int64),
        np.ascontiguousarray(groups.weights, dtype=np.float64),
        groups.first,
    )


_LISTS = (given("i8", 1), given("i8", 1), given("f8", 1), types.int64)


def add_images(
    bank: Bank,
    x: np.ndarray,
    groups: Groups,
    total: np.ndarray,
    square: np.ndarray,
    image: np.ndarray,
    gram: np.ndarray,
) -> None:
    """See :func:`..reference.add_images`; sums of a block in float32, of blocks in float64."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    wide = square if bank.per_feature else square[:, None]
    _images(x, *_lists(groups), bank.means, bank.packed, bank.width, total, wide, image, gram)


@entry(
    given("f4", 2),
    *_LISTS,
    given("f4", 2),
    given("f4", 2),
    types.int64,
    filled("f8", 2),
    filled("f8", 2),
    filled("f8", 3),
    filled("f8", 3),
)
def _images(x, rows, starts, weights, first, means, packed, q, total, square, image, gram):  # type: ignore[no-untyped-def]
    p = x.shape[1]
    strip, sums = np.empty((STRIP, p), dtype=np.float32), np.empty((q + 1, p), dtype=np.float32)
    codes, length = np.zeros((padded(q) + 1, STRIP), dtype=np.float32), np.empty(1, dtype=np.float32)
    per_feature = square.shape[1] == p and p > 1
    squares = np.zeros(p if per_feature else 0, dtype=np.float32)
    for g in range(len(starts) - 1):
        if starts[g] == starts[g + 1]:
            continue
        k = first + g
        sums[:] = np.float32(0.0)
        squares[:] = np.float32(0.0)
        for a in range(starts[g], starts[g + 1], STRIP):
            n = min(STRIP, starts[g + 1] - a)
            for i in range(n):
                _centre(
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
            latents(packed[k], strip[:n], codes[: padded(q)])
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
            to, add = image[k, j], sums[j]
            for f in range(p):
                to[f] += add[f]
        to, add = total[k], sums[q]
        for f in range(p):
            to[f] += add[f]
        if per_feature:
            to = square[k]
            for f in range(p):
                to[f] += squares[f]


# -- moments --

_HALF = LANES // 2
_HALVES = ir.VectorType(F64, _HALF)
_LINE = 64


def _row_at(v: Vectors, to: Any, step: Any, r: int) -> Any:
    """Where row r of a tile lies in the packed triangle, whose rows become shorter by a number each."""
    return v.b.add(to, v.b.add(v.b.mul(step, I64(r)), I64(-8 * (r * (r - 1) // 2))))


def _make_wide(vecs: int, edge: bool) -> Any:
    def body(v, a, stride, b, n, to, step, count, low, rows):  # type: ignore[no-untyped-def]
        """to[r, c] += sum over k < n of a[k, r] b[k, c] in float64; at an edge only columns under ``count``,
        from the diagonal on where ``low`` is 1, and the first rows.
        """
        for r in range(TALL):
            for line in range(0, 8 * LANES * vecs, _LINE):
                v.fetch(_row_at(v, to, step, r), I64(line))
        sums = accumulate(v, TALL, vecs, a, I64(BYTES), stride, b, stride, n)
        for r in range(TALL):
            base = _row_at(v, to, step, r)
            for k in range(vecs):
                for half in range(2):
                    lanes = range(half * _HALF, (half + 1) * _HALF)
                    value = v.b.fpext(v.shuffle(sums[r][k], sums[r][k], lanes), _HALVES)
                    at = 8 * (LANES * k + _HALF * half)
                    mask = _edge_mask(v, LANES * k + _HALF * half, r, count, low, rows) if edge else None
                    old = v.load(base, at, _HALVES, mask)
                    v.store(v.b.fadd(old, value), base, at, mask)

    return instructions()(body)


def _edge_mask(v: Vectors, first: int, r: int, count: Any, low: Any, rows: Any) -> Any:
    b, kind = v.b, ir.VectorType(ir.IntType(64), _HALF)
    lanes = ir.Constant(kind, [first + i for i in range(_HALF)])
    until = b.select(b.icmp_signed(">", rows, I64(r)), count, I64(0))
    under = b.icmp_signed("<", lanes, v.spread(until, _HALF))
    return b.and_(under, b.icmp_signed(">=", lanes, v.spread(b.mul(low, I64(r)), _HALF)))


_wide3, _edge3, _edge2, _edge1 = (_make_wide(*how) for how in ((3, False), (3, True), (2, True), (1, True)))


@part
def _add_triangle(strip, n, p, to):  # type: ignore[no-untyped-def]
    """Add the upper triangle of R'R of the first n rows (n, stride), zeros beyond p, to the packed one."""
    stride, start = BYTES * strip.shape[1], strip.ctypes.data
    for i in range(0, p, TALL):
        rows = min(np.int64(TALL), p - i)
        # In bytes: row i of the triangle begins at its diagonal; the next is shorter by one.
        row = to + 8 * (i * p - i * (i - 1) // 2)
        step = 8 * (p - 1 - i)
        for j in range(i, p, PANEL):
            left, right, at = start + BYTES * i, start + BYTES * j, row + 8 * (j - i)
            count, low = p - j, np.int64(j == i)
            if low == 0 and count >= PANEL and rows == TALL:
                _wide3(left, stride, right, n, at, step, count, low, rows)
            elif count > 2 * LANES:
                _edge3(left, stride, right, n, at, step, count, low, rows)
            elif count > LANES:
                _edge2(left, stride, right, n, at, step, count, low, rows)
            else:
                _edge1(left, stride, right, n, at, step, count, low, rows)


def add_moments(
    means: np.ndarray, x: np.ndarray, groups: Groups, total: np.ndarray, moment: np.ndarray
) -> None:
    """See :func:`..reference.add_moments`; sums of a strip in float32, of strips in float64."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    _moments(x, *_lists(groups), means.astype(np.float32), total, moment)


@entry(given("f4", 2), *_LISTS, given("f4", 2), filled("f8", 2), filled("f8", 2))
def _moments(x, rows, starts, weights, first, means, total, moment):  # type: ignore[no-untyped-def]
    p = x.shape[1]
    # Tiles read, and do not use, what lies behind a row.
    strip = np.zeros((STRIP, p + PANEL + TALL), dtype=np.float32)
    length, sums = np.empty(1, dtype=np.float32), np.empty(p, dtype=np.float32)
    for g in range(len(starts) - 1):
        k = first + g
        for a in range(starts[g], starts[g + 1], STRIP):
            n = min(STRIP, starts[g + 1] - a)
            sums[:] = np.float32(0.0)
            for i in range(n):
                z = strip[i]
                _centre(
                    x.ctypes.data + rows[a + i] * p * BYTES,
                    means.ctypes.data + k * p * BYTES,
                    z.ctypes.data,
                    p,
                    length.ctypes.data,
                )
                r = np.float32(weights[a + i])
                for f in range(p):
                    sums[f] += r * z[f]
                if r != np.float32(1.0):
                    root = np.float32(np.sqrt(weights[a + i]))
                    for f in range(p):
                        z[f] *= root
            _add_triangle(strip, n, p, moment.ctypes.data + 8 * k * moment.shape[1])
            to = total[k]
            for f in range(p):
                to[f] += sums[f]


# -- tangents --


def _fields(names: Sequence[str], shape: tuple[int, int]) -> np.ndarray:
    """What each tangent multiplies the derivatives with, (tangents, 2, p); NaN stands for thickness."""
    out = np.full((len(names), 2, shape[0] * shape[1]), np.nan, dtype=np.float32)
    for i, name in enumerate(names):
        if name != "thickness":
            out[i] = velocity(name, shape)
    return out


@part
def _smooth(row, height, width, taps, wide, once, out):  # type: ignore[no-untyped-def]
    """An image smoothed along both axes, zeros beyond the border; ``wide`` holds a row with such a border."""
    radius, p = len(taps) // 2, height * width
    for f in range(p):
        once[f] = np.float32(0.0)
        out[f] = np.float32(0.0)
    for u in range(width + 2 * radius):
        wide[u] = np.float32(0.0)
    for y in range(height):
        to, of, line = once[y * width : (y + 1) * width], row[y * width : (y + 1) * width], wide[radius:]
        for u in range(width):
            line[u] = of[u]
        for k in range(len(taps)):
            tap, shifted = taps[k], wide[k : k + width]
            for u in range(width):
                to[u] += tap * shifted[u]
    for k in range(len(taps)):
        # The image moved by whole lines is one long run.
        tap, move = taps[k], (k - radius) * width
        first, stop = max(0, -move), min(p, p - move)
        if first < stop:
            to, of = out[first:stop], once[first + move : stop + move]
            for f in range(stop - first):
                to[f] += tap * of[f]


@part
def _make_tangents(row, height, width, taps, fields, scratch, out):  # type: ignore[no-untyped-def]
    """Tangents of one image into ``out`` (tangents, p); scratch (5, p + taps + 2 * width)."""
    p, half = height * width, np.float32(0.5)
    wide, once, padded_image, gx, gy = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    for u in range(width):
        padded_image[u] = np.float32(0.0)
        padded_image[width + p + u] = np.float32(0.0)
    image = padded_image[width : width + p]
    _smooth(row, height, width, taps, wide, once, image)
    above, below = padded_image[:p], padded_image[2 * width : 2 * width + p]
    for f in range(p):
        gy[f] = half * (below[f] - above[f])
    left, right = padded_image[width - 1 :], padded_image[width + 1 :]
    for f in range(p):
        gx[f] = half * (right[f] - left[f])
    for y in range(height):  # there neighbours are of the next line
        last = (y + 1) * width - 1
        gx[y * width] = half * image[y * width + 1] if width > 1 else np.float32(0.0)
        gx[last] = -half * image[last - 1] if width > 1 else np.float32(0.0)
    for t in range(len(fields)):
        to, by_x, by_y = out[t], fields[t, 0], fields[t, 1]
        if np.isnan(by_x[0]):
            for f in range(p):
                to[f] = np.sqrt(gx[f] * gx[f] + gy[f] * gy[f])
        else:
            for f in range(p):
                to[f] = by_x[f] * gx[f] + by_y[f] * gy[f]


def tangent_rows(x: np.ndarray, shape: tuple[int, int], names: Sequence[str], smoothing: float) -> np.ndarray:
    """See :func:`..reference.tangent_rows`; float32."""
    out = np.empty((len(x), len(names), x.shape[1]), dtype=np.float32)
    taps = smoothing_taps(smoothing).astype(np.float32)
    _tangent_rows(np.ascontiguousarray(x, dtype=np.float32), *shape, taps, _fields(names, shape), out)
    return out


@entry(given("f4", 2), types.int64, types.int64, given("f4", 1), given("f4", 3), filled("f4", 3))
def _tangent_rows(x, height, width, taps, fields, out):  # type: ignore[no-untyped-def]
    scratch = np.empty((5, (height + 2) * width + len(taps)), dtype=np.float32)
    for i in range(len(x)):
        _make_tangents(x[i], height, width, taps, fields, scratch, out[i])


def add_tangents(
    bank: Bank,
    x: np.ndarray,
    groups: Groups,
    frame: Frame,
    factors: np.ndarray,
    image: np.ndarray,
    trace: np.ndarray,
) -> None:
    """See :func:`..reference.add_tangents`; tangents are made strip by strip, and never stored."""
    x, fields = np.ascontiguousarray(x, dtype=np.float32), _fields(frame.names, frame.shape)
    taps = smoothing_taps(frame.smoothing).astype(np.float32)
    factors = np.ascontiguousarray(factors, dtype=np.float64)
    if frame.names:
        _tangents(
            x, *_lists(groups), *frame.shape, taps, fields, bank.packed, bank.width, factors, image, trace
        )


@entry(
    given("f4", 2),
    *_LISTS,
    types.int64,
    types.int64,
    given("f4", 1),
    given("f4", 3),
    given("f4", 2),
    types.int64,
    given("f8", 2),
    filled("f8", 3),
    filled("f8", 2),
)
def _tangents(x, rows, starts, weights, first, height, width, taps, fields, packed, q, factors, image, trace):  # type: ignore[no-untyped-def]
    p, kinds = x.shape[1], len(fields)
    scratch = np.empty((5, p + 2 * width + len(taps)), dtype=np.float32)
    strip, sums = np.empty((STRIP, p), dtype=np.float32), np.empty((q, p), dtype=np.float32)
    codes, length = np.zeros((padded(q), STRIP), dtype=np.float32), np.empty(1, dtype=np.float32)
    each = STRIP // kinds
    for g in range(len(starts) - 1):
        if starts[g] == starts[g + 1]:
            continue
        k = first + g
        sums[:] = np.float32(0.0)
        counted = False
        for t in range(kinds):
            counted = counted or factors[k, t] > 0
        for a in range(starts[g], starts[g + 1], each):
            n = min(each, starts[g + 1] - a)
            for i in range(n):
                made = strip[i * kinds : (i + 1) * kinds]
                _make_tangents(x[rows[a + i]], height, width, taps, fields, scratch, made)
                for t in range(kinds):
                    at = made.ctypes.data + t * p * BYTES
                    _dot(at, at, p, length.ctypes.data)
                    trace[k, t] += weights[a + i] * length[0]
            if not counted:
                continue
            latents(packed[k], strip[: n * kinds], codes)
            for j in range(q):
                code = codes[j]
                for i in range(n * kinds):
                    code[i] *= np.float32(weights[a + i // kinds] * factors[k, i % kinds])
            add_moment(codes[:q], n * kinds, strip[: n * kinds], sums)
        for j in range(q):
            to, add = image[k, j], sums[j]
            for f in range(p):
                to[f] += add[f]


# -- tangent distance --


@dataclass(frozen=True)
class Planes:
    """Scores as tangent distance takes them: columns W, b of each sub-class packed."""

    packed: np.ndarray
    width: int
    d: np.ndarray
    c: np.ndarray
    centre: np.ndarray


def make_planes(scores: Scores) -> Planes:
    """See :func:`..reference.make_planes`."""
    columns = np.concatenate([scores.w, scores.b[:, :, None]], axis=2)
    d = scores.d if scores.d.ndim == 2 else scores.d[:, None]
    return Planes(
        _packed(columns),
        columns.shape[2],
        np.ascontiguousarray(d, dtype=np.float32),
        scores.c.astype(np.float32),
        scores.centre.astype(np.float32),
    )


def tangent_distance(
    planes: Planes, x: np.ndarray, tangents: np.ndarray, candidates: np.ndarray, gamma: float = GAMMA
) -> np.ndarray:
    """See :func:`..reference.tangent_distance`; float32."""
    out = np.empty(candidates.shape, dtype=np.float32)
    _distances(
        np.ascontiguousarray(x, dtype=np.float32),
        np.ascontiguousarray(tangents, dtype=np.float32),
        np.ascontiguousarray(candidates, dtype=np.int32),
        planes.packed,
        planes.width,
        planes.d,
        planes.c,
        planes.centre,
        gamma,
        out,
    )
    return out


@part
def _solve(g, b, t):  # type: ignore[no-untyped-def]
    """b' G^-1 b by Cholesky, in place; directions whose pivot is at rounding are left out."""
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
    given("f4", 2),
    given("f4", 3),
    given("i4", 2),
    given("f4", 2),
    types.int64,
    given("f4", 2),
    given("f4", 1),
    given("f4", 1),
    types.float64,
    filled("f4", 2),
)
def _distances(x, tangents, candidates, packed, width, d, c, centre, gamma, out):  # type: ignore[no-untyped-def]
    p, t, h = x.shape[1], tangents.shape[1], width - 1
    own = d.shape[1] > 1
    rows = np.empty((t + 1, p), dtype=np.float32)  # the tangents, and the row itself
    scaled = np.empty((t + 1 if own else 0, p), dtype=np.float32)
    codes = np.zeros((padded(width), (t + 8) // 8 * 8), dtype=np.float32)
    dots, one = np.empty((t + 1, t + 1)), np.empty(1, dtype=np.float32)
    g, b = np.empty((t, t)), np.empty(t)
    line = p * BYTES
    for i in range(len(x)):
        z = rows[t]
        for j in range(t):
            to, of = rows[j], tangents[i, j]
            for f in range(p):
                to[f] = of[f]
        _centre(x.ctypes.data + i * line, centre.ctypes.data, z.ctypes.data, p, one.ctypes.data)
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
            latents(packed[q], rows, codes)
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
            out[i, n] = score - _solve(g, b, t)
