"""The intercept of capsule regression centres rows and gives them a constant column."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.decomposition import PCA

import scalelatent as sl
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.errors import DataError
from scalelatent.models.capsule.fit import OWN_SQUARES, choose_ridge
from scalelatent.reductions.intercept import Intercept, map_rows, recenter
from scalelatent.reductions.moments import SecondMoments

ALGORITHMS = ("em", "stepwise")
ARCHITECTURES = ("multiclass", "one_vs_all", "all_vs_all")
DTYPES = ("u1", "i1", "u2", "i4", "i8", "f2", "f4", "f8", ">f4", "?")


def make_two_sides(n: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return n rows of two classes on opposite sides of 0; models without intercept confuse the classes."""
    x = np.random.default_rng(seed).normal(size=(n, 3))
    return x, (x[:, 0] > 0).astype(int)


def make_three_groups(n: int = 300, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng, y = np.random.default_rng(seed), np.arange(n) % 3
    return (rng.normal(size=(n, 5)) + 2 * np.eye(5)[y]).astype("f4"), y


# -- rows with an intercept ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("wanted", ["f4", "f8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mapped_rows_are_centred_and_have_a_constant_column(dtype: str, wanted: str, backend: str) -> None:
    x = np.random.default_rng(0).integers(0, 2 if dtype == "?" else 100, (7, 3)).astype(dtype)
    intercept = Intercept(np.array([0.3, -2.0, 40.1], dtype="f4"), 3.5)
    exact = np.column_stack([x.astype("f8") - intercept.mean.astype("f8"), np.full(7, 3.5)])
    rows = map_rows(intercept, make_backend(backend), x, wanted, "x")
    assert rows.dtype == ("f8" if backend == "reference" else wanted)
    np.testing.assert_array_equal(rows, exact.astype(rows.dtype))


def test_the_mean_is_subtracted_before_the_cast() -> None:
    x = 1e8 + np.random.default_rng(0).normal(size=(50, 2))
    intercept = Intercept(np.full(2, 1e8, dtype="f4"), 1.0)
    rows = map_rows(intercept, make_backend("cpu"), x, np.float32, "x")
    np.testing.assert_allclose(rows[:, :2], x - 1e8, rtol=1e-6, atol=1e-7)


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="different numbers of features, 4 and 3"):
        map_rows(Intercept(np.zeros(3, "f4"), 1.0), make_backend("cpu"), np.zeros((2, 4)), np.float32, "x")


def test_moments_about_any_point_give_the_moments_about_the_mean() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal([3.0, -1.0, 0.0, 100.0], size=(90, 4)), (np.arange(90) % 2).astype(np.int32)
    weight = rng.uniform(0.5, 2.0, 90)
    work = SecondMoments(4, 2, None, Intercept(np.array([2.0, 0.0, 0.0, 90.0], "f4"), 1.0))
    stats = Stats.zeros(work.layout())
    work.accumulate(make_backend("cpu"), Block(x, y, weight, 0), stats)
    moment, intercept = recenter(stats["moment"], work.intercept)
    np.testing.assert_allclose(intercept.mean, np.average(x, axis=0, weights=weight), rtol=1e-6)
    centred = x - intercept.mean
    length = np.sqrt(np.average((centred**2).sum(axis=1), weights=weight))
    np.testing.assert_allclose(intercept.constant, length, rtol=1e-9)
    rows = np.column_stack([centred, np.full(90, length)])
    exact = np.stack([(rows[y == c] * weight[y == c, None]).T @ rows[y == c] for c in range(2)])
    np.testing.assert_allclose(moment, exact, rtol=1e-9, atol=1e-9 * exact.max())


# -- models with an intercept --------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_classes_on_opposite_sides_are_distinguished(algorithm: str) -> None:
    """Classes differ in the sign of feature 0, so a fit without an intercept is hardly better than chance."""
    (x, y), (other, right) = make_two_sides(), make_two_sides(400, 1)
    options: dict[str, Any] = {"algorithm": algorithm, "random_state": 0, "n_jobs": 1, "n_epochs": 30}
    assert sl.CapsuleRegression(**options).fit(x, y).score(other, right) > 0.93
    assert sl.CapsuleRegression(fit_intercept=False, **options).fit(x, y).score(other, right) < 0.65


@pytest.mark.parametrize("projection", [None, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_shift_of_the_rows_hardly_changes_predictions(algorithm: str, projection: int | None) -> None:
    x, y = make_three_groups()
    shift = np.array([1e5, -1e5, 1e4, 0.0, 3.0])
    options: dict[str, Any] = {"algorithm": algorithm, "random_state": 0, "n_jobs": 1, "capsule_dim": 2}
    here, there = (
        sl.CapsuleRegression(projection=projection, max_iter=8, n_epochs=4, **options).fit(rows, y)
        for rows in (x.astype("f8"), x + shift)
    )
    # Means are float32 numbers. A mean of 1e5 is rounded by up to 4e-3, and standard deviations are near 1.
    np.testing.assert_allclose(here.predict_proba(x), there.predict_proba(x + shift), atol=0.02)
    assert (here.predict(x) == there.predict(x + shift)).mean() > 0.99


@pytest.mark.parametrize("projection", [None, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_latents_follow_from_the_public_attributes(architecture: str, projection: int | None) -> None:
    x, y = make_three_groups()
    model = sl.CapsuleRegression(
        architecture=architecture, projection=projection, capsule_dim=2, max_iter=5, random_state=0, n_jobs=1
    ).fit(x, y)
    assert model.mean_ is not None
    rows = x - model.mean_
    rows = rows if model.projection_ is None else rows @ model.projection_
    expected = rows @ model.W_.T + model.intercept_
    assert np.abs(model.intercept_).max() > 0.05
    np.testing.assert_allclose(model.transform(x), expected, atol=1e-5 * np.abs(expected).max())


def test_without_an_intercept_the_constants_are_zero() -> None:
    x, y = make_three_groups()
    model = sl.CapsuleRegression(fit_intercept=False, capsule_dim=2, max_iter=3, n_jobs=1).fit(x, y)
    assert model.mean_ is None
    assert not model.intercept_.any()
    np.testing.assert_allclose(model.transform(x), x @ model.W_.T, rtol=1e-4, atol=1e-5)


def test_directions_are_principal_components() -> None:
    x, y = make_three_groups()
    x = x.astype("f8") + 50
    model = sl.CapsuleRegression(projection=3, capsule_dim=2, max_iter=2, n_jobs=1).fit(x, y)
    expected = PCA(3).fit(x).components_
    overlap = np.abs((expected * model.projection_.T).sum(axis=1))
    np.testing.assert_allclose(overlap, 1.0, atol=1e-6)


@pytest.mark.parametrize("projection", [None, 4])
def test_a_saved_model_keeps_its_intercept_and_continues_to_learn(
    tmp_path: Path, projection: int | None
) -> None:
    x, y = make_three_groups()
    model = sl.CapsuleRegression(
        projection=projection, capsule_dim=2, max_iter=5, random_state=0, n_jobs=1
    ).fit(x + 9, y)
    model.save(tmp_path / "model")
    loaded = sl.load_model(tmp_path / "model")
    for name in ("W_", "intercept_", "mean_", "ridge_", "projection_"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(model, name))
    np.testing.assert_array_equal(loaded.predict_proba(x + 9), model.predict_proba(x + 9))
    for one in (model, loaded):
        one.partial_fit(x[:40] + 9, y[:40])
    np.testing.assert_allclose(loaded.predict_proba(x + 9), model.predict_proba(x + 9), atol=1e-9)


@pytest.mark.parametrize("rows", [1, 100])
def test_partial_fit_distinguishes_classes_on_opposite_sides(rows: int) -> None:
    (x, y), (other, right) = make_two_sides(1000), make_two_sides(400, 1)
    model = sl.CapsuleRegression(capsule_dim=2, random_state=0)
    for a in range(0, len(x), rows):
        model.partial_fit(x[a : a + rows], y[a : a + rows], classes=[0, 1])
    assert model.score(other, right) > 0.85
    assert (model.mean_ == 0).all() == (rows == 1)  # A first call with one row keeps the mean 0.


def test_rows_that_do_not_vary_are_refused() -> None:
    with pytest.raises(DataError, match="every row is the same, so there is nothing to learn"):
        sl.CapsuleRegression(capsule_dim=1).fit(np.ones((20, 3)), np.arange(20) % 2)


def test_a_class_of_zeros_is_learned() -> None:
    """If all features of a class are 0, its centred rows are equal, so its capsule has one direction."""
    x, y = make_three_groups()
    x[y == 2] = 0.0
    model = sl.CapsuleRegression(capsule_dim=2, random_state=0, n_jobs=1).fit(x, y)
    assert (model.predict(x[y == 2]) == 2).all()


# -- the ridge -----------------------------------------------------------------------------------------------


def test_the_default_ridge_is_a_mean_square_of_the_features() -> None:
    squares = np.array([4.0, 9.0, 1.0])
    np.testing.assert_allclose(choose_ridge(np.diag(squares * 50), 50.0, in_units=True), 4.0)
    np.testing.assert_allclose(choose_ridge(np.diag(squares * 50), 50.0, in_units=False), 14 / 3)
    small = choose_ridge(np.diag([4.0, 4.0, 1e-6, 0.0]), 1.0, in_units=True)
    np.testing.assert_allclose(small, [4.0, 4.0, OWN_SQUARES * 1e-6, 0.0])
    assert not choose_ridge(np.zeros((2, 2)), 5.0, in_units=True).any()


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_units_of_features_do_not_lower_the_score(scale: float) -> None:
    (x, y), (other, right) = make_three_groups(), make_three_groups(300, 2)
    units = np.where(np.arange(5) % 2 == 0, scale, 1.0)
    plain, scaled = (
        sl.CapsuleRegression(random_state=0, n_jobs=1).fit(x * by, y).score(other * by, right)
        for by in (1.0, units)
    )
    assert scaled > plain - 0.02


@pytest.mark.parametrize("value", [0.1, 7.0, -1e6])
def test_a_constant_feature_gives_no_direction(value: float) -> None:
    """A rounded mean leaves a small constant in a centred feature, which must not count as variance."""
    x, y = make_three_groups()
    rows = np.column_stack([x, np.full(len(x), value)]).astype("f8")
    weight = np.ones(len(x))
    rows[:10, -1], weight[:10] = value + 1, 0.0  # The feature varies only in rows of weight 0.
    options: dict[str, Any] = {"capsule_dim": 2, "random_state": 0, "n_jobs": 1, "max_iter": 8}
    model = sl.CapsuleRegression(**options).fit(rows, y, sample_weight=weight)
    without = sl.CapsuleRegression(**options).fit(x, y, sample_weight=weight)
    assert np.abs(model.W_[:, -1]).max() < 1e-12 * np.abs(model.W_).max()
    np.testing.assert_allclose(model.predict_proba(rows), without.predict_proba(x), atol=1e-3)


@pytest.mark.parametrize("projection", [None, 3])
@pytest.mark.parametrize("factor", [1e4, 1e9])
def test_a_row_that_outweighs_all_others_is_reported(factor: float, projection: int | None) -> None:
    x, y = make_three_groups()
    x = x.astype("f8")
    options: dict[str, Any] = {"capsule_dim": 1, "max_iter": 2, "n_jobs": 1, "projection": projection}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sl.CapsuleRegression(**options).fit(x, y)
    x[123] *= factor
    with pytest.warns(UserWarning, match=r"row 123 has more than 90% of the squared lengths"):
        sl.CapsuleRegression(**options).fit(x, y, engine={"block_rows": 64})
