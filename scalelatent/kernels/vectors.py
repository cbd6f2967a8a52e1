"""Vectors in LLVM's types, for sums that stay in registers and have a fixed order of SIMD lanes.

In numba's loops LLVM chooses the order of a sum over lanes, and local arrays are in memory. The code here
fixes the order of each sum. Results are bitwise identical for any length of a row, any alignment of an array
and any width of the machine's vectors.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import DOTS as DOTS
from .jit import LANES as LANES
from .jit import subkernel

llvmlite.binding.initialize_native_asmparser()  # for the instruction of Vectors.dot

BYTES = 4
F32, F64 = ir.FloatType(), ir.DoubleType()
Value: TypeAlias = "ir.Value"
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))

_MANTISSA, _EXPONENT_OF_ONE, _MANTISSA_BITS = 0x007FFFFF, 0x3F800000, 23
BIAS = 127

# Polynomials of Cephes (Moshier, logf and expf), highest power first. log(1 + z) = z - z^2/2 + z^3 P(z) for z
# from sqrt(1/2) - 1 to sqrt(2) - 1, and exp(x) = 1 + x + x^2 Q(x) for |x| up to log(2)/2.
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


def _size(kind: ir.Type) -> int:
    """Return the size in bytes of a number of the LLVM type ``kind``, or of an element of a vector type."""
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    return {F32: 4, F64: 8}[element] if element in (F32, F64) else element.width // 8


class Vectors:
    """Instructions on vectors of ``lanes`` float32 or integers, which are appended to an LLVM builder.

    Addresses and offsets are int64 numbers of bytes. The sums of a tile are float32; with ``dots`` they are
    integers, and an operand has four bytes in each lane.
    """

    def __init__(self, builder: ir.IRBuilder, lanes: int = LANES, dots: bool = False) -> None:
        self.b, self.lanes = builder, lanes
        self.vec, self.ints = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        self.wide = BYTES * lanes
        self.sums = self.ints if dots else self.vec  # type of the sums of products
        self.zero = self.integer(0) if dots else self.constant(0.0)
        self.plus = self.b.add if dots else self.b.fadd
        self.multiply_add = self.dot if dots else self.fma

    def constant(self, x: float) -> Value:
        """Return a vector with the same number in all lanes."""
        return ir.Constant(self.vec, [float(np.float32(x))] * self.lanes)

    def integer(self, x: int) -> Value:
        """Return a vector with the same integer in all lanes."""
        return ir.Constant(self.ints, [x] * self.lanes)

    def first(self, n: Value) -> Value:
        """Return a mask that selects the first n lanes of a vector."""
        return self.b.icmp_signed(
            "<", ir.Constant(self.ints, list(range(self.lanes))), self.spread(self.b.trunc(n, I32))
        )

    def point_to(self, address: Value, offset: Value | int, kind: ir.Type) -> Value:
        """Return a pointer to a value of the type ``kind``."""
        offset = I64(offset) if isinstance(offset, int) else offset
        return self.b.inttoptr(self.b.add(address, offset), kind.as_pointer())

    def load(
        self, address: Value, offset: Value | int = 0, kind: ir.Type | None = None, mask: Value | None = None
    ) -> Value:
        """Load a vector, or a value of the type ``kind``; lanes outside the mask are 0."""
        kind = kind or self.vec
        place, size = self.point_to(address, offset, kind), _size(kind)
        if mask is None:
            return self.b.load(place, align=size)
        zero = ir.Constant(kind, [0.0] * kind.count)
        name = f"llvm.masked.load.v{kind.count}f{8 * size}.p0"
        return self._call(name, kind, place, I32(size), mask, zero)

    def store(self, value: Value, address: Value, offset: Value | int = 0, mask: Value | None = None) -> None:
        """Store a vector or a number; with a mask, store only the lanes that the mask selects."""
        place, size = self.point_to(address, offset, value.type), _size(value.type)
        if mask is None:
            self.b.store(value, place, align=size)
            return
        name = f"llvm.masked.store.v{value.type.count}f{8 * size}.p0"
        self._call(name, ir.VoidType(), value, place, I32(size), mask)

    def fetch(self, address: Value, offset: Value | int) -> None:
        """Prefetch a cache line; the address may be outside the array."""
        read, near, data = I32(0), I32(3), I32(1)
        self._call("llvm.prefetch.p0", ir.VoidType(), self.point_to(address, offset, I8), read, near, data)

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Return a vector of the given lanes of a and b; the lanes of b are numbered after those of a."""
        return self.b.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def spread(self, scalar: Value, lanes: int | None = None) -> Value:
        """Return a vector that has the number ``scalar`` in each lane."""
        lanes = lanes or self.lanes
        undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        first = self.b.insert_element(undefined, scalar, I32(0))
        return self.shuffle(first, first, [0] * lanes)

    def _call(self, name: str, result: ir.Type, *args: Value) -> Value:
        """Call an intrinsic of LLVM, and declare it if necessary."""
        kind = ir.FunctionType(result, [a.type for a in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), args)

    def call(self, name: str, *values: Value) -> Value:
        """Call the LLVM intrinsic ``name``, such as "fma", on vectors of float32; return its result."""
        kind = values[0].type
        return self._call(f"llvm.{name}.v{kind.count}f32", kind, *values)

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        """Return x y + z, rounded once; integers wrap around."""
        if isinstance(x.type.element, ir.IntType):
            return self.b.add(z, self.b.mul(x, y))
        return self.call("fma", x, y, z)

    def dot(self, x: Value, y: Value, z: Value) -> Value:
        """Return z plus, per lane, the four products of unsigned bytes of x and signed bytes of y (VNNI)."""
        kind = ir.FunctionType(self.ints, [self.ints] * 3)
        # Use assembly text, because versions of LLVM declare a function for this instruction differently.
        text, register = ("vpdpbusd", "v") if self.lanes == 16 else ("{vex} vpdpbusd", "x")
        places = f"={register},0,{register},{register}"
        return self.b.asm(kind, f"{text} $3, $2, $0", places, [z, x, y], side_effect=False)

    def max(self, x: Value, y: Value) -> Value:
        """Return the larger value of each lane; the values are not NaN."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def min(self, x: Value, y: Value) -> Value:
        """Return the smaller value of each lane; the values are not NaN."""
        return self.b.select(self.b.fcmp_ordered("<", x, y), x, y)

    def bits(self, x: Value) -> Value:
        """Return the bit patterns of float32 numbers as integers."""
        return self.b.bitcast(x, self.ints)

    def split(self, x: Value) -> tuple[Value, Value]:
        """Return (mantissa, exponent) of positive x = mantissa 2^(exponent - BIAS), mantissa in [1, 2)."""
        bits = self.bits(x)
        mantissa = self.b.or_(self.b.and_(bits, self.integer(_MANTISSA)), self.integer(_EXPONENT_OF_ONE))
        return self.b.bitcast(mantissa, self.vec), self.b.lshr(bits, self.integer(_MANTISSA_BITS))

    def fold(self, x: Value, join: Callable[[Value, Value], Value]) -> Value:
        """Reduce n lanes to a scalar: ``join`` lanes i and i + n / 2, then i and i + n / 4, … i and i + 1."""
        return self.fold_together([x], lambda x, y: [join(x[0], y[0])])[0]

    def fold_together(
        self, values: list[Value], join: Callable[[list[Value], list[Value]], list[Value]]
    ) -> list[Value]:
        """Reduce each vector to a scalar, by joining the upper and the lower half of its lanes repeatedly.

        Each call of ``join`` receives the halves of all vectors.
        """
        step = self.lanes
        while step > 1:
            step //= 2
            turned = [(i + step) % self.lanes for i in range(self.lanes)]
            values = join(values, [self.shuffle(x, x, turned) for x in values])
        return [self.b.extract_element(x, I32(0)) for x in values]

    def polynomial(self, coefficients: Sequence[float], x: Value) -> Value:
        """Evaluate a polynomial by Horner's rule, highest power first."""
        total = self.constant(coefficients[0])
        for c in coefficients[1:]:
            total = self.fma(total, x, self.constant(c))
        return total

    def add_log(self, x: Value, exponent: Value, start: Value) -> Value:
        """Return start + log(x) + exponent * log(2) for positive x and integer exponents."""
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
        # The product of the power and the high part of log(2) is exact, because both have few bits.
        return b.fadd(
            self.fma(power, self.constant(_LN2_HIGH), start), self.fma(power, self.constant(_LN2_LOW), y)
        )

    def exp(self, x: Value) -> Value:
        """Return e^x for x from -87 to 0."""
        b = self.b
        power = self.call("rint", b.fmul(x, self.constant(1 / math.log(2))))
        x = self.fma(power, self.constant(-_LN2_LOW), self.fma(power, self.constant(-_LN2_HIGH), x))
        y = self.fma(b.fmul(x, x), self.polynomial(_EXP, x), b.fadd(x, self.constant(1.0)))
        shift = b.shl(b.fptosi(power, self.ints), self.integer(_MANTISSA_BITS))
        return b.bitcast(b.add(self.bits(y), shift), self.vec)

    def sigmoids(self, log_odds: Value, limit: Value) -> tuple[Value, Value]:
        """Return the sigmoids of log odds and of their negatives, after clipping them to -limit and limit."""
        b = self.b
        size = self.call("fabs", log_odds)
        size = b.select(b.fcmp_ordered("<", size, limit), size, limit)
        small = self.exp(b.fneg(size))
        large = b.fdiv(self.constant(1.0), b.fadd(self.constant(1.0), small))
        small = b.fmul(small, large)
        positive = b.fcmp_ordered(">=", log_odds, self.constant(0.0))
        return b.select(positive, large, small), b.select(positive, small, large)

    def loop(
        self, begin: Value, end: Value, step: Value, start: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]], may_be_empty: bool = False,
    ) -> list[Value]:  # fmt: skip
        """Append ``for i in range(begin, end, step): values = body(i, values)``; return the last values.

        The loop runs at least once unless it ``may_be_empty``.
        """
        b = self.b
        entry, loop, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
        if may_be_empty:
            b.cbranch(b.icmp_signed("<", begin, end), loop, done)
        else:
            b.branch(loop)
        b.position_at_end(loop)
        i = b.phi(I64)
        carried = [b.phi(value.type) for value in start]
        new = list(body(i, carried))
        following = b.add(i, step)
        last = b.block  # the body may contain loops
        for phi, first, value in zip([i, *carried], [begin, *start], [following, *new], strict=True):
            phi.add_incoming(first, entry)
            phi.add_incoming(value, last)
        b.cbranch(b.icmp_signed("<", following, end), loop, done)
        b.position_at_end(done)
        if not may_be_empty:
            return new
        ends = [b.phi(value.type) for value in start]
        for phi, first, value in zip(ends, start, new, strict=True):
            phi.add_incoming(first, entry)
            phi.add_incoming(value, last)
        return ends


def vector_intrinsic(
    lanes: int = LANES, dots: bool = False, **kinds: Any
) -> Callable[[Callable[..., None]], Callable[..., Any]]:
    """Return a decorator that makes ``body(vectors, *arguments)`` a function that kernels call.

    ``body`` appends LLVM instructions. Its arguments are int64 addresses, steps in bytes and counts;
    ``kinds`` gives the types of other arguments by name.
    """

    def wrap(body: Callable[..., None]) -> Callable[..., Any]:
        names = [*inspect.signature(body).parameters][1:]
        signature = types.void(*(kinds.get(name, types.int64) for name in names))

        @functools.wraps(body)  # numba reads the names of the arguments
        def typed(typingctx: object, *args: object) -> tuple[object, Callable[..., object]]:
            def append(
                context: Any, builder: ir.IRBuilder, signature: object, values: Sequence[Value]
            ) -> object:
                body(Vectors(builder, lanes, dots), *values)
                return context.get_dummy_value()

            return signature, append

        return intrinsic(typed)

    return wrap


@subkernel
def copy_vector(of: np.ndarray, to: np.ndarray) -> None:
    """Copy the numbers of an array (n,) into another array of the same length.

    numba would compile a slice assignment with a check of the shapes, which takes two seconds.
    """
    for k in range(len(to)):
        to[k] = of[k]


@subkernel
def find_largest(values: np.ndarray) -> np.number:
    """Return the maximum of an array (n,), or NaN if the array contains NaN.

    numba's ``max`` takes five times as long to compile.
    """
    top = values[0]
    for k in range(1, len(values)):
        if values[k] > top or values[k] != values[k]:
            top = values[k]
    return top
