"""Gradients equal slopes of exact likelihoods and losses; split batches and CSR rows give equal gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from scalelatent.contract.learners import Block
from scalelatent.engine.backend import make_backend
from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.models.crbm.model.energy import CrbmShape, Params
from scalelatent.models.crbm.model.gibbs import Uniforms, run_gibbs_steps, search_lowest_energy
from scalelatent.models.crbm.model.negative_phases import LEARNERS
from tests.models.crbm.cases import (
    central_differences,
    chain_stats,
    gradient,
    index_of,
    list_states,
    log_joint,
    log_likelihood,
    log_sum,
    make_learner,
    make_rows,
    make_theta,
)

# With one hidden or one visible unit the graph is a star, on which belief propagation is exact.
STARS = [CrbmShape(5, 1, 3), CrbmShape(1, 4, 2), CrbmShape(4, 1, 0)]


@pytest.mark.parametrize("shape", STARS, ids=str)
def test_the_mle_bp_gradient_is_the_slope_of_the_exact_likelihood(shape: CrbmShape) -> None:
    theta, rows = make_theta(shape), make_rows(shape, 6)

    def likelihood(flat: np.ndarray) -> float:
        return log_likelihood(shape.split(flat), rows.x, rows.y)

    found = gradient(make_learner(shape, "mle-bp"), theta, rows)
    np.testing.assert_allclose(found, central_differences(likelihood, theta), atol=1e-6)


def test_the_logistic_gradient_is_the_slope_of_its_likelihood() -> None:
    shape = CrbmShape(4, 0, 3)
    theta, rows = make_theta(shape), make_rows(shape, 6)

    def likelihood(flat: np.ndarray) -> float:
        return log_likelihood(shape.split(flat), rows.x, rows.y)

    found = gradient(make_learner(shape, "logistic"), theta, rows)
    np.testing.assert_allclose(found, central_differences(likelihood, theta), atol=1e-6)


def test_mean_field_is_exact_without_couplings() -> None:
    shape = CrbmShape(3, 2, 2)
    theta, rows = make_theta(shape), make_rows(shape, 5)
    shape.split(theta).W[...] = 0
    a, b = (gradient(make_learner(shape, name), theta, rows) for name in ("mle-mf", "mle-bp"))
    np.testing.assert_allclose(a, b, atol=1e-9)


@pytest.mark.parametrize("name", ["cd", "pcd"])
def test_the_gradient_of_long_gibbs_chains_is_the_slope_of_the_exact_likelihood(name: str) -> None:
    """Run 40 Gibbs steps for many copies of a row (cd), or one Gibbs step in each of 40 updates (pcd)."""
    shape, n = CrbmShape(4, 3, 2), 4000
    theta, row = make_theta(shape, scale=1.0), make_rows(shape, 1)
    x, v = np.tile(row.x, (n, 1)), np.tile(row.y, (n, 1))

    def likelihood(flat: np.ndarray) -> float:
        return log_likelihood(shape.split(flat), row.x, row.y)

    def block(step: int) -> Block:
        return Block(x, v, None, 0, np.arange(step * n, (step + 1) * n))

    exact, still = central_differences(likelihood, theta), {"chain_rows": n, "rates": np.array([0.0])}
    near = {"gibbs_steps": 40} if name == "cd" else {"gibbs_steps": 1}
    learner = make_learner(shape, name, **still, **near)
    state = learner.start(theta)
    first = gradient(make_learner(shape, name, **still, gibbs_steps=1), theta, block(0)) / n
    for step in range(40 if name == "pcd" else 0):
        state = learner.step(state, chain_stats(learner, state, block(step)), n)
    found = learner.gradient(chain_stats(learner, state, block(40))) / n
    np.testing.assert_allclose(found, exact, atol=0.03)
    assert np.abs(first - exact).max() > 0.06  # One Gibbs step alone gives another gradient.


@pytest.mark.parametrize("shape", [CrbmShape(4, 1, 3), CrbmShape(4, 1, 0)], ids=str)
@pytest.mark.parametrize(("name", "joint"), [("mssvm", False), ("lssvm", True)])
def test_margin_learners_descend_their_loss(shape: CrbmShape, name: str, joint: bool) -> None:
    """Gradients are negative slopes of the margin loss, whose best states the test finds by enumeration."""
    theta, rows = make_theta(shape, seed=4), make_rows(shape, 4)

    def loss(flat: np.ndarray) -> float:
        total = 0.0
        for x, v in zip(rows.x, rows.y, strict=True):
            log_p = log_joint(shape.split(flat), x)
            best = log_p.max(axis=1) if joint else log_sum(log_p, axis=1)
            delta = (list_states(4) != v).sum(axis=1)
            total += (best + delta).max() - best[index_of(v)]
        return total

    learner = make_learner(shape, name)
    np.testing.assert_allclose(gradient(learner, theta, rows), -central_differences(loss, theta), atol=1e-6)
    backend = make_backend("reference")
    from scalelatent.contract.stats import Stats

    stats = Stats.zeros(learner.layout(), len(rows.x))
    learner.run_chain(learner.prepare(learner.start(theta), backend), rows, stats)
    assert stats["sums"][0] == pytest.approx(loss(theta), abs=1e-5)


def learner_options(name: str) -> dict[str, Any]:
    return {"n_sweeps": 5, "gibbs_steps": LEARNERS[name].gibbs_steps}


@pytest.mark.parametrize("name", list(LEARNERS))
@pytest.mark.parametrize("width", [4, 400])
def test_the_gradient_of_a_split_batch_equals_that_of_the_whole(name: str, width: int) -> None:
    """For wide x, a part of a batch returns factors of the gradient; their product is the same gradient."""
    shape = CrbmShape(12, 0 if name == "logistic" else 3, width)
    theta, rows = make_theta(shape), make_rows(shape, 8)
    learner = make_learner(shape, name, **learner_options(name))
    whole = gradient(learner, theta, rows, "cpu")
    learner = replace(learner, n_chains=3, chain_rows=3)
    parts = [replace(rows.slice_rows(a, a + 3), chain=i) for i, a in enumerate(range(0, 8, 3))]
    assert learner.factored == (width == 400)
    split = sum(gradient(learner, theta, part, "cpu") for part in parts)
    np.testing.assert_allclose(split, whole, atol=2e-5)


@pytest.mark.parametrize("name", ["mle-bp", "cd", "logistic"])
@pytest.mark.parametrize("density", [0.1, 0.9])
def test_sparse_rows_give_the_gradient_of_dense_ones(name: str, density: float) -> None:
    shape = CrbmShape(8, 0 if name == "logistic" else 3, 60)
    theta, rows = make_theta(shape), make_rows(shape, 5)
    x = rows.x * (np.random.default_rng(3).random(rows.x.shape) < density)
    csr = replace(rows, x=CsrRows.from_scipy(csr_array(x)))
    learner, factored = (make_learner(shape, name, chain_rows=rows) for rows in (20, 5))
    assert factored.factored > learner.factored
    dense = gradient(learner, theta, replace(rows, x=x))
    np.testing.assert_allclose(gradient(learner, theta, csr), dense, atol=1e-9)
    np.testing.assert_allclose(gradient(factored, theta, csr), dense, atol=1e-6)


def test_the_numba_gradient_equals_the_reference() -> None:
    shape = CrbmShape(20, 9, 5)
    theta, rows = make_theta(shape, scale=0.3), make_rows(shape, 7)
    for name in ("mle-bp", "mle-mf"):
        learner = make_learner(shape, name, n_sweeps=8)
        a, b = (gradient(learner, theta, rows, device) for device in ("cpu", "reference"))
        np.testing.assert_allclose(a, b, atol=2e-4)


def test_the_perceptron_gradient_is_zero_if_no_better_state_is_found() -> None:
    """If the outputs of a row are the most probable ones under the model, its gradient is zero."""
    shape = CrbmShape(3, 2, 3)
    params = shape.split(theta := np.zeros(shape.n_parameters, np.float32))
    params.Wvx[...] = 30 * np.eye(3)
    params.bv[...] = -15
    rows = make_rows(shape, 6)
    rows = replace(rows, x=rows.y.astype(np.float32))
    learner = make_learner(shape, "cd-percloss")
    assert not gradient(learner, theta, rows).any()
    wrong = replace(rows, x=1 - rows.x)
    assert gradient(learner, theta, wrong).any()


def test_the_search_mostly_finds_states_of_least_free_energy() -> None:
    shape, n = CrbmShape(6, 4, 0), 200
    rng = np.random.default_rng(5)
    theta = shape.split(make_theta(shape, scale=1.5))
    params = Params(**{k: np.asarray(a, np.float64) for k, a in vars(theta).items()})
    b1, b2 = 2 * rng.normal(size=(n, 6)), rng.normal(size=(n, 4))
    start = rng.integers(0, 2, (n, 6)).astype(float)
    numbers = Uniforms(0, 0, np.arange(n))
    best, hidden, energy = search_lowest_energy(params, b1, b2, start, numbers, 30, np)

    def negated(v: np.ndarray) -> np.ndarray:
        return (b1 * v).sum(axis=1) + np.logaddexp(0, v @ params.W + b2).sum(axis=1)

    np.testing.assert_allclose(energy, negated(best), rtol=1e-12)
    np.testing.assert_allclose(hidden, 1 / (1 + np.exp(-(best @ params.W + b2))), rtol=1e-12)
    assert (energy >= negated(start)).all()
    least = np.max([negated(np.tile(v, (n, 1))) for v in list_states(6)], axis=0)
    assert (energy <= least + 1e-12).all()
    assert np.isclose(energy, least).mean() > 0.9
    # Less than 30 % of the rows start in a best state, so the search had to find it.
    assert np.isclose(negated(start), least).mean() < 0.3


def test_gibbs_chains_draw_from_the_model() -> None:
    shape, n = CrbmShape(3, 2, 0), 4000
    theta = make_theta(shape)
    params = Params(**{k: np.asarray(a, np.float64) for k, a in vars(shape.split(theta)).items()})
    b1, b2 = np.tile(params.bv, (n, 1)), np.tile(params.bh, (n, 1))
    numbers = Uniforms(0, 0, np.arange(n))
    v, _ = run_gibbs_steps(params, b1, b2, np.full((n, 2), 0.5), numbers, 12, np)
    joint = log_joint(params, np.zeros(0))
    exact = np.exp(log_sum(joint, axis=1) - log_sum(joint))
    found = np.bincount([index_of(row) for row in v], minlength=8) / n
    np.testing.assert_allclose(found, exact, atol=0.03)


def test_means_of_gibbs_chains_are_the_marginals() -> None:
    shape, n = CrbmShape(7, 5, 0), 8000
    params = Params(**{k: np.asarray(a, np.float64) for k, a in vars(shape.split(make_theta(shape))).items()})
    b1, b2 = np.tile(params.bv, (n, 1)), np.tile(params.bh, (n, 1))
    found = run_gibbs_steps(params, b1, b2, np.full((n, 5), 0.5), Uniforms(0, 0, np.arange(n)), 30, np)
    p = np.exp((joint := log_joint(params, np.zeros(0))) - log_sum(joint))
    for means, want in zip(
        found, (p.sum(axis=1) @ list_states(7), p.sum(axis=0) @ list_states(5)), strict=True
    ):
        np.testing.assert_allclose(means.mean(axis=0), want, atol=0.02)


def test_random_numbers_of_a_row_do_not_depend_on_other_rows() -> None:
    def drawn(seed: int, epoch: int, *counts: int) -> np.ndarray:
        numbers = Uniforms(seed, epoch, np.array([4, 7]))
        return np.hstack([numbers.draw(count).copy() for count in counts])

    a, b = drawn(1, 0, 9), drawn(1, 1, 9)
    assert not (a[0] == a[1]).any()
    assert not (a == b).any()
    assert (a != drawn(2, 0, 9)).all()
    np.testing.assert_array_equal(drawn(1, 0, 4, 2, 3), a)
