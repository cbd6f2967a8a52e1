"""Models on disk: a zarr group of arrays with JSON attributes. No pickle, no times, no host names."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.kinds import find_kind, known_kinds
from scalelatent.errors import DataError, JobError, ScalelatentError
from scalelatent.storage.disk import REMOVED, Location, locate
from scalelatent.storage.guard import format_of

if TYPE_CHECKING:
    import zarr

FORMAT, FORMAT_VERSION = "scalelatent-model", 1
UNFINISHED = "scalelatent-model-unfinished"
"""Attribute 'format' while arrays are still being written."""
OF_ATTRIBUTES = "attributes_digest"
_NAME = re.compile(r"(?!\.)[\w.-]+")


def save_model(
    url: str | Path,
    kind: str,
    params: dict[str, Any],
    values: dict[str, Any],
    arrays: dict[str, np.ndarray],
    *,
    overwrite: bool = False,
    beside: Callable[[Location], dict[str, str]] | None = None,
) -> None:
    """Write a model: what is there is whole, since the digests of its arrays are written last."""
    import zarr

    place = locate(url)
    _check_room(place, overwrite)
    attrs: dict[str, Any] = {
        "digests": {name: _digest(array) for name, array in arrays.items()},
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "params": params,
        "values": values,
    }
    try:
        with place.replacing() as target:
            group = zarr.create_group(target.zarr_store(read_only=False), attributes={"format": UNFINISHED})
            for name, array in arrays.items():
                group.create_array(name, data=np.ascontiguousarray(array))
            if beside is not None:
                attrs["datasets"] = beside(target)
            attrs = json.loads(json.dumps(attrs))
            group.update_attributes({**attrs, OF_ATTRIBUTES: _digest_of_attributes(attrs)})
    except OSError as error:
        raise DataError(
            f"cannot write the model {place.url}: {error}; free space or choose another place, then save "
            "again"
        ) from error


def _check_room(place: Location, overwrite: bool) -> None:
    """Refuse a place where something lies that is not a model, or one that may not go."""
    if place.is_empty():
        return
    if not overwrite:
        raise DataError(f"{place.url} exists: choose another place, or pass overwrite=True to replace it")
    if format_of(place) not in (FORMAT, UNFINISHED, REMOVED):
        raise DataError(
            f"{place.url} exists and is not a saved model, so it is not replaced; choose another place, or "
            "remove it yourself"
        )


def read_model(
    url: str | Path | Location,
) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:
    """(kind, params, values, arrays) of a saved model."""
    import zarr

    place = locate(url)
    if not place.has("zarr.json"):
        raise DataError(
            f"{place.url} is not a saved model: give a folder that `save` wrote, or a run folder's model.zarr"
        )
    try:
        group = zarr.open_group(place.zarr_store(read_only=True), mode="r", zarr_format=3)
        attrs: dict[str, Any] = dict(group.attrs)
    except ScalelatentError:
        raise
    except zarr.errors.ContainsArrayError:
        raise DataError(
            f"{place.url} is a zarr array, not a saved model: give a folder that `save` wrote, or a run "
            "folder's model.zarr"
        ) from None
    except Exception as error:  # whatever zarr raises of metadata that was changed
        raise DataError(
            f"{place.url} is damaged: its zarr.json cannot be read ({error}); save the model again"
        ) from error
    if attrs.get("format") != FORMAT:
        broken_off = not attrs or attrs.get("format") in (UNFINISHED, REMOVED)
        unfinished = "; if a model was being written there, it was not finished: save it again"
        raise DataError(
            f"{place.url} is a zarr group, but no saved model (its format is {attrs.get('format')!r}, not "
            f"{FORMAT!r}){unfinished if broken_off else ''}"
        )
    version = attrs.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise DataError(
            f"{place.url} has model format {version}, this scalelatent reads up to {FORMAT_VERSION}: upgrade "
            "scalelatent"
        )
    _check_attributes(place, attrs)
    arrays = {name: _read_array(place, group, name, digest) for name, digest in attrs["digests"].items()}
    for name, print_ in attrs.get("datasets", {}).items():
        _check_dataset(place.at(name), print_)
    return attrs["kind"], attrs["params"], attrs["values"], arrays


def _check_attributes(place: Location, attrs: dict[str, Any]) -> None:
    """Refuse attributes that are not those that were saved, or name what no model has."""
    kinds = {"kind": str, "params": dict, "values": dict, "digests": dict, "format_version": int}
    odd = [name for name, kind in kinds.items() if not isinstance(attrs.get(name), kind)]
    if not isinstance(attrs.get("datasets", {}), dict):
        odd.append("datasets")
    if odd:
        raise DataError(
            f"{place.url} is damaged: its attribute {odd[0]!r} is {_brief(attrs.get(odd[0]))}; save the "
            "model again"
        )
    # Models of earlier versions have no digest of their attributes.
    if attrs.get(OF_ATTRIBUTES, digest := _digest_of_attributes(attrs)) != digest:
        raise DataError(
            f"{place.url} is damaged: its attributes (kind, params, values, digests) are not those that were "
            "saved; save the model again"
        )
    outside = [name for name in (*attrs["digests"], *attrs.get("datasets", {})) if not _NAME.fullmatch(name)]
    if outside:
        raise DataError(
            f"{place.url} is damaged: {_brief(outside[0])} is not the name of a part of it, which lies "
            "in its own folder; save the model again"
        )


def _read_array(place: Location, group: zarr.Group, name: str, digest: str) -> np.ndarray:
    import psutil
    import zarr

    damaged = f"{place.url} is damaged: its array {name!r}"
    try:
        array = group.get(name)
        # zarr reads a chunk that is gone as zeros: a model that predicts, and wrongly.
        stored = isinstance(array, zarr.Array)
        nbytes = max(math.prod(array.shape), math.prod(array.chunks)) * array.dtype.itemsize if stored else 0
        if nbytes > psutil.virtual_memory().total:
            raise DataError(
                f"{damaged} has the shape {array.shape}, which is {nbytes / 2**30:,.0f} GiB and more than "
                "this machine has; save the model again"
            )
        found = np.asarray(array[...]) if stored else np.empty(0)
    except ScalelatentError:
        raise
    except Exception as error:  # whatever zarr and its codecs raise of metadata that was changed
        raise DataError(f"{damaged} cannot be read ({error}); save the model again") from error
    if _digest(found) != digest:
        raise DataError(f"{damaged} is not the one that was saved; save it again")
    return found


def _brief(value: object) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _check_dataset(place: Location, fingerprint: str) -> None:
    from scalelatent.data import open_dataset

    try:
        found = open_dataset(place.url).fingerprint()
    except DataError as error:
        raise DataError(
            f"{place.url}, a part of a model, is damaged: {error}; save the model again"
        ) from error
    if found != fingerprint:
        raise DataError(f"{place.url} is not the one that was saved with its model; save the model again")


def _digest_of_attributes(attrs: dict[str, Any]) -> str:
    held = {name: value for name, value in attrs.items() if name != OF_ATTRIBUTES}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def _digest(array: np.ndarray) -> str:
    head = f"{array.dtype.str} {array.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


def load_model(url: str | Path) -> Any:
    """A fitted estimator from a saved model or from a run folder that holds one.

    Parameters
    ----------
    url : str or path
        What ``save`` wrote, or a run folder; a path, ``s3://bucket/model.zarr`` or another address.

    Returns
    -------
    estimator

    Raises
    ------
    DataError
        Missing, no model, or of a newer format.

    Examples
    --------
    >>> import tempfile, numpy as np, scalelatent as sl
    >>> x, y = np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 2
    >>> place = tempfile.mkdtemp() + "/model.zarr"
    >>> m = sl.CapsuleRegression(capsule_dim=2, max_iter=3).fit(x, y)
    >>> m.save(place)
    >>> bool((sl.load_model(place).predict(x) == m.predict(x)).all())
    True
    """
    place, run = locate(url), None
    if place.has("model.zarr/zarr.json"):
        place, run = place.at("model.zarr"), place
    kind, params, values, arrays = read_model(place)
    try:
        estimator = find_kind(kind).estimator_class()
    except JobError:
        raise DataError(
            f"{place.url} holds a model of kind {_brief(kind)}, which this scalelatent does not know (it "
            f"knows {', '.join(known_kinds())}): upgrade scalelatent, or save the model again"
        ) from None
    try:
        return estimator._from_saved(params, values, arrays, place, run)
    except ScalelatentError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(
            f"{place.url} is damaged: its attributes do not make a model of kind {kind!r} "
            f"({type(error).__name__}: {error}); save the model again"
        ) from error


def saved_params(params: dict[str, Any]) -> dict[str, Any]:
    """Constructor parameters as JSON; a generator as random_state is not stored (``seed_`` is)."""
    out = {}
    for name, value in params.items():
        if name in ("n_jobs", "device"):  # where a model was fitted is not part of it
            continue
        if isinstance(value, np.generic):
            value = value.item()
        elif isinstance(value, np.ndarray):
            value = value.tolist()
        elif name == "random_state" and not isinstance(value, (int, type(None))):
            value = None
        elif isinstance(value, dict):
            # JSON keys are strings: a mapping is kept as pairs.
            value = {"pairs": [[k.item() if isinstance(k, np.generic) else k, v] for k, v in value.items()]}
        out[name] = value
    return out


def restore_params(params: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`saved_params`."""
    pairs = {k: dict(map(tuple, v["pairs"])) for k, v in params.items() if isinstance(v, dict)}
    return {**params, **pairs}
