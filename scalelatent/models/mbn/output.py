"""A fitted bootstrap network in memory and on disk.

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
# Names of the arrays in which the components of a layer are saved.
COMPONENT_ARRAYS = ("table", "offset", "variance")


@dataclass(frozen=True)
class SavedNetwork:
    """A network read from a folder; ``codes`` are the datasets of codes in the run folder, by layer."""

    layers: tuple[Layer, ...]
    centroids: tuple[Centroids, ...]
    components: Components | None
    lower_components: dict[int, Components]
    codes: dict[int, DatasetSpec]


def encode_network(model: MultilayerBootstrapNetwork) -> SavedModelState:
    """Return (values for JSON, arrays) to save of a fitted network, without its centroids."""
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
    """Read centroids and codes into memory, because their folder will be removed."""

    def read(one: StoredSets | UncopiedSets) -> Centroids:
        rows = as_rows(one.dataset.read_x(0, len(one.dataset)))
        return ArraySets(rows, one.rows) if isinstance(one, StoredSets) else DrawnSets(one.sets, rows)

    kept = {number: Dataset.from_arrays(one.read_x(0, len(one))) for number, one in codes.items()}
    return tuple(read(one) for one in centroids), kept


def write_centroids(
    layers: Sequence[Layer], centroids: Sequence[Centroids], place: Location
) -> dict[str, str]:
    """Write centroids, or the codes from which they are taken, into a model's folder; return fingerprints.

    Files on the same disk are linked instead of copied.
    """
    fingerprints = {}
    for layer, sets in zip(layers, centroids, strict=True):
        if isinstance(sets, UncopiedSets):
            name = _codes_name(layer.number - 1)
            fingerprints[name] = link_dataset(sets.dataset, place.at(name))
        else:
            name = _folder_name(layer.number)
            fingerprints[name] = write_sets(sets, layer, place.at(name))
    return fingerprints


def open_network(
    values: dict[str, Any], arrays: dict[str, np.ndarray], place: Location, run: Location | None
) -> SavedNetwork:
    """Open the network that is saved in ``place``; read only the metadata of its centroids.

    ``run`` is the run folder of its fit, if it exists; ``values`` and ``arrays`` are from `encode_network`.
    """
    layers = tuple(Layer(**fields) for fields in values["layers"])
    for layer in layers:  # the number is part of the name of a folder
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
    codes = place.at(_codes_name(layer.number - 1))
    if codes.has("zarr.json"):
        return UncopiedSets.make(layer, open_dataset(codes.url))
    return StoredSets.make(open_dataset(place.at(_folder_name(layer.number)).url), layer.rows_per_set)


def _find_codes(
    run: Location, layers: tuple[Layer, ...], fingerprints: dict[str, str] | None
) -> dict[int, DatasetSpec]:
    """Return the datasets of the codes of the training rows by layer, with their fingerprints.

    The fingerprints detect codes of another fit in the same run folder. Networks that earlier versions of the
    package saved have no fingerprints, so the fingerprints of the codes in the folder are used.
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


def _folder_name(number: int) -> str:
    return f"centroids-l{number}"


def _codes_name(number: int) -> str:
    return f"codes-l{number}"
