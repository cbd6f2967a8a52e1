"""Models compare the feature names of datasets as they compare the column names of data frames."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import scalelatent as sl
from scalelatent.evaluation.scoring import score_dataset

RNG = np.random.default_rng(0)
LABELS = np.arange(60) % 3
ROWS = (RNG.normal(size=(3, 16))[LABELS] * 3 + RNG.normal(size=(60, 16))).astype("f4")
BITS = (ROWS > 0.5).astype("u1")
NAMES = [f"p{i}" for i in range(16)]
REORDERED = [NAMES[1], NAMES[0], *NAMES[2:]]
RENAMED = ["q", *NAMES[1:]]

MODELS: dict[str, Callable[[], Any]] = {
    "capsule": lambda: sl.CapsuleRegression(capsule_dim=2, max_iter=2, random_state=0),
    "mixture": lambda: sl.LinearMixtureClassifier(n_components=1, n_dims=2, max_iter=2, random_state=0),
    "density": lambda: sl.LinearMixture(n_components=2, n_dims=2, max_iter=2, random_state=0),
    "mbn": lambda: sl.MultilayerBootstrapNetwork(
        decay=0.5, n_clusterings=50, k1=10, n_components=2, random_state=0
    ),
    "crbm": lambda: sl.ConditionalRBM(n_hidden=2, n_epochs=1, random_state=0),
    "crbm, plain": lambda: sl.ConditionalRBM(n_hidden=2, n_epochs=1, random_state=0, conditional=False),
    "hcn": lambda: sl.HierarchicalCompositionalNetwork(layers=[(2, (1, 2))], random_state=0),
}


def make_dataset(name: str, names: list[str] | None, *, labels: bool = False) -> sl.Dataset:
    """Return rows for a model with the outputs or labels that it learns, or with labels on request."""
    bits = name in ("crbm", "crbm, plain", "hcn")
    y = LABELS if labels or name in ("capsule", "mixture") else None
    rows = sl.Dataset.from_arrays(BITS if bits else ROWS, y, feature_names=names)
    return rows.with_target(sl.Dataset.from_arrays(BITS[:, :5])) if name == "crbm" else rows


def compute_output(model: Any, rows: Any) -> Any:
    """Return the predictions of a conditional RBM, or the transformed rows of another model."""
    pairs = isinstance(model, sl.ConditionalRBM) and model.conditional is not False
    return model.predict(rows) if pairs else model.transform(rows)


@pytest.fixture(params=list(MODELS))
def case(request: pytest.FixtureRequest) -> tuple[Any, Callable[[list[str] | None], sl.Dataset]]:
    """Return an unfitted model, and a function that makes its training rows with the given feature names."""
    return MODELS[request.param](), partial(make_dataset, request.param)


@pytest.mark.parametrize("stored", [False, True], ids=["memory", "stored"])
def test_fit_keeps_names_and_others_are_refused(case: Any, stored: bool, tmp_path: Path) -> None:
    model, rows = case

    def given(names: list[str] | None, folder: str) -> sl.Dataset:
        return rows(names).save(tmp_path / folder) if stored else rows(names)

    model.fit(given(NAMES, "train"))
    assert model.feature_names_in_.tolist() == NAMES
    model.save(tmp_path / "m")
    for fitted in (model, sl.load_model(tmp_path / "m")):
        assert fitted.feature_names_in_.tolist() == NAMES
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            same = compute_output(fitted, rows(NAMES))
        with pytest.raises(ValueError, match="must be in the same order as they were in fit. Pass the col"):
            compute_output(fitted, given(REORDERED, f"other-{fitted is model}"))
        with pytest.raises(
            ValueError, match=r"unseen at fit time: q\. .* now missing: p0\. Pass the columns"
        ):
            compute_output(fitted, rows(RENAMED))
        with pytest.warns(UserWarning, match="X does not have valid feature names, but .* was fitted with"):
            np.testing.assert_array_equal(compute_output(fitted, rows(None)), same)


def test_frames_and_datasets_are_refused_in_the_same_words(case: Any) -> None:
    model, rows = case
    model.fit(rows(NAMES))
    reported = []
    x = rows(None).read_x(0, 60)
    for given in (
        pd.DataFrame(x, columns=RENAMED),
        rows(RENAMED),
        pd.DataFrame(x, columns=REORDERED),
        rows(REORDERED),
    ):
        with pytest.raises(ValueError, match="feature names should match") as error:
            compute_output(model, given)
        reported.append(str(error.value))
    assert reported[0] == reported[1]
    assert reported[2] == reported[3]


def test_a_fit_without_names_forgets_those_of_the_last_fit(case: Any) -> None:
    model, rows = case
    model.fit(rows(NAMES)).fit(rows(None))
    assert not hasattr(model, "feature_names_in_")
    with pytest.warns(UserWarning, match="X has feature names, but .* was fitted without"):
        compute_output(model, rows(NAMES))


def test_frames_and_datasets_are_interchangeable(case: Any) -> None:
    model, rows = case
    frame = pd.DataFrame(rows(None).read_x(0, 60), columns=NAMES)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "labels y are not learned from")
        ds = rows(None)
        model.fit(frame, ds.read_y(0, 60) if ds.has_y else None)
        same = compute_output(model, frame)
        np.testing.assert_array_equal(compute_output(model, rows(NAMES)), same)
    with pytest.raises(ValueError, match="must be in the same order"):
        compute_output(model, rows(REORDERED))


@pytest.mark.parametrize("name", ["capsule", "mixture", "crbm, plain"])
def test_validation_rows_have_the_names_of_the_training_rows(name: str) -> None:
    with pytest.raises(ValueError, match="must be in the same order"):
        MODELS[name]().fit(make_dataset(name, NAMES), validation=make_dataset(name, REORDERED))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        MODELS[name]().fit(make_dataset(name, NAMES), validation=make_dataset(name, NAMES))


@pytest.mark.parametrize("name", ["capsule", "mixture", "density", "crbm", "crbm, plain"])
def test_partial_fit_compares_names(name: str) -> None:
    classes = {"classes": [0, 1, 2]} if name == "capsule" else {}
    model = MODELS[name]().partial_fit(make_dataset(name, NAMES), **classes)
    assert model.feature_names_in_.tolist() == NAMES
    with pytest.raises(ValueError, match="must be in the same order"):
        model.partial_fit(make_dataset(name, REORDERED))
    model.partial_fit(make_dataset(name, NAMES))


@pytest.mark.parametrize("name", ["capsule", "mixture", "density", "mbn"])
def test_scores_compare_names(name: str) -> None:
    model = MODELS[name]().fit(make_dataset(name, NAMES))
    has_score = hasattr(model, "score")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        score_dataset(model, make_dataset(name, NAMES, labels=True))
        if has_score:
            model.score(make_dataset(name, NAMES))
    with pytest.raises(ValueError, match="must be in the same order"):
        score_dataset(model, make_dataset(name, REORDERED, labels=True))
    if has_score:
        with pytest.raises(ValueError, match="must be in the same order"):
            model.score(make_dataset(name, REORDERED))


@pytest.mark.parametrize("name", ["capsule", "mixture", "density", "mbn", "crbm", "crbm, plain"])
def test_reports_compare_names(name: str, tmp_path: Path) -> None:
    model = MODELS[name]().fit(make_dataset(name, NAMES))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*feature names")
        model.report(tmp_path, data=make_dataset(name, NAMES))
    with pytest.raises(ValueError, match="must be in the same order"):
        model.report(tmp_path, data=make_dataset(name, REORDERED))


@pytest.mark.parametrize("name", ["capsule", "mixture", "mbn", "crbm, plain", "hcn"])
@pytest.mark.parametrize("held", [False, True], ids=["folds", "validation"])
def test_searches_keep_names(name: str, held: bool) -> None:
    rows = make_dataset(name, NAMES, labels=name == "mbn")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*feature names")
        search = sl.Search(MODELS[name](), {"random_state": [0, 1]}, cv=2)
        search.fit(rows, **({"validation": rows} if held and name != "hcn" else {}))
    for model in (search, search.best_estimator_):
        assert model.feature_names_in_.tolist() == NAMES
    with pytest.raises(ValueError, match="must be in the same order"):
        compute_output(search.best_estimator_, make_dataset(name, REORDERED))
