"""A conversion to another dtype gives the same number or the nearest one, as exact fractions show."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from scalelatent.data.write.convert import cast

KINDS = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]
EDGES = [2**k + d for k in (7, 8, 15, 16, 24, 31, 32, 53, 63, 64) for d in (-1, 0, 1)]
VALUES: list[Any] = [0, 1, 2, *EDGES, *(-e for e in EDGES), 0.5, 1.5, 2.5, -0.5, 300.7, 1e-30, 1e30, -0.0]


def representable_values(dtype: np.dtype[Any]) -> np.ndarray:
    """Return the values in `VALUES` that a dtype can represent, rounded to its precision."""
    found = []
    for value in VALUES:
        if dtype.kind == "f":
            with np.errstate(over="ignore"):
                found += [v for v in [np.array(value, dtype=object).astype(dtype)] if np.isfinite(v)]
        elif value == int(value) and (
            value in (0, 1) if dtype.kind == "b" else np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
        ):
            found.append(dtype.type(int(value)))
    return np.array(found, dtype=dtype)


def as_fraction(value: Any) -> Fraction:
    plain = value.item()
    return Fraction(int(plain) if isinstance(plain, bool) else plain)


def dtype_limits(dtype: np.dtype[Any]) -> tuple[Fraction, Fraction]:
    if dtype.kind == "b":
        return Fraction(0), Fraction(1)
    limits: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    return Fraction(float(limits.min) if dtype.kind == "f" else limits.min), Fraction(
        float(limits.max) if dtype.kind == "f" else limits.max
    )


@pytest.mark.parametrize(("source", "target"), list(itertools.product(KINDS, KINDS)))
def test_conversions_are_exact_or_give_the_nearest_value(source: str, target: str) -> None:
    x, dtype = representable_values(np.dtype(source)), np.dtype(target)
    low, high = dtype_limits(dtype)
    plain, exact = cast(x, dtype)
    nearest, also = cast(x, dtype, lossy=True)
    np.testing.assert_array_equal(exact, also)
    assert plain.dtype == nearest.dtype == dtype
    for value, same, p, near in zip(x, exact, plain, nearest, strict=True):
        true = as_fraction(value)
        if same:
            assert as_fraction(p) == as_fraction(near) == true
            continue
        clipped = min(max(true, low), high)
        if dtype.kind == "b":
            assert bool(near) == (true != 0)
            continue
        assert as_fraction(near) != true  # The cast reported this value as not exact.
        half = Fraction(1, 2)
        if dtype.kind == "f":
            half *= abs(clipped) * Fraction(float(np.finfo(dtype).eps))
            half += Fraction(float(np.finfo(dtype).smallest_subnormal))
        assert abs(as_fraction(near) - clipped) <= half
