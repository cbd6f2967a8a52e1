"""Allocation of arrays in kernels, compiled as instructions of the kernel itself.

numba compiles ``np.empty``, ``np.zeros`` and ``view`` as separate functions for each dtype and number of
dimensions. This took a tenth of the time of a first fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.core.typing.npydecl import parse_dtype, parse_shape
from numba.extending import intrinsic
from numba.np import arrayobj


def _allocation(zero: bool) -> Callable[..., Any]:
    def allocation(typingctx: object, shape: Any, dtype: Any) -> tuple[object, Callable[..., object]]:
        kind = types.Array(parse_dtype(dtype), parse_shape(shape), "C")

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> object:
            sizes = arrayobj._parse_shape(context, builder, signature.args[0], args[0])
            array = arrayobj._empty_nd_impl(context, builder, kind, sizes)
            if zero:
                cgutils.memset(builder, array.data, builder.mul(array.itemsize, array.nitems), 0)
            return array._getvalue()

        return kind(shape, dtype), codegen

    return intrinsic(allocation)


# Functions for kernels: empty(shape, dtype) and zeros(shape, dtype) return a new array. The shape is an
# integer or a tuple of integers.
empty, zeros = _allocation(False), _allocation(True)


def _same_bytes(typingctx: object, array: Any, dtype: Any) -> tuple[object, Callable[..., object]]:
    kind = array.copy(dtype=parse_dtype(dtype))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> object:
        old = arrayobj.make_array(array)(context, builder, args[0])
        new = arrayobj.make_array(kind)(context, builder)
        pointer = context.get_data_type(kind.dtype).as_pointer()
        rest = {name: getattr(old, name) for name in ("shape", "strides", "itemsize", "meminfo", "parent")}
        arrayobj.populate_array(new, data=builder.bitcast(old.data, pointer), **rest)
        return impl_ret_borrowed(context, builder, kind, new._getvalue())

    return kind(array, dtype), codegen


# Function for kernels: same_bytes(array, dtype) returns a view of an array as another dtype of the same size.
same_bytes: Callable[..., Any] = intrinsic(_same_bytes)
