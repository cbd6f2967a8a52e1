"""Vector instructions that send messages along the edges of a graph, for sum-product belief propagation.

A = exp(W). The beliefs that a unit is 1 and 0 are t and u. A message is a quotient N / D, in which s is the
opposite message times u (:mod:`.sum_product` derives the formulas).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from scalelatent.kernels.vectors import F32, I64, LANES, Vectors, instructions

from .coupling import EDGES, LINE_BYTES, ROWS

HALF = ROWS // 2
# Number of visible units (rows of W) whose products ``gather`` computes together. Each visible unit needs two
# product vectors in registers, so narrow vectors allow only two units.
GATHERED = HALF if LANES == EDGES else 2


def _make_gather(rows: int) -> Callable[..., None]:
    @instructions(EDGES)
    def gather(
        lanes: Vectors, a: ir.Value, m: ir.Value, row_step: ir.Value, t: ir.Value, u: ir.Value, n: ir.Value,
        chunk: ir.Value, q: ir.Value, e: ir.Value,
    ) -> None:  # fmt: skip
        """Replace the messages at ``m`` by s, and write the product of all N / D of each row as q times 2^e.

        For a message r, s = r u, N = A t + s and D = t + s. All arguments are addresses, except ``row_step``,
        the bytes of a row, ``n``, the bytes of the hidden units, and ``chunk``, the bytes after which
        mantissas and exponents are split.
        """
        b = lanes.b
        steps = [b.mul(row_step, I64(r)) for r in range(rows)]

        def edges(i: ir.Value, products: list[ir.Value]) -> list[ir.Value]:
            tj, uj, out = lanes.load(t, i), lanes.load(u, i), []
            places = [b.add(i, step) for step in steps]
            # Load before storing, because a load waits for a store to the same offset of another memory page.
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
            products = lanes.loop(i, end, I64(LINE_BYTES), state[: 2 * rows], edges)
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
    """Edges of two visible and sixteen hidden units: exp(W), s, numerators and denominators of messages."""

    a: list[ir.Value]
    s: list[ir.Value]
    over: list[ir.Value]
    under: list[ir.Value]


def _send_messages(
    lanes: Vectors, a: ir.Value, m: ir.Value, places: list[ir.Value], th: ir.Value, tv: list[ir.Value],
    uv: list[ir.Value], product: ir.Value,
) -> tuple[ir.Value, _Edges]:  # fmt: skip
    """Replace s at two places of ``m`` by messages of two units; return ``product`` times the messages."""
    fma, b, edges = lanes.fma, lanes.b, _Edges([], [], [], [])
    for at, t, u in zip(places, tv, uv, strict=True):
        aj, s = lanes.load(a, at), lanes.load(m, at)
        over, under = fma(s, fma(aj, t, u), b.fmul(aj, th)), fma(th, fma(aj, u, t), s)
        for values, value in zip(edges, (aj, s, over, under), strict=True):
            values.append(value)
    inverse = b.fdiv(lanes.constant(1.0), b.fmul(*edges.under))
    for at, over, other in zip(places, edges.over, edges.under[::-1], strict=True):
        # This order of products keeps the intermediate quotient between e^-2|W| and e^2|W|.
        message = b.fmul(b.fmul(over, inverse), other)
        lanes.store(message, m, at)
        product = b.fmul(product, message)
    return product, edges


def _make_scatter(rows: int, split: bool) -> Callable[..., None]:
    @instructions(EDGES)
    def scatter(
        lanes: Vectors, a: ir.Value, m: ir.Value, step: ir.Value, th: ir.Value, tv: ir.Value, uv: ir.Value,
        n: ir.Value, p: ir.Value, e: ir.Value, a2: ir.Value, m2: ir.Value,
    ) -> None:  # fmt: skip
        """Replace the products s at the address ``m`` by messages to the hidden units.

        Here s is the message of a hidden unit times the belief that this unit is 0. Multiply p 2^e, the
        product of the messages to each hidden unit, by the new messages; with ``split``, normalize p to a
        mantissa afterwards. Prefetch the next rows of exp(W) at ``a2`` and of messages at ``m2`` into the
        cache.
        """
        b = lanes.b
        steps = [b.mul(step, I64(r)) for r in range(rows)]
        t, u = ([lanes.spread(lanes.load(x, 4 * r, F32)) for r in range(rows)] for x in (tv, uv))

        def columns(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            tj, product = lanes.load(th, i), lanes.load(p, i)
            for line in range(rows):
                for following in (a2, m2):
                    lanes.fetch(following, b.add(b.mul(i, I64(rows)), I64(LINE_BYTES * line)))
            for r in range(0, rows, 2):
                two = slice(r, r + 2)
                places = [b.add(i, far) for far in steps[two]]
                product, _edges = _send_messages(lanes, a, m, places, tj, t[two], u[two], product)
            _store_product(lanes, product, p, e, i, split)
            return []

        lanes.loop(I64(0), n, I64(LINE_BYTES), [], columns)

    return scatter


def _store_product(
    lanes: Vectors, product: ir.Value, p: ir.Value, e: ir.Value, i: ir.Value, split: bool
) -> None:
    if split:
        product, exponent = lanes.split(product)
        lanes.store(lanes.b.add(lanes.load(e, i, exponent.type), exponent), e, i)
    lanes.store(product, p, i)


@instructions(EDGES)
def scatter_pairs(
    lanes: Vectors, a: ir.Value, m: ir.Value, row_step: ir.Value, th: ir.Value, tv: ir.Value, uv: ir.Value,
    n: ir.Value, p: ir.Value, e: ir.Value, c: ir.Value, z: ir.Value, ez: ir.Value,
) -> None:  # fmt: skip
    """Send messages of two rows to the hidden units; store inputs of pair beliefs and the Bethe estimate.

    P(v_i = 1 | h_j = 1) is stored at ``c``, which may be ``m``. The product of (x + y) / N of each column, z
    2^ez, is multiplied by the factors of both rows.
    """
    b = lanes.b
    t, u = ([lanes.spread(lanes.load(x, 4 * r, F32)) for r in range(2)] for x in (tv, uv))

    def edges(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        tj, places = lanes.load(th, i), [i, b.add(i, row_step)]
        product, two = _send_messages(lanes, a, m, places, tj, t, u, lanes.load(p, i))
        for r, at in enumerate(places):
            ax = b.fmul(b.fmul(two.a[r], t[r]), b.fadd(tj, two.s[r]))
            lanes.store(b.fdiv(ax, two.over[r]), c, at)
        tops = b.fmul(*(lanes.fma(aj, tj, s) for aj, s in zip(two.a, two.s, strict=True)))
        _store_product(lanes, product, p, e, i, True)
        factor = b.fmul(lanes.load(z, i), b.fdiv(b.fmul(*two.under), tops))
        _store_product(lanes, factor, z, ez, i, True)
        return []

    lanes.loop(I64(0), n, I64(LINE_BYTES), [], edges)


gather = _make_gather(GATHERED)
scatter, scatter_split, scatter_two = (
    _make_scatter(HALF, False),
    _make_scatter(HALF, True),
    _make_scatter(2, True),
)
