"""The two passes over the pairs of an AND-OR tree, in LLVM's own vectors.

A tree is a few runs of equal length, the same in S and W. By the sign of the evidence b, half of what the
general rule asks for is not needed, and what is left gives the same number:

- b < 0: no bound binds, a pair gets g = min(0, b + what the others add up to). Each adds at most |b|, beyond
  which nothing changes: so the sum is exact wherever it matters, however large the tree.
- b > 0: the sum does not matter, a pair gets g = min(b, max(0, -largest of the others)).

The first pass finds that sum, or the largest two; the second gives each pair its messages. Where g is the
same for all pairs (nothing lies over the pixel yet) no pair is asked for its own value again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scalelatent.kernels.vectors import I16, I64, LANES, Vectors

_SHORTS = ir.VectorType(I16, LANES)
LEAST = -1e30  # a pair that does not exist


Values = list[Any]


class _Code(Vectors):
    """What both passes ask of vectors."""

    def both(self, s: Any, w: Any) -> Any:
        """t of a pair."""
        return self.min(self.b.fadd(s, w), self.min(s, w))

    def where(self, condition: Any, before: Sequence[Any], body: Callable[[], Values]) -> Values:
        """body() if condition, else what was before."""
        b = self.b
        entry, inside, done = b.block, b.append_basic_block("some"), b.append_basic_block("all")
        b.cbranch(condition, inside, done)
        b.position_at_end(inside)
        new = body()
        last = b.block
        b.branch(done)
        b.position_at_end(done)
        out = [b.phi(value.type) for value in before]
        for phi, old, value in zip(out, before, new, strict=True):
            phi.add_incoming(old, entry)
            phi.add_incoming(value, last)
        return out


class _Pairs:
    """A vector of pairs of a tree: what they hold, and their new messages."""

    def __init__(self, code: _Code, spots: Values, mask: Any) -> None:
        self.code, self.spots, self.mask = code, spots, mask
        self.beliefs = [self._belief(spot) for spot in spots[:2]]
        self._raw = [code.load(spot, 0, _SHORTS) for spot in spots[2:]]
        self.old = [code.b.sitofp(raw, code.vec) for raw in self._raw]

    def _belief(self, spot: Any) -> Any:
        found = self.code.load(spot, mask=self.mask)
        return found if self.mask is None else self.code.b.select(self.mask, found, self.code.constant(LEAST))

    @property
    def cavity(self) -> tuple[Any, ...]:
        """Beliefs of place and weight without the messages of this tree."""
        b = self.code.b
        rest = [b.fsub(x, m) for x, m in zip(self.beliefs, self.old, strict=False)]
        return tuple(rest + self.beliefs[len(rest) :])

    def send(self, which: int, new: Any, damping: Any) -> Any:
        """Take in a new message; what has changed, where messages are kept."""
        code, b, belief = self.code, self.code.b, self.beliefs[which]
        if which >= len(self.old):
            code.store(b.fadd(belief, new), self.spots[which], mask=self.mask)
            return None
        change = b.fsub(new, self.old[which])
        if damping is not None:
            change = code.call("rint", b.fmul(damping, change))
        code.store(b.fadd(belief, change), self.spots[which], mask=self.mask)
        units = b.fptosi(change, code.ints)
        raw = b.add(self._raw[which], b.trunc(units, _SHORTS))
        if self.mask is not None:
            raw = b.select(self.mask, raw, self._raw[which])
            units = b.select(self.mask, units, code.integer(0))
        code.store(raw, self.spots[2 + which])
        return units


def _walk(code: _Code, tree: Values, start: Values, body: Callable[[_Pairs, Values], Values]) -> Values:
    """Over the vectors of a tree, with values that are carried along.

    A tree is (runs, pairs of a run, bytes from run to run of S and of W, where S, W and the messages begin).
    """
    b, (rows, n, s_step, w_step, *begins) = code.b, tree
    sizes = [I64(4), I64(4), I64(2), I64(2)][: len(begins)]
    steps = [s_step, w_step, *[b.mul(n, I64(2))] * 2][: len(begins)]
    left = b.srem(n, I64(LANES))
    last, whole = code.first(left), b.sub(n, left)

    def run(_: Any, values: Values) -> Values:
        spots, carried = values[: len(begins)], values[len(begins) :]

        def part(i: Any, mask: Any, carried: Values) -> Values:
            here = [b.add(spot, b.mul(i, size)) for spot, size in zip(spots, sizes, strict=True)]
            return body(_Pairs(code, here, mask), carried)

        step, some = I64(LANES), b.icmp_signed("!=", left, I64(0))
        found = code.loop(I64(0), whole, step, carried, lambda i, now: part(i, None, now), may_be_empty=True)
        found = code.where(some, found, lambda: part(whole, last, found))
        return [*(b.add(spot, step) for spot, step in zip(spots, steps, strict=True)), *found]

    found = code.loop(I64(0), rows, I64(1), [*begins, *start], run, may_be_empty=True)
    return found[len(begins) :]


def _inline(
    n_spots: int, n_numbers: int, result: Any, code_of: Callable[[_Code, Values, Values], Any]
) -> Any:
    """A function of a tree and some float32 numbers for numba's kernels."""
    arguments = types.UniTuple(types.int64, 4 + n_spots), types.UniTuple(types.float32, n_numbers)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = [
            [builder.extract_value(pack, i) for i in range(count)]
            for pack, count in zip(args, (4 + n_spots, n_numbers), strict=True)
        ]
        found = code_of(_Code(builder), *values)
        if isinstance(result, types.UniTuple):
            return context.make_tuple(builder, result, found)
        return context.get_dummy_value() if result is types.void else found

    def typed(typingctx, tree, numbers):  # type: ignore[no-untyped-def]
        return result(*arguments), codegen

    return intrinsic(typed)


def _look_off(code: _Code, tree: Values, numbers: Values) -> Any:
    """What the pairs add up to, each at most -b."""
    b, zero, most = code.b, code.constant(0.0), code.spread(numbers[0])

    def body(pairs: _Pairs, carried: Values) -> Values:
        t = code.both(*pairs.cavity)
        return [b.fadd(carried[0], code.min(code.max(t, zero), most))]

    found = _walk(code, tree, [zero], body)
    return code.fold(found[0], b.fadd)


def _look_on(code: _Code, tree: Values, numbers: Values) -> Values:
    """The largest and second largest t; equal where two are."""

    def join(x: Values, y: Values) -> Values:
        second = code.max(code.min(x[0], y[0]), code.max(x[1], y[1]))
        return [code.max(x[0], y[0]), second]

    def body(pairs: _Pairs, carried: Values) -> Values:
        t, (first, second) = code.both(*pairs.cavity), carried
        return [code.max(first, t), code.max(second, code.min(first, t))]

    least = code.constant(10 * LEAST)
    return code.fold_together(_walk(code, tree, [least, least], body), join)


def _tell(on: bool, even: bool, n_learned: int, damps: bool) -> Callable[[_Code, Values, Values], Any]:
    """Messages to the places (and weights) of all pairs; whether one of those that are kept has changed."""

    def code_of(code: _Code, tree: Values, numbers: Values) -> Any:
        b, zero = code.b, code.constant(0.0)
        x, y, z, damping = (code.spread(number) for number in numbers)
        keeps = len(tree) > 6

        def body(pairs: _Pairs, carried: Values) -> Values:
            s, w = pairs.cavity
            size = x  # |g|
            if not even:
                t = code.both(s, w)
                if on:  # x for all but the largest, which get y
                    size = b.select(b.fcmp_ordered("==", t, z), y, x)
                else:  # x is -(b + sum), y is -b
                    size = code.max(b.fadd(code.min(code.max(t, zero), y), x), zero)
            moved = []
            for which, other in ((0, w), (1, s))[:n_learned]:
                if on:
                    new = code.min(code.max(b.fadd(other, size), zero), size)
                else:
                    new = b.fneg(code.min(code.max(other, zero), size))
                moved.append(pairs.send(which, new, damping if damps else None))
            for bits in moved if keeps else []:
                carried = [b.or_(carried[0], bits)]
            return carried

        found = _walk(code, tree, [code.integer(0)] if keeps else [], body)
        if not keeps:
            return None
        return code.fold(found[0], b.or_)

    return code_of


def tree_of(n_kept: int, n_learned: int) -> tuple[Any, ...]:
    """Both first passes, and second ones: off, off evenly, on, on evenly.

    Of trees that keep so many of a pair's two messages, and that send so many.
    """
    result = types.int32 if n_kept else types.void
    spots = 2 + n_kept
    tells = [
        _inline(spots, 4, result, _tell(on, even, n_learned, n_kept == 2))
        for on in (False, True)
        for even in (False, True)
    ]
    return (
        _inline(spots, 1, types.float32, _look_off),
        _inline(spots, 1, types.UniTuple(types.float32, 2), _look_on),
        *tells,
    )
