"""Products of a batch's few rows with matrices of parameters, which are read once, where they lie.

x W^T sums sixteen products side by side along the features, for five rows of x and four units at a time (two
rows on AVX2), so that sums stay in registers and no operand is packed or transposed. The sixteen are added up
as a tree, whatever the width of the machine's vectors. L^T X is added to, or taken less, what lies somewhere
else: a step reads the old parameters and writes the new ones, nothing more.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
from llvmlite import ir
from numba import types

from scalelatent.kernels.jit import entry, filled, given, part
from scalelatent.kernels.memory import empty
from scalelatent.kernels.tiles import TALL, Sums, add_products, make_tile, sum_products, zero_sums
from scalelatent.kernels.vectors import BYTES, F32, F64, I64, LANES, Vectors, instructions

# Products side by side in a sum on every machine: bits do not depend on it.
SIDE = 16
# Units of a tile of x W^T, whose sums are added up together; rows of x in it, as registers go.
_UNITS, _ROWS = (4, 5) if LANES == 16 else (4, 2)
# Units whose parameters stay in the second-level cache from one reading to the next.
_SLAB = 32
# Vectors of a tile of L^T X.
_VECS = 3


def _halves(v: Vectors, a: ir.Value, b: ir.Value, lanes: int) -> ir.Value:
    """Each group of so many lanes of a, then of b, with its second half added to its first."""
    low = [first + i for first in range(0, 2 * a.type.count, lanes) for i in range(lanes // 2)]
    return v.b.fadd(v.shuffle(a, b, low), v.shuffle(a, b, [i + lanes // 2 for i in low]))


def _added_up(v: Vectors, four: list[tuple[ir.Value, ...]]) -> ir.Value:
    """The sums over the lanes of four sums, in one vector, half by half; of narrow vectors a sum is two."""
    if LANES < SIDE:
        eight = [v.b.fadd(low, high) for low, high in four]
        two = [v.shuffle(a, b, range(SIDE)) for a, b in (eight[:2], eight[2:])]
    else:
        two = [_halves(v, a, b, SIDE) for (a,), (b,) in (four[:2], four[2:])]
    one = _halves(v, two[0], two[1], SIDE // 2)
    for lanes in (SIDE // 4, SIDE // 8):
        one = _halves(v, one, one, lanes)
    return v.shuffle(one, one, range(4))


def _lane_sums(
    v: Vectors, xs: list[ir.Value], ws: list[ir.Value], n: ir.Value, lane: int, ahead: ir.Value
) -> list[ir.Value]:
    """For each pair of rows and units the sums over k of ``LANES`` of the products side by side, from
    ``lane`` on.
    """
    b = v.b
    whole = b.mul(b.sdiv(n, I64(SIDE)), I64(BYTES * SIDE))

    def at(k: ir.Value, mask: ir.Value | None = None) -> tuple[list[ir.Value], list[ir.Value]]:
        here = b.add(k, I64(BYTES * lane))
        return [v.load(x, here, mask=mask) for x in xs], [v.load(w, here, mask=mask) for w in ws]

    def operands(k: ir.Value, _: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value], tuple[()]]:
        if not lane:
            for line in (0, 64):
                v.fetch(ahead, b.add(b.mul(k, I64(2)), I64(line)))
        return *at(k), ()

    start = zero_sums(v, len(xs), len(ws))
    sums = sum_products(v, start, whole, operands, step=BYTES * SIDE, may_be_empty=True)
    rest = at(whole, v.first(b.sub(b.srem(n, I64(SIDE)), I64(lane))))
    return [total for row in add_products(v, sums, *rest) for total in row]


def _make_dots(rows: int, units: int) -> Callable[..., None]:
    @instructions()
    def dots(
        v: Vectors, x: ir.Value, x_step: ir.Value, w: ir.Value, w_step: ir.Value, n: ir.Value, bias: ir.Value,
        out: ir.Value, out_step: ir.Value, ahead: ir.Value,
    ) -> None:  # fmt: skip
        """out[r, u] = sum_k x[r, k] w[u, k] + bias[u] over n numbers. What lies at ``ahead`` is fetched, two
        lines a step.
        """
        xs = [v.b.add(x, v.b.mul(x_step, I64(r))) for r in range(rows)]
        ws = [v.b.add(w, v.b.mul(w_step, I64(u))) for u in range(units)]
        lanes = (_lane_sums(v, xs, ws, n, lane, ahead) for lane in range(0, SIDE, LANES))
        sums, biases = list(zip(*lanes, strict=True)), v.load(bias, 0, ir.VectorType(F32, units))
        for r in range(rows):
            total = _added_up(v, sums[r * units : (r + 1) * units] * (4 // units))
            total = v.b.fadd(v.shuffle(total, total, range(units)), biases)
            v.store(total, out, v.b.mul(out_step, I64(r)))

    return dots


_dots, _dots_row, _dot = (_make_dots(*shape) for shape in ((_ROWS, _UNITS), (1, _UNITS), (1, 1)))


@entry(given("f4", 2), given("f4", 2), given("f4", 1), filled("f4", 2))
def products(x: np.ndarray, w: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
    """out = x W^T + bias."""
    rows, n = x.shape
    units, row, line = len(w), BYTES * n, BYTES * len(w)
    for u in range(0, units, _UNITS):
        several = units - u >= _UNITS
        w_at, bias_at = w.ctypes.data + u * row, bias.ctypes.data + BYTES * u
        # Of the next units half is fetched with the first rows, half with others.
        ahead, more = w_at, 0
        if units - u >= 2 * _UNITS:
            ahead, more = w_at + _UNITS * row, _UNITS // 2 * row
        r = 0
        while r < rows:
            x_at, place = x.ctypes.data + r * row, out.ctypes.data + r * line + BYTES * u
            if several and rows - r >= _ROWS:
                _dots(x_at, row, w_at, row, n, bias_at, place, line, ahead)
                r += _ROWS
            elif several:
                _dots_row(x_at, row, w_at, row, n, bias_at, place, line, ahead)
                r += 1
            else:
                for k in range(units - u):
                    _dot(
                        x_at, row, w_at + k * row, row, n, bias_at + BYTES * k, place + BYTES * k, line, w_at
                    )
                r += 1
            ahead, more = ahead + more, 0


def _finish(end: str) -> Callable[..., None]:
    """What becomes of the sums of a tile of left^T X, which lies in matrices whose rows have ``row`` bytes:

    plus   out = base + sums
    less   out = sums - less
    add    out += sums - less, in float64
    climb  out = base + rate (sums - less)
    """

    def finish(
        v: Vectors, sums: Sums, row: ir.Value, less: ir.Value, rate: ir.Value, base: ir.Value, out: ir.Value,
        mask: ir.Value | None = None,
    ) -> None:  # fmt: skip
        b = v.b
        for i, value in enumerate(one for several in sums for one in several):
            u, k = divmod(i, len(sums[0]))
            place = b.add(b.mul(row, I64(u)), I64(v.wide * k))
            if end != "plus":
                value = b.fsub(value, v.load(less, place, mask=mask))
            if end == "plus":
                value = b.fadd(v.load(base, place, mask=mask), value)
            if end == "climb":
                value = v.fma(v.spread(rate), value, v.load(base, place, mask=mask))
            if end == "add":
                place, kind = b.mul(place, I64(2)), ir.VectorType(F64, LANES)
                value = b.fadd(v.load(out, place, kind, mask), b.fpext(value, kind))
            v.store(value, out, place, mask)

    return finish


def _make_outers(end: str) -> Callable[..., None]:
    finish = _finish(end)
    several = make_tile(TALL, _VECS, finish, rate=types.float32)
    one, single = (make_tile(units, 1, finish, masked=True, rate=types.float32) for units in (TALL, 1))

    @part
    def outers(
        left: np.ndarray, x: np.ndarray, less: np.ndarray, rate: np.float32, base: np.ndarray, out: np.ndarray
    ) -> None:
        """Of left the columns that ``out`` has rows."""
        n, units, features = len(left), len(out), x.shape[1]
        row, size = BYTES * features, out.itemsize
        some = empty((n, TALL), np.float32)
        for u in range(0, units, TALL):
            # Side by side they stay in the first-level cache; a row of left has one line for two tiles.
            for i in range(n):
                for k in range(min(TALL, units - u)):
                    some[i, k] = left[i, u + k]
            f = 0
            while f < features:
                width, step = _VECS * LANES, TALL
                if units - u < TALL or features - f < width:
                    width, step = min(LANES, features - f), TALL if units - u >= TALL else 1
                for k in range(u, min(u + TALL, units), step):
                    place = k * features + f
                    left_at, x_at = some.ctypes.data + BYTES * (k - u), x.ctypes.data + BYTES * f
                    first = left_at, BYTES, BYTES * TALL, x_at, row, n
                    last = row, less.ctypes.data + BYTES * place, rate, base.ctypes.data + BYTES * place
                    target = out.ctypes.data + size * place
                    if width > LANES:
                        several(*first, *last, target)
                    elif step > 1:
                        one(*first, width, *last, target)
                    else:
                        single(*first, width, *last, target)
                f += width

    return outers


_plus, _less, _add, _climb = (_make_outers(end) for end in ("plus", "less", "add", "climb"))
_ONE = numba.float32(1.0)


@entry(*[given("f4", 2)] * 3, filled("f4", 2))
def plus_outer(left: np.ndarray, x: np.ndarray, base: np.ndarray, out: np.ndarray) -> None:
    """out = base + left^T x; base may be out."""
    _plus(left, x, base, _ONE, base, out)


@entry(*[given("f4", 2)] * 3, filled("f4", 2))
def outer_less(left: np.ndarray, x: np.ndarray, less: np.ndarray, out: np.ndarray) -> None:
    """out = left^T x - less."""
    _less(left, x, less, _ONE, less, out)


@entry(*[given("f4", 2)] * 3, filled("f8", 2))
def add_outer_less(left: np.ndarray, x: np.ndarray, less: np.ndarray, out: np.ndarray) -> None:
    """out += left^T x - less, which is rounded to float32 before."""
    _add(left, x, less, _ONE, less, out)


@entry(*[given("f4", 2)] * 3, numba.float32, given("f4", 2), filled("f4", 2))
def climb_outer_less(
    left: np.ndarray, x: np.ndarray, less: np.ndarray, rate: np.float32, base: np.ndarray, out: np.ndarray
) -> None:
    """out = base + rate (left^T x - less); base may be out."""
    _climb(left, x, less, rate, base, out)


@entry(*[given("f4", 2)] * 2, *[filled("f4", 2)] * 2, *[given("f4", 2)] * 2, *[numba.float32] * 2)
def climb_outer(
    theta: np.ndarray, velocity: np.ndarray, new_theta: np.ndarray, new_velocity: np.ndarray,
    left: np.ndarray, x: np.ndarray, decay: np.float32, momentum: np.float32,
) -> None:  # fmt: skip
    """new_velocity = momentum velocity - decay theta + left^T x; new_theta = theta + new_velocity. Velocities
    may be empty, and the new arrays be the old ones.
    """
    moving, features = len(velocity) > 0, x.shape[1]
    still = empty((_SLAB, 0 if moving else features), np.float32)
    for first in range(0, len(theta), _SLAB):
        part = slice(first, first + _SLAB)
        old, new, before = theta[part], new_theta[part], velocity[part]
        # Decay and gradient are added up before theta is: alone each may be lost to its rounding.
        move = new_velocity[part] if moving else still[: len(old)]
        for i in range(len(old)):
            for j in range(features):
                drop = -decay * old[i, j]
                move[i, j] = drop + momentum * before[i, j] if moving else drop
        _plus(left[:, part], x, move, _ONE, move, move)
        for i in range(len(old)):
            for j in range(features):
                new[i, j] = old[i, j] + move[i, j]
