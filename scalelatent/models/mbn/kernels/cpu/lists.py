"""Nearest centroids of rows in upper layers, which are those that share most codes with a row.

In an upper layer, rows and centroids consist of codes: the numbers of their nearest centroids in each
clustering of the layer below. For each code there is a list of the centroids with this code. A list has only
a quarter of a centroid on average if a layer has half as many centroids as the layer below, and a clustering
uses half of the codes. So several clusterings of the upper layer are computed together, and their lists for
one code are contiguous in memory. The steps are:

1. Take some thousand rows. Process one clustering of the layer below after the other, so that the lists of
   this clustering stay in the nearest caches.
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

# Number of rows that are processed together; half of it if the clusterings that are computed together have at
# most 2**15 centroids. With more rows, the lists of centroids are read from memory less often, but the
# buffers of the rows do not fit the caches.
_STRIP_ROWS, _FEW_CENTROIDS = 2048, 2**15
# Number of columns of a matrix of codes that are transposed together: 32 two-byte codes fill a cache line.
_TRANSPOSED_TOGETHER = 32
# Number of centroids that are copied at a time from the list of the centroids with one code.
_COPIED_MEMBERS = 16
# Number of counters (one per centroid) whose maximum is found together by vector instructions; number of
# adjacent counters that are set to 0 in the time that one counter at a random place takes.
_VECTOR_COUNTERS, _CLEARED_TOGETHER = 128, 16
# Upper bound of the size of a row's buffer, in centroids per code of the row and clustering of the upper
# layer. The buffer contains the centroids that share a code with the row. A row with more such centroids is
# counted without a buffer, which takes longer.
_MAX_MEMBERS = 8
# Number of rows, and of columns, of the square matrix of codes that is transposed in registers at a time.
_SIDE = 8


@dataclass(frozen=True)
class PackedLists:
    """For each code of the layer below, the centroids of some upper-layer clusterings that have this code.

    A code is the number of a nearest centroid in one of V clusterings of the layer below.
    """

    start: np.ndarray  # uint16 or uint32 (V, codes + 1): first index of each code in ``members``
    # uint16 or uint32 (V, centroids of all clusterings + 16): the centroids with the first code, with the
    # second code, …, as ``clustering << shift | centroid``, without codes that their clustering does not use
    members: np.ndarray
    sets: int  # number of clusterings of the upper layer
    k: int  # number of centroids of each clustering of the upper layer
    shift: int  # number of low bits of ``members`` that contain the number of the centroid


def make_lists(codes: np.ndarray, units: np.ndarray) -> PackedLists:
    """Return the centroids of an upper layer, sorted by their codes in each clustering of the layer below.

    ``codes`` (clusterings, k, V) are the numbers of the nearest centroids of the upper layer's centroids in V
    clusterings below. ``units``, bool (clusterings, V, codes), is true for the codes that a clustering uses.
    """
    sets, k, v = codes.shape
    below, shift = units.shape[2], max(_VECTOR_COUNTERS.bit_length() - 1, (k - 1).bit_length())
    short = max(sets << shift, sets * k + 1, v + 1, below + 1) <= 2**16
    dtype = np.uint16 if short else np.uint32
    start = np.zeros((v, below + 1), dtype=dtype)
    members = np.zeros((v, sets * k + _COPIED_MEMBERS), dtype=dtype)
    codes = np.ascontiguousarray(codes, dtype=dtype)
    (_write_uint16 if short else _write_uint32)(codes, np.ascontiguousarray(units), shift, start, members)
    return PackedLists(start, members, sets, k, shift)


def nearest_codes(x: np.ndarray, lists: PackedLists) -> np.ndarray:
    """Return the centroid that shares most codes with each row ``x``, int32 (rows, clusterings).

    The codes of a row are the numbers of its nearest centroids in the layer below.
    """
    out = np.empty((len(x), lists.sets), dtype=np.int32)
    x = np.ascontiguousarray(x, dtype=lists.start.dtype)
    body = _count_uint16 if x.itemsize == 2 else _count_uint32
    body(x, lists.start, lists.members, lists.k, lists.shift, out)
    return out


@intrinsic
def _transpose_square(typingctx, source, source_step, target, target_step, example):  # type: ignore[no-untyped-def]
    """Transpose an 8 x 8 matrix from the address ``source`` to the address ``target``.

    ``source_step`` and ``target_step`` are the bytes between two rows of the source and of the target.
    ``example`` is any array with the type of the matrix.
    """
    kind = ir.VectorType(ir.IntType(example.dtype.bitwidth), _SIDE)

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        source, source_step, target, target_step, _ = args
        v = Vectors(builder, _SIDE)
        rows = [v.load(source, builder.mul(source_step, I64(i)), kind) for i in range(_SIDE)]
        low, high = [0, 8, 1, 9, 2, 10, 3, 11], [4, 12, 5, 13, 6, 14, 7, 15]
        # Interleaving the two halves of the 64 numbers three times transposes the matrix.
        for _ in range(3):
            pairs = [(rows[i // 2], rows[i // 2 + 4]) for i in range(_SIDE)]
            rows = [v.shuffle(*pair, high if i % 2 else low) for i, pair in enumerate(pairs)]
        for i, row in enumerate(rows):
            v.store(row, target, builder.mul(target_step, I64(i)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, example), generate


@intrinsic
def _copy_members(typingctx, target, source, example):  # type: ignore[no-untyped-def]
    """Copy sixteen numbers from the address ``source`` to ``target``; ``example`` has the same type."""
    kind = ir.VectorType(ir.IntType(example.dtype.bitwidth), _COPIED_MEMBERS)

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        v = Vectors(builder)
        v.store(v.load(args[1], 0, kind), args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, example), generate


@subkernel
def _transpose(x: np.ndarray, first: int, last: int, begin: int, end: int, transposed: np.ndarray) -> None:
    """Transpose ``x[first:last, begin:end]`` into ``transposed``, (columns, rows)."""
    size = x.itemsize
    source_step, target_step = size * x.shape[1], size * transposed.shape[1]
    rows, columns = first + (last - first) // _SIDE * _SIDE, begin + (end - begin) // _SIDE * _SIDE
    for i in range(first, rows, _SIDE):
        for v in range(begin, columns, _SIDE):
            source = x.ctypes.data + i * source_step + v * size
            target = transposed.ctypes.data + (v - begin) * target_step + (i - first) * size
            _transpose_square(source, source_step, target, target_step, x)  # type: ignore[call-arg]
    for i in range(first, last):
        for v in range(begin if i >= rows else columns, end):
            transposed[v - begin, i - first] = x[i, v]


def _write_lists(
    codes: np.ndarray, units: np.ndarray, shift: int, start: np.ndarray, members: np.ndarray
) -> None:
    """Write centroids, sorted by their codes, to ``members``, and the first index of each code to ``start``.

    ``codes`` (clusterings, k, V) are the centroids, and ``units`` (clusterings, V, codes) is true for codes
    that a clustering uses. A centroid is written as ``clustering << shift | centroid``.
    """
    sets, k, clusterings = codes.shape
    below = units.shape[2]
    flat = codes.reshape(sets * k, clusterings)
    # Rows of ``transposed`` have an odd number of cache lines, so that a column uses all sets of the cache.
    transposed = empty((_TRANSPOSED_TOGETHER, (sets * k // 64 * 2 + 3) * 32), codes.dtype)
    place = empty(below + 1, np.int64)
    chosen, numbers = empty(sets * k, codes.dtype), empty(sets * k, codes.dtype)
    for begin in range(0, clusterings, _TRANSPOSED_TOGETHER):
        end = min(begin + _TRANSPOSED_TOGETHER, clusterings)
        _transpose(flat, np.int64(0), sets * k, begin, end, transposed)
        for v in range(begin, end):
            # Write each centroid, and overwrite it by the next one if the clustering does not use its code: a
            # branch would often be mispredicted.
            count = np.uint64(0)
            for s in range(sets):
                used, mine = units[s, v], transposed[v - begin, s * k : s * k + k]
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
    codes: np.ndarray, n: int, start: np.ndarray, members: np.ndarray, ends: np.ndarray, base: int, step: int,
    room: int, full: np.ndarray,
) -> None:  # fmt: skip
    """Append the centroids with the same code as a row to the buffer of the row, for each of ``n`` rows.

    ``codes`` are the rows' codes in one clustering of the layer below. ``ends`` are the addresses after the
    last centroid in each buffer. The buffers start at the address ``base``, one every ``step`` bytes, and
    take up to ``room`` bytes of centroids. ``full`` becomes True for rows with more centroids.
    """
    size, lists, one = members.itemsize, members.ctypes.data, np.uint64(1)
    for i in range(np.uint64(n)):
        code = np.uint64(codes[i])
        a, b = np.int64(start[code]), np.int64(start[code + one])
        end = ends[i]
        ends[i] = end + size * (b - a)
        _copy_members(end, lists + size * a, members)  # type: ignore[call-arg]
        if b - a > _COPIED_MEMBERS:
            begin = base + np.int64(i) * step
            if ends[i] - begin > room:
                full[i], ends[i] = True, begin
            else:
                for more in range(_COPIED_MEMBERS, b - a, _COPIED_MEMBERS):
                    _copy_members(end + size * more, lists + size * (a + more), members)  # type: ignore[call-arg]


@subkernel
def _find_most_frequent(k: int, shift: int, counters: np.ndarray, out: np.ndarray) -> None:
    """Write the centroid with the largest counter in each clustering to ``out``; of equal ones, the first.

    The counters of clustering s start at index ``s << shift``, one per centroid.
    """
    for s in range(len(out)):
        # Find the first range of 128 counters with the maximum, which vector instructions compare fast.
        begin = s << shift
        most, at = counters[begin], begin
        for first in range(begin, begin + k, _VECTOR_COUNTERS):
            run = counters[first : first + _VECTOR_COUNTERS]
            here = run[0]
            for j in range(_VECTOR_COUNTERS):
                here = run[j] if run[j] > here else here
            if here > most:
                most, at = here, first
        while counters[at] != most:
            at += 1
        out[s] = at - begin


def _count_shared_units(
    x: np.ndarray, start: np.ndarray, members: np.ndarray, k: int, shift: int, out: np.ndarray
) -> None:
    n, clusterings = x.shape
    sets, below = out.shape[1], start.shape[1] - 1
    capacity = sets * min(2 * clusterings * k // below, _MAX_MEMBERS * clusterings) + 64
    # A buffer has room for twice as many centroids as equally frequent codes give (up to a limit). Its end is
    # checked only after _TRANSPOSED_TOGETHER codes, so it has room for the centroids that these copy. Its
    # length is an odd number of cache lines (| 1), or the ends of buffers would compete for cache sets.
    line = 64 // members.itemsize
    width = (capacity + _COPIED_MEMBERS * (_TRANSPOSED_TOGETHER + 1) + line - 1) // line | 1
    strip = _STRIP_ROWS if sets * k > _FEW_CENTROIDS else _STRIP_ROWS // 2
    buffers = empty((strip, width * line), members.dtype)
    base, step, room = buffers.ctypes.data, 64 * width, capacity * members.itemsize
    transposed = empty((_TRANSPOSED_TOGETHER, strip + line), x.dtype)
    ends, full = empty(strip, np.int64), empty(strip, np.bool_)
    counters, one = zeros(sets << shift, members.dtype), members.dtype.type(1)
    for first in range(0, n, strip):
        last = min(first + strip, n)
        for i in range(last - first):
            ends[i], full[i] = base + i * step, False
        for begin in range(0, clusterings, _TRANSPOSED_TOGETHER):
            end = min(begin + _TRANSPOSED_TOGETHER, clusterings)
            _transpose(x, first, last, begin, end, transposed)
            for v in range(begin, end):
                lists = (start[v], members[v])
                _append_members(transposed[v - begin], last - first, *lists, ends, base, step, room, full)
            for i in range(last - first):
                if ends[i] - (base + i * step) > room:
                    full[i], ends[i] = True, base + i * step
        for i in range(last - first):
            codes, mine, length = x[first + i], buffers[i], (ends[i] - (base + i * step)) // members.itemsize
            if full[i]:  # the buffer is incomplete, so read the centroids with the row's codes again
                for v in range(clusterings):
                    for m in range(start[v, codes[v]], start[v, codes[v] + 1]):
                        counters[members[v, m]] += one
            else:
                for m in range(np.uint64(length)):
                    counters[np.uint64(mine[m])] += one
            _find_most_frequent(k, shift, counters, out[first + i])
            if full[i] or length * _CLEARED_TOGETHER >= len(counters):
                counters[:] = 0
            else:
                for m in range(np.uint64(length)):
                    counters[np.uint64(mine[m])] = 0


_write_uint16, _write_uint32 = (
    entry(in_array(code, 3), in_array("b1", 3), types.int64, out_array(code, 2), out_array(code, 2))(
        _write_lists
    )
    for code in ("u2", "u4")
)
_count_uint16, _count_uint32 = (
    entry(*[in_array(code, 2)] * 3, types.int64, types.int64, out_array("i4", 2))(_count_shared_units)
    for code in ("u2", "u4")
)
