"""A refused or interrupted fit keeps the last good model; without one, the estimator stays unfitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError

import scalelatent as sl
from scalelatent.errors import DataError

RNG = np.random.default_rng(0)
LABELS = np.arange(120) % 3
ROWS = (RNG.normal(size=(3, 6))[LABELS] * 3 + RNG.normal(size=(120, 6))).astype("f4")
BITS = (RNG.random((120, 6)) < 0.4).astype("f4")
NAMES = list("abcdef")


class StopFit(sl.Callback):
    """Callback that interrupts a fit after its first pass, or in the second layer of a bootstrap network."""

    def on_pass_end(self, record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    def on_stage(self, info: dict[str, Any]) -> None:
        if info.get("layer") == 2:
            raise KeyboardInterrupt


CASES: dict[str, tuple[Callable[[], Any], np.ndarray, Any]] = {
    "capsule": (lambda: sl.CapsuleRegression(capsule_dim=2, max_iter=3), ROWS, LABELS),
    "mixture": (lambda: sl.LinearMixture(n_components=2, n_dims=2, max_iter=2), ROWS, None),
    "mixture classifier": (
        lambda: sl.LinearMixtureClassifier(n_components=2, n_dims=2, max_iter=2),
        ROWS,
        LABELS,
    ),
    "conditional RBM": (lambda: sl.ConditionalRBM(n_hidden=3, n_epochs=2), ROWS, BITS),
    "plain RBM": (lambda: sl.ConditionalRBM(n_hidden=3, n_epochs=2, conditional=False), BITS, None),
    "hierarchical": (
        lambda: sl.HierarchicalCompositionalNetwork([(2, (1, 2))], n_epochs=2, image_shape=(1, 6)),
        BITS,
        None,
    ),
    "bootstrap": (
        lambda: sl.MultilayerBootstrapNetwork(decay=0.5, n_clusterings=50, k1=16, n_components=2),
        ROWS,
        None,
    ),
    "search": (
        lambda: sl.Search(sl.CapsuleRegression(max_iter=3), {"capsule_dim": [1, 2]}, cv=2),
        ROWS,
        LABELS,
    ),
}
PARTIAL_FIT_CASES = [name for name in CASES if name not in ("bootstrap", "search")]


def make_case(name: str) -> tuple[Any, pd.DataFrame, Any]:
    """Return an unfitted estimator, rows with column names for it, and its labels, outputs or None."""
    build, x, y = CASES[name]
    return build().set_params(random_state=0), pd.DataFrame(x, columns=NAMES), y


def get_learned(model: Any) -> dict[str, Any]:
    found = {n: v for n, v in vars(model).items() if n.endswith("_")}
    names = [n for owner in type(model).__mro__ for n in vars(owner) if n.endswith("_") and n[0] != "_"]
    found |= {n: getattr(model, n) for n in names if hasattr(model, n)}
    return {n: np.array(v) if isinstance(v, np.ndarray) else v for n, v in found.items()}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        if isinstance(one[name], np.ndarray):
            np.testing.assert_array_equal(one[name], other[name])
        elif not isinstance(one[name], (dict, list)):
            np.testing.assert_equal(other[name], one[name])
        else:
            assert len(one[name]) == len(other[name])


def compute_output(model: Any, x: pd.DataFrame) -> np.ndarray:
    return np.asarray(model.transform(x))


def make_refused_rows(x: pd.DataFrame) -> pd.DataFrame:
    """Return the first five columns under other names, with a NaN in the last row."""
    out = x.iloc[:, :5].rename(columns=str.upper).copy()
    out.iloc[-1, 0] = np.nan
    return out


@pytest.mark.parametrize("name", CASES)
def test_a_refused_refit_keeps_the_last_model(name: str) -> None:
    model, x, y = make_case(name)
    model.fit(x, y)
    before, reported = get_learned(model), compute_output(model, x)
    with pytest.raises(ValueError, match="nan|NaN"):
        model.fit(make_refused_rows(x), y)
    assert_same(before, get_learned(model))
    np.testing.assert_array_equal(compute_output(model, x), reported)
    with pytest.raises(ValueError):
        model.transform(x.iloc[:, :5])


@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_refit_keeps_the_last_model(name: str) -> None:
    model, x, y = make_case(name)
    model.fit(x, y)
    before, reported = get_learned(model), compute_output(model, x)
    other = x.iloc[:, ::-1]
    with pytest.raises(KeyboardInterrupt, match="the model of the previous fit is kept"):
        model.fit(other, y, callbacks=StopFit())
    assert_same(before, get_learned(model))
    np.testing.assert_array_equal(compute_output(model, x), reported)


@pytest.mark.parametrize("name", CASES)
def test_a_refused_first_fit_leaves_the_estimator_unfitted(name: str) -> None:
    model, x, y = make_case(name)
    with pytest.raises(ValueError, match="nan|NaN"):
        model.fit(make_refused_rows(x), y)
    assert not [n for n in vars(model) if n.endswith("_")]
    with pytest.raises(NotFittedError):
        compute_output(model, x)


@pytest.mark.parametrize("name", PARTIAL_FIT_CASES)
@pytest.mark.parametrize("fitted", [False, True])
def test_a_refused_partial_fit_changes_nothing(name: str, fitted: bool) -> None:
    model, x, y = make_case(name)
    if fitted:
        model.fit(x, y)
    before = get_learned(model)
    more = x.iloc[:, :5] if fitted else make_refused_rows(x)
    options = {"classes": [0, 1, 2]} if "classes" in type(model).partial_fit.__code__.co_varnames else {}
    with pytest.raises(ValueError):
        model.partial_fit(more, y, **options)
    assert_same(before, get_learned(model))
    if not fitted:
        model.fit(x, y)  # A fit accepts 6 columns after the refused 5.


def test_a_partial_fit_that_fails_half_way_has_learned_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from scalelatent.models.capsule.model.running import RunningCapsule

    models = [sl.CapsuleRegression(capsule_dim=2, batch_rows=64, random_state=0) for _ in range(2)]
    for model in models:
        model.partial_fit(ROWS, LABELS, classes=[0, 1, 2])
    step, calls = RunningCapsule._learn_batch, []

    def interrupted(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RunningCapsule, "_learn_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models[0].partial_fit(ROWS, LABELS)
    for model in models:
        model.partial_fit(ROWS[::-1], LABELS[::-1])
    np.testing.assert_array_equal(models[0].W_, models[1].W_)


def test_a_mixture_learns_all_rows_of_a_partial_fit_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from scalelatent.models.linear_mixture.model import incremental

    model, x, _ = make_case("mixture")
    model.fit(x)
    model.partial_fit(x[:10])  # After a first partial_fit, further calls change the arrays in place.
    before, step, calls = get_learned(model), incremental._update_svd, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(incremental, "_update_svd", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.partial_fit(x)
    assert_same(before, get_learned(model))


@pytest.mark.parametrize("width", [3, 300])
@pytest.mark.parametrize("name", ["capsule", "mixture", "mixture classifier", "conditional RBM", "bootstrap"])
def test_rows_of_another_width_never_reach_a_kernel(name: str, width: int) -> None:
    """Kernels read as many features as the model has, so rows of another width must be refused first."""
    model, x, y = make_case(name)
    model.fit(x.to_numpy(), y)
    model.n_features_in_ = width
    with pytest.raises(DataError, match=rf"different numbers of features, ({width} and 6|6 and {width})"):
        model.transform(np.ones((10, width), "f4"))
