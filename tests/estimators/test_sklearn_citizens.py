"""Estimators work in pipelines and grid searches of scikit-learn, with data frames and routed weights."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold, cross_val_predict, cross_val_score
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

import scalelatent as sl
from scalelatent import CapsuleRegression, Dataset, Search
from scalelatent.estimators import _sklearn
from scalelatent.estimators.inputs import check_weights

Arrays = tuple[np.ndarray, np.ndarray]
MODEL = CapsuleRegression(capsule_dim=2, max_iter=8, nu_schedule=None, random_state=0, n_jobs=1)


@pytest.fixture
def metadata_routing() -> Iterator[None]:
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def test_a_pipeline_equals_its_steps(digits: Arrays) -> None:
    x, y = digits
    pipe = make_pipeline(StandardScaler(), clone(MODEL)).fit(x, y)
    scaled = StandardScaler().fit_transform(x)
    alone = clone(MODEL).fit(scaled, y)
    np.testing.assert_array_equal(pipe.predict(x), alone.predict(scaled))
    np.testing.assert_array_equal(pipe.transform(x), alone.transform(scaled))
    assert pipe.score(x, y) == alone.score(scaled, y)
    np.testing.assert_array_equal(pipe[:-1].get_feature_names_out(), [f"x{i}" for i in range(64)])
    np.testing.assert_array_equal(pipe.get_feature_names_out(), [f"capsuleregression{i}" for i in range(40)])


def test_a_grid_search_over_a_pipeline_finds_its_parameters(digits: Arrays) -> None:
    pipe = make_pipeline(StandardScaler(), clone(MODEL))
    grid = {"capsuleregression__capsule_dim": [1, 4], "standardscaler": [StandardScaler(), "passthrough"]}
    search = GridSearchCV(pipe, grid, cv=StratifiedKFold(3)).fit(*digits)
    assert len(search.cv_results_["params"]) == 4
    assert search.best_score_ > 0.8
    best = search.best_params_
    again = cross_val_score(clone(pipe).set_params(**best), *digits, cv=StratifiedKFold(3))
    assert again.mean() == search.best_score_


@pytest.mark.slow
def test_a_grid_search_runs_in_other_processes(digits: Arrays) -> None:
    grid = {"capsule_dim": [1, 4]}
    here, there = (GridSearchCV(MODEL, grid, cv=3, n_jobs=n).fit(*digits) for n in (1, 2))
    np.testing.assert_array_equal(there.cv_results_["mean_test_score"], here.cv_results_["mean_test_score"])


def test_cross_validation_and_stacking_work(digits: Arrays) -> None:
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.ensemble import StackingClassifier
    from sklearn.linear_model import LogisticRegression

    x, y = digits
    p = cross_val_predict(MODEL, x, y, cv=KFold(3), method="predict_proba")
    assert p.shape == (600, 10)
    np.testing.assert_allclose(p.sum(axis=1), 1)
    stack = StackingClassifier([("capsules", MODEL)], LogisticRegression(max_iter=50), cv=2).fit(x, y)
    assert stack.score(x, y) > 0.9
    assert CalibratedClassifierCV(MODEL, cv=2).fit(x, y).predict(x).shape == (600,)


def test_transforms_return_frames_with_feature_names(digits: Arrays, tmp_path: Any) -> None:
    pandas = pytest.importorskip("pandas")
    x, y = digits
    model = clone(MODEL).set_output(transform="pandas").fit(x, y)
    frame = model.transform(x[:7])
    assert isinstance(frame, pandas.DataFrame)
    assert frame.columns.tolist() == model.get_feature_names_out().tolist()
    np.testing.assert_array_equal(frame.to_numpy(), clone(MODEL).fit(x, y).transform(x[:7]))
    assert frame.dtypes.unique().tolist() == [np.float32]
    assert isinstance(model.fit_transform(x, y), pandas.DataFrame)
    # Datasets and dask arrays are not in memory, so the results are not converted to data frames.
    stored = model.transform(x, out=tmp_path / "latents.zarr")
    assert isinstance(stored, Dataset)
    import dask.array as da

    lazy = model.transform(da.from_array(x, chunks=200))
    assert isinstance(lazy, da.Array)
    np.testing.assert_allclose(lazy.compute(), stored.read_x(0, 600), rtol=1e-3, atol=1e-4)
    union = FeatureUnion([("h", clone(MODEL)), ("x", FunctionTransformer(feature_names_out="one-to-one"))])
    out = union.set_output(transform="pandas").fit(pandas.DataFrame(x).add_prefix("p"), y)
    assert out.get_feature_names_out()[[0, 40]].tolist() == ["h__capsuleregression0", "x__p0"]


def test_feature_names_come_from_data_frames(digits: Arrays) -> None:
    pandas = pytest.importorskip("pandas")
    x, y = digits
    frame = pandas.DataFrame(x, columns=[f"pixel{i}" for i in range(64)])
    labels = pandas.Series(y, name="digit")
    model = clone(MODEL).fit(frame, labels)
    np.testing.assert_array_equal(model.feature_names_in_, frame.columns)
    np.testing.assert_array_equal(model.W_, clone(MODEL).fit(x, y).W_)
    np.testing.assert_array_equal(model.predict(frame), clone(MODEL).fit(x, y).predict(x))
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame[frame.columns[::-1]])
    model.fit(x, y)
    assert not hasattr(model, "feature_names_in_")
    for options in ({"cv": 2}, {}):
        search = Search(MODEL, {"capsule_dim": [1, 2]}, **options)
        search.fit(frame, labels, **({} if options else {"validation": (frame[:100], labels[:100])}))
        np.testing.assert_array_equal(search.best_estimator_.feature_names_in_, frame.columns)
        assert search.predict(frame).shape == (600,)


@pytest.mark.usefixtures("metadata_routing")
def test_sample_weight_is_routed(digits: Arrays) -> None:
    x, y = digits
    weight = np.random.Generator(np.random.Philox(2)).uniform(0.1, 3, len(x))
    model = clone(MODEL).set_fit_request(sample_weight=True).set_score_request(sample_weight=True)
    pipe = make_pipeline(FunctionTransformer(), model)
    search = GridSearchCV(pipe, {"capsuleregression__momentum": [0.0, 0.5]}, cv=KFold(2), refit=False)
    search.fit(x, y, sample_weight=weight)
    for k, (train, test) in enumerate(KFold(2).split(x)):
        for i, momentum in enumerate((0.0, 0.5)):
            alone = clone(MODEL).set_params(momentum=momentum)
            alone.fit(x[train], y[train], sample_weight=weight[train])
            expected = alone.score(x[test], y[test], sample_weight=weight[test])
            assert search.cv_results_[f"split{k}_test_score"][i] == expected
    unasked = GridSearchCV(clone(MODEL), {"momentum": [0.0]}, cv=2)
    with pytest.raises(ValueError, match="sample_weight"):
        unasked.fit(x, y, sample_weight=weight)


def test_a_search_works_inside_a_pipeline_and_cross_validation(digits: Arrays) -> None:
    search = Search(MODEL, {"capsule_dim": [1, 3]}, cv=2)
    pipe = make_pipeline(StandardScaler(), search).fit(*digits)
    assert pipe[-1].best_params_["capsule_dim"] in (1, 3)
    assert pipe.score(*digits) > 0.8
    nested = cross_val_score(search, *digits, cv=2)
    assert nested.min() > 0.7
    twin = clone(search).set_params(estimator__max_iter=3)
    assert (twin.estimator.max_iter, search.estimator.max_iter) == (3, 8)


def test_private_names_of_scikit_learn_are_in_one_module() -> None:
    package, found = Path(sl.__file__).parent, set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sklearn":
                names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
                if any(name.startswith("_") for name in names):
                    found.add(file.relative_to(package).as_posix())
    assert found == {"estimators/_sklearn.py"}


@pytest.mark.parametrize("weights", [np.arange(4), [1, 0.5, 0, 2], 3.0])
def test_valid_weights_become_one_float64_per_row(weights: Any) -> None:
    found = check_weights(weights, 4)
    assert found.dtype == np.float64
    assert found.tolist() == np.broadcast_to(weights, 4).tolist()


@pytest.mark.parametrize("weights", [[1, 2], [1, 2, 3, -1], [1, 2, 3, np.nan], np.ones((4, 1))])
def test_weights_of_other_shapes_and_invalid_weights_are_refused(weights: Any) -> None:
    with pytest.raises(ValueError, match="sample_weight"):
        check_weights(weights, 4)


def test_without_scikit_learns_helper_an_output_is_an_array_with_a_warning(
    digits: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    pd = pytest.importorskip("pandas")
    model = clone(MODEL).fit(*digits).set_output(transform="pandas")
    framed = model.transform(digits[0][:9])
    assert isinstance(framed, pd.DataFrame)
    monkeypatch.setattr(_sklearn, "_wrap", None)
    with pytest.warns(UserWarning, match="lacks what set_output needs"):
        plain = model.transform(digits[0][:9])
    assert type(plain) is np.ndarray
    np.testing.assert_array_equal(plain, framed.to_numpy())
