"""Products of few rows with the parameters equal those of numpy in float64.

A gradient step from factors of the gradient equals a step from their products.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from scalelatent.engine.backend import make_backend
from scalelatent.models.crbm.kernels import products
from scalelatent.models.crbm.kernels.products import (
    add_outer_difference,
    ascend_outer,
    ascend_outer_difference,
    write_affine_map,
    write_outer_difference,
)
from scalelatent.models.crbm.kernels.update import StepArrays, StepRates, ascend
from scalelatent.models.crbm.model import gradient
from scalelatent.models.crbm.model.energy import CrbmShape, Observed, compute_log_loss, sigmoid
from scalelatent.models.crbm.model.gradient import ascend_factors, ascend_phase, compute_gradient
from scalelatent.models.crbm.model.negative_phases import Phase
from tests.models.crbm.cases import gradient_of_factors

SHAPES = [
    (1, 8, 1),
    (3, 9, 5),
    (10, 784, 784),
    (20, 33, 24),
    (64, 40, 49),
    (65, 31, 30),
    (170, 19, 37),
    (5, 7, 1025),
    (2, 1, 3),
    (40, 300, 25),
    (3, 9, 0),
]


def draw_normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.fixture(params=["tiles", "library"])
def implementation(request, monkeypatch):
    """Run a test with kernels for few rows ("tiles") and, by MAX_ROWS = 0, with numpy and BLAS."""
    if request.param == "library":
        monkeypatch.setattr(products, "MAX_ROWS", 0)
    return request.param


@pytest.mark.parametrize(("rows", "units", "features"), SHAPES)
def test_affine_products_equal_numpy(rows, units, features, implementation):
    rng = np.random.default_rng(rows)
    x, w, b = draw_normal(rng, rows, features), draw_normal(rng, units, features), draw_normal(rng, units)
    out = np.full((rows, units), np.nan, dtype=np.float32)
    write_affine_map(x, w, b, out, np)
    assert_allclose(out, x.astype("f8") @ w.astype("f8").T + b, rtol=0, atol=1e-6 * features + 1e-5)


@pytest.mark.parametrize("units", [1, 2, 5, 7])
def test_the_bits_of_a_row_do_not_depend_on_its_position(units, implementation):
    """BLAS sums the last rows of a matrix times a vector in another order, so einsum computes the product."""
    rng = np.random.default_rng(units)
    for rows, features in ((20, 3), (33, 70), (201, 17)):
        x, w, b = draw_normal(rng, rows, features), draw_normal(rng, units, features), draw_normal(rng, units)
        order, found = rng.permutation(rows), np.empty((2, rows, units), dtype=np.float32)
        write_affine_map(x, w, b, found[0], np)
        write_affine_map(x[order], w, b, found[1], np)
        np.testing.assert_array_equal(found[0][order], found[1])


@pytest.mark.parametrize(("rows", "units", "features"), SHAPES)
def test_differences_of_outer_products_equal_numpy(rows, units, features, implementation):
    rng = np.random.default_rng(rows)
    left, right, less = (
        draw_normal(rng, rows, units),
        draw_normal(rng, rows, features),
        draw_normal(rng, units, features),
    )
    out = np.full((units, features), np.nan, dtype=np.float32)
    write_outer_difference(left, right, less, out, np)
    assert_allclose(out, left.astype("f8").T @ right.astype("f8") - less, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("rows", "units", "features"), SHAPES)
def test_differences_of_outer_products_are_added(rows, units, features, implementation):
    rng = np.random.default_rng(rows)
    left, right, less = (
        draw_normal(rng, rows, units),
        draw_normal(rng, rows, features),
        draw_normal(rng, units, features),
    )
    total = rng.normal(size=(units, features))
    expected = total + (left.astype("f8").T @ right.astype("f8") - less)
    add_outer_difference(left, right, less, total, make_backend("cpu"))
    assert_allclose(total, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.01), (0.9, 0.01), (0.0, 0.0)])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_step_along_a_difference_of_outer_products_equals_numpy(momentum, decay, in_place, implementation):
    rng = np.random.default_rng(7)
    for rows, units, features in SHAPES:
        left, right = draw_normal(rng, rows, units), draw_normal(rng, rows, features)
        theta, less = draw_normal(rng, units, features), draw_normal(rng, units, features)
        velocity = draw_normal(rng, units if momentum else 0, features)
        gradient = left.astype("f8").T @ right.astype("f8") - less
        move = 0.1 * gradient - decay * theta + (momentum * velocity if momentum else 0)
        expected = theta + move
        new = (theta, velocity) if in_place else (np.empty_like(theta), np.empty_like(velocity))
        ascend_outer_difference(
            StepArrays(theta, velocity, *new),
            left,
            right,
            less,
            StepRates(0.1, decay, momentum),
            make_backend("cpu"),
        )
        assert_allclose(new[0], expected, rtol=0, atol=2e-5)
        if momentum:
            assert_allclose(new[1], move, rtol=0, atol=2e-5)


@pytest.mark.parametrize("units", [1, 511, 512, 513, 1030])
def test_the_log_loss_of_units_equals_float64(units, implementation):
    """The log-loss is right even for log odds of 0, and of 70, whose P(unit = 1) float32 rounds to 1."""
    rng = np.random.default_rng(units)
    lv, v = 9 * draw_normal(rng, 3, units), rng.integers(0, 2, (3, units)).astype("f4")
    lv[0], lv[1, ::2], lv[1, 1::2] = 0.0, 70.0, -70.0
    expected = np.logaddexp(0, lv.astype("f8")) - lv * v
    found = compute_log_loss(lv, sigmoid(lv, np), v, np)
    assert_allclose(found, expected.sum(axis=1), rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.0, 0.02), (0.5, 0.02)])
def test_ascend_phase_steps_along_the_gradient_of_the_phase(paired, momentum, decay, monkeypatch):
    rng, shape, rows, backend = np.random.default_rng(5), CrbmShape(30, 11, 26), 7, make_backend("cpu")
    sizes = {"visible": (rows, 30), "hidden": (rows, 11), "positive": (rows, 11), "pairs": (30, 11)}
    found = {name: draw_normal(rng, *size) for name, size in sizes.items()}
    phase = Phase(**(found | {"loss": 0, "wrong": 0} | ({} if paired else {"pairs": None})))
    v, seen = draw_normal(rng, rows, 30), Observed(draw_normal(rng, rows, 26), None)
    theta = draw_normal(rng, shape.n_parameters)
    velocity = draw_normal(rng, len(theta)) if momentum else np.zeros(0, np.float32)
    step_rates, steps = StepRates(0.2, decay, momentum), []
    for _ in range(2):
        new = theta.copy(), velocity.copy()
        steps.append(StepArrays(*new, *new))
    ascend(steps[1], compute_gradient(shape, backend, theta, seen, v, phase), shape.n_weights, step_rates)
    # The step must not call the function that stores the whole gradient.
    monkeypatch.delattr(gradient, "compute_gradient")
    ascend_phase(shape, backend, steps[0], seen, v, phase, step_rates)
    assert_allclose(steps[0].new_theta, steps[1].new_theta, rtol=0, atol=1e-5)
    assert_allclose(steps[0].new_velocity, steps[1].new_velocity, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.01), (0.9, 0.01), (0.0, 0.0)])
@pytest.mark.parametrize(("rows", "units", "features"), SHAPES)
def test_a_step_along_an_outer_product_equals_numpy(rows, units, features, momentum, decay, implementation):
    rng = np.random.default_rng(rows)
    left, right, theta = (
        draw_normal(rng, rows, units),
        draw_normal(rng, rows, features),
        draw_normal(rng, units, features),
    )
    velocity = draw_normal(rng, *theta.shape) if momentum else np.zeros((0, features), np.float32)
    before = theta.copy(), velocity.copy()
    step = StepArrays(theta, velocity, np.full_like(theta, np.nan), np.full_like(velocity, np.nan))
    ascend_outer(step, left, right, StepRates(0.1, decay, momentum))
    move = 0.1 * left.astype("f8").T @ right.astype("f8") - decay * theta
    if momentum:
        move += momentum * velocity
        assert_allclose(step.new_velocity, move, rtol=0, atol=2e-5)
    assert_allclose(step.new_theta, theta + move, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(theta, before[0])
    np.testing.assert_array_equal(velocity, before[1])
    ascend_outer(StepArrays(theta, velocity, theta, velocity), left, right, StepRates(0.1, decay, momentum))
    np.testing.assert_array_equal(theta, step.new_theta)
    np.testing.assert_array_equal(velocity, step.new_velocity)


def test_ascend_outer_without_momentum_and_decay_has_the_bits_of_a_step_with_both_zero(implementation):
    """Without momentum and decay, a separate kernel reads the parameters once instead of twice."""
    rng = np.random.default_rng(4)
    left, right, theta = draw_normal(rng, 20, 70), draw_normal(rng, 20, 100), draw_normal(rng, 70, 100)
    none, still = np.zeros((0, 100), np.float32), np.zeros_like(theta)
    steps = [StepArrays(theta, v, np.empty_like(theta), v.copy()) for v in (none, still)]
    for step in steps:
        ascend_outer(step, left, right, StepRates(0.1, 0.0, 0.0))
    np.testing.assert_array_equal(steps[0].new_theta, steps[1].new_theta)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("n_hidden", [0, 11])
def test_a_step_from_factors_equals_a_step_from_their_products(momentum, n_hidden):
    rng, shape, rows = np.random.default_rng(1), CrbmShape(30, n_hidden, 26), 7
    sizes = {"W": (30, n_hidden), "dv": (rows, 30), "dh": (rows, n_hidden), "x": (rows, 26)}
    factors = {name: rng.normal(size=size) for name, size in sizes.items()}
    theta = draw_normal(rng, shape.n_parameters)
    velocity = draw_normal(rng, len(theta)) if momentum else np.zeros(0, np.float32)
    steps = [StepArrays(theta, velocity, np.empty_like(theta), np.empty_like(velocity)) for _ in range(2)]
    step_rates = StepRates(0.2, 0.05, momentum)
    ascend_factors(shape, steps[0], *factors.values(), step_rates)
    ascend(steps[1], gradient_of_factors(factors), shape.n_weights, step_rates)
    assert_allclose(steps[0].new_theta, steps[1].new_theta, rtol=0, atol=1e-5)
    assert_allclose(steps[0].new_velocity, steps[1].new_velocity, rtol=0, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_decay_far_below_the_rounding_of_parameters_is_not_lost(momentum, implementation):
    """The decay changes a parameter by less than float32 resolves, but the mean over many must be right."""
    rng, n = np.random.default_rng(3), 400
    theta = np.full((n, n), 0.1, np.float32)
    velocity = np.zeros_like(theta) if momentum else np.zeros((0, n), np.float32)
    step = StepArrays(theta, velocity, np.empty_like(theta), np.empty_like(velocity))
    left, right = draw_normal(rng, 4, n), draw_normal(rng, 4, n)
    ascend_outer(step, left, right, StepRates(1e-7, 3e-8, momentum))
    noise = 1e-7 * left.astype("f8").T @ right.astype("f8")
    # Parameters are rounded to 7e-9, so the mean of 160,000 has an error of 1e-11.
    assert abs((step.new_theta - theta.astype("f8") - noise).mean() + 3e-9) < 3e-10


def test_the_logits_of_a_row_do_not_depend_on_other_rows():
    rng = np.random.default_rng(2)
    x, w, b = draw_normal(rng, 20, 50), draw_normal(rng, 33, 50), draw_normal(rng, 33)
    whole, part = np.empty((20, 33), np.float32), np.empty((3, 33), np.float32)
    write_affine_map(x, w, b, whole, np)
    write_affine_map(x[11:14], w, b, part, np)
    np.testing.assert_array_equal(part, whole[11:14])
