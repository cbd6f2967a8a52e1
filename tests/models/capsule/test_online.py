"""Stepwise EM of capsule regression: steps equal direct computations, and rounds end by the schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.models.capsule.kernels import reference
from scalelatent.models.capsule.model.em import initial_state
from scalelatent.models.capsule.model.online import AVERAGE_POWER, CapsuleStepwise, online_state
from scalelatent.reductions.moments import NonFiniteError

from .conftest import ARCHITECTURES, P, make_block, make_case


def run_step(learner: Any, state: Any, blocks: list[Block], backend: str = "cpu") -> Any:
    stats = Stats.zeros(learner.layout())
    prepared = learner.prepare(state, make_backend(backend))
    for one in blocks:
        learner.run_chain(prepared, one, stats)
    return learner.step(state, stats, sum(len(b.x) for b in blocks))


def run_batch_em(data: Any) -> np.ndarray:
    """Return the weights W after one pass of batch EM over all rows."""
    em, state = data.em, initial_state(data.w, data.m)
    train = em.reductions()["train"]
    stats = Stats.zeros(train.layout())
    train.accumulate(train.prepare(state, make_backend("cpu")), make_block(data), stats)
    return em.update(state, {"train": stats}).w


# -- stepwise EM ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("ridge", [0.0, 3.0])
def test_one_batch_of_all_rows_is_a_step_of_batch_em(architecture: str, ridge: float) -> None:
    data = make_case(architecture, ridge=ridge)
    learner = CapsuleStepwise(data.em, data.totals, data.counts, 0.6, 100.0)
    state = run_step(learner, online_state(data.w, data.m), [make_block(data)])
    np.testing.assert_allclose(state.w, run_batch_em(data), rtol=1e-12)
    # After one step, the running average of the weights equals the weights.
    np.testing.assert_array_equal(state.average, state.w)
    # Two chains (parts of a minibatch) give the same weights as one, up to float32 rounding.
    two = run_step(
        learner, online_state(data.w, data.m), [make_block(data, slice(40)), make_block(data, slice(40, 90))]
    )
    np.testing.assert_allclose(two.w, state.w, rtol=1e-4, atol=1e-5)


def test_steps_follow_the_formula() -> None:
    """After each of three steps, the weights W and their average equal the formulas with momentum."""
    data = make_case(momentum=0.4)
    learner = CapsuleStepwise(data.em, data.totals, data.counts, 0.7, 2.0)
    state = online_state(data.w, data.m)
    w, before, delta, average = data.w, data.w, np.zeros_like(data.w), data.w
    s = data.em.moment.sum(axis=0)
    inverse = np.linalg.inv(s + 1e-8 * np.trace(s) / P * np.eye(P))
    for t, rows in enumerate([slice(30), slice(30, 34), slice(34, 90)]):
        state = run_step(learner, state, [make_block(data, rows)])
        x, y, a = data.x[rows].astype(float), data.y[rows], data.weight[rows]
        h = w.astype(np.float32).astype(float) @ x.T
        ratios, _ = reference.posterior_ratios(h, y, data.em.members.dims[0])
        batch = ((np.repeat(ratios, 2, axis=0) - 1) * a * h) @ x * 90 / len(x)
        eta = (1 + t / 2.0) ** -0.7
        delta = (1 - eta) * delta + eta * batch
        move = eta * min(1, len(x) / P) * delta @ inverse
        w, before = w + move + 0.4 * (w - before), w
        average = average + (1 + AVERAGE_POWER) / (t + 1 + AVERAGE_POWER) * (w - average)
        np.testing.assert_allclose(state.w, w, rtol=2e-4, atol=1e-4)
        np.testing.assert_allclose(state.average, average, rtol=2e-4, atol=1e-4)
    assert state.steps == 3
    assert state.sums[0, 4] == 90


def test_members_without_rows_in_a_batch_keep_their_weights() -> None:
    data = make_case("all_vs_all", momentum=0.9)
    learner = CapsuleStepwise(data.em, data.totals, data.counts, 0.6, 100.0)
    state = run_step(learner, online_state(data.w, data.m), [make_block(data, data.y == 0)])
    pairs = data.em.members
    for r in range(pairs.n_members):
        rows = pairs.rows_of(r)
        assert np.array_equal(state.w[rows], data.w[rows]) == (pairs.labels[r, 0] < 0)


def test_row_weights_count_in_small_batches() -> None:
    """A batch of one row moves W in proportion to the row's weight, but by at most one full step."""
    data = make_case()
    x, y, rows = data.x[:2], data.y[:2], np.arange(2)
    learner = CapsuleStepwise(data.em, data.totals, data.counts, 0.0, 1.0)
    moved = {}
    for weight in (1e-6, 0.5, 1.0, 1e6):
        one = Block(x[:1], y[:1], np.array([weight]), 0, rows[:1])
        moved[weight] = run_step(learner, online_state(data.w, data.m), [one]).w - data.w
    assert np.abs(moved[1e-6]).max() < 1e-5 * np.abs(moved[1.0]).max()
    np.testing.assert_allclose(moved[0.5], moved[1.0] / 2, rtol=1e-6)
    # A row of very large weight moves W by one full step, a row of weight 1 by 1 / (P mean weight) of a step.
    mean = data.totals.sum() / 90
    np.testing.assert_allclose(moved[1e6], moved[1.0] * P * mean, rtol=1e-6)


# -- schedule ------------------------------------------------------------------------------------------------


def score_epoch(state: Any, learner: Any, error: float) -> Any:
    stats = Stats.zeros(learner.validation().layout())
    stats["sums"][0] = [0.0, error * 100, 0.0, 100.0]
    return learner.validated(state, stats)


def test_rounds_end_by_patience_and_start_from_the_best() -> None:
    data = make_case(has_validation=1, nu=np.array([0.8, 0.0]), patience=np.array([2, 1]))
    learner = CapsuleStepwise(data.em, data.totals, data.counts, 0.0, 1.0)
    state, kept = online_state(data.w, data.m), None
    for epoch, error in enumerate([0.3, 0.2, 0.25, 0.2, 0.1, 0.1]):
        state = run_step(learner, state, [make_block(data)])
        state = score_epoch(state, learner, error)
        if error < 0.3 and epoch in (1, 4):
            kept = state.average
        state = learner.end_epoch(state)
        np.testing.assert_array_equal(state.round, [[0, 0, 0, 1, 1, 2][epoch]])
        # The errors 0.25 and 0.2 are no improvement, so the next threshold nu starts from the best weights.
        if epoch == 3:
            np.testing.assert_array_equal(state.w, kept)
            assert state.since[0] == 0
            assert learner.summary(state)["nu"] == 0.0
    assert learner.is_done(state)
    assert state.best_epoch[0] == 5
    np.testing.assert_array_equal(learner.weights(state), kept)
    after = run_step(learner, state, [make_block(data)])
    np.testing.assert_array_equal(after.w, state.w)  # A stopped fit ignores further steps.


def test_without_validation_the_last_average_is_kept() -> None:
    data = make_case()
    learner = CapsuleStepwise(data.em, data.totals, data.counts, 0.6, 10.0)
    state = online_state(data.w, data.m)
    for _ in range(3):
        state = learner.end_epoch(run_step(learner, state, [make_block(data)]))
    np.testing.assert_array_equal(learner.weights(state), state.average)
    summary = learner.summary(state)
    assert summary["validation_error"] is None
    assert 0 < summary["train_error"] < 1
    assert summary["active_rows"] == 1.0


def test_a_flat_objective_ends_the_round() -> None:
    data = make_case(tol=1e6)
    learner = CapsuleStepwise(data.em, data.totals, data.counts, 0.6, 10.0)
    state = learner.end_epoch(run_step(learner, online_state(data.w, data.m), [make_block(data)]))
    # After the first epoch there is no earlier objective, so the fit continues.
    assert not learner.is_done(state)
    state = run_step(learner, state, [make_block(data)])
    before = learner.end_epoch(state)
    assert learner.is_done(before) == bool(before.objective[0] <= state.objective[0])


def test_errors_distinguish_bad_rows_from_diverging_weights() -> None:
    data = make_case()
    data.x[7, 2] = np.nan
    rows = np.arange(5, 20)[::-1]
    learner = CapsuleStepwise(data.em, data.totals, data.counts, 0.6, 10.0)
    with pytest.raises(NonFiniteError, match="row 7, feature 2 is nan"):
        run_step(learner, online_state(data.w, data.m), [make_block(data, rows)])
    with pytest.raises(FloatingPointError, match=r"member\(s\) \[0\] is not finite in step 1"):
        run_step(learner, online_state(data.w * 1e30, data.m), [make_block(data, slice(10, 20))])
