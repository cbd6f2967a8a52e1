"""Curves and rates of a job take limited memory and have correct numbers."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.monitor.board import SmoothedRate, ThinnedCurve


@given(st.integers(1, 3000), st.integers(4, 60))
def test_a_curve_has_few_evenly_spaced_points_and_both_ends(passes: int, limit: int) -> None:
    curve = ThinnedCurve(["objective"], limit)
    for number in range(1, passes + 1):
        curve.add(number, {"objective": 1.0 / number})
        assert len(curve) <= limit
    x = list(curve.x)
    assert x[0] == 1
    assert x[-1] == passes
    assert list(curve.columns["objective"]) == [1.0 / v for v in x]
    steps = {b - a for a, b in itertools.pairwise(x[:-1])}
    assert len(steps) <= 1  # Distances are equal, except the last.
    assert len(x) >= min(passes, limit // 2)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80))
def test_repeated_passes_replace_those_of_an_interrupted_run(numbers: list[int]) -> None:
    curve = ThinnedCurve(["objective"], 20)
    for i, number in enumerate(numbers):
        curve.add(number, {"objective": float(i)})
    x = list(curve.x)
    assert x == sorted(set(x))
    assert x[-1] == numbers[-1]
    assert curve.columns["objective"][-1] == len(numbers) - 1


def test_missing_numbers_are_null_and_empty_columns_are_omitted() -> None:
    curve = ThinnedCurve(["objective", "validation_error"], 10)
    curve.add(1, {"objective": 0.5})
    curve.add(2, {"objective": None})
    assert curve.to_dict() == {"x": [1.0, 2.0], "objective": [0.5, None]}
    assert curve.last("objective") == 0.5
    assert curve.last("validation_error") is None


def test_a_rate_follows_its_amounts_and_falls_to_zero() -> None:
    rate = SmoothedRate(window=3)
    for tenth in range(300):
        rate.add(tenth / 10, 50)
    assert rate.at(30) == pytest.approx(500, rel=0.05)
    for tenth in range(300, 600):
        rate.add(tenth / 10, 5)
    assert rate.at(60) == pytest.approx(50, rel=0.05)
    assert rate.at(200) == 0.0


def test_the_first_amount_counts_if_its_time_is_known() -> None:
    rate = SmoothedRate()
    rate.add(100.0, 500, seconds=2.0)
    assert rate.at(100.5) == pytest.approx(250)


def test_amounts_at_the_same_time_give_a_finite_rate() -> None:
    rate = SmoothedRate()
    for _ in range(3):
        rate.add(5.0, 10)
    assert math.isfinite(rate.at(5.0))
    assert rate.at(5.0) == 0.0
