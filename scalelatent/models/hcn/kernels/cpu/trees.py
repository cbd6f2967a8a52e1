"""Message updates of the AND-OR tree of one pixel, as LLVM vector instructions.

A pixel is the OR of its pairs, and a pair is the AND of a feature position (array S) and a weight (array W).
The pairs of a pixel are in a few contiguous rows of equal length. In belief propagation, each pair sends a
message, its value, to the OR, and the OR sends a message g back to the pair. The sign of the log odds b of
the pixel decides which of two simple formulas gives g:

- b <= 0: g = min(0, b + sum of the positive values of the other pairs). A value adds at most |b| to the sum,
  so the int32 sum is exact for trees of any size.
- b > 0: g = min(b, max(0, -largest value of the other pairs)).

The first pass over the pairs computes the sum, or the largest two values. The second pass computes g for each
pair, and from g the messages to the position and to the weight of the pair.

Most rows are quiet: no position of the row has log odds above 0 (or above -b if b > 0). A quiet row adds
nothing to the sum and does not change the result of the largest two values. All its pairs get the same g, and
its weights get the message 0. Therefore the first pass reads only the positions of a quiet row, and the
second pass reads only its weights. One byte per row has two flags: the row is live (not quiet), and the
row has nonzero messages to weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scalelatent.kernels.vectors import I8, I16, I32, I64, LANES, Vectors, vector_intrinsic

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.typing.context import BaseContext as TypingContext
    from numba.core.typing.templates import Signature

_BITS = ir.IntType(LANES)  # type of an integer with one bit per SIMD lane
# Log odds of SIMD lanes beyond the last pair of a row, in units of 1/256 nat; the sum of two fits int32.
BELIEF_OUTSIDE = -(2**29)
# Flags of a row of pairs (feature position, weight). A row with the flag HELD has nonzero messages to
# weights. A row with the flag LIVE has a position whose log odds are large enough to change the result.
HELD, LIVE = 1, 2

Values = list[ir.Value]


class _VectorCode(Vectors):
    """Emitter of the vector instructions for the two passes over the pairs of a pixel.

    A pair is a feature position and a weight that together turn on the pixel. Stored belief-propagation
    messages are int16, or int32 if ``wide``.
    """

    def __init__(self, builder: ir.IRBuilder, wide: bool) -> None:
        super().__init__(builder)
        self.wide, self.stored_type = wide, ir.VectorType(I32 if wide else I16, LANES)
        self.stored_bytes = 4 if wide else 2

    def widen(self, raw: ir.Value) -> ir.Value:
        """Convert stored belief-propagation messages (int16 or int32) to int32."""
        return raw if self.wide else self.b.sext(raw, self.ints)

    def narrow(self, messages: ir.Value) -> ir.Value:
        """Convert int32 belief-propagation messages to the type of stored messages (int16 or int32)."""
        return messages if self.wide else self.b.trunc(messages, self.stored_type)

    def max(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Return the larger of two values in each SIMD lane."""
        return self.b.select(self.b.icmp_signed(">", x, y), x, y)

    def min(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Return the smaller of two values in each SIMD lane."""
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def pair_message(self, s: ir.Value, w: ir.Value) -> ir.Value:
        """Return the messages of pairs (position AND weight) to their OR, from log odds ``s`` and ``w``."""
        return self.min(self.b.add(s, w), self.min(s, w))

    def to_bits(self, mask: ir.Value) -> ir.Value:
        """Convert a vector of booleans, one per SIMD lane, to an integer with one bit per lane."""
        return self.b.bitcast(mask, _BITS)

    def any(self, bits: ir.Value) -> ir.Value:
        """Return true if at least one bit of the integer ``bits`` is set."""
        return self.b.icmp_signed("!=", bits, _BITS(0))

    def branch(
        self,
        condition: ir.Value,
        body: Callable[[], Values],
        other: Callable[[], Values] | None = None,
        before: Sequence[ir.Value] = (),
    ) -> Values:
        """Emit a branch: return the values of body() if ``condition`` is true, else the values of other().

        Without ``other``, the values are ``before`` if the condition is false.
        """
        b = self.b
        entry, inside, done = b.block, b.append_basic_block("some"), b.append_basic_block("all")
        outside = b.append_basic_block("none") if other else done
        b.cbranch(condition, inside, outside)
        b.position_at_end(inside)
        new, last = body(), b.block
        b.branch(done)
        if other:
            b.position_at_end(outside)
            before, entry = other(), b.block
            b.branch(done)
        b.position_at_end(done)
        out = [b.phi(value.type) for value in before]
        for phi, old, value in zip(out, before, new, strict=True):
            phi.add_incoming(old, entry)
            phi.add_incoming(value, last)
        return out


class _Pairs:
    """One SIMD vector of pairs (feature position, weight): log odds and belief-propagation messages.

    In all methods, ``which`` is 0 for the positions of the pairs, and 1 for the weights. A row is a
    contiguous group of pairs; ``spots`` are the addresses of its positions, of its weights, and of the stored
    messages to its positions and weights. ``i`` is the index of the first pair of the vector in the row.
    ``mask`` is true for the SIMD lanes with a pair; it is None if all lanes have a pair.
    """

    def __init__(
        self,
        code: _VectorCode,
        spots: Values,
        i: ir.Value,
        mask: ir.Value | None,
        damping: ir.Value | None = None,
    ) -> None:
        self.code, self.mask, self._damping = code, mask, damping
        sizes = [4, 4, *[code.stored_bytes] * 2]
        self._spots = [
            code.b.add(spot, code.b.mul(i, I64(size))) for spot, size in zip(spots, sizes, strict=False)
        ]
        self._found: dict[int, ir.Value] = {}

    def belief(self, which: int) -> ir.Value:
        """Load the log odds of the positions or weights of the pairs."""
        if which not in self._found:
            code = self.code
            if self.mask is None:
                found = code.load(self._spots[which], 0, code.ints)
            else:
                found = code.bits(code.load(self._spots[which], mask=self.mask))
                found = code.b.select(self.mask, found, code.integer(BELIEF_OUTSIDE))
            self._found[which] = found
        return self._found[which]

    def old_messages(self, which: int) -> ir.Value | None:
        """Load the belief-propagation messages that the pixel sent last; return None if none are stored."""
        if 2 + which >= len(self._spots):
            return None
        return self.code.widen(self._load_stored(which))

    def _load_stored(self, which: int) -> ir.Value:
        if 2 + which not in self._found:
            self._found[2 + which] = self.code.load(self._spots[2 + which], 0, self.code.stored_type)
        return self._found[2 + which]

    def cavity(self, which: int) -> ir.Value:
        """Return log odds minus the message that this pixel sent to them, as belief propagation needs."""
        belief, old = self.belief(which), self.old_messages(which)
        return belief if old is None else self.code.b.sub(belief, old)

    def send(self, new: dict[int, ir.Value]) -> Values:
        """Replace the belief-propagation messages of the pixel by ``new``, and update the log odds of pairs.

        Key 0 of ``new`` has the messages to the positions, and key 1 the messages to the weights.

        Return two integers with one bit per SIMD lane: 1 for each pair with a changed message, and 1 for each
        weight with a nonzero message.
        """
        code, b = self.code, self.code.b
        if self.old_messages(0) is None:
            for which, message in new.items():
                self._add_to_beliefs(which, message)
            return [_BITS(0), _BITS(0)]
        changes = {which: b.sub(message, self.old_messages(which)) for which, message in new.items()}

        def find_held() -> ir.Value:
            return self._find_nonzero(self._load_stored(1)) if 1 in new else _BITS(0)

        def write_changes() -> Values:
            moved = _BITS(0)
            for which, change in changes.items():
                change = self._damp(change)
                self._add_to_beliefs(which, change)
                self._store_message(which, change)
                moved = b.or_(moved, self._find_nonzero(change))
            return [moved, find_held()]

        # After some updates of all pixels few messages change, so most vectors need no writes to memory.
        bits = functools.reduce(b.or_, (self._find_nonzero(change) for change in changes.values()))
        return code.branch(code.any(bits), write_changes, before=[_BITS(0), find_held()])

    def _find_nonzero(self, x: ir.Value) -> ir.Value:
        b, kind = self.code.b, x.type
        found = b.icmp_signed("!=", x, ir.Constant(kind, [0] * kind.count))
        return self.code.to_bits(found if self.mask is None else b.and_(found, self.mask))

    def _damp(self, change: ir.Value) -> ir.Value:
        if self._damping is None:
            return change
        code, b = self.code, self.code.b
        step = b.fmul(self._damping, b.sitofp(change, code.vec))
        return b.fptosi(code.call("rint", step), code.ints)

    def _add_to_beliefs(self, which: int, change: ir.Value) -> None:
        belief = self.code.b.add(self.belief(which), change)
        if self.mask is not None:
            belief = self.code.b.bitcast(belief, self.code.vec)
        self.code.store(belief, self._spots[which], mask=self.mask)

    def _store_message(self, which: int, change: ir.Value) -> None:
        raw = self.code.b.add(self._load_stored(which), self.code.narrow(change))
        if self.mask is not None:
            raw = self.code.b.select(self.mask, raw, self._load_stored(which))
        self.code.store(raw, self._spots[2 + which])
        self._found[2 + which] = raw


class _Tree:
    """Emitter of loops over the rows of one pixel: contiguous groups of pairs (feature position, weight).

    ``tree`` has LLVM values: the number of rows, the pairs per row, the bytes from one row to the next in S
    and in W, and the addresses of the first position, the first weight, the first stored belief-propagation
    messages, and the flag byte of the first row.
    """

    def __init__(self, code: _VectorCode, tree: Values) -> None:
        self.code = code
        self.rows, self.n, *steps = tree[:4]
        self.spots, b = tree[4:], code.b
        message_step = b.mul(self.n, I64(code.stored_bytes))
        self.steps = [*steps, *[message_step] * (len(self.spots) - 3), I64(1)]
        left = b.srem(self.n, I64(LANES))
        self.some, self.last, self.whole = (
            b.icmp_signed("!=", left, I64(0)),
            code.first(left),
            b.sub(self.n, left),
        )

    def loop_rows(self, start: Values, body: Callable[[Values, ir.Value, Values], Values]) -> Values:
        """Emit a loop over the rows (contiguous groups of pairs); return the values after the last row.

        Each row sets values = body(addresses of the first position, weight and belief-propagation messages of
        the row, address of the flags of the row, values). The values before the first row are ``start``.
        """
        code, b, n = self.code, self.code.b, len(self.spots)

        def visit_row(_: ir.Value, values: Values) -> Values:
            spots, carried = values[:n], values[n:]
            found = body(spots[:-1], code.point_to(spots[-1], 0, I8), carried)
            return [*(b.add(spot, step) for spot, step in zip(spots, self.steps, strict=True)), *found]

        return code.loop(I64(0), self.rows, I64(1), [*self.spots, *start], visit_row, may_be_empty=True)[n:]

    def loop_pairs(
        self,
        spots: Values,
        start: Values,
        body: Callable[[_Pairs, Values], Values],
        damping: ir.Value | None = None,
    ) -> Values:
        """Emit a loop over the SIMD vectors of pairs of a row; return the values after the last vector.

        Each vector sets values = body(pairs, values); the values before the first vector are ``start``.
        ``spots`` are the addresses of the first position, weight and belief-propagation messages of the row.
        """
        code = self.code

        def visit(i: ir.Value, mask: ir.Value | None, carried: Values) -> Values:
            return body(_Pairs(code, spots, i, mask, damping), carried)

        found = code.loop(
            I64(0), self.whole, I64(LANES), start, lambda i, now: visit(i, None, now), may_be_empty=True
        )
        return code.branch(self.some, lambda: visit(self.whole, self.last, found), before=found)


PassEmitter: TypeAlias = Callable[[_VectorCode, _Tree, Values, ir.Value], "ir.Value | Values | None"]
"""Function that emits the instructions of a pass over the pairs, and returns the results of the pass."""
Passes: TypeAlias = tuple[
    Callable[..., int], Callable[..., tuple[int, int]], Callable[..., bool], Callable[..., bool]
]
"""First passes for log odds of a pixel of 0 or less and above 0, and second passes for the same two cases."""


def _make_function(
    n_stored: int, wide: bool, n_numbers: int, result: types.Type, emit: PassEmitter
) -> Callable[..., Any]:
    """Return a numba function whose body is the LLVM code that ``emit`` emits.

    The arguments of the function are a tuple of addresses and sizes (see `_Tree`), a tuple of ``n_numbers``
    int32 numbers, and the damping (float32). ``n_stored`` is the number of stored belief-propagation messages
    per pair (feature position, weight).
    """
    n_tree = 7 + n_stored
    arguments = (types.UniTuple(types.int64, n_tree), types.UniTuple(types.int32, n_numbers), types.float32)

    def codegen(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        tree, numbers = (
            [builder.extract_value(pack, i) for i in range(count)]
            for pack, count in zip(args[:2], (n_tree, n_numbers), strict=True)
        )
        code = _VectorCode(builder, wide)
        found = emit(code, _Tree(code, tree), numbers, args[2])
        if isinstance(result, types.UniTuple):
            return context.make_tuple(builder, result, found)
        return context.get_dummy_value() if result is types.void else found

    def typed(
        typingctx: TypingContext, tree: types.Type, numbers: types.Type, damping: types.Type
    ) -> tuple[Signature, Callable[..., ir.Value]]:
        return result(*arguments), codegen

    return intrinsic(typed)


def _make_first_pass(on: bool, n_stored: int) -> PassEmitter:
    """Return the function that emits the first pass, which skips pairs that cannot change the result.

    A pair is a feature position and a weight that together turn on the pixel; its value is its message to the
    pixel. The pass returns the sum of the positive values, or if ``on`` (log odds of the pixel above 0) the
    two largest values. ``n_stored`` is the number of stored messages per pair.
    """

    def emit(code: _VectorCode, tree: _Tree, numbers: Values, _: ir.Value) -> ir.Value:
        b, zero, most = code.b, code.integer(0), code.spread(numbers[0])
        least = code.integer(2 * BELIEF_OUTSIDE)
        limit = b.sub(zero, most) if on else zero

        def update_result(pairs: _Pairs, carried: Values) -> Values:
            t = code.pair_message(pairs.cavity(0), pairs.cavity(1))
            if not on:
                return [b.add(carried[0], code.min(code.max(t, zero), most))]
            first, second = carried
            return [code.max(first, t), code.max(second, code.min(first, t))]

        def visit_row(spots: Values, flags: ir.Value, carried: Values) -> Values:
            top = tree.loop_pairs(spots, [least], lambda pairs, now: [code.max(now[0], pairs.cavity(0))])[0]
            live = code.any(code.to_bits(b.icmp_signed(">", top, limit)))
            found = code.branch(live, lambda: tree.loop_pairs(spots, carried, update_result), before=carried)
            flag = b.select(live, I8(LIVE), I8(0))
            b.store(b.or_(b.load(flags), flag) if n_stored == 2 else flag, flags)
            return found

        if not on:
            # A sum above 2 |b|, for log odds b of the pixel, has the same effect as 2 |b|. With this limit
            # for each SIMD lane, the sum over all lanes fits int32.
            return code.fold(code.min(tree.loop_rows([zero], visit_row)[0], b.add(most, most)), b.add)

        def merge_lanes(x: Values, y: Values) -> Values:
            second = code.max(code.min(x[0], y[0]), code.max(x[1], y[1]))
            return [code.max(x[0], y[0]), second]

        return code.fold_together(tree.loop_rows([least, least], visit_row), merge_lanes)

    return emit


def _make_second_pass(on: bool, n_stored: int) -> PassEmitter:
    """Return the function that emits the second pass, which sends a pixel's messages to all its pairs.

    A pair is a feature position and a weight that together turn on the pixel. The pass returns true if a
    stored message changed. ``n_stored`` is the number of stored messages per pair. If ``n_stored`` is 1, the
    weights are fixed and only positions get messages.
    """

    def emit(code: _VectorCode, tree: _Tree, numbers: Values, damping: ir.Value) -> ir.Value:
        b, zero = code.b, code.integer(0)
        x, y, z = (code.spread(number) for number in numbers)
        # The three numbers give the message g of the OR to a pair (position, weight): see the module
        # docstring. If ``on``, g is y for the pairs with the largest value z, and x for all other pairs. If
        # not ``on``, x is -(b + sum of the positive values of all pairs) and y is -b; then g is -max(0, x +
        # min(max(value, 0), y)).
        most = x if on else code.max(x, zero)
        damping = code.spread(damping) if n_stored == 2 else None

        def compute_message(other: ir.Value, size: ir.Value) -> ir.Value:
            """Return the message to one input of a pair from the ``other`` input; ``size`` is |g|."""
            if on:
                return code.min(code.max(b.add(other, size), zero), size)
            return b.sub(zero, code.min(code.max(other, zero), size))

        def send_quiet(pairs: _Pairs, carried: Values) -> Values:
            moved, _ = pairs.send({0: compute_message(pairs.belief(1), most)})
            return [b.or_(carried[0], moved), carried[1]]

        def send_live(pairs: _Pairs, carried: Values) -> Values:
            s, w = pairs.cavity(0), pairs.cavity(1)
            t = code.pair_message(s, w)
            if on:
                size = b.select(b.icmp_signed("==", t, z), y, x)
            else:
                size = code.max(b.add(code.min(code.max(t, zero), y), x), zero)
            new = {0: compute_message(w, size)}
            if n_stored != 1:
                new[1] = compute_message(s, size)
            return [b.or_(old, bits) for old, bits in zip(carried, pairs.send(new), strict=True)]

        def visit_row(spots: Values, flags: ir.Value, carried: Values) -> Values:
            start = [*carried, _BITS(0)]
            asleep = b.icmp_signed("==", b.load(flags), I8(0))
            found = code.branch(
                asleep,
                lambda: tree.loop_pairs(spots, start, send_quiet, damping),
                lambda: tree.loop_pairs(spots, start, send_live, damping),
            )
            if n_stored == 2:
                b.store(b.select(code.any(found[1]), I8(HELD), I8(0)), flags)
            return found[:1]

        found = tree.loop_rows([_BITS(0)], visit_row)
        return code.any(found[0]) if n_stored else None

    return emit


@vector_intrinsic()
def prefetch(code: Vectors, address: ir.Value, size: ir.Value) -> None:
    """Load ``size`` bytes, of which ``address`` is the first, into the CPU cache before they are needed."""

    def fetch_cache_line(i: ir.Value, _: ir.Value) -> Values:
        code.fetch(address, i)
        return []

    code.loop(I64(0), size, I64(64), [], fetch_cache_line, may_be_empty=True)


def make_passes(n_stored: int, wide: bool = False) -> Passes:
    """Return four numba functions that together update the AND-OR tree of one pixel.

    The tree is an OR over pairs of a feature position and a weight. The first two functions run the first
    pass over the pairs of a pixel: for log odds of the pixel of 0 or less (the pass returns a sum), and above
    0 (it returns the largest two values). The last two functions run the second pass, which sends messages to
    the pairs, for the same two cases. ``n_stored`` is the number of stored messages per pair: 0, 1 (to the
    position) or 2 (also to the weight). Stored messages are int16, or int32 if ``wide``.
    """
    result = types.boolean if n_stored else types.void
    return (
        _make_function(n_stored, wide, 1, types.int32, _make_first_pass(False, n_stored)),
        _make_function(n_stored, wide, 1, types.UniTuple(types.int32, 2), _make_first_pass(True, n_stored)),
        _make_function(n_stored, wide, 3, result, _make_second_pass(False, n_stored)),
        _make_function(n_stored, wide, 3, result, _make_second_pass(True, n_stored)),
    )
