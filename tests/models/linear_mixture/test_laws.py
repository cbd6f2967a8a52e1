"""Laws of EM for mixtures of linear models.

The objective, which EM minimises, never gets worse. Special cases equal k-means, PCA, Gaussian mixtures and
factor analysis.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA, FactorAnalysis
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from scalelatent.models.linear_mixture.model.components import Components, make_scores
from scalelatent.models.linear_mixture.model.e_step import SETTLE, START, MixtureSettings, initial_state
from scalelatent.models.linear_mixture.model.em import MixtureEM
from scalelatent.models.linear_mixture.model.m_steps import centre_scatter
from scalelatent.models.linear_mixture.model.start import seed_centres, start_components
from tests.models.linear_mixture.cases import (
    draw,
    find_nearest,
    make_main_em,
    make_rows,
    run_pass,
    run_passes,
    score_rows,
)

CASES = [("error", "hard"), ("error", "soft"), ("ppca", "soft"), ("factor-analysis", "soft")]


@pytest.mark.parametrize("h", [0, 1, 3])
@pytest.mark.parametrize(("likelihood", "assignment"), CASES)
def test_the_objective_never_gets_worse(likelihood, assignment, h):
    x = make_rows(400, 12, 4, 3)
    em, state = make_main_em(x, 4, h, likelihood, assignment, q=max(h, 1))
    reported = [s.objective for s in run_passes(em, state, x, n=25)]
    slack = 1e-6 * np.abs(reported[:-1])
    assert (np.diff(reported) <= slack).all(), reported
    assert reported[-1] < reported[0]


def test_spare_directions_do_not_raise_the_error():
    x = make_rows(500, 20, 5, 4, seed=2)
    em, state = make_main_em(x, 5, 3, q=8)
    reported = [s.objective for s in run_passes(em, state, x, n=25)]
    assert (np.diff(reported) <= 1e-6 * np.abs(reported[:-1])).all()


def test_without_dimensions_labels_equal_those_of_lloyds_k_means():
    x = make_rows(600, 8, 5, 2, seed=3)
    em, state = make_main_em(x, 6, 0, q=1)
    centres = state.components.means
    for n in range(1, 6):
        last = run_passes(em, state, x, n=n)[-1]
        lloyd = KMeans(6, init=centres, n_init=1, max_iter=n, tol=0, algorithm="lloyd").fit(x.astype("f8"))
        found = find_nearest(make_scores(last.components, "error"), x, 0, 6)
        np.testing.assert_array_equal(found, lloyd.predict(x.astype("f8")))


def fit_gaussian_mixture(kind, x, state, k, n):
    """Return scikit-learn's mean log-likelihood after 1 to n EM passes from the components in ``state``."""
    now, p = state.components, x.shape[1]
    variance = now.noise[:, 0] if now.noise.ndim == 2 else now.noise
    precision = {
        "spherical": 1.0 / variance,
        "diag": np.repeat(1.0 / variance[:, None], p, axis=1),
    }[kind]
    options = {"weights_init": now.weights, "means_init": now.means, "precisions_init": precision}
    reported = []
    for i in range(1, n + 1):
        model = GaussianMixture(k, covariance_type=kind, tol=0, reg_covar=0, max_iter=i, **options)
        with pytest.warns(ConvergenceWarning):
            reported.append(model.fit(x.astype("f8")).lower_bound_)
    return np.array(reported)


@pytest.mark.parametrize(("likelihood", "kind"), [("ppca", "spherical"), ("factor-analysis", "diag")])
def test_without_dimensions_likelihoods_equal_those_of_gaussian_mixtures(likelihood, kind):
    x = make_rows(500, 6, 3, 2, seed=4)
    em, state = make_main_em(x, 3, 0, likelihood, "soft", q=1)
    reported = -np.array([s.objective for s in run_passes(em, state, x, n=8)])
    np.testing.assert_allclose(reported, fit_gaussian_mixture(kind, x, state, 3, 8), rtol=1e-6)


def test_one_component_spans_the_subspace_of_pca():
    x = make_rows(300, 15, 1, 3, seed=5)
    em, state = make_main_em(x, 1, 3, q=8)
    last = run_passes(em, state, x, n=40)[-1]
    pca = PCA(3).fit(x.astype("f8"))
    basis = last.components.bases[0][:, :3]
    np.testing.assert_allclose(basis @ basis.T, pca.components_.T @ pca.components_, atol=1e-8)
    np.testing.assert_allclose(last.components.means[0], pca.mean_, atol=1e-8)
    variances = pca.explained_variance_ * 299 / 300
    np.testing.assert_allclose(last.components.values[0, :3], variances, rtol=1e-6)


@pytest.mark.parametrize("likelihood", ["factor-analysis", "ppca"])
def test_one_component_has_the_likelihood_of_scikit_learn(likelihood):
    x = make_rows(500, 10, 1, 2, seed=6, noise=1.0)
    em, state = make_main_em(x, 1, 2, likelihood, "soft")
    reported = -run_passes(em, state, x, n=1500)[-1].objective
    peer = FactorAnalysis(2, tol=1e-10, max_iter=5000) if likelihood == "factor-analysis" else PCA(2)
    wide = x.astype("f8")
    if likelihood == "factor-analysis":
        assert abs(reported - peer.fit(wide).score(wide)) < 1e-3
    else:  # scikit-learn divides the covariance by n - 1.
        assert abs(reported - peer.fit(wide).score(wide)) < 1e-2


def test_the_projected_scatter_is_the_moment_matrix_times_the_bases():
    x, y = make_rows(700, 14, 4, 3, seed=7), np.arange(700, dtype=np.int32) % 2
    k, p, q = 6, 14, 8
    start = start_components(x[:k].astype("f8"), q, 1)
    em = MixtureEM(MixtureSettings(p, np.repeat([0, 1], 3), 2), 3, q)
    state = initial_state(em.settings, start)
    images = run_pass(em, state, x, y, rows=100)
    scores = make_scores(start.with_n_dims(0), "error")
    index = np.where(y == 0, find_nearest(scores, x, 0, 3), find_nearest(scores, x, 3, 6))
    whole, total = np.zeros((k, p, p)), np.zeros((k, p))
    for row, own in zip(x.astype("f8"), index, strict=True):
        whole[own] += np.outer(row - start.means[own], row - start.means[own])
        total[own] += row - start.means[own]
    np.testing.assert_allclose(images["total"], total, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(
        images["scatter"], np.swapaxes(whole @ start.bases, 1, 2), rtol=1e-6, atol=1e-9
    )
    np.testing.assert_allclose(images["square"], np.trace(whole, axis1=1, axis2=2), rtol=1e-9)
    count, total = images["count"], images["total"]
    shift, spread, centred, _ = centre_scatter(count, total, images["square"], images["scatter"], start.bases)
    about = whole / count[:, None, None] - shift[:, :, None] * shift[:, None, :]
    np.testing.assert_allclose(centred, about @ start.bases, atol=1e-9)
    np.testing.assert_allclose(spread, np.trace(about, axis1=1, axis2=2), rtol=1e-9)


def test_bases_converge_in_a_whole_fit():
    x, y = make_rows(900, 16, 6, 3, seed=8), np.arange(900, dtype=np.int32) % 3
    rng = np.random.default_rng(0)
    centres = np.concatenate([seed_centres(x[y == c], 3, rng) for c in range(3)])
    em = MixtureEM(MixtureSettings(16, np.repeat([0, 1, 2], 3), 3), 3, 8)
    states = run_passes(em, initial_state(em.settings, start_components(centres, 8, 0)), x, y, n=100)
    assert em.is_done(states[-1])
    now = states[-1].components
    identity = np.swapaxes(now.bases, 1, 2) @ now.bases
    np.testing.assert_allclose(identity, np.broadcast_to(np.eye(8), identity.shape), atol=1e-10)
    assert (np.diff(now.values, axis=1) <= 1e-12).all()
    # ``values`` are the variances of the rows of a component along its basis. The main phase (3) keeps the
    # assignment of rows to components from the clustering, ``assigned_by``.
    main = next(s for s in states if s.phase == 3).assigned_by
    for c in range(3):
        rows = x[y == c]
        index = find_nearest(make_scores(main, "error"), rows, 3 * c, 3 * c + 3)
        for q in range(3 * c, 3 * c + 3):
            codes = (rows[index == q] - rows[index == q].mean(axis=0)) @ now.bases[q]
            np.testing.assert_allclose(codes.var(axis=0), now.values[q], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("likelihood", ["error", "code-cost", "ppca", "factor-analysis"])
@pytest.mark.parametrize("assignment", ["hard", "soft"])
def test_every_option_fits_from_centres(likelihood, assignment):
    x = make_rows(400, 10, 4, 2, seed=9)
    centres = seed_centres(x, 4, np.random.default_rng(0))
    mixture = MixtureSettings(10, np.zeros(4, dtype=np.int64), 0, likelihood, assignment, floor=1e-9)
    em = MixtureEM(mixture, 2, 8, settle_passes=2)
    states = run_passes(em, initial_state(mixture, start_components(centres, 8, 0)), x, n=100)
    assert em.is_done(states[-1])
    assert {START, SETTLE} >= {s.phase for s in states[:3]}
    assert all(np.isfinite(s.objective) for s in states)
    assert states[-1].objective < states[0].objective


def test_constant_features_and_equal_rows_give_no_nan():
    x = make_rows(300, 10, 2, 2, seed=10)
    x[:, 3] = 0.25
    x[:40] = x[0]
    for likelihood in ("error", "code-cost", "ppca", "factor-analysis"):
        mixture = MixtureSettings(10, np.zeros(5, dtype=np.int64), 0, likelihood, "soft", floor=1e-6)
        em = MixtureEM(mixture, 3, 8, settle_passes=2)
        centres = seed_centres(x, 5, np.random.default_rng(1))
        with np.errstate(all="raise", under="ignore"):
            states = run_passes(em, initial_state(mixture, start_components(centres, 8, 0)), x, n=60)
        assert np.isfinite(states[-1].objective)
        assert np.isfinite(states[-1].components.means).all()


def test_starving_components_are_refilled_or_later_dropped():
    x = make_rows(400, 6, 3, 1, seed=11)
    far = np.full((2, 6), 50.0)
    start = start_components(np.concatenate([x[:2].astype("f8"), far]), 4, 0)
    em = MixtureEM(MixtureSettings(6, np.zeros(4, dtype=np.int64), 0), 1, 4, start_passes=8)
    states = run_passes(em, initial_state(em.settings, start), x, n=40)
    assert states[0].n_starving == 2
    assert states[0].n_refilled == 2
    assert states[-1].counts.min() > 2
    assert states[-1].n_dropped == 0
    em, state = replace(em), replace(initial_state(em.settings, start), refill_passes=3)
    states = run_passes(em, state, x, n=3)
    assert states[0].n_dropped == 2
    assert states[-1].components.weights[2:].tolist() == [0, 0]
    assert np.isfinite(states[-1].objective)


def test_a_component_is_scored_as_its_weighted_gaussian():
    p, h = 5, 2
    basis, _ = np.linalg.qr(draw(1, p, h))
    values, noise, mean = np.array([[3.0, 2.0]]), np.array([0.5]), draw(2, 1, p)
    components = Components(mean, basis[None], values, noise, np.array([0.25]), h)
    x = draw(3, 7, p)
    covariance = 0.5 * np.eye(p) + (basis * (values[0] - 0.5)) @ basis.T
    z = x - mean
    expected = np.einsum("np,pq,nq->n", z, np.linalg.inv(covariance), z)
    expected += np.linalg.slogdet(2 * np.pi * covariance)[1] - 2 * np.log(0.25)
    found = score_rows(make_scores(components, "ppca"), x)[:, 0]
    np.testing.assert_allclose(found, expected)
    loadings = basis * np.sqrt(values - 0.5)
    components = replace(
        components, bases=loadings[None] if loadings.ndim == 2 else loadings, noise=np.full((1, p), 0.5)
    )
    found = score_rows(make_scores(components, "factor-analysis"), x)[:, 0]
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize(("likelihood", "assignment"), CASES)
def test_the_compiled_kernels_keep_the_laws(likelihood, assignment):
    x = make_rows(400, 12, 4, 3)
    em, state = make_main_em(x, 4, 3, likelihood, assignment, q=8)
    states = {backend: run_passes(em, state, x, n=20, backend=backend) for backend in ("numba", "reference")}
    reported = np.array([s.objective for s in states["numba"]])
    rounding = 1e-7 * (x * x).sum(axis=1).mean()  # A float32 score is a difference of rounded squares.
    assert (np.diff(reported) <= 1e-6 * np.abs(reported[:-1]) + rounding).all()
    wanted = [s.objective for s in states["reference"]]
    np.testing.assert_allclose(reported, wanted, rtol=1e-4, atol=1e-4)
