"""Nearest centroids in upper layers, found through lists of the centroids that have a code.

In an upper layer, rows and centroids consist of codes: one code for each clustering of the layer below. The
nearest centroid of a row is the one that has the same code as the row in the largest number of clusterings.
For each code there is a list of the centroids that have it.

If a layer has half as many centroids as the layer below, and a clustering uses half of the codes, a list has
a quarter of a centroid on average. Most lists would be empty. So several clusterings of the upper layer are
computed together, and their lists for one code are contiguous in memory. The steps are:

1. Take a strip of some thousand rows. Process one clustering of the layer below after the other, so that the
   lists of this clustering stay in the nearest caches.
2. Append the first sixteen centroids of the list of a row's code to a buffer of the row. The number is always
   sixteen, so that no branch depends on the length of the list.
3. Count how often each centroid is in the buffer of a row. The most frequent centroid is the nearest one.
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

# Number of rows that are processed together (a strip). A list has the centroids with one code. With more
# rows, each list is read from the cache more often, but the buffers of the rows take more cache lines. A
# strip has half as many rows if the lists of one clustering of the layer below have at most _FEW_MEMBERS
# centroids in total.
_STRIP, _FEW_MEMBERS = 2048, 2**15
# Number of clusterings of the layer below whose codes are transposed together. Their codes of one row fill a
# cache line, if a code has two bytes.
_TRANSPOSED = 32
# Number of centroids that are copied at a time from a list of the centroids with one code.
_COPIED = 16
# Number of counters (one per centroid) whose maximum is found together by vector instructions; number of
# adjacent counters that are set to 0 in the time that one counter at a random place takes.
_VECTOR_COUNTERS, _CLEARED_TOGETHER = 128, 16
# The buffer of a row lists, for each of its codes, the centroids with the same code. It has room for twice
# the number of centroids that equally frequent codes give, but for at most this many per code and clustering.
# Rows with more centroids are counted without a buffer.
_MAX_MEMBERS = 8
# Number of rows, and of columns, of the square matrix of codes that is transposed in registers at a time.
_LANES = 8


@dataclass(frozen=True)
class PackedLists:
    """Lists of the centroids of some clusterings of an upper layer, by their codes in the layer below."""

    # uint16 or uint32 (V, k below + 1), for V clusterings of "k below" centroids in the layer below: index in
    # ``members`` at which the list of each code starts
    start: np.ndarray
    # uint16 or uint32 (V, sets k + 16): for each of the V clusterings of the layer below, the lists of all
    # codes one after the other. A centroid is stored as ``clustering << shift | centroid``. It is missing if
    # its clustering does not use the one-hot unit of the code.
    members: np.ndarray
    sets: int  # number of clusterings of the upper layer
    k: int  # number of centroids of each clustering of the upper layer
    shift: int  # number of bits of ``members`` that hold the number of the centroid


def make_lists(codes: np.ndarray, units: np.ndarray) -> PackedLists:
    """Return lists of the centroids by their codes in the layer below, for :func:`nearest_codes`.

    ``codes`` (clusterings, k, V) are the codes of the centroids, for the V clusterings of the layer below.
    ``units``, bool (clusterings, V, k below), is true for the codes that each clustering uses.
    """
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
    """Return the centroid that shares most codes with each row, in each clustering, int32 (rows, sets)."""
    out = np.empty((len(x), lists.sets), dtype=np.int32)
    x = np.ascontiguousarray(x, dtype=lists.start.dtype)
    body = _count_short if x.itemsize == 2 else _count_long
    body(x, lists.start, lists.members, lists.k, lists.shift, out)
    return out


@intrinsic
def _transpose_tile(typingctx, source, down, target, across, like):  # type: ignore[no-untyped-def]
    """Transpose 8 x 8 codes from the address ``source`` to the address ``target``.

    ``down`` and ``across`` are the bytes between two rows of the source and of the target. ``like`` is an
    array of the type of the codes.
    """
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
    """Copy sixteen centroids of a list to the address ``target``; ``like`` is an array of their type."""
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
    """Transpose ``x[first:last, begin:end]`` into ``turned``, (columns, rows)."""
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
    """Write the lists of all codes to ``members``, and the index at which each list starts to ``start``."""
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
            # Write each centroid, and overwrite it by the next centroid if the clustering does not use its
            # code. The processor would often mispredict a branch here.
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
    """Append the centroids with a row's code to the buffer of the row; mark rows without room in ``over``.

    ``codes`` are those of ``n`` rows in one clustering of the layer below. ``ends`` are the addresses at
    which the used parts of the buffers end. The buffers start at the address ``base``, have ``row`` bytes,
    and may use ``room`` bytes.
    """
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
def _find_most_frequent(k: int, shift: int, shared: np.ndarray, out: np.ndarray) -> None:
    """Write the centroid of the first largest counter in ``shared`` for each clustering to ``out``."""
    for s in range(len(out)):
        # Find the first range of counters that has the maximum, by a few vector operations per range.
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


def _count_shared_units(
    x: np.ndarray, start: np.ndarray, members: np.ndarray, k: int, shift: int, out: np.ndarray
) -> None:
    n, clusterings = x.shape
    sets, below = out.shape[1], start.shape[1] - 1
    room = sets * min(2 * clusterings * k // below, _MAX_MEMBERS * clusterings) + 64
    # The buffer of a row has room for ``room`` centroids, and for the sixteen centroids that are copied for
    # each of _TRANSPOSED clusterings before the end is checked. A buffer has an odd number of cache lines, so
    # that the ends of the buffers are spread over all sets of the cache.
    line = 64 // members.itemsize
    width = (room + _COPIED * (_TRANSPOSED + 1) + line - 1) // line | 1
    strip = _STRIP if sets * k > _FEW_MEMBERS else _STRIP // 2
    met = empty((strip, width * line), members.dtype)
    base, row, room_bytes = met.ctypes.data, 64 * width, room * members.itemsize
    turned = empty((_TRANSPOSED, strip + line), x.dtype)
    ends, over = empty(strip, np.int64), empty(strip, np.bool_)
    shared, one = zeros(sets << shift, members.dtype), members.dtype.type(1)
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
            codes, mine, length = x[first + i], met[i], (ends[i] - (base + i * row)) // members.itemsize
            if over[i]:  # the buffer is incomplete, so count directly from the lists
                for v in range(clusterings):
                    for m in range(start[v, codes[v]], start[v, codes[v] + 1]):
                        shared[members[v, m]] += one
            else:
                for m in range(np.uint64(length)):
                    shared[np.uint64(mine[m])] += one
            _find_most_frequent(k, shift, shared, out[first + i])
            if over[i] or length * _CLEARED_TOGETHER >= len(shared):
                shared[:] = 0
            else:
                for m in range(np.uint64(length)):
                    shared[np.uint64(mine[m])] = 0


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
