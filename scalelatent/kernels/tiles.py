"""Matrix products in register tiles: a generator of tiles, and H = W X^T and Delta += G X by strips of rows.

A tile sums products of numbers of one operand with vectors of the other. It then passes the sums to a
function that stores them, adds them, or reduces them. Tiles use LLVM's vector types, because sums in local
arrays would not stay in registers. Every sum runs over its index in order, so a block gives the same bits on
any thread and for any width of the vectors.

OpenBLAS packs both operands into panels for square matrices, and reads X twice. Here only W is packed, once
per block. A strip of X is read in place, so a kernel with both products reads X from memory once. Tiles of 4
x 24 sums stay in registers (12 of 16 on AVX2; 8 x 48 in 24 of 32 on AVX-512). A step loads three vectors and
broadcasts four numbers for twelve fused multiply-adds, so the arithmetic units are the limit. H is stored
transposed, (dimensions, rows), as the E-step needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic

from .jit import entry, in_array, subkernel
from .memory import zeros
from .vectors import BYTES, I64, LANES, Value, Vectors, vector_intrinsic

# Rows of a strip (range of rows) of X. A strip of 196 columns and its products fit into the second-level
# cache.
STRIP = 128
# Rows of X in a tile that is one vector wide; zeros pad a strip to a multiple of this number of rows.
ROWS = 8
# Rows of X in a tile that is three vectors wide, whose sums use three quarters of the registers.
TALL_TILE_ROWS = 8 if LANES == 16 else 4
# Columns of a panel (a part of W, packed and transposed); they fill three vectors.
PANEL = 3 * LANES
# Largest number of rows of W for which tiles are faster than OpenBLAS (benchmarks/capsule_pass.py).
MAX_DIMS = 512
# Largest number of features. With more, a panel (some rows of W) would exceed the first-level cache.
MAX_FEATURES = 1024
# A kernel prefetches the row of X that it needs this many rows later.
_AHEAD = 8

Sums = list[list[Value]]


def add_products(v: Vectors, sums: Sums, left: Iterable[Value], right: Sequence[Value]) -> Sums:
    """Return ``sums`` plus the product of each value of ``left`` (one per row) with each vector ``right``."""
    return [
        [v.multiply_add(one, x, s) for x, s in zip(right, row, strict=True)]
        for one, row in zip(left, sums, strict=True)
    ]


def sum_products(
    v: Vectors, sums: Sums, n: Value,
    operands: Callable[[Value, list[Value]], tuple[Iterable[Value], Sequence[Value], Sequence[Value]]],
    carried: Sequence[Value] = (), step: int = 1, may_be_empty: bool = False,
) -> Sums:  # fmt: skip
    """Append a loop over i in range(0, n, step) that adds left[r] * right[c] to sums[r][c]; return the sums.

    The sums stay in registers. ``operands(i, carried)`` returns (left, right, next values of ``carried``).
    """
    width, extra = len(sums[0]), len(carried)

    def body(i: Value, values: list[Value]) -> list[Value]:
        left, right, following = operands(i, values[:extra])
        now = [values[k : k + width] for k in range(extra, len(values), width)]
        new = add_products(v, now, left, right)
        return [*following, *(s for row in new for s in row)]

    start = [*carried, *(s for row in sums for s in row)]
    new = v.loop(I64(0), n, I64(step), start, body, may_be_empty)
    return [new[k : k + width] for k in range(extra, len(new), width)]


def zero_sums(v: Vectors, rows: int, columns: int) -> Sums:
    """Return a table of ``rows`` x ``columns`` zero vectors, to which products are added."""
    return [[v.zero] * columns] * rows


def accumulate(
    v: Vectors, rows: int, vecs: int, a: Value, row_step: Value, k_step: Value, b: Value, b_step: Value,
    n: Value, ahead: bool = False, mask: Value | None = None,
) -> Sums:  # fmt: skip
    """Return the matrix product of a tile: sums[r][c] is the sum over k < n of a[r, k] * b[k, c]; n >= 1.

    The sums stay in registers. With ``ahead`` the loop prefetches later rows of ``a``. ``mask`` selects the
    vector lanes for which ``b`` has columns. If the sums are integers, k counts groups of four columns, whose
    values are bytes (unsigned in ``a``, signed in ``b``).
    """
    offsets = [v.b.mul(row_step, I64(r)) for r in range(rows)]

    def operands(k: Value, places: list[Value]) -> tuple[Iterable[Value], Sequence[Value], Sequence[Value]]:
        pa, pb = places
        right = [v.load(pb, v.wide * c, v.sums, mask) for c in range(vecs)]
        if ahead:
            # Each step prefetches four bytes per row of the tile, so that later rows are cached in time. The
            # hardware prefetcher does not continue from one row to the next.
            far = v.b.add(v.b.mul(row_step, I64(_AHEAD)), v.b.mul(k, I64(BYTES * rows)))
            v.fetch(a, far)
        # A generator loads one row at a time, because there are not enough registers for all rows.
        left = (v.spread(v.load(pa, offset, v.sums.element)) for offset in offsets)
        return left, right, (v.b.add(pa, k_step), v.b.add(pb, b_step))

    return sum_products(v, zero_sums(v, rows, vecs), n, operands, (a, b))


def make_tile(
    rows: int,
    vecs: int,
    finish: Callable[..., None],
    ahead: bool = False,
    masked: bool = False,
    dots: bool = False,
    **kinds: Any,
) -> Callable[..., Any]:
    """Return tile(a, row_step, k_step, b, b_step, n, *rest) for kernels.

    The tile computes the sums of `accumulate` and calls finish(vectors, sums, *rest). Arguments are
    addresses, steps in bytes and counts; ``kinds`` gives the types of other arguments. With ``dots`` the
    operands are bytes and the sums integers. A ``masked`` tile of one vector, tile(…, n, width, *rest), reads
    ``width`` columns of b and passes their mask to ``finish``.
    """
    rest = [name for name in inspect.signature(finish).parameters if name != "mask"][2:]
    names = ["v", "a", "row_step", "k_step", "b", "b_step", "n", *["width"] * masked, *rest]

    def tile(
        v: Vectors, a: Value, row_step: Value, k_step: Value, b: Value, b_step: Value, n: Value, *rest: Value
    ) -> None:
        chosen = {}
        if masked:
            chosen["mask"], rest = v.first(rest[0]), rest[1:]
        finish(
            v, accumulate(v, rows, vecs, a, row_step, k_step, b, b_step, n, ahead, **chosen), *rest, **chosen
        )

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    setattr(tile, "__signature__", inspect.Signature([inspect.Parameter(name, kind) for name in names]))  # noqa: B010
    return vector_intrinsic(dots=dots, **kinds)(tile)


def add(v: Vectors, sums: Sums, c: Value, c_step: Value) -> None:
    """Add the sums to the matrix at the address c."""
    for r, row in enumerate(sums):
        base = v.b.add(c, v.b.mul(c_step, I64(r)))
        for k, value in enumerate(row):
            v.store(v.plus(v.load(base, v.wide * k, v.sums), value), base, v.wide * k)


def store_transposed(v: Vectors, sums: Sums, c: Value, c_step: Value) -> None:
    """Store the sums transposed, four rows at a time: lane j of vector k goes to row LANES k + j."""
    fours = range(0, LANES, 4)
    pairs = [[f + j for f in fours for j in (i, LANES + i, i + 1, LANES + i + 1)] for i in (0, 2)]
    halves = [[f + j for f in fours for j in (i, i + 1, LANES + i, LANES + i + 1)] for i in (0, 2)]
    for first in range(0, len(sums), 4):
        for k in range(len(sums[0])):
            r0, r1, r2, r3 = (sums[first + r][k] for r in range(4))
            zipped = [(v.shuffle(r0, r1, p), v.shuffle(r2, r3, p)) for p in pairs]
            columns = [v.shuffle(*both, lanes) for both in zipped for lanes in halves]
            for j, several in enumerate(columns):
                for f in fours:
                    place = v.b.add(c, v.b.mul(c_step, I64(LANES * k + f + j)))
                    v.store(v.shuffle(several, several, range(f, f + 4)), place, BYTES * first)


# (rows of X, vectors of latent dimensions) of the three tiles that compute H.
_LATENT_TILES = ((TALL_TILE_ROWS, 3), (TALL_TILE_ROWS, 2), (ROWS, 1))
_h3, _h2, _h1 = (make_tile(*shape, store_transposed) for shape in _LATENT_TILES)
_h3_fetch, _h2_fetch, _h1_fetch = (make_tile(*shape, store_transposed, ahead=True) for shape in _LATENT_TILES)
_d3, _d43, _d23, _d13 = (make_tile(rows, 3, add) for rows in (TALL_TILE_ROWS, 4, 2, 1))
_d81, _d41, _d11 = (make_tile(rows, 1, add) for rows in (8, 4, 1))


def padded_size(dims):  # type: ignore[no-untyped-def]
    """Return the number of latent dimensions ``dims``, rounded up to a multiple of LANES."""
    return (dims + LANES - 1) // LANES * LANES


padded = subkernel(padded_size)


def _pack(w):  # type: ignore[no-untyped-def]
    """Return W (D, p) as consecutive panels (p, PANEL); the last panel is padded with zeros to whole vectors.

    A panel stays in the first-level cache while all rows of a strip are multiplied with it.
    """
    dims, p = w.shape
    packed = zeros(p * padded(dims), np.float32)
    for first in range(0, dims, PANEL):
        width = min(PANEL, padded(dims) - first)
        for k in range(min(width, dims - first)):
            for f in range(p):
                packed[first * p + f * width + k] = w[first + k, f]
    return packed


pack = subkernel(_pack)
packed_matrix = entry(in_array("f4", 2))(_pack)


@subkernel
def compute_latents(packed, x, out):  # type: ignore[no-untyped-def]
    """Write the products of all rows of W (``packed``) with the rows ``x`` of a strip to ``out``.

    ``out`` is (padded dimensions, columns); its columns are the rows ``x``, rounded up to a multiple of ROWS
    or more. All arrays are C-contiguous float32.
    """
    n, p = x.shape
    row, step = BYTES * p, BYTES * out.shape[1]
    whole = n // ROWS * ROWS
    # The last rows are padded with zeros, so that nothing is read beyond the end. The loop replaces a slice
    # assignment, whose check of shapes takes seconds to compile.
    tail = zeros((ROWS, p), np.float32)
    for i in range(whole, n):
        for f in range(p):
            tail[i - whole, f] = x[i, f]
    for first in range(0, out.shape[0], PANEL):
        vecs = min(PANEL, out.shape[0] - first) // LANES
        panel, target = packed.ctypes.data + BYTES * first * p, out.ctypes.data + first * step
        _panel_latents(x.ctypes.data, whole, row, panel, vecs, p, target, step, first == 0)
        if whole < n:
            end = target + BYTES * whole
            # The arguments are not literals, because numba would compile the function again for each literal.
            _panel_latents(tail.ctypes.data, np.int64(ROWS), row, panel, vecs, p, end, step, np.bool_(False))


@subkernel
def _panel_latents(rows, n, row, panel, vecs, p, target, step, fetch):  # type: ignore[no-untyped-def]
    """Write the product of a panel (some rows of W) and n rows of X at the address ``target``.

    n is a multiple of ROWS. With ``fetch`` (for the first panel only), rows of X are prefetched.
    """
    wide = BYTES * LANES * vecs
    for i in range(0, n, TALL_TILE_ROWS):
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
    """Return the array with numba's read-only type, so that functions it is passed to are compiled once."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return impl_ret_borrowed(context, builder, signature.return_type, args[0])

    return a.copy(readonly=True)(a), codegen


@subkernel
def add_moment(g, n, x, out):  # type: ignore[no-untyped-def]
    """Add the matrix product of the first n columns of g (D, n or more) and x (n, p) to ``out`` (D, p)."""
    dims, p = out.shape
    # The distance of two rows of g, in bytes, is its stride, because g may be a part of a wider array.
    row, across = BYTES * p, g.strides[0]
    left, rows, target = g.ctypes.data, x.ctypes.data, out.ctypes.data
    whole = p // PANEL * PANEL
    for f in range(0, whole, PANEL):
        k, at = 0, BYTES * f
        while dims - k >= TALL_TILE_ROWS:
            _d3(left + k * across, across, BYTES, rows + at, row, n, target + k * row + at, row)
            k += TALL_TILE_ROWS
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


@subkernel
def _add_rest(g, n, x, first, out):  # type: ignore[no-untyped-def]
    """Add the product of g and the columns of x from ``first`` on, which are copied and padded with zeros."""
    dims, width = out.shape[0], padded(x.shape[1] - first)
    rest = zeros((n, width), np.float32)
    for i in range(n):
        for f in range(first, x.shape[1]):
            rest[i, f - first] = x[i, f]
    part = zeros((dims, width), np.float32)
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


def can_multiply(dims: int, x: np.ndarray) -> bool:
    """Return True if these kernels can multiply ``dims`` rows of W with ``x``."""
    rows = x.dtype == np.float32 and x.flags.c_contiguous
    return bool(rows and 0 < dims <= MAX_DIMS and 0 < x.shape[1] <= MAX_FEATURES)
