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

from scalelatent.kernels.vectors import F32, I16, I64, LANES, Vectors

_SHORTS = ir.VectorType(I16, LANES)
LEAST = -(2**29)  # a place or weight that does not exist; two of them can be added

Values = list[Any]


class _Code(Vectors):
    """What both passes ask of vectors of int32."""

    def max(self, x: Any, y: Any) -> Any:
        """The larger of two, lane by lane."""
        return self.b.select(self.b.icmp_signed(">", x, y), x, y)

    def min(self, x: Any, y: Any) -> Any:
        """The smaller of two, lane by lane."""
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def both(self, s: Any, w: Any) -> Any:
        """t of a pair."""
        return self.min(self.b.add(s, w), self.min(s, w))

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
        self.old = [code.b.sext(raw, code.ints) for raw in self._raw]

    def _belief(self, spot: Any) -> Any:
        if self.mask is None:
            return self.code.load(spot, 0, self.code.ints)
        found = self.code.bits(self.code.load(spot, mask=self.mask))
        return self.code.b.select(self.mask, found, self.code.integer(LEAST))

    @property
    def cavity(self) -> tuple[Any, ...]:
        """Beliefs of place and weight without the messages of this tree."""
        rest = [self.code.b.sub(x, m) for x, m in zip(self.beliefs, self.old, strict=False)]
        return tuple(rest + self.beliefs[len(rest) :])

    def change(self, which: int, new: Any, damping: Any) -> Any:
        """By how much a message changes."""
        code, b = self.code, self.code.b
        if which >= len(self.old):
            return new
        change = b.sub(new, self.old[which])
        if damping is None:
            return change
        step = b.fmul(damping, b.sitofp(change, code.vec))
        return b.fptosi(code.call("rint", step), code.ints)

    def moves(self, changes: Values) -> Any:
        """Which pairs have another message than before: a mask."""
        b, bits = self.code.b, changes[0]
        for change in changes[1:]:
            bits = b.or_(bits, change)
        moved = b.icmp_signed("!=", bits, self.code.integer(0))
        return moved if self.mask is None else b.and_(moved, self.mask)

    def send(self, which: int, change: Any) -> None:
        """Take in a message."""
        code, b = self.code, self.code.b
        belief = b.add(self.beliefs[which], change)
        if self.mask is not None:
            belief = b.bitcast(belief, code.vec)
        code.store(belief, self.spots[which], mask=self.mask)
        if which < len(self.old):
            raw = b.add(self._raw[which], b.trunc(change, _SHORTS))
            if self.mask is not None:
                raw = b.select(self.mask, raw, self._raw[which])
            code.store(raw, self.spots[2 + which])


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
    n_spots: int, n_numbers: int, result: Any, code_of: Callable[[_Code, Values, Values, Any], Any]
) -> Any:
    """A function of a tree and some int32 numbers for numba's kernels; and a damping."""
    arguments = (
        types.UniTuple(types.int64, 4 + n_spots),
        types.UniTuple(types.int32, n_numbers),
        types.float32,
    )

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tree, numbers = (
            [builder.extract_value(pack, i) for i in range(count)]
            for pack, count in zip(args[:2], (4 + n_spots, n_numbers), strict=True)
        )
        found = code_of(_Code(builder), tree, numbers, args[2])
        if isinstance(result, types.UniTuple):
            return context.make_tuple(builder, result, found)
        return context.get_dummy_value() if result is types.void else found

    def typed(typingctx, tree, numbers, damping):  # type: ignore[no-untyped-def]
        return result(*arguments), codegen

    return intrinsic(typed)


def _look_off(code: _Code, tree: Values, numbers: Values, _: Any) -> Any:
    """What the pairs add up to, each at most -b."""
    b, zero, most = code.b, code.integer(0), code.spread(numbers[0])

    def body(pairs: _Pairs, carried: Values) -> Values:
        t = code.both(*pairs.cavity)
        return [b.add(carried[0], code.min(code.max(t, zero), most))]

    return code.fold(_walk(code, tree, [zero], body)[0], b.add)


def _look_on(code: _Code, tree: Values, numbers: Values, _: Any) -> Values:
    """The largest and second largest t; equal where two are."""

    def join(x: Values, y: Values) -> Values:
        second = code.max(code.min(x[0], y[0]), code.max(x[1], y[1]))
        return [code.max(x[0], y[0]), second]

    def body(pairs: _Pairs, carried: Values) -> Values:
        t, (first, second) = code.both(*pairs.cavity), carried
        return [code.max(first, t), code.max(second, code.min(first, t))]

    least = code.integer(2 * LEAST)
    return code.fold_together(_walk(code, tree, [least, least], body), join)


def _tell(on: bool, even: bool, n_kept: int) -> Callable[[_Code, Values, Values, Any], Any]:
    """Messages to the places and weights of all pairs; whether one of those that are kept has changed.

    Where one message is kept, it alone is sent: weights are fixed.
    """

    def code_of(code: _Code, tree: Values, numbers: Values, damping: Any) -> Any:
        b, zero = code.b, code.integer(0)
        x, y, z = (code.spread(number) for number in numbers)
        lanes = ir.IntType(LANES)  # a bit for each

        def body(pairs: _Pairs, carried: Values, damping: Any) -> Values:
            s, w = pairs.cavity
            size = x  # |g|
            if not even:
                t = code.both(s, w)
                if on:  # x for all but the largest, which get y
                    size = b.select(b.icmp_signed("==", t, z), y, x)
                else:  # x is -(b + sum), y is -b
                    size = code.max(b.add(code.min(code.max(t, zero), y), x), zero)
            changes = []
            for which, other in ((0, w), (1, s))[: n_kept or 2]:
                if on:
                    new = code.min(code.max(b.add(other, size), zero), size)
                else:
                    new = b.sub(zero, code.min(code.max(other, zero), size))
                changes.append(pairs.change(which, new, damping))

            def send() -> Values:
                for which, change in enumerate(changes):
                    pairs.send(which, change)
                return []

            if not n_kept:
                send()
                return carried
            # After some sweeps few messages change: those of most vectors need not be written again.
            moved = b.bitcast(pairs.moves(changes), lanes)
            code.where(b.icmp_signed("!=", moved, lanes(0)), [], send)
            return [b.or_(carried[0], moved)]

        def walk(damping: Any) -> Values:
            start = [lanes(0)] if n_kept else []
            return _walk(code, tree, start, lambda pairs, carried: body(pairs, carried, damping))

        if n_kept == 2:
            plain = b.fcmp_ordered("==", damping, ir.Constant(F32, 1.0))
            found = code.where(plain, [lanes(0)], lambda: walk(None))
            found = code.where(b.not_(plain), found, lambda: walk(code.spread(damping)))
        else:
            found = walk(None)
        return b.icmp_signed("!=", found[0], lanes(0)) if n_kept else None

    return code_of


def tree_of(n_kept: int) -> tuple[Any, ...]:
    """Both first passes, and second ones: off, off evenly, on, on evenly; of trees that keep so many."""
    result = types.boolean if n_kept else types.void
    spots = 2 + n_kept
    tells = [
        _inline(spots, 3, result, _tell(on, even, n_kept)) for on in (False, True) for even in (False, True)
    ]
    return (
        _inline(spots, 1, types.int32, _look_off),
        _inline(spots, 1, types.UniTuple(types.int32, 2), _look_on),
        *tells,
    )
