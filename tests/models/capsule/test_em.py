"""The EM step from residuals equals the update of the paper (Saul 2021) and never lowers the likelihood."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.models.capsule.kernels.reference import posterior_ratios, probabilities
from scalelatent.models.capsule.model.em import (
    RELATIVE_JITTER,
    CapsuleEM,
    CapsuleState,
    initial_state,
)
from scalelatent.models.capsule.model.members import Members, build_members
from scalelatent.models.capsule.model.start import parse_schedule, random_start, subspace_start
from scalelatent.reductions.moments import SecondMoments

P = 7


def make_data(m: int, n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.Philox(seed))
    y = (np.arange(n) % m).astype(np.int32)
    directions = rng.normal(size=(m, P))
    x = directions[y] * rng.normal(size=(n, 1)) + 0.7 * rng.normal(size=(n, P))
    return x, y, rng.uniform(0.2, 2, n)


def make_learner(members: Members, x: np.ndarray, y: np.ndarray, weight: Any, **options: Any) -> CapsuleEM:
    class_weight = options.pop("class_weight", None)
    reduction = SecondMoments(x.shape[1], members.n_classes, class_weight)
    stats = Stats.zeros(reduction.layout())
    reduction.accumulate(make_backend("reference"), Block(x, y, weight, 0), stats)
    nu, patience, scheduled = parse_schedule(options.pop("nu_schedule", None))
    fields = {"momentum": 0.0, "ridge": 0.0, "tol": 0.0, "max_iter": 10**6, "has_validation": 0, **options}
    return CapsuleEM(
        members, stats["moment"], nu, patience, scheduled, class_weight=class_weight, **fields
    )  # fmt: skip


def run_pass(learner: CapsuleEM, state: CapsuleState, *block: Any, device: str = "reference") -> Stats:
    reduction = learner.reductions()["train"]
    stats = Stats.zeros(reduction.layout())
    reduction.accumulate(reduction.prepare(state, make_backend(device)), Block(*block, 0), stats)
    return stats


def start_state(members: Members, learner: CapsuleEM, seed: int | None) -> CapsuleState:
    weight = np.array([np.trace(m) for m in learner.moment])
    w = (
        subspace_start(members, learner.moment, weight / P)
        if seed is None
        else random_start(members, learner.moment, weight / P, 2.0, np.random.default_rng(seed))
    )
    return initial_state(w, members.n_members)


MEMBERS = {
    "multiclass": build_members("multiclass", 3, 2),
    "odd": build_members("multiclass", 3, 1),
    "smallest": build_members("multiclass", 2, 1),
    "unequal": build_members("multiclass", 3, [1, 4, 2]),
    "one_vs_all": build_members("one_vs_all", 3, 2),
    "all_vs_all": build_members("all_vs_all", 3, 3),
}
CLASS_WEIGHT = {2: np.array([0.5, 3.0]), 3: np.array([0.5, 1.0, 3.0])}


@pytest.mark.parametrize("weighted", ["plain", "sample", "class", "both"])
@pytest.mark.parametrize("name", MEMBERS)
def test_the_update_from_residuals_equals_the_update_of_the_paper(name: str, weighted: str) -> None:
    """Equation 2.24 of Saul (2021) gives the new weights [sum w r h x^T] S^-1 from rows x of weight w.

    Here h = W x has the old weights W, r is the ratio of the posterior mean of h to h, and S = sum w x x^T.
    The package computes W + Delta S^-1, where Delta = sum w (r - 1) h x^T are the residuals.
    """
    members = MEMBERS[name]
    m = members.n_classes
    x, y, weight = make_data(m, 200, 1)
    row_weight = weight if weighted in ("sample", "both") else None
    class_weight = CLASS_WEIGHT[m] if weighted in ("class", "both") else None
    full = (np.ones(200) if row_weight is None else weight) * (1 if class_weight is None else class_weight[y])
    learner = make_learner(members, x, y, row_weight, class_weight=class_weight)
    state = start_state(members, learner, None)
    stats = run_pass(learner, state, x, y, row_weight)

    for r in range(members.n_members):
        rows = slice(members.offsets[r], members.offsets[r + 1])
        seen = members.labels[r][y] >= 0
        xs, ws, target = x[seen], full[seen], members.labels[r][y[seen]]
        h = state.w[rows] @ xs.T
        ratios, p = posterior_ratios(h, target, members.dims[r])
        moved = np.repeat(ratios, members.dims[r], axis=0) * h * ws
        s = (xs * ws[:, None]).T @ xs
        paper = np.linalg.solve(s, (moved @ xs).T).T
        residual = state.w[rows] + np.linalg.solve(s, stats["delta"][rows].T).T
        np.testing.assert_allclose(residual, paper, rtol=0, atol=1e-10 * np.abs(paper).max())
        # em_step adds a small share of the diagonal of S (the second moments of rows) to S, which moves the
        # new W slightly towards the old W.
        jitter = RELATIVE_JITTER * np.diag(np.diag(s))
        pulled = np.linalg.solve(s + jitter, (moved @ xs + state.w[rows] @ jitter).T).T
        step = learner.em_step(state.w[rows], stats["delta"][rows], r)
        np.testing.assert_allclose(step, pulled, rtol=0, atol=1e-10 * np.abs(paper).max())
        np.testing.assert_allclose(step, paper, rtol=0, atol=1e-5 * np.abs(paper).max())
        # After the step, the state of the learner has the log-loss and the error rate of the pass.
        log_loss = -(ws * np.log(p[target, np.arange(len(target))])).sum() / ws.sum()
        new = learner.update(state, {"train": stats})
        assert new.objective[r] == pytest.approx(log_loss, rel=1e-12)
        assert new.train_error[r] == pytest.approx(
            (ws * (p.argmax(axis=0) != target)).sum() / ws.sum(), abs=1e-12
        )
        assert new.active[r] == 1.0


@pytest.mark.parametrize("name", ["multiclass", "unequal", "all_vs_all"])
def test_ridge_is_the_penalised_update(name: str) -> None:
    members = MEMBERS[name]
    x, y, weight = make_data(3, 200, 2)
    learner = make_learner(members, x, y, weight, ridge=5.0)
    state = start_state(members, learner, 3)
    stats = run_pass(learner, state, x, y, weight)
    for r in range(members.n_members):
        rows = slice(members.offsets[r], members.offsets[r + 1])
        seen = members.labels[r][y] >= 0
        xs, ws, target = x[seen], weight[seen], members.labels[r][y[seen]]
        h = state.w[rows] @ xs.T
        ratios, _ = posterior_ratios(h, target, members.dims[r])
        moved = np.repeat(ratios, members.dims[r], axis=0) * h * ws
        expected = np.linalg.solve((xs * ws[:, None]).T @ xs + 5.0 * np.eye(P), (moved @ xs).T).T
        np.testing.assert_allclose(
            learner.em_step(state.w[rows], stats["delta"][rows], r), expected, atol=1e-10
        )


def compute_objective(learner: CapsuleEM, state: CapsuleState, stats: Stats) -> np.ndarray:
    """Return the log-likelihood of each member (a model of some classes) minus ridge / 2 * |W|^2."""
    members = learner.members
    parts = [state.w[members.offsets[r] : members.offsets[r + 1]] for r in range(members.n_members)]
    return stats["sums"][:, 0] - learner.ridge / 2 * np.array([(part**2).sum() for part in parts])


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("options", ["plain", "weights", "ridge", "weights and ridge"])
@pytest.mark.parametrize("name", MEMBERS)
def test_em_never_lowers_the_likelihood(name: str, options: str, seed: int | None) -> None:
    members = MEMBERS[name]
    m = members.n_classes
    x, y, weight = make_data(m, 150, 10 + (seed or 0))
    row_weight = weight if "weights" in options else None
    chosen: dict[str, Any] = {"ridge": 2.0} if "ridge" in options else {}
    if "weights" in options:
        chosen["class_weight"] = CLASS_WEIGHT[m]
    learner = make_learner(members, x, y, row_weight, **chosen)
    state = start_state(members, learner, seed)
    last, first = np.full(members.n_members, -np.inf), None
    for _ in range(25):
        stats = run_pass(learner, state, x, y, row_weight)
        value = compute_objective(learner, state, stats)
        # The tolerance allows the rounding of a sum of 150 logarithms in float64. A wrong step lowers the
        # objective by far more.
        assert (value >= last - 1e-10 * np.abs(value)).all()
        first = value if first is None else first
        last, state = value, learner.update(state, {"train": stats})
    assert (last > first).all()


def test_the_float32_kernel_raises_the_likelihood_like_the_reference() -> None:
    members = MEMBERS["multiclass"]
    x, y, _ = make_data(3, 400, 5)
    learner = make_learner(members, x, y, None)
    exact = fast = start_state(members, learner, None)
    for _ in range(20):
        exact = learner.update(exact, {"train": run_pass(learner, exact, x, y, None)})
        fast = learner.update(fast, {"train": run_pass(learner, fast, x.astype("f4"), y, None, device="cpu")})
        # A float32 number has a relative rounding error of 6e-8; the 20 passes may add up to 2e-6.
        np.testing.assert_allclose(fast.objective, exact.objective, rtol=2e-6)
    np.testing.assert_allclose(fast.w, exact.w, rtol=0, atol=1e-4 * np.abs(exact.w).max())


def test_momentum_adds_a_share_of_the_last_move() -> None:
    """Equation 2.27 of Saul (2021) with momentum g in step t is W(t+1) = EM(W(t)) + g (W(t) - W(t-1)).

    EM(W) are the weights after a plain EM step from W. In the first step, W(t) - W(t-1) is 0.
    """
    members = MEMBERS["multiclass"]
    x, y, _ = make_data(3, 200, 6)
    plain = make_learner(members, x, y, None)
    heavy = replace(plain, momentum=0.9)
    state = start_state(members, plain, None)
    stats = run_pass(plain, state, x, y, None)
    one = heavy.update(state, {"train": stats})
    np.testing.assert_array_equal(one.w, plain.update(state, {"train": stats}).w)
    stats = run_pass(plain, one, x, y, None)
    two, still = heavy.update(one, {"train": stats}), plain.update(one, {"train": stats})
    np.testing.assert_allclose(two.w, still.w + 0.9 * (one.w - state.w), rtol=0, atol=1e-13)
    assert np.abs(two.w - still.w).max() > 1e-3


def test_rows_below_the_threshold_do_not_change_the_weights() -> None:
    members = MEMBERS["multiclass"]
    x, y, weight = make_data(3, 300, 7)
    learner = make_learner(members, x, y, weight, nu_schedule=[(0.5, 100)])
    state = start_state(members, learner, None)
    stats = run_pass(learner, state, x, y, weight)
    p = probabilities(state.w @ x.T, members.dims[0])
    right = p[y, np.arange(300)]
    keep = np.where(np.arange(3)[:, None] == y, 0, p).max(axis=0) > 0.5 * right
    assert 0 < keep.sum() < 300
    reduced = run_pass(replace(learner, nu=np.zeros(1)), state, x[keep], y[keep], weight[keep])
    np.testing.assert_allclose(stats["delta"], reduced["delta"], rtol=1e-12, atol=1e-12)
    assert stats["sums"][0, 2] == keep.sum()
    assert learner.update(state, {"train": stats}).active[0] == keep.mean()


def test_update_is_a_pure_function() -> None:
    members = MEMBERS["one_vs_all"]
    x, y, _ = make_data(3, 100, 8)
    learner = make_learner(members, x, y, None, momentum=0.9, nu_schedule="paper")
    state = start_state(members, learner, None)
    stats = run_pass(learner, state, x, y, None)
    before = {k: np.array(v) for k, v in vars(state).items()}, stats.vector.copy()
    first, second = learner.update(state, {"train": stats}), learner.update(state, {"train": stats})
    for key, value in before[0].items():
        np.testing.assert_array_equal(getattr(state, key), value)
        np.testing.assert_array_equal(getattr(first, key), getattr(second, key))
    np.testing.assert_array_equal(stats.vector, before[1])


def test_fewer_rows_than_features_stays_finite() -> None:
    """The second moments of the rows are singular; a small number on their diagonal makes them invertible."""
    members = build_members("multiclass", 2, 1)
    x, y, _ = make_data(2, 4, 9)
    learner = make_learner(members, x, y, None)
    state = start_state(members, learner, None)
    for _ in range(5):
        state = learner.update(state, {"train": run_pass(learner, state, x, y, None)})
    assert np.isfinite(state.w).all()


def test_fewer_rows_than_features_keep_the_weights_of_other_directions() -> None:
    """Orthogonal to all rows, weights change by less than 0.1 % of the largest change of a weight."""
    members = build_members("multiclass", 2, 1)
    rng = np.random.Generator(np.random.Philox(4))
    x, y = rng.random((15, 30)).astype("f4"), (np.arange(15) % 2).astype(np.int32)
    learner = make_learner(members, x, y, None)
    state = first = initial_state(rng.normal(size=(2, 30)), 1)
    for _ in range(30):
        state = learner.update(state, {"train": run_pass(learner, state, x, y, None, device="cpu")})
    outside = np.linalg.svd(x.astype("f8"))[2][15:]
    moved = state.w - first.w
    assert np.abs(moved @ outside.T).max() < 1e-3 * np.abs(moved).max()


def test_weights_beyond_float32_raise_an_error_with_advice() -> None:
    members = MEMBERS["multiclass"]
    x, y, _ = make_data(3, 50, 9)
    learner = make_learner(members, x, y, None)
    state = start_state(members, learner, None)
    huge = replace(state, w=state.w * 1e30)
    with np.errstate(all="ignore"):
        stats = run_pass(learner, huge, x.astype("f4"), y, None, device="cpu")
    with pytest.raises(
        FloatingPointError, match=r"member\(s\) \[0\] is not finite in pass 1.*scale the features"
    ):
        learner.update(huge, {"train": stats})
    with pytest.raises(
        FloatingPointError, match=r"member\(s\) \[0\] is not finite in pass 2.*momentum.*ridge"
    ):
        learner.update(replace(huge, iteration=1), {"train": stats})
