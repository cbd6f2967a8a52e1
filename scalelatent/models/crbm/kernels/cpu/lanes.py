"""Vectors of float32 in LLVM's own types, for the loops over edges and units.

Written out because numba's loops leave the order of a product or sum over lanes to LLVM, and because a
product's exponent is taken off by bits. Everything here has one order: the same bits whatever the length of a
row, the alignment of an array or the neighbours in a batch.

Logs are rare: the log of a product of factors that each lie within e^(+-W) needs one log at the end, if the
exponents are taken off and added up as integers before the product can overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from scalelatent.kernels.vectors import BYTES, at, call, fetch, shuffle, spread

# The same on every machine, since products and sums over a row run by lanes: eight units at a time, and of
# sum-product sixteen edges, of which LLVM makes two vectors where a machine has narrower ones.
LANES, EDGES = 8, 16
WIDE, LINE = BYTES * LANES, BYTES * EDGES  # bytes; that of edges is also a cache line
F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
INTS = ir.VectorType(I32, LANES)
_MANTISSA, _EXPONENT_OF_ONE, _MANTISSA_BITS = 0x007FFFFF, 0x3F800000, 23
BIAS = 127

# log(1 + z), z from sqrt(1/2) - 1 to sqrt(2) - 1, as z - z^2/2 + z^3 P(z); exp(x), |x| up to log(2)/2, as
# 1 + x + x^2 Q(x): the polynomials of Cephes (Moshier, logf and expf), highest power first.
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4


def _f32(x: float) -> float:
    return float(np.float32(x))


class Lanes:
    """Instructions on vectors of n lanes, appended to an LLVM builder."""

    def __init__(self, builder: Any, n: int = LANES) -> None:
        self.b, self.n = builder, n
        self.vec, self.ints = ir.VectorType(F32, n), ir.VectorType(I32, n)

    def constant(self, x: float) -> Any:
        """The same number in all lanes."""
        return ir.Constant(self.vec, [_f32(x)] * self.n)

    def integer(self, x: int) -> Any:
        """The same integer in all lanes."""
        return ir.Constant(self.ints, [x] * self.n)

    def load(self, address: Any, offset: Any = 0, kind: Any = None) -> Any:
        """A vector so many bytes behind an address."""
        offset = I64(offset) if isinstance(offset, int) else offset
        return self.b.load(at(self.b, address, offset, kind or self.vec), align=BYTES)

    def store(self, value: Any, address: Any, offset: Any = 0) -> None:
        """Store a vector so many bytes behind an address."""
        offset = I64(offset) if isinstance(offset, int) else offset
        self.b.store(value, at(self.b, address, offset, value.type), align=BYTES)

    def fetch(self, address: Any, offset: Any) -> None:
        """Begin to fetch the cache line so many bytes behind an address, which may be nobody's."""
        fetch(self.b, address, offset)

    def spread(self, scalar: Any) -> Any:
        """A scalar in all lanes."""
        return spread(self.b, scalar, self.n)

    def call(self, name: str, *values: Any) -> Any:
        """An intrinsic of LLVM on vectors."""
        return call(self.b, f"llvm.{name}.v{self.n}f32", self.vec, *values)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """X y + z, rounded once."""
        return self.call("fma", x, y, z)

    def max(self, x: Any, y: Any) -> Any:
        """The larger of two, lane by lane; no NaN."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def bits(self, x: Any) -> Any:
        """The bits of floats as integers."""
        return self.b.bitcast(x, self.ints)

    def split(self, x: Any) -> tuple[Any, Any]:
        """Positive x = mantissa in [1, 2) times 2^(exponent - BIAS)."""
        bits = self.bits(x)
        mantissa = self.b.or_(self.b.and_(bits, self.integer(_MANTISSA)), self.integer(_EXPONENT_OF_ONE))
        return self.b.bitcast(mantissa, self.vec), self.b.lshr(bits, self.integer(_MANTISSA_BITS))

    def fold(self, x: Any, join: Callable[[Any, Any], Any]) -> Any:
        """One scalar out of the lanes: i with i + n / 2, and so on down to i + 1."""
        step = self.n
        while step > 1:
            step //= 2
            lanes = [(i + step) % self.n for i in range(self.n)]
            x = join(x, shuffle(self.b, x, x, lanes))
        return self.b.extract_element(x, I32(0))

    def polynomial(self, coefficients: Sequence[float], x: Any) -> Any:
        """Horner's rule, highest power first."""
        total = self.constant(coefficients[0])
        for c in coefficients[1:]:
            total = self.fma(total, x, self.constant(c))
        return total

    def log_plus(self, x: Any, exponent: Any, start: Any) -> Any:
        """Start + log(x) + exponent log(2), of positive x and integer exponents."""
        b = self.b
        mantissa, own = self.split(x)
        large = b.fcmp_ordered(">", mantissa, self.constant(math.sqrt(2)))
        mantissa = b.select(large, b.fmul(mantissa, self.constant(0.5)), mantissa)
        own = b.select(large, b.add(own, self.integer(1)), own)
        power = b.sitofp(b.add(exponent, b.sub(own, self.integer(BIAS))), self.vec)
        z = b.fsub(mantissa, self.constant(1.0))
        square = b.fmul(z, z)
        y = b.fmul(b.fmul(z, square), self.polynomial(_LOG, z))
        y = b.fadd(z, self.fma(square, self.constant(-0.5), y))
        # The high part times the power is exact: few bits each.
        return b.fadd(
            self.fma(power, self.constant(_LN2_HIGH), start), self.fma(power, self.constant(_LN2_LOW), y)
        )

    def exp(self, x: Any) -> Any:
        """E^x for x from -87 to 0."""
        b = self.b
        power = self.call("rint", b.fmul(x, self.constant(1 / math.log(2))))
        x = self.fma(power, self.constant(-_LN2_LOW), self.fma(power, self.constant(-_LN2_HIGH), x))
        y = self.fma(b.fmul(x, x), self.polynomial(_EXP, x), b.fadd(x, self.constant(1.0)))
        shift = b.shl(b.fptosi(power, self.ints), self.integer(_MANTISSA_BITS))
        return b.bitcast(b.add(self.bits(y), shift), self.vec)

    def beliefs(self, log_odds: Any, limit: Any) -> tuple[Any, Any]:
        """Sigmoid of log odds and of minus log odds, each to its own precision; |log odds| cut at limit."""
        b = self.b
        size = self.call("fabs", log_odds)
        size = b.select(b.fcmp_ordered("<", size, limit), size, limit)
        small = self.exp(b.fneg(size))
        large = b.fdiv(self.constant(1.0), b.fadd(self.constant(1.0), small))
        small = b.fmul(small, large)
        positive = b.fcmp_ordered(">=", log_odds, self.constant(0.0))
        return b.select(positive, large, small), b.select(positive, small, large)

    def loop(self, begin: Any, end: Any, step: Any, start: Sequence[Any], body: Any) -> list[Any]:
        """``for i in range(begin, end, step)``, at least once, with values that are carried from round to
        round: body(i, values) -> values.
        """
        b = self.b
        entry, loop, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        i = b.phi(I64)
        carried = [b.phi(value.type) for value in start]
        new = body(i, carried)
        following = b.add(i, step)
        last = b.block  # the body may hold loops
        for phi, first, value in zip([i, *carried], [begin, *start], [following, *new], strict=True):
            phi.add_incoming(first, entry)
            phi.add_incoming(value, last)
        b.cbranch(b.icmp_signed("<", following, end), loop, done)
        b.position_at_end(done)
        return new


def inline(function: Any) -> Any:
    """numba's ``intrinsic``, whose calls mypy takes for Python's."""
    return intrinsic(function)


def whole(n: int) -> int:
    """N rounded up to whole vectors of edges.

    Examples
    --------
    >>> whole(1), whole(16), whole(17)
    (16, 16, 32)
    """
    return -(-n // EDGES) * EDGES
