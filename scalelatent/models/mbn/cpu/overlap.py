"""Nearest centroids of rows of codes: shared units are counted through lists, never by one-hot products.

For a clustering of the layer below and a code, the centroids with this code form a chain; it holds a quarter
of a centroid on average where a layer has half as many centroids as the one below and looks at half of its
units. So a row meets a hundred centroids, whatever k is.

Most codes have no chain, so a bit for each code is looked at first, 64 of them in a word. The place of a
chain is how many chains begin before its word, and a count of bits; so what a row touches is small, and the
loops over clusterings branch on nothing that they load. Whom each row meets is written down, and then
counted, row after row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from scalelatent._numba import entry, filled, given, kernel

# Rows of a strip: what they have written down stays within the reach of the second-level page table.
STRIP = 1024
# Bytes of chains that are looked at at once: half of a second-level cache.
_GROUP_BYTES = 2**18
# Room for so many centroids met in each clustering below, on average; a row that meets more is counted apart.
_ROOM = 2
_WORD = 64
# Centroids that a link of a chain holds itself.
_SHORT, _LONG = 2, 1


@dataclass(frozen=True)
class Chains:
    """Centroids of one upper clustering by what they share: for a clustering below and a code, those that
    have it, in order.

    Attributes
    ----------
    bits : ndarray of uint64, shape (V, words)
        For each code whether there are any; none where the clustering does not look at the unit.
    begun : ndarray of uint32, shape (V, words)
        Chains before those of a word.
    first : ndarray of uint64, shape (chains,)
        Where k < 65536: in the two lowest words of 16 bits the first two centroids, k where there is only
        one; else one centroid in the lower half. In the upper half 1 + the place of the others in their row
        of ``more``, or 0.
    more : ndarray of uint16 or uint32, shape (V, k)
        The other centroids of chains, each chain ended by k.
    """

    bits: np.ndarray
    begun: np.ndarray
    first: np.ndarray
    more: np.ndarray


def make_lists(codes: np.ndarray, units: np.ndarray) -> Chains:
    """Chains for :func:`nearest_codes`, see :func:`..reference.make_lists`.

    Examples
    --------
    >>> lists = make_lists(np.array([[0, 1], [1, 1]]), np.ones((2, 2), dtype=bool))
    >>> [f"{link:x}" for link in lists.first]
    ['20000', '20001', '10000']
    """
    k, v = codes.shape
    bits = np.zeros((v, -(-units.shape[1] // _WORD)), dtype=np.uint64)
    begun = np.empty(bits.shape, dtype=np.uint32)
    short = k < 2**16
    first = np.empty(v * k, dtype=np.uint64)
    more = np.full((v, k), k, dtype=np.uint16 if short else np.uint32)
    codes, units = np.ascontiguousarray(codes, dtype=np.uint32), np.ascontiguousarray(units)
    used = (_chain_short if short else _chain_long)(codes, units, bits, begun, first, more)
    return Chains(bits, begun, first[:used].copy(), more)


def nearest_codes(x: np.ndarray, lists: Chains) -> np.ndarray:
    """Index of the centroid that shares most units with each row, see :func:`..reference.nearest_codes`.

    Examples
    --------
    >>> lists = make_lists(np.array([[0, 1], [1, 1]]), np.ones((2, 2), dtype=bool))
    >>> nearest_codes(np.array([[1, 1], [0, 0], [1, 0]], dtype=np.uint16), lists).tolist()
    [1, 0, 1]
    """
    out = np.empty(len(x), dtype=np.int32)
    wide = x.dtype.itemsize > 2
    body = {
        (False, 2): _count_short_short,
        (False, 4): _count_short_long,
        (True, 2): _count_long_short,
        (True, 4): _count_long_long,
    }[wide, lists.more.dtype.itemsize]
    x = np.ascontiguousarray(x, dtype=np.uint32 if wide else np.uint16)
    body(x, lists.bits, lists.begun, lists.first, lists.more, out)
    return out


@intrinsic
def _ones(typingctx, word):  # type: ignore[no-untyped-def]
    """Number of bits set in a uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.IntType(_WORD)
        count = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(kind, [kind]), f"llvm.ctpop.i{_WORD}"
        )
        return builder.call(count, args)

    return types.uint64(types.uint64), codegen


@kernel
def _chain(codes, units, bits, begun, first, more):  # type: ignore[no-untyped-def]
    """Returns how many chains there are."""
    k, clusterings = codes.shape
    one, chains = np.uint64(1), 0
    inline = _SHORT if more.itemsize == 2 else _LONG
    # Centroids by code, in order; the last place is for those whose unit is not looked at.
    place = np.empty(units.shape[1] + 1, dtype=np.int64)
    order = np.empty(k, dtype=np.int64)
    for v in range(clusterings):
        place[:] = 0
        for j in range(k):
            if units[v, codes[j, v]]:
                place[codes[j, v] + 1] += 1
        for code in range(units.shape[1]):
            place[code + 1] += place[code]
        for j in range(k):
            code = codes[j, v]
            if units[v, code]:
                order[place[code]] = j
                place[code] += 1
        # Now place[code] is where the centroids of a code end.
        start, used = 0, 0
        for code in range(units.shape[1]):
            if code % _WORD == 0:
                begun[v, code // _WORD] = chains
            stop = place[code]
            if stop == start:
                continue
            bits[v, code // _WORD] |= one << np.uint64(code % _WORD)
            link = np.uint64(order[start])
            if inline == _SHORT:
                second = order[start + 1] if stop - start > 1 else k
                link |= np.uint64(second) << np.uint64(16)
            if stop - start > inline:
                link |= np.uint64(used + 1) << np.uint64(32)
                for at in range(start + inline, stop):
                    more[v, used] = order[at]
                    used += 1
                used += 1
            first[chains] = link
            chains += 1
            start = stop
    return chains


@kernel
def _count(x, bits, begun, first, more, out):  # type: ignore[no-untyped-def]
    n, clusterings = x.shape
    met = np.empty((STRIP, _ROOM * clusterings), dtype=more.dtype)
    length = np.empty(STRIP, dtype=np.uint32)
    shared = np.zeros(more.shape[1], dtype=np.uint32)
    chain_bytes = first.itemsize * len(first) // clusterings + 12 * bits.shape[1]
    group = max(1, _GROUP_BYTES // chain_bytes)
    owner, longer = np.empty(group, dtype=np.uint32), np.empty(group, dtype=np.uint64)
    for start in range(0, n, STRIP):
        rows = x[start : min(start + STRIP, n)]
        length[:] = 0
        for v in range(0, clusterings, group):
            stop = min(v + group, clusterings)
            _meet(rows, v, stop, bits, begun, first, more, owner, longer, met, length)
        for i in range(len(rows)):
            if length[i] < met.shape[1]:
                out[start + i] = _most(met[i], length[i], shared)
            else:
                out[start + i] = _most_of_all(rows[i], bits, begun, first, more, shared)


@kernel
def _meet(rows, begin, stop, bits, begun, first, more, owner, longer, met, length):  # type: ignore[no-untyped-def]
    """Each row writes down whom it meets in some clusterings; a full list stays full."""
    # Unsigned numbers, and no slices: numba would check each index for counting from the end, and count
    # references, in loops of a few instructions.
    room, k = np.uint32(met.shape[1]), np.uint32(more.shape[1])
    one, low, half = np.uint64(1), np.uint64(63), np.uint64(32)
    width = np.uint64(8 * more.itemsize)
    mask = (one << width) - one
    for i in range(len(rows)):
        chains = np.uint32(0)
        for v in range(np.uint32(begin), np.uint32(stop)):
            code = np.uint64(rows[i, v])
            owner[chains] = v
            chains = np.uint32(chains + np.uint32((bits[v, code >> np.uint64(6)] >> (code & low)) & one))
        at, long = length[i], np.uint32(0)
        if np.uint32(at + np.uint32(2) * chains) >= room:
            length[i] = room
            continue
        for c in range(chains):
            v = owner[c]
            code = np.uint64(rows[i, v])
            word = code >> np.uint64(6)
            before = bits[v, word] & ((one << (code & low)) - one)
            link = np.uint64(first[begun[v, word] + _ones(before)])  # type: ignore[call-arg]
            met[i, at] = link & mask
            at = np.uint32(at + np.uint32(1))
            if width == np.uint64(16):
                second = np.uint32((link >> width) & mask)
                met[i, at] = second
                at = np.uint32(at + np.uint32(second != k))
            longer[long] = (np.uint64(v) << half) | (link >> half)
            long = np.uint32(long + np.uint32((link >> half) != np.uint64(0)))
        for c in range(long):
            v, place = longer[c] >> np.uint64(32), (longer[c] & np.uint64(0xFFFFFFFF)) - one
            while at < room and more[v, place] != k:
                met[i, at] = more[v, place]
                at = np.uint32(at + np.uint32(1))
                place += one
        length[i] = at


@kernel
def _most(met, length, shared):  # type: ignore[no-untyped-def]
    """The centroid met most often, the lowest of equals; 0 where none is met. ``shared`` is left as zeros."""
    # Count and index in one number, so that the largest is looked for without a branch.
    low = np.uint64(0xFFFFFFFF)
    best = low
    for at in range(length):
        j = met[at]
        count = shared[j] + np.uint32(1)
        shared[j] = count
        best = max(best, (np.uint64(count) << np.uint64(32)) | (low - np.uint64(j)))
    for at in range(length):
        shared[met[at]] = 0
    return low - (best & low)


@kernel
def _most_of_all(codes, bits, begun, first, more, shared):  # type: ignore[no-untyped-def]
    one, width, k = np.uint64(1), np.uint64(8 * more.itemsize), np.uint64(more.shape[1])
    mask = (one << width) - one
    for v in range(len(codes)):
        code = np.uint64(codes[v])
        word, bit = bits[v, code >> np.uint64(6)], one << (code & np.uint64(63))
        if not word & bit:
            continue
        at = begun[v, code >> np.uint64(6)] + _ones(word & (bit - one))  # type: ignore[call-arg]
        link = np.uint64(first[at])
        shared[link & mask] += np.uint32(1)
        if width == np.uint64(16) and (link >> width) & mask != k:
            shared[(link >> width) & mask] += np.uint32(1)
        if link >> np.uint64(32):
            place = (link >> np.uint64(32)) - one
            while more[v, place] != k:
                shared[more[v, place]] += np.uint32(1)
                place += one
    best = np.argmax(shared)
    shared[:] = 0
    return best


@entry(given("u4", 2), given("b1", 2), filled("u8", 2), filled("u4", 2), filled("u8", 1), filled("u2", 2))
def _chain_short(codes, units, bits, begun, first, more):  # type: ignore[no-untyped-def]
    return _chain(codes, units, bits, begun, first, more)


@entry(given("u4", 2), given("b1", 2), filled("u8", 2), filled("u4", 2), filled("u8", 1), filled("u4", 2))
def _chain_long(codes, units, bits, begun, first, more):  # type: ignore[no-untyped-def]
    return _chain(codes, units, bits, begun, first, more)


@entry(given("u2", 2), given("u8", 2), given("u4", 2), given("u8", 1), given("u2", 2), filled("i4", 1))
def _count_short_short(x, bits, begun, first, more, out):  # type: ignore[no-untyped-def]
    _count(x, bits, begun, first, more, out)


@entry(given("u2", 2), given("u8", 2), given("u4", 2), given("u8", 1), given("u4", 2), filled("i4", 1))
def _count_short_long(x, bits, begun, first, more, out):  # type: ignore[no-untyped-def]
    _count(x, bits, begun, first, more, out)


@entry(given("u4", 2), given("u8", 2), given("u4", 2), given("u8", 1), given("u2", 2), filled("i4", 1))
def _count_long_short(x, bits, begun, first, more, out):  # type: ignore[no-untyped-def]
    _count(x, bits, begun, first, more, out)


@entry(given("u4", 2), given("u8", 2), given("u4", 2), given("u8", 1), given("u4", 2), filled("i4", 1))
def _count_long_long(x, bits, begun, first, more, out):  # type: ignore[no-untyped-def]
    _count(x, bits, begun, first, more, out)
