"""Samples, completed rows, codes and the temperature agree with the formulas that define them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.models.linear_mixture.model import density, recognition
from scalelatent.models.linear_mixture.model.components import Components, make_scores
from scalelatent.reductions.temperature import choose_temperature
from tests.models.linear_mixture.cases import draw, score_rows


def make_components(likelihood: str, k: int = 3, p: int = 6, h: int = 2) -> Components:
    bases = np.linalg.qr(draw(1, k, p, h))[0]
    values, noise = 1.0 + np.exp(draw(2, k, h)), np.full(k, 0.4)
    if likelihood == "factor-analysis":
        bases, noise = draw(3, k, p, h), np.exp(draw(4, k, p))
    return Components(3 * draw(5, k, p), bases, values, noise, np.array([0.5, 0.3, 0.2])[:k], h)


def compute_covariances(found: Components, likelihood: str) -> np.ndarray:
    loadings, noise = density.gaussians(found, likelihood)
    return loadings @ np.swapaxes(loadings, 1, 2) + np.stack([np.diag(v) for v in noise])


@pytest.mark.parametrize("likelihood", ["ppca", "factor-analysis"])
def test_samples_have_the_moments_of_the_gaussians(likelihood):
    found = make_components(likelihood)
    x, index = density.sample(found, likelihood, 60_000, np.random.default_rng(0))
    wanted = compute_covariances(found, likelihood)
    for q in range(3):
        rows = x[index == q]
        assert abs(len(rows) / 60_000 - found.weights[q]) < 0.01
        scale = np.sqrt(np.diag(wanted[q]).max())
        np.testing.assert_allclose(rows.mean(axis=0), found.means[q], atol=0.05 * scale)
        np.testing.assert_allclose(np.cov(rows.T), wanted[q], atol=0.08 * scale**2)


@pytest.mark.parametrize("likelihood", ["ppca", "factor-analysis"])
def test_hidden_features_become_their_conditional_means(likelihood):
    found, seen = make_components(likelihood), np.array([True, False, True, True, False, False])
    x = draw(7, 9, 6)
    got, logs = density.complete(found, likelihood, x, seen)
    np.testing.assert_array_equal(got[:, seen], x[:, seen])
    means, shares = [], []
    for q, c in enumerate(compute_covariances(found, likelihood)):
        z, own = x[:, seen] - found.means[q][seen], c[np.ix_(seen, seen)]
        means.append(found.means[q][~seen] + z @ np.linalg.solve(own, c[np.ix_(seen, ~seen)]))
        square = np.einsum("np,pq,nq->n", z, np.linalg.inv(own), z)
        shares.append(-0.5 * (square + np.linalg.slogdet(2 * np.pi * own)[1]) + np.log(found.weights[q]))
    r = np.exp(np.array(shares) - logs)
    np.testing.assert_allclose(r.sum(axis=0), 1.0)
    np.testing.assert_allclose(got[:, ~seen], np.einsum("kn,knp->np", r, np.array(means)))
    whole, logs = density.complete(found, likelihood, x, np.ones(6, dtype=bool))
    np.testing.assert_array_equal(whole, x)
    scores = score_rows(make_scores(found, likelihood), x)
    np.testing.assert_allclose(logs, np.log(np.exp(-0.5 * scores).sum(axis=1)))
    with pytest.raises(ValueError, match="False for all"):
        density.complete(found, likelihood, x, np.zeros(6))
    with pytest.raises(ValueError, match="has 5 entries"):
        density.complete(found, likelihood, x, np.ones(5))


def test_codes_and_reconstructions_equal_their_formulas():
    found, x = make_components("ppca"), draw(8, 20, 6)
    index = np.arange(20) % 3
    codes = density.codes(found, "ppca", x, index)
    again = density.reconstruct(found, codes, index)
    errors = score_rows(make_scores(found, "error"), x)[np.arange(20), index]
    np.testing.assert_allclose(((x - again) ** 2).sum(axis=1), errors)


def test_the_reject_curve_equals_errors_of_sorted_rows():
    certainty, wrong = np.array([0.9, 0.1, 0.5, 0.1]), np.array([False, True, False, False])
    share, error = recognition.reject_curve(certainty, wrong)
    np.testing.assert_allclose(share, [0, 0.25, 0.5, 0.75])
    np.testing.assert_allclose(error, [0.25, 0, 0, 0])
    scores = np.array([[1.0, 4.0, 2.0], [3.0, 3.0, 9.0]])
    np.testing.assert_allclose(recognition.confidence(scores), [0.5, 0.0])
    np.testing.assert_allclose(recognition.confidence(scores[:, :1]), 1.0)


def test_the_temperature_has_the_least_log_loss():
    found, starts = replace(make_components("ppca"), n_dims=1), np.array([0, 1, 2, 3])
    x, y = density.sample(found, "ppca", 2000, np.random.default_rng(1))
    rows = recognition.Recogniser(make_scores(found, "error"), starts)
    mean = float(rows.recognise(rows.prepare(make_backend("reference")), x)[0].min(axis=1).mean())
    work = recognition.TemperaturePass(rows, mean * recognition.TEMPERATURES)
    stats, prepared = Stats.zeros(work.layout()), work.prepare(None, make_backend("reference"))
    for a in (0, 1200):
        work.accumulate(prepared, Block(x[a : a + 1200], y[a : a + 1200].astype("i4"), None, a), stats)
    chosen = choose_temperature(work.temperatures, stats["loss"])
    scores = rows.recognise(prepared, x)[0]

    def loss(t: float) -> float:
        found = recognition.probabilities(scores, t)[np.arange(len(y)), y]
        return float(-np.log(np.maximum(found, 1e-300)).sum())

    assert loss(chosen) <= min(loss(1.1 * chosen), loss(chosen / 1.1))
    best = stats["loss"].argmin()
    np.testing.assert_allclose(stats["loss"][best], loss(work.temperatures[best]))
