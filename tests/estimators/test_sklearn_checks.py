"""Estimators pass the checks of scikit-learn, except for checks that are listed with a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import parametrize_with_checks

from scalelatent import (
    CapsuleRegression,
    ConditionalRBM,
    HierarchicalCompositionalNetwork,
    MultilayerBootstrapNetwork,
    Search,
    load_model,
)
from scalelatent.errors import DataError
from scalelatent.estimators.base import warn_reduced

# Checks that cannot pass, by name, with the reason. Checks that better code could satisfy are not listed.
_WEIGHTS = (
    "repeated rows allow a larger default capsule_dim than weighted rows; with the same capsule_dim the "
    "check allows a difference of 1e-7, but passes are float32"
)
EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": _WEIGHTS,
    "check_sample_weight_equivalence_on_sparse_data": _WEIGHTS,
}


SORTED = "its rows are sorted by class; folds are contiguous rows, and a fit without a class is refused"
EXPECTED_OF_SEARCH = {
    "check_positive_only_tag_during_fit": SORTED,
    "check_estimators_nan_inf": SORTED,
    "check_sample_weight_equivalence_on_dense_data": _WEIGHTS,
    "check_sample_weight_equivalence_on_sparse_data": _WEIGHTS,
}


_THREE_VALUES = "gives a column of three values; outputs of a conditional RBM are columns of 0 and 1"
EXPECTED_OF_RBM = {
    "check_estimators_empty_data_messages": "rows without features make a plain RBM",
    "check_estimators_dtypes": _THREE_VALUES,
    "check_transformer_data_not_an_array": _THREE_VALUES,
    "check_transformer_general": _THREE_VALUES,
    "check_fit2d_1feature": _THREE_VALUES,
    "check_dtype_object": "expects an error about the type of labels; the outputs of this model are 0 or 1",
}


_BINARY = "gives real numbers; pixels of an HCN are 0 and 1, and without threshold others are refused"
_LARGE = "its numbers are near 100, above the threshold, so all pixels are 1; with threshold=100 it passes"
_OF_LARGE = ("check_fit_idempotent", "check_fit_check_is_fitted", "check_n_features_in")
_OF_SMALL = (
    "check_fit_score_takes_y", "check_estimators_overwrite_params", "check_dont_overwrite_parameters",
    "check_estimators_fit_returns_self", "check_readonly_memmap_input", "check_n_features_in_after_fitting",
    "check_positive_only_tag_during_fit", "check_estimators_dtypes", "check_dtype_object",
    "check_pipeline_consistency", "check_estimators_nan_inf", "check_estimators_pickle",
    "check_f_contiguous_array_estimator", "check_transformer_data_not_an_array", "check_transformer_general",
    "check_methods_sample_order_invariance", "check_methods_subset_invariance", "check_dict_unchanged",
    "check_fit2d_predict1d", "check_fit2d_1sample", "check_fit2d_1feature",
)  # fmt: skip

# Checks that fail for each ``threshold`` (pixels above it are 1). With threshold=100, those of 0.5 pass.
EXPECTED_OF_HCN = {
    None: dict.fromkeys((*_OF_LARGE, *_OF_SMALL), _BINARY),
    0.5: dict.fromkeys(_OF_LARGE, _LARGE),
}


def expected_failures(estimator: Any) -> dict[str, str]:
    if isinstance(estimator, HierarchicalCompositionalNetwork):
        return EXPECTED_OF_HCN[estimator.threshold]
    if isinstance(estimator, ConditionalRBM):
        return EXPECTED_OF_RBM
    return EXPECTED_OF_SEARCH if isinstance(estimator, Search) else EXPECTED


@parametrize_with_checks(
    [
        CapsuleRegression(),
        ConditionalRBM(),
        HierarchicalCompositionalNetwork(),
        HierarchicalCompositionalNetwork(threshold=0.5),
        CapsuleRegression(max_iter=5, architecture="one_vs_all", nu_schedule=None),
        CapsuleRegression(max_iter=5, architecture="all_vs_all", init="random", random_state=0),
        Search(CapsuleRegression(max_iter=5), {"momentum": [0.5, 0.0]}, cv=2),
    ],
    expected_failed_checks=expected_failures,
)
def test_scikit_learns_checks_pass(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("name", _OF_LARGE)
def test_scikit_learns_checks_of_values_near_100_pass(name: str) -> None:
    check = getattr(estimator_checks, name)
    check("HierarchicalCompositionalNetwork", HierarchicalCompositionalNetwork(threshold=100))


@pytest.mark.slow
@parametrize_with_checks([MultilayerBootstrapNetwork()])
def test_scikit_learns_checks_with_400_clusterings_pass(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize(
    ("init", "rows", "expected"), [("subspace", 20, 5), ("subspace", 3, 3), ("random", 20, 8)]
)
def test_a_default_is_reduced_to_the_rows_with_one_warning(
    init: str, rows: int, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    warn_reduced.cache_clear()
    x, y = np.random.default_rng(0).normal(size=(2 * rows, 4)), np.arange(2 * rows) % 2
    for _ in range(2):
        model = CapsuleRegression(max_iter=2, init=init).fit(x, y)
        assert (model.capsule_dim, model.capsule_dim_) == (None, expected)
    reported = [record.getMessage() for record in caplog.records]
    assert len(reported) == (expected < 8)
    assert all(
        f"capsule_dim is {expected} instead of its default 8, because the training rows have " in text
        for text in reported
    )
    # Only the default value is reduced. A value that the user sets is not: if it is too large, fit fails.
    with pytest.raises(ValueError, match="capsule_dim"):
        CapsuleRegression(capsule_dim=8).fit(x, y)


def test_a_default_batch_is_reduced_to_the_rows_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_reduced.cache_clear()
    v = np.eye(4, dtype="u1").repeat(3, axis=0)
    for more, size in ({}, 12), ({"n_chains": 5}, 10), ({"local_steps": 2, "n_chains": 2}, 3):
        model = ConditionalRBM(n_hidden=2, n_epochs=1, random_state=0, **more)
        assert model.fit(v, v).batch_size_ == size
        asked = clone(model).set_params(batch_size=size).fit(v, v)
        np.testing.assert_array_equal(model.W_, asked.W_)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "batch_size is 12 instead of its default 20", "batch_size is 10 instead of its default 20",
        "batch_size is 3 instead of its default 20",
    ]  # fmt: skip
    with pytest.raises(DataError, match="set batch_size to 12"):
        ConditionalRBM(batch_size=20).fit(v, v)


def test_a_default_equals_its_documented_value_for_enough_rows(digits: Any, tmp_path: Any) -> None:
    x, y = digits
    ours, theirs = (CapsuleRegression(max_iter=2, random_state=0, **how) for how in ({}, {"capsule_dim": 8}))
    np.testing.assert_array_equal(ours.fit(x, y).W_, theirs.fit(x, y).W_)
    # A run that started with the default can be resumed with capsule_dim=8.
    assert ours._deciding_parameters() == theirs._deciding_parameters()
    v = (x > 8).astype("u1")
    a, b = (ConditionalRBM(n_hidden=2, n_epochs=1, random_state=0, **how) for how in ({}, {"batch_size": 20}))
    np.testing.assert_array_equal(a.fit(x, v).W_, b.fit(x, v).W_)
    assert a._deciding_parameters() == b._deciding_parameters()
    for model, name, value in (ours, "capsule_dim_", 8), (a, "batch_size_", 20):
        model.save(tmp_path / name)
        assert getattr(load_model(tmp_path / name), name) == value


def test_clone_keeps_the_parameters() -> None:
    model = CapsuleRegression(
        capsule_dim=[1, 2], nu_schedule=[(0.5, 3)], class_weight={0: 2.0}, random_state=3
    )
    twin = clone(model)
    assert twin is not model
    assert twin.get_params() == model.get_params()
    assert CapsuleRegression(**model.get_params()).get_params() == model.get_params()


def test_the_constructor_stores_keyword_arguments_only() -> None:
    weird = object()
    model = CapsuleRegression(capsule_dim=weird, momentum="x", random_state=weird)
    assert model.capsule_dim is weird
    assert model.momentum == "x"
    with pytest.raises(TypeError):
        CapsuleRegression(3)


def test_estimators_work_in_pipelines_and_searches(digits: Any) -> None:
    x, y = digits[0][:300], digits[1][:300]
    model = make_pipeline(StandardScaler(), CapsuleRegression(capsule_dim=2, max_iter=10, random_state=0))
    assert cross_val_score(model, x, y, cv=3).mean() > 0.7
    search = GridSearchCV(CapsuleRegression(max_iter=5, random_state=0), {"capsule_dim": [1, 4]}, cv=2).fit(
        x, y
    )
    assert search.best_params_ in ({"capsule_dim": 1}, {"capsule_dim": 4})
    capsules = CapsuleRegression(architecture="multiclass", capsule_dim=1, max_iter=2)
    assert make_pipeline(capsules, StandardScaler()).fit(x, y).transform(x).shape == (300, 10)


def test_fit_returns_self_and_transforms(digits: Any) -> None:
    x, y = digits
    model = CapsuleRegression(capsule_dim=2, max_iter=2)
    assert model.fit(x, y) is model
    assert (model.fit_transform(x, y) == model.transform(x)).all()
