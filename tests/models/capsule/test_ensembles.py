"""Members (models of some classes) that share a pass learn the weights of separate fits, up to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.models.capsule.model.em import CapsuleEM, CapsuleState, initial_state
from scalelatent.models.capsule.model.members import Members, build_members
from scalelatent.models.capsule.model.predict import CapsuleRows, RowFrame
from scalelatent.models.capsule.model.start import parse_schedule, subspace_start
from scalelatent.reductions.moments import SecondMoments

X, Y = load_digits(return_X_y=True)
X, Y = X[:400], Y[:400].astype(np.int32)
SCHEDULE = [(0.7, 3), (0.3, 2), (0.0, 2)]
# Every seventh row has a shifted label, so models of class pairs improve for different numbers of passes.
NOISY_LABELS = np.where(np.arange(400) % 7 == 0, (Y + np.arange(400) // 7) % 10, Y).astype(np.int32)


def fit_em(
    members: Members, x: np.ndarray, y: np.ndarray, schedule: Any, device: str, passes: int
) -> CapsuleState:
    backend = make_backend(device)
    reduction = SecondMoments(x.shape[1], members.n_classes)
    moments = Stats.zeros(reduction.layout())
    reduction.accumulate(backend, Block(x, y, None, 0), moments)
    learner = CapsuleEM(
        members, moments["moment"], *parse_schedule(schedule), momentum=0.9, ridge=0.0, tol=0.0,
        max_iter=passes, class_weight=None, has_validation=0,
    )  # fmt: skip
    state = initial_state(subspace_start(members, moments["moment"], moments["weight"]), members.n_members)
    reduction = learner.reductions()["train"]
    while not learner.is_done(state):
        stats = Stats.zeros(reduction.layout())
        prepared = reduction.prepare(state, backend)
        for start in range(0, len(x), 256):
            rows = slice(start, start + 256)
            reduction.accumulate(prepared, Block(x[rows], y[rows], None, start), stats)
        state = learner.update(state, {"train": stats})
    return state


def assert_close_fits(members: Members, state: CapsuleState, r: int, alone: CapsuleState) -> None:
    rows = members.stack_rows(np.array([r]))
    scale = np.abs(alone.best).max()
    # The two fits add rows in different orders. In 20 passes, momentum amplifies float64 rounding up to 1e-7.
    np.testing.assert_allclose(state.best[rows], alone.best, rtol=0, atol=1e-7 * scale)
    assert state.best_error[r] == pytest.approx(alone.best_error[0], abs=1e-12)
    assert (state.round[r], state.best_pass[r]) == (alone.round[0], alone.best_pass[0])
    assert state.objective[r] == pytest.approx(alone.objective[0], rel=1e-7)


def test_all_vs_all_equals_its_45_binary_fits() -> None:
    members = build_members("all_vs_all", 10, 2)
    state = fit_em(members, X, NOISY_LABELS, SCHEDULE, "reference", 20)
    binary = build_members("multiclass", 2, 2)
    assert members.n_members == 45
    for r, labels in enumerate(members.labels):
        own = labels[NOISY_LABELS] >= 0
        alone = fit_em(binary, X[own], labels[NOISY_LABELS[own]].astype(np.int32), SCHEDULE, "reference", 20)
        assert_close_fits(members, state, r, alone)
    assert len(set(state.best_pass.tolist())) > 3  # Members have different best passes.


def test_one_vs_all_equals_its_binary_fits() -> None:
    members = build_members("one_vs_all", 10, 2)
    state = fit_em(members, X, NOISY_LABELS, SCHEDULE, "reference", 20)
    binary = build_members("multiclass", 2, 2)
    for c in range(10):
        alone = fit_em(binary, X, (c != NOISY_LABELS).astype(np.int32), SCHEDULE, "reference", 20)
        assert_close_fits(members, state, c, alone)


@pytest.mark.parametrize("architecture", ["multiclass", "one_vs_all", "all_vs_all"])
def test_the_numba_fit_follows_the_reference(architecture: str) -> None:
    members = build_members(architecture, 10, 2)
    fast = fit_em(members, X.astype("u1"), Y, None, "cpu", 4)
    exact = fit_em(members, X, Y, None, "reference", 4)
    # The products with the weights W are in float32, with a relative error of 6e-8 per number, over 4 passes.
    # Directions of constant pixels amplify this error in W, but not in the latents.
    h_fast, h_exact = X @ fast.w.T, X @ exact.w.T
    assert np.abs(h_fast - h_exact).max() < 1e-3 * np.abs(h_exact).max()
    np.testing.assert_allclose(fast.objective, exact.objective, rtol=1e-5)


def compute_scores(
    members: Members, w: np.ndarray, what: str, x: np.ndarray = X, projection: Any = None
) -> np.ndarray:
    rows = CapsuleRows(members, w, RowFrame(None, projection), what)
    out = rows.apply(rows.prepare(make_backend("cpu")), Block(x, None, None, 0))
    assert out.shape == (len(x), *rows.output()[0])
    assert out.dtype == rows.output()[1]
    return out


@pytest.mark.parametrize("weights", ["fitted", "random"])
@pytest.mark.parametrize("architecture", ["multiclass", "one_vs_all", "all_vs_all"])
def test_scores_are_distributions_and_follow_the_rule_of_the_paper(architecture: str, weights: str) -> None:
    from scalelatent.models.capsule.kernels.reference import probabilities

    members = build_members(architecture, 10, 2)
    if weights == "fitted":
        w = fit_em(members, X, Y, None, "reference", 2).w
    else:  # Binary models with random weights are uncertain, so their votes are often close.
        w = np.random.Generator(np.random.Philox(1)).normal(size=(members.total_dim, 64)) * 0.02
    p = compute_scores(members, w, "probabilities")
    np.testing.assert_allclose(p.sum(axis=1), 1, atol=1e-12)
    assert (p >= 0).all()
    h = compute_scores(members, w, "latents").T.astype("f8")
    each = [
        probabilities(h[members.offsets[r] : members.offsets[r + 1]], dims)
        for r, dims in enumerate(members.dims)
    ]
    if architecture == "multiclass":
        winner = each[0].argmax(axis=0)
    elif architecture == "one_vs_all":  # The class with the largest P(own class) wins.
        winner = np.array([q[0] for q in each]).argmax(axis=0)
    else:  # Each binary model votes for one of two classes; the larger sum of probabilities decides ties.
        votes, sums = np.zeros((10, len(X))), np.zeros((10, len(X)))
        for labels, q in zip(members.labels, each, strict=True):
            a, b = np.flatnonzero(labels == 0)[0], np.flatnonzero(labels == 1)[0]
            votes[a] += q[0] >= q[1]
            votes[b] += q[0] < q[1]
            sums[a] += q[0]
            sums[b] += q[1]
        winner = np.array([max(range(10), key=lambda c: (votes[c, n], sums[c, n])) for n in range(len(X))])
    np.testing.assert_array_equal(CapsuleRows.labels(p), winner)
    assert weights == "random" or (winner == Y).mean() > 0.9


def test_latents_are_products_of_rows_and_weights() -> None:
    members = build_members("multiclass", 10, 3)
    w = np.random.Generator(np.random.Philox(1)).normal(size=(30, 64))
    h = compute_scores(members, w, "latents")
    np.testing.assert_allclose(h, X @ w.T, rtol=1e-5, atol=1e-3)


def test_projection_and_weights_are_one_product() -> None:
    members = build_members("multiclass", 10, 3)
    rng = np.random.Generator(np.random.Philox(2))
    w, basis = rng.normal(size=(30, 5)), np.linalg.qr(rng.normal(size=(64, 5)))[0]
    np.testing.assert_allclose(
        compute_scores(members, w, "latents", projection=basis), X @ basis @ w.T, rtol=1e-4, atol=1e-3
    )
