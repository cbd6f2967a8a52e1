"""Loading a saved model whose files were changed fails with an error of one line that names the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.errors import DataError


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two saved models, a capsule model and a bootstrap network."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(0, 1, (60, 5)).astype(np.float32), np.arange(60) % 3
    folder = tmp_path_factory.mktemp("saved")
    sl.CapsuleRegression(capsule_dim=2, max_iter=2, random_state=0).fit(x, y).save(folder / "capsule")
    network = sl.MultilayerBootstrapNetwork(decay=0.5, n_clusterings=3, k1=10, n_components=2, random_state=0)
    network.fit(x).save(folder / "mbn")
    return folder


@pytest.fixture
def model(saved_models: Path, tmp_path: Path) -> Path:
    """Return the path of a copy of the saved capsule model, which a test may change."""
    shutil.copytree(saved_models / "capsule", tmp_path / "m")
    return tmp_path / "m"


def change(path: Path, *keys: Any, to: Any) -> None:
    """Change the value at the given keys of a JSON file; ``to=...`` (an Ellipsis) removes the value."""
    meta = json.loads(path.read_text())
    parent = meta
    for key in keys[:-1]:
        parent = parent[key]
    if to is ...:
        del parent[keys[-1]]
    else:
        parent[keys[-1]] = to
    path.write_text(json.dumps(meta))


def set_attr(*keys: Any, to: Any) -> Callable[[Path], None]:
    return lambda model: change(model / "zarr.json", "attributes", *keys, to=to)


def set_unsealed(*keys: Any, to: Any) -> Callable[[Path], None]:
    """Return a function that changes an attribute and removes the digest that would reveal the change."""

    def edit(model: Path) -> None:
        change(model / "zarr.json", "attributes", "attributes_digest", to=...)
        change(model / "zarr.json", "attributes", *keys, to=to)

    return edit


def set_zarr(*keys: Any, to: Any) -> Callable[[Path], None]:
    return lambda model: change(model / "W" / "zarr.json", *keys, to=to)


def replace_text(name: str, content: str) -> Callable[[Path], Any]:
    return lambda model: (model / name).write_text(content)


NOT_SAVED = "its attributes (kind, params, values, digests) are not those that were saved"
CHANGES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("a parameter", set_attr("params", "capsule_dim", to=3), NOT_SAVED),
    ("a value", set_attr("values", "n_features_in", to=50), NOT_SAVED),
    ("the classes", set_attr("values", "classes", to=[7, 8, 9]), NOT_SAVED),
    ("the kind", set_attr("kind", to="mbn"), NOT_SAVED),
    ("a digest", set_attr("digests", "W", to="0" * 64), NOT_SAVED),
    ("an array more", set_attr("digests", "V", to="0" * 64), NOT_SAVED),
    ("another kind, unsealed", set_unsealed("kind", to="mbn"), "do not make a model of kind 'mbn'"),
    ("no such kind", set_unsealed("kind", to="forest"), "kind 'forest', which this scalelatent"),
    ("kind is a list", set_unsealed("kind", to=[]), "its attribute 'kind' is []"),
    ("no params", set_unsealed("params", to=...), "its attribute 'params' is missing"),
    ("params is a list", set_unsealed("params", to=[1]), "its attribute 'params' is [1]"),
    ("a parameter of no model", set_unsealed("params", "zzz", to=1), "argument 'zzz'"),
    ("values is null", set_unsealed("values", to=None), "its attribute 'values' is missing"),
    ("a value lacks", set_unsealed("values", "classes", to=...), "KeyError: 'classes'"),
    ("a value of a kind", set_unsealed("values", "classes_dtype", to="zz"), "data type 'zz'"),
    ("digests is a number", set_unsealed("digests", to=3), "its attribute 'digests' is 3"),
    ("no digests", set_unsealed("digests", to={}), "KeyError: 'dims'"),
    ("a digest is a number", set_unsealed("digests", "W", to=3), "'W' is not the one that was saved"),
    ("no version", set_unsealed("format_version", to=...), "'format_version' is missing"),
    ("version is text", set_unsealed("format_version", to="1"), "'format_version' is '1'"),
    ("a newer version", set_attr("format_version", to=2), "model format 2, this scalelatent reads up to 1"),
    ("datasets outside", set_unsealed("datasets", to={"../../x": ""}), "'../../x' is not the name of a"),
    ("datasets above", set_unsealed("datasets", to={"..": ""}), "'..' is not the name of a file in the"),
    ("an array outside", set_unsealed("digests", to={"../W": ""}), "'../W' is not the name of a file in the"),
    ("datasets is text", set_unsealed("datasets", to="x"), "its attribute 'datasets' is 'x'"),
    ("a dataset lacks", set_unsealed("datasets", to={"x": ""}), "m/x, a part of a model, is damaged"),
    ("a 728 TiB shape", set_zarr("shape", to=[10_000_000, 10_000_000]), "has the shape (10000000, 10000000)"),
    ("a shape of a row less", set_zarr("shape", to=[3, 5]), "'W'"),
    ("a shape of a word", set_zarr("shape", to="all"), "'W' cannot be read"),
    ("no codecs", set_zarr("codecs", to=[]), "'W' cannot be read"),
    ("an unknown codec", set_zarr("codecs", to=[{"name": "secret"}]), "'W' cannot be read"),
    ("another type", set_zarr("data_type", to="float32"), "'W'"),
    ("no type", set_zarr("data_type", to="quaternion"), "'W' cannot be read"),
    ("chunks of 1 EiB", set_zarr("chunk_grid", "configuration", "chunk_shape", to=[2**30, 2**30]), "'W'"),
    ("no grid", set_zarr("chunk_grid", to=None), "'W' cannot be read"),
    ("an array's text", replace_text("W/zarr.json", "{"), "'W' cannot be read"),
    ("the attributes are a list", lambda m: change(m / "zarr.json", "attributes", to=[]), "zarr"),
    ("the text is no object", replace_text("zarr.json", "[]"), "zarr.json cannot be read"),
    ("no text", replace_text("zarr.json", ""), "zarr.json cannot be read"),
    ("half of the text", replace_text("zarr.json", '{"attributes": {"form'), "zarr.json cannot be read"),
    ("another format", set_attr("format", to="scalelatent-dataset"), "is a dataset, not a saved model"),
    ("a node of another type", lambda m: change(m / "zarr.json", "node_type", to="tree"), "zarr.json cannot"),
    ("a chunk is gone", lambda m: shutil.rmtree(m / "W" / "c"), "'W' is not the one that was saved"),
    ("a chunk is text", replace_text("W/c/0/0", "text"), "'W' cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "reported"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_a_changed_model_is_refused(model: Path, edit: Callable[[Path], Any], reported: str) -> None:
    edit(model)
    with pytest.raises(DataError) as refused:
        sl.load_model(model)
    message = str(refused.value)
    assert reported in message
    assert str(model) in message
    assert "\n" not in message
    assert len(message) < 800


def test_a_model_of_an_earlier_version_is_loaded(model: Path) -> None:
    before = sl.load_model(model)
    change(model / "zarr.json", "attributes", "attributes_digest", to=...)
    np.testing.assert_array_equal(sl.load_model(model).W_, before.W_)


@pytest.mark.parametrize(
    ("edit", "reported"),
    [
        (lambda m: change(m / "zarr.json", "attributes", "values", "layers", 0, "k", to=2), NOT_SAVED),
        (set_unsealed("values", "layers", 0, "number", to="../../x"), "number is '../../x'"),
        (lambda m: shutil.rmtree(m / "centroids-l1"), "centroids-l1"),
    ],
)
def test_a_changed_bootstrap_network_is_refused(
    saved_models: Path, tmp_path: Path, edit: Callable[[Path], Any], reported: str
) -> None:
    shutil.copytree(saved_models / "mbn", tmp_path / "m")
    edit(tmp_path / "m")
    with pytest.raises(DataError, match=reported.replace("(", r"\(").replace(")", r"\)")):
        sl.load_model(tmp_path / "m")
