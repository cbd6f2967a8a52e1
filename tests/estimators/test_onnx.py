"""Models write their predictions as ONNX graphs; onnxruntime and the model agree on 1,000 rows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone

import scalelatent as sl
from scalelatent.errors import DataError

runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

CLASSES, FEATURES = 4, 20
CENTRES = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))


def draw_rows(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw n rows around the centres of four classes, and return the rows and their classes."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, n)
    return (CENTRES[y] + rng.normal(0, 1.2, (n, FEATURES))).astype(np.float32), y


def run_graph(model: Any, folder: Path, x: np.ndarray) -> dict[str, np.ndarray]:
    """Save the model as an ONNX graph, run it on rows x with onnxruntime, and return its outputs by name."""
    file = folder / "model.onnx"
    model.to_onnx(file)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"x": x}), strict=True))


MODELS = {
    "multiclass": sl.CapsuleRegression(capsule_dim=3, max_iter=8),
    "a dimension a class": sl.CapsuleRegression(capsule_dim=[1, 2, 3, 2], max_iter=8),
    "one against all": sl.CapsuleRegression(capsule_dim=2, architecture="one_vs_all", max_iter=8),
    "all against all": sl.CapsuleRegression(capsule_dim=2, architecture="all_vs_all", max_iter=8),
    "projected": sl.CapsuleRegression(capsule_dim=4, projection=9, max_iter=8),
    "mixture": sl.LinearMixtureClassifier(n_components=3, n_dims=2, max_iter=5),
    "mixture of densities": sl.LinearMixtureClassifier(
        n_components=2, n_dims=2, likelihood="ppca", smoothing=0.5, image_shape=(4, 5), max_iter=5
    ),
    "factors": sl.LinearMixtureClassifier(n_components=1, n_dims=2, likelihood="factor-analysis", max_iter=5),
    "k-means": sl.LinearMixtureClassifier(n_components=3, n_dims=0, max_iter=5),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("words", [False, True])
def test_graphs_of_classifiers_agree_with_predictions(tmp_path: Path, name: str, words: bool) -> None:
    names = np.array(["ash", "birch", "cedar", "dogwood"]) if words else np.array([2, 3, 5, 9])
    x, y = draw_rows(600, 1)
    model = MODELS[name].set_params(random_state=0, n_jobs=1).fit(x, names[y])
    held, _ = draw_rows(1000, 2)
    found, ours = run_graph(model, tmp_path, held), model.predict_proba(held)
    np.testing.assert_allclose(found["probabilities"], ours, atol=2e-4)
    top = np.sort(ours, axis=1)[:, -2:]
    clear = top[:, 1] - top[:, 0] > 1e-3
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(np.asarray(found["label"])[clear], model.predict(held)[clear])


TWO_CLASSES = {"words": ["no", "yes"], "numbers": [-1, 7], "flags": [False, True], "floats": [0.0, 1.0]}


@pytest.mark.parametrize("labels", TWO_CLASSES)
@pytest.mark.parametrize("name", MODELS)
def test_graphs_of_two_classes_agree_with_predictions(tmp_path: Path, name: str, labels: str) -> None:
    names, (x, y) = np.array(TWO_CLASSES[labels]), draw_rows(600, 1)
    model = clone(MODELS[name]).set_params(random_state=0, n_jobs=1)
    if name == "a dimension a class":
        model.set_params(capsule_dim=[1, 3])
    model.fit(x, names[y // 2])
    held, truth = draw_rows(1000, 2)
    found, ours = run_graph(model, tmp_path, held), model.predict_proba(held)
    assert found["probabilities"].shape == ours.shape == (1000, 2)
    np.testing.assert_allclose(found["probabilities"], ours, atol=2e-4)
    clear = np.abs(ours[:, 0] - ours[:, 1]) > 1e-3
    label, mine = np.asarray(found["label"]), model.predict(held)
    np.testing.assert_array_equal(label[clear], mine[clear])
    np.testing.assert_array_equal(label, names[found["probabilities"].argmax(axis=1)])
    for one in names:  # Each class is predicted for more than 60 % of its rows.
        assert (label[names[truth // 2] == one] == one).mean() > 0.6


def test_a_graph_predicts_rows_of_zeros(tmp_path: Path) -> None:
    x, y = draw_rows(600, 1)
    model = sl.CapsuleRegression(capsule_dim=2, max_iter=3, random_state=0).fit(x, y)
    zero = np.zeros((1, FEATURES), np.float32)
    np.testing.assert_allclose(
        run_graph(model, tmp_path, zero)["probabilities"], model.predict_proba(zero), atol=1e-6
    )


def test_graphs_of_compressive_networks_agree_with_predictions(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    model = sl.CompressiveMBN(hidden=(8, 6), random_state=0)
    # A fit needs PyTorch, so the test sets the attributes of a fitted network.
    sizes = (FEATURES, 8, 6, 3)
    model.coefs_ = [rng.normal(size=pair).astype("f4") for pair in pairwise(sizes)]
    model.intercepts_ = [rng.normal(size=n).astype("f4") for n in sizes[1:]]
    model.n_features_in_, model.n_iter_ = FEATURES, 1
    x, _ = draw_rows(1000, 4)
    np.testing.assert_allclose(
        run_graph(model, tmp_path, x)["output"], model.transform(x), rtol=1e-4, atol=1e-4
    )


def test_models_without_a_graph_are_refused(tmp_path: Path) -> None:
    x, _ = draw_rows(100, 5)
    density = sl.LinearMixture(n_components=2, n_dims=1, max_iter=2, random_state=0).fit(x)
    with pytest.raises(DataError, match="predictions of a LinearMixture have no ONNX graph"):
        density.to_onnx(tmp_path / "m.onnx")
    images = np.random.default_rng(0).random((60, 64)).astype("f4")
    tangents = sl.LinearMixtureClassifier(
        n_components=1,
        n_dims=2,
        tangents=("shift-x", "shift-y"),
        recognition="tangent-distance",
        image_shape=(8, 8),
        max_iter=2,
    )
    with pytest.raises(DataError, match="recognises rows by tangent distance"):
        tangents.fit(images, np.arange(60) % 2).to_onnx(tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
