"""The loops over edges of sum-product belief propagation; see :mod:`.sum_product` for the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir
from numba import types

from scalelatent.kernels.vectors import F32, I64, LANES, Vectors, instructions
from scalelatent.models.crbm.kernels.inference import MAX_WEIGHT

from .coupling import EDGES, LINE, ROWS

HALF = ROWS // 2
# Rows whose products are gathered at once: the two of each stay in registers.
GATHERED = HALF if LANES == EDGES else 2


def _make_gather(rows: int) -> Callable[..., None]:
    @instructions(EDGES)
    def gather(
        lanes: Vectors, a: ir.Value, m: ir.Value, row_step: ir.Value, t: ir.Value, u: ir.Value, n: ir.Value,
        chunk: ir.Value, q: ir.Value, e: ir.Value,
    ) -> None:  # fmt: skip
        """S into the place of the messages ``m``; of each row the product of all N / D as q times 2^e.
        Addresses, bytes of a row, bytes between exponents' splits.
        """
        b = lanes.b
        steps = [b.mul(row_step, I64(r)) for r in range(rows)]

        def edges(i: ir.Value, products: list[ir.Value]) -> list[ir.Value]:
            tj, uj, out = lanes.load(t, i), lanes.load(u, i), []
            places = [b.add(i, step) for step in steps]
            # All loads come first: one after a store to the same place of another page waits for it.
            loaded = [(lanes.load(a, at), lanes.load(m, at)) for at in places]
            for r, (at, (ar, message)) in enumerate(zip(places, loaded, strict=True)):
                s = b.fmul(message, uj)
                lanes.store(s, m, at)
                out += [
                    b.fmul(products[2 * r], lanes.fma(ar, tj, s)),
                    b.fmul(products[2 * r + 1], b.fadd(tj, s)),
                ]
            return out

        def chunks(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
            end = b.add(i, chunk)
            end = b.select(b.icmp_signed("<", end, n), end, n)
            products = lanes.loop(i, end, I64(LINE), state[: 2 * rows], edges)
            split = [lanes.split(p) for p in products]
            exponents = [
                b.add(state[2 * rows + r], b.sub(split[2 * r][1], split[2 * r + 1][1])) for r in range(rows)
            ]
            return [mantissa for mantissa, _ in split] + exponents

        start = [lanes.constant(1.0)] * (2 * rows) + [lanes.integer(0)] * rows
        state = lanes.loop(I64(0), n, chunk, start, chunks)
        for r in range(rows):
            ratio = b.fdiv(state[2 * r], state[2 * r + 1])
            lanes.store(lanes.fold(ratio, b.fmul), q, 4 * r)
            lanes.store(lanes.fold(state[2 * rows + r], b.add), e, 4 * r)

    return gather


class _Edges(NamedTuple):
    """Edges of two visible units to sixteen hidden ones: their messages are ``over`` divided by ``under``."""

    a: list[ir.Value]
    s: list[ir.Value]
    over: list[ir.Value]
    under: list[ir.Value]


# A message lies within e^(+-40), whatever s, which may be rounded to zero, says of the old one.
_LEAST = math.exp(-MAX_WEIGHT)


def _damped(lanes: Vectors, new: ir.Value, s: ir.Value, uh: ir.Value, weight: ir.Value) -> ir.Value:
    """``weight`` of the log of a new message and the rest of that of the old one, s / u."""
    old = lanes.max(lanes.b.fdiv(s, uh), lanes.constant(_LEAST))
    zero, none = lanes.constant(0.0), lanes.integer(0)
    before, now = (lanes.log_plus(message, none, zero) for message in (old, new))
    return lanes.exp(lanes.fma(weight, lanes.b.fsub(now, before), before))


def _send(
    lanes: Vectors, a: ir.Value, m: ir.Value, places: list[ir.Value], th: ir.Value, tv: list[ir.Value],
    uv: list[ir.Value], product: ir.Value, damping: tuple[ir.Value, ir.Value] | None = None,
) -> tuple[ir.Value, _Edges]:  # fmt: skip
    """Messages of two visible units into ``m``, which holds s, at the two places; ``product`` times them.
    ``damping`` is (u of the hidden units, weight).
    """
    fma, b, edges = lanes.fma, lanes.b, _Edges([], [], [], [])
    for at, t, u in zip(places, tv, uv, strict=True):
        aj, s = lanes.load(a, at), lanes.load(m, at)
        over, under = fma(s, fma(aj, t, u), b.fmul(aj, th)), fma(th, fma(aj, u, t), s)
        for values, value in zip(edges, (aj, s, over, under), strict=True):
            values.append(value)
    inverse = b.fdiv(lanes.constant(1.0), b.fmul(*edges.under))
    for at, s, over, other in zip(places, edges.s, edges.over, edges.under[::-1], strict=True):
        # In this order: what a message is divided by lies within e^(+-W), and itself within e^(+-2W).
        message = b.fmul(b.fmul(over, inverse), other)
        if damping is not None:
            message = _damped(lanes, message, s, *damping)
        lanes.store(message, m, at)
        product = b.fmul(product, message)
    return product, edges


def _make_scatter(rows: int, split: bool) -> Callable[..., None]:
    @instructions(EDGES)
    def scatter(
        lanes: Vectors, a: ir.Value, m: ir.Value, step: ir.Value, th: ir.Value, tv: ir.Value, uv: ir.Value,
        n: ir.Value, p: ir.Value, e: ir.Value, a2: ir.Value, m2: ir.Value,
    ) -> None:  # fmt: skip
        """Messages to the hidden units into ``m``, which holds s; the product of each column times them as
        p times 2^e, and with ``split`` p a mantissa. As many bytes of the next A and messages,
        ``a2`` and ``m2``, are fetched.
        """
        b = lanes.b
        steps = [b.mul(step, I64(r)) for r in range(rows)]
        t, u = ([lanes.spread(lanes.load(x, 4 * r, F32)) for r in range(rows)] for x in (tv, uv))

        def columns(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            tj, product = lanes.load(th, i), lanes.load(p, i)
            for line in range(rows):
                for following in (a2, m2):
                    lanes.fetch(following, b.add(b.mul(i, I64(rows)), I64(LINE * line)))
            for r in range(0, rows, 2):
                two = slice(r, r + 2)
                places = [b.add(i, far) for far in steps[two]]
                product, _edges = _send(lanes, a, m, places, tj, t[two], u[two], product)
            _keep(lanes, product, p, e, i, split)
            return []

        lanes.loop(I64(0), n, I64(LINE), [], columns)

    return scatter


def _keep(lanes: Vectors, product: ir.Value, p: ir.Value, e: ir.Value, i: ir.Value, split: bool) -> None:
    if split:
        product, exponent = lanes.split(product)
        lanes.store(lanes.b.add(lanes.load(e, i, exponent.type), exponent), e, i)
    lanes.store(product, p, i)


def _pair_edges(
    lanes: Vectors, a: ir.Value, m: ir.Value, row_step: ir.Value, th: ir.Value, tv: ir.Value, uv: ir.Value,
    n: ir.Value, p: ir.Value, e: ir.Value, c: ir.Value, z: ir.Value, ez: ir.Value, uh: ir.Value | None = None,
    weight: ir.Value | None = None,
) -> None:  # fmt: skip
    b = lanes.b
    t, u = ([lanes.spread(lanes.load(x, 4 * r, F32)) for r in range(2)] for x in (tv, uv))

    def edges(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        tj, places = lanes.load(th, i), [i, b.add(i, row_step)]
        damping = None if uh is None else (lanes.load(uh, i), lanes.spread(weight))
        product, two = _send(lanes, a, m, places, tj, t, u, lanes.load(p, i), damping)
        for r, at in enumerate(places):
            ax = b.fmul(b.fmul(two.a[r], t[r]), b.fadd(tj, two.s[r]))
            lanes.store(b.fdiv(ax, two.over[r]), c, at)
        tops = b.fmul(*(lanes.fma(aj, tj, s) for aj, s in zip(two.a, two.s, strict=True)))
        _keep(lanes, product, p, e, i, True)
        _keep(lanes, b.fmul(lanes.load(z, i), b.fdiv(b.fmul(*two.under), tops)), z, ez, i, True)
        return []

    lanes.loop(I64(0), n, I64(LINE), [], edges)


@instructions(EDGES)
def scatter_pairs(
    lanes: Vectors, a: ir.Value, m: ir.Value, row_step: ir.Value, th: ir.Value, tv: ir.Value, uv: ir.Value,
    n: ir.Value, p: ir.Value, e: ir.Value, c: ir.Value, z: ir.Value, ez: ir.Value,
) -> None:  # fmt: skip
    """Scatter of two rows that also stores P(v_i = 1 | h_j = 1) into ``c``, which may be ``m``, and
    multiplies each column's (x + y) / N into z times 2^ez.
    """
    _pair_edges(lanes, a, m, row_step, th, tv, uv, n, p, e, c, z, ez)


@instructions(EDGES, weight=types.float32)
def damped_pairs(
    lanes: Vectors, a: ir.Value, m: ir.Value, step: ir.Value, th: ir.Value, tv: ir.Value, uv: ir.Value,
    n: ir.Value, p: ir.Value, e: ir.Value, c: ir.Value, z: ir.Value, ez: ir.Value, uh: ir.Value,
    weight: ir.Value,
) -> None:  # fmt: skip
    """:func:`scatter_pairs` with damped messages, see :func:`damped_scatter`."""
    _pair_edges(lanes, a, m, step, th, tv, uv, n, p, e, c, z, ez, uh, weight)


@instructions(EDGES, weight=types.float32)
def damped_scatter(
    lanes: Vectors, a: ir.Value, m: ir.Value, step: ir.Value, th: ir.Value, tv: ir.Value, uv: ir.Value,
    n: ir.Value, p: ir.Value, e: ir.Value, uh: ir.Value, weight: ir.Value,
) -> None:  # fmt: skip
    """Scatter of two rows whose messages have the ``weight``, the old ones the rest; ``uh`` are the beliefs
    of the hidden units to be 0.
    """
    b = lanes.b
    t, u = ([lanes.spread(lanes.load(x, 4 * r, F32)) for r in range(2)] for x in (tv, uv))
    weights = lanes.spread(weight)

    def columns(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        tj, places, damping = lanes.load(th, i), [i, b.add(i, step)], (lanes.load(uh, i), weights)
        product, _edges = _send(lanes, a, m, places, tj, t, u, lanes.load(p, i), damping)
        _keep(lanes, product, p, e, i, True)
        return []

    lanes.loop(I64(0), n, I64(LINE), [], columns)


gather = _make_gather(GATHERED)
scatter, scatter_split, scatter_two = (
    _make_scatter(HALF, False),
    _make_scatter(HALF, True),
    _make_scatter(2, True),
)
