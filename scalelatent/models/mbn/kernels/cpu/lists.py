"""Shared units counted through lists: for a clustering of the layer below and a code, the centroids that have
it.

A list holds a quarter of a centroid on average where a layer has half as many centroids as the one below and
looks at half of its units: to look up one clustering's lists at a time would be to find most of them empty.
So several clusterings are looked up at once. Their lists of a code lie one after the other, and one look-up
copies the first sixteen numbers of them behind those that the row has met, all sixteen whatever there are,
so that no branch depends on it. A strip of rows is looked up clustering below after clustering below, whose
tables stay in the caches nearest to the core; at the end the centroids that each row has met are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scalelatent.kernels.jit import entry, filled, given, part
from scalelatent.kernels.memory import empty, zeros
from scalelatent.kernels.vectors import I64, Vectors

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.typing.templates import Signature

# Rows of a strip: the more, the more often a table is used while it is near; the lines that they write to
# should stay near too.
_STRIP = 1024
# Clusterings below that are transposed at a time: a line of codes.
_GROUP = 32
_COPIED = 16
# Counters whose largest is found at once; so many are cleared in the time of one by itself.
_RUN, _CLEARED = 128, 16
# A row has room for twice what it meets if codes are even, up to so many a look-up; a row that meets more is
# counted apart.
_MAX_ROOM = 8
_LANES = 8


@dataclass(frozen=True)
class PackedLists:
    """Centroids of some upper clusterings by what they share."""

    # uint16 or uint32 (V, k below + 1): where the lists of each code begin
    start: np.ndarray
    # uint16 or uint32 (V, sets k + 16): the lists, one after the other, in the order of
    # clusterings and centroids; behind them what belongs to units that its clustering does not look at. A
    # number is ``clustering << shift | centroid``
    members: np.ndarray
    # sets, k, shift: Upper clusterings, and centroids of each; the latter take so many bits
    sets: int
    k: int
    shift: int


def make_lists(codes: np.ndarray, units: np.ndarray) -> PackedLists:
    """Lists for :func:`nearest_codes`, see :func:`..reference.make_lists`."""
    sets, k, v = codes.shape
    below, shift = units.shape[2], max(_RUN.bit_length() - 1, (k - 1).bit_length())
    short = max(sets << shift, sets * k + 1, v + 1, below + 1) <= 2**16
    dtype = np.uint16 if short else np.uint32
    start = np.zeros((v, below + 1), dtype=dtype)
    members = np.zeros((v, sets * k + _COPIED), dtype=dtype)
    codes = np.ascontiguousarray(codes, dtype=dtype)
    (_list_short if short else _list_long)(codes, np.ascontiguousarray(units), shift, start, members)
    return PackedLists(start, members, sets, k, shift)


def nearest_codes(x: np.ndarray, lists: PackedLists) -> np.ndarray:
    """Of each clustering the index of the centroid that shares most units with each row, see
    :func:`..reference.nearest_codes`.
    """
    out = np.empty((len(x), lists.sets), dtype=np.int32)
    x = np.ascontiguousarray(x, dtype=lists.start.dtype)
    body = _count_short if x.itemsize == 2 else _count_long
    body(x, lists.start, lists.members, lists.k, lists.shift, out)
    return out


@intrinsic
def _turn(typingctx, source, down, target, across, like):  # type: ignore[no-untyped-def]
    """8 x 8 numbers of the type of the array ``like`` transposed; addresses and byte steps, all int64."""
    kind = ir.VectorType(ir.IntType(like.dtype.bitwidth), _LANES)

    def append(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        source, down, target, across, _ = args
        v = Vectors(builder, _LANES)
        rows = [v.load(source, builder.mul(down, I64(i)), kind) for i in range(_LANES)]
        low, high = [0, 8, 1, 9, 2, 10, 3, 11], [4, 12, 5, 13, 6, 14, 7, 15]
        # Three perfect shuffles of the 64 numbers.
        for _ in range(3):
            pairs = [(rows[i // 2], rows[i // 2 + 4]) for i in range(_LANES)]
            rows = [v.shuffle(*pair, high if i % 2 else low) for i, pair in enumerate(pairs)]
        for i, row in enumerate(rows):
            v.store(row, target, builder.mul(across, I64(i)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, like), append


@intrinsic
def _copy(typingctx, target, source, like):  # type: ignore[no-untyped-def]
    """Sixteen numbers of the type of the array ``like``; addresses, int64."""
    kind = ir.VectorType(ir.IntType(like.dtype.bitwidth), _COPIED)

    def append(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        v = Vectors(builder)
        v.store(v.load(args[1], 0, kind), args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, like), append


@part
def _transpose(x: np.ndarray, first: int, last: int, begin: int, end: int, turned: np.ndarray) -> None:
    """Rows first to last of columns begin to end as (columns, rows)."""
    size = x.itemsize
    down, across = size * x.shape[1], size * turned.shape[1]
    rows, columns = first + (last - first) // _LANES * _LANES, begin + (end - begin) // _LANES * _LANES
    for i in range(first, rows, _LANES):
        for v in range(begin, columns, _LANES):
            source = x.ctypes.data + i * down + v * size
            target = turned.ctypes.data + (v - begin) * across + (i - first) * size
            _turn(source, down, target, across, x)  # type: ignore[call-arg]
    for i in range(first, last):
        for v in range(begin if i >= rows else columns, end):
            turned[v - begin, i - first] = x[i, v]


def _list(codes: np.ndarray, units: np.ndarray, shift: int, start: np.ndarray, members: np.ndarray) -> None:
    sets, k, clusterings = codes.shape
    below = units.shape[2]
    flat = codes.reshape(sets * k, clusterings)
    # An odd number of lines, lest what is written in one go meets in few sets of the cache.
    turned = empty((_GROUP, (sets * k // 64 * 2 + 3) * 32), codes.dtype)
    place = empty(below + 2, np.int64)
    for begin in range(0, clusterings, _GROUP):
        end = min(begin + _GROUP, clusterings)
        _transpose(flat, np.int64(0), sets * k, begin, end, turned)
        for v in range(begin, end):
            mine = turned[v - begin]
            place[:] = 0
            for s in range(sets):
                seen = units[s, v]
                for j in range(s * k, s * k + k):
                    # Behind the last code lies what the clustering does not look at.
                    code = mine[j] if seen[mine[j]] else below
                    mine[j] = code
                    place[code + 1] += 1
            for code in range(below):
                place[code + 1] += place[code]
                start[v, code + 1] = place[code + 1]
            for s in range(sets):
                for j in range(k):
                    # What is not read goes behind the last list: a branch would be mispredicted.
                    code = mine[s * k + j]
                    members[v, place[code]] = s << shift | j
                    place[code] += 1


@part
def _meet(
    codes: np.ndarray, n: int, start: np.ndarray, members: np.ndarray, ends: np.ndarray, base: int, row: int,
    room: int, over: np.ndarray,
) -> None:  # fmt: skip
    """n rows write the centroids of their codes' lists where those that they have met end."""
    size, lists, one = members.itemsize, members.ctypes.data, np.uint64(1)
    for i in range(np.uint64(n)):
        code = np.uint64(codes[i])
        a, b = np.int64(start[code]), np.int64(start[code + one])
        end = ends[i]
        ends[i] = end + size * (b - a)
        _copy(end, lists + size * a, members)  # type: ignore[call-arg]
        if b - a > _COPIED:
            begin = base + np.int64(i) * row
            if ends[i] - begin > room:
                over[i], ends[i] = True, begin
            else:
                for more in range(_COPIED, b - a, _COPIED):
                    _copy(end + size * more, lists + size * (a + more), members)  # type: ignore[call-arg]


@part
def _most(met: np.ndarray, length: int, k: int, shift: int, shared: np.ndarray, out: np.ndarray) -> None:
    """Of each clustering the centroid met most often, the lowest of equals. ``shared`` is left as zeros."""
    one = shared.dtype.type(1)
    for m in range(np.uint64(length)):
        shared[np.uint64(met[m])] += one
    for s in range(len(out)):
        # Runs of counters first: their maximum is a matter of a few vectors.
        begin = s << shift
        most, at = shared[begin], begin
        for first in range(begin, begin + k, _RUN):
            run = shared[first : first + _RUN]
            here = run[0]
            for j in range(_RUN):
                here = run[j] if run[j] > here else here
            if here > most:
                most, at = here, first
        while shared[at] != most:
            at += 1
        out[s] = at - begin
    if length * _CLEARED < len(shared):
        for m in range(np.uint64(length)):
            shared[np.uint64(met[m])] = 0
    else:
        shared[:] = 0


@part
def _most_of_all(
    codes: np.ndarray, start: np.ndarray, members: np.ndarray, k: int, shift: int, shared: np.ndarray,
    out: np.ndarray,
) -> None:  # fmt: skip
    for v in range(len(codes)):
        for m in range(start[v, codes[v]], start[v, codes[v] + 1]):
            shared[members[v, m]] += 1
    for s in range(len(out)):
        begin = at = s << shift
        for j in range(begin, begin + k):
            at = j if shared[j] > shared[at] else at
        out[s] = at - begin
    shared[:] = 0


def _count(
    x: np.ndarray, start: np.ndarray, members: np.ndarray, k: int, shift: int, out: np.ndarray
) -> None:
    n, clusterings = x.shape
    sets, below = out.shape[1], start.shape[1] - 1
    room = sets * min(2 * clusterings * k // below, _MAX_ROOM * clusterings) + 64
    # Between two looks at its end a row writes sixteen numbers a clustering. Rows are of an odd number of
    # lines, lest their ends meet in few sets of the cache.
    line = 64 // members.itemsize
    width = (room + _COPIED * (_GROUP + 1) + line - 1) // line | 1
    met = empty((_STRIP, width * line), members.dtype)
    base, row, room_bytes = met.ctypes.data, 64 * width, room * members.itemsize
    turned = empty((_GROUP, _STRIP + line), x.dtype)
    ends, over = empty(_STRIP, np.int64), empty(_STRIP, np.bool_)
    shared = zeros(sets << shift, members.dtype)
    for first in range(0, n, _STRIP):
        last = min(first + _STRIP, n)
        for i in range(last - first):
            ends[i], over[i] = base + i * row, False
        for begin in range(0, clusterings, _GROUP):
            end = min(begin + _GROUP, clusterings)
            _transpose(x, first, last, begin, end, turned)
            for v in range(begin, end):
                lists = (start[v], members[v])
                _meet(turned[v - begin], last - first, *lists, ends, base, row, room_bytes, over)
            for i in range(last - first):
                if ends[i] - (base + i * row) > room_bytes:
                    over[i], ends[i] = True, base + i * row
        for i in range(last - first):
            if over[i]:
                _most_of_all(x[first + i], start, members, k, shift, shared, out[first + i])
            else:
                length = (ends[i] - (base + i * row)) // members.itemsize
                _most(met[i], length, k, shift, shared, out[first + i])


_list_short, _list_long = (
    entry(given(code, 3), given("b1", 3), types.int64, filled(code, 2), filled(code, 2))(_list)
    for code in ("u2", "u4")
)
_count_short, _count_long = (
    entry(*[given(code, 2)] * 3, types.int64, types.int64, filled("i4", 2))(_count) for code in ("u2", "u4")
)
