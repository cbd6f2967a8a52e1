"""Bootstrap networks on disk: centroids stay datasets, which a loaded network reads set by set."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from scalelatent.data import Dataset, open_dataset
from scalelatent.data.store import Location
from scalelatent.engine.rowsets import StoredSets, write_sets
from scalelatent.models.mbn.layers import Layer
from scalelatent.models.mbn.pca import Components

from .base import _plain_params
from .persist import save_model


def save_network(model: Any, url: Any, overwrite: bool) -> None:
    """Write a fitted network, see :meth:`.MultilayerBootstrapNetwork.save`."""
    values: dict[str, Any] = {
        "layers": [asdict(layer) for layer in model._layers],
        "seed": model.seed_,
        "decay": model.decay_,
        "n_features_in": model.n_features_in_,
        "n_iter": model.n_iter_,
    }
    arrays = {}
    found = model._components.get(len(model._layers))
    if found is not None:
        values["total_variance"] = found.total_variance
        arrays = {"table": found.table, "offset": found.offset, "variance": found.variance}
    if hasattr(model, "feature_names_in_"):
        values["feature_names_in"] = [str(name) for name in model.feature_names_in_]

    def beside(place: Location) -> dict[str, str]:
        prints = {}
        for layer, sets in zip(model._layers, model._centroids, strict=True):
            name = _name(layer.number)
            prints[name] = write_sets(sets, layer, place.at(name))
        return prints

    params = _plain_params(model.get_params(deep=False))
    save_model(url, model._kind, params, values, arrays, overwrite=overwrite, beside=beside)


def load_network(model: Any, values: dict[str, Any], arrays: dict[str, np.ndarray], place: Location) -> None:
    """Give an estimator what :func:`save_network` wrote; of centroids nothing but metadata is read."""
    layers = tuple(Layer(**fields) for fields in values["layers"])
    sets = tuple(_open(place.at(_name(layer.number)), values, layer) for layer in layers)
    components = None
    if "table" in arrays:
        components = Components(
            arrays["table"], arrays["offset"], arrays["variance"], values["total_variance"]
        )
    model._keep(layers, sets, {}, components, [])
    model._folder = None
    model.n_iter_, model.seed_, model.decay_ = values["n_iter"], values["seed"], values["decay"]
    model.n_features_in_ = values["n_features_in"]
    if "feature_names_in" in values:
        model.feature_names_in_ = np.array(values["feature_names_in"], dtype=object)


def _name(number: int) -> str:
    return f"centroids-l{number}"


def _open(place: Location, values: dict[str, Any], layer: Layer) -> StoredSets:
    dataset: Dataset = open_dataset(place.url)
    return StoredSets.of(dataset, layer.k)
