"""Steps of conditional RBMs follow formulas; validation errors set the learning rate and the end of a fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scalelatent.contract.stats import Stats
from scalelatent.errors import DivergenceError
from scalelatent.models.crbm.model.energy import CrbmShape
from scalelatent.models.crbm.model.online import CrbmLearner
from scalelatent.models.crbm.model.predict import CrbmScoring
from scalelatent.models.crbm.model.state import CrbmState
from tests.models.crbm.cases import (
    chain_stats,
    gradient,
    gradient_of_factors,
    make_learner,
    make_rows,
    make_theta,
)

SHAPE = CrbmShape(6, 3, 4)


@pytest.mark.parametrize("shape", [SHAPE, CrbmShape(12, 3, 400)])
def test_a_step_follows_the_formulas_of_momentum_and_decay(shape: CrbmShape) -> None:
    theta, rows = make_theta(shape, scale=0.1), make_rows(shape, 8)
    learner = make_learner(shape, "mle-bp", momentum=0.9, weight_decay=0.01, rates=np.array([0.1, 0.02]))
    assert learner.factored == (shape != SHAPE)
    state = replace(learner.start(theta), velocity=np.full_like(theta, 0.5), iteration=1)
    stats = chain_stats(learner, state, rows)
    decayed = np.where(np.arange(len(theta)) < shape.n_weights, theta, 0)
    total = gradient_of_factors(stats) if learner.factored else learner.gradient(stats)
    velocity = 0.9 * 0.5 + 0.02 * (total / 8 - 0.01 * decayed)
    found = learner.step(state, stats, 8)
    np.testing.assert_allclose(found.velocity, velocity, atol=1e-6)
    np.testing.assert_allclose(found.theta, theta + velocity, atol=1e-6)
    assert (state.theta == theta).all()
    assert (state.velocity == 0.5).all()
    assert found.steps == 1


@pytest.mark.parametrize("name", ["mle-bp", "cd", "pcd"])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_local_steps_of_one_chain_are_plain_steps(name: str, momentum: float) -> None:
    theta, rows = make_theta(SHAPE), make_rows(SHAPE, 11)
    options = {"momentum": momentum, "n_sweeps": 5, "chain_rows": 4}
    plain = make_learner(SHAPE, name, **options)
    state = plain.start(theta)
    for a in range(0, 11, 4):
        part = rows.slice_rows(a, a + 4)
        state = plain.step(state, chain_stats(plain, state, part), len(part.x))
    local = make_learner(SHAPE, name, local_steps=3, **options)
    first = local.start(theta)
    walked = local.step(first, chain_stats(local, first, rows), 11)
    np.testing.assert_allclose(walked.theta, state.theta, atol=1e-6)
    np.testing.assert_allclose(walked.velocity, state.velocity, atol=1e-6)
    np.testing.assert_allclose(walked.particles, state.particles, atol=1e-6)
    np.testing.assert_allclose(walked.sums, state.sums, rtol=1e-6)


def test_chains_of_local_steps_are_averaged() -> None:
    theta, rows = make_theta(SHAPE), make_rows(SHAPE, 8)
    learner = make_learner(SHAPE, "mle-bp", local_steps=2, chain_rows=2, n_chains=2, momentum=0.5)
    state = learner.start(theta)
    parts = [chain_stats(learner, state, replace(rows.slice_rows(a, a + 4), chain=a // 4)) for a in (0, 4)]
    alone = [learner.step(state, part, 4) for part in parts]
    both = learner.step(state, parts[0].merge(parts[1]), 8)
    np.testing.assert_allclose(both.theta, (alone[0].theta + alone[1].theta) / 2, atol=1e-6)
    np.testing.assert_allclose(both.velocity, (alone[0].velocity + alone[1].velocity) / 2, atol=1e-6)


def test_persistent_chains_continue_from_their_states() -> None:
    theta, rows = make_theta(SHAPE), make_rows(SHAPE, 6)
    learner = make_learner(SHAPE, "pcd", n_chains=2, chain_rows=3)
    state = learner.start(theta)
    first = chain_stats(learner, state, replace(rows.slice_rows(0, 3), chain=0))
    second = chain_stats(learner, state, replace(rows.slice_rows(3, 5), chain=1))
    after = learner.step(state, first.merge(second), 5)
    assert (after.particles[:5] != 0.5).all()
    assert (
        after.particles[5] == 0.5
    ).all()  # The step had five rows, so it did not use the sixth Gibbs chain.
    # The state of the Gibbs chains affects the next gradient.
    fresh = replace(after, particles=state.particles)
    next_rows = replace(rows.slice_rows(0, 3), epoch=1)
    a, b = (chain_stats(learner, s, next_rows).vector for s in (after, fresh))
    assert not np.allclose(a, b)


def score_epoch(learner: CrbmLearner, state: CrbmState, wrong: int) -> CrbmState:
    stats = Stats.zeros(learner.validation().layout())
    stats["units"][:] = [wrong, 100, wrong / 2, 20]
    return learner.end_epoch(learner.validated(state, stats))


def test_the_best_epoch_is_kept_and_patience_ends_the_fit() -> None:
    learner = make_learner(SHAPE, "mle-bp", has_validation=True, patience=2)
    state = learner.start(make_theta(SHAPE))
    thetas = []
    for epoch, wrong in enumerate((9, 5, 7, 5)):
        state = replace(state, theta=make_theta(SHAPE, seed=epoch))
        thetas.append(state.theta)
        state = score_epoch(learner, state, wrong)
        assert learner.is_done(state) == (epoch == 3)
    kept, epoch = learner.best_parameters(state)
    assert epoch == 2
    assert (kept == thetas[1]).all()
    reported = learner.summary(state)
    assert reported["best_error"] == 0.05
    assert reported["validation_error"] == 0.05
    assert reported["changed_error"] == pytest.approx(2.5 / 20)


def test_a_small_gain_is_kept_and_does_not_reset_the_patience() -> None:
    learner = make_learner(SHAPE, "mle-bp", has_validation=True, patience=2, gain=0.1)
    state = learner.start(make_theta(SHAPE))
    for wrong in (60, 50, 46, 45):
        state = score_epoch(learner, state, wrong)
    assert state.best_epoch == 4
    assert state.n_drops == 1


def test_learning_continues_from_the_best_parameters_at_a_lower_rate_until_that_gains_nothing() -> None:
    rates = np.array([0.2, 0.1])
    learner = make_learner(SHAPE, "mle-bp", has_validation=True, patience=2, gain=0.1, rates=rates)
    state, thetas, used = learner.start(make_theta(SHAPE)), [], []
    for epoch, wrong in enumerate((60, 50, 70, 55, 40, 48, 42, 39, 41)):
        assert not learner.is_done(state)
        state = replace(state, theta=make_theta(SHAPE, seed=epoch))
        thetas.append(state.theta)
        state = score_epoch(learner, state, wrong)
        used.append(learner.summary(state)["learning_rate"])
        if epoch in (3, 6):  # The error has not fallen by ``gain`` for two epochs, the patience.
            assert (state.theta == thetas[state.best_epoch - 1]).all()
    assert learner.is_done(state)
    assert used == pytest.approx([0.2, 0.1, 0.1, 0.1, *[0.1 / 4] * 3, *[0.1 / 16] * 2])
    assert state.best_epoch == 8


def test_learning_rates_follow_the_epoch() -> None:
    learner = make_learner(SHAPE, "mle-bp", rates=np.array([0.05, 0.02]))
    assert [learner.rate(epoch) for epoch in range(4)] == [0.05, 0.02, 0.02, 0.02]


def test_sweeps_grow_with_the_epoch_as_in_the_paper() -> None:
    """The number T of sweeps (rounds of messages) is 8 in the first epoch, and 17 in the tenth.

    With strong couplings, the gradient after 8 sweeps differs from that after 17 sweeps.
    """
    theta, rows = make_theta(SHAPE, scale=3.0), make_rows(SHAPE, 4)
    learner = make_learner(SHAPE, "mle-bp", n_sweeps=None)
    fixed = {t: make_learner(SHAPE, "mle-bp", n_sweeps=t) for t in (8, 17)}
    for epoch, t in ((0, 8), (9, 17)):
        at = replace(rows, epoch=epoch)
        assert (gradient(learner, theta, at) == gradient(fixed[t], theta, at)).all()
    a, b = (gradient(learner, theta, replace(rows, epoch=epoch)) for epoch in (0, 9))
    assert (a != b).any()


@pytest.mark.parametrize("bad", [41.0, np.nan, -np.inf])
@pytest.mark.parametrize("local", [0, 2])
def test_weights_above_40_or_not_finite_end_the_fit_with_a_recommended_rate(bad: float, local: int) -> None:
    learner = make_learner(SHAPE, "mle-bp", rates=np.array([0.05]), local_steps=local)
    state = replace(learner.start(make_theta(SHAPE)), iteration=3, steps=70)
    stats = Stats.zeros(learner.layout())
    stats["chains"][...] = 1
    stats["W"][2, 1] = bad * 8 / 0.05
    message = "in epoch 4, step 71, at learning_rate=0.05: try learning_rate=0.02.*last good checkpoint"
    with pytest.raises(FloatingPointError, match=message):
        learner.step(state, stats, 8)


@pytest.mark.parametrize("field", ["W", "bv", "bh"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_parameters_that_are_not_finite_end_the_fit_at_once(field: str, bad: float) -> None:
    learner = make_learner(SHAPE, "mle-bp")
    state = learner.start(make_theta(SHAPE))
    stats = Stats.zeros(learner.layout())
    stats[field].flat[1] = bad
    with pytest.raises(DivergenceError, match="parameters are no longer finite in epoch 1, step 1"):
        learner.step(state, stats, 8)


def test_without_hidden_units_weights_may_be_large() -> None:
    shape = CrbmShape(6, 0, 4)
    learner = make_learner(shape, "logistic")
    stats = Stats.zeros(learner.layout())
    stats["Wvx"][0] = 1e4
    found = learner.step(learner.start(make_theta(shape)), stats, 8)
    assert found.theta.max() > 40
    found.theta[0] = np.nan  # The step does not check Wvx, but a row whose biases become NaN ends the fit.
    with pytest.raises(DivergenceError, match="parameters are no longer finite"):
        chain_stats(learner, found, make_rows(shape, 8))
    stats["Wvx"][0] = np.nan  # A NaN in the gradient of Wvx comes with a NaN in that of bv, which is checked.
    stats["dv" if learner.factored else "bv"][...] = np.nan
    with pytest.raises(DivergenceError, match="parameters are no longer finite"):
        learner.step(learner.start(make_theta(shape)), stats, 8)


def test_local_steps_that_diverge_end_the_fit() -> None:
    learner = make_learner(SHAPE, "mle-bp", rates=np.array([1e6]), local_steps=4, chain_rows=2)
    state = learner.start(make_theta(SHAPE))
    with pytest.raises(DivergenceError, match="epoch 1, step 1, at learning_rate=1e\\+06"):
        chain_stats(learner, state, make_rows(SHAPE, 8), "cpu")


def test_an_epoch_records_its_measurements() -> None:
    theta, rows = make_theta(SHAPE), make_rows(SHAPE, 8)
    learner = make_learner(SHAPE, "mle-bp")
    state = learner.step(learner.start(theta), chain_stats(learner, learner.start(theta), rows), 8)
    middle, end = learner.summary(state), learner.summary(learner.end_epoch(state))
    assert middle == end
    assert 0 < end["train_error"] < 1
    assert end["converged"] == 1.0
    assert end["n_sweeps"] == 60
    slow = make_learner(SHAPE, "mle-bp", n_sweeps=1)
    assert chain_stats(slow, slow.start(theta), rows)["sums"][3] == 0


def test_scoring_counts_changed_units_of_binary_rows() -> None:
    shape = CrbmShape(3, 1, 3)
    learner = make_learner(shape, "mle-bp")
    rows = make_rows(shape, 2)
    params = shape.split(theta := np.zeros(shape.n_parameters, np.float32))
    params.bv[...] = 5.0  # This bias turns every visible unit on.
    v = np.array([[1, 1, 0], [1, 0, 1]], np.uint8)
    x = np.array([[1, 0, 0], [1, 1, 1]], np.uint8)
    from scalelatent.engine.backend import make_backend

    scoring = learner.validation()
    stats = Stats.zeros(scoring.layout())
    prepared = scoring.prepare(learner.start(theta), make_backend("reference"))
    scoring.accumulate(prepared, replace(rows, x=x, y=v), stats)
    assert CrbmScoring.errors(stats) == (2 / 6, 1 / 2)
    scoring.accumulate(prepared, replace(rows, x=x * 0.5, y=v), stats)
    assert np.isnan(CrbmScoring.errors(stats)[1])
