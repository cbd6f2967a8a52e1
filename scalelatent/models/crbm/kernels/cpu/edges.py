"""Vector instructions that send messages along the edges of a graph, for sum-product belief propagation.

In the formulas, A = exp(W), and t and u are the beliefs P(h = 1) and P(h = 0) of a hidden unit. Its message
to a visible unit is N / D with N = A t + s and D = t + s, where s is u times the message that it received.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from scalelatent.kernels.vectors import F32, I64, LANES, Vectors, vector_intrinsic

from .coupling import EDGES, LINE_BYTES, ROWS

# Half of the visible units (rows of W) that are processed together.
HALF = ROWS // 2
# Number of visible units (rows of W) whose products ``gather`` computes together. Each of them needs two
# product vectors in registers, so narrow vectors allow only two units.
GATHERED = HALF if LANES == EDGES else 2


def _make_gather(rows: int) -> Callable[..., None]:
    @vector_intrinsic(EDGES)
    def gather(
        lanes: Vectors, exp_w: ir.Value, messages: ir.Value, row_bytes: ir.Value, h_on: ir.Value,
        h_off: ir.Value, end: ir.Value, chunk_bytes: ir.Value, mantissas: ir.Value, exponents: ir.Value,
    ) -> None:  # fmt: skip
        """Multiply the messages N / D to each of a few visible units over the hidden units; store s.

        For a stored message r and beliefs t, u of a hidden unit (at ``h_on``, ``h_off``), s = r u replaces r,
        N = A t + s and D = t + s. A product is split into mantissa and exponent after ``chunk_bytes`` bytes
        of the hidden units, which have ``end`` bytes. The arguments without "bytes" or "end" are addresses.
        """
        b = lanes.b
        steps = [b.mul(row_bytes, I64(r)) for r in range(rows)]

        def multiply_messages(i: ir.Value, products: list[ir.Value]) -> list[ir.Value]:
            t, u, out = lanes.load(h_on, i), lanes.load(h_off, i), []
            places = [b.add(i, step) for step in steps]
            # Load before storing, because a load waits for a store to the same offset of another memory page.
            loaded = [(lanes.load(exp_w, place), lanes.load(messages, place)) for place in places]
            for r, (place, (factor, message)) in enumerate(zip(places, loaded, strict=True)):
                s = b.fmul(message, u)
                lanes.store(s, messages, place)
                out += [
                    b.fmul(products[2 * r], lanes.fma(factor, t, s)),
                    b.fmul(products[2 * r + 1], b.fadd(t, s)),
                ]
            return out

        def multiply_chunk(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
            stop = b.add(i, chunk_bytes)
            stop = b.select(b.icmp_signed("<", stop, end), stop, end)
            products = lanes.loop(i, stop, I64(LINE_BYTES), state[: 2 * rows], multiply_messages)
            split = [lanes.split(p) for p in products]
            powers = [
                b.add(state[2 * rows + r], b.sub(split[2 * r][1], split[2 * r + 1][1])) for r in range(rows)
            ]
            return [mantissa for mantissa, _ in split] + powers

        start = [lanes.constant(1.0)] * (2 * rows) + [lanes.integer(0)] * rows
        state = lanes.loop(I64(0), end, chunk_bytes, start, multiply_chunk)
        for r in range(rows):
            ratio = b.fdiv(state[2 * r], state[2 * r + 1])
            lanes.store(lanes.fold(ratio, b.fmul), mantissas, 4 * r)
            lanes.store(lanes.fold(state[2 * rows + r], b.add), exponents, 4 * r)

    return gather


class _Edges(NamedTuple):
    """Vectors of sixteen hidden units for each of two visible units: parts of the messages between them.

    The new messages to the hidden units are numerator / denominator, and s is the last message to a hidden
    unit times the belief P(h = 0).
    """

    exp_w: list[ir.Value]
    s: list[ir.Value]
    numerators: list[ir.Value]
    denominators: list[ir.Value]


def _send_messages(
    lanes: Vectors, exp_w: ir.Value, messages: ir.Value, places: list[ir.Value], h_on: ir.Value,
    v_on: list[ir.Value], v_off: list[ir.Value], product: ir.Value,
) -> tuple[ir.Value, _Edges]:  # fmt: skip
    """Replace the s of two visible units by messages to hidden units; return ``product`` times the messages.

    ``places`` are the offsets of both units in ``messages``, and s is the last message to a hidden unit times
    P(h = 0). ``h_on``, ``v_on`` and ``v_off`` are beliefs that units are 1 (on) or 0 (off).
    """
    fma, b, edges = lanes.fma, lanes.b, _Edges([], [], [], [])
    for place, t, u in zip(places, v_on, v_off, strict=True):
        factor, s = lanes.load(exp_w, place), lanes.load(messages, place)
        over, under = fma(s, fma(factor, t, u), b.fmul(factor, h_on)), fma(h_on, fma(factor, u, t), s)
        for values, value in zip(edges, (factor, s, over, under), strict=True):
            values.append(value)
    inverse = b.fdiv(lanes.constant(1.0), b.fmul(*edges.denominators))
    for place, over, other in zip(places, edges.numerators, edges.denominators[::-1], strict=True):
        # This order of products keeps the intermediate quotient between e^-2|W| and e^2|W|.
        message = b.fmul(b.fmul(over, inverse), other)
        lanes.store(message, messages, place)
        product = b.fmul(product, message)
    return product, edges


def _make_scatter(rows: int, split: bool) -> Callable[..., None]:
    @vector_intrinsic(EDGES)
    def scatter(
        lanes: Vectors, exp_w: ir.Value, messages: ir.Value, row_bytes: ir.Value, h_on: ir.Value,
        v_on: ir.Value, v_off: ir.Value, end: ir.Value, mantissas: ir.Value, exponents: ir.Value,
        next_exp_w: ir.Value, next_messages: ir.Value,
    ) -> None:  # fmt: skip
        """Replace the s of a few visible units by their messages to the hidden units.

        Here s is the last message to a hidden unit times the belief P(h = 0). Multiply the products of the
        messages to each hidden unit (mantissa times 2^exponent) by the new messages; with ``split``, a
        mantissa is normalized afterwards. Prefetch the next rows of exp(W) and of messages into the cache.
        """
        b = lanes.b
        steps = [b.mul(row_bytes, I64(r)) for r in range(rows)]
        t, u = ([lanes.spread(lanes.load(x, 4 * r, F32)) for r in range(rows)] for x in (v_on, v_off))

        def send_to_hidden(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            on, product = lanes.load(h_on, i), lanes.load(mantissas, i)
            for line in range(rows):
                for following in (next_exp_w, next_messages):
                    lanes.fetch(following, b.add(b.mul(i, I64(rows)), I64(LINE_BYTES * line)))
            for r in range(0, rows, 2):
                two = slice(r, r + 2)
                places = [b.add(i, step) for step in steps[two]]
                product, _edges = _send_messages(lanes, exp_w, messages, places, on, t[two], u[two], product)
            _store_product(lanes, product, mantissas, exponents, i, split)
            return []

        lanes.loop(I64(0), end, I64(LINE_BYTES), [], send_to_hidden)

    return scatter


def _store_product(
    lanes: Vectors, product: ir.Value, mantissas: ir.Value, exponents: ir.Value, i: ir.Value, split: bool
) -> None:
    if split:
        product, exponent = lanes.split(product)
        lanes.store(lanes.b.add(lanes.load(exponents, i, exponent.type), exponent), exponents, i)
    lanes.store(product, mantissas, i)


@vector_intrinsic(EDGES)
def scatter_pairs(
    lanes: Vectors, exp_w: ir.Value, messages: ir.Value, row_bytes: ir.Value, h_on: ir.Value, v_on: ir.Value,
    v_off: ir.Value, end: ir.Value, mantissas: ir.Value, exponents: ir.Value, given_h: ir.Value,
    bethe: ir.Value, bethe_exponents: ir.Value,
) -> None:  # fmt: skip
    """Send messages of two visible units i to the hidden units j, and store what pairs and log Z need.

    P(v_i = 1 | h_j = 1) is stored at ``given_h``, which may be ``messages``. The factors (x + y) / N of the
    Bethe estimate, x = P(v_i = 1) D and y = P(v_i = 0) N, multiply ``bethe`` times 2^``bethe_exponents``.
    """
    b = lanes.b
    t, u = ([lanes.spread(lanes.load(x, 4 * r, F32)) for r in range(2)] for x in (v_on, v_off))

    def send_and_store(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        on, places = lanes.load(h_on, i), [i, b.add(i, row_bytes)]
        product, two = _send_messages(lanes, exp_w, messages, places, on, t, u, lanes.load(mantissas, i))
        for r, place in enumerate(places):
            ax = b.fmul(b.fmul(two.exp_w[r], t[r]), b.fadd(on, two.s[r]))
            lanes.store(b.fdiv(ax, two.numerators[r]), given_h, place)
        tops = b.fmul(*(lanes.fma(factor, on, s) for factor, s in zip(two.exp_w, two.s, strict=True)))
        _store_product(lanes, product, mantissas, exponents, i, True)
        ratio = b.fmul(lanes.load(bethe, i), b.fdiv(b.fmul(*two.denominators), tops))
        _store_product(lanes, ratio, bethe, bethe_exponents, i, True)
        return []

    lanes.loop(I64(0), end, I64(LINE_BYTES), [], send_and_store)


gather = _make_gather(GATHERED)
scatter, scatter_split, scatter_two = (
    _make_scatter(HALF, False),
    _make_scatter(HALF, True),
    _make_scatter(2, True),
)
