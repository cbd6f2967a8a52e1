"""Stepwise EM with batches of all rows equals batch EM; with small batches, its error is nearly as low."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.models.linear_mixture.kernels import reference
from scalelatent.models.linear_mixture.model.components import make_scores, score_few_rows
from scalelatent.models.linear_mixture.model.incremental import _update_svd, add_rows
from scalelatent.models.linear_mixture.model.start import start_components
from scalelatent.models.linear_mixture.model.stepwise import StepwiseMixture, initial_stepwise_state
from tests.models.linear_mixture.cases import make_main_em, make_rows, run_passes, score_rows


def fit_stepwise(learner: StepwiseMixture, state, x: np.ndarray, batch: int):
    backend = make_backend("cpu")
    while not learner.is_done(state):
        order = np.random.default_rng(state.epoch).permutation(len(x))
        for a in range(0, len(x), batch):
            rows = order[a : a + batch]
            stats, prepared = Stats.zeros(learner.layout()), learner.prepare(state, backend)
            for part in np.array_split(rows, 2):  # Two chains (parallel parts of a step).
                learner.run_chain(prepared, Block(x[part], None, None, 0, part), stats)
            state = learner.step(state, stats, len(rows))
        state = learner.end_epoch(state)
    return state


@pytest.mark.parametrize(("likelihood", "assignment"), [("error", "hard"), ("factor-analysis", "soft")])
def test_a_first_step_with_all_rows_equals_a_pass_of_batch_em(likelihood, assignment):
    x = make_rows(400, 12, 4, 3)
    em, state = make_main_em(x, 4, 3, likelihood, assignment, q=8)
    wanted = run_passes(em, state, x, n=1, backend="numba")[0].components
    learner = StepwiseMixture(em.settings, 8, t0=1.0, n_epochs=1)
    found = fit_stepwise(
        learner, initial_stepwise_state(em.settings, state.components, np.full(4, 100.0)), x, len(x)
    ).mixture.components
    for name in ("means", "values", "noise", "weights"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.abs(found.bases), np.abs(wanted.bases), atol=1e-3)


@pytest.mark.parametrize(
    ("likelihood", "assignment"), [("error", "hard"), ("ppca", "soft"), ("factor-analysis", "soft")]
)
def test_a_few_epochs_come_near_batch_em(likelihood, assignment):
    x = make_rows(4000, 16, 4, 3, seed=2)
    em, state = make_main_em(x, 4, 3, likelihood, assignment, q=8, floor=1e-9)
    state = run_passes(em, state, x, n=2, backend="numba")[-1]
    batch = run_passes(em, state, x, n=12, backend="numba")
    learner = StepwiseMixture(em.settings, 8, n_epochs=3)
    start = initial_stepwise_state(em.settings, state.components, state.counts)
    found = fit_stepwise(learner, start, x, 250)
    last = run_passes(em, replace(state, components=found.mixture.components), x, n=1, backend="numba")[
        0
    ].objective
    gained = batch[0].objective - batch[-1].objective
    assert last <= batch[-1].objective + 0.05 * gained + 1e-3 * abs(batch[-1].objective)


def test_single_rows_give_pca_if_the_basis_spans_their_rank():
    x = make_rows(60, 10, 2, 2, seed=3).astype("f8")
    found, counts = start_components(x[:2].copy(), 10, 0), np.ones(2)
    index = (np.arange(60) % 2).astype(int)
    found = replace(found, values=np.zeros((2, 10)), noise=np.zeros(2), n_dims=4)
    for i in range(2, 60, 3):
        counts = add_rows(found, counts, x[i : i + 3], index[i : i + 3], np.ones(60)[i : i + 3])
    for q in range(2):
        rows = x[index == q][: int(counts[q])]
        np.testing.assert_allclose(found.means[q], rows.mean(axis=0))
        wanted = np.cov(rows.T, bias=True)
        np.testing.assert_allclose((found.bases[q] * found.values[q]) @ found.bases[q].T, wanted, atol=1e-10)
        rest = np.linalg.eigvalsh(wanted)[:-4].sum() / 6
        np.testing.assert_allclose(found.noise[q], rest, atol=1e-10)


def test_single_rows_keep_the_error_low():
    x = make_rows(1500, 20, 3, 3, seed=4)
    em, state = make_main_em(x, 3, 3, q=8)
    state = run_passes(em, state, x[:500], n=10)[-1]
    found, counts = state.components.copy(), state.counts
    for i in range(500, 1500):
        index = reference.nearest(
            reference.make_scorer(make_scores(found, "error"), np.array([0, 3])), x[i : i + 1], 0, 1
        )[1][:, 0]
        counts = add_rows(found, counts, x[i : i + 1], index, np.ones(1))
    identity = np.swapaxes(found.bases, 1, 2) @ found.bases
    np.testing.assert_allclose(identity, np.broadcast_to(np.eye(8), identity.shape), atol=1e-8)
    before, after = (
        score_rows(make_scores(p, "error"), x).min(axis=1).mean() for p in (state.components, found)
    )
    assert after <= 1.02 * before
    assert counts.sum() == 1500


@pytest.mark.parametrize("likelihood", ["error", "code-cost", "ppca"])
def test_few_rows_have_the_scores_of_many(likelihood):
    x = make_rows(300, 14, 4, 3, seed=5)
    em, state = make_main_em(x, 4, 3, likelihood if likelihood == "ppca" else "error", q=8, floor=1e-9)
    now = run_passes(em, state, x, n=4)[-1].components
    found = score_few_rows(now, likelihood, x[:5].astype("f8"))
    np.testing.assert_allclose(found, score_rows(make_scores(now, likelihood), x[:5]), rtol=1e-9, atol=1e-9)


def test_an_update_by_a_single_row_equals_a_whole_decomposition():
    basis, singular = np.linalg.qr(np.random.default_rng(0).normal(size=(20, 6)))[0], np.arange(7.0, 1.0, -1)
    for row in (np.random.default_rng(1).normal(size=20), basis @ np.arange(6.0), np.zeros(20)):
        found, values = _update_svd(basis, singular, row[None])
        stack = np.concatenate([singular[:, None] * basis.T, row[None]])
        wanted = np.linalg.svd(stack, full_matrices=False)
        np.testing.assert_allclose(values, wanted[1], atol=1e-12)
        np.testing.assert_allclose((found * values**2) @ found.T, stack.T @ stack, atol=1e-10)
        np.testing.assert_allclose(found[:, :6].T @ found[:, :6], np.eye(6), atol=1e-12)
