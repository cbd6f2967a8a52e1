"""Fitted parameters cannot be assigned, are listed, and are saved with the names of the features."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent import CapsuleRegression, ConditionalRBM, MultilayerBootstrapNetwork, load_model

LABELS = np.arange(60) % 3
FITS: dict[str, Callable[[Any], Any]] = {
    "capsule": lambda x: CapsuleRegression(capsule_dim=2, max_iter=2, random_state=0).fit(
        x, np.arange(60) % 3
    ),
    "crbm": lambda x: ConditionalRBM(n_hidden=3, n_epochs=1, random_state=0).fit(x, to_bits(x)),
    "mbn": lambda x: MultilayerBootstrapNetwork(decay=0.5, n_clusterings=5, random_state=0).fit(x),
}
LEARNED = {
    "capsule": ("W_", "projection_", "capsule_dims_", "classes_"),
    "crbm": ("W_", "Wvx_", "Whx_", "bv_", "bh_"),
    "mbn": ("components_", "mean_projection_", "explained_variance_", "explained_variance_ratio_", "ks_"),
}


def to_bits(x: Any) -> np.ndarray:
    return (np.asarray(x) > 0).astype("u1")


def make_rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(60, 6)).astype("f4")


@pytest.mark.parametrize("kind", FITS)
def test_assigning_a_fitted_parameter_raises_an_error(kind: str) -> None:
    x = make_rows()
    model = FITS[kind](x)
    before = model.transform(x)
    for name in LEARNED[kind]:
        assert not hasattr(type(model)(), name)
        with pytest.raises(AttributeError, match=f"{name} of {type(model).__name__} .* cannot be set: "):
            setattr(model, name, getattr(model, name))
    np.testing.assert_array_equal(model.transform(x), before)


def test_the_error_of_a_conditional_rbm_names_from_weights() -> None:
    with pytest.raises(AttributeError, match=r"or make .*: ConditionalRBM\.from_weights$"):
        FITS["crbm"](make_rows()).W_ = np.zeros((6, 3))


@pytest.mark.parametrize(("kind", "name"), [("capsule", "W_"), ("crbm", "Whx_")])
@pytest.mark.parametrize("options", ["fitted", "loaded", "pickled"])
def test_values_written_in_place_are_used(kind: str, name: str, options: str, tmp_path: Path) -> None:
    x = make_rows()
    model = FITS[kind](x)
    if options == "loaded":
        model.save(tmp_path / "m.zarr")
        model = load_model(tmp_path / "m.zarr")
    elif options == "pickled":
        model = pickle.loads(pickle.dumps(model))
    before = model.transform(x)
    getattr(model, name)[...] = 0
    assert (model.transform(x) != before).any()


def test_components_are_a_read_only_copy() -> None:
    with pytest.raises(ValueError, match="read-only"):
        FITS["mbn"](make_rows()).components_[0] = 0


@pytest.mark.parametrize("kind", FITS)
def test_feature_names_are_saved(kind: str, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    x = pandas.DataFrame(make_rows()).add_prefix("p")
    model = FITS[kind](x)
    model.save(tmp_path / "m.zarr")
    other = load_model(tmp_path / "m.zarr")
    assert other.feature_names_in_.tolist() == [f"p{i}" for i in range(6)]
    assert other.feature_names_in_.dtype == object
    np.testing.assert_array_equal(other.transform(x), model.transform(x))
    with pytest.raises(ValueError, match="feature names should match"):
        other.transform(x[x.columns[::-1]])


@pytest.mark.parametrize("kind", FITS)
def test_learned_attributes_are_listed(kind: str) -> None:

    from scalelatent.estimators.fitted_attributes import list_fitted
    from scalelatent.jobs.runs import model_info

    model = FITS[kind](make_rows())
    reported = list_fitted(model)
    assert set(LEARNED[kind]) - {name for name in LEARNED[kind] if getattr(model, name) is None} <= set(
        reported
    )
    assert reported["seed_"] == model.seed_
    assert model_info(model)["learned"] == reported
    assert type(model).__name__ in model._repr_mimebundle_()["text/html"]
    assert list_fitted(type(model)()) == {}
