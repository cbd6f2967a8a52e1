"""Scores of CSR rows with all centroids of a clustering, a panel of columns at a time, in float32 or counts.

Sums of products stay in eight registers: of 64 centroids in float32, of 128 in int16. Of each lane the best
score and the second best are kept as scores are made, in two sets of lanes, so that one comparison need not
wait for the one before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scalelatent.kernels.jit import part
from scalelatent.kernels.vectors import BYTES, at, call, shuffle, spread

# Wider vectors gain nothing: loads are the limit.
LANES = 8
SETS = 2
_VECS = 8
# Bytes of a panel's part of a column.
PANEL_BYTES = _VECS * LANES * BYTES
_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VEC, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_WIDE = BYTES * LANES


@intrinsic
def _score(typingctx, places, values, count, panel, sums, scale, bias, lanes, j, kind):  # type: ignore[no-untyped-def]
    """Sums of a row with the centroids of a panel, the first of which is ``j``; addresses, all int64.

    ``sums`` holds what the postings gave, and then all; ``places`` are the byte offsets of the columns of
    ``count`` entries in the panel; ``lanes`` holds of each lane the best score so far, the second best, and
    where the best is. ``kind`` is an array of the type of the sums.
    """
    whole = isinstance(kind.dtype, types.Integer)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places, values, count, panel, sums, scale, bias, lanes, j, _ = args
        scalar, size = (_I16, 2) if whole else (_F32, BYTES)
        vector = ir.VectorType(scalar, _WIDE // size)
        load = lambda base, v, of: builder.load(at(builder, base, _I64(_WIDE * v), of), align=size)  # noqa: E731
        fma = f"llvm.fma.v{LANES}f32"
        begun = [load(sums, v, vector) for v in range(_VECS)]
        entry = builder.block
        loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", count, _I64(0)), loop, done)
        builder.position_at_end(loop)
        e, now = builder.phi(_I64), [builder.phi(vector) for _ in range(_VECS)]
        place = builder.load(at(builder, places, builder.mul(e, _I64(8)), _I64), align=8)
        value = builder.load(at(builder, values, builder.mul(e, _I64(size)), scalar), align=size)
        every, column = spread(builder, value, vector.count), builder.add(panel, place)
        more = []
        for v in range(_VECS):
            part = load(column, v, vector)
            if whole:
                more.append(builder.add(now[v], builder.mul(every, part)))
            else:
                more.append(call(builder, fma, _VEC, every, part, now[v]))
        following = builder.add(e, _I64(1))
        for phi, old, new in zip((e, *now), (_I64(0), *begun), (following, *more), strict=True):
            phi.add_incoming(old, entry)
            phi.add_incoming(new, loop)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
        builder.position_at_end(done)
        totals = [builder.phi(vector) for _ in range(_VECS)]
        for v, total in enumerate(totals):
            total.add_incoming(begun[v], entry)
            total.add_incoming(more[v], loop)
            builder.store(total, at(builder, sums, _I64(_WIDE * v), vector), align=size)
        if whole:
            totals = [part for total in totals for part in _halves(builder, total)]
        index = builder.add(
            spread(builder, builder.trunc(j, _I32), LANES), ir.Constant(_WORDS, list(range(LANES)))
        )
        kept = [(what + SETS * n, of) for n, of in enumerate((_VEC, _VEC, _WORDS)) for what in range(SETS)]
        best = [load(lanes, place, of) for place, of in kept]
        for v, total in enumerate(totals):
            score = builder.fadd(builder.fmul(total, load(scale, v, _VEC)), load(bias, v, _VEC))
            top, second, where = best[v % SETS :: SETS]
            better = builder.fcmp_ordered(">", score, top)
            loser = builder.select(better, top, score)
            second = builder.select(builder.fcmp_ordered(">", loser, second), loser, second)
            here = builder.add(index, ir.Constant(_WORDS, [LANES * v] * LANES))
            best[v % SETS :: SETS] = [
                builder.select(better, score, top),
                second,
                builder.select(better, here, where),
            ]
        for what, (place, of) in zip(best, kept, strict=True):
            builder.store(what, at(builder, lanes, _I64(_WIDE * place), of), align=BYTES)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9, kind), codegen


def _halves(builder: Any, total: Any) -> list[Any]:
    """A vector of int16 as two of float32."""
    parts = (shuffle(builder, total, total, list(range(n, n + LANES))) for n in (0, LANES))
    return [builder.sitofp(builder.sext(part, _WORDS), _VEC) for part in parts]


@part
def scan(rows, places, values, dense, panels, sums, scale, bias, lanes):  # type: ignore[no-untyped-def]
    """Sums of the first ``rows`` rows of a strip with all centroids, and the best of them by lanes."""
    full = len(scale)
    width = np.int64(PANEL_BYTES // sums.itemsize)
    panel_bytes = panels.itemsize * len(panels) // (full // width)
    for j in range(0, full, width):
        panel = panels.ctypes.data + j // width * panel_bytes
        for i in range(rows):
            _score(  # type: ignore[call-arg]
                places.ctypes.data + i * places.strides[0],
                values.ctypes.data + i * values.strides[0],
                dense[i],
                panel,
                sums.ctypes.data + i * sums.strides[0] + sums.itemsize * j,
                scale.ctypes.data + BYTES * j,
                bias.ctypes.data + BYTES * j,
                lanes.ctypes.data + i * lanes.strides[0],
                j,
                sums,
            )


@part
def leader(lanes, slack):  # type: ignore[no-untyped-def]
    """What the lanes of a row say: (how many scores are within ``slack`` of the best, of each lane two at
    most; the first of those that lead their lanes; the score that they reach).
    """
    lane = SETS * LANES
    where = lanes.view(np.int32)[2 * lane :]
    top = lanes[0]
    for n in range(1, lane):
        top = max(top, lanes[n])
    least = top - slack
    # Rounded down: it is compared with float32 scores.
    least = np.float32(least - 1e-7 * abs(least)) if slack > 0 else np.float32(top)
    count, code = 0, np.int32(2**31 - 1)
    for n in range(lane):
        leads = lanes[n] >= least
        count += leads + (lanes[lane + n] >= least)
        code = min(code, where[n]) if leads else code
    return count, code, least
