"""Closed forms of posteriors agree with draws of latents h ~ N(Wx, I) and classes y.

The probability of class y given h is |h_y|^2 / |h|^2, where h_y are the latents of the capsule of class y.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.models.capsule.kernels.reference import posterior_ratios, probabilities
from scalelatent.models.capsule.kernels.squash import squash_table

DRAWS = 200_000
SIGMAS = 4.5  # Allowed error in standard errors, which none of about 450 comparisons should exceed.
SHAPES = {
    "equal": [2, 2, 2],
    "odd D": [1, 1, 1],
    "smallest": [1, 1],
    "unequal": [1, 2, 4],
    "unequal, odd D": [3, 1, 1],
    "larger": [4, 4, 4, 4],
}


def draw_means(dims: np.ndarray, scale: float, seed: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(seed)).normal(size=dims.sum()) * scale


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("name", SHAPES)
def test_closed_forms_agree_with_monte_carlo(name: str, scale: float) -> None:
    dims = np.array(SHAPES[name])
    mean = draw_means(dims, scale, 5)
    rng = np.random.Generator(np.random.Philox(11))
    h = mean[:, None] + rng.normal(size=(dims.sum(), DRAWS))
    starts = np.concatenate([[0], np.cumsum(dims)[:-1]])
    q = np.add.reduceat(h * h, starts, axis=0)
    share = q / q.sum(axis=0)

    p = probabilities(mean[:, None], dims)[:, 0]
    error = share.std(axis=1) / np.sqrt(DRAWS)
    assert (np.abs(share.mean(axis=1) - p) < SIGMAS * error).all()

    for y in range(len(dims)):
        ratios, _ = posterior_ratios(mean[:, None], np.array([y]), dims)
        expected = np.repeat(ratios[:, 0], dims) * mean
        # The draws have importance weights w = |h_y|^2/|h|^2: E[h | y] = E[h w] / E[w]. The standard error of
        # this ratio follows by linearisation.
        w = share[y] / share[y].mean()
        found = (h * w).mean(axis=1)
        error = (w * (h - found[:, None])).std(axis=1) / np.sqrt(DRAWS)
        assert (np.abs(found - expected) < SIGMAS * error).all()


DIMS = st.lists(st.integers(1, 6), min_size=2, max_size=6).map(np.array)


@given(DIMS, st.integers(0, 2**32), st.floats(0, 1e3))
def test_probabilities_are_a_distribution(dims: np.ndarray, seed: int, scale: float) -> None:
    h = np.random.Generator(np.random.Philox(seed)).normal(size=(dims.sum(), 7)) * scale
    for table in (None, squash_table(int(dims.sum()))):
        p = probabilities(h, dims, table)
        assert p.shape == (len(dims), 7)
        assert (p >= 0).all()
        # Divisions and the interpolated table round a few times.
        np.testing.assert_allclose(p.sum(axis=0), 1, rtol=0, atol=1e-12)


@given(DIMS, st.integers(0, 2**32))
def test_posterior_means_average_to_the_prior_mean(dims: np.ndarray, seed: int) -> None:
    """The posterior means of all classes, weighted by probability, sum to Wx: sum_y P(y|x) E[h|y,x] = Wx."""
    h = np.random.Generator(np.random.Philox(seed)).normal(size=(dims.sum(), 5)) * 2
    total = np.zeros((len(dims), 5))
    for y in range(len(dims)):
        ratios, p = posterior_ratios(h, np.full(5, y), dims)
        total += p[y] * ratios
    np.testing.assert_allclose(total, 1, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dims", [[1, 1], [2, 2, 2], [1, 4]])
def test_a_row_of_zeros_gives_prior_probabilities(dims: list[int]) -> None:
    sizes = np.array(dims)
    with np.errstate(all="raise"):
        ratios, p = posterior_ratios(np.zeros((sizes.sum(), 1)), np.array([1]), sizes)
    np.testing.assert_allclose(p[:, 0], sizes / sizes.sum(), rtol=1e-15)
    assert np.isfinite(ratios).all()


def test_equal_dimensions_predict_the_longest_capsule() -> None:
    h = np.random.Generator(np.random.Philox(3)).normal(size=(12, 200))
    lengths = (h.reshape(4, 3, 200) ** 2).sum(axis=1)
    np.testing.assert_array_equal(probabilities(h, np.full(4, 3)).argmax(axis=0), lengths.argmax(axis=0))


def test_unequal_dimensions_weigh_short_rows_by_dimension() -> None:
    """In short rows, a shorter capsule with more dimensions may be more probable than a longer one."""
    h = np.array([[0.2], [0.0], [0.0], [0.0], [0.1]])
    assert probabilities(h, np.array([1, 4]))[:, 0].argmax() == 1
    assert probabilities(100 * h, np.array([1, 4]))[:, 0].argmax() == 0
