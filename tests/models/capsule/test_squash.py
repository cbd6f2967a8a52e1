"""The functions I_s(b) of capsule regression (Saul 2021, equation A.1) and their table are accurate.

lambda0 is I_s for s = D/2 and lambda1 for s = D/2 + 1, with D the sum of all capsule dimensions.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import hyp1f1

from scalelatent.models.capsule.kernels.reference import probabilities
from scalelatent.models.capsule.kernels.squash import squash_integral, squash_table

EXPONENTS = [0, 0.5, 1, 1.5, 2, 2.5, 5, 9.5, 10, 39, 64.5, 160, 320, 320.5, 1000]


def integrate(s: float, b: float) -> float:
    # With the variable rho = 1 - u/b of the paper, I_s(b) is the integral of (1 - u/b)^s e^-u over u from 0
    # to b. This form has no large numbers, and its integrand is negligible above u = 50.
    pieces = np.unique(np.clip([0.0, min(b, b / (s + 1)), min(b, 10 * b / (s + 1)), min(b, 50.0), b], 0, b))
    value = 0.0
    for low, high in itertools.pairwise(pieces):
        value += quad(
            lambda u: (1 - u / b) ** s * np.exp(-u), low, high, epsabs=1e-15, epsrel=1e-13, limit=200
        )[0]
    return value


@pytest.mark.parametrize("s", EXPONENTS)
def test_functions_equal_quadrature(s: float) -> None:
    b = np.array([1e-6, 1e-2, 0.5, 1.0, 3.0, max(s, 0.1), s + 0.5, 2 * s + 1, 100.0, 1e3, 1e4])
    expected = [integrate(s, value) for value in b]
    np.testing.assert_allclose(squash_integral(s, b), expected, rtol=2e-12, atol=1e-15)


@pytest.mark.parametrize("s", EXPONENTS)
def test_functions_equal_kummers_function(s: float) -> None:
    # I_s(b) = b/(s+1) M(1, s+2, -b) with Kummer's function M, whose series loses digits for large b. By
    # Kummer's transformation M(1, s+2, -b) = e^-b M(s+1, s+2, b), whose terms are all positive. scipy
    # computes M(s+1, s+2, b) accurately as long as e^b does not overflow.
    b = np.concatenate([np.linspace(1e-3, 20, 41), np.linspace(25, 600, 24)])
    expected = b / (s + 1) * np.exp(-b) * hyp1f1(s + 1, s + 2, b)
    good = np.isfinite(expected)
    assert good[b <= 20].all()
    np.testing.assert_allclose(squash_integral(s, b)[good], expected[good], rtol=1e-10)
    small = b < 15
    plain = b[small] / (s + 1) * hyp1f1(1, s + 2, -b[small])
    # The series of M(1, s+2, -b) alternates: its relative error is at most about e^15 * 1e-16 = 3e-10.
    np.testing.assert_allclose(squash_integral(s, b[small]), plain, rtol=1e-9)


def test_functions_have_known_values() -> None:
    b = np.array([0.3, 2.0, 50.0])
    np.testing.assert_allclose(squash_integral(0, b), 1 - np.exp(-b), rtol=1e-15)
    np.testing.assert_allclose(squash_integral(1, b), 1 - (1 - np.exp(-b)) / b, rtol=1e-14)


@given(st.integers(0, 4000), st.floats(0, 1e4))
def test_functions_stay_within_the_bounds_of_the_paper(twice_s: int, b: float) -> None:
    """The bounds are b/(b+s+1) <= I_s(b) <= b/(b+s) (equation A.4 of Saul 2021)."""
    s = twice_s / 2
    value = float(squash_integral(s, b))
    slack = 4e-16  # Each side of the inequality is rounded once.
    assert b / (b + s + 1) - slack <= value
    if b + s > 0:
        assert value <= b / (b + s) + slack


@given(st.integers(0, 1000))
def test_functions_increase_with_b_and_decrease_with_s(twice_s: int) -> None:
    b = np.concatenate([np.geomspace(1e-8, 1e4, 400)])
    lower, upper = squash_integral(twice_s / 2, b), squash_integral(twice_s / 2 + 1, b)
    assert (np.diff(lower) >= -2e-16).all()
    assert lower[-1] > 0.6
    assert (upper <= lower + 2e-16).all()


@pytest.mark.parametrize("s", EXPONENTS)
def test_the_two_recursions_meet(s: float) -> None:
    """The code uses one recursion below b = s and another above, so both must agree at b = s."""
    if s == 0:
        return
    b = np.array([s, np.nextafter(s, np.inf)])
    below, above = squash_integral(s, b)
    assert abs(above - below) < 4e-15


@pytest.mark.parametrize("s", EXPONENTS)
def test_zero_gives_zero_without_a_warning(s: float) -> None:
    with np.errstate(all="raise"):
        assert squash_integral(s, np.zeros(3)).tolist() == [0.0] * 3
    assert squash_integral(s, 0.0).shape == ()


@pytest.mark.parametrize("s", [-0.5, -1, 0.25, 1.3])
def test_exponents_that_are_not_multiples_of_a_half_are_refused(s: float) -> None:
    with pytest.raises(ValueError, match="multiple of 1/2"):
        squash_integral(s, np.ones(1))


DIMENSIONS = [*range(2, 41), 63, 64, 65, 99, 160, 161, 319, 320, 321, 640, 1001, 1280, 2047, 2999, 3999, 4000]


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_the_table_has_errors_below_1e_12(dimension: int) -> None:
    rng = np.random.Generator(np.random.Philox(dimension))
    b = np.concatenate(
        [[0.0, 1e-300, 1e-12], rng.uniform(0, 2 * dimension, 400), 10 ** rng.uniform(-6, 12, 400)]
    )
    table = squash_table(dimension)
    for extra, got in zip((0, 1), table(b), strict=True):
        assert np.abs(got - squash_integral(dimension / 2 + extra, b)).max() < 1e-12
        assert got[0] == 0.0
        assert (got >= 0).all()
        assert (got <= 1 + 1e-15).all()


def test_table_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        squash_table(20).coefficients[0, 0] = 1.0


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_the_complement_of_lambda0_is_better_than_float32_up_to_very_long_capsules(dimension: int) -> None:
    """1 - lambda0(|h|^2 / 2) keeps the 24 bits of float32 latents h up to |h|^2 = 1e8 D.

    D is the number of latents. The probability of a class whose capsule is not the longest depends on
    1 - lambda0, which is small for long rows.
    """
    s, rng = dimension / 2, np.random.default_rng(dimension)
    b = s * 10 ** rng.uniform(-3, 8, 2000)
    # By equation A.3 of Saul (2021), 1 - I_s = s/b I_{s-1}. The right side has no difference of near numbers.
    exact = s / b * squash_integral(s - 1, b)
    for found in (squash_table(dimension)(b)[0], squash_integral(s, b)):
        assert np.abs((1 - found) / exact - 1).max() < 2.0**-24


@pytest.mark.parametrize("tabled", [False, True])
@pytest.mark.parametrize("size", [1, 8, 64])
def test_the_likeliest_class_is_the_longest_capsule_of_equal_dimensions(size: int, tabled: bool) -> None:
    """If all capsules have one size, the probability of class i grows with the squared length |h_i|^2.

    D is the number of all latents h. Rounding of probabilities hides the last bit of h only in rows with
    |h|^2 < 1e-6 D, whose classes are nearly equally probable.
    """
    rng, n = np.random.default_rng(size), 400
    h = rng.normal(size=(10 * size, n)).astype("f4")
    h[:size] *= 4
    h *= np.sqrt(10 * size * 10 ** rng.uniform(-6, 8, n) / (h * h).sum(axis=0)).astype("f4")
    first, second = h[:size].copy(), h[size : 2 * size]
    # Capsule 1 is longer than capsule 0 by the last bit of each latent.
    second[:] = np.nextafter(first, np.float32(np.inf) * np.sign(first))
    q = (h.astype("f8") ** 2).reshape(10, size, n).sum(axis=1)
    p = probabilities(h, np.full(10, size), squash_table(10 * size) if tabled else None)
    np.testing.assert_array_equal(p.argmax(axis=0), q.argmax(axis=0))
    assert (q.argmax(axis=0) == 1).mean() > 0.5  # The last bits decide in most rows.
