"""Save and open a fitted bootstrap network.

The centroids of a layer are a dataset that is read in parts. If that dataset would be larger than the codes
of all training rows in the layer below, these codes are saved instead, and centroids are taken from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from scalelatent.data import Dataset, open_dataset
from scalelatent.data.write.create import link_dataset
from scalelatent.engine.reading import as_rows
from scalelatent.engine.rowsets import DrawnSets, StoredSets, UncopiedSets, write_sets
from scalelatent.estimators.base import SavedModelState
from scalelatent.estimators.session import codes_location
from scalelatent.models.mbn.model.layers import ArraySets, Layer
from scalelatent.models.mbn.model.pca import Components
from scalelatent.storage.disk import Location

if TYPE_CHECKING:
    from scalelatent.data.schema import DatasetSpec

    from .estimator import MultilayerBootstrapNetwork

# Centroids of a layer of a fitted network.
Centroids: TypeAlias = StoredSets | UncopiedSets | ArraySets | DrawnSets
# Fields of `Components` that are saved as arrays.
COMPONENT_ARRAYS = ("table", "offset", "variance")


@dataclass(frozen=True)
class SavedNetwork:
    """A network read from a folder; the numbers of layers are the keys of the dictionaries.

    ``codes`` are the datasets in the run folder with the numbers of the training rows' nearest centroids.
    """

    layers: tuple[Layer, ...]
    centroids: tuple[Centroids, ...]
    components: Components | None
    lower_components: dict[int, Components]
    codes: dict[int, DatasetSpec]


def encode_network(model: MultilayerBootstrapNetwork) -> SavedModelState:
    """Return the JSON values and the arrays that are saved for a fitted network, without its centroids."""
    values: dict[str, Any] = {"layers": [asdict(layer) for layer in model._layers], "decay": model.decay_}
    arrays: dict[str, np.ndarray] = {}
    lower: dict[str, float] = {}
    for number, found in model._components.items():
        below = number < len(model._layers)
        arrays |= {name + (f"-l{number}" if below else ""): getattr(found, name) for name in COMPONENT_ARRAYS}
        if below:
            lower[str(number)] = found.total_variance
        else:
            values["total_variance"] = found.total_variance
    values["lower_total_variance"] = lower
    stored = {number: codes for number, codes in model._codes.items() if codes.is_stored}
    values["code_fingerprints"] = {str(number): codes.fingerprint() for number, codes in stored.items()}
    return values, arrays


def read_into_memory(
    centroids: Sequence[StoredSets | UncopiedSets], codes: Mapping[int, Dataset]
) -> tuple[tuple[Centroids, ...], dict[int, Dataset]]:
    """Return the centroids and codes of all layers in memory, because their folder will be removed."""

    def read(sets: StoredSets | UncopiedSets) -> Centroids:
        rows = as_rows(sets.dataset.read_x(0, len(sets.dataset)))
        return ArraySets(rows, sets.rows) if isinstance(sets, StoredSets) else DrawnSets(sets.sets, rows)

    kept = {number: Dataset.from_arrays(one.read_x(0, len(one))) for number, one in codes.items()}
    return tuple(read(sets) for sets in centroids), kept


def write_centroids(
    layers: Sequence[Layer], centroids: Sequence[Centroids], place: Location
) -> dict[str, str]:
    """Write the centroids of each layer, or the codes from which they are read, into the folder of a model.

    Files on the same disk are linked instead of copied. Return the fingerprint of each dataset by its name.
    """
    fingerprints = {}
    for layer, sets in zip(layers, centroids, strict=True):
        if isinstance(sets, UncopiedSets):
            name = _name_codes(layer.number - 1)
            fingerprints[name] = link_dataset(sets.dataset, place.at(name))
        else:
            name = _name_folder(layer.number)
            fingerprints[name] = write_sets(sets, layer, place.at(name))
    return fingerprints


def open_network(
    values: dict[str, Any], arrays: dict[str, np.ndarray], place: Location, run: Location | None
) -> SavedNetwork:
    """Open the network that is saved in ``place``; read only the metadata of its centroids.

    ``run`` is the run folder of its fit, if it exists; ``values`` and ``arrays`` are from `encode_network`.
    """
    layers = tuple(Layer(**fields) for fields in values["layers"])
    for layer in layers:  # refuse a text instead of a number, because it becomes a part of a path
        if not isinstance(layer.number, int):
            raise ValueError(f"a layer's number is {layer.number!r}")
    sets = tuple(_open_centroids(layer, place) for layer in layers)
    lower = values.get("lower_total_variance", {})
    return SavedNetwork(
        layers,
        sets,
        _read_components(arrays, "", values["total_variance"]) if "table" in arrays else None,
        {
            int(number): _read_components(arrays, f"-l{number}", variance)
            for number, variance in lower.items()
        },
        {} if run is None else _find_codes(run, layers, values.get("code_fingerprints")),
    )


def _open_centroids(layer: Layer, place: Location) -> Centroids:
    """Return the centroids of a layer of the model in ``place``, which has them or the codes below."""
    codes = place.at(_name_codes(layer.number - 1))
    if codes.has("zarr.json"):
        return UncopiedSets.make(layer, open_dataset(codes.url))
    return StoredSets.make(open_dataset(place.at(_name_folder(layer.number)).url), layer.rows_per_set)


def _find_codes(
    run: Location, layers: tuple[Layer, ...], fingerprints: dict[str, str] | None
) -> dict[int, DatasetSpec]:
    """Return the datasets in the run folder with the codes of the training rows, by the number of the layer.

    ``fingerprints`` detect codes that another fit has written to the same folder. They are None in networks
    saved by earlier versions of the package; then the fingerprints of the codes in the folder are used.
    """
    found: dict[int, DatasetSpec] = {}
    for layer in layers:
        place = codes_location(run.at("engine"), f"code-l{layer.number}")
        if place.has("zarr.json"):
            expected = (
                open_dataset(place.url).fingerprint()
                if fingerprints is None
                else fingerprints.get(str(layer.number))
            )
            if expected is not None:
                found[layer.number] = {
                    "url": place.url, "start": 0, "stop": layer.n_rows, "fingerprint": expected,
                }  # fmt: skip
    return found


def _read_components(arrays: dict[str, np.ndarray], layer: str, total_variance: float) -> Components:
    table, offset, variance = (arrays[name + layer] for name in COMPONENT_ARRAYS)
    return Components(table, offset, variance, total_variance)


def _name_folder(number: int) -> str:
    return f"centroids-l{number}"


def _name_codes(number: int) -> str:
    return f"codes-l{number}"
