"""Bootstrap networks on disk: centroids stay datasets, which a loaded network reads set by set."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from scalelatent.data import Dataset, open_dataset
from scalelatent.engine.reading import as_rows
from scalelatent.engine.rowsets import StoredSets, write_sets
from scalelatent.estimators.layer_steps import codes_place
from scalelatent.models.mbn.model.layers import ArraySets, Layer
from scalelatent.models.mbn.model.pca import Components
from scalelatent.storage.disk import Location

# Arrays of a layer's components.
PARTS = ("table", "offset", "variance")


def network_to_saved(model: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(values, arrays) of a fitted network, without its centroids."""
    values: dict[str, Any] = {
        "layers": [asdict(layer) for layer in model._layers],
        "seed": model.seed_,
        "decay": model.decay_,
        "n_features_in": model.n_features_in_,
        "n_iter": model.n_iter_,
    }
    arrays: dict[str, np.ndarray] = {}
    lower: dict[str, float] = {}
    for number, found in model._components.items():
        below = number < len(model._layers)
        arrays |= {name + (f"-l{number}" if below else ""): getattr(found, name) for name in PARTS}
        if below:
            lower[str(number)] = found.total_variance
        else:
            values["total_variance"] = found.total_variance
    values["lower_total_variance"] = lower
    return values, arrays


def into_memory(model: Any) -> None:
    """Take centroids and codes out of a folder that is about to go."""
    model._centroids = tuple(
        ArraySets(as_rows(sets.dataset.read_x(0, len(sets.dataset))), sets.rows) for sets in model._centroids
    )
    model._codes = {
        number: Dataset.from_arrays(codes.read_x(0, len(codes))) for number, codes in model._codes.items()
    }


def write_centroids(model: Any, place: Location) -> dict[str, str]:
    """Put the centroids into a model's folder, linked where they lie on the same disk, else copied; returns
    their fingerprints by name.
    """
    prints = {}
    for layer, sets in zip(model._layers, model._centroids, strict=True):
        name = _name(layer.number)
        prints[name] = write_sets(sets, layer, place.at(name))
    return prints


def load_network(
    model: Any,
    values: dict[str, Any],
    arrays: dict[str, np.ndarray],
    place: Location,
    run: Location | None,
) -> None:
    """Give an estimator what the two functions above put out; of centroids nothing but metadata is read.

    Out of a run folder it also knows where the fit has left codes.
    """
    layers = tuple(Layer(**fields) for fields in values["layers"])
    for layer in layers:  # it names the folder of its centroids
        if not isinstance(layer.number, int):
            raise ValueError(f"a layer's number is {layer.number!r}")
    sets = tuple(_open(place.at(_name(layer.number)), values, layer) for layer in layers)
    components = _components(arrays, "", values["total_variance"]) if "table" in arrays else None
    model._keep(layers, sets, {}, components, [])
    for number, variance in values.get("lower_total_variance", {}).items():
        model._components[int(number)] = _components(arrays, f"-l{number}", variance)
    model._left = {} if run is None else _codes_left(run, layers)
    model._folder = None
    model.n_iter_, model.seed_, model.decay_ = values["n_iter"], values["seed"], values["decay"]
    model.n_features_in_ = values["n_features_in"]


def _codes_left(run: Location, layers: tuple[Layer, ...]) -> dict[int, Location]:
    """Where the codes of the training rows lie, by layer; see :meth:`.layer_steps.LayerSteps.encode`."""
    found = {layer.number: codes_place(run.at("engine"), f"code-l{layer.number}") for layer in layers}
    return {number: place for number, place in found.items() if place.has("zarr.json")}


def _components(arrays: dict[str, np.ndarray], layer: str, total_variance: float) -> Components:
    table, offset, variance = (arrays[name + layer] for name in PARTS)
    return Components(table, offset, variance, total_variance)


def _name(number: int) -> str:
    return f"centroids-l{number}"


def _open(place: Location, values: dict[str, Any], layer: Layer) -> StoredSets:
    dataset: Dataset = open_dataset(place.url)
    return StoredSets.of(dataset, layer.k)
