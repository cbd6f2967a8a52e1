"""Rounds (passes with one threshold nu) begin and end by the schedule, and the best weights are kept.

Most tests read no rows: they supply the error rates that passes would measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent import CapsuleRegression
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.models.capsule.model.em import CapsuleEM, CapsuleState, initial_state
from scalelatent.models.capsule.model.members import build_members
from scalelatent.models.capsule.model.start import PAPER_SCHEDULE, parse_schedule

ROWS = 100.0


def make_learner(schedule: Any, m: int = 2, architecture: str = "multiclass", **options: Any) -> CapsuleEM:
    nu, patience, scheduled = parse_schedule(schedule)
    fields_ = {"momentum": 0.5, "ridge": 0.0, "tol": 0.0, "max_iter": 1000, "has_validation": 0, **options}
    members = build_members(architecture, m, 1)
    return CapsuleEM(
        members, np.stack([np.eye(3)] * m), nu, patience, scheduled, class_weight=None, **fields_
    )


def make_stats(
    learner: CapsuleEM, errors: Any, losses: Any, seed: int, validation: Any = None
) -> dict[str, Stats]:
    out = {}
    for part, reduction in learner.reductions().items():
        stats = out[part] = Stats.zeros(reduction.layout())
        wrong = errors if part == "train" or validation is None else validation
        stats["sums"][:, 0] = -ROWS * np.asarray(losses)
        stats["sums"][:, 1] = ROWS * np.asarray(wrong)
        stats["sums"][:, 2:] = ROWS
        stats["rows"][:] = ROWS
    out["train"]["delta"][:] = np.random.Generator(np.random.Philox(seed)).normal(
        size=out["train"]["delta"].shape
    )
    return out


def _run_passes(
    learner: CapsuleEM, errors: Sequence[Any], losses: Sequence[Any] | None = None
) -> list[CapsuleState]:
    """Return the states of a fit: the initial one, and one after each pass with its given error and loss."""
    n = learner.members.n_members
    w = np.random.Generator(np.random.Philox(99)).normal(size=(learner.members.total_dim, 3))
    states = [initial_state(w, n)]
    for i, error in enumerate(errors):
        loss = 1.0 / (i + 1) if losses is None else losses[i]
        states.append(learner.update(states[-1], make_stats(learner, error, loss, i)))
    return states


def test_rounds_end_by_patience_and_restart_from_the_best() -> None:
    learner = make_learner([(0.5, 2), (0.0, 1)])
    # Round 2 starts with pass 5, which measures the best weights again. Pass 6 has no smaller error.
    states = _run_passes(learner, [0.5, 0.4, 0.4, 0.45, 0.4, 0.4])
    assert [int(s.round[0]) for s in states] == [0, 0, 0, 0, 1, 1, 2]
    assert [int(s.stale[0]) for s in states] == [0, 0, 0, 1, -1, 0, -1]
    assert [int(s.best_pass[0]) for s in states] == [0, 1, 2, 2, 2, 2, 2]
    assert [float(s.best_error[0]) for s in states[1:]] == [0.5, 0.4, 0.4, 0.4, 0.4, 0.4]
    assert [int(s.finished[0]) for s in states] == [0, 0, 0, 0, 0, 0, 1]
    # The best model has the weights before the M-step of pass 2, because pass 2 measured these weights.
    np.testing.assert_array_equal(states[2].best, states[1].w)
    np.testing.assert_array_equal(states[4].w, states[1].w)
    np.testing.assert_array_equal(states[-1].w, states[1].w)
    np.testing.assert_array_equal(learner.weights(states[-1]), states[1].w)
    assert learner.is_done(states[-1])
    assert not learner.is_done(states[-2])


def test_patience_counts_passes_without_improvement() -> None:
    for patience in (1, 3, 5):
        states = _run_passes(make_learner([(0.5, patience), (0.0, 1)]), [0.5, *[0.5] * patience])
        assert [int(s.round[0]) for s in states[-2:]] == [0, 1]


def test_improvement_resets_the_patience() -> None:
    states = _run_passes(make_learner([(0.5, 2), (0.0, 1)]), [0.5, 0.5, 0.4, 0.4, 0.3, 0.3])
    assert [int(s.stale[0]) for s in states[1:]] == [0, 1, 0, 1, 0, 1]
    assert int(states[-1].round[0]) == 0


def test_momentum_restarts_with_each_round() -> None:
    learner = make_learner([(0.5, 1), (0.0, 5)])
    states = _run_passes(learner, [0.5, 0.6, 0.5, 0.4])
    assert int(states[2].round[0]) == 1
    first = states[2]  # The second round starts again from the best model.
    np.testing.assert_array_equal(first.previous, first.w)
    for before, after, seed, momentum in ((states[2], states[3], 2, False), (states[3], states[4], 3, True)):
        step = learner.em_step(before.w, make_stats(learner, 0, 0, seed)["train"]["delta"], 0)
        pushed = step + 0.5 * (before.w - before.previous)
        np.testing.assert_array_equal(after.w, pushed)
        assert np.array_equal(after.w, step) is not momentum
        np.testing.assert_array_equal(after.previous, before.w)


def test_tol_ends_a_round_only_after_a_step_of_this_round() -> None:
    """``tol``, the least fall of the loss, ignores a round's first pass, which measures the best weights."""
    learner = make_learner([(0.8, 9), (0.4, 9), (0.0, 9)], tol=0.1)
    losses = [1.0, 0.95, 0.95, 0.8, 0.75, 0.75, 0.7]
    states = _run_passes(learner, [0.5] * len(losses), losses)
    # In passes 2, 5 and 7 the loss falls by less than tol, so these passes end the three rounds.
    assert [int(s.round[0]) for s in states[1:]] == [0, 1, 1, 1, 2, 2, 3]
    for i, s in enumerate(states[1:]):
        started = int(s.round[0]) > int(states[i].round[0])
        moved = not np.array_equal(s.w, states[i].w)
        assert moved or started or learner.is_done(s)


def test_the_schedule_of_the_paper_has_five_rounds() -> None:
    assert PAPER_SCHEDULE == ((0.8, 128), (0.6, 64), (0.4, 32), (0.2, 16), (0.0, 8))
    learner = make_learner("paper")
    state = initial_state(np.zeros((2, 3)), 1)
    rounds = []
    while not learner.is_done(state):
        rounds.append(int(state.round[0]))
        state = learner.update(state, make_stats(learner, 0.3, 1.0, 0))
    # No pass is better than the first one, so each round has ``patience`` passes after its first pass, which
    # measures the best model and does not count.
    assert [rounds.count(r) for r in range(5)] == [129, 65, 33, 17, 9]


def test_the_schedule_uses_the_validation_error_if_there_is_one() -> None:
    learner = make_learner([(0.5, 1)], has_validation=1)
    state = initial_state(np.zeros((2, 3)), 1)
    state = learner.update(state, make_stats(learner, 0.1, 1.0, 0, validation=0.4))
    state = learner.update(state, make_stats(learner, 0.2, 0.9, 1, validation=0.3))
    assert (state.train_error[0], state.validation_error[0], state.best_error[0]) == (0.2, 0.3, 0.3)
    assert not learner.is_done(state)
    state = learner.update(state, make_stats(learner, 0.0, 0.8, 2, validation=0.3))
    assert learner.is_done(state)
    assert int(state.best_pass[0]) == 2
    assert learner.summary(state)["validation_error"] == 0.3


@pytest.mark.parametrize("max_iter", [1, 3])
def test_max_iter_ends_in_any_round(max_iter: int) -> None:
    states = _run_passes(make_learner([(0.5, 10)], max_iter=max_iter), [0.5, 0.3, 0.4][:max_iter])
    assert [bool(s.finished.all()) for s in states] == [False] * max_iter + [True]
    # The best weights are kept, not the latest.
    np.testing.assert_array_equal(states[-1].w, states[min(max_iter - 1, 1)].w)


def test_tol_ends_a_round_and_zero_never_does() -> None:
    # Pass 5 measures the initial weights of the second round (threshold 0.0).
    losses = [
        1.0,
        0.5,
        0.45,
        0.449,
        0.448,
        0.447,
    ]
    errors = [0.5, 0.4, 0.3, 0.2, 0.1, 0.05]
    states = _run_passes(make_learner([(0.5, 9), (0.0, 9)], tol=0.01), errors, losses)
    assert [int(s.round[0]) for s in states] == [0, 0, 0, 0, 1, 1, 2]
    states = _run_passes(make_learner([(0.5, 9), (0.0, 9)], tol=0.0), errors, [1.0] * 6)
    assert int(states[-1].round[0]) == 0


def test_a_rising_loss_is_not_flat() -> None:
    states = _run_passes(make_learner([(0.5, 9)], tol=0.01), [0.5, 0.4, 0.3], [1.0, 1.0 + 1e-3, 1.5])
    assert not states[-1].finished.any()


def test_plain_em_keeps_the_latest_weights() -> None:
    learner = make_learner(None, max_iter=4)
    states = _run_passes(learner, [0.1, 0.2, 0.3, 0.4])
    assert learner.is_done(states[-1])
    assert int(states[-1].best_pass[0]) == 1
    step = learner.em_step(states[3].w, make_stats(learner, 0, 0, 3)["train"]["delta"], 0)
    np.testing.assert_array_equal(
        learner.weights(states[-1]), step + 0.5 * (states[3].w - states[3].previous)
    )


def test_plain_em_stops_by_tol_at_the_weights_it_measured() -> None:
    learner = make_learner(None, tol=0.01)
    states = _run_passes(learner, [0.4, 0.3, 0.2], [1.0, 0.5, 0.495])
    assert [bool(s.finished.all()) for s in states] == [False, False, False, True]
    np.testing.assert_array_equal(learner.weights(states[-1]), states[2].w)


def test_plain_em_never_runs_out_of_patience() -> None:
    states = _run_passes(make_learner(None), [0.5] * 300)
    assert int(states[-1].stale[0]) == 299
    assert not states[-1].finished.any()


def test_each_member_stops_on_its_own_schedule() -> None:
    learner = make_learner([(0.5, 1), (0.0, 1)], m=3, architecture="one_vs_all")
    states = _run_passes(
        learner,
        # Errors of three members (models of one class against the rest) in each pass. Member 0 never
        # improves, member 1 improves once, and member 2 always improves.
        [
            [0.5, 0.5, 0.5],
            [0.5, 0.4, 0.4],
            [0.5, 0.4, 0.3],
            [0.5, 0.4, 0.2],
            [0.5, 0.4, 0.1],
            [0.5, 0.4, 0.05],
        ],
    )
    finished = np.array([s.finished for s in states])
    assert finished[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert finished[:, 1].tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert not finished[:, 2].any()
    for r in (0, 1):  # After a model has stopped, passes do not change its weights, errors and counters.
        stop = int(np.flatnonzero(finished[:, r])[0])
        rows = learner.members.stack_rows(np.array([r]))
        for later in states[stop + 1 :]:
            for name in ("w", "best"):
                np.testing.assert_array_equal(getattr(later, name)[rows], getattr(states[stop], name)[rows])
            for name in ("objective", "train_error", "best_error", "best_pass", "round", "stale", "active"):
                assert getattr(later, name)[r] == getattr(states[stop], name)[r]
    assert [learner.summary(s)["active_members"] for s in states] == [3, 3, 3, 3, 2, 1, 1]


@pytest.mark.parametrize("architecture", ["one_vs_all", "all_vs_all"])
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_stopped_members_cost_nothing(architecture: str, device: str) -> None:
    learner = make_learner("paper", m=4, architecture=architecture)
    rng = np.random.Generator(np.random.Philox(1))
    x, y = rng.normal(size=(64, 3)).astype("f4"), rng.integers(0, 4, 64).astype(np.int32)
    state = initial_state(rng.normal(size=(learner.members.total_dim, 3)), learner.members.n_members)
    finished = state.finished.copy()
    finished[::2] = 1
    reduction = learner.reductions()["train"]

    def run(state: CapsuleState) -> tuple[Any, Stats]:
        stats = Stats.zeros(reduction.layout())
        prepared = reduction.prepare(state, make_backend(device))
        reduction.accumulate(prepared, Block(x, y, None, 0), stats)
        return prepared, stats

    everyone, full = run(state)
    prepared, stats = run(replace(state, finished=finished))
    live = np.flatnonzero(finished == 0)
    for _, members, w, _, _ in prepared.groups:
        assert set(members) <= set(live)
        assert len(w) == learner.members.dims[members].sum()
    assert len(everyone.groups) >= len(prepared.groups)
    for r in range(learner.members.n_members):
        rows = learner.members.stack_rows(np.array([r]))
        if finished[r]:
            assert not stats["sums"][r].any()
            assert not stats["delta"][rows].any()
        else:  # Models that have not stopped get the same sums as if no model had stopped.
            np.testing.assert_allclose(stats["delta"][rows], full["delta"][rows], rtol=1e-5, atol=1e-6)
    none, empty = run(replace(state, finished=np.ones_like(finished)))
    assert not none.groups
    assert not empty.vector.any()


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=40), st.lists(st.integers(1, 3), min_size=1, max_size=3)
)
def test_any_sequence_of_errors_keeps_the_best_weights(errors: list[int], patience: list[int]) -> None:
    learner = make_learner([(0.5, k) for k in patience])
    w = np.random.Generator(np.random.Philox(99)).normal(size=(2, 3))
    state, best, at = initial_state(w, 1), np.inf, None
    for i, error in enumerate(errors):
        if learner.is_done(state):
            break
        if error / 10 < best:
            best, at = error / 10, state.w
        new = learner.update(state, make_stats(learner, error / 10, 1.0, i))
        assert new.iteration == state.iteration + 1 == i + 1
        assert 0 <= new.round[0] - state.round[0] <= 1
        assert new.stale[0] < patience[min(new.round[0], len(patience) - 1)]
        state = new
        assert state.best_error[0] == pytest.approx(best)
        np.testing.assert_array_equal(state.best, at)
    assert learner.is_done(state) == (state.round[0] == len(patience))


def test_the_summary_has_only_scalars() -> None:
    learner = make_learner("paper", m=3, architecture="one_vs_all")
    states = _run_passes(learner, [[0.5, 0.25, 0.0]], [[3.0, 2.0, 1.0]])
    summary = learner.summary(states[-1])
    assert summary["pass"] == 1
    assert summary["objective"] == pytest.approx(2.0)
    assert summary["train_error"] is None  # No pass measured the joint decision of all models.
    assert summary["mean_member_train_error"] == pytest.approx(0.25)
    assert summary["validation_error"] is None
    assert summary["nu"] == pytest.approx(0.8)
    assert summary["round"] == 1
    assert all(isinstance(v, (int, float, type(None))) for v in summary.values())


def test_the_arrays_of_a_state_have_the_documented_shapes() -> None:
    state = initial_state(np.zeros((6, 3)), 3)
    for field in fields(state):
        value = getattr(state, field.name)
        if field.name in ("w", "previous", "best"):
            assert value.shape == (6, 3)
        elif field.name not in ("iteration", "decision_error", "together", "together_error"):
            assert value.shape == (3,)


@pytest.mark.parametrize(
    "bad",
    [
        "Paper",
        "",
        [],
        [0.5],
        [(0.5,)],
        [(1.0, 3)],
        [(-0.1, 3)],
        [(0.5, 0)],
        [(0.5, 3, 1)],
        5,
        [(np.nan, 3)],
        [("a", 3)],
    ],
)
def test_bad_schedules_are_refused_before_a_fit(bad: Any) -> None:
    with pytest.raises(ValueError, match="nu_schedule"):
        CapsuleRegression(nu_schedule=bad).fit(np.eye(6), np.arange(6) % 3)
