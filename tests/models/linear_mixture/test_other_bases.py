"""Other dimensions and tangents from the moments of a fit; recognition after it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss

import scalelatent as sl


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y


def fitted(digits: Any, **params: Any) -> Any:
    x, y = digits
    params = {"n_components": 2, "n_dims": 8, "random_state": 0, "statistics": "moments"} | params
    return sl.LinearMixtureClassifier(**params).fit(x[:1200], y[:1200])


@pytest.mark.parametrize("likelihood", ["error", "code-cost", "ppca"])
def test_the_own_parameters_give_the_same_model(digits: Any, likelihood: str) -> None:
    m = fitted(digits, likelihood=likelihood)
    same = m.with_bases()
    for name in ("means_", "bases_", "variances_", "noise_", "temperature_"):
        np.testing.assert_array_equal(getattr(same, name), getattr(m, name))


def test_tangents_of_the_fit_give_nearly_the_same_model(digits: Any) -> None:
    m = fitted(digits, tangents=("shift-x", "thickness"), image_shape=(8, 8))
    np.testing.assert_allclose(
        m.with_bases().decision_function(digits[0]), m.decision_function(digits[0]), atol=1e-4
    )


def test_directions_are_principal_components_of_each_class(digits: Any) -> None:
    x, y = digits
    few = fitted(digits, n_components=1).with_bases(3)
    for c in range(10):
        own = x[:1200][y[:1200] == c].astype(np.float64)
        values, vectors = np.linalg.eigh(np.cov(own.T, bias=True))
        np.testing.assert_allclose(few.variances_[c], values[::-1][:3], rtol=1e-5)
        np.testing.assert_allclose(np.abs(vectors[:, ::-1][:, :3].T @ few.bases_[c]), np.eye(3), atol=1e-3)
        np.testing.assert_allclose(few.noise_[c], values[:-3].mean(), rtol=1e-5)


def test_a_share_of_the_variance(digits: Any) -> None:
    m = fitted(digits)
    dims = [m.with_bases(share).n_dims_ for share in (0.5, 0.8)]
    assert dims[0] < dims[1] <= 20
    with pytest.raises(ValueError, match="raise max_dims"):
        m.set_params(max_dims=4).with_bases(0.99)


def test_probabilities_are_about_those_of_a_fit_with_so_many_dimensions(digits: Any) -> None:
    x, y = digits
    few, fit = fitted(digits).with_bases(3), fitted(digits, n_dims=3)
    losses = [log_loss(y[1200:], m.predict_proba(x[1200:])) for m in (few, fit)]
    assert losses[0] < 1.25 * losses[1]
    assert few.score(x[1200:], y[1200:]) > fit.score(x[1200:], y[1200:]) - 0.02


def test_the_first_model_stays_and_moments_are_saved(digits: Any, tmp_path: Any) -> None:
    m = fitted(digits)
    before = m.decision_function(digits[0])
    few = m.with_bases(3)
    assert (m.n_dims, m.n_dims_, few.n_dims, few.n_dims_) == (8, 8, 3, 3)
    few.partial_fit(digits[0][1200:], digits[1][1200:])
    np.testing.assert_array_equal(m.decision_function(digits[0]), before)
    m.save(tmp_path / "m.zarr")
    loaded = sl.load_model(tmp_path / "m.zarr")
    np.testing.assert_array_equal(loaded.with_bases(5).bases_, m.with_bases(5).bases_)


def test_moments_are_no_part_of_what_workers_get(digits: Any) -> None:
    m = fitted(digits)
    assert m._fitted.kept is not None
    assert m._row_map("scores").fitted.kept is None


def test_tangents_may_come_after_the_fit(digits: Any) -> None:
    m = fitted(digits)
    with pytest.raises(ValueError, match="image_shape"):
        m.with_bases(tangents=("shift-x",))
    m.set_params(image_shape=(8, 8))
    moved = m.with_bases(tangents=("shift-x", "shift-y"), recognition_tangent_weight=0.3)
    assert np.abs(moved.bases_ - m.bases_).max() > 0.01
    assert moved.set_params(recognition="tangent-distance").score(*digits) > 0.95
    with pytest.raises(ValueError, match="thickness"):
        m.with_bases(tangents=("thickness",))


def test_what_has_no_moments_is_refused(digits: Any) -> None:
    x, y = digits
    with pytest.raises(ValueError, match="statistics='moments'"):
        fitted(digits, statistics="images").with_bases(3)
    with pytest.raises(ValueError, match="fit again"):
        fitted(digits, likelihood="factor-analysis", n_dims=2, max_iter=2).with_bases(3)
    with pytest.raises(ValueError, match="partial_fit"):
        fitted(digits).partial_fit(x[:5], y[:5]).with_bases(3)
    with pytest.raises(ValueError, match="at most 63"):
        fitted(digits).with_bases(64)


def test_densities_too(digits: Any) -> None:
    d = sl.LinearMixture(n_components=4, n_dims=8, likelihood="ppca", random_state=0, statistics="moments")
    few = d.fit(digits[0]).with_bases(2)
    assert few.encode(digits[0][:5])[0].shape == (5, 2)
    assert few.score(digits[0]) < d.score(digits[0])


def test_recognition_may_change_after_the_fit(digits: Any, tmp_path: Any) -> None:
    x = digits[0]
    m = fitted(digits, tangents=("shift-x", "shift-y"), image_shape=(8, 8), statistics="images")
    plain = m.decision_function(x)
    moved = m.set_params(recognition="tangent-distance").decision_function(x)
    assert (moved >= plain - 1e-5).all()
    assert (moved > plain + 1e-3).any()
    m.set_params(recognition="error").save(tmp_path / "m.zarr")
    loaded = sl.load_model(tmp_path / "m.zarr")
    np.testing.assert_array_equal(loaded.decision_function(x), plain)
    np.testing.assert_array_equal(
        loaded.set_params(recognition="tangent-distance").decision_function(x), moved
    )
    none = fitted(digits).set_params(recognition="tangent-distance")
    with pytest.raises(ValueError, match="needs tangents"):
        none.predict(x)
