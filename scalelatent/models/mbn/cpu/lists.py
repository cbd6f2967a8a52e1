"""Shared units counted through lists: for a clustering of the layer below and a code, the centroids that have
it.

A list holds a quarter of a centroid on average where a layer has half as many centroids as the one below and
looks at half of its units, so a row meets a hundred centroids, whatever k is. Most lists are empty: one bit a
code says so. A strip of rows is looked up clustering after clustering, whose tables stay in the first-level
cache; rows with a list copy its first four centroids behind those that they have met, all four whatever the
list's length, so that no branch depends on it. At the end the centroids that each row has met are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scalelatent._numba import entry, filled, given, kernel
from scalelatent.models.tiles import at

# Rows of a strip: the lines that they write to stay in the caches nearest to the core.
_STRIP = 512
# Clusterings that are transposed at a time: a line of codes.
_GROUP = 32
_WORD = 64
_COPIED = 4
# A row has room for twice what it meets if codes are even, up to so many a clustering; a row that meets more
# is counted apart.
_MAX_ROOM = 8
_LANES = 8
_I32, _I64 = ir.IntType(32), ir.IntType(64)


@dataclass(frozen=True)
class Lists:
    """Centroids of one upper clustering by what they share.

    Attributes
    ----------
    some : ndarray of uint64, shape (V, words)
        For each code whether its list has any centroid.
    start : ndarray of uint16 or uint32, shape (V, k below + 1)
        Where the list of each code begins.
    members : ndarray of uint16 or uint32, shape (V, k + 4)
        The lists, one after the other, each in order; none where the clustering does not look at the unit.
    k : int
    """

    some: np.ndarray
    start: np.ndarray
    members: np.ndarray
    k: int


def make_lists(codes: np.ndarray, units: np.ndarray) -> Lists:
    """Lists for :func:`nearest_in_lists`, see :func:`..reference.make_lists`.

    Examples
    --------
    >>> lists = make_lists(np.array([[0, 1], [1, 1]]), np.ones((2, 2), dtype=bool))
    >>> lists.start.tolist(), lists.members[:, :2].tolist()
    ([[0, 1, 2], [0, 0, 2]], [[0, 1], [0, 1]])
    """
    (k, v), below = codes.shape, units.shape[1]
    short = max(k, v, below) < 2**16
    dtype = np.uint16 if short else np.uint32
    some = np.zeros((v, -(-below // _WORD)), dtype=np.uint64)
    start = np.zeros((v, below + 1), dtype=dtype)
    members = np.zeros((v, k + _COPIED), dtype=dtype)
    codes = np.ascontiguousarray(codes, dtype=dtype)
    (_list_short if short else _list_long)(codes, np.ascontiguousarray(units), some, start, members)
    return Lists(some, start, members, k)


def nearest_in_lists(x: np.ndarray, lists: Lists) -> np.ndarray:
    """Index of the centroid that shares most units with each row, see :func:`..reference.nearest_codes`.

    Examples
    --------
    >>> lists = make_lists(np.array([[0, 1], [1, 1]]), np.ones((2, 2), dtype=bool))
    >>> nearest_in_lists(np.array([[1, 1], [0, 0], [1, 0]], dtype=np.uint16), lists).tolist()
    [1, 0, 1]
    """
    out = np.empty(len(x), dtype=np.int32)
    x = np.ascontiguousarray(x, dtype=lists.start.dtype)
    body = _count_short if x.itemsize == 2 else _count_long
    body(x, lists.some, lists.start, lists.members, lists.k, out)
    return out


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


@intrinsic
def _turn(typingctx, source, down, target, across, like):  # type: ignore[no-untyped-def]
    """8 x 8 numbers of the type of the array ``like`` transposed; addresses and byte steps, all int64."""
    size = like.dtype.bitwidth // 8
    kind = ir.VectorType(ir.IntType(8 * size), _LANES)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        source, down, target, across, _ = args
        place = lambda base, step, i: at(builder, base, builder.mul(step, _I64(i)), kind)  # noqa: E731
        rows = [builder.load(place(source, down, i), align=size) for i in range(_LANES)]
        low, high = [0, 8, 1, 9, 2, 10, 3, 11], [4, 12, 5, 13, 6, 14, 7, 15]
        # Three perfect shuffles of the 64 numbers.
        for _ in range(3):
            pairs = [(rows[i // 2], rows[i // 2 + 4]) for i in range(_LANES)]
            rows = [_shuffle(builder, *pair, high if i % 2 else low) for i, pair in enumerate(pairs)]
        for i, row in enumerate(rows):
            builder.store(row, place(target, across, i), align=size)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, like), codegen


@intrinsic
def _copy_four(typingctx, target, source, like):  # type: ignore[no-untyped-def]
    """Four numbers of the type of the array ``like``; addresses, int64."""
    size = like.dtype.bitwidth // 8
    kind = ir.VectorType(ir.IntType(8 * size), _COPIED)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        four = builder.load(at(builder, args[1], _I64(0), kind), align=size)
        builder.store(four, at(builder, args[0], _I64(0), kind), align=size)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, like), codegen


@kernel
def _list(codes, units, some, start, members):  # type: ignore[no-untyped-def]
    k, below = len(codes), units.shape[1]
    mine = np.empty(k, dtype=codes.dtype)
    place = np.empty(below + 1, dtype=np.int64)
    for v in range(codes.shape[1]):
        place[:] = 0
        for j in range(k):
            code = codes[j, v]
            mine[j] = code
            place[code + 1] += units[v, code]
        for code in range(below):
            some[v, code // _WORD] |= np.uint64(place[code + 1] > 0) << np.uint64(code % _WORD)
            place[code + 1] += place[code]
            start[v, code + 1] = place[code + 1]
        for j in range(k):
            code = mine[j]
            if units[v, code]:
                members[v, place[code]] = j
                place[code] += 1


@kernel
def _transpose(x, first, last, begin, end, turned):  # type: ignore[no-untyped-def]
    """Rows first to last of clusterings begin to end as (clusterings, rows)."""
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


@kernel
def _find(codes, n, some, found):  # type: ignore[no-untyped-def]
    """How many of n rows have a list; row and code of each go to ``found``."""
    count, one, low = np.uint64(0), np.uint64(1), np.uint64(_WORD - 1)
    for i in range(np.uint64(n)):
        code = np.uint64(codes[i])
        found[count] = (i << np.uint64(32)) | code
        count += (some[code >> np.uint64(6)] >> (code & low)) & one
    return count


@kernel
def _meet(found, count, start, members, ends, base, row, room, over):  # type: ignore[no-untyped-def]
    """The rows found write the centroids of their lists where those that they have met end."""
    size, lists = members.itemsize, members.ctypes.data
    for f in range(np.uint64(count)):
        i, code = found[f] >> np.uint64(32), found[f] & np.uint64(0xFFFFFFFF)
        a, b = np.int64(start[code]), np.int64(start[code + np.uint64(1)])
        end = ends[i]
        ends[i] = end + size * (b - a)
        _copy_four(end, lists + size * a, members)  # type: ignore[call-arg]
        if b - a > _COPIED:
            begin = base + np.int64(i) * row
            if ends[i] - begin > room:
                over[i], ends[i] = True, begin
            else:
                for more in range(_COPIED, b - a, _COPIED):
                    _copy_four(end + size * more, lists + size * (a + more), members)  # type: ignore[call-arg]


@kernel
def _most(met, length, shared):  # type: ignore[no-untyped-def]
    """The centroid met most often, the lowest of equals; 0 where none is met. ``shared`` is left as zeros."""
    # Count and index in one number, below 2^48; in float64, because the compiler makes a branch of the
    # maximum of integers.
    low = np.int64(0xFFFFFFFF)
    best, one = np.float64(low), shared.dtype.type(1)
    for m in range(np.uint64(length)):
        j = np.uint64(met[m])
        shared[j] += one
        key = np.float64((np.int64(shared[j]) << 32) | (low - np.int64(j)))
        best = key if key > best else best
    for m in range(np.uint64(length)):
        shared[np.uint64(met[m])] = 0
    return low - (np.int64(best) & low)


@kernel
def _most_of_all(codes, start, members, shared):  # type: ignore[no-untyped-def]
    for v in range(len(codes)):
        for m in range(start[v, codes[v]], start[v, codes[v] + 1]):
            shared[members[v, m]] += 1
    best = np.argmax(shared)
    shared[:] = 0
    return best


@kernel
def _count(x, some, start, members, k, out):  # type: ignore[no-untyped-def]
    n, clusterings = x.shape
    room = min(2 * clusterings * k // (start.shape[1] - 1), _MAX_ROOM * clusterings) + _WORD
    # Between two looks at its end a row writes four numbers a clustering. Rows are of an odd number of lines,
    # lest their ends meet in few sets of the cache.
    line = 64 // members.itemsize
    width = (room + _COPIED * (_GROUP + 1) + line - 1) // line | 1
    met = np.empty((_STRIP, width * line), dtype=members.dtype)
    base, row, room_bytes = met.ctypes.data, 64 * width, room * members.itemsize
    turned = np.empty((_GROUP, _STRIP + line), dtype=x.dtype)
    ends, found = np.empty(_STRIP, dtype=np.int64), np.empty(_STRIP + 1, dtype=np.uint64)
    over, shared = np.empty(_STRIP, dtype=np.bool_), np.zeros(k, dtype=members.dtype)
    for first in range(0, n, _STRIP):
        last = min(first + _STRIP, n)
        for i in range(last - first):
            ends[i], over[i] = base + i * row, False
        for begin in range(0, clusterings, _GROUP):
            end = min(begin + _GROUP, clusterings)
            _transpose(x, first, last, begin, end, turned)
            for v in range(begin, end):
                count = _find(turned[v - begin], last - first, some[v], found)
                _meet(found, count, start[v], members[v], ends, base, row, room_bytes, over)
            for i in range(last - first):
                if ends[i] - (base + i * row) > room_bytes:
                    over[i], ends[i] = True, base + i * row
        for i in range(last - first):
            if over[i]:
                out[first + i] = _most_of_all(x[first + i], start, members, shared)
            else:
                length = (ends[i] - (base + i * row)) // members.itemsize
                out[first + i] = _most(met[i], length, shared)


@entry(given("u2", 2), given("b1", 2), filled("u8", 2), filled("u2", 2), filled("u2", 2))
def _list_short(codes, units, some, start, members):  # type: ignore[no-untyped-def]
    _list(codes, units, some, start, members)


@entry(given("u4", 2), given("b1", 2), filled("u8", 2), filled("u4", 2), filled("u4", 2))
def _list_long(codes, units, some, start, members):  # type: ignore[no-untyped-def]
    _list(codes, units, some, start, members)


@entry(given("u2", 2), given("u8", 2), given("u2", 2), given("u2", 2), types.int64, filled("i4", 1))
def _count_short(x, some, start, members, k, out):  # type: ignore[no-untyped-def]
    _count(x, some, start, members, k, out)


@entry(given("u4", 2), given("u8", 2), given("u4", 2), given("u4", 2), types.int64, filled("i4", 1))
def _count_long(x, some, start, members, k, out):  # type: ignore[no-untyped-def]
    _count(x, some, start, members, k, out)
