"""Shared units counted in bit planes: for few centroids, where a code's centroids fit a vector register.

For a clustering below and a code, a bit for each centroid says whether it has the code. A row adds up the
bits of its codes, all centroids at once: bit p of every count lies in plane p, and a tree of carry-save
adders (five logical operations each) takes sixteen codes to one carry of the fifth plane (Harley and Seal;
Warren, Hacker's Delight, 5-1). So a look-up costs a load and some six operations, whatever it meets, and the
largest count is found by going through the planes from the highest down.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from scalelatent._numba import entry, filled, given, kernel
from scalelatent.models.tiles import at

# Codes that one tree adds up.
BLOCK = 16
# Planes of a tree, and all of them: counts are below 1,024.
_LOW, PLANES = 4, 10
_WORD = 64
# Words of a code's bits: the most that fit a vector register.
MAX_WORDS = 4
# Words of all codes of one clustering: sixteen of them take half of a second-level cache.
_MAX_TABLE = 2048
# Rows whose planes are kept while the tables of a block stay in the cache.
_STRIP = 1024
_I16, _I64 = ir.IntType(16), ir.IntType(_WORD)


@dataclass(frozen=True)
class Planes:
    """Centroids of one upper clustering as bits.

    Attributes
    ----------
    bits : ndarray of uint64, shape (blocks, k below, 16, words)
        For each code in a block of sixteen clusterings which centroids have it; none where the clustering
        does not look at the unit. Words are 1, 2 or 4.
    begin : ndarray of int64, shape (blocks,)
        First clustering of each block. The last block ends with the last clustering; those that the block
        before has counted have no bits.
    clusterings : int
    """

    bits: np.ndarray
    begin: np.ndarray
    clusterings: int


def fits(k: int, clusterings: int, below: int) -> bool:
    """Whether so many centroids are counted in planes.

    Examples
    --------
    >>> fits(250, 400, 500), fits(500, 400, 1000), fits(250, 10, 500)
    (True, False, False)
    """
    words = _words(k)
    return words <= MAX_WORDS and BLOCK <= clusterings < 2**PLANES and words * below <= _MAX_TABLE


def make_planes(codes: np.ndarray, units: np.ndarray) -> Planes:
    """Bits for :func:`nearest_in_planes`, see :func:`..reference.make_lists`.

    Examples
    --------
    >>> planes = make_planes(np.array([[0] * 20, [1] * 20]), np.ones((20, 2), dtype=bool))
    >>> planes.begin.tolist(), planes.bits[0, :, 0, 0].tolist(), planes.bits[1, 1, :, 0].tolist()
    ([0, 4], [1, 2], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2])
    """
    k, clusterings = codes.shape
    begin = np.minimum(BLOCK * np.arange(-(-clusterings // BLOCK)), clusterings - BLOCK)
    bits = np.zeros((len(begin), units.shape[1], BLOCK, _words(k)), dtype=np.uint64)
    _set_bits(np.ascontiguousarray(codes, dtype=np.uint16), np.ascontiguousarray(units), begin, bits)
    return Planes(bits, begin, clusterings)


def nearest_in_planes(x: np.ndarray, planes: Planes) -> np.ndarray:
    """Index of the centroid that shares most units with each row, see :func:`..reference.nearest_codes`.

    Examples
    --------
    >>> planes = make_planes(np.array([[0] * 20, [1] * 20]), np.ones((20, 2), dtype=bool))
    >>> nearest_in_planes(np.array([[0] * 9 + [1] * 11], dtype=np.uint16), planes).tolist()
    [1]
    """
    out = np.empty(len(x), dtype=np.int32)
    _nearest_in_planes(np.ascontiguousarray(x, dtype=np.uint16), planes.bits, planes.begin, out)
    return out


def _words(k: int) -> int:
    return 1 << (-(-k // _WORD) - 1).bit_length()


def _add(builder: Any, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    """(carry, sum) of three bits, in every bit."""
    either = builder.xor(a, b)
    return builder.or_(builder.and_(a, b), builder.and_(either, c)), builder.xor(either, c)


def _make_block(words: int) -> Any:
    """block(codes, bits, state): adds a block of codes of one row to its planes; addresses, all int64."""
    kind, size = ir.VectorType(_I64, words), words * _WORD // 8

    @intrinsic
    def block(typingctx, codes, bits, state):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            codes, bits, state = args
            plane = lambda p: at(builder, state, _I64(size * p), kind)  # noqa: E731
            low = [builder.load(plane(p), align=8) for p in range(_LOW)]

            def look_up(i: int) -> Any:
                code = builder.zext(builder.load(at(builder, codes, _I64(2 * i), _I16), align=2), _I64)
                line = builder.add(bits, builder.mul(code, _I64(size * BLOCK)))
                return builder.load(at(builder, line, _I64(size * i), kind), align=8)

            def tree(level: int, first: int) -> Any:
                """2^level codes go into the lowest planes; what is carried out of them comes back."""
                half = 2 ** (level - 1)
                below = look_up if level == 1 else partial(tree, level - 1)
                pair = [below(i) for i in (first, first + half)]
                carry, low[level - 1] = _add(builder, low[level - 1], *pair)
                return carry

            carry = tree(_LOW, 0)
            for p in range(_LOW):
                builder.store(low[p], plane(p), align=8)
            for p in range(_LOW, PLANES):
                before = builder.load(plane(p), align=8)
                builder.store(builder.xor(before, carry), plane(p), align=8)
                carry = builder.and_(before, carry)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return block


_block_1, _block_2, _block_4 = (_make_block(words) for words in (1, 2, 4))


@intrinsic
def _trailing_zeros(typingctx, word):  # type: ignore[no-untyped-def]
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64, ir.IntType(1)])
        count = cgutils.get_or_insert_function(builder.module, kind, f"llvm.cttz.i{_WORD}")
        return builder.call(count, [args[0], ir.Constant(ir.IntType(1), 0)])

    return types.int64(types.uint64), codegen


@kernel
def _largest(planes):  # type: ignore[no-untyped-def]
    """The lowest centroid of the largest count."""
    words = planes.shape[1]
    left = np.full(words, ~np.uint64(0))
    for p in range(PLANES - 1, -1, -1):
        some = np.uint64(0)
        for w in range(words):
            some |= left[w] & planes[p, w]
        if some:
            for w in range(words):
                left[w] &= planes[p, w]
    w = 0
    while not left[w]:
        w += 1
    return _WORD * w + _trailing_zeros(left[w])  # type: ignore[call-arg]


@entry(given("u2", 2), given("b1", 2), given("i8", 1), filled("u8", 4))
def _set_bits(codes, units, begin, bits):  # type: ignore[no-untyped-def]
    done = 0
    for b in range(len(begin)):
        for j in range(len(codes)):
            bit = np.uint64(1) << np.uint64(j % _WORD)
            for i in range(done - begin[b], BLOCK):
                v = begin[b] + i
                code = codes[j, v]
                if units[v, code]:
                    bits[b, code, i, j // _WORD] |= bit
        done = begin[b] + BLOCK


@entry(given("u2", 2), given("u8", 4), given("i8", 1), filled("i4", 1))
def _nearest_in_planes(x, bits, begin, out):  # type: ignore[no-untyped-def]
    n, clusterings = x.shape
    words = bits.shape[3]
    state = np.empty((_STRIP, PLANES, words), dtype=np.uint64)
    row, kept = x.itemsize * clusterings, state.itemsize * PLANES * words
    table = bits.itemsize * bits.shape[1] * BLOCK * words
    for start in range(0, n, _STRIP):
        stop = min(start + _STRIP, n)
        state[:] = 0
        for b in range(len(begin)):
            codes, of_block = x.ctypes.data + x.itemsize * begin[b], bits.ctypes.data + b * table
            for i in range(start, stop):
                mine = state.ctypes.data + (i - start) * kept
                if words == 1:
                    _block_1(codes + i * row, of_block, mine)  # type: ignore[call-arg]
                elif words == 2:
                    _block_2(codes + i * row, of_block, mine)  # type: ignore[call-arg]
                else:
                    _block_4(codes + i * row, of_block, mine)  # type: ignore[call-arg]
        for i in range(start, stop):
            out[i] = _largest(state[i - start])
