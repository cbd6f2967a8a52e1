"""Vectors of float32 in LLVM's own types, for kernels whose sums must stay in registers."""

from __future__ import annotations

import os
from typing import Any

import llvmlite.binding
from llvmlite import ir

BYTES = 4
# float32 in this machine's widest vectors. No sum runs over lanes, so no bit of a result depends on it.
# SCALELATENT_LANES is for tests: it runs the kernels of other machines, in vectors that LLVM puts together.
LANES = int(
    os.environ.get("SCALELATENT_LANES", 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8)
)

_I32 = ir.IntType(32)


def at(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    """A pointer to a ``kind`` so many bytes behind an address; both int64."""
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Lanes of two vectors, counted through both."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def spread(builder: Any, scalar: Any, lanes: int) -> Any:
    """A scalar in all lanes of a vector of its type."""
    first = builder.insert_element(
        ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined), scalar, _I32(0)
    )
    return shuffle(builder, first, first, [0] * lanes)
