"""Products of a batch's few rows with matrices of parameters, which are read once, where they lie.

x W^T sums sixteen products side by side along the features, for five rows of x and four units at a time (two
rows on AVX2), so that sums stay in registers and no operand is packed or transposed. The sixteen are added up
as a tree, whatever the width of the machine's vectors. L^T X is added to, or taken less, what lies somewhere
else: a step reads the old parameters and writes the new ones, nothing more.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scalelatent.kernels.jit import entry, filled, given, part
from scalelatent.kernels.tiles import accumulate
from scalelatent.kernels.vectors import BYTES, LANES, at, call, fetch, load, shuffle, spread, store

# Products side by side in a sum on every machine: bits do not depend on it.
SIDE = 16
# Units of a tile of x W^T, whose sums are added up together; rows of x in it, as registers go.
_UNITS, _ROWS = (4, 5) if LANES == 16 else (4, 2)
# Units whose parameters stay in the second-level cache from one reading to the next.
_SLAB = 32
# Units and vectors of a tile of L^T X.
_TALL, _VECS = 8 if LANES == 16 else 4, 3

_F32, _F64 = ir.FloatType(), ir.DoubleType()
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_VEC = ir.VectorType(_F32, LANES)


def _first_lanes(builder: Any, n: Any, of: int) -> Any:
    """The mask of the first n of so many lanes."""
    lanes = ir.Constant(ir.VectorType(_I32, of), list(range(of)))
    return builder.icmp_signed("<", lanes, spread(builder, builder.trunc(n, _I32), of))


def _halves(builder: Any, a: Any, b: Any, lanes: int) -> Any:
    """Each group of so many lanes of a, then of b, with its second half added to its first."""
    low = [first + i for first in range(0, 2 * a.type.count, lanes) for i in range(lanes // 2)]
    return builder.fadd(shuffle(builder, a, b, low), shuffle(builder, a, b, [i + lanes // 2 for i in low]))


def _added_up(builder: Any, four: list[tuple[Any, ...]]) -> Any:
    """The sums over the lanes of four sums, in one vector, half by half; of narrow vectors a sum is two."""
    if LANES < SIDE:
        eight = [builder.fadd(low, high) for low, high in four]
        two = [shuffle(builder, a, b, list(range(SIDE))) for a, b in (eight[:2], eight[2:])]
    else:
        two = [_halves(builder, a, b, SIDE) for (a,), (b,) in (four[:2], four[2:])]
    one = _halves(builder, two[0], two[1], SIDE // 2)
    for lanes in (SIDE // 4, SIDE // 8):
        one = _halves(builder, one, one, lanes)
    return shuffle(builder, one, one, [0, 1, 2, 3])


def _multiply_add(
    builder: Any, xs: list[Any], ws: list[Any], k: Any, sums: list[Any], mask: Any
) -> list[Any]:
    """The products at k of all pairs of rows and units, added to their sums."""
    left, right = ([load(builder, a, k, _VEC, mask) for a in some] for some in (xs, ws))
    pairs = [(a, b) for a in left for b in right]
    fma = f"llvm.fma.v{LANES}f32"
    return [call(builder, fma, _VEC, a, b, s) for (a, b), s in zip(pairs, sums, strict=True)]


def _lane_sums(builder: Any, xs: list[Any], ws: list[Any], n: Any, lane: int, ahead: Any) -> list[Any]:
    """For each pair of rows and units the sums over k of ``LANES`` of the products side by side, from
    ``lane`` on.
    """
    whole = builder.mul(builder.sdiv(n, _I64(SIDE)), _I64(BYTES * SIDE))
    begin, test, loop, rest = builder.block, *map(builder.append_basic_block, ("test", "loop", "rest"))
    builder.branch(test)
    builder.position_at_end(test)
    k, sums = builder.phi(_I64), [builder.phi(_VEC) for _ in range(len(xs) * len(ws))]
    here = builder.add(k, _I64(BYTES * lane))
    builder.cbranch(builder.icmp_signed("<", k, whole), loop, rest)
    builder.position_at_end(loop)
    if not lane:
        for line in (0, 64):
            fetch(builder, ahead, builder.add(builder.mul(k, _I64(2)), _I64(line)))
    then = [builder.add(k, _I64(BYTES * SIDE)), *_multiply_add(builder, xs, ws, here, sums, None)]
    first = [_I64(0), *[ir.Constant(_VEC, [0.0] * LANES)] * len(sums)]
    for phi, value, following in zip([k, *sums], first, then, strict=True):
        phi.add_incoming(value, begin)
        phi.add_incoming(following, loop)
    builder.branch(test)
    builder.position_at_end(rest)
    mask = _first_lanes(builder, builder.sub(builder.srem(n, _I64(SIDE)), _I64(lane)), LANES)
    return _multiply_add(builder, xs, ws, here, sums, mask)


def _make_dots(rows: int, units: int) -> Any:
    """dots(x, x_step, w, w_step, n, bias, out, out_step, ahead): out[r, u] = sum_k x[r, k] w[u, k] + bias[u]
    over n numbers; addresses and byte steps. What lies at ``ahead`` is fetched, two lines a step.
    """

    @intrinsic
    def dots(typingctx, x, x_step, w, w_step, n, bias, out, out_step, ahead):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            x, x_step, w, w_step, n, bias, out, out_step, ahead = args
            xs = [builder.add(x, builder.mul(x_step, _I64(r))) for r in range(rows)]
            ws = [builder.add(w, builder.mul(w_step, _I64(u))) for u in range(units)]
            lanes = (_lane_sums(builder, xs, ws, n, lane, ahead) for lane in range(0, SIDE, LANES))
            sums, kind = list(zip(*lanes, strict=True)), ir.VectorType(_F32, units)
            b = builder.load(at(builder, bias, _I64(0), kind), align=BYTES)
            for r in range(rows):
                total = _added_up(builder, sums[r * units : (r + 1) * units] * (4 // units))
                total = builder.fadd(shuffle(builder, total, total, list(range(units))), b)
                place = at(builder, out, builder.mul(out_step, _I64(r)), kind)
                builder.store(total, place, align=BYTES)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return dots


_dots, _dots_row, _dot = (_make_dots(*shape) for shape in ((_ROWS, _UNITS), (1, _UNITS), (1, 1)))


@entry(given("f4", 2), given("f4", 2), given("f4", 1), filled("f4", 2))
def products(x: Any, w: Any, bias: Any, out: Any) -> None:
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


def _make_outer(units: int, vecs: int, end: str) -> Any:
    """outer(left, left_row, x, x_row, n, width, less, rate, base, out): with sums[u, f] the sum over n rows
    of left[k, u] x[k, f], for so many units and vectors, or fewer features in one vector,

    plus   out = base + sums
    less   out = sums - less
    add    out += sums - less, in float64
    climb  out = base + rate (sums - less)
    """

    @intrinsic
    def outer(  # type: ignore[no-untyped-def]
        typingctx, left, left_row, x, x_row, n, width, less, rate, base, out
    ):
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            left, left_row, x, x_row, n, width, less, rate, base, out = args
            mask = _first_lanes(builder, width, LANES) if vecs == 1 else None
            sums = accumulate(builder, units, vecs, left, _I64(BYTES), left_row, x, x_row, n, mask=mask)
            for i, value in enumerate(one for row in sums for one in row):
                u, v = divmod(i, vecs)
                place = builder.add(builder.mul(x_row, _I64(u)), _I64(BYTES * LANES * v))
                if end != "plus":
                    value = builder.fsub(value, load(builder, less, place, _VEC, mask))
                if end == "plus":
                    value = builder.fadd(load(builder, base, place, _VEC, mask), value)
                if end == "climb":
                    old, fma = load(builder, base, place, _VEC, mask), f"llvm.fma.v{LANES}f32"
                    value = call(builder, fma, _VEC, spread(builder, rate, LANES), value, old)
                if end == "add":
                    place, kind = builder.mul(place, _I64(2)), ir.VectorType(_F64, LANES)
                    total = load(builder, out, place, kind, mask)
                    value = builder.fadd(total, builder.fpext(value, kind))
                store(builder, value, out, place, mask)
            return context.get_dummy_value()

        addresses = [types.int64] * 7
        return types.void(*addresses, types.float32, *addresses[:2]), codegen

    return outer


def _make_outers(end: str) -> Any:
    several, one, single = (_make_outer(*shape, end) for shape in ((_TALL, _VECS), (_TALL, 1), (1, 1)))

    @part
    def outers(left, x, less, rate, base, out):  # type: ignore[no-untyped-def]
        """Of left the columns that ``out`` has rows."""
        n, units, features = len(left), len(out), x.shape[1]
        row, size = BYTES * features, out.itemsize
        some = np.empty((n, _TALL), dtype=np.float32)
        for u in range(0, units, _TALL):
            # Side by side they stay in the first-level cache; a row of left has one line for two tiles.
            for i in range(n):
                for k in range(min(_TALL, units - u)):
                    some[i, k] = left[i, u + k]
            f = 0
            while f < features:
                width, step = _VECS * LANES, _TALL
                if units - u < _TALL or features - f < width:
                    width, step = min(LANES, features - f), _TALL if units - u >= _TALL else 1
                for k in range(u, min(u + _TALL, units), step):
                    place = k * features + f
                    left_at, x_at = some.ctypes.data + BYTES * (k - u), x.ctypes.data + BYTES * f
                    first = left_at, BYTES * _TALL, x_at, row, n, width, less.ctypes.data + BYTES * place
                    last = rate, base.ctypes.data + BYTES * place, out.ctypes.data + size * place
                    if width > LANES:
                        several(*first, *last)
                    elif step > 1:
                        one(*first, *last)
                    else:
                        single(*first, *last)
                f += width

    return outers


_plus, _less, _add, _climb = (_make_outers(end) for end in ("plus", "less", "add", "climb"))
_ONE = numba.float32(1.0)


@entry(*[given("f4", 2)] * 3, filled("f4", 2))
def plus_outer(left: Any, x: Any, base: Any, out: Any) -> None:
    """out = base + left^T x; base may be out."""
    _plus(left, x, base, _ONE, base, out)


@entry(*[given("f4", 2)] * 3, filled("f4", 2))
def outer_less(left: Any, x: Any, less: Any, out: Any) -> None:
    """out = left^T x - less."""
    _less(left, x, less, _ONE, less, out)


@entry(*[given("f4", 2)] * 3, filled("f8", 2))
def add_outer_less(left: Any, x: Any, less: Any, out: Any) -> None:
    """out += left^T x - less, which is rounded to float32 before."""
    _add(left, x, less, _ONE, less, out)


@entry(*[given("f4", 2)] * 3, numba.float32, given("f4", 2), filled("f4", 2))
def climb_outer_less(left: Any, x: Any, less: Any, rate: Any, base: Any, out: Any) -> None:
    """out = base + rate (left^T x - less); base may be out."""
    _climb(left, x, less, rate, base, out)


@entry(*[given("f4", 2)] * 2, *[filled("f4", 2)] * 2, *[given("f4", 2)] * 2, *[numba.float32] * 2)
def climb_outer(
    theta: Any, velocity: Any, new_theta: Any, new_velocity: Any, left: Any, x: Any, decay: Any, momentum: Any
) -> None:
    """new_velocity = momentum velocity - decay theta + left^T x; new_theta = theta + new_velocity. Velocities
    may be empty, and the new arrays be the old ones.
    """
    moving, features = len(velocity) > 0, x.shape[1]
    still = np.empty((_SLAB, 0 if moving else features), dtype=np.float32)
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
