"""Products with a strip of rows in register tiles: H = W X^T and Delta += G X, for up to some hundred rows of
W and G.

OpenBLAS packs both operands into panels made for square matrices, and reads X twice. Here W alone is packed,
once a block; a strip of X is read in place, so that a kernel which does both products reads it from memory
once. Tiles of 4 x 24 sums stay in registers (12 of 16 on AVX2): a step loads three vectors and broadcasts
four numbers for twelve fused multiply-adds, so the arithmetic units are the limit. H is stored transposed,
(dimensions, rows), as the E-step wants it. The tiles are written in LLVM's vector types, because sums in
local arrays would not stay in registers.

Every sum runs over its index in order: a block gives the same bits each time, on any thread.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from scalelatent._numba import kernel

LANES = 8
# Rows of a strip: X (p = 196) and H stay in the second-level cache between the two products.
STRIP = 128
# Columns of a panel: three vectors.
PANEL = 3 * LANES
# Up to so many rows of W the tiles are ahead of OpenBLAS (benchmarks/capsule_pass.py); with 512-bit vectors,
# which OpenBLAS uses and the tiles do not, only while packing is what costs.
MAX_DIMS = 64 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 512
# Beyond this many columns a panel of W is far larger than the first-level cache.
MAX_FEATURES = 1024
# Rows of X that are fetched ahead of the four in work.
_AHEAD = 8

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VEC, _HALF = ir.VectorType(_F32, LANES), ir.VectorType(_F32, LANES // 2)
BYTES = 4


def at(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    """A pointer to a ``kind`` so many bytes behind an address; both int64."""
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Lanes of two vectors, counted through both."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def spread(builder: Any, scalar: Any) -> Any:
    """A scalar in all lanes of a vector of its type."""
    first = builder.insert_element(
        ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined), scalar, _I32(0)
    )
    return shuffle(builder, first, first, [0] * LANES)


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
    vectors = [builder.load(at(builder, pb, _I64(BYTES * LANES * v), _VEC), align=BYTES) for v in range(vecs)]
    if fetch:
        # Four bytes of each of four rows a step: the rows ahead, sixteen bytes a step, arrive just in time.
        # The hardware
        # would start anew with every row.
        ahead = builder.add(builder.mul(row_step, _I64(_AHEAD)), builder.mul(k, _I64(BYTES * rows)))
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _I32, _I32, _I32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(prefetch, [at(builder, a, ahead, ir.IntType(8)), _I32(0), _I32(3), _I32(1)])
    new = []
    for r in range(rows):
        one = builder.load(at(builder, pa, offsets[r], _F32), align=BYTES)
        wide = spread(builder, one)
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


def _add(builder: Any, sums: list[list[Any]], c: Any, row_step: Any) -> None:
    for r, row in enumerate(sums):
        base = builder.add(c, builder.mul(row_step, _I64(r)))
        for v, value in enumerate(row):
            place = at(builder, base, _I64(BYTES * LANES * v), _VEC)
            builder.store(builder.fadd(builder.load(place, align=BYTES), value), place, align=BYTES)


def _store_transposed(builder: Any, sums: list[list[Any]], c: Any, row_step: Any) -> None:
    """Four rows at a time: lane j of vector v goes to row 8v + j, four columns side by side."""
    even, odd = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    low, high = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    for first in range(0, len(sums), 4):
        for v in range(len(sums[0])):
            r0, r1, r2, r3 = (sums[first + r][v] for r in range(4))
            a, b = shuffle(builder, r0, r1, even), shuffle(builder, r0, r1, odd)
            d, e = shuffle(builder, r2, r3, even), shuffle(builder, r2, r3, odd)
            columns = [shuffle(builder, p, q, lanes) for p, q in ((a, d), (b, e)) for lanes in (low, high)]
            for j, both in enumerate(columns):
                for half, lanes in enumerate(([0, 1, 2, 3], [4, 5, 6, 7])):
                    place = builder.add(c, builder.mul(row_step, _I64(LANES * v + 4 * half + j)))
                    builder.store(
                        shuffle(builder, both, both, lanes),
                        at(builder, place, _I64(BYTES * first), _HALF),
                        align=BYTES,
                    )


def make_tile(rows: int, vecs: int, transposed: bool, fetch: bool = False) -> Any:
    """tile(a, row_step, k_step, b, b_step, n, c, c_step): addresses and byte steps, all int64.

    Transposed sums are stored, others are added to what lies at ``c``.
    """

    @intrinsic
    def tile(typingctx, a, row_step, k_step, b, b_step, n, c, c_step):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            a, row_step, k_step, b, b_step, n, c, c_step = args
            sums = accumulate(builder, rows, vecs, a, row_step, k_step, b, b_step, n, fetch)
            (_store_transposed if transposed else _add)(builder, sums, c, c_step)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return tile


_h43_fetch = make_tile(4, 3, True, True)
_h43, _h42, _h81 = make_tile(4, 3, True), make_tile(4, 2, True), make_tile(8, 1, True)
_d43, _d23, _d13 = make_tile(4, 3, False), make_tile(2, 3, False), make_tile(1, 3, False)
_d81, _d41, _d11 = make_tile(8, 1, False), make_tile(4, 1, False), make_tile(1, 1, False)


@kernel
def padded(dims):  # type: ignore[no-untyped-def]
    """Dimensions rounded up to whole vectors: rows of H."""
    return (dims + LANES - 1) // LANES * LANES


@kernel
def pack(w):  # type: ignore[no-untyped-def]
    """W (D, p) in panels (p, 24), the last of 8 or 16 columns, filled up with zeros, one after the other.

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


@kernel
def latents(packed, x, out):  # type: ignore[no-untyped-def]
    """H = W X^T of a strip into ``out`` (padded dimensions, at least the rows rounded up to 8), all
    C-contiguous float32.
    """
    n, p = x.shape
    row, step = BYTES * p, BYTES * out.shape[1]
    whole = n // LANES * LANES
    tail = np.zeros((LANES, p), dtype=np.float32)
    # The last rows, filled up with zeros: nothing is read beyond the end.
    tail[: n - whole] = x[whole:]
    for first in range(0, out.shape[0], PANEL):
        vecs = min(PANEL, out.shape[0] - first) // LANES
        panel, target = packed.ctypes.data + BYTES * first * p, out.ctypes.data + first * step
        _panel_latents(x.ctypes.data, whole, row, panel, vecs, p, target, step, first == 0)
        if whole < n:
            end = target + BYTES * whole
            _panel_latents(tail.ctypes.data, LANES, row, panel, vecs, p, end, step, False)


@kernel
def _panel_latents(rows, n, row, panel, vecs, p, target, step, fetch):  # type: ignore[no-untyped-def]
    """One panel of W with n rows of X, n a multiple of 8; only the first panel has to wait for memory."""
    wide = BYTES * LANES * vecs
    for i in range(0, n, 4):
        place = target + BYTES * i
        if vecs == 3 and fetch:
            _h43_fetch(rows + i * row, row, BYTES, panel, wide, p, place, step)
        elif vecs == 3:
            _h43(rows + i * row, row, BYTES, panel, wide, p, place, step)
        elif vecs == 2:
            _h42(rows + i * row, row, BYTES, panel, wide, p, place, step)
        elif i % LANES == 0:
            _h81(rows + i * row, row, BYTES, panel, wide, p, place, step)


@kernel
def add_moment(g, n, x, out):  # type: ignore[no-untyped-def]
    """out += G X over the first n columns of g (D, at least n) and rows of x (n, p)."""
    dims, p = out.shape
    # The stride, not the width: g may be a part of a wider array.
    row, across = BYTES * p, g.strides[0]
    left, rows, target = g.ctypes.data, x.ctypes.data, out.ctypes.data
    whole = p // PANEL * PANEL
    for f in range(0, whole, PANEL):
        k, at = 0, BYTES * f
        while dims - k >= 4:
            _d43(left + k * across, across, BYTES, rows + at, row, n, target + k * row + at, row)
            k += 4
        if dims - k >= 2:
            _d23(left + k * across, across, BYTES, rows + at, row, n, target + k * row + at, row)
            k += 2
        if dims - k == 1:
            _d13(left + k * across, across, BYTES, rows + at, row, n, target + k * row + at, row)
    if whole < p:
        _add_rest(g, n, x, whole, out)


@kernel
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
