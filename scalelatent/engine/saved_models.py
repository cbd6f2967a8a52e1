"""Save and load models: a zarr group of arrays with JSON attributes, without pickle, times or host names."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.kinds import find_kind, load_all_kinds
from scalelatent.errors import DataError, JobError, ScalelatentError
from scalelatent.storage.disk import REMOVED, Location, locate
from scalelatent.storage.write_checks import describe_contents, format_of

if TYPE_CHECKING:
    import zarr

FORMAT, FORMAT_VERSION = "scalelatent-model", 1
UNFINISHED = "scalelatent-model-unfinished"
"""Value of the attribute 'format' while arrays are being written."""
ATTRIBUTES_DIGEST = "attributes_digest"  # name of the attribute with the digest of all other attributes
_GIVE = "give a folder that `save` wrote, or the run folder of a finished run"
_NAME = re.compile(r"(?!\.)[\w.-]+")


def save_model(
    url: str | Path,
    kind: str,
    params: dict[str, Any],
    values: dict[str, Any],
    arrays: dict[str, np.ndarray],
    *,
    overwrite: bool = False,
    write_datasets: Callable[[Location], dict[str, str]] | None = None,
) -> None:
    """Write a model; a reader finds either a complete model or none, because digests are written last.

    ``write_datasets`` writes datasets into the model's folder and returns their fingerprints by name.
    """
    import zarr

    location = locate(url)
    _check_room(location, overwrite)
    attrs: dict[str, Any] = {
        "digests": {name: _digest(array) for name, array in arrays.items()},
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "params": params,
        "values": values,
    }
    try:
        with location.replacing() as target:
            group = zarr.create_group(target.zarr_store(read_only=False), attributes={"format": UNFINISHED})
            for name, array in arrays.items():
                group.create_array(name, data=np.ascontiguousarray(array))
            if write_datasets is not None:
                attrs["datasets"] = write_datasets(target)
            attrs = json.loads(json.dumps(attrs))
            group.update_attributes({**attrs, ATTRIBUTES_DIGEST: _digest_of_attributes(attrs)})
    except OSError as error:
        raise DataError(
            f"cannot write the model {location.url}: {error}; free some space or choose another path, then "
            "save again"
        ) from error


def _check_room(location: Location, overwrite: bool) -> None:
    """Raise a DataError if the folder contains anything except a model that may be overwritten."""
    if location.is_empty():
        return
    if not overwrite:
        raise DataError(f"{location.url} exists: choose another path, or pass overwrite=True to replace it")
    if format_of(location) not in (FORMAT, UNFINISHED, REMOVED):
        raise DataError(
            f"{location.url} exists and is not a saved model, so it is not replaced; choose another path, or "
            "remove it yourself"
        )


def read_model(
    url: str | Path | Location,
) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:
    """Return (kind, params, values, arrays) of a saved model, after a check of all digests."""
    import zarr

    location = locate(url)
    if not location.has("zarr.json"):
        raise DataError(f"{location.url} {describe_contents(location, 'a saved model')}; {_GIVE}")
    try:
        group = zarr.open_group(location.zarr_store(read_only=True), mode="r", zarr_format=3)
        attrs: dict[str, Any] = dict(group.attrs)
    except ScalelatentError:
        raise
    except zarr.errors.ContainsArrayError:
        raise DataError(f"{location.url} is a zarr array, not a saved model; {_GIVE}") from None
    except Exception as error:  # zarr may raise anything if its metadata was changed
        raise DataError(
            f"{location.url} is damaged: its zarr.json cannot be read ({error}); save the model again"
        ) from error
    if attrs.get("format") != FORMAT:
        is_unfinished = not attrs or attrs.get("format") in (UNFINISHED, REMOVED)
        advice = "if a model was being written there, it was not finished: save it again"
        raise DataError(
            f"{location.url} {describe_contents(location, 'a saved model')}; "
            f"{advice if is_unfinished else _GIVE}"
        )
    version = attrs.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise DataError(
            f"{location.url} has model format {version}, this scalelatent reads up to {FORMAT_VERSION}: "
            "upgrade scalelatent"
        )
    _check_attributes(location, attrs)
    arrays = {name: _read_array(location, group, name, digest) for name, digest in attrs["digests"].items()}
    for name, fingerprint in attrs.get("datasets", {}).items():
        _check_dataset(location.at(name), fingerprint)
    return attrs["kind"], attrs["params"], attrs["values"], arrays


def _check_attributes(location: Location, attrs: dict[str, Any]) -> None:
    """Raise a DataError if attributes were changed since they were saved, or have wrong types or names."""
    types = {"kind": str, "params": dict, "values": dict, "digests": dict, "format_version": int}
    wrong = [name for name, type_ in types.items() if not isinstance(attrs.get(name), type_)]
    if not isinstance(attrs.get("datasets", {}), dict):
        wrong.append("datasets")
    if wrong:
        raise DataError(
            f"{location.url} is damaged: its attribute {wrong[0]!r} is {_brief(attrs.get(wrong[0]))}; save "
            "the model again"
        )
    # Models of earlier versions have no digest of their attributes.
    if attrs.get(ATTRIBUTES_DIGEST, digest := _digest_of_attributes(attrs)) != digest:
        raise DataError(
            f"{location.url} is damaged: its attributes (kind, params, values, digests) are not those that "
            "were saved; save the model again"
        )
    outside = [name for name in (*attrs["digests"], *attrs.get("datasets", {})) if not _NAME.fullmatch(name)]
    if outside:
        raise DataError(
            f"{location.url} is damaged: {_brief(outside[0])} is not the name of a file in the model's "
            "folder; save the model again"
        )


def _read_array(location: Location, group: zarr.Group, name: str, digest: str) -> np.ndarray:
    import psutil
    import zarr

    damaged = f"{location.url} is damaged: its array {name!r}"
    try:
        array = group.get(name)
        # The digest is needed because zarr reads a missing chunk as zeros without an error.
        exists = isinstance(array, zarr.Array)
        nbytes = max(math.prod(array.shape), math.prod(array.chunks)) * array.dtype.itemsize if exists else 0
        if nbytes > psutil.virtual_memory().total:
            raise DataError(
                f"{damaged} has the shape {array.shape}, which is {nbytes / 2**30:,.0f} GiB and more than "
                "this machine has; save the model again"
            )
        found = np.asarray(array[...]) if exists else np.empty(0)
    except ScalelatentError:
        raise
    except Exception as error:  # zarr and its codecs may raise anything if metadata was changed
        raise DataError(f"{damaged} cannot be read ({error}); save the model again") from error
    if _digest(found) != digest:
        raise DataError(f"{damaged} is not the one that was saved; save it again")
    return found


def _brief(value: object) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _check_dataset(location: Location, fingerprint: str) -> None:
    from scalelatent.data import open_dataset

    try:
        found = open_dataset(location.url).fingerprint()
    except DataError as error:
        raise DataError(
            f"{location.url}, a part of a model, is damaged: {error}; save the model again"
        ) from error
    if found != fingerprint:
        raise DataError(f"{location.url} is not the one that was saved with its model; save the model again")


def _digest_of_attributes(attrs: dict[str, Any]) -> str:
    attributes = {name: value for name, value in attrs.items() if name != ATTRIBUTES_DIGEST}
    return hashlib.sha256(json.dumps(attributes, sort_keys=True).encode()).hexdigest()


def _digest(array: np.ndarray) -> str:
    head = f"{array.dtype.str} {array.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


def load_model(url: str | Path) -> Any:
    """Load a fitted estimator from a saved model or from a run folder that contains one.

    Parameters
    ----------
    url : str or path
        Path or URL of a model that ``save`` wrote, such as ``s3://bucket/model.zarr``, or of a run folder.

    Returns
    -------
    estimator
        The fitted estimator.

    Raises
    ------
    DataError
        There is no model, it is damaged, or it has a newer format.

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
    location, run = locate(url), None
    if location.has("model.zarr/zarr.json"):
        location, run = location.at("model.zarr"), location
    kind, params, values, arrays = read_model(location)
    try:
        estimator = find_kind(kind).estimator_class()
    except JobError:
        raise DataError(
            f"{location.url} holds a model of kind {_brief(kind)}, which this scalelatent does not know (it "
            f"knows {', '.join(load_all_kinds())}): upgrade scalelatent, or save the model again"
        ) from None
    try:
        return estimator._from_saved(params, values, arrays, location, run)
    except ScalelatentError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(
            f"{location.url} is damaged: its attributes do not make a model of kind {kind!r} "
            f"({type(error).__name__}: {error}); save the model again"
        ) from error


def encode_params(params: dict[str, Any]) -> dict[str, Any]:
    """Return constructor parameters as JSON values; a generator as ``random_state`` becomes None."""
    out = {}
    for name, value in params.items():
        if name in ("n_jobs", "device"):  # these describe the machine of the fit, not the model
            continue
        if isinstance(value, np.generic):
            value = value.item()
        elif isinstance(value, np.ndarray):
            value = value.tolist()
        elif name == "random_state" and not isinstance(value, (int, type(None))):
            value = None
        elif isinstance(value, dict):
            # JSON keys must be strings, so a mapping is stored as a list of pairs.
            value = {"pairs": [[k.item() if isinstance(k, np.generic) else k, v] for k, v in value.items()]}
        out[name] = value
    return out


def restore_params(params: dict[str, Any]) -> dict[str, Any]:
    """Return constructor parameters from ``params``, the JSON values that `encode_params` made of them."""
    pairs = {k: dict(map(tuple, v["pairs"])) for k, v in params.items() if isinstance(v, dict)}
    return {**params, **pairs}
