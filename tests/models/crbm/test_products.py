"""Products of few rows in register tiles against numpy in float64, and a step from factors against one from
their products.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from scalelatent.models.crbm import products
from scalelatent.models.crbm.gradient import climb_factors, of_factors
from scalelatent.models.crbm.model import CrbmShape
from scalelatent.models.crbm.products import affine, climb_outer, outer_less
from scalelatent.models.crbm.update import Pace, Way, climb

SHAPES = [
    (1, 8, 1),
    (3, 9, 5),
    (10, 784, 784),
    (20, 33, 24),
    (64, 40, 49),
    (65, 31, 30),
    (5, 7, 1025),
    (2, 1, 3),
]


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.fixture(params=["tiles", "library"])
def way_of(request, monkeypatch):
    """Both ways of each product."""
    if request.param == "library":
        monkeypatch.setattr(products, "MAX_ROWS", 0)
    return request.param


@pytest.mark.parametrize(("rows", "units", "features"), SHAPES)
def test_affine(rows, units, features, way_of):
    rng = np.random.default_rng(rows)
    x, w, b = normal(rng, rows, features), normal(rng, units, features), normal(rng, units)
    out = np.full((rows, units), np.nan, dtype=np.float32)
    affine(x, w, b, out, np)
    assert_allclose(out, x.astype("f8") @ w.astype("f8").T + b, rtol=0, atol=1e-6 * features + 1e-5)


@pytest.mark.parametrize(("rows", "units", "features"), SHAPES)
def test_outer_less(rows, units, features, way_of):
    rng = np.random.default_rng(rows)
    left, right, less = normal(rng, rows, units), normal(rng, rows, features), normal(rng, units, features)
    out = np.full((units, features), np.nan, dtype=np.float32)
    outer_less(left, right, less, out, np)
    assert_allclose(out, left.astype("f8").T @ right.astype("f8") - less, rtol=0, atol=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("rows", "units", "features"), SHAPES)
def test_climb_outer(rows, units, features, momentum, way_of):
    rng = np.random.default_rng(rows)
    left, right, theta = normal(rng, rows, units), normal(rng, rows, features), normal(rng, units, features)
    velocity = normal(rng, *theta.shape) if momentum else np.zeros((0, features), np.float32)
    before = theta.copy(), velocity.copy()
    way = Way(theta, velocity, np.full_like(theta, np.nan), np.full_like(velocity, np.nan))
    climb_outer(way, left, right, Pace(0.1, 0.01, momentum))
    move = 0.1 * left.astype("f8").T @ right.astype("f8") - 0.01 * theta
    if momentum:
        move += momentum * velocity
        assert_allclose(way.speed, move, rtol=0, atol=2e-5)
    assert_allclose(way.out, theta + move, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(theta, before[0])
    np.testing.assert_array_equal(velocity, before[1])


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("n_hidden", [0, 11])
def test_a_step_from_factors_is_that_of_their_products(momentum, n_hidden):
    rng, shape, rows = np.random.default_rng(1), CrbmShape(30, n_hidden, 26), 7
    w, dv, dh, x = (rng.normal(size=s) for s in ((30, n_hidden), (rows, 30), (rows, n_hidden), (rows, 26)))
    theta = normal(rng, shape.n_parameters)
    velocity = normal(rng, len(theta)) if momentum else np.zeros(0, np.float32)
    ways = [Way(theta, velocity, np.empty_like(theta), np.empty_like(velocity)) for _ in range(2)]
    pace = Pace(0.2, 0.05, momentum)
    climb_factors(shape, ways[0], w, dv, dh, x, pace)
    climb(ways[1], of_factors(shape, w, dv, dh, x, np.float64), shape.n_weights, pace)
    assert_allclose(ways[0].out, ways[1].out, rtol=0, atol=1e-5)
    assert_allclose(ways[0].speed, ways[1].speed, rtol=0, atol=1e-5)


def test_a_row_has_the_same_logits_beside_any_others():
    rng = np.random.default_rng(2)
    x, w, b = normal(rng, 20, 50), normal(rng, 33, 50), normal(rng, 33)
    whole, part = np.empty((20, 33), np.float32), np.empty((3, 33), np.float32)
    affine(x, w, b, whole, np)
    affine(x[11:14], w, b, part, np)
    np.testing.assert_array_equal(part, whole[11:14])
