"""Arrays that kernels allocate, or view with another dtype, equal those of numpy."""

from __future__ import annotations

import numpy as np
import pytest

from scalelatent.kernels.jit import kernel
from scalelatent.kernels.memory import empty, same_bytes, zeros


@kernel
def allocate_arrays(n, m):
    room = empty((n, m), np.float32)
    for i in range(n):
        for j in range(m):
            room[i, j] = i - j
    return room, zeros(n, np.bool_), zeros((n, 2, m), np.int64)


@kernel
def view_as_integers(a):
    return same_bytes(a, np.int32)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_allocated_arrays_have_the_shape_dtype_and_values_of_numpy(n: int) -> None:
    room, flags, counts = allocate_arrays(n, 3)
    np.testing.assert_array_equal(
        room, np.subtract.outer(np.arange(n), np.arange(3)).astype("f4"), strict=True
    )
    np.testing.assert_array_equal(flags, np.zeros(n, bool), strict=True)
    np.testing.assert_array_equal(counts, np.zeros((n, 2, 3), np.int64), strict=True)


@pytest.mark.parametrize("rows", [slice(None), slice(1, 3), slice(None, None, -2)])
def test_same_bytes_returns_a_view_with_another_dtype(rows: slice) -> None:
    a = np.arange(12, dtype="f4").reshape(4, 3)[rows]
    turned = view_as_integers(a)
    np.testing.assert_array_equal(turned, a.view("i4"), strict=True)
    turned[0, 0] = 7
    assert a.view("i4")[0, 0] == 7


def test_a_size_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="negative dimensions"):
        allocate_arrays(-1, 3)
