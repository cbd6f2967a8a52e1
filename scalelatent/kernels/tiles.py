"""Products with a strip of rows in register tiles: H = W X^T and Delta += G X, for up to some hundred rows of
W and G.

OpenBLAS packs both operands into panels made for square matrices, and reads X twice. Here W alone is packed,
once a block; a strip of X is read in place, so that a kernel which does both products reads it from memory
once. Tiles of 4 x 24 sums stay in registers (12 of 16 on AVX2; 8 x 48 in 24 of 32 on AVX-512): a step loads
three vectors and broadcasts four numbers for twelve fused multiply-adds, so the arithmetic units are the
limit. H is stored transposed, (dimensions, rows), as the E-step wants it. The tiles are written in LLVM's
vector types, because sums in local arrays would not stay in registers.

Every sum runs over its index in order: a block gives the same bits each time, on any thread, whatever the
width of the vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic

from .jit import kernel, part
from .vectors import BYTES, LANES, at, call, fetch, load, shuffle, spread

# Rows of a strip: X (p = 196) and H stay in the second-level cache between the two products.
STRIP = 128
# Rows of X in a tile of one vector; a strip is filled up to whole ones.
ROWS = 8
# Rows of a tile of three vectors, with its sums in three quarters of the registers.
_TALL = 8 if LANES == 16 else 4
# Columns of a panel: three vectors.
PANEL = 3 * LANES
# Up to so many rows of W the tiles are ahead of OpenBLAS (benchmarks/capsule_pass.py).
MAX_DIMS = 512
# Beyond this many columns a panel of W is far larger than the first-level cache.
MAX_FEATURES = 1024
# How many rows of X ahead of those in work others are fetched.
_AHEAD = 8

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FMA = f"llvm.fma.v{LANES}f32"
_VEC, _FOUR = ir.VectorType(_F32, LANES), ir.VectorType(_F32, 4)


def accumulate(
    builder: Any,
    rows: int,
    vecs: int,
    a: Any,
    row_step: Any,
    k_step: Any,
    b: Any,
    b_step: Any,
    n: Any,
    ahead: bool = False,
    mask: Any = None,
) -> list[list[Any]]:
    """acc[r][v] = sum over k < n of a[r, k] * b[k, v], in registers; n is at least 1. ``ahead``: rows of a
    are fetched before they come; ``mask``: of lanes that b has.
    """
    entry, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    offsets = [builder.mul(row_step, _I64(r)) for r in range(rows)]
    builder.branch(loop)
    builder.position_at_end(loop)
    k, pa, pb = builder.phi(_I64), builder.phi(_I64), builder.phi(_I64)
    sums = [[builder.phi(_VEC) for _ in range(vecs)] for _ in range(rows)]
    vectors = [load(builder, pb, _I64(BYTES * LANES * v), _VEC, mask) for v in range(vecs)]
    if ahead:
        # Four bytes a row and step: the rows ahead arrive just in time. The hardware would start anew with
        # every row.
        far = builder.add(builder.mul(row_step, _I64(_AHEAD)), builder.mul(k, _I64(BYTES * rows)))
        fetch(builder, a, far)
    new = []
    for r in range(rows):
        one = builder.load(at(builder, pa, offsets[r], _F32), align=BYTES)
        wide = spread(builder, one, LANES)
        new.append([call(builder, _FMA, _VEC, wide, vectors[v], sums[r][v]) for v in range(vecs)])
    following = [builder.add(k, _I64(1)), builder.add(pa, k_step), builder.add(pb, b_step)]
    for phi, start, step in zip((k, pa, pb), (_I64(0), a, b), following, strict=True):
        phi.add_incoming(start, entry)
        phi.add_incoming(step, loop)
    for r in range(rows):
        for v in range(vecs):
            sums[r][v].add_incoming(ir.Constant(_VEC, [0.0] * LANES), entry)
            sums[r][v].add_incoming(new[r][v], loop)
    builder.cbranch(builder.icmp_signed("<", following[0], n), loop, done)
    builder.position_at_end(done)
    return new


def _add(builder: Any, sums: list[list[Any]], c: Any, row_step: Any) -> None:
    for r, row in enumerate(sums):
        base = builder.add(c, builder.mul(row_step, _I64(r)))
        for v, value in enumerate(row):
            place = at(builder, base, _I64(BYTES * LANES * v), _VEC)
            builder.store(builder.fadd(builder.load(place, align=BYTES), value), place, align=BYTES)


def _store_transposed(builder: Any, sums: list[list[Any]], c: Any, row_step: Any) -> None:
    """Four rows at a time: lane j of vector v goes to row LANES v + j, four columns side by side."""
    fours = range(0, LANES, 4)
    pairs = [[f + j for f in fours for j in (i, LANES + i, i + 1, LANES + i + 1)] for i in (0, 2)]
    halves = [[f + j for f in fours for j in (i, i + 1, LANES + i, LANES + i + 1)] for i in (0, 2)]
    for first in range(0, len(sums), 4):
        for v in range(len(sums[0])):
            r0, r1, r2, r3 = (sums[first + r][v] for r in range(4))
            zipped = [(shuffle(builder, r0, r1, p), shuffle(builder, r2, r3, p)) for p in pairs]
            columns = [shuffle(builder, *both, lanes) for both in zipped for lanes in halves]
            for j, several in enumerate(columns):
                for f in fours:
                    place = builder.add(c, builder.mul(row_step, _I64(LANES * v + f + j)))
                    builder.store(
                        shuffle(builder, several, several, list(range(f, f + 4))),
                        at(builder, place, _I64(BYTES * first), _FOUR),
                        align=BYTES,
                    )


def make_tile(rows: int, vecs: int, transposed: bool, ahead: bool = False) -> Any:
    """tile(a, row_step, k_step, b, b_step, n, c, c_step): addresses and byte steps, all int64.

    Transposed sums are stored, others are added to what lies at ``c``.
    """

    @intrinsic
    def tile(typingctx, a, row_step, k_step, b, b_step, n, c, c_step):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            a, row_step, k_step, b, b_step, n, c, c_step = args
            sums = accumulate(builder, rows, vecs, a, row_step, k_step, b, b_step, n, ahead)
            (_store_transposed if transposed else _add)(builder, sums, c, c_step)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return tile


_H_TILES = ((_TALL, 3), (_TALL, 2), (ROWS, 1))
_h3, _h2, _h1 = (make_tile(rows, vecs, True) for rows, vecs in _H_TILES)
_h3_fetch, _h2_fetch, _h1_fetch = (make_tile(rows, vecs, True, True) for rows, vecs in _H_TILES)
_d3, _d43, _d23, _d13 = (make_tile(rows, 3, False) for rows in (_TALL, 4, 2, 1))
_d81, _d41, _d11 = (make_tile(rows, 1, False) for rows in (8, 4, 1))


@kernel
def padded(dims):  # type: ignore[no-untyped-def]
    """Dimensions rounded up to whole vectors: rows of H."""
    return (dims + LANES - 1) // LANES * LANES


@kernel
def pack(w):  # type: ignore[no-untyped-def]
    """W (D, p) in panels (p, PANEL), one after the other, the last of whole vectors filled up with zeros.

    A panel stays in the first-level cache while all rows of a strip go by.
    """
    dims, p = w.shape
    packed = np.zeros(p * padded(dims), dtype=np.float32)
    for first in range(0, dims, PANEL):
        width = min(PANEL, padded(dims) - first)
        panel = packed[first * p : (first + width) * p].reshape(p, width)
        for k in range(min(width, dims - first)):
            for f in range(p):
                panel[f, k] = w[first + k, f]
    return packed


@part
def latents(packed, x, out):  # type: ignore[no-untyped-def]
    """H = W X^T of a strip into ``out`` (padded dimensions, at least the rows rounded up to whole ROWS), all
    C-contiguous float32.
    """
    n, p = x.shape
    row, step = BYTES * p, BYTES * out.shape[1]
    whole = n // ROWS * ROWS
    # The last rows, filled up with zeros: nothing is read beyond the end. A slice would be assigned with a
    # check of shapes whose message takes seconds to compile.
    tail = np.zeros((ROWS, p), dtype=np.float32)
    for i in range(whole, n):
        for f in range(p):
            tail[i - whole, f] = x[i, f]
    for first in range(0, out.shape[0], PANEL):
        vecs = min(PANEL, out.shape[0] - first) // LANES
        panel, target = packed.ctypes.data + BYTES * first * p, out.ctypes.data + first * step
        _panel_latents(x.ctypes.data, whole, row, panel, vecs, p, target, step, first == 0)
        if whole < n:
            end = target + BYTES * whole
            # No literals: for those numba would compile the panel once more.
            _panel_latents(tail.ctypes.data, np.int64(ROWS), row, panel, vecs, p, end, step, np.bool_(False))


@part
def _panel_latents(rows, n, row, panel, vecs, p, target, step, fetch):  # type: ignore[no-untyped-def]
    """One panel of W with n rows of X, n a multiple of ROWS; only the first panel has to wait for memory."""
    wide = BYTES * LANES * vecs
    for i in range(0, n, _TALL):
        place = target + BYTES * i
        if vecs == 3 and fetch:
            _h3_fetch(rows + i * row, row, BYTES, panel, wide, p, place, step)
        elif vecs == 3:
            _h3(rows + i * row, row, BYTES, panel, wide, p, place, step)
        elif vecs == 2 and fetch:
            _h2_fetch(rows + i * row, row, BYTES, panel, wide, p, place, step)
        elif vecs == 2:
            _h2(rows + i * row, row, BYTES, panel, wide, p, place, step)
        elif i % ROWS == 0 and fetch:
            _h1_fetch(rows + i * row, row, BYTES, panel, wide, p, place, step)
        elif i % ROWS == 0:
            _h1(rows + i * row, row, BYTES, panel, wide, p, place, step)


@intrinsic
def read_only(typingctx, a):  # type: ignore[no-untyped-def]
    """The same array, as one that is only read: numba compiles a kernel for each type of array."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return impl_ret_borrowed(context, builder, signature.return_type, args[0])

    return a.copy(readonly=True)(a), codegen


@part
def add_moment(g, n, x, out):  # type: ignore[no-untyped-def]
    """out += G X over the first n columns of g (D, at least n) and rows of x (n, p)."""
    dims, p = out.shape
    # The stride, not the width: g may be a part of a wider array.
    row, across = BYTES * p, g.strides[0]
    left, rows, target = g.ctypes.data, x.ctypes.data, out.ctypes.data
    whole = p // PANEL * PANEL
    for f in range(0, whole, PANEL):
        k, at = 0, BYTES * f
        while dims - k >= _TALL:
            _d3(left + k * across, across, BYTES, rows + at, row, n, target + k * row + at, row)
            k += _TALL
        if dims - k >= 4:
            _d43(left + k * across, across, BYTES, rows + at, row, n, target + k * row + at, row)
            k += 4
        if dims - k >= 2:
            _d23(left + k * across, across, BYTES, rows + at, row, n, target + k * row + at, row)
            k += 2
        if dims - k == 1:
            _d13(left + k * across, across, BYTES, rows + at, row, n, target + k * row + at, row)
    if whole < p:
        _add_rest(g, n, x, whole, out)


@part
def _add_rest(g, n, x, first, out):  # type: ignore[no-untyped-def]
    """The columns of X from ``first`` on, fewer than a panel: copied, and filled up with zeros."""
    dims, width = out.shape[0], padded(x.shape[1] - first)
    rest = np.zeros((n, width), dtype=np.float32)
    for i in range(n):
        for f in range(first, x.shape[1]):
            rest[i, f - first] = x[i, f]
    part = np.zeros((dims, width), dtype=np.float32)
    row, across = BYTES * width, g.strides[0]
    for f in range(0, width, LANES):
        k, source, target = 0, rest.ctypes.data + BYTES * f, part.ctypes.data + BYTES * f
        while dims - k >= 8:
            _d81(g.ctypes.data + k * across, across, BYTES, source, row, n, target + k * row, row)
            k += 8
        if dims - k >= 4:
            _d41(g.ctypes.data + k * across, across, BYTES, source, row, n, target + k * row, row)
            k += 4
        while k < dims:
            _d11(g.ctypes.data + k * across, across, BYTES, source, row, n, target + k * row, row)
            k += 1
    for k in range(dims):
        total, more = out[k, first:], part[k]
        for f in range(len(total)):
            total[f] += more[f]


def fits(dims: int, x: np.ndarray) -> bool:
    """Whether these kernels serve a product of ``dims`` rows with ``x``.

    Examples
    --------
    >>> fits(20, np.zeros((100, 196), dtype=np.float32)), fits(2000, np.zeros((100, 196), dtype=np.float32))
    (True, False)
    """
    rows = x.dtype == np.float32 and x.flags.c_contiguous
    return bool(rows and 0 < dims <= MAX_DIMS and 0 < x.shape[1] <= MAX_FEATURES)
