"""Parameters of capsule regression have their documented effects, and invalid values are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scalelatent import CapsuleRegression
from scalelatent.models.capsule.fit import AUTO_PROJECTION

Arrays = tuple[np.ndarray, np.ndarray]


def _fit(data: Arrays, **options: Any) -> CapsuleRegression:
    return CapsuleRegression(
        **{"capsule_dim": 2, "max_iter": 5, "random_state": 0, "n_jobs": 1, **options}
    ).fit(*data)


def test_the_default_schedule_learns_digits(digits: Arrays, held_out: Arrays) -> None:
    model = CapsuleRegression(capsule_dim=6, random_state=0).fit(*digits, validation=held_out)
    assert model.score(*held_out) > 0.88  # The limit is low because the fit has only 600 rows.
    # The schedule ended the fit before the largest number of passes.
    assert model.n_iter_ == len(model.history_) < 2000


@pytest.mark.parametrize(
    ("architecture", "rows", "members", "score"),
    [("multiclass", 20, 1, 0.8), ("one_vs_all", 40, 10, 0.8), ("all_vs_all", 180, 45, 0.8)],
)
def test_all_architectures_learn(
    digits: Arrays, held_out: Arrays, architecture: str, rows: int, members: int, score: float
) -> None:
    model = _fit(digits, architecture=architecture, max_iter=20)
    assert model.W_.shape == (rows, 64)
    assert model.capsule_dims_.shape == (members, 10 if architecture == "multiclass" else 2)
    assert model.score(*held_out) > score
    assert model.transform(held_out[0]).shape == (300, rows)
    assert model.history_[-1]["active_members"] <= members


# -- projection ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_projection_is_the_svd_about_the_mean_or_the_origin(digits: Arrays, fit_intercept: bool) -> None:
    model = _fit(digits, projection=12, fit_intercept=fit_intercept)
    assert model.projection_.shape == (64, 12)
    assert model.W_.shape == (40, 12)
    rows = digits[0] - (digits[0].mean(axis=0).astype("f4") if fit_intercept else 0.0)
    v = np.linalg.svd(rows, full_matrices=False)[2][:12]
    signs = np.sign((v * model.projection_.T).sum(axis=1))
    np.testing.assert_allclose(model.projection_.T, v * signs[:, None], atol=1e-6)
    np.testing.assert_allclose(model.projection_.T @ model.projection_, np.eye(12), atol=1e-12)


def test_projection_equals_a_projection_before_the_fit(digits: Arrays) -> None:
    # Both fits get the same ridge, because the default ridge differs with and without a projection.
    model = _fit(digits, projection=12, ridge=20.0)
    projected = (digits[0].astype("f4") @ model.projection_.astype("f4")).astype("f4")
    other = _fit((projected, digits[1]), projection=None, ridge=20.0)
    np.testing.assert_allclose(model.predict_proba(digits[0]), other.predict_proba(projected), atol=1e-4)


def test_a_full_projection_only_rotates_the_axes(digits: Arrays) -> None:
    used = digits[0][:, digits[0].any(axis=0)]
    plain, turned = (_fit((used, digits[1]), projection=p, ridge=20.0) for p in (None, used.shape[1]))
    np.testing.assert_allclose(plain.predict_proba(used), turned.predict_proba(used), atol=1e-3)


def test_auto_projects_only_wide_rows(digits: Arrays) -> None:
    assert AUTO_PROJECTION == 196
    # Rows of 64 features are narrow, so "auto" makes no projection.
    assert _fit(digits, projection="auto").projection_ is None
    assert _fit(digits, projection=None).projection_ is None
    rng = np.random.Generator(np.random.Philox(1))
    wide = np.concatenate([digits[0], rng.integers(0, 3, (600, 140))], axis=1)
    assert _fit((wide, digits[1]), projection="auto", max_iter=1).projection_.shape == (204, 196)
    assert _fit((wide[:, :196], digits[1]), projection="auto", max_iter=1).projection_ is None
    assert _fit((wide, digits[1]), projection=None, max_iter=1).W_.shape == (40, 204)


def test_validation_rows_are_projected(digits: Arrays, held_out: Arrays) -> None:
    model = CapsuleRegression(capsule_dim=2, max_iter=8, projection=15).fit(*digits, validation=held_out)
    # Two of the 300 predicted classes may differ, which is an error of 2 / 300 < 0.007.
    assert 1 - model.score(*held_out) == pytest.approx(model.best_validation_error_, abs=0.007)


# -- starts --------------------------------------------------------------------------------------------------


def test_a_random_start_depends_on_the_seed_alone(digits: Arrays) -> None:
    first, again, other = (_fit(digits, init="random", random_state=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(first.W_, again.W_)
    assert not np.array_equal(first.W_, other.W_)
    assert (first.seed_, other.seed_) == (1, 2)


def test_a_drawn_seed_is_kept_and_repeats_the_fit(digits: Arrays) -> None:
    first = _fit(digits, init="random", random_state=None)
    np.testing.assert_array_equal(_fit(digits, init="random", random_state=first.seed_).W_, first.W_)
    assert first.seed_ != _fit(digits, init="random", random_state=None).seed_
    a, b = (_fit(digits, init="random", random_state=np.random.RandomState(3)) for _ in range(2))
    np.testing.assert_array_equal(a.W_, b.W_)


def test_init_scale_scales_the_start(digits: Arrays) -> None:
    h = [
        _fit(digits, init="random", init_scale=s, max_iter=1, nu_schedule=[(0.0, 1)])
        .transform(digits[0])
        .std()
        for s in (0.5, 5.0)
    ]
    # A fit of one pass keeps the model that it measured, which is the start.
    assert h[1] == pytest.approx(10 * h[0], rel=1e-4)


def test_a_warm_start_continues_the_fit(digits: Arrays) -> None:
    whole = _fit(digits, max_iter=10, nu_schedule=None, momentum=0)
    model = CapsuleRegression(
        capsule_dim=2, max_iter=4, nu_schedule=None, momentum=0, warm_start=True, n_jobs=1
    )
    model.fit(*digits)
    first = model.W_
    model.set_params(max_iter=6).fit(*digits)
    # A warm start sums the second moments around the known mean. A first fit sums around another point and
    # shifts the moments to the mean afterwards, so the two fits round differently.
    np.testing.assert_allclose(model.W_, whole.W_, rtol=0, atol=1e-6 * np.abs(whole.W_).max())
    assert model.n_iter_ == 6
    assert not np.array_equal(first, model.W_)
    cold = CapsuleRegression(capsule_dim=2, max_iter=4, nu_schedule=None, momentum=0, n_jobs=1).fit(*digits)
    np.testing.assert_array_equal(cold.fit(*digits).W_, first)


def test_warm_start_keeps_the_projection(digits: Arrays) -> None:
    model = CapsuleRegression(capsule_dim=2, max_iter=2, projection=10, warm_start=True).fit(*digits)
    basis = model.projection_
    half = digits[0][:300], digits[1][:300]
    np.testing.assert_array_equal(model.fit(*half).projection_, basis)
    fresh = CapsuleRegression(capsule_dim=2, max_iter=2, projection=10).fit(*half).projection_
    assert not np.allclose(fresh, basis)


@pytest.mark.parametrize("change", [{"capsule_dim": 3}, {"architecture": "multiclass"}, {"projection": 9}])
def test_warm_start_with_another_shape_is_refused(digits: Arrays, change: dict[str, Any]) -> None:
    model = CapsuleRegression(capsule_dim=2, max_iter=2, warm_start=True).fit(*digits)
    with pytest.raises(
        ValueError, match=r"warm_start: the last fit has weights of shape \(40, 65\).*warm_start=False"
    ):
        model.set_params(**change).fit(*digits)


def test_a_warm_start_without_the_earlier_projection_computes_its_own(digits: Arrays) -> None:
    """The projection has 64 directions, as many as features, so the shape of the weights does not change."""
    model = _fit(digits, projection=64, warm_start=True)
    model.set_params(projection=None).fit(*digits)
    assert model.projection_ is None
    expected = (digits[0] - model.mean_) @ model.W_.T + model.intercept_
    np.testing.assert_allclose(model.transform(digits[0]), expected, atol=1e-4 * np.abs(expected).max())


def test_warm_start_with_other_classes_is_refused(digits: Arrays) -> None:
    model = CapsuleRegression(capsule_dim=2, max_iter=2, warm_start=True).fit(*digits)
    with pytest.raises(ValueError, match="warm_start"):
        model.fit(digits[0], digits[1] + 1)


# -- learning ------------------------------------------------------------------------------------------------


def test_plain_em_lowers_the_log_loss_in_every_pass(digits: Arrays) -> None:
    model = _fit(digits, nu_schedule=None, momentum=0, max_iter=15)
    losses = [r["objective"] for r in model.history_]
    assert (np.diff(losses) < 0).all()
    assert {r["active_rows"] for r in model.history_} == {1.0}


def test_momentum_needs_fewer_passes(digits: Arrays) -> None:
    losses = [
        _fit(digits, nu_schedule=None, momentum=m, max_iter=15).history_[-1]["objective"] for m in (0.0, 0.9)
    ]
    assert losses[1] < losses[0] - 0.01


def test_tol_ends_plain_em(digits: Arrays) -> None:
    model = _fit(digits, architecture="multiclass", nu_schedule=None, momentum=0, max_iter=500, tol=1e-3)
    losses = [r["objective"] for r in model.history_]
    assert model.n_iter_ < 500
    assert losses[-2] - losses[-1] < 1e-3 <= losses[-3] - losses[-2]
    assert _fit(digits, nu_schedule=None, momentum=0, max_iter=40, tol=0).n_iter_ == 40
    assert _fit(digits, nu_schedule=None, momentum=0, max_iter=40, tol=None).n_iter_ == 40


def test_thresholds_exclude_most_rows(digits: Arrays) -> None:
    model = _fit(digits, nu_schedule=[(0.8, 30)], max_iter=30)
    assert model.history_[-1]["active_rows"] < 0.4
    assert model.history_[0]["nu"] == 0.8


def test_a_ridge_shrinks_the_weights(digits: Arrays) -> None:
    sizes = [np.linalg.norm(_fit(digits, ridge=r, nu_schedule=None).W_) for r in (0.0, 1e3, 1e6)]
    assert sizes[0] > 1.05 * sizes[1] > 1.05**2 * sizes[2]


def test_classes_may_have_different_dimensions(digits: Arrays) -> None:
    x, y = digits[0][digits[1] < 3], digits[1][digits[1] < 3]
    options = {"max_iter": 20, "random_state": 0, "temperature": 1.0}
    model = CapsuleRegression(capsule_dim=[1, 4, 2], **options).fit(x, y)
    assert model.W_.shape == (7, 64)
    p = model.predict_proba(x)
    np.testing.assert_array_equal(model.predict(x), p.argmax(axis=1))
    assert model.score(x, y) > 0.95
    h = model.transform(x).astype(float)
    from scalelatent.models.capsule.kernels.reference import probabilities

    np.testing.assert_allclose(p, probabilities(h.T, np.array([1, 4, 2])).T, atol=1e-6)
    blank = np.zeros((1, 64), "u1")
    assert model.predict(blank).tolist() == [1]  # All capsules have length 0; the class of 4 dimensions wins.


@pytest.mark.parametrize("device", ["cpu", "reference", "auto"])
def test_devices_give_close_fits(digits: Arrays, device: str) -> None:
    expected = _fit(digits, device="reference", nu_schedule=None)
    model = _fit(digits, device=device, nu_schedule=None)
    np.testing.assert_allclose(model.predict_proba(digits[0]), expected.predict_proba(digits[0]), atol=1e-4)


INVALID = [
    ({"capsule_dim": 0}, "capsule_dim=0"),
    ({"capsule_dim": 2.5}, "capsule_dim=2.5"),
    ({"capsule_dim": [1, 2]}, "2 dimensions for 10 classes"),
    ({"capsule_dim": 66}, "capsule_dim=66 is above the 65 columns of the rows"),
    ({"capsule_dim": 6, "projection": 4}, "capsule_dim=6 is above the 5 columns of the rows"),
    ({"fit_intercept": 1}, "fit_intercept=1: give True or False"),
    ({"architecture": "pairs"}, "architecture='pairs' is not one of"),
    ({"algorithm": "sgd"}, "algorithm='sgd' is not one of None, 'em'"),
    ({"init": "zeros"}, "init='zeros' is not one of 'subspace', 'random'"),
    ({"init_scale": 0}, "init_scale=0"),
    ({"momentum": 1.0}, r"momentum=1.0: give a number in \[0, 1\)"),
    ({"momentum": -0.1}, "momentum=-0.1"),
    ({"momentum": "a"}, "momentum='a'"),
    ({"momentum": float("nan")}, "momentum=nan"),
    ({"max_iter": 0}, "max_iter=0"),
    ({"max_iter": 2.5}, "max_iter=2.5"),
    ({"max_iter": True}, "max_iter=True"),
    ({"tol": -1}, "tol=-1"),
    ({"tol": "x"}, "tol='x'"),
    ({"ridge": -1}, "ridge=-1"),
    ({"ridge": float("nan")}, "ridge=nan"),
    ({"ridge": "a"}, "ridge='a'"),
    ({"nu_schedule": [(1.5, 3)]}, "nu_schedule"),
    ({"nu_schedule": "papers"}, "nu_schedule='papers'"),
    ({"projection": 65}, "projection=65 is above the 64 features.*give at most 64"),
    ({"projection": 0}, "projection=0"),
    ({"projection": 2.5}, "projection=2.5"),
    ({"projection": "none"}, "projection='none'"),
    ({"projection": True}, "projection=True"),
    ({"class_weight": "even"}, "class_weight='even'"),
    ({"class_weight": {11: 2.0}}, "class_weight=.*classes are"),
    ({"class_weight": {3: -1.0}}, "class_weight=.*above 0"),
    ({"class_weight": {3: 0}}, "class_weight=.*above 0"),
    ({"class_weight": {3: "a"}}, "class_weight=.*finite numbers"),
    ({"class_weight": [1, 2]}, r"class_weight=\[1, 2\]: give 'balanced', a dict"),
    ({"class_weight": {3: float("nan")}}, "class_weight=.*finite"),
    ({"random_state": -3}, "random_state=-3"),
    ({"random_state": "seed"}, "random_state='seed'"),
    ({"device": "cuda"}, "device='cuda' is not one of"),
    ({"n_jobs": 0}, "n_jobs=0"),
]


@pytest.mark.parametrize(("options", "message"), INVALID, ids=[str(o) for o, _ in INVALID])
def test_invalid_values_are_refused_before_any_pass(
    digits: Arrays, options: dict[str, Any], message: str
) -> None:
    from scalelatent import Callback

    class RefuseStages(Callback):
        def on_stage(self, info: dict[str, Any]) -> None:
            raise AssertionError(f"work started: {info}")

    model = CapsuleRegression(**{"capsule_dim": 2, "max_iter": 2, **options})
    with pytest.raises(ValueError, match=message):
        model.fit(*digits, callbacks=[RefuseStages()])
    assert not hasattr(model, "W_")


def test_balanced_weights_ignore_rows_of_weight_zero(digits: Any) -> None:
    x, y = digits
    weight = np.ones(len(x))
    weight[y < 3] = np.arange((y < 3).sum()) % 2
    options = {"capsule_dim": 1, "class_weight": "balanced", "max_iter": 3, "nu_schedule": None}
    kept = weight > 0
    masked = CapsuleRegression(**options).fit(x, y, sample_weight=weight)
    cut = CapsuleRegression(**options).fit(x[kept], y[kept])
    np.testing.assert_allclose(masked.W_, cut.W_, rtol=1e-3, atol=1e-4)
    assert masked.history_[-1]["objective"] == pytest.approx(cut.history_[-1]["objective"], rel=1e-5)
