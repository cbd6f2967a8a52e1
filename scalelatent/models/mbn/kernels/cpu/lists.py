"""Shared units, counted through lists of the centroids that have a code in a clustering of the layer below.

If a layer has half as many centroids as the layer below, and uses half of its units, a list has a quarter of
a centroid on average. Looking up the lists of one clustering would find most of them empty. So several
clusterings are looked up together: their lists of a code are contiguous.

1. Take a strip of rows, and one clustering below after the other, so that its lists stay in the nearest
   caches.
2. Copy the first sixteen members of the list of a row's code behind the members of the row. It is always
   sixteen, so that no branch depends on the length of the list.
3. At the end count the members of each row; the centroid that occurs most often shares most units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.memory import empty, zeros
from scalelatent.kernels.vectors import I64, Vectors

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.typing.templates import Signature

# Number of rows coded together (a strip). More rows reuse a cached list more often, but write to more cache
# lines. A strip is half as long if the lists of a clustering below have at most _FEW_MEMBERS members in all.
_STRIP, _FEW_MEMBERS = 2048, 2**15
# Number of clusterings of the layer below whose codes are transposed together, one cache line of codes.
_TRANSPOSED = 32
# Number of members (centroids) of the list of a code that are copied at a time.
_COPIED = 16
# Number of counters whose maximum is computed with vectors. Clearing this many adjacent counters takes
# as long as clearing a single counter elsewhere.
_VECTOR_COUNTERS, _CLEARED_TOGETHER = 128, 16
# Upper bound of the members (centroids that share a unit with a row) per look-up in the buffer of a row. The
# buffer has room for twice the members of a row with uniform codes; other rows are counted without a buffer.
_MAX_MEMBERS = 8
# Rows and columns of a tile that is transposed in registers.
_LANES = 8


@dataclass(frozen=True)
class PackedLists:
    """Centroids of some clusterings of an upper layer, sorted by the codes of the layer below."""

    # uint16 or uint32 (V, k below + 1): start of the lists of each code
    start: np.ndarray
    # uint16 or uint32 (V, sets k + 16): contiguous lists in the order of clusterings and centroids, without
    # the members of units that their clustering does not use. A member is ``clustering << shift | centroid``
    members: np.ndarray
    sets: int  # number of clusterings of the upper layer
    k: int  # number of centroids of each clustering of the upper layer
    shift: int  # number of bits of the centroid in a member


def make_lists(codes: np.ndarray, units: np.ndarray) -> PackedLists:
    """Sort the centroids by codes for :func:`nearest_codes`, see :func:`..reference.make_lists`."""
    sets, k, v = codes.shape
    below, shift = units.shape[2], max(_VECTOR_COUNTERS.bit_length() - 1, (k - 1).bit_length())
    short = max(sets << shift, sets * k + 1, v + 1, below + 1) <= 2**16
    dtype = np.uint16 if short else np.uint32
    start = np.zeros((v, below + 1), dtype=dtype)
    members = np.zeros((v, sets * k + _COPIED), dtype=dtype)
    codes = np.ascontiguousarray(codes, dtype=dtype)
    (_list_short if short else _list_long)(codes, np.ascontiguousarray(units), shift, start, members)
    return PackedLists(start, members, sets, k, shift)


def nearest_codes(x: np.ndarray, lists: PackedLists) -> np.ndarray:
    """See :func:`..reference.nearest_codes`."""
    out = np.empty((len(x), lists.sets), dtype=np.int32)
    x = np.ascontiguousarray(x, dtype=lists.start.dtype)
    body = _count_short if x.itemsize == 2 else _count_long
    body(x, lists.start, lists.members, lists.k, lists.shift, out)
    return out


@intrinsic
def _transpose_tile(typingctx, source, down, target, across, like):  # type: ignore[no-untyped-def]
    """Transpose 8 x 8 numbers of the type of the array ``like``; addresses and byte steps are int64."""
    kind = ir.VectorType(ir.IntType(like.dtype.bitwidth), _LANES)

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        source, down, target, across, _ = args
        v = Vectors(builder, _LANES)
        rows = [v.load(source, builder.mul(down, I64(i)), kind) for i in range(_LANES)]
        low, high = [0, 8, 1, 9, 2, 10, 3, 11], [4, 12, 5, 13, 6, 14, 7, 15]
        # Interleaving the two halves of the 64 numbers three times transposes the 8 x 8 tile.
        for _ in range(3):
            pairs = [(rows[i // 2], rows[i // 2 + 4]) for i in range(_LANES)]
            rows = [v.shuffle(*pair, high if i % 2 else low) for i, pair in enumerate(pairs)]
        for i, row in enumerate(rows):
            v.store(row, target, builder.mul(across, I64(i)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, like), generate


@intrinsic
def _copy_members(typingctx, target, source, like):  # type: ignore[no-untyped-def]
    """Copy sixteen list members of the type of the array ``like``; ``target``, ``source``: addresses."""
    kind = ir.VectorType(ir.IntType(like.dtype.bitwidth), _COPIED)

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        v = Vectors(builder)
        v.store(v.load(args[1], 0, kind), args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, like), generate


@subkernel
def _transpose(x: np.ndarray, first: int, last: int, begin: int, end: int, turned: np.ndarray) -> None:
    """Transpose rows first to last of columns begin to end into ``turned``, (columns, rows)."""
    size = x.itemsize
    down, across = size * x.shape[1], size * turned.shape[1]
    rows, columns = first + (last - first) // _LANES * _LANES, begin + (end - begin) // _LANES * _LANES
    for i in range(first, rows, _LANES):
        for v in range(begin, columns, _LANES):
            source = x.ctypes.data + i * down + v * size
            target = turned.ctypes.data + (v - begin) * across + (i - first) * size
            _transpose_tile(source, down, target, across, x)  # type: ignore[call-arg]
    for i in range(first, last):
        for v in range(begin if i >= rows else columns, end):
            turned[v - begin, i - first] = x[i, v]


def _write_lists(
    codes: np.ndarray, units: np.ndarray, shift: int, start: np.ndarray, members: np.ndarray
) -> None:
    """Write the lists of all clusterings below to ``start`` and ``members``."""
    sets, k, clusterings = codes.shape
    below = units.shape[2]
    flat = codes.reshape(sets * k, clusterings)
    # Each row of ``turned`` has an odd number of cache lines, so that consecutive writes are spread over all
    # sets of the cache.
    turned = empty((_TRANSPOSED, (sets * k // 64 * 2 + 3) * 32), codes.dtype)
    place = empty(below + 1, np.int64)
    chosen, numbers = empty(sets * k, codes.dtype), empty(sets * k, codes.dtype)
    for begin in range(0, clusterings, _TRANSPOSED):
        end = min(begin + _TRANSPOSED, clusterings)
        _transpose(flat, np.int64(0), sets * k, begin, end, turned)
        for v in range(begin, end):
            # Write each member, and step past it only if its unit is used: a branch would be mispredicted.
            count = np.uint64(0)
            for s in range(sets):
                used, mine = units[s, v], turned[v - begin, s * k : s * k + k]
                for j in range(np.uint64(k)):
                    unit = np.uint64(mine[j])
                    chosen[count], numbers[count] = unit, s << shift | np.int64(j)
                    count += np.uint64(used[unit])
            place[:] = 0
            for i in range(count):
                place[np.uint64(chosen[i]) + np.uint64(1)] += 1
            for code in range(below):
                place[code + 1] += place[code]
                start[v, code + 1] = place[code + 1]
            for i in range(count):
                unit = np.uint64(chosen[i])
                members[v, np.uint64(place[unit])] = numbers[i]
                place[unit] += 1


@subkernel
def _append_members(
    codes: np.ndarray, n: int, start: np.ndarray, members: np.ndarray, ends: np.ndarray, base: int, row: int,
    room: int, over: np.ndarray,
) -> None:  # fmt: skip
    """Append the centroids in the list of each row's code to the members (centroids met) of the row."""
    size, lists, one = members.itemsize, members.ctypes.data, np.uint64(1)
    for i in range(np.uint64(n)):
        code = np.uint64(codes[i])
        a, b = np.int64(start[code]), np.int64(start[code + one])
        end = ends[i]
        ends[i] = end + size * (b - a)
        _copy_members(end, lists + size * a, members)  # type: ignore[call-arg]
        if b - a > _COPIED:
            begin = base + np.int64(i) * row
            if ends[i] - begin > room:
                over[i], ends[i] = True, begin
            else:
                for more in range(_COPIED, b - a, _COPIED):
                    _copy_members(end + size * more, lists + size * (a + more), members)  # type: ignore[call-arg]


@subkernel
def _find_most_frequent(
    met: np.ndarray, length: int, k: int, shift: int, shared: np.ndarray, out: np.ndarray
) -> None:
    """Write the most frequent centroid of each clustering, the lowest of equals; reset ``shared`` to 0."""
    one = shared.dtype.type(1)
    for m in range(np.uint64(length)):
        shared[np.uint64(met[m])] += one
    for s in range(len(out)):
        # Compare runs of counters first, whose maximum takes a few vector operations.
        begin = s << shift
        most, at = shared[begin], begin
        for first in range(begin, begin + k, _VECTOR_COUNTERS):
            run = shared[first : first + _VECTOR_COUNTERS]
            here = run[0]
            for j in range(_VECTOR_COUNTERS):
                here = run[j] if run[j] > here else here
            if here > most:
                most, at = here, first
        while shared[at] != most:
            at += 1
        out[s] = at - begin
    if length * _CLEARED_TOGETHER < len(shared):
        for m in range(np.uint64(length)):
            shared[np.uint64(met[m])] = 0
    else:
        shared[:] = 0


@subkernel
def _count_all_members(
    codes: np.ndarray, start: np.ndarray, members: np.ndarray, k: int, shift: int, shared: np.ndarray,
    out: np.ndarray,
) -> None:  # fmt: skip
    """Count the shared units of a row with more members than there is room for, directly from the lists."""
    for v in range(len(codes)):
        for m in range(start[v, codes[v]], start[v, codes[v] + 1]):
            shared[members[v, m]] += 1
    for s in range(len(out)):
        begin = at = s << shift
        for j in range(begin, begin + k):
            at = j if shared[j] > shared[at] else at
        out[s] = at - begin
    shared[:] = 0


def _count_shared_units(
    x: np.ndarray, start: np.ndarray, members: np.ndarray, k: int, shift: int, out: np.ndarray
) -> None:
    n, clusterings = x.shape
    sets, below = out.shape[1], start.shape[1] - 1
    room = sets * min(2 * clusterings * k // below, _MAX_MEMBERS * clusterings) + 64
    # The buffer of a row has ``room`` numbers, and space for the sixteen numbers that each clustering of a
    # group copies before the end of the row is checked. A buffer has an odd number of cache lines, so that
    # the ends of the rows are spread over all sets of the cache.
    line = 64 // members.itemsize
    width = (room + _COPIED * (_TRANSPOSED + 1) + line - 1) // line | 1
    strip = _STRIP if sets * k > _FEW_MEMBERS else _STRIP // 2
    met = empty((strip, width * line), members.dtype)
    base, row, room_bytes = met.ctypes.data, 64 * width, room * members.itemsize
    turned = empty((_TRANSPOSED, strip + line), x.dtype)
    ends, over = empty(strip, np.int64), empty(strip, np.bool_)
    shared = zeros(sets << shift, members.dtype)
    for first in range(0, n, strip):
        last = min(first + strip, n)
        for i in range(last - first):
            ends[i], over[i] = base + i * row, False
        for begin in range(0, clusterings, _TRANSPOSED):
            end = min(begin + _TRANSPOSED, clusterings)
            _transpose(x, first, last, begin, end, turned)
            for v in range(begin, end):
                lists = (start[v], members[v])
                _append_members(turned[v - begin], last - first, *lists, ends, base, row, room_bytes, over)
            for i in range(last - first):
                if ends[i] - (base + i * row) > room_bytes:
                    over[i], ends[i] = True, base + i * row
        for i in range(last - first):
            if over[i]:
                _count_all_members(x[first + i], start, members, k, shift, shared, out[first + i])
            else:
                length = (ends[i] - (base + i * row)) // members.itemsize
                _find_most_frequent(met[i], length, k, shift, shared, out[first + i])


_list_short, _list_long = (
    entry(in_array(code, 3), in_array("b1", 3), types.int64, out_array(code, 2), out_array(code, 2))(
        _write_lists
    )
    for code in ("u2", "u4")
)
_count_short, _count_long = (
    entry(*[in_array(code, 2)] * 3, types.int64, types.int64, out_array("i4", 2))(_count_shared_units)
    for code in ("u2", "u4")
)
