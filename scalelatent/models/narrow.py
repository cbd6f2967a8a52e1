"""Products of a narrow matrix with a strip of rows: H = W X^T and Delta += G X for a few dozen rows of W and
G.

OpenBLAS packs both operands into panels made for square matrices; with 20 or 40 rows on one side packing,
padding and reading X twice cost half the time. Here X is read in place, a strip at a time, so that a kernel
which does both products reads it from memory once. Tiles of 4 x 24 sums stay in registers (12 of 16 on AVX2):
a step loads three vectors and broadcasts four numbers for twelve fused multiply-adds, so the arithmetic units
are the limit. H is stored transposed, (dimensions, rows), as the E-step wants it. The tiles are written in
LLVM's vector types, because sums in local arrays would not stay in registers.

Every sum runs over its index in order: a block gives the same bits each time, on any thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from scalelatent._numba import kernel

LANES = 8
# Rows of a strip: X (p = 196) and H stay in the second-level cache between the two products.
STRIP = 128
# Beyond this many rows of W, OpenBLAS is level (benchmarks/capsule_pass.py).
MAX_NARROW = 64
# Rows of X that are fetched ahead of the four in work.
_AHEAD = 8

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VEC, _HALF = ir.VectorType(_F32, LANES), ir.VectorType(_F32, LANES // 2)
_BYTES = 4


def _at(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _accumulate(
    builder: Any,
    rows: int,
    vecs: int,
    a: Any,
    row_step: Any,
    k_step: Any,
    b: Any,
    b_step: Any,
    n: Any,
    fetch: bool,
) -> list[list[Any]]:
    """acc[r][v] = sum over k < n of a[r, k] * b[k, v], in registers; n is at least 1."""
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VEC, [_VEC] * 3), f"llvm.fma.v{LANES}f32"
    )
    entry, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    offsets = [builder.mul(row_step, _I64(r)) for r in range(rows)]
    builder.branch(loop)
    builder.position_at_end(loop)
    k, pa, pb = builder.phi(_I64), builder.phi(_I64), builder.phi(_I64)
    sums = [[builder.phi(_VEC) for _ in range(vecs)] for _ in range(rows)]
    vectors = [
        builder.load(_at(builder, pb, _I64(_BYTES * LANES * v), _VEC), align=_BYTES) for v in range(vecs)
    ]
    if fetch:
        # Four bytes of each of four rows a step: the rows ahead, sixteen bytes a step, arrive just in time.
        # The hardware
        # would start anew with every row.
        ahead = builder.add(builder.mul(row_step, _I64(_AHEAD)), builder.mul(k, _I64(_BYTES * rows)))
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _I32, _I32, _I32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(prefetch, [_at(builder, a, ahead, ir.IntType(8)), _I32(0), _I32(3), _I32(1)])
    new = []
    for r in range(rows):
        one = builder.load(_at(builder, pa, offsets[r], _F32), align=_BYTES)
        first = builder.insert_element(ir.Constant(_VEC, ir.Undefined), one, _I32(0))
        wide = _shuffle(builder, first, first, [0] * LANES)
        new.append([builder.call(fma, [wide, vectors[v], sums[r][v]]) for v in range(vecs)])
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


def _store(builder: Any, sums: list[list[Any]], c: Any, row_step: Any) -> None:
    for r, row in enumerate(sums):
        base = builder.add(c, builder.mul(row_step, _I64(r)))
        for v, value in enumerate(row):
            builder.store(value, _at(builder, base, _I64(_BYTES * LANES * v), _VEC), align=_BYTES)


def _store_transposed(builder: Any, sums: list[list[Any]], c: Any, row_step: Any) -> None:
    """Four rows at a time: lane j of vector v goes to row 8v + j, four columns side by side."""
    even, odd = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    low, high = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    for first in range(0, len(sums), 4):
        for v in range(len(sums[0])):
            r0, r1, r2, r3 = (sums[first + r][v] for r in range(4))
            a, b = _shuffle(builder, r0, r1, even), _shuffle(builder, r0, r1, odd)
            d, e = _shuffle(builder, r2, r3, even), _shuffle(builder, r2, r3, odd)
            columns = [_shuffle(builder, p, q, lanes) for p, q in ((a, d), (b, e)) for lanes in (low, high)]
            for j, both in enumerate(columns):
                for half, lanes in enumerate(([0, 1, 2, 3], [4, 5, 6, 7])):
                    place = builder.add(c, builder.mul(row_step, _I64(LANES * v + 4 * half + j)))
                    builder.store(
                        _shuffle(builder, both, both, lanes),
                        _at(builder, place, _I64(_BYTES * first), _HALF),
                        align=_BYTES,
                    )


def _tile(rows: int, vecs: int, transposed: bool) -> Any:
    """tile(a, row_step, k_step, b, b_step, n, c, c_step): addresses and byte steps, all int64."""

    @intrinsic
    def tile(typingctx, a, row_step, k_step, b, b_step, n, c, c_step):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            a, row_step, k_step, b, b_step, n, c, c_step = args
            sums = _accumulate(
                builder, rows, vecs, a, row_step, k_step, b, b_step, n, fetch=transposed and vecs == 3
            )
            (_store_transposed if transposed else _store)(builder, sums, c, c_step)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return tile


_h43, _h42, _h81 = _tile(4, 3, True), _tile(4, 2, True), _tile(8, 1, True)
_d43, _d23, _d13 = _tile(4, 3, False), _tile(2, 3, False), _tile(1, 3, False)
_d81, _d11 = _tile(8, 1, False), _tile(1, 1, False)


@kernel
def pack(w):  # type: ignore[no-untyped-def]
    """W (D, p) as (p, dimensions padded with zeros to whole vectors)."""
    dims, p = w.shape
    packed = np.zeros((p, (dims + LANES - 1) // LANES * LANES), dtype=np.float32)
    for k in range(dims):
        for f in range(p):
            packed[f, k] = w[k, f]
    return packed


@kernel
def latents(packed, x, out):  # type: ignore[no-untyped-def]
    """H = W X^T of a strip into ``out`` (padded dimensions, at least the rows rounded up to 8), all
    C-contiguous float32.
    """
    p, padded = packed.shape
    n, vecs = len(x), packed.shape[1] // LANES
    tail = np.zeros((LANES, p), dtype=np.float32)
    row, wide, step = 4 * p, 4 * padded, 4 * out.shape[1]
    weights = packed.ctypes.data
    for i in range(0, n, LANES):
        rows, target = x.ctypes.data + i * row, out.ctypes.data + 4 * i
        if n - i < LANES:
            # The last rows, padded with zeros: nothing is read beyond the end.
            tail[: n - i] = x[i:]
            rows = tail.ctypes.data
        v = 0
        while vecs - v >= 3:
            for half in range(2):
                _h43(
                    rows + 4 * half * row,
                    row,
                    4,
                    weights + 32 * v,
                    wide,
                    p,
                    target + 8 * v * step + 16 * half,
                    step,
                )
            v += 3
        if vecs - v == 2:
            for half in range(2):
                _h42(
                    rows + 4 * half * row,
                    row,
                    4,
                    weights + 32 * v,
                    wide,
                    p,
                    target + 8 * v * step + 16 * half,
                    step,
                )
        elif vecs - v == 1:
            _h81(rows, row, 4, weights + 32 * v, wide, p, target + 8 * v * step, step)


@kernel
def add_moment(g, n, x, part, out):  # type: ignore[no-untyped-def]
    """out += G X over the first n columns of g (D, at least n) and rows of x (n, p), p >= 8; ``part`` is
    scratch like ``out``.
    """
    dims, p = out.shape
    # The stride, not the width: g may be a part of a wider array.
    row, across = 4 * p, g.strides[0]
    left, rows, target = g.ctypes.data, x.ctypes.data, part.ctypes.data
    f = 0
    while p - f >= 24:
        k = 0
        while dims - k >= 4:
            _d43(left + k * across, across, 4, rows + 4 * f, row, n, target + k * row + 4 * f, row)
            k += 4
        if dims - k >= 2:
            _d23(left + k * across, across, 4, rows + 4 * f, row, n, target + k * row + 4 * f, row)
            k += 2
        if dims - k == 1:
            _d13(left + k * across, across, 4, rows + 4 * f, row, n, target + k * row + 4 * f, row)
        f += 24
    # What is left is narrower than a tile; the last vector overlaps columns that are done, and writes them
    # again alike.
    while f < p:
        at = min(f, p - LANES)
        k = 0
        while dims - k >= 8:
            _d81(left + k * across, across, 4, rows + 4 * at, row, n, target + k * row + 4 * at, row)
            k += 8
        while k < dims:
            _d11(left + k * across, across, 4, rows + 4 * at, row, n, target + k * row + 4 * at, row)
            k += 1
        f += LANES
    for k in range(dims):
        total, more = out[k], part[k]
        for j in range(p):
            total[j] += more[j]


def fits(dims: int, x: np.ndarray) -> bool:
    """Whether these kernels serve a product of ``dims`` rows with ``x``.

    Examples
    --------
    >>> fits(20, np.zeros((100, 196), dtype=np.float32)), fits(320, np.zeros((100, 196), dtype=np.float32))
    (True, False)
    """
    return 0 < dims <= MAX_NARROW and x.dtype == np.float32 and x.shape[1] >= LANES and x.flags.c_contiguous
