"""Products of the rows of a small batch with matrices of parameters, which are read once and in place.

The product x W^T of rows x and weights W of units is computed for five rows (two on AVX2) and four units at a
time. Each of its numbers has sixteen partial sums along the features, which stay in registers; no operand is
packed or transposed. The partial sums are added as a tree, so that the bits do not depend on the width of the
vectors. The product left^T x is added to a matrix, or a matrix is subtracted from it, without storing it.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
from llvmlite import ir
from numba import types

from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.memory import empty
from scalelatent.kernels.tiles import TALL_TILE_ROWS, Sums, add_products, make_tile, sum_products, zero_sums
from scalelatent.kernels.vectors import BYTES, F32, F64, I64, LANES, Vectors, vector_intrinsic

# Number of partial sums of each number of x W^T. It is the same on every machine, so the bits are, too.
PARTIAL_SUMS = 16
# Numbers of units and of rows of x whose products x W^T are summed at a time, limited by the registers.
_UNITS, _ROWS = (4, 5) if LANES == 16 else (4, 2)
# Number of units whose parameters are updated together. A step reads these parameters twice, the second time
# from the second-level cache.
_UPDATED_UNITS = 32
# A tile is the part of left^T x that is summed in registers at a time; each row of it has this many vectors.
_TILE_VECTORS = 3


def _add_halves(v: Vectors, a: ir.Value, b: ir.Value, lanes: int) -> ir.Value:
    """Add the second half to the first half of each group of ``lanes`` numbers of a, then of b."""
    low = [first + i for first in range(0, 2 * a.type.count, lanes) for i in range(lanes // 2)]
    return v.b.fadd(v.shuffle(a, b, low), v.shuffle(a, b, [i + lanes // 2 for i in low]))


def _add_lanes(v: Vectors, four: list[tuple[ir.Value, ...]]) -> ir.Value:
    """Return the totals of four vectors of partial sums, in one vector; on AVX2 each is two vectors."""
    if LANES < PARTIAL_SUMS:
        eight = [v.b.fadd(low, high) for low, high in four]
        two = [v.shuffle(a, b, range(PARTIAL_SUMS)) for a, b in (eight[:2], eight[2:])]
    else:
        two = [_add_halves(v, a, b, PARTIAL_SUMS) for (a,), (b,) in (four[:2], four[2:])]
    one = _add_halves(v, two[0], two[1], PARTIAL_SUMS // 2)
    for lanes in (PARTIAL_SUMS // 4, PARTIAL_SUMS // 8):
        one = _add_halves(v, one, one, lanes)
    return v.shuffle(one, one, range(4))


def _sum_lanes(
    v: Vectors, xs: list[ir.Value], ws: list[ir.Value], n: ir.Value, lane: int, ahead: ir.Value
) -> list[ir.Value]:
    """Return partial sums of x times w over the ``n`` columns, for each row of x and each unit.

    Number i of a vector is the sum over the columns k with k mod 16 = ``lane`` + i. If ``lane`` is 0, two
    cache lines per step are prefetched from the address ``ahead``.
    """
    b = v.b
    whole = b.mul(b.sdiv(n, I64(PARTIAL_SUMS)), I64(BYTES * PARTIAL_SUMS))

    def load_columns(k: ir.Value, mask: ir.Value | None = None) -> tuple[list[ir.Value], list[ir.Value]]:
        here = b.add(k, I64(BYTES * lane))
        return [v.load(x, here, mask=mask) for x in xs], [v.load(w, here, mask=mask) for w in ws]

    def load_operands(k: ir.Value, _: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value], tuple[()]]:
        if not lane:
            for line in (0, 64):
                v.fetch(ahead, b.add(b.mul(k, I64(2)), I64(line)))
        return *load_columns(k), ()

    start = zero_sums(v, len(xs), len(ws))
    sums = sum_products(v, start, whole, load_operands, step=BYTES * PARTIAL_SUMS, may_be_empty=True)
    rest = load_columns(whole, v.first(b.sub(b.srem(n, I64(PARTIAL_SUMS)), I64(lane))))
    return [total for row in add_products(v, sums, *rest) for total in row]


def _make_dots(rows: int, units: int) -> Callable[..., None]:
    @vector_intrinsic()
    def dots(
        v: Vectors, x: ir.Value, x_step: ir.Value, w: ir.Value, w_step: ir.Value, n: ir.Value, bias: ir.Value,
        out: ir.Value, out_step: ir.Value, ahead: ir.Value,
    ) -> None:  # fmt: skip
        """Write out[r, u] = sum_k x[r, k] w[u, k] + bias[u]; prefetch memory from the address ``ahead``."""
        xs = [v.b.add(x, v.b.mul(x_step, I64(r))) for r in range(rows)]
        ws = [v.b.add(w, v.b.mul(w_step, I64(u))) for u in range(units)]
        lanes = (_sum_lanes(v, xs, ws, n, lane, ahead) for lane in range(0, PARTIAL_SUMS, LANES))
        sums, biases = list(zip(*lanes, strict=True)), v.load(bias, 0, ir.VectorType(F32, units))
        for r in range(rows):
            total = _add_lanes(v, sums[r * units : (r + 1) * units] * (4 // units))
            total = v.b.fadd(v.shuffle(total, total, range(units)), biases)
            v.store(total, out, v.b.mul(out_step, I64(r)))

    return dots


_dots, _dots_row, _dot = (_make_dots(*shape) for shape in ((_ROWS, _UNITS), (1, _UNITS), (1, 1)))


@entry(in_array("f4", 2), in_array("f4", 2), in_array("f4", 1), out_array("f4", 2))
def products(x: np.ndarray, w: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
    """Write x W^T + bias to ``out``."""
    rows, n = x.shape
    units, row, line = len(w), BYTES * n, BYTES * len(w)
    for u in range(0, units, _UNITS):
        several = units - u >= _UNITS
        w_at, bias_at = w.ctypes.data + u * row, bias.ctypes.data + BYTES * u
        # The first rows prefetch one half of the parameters of the next units, the following rows the other.
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


def _make_finish(end: str) -> Callable[..., None]:
    """Return a function that stores the sums left^T x in ``out`` by the formula of the name ``end``.

    plus   out = base + sums
    less   out = sums - subtracted
    add    out += sums - subtracted, in float64
    ascend out = base + rate (sums - subtracted)
    """

    def finish(
        v: Vectors, sums: Sums, row: ir.Value, subtracted: ir.Value, rate: ir.Value, base: ir.Value,
        out: ir.Value, mask: ir.Value | None = None,
    ) -> None:  # fmt: skip
        b = v.b
        for i, value in enumerate(one for several in sums for one in several):
            u, k = divmod(i, len(sums[0]))
            place = b.add(b.mul(row, I64(u)), I64(v.wide * k))
            if end != "plus":
                value = b.fsub(value, v.load(subtracted, place, mask=mask))
            if end == "plus":
                value = b.fadd(v.load(base, place, mask=mask), value)
            if end == "ascend":
                value = v.fma(v.spread(rate), value, v.load(base, place, mask=mask))
            if end == "add":
                place, kind = b.mul(place, I64(2)), ir.VectorType(F64, LANES)
                value = b.fadd(v.load(out, place, kind, mask), b.fpext(value, kind))
            v.store(value, out, place, mask)

    return finish


def _make_outers(end: str) -> Callable[..., None]:
    finish = _make_finish(end)
    several = make_tile(TALL_TILE_ROWS, _TILE_VECTORS, finish, rate=types.float32)
    one, single = (
        make_tile(units, 1, finish, masked=True, rate=types.float32) for units in (TALL_TILE_ROWS, 1)
    )

    @subkernel
    def outers(
        left: np.ndarray, x: np.ndarray, subtracted: np.ndarray, rate: np.float32, base: np.ndarray,
        out: np.ndarray,
    ) -> None:  # fmt: skip
        """Compute left^T x, and store it in ``out`` by the formula of ``end``, which `_make_finish` lists."""
        n, units, features = len(left), len(out), x.shape[1]
        row, size = BYTES * features, out.itemsize
        some = empty((n, TALL_TILE_ROWS), np.float32)
        for u in range(0, units, TALL_TILE_ROWS):
            # Copy the columns of left, because contiguous columns stay in the first-level cache.
            for i in range(n):
                for k in range(min(TALL_TILE_ROWS, units - u)):
                    some[i, k] = left[i, u + k]
            f = 0
            while f < features:
                width, step = _TILE_VECTORS * LANES, TALL_TILE_ROWS
                if units - u < TALL_TILE_ROWS or features - f < width:
                    width, step = (
                        min(LANES, features - f),
                        TALL_TILE_ROWS if units - u >= TALL_TILE_ROWS else 1,
                    )
                for k in range(u, min(u + TALL_TILE_ROWS, units), step):
                    place = k * features + f
                    left_at, x_at = some.ctypes.data + BYTES * (k - u), x.ctypes.data + BYTES * f
                    first = left_at, BYTES, BYTES * TALL_TILE_ROWS, x_at, row, n
                    last = row, subtracted.ctypes.data + BYTES * place, rate, base.ctypes.data + BYTES * place
                    target = out.ctypes.data + size * place
                    if width > LANES:
                        several(*first, *last, target)
                    elif step > 1:
                        one(*first, width, *last, target)
                    else:
                        single(*first, width, *last, target)
                f += width

    return outers


_plus, _subtract, _add, _ascend = (_make_outers(end) for end in ("plus", "less", "add", "ascend"))
_UNIT_RATE = numba.float32(1.0)


@entry(*[in_array("f4", 2)] * 3, out_array("f4", 2))
def add_outer_product(left: np.ndarray, x: np.ndarray, base: np.ndarray, out: np.ndarray) -> None:
    """Write base + left^T x to ``out``, which may be ``base``."""
    _plus(left, x, base, _UNIT_RATE, base, out)


@entry(*[in_array("f4", 2)] * 3, out_array("f4", 2))
def write_outer_difference(left: np.ndarray, x: np.ndarray, subtracted: np.ndarray, out: np.ndarray) -> None:
    """Write left^T x - subtracted to ``out``."""
    _subtract(left, x, subtracted, _UNIT_RATE, subtracted, out)


@entry(*[in_array("f4", 2)] * 3, out_array("f8", 2))
def add_outer_difference(left: np.ndarray, x: np.ndarray, subtracted: np.ndarray, out: np.ndarray) -> None:
    """Round left^T x - subtracted to float32, and add it to the float64 array ``out``."""
    _add(left, x, subtracted, _UNIT_RATE, subtracted, out)


@entry(*[in_array("f4", 2)] * 3, numba.float32, in_array("f4", 2), out_array("f4", 2))
def ascend_outer_difference(
    left: np.ndarray, x: np.ndarray, subtracted: np.ndarray, rate: np.float32, base: np.ndarray,
    out: np.ndarray,
) -> None:  # fmt: skip
    """Write base + rate (left^T x - subtracted) to ``out``, which may be ``base``."""
    _ascend(left, x, subtracted, rate, base, out)


@entry(*[in_array("f4", 2)] * 2, *[out_array("f4", 2)] * 2, *[in_array("f4", 2)] * 2, *[numba.float32] * 2)
def ascend_outer(
    theta: np.ndarray, velocity: np.ndarray, new_theta: np.ndarray, new_velocity: np.ndarray,
    left: np.ndarray, x: np.ndarray, decay: np.float32, momentum: np.float32,
) -> None:  # fmt: skip
    """Set new_theta = theta + move, new_velocity = move = momentum * velocity - decay * theta + left^T x.

    ``left`` already contains the learning rate. Without momentum, both velocities are empty and the move is
    not stored. Each new array may be the old one.
    """
    moving, features = len(velocity) > 0, x.shape[1]
    still = empty((_UPDATED_UNITS, 0 if moving else features), np.float32)
    for first in range(0, len(theta), _UPDATED_UNITS):
        part = slice(first, first + _UPDATED_UNITS)
        old, new, before = theta[part], new_theta[part], velocity[part]
        # Decay and gradient are added first: each of them alone may be too small to change theta in float32.
        move = new_velocity[part] if moving else still[: len(old)]
        for i in range(len(old)):
            for j in range(features):
                drop = -decay * old[i, j]
                move[i, j] = drop + momentum * before[i, j] if moving else drop
        _plus(left[:, part], x, move, _UNIT_RATE, move, move)
        for i in range(len(old)):
            for j in range(features):
                new[i, j] = old[i, j] + move[i, j]
